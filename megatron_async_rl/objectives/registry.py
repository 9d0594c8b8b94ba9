"""Names of the configuration -> methods. A built-in method is one function, one settings model in
config/ and one line here; a plug-in, `module:Class`, is one file."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_async_rl.config.settings_model import find
from megatron_async_rl.objectives.advantages.discounted import (
    gae,
    reinforce_pp,
    reinforce_pp_baseline,
)
from megatron_async_rl.objectives.advantages.least_variance import opob, opob_needs, otb
from megatron_async_rl.objectives.advantages.partial_return import partial_return
from megatron_async_rl.objectives.advantages.per_response import grpo, no_baseline, opo, rloo
from megatron_async_rl.objectives.losses.aspo import aspo
from megatron_async_rl.objectives.losses.bapo import bapo, decide_bapo
from megatron_async_rl.objectives.losses.cispo import cispo
from megatron_async_rl.objectives.losses.dppo import dppo_kl, dppo_tv
from megatron_async_rl.objectives.losses.gipo import gipo
from megatron_async_rl.objectives.losses.gmpo import gmpo
from megatron_async_rl.objectives.losses.gspo import gspo
from megatron_async_rl.objectives.losses.kimi import decide_kimi, kimi
from megatron_async_rl.objectives.losses.m2po import decide_m2po, m2po
from megatron_async_rl.objectives.losses.minirl import minirl
from megatron_async_rl.objectives.losses.oapl import decide_oapl, oapl
from megatron_async_rl.objectives.losses.ppo_clip import decoupled_ppo, ppo_clip
from megatron_async_rl.objectives.losses.reinforce import reinforce
from megatron_async_rl.objectives.losses.sapo import sapo
from megatron_async_rl.objectives.losses.sft import sft
from megatron_async_rl.objectives.losses.topr import topr
from megatron_async_rl.objectives.losses.trajectory_balance import (
    decide_trajectory_balance,
    trajectory_balance,
)
from megatron_async_rl.objectives.losses.vespo import vespo
from megatron_async_rl.objectives.method import (
    AdvantageMethod,
    CorrectionMethod,
    LossMethod,
    columns,
)
from megatron_async_rl.objectives.off_policy import icepop, opsm, reject, tis, token_veto

# Whole-batch needs stand next to the function that reads them.
ADVANTAGES: Mapping[str, AdvantageMethod] = {
    "none": AdvantageMethod(no_baseline),
    "grpo": AdvantageMethod(grpo),
    "rloo": AdvantageMethod(rloo),
    "opo": AdvantageMethod(opo),
    "reinforce_pp": AdvantageMethod(reinforce_pp),
    "reinforce_pp_baseline": AdvantageMethod(reinforce_pp_baseline),
    "gae": AdvantageMethod(gae, columns("values")),
    "otb": AdvantageMethod(otb, columns("logp_prox", "sum_p_squared")),
    "opob": AdvantageMethod(opob, opob_needs),
    "partial_return": AdvantageMethod(partial_return),
}

LOSSES: Mapping[str, LossMethod] = {
    "sft": LossMethod(sft),
    "reinforce": LossMethod(reinforce),
    "ppo_clip": LossMethod(ppo_clip),
    "decoupled_ppo": LossMethod(decoupled_ppo),
    "cispo": LossMethod(cispo),
    "gspo": LossMethod(gspo),
    "gmpo": LossMethod(gmpo),
    "sapo": LossMethod(sapo),
    "dppo_tv": LossMethod(dppo_tv),
    "dppo_kl": LossMethod(dppo_kl),
    "topr": LossMethod(topr),
    # `decide` runs once on the whole optimizer-step batch.
    "trajectory_balance": LossMethod(
        trajectory_balance, decide_trajectory_balance, columns("logp", "logp_ref")
    ),
    "oapl": LossMethod(oapl, decide_oapl),
    "kimi": LossMethod(kimi, decide_kimi),
    "vespo": LossMethod(vespo),
    "gipo": LossMethod(gipo),
    "aspo": LossMethod(aspo),
    "minirl": LossMethod(minirl),
    "m2po": LossMethod(m2po, decide_m2po, columns("logp")),
    "bapo": LossMethod(bapo, decide_bapo, columns("logp")),
}

# With `normalize`, weights are divided by their mean over the whole batch.
CORRECTIONS: Mapping[str, CorrectionMethod] = {
    "tis": CorrectionMethod(tis, whole=lambda settings: settings.normalize),
    "icepop": CorrectionMethod(icepop, whole=lambda settings: settings.normalize),
    "reject": CorrectionMethod(reject),
    "token_veto": CorrectionMethod(token_veto),
    "opsm": CorrectionMethod(opsm, needs=columns("logp")),
}


def advantage_method(name: str) -> AdvantageMethod:
    return find("advantage", name, ADVANTAGES)


def loss_method(name: str) -> LossMethod:
    return find("loss", name, LOSSES)


def correction_method(name: str) -> CorrectionMethod:
    return find("correction", name, CORRECTIONS)
