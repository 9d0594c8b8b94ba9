"""What a user may say about the objective and the step controls: one small model per method, chosen by its `name`.

A method without settings may be written as its bare name: `loss: reinforce` is `loss: {name: reinforce}`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from megatron_async_rl.config.strict import Strict


def _bare_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class GrpoAdvantage(Strict):
    """(R - mean) / (std + 1e-6) over the group, unbiased std (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """False is Dr.GRPO (arXiv 2503.20783): centre only."""


class RlooAdvantage(Strict):
    """R minus the mean of the group's other rewards (arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"


class NoAdvantage(Strict):
    """The reward itself, without a baseline. The `sft` loss needs no advantage and takes this one."""

    name: Literal["none"] = "none"


Advantage = Annotated[
    Annotated[Union[GrpoAdvantage, RlooAdvantage, NoAdvantage], Field(discriminator="name")],
    BeforeValidator(_bare_name),
]


class ReinforceLoss(Strict):
    """-A * logp."""

    name: Literal["reinforce"] = "reinforce"


class PpoClipLoss(Strict):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347; asymmetric bounds from arXiv 2503.14476)."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: PositiveFloat = 0.2
    """The ratio is cut at 1 - clip_low from below."""
    clip_high: PositiveFloat = 0.2
    """The ratio is cut at 1 + clip_high from above."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """c of dual-clip PPO (arXiv 1912.09729): where A < 0 the loss is at most -A c."""


class SftLoss(Strict):
    """-logp of given responses: supervised warm starts."""

    name: Literal["sft"] = "sft"


Loss = Annotated[
    Annotated[Union[ReinforceLoss, PpoClipLoss, SftLoss], Field(discriminator="name")],
    BeforeValidator(_bare_name),
]

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class ObjectiveConfig(Strict):
    """What the loss is."""

    advantage: Advantage = GrpoAdvantage()
    loss: Loss = PpoClipLoss()
    proximal: Literal["behavior", "recompute"] = "behavior"
    """The policy a ratio is taken against: the one that sampled (`behavior`), or the trainer's own weights at the
    start of the step (`recompute`; with one step per batch those are the current ones, so the ratio is 1)."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; the denominators are those of the whole optimizer-step batch."""
    norm_length: PositiveInt | None = None
    """Constant divisor per sequence for `seq-mean-token-sum-norm` (Dr.GRPO); tokens."""

    @model_validator(mode="after")
    def _norm_length_is_for_its_aggregation(self) -> ObjectiveConfig:
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.norm_length is not None):
            raise ValueError(
                "norm_length and aggregation: seq-mean-token-sum-norm go together; "
                f"got aggregation={self.aggregation}, norm_length={self.norm_length}"
            )
        return self


class GacControl(Strict):
    """Gradient alignment control (arXiv 2603.01501). Thresholds and the exact projection are this project's own."""

    name: Literal["gac"] = "gac"
    c_low: Annotated[float, Field(gt=-1.0, lt=1.0)] = 0.15
    """Up to this cosine the gradient is left alone."""
    c_high: Annotated[float, Field(gt=-1.0, le=1.0)] | None = None
    """Above this cosine the step is skipped; null never skips. At least 0.7 is advised: low values deadlock."""
    target: Literal["threshold", "zero"] = "threshold"
    """Project to cosine c_low exactly, or remove the aligned component."""
    reference: Literal["raw", "applied"] = "raw"
    """Which previous gradient is compared with: as it came, or as it was applied."""
    max_consecutive_skips: PositiveInt = 4
    """A skip freezes the weights, so the next gradient is as aligned; after this many the step is projected instead."""

    @model_validator(mode="after")
    def _ordered(self) -> GacControl:
        if self.c_high is not None and self.c_high <= self.c_low:
            raise ValueError(f"c_high ({self.c_high}) must be above c_low ({self.c_low}), or null to never skip")
        return self


Control = Annotated[GacControl, BeforeValidator(_bare_name)]
