"""A case run through the registries: what a training step runs, on a batch that the case spells out.

The settings are those of the configuration's own models, `decide` sees the whole batch before the loss does, and aggregation has
the whole batch's denominators. Padding stays in, with mask 0: it has to be without effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async_rl.conform.cases import Case, Numbers
from megatron_async_rl.conform.inputs import batch_of, micro_batch, settings_of
from megatron_async_rl.conform.scalars import SCALARS
from megatron_async_rl.objectives.aggregate import Denominators, aggregate
from megatron_async_rl.objectives.batch import SequenceLoss, TokenBatch
from megatron_async_rl.objectives.registry import advantage_method, correction_method, find, loss_method


@dataclass(frozen=True, eq=False)
class Found:
    """values: what came out, under the names that `expect` uses.

    scales: for a sum, the sum of its terms' magnitudes, which its rounding goes by.
    """

    values: Mapping[str, Numbers]
    scales: Mapping[str, float] = field(default_factory=dict)


def run_case(case: Case, dtype: torch.dtype) -> Found | None:
    """None where the method runs in float64 only. Raises ValueError for what this project does not have."""
    return find("kind", case.kind, KINDS)(case, dtype)


def _padded(values: Tensor, batch: TokenBatch) -> Numbers:
    """[N] -> [S, T], 0 where the mask is 0."""
    kept = torch.where(batch.mask > 0, values.detach().double(), 0.0)
    return np.asarray(kept.reshape(batch.sequences, -1).numpy())


def _policy_loss(case: Case, dtype: torch.dtype) -> Found:
    method, params = loss_method(case.name), dict(case.params)
    aggregation, norm_length = params.pop("aggregation", None), params.pop("norm_length", None)
    settings: Any = settings_of("loss", case.name, params)
    whole = batch_of(case)
    if method.decide is not None:
        whole = whole.replace(decided=method.decide(whole, settings))
    part = micro_batch(whole, dtype)
    part = part.replace(logp=part.logp.clone().requires_grad_())
    losses = method.function(part, settings)
    if isinstance(losses, SequenceLoss) and aggregation not in (None, "seq-mean"):
        raise ValueError(f"params.aggregation is {aggregation}, and {case.name} is one number per sequence: seq-mean")
    how = (part, aggregation or settings.default_aggregation, Denominators.of(whole), norm_length)
    loss = aggregate(losses, *how).sum()
    (gradient,) = torch.autograd.grad(loss, part.logp, allow_unused=True)
    magnitude = aggregate(dataclasses.replace(losses, loss=losses.loss.detach().abs()), *how).abs().sum()
    values = {
        "loss": np.array(loss.item()),
        "grad_logp": _padded(gradient if gradient is not None else torch.zeros_like(part.logp), part),
        "keep": _padded(~losses.clipped, part),
    }
    return Found(values, {"loss": magnitude.item()})


def _advantage(case: Case, dtype: torch.dtype) -> Found | None:
    if dtype != torch.float64:
        return None
    method, whole = advantage_method(case.name), batch_of(case)
    found = method.function(whole, settings_of("advantage", case.name, case.params))
    values = {"advantages": _padded(found.tokens, whole)}
    if found.returns is not None:
        values["returns"] = _padded(found.returns, whole)
    if found.baselines is not None:
        values["baselines"] = np.asarray(found.baselines.double().numpy())
    return Found(values)


def _correction(case: Case, dtype: torch.dtype) -> Found | None:
    method = correction_method(case.name)
    settings = settings_of("corrections", case.name, case.params)
    if dtype != torch.float64 and method.whole(settings):
        return None
    whole = batch_of(case)
    factor = method.function(whole if method.whole(settings) else micro_batch(whole, dtype), settings)
    return Found({"weights": _padded(factor, whole), "mask": _padded(factor != 0, whole)})


def _scalar(case: Case, dtype: torch.dtype) -> Found | None:
    if dtype != torch.float64:
        return None
    values = find("scalar", case.name, SCALARS)(case)
    return Found({key: np.array(value, dtype=np.float64) for key, value in values.items()})


KINDS: Mapping[str, Callable[[Case, torch.dtype], Found | None]] = {
    "policy_loss": _policy_loss,
    "advantage": _advantage,
    "weights": _correction,
    "mask": _correction,
    "scalar": _scalar,
}
