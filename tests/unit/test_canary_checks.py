"""Rows of `mar verify CONFIG --numerics` on samples made by hand. tests/loop/test_numerics.py has
the faults of whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import NumericsConfig
from megatron_async_rl.metrics.load_log import WeightLoad
from megatron_async_rl.verify.canary_checks import (
    FACTOR,
    chi_squared,
    chi_squared_tail,
    gradients_row,
    initial_row,
    of_another_distribution,
    probability_score,
    repeated_responses,
    sampling_row,
    seeds_row,
    tokens_row,
    updated_rows,
    weights_row,
)
from megatron_async_rl.verify.canary_loop import measure_canaries
from megatron_async_rl.verify.canary_samples import (
    CanarySamples,
    InitialMeasurements,
    measurement_file,
    read_canaries,
    write_measurements,
)
from megatron_async_rl.verify.numerics import _notes, numerics_overrides
from megatron_async_rl.verify.scorecard import RowVerdict, ScorecardRow
from tests.stored_pages import require_page
from tests.written_run import write_run

CHANCES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
ROUNDING = 1e-6


def canaries(draw: np.ndarray = CHANCES, *, count: int = 400, **changes: Any) -> CanarySamples:
    """Responses of one token of the distribution `draw`, by two engines in turn; the trainer has
    CHANCES."""
    drawn = np.random.default_rng(0).choice(len(CHANCES), size=count, p=draw)
    logp = np.log(CHANCES[drawn]).astype(np.float32)
    ones = np.ones(count, dtype=np.int64)
    found = CanarySamples(
        version=0,
        digest="d0",
        id=np.array([f"{number % 4}-{number}" for number in range(count)]),
        engines=np.arange(count) % 2,
        group=np.arange(count) % 4,
        prompt_length=8 * ones,
        length=ones,
        response_ids=drawn.astype(np.int32),
        versions=np.zeros(count, dtype=np.int32),
        loss_mask=np.ones(count, dtype=np.uint8),
        engine=logp + np.float32(ROUNDING),
        trainer=logp,
        sum_p_squared=np.full(count, (CHANCES**2).sum(), dtype=np.float32),
        rounded=logp + np.float32(ROUNDING),
        first=InitialMeasurements(
            first_token_logprobs=np.log(np.tile(CHANCES, (4, 1))).astype(np.float32),
            moved=np.full(4, 0.5, dtype=np.float32),
            without_gradient=(),
            trainable=1,
        ),
        known_engines=(0, 1),
    )
    return replace(found, **changes)


def test_the_bound_of_log_probs_follows_the_measured_rounding() -> None:
    sound = canaries()
    assert initial_row(sound).verdict is RowVerdict.PASSED
    # Beyond the roundings of a layer, and of the log-prob itself.
    beyond = sound.trainer + np.float32(2 * FACTOR * ROUNDING)
    assert initial_row(replace(sound, engine=beyond)).failed
    coarser = sound.trainer + np.float32(4 * ROUNDING)
    assert not initial_row(replace(sound, engine=beyond, rounded=coarser)).failed


def test_one_wrong_token_or_one_that_is_not_a_number_fails() -> None:
    for wrong in (np.float32(-9.0), np.float32("nan")):
        samples = canaries()
        engine = samples.engine.copy()
        engine[7] = wrong
        failed = initial_row(replace(samples, engine=engine))
        assert failed.failed
        assert [line.partition(":")[0] for line in failed.details] == ["engine 1, depth 8 to 15"]


def test_an_engine_without_a_sample_leaves_the_row_absent() -> None:
    found = initial_row(replace(canaries(), known_engines=(0, 1, 2)))
    assert found.verdict is RowVerdict.ABSENT
    assert "engine 2 sampled no response" in found.value


def test_new_weights_that_change_no_more_than_rounding_prove_nothing() -> None:
    first = canaries()
    assert first.first is not None
    still = replace(first, first=replace(first.first, moved=np.full(4, 1e-6, dtype=np.float32)))
    verdicts = [row.verdict for row in updated_rows(still, canaries(version=1), 4, 32)]
    assert verdicts == [RowVerdict.ABSENT] * 2
    names = {row.name: row.verdict for row in updated_rows(first, canaries(version=1), 4, 0)}
    assert names == {
        "log-probs after an update": RowVerdict.PASSED,
        "prefix cache": RowVerdict.ABSENT,
    }


def test_a_sharper_distribution_fails_both_statistics() -> None:
    sharper = CHANCES**1.6 / (CHANCES**1.6).sum()
    for draw, fair in ((CHANCES, True), (sharper, False)):
        samples = canaries(draw, count=2000)
        assert samples.first is not None
        statistic, freedom = chi_squared(samples, samples.first.first_token_logprobs)
        assert freedom == 16
        assert (chi_squared_tail(statistic, freedom) > 1e-3) == fair
        assert (abs(probability_score(samples)) < 3.5) == fair


def test_the_tail_of_chi_squared_is_that_of_tables() -> None:
    for statistic, freedom, chance in ((3.841, 1, 0.05), (18.31, 10, 0.05), (124.34, 100, 0.05)):
        assert chi_squared_tail(statistic, freedom) == pytest.approx(chance, rel=0.06)
    assert chi_squared_tail(0.0, 0) == 1.0


def test_every_engine_must_have_loaded_every_version() -> None:
    def load(engine: int, digest: str = "d0") -> WeightLoad:
        return WeightLoad(version=0, engine=engine, digest=digest, tensors=3, time=0.0)

    def details(*loads: WeightLoad) -> tuple[str, ...]:
        return weights_row(loads, [canaries()], "", "shared_memory").details

    assert details(load(0), load(1)) == ()
    assert details(load(0)) == ("version 0: engine 1 has not loaded it",)
    assert details(load(0), load(1, "d1")) == ("version 0: engine 1 has d1, the trainer d0",)
    nothing = weights_row([], [], "", "shared_memory")
    assert nothing.verdict is RowVerdict.ABSENT


def longer(count: int = 16) -> CanarySamples:
    """Responses of four tokens, without repetitions; those of prompts 1 and 3 are lengthened."""
    draw = np.random.default_rng(1)
    tokens = np.stack([draw.permutation(8) for _ in range(count)])[:, :4].astype(np.int32)
    tokens[:, 0] = np.arange(count)
    logp = np.full(4 * count, -1.0, dtype=np.float32)
    ones = np.ones(count, dtype=np.int64)
    first = canaries().first
    assert first is not None
    return canaries(
        count=count,
        prompt_length=np.where(np.arange(count) % 2, 140, 5),
        length=4 * ones,
        response_ids=tokens.reshape(-1),
        versions=np.zeros(4 * count, dtype=np.int32),
        loss_mask=np.ones(4 * count, dtype=np.uint8),
        engine=logp + np.float32(2e-6),
        trainer=logp,
        sum_p_squared=np.full(4 * count, 0.1, dtype=np.float32),
        rounded=logp + np.float32(1e-6),
    )


def test_every_row_of_canaries_is_the_one_on_its_page() -> None:
    def load(version: int, engine: int, digest: str = "", tensors: int = 3) -> WeightLoad:
        given = {"version": version, "engine": engine, "tensors": tensors, "time": 0.0}
        return WeightLoad(digest=digest or f"d{version}", **given)

    def weights(*loads: WeightLoad, mismatch: str = "") -> ScorecardRow:
        versions = [canaries(), canaries(version=1, digest="d1")]
        return weights_row(loads, versions, mismatch, "collective")

    def changed(samples: CanarySamples, name: str, at: int, value: float) -> CanarySamples:
        values = getattr(samples, name).copy()
        values[at] = value
        return replace(samples, **{name: values})

    sound, long = canaries(), longer()
    assert sound.first is not None
    untrained = replace(sound, loss_mask=np.zeros(400, dtype=np.uint8))
    sharper = CHANCES**1.6 / (CHANCES**1.6).sum()
    twice = replace(long, response_ids=np.tile(long.response_ids[:32], 2))
    wrong = changed(changed(long, "response_ids", 1, 9), "engine", 7, float("nan"))
    lacking = replace(sound.first, without_gradient=("a.weight", "b.weight"), trainable=5)
    rows: dict[str, list[ScorecardRow]] = {
        "weights": [weights(load(0, 0), load(0, 1), load(1, 0, tensors=4), load(1, 1))],
        "other weights": [
            weights(load(0, 0), load(0, 1, "x"), load(1, 0), load(7, 0), mismatch="tensor t")
        ],
        "no weights": [weights_row([], [], "", "collective")],
        "a load that failed": [weights_row([], [], "tensor t differs", "collective")],
        "log-probs": [initial_row(sound), initial_row(long)],
        "one log-prob": [initial_row(changed(long, "engine", 21, -1.1))],
        "an engine's log-probs": [
            initial_row(replace(long, engine=long.engine + (long.engines[long.rows] > 0)))
        ],
        "no token": [initial_row(untrained)],
        "no engine": [initial_row(replace(sound, known_engines=(0, 1, 2, 5)))],
        "another distribution": [of_another_distribution("log-probs", ("top_p: 0.5", "top_k: 2"))],
        "updated": list(updated_rows(sound, longer(), 2, 140)),
        "updated, and stale in the cache": list(
            updated_rows(sound, replace(long, engine=long.engine + (long.depth > 138)), 2, 140)
        ),
        "updated, and stale": list(
            updated_rows(sound, replace(long, engine=long.engine + (long.depth < 139)), 2, 140)
        ),
        "no long prompt": list(updated_rows(sound, long, 2, 0)),
        "too small a change": list(
            updated_rows(
                replace(sound, first=replace(sound.first, moved=np.full(4, 1.2e-5))), long, 2, 140
            )
        ),
        "large enough a change": list(
            updated_rows(
                replace(sound, first=replace(sound.first, moved=np.full(4, 1.3e-5))), long, 2, 140
            )
        ),
        "sampled": [
            sampling_row(one, (), repeated_responses(long)) for one in (sound, canaries(count=2000))
        ],
        "sampled from a sharper distribution": [
            sampling_row(canaries(sharper, count=2000), (), repeated_responses(long))
        ],
        "sampled from a flatter distribution": [
            sampling_row(canaries(np.full(5, 0.2), count=2000), (), repeated_responses(long))
        ],
        "sampled with top-p": [sampling_row(sound, ("top_p: 0.5",), repeated_responses(sound))],
        "sampled with one seed": [sampling_row(sound, (), repeated_responses(twice))],
        "seeds": [seeds_row(sound, repeated_responses(sound))],
        "one seed": [seeds_row(twice, repeated_responses(twice))],
        "tokens": [tokens_row([sound, long], {99})],
        "wrong tokens": [
            tokens_row([sound, changed(replace(wrong, version=0), "versions", 13, 4)], {9, 8})
        ],
        "gradients": [gradients_row(sound)],
        "no gradients": [gradients_row(replace(sound, first=lacking))],
    }
    text = ""
    for case, found in rows.items():
        text += f"$ {case}\n"
        for row in found:
            text += f"{row.name}: {row.verdict}; {row.value}; bound: {row.bound}\n"
            text += "".join(f"  - {one}\n" for one in row.details)
            text += f"  remedy: {row.remedy}\n" if row.verdict != RowVerdict.PASSED else ""
    require_page("verify/canaries", text)


def test_prompts_are_lengthened_beyond_a_block_if_no_environment_renders_them(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path, max_position_embeddings=4096)
    lengths = []
    for changes in (
        [],
        ["rollout.environment={name: 'tests.unit.agents:run'}"],
        ["rollout.max_context=45"],  # 33 tokens besides the response
        ["rollout.max_context=44"],
        ["rollout.max_context=76", "rollout.vllm.block_size=64"],
        ["rollout.max_context=77", "rollout.vllm.block_size=64"],
    ):
        overrides = ["policy.tokens_per_micro_batch=4096", "rollout.sampling.max_tokens=12"]
        overrides += changes
        (settings,) = (
            one.removeprefix("run.numerics=")
            for one in numerics_overrides(load(file, overrides))
            if one.startswith("run.numerics=")
        )
        lengths.append(json.loads(settings)["long_prompt"])
    assert lengths == [NumericsConfig.default_of("long_prompt"), 0, 33, 0, 0, 65]


def test_canaries_end_without_a_measurement_if_the_run_stops(tmp_path: Path) -> None:
    rank = Mock()
    rank.rank0.next_batch.return_value = None
    policy = SimpleNamespace(receive=lambda take: take())
    config = load(write_run(tmp_path))
    measure_canaries(config, policy, rank)  # type: ignore[arg-type]
    assert rank.mock_calls == [
        call.enter("waiting", "batch"),
        call.await_batch(),
        call.rank0.next_batch(),
        call.rank0.set_status("stopped"),
    ]
    assert not config.run.dir.exists()


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_damaged_file_of_measurements_counts_as_not_measured(tmp_path: Path, left: float) -> None:
    file = measurement_file(tmp_path, 1)
    write_measurements(file, {"id": np.array(["0-0"]), "trainer": np.zeros(100)})
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    content = file.read_bytes()
    file.write_bytes(content[: int(left * len(content))])
    assert read_canaries(file, tmp_path, 1, (0,)) is None
    (note,) = _notes(tmp_path, [canaries()], "")
    assert note == "canaries_1.npz is damaged: its version counts as not measured"
    file.unlink()
    assert read_canaries(file, tmp_path, 1, (0,)) is None
    assert [*_notes(tmp_path, [canaries()], "")] == ["the check ended early: it was stopped"]
