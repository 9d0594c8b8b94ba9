"""Responses of a group share their prefix in a packed row: which tokens are shared, where they are,
and the attention of what continues them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_async_rl.config.load import load
from megatron_async_rl.config.policy import KEYS_PER_TOKEN
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.policy import attention
from megatron_async_rl.policy.attention import CoreAttention, TransformerEngineAttention, window_of
from megatron_async_rl.policy.batching import build_micro_batch, plan_micro_batches
from megatron_async_rl.policy.packed_sequences import repeat_rows, sum_sorted_rows
from megatron_async_rl.policy.packing import Packed, Segments
from megatron_async_rl.samples.prefixes import shared_prefixes
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt
from tests.cases import looped
from tests.train_batches import (
    groups_of,
    joined,
    make_sample,
    ragged_batch,
    rank_batches,
    samples_in,
)
from tests.unit.test_packed_attention import GROUPS, HEADS, WIDTH, built
from tests.written_run import write_run

CPU = torch.device("cpu")


def prompt(*tokens):
    return Prompt(id=str(tokens), text="", token_ids=tokens)


def group(tokens, *responses):
    asked = prompt(*tokens)
    return [make_sample(asked, f"{tokens}-{i}", list(own)) for i, own in enumerate(responses)]


def shared(*groups):
    samples = TrainBatch.of(0, groups).samples
    return shared_prefixes(samples, np.arange(samples.num_rows)).to_pylist()


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        pytest.param([[7, 8], [9, 8]], 3, id="the prompt"),
        pytest.param([[7], [9]], 3, id="responses of one token"),
        pytest.param([[7, 8, 9], [7, 8, 5]], 5, id="equal beginnings of responses"),
        pytest.param([[7, 8, 9], [7, 8, 9]], 5, id="equal responses"),
        pytest.param([[7, 8], [7, 8, 9, 5]], 4, id="a sample that begins another"),
        pytest.param([[7, 8], [7, 8], [6]], 3, id="the shortest decides"),
        pytest.param([[*range(900), 7], [*range(900), 8]], 903, id="long beginnings"),
    ],
)
def test_a_group_shares_the_tokens_with_which_all_begin_and_that_are_fed(responses, expected):
    assert shared(group([1, 2, 3], *responses)) == [[expected]] * len(responses)


def test_groups_and_samples_alone_share_nothing_with_others():
    alone, *others = shared(group([1, 2], [3]), group([1, 2], [3], [4]))
    assert (alone, others) == ([0], [[2], [2]])
    assert shared(group([1, 2], [3])) == [None]


def test_samples_of_other_prompts_share_what_both_begin_with():
    """An environment writes its own prompts."""
    assert shared(group([1, 2, 3], [4]) + group([1, 2, 5], [4])) == [[2], [2]]
    assert shared(group([1, 2], [4]) + group([3, 2], [4])) == [None, None]


def test_segments_share_with_those_of_their_own_number():
    first, second = group([1, 2], [3, 4], [5, 6])
    context, other = group([8, 9, 1], [3], [4])
    pair = [joined([first, context]), joined([second, other]), replace(first, id="alone")]
    assert shared(pair) == [[2, 3], [2, 3], [2]]


def test_a_prefix_ends_where_recorded_experts_differ():
    first, second, third = group([1, 2, 3], [4], [5], [6])
    one, two = replace(first, routed_experts=b"aabbcc"), replace(second, routed_experts=b"aabxcc")
    assert shared([one, two]) == [[1], [1]]
    assert shared([one, replace(two, routed_experts=b"aabbcc")]) == [[3], [3]]
    assert shared([one, third]) == shared([third, one]) == [None, None]


def test_a_batch_in_which_prefixes_save_little_shares_none():
    samples = TrainBatch.of(0, [group([1], range(2, 12), range(3, 13))]).samples
    rows = np.arange(2)
    for minimum, expected in ((0.05, [[1], [1]]), (0.051, [None, None])):
        assert shared_prefixes(samples, rows, minimum=minimum).to_pylist() == expected


def test_samples_without_a_reward_do_not_shorten_a_prefix():
    good = group([1, 2], [3, 4], [3, 5])
    (failed,) = group([1, 9], [3])
    batch = TrainBatch.of(0, [[*good, replace(failed, reward_error="raised")]])
    (view,) = rank_batches(batch, 1, sharing=0.0)
    assert view.shared.to_pylist() == [[3], [3], None]


ROWS = {
    "groups": ([6, 8, 5, 9, 9], [4, 4, 4, 7, 7], [0, 0, 0, 1, 1]),
    "equal responses": ([6, 6, 9], [6, 6, 4], [0, 0, 1]),
    "one token each": ([3, 3, 3], [2, 2, 2], [0, 0, 0]),
    "a prefix of one token": ([4, 2, 9, 2], [1, 1, 1, 1], [0, 0, 0, 1]),
    "a sample that begins another": ([4, 9, 6], [4, 4, 4], [0, 0, 0]),
    "prefixes of one length": ([6, 8, 5, 6, 5, 4], [4, 4, 4, 4, 4, 0], [0, 0, 1, 1, 0, 2]),
    "nothing shared": ([6, 8, 5], [0, 0, 0], [0, 1, 2]),
    "a call that begins with the second prefix": ([300, 290, 6, 7], [4, 4, 4, 4], [0, 0, 1, 1]),
    "far longer than others": ([300, 6, 7], [4, 4, 4], [0, 0, 0]),
}
"""Name -> (tokens, shared prefix, family) of each segment."""


def segments_of(name):
    fed, prefix, family = (np.array(each) for each in ROWS[name])
    return Segments(fed, np.ones_like(fed), family, prefix, family)


class ThdKernel(torch.nn.Module):
    """Transformer Engine's interface over plain tensor operations; queries are the last tokens of
    their keys if the mask is aligned at the bottom right."""

    def __init__(self, config, layer_number, attn_mask_type, *args, **kwargs):
        super().__init__()
        self.window = window_of(config, layer_number)

    def forward(self, query, key, value, mask, mask_type, bias, packed):
        own, seen = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_kv.tolist()
        assert packed.cu_seqlens_q.dtype == packed.cu_seqlens_kv.dtype == torch.int32
        assert len(own) == len(seen)
        assert (len(query), len(key), len(value)) == (own[-1], seen[-1], seen[-1])
        assert packed.max_seqlen_q == max(np.diff(own)) <= packed.max_seqlen_kv
        assert packed.max_seqlen_kv == max(np.diff(seen))
        expected = "causal" if own == seen else "padding_causal_bottom_right"
        assert mask_type.name == expected
        assert mask_type.name != "causal" or mask_type is AttnMaskType.causal
        return torch.cat(
            [
                dense(
                    query[slice(*one)],
                    *(
                        each[slice(*all)].repeat_interleave(HEADS // GROUPS, 1)
                        for each in (key, value)
                    ),
                    np.arange(all[1] - all[0])[-(one[1] - one[0]) :],
                    self.window,
                )
                for one, all in zip(pairwise(own), pairwise(seen), strict=True)
            ]
        )


def dense(query, key, value, positions, window):
    """[queries, heads, head] at these positions of the sequence of the keys, by the definition."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / WIDTH**0.5
    behind = torch.as_tensor(positions)[:, None] - torch.arange(len(key))
    unseen = (behind < 0) | (behind >= (window or len(key)))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def by_hand(tensors, arranged, fed, window):
    """Attention over each segment as a sequence of its own, with the tokens at its places."""
    query, key, value = (each[:, 0] for each in tensors)
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    result = query.new_zeros(len(query), HEADS * WIDTH)
    for places in np.split(arranged.places, np.cumsum(fed)[:-1]):
        at = torch.from_numpy(places)
        own = dense(query[at], key[at], value[at], np.arange(len(at)), window)
        result = result.index_copy(0, at, own)
    return result[:, None]


@looped("kind", [CoreAttention, TransformerEngineAttention])
@looped("window", [None, 1, 3, 6])
@looped("multiple", [1, 8])
@looped("name", list(ROWS))
def test_attention_is_that_of_whole_segments_in_float64(monkeypatch, name, multiple, window, kind):
    monkeypatch.setattr(attention, "TEDotProductAttention", ThdKernel)
    segments = segments_of(name)
    arranged = Packed(multiple).arrange(segments)
    length = int(arranged.lengths.sum())
    assert length == Packed(multiple).shape(segments)[1]
    assert len(np.unique(arranged.places)) == segments.computed
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(length, 1, heads, WIDTH, generator=draw, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    ours, theirs = ([each.clone().requires_grad_() for each in tensors] for _ in range(2))
    found = built(kind, window=window)(*ours, None, packed_seq_params=arranged.packing)
    expected = by_hand(theirs, arranged, segments.fed, window)
    # The filling of a row is read by no token.
    real = torch.from_numpy(np.unique(arranged.places))
    torch.testing.assert_close(found[real], expected[real], atol=1e-12, rtol=0.0)
    weights = torch.randn(len(real), HEADS * WIDTH, generator=draw, dtype=torch.float64)
    for output in (found, expected):
        (output[real, 0] * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=0.0)


def test_attention_needs_a_call_for_each_length_of_prefixes_and_fills_little():
    packing = Packed().arrange(segments_of("prefixes of one length")).packing
    assert packing.runs == ((3, 4),), "two prefixes and the segment that shares nothing"
    (call,) = packing.branches
    assert (call.pieces, call.tokens, call.longest) == (5, 8 + 2 - 2 + 2, 4)
    assert call.prefixes == ((0, 3), (1, 2))
    long, short = Packed().arrange(segments_of("far longer than others")).packing.branches
    assert [(each.pieces, each.longest) for each in (long, short)] == [(1, 296), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_repeated_row_gets_the_sum_of_its_gradients(dtype):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 2, 3, generator=draw).to(dtype).requires_grad_()
    index = torch.tensor([3, 0, 3, 3, 1, 0, *[3] * 60])
    gradient = torch.randn(66, 2, 3, generator=draw).to(dtype)
    assert torch.equal(repeat_rows(rows, index), rows[index])
    repeat_rows(rows, index).backward(gradient)
    expected = torch.zeros(5, 2, 3, dtype=torch.float64)
    for row, one in zip(index.tolist(), gradient.double(), strict=True):
        expected[row] += one
    torch.testing.assert_close(rows.grad, expected.to(dtype), atol=0.0, rtol=1e-6)
    # As on a GPU.
    flat = sum_sorted_rows(gradient.double().flatten(1), index, 5)
    torch.testing.assert_close(flat.view(5, 2, 3), expected)


BATCH = ragged_batch(groups=8, group_size=4)


def planned(batch, data_parallel=1, *, sharing=0.0, sequences=Packed(), **settings):  # noqa: B008
    views = rank_batches(batch, data_parallel, sharing=sharing)
    plans = [
        plan_micro_batches(view, data_parallel=data_parallel, sequences=sequences, **settings)
        for view in views
    ]
    assert all(plan == plans[0] for plan in plans)
    return plans[0], views


@looped("data_parallel", [1, 2, 3])
@looped(("budget", "multiple"), [(30, 1), (64, 4), (4096, 2)])
@looped("segments", [1, 3])
def test_plans_with_shared_prefixes_hold_every_sample_once_and_keep_the_budget(
    data_parallel, budget, multiple, segments
):
    groups = [[one for one in own if one.valid] for own in groups_of(BATCH)]
    if segments > 1:
        budget *= 3
        groups = [[joined([one, *own[: segments - 1]]) for one in own] for own in groups]
    plan, views = planned(
        TrainBatch.of(3, groups), data_parallel, budget=budget, sequences=Packed(multiple)
    )
    samples = [row for rank in plan.ranks for rows in rank for row in rows]
    assert sorted(samples) == list(range(sum(map(len, groups))))
    sizes = [
        build_micro_batch(view, rows, CPU, Packed(multiple)).tokens.shape[1]
        for view, rank in zip(views, plan.ranks, strict=True)
        for rows in rank
    ]
    assert max(sizes) <= budget
    assert sum(sizes) == plan.computed
    alone, _ = planned(
        TrainBatch.of(3, groups),
        data_parallel,
        sharing=None,
        budget=budget,
        sequences=Packed(multiple),
    )
    assert plan.computed < alone.computed
    assert plan.shared_share > alone.shared_share == 0.0
    assert plan.padding_share >= 0.0
    fed = int(views[0].fed.sum())
    computed = plan.computed * (1 - plan.padding_share)
    assert computed == pytest.approx(fed * (1 - plan.shared_share))
    assert len(plan.ranks[0]) <= len(alone.ranks[0])


def test_a_group_larger_than_a_micro_batch_has_its_prompt_in_each():
    batch = TrainBatch.of(0, [group([1] * 10, *([2 + i] * 6 for i in range(9)))])
    plan, (view,) = planned(batch, budget=27)
    sizes = [len(rows) for rows in plan.ranks[0]]
    assert sizes == [3, 3, 3]
    assert plan.computed == 3 * (10 + 3 * 5)
    micro = build_micro_batch(view, plan.ranks[0][0], CPU, Packed())
    assert micro.rows.tolist()[::6] == [9] * 3, "the prompt's last token predicts all of them"
    plan, (view,) = planned(batch, budget=16)
    assert [len(rows) for rows in plan.ranks[0]] == [1] * 9
    alone = build_micro_batch(view, plan.ranks[0][0], CPU, Packed())
    assert (alone.packing.runs, alone.packing.branches) == (((1, 15),), ())


@looped(("prompt_tokens", "members", "per_micro_batch"), [(100, 30, 8), (20, 30, 30), (3, 8, 8)])
def test_keys_of_a_long_prompt_that_many_short_responses_read_are_limited(
    prompt_tokens, members, per_micro_batch
):
    """Every layer stores them, so a micro-batch of few tokens could need any amount of memory."""
    budget = 110
    batch = TrainBatch.of(0, [group([1] * prompt_tokens, *([2 + i, 3] for i in range(members)))])
    plan, (view,) = planned(batch, budget=budget)
    micros = [build_micro_batch(view, rows, CPU, Packed()) for rows in plan.ranks[0]]
    assert max(len(micro.samples) for micro in micros) == per_micro_batch
    for micro in micros:
        keys = 0 if micro.packing.keys is None else len(micro.packing.keys)
        assert keys - micro.packing.runs[0][1] <= KEYS_PER_TOKEN * budget
    equal = TrainBatch.of(0, [group([1] * prompt_tokens, *[[2, 3]] * members)])
    assert len(planned(equal, budget=budget)[0].ranks[0]) == 1, "nothing is copied"


def test_ranks_get_whole_groups_unless_single_samples_balance_them_better():
    even = TrainBatch.of(0, [group([n] * 20, *([9 + i] * 5 for i in range(4))) for n in (1, 2)])
    for view in rank_batches(even, 2, sharing=0.0):
        assert view.owner.tolist() in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    for view in rank_batches(even, 2):
        assert view.owner.tolist() != [0] * 4 + [1] * 4
    uneven = TrainBatch.of(0, [group([1] * 5, *([9 + i] * 20 for i in range(4)))])
    for view in rank_batches(uneven, 2, sharing=0.0):
        assert sorted(view.owner.tolist()) == [0, 0, 1, 1]


@looped("multiple", [1, 8])
@looped("segments", [1, 2])
def test_each_token_is_predicted_from_the_position_before_it(multiple, segments):
    groups = [[one for one in own if one.valid] for own in groups_of(BATCH)]
    if segments > 1:
        groups = [[joined(pair) for pair in pairwise([*own, own[0]])] for own in groups]
    plan, (view,) = planned(TrainBatch.of(3, groups), budget=200, sequences=Packed(multiple))
    samples = samples_in(TrainBatch.of(3, groups))
    for rows in plan.ranks[0]:
        micro = build_micro_batch(view, rows, CPU, Packed(multiple))
        tokens, positions = micro.tokens[0], micro.position_ids[0]
        assert int((~micro.padding).sum()) == len(tokens) - int(micro.padding.sum())
        for number, row in enumerate(rows):
            sample, own = samples[row], micro.sequence == number
            whole = np.concatenate((sample.prompt.token_ids, sample.response_ids))
            starts = () if sample.segment_starts is None else sample.segment_starts
            begins = np.array([0, *(len(sample.prompt.token_ids) + start for start in starts)])
            numbers = np.arange(len(sample.prompt.token_ids), len(whole))
            begin = begins[np.searchsorted(begins, numbers, side="right") - 1]
            trained = numbers > begin
            before = numbers[trained] - 1
            at = micro.rows[own].numpy()[trained]
            np.testing.assert_array_equal(tokens[at], whole[before])
            np.testing.assert_array_equal(positions[at], before - begin[trained])
            np.testing.assert_array_equal(micro.targets[own], sample.response_ids)


def test_recorded_experts_are_those_of_each_place():
    samples = [
        replace(one, routed_experts=bytes([10 + k] * 2 + [30 + i] * (one.total_length - 3)))
        for k, i, one in (
            (number // 2, number, one)
            for number, one in enumerate(
                group([1, 2], [3, 4, 5], [3, 9]) + group([6, 7], [3], [4, 8])
            )
        )
    ]
    batch = TrainBatch.of(0, [samples[:2], samples[2:]])
    plan, (view,) = planned(batch, budget=200)
    (rows,) = plan.ranks[0]
    micro = build_micro_batch(view, rows, CPU, Packed())
    assert plan.computed < int(view.fed.sum())
    assert micro.routed.all()
    for number, row in enumerate(rows):
        own = micro.rows[micro.sequence == number]
        found = micro.routed_experts[0, own, 0].numpy().tobytes()
        assert found == samples[row].routed_experts[1:]


POLICY = "policy.sequence=packed"
ALWAYS = "policy.prefix_sharing=always"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        pytest.param(["policy.sequence=padded"], "policy.sequence: packed", id="padded"),
        pytest.param(
            [POLICY, "policy.parallel.ranks=2", "policy.parallel.context=2"],
            r"policy\.parallel\.context > 1",
            id="context",
        ),
        pytest.param(
            [POLICY, "policy.lora={rank: 4, dropout: 0.1}"], r"policy\.lora\.dropout", id="dropout"
        ),
    ],
)
def test_what_cannot_share_prefixes_is_refused_with_the_reason_or_does_not_share(
    tmp_path, keys, reason
):
    file = write_run(tmp_path)
    assert load(file, keys).policy.min_sharing is None
    with pytest.raises(ConfigError, match=rf"policy\.prefix_sharing(?s:.)*{reason}"):
        load(file, [*keys, ALWAYS])


def test_packed_rows_share_prefixes_unless_they_are_not_to(tmp_path):
    file = write_run(tmp_path)
    minimum = {
        value: load(file, [POLICY, f"policy.prefix_sharing={value}"]).policy.min_sharing
        for value in ("auto", "always", "never")
    }
    assert minimum == {"auto": 1 / 16, "always": 0.0, "never": None}
