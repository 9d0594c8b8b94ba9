"""Log-probs and entropy of target tokens from hidden states, with the vocabulary divided over
tensor-parallel ranks.

For logits z = W h / temperature over the true vocabulary, L = log sum_v exp z_v, p_v = exp(z_v -
L):

    logp          = z_target - L
    entropy       = - sum_v p_v log p_v
    sum_p_squared = sum_v p_v^2, the probability that two draws agree

    d logp / d z_v    = [v = target] - p_v
    d entropy / d z_v = -p_v (log p_v + entropy)
    sum_p_squared has no gradient.

A rank r with a part of the vocabulary computes the same three quantities L_r, H_r and S_r under its
own softmax. With w_r = exp(L_r - L) they add up: entropy = sum_r w_r (H_r + L - L_r), and
sum_p_squared = sum_r w_r^2 S_r.

The matrix of the gradient is computed in the forward pass, where p is available: p_v - [v = target]
of the first tokens is kept for the backward pass, which then needs two GEMMs. For tokens that do
not fit, the backward pass computes the logits again, with a third GEMM.

Invariants:
- logits exist for `chunk` tokens at a time, [chunk, V/tp] float32, and no rank has another's. With
  the kept matrices they use at most the memory of LOGIT_COPIES such chunks: room for the tokens of
  two chunks in float32 models, of three in bfloat16 ones;
- logits are not rounded to the model's dtype before the softmax; the weight's gradient is summed in
  float32. No tensor of the weight's size is allocated if `weight_gradient` is given; otherwise each
  backward pass allocates one, and a copy in the weight's dtype for autograd;
- one collective in the forward pass (four numbers per token and rank) and one in the backward pass
  (the sum of the hidden states' gradient), whatever the number of chunks, and no wait for the
  device;
- padding rows of the vocabulary are in no sum and get no gradient;
- a chunk's GEMMs are those of `products.py`: sums of exact products, in the result's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.products import add_weight_gradient, logits_into

LOGIT_COPIES = 3
"""Chunks of float32 logits whose memory is used; the memory plan depends on it."""


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    group: Any = None,
    *,
    vocab_size: int,
    weight_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logp [N], entropy [N], sum_p_squared [N]), float32 (float64 for float64 hidden
    states), in nats; the first two with gradient.

    hidden: [N, H], equal on all ranks of `group`; its gradient is summed over them. weight: [V/tp,
    H], this rank's rows of the output layer, ranks in order of the vocabulary; its gradient is
    local. targets: [N] int64 in 0..vocab_size-1. group: the tensor-parallel group; None for an
    undivided vocabulary. vocab_size: true rows; those beyond are padding. weight_gradient: [V/tp,
    H], to which the backward pass adds the weight's gradient; autograd then gets none.
    """
    rows = weight.shape[0]
    ranks = 1 if group is None else dist.get_world_size(group)
    first = 0 if group is None else dist.get_rank(group) * rows
    precision = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    settings = _Settings(
        temperature=temperature,
        chunk=chunk,
        group=group,
        ranks=ranks,
        first=first,
        valid=max(0, min(rows, vocab_size - first)),
        precision=precision,
        kept=min(chunk * _kept_chunks(hidden.dtype, precision), len(hidden))
        if with_gradient
        else 0,
        weight_gradient=weight_gradient,
    )
    result: tuple[Tensor, Tensor, Tensor] = _VocabParallelLogprobs.apply(
        hidden, weight, targets, settings
    )
    return result


def _kept_chunks(dtype: torch.dtype, precision: torch.dtype) -> int:
    """Return the number of chunks to keep besides one of logits, and one of `dtype` if that
    differs."""
    work = precision.itemsize + (dtype.itemsize if dtype != precision else 0)
    return (LOGIT_COPIES * precision.itemsize - work) // dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Settings:
    """Settings of one call. first, valid: this rank's rows of the vocabulary. kept: number of
    tokens whose softmax is kept."""

    temperature: float
    chunk: int
    group: Any
    ranks: int
    first: int
    valid: int
    precision: torch.dtype
    kept: int
    weight_gradient: Tensor | None

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, 1] each: whether a target is in this rank's rows, and its row (clamped for
        others)."""
        rows = targets[:, None] - self.first
        return (rows >= 0) & (rows < self.valid), rows.clamp(0, self.valid - 1)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, valid, precision = hidden.shape[0], settings.valid, settings.precision
        # Per token, under this rank's own softmax: L_r, H_r, S_r, and the target's log-prob (0 on
        # other ranks). float64, because differences of L over ranks are small compared with L.
        local = torch.zeros(4, tokens, dtype=torch.float64, device=hidden.device)
        if valid == 0:
            # A rank with only padding rows has no share of the softmax.
            local[0] = float("-inf")
        kept = hidden.new_empty(settings.kept if valid else 0, valid)
        work = _Work(settings, hidden)
        for part in _chunks(0, tokens, settings):
            held = kept[part] if part.start < settings.kept else None
            # Kept chunks of the same dtype are computed in place, without work memory.
            logits = work.of(part, precision) if held is None or held.dtype != precision else held
            logits_into(logits, hidden[part], weight[:valid])
            here, row = settings.local_targets(targets[part])
            local_softmax(logits, settings.temperature, here, row, local[:, part], held)

        if settings.ranks == 1:
            # Separate tensors, because views of one would share autograd's metadata.
            log_total, entropy, sum_p_squared, logp = (
                row.to(precision, copy=True) for row in local
            )
        else:
            gathered = local.new_empty(settings.ranks, *local.shape)
            # The forward pass's only collective: four numbers per token and rank.
            dist.all_gather(list(gathered), local, group=settings.group)
            # Summed on every rank in the order of the ranks, so all have the same bits.
            totals, entropies, squares, target_logps = gathered.unbind(1)
            log_total = torch.logsumexp(totals, dim=0)
            away = totals - log_total
            shares = away.exp()
            # A rank with only padding rows has share 0 and an infinite distance.
            entropy = torch.where(shares > 0, shares * (entropies - away), 0.0).sum(0)
            sum_p_squared = (shares.square() * squares).sum(0)
            owner = targets // weight.shape[0]
            logp = target_logps.sum(0) + away.gather(0, owner[None])[0]
            entropy, sum_p_squared, logp = (
                one.to(precision) for one in (entropy, sum_p_squared, logp)
            )
        if kept.numel():
            some = slice(0, settings.kept)
            if settings.ranks > 1:
                # Convert from this rank's own softmax to the softmax over the whole vocabulary.
                kept.mul_((local[0] - log_total)[some, None].exp().to(precision))
            subtract_targets(kept, logp[some], *settings.local_targets(targets[some]))

        log_total = log_total.to(precision)
        ctx.save_for_backward(hidden, weight, targets, log_total, entropy, logp, kept)
        ctx.settings = settings
        # It only weights baselines, and is a constant of the loss.
        ctx.mark_non_differentiable(sum_p_squared)
        # None in the backward pass means that the entropy was not used, so kept matrices suffice.
        ctx.set_materialize_grads(False)
        return logp, entropy, sum_p_squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, grad_sum_p_squared: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors[:2]
        settings: _Settings = ctx.settings
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        total = settings.weight_gradient
        if wants_weight and total is None:
            # Chunks are summed in full precision, because bfloat16 would round each addition.
            total = torch.zeros(weight.shape, dtype=settings.precision, device=weight.device)

        rows = weight[: settings.valid]
        for part, matrix, factor in _logit_gradients(ctx, grad_logp, grad_entropy):
            if grad_hidden is not None:
                torch.mm(matrix, rows, out=grad_hidden[part])
                if factor is not None:
                    grad_hidden[part].mul_(factor)
            if wants_weight:
                assert total is not None
                inputs = hidden[part] if factor is None else (hidden[part] * factor).to(rows.dtype)
                add_weight_gradient(total[: settings.valid], matrix, inputs)

        if grad_hidden is not None and settings.ranks > 1:
            # Each rank has the part of its own rows; hidden states are equal on all ranks.
            dist.all_reduce(grad_hidden, group=settings.group)
        if total is None or settings.weight_gradient is not None:
            # The gradient is in Megatron's buffer already; if returned, it would be added a second
            # time.
            return grad_hidden, None, None, None
        return grad_hidden, total.to(weight.dtype), None, None


def _logit_gradients(
    ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield (tokens, matrix [n, V/tp] in the hidden states' dtype, factor [n, 1] or None): factor *
    matrix is the gradient with respect to these tokens' hidden weight^T. The matrix is valid until
    the next one."""
    hidden, weight, targets, log_total, entropy, logp, kept = ctx.saved_tensors
    settings: _Settings = ctx.settings
    tokens = hidden.shape[0] if settings.valid else 0
    if grad_logp is None:
        grad_logp = torch.zeros_like(log_total)
    scale = -grad_logp.to(settings.precision)[:, None] / settings.temperature
    if grad_entropy is None and len(kept):
        yield slice(0, len(kept)), kept, scale[: len(kept)]

    work = _Work(settings, hidden)
    for part in _chunks(len(kept) if grad_entropy is None else 0, tokens, settings):
        here, row = settings.local_targets(targets[part])
        if part.start < len(kept):
            source = kept[part]
        else:
            source = work.of(part, settings.precision)
            logits_into(source, hidden[part], weight[: settings.valid])
            for block in row_blocks(source):
                shift = log_total[part][block, None]
                # The third GEMM, for tokens that did not fit in the forward pass.
                source[block].div_(settings.temperature).sub_(shift).exp_()
            subtract_targets(source, logp[part], here, row)
        matrix = work.of(part, hidden.dtype)
        if grad_entropy is None:
            if matrix.dtype != source.dtype:
                # Rounded once to the operands' dtype, like the kept ones.
                matrix.copy_(source)
            yield part, matrix, scale[part]
            continue

        at_target = logp[part, None].exp()
        bonus = -grad_entropy[part, None].to(settings.precision) / settings.temperature
        for block in row_blocks(source):
            less = source[block].to(settings.precision)
            p = less.clone()
            set_targets(p, at_target[block], here[block], row[block])
            # p log p + p H = p (log p + H), with 0 log 0 = 0.
            surprise = torch.xlogy(p, p).addcmul_(p, entropy[part][block, None])
            less = less * scale[part][block]
            matrix[block] = less.addcmul_(surprise, bonus[block])
        yield part, matrix, None


class _Work:
    """Memory for one chunk [n, V/tp] of each dtype, allocated at its first use and reused."""

    def __init__(self, settings: _Settings, hidden: Tensor) -> None:
        self._shape = min(settings.chunk, len(hidden)), settings.valid
        self._hidden = hidden
        self._buffers: dict[torch.dtype, Tensor] = {}

    def of(self, part: slice, dtype: torch.dtype) -> Tensor:
        if dtype not in self._buffers:
            self._buffers[dtype] = self._hidden.new_empty(self._shape, dtype=dtype)
        return self._buffers[dtype][: part.stop - part.start]


def _chunks(start: int, stop: int, settings: _Settings) -> Iterator[slice]:
    for first in range(start, stop if settings.valid else start, settings.chunk):
        yield slice(first, min(first + settings.chunk, stop))


LOGIT_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits that are processed at a time, by device type: two blocks stay in the cache; on CUDA as
above, and little compared with a chunk of a large vocabulary."""


def local_softmax(
    logits: Tensor,
    temperature: float,
    here: Tensor,
    row: Tensor,
    local: Tensor,
    kept: Tensor | None,
) -> None:
    """Compute `local` [4, n] and, in place of the logits [n, V/tp] of temperature 1, their softmax.
    Copy the softmax to `kept` if that is other memory."""
    below = torch.empty_like(logits[next(row_blocks(logits))])
    for block in row_blocks(logits):
        z = logits[block]
        if temperature != 1.0:
            z.div_(temperature)
        largest, at_target = z.amax(1, keepdim=True), z.gather(1, row[block])[:, 0]
        # The largest logit is subtracted first, so that exp does not overflow.
        less = torch.sub(z, largest, out=below[: len(z)])
        p = torch.exp(less, out=z)
        total = p.sum(1, keepdim=True)
        p.div_(total)
        # L in float64, because it is large compared with differences of logits and of ranks.
        log_sum = total[:, 0].double().log()
        local[0, block] = largest[:, 0].double() + log_sum
        local[1, block] = log_sum - torch.linalg.vecdot(p, less)
        local[2, block] = torch.linalg.vecdot(p, p)
        local[3, block] = torch.where(here[block][:, 0], at_target - local[0, block], 0.0)
        if kept is not None and kept is not logits:
            kept[block] = p


def subtract_targets(p: Tensor, logp: Tensor, here: Tensor, row: Tensor) -> None:
    """Subtract 1 from p [n, V/tp] at the targets of this rank; exact if p is 1 within rounding."""
    set_targets(p, torch.expm1(logp)[:, None], here, row)


def set_targets(matrix: Tensor, values: Tensor, here: Tensor, row: Tensor) -> None:
    values = torch.where(here, values.to(matrix.dtype), matrix.gather(1, row))
    # Not `scatter_`, which for bfloat16 on the CPU copies the whole matrix.
    line = torch.arange(len(matrix), device=matrix.device)
    matrix.index_put_((line, row[:, 0]), values[:, 0])


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield rows of a matrix, as many as are processed at a time."""
    size = max(1, LOGIT_BLOCK[matrix.device.type] // matrix.shape[1])
    for first in range(0, len(matrix), size):
        yield slice(first, min(first + size, len(matrix)))
