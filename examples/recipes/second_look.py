"""A second turn for problems with one answer: the model is asked to look at its work again,
whatever it has answered. It gets no hint on the answer; `rollout.reward` judges the last turn."""

from __future__ import annotations

from megatron_async_rl.rollout.environments import EpisodeStep
from megatron_async_rl.samples import Prompt

AGAIN = (
    "Look at each step again. Correct what is wrong, and write the answer, a number, in \\boxed{}."
)


class SecondLook:
    def __init__(self, looks: int = 1) -> None:
        self.looks = looks

    def reset(self, prompt: Prompt) -> None:
        """Return nothing: the first turn has no opening."""

    def step(self, response: str) -> EpisodeStep:
        self.looks -= 1
        return EpisodeStep(observation=AGAIN) if self.looks >= 0 else EpisodeStep(done=True)
