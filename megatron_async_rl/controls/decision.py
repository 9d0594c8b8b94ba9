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
    """Optimizer as controls see it. Lists have one tensor per gradient shard, of the shard's shape,
    float32."""

    @property
    def beta1(self) -> float:
        """Adam's beta1 of the configuration, for steps in which no control sets another."""
        ...

    @property
    def updates(self) -> int:
        """Number of optimizer steps so far in the run; a skipped step does not count."""
        ...

    def momentum(self) -> Sequence[Tensor] | None:
        """Adam's first moment, read-only; None on every rank before the first step. A tensor that
        is not kept in float32 on the device is made when it is first read."""
        ...

    def last_update(self) -> Sequence[Tensor] | None:
        """Change of the parameters by the last step that was not skipped, without weight decay;
        None on every rank before the first.

        This is Adam's part of the change: it does not contain the part that a control added
        (`UpdateCorrection`). Each tensor is computed when it is first read.
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
    """The coming step. gradients: reduced, before clipping, may be changed in place. optimizer:
    read-only.

    log_weights: [S] float64, sum over each trained sequence's tokens of log(pi / mu), untruncated,
    the same on every rank; empty for given responses. lag_max: lag in versions of the batch's
    oldest token. moved: True if an earlier optimizer step of the batch has changed the weights, so
    that a lag of 0 is not on-policy. lr: the scheduler's, for this step. is_anomaly: returns True
    for a gradient norm far outside the run's history; the next gradient must not be compared with
    such a gradient.
    """

    # Reduced over all ranks, so that every rank has the same norms.
    gradients: Gradients
    optimizer: OptimizerView
    log_weights: NDArray[np.float64]
    lag_max: int
    lr: float
    is_anomaly: Callable[[float], bool] = never
    moved: bool = False


@dataclass(frozen=True)
class Decision:
    """Decision about one step. skip: do not change weights, moments and step count, and apply no
    weight decay. lr_scale: factor on the learning rate of this step.

    gradient_scale: factor on the gradient after clipping, in this step. beta1: for this step; None
    keeps it. norm_before, norm_after: |g| over the model before and after the control, so that it
    is not measured again; None if the control did not measure it. A control that changes gradients
    in place sets both.
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
    """Return the combined decision of all controls: factors multiply, the last beta1 and the last
    `norm_after` apply, and each control may skip. `norm_before` is the first one measured, because
    later ones belong to a changed gradient."""
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
    """Update that the optimizer is about to apply, one tensor per gradient shard, of the shard's
    shape.

    update: Adam's, of the gradient after controls and clipping, with this step's lr and beta1,
    without weight decay. displacement: the present weights minus those under which the batch's
    samples began (the mean over trained tokens if they differ); null on every rank if they are
    equal, or if the run keeps no past weights. Tensors of both are computed each time they are
    read. gradients: after clipping, read-only. kl: estimate k2 of the divergence of the policy from
    the sampling policy, mean over trained tokens of (log(pi / mu))^2 / 2, nats per token, the same
    on every rank; 0 for given responses.
    """

    gradients: Gradients
    update: Iterable[Tensor]
    displacement: Iterable[Tensor] | None
    kl: float = 0.0


@dataclass(frozen=True)
class UpdateCorrection:
    """Change to an update. along: multiple of the displacement that is added to the update. length:
    length of the sum, relative to the update's."""

    along: float = 0.0
    length: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Control:
    """Base class of controls. The optimizer step calls it on every rank once per step, on the fully
    reduced gradient, before clipping (`apply`), and again just before the optimizer changes the
    parameters, if no control skips the step (`before_update`).

    The decision must be the same on every rank, so it may depend only on all-reduced numbers, which
    need a fixed number of collectives per step. State has two parts: numbers that are the same on
    every rank (`state_dict`), and tensors, one per gradient shard (`shard_state`), which a
    checkpoint converts to another parallel layout.
    """

    needs_update_norm: bool = False
    """True to get `optimizer.last_update_norm`, which costs a sweep over Adam's state each step."""

    def apply(self, step: StepView) -> Decision:
        return Decision()

    def before_update(self, update: UpdateView) -> UpdateCorrection:
        return UpdateCorrection()

    def reset(self) -> None:
        """Forget what the next step would be compared with, because this gradient is unusable."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and containers of them, the same on every rank and with every layout."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def shard_state(self) -> dict[str, list[Tensor]]:
        """Name -> one float32 tensor per gradient shard of this rank, in their order and of their
        shapes.

        A name without state at the moment is left out. The tensors may be views of the state
        itself: read them before the next step.
        """
        return {}

    def device_state(self) -> list[Tensor]:
        """Tensors that the control keeps on the gradients' device between steps. In a colocated run
        they are moved to host memory while engines use the device, and are the same tensors
        afterwards."""
        return []

    def load_shard_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Load the result of `shard_state`, cut for this rank's gradient shards (copied); a name
        that is absent has no state.

        Called once after `load_state_dict`, also with an empty mapping.
        """


def build_controls(configs: Iterable[Any]) -> dict[str, Control]:
    """Return name -> control, in the order of the configuration, in which they are applied."""
    return {config.name: method_of(config)(config) for config in configs}
