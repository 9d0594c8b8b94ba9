"""Log-probs and entropy of target tokens from hidden states, with the vocabulary cut over
tensor-parallel ranks.

For logits z = W h / temperature over the true vocabulary, L = log sum_v exp z_v:

    logp          = z_target - L
    entropy       = L - sum_v exp(z_v - L) z_v
    sum_p_squared = exp(log sum_v exp(2 z_v) - 2 L), the probability that two draws agree

    d logp / d z_v    = [v = target] - exp(z_v - L)
    d entropy / d z_v = -exp(z_v - L) (z_v - L + entropy)
    sum_p_squared has no gradient.

Invariants:
- logits exist for `chunk` tokens and this rank's rows at a time, [chunk, V/tp] float32, forward and
  backward; backward makes them again. No rank sees another's logits;
- one collective forward (four numbers per token and rank) and one backward (the sum of the hidden
  states' gradient), however many chunks there are;
- logits are float32 from the product of hidden states and weight on, whatever their own dtype;
- padding rows of the vocabulary enter no sum and get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    group: Any = None,
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp [N], entropy [N], sum_p_squared [N]), float32 (float64 for float64 hidden states), in
    nats; the first two with gradient.

    hidden: [N, H], equal on all ranks of `group`; its gradient is summed over them. weight: [V/tp,
    H], this rank's rows of the output layer, ranks in order of the vocabulary; its gradient is
    local. targets: [N] int64 in 0..vocab_size-1. group: the tensor-parallel group; None for an
    undivided vocabulary. vocab_size: true rows; those beyond are padding.
    """
    result: tuple[Tensor, Tensor, Tensor] = _VocabParallelLogprobs.apply(
        hidden, weight, targets, temperature, chunk, group, vocab_size
    )
    return result


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        group: Any,
        vocab_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ranks = 1 if group is None else dist.get_world_size(group)
        rows = weight.shape[0]
        first = 0 if group is None else dist.get_rank(group) * rows
        valid = max(0, min(rows, vocab_size - first))
        # Per token: this rank's log-sum-exp, the mean of its logits under its own softmax, the
        # target's logit (0 elsewhere), and the log-sum-exp of twice the logits.
        precision = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        local = torch.zeros(4, hidden.shape[0], dtype=precision, device=hidden.device)
        if valid == 0:
            local[0] = local[3] = float("-inf")
        for start in range(0, hidden.shape[0] if valid else 0, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight[:valid], temperature, precision)
            total = torch.logsumexp(logits, dim=1)
            here, rowwise = _local_targets(targets[part], first, valid)
            local[0, part] = total
            local[2, part] = torch.where(here, logits.gather(1, rowwise[:, None])[:, 0], 0.0)
            probabilities = torch.exp(logits - total[:, None])
            local[1, part] = torch.linalg.vecdot(probabilities, logits)
            local[3, part] = torch.linalg.vecdot(probabilities, probabilities).log() + 2 * total
        if ranks > 1:
            gathered = torch.empty(ranks, *local.shape, dtype=precision, device=hidden.device)
            dist.all_gather(list(gathered), local, group=group)
            totals, means, target_logits, doubled = gathered.unbind(1)
            log_total = torch.logsumexp(totals, dim=0)
            mean = (torch.exp(totals - log_total) * means).sum(0)
            target = target_logits.sum(0)
            log_doubled = torch.logsumexp(doubled, dim=0)
        else:
            log_total, mean, target, log_doubled = local
        logp = target - log_total
        entropy = log_total - mean
        sum_p_squared = torch.exp(log_doubled - 2 * log_total)
        ctx.save_for_backward(hidden, weight, targets, log_total, entropy)
        ctx.settings = (temperature, chunk, group, ranks, first, valid, precision)
        ctx.mark_non_differentiable(sum_p_squared)
        ctx.set_materialize_grads(False)
        return logp, entropy, sum_p_squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, grad_sum_p_squared: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_total, entropy = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(log_total)
        temperature, chunk, group, ranks, first, valid, precision = ctx.settings
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        # Chunks are summed in full precision: in bfloat16 each addition would round.
        grad_weight = (
            torch.zeros(weight.shape, dtype=precision, device=weight.device)
            if wants_weight
            else None
        )
        for start in range(0, hidden.shape[0] if valid else 0, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight[:valid], temperature, precision)
            scale = grad_logp[part].to(precision) / temperature
            here, rowwise = _local_targets(targets[part], first, valid)
            logits.sub_(log_total[part, None])
            factor = -scale[:, None]
            if grad_entropy is not None:
                bonus = grad_entropy[part].to(precision) / temperature
                factor = factor - bonus[:, None] * (logits + entropy[part, None])
            grad_logits = logits.exp_().mul_(factor)
            grad_logits.scatter_add_(1, rowwise[:, None], torch.where(here, scale, 0.0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight[:valid], out=grad_hidden[part])
            if grad_weight is not None:
                if grad_weight.dtype == hidden.dtype:
                    grad_weight[:valid].addmm_(grad_logits.t(), hidden[part])
                else:
                    grad_weight[:valid].add_(torch.mm(grad_logits.t(), hidden[part]))
        if grad_hidden is not None and ranks > 1:
            dist.all_reduce(grad_hidden, group=group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, temperature: float, precision: torch.dtype) -> Tensor:
    """In `precision` from the product on: logits rounded to bfloat16 before the softmax would put
    log-probs off by up to 0.05."""
    if hidden.dtype == precision:
        product = torch.mm(hidden, weight.t())
    elif hidden.is_cuda:
        product = torch.mm(hidden, weight.t(), out_dtype=precision)
    else:
        # torch's CPU product has no other output type; products of bfloat16 are exact in float32.
        product = torch.mm(hidden.to(precision), weight.t().to(precision))
    return product.div_(temperature)


def _local_targets(targets: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in this rank's rows, and their row (clamped into range elsewhere)."""
    rows = targets - first
    return (rows >= 0) & (rows < valid), rows.clamp(0, valid - 1)
