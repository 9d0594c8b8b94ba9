"""Rewards of whole groups: a part of the reward that is called `per: group` takes all responses to a
prompt at once, so it is called here, where a group comes together, and not where each is sampled.

    engine: parts per response --sample--> controller or evaluation: parts per group --> reward

Invariants:
- a group is scored once it has all its responses, and each response gets the sum of both kinds of
  parts;
- a response that failed before is not shown to the reward, and keeps its error; the others are, in
  the order in which they were asked;
- what the reward does costs the group its reward, not the run: the processes are those of
  rollout/scoring.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_async_rl.config.schema import RewardConfig
from megatron_async_rl.flow.buffer import Group
from megatron_async_rl.rollout.rewards.registry import Context, Item
from megatron_async_rl.rollout.rewards.worker import Scored
from megatron_async_rl.rollout.scoring import FailureLog, Scorer
from megatron_async_rl.samples.rows import SampleRow, rescored
from megatron_async_rl.samples.types import Prompt, Sample

Done = Callable[[Group, list[SampleRow]], None]
LOG = "controller.reward_errors.jsonl"


class GroupRewards:
    """Used by one event loop. Call `start` first. `log_dir`: of the failures; null: none is
    written."""

    def __init__(self, settings: RewardConfig, log_dir: Path | None) -> None:
        self._scorer = Scorer(settings, "group")
        self._settings = settings
        self._tasks = set[asyncio.Task[None]]()
        self.moved_at = 0.0
        """When a group last got its reward; monotonic seconds."""
        self._failures = FailureLog(None if log_dir is None else log_dir / LOG)

    @property
    def any(self) -> bool:
        """Whether the reward has such a part."""
        return bool(self._scorer.pools)

    async def start(self) -> None:
        """Returns when each can score. Raises WorkerStartError."""
        self._scorer.start()
        await self._scorer.ready()

    def close(self) -> None:
        """Ends the processes; what is still waited for is cancelled."""
        for task in self._tasks:
            task.cancel()
        self._scorer.close()

    @property
    def waiting(self) -> int:
        """Groups that wait for their reward."""
        return len(self._tasks)

    def begin(self, group: Group, done: Done, fail: Callable[[BaseException], None]) -> None:
        """Has `group` scored, then calls `done` with its samples; `fail` for a mistake of ours, which
        must end the run, not a task."""
        task = asyncio.create_task(
            self._score(group, done, fail), name=f"reward of group {group.index}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(self, group: Group, done: Done, fail: Callable[[BaseException], None]) -> None:
        try:
            samples = await self.of(group.prompt, group.samples)
            self.moved_at = time.monotonic()
            done(group, samples)
        except Exception as error:  # noqa: BLE001 - the controller raises it
            fail(error)

    async def of(
        self, prompt: Prompt, samples: Sequence[SampleRow], *, held_out: bool = False
    ) -> list[SampleRow]:
        """The samples of a group with their rewards, in their order."""
        rows = [row for row in samples if row.valid]
        if not rows or not self._scorer.scores(prompt):
            return list(samples)
        shown = [row.sample() for row in rows]
        items = [Item(prompt, one.text, _context(one, held_out)) for one in shown]
        scored = await self._scorer.score_all(items)
        for one, result in zip(shown, scored, strict=True):
            if result.error is not None:
                self._failures.add(one.id, prompt, one.text, result.error)
        pairs = [self._whole(row, one) for row, one in zip(rows, scored, strict=True)]
        rewards, parts = zip(*pairs, strict=True)
        new = {one.id: one for one in rescored(rows, rewards, parts, [s.error for s in scored])}
        return [new.get(row.id, row) for row in samples]

    def _whole(self, row: SampleRow, scored: Scored) -> tuple[float, Mapping[str, float] | None]:
        """The reward of a sample, and its parts. What came from an environment stays."""
        if scored.error is not None:
            return 0.0, None
        before = row.reward_parts or {}
        if scored.parts is None:  # the only reward, which has no name
            return row.reward + scored.reward, before or None
        parts = {**before, **scored.parts}
        others = row.reward - self._settings.total(before)
        return others + self._settings.total(parts), parts


def _context(sample: Sample, held_out: bool) -> Context:
    return Context(
        finish_reason=sample.finish_reason,
        tokens=sample.length,
        seconds=sample.finished_at - sample.started_at,
        version=int(sample.versions[-1]),
        held_out=held_out,
    )
