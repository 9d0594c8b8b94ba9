"""TBA's store: what is kept of each prompt, how it is drawn, and that the same seed draws the
same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_async_rl.config.flow import Replay
from megatron_async_rl.flow.scheduler import ReplayStore
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.rows import SampleGroup, SampleRow, rows_of
from tests.train_batches import make_sample, row

P_VALUE_1E4 = {3: 21.11, 9: 33.72}
"""Chi-square that is exceeded once in 10,000, by degrees of freedom."""


def sample(
    prompt: str, token: int, reward: float = 0.0, version: int = 0, *, valid: bool = True
) -> SampleRow:
    made = Sample(
        id=f"{prompt}-{token}-{version}",
        prompt=Prompt(id=prompt, text="", token_ids=(1,)),
        response_ids=np.array([token], dtype=np.int32),
        behavior_logprobs=np.zeros(1, dtype=np.float32),
        versions=np.array([version], dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.uint8),
        text="",
        finish_reason="stop",
        reward=reward,
        reward_error=None if valid else "no idea",
    )
    return row(made)


def group(index: int, *samples: SampleRow) -> SampleGroup:
    return SampleGroup(index, samples[0].sample().prompt, samples)


def store(
    recent: float = 0.0, inverse_temperature: float = 0.0, per_prompt: int = 100, seed: int = 3
) -> ReplayStore:
    return ReplayStore(
        Replay(recent=recent, inverse_temperature=inverse_temperature, per_prompt=per_prompt), seed
    )


def tokens(groups: tuple[SampleGroup, ...]) -> list[int]:
    return [int(one.response_ids[0]) for drawn in groups for one in drawn.samples]


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[key] - value) ** 2 / value for key, value in expected.items())


def test_stored_responses_are_drawn_with_softmax_probabilities() -> None:
    replay = store(inverse_temperature=0.5)
    rewards = {1: 0.0, 2: 1.0, 3: 2.0, 4: -3.0}
    weights = {token: np.exp(0.5 * reward) for token, reward in rewards.items()}
    arrived = [group(0, *(sample("a", token, reward) for token, reward in rewards.items()))]
    groups, replayed = replay.exchange(arrived, 0, 8000)
    assert replayed == 8000
    expected = {token: 8000 * weight / sum(weights.values()) for token, weight in weights.items()}
    assert chi_square(Counter(tokens(groups)), expected) < P_VALUE_1E4[3]


def test_prompts_are_drawn_evenly_and_not_twice_for_one_batch() -> None:
    replay = store()
    counts: Counter[int] = Counter()
    replay.exchange([group(i, sample(f"p{i}", i)) for i in range(10)], 0, 1)
    for version in range(1, 501):
        drawn = tokens(
            replay.exchange([group(i, sample(f"p{i}", i)) for i in range(4)], version, 1)[0]
        )
        assert len(set(drawn)) == 4
        counts.update(drawn)
    assert chi_square(counts, dict.fromkeys(range(10), 200.0)) < P_VALUE_1E4[9]


def test_a_step_takes_what_arrived_with_the_probability_that_was_asked() -> None:
    replay = store(recent=0.3)
    arrived = [group(0, sample("a", 1))]
    recent = sum(
        replay.exchange(arrived, version, 1) == (tuple(arrived), 0) for version in range(2000)
    )
    assert recent == pytest.approx(600, abs=80)


@pytest.mark.parametrize(("recent", "replayed"), [(1.0, 0), (0.0, 6)])
def test_at_the_ends_a_step_always_or_never_takes_what_arrived(
    recent: float, replayed: int
) -> None:
    replay = store(recent=recent)
    for version in range(20):
        arrived = [group(2 * version + i, sample(f"p{i}", version)) for i in range(2)]
        groups, count = replay.exchange(arrived, version, 3)
        assert count == replayed
        assert (list(groups) == arrived) == (replayed == 0)


def test_the_newest_distinct_responses_of_a_prompt_are_kept() -> None:
    replay = store(per_prompt=3)
    for version, token in enumerate([1, 2, 3, 1, 4]):
        groups, _ = replay.exchange(
            [group(version, sample("a", token, version=version))], version, 400
        )
    assert set(tokens(groups)) == {3, 1, 4}, "2 is the oldest: 1 came once more after it"
    versions = {int(one.response_ids[0]): one.start_version for one in groups[0].samples}
    assert versions == {3: 2, 1: 3, 4: 4}, "of equal responses the newer is the one that is kept"


def test_a_response_whose_reward_failed_is_not_stored() -> None:
    replay = store()
    groups, _ = replay.exchange([group(0, sample("a", 1, valid=False), sample("a", 2))], 0, 50)
    assert set(tokens(groups)) == {2}
    alone = [group(0, sample("b", 1, valid=False))]
    assert store().exchange(alone, 0, 1) == (tuple(alone), 0), (
        "with nothing stored there is nothing to draw"
    )


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    def draws(seed: int) -> list[list[int]]:
        replay = store(inverse_temperature=1.0, seed=seed)
        arrived = [
            group(i, *(sample(f"p{i}", 10 * i + k, reward=k) for k in range(5))) for i in range(4)
        ]
        return [tokens(replay.exchange(arrived, version, 5)[0]) for version in range(5)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len({tuple(drawn) for drawn in draws(1)}) == 5, "each version draws anew"


def test_what_trains_again_has_its_own_id_its_old_versions_and_the_place_of_what_arrived() -> None:
    replay = store()
    replay.exchange([group(0, sample("a", 1, version=2))], 2, 1)
    groups, _ = replay.exchange([group(7, sample("a", 1, version=2))], 9, 3)
    (again,) = groups
    assert (again.index, again.prompt.id) == (7, "a")
    assert [one.id for one in again.samples] == ["a-1-2@9.7-0", "a-1-2@9.7-1", "a-1-2@9.7-2"]
    assert all(one.start_version == 2 for one in again.samples)


def test_what_is_stored_keeps_nothing_of_the_reports_it_came_in() -> None:
    long = [make_sample(Prompt(id="b", text="", token_ids=(1,)), "b", [3] * 10_000)]
    report = batch_of([sample("a", 1).sample(), *long], [0, 1])
    replay = store()
    replay.exchange([group(0, rows_of(report)[0])], 0, 1)
    ((_, (kept,)),) = replay.content()
    assert kept.batch.get_total_buffer_size() < 4_000 < report.get_total_buffer_size()


def test_a_store_that_was_saved_draws_what_the_one_that_went_on_draws() -> None:
    def arrived(version: int) -> list[SampleGroup]:
        return [
            group(
                i, *(sample(f"p{i}", 10 * version + k, reward=k, version=version) for k in range(3))
            )
            for i in range(4)
        ]

    def ids(drawn: tuple[tuple[SampleGroup, ...], int]) -> list[list[str]]:
        return [[one.id for one in each.samples] for each in drawn[0]]

    through, saved = store(recent=0.3, per_prompt=5), store(recent=0.3, per_prompt=5)
    for version in range(4):
        through.exchange(arrived(version), version, 3)
        saved.exchange(arrived(version), version, 3)
    resumed = store(recent=0.3, per_prompt=5)
    resumed.load(saved.content())
    for version in range(4, 20):
        assert ids(resumed.exchange(arrived(version), version, 3)) == ids(
            through.exchange(arrived(version), version, 3)
        )


def test_a_smaller_store_takes_up_the_newest_of_what_was_saved() -> None:
    large, small = store(), store(per_prompt=2)
    large.exchange([group(0, *(sample("a", token) for token in (4, 9, 2, 7)))], 0, 1)
    small.load(large.content())
    ((_, left),) = small.content()
    assert [int(one.response_ids[0]) for one in left] == [2, 7]
