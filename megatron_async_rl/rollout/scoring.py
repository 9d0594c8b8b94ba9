"""Scoring of finished responses. Trivial rewards run on the engine's event loop, other rewards run
in processes.

    response -> Scorer -+-> RewardPool of part "correct" -> UserProcess ...
                        +-> RewardPool of part "style"   -> UserProcess ...

An engine has a Scorer of the parts that are called per response. A part that is called per group
receives all responses to a prompt in one call, so the controller and an evaluation, which collect
the groups, call it: they have `GroupRewards` with a Scorer of these parts.

    engine: parts per response --sample--> controller or evaluation: parts per group --> reward

Invariants:
- the reward of a response is the weighted sum of the parts that apply to its prompt, multiplied by
  the gates. If a part fails, the response fails, and its error names the part;
- a fault of a part that is called per response affects only that response
  (rewards/reward_pool.py); a fault of a part that is called per group affects only that group;
- a group is scored once it has all its responses, and the reward of each response includes both
  kinds of parts;
- a part that is called per group does not receive responses that failed before; they keep their
  errors. It receives the others in the order of their requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
"""File, in the folder of the logs, for the failures of parts that are called per group."""


def require_rewards(settings: RewardConfig) -> None:
    """Load every reward into this process. Raises RewardError, with the key of the reward, for a
    reward that cannot be loaded or whose parameters do not match `per`."""
    for name, part in settings.rewards.items():
        key = _key(name)
        loaded = load_reward(part.name, part.settings, key)
        if loaded.of_groups and part.per != "group":
            what = f"{part.name!r} takes (prompt, responses), so it needs all responses to a prompt"
            raise RewardError(f"{key}.per", what, f"set {key}.per: group")
        if part.per == "group" and not loaded.of_groups:
            what = f"{part.name!r} does not accept all responses to a prompt"
            fix = "name a function with the parameters (prompt, responses), or remove `per`"
            raise RewardError(f"{key}.per", what, fix)


def reward_fields(settings: RewardConfig) -> Required:
    """Return two functions of a data row: the columns that the rewards need in addition to `prompt`
    (None if no part adds to the reward of the row), and the check of the row's values."""
    parts = [(one, required_fields(one.name, one.settings)) for one in settings.rewards.values()]

    def columns(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
        applying = [(part, names) for part, names in parts if part.applies(fields)]
        # Gates only multiply: with gates alone, the reward of every response would be 0.
        if all(part.gate for part, _ in applying):
            return None
        return tuple(dict.fromkeys(chain.from_iterable(names for _, names in applying)))

    def fault(fields: Mapping[str, Any]) -> tuple[str, str, str] | None:
        for part, _ in parts:
            if part.applies(fields):
                try:
                    validate_row(part.name, part.settings, fields)
                except ColumnError as error:
                    return error.column, error.fault, error.fix
                except RewardError as error:
                    return "", error.what, error.fix
                # A validator may fail on unexpected data: report the row instead of a traceback.
                except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                    what = f"{part.name} cannot use the row: {type(error).__name__}: {error}"
                    return "", what, "correct the row"
        return None

    return Required(columns, fault)


def _key(part: str | None) -> str:
    return KEY if part is None else f"{KEY}.parts.{part}"


class FailureLog:
    """JSONL file with one object per failed reward, including the response. With `path` None,
    nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._warned = False

    def add(self, sample: str, prompt: Prompt, response: str, error: str) -> None:
        """Append a failure. An OSError of the file loses this line, and the first one is logged."""
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
            # Once, because a full disk would cause a warning for every failed reward.
            if not self._warned:
                _log.warning("cannot write a failed reward to %s: %s", self._path, failure)
            self._warned = True


class InlineReward:
    """A trivial reward, which is called on the event loop."""

    def __init__(self, name: str, key: str) -> None:
        self._reward = load_reward(name, None, key)

    def score(self, item: RewardItem) -> Scored:
        try:
            (scored,) = call(self._reward, [item], 0.0)
        except BaseException as error:  # noqa: BLE001 - affects only its own response
            return Scored(reward=0.0, error=described(error))
        return scored

    async def submit(self, items: Sequence[RewardItem]) -> Sequence[Scored]:
        return [self.score(item) for item in items]


def _rewarding(
    settings: RewardConfig, name: str | None, part: RewardPart
) -> InlineReward | RewardPool:
    known = built_in(part.name)
    key = _key(name)
    if known is not None and known.inline:
        return InlineReward(part.name, key)
    memory_limits = (settings.memory_mib, known.memory_mib if known is not None else None)
    limits = RewardLimits(
        name=part.name,
        key=key,
        settings=dict(part.settings),
        concurrency=settings.concurrency,
        batch=settings.batch,
        timeout_s=settings.timeout_s,
        cpu_limit_s=known.cpu_limit_s if known is not None else None,
        # The lower limit of the configuration's and the built-in reward's.
        memory_mib=min((limit for limit in memory_limits if limit is not None), default=None),
    )
    return RewardPool(limits, settings.workers)


class Scorer:
    """Parts of the reward with this `per` (`response` or `group`), for one event loop. Call `start`
    first."""

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
        """Start the first process of each reward. The process imports the reward while the engine
        starts."""
        for pool in self.pools:
            pool.start()

    async def ready(self) -> None:
        """Return once each reward can score. Raises UserCodeStartError."""
        for pool in self.pools:
            await pool.ready()

    def score_inline(
        self, prompt: Prompt, response: str, context: RewardContext = NOTHING_KNOWN
    ) -> Scored:
        """Score a response without awaiting. Call it only if `inline` is true. See `score`."""
        item = RewardItem(prompt, response, context)
        parts = self._parts_of(prompt)
        return self._sum(
            {name: one.score(item) for name, one in parts if isinstance(one, InlineReward)}
        )

    async def score(
        self, prompt: Prompt, response: str, context: RewardContext = NOTHING_KNOWN
    ) -> Scored:
        """Score a response. A fault of the reward (an exception, a value that is not a finite
        number, a timeout, or the end of its process) does not raise: it becomes the error of the
        result."""
        (scored,) = await self.score_all([RewardItem(prompt, response, context)])
        return scored

    async def score_all(self, items: Sequence[RewardItem]) -> list[Scored]:
        """Score responses to one prompt. Each part receives them in one call. See `score`."""
        parts = self._parts_of(items[0].prompt)
        pending = [one.submit(items) for _, one in parts]
        # Most rewards have a single part: save the task that `gather` would create for it.
        results = [await pending[0]] if len(pending) == 1 else await asyncio.gather(*pending)
        names = [name for name, _ in parts]
        return [
            self._sum({name: scores[place] for name, scores in zip(names, results, strict=True)})
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
        # A reward without named parts is a single part with the name None.
        if None in scored:
            return scored[None]
        errors = [f"{name}: {one.error}" for name, one in scored.items() if one.error is not None]
        # A sum of the other parts would train the sample on an incomplete reward.
        if errors:
            timed_out = any(one.timed_out for one in scored.values())
            return Scored(reward=0.0, error="; ".join(errors), timed_out=timed_out)

        parts = {str(name): one.reward for name, one in scored.items()}
        total = self._settings.total(parts)
        if error := _too_large(parts, total):
            return Scored(reward=0.0, error=error)
        return Scored(reward=total, parts=parts)


class GroupRewards:
    """Rewards of whole groups, for one event loop. Call `start` first. `log_dir`: folder for the
    file of failures; with None, no file is written."""

    def __init__(self, settings: RewardConfig, log_dir: Path | None) -> None:
        self._scorer = Scorer(settings, "group")
        self._settings = settings
        self._tasks = set[asyncio.Task[None]]()
        self.moved_at = 0.0
        """Time at which a group was last scored, in monotonic seconds."""
        self._failures = FailureLog(None if log_dir is None else log_dir / LOG)

    @property
    def any(self) -> bool:
        """True if the reward has parts that are called per group."""
        # No part that is called per group is inline.
        return bool(self._scorer.pools)

    async def start(self) -> None:
        """Start the processes, and wait until each part can score. Raises UserCodeStartError."""
        self._scorer.start()
        await self._scorer.ready()

    def close(self) -> None:
        """End the processes, and cancel groups that wait for their reward."""
        for task in self._tasks:
            task.cancel()
        self._scorer.close()

    @property
    def waiting(self) -> int:
        """Number of groups that wait for their reward."""
        return len(self._tasks)

    def begin(
        self, group: SampleGroup, done: OnGroupScored, fail: Callable[[BaseException], None]
    ) -> None:
        """Score `group` in a task, then call `done` with the group and its scored samples. `fail`
        receives an internal error, which must end the run and not only the task."""
        task = asyncio.create_task(
            self._score(group, done, fail), name=f"reward of group {group.index}"
        )
        # asyncio holds tasks weakly: without this reference, the task might be garbage-collected.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(
        self, group: SampleGroup, done: OnGroupScored, fail: Callable[[BaseException], None]
    ) -> None:
        try:
            samples = await self.of(group.prompt, group.samples)
            # Inside `try`, so that an error of `done` ends the run, too.
            done(group, samples)
        except Exception as error:  # noqa: BLE001 - the controller raises it
            fail(error)

    async def of(
        self, prompt: Prompt, samples: Sequence[SampleRow], *, held_out: bool = False
    ) -> list[SampleRow]:
        """Return the samples of a group with their complete rewards, in the order of `samples`."""
        # A response that failed before keeps its error.
        rows = [row for row in samples if row.valid]
        if not rows or not self._scorer.scores(prompt):
            return list(samples)
        valid_samples = [row.sample() for row in rows]
        items = [RewardItem(prompt, one.text, _context(one, held_out)) for one in valid_samples]
        scored = await self._scorer.score_all(items)
        totals = [self._total(row, one) for row, one in zip(rows, scored, strict=True)]
        for sample, result in zip(valid_samples, totals, strict=True):
            if result.error is not None:
                self._failures.add(sample.id, prompt, sample.text, result.error)
        self.moved_at = time.monotonic()
        new_rows = rescored(
            rows,
            [one.reward for one in totals],
            [one.parts for one in totals],
            [one.error for one in totals],
        )
        # Failed responses keep their positions, so the order is that of the requests.
        by_id = {one.id: one for one in new_rows}
        return [by_id.get(row.id, row) for row in samples]

    def _total(self, row: SampleRow, scored: Scored) -> Scored:
        """Return the complete reward of a sample: `scored`, the parts that it had before, and the
        reward of its environment."""
        if scored.error is not None:
            return Scored(reward=0.0, error=scored.error)
        before = row.reward_parts or {}
        if scored.parts is None:  # a single reward, without named parts
            total, parts = row.reward + scored.reward, before
        else:
            parts = {**before, **scored.parts}
            # Gates multiply the sum of all parts, so the total of all parts replaces the total of
            # the earlier ones. The rest of `row.reward` is the environment's and does not change.
            total = row.reward - self._settings.total(before) + self._settings.total(parts)
        if error := _too_large(parts, total):
            return Scored(reward=0.0, error=error)
        return Scored(reward=total, parts=parts or None)


def _too_large(parts: Mapping[str, float], total: float) -> str | None:
    """Return the error of a total that is not finite, or whose magnitude exceeds LARGEST."""
    if abs(total) <= LARGEST:  # False for NaN
        return None
    return (
        f"the reward of the parts {parts} is {total}; it must be finite and at most {LARGEST:g} in"
        " magnitude"
    )


def _context(sample: Sample, held_out: bool) -> RewardContext:
    return RewardContext(
        finish_reason=sample.finish_reason,
        tokens=sample.length,
        seconds=sample.finished_at - sample.started_at,
        version=int(sample.versions[-1]),
        held_out=held_out,
    )
