"""The measurements of a step: a table with one row per sample, one all-reduce, then the metrics on
every rank alike.

Each sample's row is written by one rank (the last pipeline stage, tensor and context rank 0, of the
data-parallel rank that owns the sample) and is zero elsewhere, so a plain sum over all ranks
completes the table, maxima included; the metrics are then the same numbers, added in the same
order, on every layout.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.controls.ess_lr import effective_sample_size
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch
from megatron_async_rl.objectives.objective import BatchLoss, Objective
from megatron_async_rl.objectives.targets import StepTargets
from megatron_async_rl.objectives.terms import kl_estimate
from megatron_async_rl.policy.forward import TokenOutputs
from megatron_async_rl.policy.microbatch import MicroBatch
from megatron_async_rl.samples.rank_batch import RankBatch

COLUMNS = (
    "loss",
    "entropy",
    "log_weight",
    "k2",
    "k3",
    "chi2",
    "difference",
    "difference_max",
    "difference_lag0_max",
    "clipped_positive",
    "clipped_negative",
    "positive",
    "negative",
    "rejected",
    "weight",
    "kl_ref",
    "term_kl",
    "term_entropy",
    "term_value",
)

TERMS = ("kl", "entropy", "value")
"""Terms that may be added to the loss, `BatchLoss.terms`."""


class StepTable:
    """[S, len(COLUMNS)] float64: sums, or maxima, over each sample's trained tokens."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self.values = torch.zeros((samples, len(COLUMNS)), dtype=torch.float64, device=device)

    @torch.no_grad()
    def record(
        self,
        micro_batch: MicroBatch,
        tokens: TokenBatch,
        loss: BatchLoss,
        version: int,
    ) -> None:
        """tokens: with `entropy`; loss: of this micro-batch."""
        if not micro_batch.samples:
            return
        log_weight = (tokens.logp - tokens.logp_behavior).double()
        bounded = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        difference = log_weight.abs()
        # A token of this version in a response that an older one began was sampled over the older
        # one's keys and values.
        older = (micro_batch.versions != version).double()
        begun_by_an_older = older.new_zeros(tokens.sequences).scatter_reduce(
            0, tokens.sequence, older, "amax"
        )
        lag0 = 1.0 - begun_by_an_older[tokens.sequence]
        positive, negative = (tokens.advantages > 0).double(), (tokens.advantages < 0).double()

        def total(values: Tensor) -> Tensor:
            return tokens.sequence_sum(values)

        def largest(values: Tensor) -> Tensor:
            zeros = torch.zeros(tokens.sequences, dtype=torch.float64, device=values.device)
            return zeros.scatter_reduce(0, tokens.sequence, values * tokens.mask, "amax")

        nan = torch.nan  # no value for this sample: `step_metrics` leaves it out
        nothing = torch.full(
            (tokens.sequences,), nan, dtype=torch.float64, device=tokens.logp.device
        )
        reference = None if tokens.logp_ref is None else (tokens.logp - tokens.logp_ref).double()
        columns = {
            "loss": loss.parts.double(),
            "entropy": total(tokens.require("entropy").double()),
            "log_weight": total(log_weight),
            "k2": total(0.5 * bounded.square()),
            "k3": total(torch.expm1(bounded) - bounded),
            "chi2": total(torch.expm1(2 * bounded)),
            "difference": total(difference),
            "difference_max": largest(difference),
            "difference_lag0_max": torch.where(largest(lag0) > 0, largest(difference * lag0), nan),
            "clipped_positive": total(loss.clipped * positive),
            "clipped_negative": total(loss.clipped * negative),
            "positive": total(positive),
            "negative": total(negative),
            "rejected": total(loss.rejected.double()),
            "weight": total(tokens.weights.double()),
        }
        columns["kl_ref"] = nothing if reference is None else total(kl_estimate(reference, "k3"))
        columns |= {
            f"term_{name}": loss.terms[name].double() if name in loss.terms else nothing
            for name in TERMS
        }
        self.values[micro_batch.batch_samples] = torch.stack(
            [columns[name] for name in COLUMNS], dim=1
        )

    @property
    def losses(self) -> list[float]:
        """Each sample's part of the step's loss, in a completed table."""
        found: list[float] = self._column("loss").tolist()
        return found

    def weigh(self, advantages: Tensor) -> None:
        """Makes rows recorded at advantage 1 those of `advantages`, [S]: the loss, and the counts
        by its sign."""
        advantages = advantages.to(self.values.device)
        self._column("loss").mul_(advantages)
        for name in ("positive", "clipped_positive"):
            counted = self._column(name).clone()
            self._column(name).copy_(counted * (advantages > 0))
            self._column(name.replace("positive", "negative")).copy_(counted * (advantages < 0))

    def add_terms(self, other: StepTable) -> None:
        """Takes the terms from another pass over the same samples, which recorded nothing else as
        its loss; this one had none."""
        self._column("loss").add_(other._column("loss"))
        for term in TERMS:
            self._column(f"term_{term}").copy_(other._column(f"term_{term}"))

    def _column(self, name: str) -> Tensor:
        return self.values[:, COLUMNS.index(name)]

    def log_weights(self, samples: RankBatch) -> NDArray[np.float64]:
        """sum_t log(pi / mu) of each sample with trained tokens, untruncated, of a completed table;
        empty for given responses."""
        column = self.values[:, COLUMNS.index("log_weight")].cpu().numpy()
        return column[samples.sampled & (samples.trained > 0)]


class RecordedLoss:
    """The objective's loss of a micro-batch, from its log-probs on the last stage; and the rows of
    the table.

    table: null where another tensor-parallel rank records. owner: the data-parallel rank.
    advantage: of every trained token; null for the batch's own. with_terms: false leaves out what
    is added to the loss.
    """

    def __init__(
        self,
        objective: Objective,
        targets: StepTargets,
        table: StepTable | None,
        *,
        owner: int = 0,
        advantage: float | None = None,
        with_terms: bool = True,
    ) -> None:
        self._objective = objective
        self._targets = targets
        self._table = table
        self._owner = owner
        targets.owned_by(owner)  # gathered before the micro-batches run, so that none waits for it
        self._advantage = advantage
        self._with_terms = with_terms

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
        targets = self._targets
        placed = targets.placed(self._owner, outputs.logp.dtype, outputs.logp.device)
        tokens = placed.part(
            micro_batch.owned_tokens, micro_batch.batch_samples, micro_batch.sequence
        )
        tokens = tokens.replace(logp=outputs.logp, entropy=outputs.entropy)
        if outputs.values is not None:
            tokens = tokens.replace(values=outputs.values, values_old=tokens.require("values"))
        if self._advantage is not None:
            tokens = tokens.replace(advantages=self._advantage * tokens.mask)
        loss = self._objective.loss(
            tokens,
            targets.denominators,
            corrected=targets.corrected,
            with_terms=self._with_terms,
        )
        if self._table is not None:
            self._table.record(micro_batch, tokens, loss, targets.samples.version)
        return loss.parts.sum()


def step_metrics(table: NDArray[np.float64], samples: RankBatch) -> dict[str, float]:
    """Metrics of a completed table, row by row of `samples`; a sample without trained tokens is
    left out. Keys are those of metrics/catalogue.py."""
    column = dict(zip(COLUMNS, table.T, strict=True))
    counts, sampled = samples.trained, samples.sampled.any()
    tokens = int(counts.sum())
    metrics = {"policy/loss": float(column["loss"].sum())}
    if tokens == 0:
        return metrics
    metrics["policy/entropy"] = float(column["entropy"].sum()) / tokens
    if not sampled:
        return metrics
    log_weights = column["log_weight"][counts > 0]
    ess = effective_sample_size(log_weights)
    present = {
        "loss/kl": column["term_kl"],
        "loss/entropy": column["term_entropy"],
        "loss/value": column["term_value"],
        "ratio/kl_reference": column["kl_ref"] / tokens,
    }
    # Nowhere a number: not configured. A penalty that happens to be 0 is logged as 0.
    metrics |= {
        name: float(values.sum()) for name, values in present.items() if not np.isnan(values).all()
    }
    fresh = column["difference_lag0_max"][~np.isnan(column["difference_lag0_max"])]
    if len(fresh):
        metrics["ratio/logp_diff_lag0_max"] = float(fresh.max())
    for name, sign in (("clip/positive", "positive"), ("clip/negative", "negative")):
        if of_sign := float(column[sign].sum()):
            metrics[name] = float(column[f"clipped_{sign}"].sum()) / of_sign
    return metrics | {
        "ratio/ess": ess,
        "ratio/ess_ratio": ess / len(log_weights),
        "ratio/kl_k1": float(-column["log_weight"].sum()) / tokens,
        "ratio/kl_k2": float(column["k2"].sum()) / tokens,
        "ratio/kl_k3": float(column["k3"].sum()) / tokens,
        "ratio/chi2": float(column["chi2"].sum()) / tokens,
        "ratio/logp_diff_mean": float(column["difference"].sum()) / tokens,
        "ratio/logp_diff_max": float(column["difference_max"].max()),
        "clip/rejected": float(column["rejected"].sum()) / tokens,
        "clip/weight_mean": float(column["weight"].sum()) / tokens,
    }
