import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
from megatron_async_rl.objectives.batch import on_device
from megatron_async_rl.objectives.objective import Denominators, Objective, StepTargets, whole_batch
from megatron_async_rl.policy import batching
from megatron_async_rl.policy.attention import ContextParallelSlice
from megatron_async_rl.policy.batch_shares import assign_owners
from megatron_async_rl.policy.batching import (
    SampleTooLong,
    build_micro_batch,
    build_micro_batches,
    plan_micro_batches,
)
from megatron_async_rl.policy.forward import TokenOutputs
from megatron_async_rl.policy.packing import (
    MICRO_BATCH_COSTS,
    Packed,
    Padded,
    Segments,
    cheapest_cut,
    row_divisor,
)
from megatron_async_rl.policy.step import RecordedLoss
from tests.cases import looped
from tests.train_batches import (
    columns_of,
    grouped,
    joined,
    make_sample,
    ragged_batch,
    rank_batches,
    samples_in,
)

CPU = torch.device("cpu")
SAMPLES = [
    dataclasses.replace(sample, reward_error=None)
    for sample in samples_in(ragged_batch(groups=20, group_size=4))
]


def planned(samples, data_parallel=1, **settings):
    """(plan, each data-parallel rank's view of the batch)."""
    views = rank_batches(grouped(samples), data_parallel)
    plans = [plan_micro_batches(view, data_parallel=data_parallel, **settings) for view in views]
    assert all(plan == plans[0] for plan in plans)
    return plans[0], views


def geometric(count, seed):
    """Response lengths as of a task whose answers end early: mean 16, at most 128."""
    rng = np.random.default_rng(seed)
    prompt = SAMPLES[0].prompt
    return [
        make_sample(prompt, str(index), [3] * min(int(length), 128))
        for index, length in enumerate(rng.geometric(1 / 16, count))
    ]


@looped("data_parallel", [1, 2, 3, 8])
@looped(("budget", "multiple"), [(32, 1), (100, 4), (100000, 2)])
@looped("layout", [Padded, Packed])
def test_every_sample_is_in_exactly_one_micro_batch_and_no_budget_is_exceeded(
    data_parallel, budget, multiple, layout
):
    sequences = layout(multiple)
    plan, views = planned(SAMPLES, data_parallel, budget=budget, sequences=sequences)
    assert sorted(i for rank in plan.ranks for rows in rank for i in rows) == list(
        range(len(SAMPLES))
    )
    assert {len(rank) for rank in plan.ranks} == {len(plan.ranks[0])}
    sizes = [
        build_micro_batch(view, rows, CPU, sequences).tokens.numel()
        for view, rank in zip(views, plan.ranks, strict=True)
        for rows in rank
    ]
    assert max(sizes) <= budget
    real = sum(sample.total_length - 1 for sample in SAMPLES)
    assert plan.padding_share == pytest.approx(1 - real / sum(sizes))


def test_the_number_of_micro_batches_fills_up_to_whole_rounds_of_the_pipeline():
    for data_parallel in (1, 3):
        plain, _ = planned(SAMPLES, data_parallel, budget=64)
        rounds, _ = planned(SAMPLES, data_parallel, budget=64, in_groups_of=4)
        assert len(rounds.ranks[0]) == -(-len(plain.ranks[0]) // 4) * 4
        for mine, filled in zip(plain.ranks, rounds.ranks, strict=True):
            assert filled == mine + ((),) * (len(rounds.ranks[0]) - len(plain.ranks[0]))


@pytest.mark.parametrize("samples", [SAMPLES, geometric(200, 0)], ids=["uniform", "geometric"])
def test_ranks_carry_nearly_the_same_tokens_padding_included(samples):
    plan, (batch, *_) = planned(samples, 4, budget=1024)
    real = [sum(batch.fed[list(rows)].sum() for rows in rank) for rank in plan.ranks]
    assert max(real) - min(real) <= max(sample.total_length for sample in samples)
    computed = [
        sum(batch.fed[list(rows)].max(initial=0) * len(rows) for rows in rank)
        for rank in plan.ranks
    ]
    assert max(computed) < 1.1 * min(computed)


def test_the_longest_sample_does_not_come_on_top_of_an_even_share_of_the_short_ones():
    lengths = np.array([10] * 20 + [200])
    assert np.bincount(assign_owners(lengths, 2), lengths).tolist() == [200, 200]


def test_groups_that_have_to_stay_whole_do():
    rng = np.random.default_rng(0)
    lengths, group = rng.integers(1, 100, 60), np.arange(60) // 4 + 7
    owner = assign_owners(lengths, 4, group)
    assert all(len(set(owner[group == number])) == 1 for number in group)
    loads = np.bincount(owner, lengths)
    assert loads.max() - loads.min() <= max(lengths[group == number].sum() for number in group)


@looped("count", [64, 128, 256, 512])
@looped("data_parallel", [1, 2])
def test_a_tenth_of_the_tokens_is_padding_at_most_where_lengths_are_geometric(count, data_parallel):
    shares, numbers = [], []
    for seed in range(10):
        plan, _ = planned(geometric(count, seed), data_parallel, budget=16384)
        shares.append(plan.padding_share)
        numbers.append(len(plan.ranks[0]))
    assert max(shares) < 0.1
    assert max(numbers) <= 20, "padding is not bought at any price"


def test_where_little_is_padding_anyway_few_micro_batches_are_made():
    """The demo has such a batch: 512 samples of 6 to 13 tokens."""
    prompt = dataclasses.replace(SAMPLES[0].prompt, token_ids=(1,))
    samples = [make_sample(prompt, str(i), [3] * (6 + i % 8)) for i in range(512)]
    plan, _ = planned(samples, budget=16384)
    assert plan.padding_share < 0.1
    assert len(plan.ranks[0]) <= 4
    few, _ = planned(samples[:4], budget=16384)
    assert len(few.ranks[0]) == 1


def test_equal_lengths_are_cut_by_the_budget_alone_and_evenly():
    plan, _ = planned(
        [make_sample(SAMPLES[0].prompt, str(i), [3] * 10) for i in range(9)], budget=99
    )
    length = len(SAMPLES[0].prompt.token_ids) + 9
    assert 99 // length < 9
    sizes = [len(rows) for rows in plan.ranks[0]]
    assert len(sizes) == -(-9 // (99 // length))
    assert max(sizes) - min(sizes) <= 1


def test_no_other_cut_into_runs_costs_less():
    """Against every cut of a few samples."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        lengths = np.sort(rng.integers(1, 40, 8))[::-1]
        samples = [
            make_sample(SAMPLES[0].prompt, str(i), [3] * int(n)) for i, n in enumerate(lengths)
        ]
        (batch,) = planned(samples, budget=150)[1]
        fixed = int(rng.choice(MICRO_BATCH_COSTS))
        found = cheapest_cut(np.arange(8), batch.fed, 150, fixed)

        def cost(cuts, fed=batch.fed, fixed=fixed):
            runs = np.split(fed, cuts)
            sizes = [run.max() * len(run) for run in runs]
            return np.inf if max(sizes) > 150 else sum(sizes) + fixed * len(sizes)

        assert [i for rows in found for i in rows] == list(range(8))
        ends = np.cumsum([len(rows) for rows in found])[:-1]
        cheapest = min(
            cost([place + 1 for place in range(7) if mask >> place & 1]) for mask in range(2**7)
        )
        assert cost(ends) == pytest.approx(cheapest, rel=0.01)


def test_fewer_samples_than_ranks_leave_ranks_with_masked_work_only():
    plan, (batch, *_) = planned(SAMPLES[:1], 3, budget=64)
    assert plan.ranks == (((0,),), ((),), ((),))
    filler = build_micro_batch(batch, (), CPU)
    assert filler.samples == ()
    assert len(filler.rows) == 1


def test_no_sample_at_all_is_one_masked_micro_batch():
    batch = columns_of(SAMPLES[:1]).select([])
    assert plan_micro_batches(batch, data_parallel=2, budget=64)[0] == (((),), ((),))


def test_a_sample_longer_than_the_budget_is_named_with_the_key_to_raise():
    longest = max(SAMPLES, key=lambda sample: sample.total_length)
    budget = longest.total_length - 1
    with pytest.raises(
        SampleTooLong,
        match=rf"{longest.id}.* {budget + 1} tokens.*policy.tokens_per_micro_batch = {budget}",
    ):
        planned([SAMPLES[0], longest], budget=budget)


@pytest.mark.parametrize("layout", [Padded, Packed])
def test_each_response_token_is_predicted_from_the_position_before_it(layout):
    sequences = layout(2)
    plan, views = planned(SAMPLES, 2, budget=128, sequences=sequences)
    for view, rank in zip(views, plan.ranks, strict=True):
        for rows in rank:
            batch = build_micro_batch(view, rows, CPU, sequences)
            tokens, positions = batch.tokens.flatten().numpy(), batch.position_ids.flatten()
            for row, index in enumerate(rows):
                sample, mine = SAMPLES[index], (batch.sequence == row).numpy()
                prompt, at = sample.prompt.token_ids, batch.rows.numpy()[mine]
                np.testing.assert_array_equal(batch.targets.numpy()[mine], sample.response_ids)
                np.testing.assert_array_equal(tokens[at], [prompt[-1], *sample.response_ids[:-1]])
                np.testing.assert_array_equal(batch.versions.numpy()[mine], sample.versions)
                start = at[0] - len(prompt) + 1
                np.testing.assert_array_equal(tokens[start : at[0] + 1], prompt)
                assert torch.equal(
                    positions[start : at[-1] + 1], torch.arange(sample.total_length - 1)
                )
            assert batch.tokens.shape == batch.position_ids.shape
            assert batch.tokens.shape[1] % 2 == 0


@pytest.mark.parametrize("samples", [SAMPLES, geometric(300, 1)], ids=["uniform", "geometric"])
@pytest.mark.parametrize("budget", [200, 1024])
def test_packed_samples_are_not_padded_and_fill_few_micro_batches_evenly(samples, budget):
    plan, (batch,) = planned(samples, budget=budget, sequences=Packed())
    assert plan.padding_share == 0.0
    sizes = [int(batch.fed[list(rows)].sum()) for rows in plan.ranks[0]]
    assert len(sizes) <= 1.1 * sum(sizes) / budget + 1
    assert max(sizes) - min(sizes) <= batch.fed.max()
    for rows in plan.ranks[0]:
        assert list(batch.fed[list(rows)]) == sorted(batch.fed[list(rows)], reverse=True)


def test_what_fills_a_packed_row_up_belongs_to_its_last_sample():
    batch = columns_of(
        [make_sample(SAMPLES[0].prompt, str(i), [3] * n) for i, n in enumerate((4, 2))]
    )
    fed = batch.fed.tolist()
    micro = build_micro_batch(batch, (0, 1), CPU, Packed(8))
    length = micro.tokens.shape[1]
    assert length % 8 == 0
    assert length > sum(fed)
    last = length - fed[0]
    assert micro.position_ids.tolist() == [[*range(fed[0]), *range(last)]]
    assert micro.packing.cu_seqlens_q.tolist() == [0, fed[0], length]
    assert micro.packing.max_seqlen_q == max(fed[0], last)
    nobody = build_micro_batch(batch, (), CPU, Packed(8))
    assert nobody.tokens.shape == (1, 8)
    assert nobody.packing.cu_seqlens_q.tolist() == [0, 8]
    assert (nobody.samples, len(nobody.rows)) == ((), 1)


@pytest.mark.parametrize("layout", [Padded(4), Packed(4), Packed(4, ContextParallelSlice(1, 2))])
def test_micro_batches_of_a_plan_are_uploaded_together(monkeypatch, layout):
    plan, (batch,) = planned(SAMPLES, budget=96, sequences=layout)
    cuts = (*plan.ranks[0], ())
    uploads = []
    monkeypatch.setattr(batching, "on_device", lambda *args: uploads.append(1) or on_device(*args))
    together = build_micro_batches(batch, cuts, CPU, layout)
    assert len(uploads) == 1
    assert [each.samples for each in together] == list(cuts)
    for rows, found in zip(cuts, together, strict=True):
        alone = build_micro_batch(batch, rows, CPU, layout)
        for name in ("tokens", "position_ids", "rows", "targets", "sequence", "versions"):
            assert torch.equal(getattr(found, name), getattr(alone, name)), name
        if isinstance(layout, Packed):
            assert torch.equal(found.packing.cu_seqlens_q, alone.packing.cu_seqlens_kv)
            assert found.packing.cu_seqlens_q.dtype == torch.int32


def test_places_of_a_micro_batch_are_those_of_its_tokens_in_the_batch():
    plan, (batch,) = planned(SAMPLES, budget=96)
    (*parts, nobody) = build_micro_batches(batch, (*plan.ranks[0], ()), CPU)
    for part in parts:
        assert part.batch_samples.tolist() == list(part.samples)
        assert torch.equal(torch.from_numpy(batch.versions)[part.owned_tokens], part.versions)
        owners = torch.from_numpy(batch.rows)[part.owned_tokens]
        assert torch.equal(owners, part.batch_samples[part.sequence])
    assert nobody.owned_tokens.tolist() == nobody.batch_samples.tolist() == [-1]


def test_tokens_of_a_micro_batch_are_numbered_among_those_of_their_owner():
    plan, batches = planned(SAMPLES, data_parallel=3, budget=96)
    for owner, batch in enumerate(batches):
        rows = batch.rows[batch.owner[batch.rows] == owner]
        parts = build_micro_batches(batch, [c for c in plan.ranks[owner] if c], CPU)
        for part in parts:
            places = part.owned_tokens.numpy()
            assert (rows[places] == part.batch_samples[part.sequence].numpy()).all()
        seen = torch.cat([part.owned_tokens for part in parts])
        assert sorted(seen.tolist()) == list(range(len(rows)))


def test_targets_that_are_placed_are_those_of_the_owners_tokens():
    plan, batches = planned(SAMPLES, data_parallel=3, budget=96)
    for owner, batch in enumerate(batches):
        whole = whole_batch(batch, {})
        targets = StepTargets(batch, whole, Denominators.of(whole), True)
        held = batch.owner[batch.rows] == owner
        assert len(targets.gather(owner)["batch", "mask"]) == 1 + held.sum() < len(batch.rows)
        for rows in filter(None, plan.ranks[owner]):
            micro = build_micro_batch(batch, rows, CPU)
            places = (micro.owned_tokens, micro.batch_samples, micro.sequence)
            part = targets.micro_batch(owner, *places, dtype=torch.float32)
            own = np.concatenate([np.flatnonzero(batch.rows == row) for row in rows])
            expected = batch.behavior_logprobs[own]
            assert torch.equal(part.logp_behavior, torch.from_numpy(expected))
            assert torch.equal(part.rewards, whole.rewards[list(rows)].float())
        padding = (torch.tensor(at) for at in ([-1], [-1], [0]))
        nobody = targets.micro_batch(owner, *padding, dtype=torch.float32)
        assert nobody.mask.tolist() == nobody.rewards.tolist() == [0.0]


def test_targets_are_uploaded_once_for_all_passes_of_a_step_and_anew_when_they_change(monkeypatch):
    _, (batch,) = planned(SAMPLES, budget=96)
    whole = whole_batch(batch, {})
    targets = StepTargets(batch, whole, Denominators.of(whole), True)
    objective = Objective(ObjectiveConfig())
    micro, nothing = build_micro_batch(batch, (0, 1), CPU), torch.zeros(len(batch.rows))
    logp = nothing[micro.owned_tokens].requires_grad_()
    outputs = TokenOutputs(logp, logp.detach(), logp.detach())
    uploads = []
    upload = lambda *args: uploads.append(1) or on_device(*args)  # noqa: E731
    monkeypatch.setattr("megatron_async_rl.objectives.objective.on_device", upload)
    for with_terms in (True, False):
        loss = RecordedLoss(objective, targets, None, with_terms=with_terms)
        loss(micro, outputs)
        loss(micro, outputs)
    assert len(uploads) == 1
    changed = replace(targets, whole=whole.replace(advantages=whole.advantages + 1.0))
    assert float(loss(micro, outputs)) != float(
        RecordedLoss(objective, changed, None)(micro, outputs)
    )
    assert len(uploads) == 2


def test_tensors_are_moved_by_one_copy_per_dtype_and_come_back_whole(monkeypatch):
    tensors = {
        "a": torch.arange(6).view(2, 3),
        "b": torch.zeros(0),
        ("c", 1): torch.tensor([1.5, -2.0]),
        "d": torch.tensor(7),
        "e": torch.ones(2, 1),
    }
    copies, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kw: copies.append(1) or to(self, *args, **kw)
    )
    found = on_device(tensors, CPU)
    assert len(copies) == 2
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
        assert torch.equal(found[name], each)
    assert on_device({}, CPU) == {}


@looped("kind", [Padded, Packed])
@looped(("size", "multiple"), [(2, 4), (3, 6), (2, 12)])
def test_parts_of_context_parallel_ranks_make_up_the_whole_rows(kind, size, multiple):
    layouts = [kind(multiple, ContextParallelSlice(rank, size)) for rank in range(size)]
    plan, (batch,) = planned(SAMPLES, budget=96, sequences=layouts[0])
    for rows in (*plan.ranks[0], ()):
        parts = [build_micro_batch(batch, rows, CPU, layout) for layout in layouts]
        fed = batch.fed[list(rows)]
        segments = Segments.apart(fed)
        count, length = layouts[0].shape(segments)
        lengths = layouts[0].arrange(segments).lengths
        starts = np.arange(len(fed)) * length if kind is Padded else np.cumsum(lengths) - lengths
        assert length % multiple == 0
        assert {part.tokens.shape for part in parts} == {(count, length // size)}
        own = torch.from_numpy(np.concatenate([layout.own(lengths) for layout in layouts]))
        assert own.sort().values.tolist() == list(range(count * length))
        whole = {}
        for name in ("tokens", "position_ids"):
            joined = torch.cat([getattr(part, name).flatten() for part in parts])
            whole[name] = torch.empty_like(joined).index_copy(0, own, joined)
        predicts = []
        for number, index in enumerate(rows):
            sample, start = SAMPLES[index], starts[number]
            expected = [*sample.prompt.token_ids, *sample.response_ids][:-1]
            line = slice(start, start + len(expected))
            assert whole["tokens"][line].tolist() == expected
            assert whole["position_ids"][line].tolist() == list(range(len(expected)))
            predicts += range(start + len(sample.prompt.token_ids) - 1, line.stop)
        found = {
            int(place): int(layout.own(lengths)[row])
            for layout, part in zip(layouts, parts, strict=True)
            for place, row in zip(part.places, part.rows, strict=True)
        }
        assert [found[place] for place in sorted(found)] == (predicts or [0])
        assert sum(len(part.rows) for part in parts) == len(found) == len(parts[0].targets)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_context_parallel_ranks_have_the_same_work_under_the_causal_mask(size):
    starts, lengths = np.array([0, 4 * size]), np.array([4 * size, 6 * size])
    arranged = Packed(2 * size).arrange(Segments.apart(lengths))
    keys = [
        int((arranged.positions[ContextParallelSlice(rank, size).own(starts, lengths)] + 1).sum())
        for rank in range(size)
    ]
    assert len(set(keys)) == 1


def test_a_sample_that_fits_alone_is_packed_under_any_multiple():
    longest = max(sample.total_length for sample in SAMPLES)
    plan, _ = planned(SAMPLES, budget=longest + 3, sequences=Packed(4))
    assert sorted(i for rows in plan.ranks[0] for i in rows) == list(range(len(SAMPLES)))


def test_a_rank_cannot_feed_tokens_that_another_one_has():
    plan, (first, second) = planned(SAMPLES, 2, budget=128)
    others = plan.ranks[1][0]
    with pytest.raises(ValueError, match=rf"{SAMPLES[others[0]].id}.*another data-parallel rank"):
        build_micro_batch(first, others, CPU)
    assert build_micro_batch(second, others, CPU).samples == others


@pytest.mark.parametrize("layout", [Padded(2), Packed(2), Packed(4, ContextParallelSlice(1, 2))])
def test_a_segment_lies_in_a_micro_batch_as_a_sample_of_its_own(layout):
    """Each trained token is predicted from the same token at the same position, and both cuts have
    all of them."""
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 12)]
    alone = SAMPLES[:12]
    together = [joined(alone[cut]) if cut.stop - cut.start > 1 else alone[0] for cut in cuts]

    def predicted(samples):
        plan, (view,) = planned(samples, budget=200, sequences=layout)
        found = {}
        for rows in plan.ranks[0]:
            part = build_micro_batch(view, rows, CPU, layout)
            places = np.arange(len(part.targets)) if part.places is None else part.places
            before = part.tokens.flatten()[part.rows]
            at = part.position_ids.flatten()[part.rows]
            owners = part.batch_samples[part.sequence[places]]
            numbers = view.starts[owners] + part.owned_tokens[places].numpy()
            numbers = numbers - view.owned_starts[owners]
            for number, *told in zip(numbers, before, at, part.targets[places], strict=True):
                found[int(number)] = tuple(map(int, told))
            if part.packing is not None:
                fed = view.segments(np.array(rows))[0] - 1
                ends = np.cumsum(layout.arrange(Segments.apart(fed)).lengths)
                assert part.packing.cu_seqlens_q.tolist() == [0, *ends]
        return [found.get(number) for number in np.flatnonzero(view.loss_mask)]

    assert predicted(together) == predicted(alone)
    longest = max(cuts, key=lambda cut: cut.stop - cut.start)
    needed = sum(layout.round_up(np.array([one.total_length - 1]))[0] for one in alone[longest])
    with pytest.raises(SampleTooLong):
        planned(together, budget=needed - layout.multiple, sequences=layout)


def test_packed_rows_in_bfloat16_on_a_cpu_have_few_lengths():
    def divisor(dtype="bfloat16", device="cpu", budget=1024, sequence="packed", **parallel):
        config = PolicyConfig(
            sequence=sequence, tokens_per_micro_batch=budget, parallel=ParallelConfig(**parallel)
        )
        return row_divisor(config, dtype=dtype, device=device)

    assert divisor() == 32
    assert divisor(ranks=2, tensor=2) == 32
    assert divisor(ranks=3, context=3, budget=960) == 96
    # A sample of 1,000 tokens still fits.
    assert divisor(budget=1000) == 1
    assert divisor(dtype="float32") == divisor(device="cuda") == divisor(sequence="padded") == 1
