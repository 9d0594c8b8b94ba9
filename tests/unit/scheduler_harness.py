"""A scheduler without a fleet: the test chooses the answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.flow.buffer import buffer_bytes, read_buffer
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rows import SampleGroup, SampleRow
from megatron_async_rl.samples.types import Request
from tests.train_batches import row


def _scheduler(flow: FlowConfig, steps: int | None) -> Scheduler:
    return Scheduler(flow, steps=steps, fresh_steps=0, seed=0, scored_whole=False)


class SchedulerHarness:
    """A scheduler, and the requests that it has made, by id."""

    def __init__(
        self,
        prompts_per_step: int = 2,
        async_ratio: float = 1.0,
        *,
        steps: int | None = None,
        **more: Any,
    ) -> None:
        self.settings = {
            "prompts_per_step": prompts_per_step,
            "group_size": 2,
            "async_ratio": async_ratio,
            **more,
        }
        self.scheduler = _scheduler(FlowConfig(**self.settings), steps)
        self.scheduler.start(0)
        self.asked: dict[str, Request] = {}
        self.drawn = 0

    def resume(
        self, version: int, *, steps: int | None = None, oldest: int = 0, **changed: Any
    ) -> list[str]:
        """Another scheduler continues with what this one saves; returns what it requests again."""
        saved = self.scheduler
        self.settings |= changed
        self.scheduler = _scheduler(FlowConfig(**self.settings), steps)
        requests = self.scheduler.start(
            version,
            saved.next_index,
            saved.pending(),
            read_buffer(buffer_bytes(saved.buffer())),
            oldest,
        )
        self.asked = {request.id: request for request, _ in requests}
        return list(self.asked)

    def admit(self) -> list[Request]:
        """Admit as many groups as there is room for."""
        made: list[Request] = []
        while self.scheduler.room():
            made += self.scheduler.admit(self.prompt)
        self.asked |= {request.id: request for request in made}
        return made

    def prompt(self) -> Prompt:
        self.drawn += 1
        return Prompt(id=f"p{self.drawn - 1}", text="", token_ids=(1,))

    def answer(
        self, *ids: str, versions: tuple[int, ...] = (0,), reward: float | None = None
    ) -> None:
        for one in ids:
            request = self.asked[one]
            before = [] if request.prefix is None else request.prefix.versions.tolist()
            whole = np.array([*before, *versions], dtype=np.int32)
            sample = Sample(
                id=one,
                prompt=request.prompt,
                response_ids=whole,
                behavior_logprobs=np.zeros(len(whole), dtype=np.float32),
                versions=whole,
                loss_mask=np.ones(len(whole), dtype=np.uint8),
                text="",
                finish_reason="stop",
                reward=float(request.k) if reward is None else reward,
            )
            self.scheduler.on_sample(row(sample, request.group), request.group)

    def finish(self, *groups: int, version: int = 0) -> None:
        for group in groups:
            self.answer(f"{group}-0", f"{group}-1", versions=(version,))

    def take(self, version: int) -> list[int] | None:
        batch = self.scheduler.take(version)
        return None if batch is None else indices(batch)


def samples_of(batch: Iterable[SampleGroup]) -> list[SampleRow]:
    return [sample for group in batch for sample in group.samples]


def indices(batch: Iterable[SampleGroup]) -> list[int]:
    return [group.index for group in batch]
