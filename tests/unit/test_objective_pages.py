"""Numbers of whole objectives on one batch: the columns that each needs, its prepared batch, its
decisions, its loss and its gradient. Reference vectors prove the methods (test_conform.py); these
pages show what composes them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_async_rl.config.losses import OaplLoss
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.losses.oapl import decide_oapl
from megatron_async_rl.objectives.objective import Objective, valid_samples, whole_batch
from megatron_async_rl.objectives.off_policy import proximal_metrics
from tests.stored_pages import require_page
from tests.token_batches import part_of
from tests.train_batches import columns, ragged_batch

BATCH = columns(ragged_batch())
NORMALIZED = {"name": "tis", "normalize": True}
TRUNCATED = {"estimator": "k3", "coef": 0.1, "where": "loss", "weight": "truncated"}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"loss": "reinforce", "advantage": "rloo"},
    {"loss": "gspo", "entropy_bonus": 0.25},
    {"loss": "ppo_clip", "advantage": "gae", "value": {}, "aggregation": "seq-mean-token-mean"},
    {"loss": "ppo_clip", "kl": {"estimator": "k2", "coef": 0.5, "where": "reward"}},
    {"loss": "ppo_clip", "kl": TRUNCATED, "entropy_bonus": 0.1},
    {"loss": "gspo", "kl": {"coef": 0.1, "where": "loss"}},
    {"loss": "ppo_clip", "proximal": "recompute", "corrections": ["tis"]},
    {"loss": "ppo_clip", "proximal": "recompute", "corrections": [NORMALIZED]},
    {"loss": "ppo_clip", "proximal": "loglinear", "corrections": ["icepop", "token_veto"]},
    {"loss": "reinforce", "proximal": "snapshot", "corrections": ["icepop"]},
    {"loss": "decoupled_ppo", "proximal": "ewma", "minibatches": 2, "corrections": ["opsm"]},
    {"loss": "decoupled_ppo", "proximal": "recompute", "epochs": 2},
    {"loss": "ppo_clip", "proximal": "loglinear", "epochs": 2},
    {"loss": "ppo_clip", "proximal": "snapshot"},
    {"loss": "m2po", "advantage": "rloo"},
    {"loss": "oapl"},
    {"loss": "ppo_clip", "overlong": {"max_length": 16, "buffer": 8}},
    {"aggregation": "seq-mean-token-sum-norm", "norm_length": 10, "renormalize": True},
    {
        "loss": "ppo_clip",
        "proximal": "recompute",
        "corrections": [{"name": "icepop", "low": 0.8, "high": 1.2}],
        "renormalize": True,
        "aggregation": "seq-mean-token-mean",
        "entropy_bonus": 0.5,
    },
    {
        "loss": "ppo_clip",
        "proximal": "recompute",
        "corrections": [{"name": "icepop", "low": 0.8, "high": 1.2}],
        "renormalize": True,
        "aggregation": "token-mean",
        "entropy_bonus": 0.5,
    },
)


def number(value: float) -> str:
    return f"{0.0 if abs(value) < 1e-9 else value:.6g}"


def drawn(name: str, count: int) -> Tensor:
    """Return fixed numbers for a precomputed column."""
    chance = np.random.default_rng(sum(map(ord, name)))
    if name in ("sum_p_squared", "entropy"):
        return torch.from_numpy(chance.uniform(0.1, 0.9, count))
    return torch.from_numpy(-math.log(64) + 0.3 * chance.standard_normal(count))


def described(config: dict[str, Any]) -> str:
    try:
        objective = Objective(ObjectiveConfig.model_validate(config))
    except ValidationError as error:
        return f"refused: {error.errors()[0]['msg'][:60]}\n"
    text = f"needs {sorted(objective.needs)}, again {sorted(objective.needs_again)}\n"
    samples = valid_samples(BATCH)
    count = int(samples.lengths.sum())
    known = {name: drawn(name, count) for name in sorted(objective.needs)}
    prepared = objective.prepare(samples, known)
    for name in ("rewards", "advantages", "logp_prox", "token_rewards", "returns"):
        value = getattr(prepared, name)
        if value is not None and not torch.isnan(value).any():
            parts = (value.sum(), value.abs().sum(), (value * torch.arange(len(value))).sum())
            text += f"{name}: {' '.join(number(float(part)) for part in parts)}\n"
    text += f"metrics: { {k: number(v) for k, v in objective.metrics(prepared, known).items()} }\n"
    again = {name: drawn(f"{name} again", count) for name in sorted(objective.needs_again)}
    targets = objective.decide(samples, prepared, again)
    text += f"{targets.denominators}, corrected: {targets.corrected}\n"
    text += f"decided: { {k: number(v) for k, v in sorted(targets.metrics.items())} }\n"
    rows = np.flatnonzero(samples.owner[np.arange(len(samples))] == 0)
    for with_terms in (True, False) if objective.adds_terms else (True,):
        logp = drawn("now", count).requires_grad_()
        extra = {
            "entropy": drawn("entropy", count),
            "values": drawn("values", count).requires_grad_(),
            "values_old": drawn("old values", count),
            "logp_ref": drawn("logp_ref", count),
        }
        part = part_of(targets, rows).replace(logp=logp, **extra)
        if torch.isnan(part.logp_prox).any():
            part = part.replace(logp_prox=logp.detach())
        loss = objective.loss(
            part, targets.denominators, corrected=targets.corrected, with_terms=with_terms
        )
        loss.parts.sum().backward()
        gradient = logp.grad if logp.grad is not None else torch.zeros(count)
        figures = (loss.parts.sum(), gradient.sum(), gradient.abs().sum())
        text += f"loss, gradient: {' '.join(number(float(one)) for one in figures)}"
        text += f", {int(loss.clipped.sum())} clipped, {int(loss.rejected.sum())} rejected"
        terms = {name: number(float(one.sum())) for name, one in loss.terms.items()}
        text += f", terms {terms}\n"
    return text


def test_every_objective_has_the_numbers_of_its_page() -> None:
    text = "".join(f"$ {config}\n{described(config)}" for config in CONFIGS)
    require_page("objectives/numbers", text)


def test_every_combination_needs_the_columns_of_its_page() -> None:
    lines = []
    for loss, proximal, steps, corrections, kl in itertools.product(
        ("ppo_clip", "reinforce", "m2po", "decoupled_ppo"),
        ("behavior", "recompute", "loglinear", "ewma", "snapshot"),
        (1, 2),
        ([], ["tis"], [NORMALIZED], ["opsm"]),
        (None, "reward", "loss"),
    ):
        config: dict[str, Any] = {
            "loss": loss,
            "proximal": proximal,
            "minibatches": steps,
            "corrections": corrections,
        }
        if kl is not None:
            config["kl"] = {"where": kl, "coef": 0.1}
        try:
            objective = Objective(ObjectiveConfig.model_validate(config))
        except ValidationError:
            continue
        own = " ".join(str(one if isinstance(one, str) else "tis mean 1") for one in corrections)
        lines.append(
            f"{loss} {proximal} {steps} {own or '-'} {kl or '-'}: {sorted(objective.needs)}"
            f" {sorted(objective.needs_again)} {objective._correct_whole} {objective.adds_terms}\n"
        )
    require_page("objectives/columns", "".join(lines))


def test_a_batch_without_samples_has_no_numbers_and_no_loss() -> None:
    samples = BATCH.select([])
    for loss in ("ppo_clip", "oapl", "m2po", "gspo"):
        objective = Objective(ObjectiveConfig.model_validate({"loss": loss}))
        known = {name: torch.empty(0, dtype=torch.float64) for name in objective.needs}
        prepared = objective.prepare(samples, known)
        assert len(prepared.logp) == 0
        targets = objective.decide(samples, prepared)
        assert (targets.denominators.tokens, targets.denominators.sequences) == (0, 0)
        assert targets.metrics == {}
    whole = whole_batch(samples, {})
    assert whole.group_centred(whole.require("rewards")).tolist() == []
    assert decide_oapl(whole, OaplLoss()).sequences["advantage"].tolist() == []
    assert whole.select(torch.arange(0)) is whole
    assert proximal_metrics(whole, torch.empty(0)) == {}


def test_all_sequences_of_a_batch_are_the_batch_itself() -> None:
    whole = whole_batch(valid_samples(BATCH), {})
    assert whole.select(torch.arange(whole.sequences)) is whole
    part = whole.select(torch.arange(1, whole.sequences))
    assert part.sequences == whole.sequences - 1
    lengths = torch.bincount(whole.sequence)
    assert torch.bincount(part.sequence).tolist() == lengths[1:].tolist()
    assert part.logp_behavior.tolist() == whole.logp_behavior[int(lengths[0]) :].tolist()
    assert part.require("rewards").tolist() == whole.require("rewards")[1:].tolist()
