"""Phases of the devices that engines and policy share, and their order.

             engines sleep,              policy releases             weights are staged; each engine
             policy restores             its training state          wakes its weights, loads, is
                                                                     verified, wakes its cache
    generate ---------------> train ----------------------> publish -------------------> generate

Policy and engines go through one order, each through its own steps of it (`by`): the policy waits
for the engines' sleep, and what it stages is what an engine waits for. Where engines have devices
of their own the phases are the trainer's alone, and nothing has to make room.

Invariants:
- a step is taken only after the one before it was; after a failed step none is;
- nothing here waits, and nothing knows what a step does;
- an error that leaves a step names phase and step, in a note that `watchdog.events` shows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
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
    """needs: the phase whose memory it needs."""

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
"""Steps that lead to a phase from the one before it, in order. Weights are staged, in host memory
or where the policy has them, before an engine wakes, so that a device never holds three copies of
them."""
PHASES = tuple(TO)
"""Phases in the order in which they follow each other; the first follows the last."""


class PhaseOrderError(RuntimeError):
    """A step was to be taken whose turn it is not."""


class DevicePhases:
    """The order as one party goes through it. phase: the one it stands in at first."""

    def __init__(self, by: StepParty, phase: Phase) -> None:
        self._by = by
        self._at = phase
        self._step: PhaseStep | None = None

    @property
    def phase(self) -> Phase:
        """The one it stands in, or within a step the one whose memory that needs."""
        return self._at if self._step is None else self._step.needs

    def to(self, phase: Phase, do: Mapping[PhaseStepName, Callable[[], object]]) -> None:
        """Takes the party's own steps to `phase`, which it stands in then. Raises PhaseOrderError
        where another phase is next, and what a step raises."""
        for step in self._steps_to(phase):
            with self._taking(step):
                do[step.name]()
        self._at = phase

    async def await_to(
        self, phase: Phase, do: Mapping[PhaseStepName, Callable[[], Awaitable[object]]]
    ) -> None:
        """The same, of steps that are awaited."""
        for step in self._steps_to(phase):
            with self._taking(step):
                await do[step.name]()
        self._at = phase

    def _steps_to(self, phase: Phase) -> tuple[PhaseStep, ...]:
        following = PHASES[(PHASES.index(self._at) + 1) % len(PHASES)]
        if self._step is not None or phase != following:
            step = "" if self._step is None else f" and step {self._step.name}"
            raise PhaseOrderError(
                f"phase {phase} was to follow phase {self._at}{step}, after which comes {following}"
            )
        return tuple(step for step in TO[phase] if step.by in (self._by, "both"))

    @contextmanager
    def _taking(self, step: PhaseStep) -> Iterator[None]:
        self._step = step
        try:
            yield
        except BaseException as error:
            error.add_note(f"in phase {step.needs}, step {step.name}")
            raise
        self._step = None
