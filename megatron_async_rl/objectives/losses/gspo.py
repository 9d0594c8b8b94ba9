"""GSPO (arXiv 2507.18071): PPO's clip on the length-normalised ratio of the whole sequence, in its
per-token form."""

from __future__ import annotations

from megatron_async_rl.config.losses import GspoLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import clipped_surrogate
from megatron_async_rl.objectives.method import LossMethod

LARGEST_LOG = 10.0
"""Upper limit of log s; a sequence beyond it has no gradient."""


def gspo(batch: TokenBatch, settings: GspoLoss) -> TokenLoss:
    """l = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)), s_t = sg(s) pi_t / sg(pi_t) (eq.
    14 there).

    s = exp(mean_t log r_t) over the sequence's trained tokens, r = pi / pi_prox, log s at most 10.
    [N] -> [N]. Defaults: clip_low 0.03, clip_high 0.04 (the paper's defaults, for nearly on-policy
    data, are 3e-4 and 4e-4).
    """
    current = batch.logp.detach()
    log_s = batch.per_token(batch.sequence_mean(current - batch.logp_prox))
    # The value is s, the gradient that of this token alone.
    ratio = (batch.logp - current + log_s).clamp(max=LARGEST_LOG).exp()
    found = clipped_surrogate(
        batch.advantages, ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high
    )
    return TokenLoss(found.loss, found.clipped | (log_s > LARGEST_LOG))


GSPO = LossMethod(gspo)
