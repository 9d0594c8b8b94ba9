"""What waits between a prompt and its batch, as a checkpoint holds it, and how much of it a resumed run may go on with.

Invariants:
- a buffer is of one moment: nothing in it was consumed, and it shares no container with the scheduler it came from;
- what is taken up keeps the law (law.py): budget and plan hold with it, and every deadline is that of the group's own version;
- with `exact_lag` either everything is taken up or nothing: with a part of it the others would train at another lag.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.config.selection import ExactLag
from megatron_async_rl.flow.admitted import Admitted
from megatron_async_rl.flow.law import deadline, max_lag
from megatron_async_rl.samples.types import Prompt, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """`groups`: admitted and neither consumed nor dropped. `returned`: whose cut responses wait to be continued."""

    groups: tuple[Admitted, ...] = ()
    returned: tuple[Admitted, ...] = ()
    stored: tuple[tuple[Prompt, tuple[Sample, ...]], ...] = ()
    """The replay store: responses of each prompt, oldest first."""
    equal: tuple[int, int] = (0, 0)
    """What the filter of equal groups has kept and dropped (equal_groups.py)."""
    first_versions: tuple[int, ...] = ()
    """What `exact_lag` makes under these waits less, as there was too little before; of other selections none."""


EMPTY = Buffer()


def at_rest(entry: Admitted) -> Admitted:
    """A copy of a group that waits. A whole one asks for nothing: what was being cut of it is cut."""
    whole = entry.finished is not None
    return replace(entry, open={} if whole else dict(entry.open), samples=list(entry.samples), prefixes=[])


def cut_at_rest(entry: Admitted) -> Admitted:
    """A copy of a group with its cut responses alone, those that are being cut as they were when they were asked."""
    cutting = [request.prefix for request in entry.open.values() if request.prefix is not None]
    return replace(entry, open={}, samples=[], prefixes=[*entry.prefixes, *cutting], finished=None)


def taken_up(buffer: Buffer, flow: FlowConfig, *, version: int, limit: int, fresh_steps: int, oldest: int) -> Buffer:
    """What a run that begins at `version` goes on with; groups come most urgent first. The others' prompts are asked again.

    `limit`: groups that it may hold. `oldest`: the version whose weights, or newer ones', every token must come from.
    """

    def due_now(groups: Iterable[Admitted]) -> list[Admitted]:
        return [replace(one, deadline=deadline(one.version, flow.async_ratio, fresh_steps)) for one in groups]

    groups = _within_the_law(due_now(buffer.groups), flow, version, limit, oldest)
    first_versions: set[int] = set()
    if isinstance(flow.selection, ExactLag):
        due = (version + place // flow.prompts_per_step for place in range(len(groups)))
        exact = all(_is_exact(g, d, version, buffer.first_versions) for g, d in zip(groups, due, strict=True))
        groups = groups if exact and len(groups) == len(buffer.groups) else []
        first_versions.update(buffer.first_versions if groups else ())
        if len(groups) < max_lag(flow.async_ratio) * flow.prompts_per_step:
            first_versions.add(max(version, fresh_steps))
    if len(groups) < len(buffer.groups):
        log.warning(
            "version %d goes on with %d of the %d groups in the buffer and asks for the others again: for the present flow, "
            "run.steps and objective.snapshots they are of another size, too many, or too old",
            version, len(groups), len(buffer.groups),
        )  # fmt: skip
    known = [one for one in buffer.returned if min(prefix.start_version for prefix in one.prefixes) >= oldest]
    return replace(
        buffer,
        groups=tuple(groups),
        returned=tuple(due_now(known) if flow.requeue_cut else ()),
        first_versions=tuple(first_versions),
    )


def _within_the_law(groups: Iterable[Admitted], flow: FlowConfig, version: int, limit: int, oldest: int) -> list[Admitted]:
    taken: list[Admitted] = []
    for group in sorted(groups, key=lambda group: (group.deadline, group.index)):
        # All that are taken have a deadline no later, so that this one decides whether the plan holds (law.holds).
        places = min(limit, (group.deadline - version + 1) * flow.prompts_per_step)
        if len(taken) < places and _fits(group, flow.group_size) and min(_versions(group, version)) >= oldest:
            taken.append(group)
    return taken


def _fits(group: Admitted, size: int) -> bool:
    have = len(group.samples)
    return have == size if group.finished is not None else have < size <= have + len(group.open)


def _versions(group: Admitted, now: int) -> set[int]:
    """Of the first and the last token of each response, `now` being that of what is asked now."""
    begun = [*(s.versions for s in group.samples), *(r.prefix.versions for r in group.open.values() if r.prefix is not None)]
    return {int(versions[end]) for versions in begun for end in (0, -1)} | ({now} if group.open else set())


def _is_exact(group: Admitted, due: int, now: int, first_versions: Collection[int]) -> bool:
    return _versions(group, now) == {group.version} and (group.deadline == due or group.version in first_versions)
