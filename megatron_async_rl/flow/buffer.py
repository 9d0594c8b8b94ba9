"""The groups that wait between a prompt and its batch, as a checkpoint holds them, and how many of
them a resumed run may continue with.

Invariants:
- a buffer is of one moment: nothing in it was consumed, and it shares no container with the
  scheduler it came from;
- what a run takes up keeps the law (staleness.py): budget and plan hold with it, and every deadline
  is that of the group's own version;
- with `exact_lag` either everything is taken up or nothing: with a part of it the others would
  train at another lag.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from megatron_async_rl.config.flow import ExactLag, FlowConfig
from megatron_async_rl.flow.staleness import deadline, max_lag
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Prompt, Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """The finished responses to one prompt. `index` is the order of admission, from 0 over the
    whole run."""

    index: int
    prompt: Prompt
    samples: tuple[SampleRow, ...]


@dataclass(eq=False)
class GroupState:
    """One group from its admission to its batch. `finished`: its place in the order in which groups
    finished; null while it is running."""

    index: int
    prompt: Prompt
    version: int
    """Under which it was admitted."""
    deadline: int
    open: dict[str, Request]
    """Requests that are not answered, by id; none while a whole group waits for its reward."""
    samples: list[SampleRow] = field(default_factory=list)
    finished: int | None = None
    dropped: str = ""
    """Why; empty: it is not."""

    def group(self) -> SampleGroup:
        """The finished group, its samples in the order in which they were asked."""
        samples = sorted(self.samples, key=lambda sample: int(sample.id.rpartition("-")[2]))
        return SampleGroup(self.index, self.prompt, tuple(samples))


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """`groups`: admitted and neither consumed nor dropped."""

    groups: tuple[GroupState, ...] = ()
    stored: tuple[tuple[Prompt, tuple[SampleRow, ...]], ...] = ()
    """The replay store: responses of each prompt, oldest first."""
    equal: tuple[int, int] = (0, 0)
    """Groups that dynamic sampling has kept and dropped (group_table.py)."""
    first_versions: tuple[int, ...] = ()
    """Versions under which what `exact_lag` makes waits less, as there was too little before; none
    with other selections."""


EMPTY = Buffer()


def snapshot(entry: GroupState) -> GroupState:
    """A copy of a group that waits."""
    return replace(entry, open=dict(entry.open), samples=list(entry.samples))


def restorable(
    buffer: Buffer, flow: FlowConfig, *, version: int, limit: int, fresh_steps: int, oldest: int
) -> Buffer:
    """The part of `buffer` that a run which begins at `version` continues with; groups come most
    urgent first. The others' prompts are asked again.

    `limit`: groups that it may hold. `oldest`: the version whose weights, or newer ones', every
    token must come from.
    """
    due_now = [
        replace(one, deadline=deadline(one.version, flow.async_ratio, fresh_steps))
        for one in buffer.groups
    ]
    groups = _within_the_law(due_now, flow, version, limit, oldest)
    first_versions: set[int] = set()
    if isinstance(flow.selection, ExactLag):
        due = (version + place // flow.prompts_per_step for place in range(len(groups)))
        exact = all(
            _is_exact(g, d, version, buffer.first_versions)
            for g, d in zip(groups, due, strict=True)
        )
        groups = groups if exact and len(groups) == len(buffer.groups) else []
        first_versions.update(buffer.first_versions if groups else ())
        if len(groups) < max_lag(flow.async_ratio) * flow.prompts_per_step:
            first_versions.add(max(version, fresh_steps))

    if len(groups) < len(buffer.groups):
        log.warning(
            "version %d continues with %d of the %d groups in the buffer and requests the others"
            " again: for the present flow, run.steps and objective.snapshots they are of another"
            " size, too many, or too old",
            version,
            len(groups),
            len(buffer.groups),
        )
    return replace(buffer, groups=tuple(groups), first_versions=tuple(first_versions))


def _within_the_law(
    groups: Iterable[GroupState], flow: FlowConfig, version: int, limit: int, oldest: int
) -> list[GroupState]:
    taken: list[GroupState] = []
    for group in sorted(groups, key=lambda group: (group.deadline, group.index)):
        # All that are taken have a deadline no later, so that this one decides whether the plan is
        # feasible (staleness.is_feasible).
        places = min(limit, (group.deadline - version + 1) * flow.prompts_per_step)
        if (
            len(taken) < places
            and _fits(group, flow.group_size)
            and min(_versions(group, version)) >= oldest
        ):
            taken.append(group)
    return taken


def _fits(group: GroupState, size: int) -> bool:
    have = len(group.samples)
    if group.finished is not None:
        return have == size
    return have <= size == have + len(group.open)


def _versions(group: GroupState, now: int) -> set[int]:
    """Versions of the first and the last token of each response; what is asked now has `now`."""
    begun = [request.prefix for request in group.open.values() if request.prefix is not None]
    return {
        *(version for one in group.samples for version in (one.start_version, one.last_version)),
        *(int(prefix.versions[end]) for prefix in begun for end in (0, -1)),
        *([now] if group.open else []),
    }


def _is_exact(group: GroupState, due: int, now: int, first_versions: Collection[int]) -> bool:
    return _versions(group, now) == {group.version} and (
        group.deadline == due or group.version in first_versions
    )
