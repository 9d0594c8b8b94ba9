"""Null baseline: Adam's first moment forgets faster, at every step alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.controls.decision import Control, Decision, StepView

if TYPE_CHECKING:
    from megatron_async_rl.config.controls import Beta1Control


class Beta1(Control):
    def __init__(self, settings: Beta1Control) -> None:
        self.settings = settings

    def apply(self, step: StepView) -> Decision:
        return Decision(beta1=self.settings.beta1)
