"""Order of the phases of devices that engines and policy share.

             engines sleep,              policy releases             weights are staged; each engine
             policy restores             its training state          wakes its weights, loads, is
                                                                     verified, wakes its cache
    generate ---------------> train ----------------------> publish -------------------> generate

Policy and engines follow the same order, and each takes its own steps of it (`by`): the policy
waits for the engines to sleep, and an engine waits for the weights that the policy stages. If
engines have devices of their own, only the trainer has phases, and no memory is released.

Invariants:
- a step is taken only after the step before it, and no step is left out; after a failed step no
  other is taken;
- nothing here waits or depends on what a step does;
- an error that leaves a step names phase and step, in a note that `watchdog.events` shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

Phase = Literal["generate", "train", "publish"]
"""`generate`: engines have weights and cache, the policy its parameters. `train`: engines have
nothing, the policy everything. `publish`: the policy has its parameters, engines their weights."""
PhaseStepName = Literal[
    "sleep", "restore", "release", "stage", "wake weights", "load", "verify", "wake cache"
]
StepParty = Literal["policy", "engine", "both"]


class PhaseStep(NamedTuple):
    """One step to a phase. needs: the phase whose memory it needs."""

    name: PhaseStepName
    by: StepParty
    needs: Phase


TO: dict[Phase, tuple[PhaseStep, ...]] = {
    "train": (PhaseStep("sleep", "both", "generate"), PhaseStep("restore", "policy", "train")),
    "publish": (PhaseStep("release", "policy", "train"),),
    "generate": (
        PhaseStep("stage", "policy", "publish"),
        PhaseStep("wake weights", "engine", "publish"),
        PhaseStep("load", "engine", "publish"),
        PhaseStep("verify", "engine", "publish"),
        PhaseStep("wake cache", "engine", "generate"),
    ),
}
"""Steps that lead to a phase from the one before it, in order. Weights are staged in host memory,
or where the policy holds them, before an engine wakes, so that a device never holds three copies of
them."""
PHASES = tuple(TO)
"""Phases in the order in which they follow each other; the first follows the last."""


class PhaseOrderError(RuntimeError):
    """A phase or step out of order."""


class DevicePhases:
    """One party's position in the order:

        with devices.phase("train"):
            with devices.step("sleep"):
                ...
            with devices.step("restore"):
                ...

    at: the initial phase.
    """

    def __init__(self, by: StepParty, at: Phase) -> None:
        self._by = by
        self._at = at
        self._left: list[PhaseStep] = []
        """Remaining steps of the party before the next phase."""
        self._step: PhaseStep | None = None

    @property
    def current(self) -> Phase:
        """Phase of the party; within a step, the phase whose memory the step needs."""
        return self._at if self._step is None else self._step.needs

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Go to `phase`. The block takes the party's own steps to it, in order; afterwards the
        party is in that phase. Raises PhaseOrderError if another phase is next, or if the block
        leaves out a step."""
        following = PHASES[(PHASES.index(self._at) + 1) % len(PHASES)]
        # After a block that raised, steps remain: the devices are in no phase from then on.
        if self._left or self._step is not None or phase != following:
            step = "" if self._step is None else f" and step {self._step.name}"
            raise PhaseOrderError(
                f"phase {phase} cannot follow phase {self._at}{step}: the next phase is {following}"
            )
        self._left = [step for step in TO[phase] if step.by in (self._by, "both")]
        yield
        if self._left:
            raise PhaseOrderError(f"phase {phase} began without step {self._left[0].name}")
        self._at = phase

    @contextmanager
    def step(self, name: PhaseStepName) -> Iterator[None]:
        """Take the next step. Raises PhaseOrderError if another step is next."""
        if self._step is not None or not self._left or self._left[0].name != name:
            following = self._left[0].name if self._left else "no step"
            raise PhaseOrderError(f"step {name} was taken in phase {self._at} before {following}")
        # Removed before it runs, so a failed step is not repeated.
        self._step = step = self._left.pop(0)
        try:
            yield
        except BaseException as error:
            # `_step` stays: `current` names the memory that the failed step needed.
            error.add_note(f"in phase {step.needs}, step {step.name}")
            raise
        self._step = None
