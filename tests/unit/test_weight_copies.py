"""Copies of a model's weights: put in place for a pass and taken away without a trace."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.policy import references
from megatron_async_rl.policy.past_weights import SnapshotMissing, Snapshots, WeightSnapshot
from megatron_async_rl.policy.references import (
    ArchitectureMismatch,
    Precompute,
    ReferencePolicies,
    passes,
)
from tests.tiny_models import save_tiny_model
from tests.train_batches import columns_of, groups_of, make_sample, rewards_batch


def chunk(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)).to(dtype)
    made.register_parameter("tied", made[0].weight)
    return made


def values(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def fill(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_others_are_in_place_within_the_pass_and_the_trained_weights_after_it_bit_for_bit(dtype):
    model = chunk(dtype=dtype)
    other = WeightSnapshot([model])
    first = values(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    trained, aliases = values(model), [parameter.data_ptr() for parameter in model.parameters()]
    with WeightSnapshot([model]).restored_after():
        other.place()
        assert same(values(model), first)
        assert model.tied is model[0].weight
    assert same(values(model), trained)
    assert [parameter.data_ptr() for parameter in model.parameters()] == aliases


def test_the_trained_weights_are_back_after_a_pass_that_raised():
    model = chunk()
    trained = values(model)

    def broken_pass():
        with WeightSnapshot([model]).restored_after():
            fill(model, 3.0)
            raise RuntimeError("in the pass")

    with pytest.raises(RuntimeError, match="in the pass"):
        broken_pass()
    assert same(values(model), trained)


def test_an_average_is_the_exponential_one_in_float32_also_of_bfloat16_weights():
    model = chunk(dtype=torch.bfloat16)
    fill(model, 1.0)
    average = WeightSnapshot([model], torch.float32)
    expected = 1.0
    for value in (1.0078125, 1.015625, 2.0):
        fill(model, value)
        average.average(0.999)
        expected = 0.999 * expected + 0.001 * value
    for tensor in average.tensors[0].values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, expected), rtol=1e-6, atol=0.0)


def test_snapshots_keep_the_newest_versions_and_reuse_their_memory():
    model = chunk()
    kept = Snapshots(lambda: WeightSnapshot([model]), size=2)
    for version in (4, 5, 6, 6):
        fill(model, float(version))
        kept.begin(version)
    fill(model, 9.0)
    kept.begin(6)
    assert list(kept.versions) == [5, 6]
    for version in (5, 6):
        assert all(
            tensor.eq(version).all() for tensor in kept.of(version, current=6).tensors[0].values()
        )


def test_a_version_that_is_not_kept_is_refused_with_the_key_and_the_number_that_would_do():
    model = chunk()
    kept = Snapshots(lambda: WeightSnapshot([model]), size=2)
    for version in (4, 5, 6):
        kept.begin(version)
    with pytest.raises(
        SnapshotMissing,
        match=r"version 3 at version 6.*versions: 5, 6; set objective\.snapshots \(now 2\).*4\.",
    ):
        kept.of(3, current=6)


def test_a_checkpoint_has_the_snapshots_that_the_next_version_may_need_and_gives_them_back():
    config = ObjectiveConfig(proximal="snapshot", snapshots=3)
    kept, model = others(config)
    for version in range(5):
        fill(model, float(version))
        kept.begin(version)
    state = kept.parameter_state()
    assert sorted(state) == ["past_weights_3", "past_weights_4"], "2 gives its place to 5"

    def read(named):
        for name, sliced in named.items():
            for (_, wanted), (_, held) in zip(sliced, state[name], strict=True):
                wanted.copy_(held)

    saved = SimpleNamespace(names=frozenset(state), read=read, content={})
    for size, expected in ((3, [3, 4, 5]), (2, [4, 5]), (1, [5])):
        again, model = others(config.model_copy(update={"snapshots": size}))
        fill(model, 5.0)
        again.begin(0)
        again.load(saved, warn=False)
        assert again.oldest(5) == expected[0]
        again.begin(5)
        assert list(again.snapshots.versions) == expected
        for version in expected:
            assert all(
                t.eq(version).all()
                for t in again.snapshots.of(version, current=5).tensors[0].values()
            )


def test_without_past_weights_any_version_will_do_and_with_none_saved_only_the_present_one():
    assert others(ObjectiveConfig(proximal="recompute"))[0].oldest(7) == 0
    assert others(SNAPSHOT)[0].oldest(7) == 7


def others(config, source=Path()):
    model = SimpleNamespace(chunks=[chunk()], source=source, bridge=None)
    return ReferencePolicies(config, Objective(config).needs, model), model.chunks[0]


def test_an_objective_without_a_comparison_keeps_nothing():
    kept, _ = others(ObjectiveConfig(proximal="recompute"))
    assert (kept.reference, kept.average, kept.snapshots, kept.trained) == (None, None, None, None)
    assert kept.parameter_state() == {}


def kl(**reference):
    return ObjectiveConfig(kl=KlConfig(coef=0.1), reference=ReferenceConfig(**reference))


def test_a_reference_is_refreshed_after_every_so_many_steps_and_then_is_in_the_checkpoint():
    kept, model = others(kl(refresh_every=2))
    first = values(model)
    fill(model, 1.0)
    kept.stepped(1)
    assert same(kept.reference.tensors[0], first)
    fill(model, 2.0)
    kept.stepped(2)
    assert same(kept.reference.tensors[0], values(model))
    assert list(kept.parameter_state()) == ["reference"]


def test_a_reference_that_does_not_move_is_not_in_the_checkpoint():
    kept, model = others(kl())
    first = values(model)
    fill(model, 1.0)
    kept.stepped(1)
    assert same(kept.reference.tensors[0], first)
    assert kept.parameter_state() == {}


def test_a_reference_whose_tensors_would_be_computed_with_otherwise_is_refused(tmp_path):
    own = save_tiny_model(
        tmp_path / "own", "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    theirs = save_tiny_model(
        tmp_path / "theirs", "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    with pytest.raises(
        ArchitectureMismatch, match=r"objective\.reference\.path.*rope_parameters.*1000000"
    ):
        others(kl(path=theirs), source=own)


def test_a_reference_with_another_window_is_refused_and_one_with_an_unused_window_is_not(tmp_path):
    own = save_tiny_model(tmp_path / "own", "mistral", sliding_window=8)
    theirs = save_tiny_model(tmp_path / "theirs", "mistral", sliding_window=None)
    with pytest.raises(ArchitectureMismatch, match="sliding_window: None, the model has 8"):
        others(kl(path=theirs), source=own)

    unused = [save_tiny_model(tmp_path / name, "qwen2") for name in ("a", "b")]
    for folder, width in zip(unused, (8, 16), strict=True):
        file = folder / "config.json"
        content = json.loads(file.read_text()) | {"sliding_window": width}
        file.write_text(json.dumps(content | ({"layer_types": None} if width == 8 else {})))
    references._refuse_other_architecture(*unused)


def mixed(*versions):
    prompt = groups_of(rewards_batch([[0.0]]))[0][0].prompt
    return [
        make_sample(prompt, str(i), [3] * len(each), versions=list(each))
        for i, each in enumerate(versions)
    ]


def planned(config, samples, version, begun):
    kept, _ = others(config)
    for each in begun:
        kept.begin(each)
    columns = sorted(Objective(config).needs)
    names = {None: None} | {
        id(held): v for v, held in (kept.snapshots.versions if kept.snapshots else {}).items()
    }
    found = passes(columns, columns_of(samples, version), kept)
    return [
        (names.get(id(p.weights)) if p.weights is not None else None, p.fills, p.rows)
        for p in found
    ]


SNAPSHOT = ObjectiveConfig(proximal="snapshot", snapshots=3)


def test_each_version_of_a_batch_gets_one_pass_over_the_samples_it_wrote_in():
    samples = mixed((0, 0, 1), (1, 2), (2, 2), (0, 2))
    assert planned(SNAPSHOT, samples, 2, (0, 1, 2)) == [
        (None, (Precompute("logp_prox", "logp", 2),), (1, 2, 3)),
        (0, (Precompute("logp_prox", "logp", 0),), (0, 3)),
        (1, (Precompute("logp_prox", "logp", 1),), (0, 1)),
    ]


def test_precomputed_log_probs_save_the_pass_of_the_current_version():
    config = SNAPSHOT.model_copy(update={"kl": KlConfig(coef=0.1, where="reward")})
    samples = mixed((0, 1), (1, 1))
    found = planned(config, samples, 1, (0, 1))
    assert found[0] == (
        None,
        (Precompute("logp", "logp"), Precompute("logp_prox", "logp", 1)),
        None,
    )
    assert [rows for _, _, rows in found] == [None, None, (0,)]


def test_a_synchronous_batch_has_one_pass_under_the_weights_in_training():
    assert planned(SNAPSHOT, mixed((5,), (5, 5)), 5, (5,)) == [
        (None, (Precompute("logp_prox", "logp", 5),), (0, 1))
    ]


def test_a_reference_is_compared_as_transformers_reads_it_whatever_release_wrote_it(tmp_path):
    own = save_tiny_model(tmp_path / "own", "mistral", sliding_window=4096)
    file = save_tiny_model(tmp_path / "theirs", "mistral", sliding_window=4096) / "config.json"
    content = json.loads(file.read_text())
    theta = content.pop("rope_parameters")["rope_theta"]
    del content["sliding_window"]  # which then is 4096
    file.write_text(json.dumps(content | {"rope_theta": theta}))
    references._refuse_other_architecture(file.parent, own)
    file.write_text(json.dumps(content | {"rope_theta": 2 * theta}))
    with pytest.raises(ArchitectureMismatch, match="rope_parameters"):
        references._refuse_other_architecture(file.parent, own)
