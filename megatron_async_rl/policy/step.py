"""The step from reduced gradients to new weights: prepare, controls, clip, controls again, step.

Invariants:
- every decision depends on all-reduced numbers, so all ranks step or none does;
- a skipped step changes nothing: no weight, no moment, no step count, no weight decay;
- a gradient that is not finite, or whose loss is not finite, is never applied, whatever the
  controls decide; it is reported, and such steps in a row are counted;
- a gradient far outside the run's history is reported before it is applied, or skipped;
- gradient memory is swept for a norm only if no control has measured it already.

`StepTable` holds the measurements of a step: one row per sample and one all-reduce; then every rank
computes the same metrics. Each sample's row is written by one rank (the last pipeline stage, tensor
and context rank 0, of the data-parallel rank that owns the sample) and is zero elsewhere, so a
plain sum over all ranks completes the table, maxima included. The metrics are then the same
numbers, added in the same order, with every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.controls.decision import (
    Control,
    Decision,
    StepView,
    UpdateView,
    combined,
)
from megatron_async_rl.gradients import Gradients, clip_to, scale, squared_norm, squared_norm_of
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch
from megatron_async_rl.objectives.objective import BatchLoss, Objective, StepTargets
from megatron_async_rl.objectives.off_policy import effective_sample_size
from megatron_async_rl.objectives.terms import kl_estimate
from megatron_async_rl.policy.adam_view import AdamView, TakenStep, gradients_of
from megatron_async_rl.policy.anomaly import NormHistory, NotFinite, Spike
from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.forward import TokenOutputs
from megatron_async_rl.policy.optimizer import Beta1Product, learning_rate
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.past_weights import WeightDisplacement
from megatron_async_rl.samples.rank_batch import RankBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFacts:
    """Facts about the batch from the forward passes, the same on every rank; fields as in StepView
    and UpdateView."""

    loss: float
    log_weights: NDArray[np.float64]
    lag_max: int
    moved: bool = False
    kl: float = 0.0


class OptimizerStep:
    """Optimizer steps of a run. Counts: `steps` so far, including skipped ones (the schedule's
    clock), `updates` of them not skipped, `nonfinite` of them skipped because loss or gradient was
    not finite, `nonfinite_in_a_row` of those since the last finite step. A batch without anything
    to learn counts as neither."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        settings: OptimizerConfig,
        controls: Mapping[str, Control],
        layout: Layout,
        total_steps: int,
        *,
        on_anomaly: Literal["report", "skip"],
    ) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.controls = controls
        self.layout = layout
        self.total_steps = total_steps
        self.on_anomaly = on_anomaly
        self.steps = 0
        self.updates = 0
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0
        self.nonfinite_ids: list[str] = []
        """Samples to which the newest steps in a row that were not finite are traced."""
        self.last: TakenStep | None = None
        self.beta1_product = Beta1Product()
        self._weight_decay = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        self.norms = NormHistory(clip=settings.clip_grad)

    def take(
        self,
        facts: StepFacts,
        displacement: WeightDisplacement | None = None,
        report: Callable[[Spike | NotFinite, Gradients], Sequence[str]] | None = None,
    ) -> dict[str, float]:
        """Take or skip one step; return metrics, the same on every rank. `policy/grad_norm` is
        after the controls, before clipping. Collective.

        The loss is checked because clamps turn a nan loss into a gradient of 0, which would look
        harmless. report: called on every rank with an anomalous gradient, before it is applied, and
        with a non-finite one; it may use the gradient buffers, restores their content, and returns
        the ids of the samples to which the gradient is traced.
        """
        lr = learning_rate(self.settings, self.steps, self.total_steps)
        self.steps += 1
        # The schedule's clock counts this step even if it is skipped below.
        overflow = self.optimizer.prepare_grads()
        gradients = gradients_of(self.optimizer, self.layout)
        usable = math.isfinite(facts.loss) and not overflow

        decision = self._decide(gradients, facts, lr, usable)
        norm = decision.norm_after
        if norm is None:
            norm = math.sqrt(squared_norm(gradients))
        found = norm if decision.norm_before is None else decision.norm_before
        # A control may have measured, or produced, a norm that is not finite.
        usable = usable and math.isfinite(norm) and math.isfinite(found)
        skip = decision.skip or not usable
        self.nonfinite += not usable
        self.nonfinite_in_a_row = 0 if usable else self.nonfinite_in_a_row + 1
        if usable:
            self.nonfinite_ids.clear()

        spike = self.norms.spike(found) if usable else None
        strange = spike if usable else NotFinite(facts.loss, found)
        if strange is not None and report is not None:
            ids = report(strange, gradients)
            self.nonfinite_ids += () if usable else ids
            # `report` may have replaced the shards.
            gradients = gradients_of(self.optimizer, self.layout)
        skip = skip or (spike is not None and self.on_anomaly == "skip")
        if usable:
            # After the check, so that a gradient is compared with earlier ones only.
            self.norms.add(found)

        metrics = dict(decision.metrics)
        lengthened = 1.0
        beta1 = decision.beta1 if decision.beta1 is not None else self.settings.betas[0]
        if not skip:
            clip_to(gradients, norm, self.settings.clip_grad)
            scale(gradients, decision.gradient_scale)
            # Only if the step is not skipped: otherwise Adam's moment does not change.
            self.beta1_product = self.beta1_product.times(beta1)
            correction = self.beta1_product.lr_factor(self.updates + 1)
            step_lr = lr * decision.lr_scale * correction
            for group, decay in zip(self.optimizer.param_groups, self._weight_decay, strict=True):
                group["lr"] = step_lr
                # Adam multiplies decay by the learning rate, whose correction must not affect it.
                group["weight_decay"] = decay / correction
                group["betas"] = (beta1, self.settings.betas[1])
            # After clipping, so that corrections get the update that Adam will make.
            lengthened = self._correct(gradients, facts.kl, displacement, metrics)
            self.optimizer.step_with_ready_grads()
            for group, decay in zip(self.optimizer.param_groups, self._weight_decay, strict=True):
                # The correction applies only to this step, and `last` records it.
                group["lr"], group["weight_decay"] = lr * decision.lr_scale, decay
            self.updates += 1
            # `last_update` recomputes Adam's update from these, so none is stored.
            self.last = TakenStep(step_lr, beta1)

        return (
            metrics
            | self._update_norm(None if skip else gradients, lengthened)
            | {
                "policy/grad_norm": norm,
                **({} if spike is None else {"policy/grad_anomaly": spike.norm / spike.median}),
                "policy/lr": lr,
                "policy/lr_scale": decision.lr_scale,
                "policy/beta1": beta1,
                "policy/skipped": float(skip),
                "policy/nonfinite": float(self.nonfinite),
            }
        )

    def skip(self) -> dict[str, float]:
        """Skip a batch that has nothing to learn from: only the clock advances."""
        lr = learning_rate(self.settings, self.steps, self.total_steps)
        self.steps += 1
        skipped = {
            "policy/lr": lr,
            "policy/skipped": 1.0,
            "policy/nonfinite": float(self.nonfinite),
        }
        return skipped | self._update_norm(None, 1.0)

    def _decide(self, gradients: Gradients, facts: StepFacts, lr: float, usable: bool) -> Decision:
        """Combine the controls' decisions; controls never see an unusable gradient."""
        if not usable:
            for control in self.controls.values():
                control.reset()
            return Decision()
        view = StepView(
            gradients=gradients,
            optimizer=self._view(),
            log_weights=facts.log_weights,
            lag_max=facts.lag_max,
            moved=facts.moved,
            lr=lr,
            is_anomaly=lambda norm: self.norms.spike(norm) is not None,
        )
        return combined(control.apply(view) for control in self.controls.values())

    def _correct(
        self,
        gradients: Gradients,
        kl: float,
        displacement: WeightDisplacement | None,
        metrics: dict[str, float],
    ) -> float:
        """Let the controls correct the update for which the optimizer is set, and add their
        metrics; return the length of the corrected update, relative to Adam's own."""
        lengthened = 1.0
        for control in self.controls.values():
            correction = control.before_update(
                UpdateView(
                    gradients=gradients,
                    update=self._view().next_update(),
                    displacement=displacement,
                    kl=kl,
                )
            )
            metrics |= correction.metrics
            lengthened *= correction.length
            if correction.along != 0.0 and displacement is not None:
                displacement.add(correction.along)
        return lengthened

    def _view(self) -> AdamView:
        return AdamView(self.optimizer, self.settings, self.updates, self.last)

    def _update_norm(self, gradients: Gradients | None, lengthened: float) -> dict[str, float]:
        """Return the length of the update just made, `lengthened` times that of Adam's part; 0
        without one. Only measured on request, because it costs a sweep over Adam's state and an
        all-reduce of one scalar."""
        requested = self.settings.log_update_norm or any(
            control.needs_update_norm for control in self.controls.values()
        )
        if not requested:
            return {}
        update = self._view().last_update() if gradients is not None else None
        if gradients is None or update is None or self.last is None:
            return {"update/norm": 0.0}
        norm = math.sqrt(squared_norm_of(gradients, update))
        self.last = replace(self.last, norm=norm)
        return {"update/norm": lengthened * norm}

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "updates": self.updates,
            "nonfinite": self.nonfinite,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "last": None if self.last is None else asdict(self.last),
            "beta1_product": self.beta1_product.state_dict(),
            "norms": self.norms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.updates = state["steps"], state["updates"]
        self.nonfinite = state["nonfinite"]
        self.last = None if state["last"] is None else TakenStep(**state["last"])
        # The entries below are absent, or a plain list of norms, in checkpoints of earlier
        # versions.
        self.nonfinite_in_a_row = state.get("nonfinite_in_a_row", 0)
        beta1 = self.settings.betas[0] if self.last is None else self.last.beta1
        self.beta1_product = Beta1Product.of_state(state.get("beta1_product"), beta1, self.updates)
        norms = state.get("norms", [])
        if isinstance(norms, list):
            norms = {"values": norms, "largest_median": max(norms, default=0.0)}
        self.norms.load_state_dict(norms)


# fmt: off
COLUMNS = (
    "loss", "entropy", "log_weight", "k2", "k3", "chi2", "difference", "difference_max",
    "difference_lag0_max", "clipped_positive", "clipped_negative", "positive", "negative",
    "rejected", "weight", "kl_ref", "term_kl", "term_entropy", "term_value",
)
# fmt: on

TERMS = ("kl", "entropy", "value")
"""Terms that may be added to the loss (`BatchLoss.terms`)."""


class StepTable:
    """[S, len(COLUMNS)] float64: sums, or maxima, over each sample's trained tokens."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self.values = torch.zeros((samples, len(COLUMNS)), dtype=torch.float64, device=device)

    @torch.no_grad()
    def record(
        self, micro_batch: MicroBatch, tokens: TokenBatch, loss: BatchLoss, version: int
    ) -> None:
        """Record a micro-batch. tokens: with `entropy`; loss: of this micro-batch."""
        if not micro_batch.samples:
            return
        log_weight = (tokens.logp - tokens.logp_behavior).double()
        bounded = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        difference = log_weight.abs()
        # A token of this version in a response that an older version began was sampled over the
        # older version's keys and values. float64 throughout: sums over tokens of a sample are the
        # metrics' only rounding.
        older = (micro_batch.versions != version).double()
        begun = older.new_zeros(tokens.sequences).scatter_reduce(0, tokens.sequence, older, "amax")
        lag0 = 1.0 - begun[tokens.sequence]
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
        # Assigned, not added, so that a second pass over the same samples replaces its rows.
        self.values[micro_batch.batch_samples] = torch.stack(
            [columns[name] for name in COLUMNS], dim=1
        )
        self._record_depths(micro_batch, tokens, difference, (tokens.mask > 0) & (lag0 > 0))

    def _record_depths(
        self, micro_batch: MicroBatch, tokens: TokenBatch, difference: Tensor, at_lag0: Tensor
    ) -> None:
        """Record |logp - logp_behavior|, [N] float64, of the tokens `at_lag0`, [N] bool, by depth.
        Does nothing here; `Lag0Table` implements it."""

    def weigh(self, advantages: Tensor) -> None:
        """Convert rows recorded at advantage 1 to those of `advantages`, [S]: the loss, and the
        counts that depend on its sign."""
        advantages = advantages.to(self.values.device)
        self._column("loss").mul_(advantages)
        for name in ("positive", "clipped_positive"):
            counted = self._column(name).clone()
            self._column(name).copy_(counted * (advantages > 0))
            self._column(name.replace("positive", "negative")).copy_(counted * (advantages < 0))

    def add_terms(self, other: StepTable) -> None:
        """Add the terms of another pass over the same samples, whose loss consisted only of terms;
        this table's loss had none."""
        self._column("loss").add_(other._column("loss"))
        for term in TERMS:
            self._column(f"term_{term}").copy_(other._column(f"term_{term}"))

    def _column(self, name: str) -> Tensor:
        return self.values[:, COLUMNS.index(name)]

    def complete(self, group: Any) -> NDArray[np.float64]:
        """Return the rows of all samples, on the host: the one copy of a step's measurements from
        the device. Collective over `group`."""
        dist.all_reduce(self.values, group=group)
        return self.values.cpu().numpy()


class RecordedLoss:
    """The objective's loss of a micro-batch, from its log-probs on the last stage; also records the
    rows of the table.

    table: null if another tensor-parallel rank records. owner: the data-parallel rank. advantage:
    of every trained token; null for the batch's own. with_terms: False leaves out the terms added
    to the loss.
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
        targets.gather(owner)  # before the micro-batches run, so that none waits for it
        self._advantage = advantage
        self._with_terms = with_terms

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
        targets = self._targets
        tokens = targets.micro_batch(
            self._owner,
            micro_batch.owned_tokens,
            micro_batch.batch_samples,
            micro_batch.sequence,
            dtype=outputs.logp.dtype,
        )
        tokens = tokens.replace(logp=outputs.logp, entropy=outputs.entropy)
        # Value clipping is relative to the estimates before the step: the batch's `values`.
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
        # Not divided, because denominators already are those of the whole step.
        return loss.parts.sum()


def sample_losses(table: NDArray[np.float64]) -> list[float]:
    """Return each sample's part of the step's loss, from a completed table."""
    losses: list[float] = table[:, COLUMNS.index("loss")].tolist()
    return losses


def sample_log_weights(table: NDArray[np.float64], samples: RankBatch) -> NDArray[np.float64]:
    """Return sum_t log(pi / mu) of each sample with trained tokens, untruncated, from a completed
    table; empty for given responses."""
    return table[samples.sampled & (samples.trained > 0), COLUMNS.index("log_weight")]


def step_metrics(table: NDArray[np.float64], samples: RankBatch) -> dict[str, float]:
    """Return the metrics of a completed table, row by row of `samples`, without samples without
    trained tokens. Keys are those of metrics/catalogue.py."""
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
    # No number at all means not configured. A penalty that happens to be 0 is logged as 0.
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
