"""REINFORCE++ with a baseline (arXiv 2501.03262): centred within each group, whitened over the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.advantages.whitening import whitened
from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import ReinforcePpBaselineAdvantage


def reinforce_pp_baseline(batch: TokenBatch, settings: ReinforcePpBaselineAdvantage) -> Advantages:
    """R_i - mean R of the group on each of the sequence's tokens, then whitened. [S] rewards -> [N].

    Before whitening exactly 0 for a group of one or of equal rewards; the batch's mean, which whitening takes from every
    token, is then what is left.
    """
    return Advantages(whitened(batch.per_token(batch.group_centred(batch.require("rewards"))), batch.mask))
