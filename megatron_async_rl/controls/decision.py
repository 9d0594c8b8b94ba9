"""The interface of gradient controls: a control's view of the coming step, and its decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.settings_model import method_of
from megatron_async_rl.gradients import Gradients


class OptimizerView(Protocol):
    """View of the optimizer for a control. Lists have one tensor per gradient shard, of the
    shard's shape, float32."""

    @property
    def beta1(self) -> float:
        """Adam's beta1 of the configuration, used by steps for which no control sets another."""
        ...

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far in the run; a skipped step does not count."""
        ...

    def momentum(self) -> Sequence[Tensor] | None:
        """Adam's first moment, to be read; None on every rank before the first step. A tensor that
        is not kept in float32 on the device is made at its first use."""
        ...

    def last_update(self) -> Sequence[Tensor] | None:
        """Change of the parameters by the last step that was taken, without weight decay; None on
        every rank before the first.

        Adam's own part of it: what a control moved the parameters by besides (`UpdateCorrection`)
        is not in it. Each tensor is computed at its first use.
        """
        ...

    @property
    def last_update_norm(self) -> float | None:
        """|last_update| over the model; None before the first step, and if no control has set
        `needs_update_norm` and the configuration does not log it."""
        ...


def never(norm: float) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
    """gradients: reduced, before clipping, changeable in place. optimizer: readable.

    log_weights: [S] float64, sum over each trained sequence's tokens of log(pi / mu), untruncated,
    the same on every rank; empty for given responses. lag_max: versions, of the batch's oldest
    token. moved: an earlier optimizer step of the batch has changed the weights, so that a lag of 0
    is not on-policy. lr: the scheduler's, for this step. is_anomaly: True for a gradient norm far
    outside the run's history; such a gradient is nothing to compare the next one with.
    """

    # Reduced over all ranks, so that every rank sees the same norms.
    gradients: Gradients
    optimizer: OptimizerView
    log_weights: NDArray[np.float64]
    lag_max: int
    lr: float
    is_anomaly: Callable[[float], bool] = never
    moved: bool = False


@dataclass(frozen=True)
class Decision:
    """skip: leave weights, moments, step count and weight decay alone. lr_scale: factor on this one
    step's learning rate.

    gradient_scale: factor on the gradient after clipping, this step. beta1: of this one step; None
    keeps it. norm_before, norm_after: |g| over the model as the control found the gradient and as
    it leaves it, so that it is not measured again; None where it did not look. A control that
    changes gradients in place sets both.
    """

    skip: bool = False
    # Neutral defaults: decisions combine by multiplication.
    lr_scale: float = 1.0
    gradient_scale: float = 1.0
    # Null, because no number means "leave it".
    beta1: float | None = None
    norm_before: float | None = None
    norm_after: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def combined(decisions: Iterable[Decision]) -> Decision:
    """Return the decision of all controls: factors multiply, the last beta1 and the last norm hold,
    and any may skip. `norm_before` is the first measured: later ones are of a changed gradient."""
    # In the order of the configuration, so that "last" has a meaning.
    whole = Decision()
    for each in decisions:
        whole = Decision(
            skip=whole.skip or each.skip,
            lr_scale=whole.lr_scale * each.lr_scale,
            gradient_scale=whole.gradient_scale * each.gradient_scale,
            beta1=whole.beta1 if each.beta1 is None else each.beta1,
            norm_before=each.norm_before if whole.norm_before is None else whole.norm_before,
            norm_after=whole.norm_after if each.norm_after is None else each.norm_after,
            metrics={**whole.metrics, **each.metrics},
        )
    return whole


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateView:
    """Update that the optimizer is about to apply, one tensor per gradient shard, of the
    shard's shape.

    update: Adam's, of the gradient as controls and clipping left it, with this step's lr and beta1,
    without weight decay. displacement: the weights as they are minus those that the batch's samples
    began under (the mean over trained tokens where they differ); null on every rank where those are
    the same, or the run keeps no past weights. Tensors of both are computed when they are read,
    each time again. gradients: after clipping, not to be changed any more. kl: estimate k2 of the
    divergence of the policy from the sampling policy, mean over trained tokens of (log(pi / mu))^2
    / 2, nats per token, the same on every rank; 0 for given responses.
    """

    gradients: Gradients
    update: Iterable[Tensor]
    displacement: Iterable[Tensor] | None
    kl: float = 0.0


@dataclass(frozen=True)
class UpdateCorrection:
    """along: the parameters move by this much of the displacement besides the update. length: of
    the two together, over the update's own."""

    along: float = 0.0
    length: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Control:
    """Called on every rank once per optimizer step, on the fully reduced gradient, before clipping
    (`apply`), and again just before the optimizer changes the parameters, where no control
    skips the step (`before_update`).

    Its decision must be the same on every rank, so it may rest only on all-reduced numbers, reduced
    with a fixed number of collectives per step. State comes in two parts: numbers that are the same
    on every rank (`state_dict`), and what has one tensor per gradient shard (`shard_state`), which
    a checkpoint carries over to another parallel layout.
    """

    needs_update_norm: bool = False
    """Reads `optimizer.last_update_norm`, which costs a sweep over Adam's state after each step."""

    def apply(self, step: StepView) -> Decision:
        return Decision()

    def before_update(self, update: UpdateView) -> UpdateCorrection:
        return UpdateCorrection()

    def reset(self) -> None:
        """Forget what compares one step with the next: this step has no usable gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and containers of them, the same on every rank and on every layout."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def shard_state(self) -> dict[str, list[Tensor]]:
        """Name -> one float32 tensor per gradient shard of this rank, in their order and of their
        shapes.

        A name whose state does not exist at the moment is left out. May be views of the state
        itself: to be read before the next step.
        """
        return {}

    def device_state(self) -> list[Tensor]:
        """Tensors that it keeps on the gradients' device from step to step: colocated, they wait in
        host memory while engines have their turn, and are the same tensors after."""
        return []

    def load_shard_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Take what `shard_state` returned, cut for this rank's gradient shards (copied); a name
        that is absent has no state.

        Called once after `load_state_dict`, also with an empty mapping.
        """


def build_controls(configs: Iterable[Any]) -> dict[str, Control]:
    """Name -> control, in the order of the configuration, in which they are applied."""
    return {config.name: method_of(config)(config) for config in configs}
