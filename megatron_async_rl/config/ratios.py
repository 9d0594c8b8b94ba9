"""Ratios of policies that a method reads, as a fact about its settings.

Three policies give a token a log-prob: the policy in training (pi), the proximal one, and the
sampling one (mu). A rule that depends on a ratio (config/sampling_rules.py) looks at
this fact and never at a method's name, so a new method or a plug-in is covered by what it declares.
"""

from __future__ import annotations

from typing import Literal

from megatron_async_rl.config.settings_model import Strict

NATS_PER_ROOT_TOKEN = 0.03
"""Spread of the logarithm of a response's ratio over the square root of its length, by a public fit
of the mismatch between trainers and engines alone; staleness adds to it."""
LONG_RESPONSE = 512
"""Tokens at which that spread, 0.68 nats, is a factor of 2: the default cap of `tis`. The studies
of this project had answers of 6 to 14 tokens."""

Ratio = Literal["pi/mu", "prox/mu", "pi/prox"]
Proximal = Literal["behavior", "recompute", "loglinear", "ewma", "snapshot"]


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
