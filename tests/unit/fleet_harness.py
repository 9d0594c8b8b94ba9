"""A fleet of fake engines that hold version 0, and what it hands back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_async_rl.flow.fleet import Fleet, FleetSettings
from megatron_async_rl.flow.router import Listener
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Aborted, Request
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest, specs
from tests.unit.flow_setup import PROMPTS, until


def never(request: Request) -> float:
    return 60.0


class FleetHarness(Listener):
    def __init__(self, launch: FakeLaunch, evaluators: int, settings: FleetSettings) -> None:
        self.samples: list[SampleRow] = []
        self.aborted: list[Aborted] = []
        self.given_up: list[tuple[str, str]] = []
        self.errors: list[BaseException] = []
        self.notes: list[str] = []
        self.versions: list[int] = []
        self.launch = launch
        count = len(launch.engines)
        self.fleet = Fleet(specs(count), launch, self, settings, evaluators_from=count - evaluators)

    def on_sample(self, sample: SampleRow, request: Request) -> None:
        self.samples.append(sample)

    def on_abort(self, aborted: Aborted, request: Request) -> Request:
        self.aborted.append(aborted)
        return super().on_abort(aborted, request)

    def on_give_up(self, request: Request, reason: str) -> None:
        self.given_up.append((request.id, reason))

    def on_version(self, version: int) -> None:
        self.versions.append(version)

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def lost(self) -> list[tuple[int, str]]:
        return [(slot.index, slot.lost) for slot in self.fleet.slots if slot.lost]

    def serving(self) -> list[int]:
        return [slot.index for slot in self.fleet.slots if slot.serving]

    async def stage(self, version: int) -> None:
        self.fleet.updates.stage(version, manifest(version))

    async def close(self) -> None:
        await self.fleet.close(5.0)


async def fleet_of(
    engines: Sequence[FakeEngine] | FakeLaunch, *, evaluators: int = 0, **settings: Any
) -> FleetHarness:
    """All engines have started, and the training engines hold version 0."""
    launch = engines if isinstance(engines, FakeLaunch) else FakeLaunch(engines)
    own = {"capacity": 8, "unresponsive_s": 5.0, **settings}
    harness = FleetHarness(launch, evaluators, FleetSettings(**own))
    await harness.fleet.started()
    await harness.stage(0)
    count = len(launch.engines) - evaluators
    await until(lambda: len(harness.serving()) == count)
    return harness


def requests(groups: int, size: int = 1, first: int = 0) -> list[Request]:
    return [
        Request(group=first + g, k=k, prompt=PROMPTS[g % 7])
        for g in range(groups)
        for k in range(size)
    ]


def ids(of: Sequence[Request]) -> list[str]:
    return [request.id for request in of]
