import numpy as np
import pytest
import torch

from megatron_async_rl.policy.microbatch import SampleTooLong, build_micro_batch, plan_micro_batches
from tests.train_batches import ragged_batch

CPU = torch.device("cpu")
SAMPLES = list(ragged_batch(groups=20, group_size=4).samples())


def padded_tokens(samples, rows, multiple=1):
    batch = build_micro_batch(samples, rows, CPU, multiple)
    return batch.tokens.numel()


@pytest.mark.parametrize("data_parallel", [1, 2, 3, 8])
@pytest.mark.parametrize(("budget", "multiple"), [(32, 1), (100, 4), (100000, 2)])
def test_every_sample_is_in_exactly_one_micro_batch_and_no_budget_is_exceeded(data_parallel, budget, multiple):
    plan = plan_micro_batches(SAMPLES, data_parallel=data_parallel, budget=budget, multiple=multiple)
    assert sorted(i for rank in plan.ranks for rows in rank for i in rows) == list(range(len(SAMPLES)))
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    sizes = [padded_tokens(SAMPLES, rows, multiple) for rank in plan.ranks for rows in rank]
    assert max(sizes) <= budget
    real = sum(sample.total_length - 1 for sample in SAMPLES)
    assert plan.padding_share == pytest.approx(1 - real / sum(sizes))


def test_the_number_of_micro_batches_fills_up_to_whole_rounds_of_the_pipeline():
    for data_parallel in (1, 3):
        plain = plan_micro_batches(SAMPLES, data_parallel=data_parallel, budget=64)
        rounds = plan_micro_batches(SAMPLES, data_parallel=data_parallel, budget=64, in_groups_of=4)
        assert rounds.micro_batches == -(-plain.micro_batches // 4) * 4
        for mine, filled in zip(plain.ranks, rounds.ranks, strict=True):
            assert filled == mine + ((),) * (rounds.micro_batches - plain.micro_batches)


def test_ranks_carry_nearly_the_same_tokens():
    plan = plan_micro_batches(SAMPLES, data_parallel=4, budget=64)
    loads = [sum(SAMPLES[i].total_length - 1 for rows in rank for i in rows) for rank in plan.ranks]
    assert max(loads) - min(loads) <= max(sample.total_length for sample in SAMPLES)


def test_bucketing_by_length_pads_less_than_the_given_order():
    plan = plan_micro_batches(SAMPLES, data_parallel=1, budget=128)
    fed = [sample.total_length - 1 for sample in SAMPLES]
    unsorted = sum(max(fed[i : i + 5]) * len(fed[i : i + 5]) for i in range(0, len(fed), 5))
    assert plan.padding_share < 0.5 * (1 - sum(fed) / unsorted)


def test_fewer_samples_than_ranks_leave_ranks_with_masked_work_only():
    plan = plan_micro_batches(SAMPLES[:1], data_parallel=3, budget=64)
    assert plan.ranks == (((0,),), ((),), ((),))
    filler = build_micro_batch(SAMPLES[:1], (), CPU)
    assert filler.mask.sum() == 0
    assert filler.samples == ()
    assert len(filler.rows) == 1


def test_no_sample_at_all_is_one_masked_micro_batch():
    assert plan_micro_batches([], data_parallel=2, budget=64).ranks == (((),), ((),))


def test_a_sample_longer_than_the_budget_is_named_with_the_key_to_raise():
    longest = max(SAMPLES, key=lambda sample: sample.total_length)
    budget = longest.total_length - 1
    with pytest.raises(SampleTooLong, match=rf"{longest.id}.* {budget + 1} tokens.*policy.tokens_per_micro_batch = {budget}"):
        plan_micro_batches([longest], data_parallel=1, budget=budget)


def test_each_response_token_is_predicted_from_the_position_before_it():
    plan = plan_micro_batches(SAMPLES, data_parallel=1, budget=128, multiple=2)
    for rows in plan.ranks[0]:
        batch = build_micro_batch(SAMPLES, rows, CPU, 2)
        fed = batch.tokens.flatten()[batch.rows].numpy()
        for row, index in enumerate(rows):
            sample, mine = SAMPLES[index], (batch.sequence == row).numpy()
            np.testing.assert_array_equal(batch.targets.numpy()[mine], sample.response_ids)
            np.testing.assert_array_equal(fed[mine], [sample.prompt.token_ids[-1], *sample.response_ids[:-1]])
            np.testing.assert_array_equal(batch.mask.numpy()[mine], sample.loss_mask)
            np.testing.assert_array_equal(batch.versions.numpy()[mine], sample.versions)
            np.testing.assert_array_equal(batch.behavior_logprobs.numpy()[mine], sample.behavior_logprobs)
            np.testing.assert_array_equal(batch.tokens[row, : len(sample.prompt.token_ids)], sample.prompt.token_ids)
        assert batch.tokens.shape[1] % 2 == 0
        assert torch.equal(batch.position_ids[0], torch.arange(batch.tokens.shape[1]))
