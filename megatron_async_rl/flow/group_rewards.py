"""Rewards of whole groups: a part of the reward with `per: group` receives all responses to a
prompt at once, so it is called where groups are assembled, not where responses are sampled.

    engine: parts per response --sample--> controller or evaluation: parts per group --> reward

Invariants:
- a group is scored once it has all its responses, and each response gets the sum of both kinds of
  parts;
- the reward does not receive a response that failed before, which keeps its error. It receives the
  others in the order of their requests;
- a failure costs the group its reward, but does not end the run: the processes are those of
  rollout/scoring.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_async_rl.config.rollout import RewardConfig
from megatron_async_rl.flow.buffer import SampleGroup
from megatron_async_rl.rollout.rewards.registry import RewardContext, RewardItem
from megatron_async_rl.rollout.rewards.worker import Scored
from megatron_async_rl.rollout.scoring import FailureLog, Scorer
from megatron_async_rl.samples.rows import SampleRow, rescored
from megatron_async_rl.samples.types import Prompt, Sample

OnGroupScored = Callable[[SampleGroup, list[SampleRow]], None]
LOG = "controller.reward_errors.jsonl"


class GroupRewards:
    """Rewards of whole groups, used by one event loop. Call `start` first. `log_dir`: folder for
    the failures; None writes none."""

    def __init__(self, settings: RewardConfig, log_dir: Path | None) -> None:
        self._scorer = Scorer(settings, "group")
        self._settings = settings
        self._tasks = set[asyncio.Task[None]]()
        self.moved_at = 0.0
        """Time when a group last got its reward; monotonic seconds."""
        self._failures = FailureLog(None if log_dir is None else log_dir / LOG)

    @property
    def any(self) -> bool:
        """True if the reward has a part that is called per group."""
        return bool(self._scorer.pools)

    async def start(self) -> None:
        """Wait until each part can score. Raises UserCodeStartError."""
        self._scorer.start()
        await self._scorer.ready()

    def close(self) -> None:
        """End the processes and cancel what is still awaited."""
        for task in self._tasks:
            task.cancel()
        self._scorer.close()

    @property
    def waiting(self) -> int:
        """Groups that wait for their reward."""
        return len(self._tasks)

    def begin(
        self, group: SampleGroup, done: OnGroupScored, fail: Callable[[BaseException], None]
    ) -> None:
        """Score `group`, then call `done` with its samples. `fail` receives an internal error,
        which must end the run, not only a task."""
        task = asyncio.create_task(
            self._score(group, done, fail), name=f"reward of group {group.index}"
        )
        # asyncio holds tasks weakly: without this reference they may be garbage-collected.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(
        self, group: SampleGroup, done: OnGroupScored, fail: Callable[[BaseException], None]
    ) -> None:
        try:
            samples = await self.of(group.prompt, group.samples)
            # Inside `try`, so that an error in the listener ends the run, too.
            done(group, samples)
        except Exception as error:  # noqa: BLE001 - the controller raises it
            fail(error)

    async def of(
        self, prompt: Prompt, samples: Sequence[SampleRow], *, held_out: bool = False
    ) -> list[SampleRow]:
        """Return the samples of a group with their rewards, in their order."""
        # A response that failed before has no reward to add to.
        rows = [row for row in samples if row.valid]
        if not rows or not self._scorer.scores(prompt):
            return list(samples)
        shown = [row.sample() for row in rows]
        items = [RewardItem(prompt, one.text, _context(one, held_out)) for one in shown]
        scored = await self._scorer.score_all(items)
        whole = [self._whole(row, one) for row, one in zip(rows, scored, strict=True)]
        for one, result in zip(shown, whole, strict=True):
            if result.error is not None:
                self._failures.add(one.id, prompt, one.text, result.error)
        self.moved_at = time.monotonic()
        new = rescored(
            rows,
            [one.reward for one in whole],
            [one.parts for one in whole],
            [one.error for one in whole],
        )
        # Failed responses keep their positions: the order is that of the requests.
        by_id = {one.id: one for one in new}
        return [by_id.get(row.id, row) for row in samples]

    def _whole(self, row: SampleRow, scored: Scored) -> Scored:
        """Return a sample's reward including the parts that it had before and its environment's
        share."""
        if scored.error is not None:
            return Scored(reward=0.0, error=scored.error)
        before = row.reward_parts or {}
        if scored.parts is None:  # the only reward, which has no name
            total, parts = row.reward + scored.reward, before
        else:
            parts = {**before, **scored.parts}
            # All parts are weighted again as a whole; the environment's share does not change.
            total = row.reward - self._settings.total(before) + self._settings.total(parts)
        if not math.isfinite(total):
            return Scored(reward=0.0, error=f"the reward of the parts {parts} is {total}")
        return Scored(reward=total, parts=parts or None)


def _context(sample: Sample, held_out: bool) -> RewardContext:
    return RewardContext(
        finish_reason=sample.finish_reason,
        tokens=sample.length,
        seconds=sample.finished_at - sample.started_at,
        version=int(sample.versions[-1]),
        held_out=held_out,
    )
