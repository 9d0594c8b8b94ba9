"""What tests of the controller and the fleet share: seven prompts, a flow, engines that are
coroutines, and the trainer's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from megatron_async_rl.config.schema import EvalConfig, FlowConfig
from megatron_async_rl.data import PromptSource
from megatron_async_rl.flow.controller import Controller, ControllerSpec, DataState
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.samples import Group, Prompt
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest, specs

PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i,)) for i in range(7)]
OF_THE_FLEET = set(FleetSettings.__dataclass_fields__)


def flow(prompts_per_step: int = 3, async_ratio: float = 1.0, **more: Any) -> FlowConfig:
    return FlowConfig(
        **{
            "prompts_per_step": prompts_per_step,
            "group_size": 2,
            "async_ratio": async_ratio,
            **more,
        }
    )


def source() -> PromptSource:
    return PromptSource(PROMPTS, seed=5, shuffle=True)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


async def until(what: Callable[[], object]) -> None:
    while not what():
        await asyncio.sleep(0.002)


def expected_prompts(count: int) -> list[str]:
    reference = source()
    return [reference.next().id for _ in range(count)]


def controller_of(
    engines: Sequence[FakeEngine] | FakeLaunch, flow: FlowConfig, **settings: Any
) -> Controller:
    """`settings`: of ControllerSpec and FleetSettings."""
    launch = engines if isinstance(engines, FakeLaunch) else FakeLaunch(engines)
    fleet = {name: settings.pop(name) for name in OF_THE_FLEET & settings.keys()}
    spec = ControllerSpec(
        flow=flow,
        engines=specs(len(launch.engines)),
        fleet=FleetSettings(**fleet),
        held_out=PROMPTS,
        evaluation=EvalConfig(samples_per_prompt=2, pass_at=(1, 2)),
        **settings,
    )
    return Controller(source(), spec, launch)


async def begin(
    engines: Sequence[FakeEngine] | FakeLaunch,
    flow: FlowConfig,
    *,
    version: int = 0,
    position: DataState | None = None,
    **settings: Any,
) -> Controller:
    """A controller whose training engines hold `version`."""
    controller = controller_of(engines, flow, **settings)
    await controller.start(position)
    await stage(controller, version)
    return controller


async def stage(controller: Controller, version: int) -> None:
    """Returns when every training engine that is there holds `version`."""
    await controller.staged(version, manifest(version))
    await until(lambda: holds(controller, version))


def holds(controller: Controller, version: int) -> bool:
    slots = [one for one in controller._fleet.slots if not one.evaluates and not one.dead]
    return all(slot.serving and slot.version == version for slot in slots)


async def train(controller: Controller, first: int, last: int) -> list[Group]:
    """The trainer's side for versions first..last-1; returns the consumed groups in order."""
    groups: list[Group] = []
    for version in range(first, last):
        handout = await controller.next_batch(version)
        assert handout is not None
        groups += handout.batch.groups
        await stage(controller, version + 1)
    return groups


async def position(controller: Controller, *, buffer: bool = True, oldest: int = 0) -> DataState:
    """What a checkpoint has; without its buffer if so said."""
    saved = await controller.state()
    return DataState(state=saved.state, buffer=saved.buffer if buffer else None, oldest=oldest)
