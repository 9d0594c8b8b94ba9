"""Samples as rows of the reports they came in, and what is made of them again."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_async_rl.samples.columns import NUMERIC, SCHEMA, batch_of, samples_of
from megatron_async_rl.samples.rows import TrainBatch, gathered, rescored, rows_of
from megatron_async_rl.samples.types import Prompt, Sample
from tests.cases import looped
from tests.train_batches import joined, make_sample, row

PROMPTS = [Prompt(id=f"p{i}", text=f"{i}?", token_ids=(7,) * (i + 1)) for i in range(3)]


def sample(group: int, k: int, versions: list[int]) -> Sample:
    return make_sample(
        PROMPTS[group],
        f"{group}-{k}",
        [10 * group + k] * len(versions),
        reward=group + k / 10,
        versions=versions,
        reward_error="no" if k == 2 else None,
    )


SAMPLES = [
    sample(0, 0, [1, 1, 2]),
    sample(1, 0, [3]),
    sample(1, 2, [2, 2]),
    joined([sample(2, 1, [3, 4]), sample(2, 0, [0, 1])]),
]
GROUPS = [0, 1, 1, 2]
REPORTS = [
    batch_of(SAMPLES[:1], GROUPS[:1]),
    batch_of([SAMPLES[0], *SAMPLES[1:]], GROUPS).slice(1),  # its rows begin within its buffers
]
ROWS = [one for report in REPORTS for one in rows_of(report)]


def test_a_row_has_the_content_of_its_sample() -> None:
    for one, expected in zip(ROWS, SAMPLES, strict=True):
        for name in ("id", "reward", "valid", "truncated", "length", "total_length"):
            assert getattr(one, name) == getattr(expected, name), name
        assert one.prompt_id == expected.prompt.id
        assert (one.start_version, one.last_version) == (
            expected.versions.min(),
            expected.versions.max(),
        )
        assert one.response_ids.tolist() == expected.response_ids.tolist()
        again = one.sample()
        assert (again.id, again.prompt) == (expected.id, expected.prompt)
        assert again.response_ids.tolist() == expected.response_ids.tolist()


def test_a_new_reward_is_what_its_steps_sum_to() -> None:
    steps = np.array([-1000.0, 1000.0], dtype=np.float32)
    one = replace(make_sample(PROMPTS[0], "0-0", [3, 4], reward=0.0), step_rewards=steps)
    (new,) = rescored([row(one, 0)], [4e-5], [None], [None])
    assert new.sample().reward == float(np.sum(new.sample().step_rewards, dtype=np.float64))


@looped("order", [[0, 1, 2, 3], [3, 0, 2], [1, 0, 0, 2], [3, 2, 1], [2], [1, 1], []])
def test_rows_of_several_reports_are_gathered_in_the_order_asked(order: list[int]) -> None:
    chosen = [SAMPLES[place] for place in order]
    rows = [ROWS[place] for place in order]
    assert gathered(rows) == batch_of(chosen, [GROUPS[place] for place in order])
    places = list(range(len(order)))
    assert gathered(rows, places, NUMERIC) == batch_of(chosen, places, NUMERIC)


def test_a_row_under_another_name_is_gathered_under_it_and_the_first_keeps_its_own() -> None:
    twice = gathered([ROWS[0], ROWS[0].renamed("again")])
    assert twice.column("id").to_pylist() == ["0-0", "again"]
    assert [one.length for one in samples_of(twice)] == [3, 3]
    assert ROWS[0].id == "0-0"


def test_what_is_gathered_keeps_nothing_of_the_reports_it_is_from() -> None:
    long = rows_of(batch_of([SAMPLES[0], make_sample(PROMPTS[1], "1-0", [1] * 10_000)], [0, 1]))
    gathered_alone = gathered(long[:1])
    assert gathered_alone == batch_of(SAMPLES[:1], [0])
    assert gathered_alone.get_total_buffer_size() < 4_000


def test_a_train_batch_of_given_samples_has_each_group_by_its_place() -> None:
    batch = TrainBatch.of(4, [[SAMPLES[1], SAMPLES[2]], [SAMPLES[0]]])
    assert batch.samples == batch_of([SAMPLES[1], SAMPLES[2], SAMPLES[0]], [0, 0, 1])
    assert batch.samples.schema == SCHEMA


def test_a_batch_with_a_token_of_newer_weights_than_it_trains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample '2-1' was sampled by version 4, newer than .* 3"):
        TrainBatch.of(3, [SAMPLES])
    assert TrainBatch.of(4, [SAMPLES]).version == 4


def test_an_array_of_another_dtype_is_refused_and_not_converted() -> None:
    wide = make_sample(PROMPTS[0], "0-0", [1])
    object.__setattr__(wide, "response_ids", np.array([2**40]))
    with pytest.raises(TypeError, match="int64"):
        row(wide)
