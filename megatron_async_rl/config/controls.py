"""Settings of the gradient controls: one small model per control, chosen by its
`name`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from megatron_async_rl.config.losses import Ratio, ReadsRatios
from megatron_async_rl.config.settings_model import Strict, bare_name, or_plug_in

Cosine = Annotated[float, Field(gt=-1.0, lt=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class ControlSettings(ReadsRatios):
    """The class attributes are facts about the control, for config/rules.py."""

    method_type: ClassVar[tuple[str, str]] = (
        "a subclass of",
        "megatron_async_rl.controls.decision.Control",
    )
    folder: ClassVar[str] = "megatron_async_rl.controls"
    # Facts of the class, so that rules cover plug-ins and never test for a name.
    sets_beta1: ClassVar[bool] = False
    """Decides Adam's beta1; two of them would overrule each other."""
    scales_lr: ClassVar[bool] = False
    """Multiplies the learning rate."""
    judges_alignment: ClassVar[bool] = False
    """Is GAC, or does what it does by other means."""
    needs_sampled: ClassVar[bool] = False
    """Reads pi / mu, whatever its settings; given responses have none."""
    needs_past_weights: ClassVar[bool] = False
    """Looks at the weights that sampled the batch; `objective.snapshots` versions of them are
    kept."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # Reading pi / mu is what makes a control need sampled responses.
        return frozenset({"pi/mu"} if self.needs_sampled else ())

    @property
    def fresh_steps(self) -> int:
        """Optimizer steps that a run begins with synchronously for this control."""
        return 0


class CalibrateConfig(Strict):
    """Calibrate c_low from the run's own cosines on fresh data. The first `steps` + 1 steps of the
    run are synchronous."""

    steps: PositiveInt = 32
    """Cosines to collect. Until there are as many, every gradient is kept."""
    quantile: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """c_low becomes this quantile of them."""


def _never_turned_back(c_low: float) -> float:
    # Orthogonal is the least that a projection may leave.
    if c_low < 0.0:
        raise ValueError(
            "must be at least 0: projecting to a negative cosine would turn the gradient against"
            " its predecessor"
        )
    return c_low


class AlignmentSettings(ControlSettings):
    """Thresholds on the cosine of consecutive gradients. They and the exact projection are this
    project's own."""

    judges_alignment: ClassVar[bool] = True

    c_low: Annotated[float, AfterValidator(_never_turned_back), Field(lt=1.0)] = 0.15
    """Cosine up to which the gradient is unchanged; at least 0. `calibrate` replaces it."""
    c_high: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Cosine above which the step is skipped; null never skips. At least 0.7 is advised: low
    values deadlock."""
    target: Literal["threshold", "zero"] = "threshold"
    """Project to cosine c_low exactly, or remove the aligned component."""
    reference: Literal["raw", "applied"] = "raw"
    """Form of the previous gradient to compare with: as computed, or as applied."""
    max_consecutive_skips: PositiveInt = 4
    """A skip freezes the weights, so the next gradient is as aligned; after this many the step is
    projected instead."""
    calibrate: CalibrateConfig | None = None
    """Null: c_low is the number above."""
    reference_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Number format of the stored previous gradient: 4, 2 or about 1 byte per parameter. The
    cosine changes by at most 0.002 (bf16) or 0.06 (fp8), and usually by far less."""
    reference_offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps it in page-locked host memory, copied during the optimizer's step; on a CPU it
    changes nothing."""

    @property
    def fresh_steps(self) -> int:
        # A cosine compares two gradients, so n cosines need n + 1 steps.
        return self.calibrate.steps + 1 if self.calibrate is not None else 0

    @model_validator(mode="after")
    def _ordered(self) -> AlignmentSettings:
        # With `calibrate` the threshold is known only during the run.
        if self.calibrate is None and self.c_high is not None and self.c_high <= self.c_low:
            raise ValueError(
                f"c_high ({self.c_high}) must be above c_low ({self.c_low}), or null to never skip"
            )
        return self


class GacControl(AlignmentSettings):
    """Gradient alignment control (arXiv 2603.01501). Thresholds and the exact projection are this
    project's own."""

    method: ClassVar[Any] = "controls.gac:Gac"

    name: Literal["gac"] = "gac"


# Null baselines change one effect of a control and leave out the mechanism.
class MatchedNormControl(AlignmentSettings):
    """Null baseline of gac, with gac's settings: shortens the gradient as gac would, without
    changing its direction."""

    method: ClassVar[Any] = "controls.gac:MatchedNorm"

    name: Literal["matched_norm"] = "matched_norm"


class MatchedLrControl(ControlSettings):
    """Null baseline of any control: scales the learning rate so that the mean update norm equals
    that control's. Logs `update/norm`, at the cost of one more pass over Adam's state."""

    method: ClassVar[Any] = "controls.gac:MatchedLr"
    scales_lr: ClassVar[bool] = True

    name: Literal["matched_lr"] = "matched_lr"
    target_update_norm: PositiveFloat
    """Mean `update/norm` of the control's run, which logs it with
    policy.optimizer.log_update_norm: true."""


class Beta1Control(ControlSettings):
    """Null baseline: another constant beta1 of Adam."""

    method: ClassVar[Any] = "controls.gac:Beta1"
    sets_beta1: ClassVar[bool] = True

    name: Literal["beta1"] = "beta1"
    beta1: Decay = 0.5
    """Replaces policy.optimizer.betas[0]."""


class MomentumByAlignmentControl(ControlSettings):
    """Lowers Adam's beta1 linearly while the gradient is aligned with the optimizer's direction (a
    method of this project)."""

    method: ClassVar[Any] = "controls.momentum_by_alignment:MomentumByAlignment"
    sets_beta1: ClassVar[bool] = True

    name: Literal["momentum_by_alignment"] = "momentum_by_alignment"
    against: Literal["momentum", "last_update"] = "momentum"
    """Direction to compare the gradient with: Adam's first moment, or the negated last update."""
    c_low: Cosine = 0.1
    """Cosine up to which beta1 is beta1_max."""
    c_high: Annotated[float, Field(gt=-1.0, le=1.0)] = 0.6
    """Cosine from which beta1 is beta1_min."""
    beta1_min: Decay = 0.0
    """Smallest beta1."""
    beta1_max: Decay | None = None
    """Largest beta1; null: policy.optimizer.betas[0]."""

    @model_validator(mode="after")
    def _ordered(self) -> MomentumByAlignmentControl:
        # beta1 falls linearly between the two, so the interval must not be empty.
        if self.c_high <= self.c_low:
            raise ValueError(f"c_high ({self.c_high}) must be above c_low ({self.c_low})")
        if self.beta1_max is not None and self.beta1_max <= self.beta1_min:
            raise ValueError(
                f"beta1_max ({self.beta1_max}) must be above beta1_min ({self.beta1_min})"
            )
        return self


class EssLrControl(ControlSettings):
    """Learning rate by effective sample size (VCPO, arXiv 2602.17616): lr x rule(min(1, (ESS / B) /
    reference_ratio))."""

    method: ClassVar[Any] = "controls.ess_lr:EssLr"
    scales_lr: ClassVar[bool] = True
    needs_sampled: ClassVar[bool] = True

    name: Literal["ess_lr"] = "ess_lr"
    rule: Literal["sqrt", "linear"] = "sqrt"
    """Square root of the relative ESS, or the relative ESS itself."""
    reference_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] = 1.0
    """ESS / B at which the learning rate is not reduced; `auto`: the mean over the run's on-policy
    steps so far."""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Smallest factor."""
    use_truncated: bool = False
    """Truncate each sequence's weight to `cap` before the ESS is computed."""
    cap: PositiveFloat = 8.0
    """Largest sequence weight with `use_truncated`."""

    @property
    def multiplies_over_response(self) -> bool:
        return True


class DisplacementControl(ControlSettings):
    """Experimental method of this project: removes from the optimizer's update the component along
    the displacement of the weights since they sampled the batch. Keeps `objective.snapshots`
    versions of the weights."""

    method: ClassVar[Any] = "controls.displacement:Displacement"
    needs_past_weights: ClassVar[bool] = True

    name: Literal["displacement"] = "displacement"
    c_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Cosine of update and displacement up to which the update is unchanged."""
    target: Literal["threshold", "zero"] = "zero"
    """Shrink the component along the displacement until the cosine is c_low, or remove it."""
    tolerated_kl: Annotated[float, Field(ge=0.0)] = 0.0
    """Divergence from the sampling policy, `ratio/kl_k2`, up to which nothing is removed; above it,
    the share 1 - tolerated_kl / divergence is removed. 0 always removes all of it."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # The divergence is estimated from pi / mu only where it is compared.
        return frozenset({"pi/mu"} if self.tolerated_kl > 0.0 else ())


ControlConfig = Annotated[
    Annotated[
        Union[
            GacControl,
            MatchedNormControl,
            MatchedLrControl,
            Beta1Control,
            MomentumByAlignmentControl,
            EssLrControl,
            DisplacementControl,
        ],
        Field(discriminator="name"),
    ],
    or_plug_in(ControlSettings),
    BeforeValidator(bare_name),
    # A plug-in has fields of its own, which the stored configuration must keep.
    SerializeAsAny(),
]
