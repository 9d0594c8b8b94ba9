"""Samples as Arrow record batches, and back."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from megatron_async_rl.samples.columns import (
    NUMERIC,
    SCHEMA,
    SampleColumns,
    as_stream,
    batch_of,
    flat,
    from_stream,
    samples_of,
)
from megatron_async_rl.samples.types import Prompt, Sample
from tests.cases import looped

PROMPT = Prompt(id="p0", text="1+1=", token_ids=(5, 6, 7), fields={"answer": "2", "tags": [1]})


def sample(k: int, length: int, **changes: object) -> Sample:
    values: dict[str, object] = {
        "id": f"3-{k}",
        "prompt": PROMPT,
        "response_ids": np.arange(length, dtype=np.int32) + k,
        "behavior_logprobs": -np.linspace(0.1, 0.7, length).astype(np.float32),
        "versions": np.sort(np.arange(length, dtype=np.int32) % 3),
        "loss_mask": np.ones(length, dtype=np.uint8),
        "text": "2 ✓",
        "finish_reason": "stop",
        "reward": 0.1 + 0.2,
        "engine": 1,
        "started_at": 1.5,
        "finished_at": 2.5,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def segmented(k: int, **changes: object) -> Sample:
    """Sample of two segments; the second has a context of two tokens, and older weights began
    it."""
    values: dict[str, object] = {
        "versions": np.array([1, 2, 0, 0, 3], dtype=np.int32),
        "loss_mask": np.array([1, 1, 0, 0, 1], dtype=np.uint8),
        "segment_starts": np.array([2], dtype=np.int32),
        "routed_experts": bytes(range(6)),  # of 3 tokens of the prompt and 5, the last ones' apart
    }
    return sample(k, 5, **(values | changes))


def test_a_batch_and_its_samples_are_the_same_to_the_last_bit():
    steps = np.array([0.25, 0.5], dtype=np.float32)
    given = [
        sample(0, 4),
        sample(1, 2, step_rewards=steps, reward=0.75, weight=0.5),
        sample(2, 1, reward=0.0, reward_error="no number", finish_reason="length"),
        sample(3, 2, routed_experts=bytes(range(24))),
        sample(4, 1, reward_parts={"right": 1.0, "style": 0.1 + 0.2}),
        sample(5, 1, reward_parts={}),
        segmented(6),
    ]
    batch = batch_of(given, [3, 3, 4, 4, 4, 4, 4])
    assert batch.schema == SCHEMA
    assert batch.column("group").to_pylist() == [3, 3, 4, 4, 4, 4, 4]
    assert samples_of(from_stream(as_stream(batch)))[4].reward_parts == given[4].reward_parts
    for cut in (batch, pa.concat_batches([batch.slice(0, 1), batch.slice(1)])):
        for before, after in zip(given, samples_of(cut), strict=True):
            for name in vars(before):
                left, right = getattr(before, name), getattr(after, name)
                if isinstance(left, np.ndarray):
                    assert left.dtype == right.dtype, name
                    np.testing.assert_array_equal(left, right)
                else:
                    assert left == right, name


@pytest.mark.parametrize("experts", [b"", bytes(5)], ids=["none", "not a row each"])
def test_routed_experts_are_a_row_for_each_token_but_the_last(experts: bytes) -> None:
    with pytest.raises(ValueError, match="one row for each of its 4 tokens but the last"):
        sample(0, 2, routed_experts=experts)


@looped(
    ("changes", "said"),
    [
        ({"segment_starts": None}, "weight versions decrease"),
        ({"segment_starts": np.array([3], dtype=np.int32)}, "weight versions decrease"),
        ({"segment_starts": np.array([1, 2], dtype=np.int32)}, "segments begin at"),
        ({"segment_starts": np.array([2, 2], dtype=np.int32)}, "segments begin at"),
        ({"segment_starts": np.array([2, 3], dtype=np.int32)}, "segments begin at"),
        ({"segment_starts": np.array([2, 5], dtype=np.int32)}, "segments begin at"),
        ({"segment_starts": np.array([0, 2], dtype=np.int32)}, "segments begin at"),
        ({"segment_starts": np.zeros(0, dtype=np.int32)}, "segments begin at"),
        ({"routed_experts": bytes(range(7))}, "one row for each of its 6 tokens"),
    ],
)
def test_a_segment_begins_within_the_response_with_a_context(changes, said) -> None:
    assert segmented(0).start_version == 0
    with pytest.raises(ValueError, match=said):
        segmented(0, **changes)


def test_rows_in_the_middle_of_a_batch_are_read_from_their_own_place():
    batch = batch_of([sample(0, 4), sample(1, 2)], [0, 1]).slice(1, 1)
    (only,) = samples_of(batch)
    assert only.id == "3-1"
    assert only.response_ids.tolist() == [1, 2]


def test_what_a_trainer_rank_gets_holds_no_text():
    assert {"text", "prompt_text", "fields", "prompt_id"}.isdisjoint(NUMERIC.names)


def appended(columns: SampleColumns, given: Sample, group: int) -> None:
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    columns.append(group=group, **fields)


def test_rows_gathered_one_by_one_are_the_batch_of_their_samples() -> None:
    given = [
        sample(0, 4),
        sample(1, 2, step_rewards=np.array([0.25, 0.5], dtype=np.float32), reward=0.75),
        sample(2, 1, reward=0.0, reward_error="no number", finish_reason="length", weight=0.5),
        sample(3, 1, reward_parts={"right": 1.0, "style": 0.5}),
    ]
    columns = SampleColumns()
    for group, each in zip((3, 3, 4, 4), given, strict=True):
        appended(columns, each, group)
    assert len(columns) == 4
    assert columns.take() == batch_of(given, [3, 3, 4, 4])


def test_two_prompts_of_one_id_keep_each_its_own_tokens() -> None:
    """The data may have changed before a resume that continues with what was asked."""
    changed = dataclasses.replace(PROMPT, token_ids=(9,), fields={"answer": "3"})
    given = [sample(0, 1), sample(1, 1, prompt=changed), sample(2, 1)]
    columns = SampleColumns()
    for one in given:
        appended(columns, one, 3)
    assert columns.take() == batch_of(given, [3, 3, 3])


def test_what_was_taken_is_not_taken_again() -> None:
    columns = SampleColumns()
    appended(columns, sample(0, 4), 3)
    first = columns.take()
    assert columns.take().num_rows == len(columns) == 0
    assert columns.take().schema == SCHEMA
    appended(columns, sample(1, 2), 5)
    assert columns.take().column("id").to_pylist() == ["3-1"]
    assert first.column("id").to_pylist() == ["3-0"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": np.array([2, 1], dtype=np.int32)}, "versions decrease"),
        ({"loss_mask": np.ones(3, dtype=np.uint8)}, "loss_mask has 3 entries for 2"),
        ({"response_ids": np.zeros(0, dtype=np.int32)}, "empty response"),
        ({"step_rewards": np.ones(2, dtype=np.float32)}, "step rewards sum to 2.0"),
    ],
)
def test_a_row_that_no_sample_could_be_is_refused_and_leaves_nothing(changes, said) -> None:
    columns = SampleColumns()
    good = {f.name: getattr(sample(0, 2), f.name) for f in dataclasses.fields(Sample)}
    with pytest.raises(ValueError, match=f"sample '3-0'.*{said}"):
        columns.append(group=3, **(good | changes))
    assert len(columns) == columns.take().num_rows == 0
    with pytest.raises(ValueError, match=said):
        Sample(**(good | changes))


def test_the_values_of_a_list_column_are_those_of_its_rows() -> None:
    column = pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int32()))
    # A null row whose offsets enclose a value.
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 1, 3, 4], pa.int32()),
        pa.array([1, 2, 7, 3], pa.int32()),
        mask=pa.array([False, True, False]),
    )
    for part, values, lengths in (
        (column, [9, 1, 2, 3], [1, 2, 0, 1]),
        (column[1:], [1, 2, 3], [2, 0, 1]),
        (column.cast(pa.large_list(pa.int32()))[1:3], [1, 2], [2, 0]),
        (hidden, [1, 3], [1, 0, 1]),
        (column[:0], [], []),
    ):
        found, sizes = flat(part)
        assert (found.tolist(), sizes.tolist()) == (values, lengths)
        assert sizes.dtype == np.int64
