"""Names of the configuration -> functions. Adding a method is one file and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.objectives.advantages.baseline_free import no_baseline
from megatron_async_rl.objectives.advantages.grpo import grpo
from megatron_async_rl.objectives.advantages.rloo import rloo
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import ppo_clip
from megatron_async_rl.objectives.losses.reinforce import reinforce
from megatron_async_rl.objectives.losses.sft import sft

AdvantageFunction = Callable[[NDArray[np.float64], Any], NDArray[np.float64]]
"""(rewards of one group's valid samples [n], settings) -> advantages [n]."""

LossFunction = Callable[[TokenBatch, Any], TokenLoss]
"""(tokens, settings) -> token losses [N]."""

ADVANTAGES: Mapping[str, AdvantageFunction] = {"grpo": grpo, "rloo": rloo, "none": no_baseline}
LOSSES: Mapping[str, LossFunction] = {"reinforce": reinforce, "ppo_clip": ppo_clip, "sft": sft}

F = TypeVar("F")


class UnknownName(ValueError):
    """A name that no registry line has."""


def find(kind: str, name: str, registry: Mapping[str, F]) -> F:
    """Raises UnknownName, naming the nearest known names."""
    if name in registry:
        return registry[name]
    nearest = difflib.get_close_matches(name, registry, n=3, cutoff=0.0)
    raise UnknownName(f"unknown {kind} {name!r}; nearest: {', '.join(nearest)}; known: {', '.join(sorted(registry))}")


def advantage_function(name: str) -> AdvantageFunction:
    return find("advantage", name, ADVANTAGES)


def loss_function(name: str) -> LossFunction:
    return find("loss", name, LOSSES)
