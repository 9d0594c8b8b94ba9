"""Every setting of a model family that is not refused: log-probs, gradient and weights of a tiny
random model are transformers', on one rank, and divided over tensor-parallel ranks, pipeline stages
and experts."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async_rl.policy.families import FAMILIES
from tests.parallel import layouts
from tests.parallel.family_program import CONTEXT_MODELS
from tests.parallel.models import tensors_of
from tests.thorough import THOROUGH
from tests.tiny_models import save_tiny_model
from tests.train_batches import ragged_batch, samples_in

pytestmark = pytest.mark.parallel

VOCABULARY = 61
"""Odd, so that two tensor-parallel ranks need a padding row."""
WINDOW = 5
"""Shorter than most sequences of the batch."""
LAYOUTS = {
    "single": {"ranks": 1},
    "sequence": {"ranks": 2, "tensor": 2, "sequence": True},
    "pipeline": {"ranks": 2, "pipeline": 2},
    "context": {"ranks": 2, "context": 2, "distributed_optimizer": False},
}
MIXTURE_LAYOUTS = {
    "mixture_single": {"ranks": 1},
    "expert": {"ranks": 2, "expert": 2, "distributed_optimizer": False},
}
"""A distributed optimizer would leave each rank a slice of the gradient."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "mistral-full": {"family": "mistral", "sliding_window": None, "head_dim": 16},
    "mistral-window": {"family": "mistral", "sliding_window": WINDOW, "tied": True},
    "mixture-window": {
        "family": "qwen3_moe",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "qwen2-window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
    },
    "qwen3-window": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
    },
    "llama-bias": {"family": "llama", "attention_bias": True},
    "llama-llama3-rope": {"family": "llama", "rope_parameters": LLAMA3},
    "qwen2-yarn": {"family": "qwen2", "rope_parameters": YARN, "tied": True},
    "qwen3-yarn": {
        "family": "qwen3",
        "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
    },
    "mistral-yarn": {
        "family": "mistral",
        "sliding_window": WINDOW,
        "rope_parameters": YARN | {"truncate": False, "mscale": 1.2, "mscale_all_dim": 0.4},
    },
}
MODELS["gemma3"] = {
    "family": "gemma3_text",
    "tied": True,
    "layers": 4,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
DIVIDED = {
    "sequence": ("mistral-full", "llama-bias", "qwen2-window", "qwen3-yarn", "gemma3"),
    "pipeline": ("mistral-yarn", "gemma3"),
}
"""Models that the gate also divides: over tensor-parallel ranks, one with each kind of tensor
(biases of all or some projections, norms of queries and keys, four norms a layer); over stages,
models whose layers differ or share a rotation."""


def models_of(layout: str) -> list[str]:
    """Return the models of a layout."""
    if layout in MIXTURE_LAYOUTS:
        return [model for model in MODELS if model.startswith("mixture")]
    dense = [model for model in MODELS if not model.startswith("mixture")]
    if layout == "context":
        return [model for model in dense if model in CONTEXT_MODELS]
    return dense if THOROUGH else [each for each in dense if each in DIVIDED.get(layout, dense)]


CASES = [(layout, model) for layout in LAYOUTS | MIXTURE_LAYOUTS for model in models_of(layout)]


def batch(name: str):
    source = ragged_batch(vocabulary=VOCABULARY, seed=4)
    if name == "a":
        return source
    return layouts.replaced(
        source, lambda s: {"finish_reason": "given", "weight": 1.0, "reward_error": None}
    )


@functools.cache
def material() -> Path:
    directory = layouts.temporary()
    for number, (name, settings) in enumerate(MODELS.items()):
        shape = {"vocab_size": VOCABULARY, "seed": number, "scale": 3.0}
        save_tiny_model(directory / name, **shape, **settings)
    batches = {name: batch(name) for name in ("a", "given")}
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    torch.save(list(samples_in(batches["given"])), directory / "samples.pt")
    chosen = {layout: models_of(layout) for layout in LAYOUTS | MIXTURE_LAYOUTS}
    (directory / "models.json").write_text(json.dumps(chosen))
    return directory


def measured(layout: str, model: str) -> dict:
    outcome = results((LAYOUTS | MIXTURE_LAYOUTS)[layout]["ranks"])
    if isinstance(outcome, AssertionError):
        raise outcome
    return outcome[layout][model]


@functools.cache
def results(ranks: int) -> dict[str, dict] | AssertionError:
    """The measurements of all layouts of this many ranks."""
    return layouts.run_program("family_program", material(), LAYOUTS | MIXTURE_LAYOUTS, ranks)


@functools.cache
def reference(model: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """(log-probs of each response, gradient of the mean negative log-prob of the trained tokens) by
    transformers in float64."""
    loaded = layouts.loaded(material() / model)
    scores, total, tokens = [], torch.zeros((), dtype=torch.float64), 0
    for sample in samples_in(batch("given")):
        logp, _ = layouts.reference_logprobs(loaded, sample)
        kept = torch.from_numpy(sample.loss_mask.astype(bool))
        scores.append(logp.detach())
        total, tokens = total - logp[kept].sum(), tokens + int(kept.sum())
    (total / tokens).backward()
    return scores, {name: each.grad for name, each in loaded.named_parameters()}


@pytest.mark.parametrize("what", ["scores", "packed_scores"])
@pytest.mark.parametrize(("layout", "model"), CASES)
def test_log_probs_are_those_of_transformers(layout, model, what):
    expected, _ = reference(model)
    for mine, theirs in zip(measured(layout, model)[what], expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("what", ["gradient", "recomputed_gradient"])
@pytest.mark.parametrize(("layout", "model"), CASES)
def test_every_parameter_has_the_gradient_that_transformers_gives_it(layout, model, what):
    found, (_, expected) = measured(layout, model)[what], reference(model)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, theirs in in_files(expected, found).items():
        torch.testing.assert_close(
            found[name].double(),
            theirs,
            atol=1e-5 * largest,
            rtol=0.0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_exported_weights_are_the_files_bit_for_bit(layout, model):
    found, expected = measured(layout, model)["weights"], tensors_of(material() / model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_a_checkpoint_brings_back_the_trained_weights(layout, model):
    found = measured(layout, model)
    assert found["resumed"].keys() == found["trained"].keys()
    for name, tensor in found["trained"].items():
        assert torch.equal(found["resumed"][name], tensor), name
        assert not torch.equal(found["weights"][name], tensor), name


def in_files(
    gradient: dict[str, torch.Tensor], names: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients under the names of the files; transformers puts all experts of a layer into one
    tensor."""
    found = {}
    for name, tensor in gradient.items():
        layer, _, fused = name.partition(".experts.")
        if not fused:
            found[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused]
        for expert, whole in enumerate(tensor):
            for part, own in zip(parts, whole.chunk(len(parts)), strict=True):
                found[f"{layer}.experts.{expert}.{part}.weight"] = own
    assert found.keys() == names.keys()
    return found


def test_every_family_is_among_the_models():
    tried = {settings["family"] for settings in MODELS.values()}
    assert tried == set(FAMILIES)


@pytest.mark.parametrize("model", MODELS)
def test_the_setting_that_a_model_tries_changes_its_log_probs(model):
    """Else a family that ignores it would pass."""
    settings = MODELS[model]
    plain = {
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    changed = {key: plain[key] for key in plain if settings.get(key, plain[key]) != plain[key]}
    changed["layer_types"] = None
    if settings["family"] == "gemma3_text":
        changed = {"layer_types": ["full_attention"] * 4}
    if changed == {"layer_types": None}:
        return
    loaded = layouts.loaded(material() / model)
    config = loaded.config.to_dict() | changed
    other = type(loaded)(type(loaded.config)(**config))
    other.load_state_dict(loaded.state_dict(), strict=False)
    apart = [
        float((layouts.reference_logprobs(other, sample)[0] - own).abs().max())
        for sample, own in zip(samples_in(batch("given")), reference(model)[0], strict=True)
    ]
    assert max(apart) > 0.01
