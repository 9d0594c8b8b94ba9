"""A number from 1 to 7, and three guesses: after each wrong one the model receives `h`, the number
is higher, or `l`, it is lower.

Guessing at random finds the number in three of seven games; halving what is left finds it always.
"""

from __future__ import annotations

from megatron_async_rl.rollout.environments import EpisodeStep
from megatron_async_rl.samples import Prompt

GUESSES = 3


class Game:
    """A turn's guess is the first digit in it. A row has the number as `secret`."""

    def reset(self, prompt: Prompt) -> None:
        self.secret = int(prompt.fields["secret"])
        self.left = GUESSES

    def step(self, response: str) -> EpisodeStep:
        self.left -= 1
        guess = next((int(one) for one in response if one.isdigit()), None)
        if guess == self.secret:
            return EpisodeStep(reward=1.0, done=True)
        if guess is None or self.left == 0:
            return EpisodeStep(done=True)
        return EpisodeStep(observation="h" if self.secret > guess else "l")
