"""A train batch taken apart for the ranks: all numbers, and each rank's own tokens."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from megatron_async_rl.objectives.objective import valid_samples
from megatron_async_rl.policy.batch_shares import _batch, _tensor, split
from megatron_async_rl.samples.rank_batch import NO_RANK, NUMBERS, TOKENS
from megatron_async_rl.samples.rows import TrainBatch
from tests.train_batches import (
    columns,
    columns_of,
    groups_of,
    joined,
    ragged_batch,
    rank_batches,
    samples_in,
)

BATCH = ragged_batch()
SAMPLES = list(samples_in(BATCH))
PER_TOKEN = ("behavior_logprobs", "versions", "loss_mask")


def own_tokens(view, row):
    start = view.token_starts[row]
    return view.token_ids[start : start + view.prompt_lengths[row] + view.lengths[row]].tolist()


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
def test_ranks_have_all_numbers_and_the_tokens_of_their_own_samples_alone(data_parallel):
    for rank, view in enumerate(rank_batches(BATCH, data_parallel)):
        assert view.ids.to_pylist() == [sample.id for sample in SAMPLES]
        assert view.group.tolist() == [n for n, g in enumerate(groups_of(BATCH)) for _ in g]
        assert view.rewards.tolist() == [sample.reward for sample in SAMPLES]
        assert view.valid.tolist() == [sample.valid for sample in SAMPLES]
        assert view.trained.tolist() == [sample.loss_mask.sum() for sample in SAMPLES]
        for name in PER_TOKEN:
            expected = np.concatenate([getattr(sample, name) for sample in SAMPLES])
            assert getattr(view, name).dtype == expected.dtype
            np.testing.assert_array_equal(getattr(view, name), expected)

        mine = np.flatnonzero(view.owner == rank).tolist()
        assert np.flatnonzero(view.token_starts >= 0).tolist() == mine
        assert len(view.token_ids) == sum(SAMPLES[row].total_length for row in mine)
        for row in mine:
            sample = SAMPLES[row]
            assert own_tokens(view, row) == [*sample.prompt.token_ids, *sample.response_ids]
    failed = [row for row, sample in enumerate(SAMPLES) if not sample.valid]
    assert np.flatnonzero(view.owner == NO_RANK).tolist() == failed != []


def test_a_rank_knows_the_segments_of_every_sample_and_the_experts_of_its_own():
    pair, alone = SAMPLES[:2], SAMPLES[2]
    rows = [sample.total_length - 1 for sample in (*pair, alone)]
    together = dataclasses.replace(joined(pair), routed_experts=b"a" * rows[0] + b"b" * rows[1])
    alone = dataclasses.replace(alone, routed_experts=b"c" * rows[2])
    view = columns_of([alone, SAMPLES[3], together])
    for chosen in (view, view.select([0, 1, 2])):
        lengths, counts = chosen.segments(np.arange(3))
        assert counts.tolist() == [1, 1, 2]
        assert lengths.tolist() == [
            sample.total_length for sample in (SAMPLES[2], SAMPLES[3], *pair)
        ]
        assert chosen.fed.tolist() == [rows[2], SAMPLES[3].total_length - 1, rows[0] + rows[1]]
    assert view.start_versions.tolist() == [
        one.versions.min() for one in (alone, SAMPLES[3], together)
    ]
    nothing = b"\0" * SAMPLES[3].total_length
    expected = b"c" * rows[2] + b"\0" + nothing + b"a" * rows[0] + b"\0" + b"b" * rows[1] + b"\0"
    assert view.routed_experts.tobytes() == expected
    assert view.select([2]).segments(np.arange(1))[1].tolist() == [2]


def test_nothing_that_is_sent_holds_text():
    assert {"text", "prompt_text", "fields", "prompt_id"}.isdisjoint(
        [*NUMBERS.names, *TOKENS.names]
    )


def test_what_is_received_is_what_was_sent():
    first = {name: getattr(SAMPLES[0], name)[:1] for name in (*PER_TOKEN, "response_ids")}
    rewarded = dataclasses.replace(
        SAMPLES[0], **first, step_rewards=np.array([0.5], dtype=np.float32), reward=0.5
    )
    whole = TrainBatch.of(BATCH.version, [[SAMPLES[1], rewarded, SAMPLES[2]]])
    numbers, tokens = split(whole, 2)
    for sent in (numbers, *tokens):
        received = _batch(_tensor(sent))
        assert received.schema == sent.schema
        assert received == sent
    steps = columns(whole).step_rewards
    assert steps.tolist() == [0.0] * SAMPLES[1].length + [0.5] + [0.0] * SAMPLES[2].length
    assert columns(BATCH).step_rewards is None


def test_a_rank_without_samples_receives_an_empty_part():
    _, tokens = split(TrainBatch.of(BATCH.version, groups_of(BATCH)[:1]), 8)
    empty = _batch(_tensor(tokens[7]))
    assert isinstance(empty, pa.RecordBatch)
    assert empty.num_rows == 0


def test_selected_rows_bring_their_own_tokens_and_numbers():
    rows = [7, 2, 5]
    picked, expected = columns_of(SAMPLES).select(rows), columns_of([SAMPLES[r] for r in rows])
    for row in range(3):
        if SAMPLES[rows[row]].valid:
            assert own_tokens(picked, row) == own_tokens(expected, row)
    for name in ("rewards", "lengths", "prompt_lengths", "valid", "owner", *PER_TOKEN):
        np.testing.assert_array_equal(getattr(picked, name), getattr(expected, name), name)
    assert picked.ids.equals(expected.ids)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_its_sample(reward):
    strange = dataclasses.replace(SAMPLES[3], reward=reward)
    with pytest.raises(ValueError, match=f"sample '{strange.id}' has reward {reward}"):
        valid_samples(columns_of([SAMPLES[0], strange]))
    failed = dataclasses.replace(strange, reward_error="raised")
    assert valid_samples(columns_of([SAMPLES[0], failed])).ids.to_pylist() == [SAMPLES[0].id]
