"""What a user may say about the step controls: one small model per control, chosen by its `name`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from megatron_async_rl.config.bare_name import bare_name
from megatron_async_rl.config.strict import Strict


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


Control = Annotated[GacControl, BeforeValidator(bare_name)]
