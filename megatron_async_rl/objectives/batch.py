"""Response tokens of a whole optimizer step or of one micro-batch, flat, with the log-probs of the
three policies.

Invariants:
- every [N] tensor has one entry per response token. The tokens of a sequence form a run, and the
  runs have the order of the sequences, so there is no padding;
- sequence sums go through `sequence`, so any packing of the same tokens gives the same sums; they
  add up runs in a fixed order, because `index_add` on CUDA has none and its results would differ
  from run to run;
- a sequence is never split over two TokenBatches; a group may be split over micro-batches, never
  over whole batches;
- only `logp` (and `entropy`, `values`, if a loss term needs them) carries a gradient, and in a
  whole batch nothing does;
- a tensor that was not requested is None: `require` names the missing tensor instead of computing
  without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios inside a loss are clamped to this magnitude: exp(20) is far outside every clip range
and still finite."""
PER_SEQUENCE = ("rewards", "score_norms", "group")
"""Fields of a TokenBatch with one number per sequence. Micro-batches have no `group`."""


@dataclass(frozen=True, eq=False)
class BatchDecision:
    """Decisions of a loss that depend on the whole optimizer-step batch, made before any of its
    micro-batches trains.

    tokens: [N] each; sequences: [S] each; scalars: numbers, under the keys of the metrics log
    (`objective/...`). A micro-batch holds its own tokens' and sequences' entries.
    """

    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """N response tokens of S sequences.

    logp: [N] float, with gradient: log-probs (nats) under the policy being trained, after
        temperature.
    logp_prox: [N] float, detached: under the proximal policy, the denominator of the loss's ratio.
    logp_behavior: [N] float, detached: as reported by the engine that sampled the token.
    advantages: [N] float.
    mask: [N] float: 1 = trained on, 0 = ignored (environment tokens); denominators count it.
    weights: [N] float: factor on the token's loss, the sample's own weight times all corrections;
        0 = rejected; no denominator contains it.
    sequence: [N] int64, ascending: the token's sequence, 0..S-1.
    decided: the loss's decisions for the whole batch.

    Present if the configuration needs them:

    logp_ref: [N] float, detached: under the reference policy.
    sum_p_squared: [N] float, detached: sum over the vocabulary of pi(v)^2 at the token's position.
    values: [N] float: the value head's estimate at the token's position.
    values_old: [N] float, detached: the same before the step, in micro-batches (in a whole batch
        `values` has them).
    returns: [N] float: targets of `values`.
    rewards: [S] float: after shaping and KL.
    token_rewards: [N] float: the same spread over tokens, sums to `rewards`.
    step_rewards: [N] float: as given by the task, including environment tokens.
    score_norms: [S] float, detached: the norm of each sequence's score gradient, if it was
        measured.
    lag: [N] int64: trained version minus the version that sampled the token.
    group: [S] int64 in 0..G-1, only in whole batches: statistics of a part of a group would be
        wrong.
    """

    logp: Tensor
    logp_prox: Tensor
    logp_behavior: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sequence: Tensor
    sequences: int
    decided: BatchDecision = BatchDecision()
    logp_ref: Tensor | None = None
    sum_p_squared: Tensor | None = None
    values: Tensor | None = None
    values_old: Tensor | None = None
    returns: Tensor | None = None
    entropy: Tensor | None = None
    rewards: Tensor | None = None
    token_rewards: Tensor | None = None
    step_rewards: Tensor | None = None
    score_norms: Tensor | None = None
    lag: Tensor | None = None
    group: Tensor | None = None

    def require(self, name: str) -> Tensor:
        """Return the optional tensor `name`. Raises ValueError if it is missing."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"this token batch has no {name}: no configured method needs it, or it is a"
                " micro-batch"
            )
        assert isinstance(value, Tensor)
        return value

    def replace(self, **changes: Tensor | BatchDecision) -> TokenBatch:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the tensors that this batch has, without those of `decided`."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                yield each.name, value

    def select(self, sequences: Tensor) -> TokenBatch:
        """Return these sequences, [K] int64, ascending and in whole groups, without decisions,
        because a decision depends on all sequences of an optimizer step."""
        if len(sequences) == self.sequences:
            return self
        # Whole sequences are selected, so no run of tokens is cut.
        starts, lengths = self._starts[sequences], self._starts.diff()[sequences]
        sequence = torch.arange(len(sequences)).repeat_interleave(lengths)
        first = lengths.cumsum(0) - lengths
        tokens = torch.arange(len(sequence)) + (starts - first)[sequence]
        taken: dict[str, Any] = {
            name: value[sequences if name in PER_SEQUENCE else tokens]
            for name, value in self.tensors()
        }
        taken |= {"sequence": sequence, "sequences": len(sequences)}
        return TokenBatch(**taken)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[N] -> [S]: sum of `values` over each sequence's trained tokens, differentiable."""
        # Selected, not multiplied by 0, because tokens that are not trained on may have any value,
        # including inf and nan.
        kept = torch.where(self.mask > 0, values * self.mask, 0.0)
        # Unsafe: skips a check of the offsets, for which the host would wait for the device.
        return torch.segment_reduce(kept, "sum", offsets=self._starts, unsafe=True)

    @cached_property
    def _starts(self) -> Tensor:
        """[S + 1]: index of each sequence's first token, and the number of tokens at the end."""
        # Sequences are runs of tokens, so their starts are found by bisection.
        numbers = torch.arange(self.sequences + 1, device=self.sequence.device)
        return torch.searchsorted(self.sequence, numbers)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N] -> [S]: mean over each sequence's trained tokens; 0 for a sequence without any."""
        return self.sequence_sum(values) / self.lengths().clamp(min=1)

    def lengths(self) -> Tensor:
        """[S]: trained tokens of each sequence, in the mask's dtype."""
        return self.sequence_sum(torch.ones_like(self.mask))

    def kept(self) -> Tensor:
        """[N]: 1 on trained tokens that no correction so far has rejected, else 0."""
        return self.mask * (self.weights != 0)

    def per_token(self, values: Tensor) -> Tensor:
        """[S] -> [N]: each sequence's value on its tokens, 0 where the mask is 0."""
        return torch.where(self.mask > 0, values[self.sequence], 0.0)

    def group_sum(self, values: Tensor) -> Tensor:
        """[S] -> [G]: sum over each group's sequences. Whole batches only."""
        group = self.require("group")
        return values.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(
            0, group, values
        )

    def group_mean(self, values: Tensor) -> Tensor:
        """[S] -> [S]: the mean of the sequence's own group. Whole batches only."""
        group = self.require("group")
        return (self.group_sum(values) / self.group_sum(torch.ones_like(values)).clamp(min=1))[
            group
        ]

    def group_count(self) -> Tensor:
        """[S] int64: sequences in the sequence's own group. Whole batches only."""
        group = self.require("group")
        return torch.bincount(group)[group]

    def group_centred(self, values: Tensor) -> Tensor:
        """[S] -> [S]: `values` minus their group's mean; exactly 0 where a group's values are all
        equal."""
        group = self.require("group")
        if not len(group):
            return values
        lowest, highest = (
            torch.zeros(int(group.max()) + 1, dtype=values.dtype).scatter_reduce(
                0, group, values, kind, include_self=False
            )
            for kind in ("amin", "amax")
        )
        # A mean of equal values may differ from them by a rounding error, which normalisation would
        # amplify to +-1.
        return torch.where((lowest == highest)[group], 0.0, values - self.group_mean(values))

    def log_ratio(self) -> Tensor:
        """[N]: log r = log(pi / pi_prox), clamped to +-LOG_RATIO_BOUND."""
        # exp overflows float32 from 88 on, and gradients are useless long before that.
        return torch.clamp(self.logp - self.logp_prox, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def log_weight(self) -> Tensor:
        """[N]: log w = log(pi / mu), clamped to +-LOG_RATIO_BOUND."""
        return torch.clamp(self.logp - self.logp_behavior, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """Result of a token-level loss.

    loss: [N] float with gradient, before mask, weights and aggregation.
    clipped: [N] bool: tokens whose gradient the loss has set to zero.
    """

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True, eq=False)
class SequenceLoss:
    """Result of a sequence-level loss, which is averaged over the sequences of the optimizer-step
    batch.

    loss: [S] float with gradient, before weights; 0 for a sequence without trained tokens.
    clipped: [N] bool: tokens whose gradient the loss has set to zero.
    """

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True, eq=False)
class Advantages:
    """Result of an advantage estimator, for the whole batch.

    tokens: [N] float64, 0 where the mask is 0. returns: [N] float64, targets of a value head.
    baselines: [S] float64, if the estimator has one per sequence (for inspection).
    """

    tokens: Tensor
    returns: Tensor | None = None
    baselines: Tensor | None = None


def on_device[Name: Hashable](
    tensors: Mapping[Name, Tensor], device: torch.device
) -> dict[Name, Tensor]:
    """Return copies of host tensors on `device`, by one asynchronous upload per dtype."""
    found: dict[Name, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        alike = {name: each for name, each in tensors.items() if each.dtype == dtype}
        flat = torch.cat([each.reshape(-1) for each in alike.values()])
        if device.type == "cuda":
            # An upload is asynchronous only from page-locked memory.
            flat = flat.pin_memory()
        parts = flat.to(device, non_blocking=True).split([each.numel() for each in alike.values()])
        for (name, each), part in zip(alike.items(), parts, strict=True):
            found[name] = part.view(each.shape)
    return found


def weighted_means(values: Tensor, weights: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """b_c = sum of w v / sum of w over the entries of cell c, in two parts: -> (lowest, above), [C]
    each; b = lowest + above.

    values, weights: [n]; cell: [n] int64, 0..C-1. `v - lowest[cell] - above[cell]` is exactly 0 if
    all values of a cell are equal, unlike v - b. If the weights sum to 0, b is the plain mean.
    """
    cells = int(cell.max()) + 1 if len(cell) else 0
    empty = values.new_zeros(cells)
    lowest = empty.scatter_reduce(0, cell, values, "amin", include_self=False)
    # Relative to the cell's minimum, so that equal values become exactly 0.
    over = values - lowest[cell]
    total = empty.index_add(0, cell, weights)
    weighted = empty.index_add(0, cell, weights * over)
    plain = empty.index_add(0, cell, over) / empty.index_add(0, cell, torch.ones_like(over)).clamp(
        min=1
    )
    return lowest, torch.where(total == 0, plain, weighted / torch.where(total == 0, 1.0, total))
