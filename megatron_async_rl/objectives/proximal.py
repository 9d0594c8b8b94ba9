"""The proximal policy: what the ratio r = pi / pi_prox is taken against.

behavior    logp_prox = logp_behavior
recompute   the trainer's weights at the start of the step. A batch is consumed by one optimizer step, so these are the
            weights that `logp` is computed with: its detached value is exact and needs no second pass
loglinear   logp_behavior + a (sg(logp) - logp_behavior), a = 1 - 1/d, d the token's lag; a = 0 at lag 0 (A-3PO, arXiv
            2512.06547)
ewma        log-probs under an exponential average of the trainer's weights; surveyed
snapshot    log-probs under the trainer's copy of the very version that sampled the token (arXiv 2605.12070); surveyed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.method import Column

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import Proximal


def surveyed_for_proximal(proximal: Proximal) -> set[Column]:
    """The columns that have to be surveyed to know logp_prox over the whole batch."""
    if proximal == "behavior":
        return set()
    return {"logp"} if proximal in ("recompute", "loglinear") else {"logp_prox"}


def proximal_logp(batch: TokenBatch, proximal: Proximal, surveyed: Tensor | None) -> Tensor:
    """[N]. `batch.logp`: detached, under the weights at the start of the step (nan gives nan).

    surveyed: [N], for ewma and snapshot.
    """
    if proximal == "behavior":
        return batch.logp_behavior
    if proximal == "recompute":
        return batch.logp
    if proximal == "loglinear":
        lag = batch.require("lag").clamp(min=1)
        return batch.logp_behavior + (1.0 - 1.0 / lag) * (batch.logp - batch.logp_behavior)
    return surveyed.double() if surveyed is not None else batch.logp_prox


def proximal_metrics(batch: TokenBatch, surveyed: Tensor | None) -> dict[str, float]:
    """`ratio/prox_diff_max`: largest |logp_prox - logp_behavior| of a trained token, where logp_prox was surveyed.

    With `snapshot`, and responses whose cache is recomputed at every update, it is rounding: the trainer and the engine disagree
    about a token, or about the version that sampled it, where it is more.
    """
    if surveyed is None or not batch.mask.any():
        return {}
    difference = (surveyed.double() - batch.logp_behavior).abs()[batch.mask > 0]
    return {"ratio/prox_diff_max": float(difference.max())}
