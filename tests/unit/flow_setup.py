"""Setup of the controller and fleet tests: seven prompts, a flow, engines that are coroutines,
and the trainer's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.rollout import RewardConfig
from megatron_async_rl.data import PromptSource
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import ControllerSpec, DataState
from megatron_async_rl.flow.evaluation import HeldOut
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.rollout.scoring import GroupRewards
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.columns import rows_of_lists
from megatron_async_rl.samples.rows import SampleRow, TrainBatch, rescored
from megatron_async_rl.watchdog import processes
from tests.unit import virtual_time
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest, specs

PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i,)) for i in range(7)]
# `run_dir` is the controller's, which gives the fleet its own.
OF_THE_FLEET = set(FleetSettings.__dataclass_fields__) - {"run_dir"}


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
    # `collect_rarely` would exclude the objects of all tests so far from garbage collection.
    with mock.patch.object(processes, "gc"):
        virtual_time.run(asyncio.wait_for(body(), 600))


async def until(what: Callable[[], object]) -> None:
    while not what():
        await asyncio.sleep(0.002)


def expected_prompts(count: int) -> list[str]:
    reference = source()
    return [reference.next().id for _ in range(count)]


class WholeRewards(GroupRewards):
    """Ten more for every response of a group, `delay(samples)` seconds after it is whole, or
    `error(sample)`; `seen`: the samples of each call."""

    def __init__(
        self,
        delay: Callable[[Sequence[SampleRow]], float] = lambda samples: 0.0,
        error: Callable[[SampleRow], str | None] = lambda sample: None,
    ) -> None:
        super().__init__(RewardConfig(name="its:own", per="group"), None)
        self.delay, self.error = delay, error
        self.seen: list[list[str]] = []

    async def start(self) -> None: ...
    async def of(
        self, prompt: Prompt, samples: Sequence[SampleRow], *, held_out: bool = False
    ) -> list[SampleRow]:
        self.seen.append([sample.id for sample in samples])
        assert {sample.prompt_id for sample in samples} == {prompt.id}
        await asyncio.sleep(self.delay(samples))
        return rescored(
            samples,
            [sample.reward + 10 for sample in samples],
            [{"whole": 10.0}] * len(samples),
            [self.error(sample) for sample in samples],
        )


def controller_of(
    engines: Sequence[FakeEngine] | FakeLaunch,
    flow: FlowConfig,
    *,
    whole: WholeRewards | None = None,
    on_error: Literal["drop", "stop"] = "drop",
    **settings: Any,
) -> Controller:
    """`settings`: of ControllerSpec and FleetSettings. `whole`: the reward is one per group."""
    launch = engines if isinstance(engines, FakeLaunch) else FakeLaunch(engines)
    fleet = {name: settings.pop(name) for name in OF_THE_FLEET & settings.keys()}
    spec = ControllerSpec(
        flow=flow,
        engines=specs(len(launch.engines)),
        fleet=FleetSettings(**fleet),
        held_out=[HeldOut(prompts=PROMPTS, n=2, pass_at=(1, 2))],
        reward=RewardConfig(
            name="its:own", per="group" if whole else "response", on_error=on_error
        ),
        **{"steps": None, "fresh_steps": 0, "seed": 0, **settings},
    )
    controller = Controller(source(), spec, launch)
    if whole is not None:
        controller._rewards = whole
    return controller


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


@dataclass(frozen=True)
class Trained:
    """A sample of a batch, as the trainer got it."""

    id: str
    prompt: Prompt
    versions: list[int]
    reward: float
    valid: bool

    @property
    def start_version(self) -> int:
        return self.versions[0]


@dataclass(frozen=True)
class TrainedGroup:
    index: int
    samples: list[Trained]

    @property
    def prompt(self) -> Prompt:
        return self.samples[0].prompt


def groups_of(batch: TrainBatch) -> list[TrainedGroup]:
    """The groups of PROMPTS that a batch trains."""
    columns = batch.samples
    versions, tokens = (rows_of_lists(columns.column(name)) for name in ("versions", "prompt_ids"))
    groups: dict[int, TrainedGroup] = {}
    for number, one in enumerate(columns.select(["id", "group", "reward", "valid"]).to_pylist()):
        sample = Trained(
            id=one["id"],
            prompt=PROMPTS[tokens[number][0]],
            versions=versions[number].tolist(),
            reward=one["reward"],
            valid=one["valid"],
        )
        index = int(one["id"].partition("-")[0])
        groups.setdefault(one["group"], TrainedGroup(index, [])).samples.append(sample)
    assert list(groups) == list(range(len(groups))), "a group's number is its place in the batch"
    return list(groups.values())


def samples_in(batch: TrainBatch) -> list[Trained]:
    return [sample for group in groups_of(batch) for sample in group.samples]


async def train(controller: Controller, first: int, last: int) -> list[TrainedGroup]:
    """The trainer's side for versions first..last-1; returns the consumed groups in order."""
    groups: list[TrainedGroup] = []
    for version in range(first, last):
        handout = await controller.next_batch(version)
        assert handout is not None
        groups += groups_of(handout.batch)
        await stage(controller, version + 1)
    return groups


async def position(controller: Controller, *, buffer: bool = True, oldest: int = 0) -> DataState:
    """State in a checkpoint; `buffer`: with the buffer."""
    saved = await controller.state()
    return DataState(state=saved.state, buffer=saved.buffer if buffer else None, oldest=oldest)
