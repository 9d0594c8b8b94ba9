"""TokenBatches made by hand or at random, in float64, for tests of pure objective functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.objective import Objective, StepTargets, valid_samples
from megatron_async_rl.samples.columns import spans


def decided(objective: Objective, batch, precomputed, current=None) -> StepTargets:
    """Return the targets of one optimizer step on all valid samples of a RankBatch."""
    samples = valid_samples(batch)
    return objective.decide(samples, objective.prepare(samples, precomputed), current)


def part_of(targets: StepTargets, rows, dtype=torch.float64) -> TokenBatch:
    """Return the micro-batch of the samples `rows` of a step, all of one owner, numbered as by
    build_micro_batches."""
    chosen = np.array(rows, dtype=np.int64)
    starts, lengths = targets.samples.owned_starts[chosen], targets.samples.lengths[chosen]
    tokens, sequence = spans(starts, lengths), np.repeat(np.arange(len(chosen)), lengths)
    if not len(chosen):
        chosen, tokens, sequence = np.array([-1]), np.array([-1]), np.array([0])
        owner = 0
    else:
        owner = int(targets.samples.owner[chosen[0]])
    places = map(torch.from_numpy, (tokens, chosen, sequence))
    # A step has one dtype, but a test may request parts in several.
    return replace(targets).micro_batch(owner, *places, dtype=dtype)


def tokens(
    logp,
    *,
    prox=None,
    behavior=None,
    ref=None,
    advantages=None,
    mask=None,
    weights=None,
    sequence=None,
    rewards=None,
    group=None,
    dtype=torch.float64,
    **more,
) -> TokenBatch:
    """Return a batch from lists; `sequence` defaults to one sequence, `logp` carries the
    gradient."""
    logp = torch.as_tensor(logp, dtype=dtype)

    def fill(values, default):
        return (
            torch.full_like(logp, default)
            if values is None
            else torch.as_tensor(values, dtype=dtype)
        )

    def maybe(values, kind=dtype):
        return None if values is None else torch.as_tensor(values, dtype=kind)

    sequence = (
        torch.zeros(len(logp), dtype=torch.int64) if sequence is None else torch.as_tensor(sequence)
    )
    return TokenBatch(
        logp=logp.detach().requires_grad_(),
        logp_prox=fill(prox, 0.0),
        logp_behavior=fill(behavior, 0.0),
        advantages=fill(advantages, 1.0),
        mask=fill(mask, 1.0),
        weights=fill(weights, 1.0),
        sequence=sequence,
        sequences=int(sequence.max()) + 1 if len(logp) else 0,
        logp_ref=maybe(ref),
        rewards=maybe(rewards),
        group=maybe(group, torch.int64),
        **more,
    )


def rewarded(rewards, *, group=None, lengths=None, mask=None) -> TokenBatch:
    """Return a whole batch with these rewards, groups and lengths and trivial other values; one
    group and one token each by default."""
    lengths = torch.as_tensor(lengths if lengths is not None else [1] * len(rewards))
    sequence = torch.repeat_interleave(torch.arange(len(rewards)), lengths)
    group = group if group is not None else [0] * len(rewards)
    return tokens(
        torch.zeros(len(sequence)), mask=mask, sequence=sequence, rewards=rewards, group=group
    )


def random_tokens(
    sequences: int = 6, seed: int = 0, *, group_size: int = 3, longest: int = 8
) -> TokenBatch:
    """Return ragged sequences with every optional tensor, some masked tokens, and log-ratios of
    order 1."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (sequences,), generator=generator)
    sequence = torch.arange(sequences).repeat_interleave(lengths)

    def draw(count=None):
        return torch.randn(count or len(sequence), generator=generator, dtype=torch.float64)

    mask = (torch.rand(len(sequence), generator=generator) > 0.2).double()
    group = torch.arange(sequences) // group_size
    return tokens(
        draw(),
        prox=draw(),
        behavior=draw(),
        ref=draw(),
        advantages=draw(sequences)[sequence],
        mask=mask,
        weights=draw().abs(),
        sequence=sequence,
        rewards=draw(sequences),
        group=group,
        sum_p_squared=torch.rand(len(sequence), generator=generator, dtype=torch.float64),
        values=draw(),
        entropy=draw().abs(),
        lag=torch.randint(0, 4, (len(sequence),), generator=generator),
    )


def detached(batch: TokenBatch) -> TokenBatch:
    """Return the batch without gradients, like a whole batch."""
    return batch.replace(logp=batch.logp.detach())
