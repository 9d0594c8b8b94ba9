"""Recomputed activations change no gradient, no weight and no metric by a bit, and take less
memory, on several layouts."""

from __future__ import annotations

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.memory import rank_memory
from megatron_async_rl.plan.model_files import read_model
from tests.parallel import layouts
from tests.written_run import write_run

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["recompute_program"]


def results(layout, dtype="float32"):
    return layouts.results(layout, "recompute_program")[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_weights_and_metrics_are_the_same_bits(layout, dtype):
    for rank in results(layout, dtype)["ranks"]:
        assert [kind for kind, found in rank.items() if not found["same"]] == []
    assert results(layout, dtype)["steps"][1]["gac/cosine"] != 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_less_is_kept_on_every_rank_and_nothing_after_the_step(layout, dtype):
    for rank in results(layout, dtype)["ranks"]:
        peaks = {kind: found["peak"] for kind, found in rank.items()}
        assert peaks["full"] < peaks["selective"] < peaks["none"]
        assert {found["left"] for found in rank.values()} == {0}
    # Each layer keeps its input; one at a time is computed again.
    if layout == "single":
        assert peaks["full"] < 1.2 / layouts.LAYERS * peaks["none"]


@pytest.mark.parametrize("layout", [name for name in ("single", "context") if name in LAYOUTS])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_the_plan_knows_what_is_kept(tmp_path, kind, layout):
    found = results(layout)["ranks"][0][kind]
    parallel = LAYOUTS[layout]
    rows, part = found["largest"]
    longest = part * parallel.get("context", 1)
    settings = [f"model.path={layouts.material() / 'tied'}", "model.dtype=float32"]
    settings += [f"policy.tokens_per_micro_batch={rows * longest}"]
    settings += ["policy.logprob_chunk_tokens=16"]
    settings += [f"policy.parallel.{key}={size}" for key, size in parallel.items()]
    config = load(write_run(tmp_path), [*settings, f"policy.recompute={kind}"])
    shape, _ = read_model(config.model.path)
    planned = rank_memory(config, shape, stage=0, data_parallel=1, longest=longest)
    assert planned.activations + planned.logprobs == pytest.approx(found["peak"], rel=0.15)
