"""A case run through the registries: what a training step runs, on a batch that the case spells
out.

The settings are those of the configuration's own models, `decide` sees the whole batch before the
loss does, and aggregation has the whole batch's denominators. Padding stays in, with mask 0: it has
to be without effect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async_rl.config.controls import EssLrControl
from megatron_async_rl.config.keys import method_name, models_in, nearest
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.settings_model import Strict, method_of
from megatron_async_rl.conform.cases import Case, Numbers
from megatron_async_rl.controls.ess_lr import effective_sample_size, lr_scale
from megatron_async_rl.objectives.aggregate import Denominators, aggregate
from megatron_async_rl.objectives.batch import BatchDecision, SequenceLoss, TokenBatch
from megatron_async_rl.objectives.method import AdvantageMethod, CorrectionMethod, LossMethod
from megatron_async_rl.objectives.terms import token_rewards

POLICIES = ("logp", "logp_prox", "logp_behavior")
"""If a case names only some of the three policies, the others are the first one it names."""
COLUMNS = tuple(
    field.name
    for field in dataclasses.fields(TokenBatch)
    if field.name not in ("sequence", "sequences", "decided")
)
PER_SEQUENCE = ("rewards", "group", "score_norms")


def settings_of(section: str, name: str, params: Mapping[str, Any]) -> Strict:
    """The settings of method `name` as `objective.<section>` would take them. Raises
    ValidationError, ValueError."""
    models = models_in(ObjectiveConfig.model_fields[section].annotation)
    for model in models:
        if method_name(model) == name:
            return model.model_validate({**params, "name": name})
    known = [str(method_name(model)) for model in models]
    raise ValueError(
        f"unknown {section} {name!r}; nearest: {nearest(name, known) or 'none'}; known:"
        f" {', '.join(sorted(known))}"
    )


def batch_of(case: Case) -> TokenBatch:
    """The case as a whole batch: float64, no gradient, every column that the case names. Raises
    ValueError."""
    if "mask" not in case.inputs:
        raise ValueError("inputs.mask is missing")
    rows, length = case.inputs["mask"].shape
    given: dict[str, Any] = {}
    for key, values in case.inputs.items():
        if key not in COLUMNS:
            raise ValueError(
                f"inputs.{key} is not a batch's column; nearest: {nearest(key, COLUMNS) or 'none'}"
            )
        if (values.ndim == 1) != (key in PER_SEQUENCE) or not values.ndim:
            raise ValueError(
                f"inputs.{key}: expected numbers per"
                f" {'sequence' if key in PER_SEQUENCE else 'token'}"
            )
        given[key] = torch.from_numpy(values.flatten()).to(
            torch.int64 if key in ("group", "lag") else torch.float64
        )
    unknown = torch.full((rows * length,), math.nan, dtype=torch.float64)
    first = next((given[key] for key in POLICIES if key in given), unknown)
    columns: dict[str, Any] = {
        **dict.fromkeys(POLICIES, first),
        "advantages": torch.zeros_like(unknown),
        "weights": torch.ones_like(unknown),
        "sequence": torch.arange(rows).repeat_interleave(length),
        "sequences": rows,
    }
    batch = TokenBatch(**(columns | given))
    if batch.rewards is None:
        return batch
    batch = batch.replace(token_rewards=token_rewards(batch, torch.zeros_like(batch.mask)))
    return (
        batch
        if "advantages" in given
        else batch.replace(advantages=batch.per_token(batch.require("rewards")))
    )


def micro_batch(whole: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """All of a whole batch as one micro-batch in `dtype`."""

    def cast(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in values.items()
        }

    columns = {key: value for key in COLUMNS if isinstance(value := getattr(whole, key), Tensor)}
    decided = BatchDecision(
        cast(whole.decided.tokens), cast(whole.decided.sequences), whole.decided.scalars
    )
    return dataclasses.replace(whole, **(cast(columns) | {"group": None, "decided": decided}))


def _decided(name: str, case: Case, params: Mapping[str, Any]) -> Mapping[str, float]:
    """Numbers that the loss `name` decides from the case as a whole batch; keys are those of its
    metrics."""
    settings: Any = settings_of("loss", name, params)
    decide = method_of(settings).decide
    if decide is None:
        raise ValueError(f"loss {name} decides nothing from the whole batch")
    return decide(batch_of(case), settings).scalars


def _m2po_cap(case: Case) -> dict[str, float]:
    found = _decided("m2po", case, {**case.params, "mode": "cap"})
    return {"log_ratio_cap": found["objective/log_ratio_cap"]}


def _bapo(case: Case) -> dict[str, float]:
    found = _decided("bapo", case, case.params)
    return {
        name: found.get(f"objective/{name}", math.nan)
        for name in ("clip_low", "clip_high", "positive_share")
    }


def _ess(case: Case) -> dict[str, float]:
    batch = batch_of(case)
    log_weights = batch.sequence_sum(batch.logp - batch.logp_behavior)[batch.lengths() > 0]
    return _of_log_weights(log_weights.numpy(), case.params)


def _ess_log_weights(case: Case) -> dict[str, float]:
    """`shape` only names what the weights look like."""
    return _of_log_weights(
        case.inputs["log_weights"],
        {key: value for key, value in case.params.items() if key != "shape"},
    )


def _of_log_weights(log_weights: Numbers, params: Mapping[str, Any]) -> dict[str, float]:
    settings = EssLrControl.model_validate(params)
    if isinstance(settings.reference_ratio, str):
        raise ValueError("params.reference_ratio: auto is known only within a run")
    ess = effective_sample_size(log_weights)
    ratio = ess / max(len(log_weights), 1)
    scale = lr_scale(
        ratio, rule=settings.rule, reference_ratio=settings.reference_ratio, floor=settings.floor
    )
    return {"ess": ess, "ess_ratio": ratio, "lr_scale": scale}


SCALARS: Mapping[str, Callable[[Case], dict[str, float]]] = {
    "m2po_cap": _m2po_cap,
    "bapo": _bapo,
    "ess": _ess,
    "ess_log_weights": _ess_log_weights,
}


@dataclass(frozen=True, eq=False)
class CaseValues:
    """values: what came out, under the names that `expect` uses.

    scales: for a sum, the sum of its terms' magnitudes, which its rounding goes by.
    """

    values: Mapping[str, Numbers]
    scales: Mapping[str, float] = field(default_factory=dict)


def run_case(case: Case, dtype: torch.dtype) -> CaseValues | None:
    """None where the method runs in float64 only. Raises ValueError for what this project does not
    have."""
    return _known("kind", case.kind, KINDS)(case, dtype)


def _padded(values: Tensor, batch: TokenBatch) -> Numbers:
    """[N] -> [S, T], 0 where the mask is 0."""
    kept = torch.where(batch.mask > 0, values.detach().double(), 0.0)
    return np.asarray(kept.reshape(batch.sequences, -1).numpy())


def _policy_loss(case: Case, dtype: torch.dtype) -> CaseValues:
    params = dict(case.params)
    aggregation, norm_length = params.pop("aggregation", None), params.pop("norm_length", None)
    settings: Any = settings_of("loss", case.name, params)
    method: LossMethod = method_of(settings)
    whole = batch_of(case)
    if method.decide is not None:
        whole = whole.replace(decided=method.decide(whole, settings))
    part = micro_batch(whole, dtype)
    part = part.replace(logp=part.logp.clone().requires_grad_())
    losses = method.function(part, settings)
    if isinstance(losses, SequenceLoss) and aggregation not in (None, "seq-mean"):
        raise ValueError(
            f"params.aggregation is {aggregation}, and {case.name} is one number per sequence:"
            " seq-mean"
        )
    how = (part, aggregation or settings.default_aggregation, Denominators.of(whole), norm_length)
    loss = aggregate(losses, *how).sum()
    (gradient,) = torch.autograd.grad(loss, part.logp, allow_unused=True)
    magnitude = (
        aggregate(dataclasses.replace(losses, loss=losses.loss.detach().abs()), *how).abs().sum()
    )
    values = {
        "loss": np.array(loss.item()),
        "grad_logp": _padded(
            gradient if gradient is not None else torch.zeros_like(part.logp), part
        ),
        "keep": _padded(~losses.clipped, part),
    }
    return CaseValues(values, {"loss": magnitude.item()})


def _advantage(case: Case, dtype: torch.dtype) -> CaseValues | None:
    if dtype != torch.float64:
        return None
    settings: Any = settings_of("advantage", case.name, case.params)
    method: AdvantageMethod = method_of(settings)
    whole = batch_of(case)
    found = method.function(whole, settings)
    values = {"advantages": _padded(found.tokens, whole)}
    if found.returns is not None:
        values["returns"] = _padded(found.returns, whole)
    if found.baselines is not None:
        values["baselines"] = np.asarray(found.baselines.double().numpy())
    return CaseValues(values)


def _correction(case: Case, dtype: torch.dtype) -> CaseValues | None:
    settings: Any = settings_of("corrections", case.name, case.params)
    method: CorrectionMethod = method_of(settings)
    if dtype != torch.float64 and method.whole(settings):
        return None
    whole = batch_of(case)
    factor = method.function(
        whole if method.whole(settings) else micro_batch(whole, dtype), settings
    )
    return CaseValues({"weights": _padded(factor, whole), "mask": _padded(factor != 0, whole)})


def _known[F](kind: str, name: str, table: Mapping[str, F]) -> F:
    """Raises ValueError for a name that the table lacks."""
    if name not in table:
        raise ValueError(
            f"unknown {kind} {name!r}; nearest: {nearest(name, [*table]) or 'none'}; known:"
            f" {', '.join(sorted(table))}"
        )
    return table[name]


def _scalar(case: Case, dtype: torch.dtype) -> CaseValues | None:
    if dtype != torch.float64:
        return None
    values = _known("scalar", case.name, SCALARS)(case)
    return CaseValues({key: np.array(value, dtype=np.float64) for key, value in values.items()})


KINDS: Mapping[str, Callable[[Case, torch.dtype], CaseValues | None]] = {
    "policy_loss": _policy_loss,
    "advantage": _advantage,
    "weights": _correction,
    "mask": _correction,
    "scalar": _scalar,
}
