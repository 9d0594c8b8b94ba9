"""Scoring of finished responses: trivial rewards on the engine's event loop, others in processes.

    response -> Scorer -+-> RewardPool of part "correct" -> UserProcess ...
                        +-> RewardPool of part "style"   -> UserProcess ...

An engine has a Scorer of the parts that are called per response. The controller and an evaluation
have `GroupRewards`, with a Scorer of the parts called per group: such a part receives all responses
to a prompt in one call, so it is called where a group comes together.

    engine: parts per response --sample--> controller or evaluation: parts per group --> reward

Invariants:
- the reward of a response is the weighted sum of the parts that apply to its prompt, multiplied by
  the gates. A part that fails makes the response fail, and is named;
- a fault of a reward affects only its own response (rewards/reward_pool.py). A fault of a part that
  is called per group costs the group its reward, not the run;
- a group is scored once it has all its responses, and each response gets the sum of both kinds of
  parts;
- a part that is called per group does not receive a response that failed before, which keeps its
  error. It receives the others in the order of their requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.config.rollout import RewardConfig, RewardPart
from megatron_async_rl.data.row_columns import Required
from megatron_async_rl.rollout.isolation.child import described
from megatron_async_rl.rollout.rewards.registry import (
    KEY,
    LARGEST,
    NOTHING_KNOWN,
    ColumnError,
    RewardContext,
    RewardError,
    RewardItem,
    built_in,
    load_reward,
    required_fields,
    validate_row,
)
from megatron_async_rl.rollout.rewards.reward_pool import RewardLimits, RewardPool
from megatron_async_rl.rollout.rewards.worker import Scored, call
from megatron_async_rl.samples.rows import SampleGroup, SampleRow, rescored
from megatron_async_rl.samples.types import Prompt, Sample

_log = logging.getLogger(__name__)
OnGroupScored = Callable[[SampleGroup, list[SampleRow]], None]
LOG = "controller.reward_errors.jsonl"
"""File of the failures of parts that are called per group, in the folder of logs."""


def require_rewards(settings: RewardConfig) -> None:
    """Load every reward into this process. Raises RewardError with the key."""
    for name, part in settings.rewards.items():
        key = _key(name)
        loaded = load_reward(part.name, part.settings, key)
        if loaded.of_groups and part.per != "group":
            what = f"{part.name!r} takes (prompt, responses), all responses to a prompt"
            raise RewardError(f"{key}.per", what, f"set {key}.per: group")
        if part.per == "group" and not loaded.of_groups:
            what = f"{part.name!r} does not take all responses to a prompt"
            fix = "name a function with the parameters (prompt, responses), or remove `per`"
            raise RewardError(f"{key}.per", what, fix)


def reward_fields(settings: RewardConfig) -> Required:
    """Return the columns that the rewards need in addition to `prompt` (None for a row without a
    part that adds to its reward), and the check of their values."""
    parts = [(one, required_fields(one.name, one.settings)) for one in settings.rewards.values()]

    def columns(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
        every = [(part, names) for part, names in parts if part.applies(fields)]
        # Gates only multiply: the reward of such a row would be 0 for every response.
        if all(part.gate for part, _ in every):
            return None
        return tuple(dict.fromkeys(chain.from_iterable(names for _, names in every)))

    def fault(fields: Mapping[str, Any]) -> tuple[str, str, str] | None:
        for part, _ in parts:
            if part.applies(fields):
                try:
                    validate_row(part.name, part.settings, fields)
                except ColumnError as error:
                    return error.column, error.fault, error.fix
                except RewardError as error:
                    return "", error.what, error.fix
                # A validator that fails on strange data must name the row, not end the command.
                except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                    what = f"{part.name} cannot use it: {type(error).__name__}: {error}"
                    return "", what, "correct the row"
        return None

    return Required(columns, fault)


def _key(part: str | None) -> str:
    return KEY if part is None else f"{KEY}.parts.{part}"


class FailureLog:
    """JSONL file with one object per failed reward and its response. `path`: None writes
    nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._warned = False

    def add(self, sample: str, prompt: Prompt, response: str, error: str) -> None:
        """Append a failure. An error of the file loses only this line."""
        if self._path is None:
            return
        line = {
            "sample": sample,
            "prompt": prompt.id,
            "text": prompt.text,
            "response": response,
            "error": error,
        }
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as failure:
            # Once: a full disk would otherwise add one warning per response.
            if not self._warned:
                _log.warning("cannot write a failed reward to its file: %s", failure)
            self._warned = True


class InlineReward:
    """A trivial reward, called on the event loop."""

    def __init__(self, name: str, key: str) -> None:
        self._reward = load_reward(name, None, key)

    def score(self, item: RewardItem) -> Scored:
        try:
            (scored,) = call(self._reward, [item], 0.0)
        except BaseException as error:  # noqa: BLE001 - fails only its own response
            return Scored(reward=0.0, error=described(error))
        return scored

    async def submit(self, items: Sequence[RewardItem]) -> Sequence[Scored]:
        return [self.score(item) for item in items]


def _rewarding(
    settings: RewardConfig, name: str | None, part: RewardPart
) -> InlineReward | RewardPool:
    found = built_in(part.name)
    key = _key(name)
    if found is not None and found.inline:
        return InlineReward(part.name, key)
    limits = (settings.memory_mib, found.memory_mib if found is not None else None)
    called = RewardLimits(
        name=part.name,
        key=key,
        settings=dict(part.settings),
        concurrency=settings.concurrency,
        batch=settings.batch,
        timeout_s=settings.timeout_s,
        cpu_limit_s=found.cpu_limit_s if found is not None else None,
        # The stricter limit of the configuration and of the built-in reward.
        memory_mib=min((limit for limit in limits if limit is not None), default=None),
    )
    return RewardPool(called, settings.workers)


class Scorer:
    """The parts of the reward that are called `per` response or group, for one event loop. Call
    `start` first."""

    def __init__(
        self, settings: RewardConfig, per: Literal["response", "group"] = "response"
    ) -> None:
        self.per = per
        self._settings = settings
        self._parts: dict[str | None, tuple[RewardPart, InlineReward | RewardPool]] = {
            name: (part, _rewarding(settings, name, part))
            for name, part in settings.rewards.items()
            if part.per == per
        }
        self.pools = [pool for _, pool in self._parts.values() if isinstance(pool, RewardPool)]
        self.inline = not self.pools

    def start(self) -> None:
        """Start the first process of each reward, which imports it while the engine starts."""
        for pool in self.pools:
            pool.start()

    async def ready(self) -> None:
        """Return once each reward can score. Raises UserCodeStartError."""
        for pool in self.pools:
            await pool.ready()

    def score_inline(
        self, prompt: Prompt, response: str, context: RewardContext = NOTHING_KNOWN
    ) -> Scored:
        """Return the score without awaiting; only if `inline` is true."""
        item = RewardItem(prompt, response, context)
        every = self._parts_of(prompt)
        return self._sum(
            {name: one.score(item) for name, one in every if isinstance(one, InlineReward)}
        )

    async def score(
        self, prompt: Prompt, response: str, context: RewardContext = NOTHING_KNOWN
    ) -> Scored:
        """Score a response. Never raises for a fault of the reward: an exception, a value that is
        not a finite number, a timeout and the end of its process are errors of the response."""
        (scored,) = await self.score_all([RewardItem(prompt, response, context)])
        return scored

    async def score_all(self, items: Sequence[RewardItem]) -> list[Scored]:
        """Score responses to one prompt, which each part receives in one call; see `score`."""
        parts = self._parts_of(items[0].prompt)
        requested = [one.submit(items) for _, one in parts]
        # Without the task that `gather` would add for the common single part.
        every = [await requested[0]] if len(requested) == 1 else await asyncio.gather(*requested)
        names = [name for name, _ in parts]
        return [
            self._sum({name: one[place] for name, one in zip(names, every, strict=True)})
            for place in range(len(items))
        ]

    def scores(self, prompt: Prompt) -> bool:
        """Return True if any part applies to `prompt`."""
        return bool(self._parts_of(prompt))

    def close(self) -> None:
        """End the processes, and cancel pending scores."""
        for pool in self.pools:
            pool.close()

    def _parts_of(self, prompt: Prompt) -> list[tuple[str | None, InlineReward | RewardPool]]:
        return [(n, one) for n, (part, one) in self._parts.items() if part.applies(prompt.fields)]

    def _sum(self, scored: Mapping[str | None, Scored]) -> Scored:
        # A reward without named parts is its only part.
        if None in scored:
            return scored[None]
        errors = [f"{name}: {one.error}" for name, one in scored.items() if one.error is not None]
        # No partial sum: the sample would be trained on a reward that lacks a term.
        if errors:
            timed_out = any(one.timed_out for one in scored.values())
            return Scored(reward=0.0, error="; ".join(errors), timed_out=timed_out)

        parts = {str(name): one.reward for name, one in scored.items()}
        total = self._settings.total(parts)
        if not abs(total) <= LARGEST:
            return Scored(reward=0.0, error=f"the reward of the parts {parts} is {total}")
        return Scored(reward=total, parts=parts)


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
