"""A policy on one rank of this process: its files, the warnings of a load, and what it returns."""

from __future__ import annotations

import errno
import io
import json
import logging
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.config.controls import DisplacementControl, GacControl
from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import (
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device, device_memory
from megatron_async_rl.policy.anomaly import NonFiniteError
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken, looks_whole
from megatron_async_rl.policy.device_memory import StateReleased
from megatron_async_rl.policy.digested_folder import require_export
from megatron_async_rl.policy.model import UnsupportedModel
from megatron_async_rl.policy.opob import OpobUnsupported
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.weights import convert as convert_module
from megatron_async_rl.weights.convert import export_hf
from megatron_async_rl.weights.export import WeightExporter
from tests.tiny_models import save_tiny_model
from tests.train_batches import columns, make_sample, ragged_batch, rewards_batch

MOVING = ObjectiveConfig(
    kl=KlConfig(coef=0.1), reference=ReferenceConfig(ema=0.7), proximal="ewma", ewma_decay=0.6
)
"""Two averages of the weights, which a checkpoint has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("alone") / "model", vocab_size=96)


Build = Any


@pytest.fixture
def build(model: Path, layout: Layout) -> Build:
    def built(
        objective: ObjectiveConfig | None = None,
        controls: tuple[Any, ...] = (),
        *,
        optimizer: dict[str, Any] | None = None,
        seed: int = 0,
        path: Path = model,
        dtype: Literal["float32", "bfloat16"] = "float32",
        **settings: Any,
    ) -> Policy:
        # A large epsilon, so that an update of a gradient near 0 is not the sign of a rounding.
        return Policy.build(
            ModelConfig(path=path, dtype=dtype),
            PolicyConfig(
                optimizer=OptimizerConfig(**{"lr": 1e-3, "eps": 0.01, **(optimizer or {})}),
                tokens_per_micro_batch=160,
                **settings,
            ),
            objective or ObjectiveConfig(),
            controls,
            layout=layout,
            temperature=0.7,
            total_steps=10,
            seed=seed,
        )

    return built


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for chunk in policy.model.chunks
        for name, parameter in chunk.named_parameters()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def step(policy: Policy, version: int = 3, **batch: Any) -> dict[str, float]:
    return policy.train_step(columns(ragged_batch(groups=3, version=version, **batch)))


def warnings(caplog: pytest.LogCaptureFixture, folder: Path) -> list[str]:
    found = [
        one.getMessage()
        for one in caplog.records
        if one.levelno >= logging.WARNING and one.name.startswith("megatron_async_rl")
    ]
    caplog.clear()
    return [one.replace(str(folder), "RUN") for one in found]


def test_a_saved_folder_has_its_files_and_the_newest_are_kept(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build(MOVING, (GacControl(),))
    step(policy)
    folder = tmp_path / "run" / "checkpoint"
    (folder / "unfinished_step_00000009").mkdir(parents=True)
    (folder / "latest.x.partial").touch()
    path = policy.save(folder, 1, {"version": 1}, keep=2, files={"config.yaml": b"own"})
    assert path == folder / "step_00000001"
    assert sorted(one.name for one in folder.iterdir()) == ["latest", "step_00000001"]
    assert (folder / "latest").read_text() == "step_00000001"
    files = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())
    assert files == [
        *("about.json", "config.yaml", "rank_0.pt", "sharded/.metadata"),
        *("sharded/__0_0.distcp", "state.pt"),
    ]
    about = json.loads((path / "about.json").read_text())
    assert {key: about[key] for key in about if key not in ("files", "digest", "model_path")} == {
        "step": 1,
        "layout": {
            "tensor": 1,
            "context": 1,
            "pipeline": 1,
            "virtual_pipeline": 1,
            "expert": 1,
            "data": 1,
            "distributed_optimizer": about["layout"]["distributed_optimizer"],
            "device": "cpu",
        },
        "dtype": "float32",
        "vocab_size": 96,
        "layers": "local",
        "weights": "model",
        "moments": "float32",
        "adam_steps": 1,
        "parameter_state": [
            *("adam.exp_avg", "adam.exp_avg_sq", "control.gac.reference"),
            *("proximal_average", "reference"),
        ],
        "reference_digest": None,
    }
    with pytest.raises(FileExistsError, match="step_00000001 is already saved"):
        policy.save(folder, 1, {}, keep=2)
    with pytest.raises(TypeError, match="a checkpoint holds numbers, text, tensors"):
        policy.save(folder, 2, {"odd": object()}, keep=2)
    assert sorted(one.name for one in folder.iterdir()) == ["latest", "step_00000001"]
    with Background("writing") as writing:
        for number in (2, 3, 4):
            policy.save(folder, number, {"version": number}, keep=2, background=writing)
        writing.finish()
    assert sorted(one.name for one in folder.glob("step_*")) == ["step_00000003", "step_00000004"]
    policy.save(folder, 5, {"version": 5}, keep=1, proven=3)
    assert sorted(one.name for one in folder.glob("step_*")) == ["step_00000003", "step_00000005"]
    # A folder that `latest` does not name is replaced.
    (folder / "step_00000006").mkdir()
    (folder / "step_00000006" / "torn").touch()
    policy.save(folder, 6, {"version": 6}, keep=None)
    assert not (folder / "step_00000006" / "torn").exists()
    assert len(list(folder.glob("step_*"))) == 3
    assert policy.load(folder / "step_00000005") == {"version": 5}
    assert policy.load(folder) == {"version": 6}
    assert policy.load(tmp_path / "none") is None
    assert warnings(caplog, tmp_path) == []


def test_a_write_in_the_background_has_the_weights_of_its_call(
    build: Build, tmp_path: Path
) -> None:
    policy = build()
    step(policy)
    before = weights(policy)
    with Background("writing") as writing:
        policy.save(tmp_path, 1, {}, keep=1, background=writing)
        step(policy, 4)
        assert not same(before, weights(policy))
        writing.finish()
    policy.load(tmp_path)
    assert same(before, weights(policy))


def test_a_loaded_policy_makes_the_same_next_step(build: Build, tmp_path: Path) -> None:
    settings = {"lora": LoraConfig(rank=2, alpha=4, dropout=0.5)}
    for number, (objective, controls, others) in enumerate(
        (
            (MOVING, (GacControl(),), {}),
            (ObjectiveConfig(minibatches=2, snapshots=3), (DisplacementControl(),), {}),
            (ObjectiveConfig(), (), settings),
            (ObjectiveConfig(), (), {"optimizer": {"moment_dtype": "bfloat16"}}),
        )
    ):
        policy, folder = build(objective, controls, **others), tmp_path / str(number)
        for version in (0, 1):
            step(policy, version, seed=version)
        policy.save(folder, 2, {}, keep=1)
        random = torch.get_rng_state()
        metrics, after = step(policy, 2, seed=5), weights(policy)
        resumed = build(objective, controls, seed=1, **others)
        torch.manual_seed(7)
        resumed.load(folder)
        assert torch.equal(torch.get_rng_state(), random)
        again = step(resumed, 2, seed=5)
        own = {name: value for name, value in metrics.items() if not name.startswith("time/")}
        assert own == {name: again[name] for name in own}
        assert same(after, weights(resumed))


def test_a_load_names_what_the_checkpoint_lacks(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build()
    step(plain)
    plain.save(tmp_path / "plain", 1, {}, keep=1)
    policy = build(MOVING, (GacControl(),))
    policy.load(tmp_path / "plain")
    assert warnings(caplog, tmp_path) == [
        "the checkpoint holds no reference: it starts from the weights it was configured with",
        "the checkpoint holds no proximal average: it starts from the weights of the checkpoint",
        "the checkpoint in RUN/plain has no state of control gac: it starts afresh",
    ]
    about = tmp_path / "plain" / "step_00000001" / "about.json"
    _edit(about, lambda content: content["layout"].update(tensor=2))
    torch.manual_seed(3)
    random = torch.get_rng_state()
    plain.load(tmp_path / "plain")
    assert torch.equal(torch.get_rng_state(), random), "another layout's generators do not fit"
    (warning,) = warnings(caplog, tmp_path)
    assert warning.startswith("RUN/plain/step_00000001 was saved on layout {'tensor': 2, ")
    assert "and is loaded on {'tensor': 1, " in warning
    assert warning.endswith("'device': 'cpu'}: random generators start afresh")
    # Entries that earlier versions did not write.
    _edit(about, lambda content: content["layout"].update(tensor=1))
    _edit(about, lambda content: [content["layout"].pop(key) for key in ("context", "device")])
    plain.load(tmp_path / "plain")
    assert warnings(caplog, tmp_path) == []
    _edit(about, lambda content: content["parameter_state"].remove("adam.exp_avg"))
    plain.load(tmp_path / "plain")
    assert warnings(caplog, tmp_path) == [
        "RUN/plain/step_00000001 holds no adam.exp_avg: the optimizer starts without it"
    ]
    _edit(about, lambda content: content.pop("files"))
    plain.load(tmp_path / "plain")
    assert warnings(caplog, tmp_path)[0] == (
        "RUN/plain/step_00000001 has no digests: damage to its files may go unnoticed"
    )


def _edit(file: Path, change: Any) -> None:
    """Change a description as another writer would have written it."""
    from megatron_async_rl.policy.digested_folder import described, files_of

    content = json.loads(file.read_text())
    files = files_of(content)
    change(content)
    kept = {key: value for key, value in content.items() if key not in ("files", "digest")}
    whole = "files" in content
    file.write_text(described(kept, files) if whole else json.dumps(kept))


def test_a_checkpoint_of_another_model_is_refused(build: Build, tmp_path: Path) -> None:
    adapters = {"lora": LoraConfig(rank=2, alpha=4)}
    plain, adapted = build(), build(**adapters)
    plain.save(tmp_path / "plain", 1, {}, keep=1)
    adapted.save(tmp_path / "adapted", 1, {}, keep=1)
    with pytest.raises(CheckpointBroken, match=r"holds whole weights \(lora: None\), and the"):
        adapted.load(tmp_path / "plain")
    with pytest.raises(CheckpointBroken, match=r"holds adapters \(lora: {(.|\n)*lora: None\n"):
        plain.load(tmp_path / "adapted")
    wide = save_tiny_model(tmp_path / "wide", vocab_size=96, intermediate_size=64)
    with pytest.raises(CheckpointBroken, match=r"model\.path(.|\n)*cannot be loaded into this"):
        build(path=wide).load(tmp_path / "plain")
    other = save_tiny_model(tmp_path / "other", vocab_size=96, seed=1)
    with pytest.raises(CheckpointBroken, match=r"trained over other weights than those of"):
        build(path=other, **adapters).load(tmp_path / "adapted")
    (tmp_path / "plain" / "step_00000001" / "state.pt").unlink()
    message = r"is damaged: state.pt: (.|\n)*no other checkpoint of .* is whole; "
    with pytest.raises(CheckpointBroken, match=f"{message}restore one from a copy"):
        plain.load(tmp_path / "plain")
    # The folder of checkpoints of a run.
    (tmp_path / "config.yaml").touch()
    (tmp_path / "plain").rename(tmp_path / "checkpoint")
    with pytest.raises(CheckpointBroken, match=f"{message}remove that folder to begin again"):
        plain.load(tmp_path / "checkpoint")


def test_damage_to_a_checkpoint_without_digests_names_the_file(
    build: Build, tmp_path: Path
) -> None:
    policy = build()
    policy.save(tmp_path, 1, {"version": 1}, keep=1)
    path = tmp_path / "step_00000001"
    _edit(path / "about.json", lambda content: content.pop("files"))
    assert policy.load(tmp_path) == {"version": 1}

    def refusal(name: str, content: bytes | None) -> str:
        """The reason of a load while the file has this content, or is not there."""
        whole = (path / name).read_bytes()
        (path / name).unlink()
        if content is not None:
            (path / name).write_bytes(content)
        with pytest.raises(CheckpointBroken) as raised:
            policy.load(tmp_path)
        (path / name).write_bytes(whole)
        found = str(raised.value).partition("\n  fix: ")[0]
        assert f"{path} is damaged: " in found
        return found.partition(" is damaged: ")[2]

    state = (path / "state.pt").read_bytes()
    at = state.index(b"version")
    torn = state[:at] + b"V" + state[at + 1 :]
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("state/odd", b"no tensor")
    assert refusal("state.pt", b"no zip file") == (
        "state.pt cannot be read (BadZipFile: File is not a zip file)"
    )
    assert refusal("state.pt", torn) == (
        "state.pt cannot be read (BadZipFile: archive/data.pkl is damaged)"
    )
    assert refusal("state.pt", None).startswith("state.pt cannot be read (FileNotFoundError: ")
    assert refusal("state.pt", other.getvalue()).startswith(
        "state.pt cannot be read (RuntimeError: "
    )
    assert refusal("rank_0.pt", None) == "rank_0.pt is not there"
    assert refusal("sharded/.metadata", None) == "sharded/.metadata is not there"
    assert refusal("sharded/.metadata", b"no index").startswith(
        "sharded/.metadata: it cannot be read (UnpicklingError: "
    )


def test_a_damaged_checkpoint_names_an_older_one_only_if_that_is_whole(
    build: Build, tmp_path: Path
) -> None:
    policy = build()
    for step_number in (1, 2):
        policy.save(tmp_path, step_number, {"version": step_number}, keep=2)
    older, newer = (tmp_path / f"step_0000000{number}" for number in (1, 2))
    damaged = newer / "sharded" / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointBroken) as raised:
        policy.load(tmp_path)
    assert f"{newer} is damaged: sharded/__0_0.distcp: tensor " in str(raised.value)
    assert f"use {older}, the newest other checkpoint that is whole" in str(raised.value)
    assert looks_whole(older)
    (older / "state.pt").unlink()
    assert not looks_whole(older)
    with pytest.raises(CheckpointBroken, match=r"no other checkpoint of .* is whole"):
        policy.load(tmp_path)


def test_a_checkpoint_that_the_disk_does_not_return_is_not_whole(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build().save(tmp_path, 1, {}, keep=1)
    assert looks_whole(path)
    is_file = Path.is_file

    def failing(file: Path) -> bool:
        if file.name == "state.pt":
            raise OSError(errno.EIO, "Input/output error")
        return is_file(file)

    monkeypatch.setattr(Path, "is_file", failing)
    assert looks_whole(path) is False


def test_the_fixed_reference_of_adapters_is_their_base_and_has_no_digest_of_its_own(
    build: Build, tmp_path: Path
) -> None:
    fixed = ObjectiveConfig(kl=KlConfig(coef=0.1), reference=ReferenceConfig())
    policy = build(fixed, lora=LoraConfig(rank=2, alpha=4))
    path = policy.save(tmp_path, 1, {}, keep=1)
    assert json.loads((path / "about.json").read_text())["reference_digest"] is None


def test_a_reference_from_another_directory_leaves_the_weights_as_they_were(
    build: Build, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", vocab_size=96, seed=1)
    kl = KlConfig(coef=0.1)
    policy = build(ObjectiveConfig(kl=kl, reference=ReferenceConfig(path=other)))
    assert same(weights(policy), weights(build()))
    of_other = build(ObjectiveConfig(kl=kl, reference=ReferenceConfig()), path=other)
    digest = policy.references.fixed_digest()
    assert digest is not None
    assert digest == of_other.references.fixed_digest()


def test_models_and_settings_that_a_policy_cannot_compute_are_refused(
    build: Build, tmp_path: Path
) -> None:
    experts = save_tiny_model(tmp_path / "experts", "qwen3_moe", vocab_size=96)
    message = (
        r"policy\.lora\.targets: \['down_proj', 'gate_proj', 'up_proj'\] are experts here, which"
        " have no adapters; name q_proj, k_proj, v_proj, o_proj alone"
    )
    with pytest.raises(ValueError, match=message):
        build(path=experts, lora=LoraConfig(rank=2))
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = build(path=experts, lora=LoraConfig(rank=2, targets=attention))
    trained = {
        name.split(".")[-2]
        for name, parameter in adapted.model.chunks[0].named_parameters()
        if parameter.requires_grad
    }
    assert trained == set(attention)

    exact = ObjectiveConfig(advantage=OpobAdvantage(mode="exact"), loss="reinforce")
    overlap = ParallelConfig(overlap_grad_reduce=True)
    with pytest.raises(OpobUnsupported, match="needs gradients that are reduced once, at the end"):
        build(exact, parallel=overlap)

    other = save_tiny_model(tmp_path / "other", vocab_size=96)
    _edit_json(other / "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModel, match=rf"^{other}/config.json: model_type is 'gpt2'; sup"):
        build(path=other)


def test_an_export_of_several_files_replaces_what_was_there(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build()
    exporter, source = WeightExporter(policy.model.bridge, policy.model.chunks), tmp_path / "source"
    shutil.copytree(policy.model.source, source)
    (source / "digests.json").write_text("of another model")
    export_hf(exporter, source, tmp_path / "single")
    whole = load_file(tmp_path / "single" / "model.safetensors")
    assert not (tmp_path / "single" / "model.safetensors.index.json").exists()

    out = tmp_path / "several"
    for folder in (out, tmp_path / "several.unfinished"):
        folder.mkdir()
        (folder / "left").touch()
    monkeypatch.setattr(convert_module, "FILE_BYTES", 1)
    monkeypatch.setattr(convert_module, "BUCKET_BYTES", 2**13)
    export_hf(exporter, source, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted({*index["weight_map"].values()})
    assert len(names) > 2
    assert names == [
        f"model-{n + 1:05d}-of-{len(names):05d}.safetensors" for n in range(len(names))
    ]
    assert sorted(one.name for one in out.glob("*.safetensors")) == names
    found = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert found.keys() == whole.keys() == set(exporter.names)
    assert same(whole, found)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert not (out / "left").exists()
    assert not (tmp_path / "several.unfinished").exists()
    require_export(out, "MODEL")


def test_a_conversion_is_refused_before_it_begins(build: Build, tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    path = build().save(folder, 1, {}, keep=1)
    out.mkdir()
    (out / "own").touch()
    with pytest.raises(
        UserError, match=rf"^OUT\n  {out} is not empty\n  fix: name a new directory"
    ):
        convert_module.convert(folder, out)
    assert [one.name for one in out.iterdir()] == ["own"]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=rf"^CHECKPOINT\n  {tmp_path}/none holds no checkpoint\n"):
        convert_module.convert(tmp_path / "none", tmp_path / "new")
    gone = tmp_path / "gone"
    _edit(path / "about.json", lambda content: content.update(model_path=str(gone)))
    message = (
        rf"^CHECKPOINT\n  {path} was trained from {gone}, whose config\.json and tokenizer are"
        r" needed and not there\n  fix: put that model directory back"
    )
    with pytest.raises(UserError, match=message):
        convert_module.convert(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def _edit_json(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_a_fixed_reference_has_the_digest_with_which_it_was_saved(
    build: Build, tmp_path: Path
) -> None:
    fixed = ObjectiveConfig(kl=KlConfig(coef=0.1), reference=ReferenceConfig())
    policy = build(fixed)
    policy.save(tmp_path, 1, {}, keep=1)
    about = tmp_path / "step_00000001" / "about.json"
    saved = json.loads(about.read_text())
    digest = saved["reference_digest"]
    assert (len(digest), saved["adam_steps"]) == (16, 0)
    policy.load(tmp_path)
    _edit(about, lambda content: content.update(reference_digest="f" * 16))
    message = rf"other reference weights than those of .*digest f{{16}}, here {digest}"
    with pytest.raises(CheckpointBroken, match=message):
        policy.load(tmp_path)


def test_steps_without_a_token_advance_the_clock_alone(build: Build) -> None:
    policy = build(ObjectiveConfig(minibatches=2), optimizer={"log_update_norm": True})
    before = weights(policy)
    batch = rewards_batch([[None, None], [None, None]])
    metrics = policy.train_step(columns(batch))
    assert metrics == {
        "policy/lr": 1e-3,
        "policy/skipped": 1.0,
        "policy/nonfinite": 0.0,
        "update/norm": 0.0,
    }
    assert (policy.step.steps, policy.step.updates) == (2, 0)
    assert same(before, weights(policy))


def test_weights_that_are_not_finite_are_neither_saved_nor_published(
    build: Build, tmp_path: Path
) -> None:
    policy = build()
    step(policy)
    assert not policy.untried
    policy.step.nonfinite_in_a_row = 1
    assert policy.untried
    parameter = next(iter(policy.model.chunks[0].parameters()))
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match="after optimizer step 1 not finite: weights; they"):
        policy.save(tmp_path, 1, {}, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_not_finite_is_skipped_although_no_file_may_name_its_samples(
    build: Build,
) -> None:
    policy = build()
    before = weights(policy)
    prompt = Prompt(id="p", text="", token_ids=(4,))
    unknown = {"logprobs": [np.nan] * 2, "versions": [3, 3]}
    samples = [make_sample(prompt, f"0-{k}", [5, 6], reward=k, **unknown) for k in range(2)]
    metrics = policy.train_step(columns(TrainBatch.of(3, [samples])))
    assert metrics["policy/nonfinite"] == 1.0
    assert policy.step.nonfinite_ids == []
    assert same(before, weights(policy))


def test_a_score_is_the_log_prob_of_every_response_token(build: Build) -> None:
    policy = build()
    samples = columns(ragged_batch(groups=2, version=3)).select(np.arange(4))
    scores = policy.score(samples)
    assert [len(one) for one in scores] == samples.lengths.tolist()
    assert all((one < 0).all() for one in scores)
    assert policy.score(samples.select([])) == []
    batches = iter([ragged_batch(groups=2, version=3), None])
    loss, tokens = policy.mean_loss(lambda: next(batches))
    whole = columns(ragged_batch(groups=2, version=3))
    trained = whole.loss_mask.astype(bool)
    logp = np.concatenate(policy.score(whole))
    assert tokens == trained.sum()
    assert loss == pytest.approx(-logp[trained].mean(), rel=1e-5)
    assert policy.mean_loss(lambda: None) == (0.0, 0)


def test_memory_is_counted_by_owner_and_released_between_steps(build: Build) -> None:
    policy = build(controls=(GacControl(),))
    parameters = sum(each.numel() for each in weights(policy).values()) * 4
    first = policy.memory.held()
    # Buffers may be padded.
    assert parameters <= first["parameters"] < 1.1 * parameters
    assert parameters <= first["gradients"] < 1.1 * parameters
    assert first["references of gradient controls"] == 0
    step(policy)
    held = policy.memory.held()
    assert 2 * parameters <= held["optimizer state"] < 2.2 * parameters
    assert parameters <= held["references of gradient controls"] < 1.2 * parameters
    before = weights(policy)
    policy.memory.release()
    with pytest.raises(StateReleased, match="call `restore` before a training step"):
        step(policy, 4)
    assert policy.memory.held()["gradients"] == 0
    policy.memory.restore()
    assert policy.memory.held() == held
    assert same(before, weights(policy))
    step(policy, 4)


def test_a_second_release_or_restore_does_nothing(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build()
    step(policy)
    copies, copied = [], device_memory._copied

    def counted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies.append(len(tensors))
        return copied(tensors)

    monkeypatch.setattr(device_memory, "_copied", counted)
    before, held = weights(policy), policy.memory.held()
    gradients = [one.main_grad.fill_(1.0) for one in policy.model.chunks[0].parameters()]
    policy.memory.restore()
    assert all((gradient == 1.0).all() for gradient in gradients)
    policy.memory.release()
    policy.memory.release()
    assert len(copies) == 1
    policy.memory.restore()
    assert policy.memory.held() == held
    assert same(before, weights(policy))


def test_host_memory_that_ran_out_at_a_release_is_named_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = [torch.empty(2**28, device="meta"), torch.empty(2**29, device="meta")]

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(device_memory, "torch", SimpleNamespace(**{**vars(torch), "empty": full}))
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        device_memory._copied(state)
    assert raised.value.__notes__ == ["3.0 GiB of host memory are needed for the training state"]


def test_a_restore_waits_for_the_memory_of_an_engine_that_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, refusals = [0.0], [torch.OutOfMemoryError("CUDA out of memory")] * 3

    class Storage:
        size = 0

        def resize_(self, nbytes: int) -> None:
            if refusals:
                raise refusals.pop()
            self.size = nbytes

    def pause(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=pause)
    monkeypatch.setattr(device_memory, "time", clock)
    storage: Any = Storage()
    device_memory._take(storage, 8)
    assert (storage.size, now[0]) == (8, pytest.approx(3 * device_memory.PAUSE_S))
    refusals[:] = [torch.OutOfMemoryError("CUDA out of memory")] * 10**4
    with pytest.raises(torch.OutOfMemoryError):
        device_memory._take(storage, 16)
    waited = now[0] - 3 * device_memory.PAUSE_S
    assert waited == pytest.approx(device_memory.MEMORY_FREE_TIMEOUT_S, rel=0.05)
    assert storage.size == 8


def test_memory_of_other_processes_is_counted_on_cuda(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build()
    memory = policy.memory
    monkeypatch.setattr(memory, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 350)
    held = memory.held()
    assert held["activations, at their peak"] == 300, "tensors of the CPU are not on the device"
    assert held["engines and other processes"] == 550
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 950)
    assert memory.held()["engines and other processes"] == 0


@pytest.mark.parametrize(
    ("world", "parallel", "message"),
    [
        (1, {"ranks": 2}, "policy.parallel.ranks is 2, but 1 ranks were started"),
        (3, {"ranks": 3, "tensor": 2}, "must divide ranks \\(3\\)"),
        (4, {"ranks": 4, "expert": 3}, "must divide a stage's ranks: ranks \\(4\\) over pipeline"),
    ],
)
def test_a_layout_that_does_not_fit_the_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, world: int, parallel: dict[str, int], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ValueError, match=message):
        initialise(ParallelConfig(**parallel), "cpu", timeout_s=600)


def test_a_process_stays_on_its_device(layout: Layout) -> None:
    assert device.install("cpu") == "cpu"
    assert device.device() == layout.device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="already runs on cpu; it cannot change to cuda"):
        device.install("cuda")
    with pytest.raises(ValueError, match="'tpu' is not one of auto, cpu, cuda"):
        device.install("tpu")


def test_the_output_weights_gradient_in_bfloat16_is_rounded_once(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient(dtype: Literal["float32", "bfloat16"]) -> torch.Tensor:
        """The gradient of a step of several micro-batches, in a buffer of this dtype."""
        policy = build(
            dtype="bfloat16", optimizer={"gradient_dtype": dtype}, logprob_chunk_tokens=8
        )
        found, counts = [], []
        accumulate, reduce = policy.schedule.accumulate, policy.schedule.reduce

        def accumulated(micro_batches: Sequence[Any], consume: Any) -> None:
            counts.append(len(micro_batches))
            accumulate(micro_batches, consume)

        def reduced() -> None:
            found.append(policy.model.output_weight().main_grad.clone())
            reduce()

        monkeypatch.setattr(policy.schedule, "accumulate", accumulated)
        monkeypatch.setattr(policy.schedule, "reduce", reduced)
        step(policy)
        (count,), (one,) = counts, found
        assert count > 1
        return one

    narrow, wide = gradient("bfloat16"), gradient("float32")
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert wide.abs().max() > 0
    assert torch.equal(narrow, wide.bfloat16())
