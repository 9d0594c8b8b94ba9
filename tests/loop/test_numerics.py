"""`mar verify CONFIG --numerics`: each fault of trainer or engines fails exactly its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_async_rl import train
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.coverage_record import CoverageRecord, read_coverage
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.verify import numerics
from megatron_async_rl.verify.numerics import numerics_overrides, numerics_scorecard
from megatron_async_rl.verify.received_gradients import ReceivedGradients
from megatron_async_rl.verify.scorecard import RowVerdict, Scorecard
from megatron_async_rl.watchdog.events import read_events
from megatron_async_rl.weights.export import WeightExporter
from megatron_async_rl.weights.manifest import WeightMismatch
from tests.loop.canary_engine import SWAPPED, CanaryEngines, swapped
from tests.loop.one_process import Engines, OneProcess

LOGPROBS = {"log-probs", "log-probs after an update", "prefix cache"}
TOP_P = ("rollout.sampling.top_p=0.9", "objective.loss=ppo_clip", "objective.proximal=recompute")
DETACHED = "decoder.layers.1.self_attention.linear_proj.weight"


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with pytest.MonkeyPatch.context() as patch:
        # Half of the responses show every fault in half the time.
        patch.setattr(numerics, "RESPONSES", 32)
        yield OneProcess(tmp_path_factory.mktemp("numerics"), patch)


SHORT = ("rollout.sampling.max_tokens=12", "rollout.max_context=72")
"""Settings with which a check takes a second; a lengthened prompt still has a block of the
cache."""


def verified(loop: OneProcess, name: str, engines: CanaryEngines, *changes: str) -> Scorecard:
    """Return the scorecard of a check of the loop's config."""
    given = loop.config(name, *SHORT, *changes)
    config = load(loop.root / "config.yaml", [*SHORT, *changes, *numerics_overrides(given)])
    config.run.dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        loop.run(config, engines)  # type: ignore[arg-type]
    except WeightMismatch:
        assert engines.fault == "damaged by the carrier"
    return numerics_scorecard(name, config)


def failed(card: Scorecard) -> set[str]:
    return {row.name for row in card.failed}


def rows(card: Scorecard, verdict: RowVerdict) -> set[str]:
    return {row.name for row in card.rows if row.verdict is verdict}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_config_passes_every_row(loop: OneProcess, dtype: str) -> None:
    """transformers and Megatron compute the same model, and differ by rounding."""
    card = verified(loop, dtype, CanaryEngines(), f"model.dtype={dtype}")
    assert rows(card, RowVerdict.PASSED) == {row.name for row in card.rows}, card.text()
    assert card.exit_code == 0
    values = {row.name: row.value for row in card.rows}
    assert values["weights"] == "2 versions, 2 engines, 25 tensors by shared_memory"
    assert "0 of 19 parameters" in values["gradients"]


def test_adapters_and_a_value_head_receive_gradients_although_they_begin_at_zero(
    loop: OneProcess,
) -> None:
    settings = (
        "policy.lora={rank: 2}",
        "objective={loss: ppo_clip, proximal: recompute, advantage: gae, value: {}}",
    )
    card = verified(loop, "adapters", CanaryEngines(), *settings)
    values = {row.name: row.value for row in card.rows}
    assert values["gradients"].startswith("0 of "), card.text()


FAULTS = {
    # Sampled and reported at another temperature: the trainer differs in everything it compares.
    "temperature": LOGPROBS | {"sampling distribution"},
    # Only the frequencies of tokens show it.
    "unreported temperature": {"sampling distribution"},
    "shared seed": {"seeds"},
    "stale prefix cache": {"prefix cache"},
    "stale weights": {"log-probs after an update", "prefix cache"},
    "after the end": {"tokens"},
    "damaged by the carrier": {"weights"},
}


def test_a_stale_prefix_exceeds_the_rounding_of_bfloat16(loop: OneProcess) -> None:
    card = verified(loop, "bf16", CanaryEngines("stale prefix cache"), "model.dtype=bfloat16")
    assert failed(card) == {"prefix cache"}, card.text()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engines_fails_exactly_its_rows(loop: OneProcess, fault: str) -> None:
    card = verified(loop, fault, CanaryEngines(fault))
    assert failed(card) == FAULTS[fault], card.text()
    assert card.exit_code == 1
    if fault == "shared seed":
        # Its test assumes independent samples.
        assert rows(card, RowVerdict.ABSENT) == {"sampling distribution"}
    if fault == "damaged by the carrier":
        assert SWAPPED in card.failed[0].details[0]
        assert rows(card, RowVerdict.ABSENT) == {row.name for row in card.rows} - {"weights"}


def test_a_fault_of_one_engine_is_named_with_the_engine(loop: OneProcess) -> None:
    card = verified(loop, "one engine", CanaryEngines("temperature", faulty=[1]))
    (row,) = (row for row in card.rows if row.name == "log-probs")
    assert row.failed
    assert all(line.startswith("engine 1, depth ") for line in row.details)


def test_shards_exchanged_before_the_digest_fail_the_log_probs(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides then have equal digests of the wrong tensor."""
    shard = WeightExporter.shard

    def exchanged(self: WeightExporter, entry: Any) -> torch.Tensor:
        weight = shard(self, entry)
        return swapped(weight) if entry.hf_names == (SWAPPED,) else weight

    monkeypatch.setattr(WeightExporter, "shard", exchanged)
    card = verified(loop, "exchanged", CanaryEngines())
    assert failed(card) == LOGPROBS, card.text()


def detached(build: Callable[..., Policy]) -> Callable[..., Policy]:
    """Return `Policy.build` of a model one of whose parameters gets no gradient."""

    def building(*arguments: Any, **settings: Any) -> Policy:
        policy = build(*arguments, **settings)
        policy.model.chunks[0].get_parameter(DETACHED).register_hook(torch.zeros_like)
        return policy

    return building


def test_a_parameter_without_gradient_is_named(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.Policy, "build", detached(Policy.build))
    card = verified(loop, "detached", CanaryEngines())
    assert failed(card) == {"gradients"}
    (row,) = card.failed
    assert row.details == (DETACHED,)


def test_training_reports_a_parameter_without_gradient_once(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.Policy, "build", detached(Policy.build))
    run_dir = loop.run(loop.config("trained", "run.steps=6"), Engines())
    assert read_coverage(run_dir) == CoverageRecord(step=5, trainable=19, parameters=(DETACHED,))
    (row,) = ReceivedGradients(run_dir).result()
    assert row.failed
    assert (row.value, row.details) == ("18 of 19 by step 5", (DETACHED,))
    texts = [event.text for event in read_events(run_dir)]
    (text,) = (text for text in texts if "gradient" in text)
    expected = "step 5: 1 of 19 trainable parameters have had no gradient: "
    assert text.startswith(expected)
    assert text.endswith(DETACHED)


def test_settings_that_only_the_engines_have_fail_the_distribution(loop: OneProcess) -> None:
    card = verified(loop, "top_p", CanaryEngines(), *TOP_P)
    (row,) = card.failed
    assert row.name == "sampling distribution"
    assert "top_p: 0.9" in row.details[0]
    assert rows(card, RowVerdict.ABSENT) == LOGPROBS


def test_a_config_without_engines_is_refused(loop: OneProcess) -> None:
    config = loop.config(
        "sft", "objective.loss=sft", "rollout=null", "flow.group_size=1", "flow.async_ratio=0"
    )
    with pytest.raises(UserError, match="has no engines"):
        numerics_overrides(config)
