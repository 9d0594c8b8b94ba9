"""A calculator as a tool: a turn `[37*4]` is a call, which is answered with `148=`; any other turn
is the answer and ends the sample.

It rewards nothing itself: `rollout.reward: arithmetic` compares the last turn with the row's
`answer`.
"""

from __future__ import annotations

import re

from megatron_async_rl.rollout.environments import Step
from megatron_async_rl.samples import Prompt

CALL = re.compile(r"\[(\d{1,2})\*(\d{1,2})\]")


class Calculator:
    def reset(self, prompt: Prompt) -> None:
        """Nothing is said before the first turn."""

    def step(self, response: str) -> Step:
        call = CALL.fullmatch(response.strip())
        if call is None:
            return Step(done=True)
        return Step(observation=f"{int(call[1]) * int(call[2])}=")
