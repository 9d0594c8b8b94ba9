"""Names of the configuration -> methods. Adding a method is one file, one settings model and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from megatron_async_rl.objectives.advantages.baseline_free import no_baseline
from megatron_async_rl.objectives.advantages.grpo import grpo
from megatron_async_rl.objectives.advantages.rloo import rloo
from megatron_async_rl.objectives.corrections.icepop import icepop
from megatron_async_rl.objectives.corrections.tis import tis
from megatron_async_rl.objectives.losses.ppo_clip import ppo_clip
from megatron_async_rl.objectives.losses.reinforce import reinforce
from megatron_async_rl.objectives.losses.sft import sft
from megatron_async_rl.objectives.method import AdvantageMethod, CorrectionMethod, LossMethod

ADVANTAGES: Mapping[str, AdvantageMethod] = {
    "none": AdvantageMethod(no_baseline),
    "grpo": AdvantageMethod(grpo),
    "rloo": AdvantageMethod(rloo),
}

LOSSES: Mapping[str, LossMethod] = {
    "sft": LossMethod(sft),
    "reinforce": LossMethod(reinforce),
    "ppo_clip": LossMethod(ppo_clip),
}

CORRECTIONS: Mapping[str, CorrectionMethod] = {
    "tis": CorrectionMethod(tis, whole=lambda settings: settings.normalize),
    "icepop": CorrectionMethod(icepop),
}

F = TypeVar("F")


class UnknownName(ValueError):
    """A name that no registry line has."""


def find(kind: str, name: str, registry: Mapping[str, F]) -> F:
    """Raises UnknownName, naming the nearest known names."""
    if name in registry:
        return registry[name]
    nearest = difflib.get_close_matches(name, registry, n=3, cutoff=0.0)
    raise UnknownName(f"unknown {kind} {name!r}; nearest: {', '.join(nearest)}; known: {', '.join(sorted(registry))}")


def advantage_method(name: str) -> AdvantageMethod:
    return find("advantage", name, ADVANTAGES)


def loss_method(name: str) -> LossMethod:
    return find("loss", name, LOSSES)


def correction_method(name: str) -> CorrectionMethod:
    return find("correction", name, CORRECTIONS)
