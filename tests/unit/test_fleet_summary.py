"""Metrics of engines and flow between two steps: counts of engines that may have been started
again, and what was dropped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_async_rl.flow import summary
from megatron_async_rl.flow.summary import (
    EngineCounts,
    FlowCounts,
    counted,
    describe_flow,
    engine_metrics,
    flow_metrics,
    length_histogram,
    summarise,
    summarise_dropped,
)
from megatron_async_rl.flow.updates import Relayed, Transfer
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Request
from tests.train_batches import (
    columns,
    joined,
    make_sample,
    ragged_batch,
    rewards_batch,
    row,
    samples_in,
)

FRESH = EngineCounts(alive=True, version=3, in_flight=5, tokens=1000, busy_s=40.0, restarts=0)


def test_an_engines_share_and_tokens_are_those_since_the_last_step() -> None:
    now = [
        replace(FRESH, tokens=1600, busy_s=49.0),
        replace(FRESH, tokens=1000, busy_s=44.0, version=2, in_flight=1),
    ]
    metrics = engine_metrics(now, [FRESH, FRESH], 10.0)
    assert metrics["engine/busy_shares"] == pytest.approx([0.9, 0.4])
    assert metrics["engine/busy_share"] == pytest.approx(0.65)
    assert metrics["engine/tokens"] == [600, 0]
    assert (metrics["engine/versions"], metrics["engine/in_flight"], metrics["engine/alive"]) == (
        [3, 2],
        [5, 1],
        2,
    )


def test_what_an_engine_reports_late_is_counted_in_the_steps_after_and_never_lost() -> None:
    """One engine samples all the time, the other a quarter of it; both report once a second, and a
    step takes 0.25 s."""
    before: list[EngineCounts] = []
    shares = []
    for step in range(1, 41):
        reported = step // 4
        now = [replace(FRESH, busy_s=1.0 * reported), replace(FRESH, busy_s=0.25 * reported)]
        shares.append(engine_metrics(now, before, 0.25)["engine/busy_shares"])
        before = counted(now, before, 0.25)
    assert all(share[0] == 1.0 for share in shares[3:])
    assert sum(share[1] for share in shares) / 40 == pytest.approx(0.25)
    again = counted([replace(FRESH, busy_s=0.75)], [replace(FRESH, busy_s=40.0)], 0.5)
    assert again[0].busy_s == 0.5, "of an engine that was started again, too"


def test_a_restarted_engine_counts_what_it_did_since_and_a_dead_one_has_no_version() -> None:
    now = [
        replace(FRESH, tokens=30, busy_s=2.0, restarts=2),
        replace(FRESH, alive=False, restarts=1),
    ]
    metrics = engine_metrics(now, [FRESH, FRESH], 10.0)
    assert metrics["engine/tokens"] == [30, 0]
    assert metrics["engine/busy_shares"] == pytest.approx([0.2, 0.0])
    assert (metrics["engine/versions"], metrics["engine/alive"], metrics["engine/restarts"]) == (
        [3, -1],
        1,
        3,
    )


def test_the_first_step_has_everything_since_the_engines_started() -> None:
    assert engine_metrics([FRESH], [], 80.0)["engine/busy_share"] == pytest.approx(0.5)


def test_the_controllers_counts_keep_their_names() -> None:
    assert flow_metrics({"in_flight": 3, "aborted": 1, "oldest_in_flight_s": 2.0}) == {
        "flow/in_flight": 3,
        "flow/aborted": 1,
    }


def test_lengths_are_counted_in_powers_of_two() -> None:
    assert length_histogram([1, 2, 3, 4, 7, 8, 64]) == [1, 2, 2, 1, 0, 0, 1]


def test_what_was_dropped_has_its_lengths_and_the_rewards_that_did_not_fail() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    long, short = (
        make_sample(prompt, "0-0", [5] * 12, reward_error="timed out"),
        make_sample(prompt, "0-1", [5] * 4, reward=0.25),
    )
    assert summarise_dropped([]) == {}
    dropped = summarise_dropped([row(long), row(short)])
    assert (dropped["dropped/responses"], dropped["dropped/length_mean"]) == (2, 8.0)
    assert (dropped["dropped/length_histogram"], dropped["dropped/reward_mean"]) == (
        [0, 0, 1, 1],
        0.25,
    )
    assert "dropped/reward_mean" not in summarise_dropped([row(long)])


def test_the_planning_rules_drift_is_the_oldest_start_times_the_updates_length() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    samples = tuple(make_sample(prompt, f"0-{start}", [5], versions=[start]) for start in (1, 3))
    batch = TrainBatch.of(4, [samples])
    assert summarise(columns(batch), 3, update_norm=0.02)["staleness/drift"] == pytest.approx(
        0.02 * 3
    )
    assert "staleness/drift" not in summarise(columns(batch), 3)


def test_turns_are_counted_where_tokens_of_environments_stand_between_them() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    masks = [[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 1]]
    samples = tuple(
        make_sample(prompt, f"0-{k}", [5] * len(mask), versions=[0] * len(mask), mask=mask)
        for k, mask in enumerate(masks)
    )
    seen = summarise(columns(TrainBatch.of(0, [samples])), 0)
    assert seen["response/turns_mean"] == (2 + 3 + 1) / 3
    assert seen["response/environment_share"] == pytest.approx(4 / 12)
    single = summarise(columns(TrainBatch.of(0, [samples[2:]])), 0)
    assert "response/turns_mean" not in single


def test_segments_are_counted_where_a_sample_has_several() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1, 2))
    alone = [make_sample(prompt, f"0-{k}", [5, 5], versions=[k, k]) for k in range(3)]
    # The oldest version stands neither first nor last.
    batch = TrainBatch.of(3, [[joined([alone[1], alone[0], alone[1]]), alone[2]]])
    seen = summarise(columns(batch), 3)
    assert seen["response/segments_mean"] == (3 + 1) / 2
    assert seen["response/turns_mean"] == (3 + 1) / 2
    assert (seen["response/mixed_versions"], seen["lag/start_max"]) == (0.5, 3)
    single = summarise(columns(TrainBatch.of(0, [alone[:1]])), 0)
    assert "response/segments_mean" not in single


def test_the_parts_of_rewards_have_means_over_the_samples_that_have_them() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    parts = ({"right": 1.0, "short": 0.5}, {"right": 0.0}, None, {})
    samples = [
        replace(make_sample(prompt, f"0-{k}", [5]), reward_parts=one) for k, one in enumerate(parts)
    ]
    seen = summarise(columns(TrainBatch.of(0, [samples])), 0)
    found = {name: value for name, value in seen.items() if name.startswith("reward/part/")}
    assert found == {"reward/part/right": 0.5, "reward/part/short": 0.5}


def test_a_group_whose_rewards_all_failed_teaches_nothing_either() -> None:
    batch = columns(rewards_batch([[None, None], [1.0, 0.0], [0.5, 0.5], [None, 1.0]]))
    assert summarise(batch, 3)["reward/equal_groups"] == 3 / 4


def test_every_sample_trained_on_is_in_the_histogram_of_lengths() -> None:
    batch = ragged_batch()
    counts = summarise(columns(batch), 3)["trained/length_histogram"]
    lengths = [sample.length for sample in samples_in(batch) if sample.reward_error is None]
    assert counts == [
        sum(2**low <= length < 2 ** (low + 1) for length in lengths)
        for low in range(max(lengths).bit_length())
    ]


def test_lags_rewards_and_lengths_of_a_batch_are_those_counted_by_hand() -> None:
    prompts = [Prompt(id=f"p{i}", text="", token_ids=(1,) * (i + 1)) for i in range(2)]
    first = (
        make_sample(prompts[0], "0-0", [3, 3, 3, 3], reward=1.0, versions=[5, 5, 6, 7]),
        make_sample(prompts[0], "0-1", [3, 3], reward=0.0, versions=[4, 4], mask=[1, 0]),
    )
    second = (
        make_sample(prompts[1], "1-0", [3], reward=0.5, versions=[7]),
        make_sample(prompts[1], "1-1", [3, 3, 3], versions=[6, 6, 6], reward_error="no"),
    )
    seen = summarise(columns(TrainBatch.of(7, [first, second])), max_lag=4)
    assert seen["lag/histogram"] == [2, 1, 2, 2, 0], (
        "every token by its own version, up to the bound"
    )
    assert (seen["lag/max"], seen["lag/mean"]) == (3, pytest.approx((1 * 1 + 2 * 2 + 2 * 3) / 7))
    assert (seen["lag/start_max"], seen["lag/start_mean"]) == (3, (2 + 3 + 0) / 3)
    assert (seen["reward/mean"], seen["reward/errors"]) == (pytest.approx(0.5), 1)
    assert seen["reward/std"] == pytest.approx((1 / 6) ** 0.5)
    assert seen["reward/equal_groups"] == 0.5, "a group with one reward left teaches nothing"
    assert (
        seen["response/length_mean"],
        seen["response/length_max"],
        seen["response/mixed_versions"],
    ) == (pytest.approx(7 / 3), 4, pytest.approx(1 / 3))
    assert seen["tokens/trained"] == 4 + 1 + 1, (
        "neither the environment's token nor those of the failed reward"
    )
    assert seen["tokens/prompt"] == 1 + 1 + 2


def test_a_failed_sample_has_no_lag_and_a_batch_of_them_has_no_numbers() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    fresh = make_sample(prompt, "0-0", [3, 3], versions=[7, 7])
    stale = make_sample(prompt, "0-1", [3], versions=[1], reward_error="no")
    seen = summarise(columns(TrainBatch.of(7, [(fresh, stale)])), 6)
    assert (seen["lag/max"], seen["lag/start_max"], seen["reward/errors"]) == (0, 0, 1)
    failed = columns(TrainBatch.of(7, [(stale,)]))
    assert summarise(failed, 6) == {"reward/errors": 1}


def test_a_metric_of_several_samples_is_absent_for_one() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    samples = [make_sample(prompt, f"{k}-0", [3], reward=float(k)) for k in range(2)]
    apart = summarise(columns(TrainBatch.of(0, [samples[:1], samples[1:]])), 0)
    assert "reward/equal_groups" not in apart
    assert apart["reward/std"] == 0.5
    assert "reward/std" not in summarise(columns(TrainBatch.of(0, [samples[:1]])), 0)


def test_tokens_generated_are_those_that_engines_sampled_for_training() -> None:
    """Tokens of aborted responses count; those of an environment or an evaluation do not."""
    prompt = Prompt(id="p", text="", token_ids=(1,))
    sample = row(make_sample(prompt, "a", [5, 6, 7, 8], versions=[0, 0, 1, 1]), 0)
    counts, slot = FlowCounts(), SimpleNamespace(evaluates=False)
    lines = []
    for generated in (8, 8, 11, 2):  # in the end the engine has started again
        counts.add(sample, Request(group=0, k=0, prompt=prompt))
        engine = replace(FRESH, tokens=generated + 100, generated=generated)
        lines.append(counts.since_last({"engines": [engine], "waiting": 3}, [slot], None))  # type: ignore[list-item]
    assert [line["tokens/generated"] for line in lines] == [8, 0, 3, 2]
    assert counts.responses["samples"] == 4
    assert {line["flow/waiting"] for line in lines} == {3}


def test_a_line_has_the_counts_and_transfers_since_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(summary.time, "monotonic", lambda: now)
    counts = FlowCounts()
    slots = [SimpleNamespace(evaluates=False), SimpleNamespace(evaluates=True)]
    transfer = Transfer(version=3, nbytes=7, seconds=1.5, paused_s=0.5)
    lines = []
    for seconds, busy_s in ((10.0, 4.0), (5.0, 9.0), (4.0, 9.0)):
        now += seconds
        engines = [replace(FRESH, busy_s=busy_s), replace(FRESH, busy_s=99.0)]
        given = {"engines": engines, "waiting": 3}
        relayed = Relayed(version=3, seconds=2.5, nbytes=9) if busy_s == 4.0 else None
        lines.append(counts.since_last(given, slots, transfer, relayed))  # type: ignore[arg-type]
    engine = {
        "flow/waiting": 3,
        "tokens/generated": 0,
        "engine/in_flight": [5],
        "engine/versions": [3],
        "engine/alive": 1,
        "engine/restarts": 0,
        "weights/publish_s": 1.5,
        "weights/publish_bytes": 7,
        "weights/pause_s": 0.5,
    }
    relay = {"weights/relay_s": 2.5, "weights/relay_bytes": 9}
    for line, share, tokens in zip(lines, (0.4, 1.0, 0.0), (1000, 0, 0), strict=True):
        assert line == {
            **engine,
            "engine/busy_share": share,
            "engine/busy_shares": [share],
            "engine/tokens": [tokens],
            **(relay if line is lines[0] else {}),
        }


def test_a_stall_report_describes_the_flow_in_one_line() -> None:
    engines = [FRESH, replace(FRESH, alive=False, in_flight=0)]
    stats = {"version": 4, "waiting": 3, "buffer": 2, "oldest_in_flight_s": 7.6, "engines": engines}
    text = "version 4, 3 waiting, 2 ready,{} the oldest for 8 s; engine 0: version 3, 5 in flight;"
    for scoring, more in ((0, ""), (2, " 2 groups wait for their reward,")):
        assert describe_flow(stats, scoring) == f"{text} engine 1: lost, 0 in flight".format(more)
