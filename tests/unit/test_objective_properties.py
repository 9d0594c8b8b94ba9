"""Properties of every registered loss, advantage and correction, whatever its formula."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.config.losses import ReinforceLoss
from megatron_async_rl.objectives.batch import BatchDecision
from megatron_async_rl.objectives.objective import Denominators, aggregate
from megatron_async_rl.objectives.terms import token_rewards
from tests.cases import looped
from tests.gpu.host_syncs import unordered_sums
from tests.method_settings import ADVANTAGES, CORRECTIONS, LOSSES, every, label, models
from tests.token_batches import detached, random_tokens

few = settings(max_examples=5, derandomize=True, deadline=None)
seeds = st.integers(0, 2**16)
each_loss = looped("loss", every("loss"), ids=label)
each_advantage = looped("advantage", every("advantage"), ids=label)
each_correction = looped("correction", every("corrections"), ids=label)
TOKENS = ("logp", "logp_prox", "logp_behavior", "logp_ref")
PER_SEQUENCE = ("rewards", "group", "score_norms")


def whole_batch(seed, *, sequences=6, group_size=3, longest=5, spread=0.3):
    """A whole batch as `prepare` passes it to a method. The four policies differ by log-ratios
    of order `spread`."""
    batch = detached(random_tokens(sequences, seed, group_size=group_size, longest=longest))
    base = -batch.logp.abs() - 0.5
    norms = 0.1 + torch.rand(
        sequences, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    batch = batch.replace(
        **{name: base + spread * getattr(batch, name) for name in TOKENS}, score_norms=norms
    )
    return with_token_rewards(batch)


def with_token_rewards(batch):
    return batch.replace(token_rewards=token_rewards(batch, torch.zeros_like(batch.mask)))


def columns(batch):
    """(name, tensor) of what has one entry per token."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name not in PER_SEQUENCE:
            yield field.name, value


def part_of(batch, chosen, order=None):
    """The micro-batch of the sequences `chosen`, in that order, with the tokens of `order` (indices
    into it) where given."""
    index = torch.cat([torch.nonzero(batch.sequence == s).flatten() for s in chosen])
    index = index if order is None else index[order]
    renumbered = torch.zeros(batch.sequences, dtype=torch.int64)
    renumbered[torch.tensor(chosen)] = torch.arange(len(chosen))
    taken = {name: value[index] for name, value in columns(batch)}
    taken |= {
        name: getattr(batch, name)[chosen]
        for name in PER_SEQUENCE
        if getattr(batch, name, None) is not None
    }
    decided = BatchDecision(
        {name: value[index] for name, value in batch.decided.tokens.items()},
        {name: value[chosen] for name, value in batch.decided.sequences.items()},
        batch.decided.scalars,
    )
    taken["sequence"] = renumbered[batch.sequence[index]]
    return dataclasses.replace(batch, **taken, sequences=len(chosen), decided=decided), index


def decided(batch, loss):
    decide = LOSSES[loss.name].decide
    return batch.replace(decided=decide(batch, loss)) if decide is not None else batch


def value_of(batch, loss, denominators, aggregation=None):
    """The batch's part of the loss; differentiable in `batch.logp`."""
    losses = LOSSES[loss.name].function(dataclasses.replace(batch, group=None), loss)
    return aggregate(losses, batch, aggregation or loss.default_aggregation, denominators).sum()


def value_and_gradient(batch, loss, denominators):
    logp = batch.logp.clone().requires_grad_()
    value = value_of(batch.replace(logp=logp), loss, denominators)
    (gradient,) = torch.autograd.grad(value, logp)
    return value.detach(), gradient


def test_every_registered_method_can_be_configured_and_the_other_way_round():
    for section, registry in (
        ("loss", LOSSES),
        ("advantage", ADVANTAGES),
        ("corrections", CORRECTIONS),
    ):
        assert {model.model_fields["name"].default for model in models(section)} == set(registry)


# (a) On-policy, every ratio loss is REINFORCE.


def on_policy(seed):
    batch = whole_batch(seed)
    batch = batch.replace(logp_prox=batch.logp, logp_behavior=batch.logp, logp_ref=batch.logp)
    # As advantages of whole responses are: one per sequence, and the reward itself, so that losses
    # of either kind compare.
    return batch.replace(
        advantages=batch.per_token(batch.require("rewards")), weights=torch.ones_like(batch.weights)
    )


def credit(loss, batch):
    """[N]: what the gradient of -sum(credit * logp) has to be, before aggregation; the exceptions
    to credit = A, in full.

    sft: every response has credit 1. trajectory_balance: the residual is -(R - mean R) / beta, and
    a square's slope doubles it. kimi: 2 tau (R - mean R). oapl: 2 beta_policy (R - V), V the soft
    value beta_value log mean exp(R / beta_value) of the group.
    """
    rewards = batch.require("rewards")
    if loss.name == "sft":
        return torch.ones_like(batch.mask)
    if loss.name == "trajectory_balance":
        return batch.per_token(2 / loss.beta * batch.group_centred(rewards))
    if loss.name == "kimi":
        return batch.per_token(2 * loss.tau * batch.group_centred(rewards))
    if loss.name == "oapl":
        value = loss.beta_value * batch.group_mean((rewards / loss.beta_value).exp()).log()
        return batch.per_token(2 * loss.beta_policy * (rewards - value))
    return batch.advantages


@given(seed=seeds)
@few
@each_loss
def test_with_all_policies_equal_the_gradient_is_that_of_reinforce(loss, seed):
    batch = decided(on_policy(seed), loss)
    denominators = Denominators.of(batch)
    _, found = value_and_gradient(batch, loss, denominators)
    aggregation = {
        "seq-mean": "seq-mean-token-mean" if loss.name == "gmpo" else "seq-mean-token-sum"
    }.get(loss.default_aggregation, loss.default_aggregation)
    plain = batch.replace(advantages=credit(loss, batch))
    logp = batch.logp.clone().requires_grad_()
    value = value_of(plain.replace(logp=logp), ReinforceLoss(), denominators, aggregation)
    (expected,) = torch.autograd.grad(value, logp)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


# (b) The gradient is the derivative of what is written, with what is detached held still.


class Held:
    """Tensor.detach that answers, at any point, what it answered at the base point, call by
    call."""

    def __init__(self):
        self.values, self.next, self.recording = [], 0, True
        self.original = torch.Tensor.detach

    def detach(self, tensor):
        if self.recording:
            self.values.append(self.original(tensor).clone())
        else:
            self.next += 1
        return self.values[self.next - 1] if not self.recording else self.values[-1]

    def rewind(self):
        self.recording, self.next = False, 0


def with_held_detach(function, logp):
    """function(logp), then function(other logp) with every detached value as it was the first
    time."""
    held = Held()
    with mock.patch.object(torch.Tensor, "detach", lambda tensor: held.detach(tensor)):
        value = function(logp)

    def again(other):
        held.rewind()
        with mock.patch.object(torch.Tensor, "detach", lambda tensor: held.detach(tensor)):
            found = function(other)
        assert held.next == len(held.values)
        return float(held.original(found))

    return value, again


@given(seed=seeds)
@few
@each_loss
def test_the_gradient_is_the_finite_difference_with_detached_parts_held_still(loss, seed):
    batch = decided(whole_batch(seed, sequences=4, group_size=2, longest=3), loss)
    denominators, step = Denominators.of(batch), 1e-6
    logp = batch.logp.clone().requires_grad_()
    value, again = with_held_detach(
        lambda x: value_of(batch.replace(logp=x), loss, denominators), logp
    )
    (gradient,) = torch.autograd.grad(value, logp)
    for i in range(len(logp)):
        shift = torch.zeros_like(batch.logp)
        shift[i] = step
        slope = (again(batch.logp + shift) - again(batch.logp - shift)) / (2 * step)
        assert float(gradient[i]) == pytest.approx(slope, rel=1e-5, abs=1e-6)


# (c) Neither the order of sequences nor the cut into micro-batches matters.


def shuffled(count, generator):
    return torch.randperm(count, generator=generator)


def permuted(batch, generator):
    """The same whole batch with its sequences, each in one piece, and its groups in another order:
    (batch, index of tokens)."""
    order = shuffled(batch.sequences, generator)
    moved, index = part_of(batch, order.tolist())
    names = shuffled(int(batch.group.max()) + 1, generator)
    return moved.replace(group=names[batch.group[order]]), index


@given(seed=seeds, cuts=st.integers(1, 6))
@few
@each_loss
def test_no_cut_and_no_order_of_a_batch_changes_a_loss_or_its_gradient(loss, seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    whole = whole_batch(seed)
    denominators = Denominators.of(whole)
    value, gradient = value_and_gradient(decided(whole, loss), loss, denominators)

    moved, index = permuted(whole, generator)
    moved = decided(moved, loss)
    total, summed = torch.zeros_like(value), torch.zeros_like(gradient)
    owner = torch.randint(cuts, (whole.sequences,), generator=generator)
    for cut in range(cuts):
        chosen = torch.nonzero(owner == cut).flatten().tolist()
        if chosen:
            part, tokens = part_of(moved, chosen)
            found, slope = value_and_gradient(part, loss, denominators)
            total += found
            summed[index[tokens]] += slope
    torch.testing.assert_close(total, value, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(summed, gradient, atol=1e-9, rtol=1e-9)
    assert torch.all(gradient[whole.mask == 0] == 0)


@given(seed=seeds)
@few
@each_advantage
def test_the_order_of_sequences_does_not_change_an_advantage(advantage, seed):
    whole = whole_batch(seed)
    moved, index = permuted(whole, torch.Generator().manual_seed(seed))
    function = ADVANTAGES[advantage.name].function
    expected, found = function(whole, advantage), function(with_token_rewards(moved), advantage)
    torch.testing.assert_close(found.tokens, expected.tokens[index], atol=1e-9, rtol=1e-9)
    assert torch.all(expected.tokens[whole.mask == 0] == 0)
    if expected.returns is not None:
        torch.testing.assert_close(found.returns, expected.returns[index], atol=1e-9, rtol=1e-9)


@given(seed=seeds, cuts=st.integers(1, 6))
@few
@each_correction
def test_no_cut_and_no_order_of_a_batch_changes_a_correction(correction, seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    whole, method = whole_batch(seed), CORRECTIONS[correction.name]
    expected = method.function(whole, correction)
    moved, index = permuted(whole, generator)
    assert not expected.requires_grad
    if method.whole(correction):
        torch.testing.assert_close(
            method.function(moved, correction), expected[index], atol=1e-9, rtol=1e-9
        )
        return
    owner = torch.randint(cuts, (whole.sequences,), generator=generator)
    for chosen in (torch.nonzero(owner == cut).flatten().tolist() for cut in range(cuts)):
        if chosen:
            part, tokens = part_of(moved, chosen)
            found = method.function(dataclasses.replace(part, group=None), correction)
            torch.testing.assert_close(found, expected[index[tokens]], atol=1e-9, rtol=1e-9)


@given(seed=seeds)
@few
@each_correction
def test_a_correction_does_nothing_where_trainer_and_engine_agree(correction, seed):
    batch = whole_batch(seed)
    batch = batch.replace(
        logp_prox=batch.logp_behavior,
        logp=batch.logp_behavior,
        weights=torch.ones_like(batch.weights),
    )
    factor = CORRECTIONS[correction.name].function(batch, correction)
    assert torch.all(factor[batch.mask > 0] == 1.0)


# On CUDA the same numbers give the same bits.


@each_loss
def test_a_loss_and_its_gradient_leave_the_order_of_no_sum_to_the_device(loss):
    batch = in_single(decided(whole_batch(0), loss))
    with unordered_sums() as found:
        value_and_gradient(batch, loss, Denominators.of(batch))
    assert found == []


@each_correction
def test_a_correction_leaves_the_order_of_no_sum_to_the_device(correction):
    method = CORRECTIONS[correction.name]
    with unordered_sums() as found:
        if not method.whole(correction):
            method.function(in_single(whole_batch(0)), correction)
    assert found == []


# (d) Extremes.


def extreme(seed, case, dtype=torch.float64):
    """A whole batch with something unusual in it."""
    batch = whole_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    if case == "huge log-ratios":
        far = torch.tensor([-700.0, 0.0, 0.0])
        draws = {
            name: far[torch.randint(3, batch.logp.shape, generator=generator)].double()
            for name in TOKENS
        }
        batch = batch.replace(**draws)
    if case == "fully masked sequence":
        batch = batch.replace(mask=torch.where(batch.sequence == 1, 0.0, batch.mask))
    if case == "nothing trained on":
        batch = batch.replace(mask=torch.zeros_like(batch.mask))
    if case == "groups of one":
        batch = batch.replace(group=torch.arange(batch.sequences))
    if case == "equal rewards":
        batch = batch.replace(rewards=torch.full_like(batch.rewards, 0.1))
    if case == "single token":
        batch, _ = part_of(batch, [0], torch.zeros(1, dtype=torch.int64))
        batch = batch.replace(
            mask=torch.ones(1, dtype=torch.float64), group=torch.zeros(1, dtype=torch.int64)
        )
    return with_token_rewards(batch)


EXTREMES = (
    "huge log-ratios",
    "fully masked sequence",
    "nothing trained on",
    "groups of one",
    "equal rewards",
    "single token",
)


def in_single(batch):
    """A micro-batch's dtypes: float32 where the whole batch is float64."""

    def cast(values):
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in values.items()
        }

    tensors = {
        f.name: v
        for f in dataclasses.fields(batch)
        if isinstance(v := getattr(batch, f.name), torch.Tensor)
    }
    numbers = BatchDecision(
        cast(batch.decided.tokens), cast(batch.decided.sequences), batch.decided.scalars
    )
    return dataclasses.replace(batch, **(cast(tensors) | {"group": None, "decided": numbers}))


@looped("case", EXTREMES)
@each_loss
def test_an_extreme_batch_has_a_finite_loss_and_gradient(loss, case):
    for seed in range(4):
        batch = decided(extreme(seed, case), loss)
        denominators = Denominators.of(batch)
        for part in (batch, in_single(batch)):
            value, gradient = value_and_gradient(part, loss, denominators)
            assert torch.isfinite(value)
            assert torch.isfinite(gradient).all()
            assert torch.all(gradient[batch.mask == 0] == 0)
            assert value == 0.0 or case != "nothing trained on"


@looped("case", EXTREMES)
@each_advantage
def test_an_extreme_batch_has_finite_advantages(advantage, case):
    for seed in range(4):
        batch = extreme(seed, case)
        found = ADVANTAGES[advantage.name].function(batch, advantage)
        assert torch.isfinite(found.tokens).all()
        assert torch.all(found.tokens[batch.mask == 0] == 0)
        if found.returns is not None:
            assert torch.isfinite(found.returns).all()


@looped("case", EXTREMES)
@each_correction
def test_an_extreme_batch_has_finite_corrections(correction, case):
    method = CORRECTIONS[correction.name]
    for seed in range(4):
        batch = extreme(seed, case)
        for part in (batch,) if method.whole(correction) else (batch, in_single(batch)):
            factor = method.function(part, correction)
            assert torch.isfinite(factor).all()
            assert torch.all(factor >= 0)


@given(seed=seeds)
@few
@each_loss
def test_a_group_without_a_trained_token_changes_nothing(loss, seed):
    batch = whole_batch(seed)
    last = batch.group[batch.sequence] == batch.group.max()
    silent = batch.replace(mask=torch.where(last, 0.0, batch.mask))
    without, index = part_of(
        silent, torch.nonzero(batch.group < batch.group.max()).flatten().tolist()
    )
    value, gradient = value_and_gradient(decided(silent, loss), loss, Denominators.of(silent))
    expected, slope = value_and_gradient(decided(without, loss), loss, Denominators.of(without))
    torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient[index], slope, atol=1e-12, rtol=1e-12)


def compares_fully(advantage):
    """otb's zero_tail gives the reward itself, uncompared, to tokens beyond the end of all other
    responses."""
    return advantage.compares_group and not getattr(advantage, "zero_tail", False)


each_comparing_advantage = looped(
    "advantage", [a for a in every("advantage") if compares_fully(a)], ids=label
)


@given(seed=seeds, reward=st.sampled_from([0.1, -1 / 3, 7.7e5]))
@few
@each_comparing_advantage
def test_equal_rewards_and_groups_of_one_teach_nothing_to_an_estimator_that_compares(
    advantage, seed, reward
):
    batch, function = whole_batch(seed), ADVANTAGES[advantage.name].function
    equal = with_token_rewards(batch.replace(rewards=torch.full_like(batch.rewards, reward)))
    assert torch.all(function(equal, advantage).tokens == 0.0)
    alone = function(batch.replace(group=torch.arange(batch.sequences)), advantage).tokens
    assert torch.all(alone == 0.0)


@given(seed=seeds, shift=st.floats(-5.0, 5.0))
@few
@each_comparing_advantage
def test_a_constant_added_to_all_rewards_of_a_group_is_without_effect(advantage, seed, shift):
    batch, function = whole_batch(seed), ADVANTAGES[advantage.name].function
    moved = with_token_rewards(batch.replace(rewards=batch.rewards + shift * (batch.group == 0)))
    torch.testing.assert_close(
        function(moved, advantage).tokens, function(batch, advantage).tokens, atol=1e-9, rtol=1e-9
    )
