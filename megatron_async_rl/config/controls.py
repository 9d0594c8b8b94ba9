"""Settings of the gradient controls: one model per control, which the configuration selects by
its `name`."""

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
from megatron_async_rl.config.policy import Decay
from megatron_async_rl.config.settings_model import Strict, bare_name, or_plug_in

Cosine = Annotated[float, Field(gt=-1.0, lt=1.0)]


class ControlSettings(ReadsRatios):
    """Base of every control's settings. The class attributes are properties of the control, which
    config/rules.py reads."""

    method_type: ClassVar[tuple[str, str]] = (
        "a subclass of",
        "megatron_async_rl.controls.decision.Control",
    )
    folder: ClassVar[str] = "megatron_async_rl.controls"
    # Class attributes, so that rules also cover plug-ins and never test for a name.
    sets_beta1: ClassVar[bool] = False
    """True if the control sets Adam's beta1. Two such controls would override each other."""
    scales_lr: ClassVar[bool] = False
    """True if the control multiplies the learning rate."""
    judges_alignment: ClassVar[bool] = False
    """True if the control acts on the cosine of consecutive gradients, as GAC does."""
    needs_sampled: ClassVar[bool] = False
    """True if the control reads pi / mu with any settings. Given responses have no such ratio."""
    needs_past_weights: ClassVar[bool] = False
    """True if the control reads the weights that sampled the batch. The run keeps
    the newest versions of them (`objective.snapshots`)."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # A control needs sampled responses because it reads pi / mu.
        return frozenset({"pi/mu"} if self.needs_sampled else ())

    @property
    def fresh_steps(self) -> int:
        """Number of synchronous optimizer steps that this control needs at the start of a run."""
        return 0


class CalibrateConfig(Strict):
    """Calibrate c_low from the run's own cosines on fresh data. The first `steps` + 1 steps of the
    run are synchronous."""

    steps: PositiveInt = 32
    """Number of cosines to collect. Gradients are unchanged until the calibration is complete."""
    quantile: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Quantile of these cosines that becomes c_low."""


def _not_reversed(c_low: float) -> float:
    # A projection may at most make the gradient orthogonal to its predecessor.
    if c_low < 0.0:
        raise ValueError(
            "must be at least 0: projecting to a negative cosine would turn the gradient against"
            " its predecessor"
        )
    return c_low


class AlignmentSettings(ControlSettings):
    """Thresholds on the cosine of consecutive gradients. The thresholds and the exact projection
    are this project's own."""

    judges_alignment: ClassVar[bool] = True

    c_low: Annotated[float, AfterValidator(_not_reversed), Field(lt=1.0)] = 0.15
    """Cosine up to which the gradient is unchanged; at least 0. `calibrate` replaces it."""
    c_high: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Cosine above which the step is skipped; null never skips. Use at least 0.7: with low values
    training deadlocks."""
    target: Literal["threshold", "zero"] = "threshold"
    """Projection of the gradient. `threshold`: to a cosine of exactly c_low. `zero`: the aligned
    component is removed."""
    reference: Literal["raw", "applied"] = "raw"
    """Gradient to compare with. `raw`: that of the previous step as computed, also after a skip.
    `applied`: the last applied gradient, after its projection."""
    max_consecutive_skips: PositiveInt = 4
    """Number of consecutive skips after which the step is projected instead: a skip does not change
    the weights, so the next gradient is equally aligned."""
    calibrate: CalibrateConfig | None = None
    """Calibration of c_low; null uses the value of `c_low`."""
    reference_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Number format of the stored previous gradient: 4, 2 or about 1 byte per parameter. The
    cosine changes by at most 0.002 (bf16) or 0.06 (fp8), and usually by far less."""
    reference_offload: Literal["none", "cpu"] = "none"
    """Memory of the stored gradient. `cpu` keeps it in page-locked host memory and copies it during
    the optimizer step; it has no effect on a CPU."""

    @property
    def fresh_steps(self) -> int:
        # A cosine needs two gradients, so n cosines need n + 1 steps.
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
    """Gradient alignment control (arXiv 2603.01501). The thresholds and the exact projection are
    this project's own."""

    method: ClassVar[Any] = "controls.gac:Gac"

    name: Literal["gac"] = "gac"


# Null baselines reproduce one effect of a control without its mechanism.
class MatchedNormControl(AlignmentSettings):
    """Null baseline of gac, with gac's settings: scales the gradient to the norm that gac would
    leave, without a change of direction."""

    method: ClassVar[Any] = "controls.gac:MatchedNorm"

    name: Literal["matched_norm"] = "matched_norm"


class MatchedLrControl(ControlSettings):
    """Null baseline of any control: scales the learning rate such that the mean update norm equals
    that of the control. Logs `update/norm`, at the cost of one more pass over Adam's state."""

    method: ClassVar[Any] = "controls.gac:MatchedLr"
    scales_lr: ClassVar[bool] = True

    name: Literal["matched_lr"] = "matched_lr"
    target_update_norm: PositiveFloat
    """Mean `update/norm` of a run with the control and with
    policy.optimizer.log_update_norm: true."""


class Beta1Control(ControlSettings):
    """Null baseline: another constant beta1 of Adam."""

    method: ClassVar[Any] = "controls.gac:Beta1"
    sets_beta1: ClassVar[bool] = True

    name: Literal["beta1"] = "beta1"
    beta1: Decay = 0.5
    """Replaces policy.optimizer.betas[0]."""


class MomentumByAlignmentControl(ControlSettings):
    """Lowers Adam's beta1 linearly in the alignment of the gradient with the optimizer's direction
    (a method of this project)."""

    method: ClassVar[Any] = "controls.momentum_by_alignment:MomentumByAlignment"
    sets_beta1: ClassVar[bool] = True

    name: Literal["momentum_by_alignment"] = "momentum_by_alignment"
    against: Literal["momentum", "last_update"] = "momentum"
    """Direction to compare the gradient with: Adam's first moment, or the negated last update."""
    c_low: Cosine = 0.1
    """Cosine at and below which beta1 is beta1_max."""
    c_high: Annotated[float, Field(gt=-1.0, le=1.0)] = 0.6
    """Cosine at and above which beta1 is beta1_min."""
    beta1_min: Decay = 0.0
    """Smallest beta1."""
    beta1_max: Decay | None = None
    """Largest beta1; null uses policy.optimizer.betas[0]."""

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
    """Scales the learning rate by the effective sample size (VCPO, arXiv 2602.17616): lr x
    rule(min(1, (ESS / B) / reference_ratio))."""

    method: ClassVar[Any] = "controls.ess_lr:EssLr"
    scales_lr: ClassVar[bool] = True
    needs_sampled: ClassVar[bool] = True

    name: Literal["ess_lr"] = "ess_lr"
    rule: Literal["sqrt", "linear"] = "sqrt"
    """Function of the relative ESS: its square root (`sqrt`), or the relative ESS (`linear`)."""
    reference_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] = 1.0
    """ESS / B at and above which the learning rate is not reduced; `auto` uses the mean over the
    run's on-policy steps so far."""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Smallest factor of the learning rate."""
    use_truncated: bool = False
    """Truncate each sequence's weight to `cap` before the ESS is computed."""
    cap: PositiveFloat = 8.0
    """Largest sequence weight with `use_truncated`."""

    @property
    def multiplies_over_response(self) -> bool:
        return True


class DisplacementControl(ControlSettings):
    """Experimental method of this project: removes the component of the optimizer's update along
    the displacement, the change of the weights since the version that sampled the batch. The run
    keeps the newest versions of the weights (`objective.snapshots`)."""

    method: ClassVar[Any] = "controls.displacement:Displacement"
    needs_past_weights: ClassVar[bool] = True

    name: Literal["displacement"] = "displacement"
    c_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Cosine of update and displacement up to which the update is unchanged."""
    target: Literal["threshold", "zero"] = "zero"
    """Projection of the update. `threshold`: the component along the displacement is reduced until
    the cosine is c_low. `zero`: the component is removed."""
    tolerated_kl: Annotated[float, Field(ge=0.0)] = 0.0
    """Divergence from the sampling policy, `ratio/kl_k2`, up to which the update is unchanged;
    above it, the share 1 - tolerated_kl / divergence of the component is removed. 0 always removes
    all of it."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # Only a positive tolerated_kl needs the divergence, which is estimated from pi / mu.
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
    # The stored configuration must keep a plug-in's own fields.
    SerializeAsAny(),
]
