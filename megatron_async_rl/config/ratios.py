"""Ratios of policies that a method reads, as a fact about its settings.

Three policies give a token a log-prob: the policy in training (pi), the proximal one, and the
sampling one (mu). A rule that depends on a ratio (config/sampling.py, config/rules.py) looks at
this fact and never at a method's name, so a new method or a plug-in is covered by what it declares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from megatron_async_rl.config.problem import shipped
from megatron_async_rl.config.settings_model import Strict

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import Proximal
    from megatron_async_rl.config.schema import Config

NATS_PER_ROOT_TOKEN = 0.03
"""Spread of the logarithm of a response's ratio over the square root of its length, by a public fit
of the mismatch between trainers and engines alone; staleness adds to it."""
LONG_RESPONSE = 512
"""Tokens at which that spread, 0.68 nats, is a factor of 2: the default cap of `tis`. The studies
of this project had answers of 6 to 14 tokens."""

Ratio = Literal["pi/mu", "prox/mu", "pi/prox"]


class ReadsRatios(Strict):
    """Settings of a method that may read ratios of policies."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        """Ratios that the method reads, with these settings."""
        return frozenset()

    @property
    def weighs_each_token(self) -> bool:
        """True when a ratio to the behavior policy is nothing but that token's own importance
        weight (or decides about that token alone). It then is the right weight of what was sampled,
        whatever distribution that was sampled from."""
        return False

    @property
    def multiplies_over_response(self) -> bool:
        """True when the method reads the product of a ratio over all tokens of a response (or the
        sum of its logarithm), which grows or falls with the response's length."""
        return False


def engine_ratios(method: ReadsRatios, proximal: Proximal) -> frozenset[Ratio]:
    """Ratios of the method that compare a log-prob of the trainer with one of the engine."""
    own: dict[Ratio, bool] = {
        "pi/mu": True,
        # With `behavior` both are the engine's, and the ratio is 1.
        "prox/mu": proximal != "behavior",
        # The engine's log-probs are (`behavior`), or are part of (`loglinear`), the proximal ones.
        "pi/prox": proximal in ("behavior", "loglinear"),
    }
    return frozenset(ratio for ratio in method.ratios if own[ratio])


def length_warnings(config: Config) -> list[str]:
    """Notes on methods that multiply ratios over responses longer than any that they were tested
    on."""
    rollout, objective = config.rollout, config.objective
    if rollout is None or rollout.sampling.max_tokens <= LONG_RESPONSE:
        return []
    length = rollout.sampling.max_tokens
    # Without a ratio to the engine's log-probs, one step per batch leaves nothing to multiply.
    always_one = objective.proximal == "recompute" and objective.steps_per_batch == 1
    found = [
        name
        for name, method in _methods(config)
        if method.multiplies_over_response and not (always_one and method.ratios == {"pi/prox"})
    ]
    if not found:
        return []
    spread = NATS_PER_ROOT_TOKEN * math.sqrt(length)
    return [
        f"{' and '.join(found)} multiply ratios over a whole response: with"
        f" rollout.sampling.max_tokens: {length} their logarithm is off by about {spread:.1f} nats"
        " from rounding alone, so most weights are at a bound; tested on answers of 6 to 14 tokens."
        " Set level: token where a method has a level, or reject by sequence_geometric"
        f" ({shipped('docs/choosing_a_method.md')})"
    ]


def _methods(config: Config) -> Iterator[tuple[str, ReadsRatios]]:
    objective = config.objective
    yield f"objective.loss: {objective.loss.name}", objective.loss
    yield f"objective.advantage: {objective.advantage.name}", objective.advantage
    for correction in objective.corrections:
        yield f"correction {correction.name}", correction
    for control in config.controls:
        yield f"controls: {control.name}", control
