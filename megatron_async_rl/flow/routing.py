"""Which engine gets a request: the least loaded one with room, or one nearly as empty that knows the prompt.

Invariant: an engine that holds `capacity` requests is never chosen, so a slow one cannot hoard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Sized
from typing import Protocol, TypeVar

AFFINITY_LEAST = 8
"""Requests by which an engine that knows the prompt may be fuller than the least loaded one, at the least."""

GROUPS_REMEMBERED = 4096
"""Newest groups whose engine is remembered, for its prefix cache."""


class Place(Protocol):
    """An engine that could take a request."""

    @property
    def index(self) -> int: ...
    @property
    def held(self) -> Sized: ...


P = TypeVar("P", bound=Place)


class Router:
    """`capacity`: requests that one engine holds at most."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slack = max(AFFINITY_LEAST, capacity // 16)
        self._last: OrderedDict[int, int] = OrderedDict()

    def choose(self, places: Sequence[P], group: int) -> P | None:
        """Null where none has room; of several that are as empty, the first. Remembers where the group went."""
        least = min(places, key=lambda place: len(place.held), default=None)
        if least is None or len(least.held) >= self.capacity:
            return None
        last = self._last.get(group)
        near = None if last is None else next((place for place in places if place.index == last), None)
        if near is not None and len(near.held) < min(self.capacity, len(least.held) + self._slack + 1):
            return near
        self._last[group] = least.index
        if len(self._last) > GROUPS_REMEMBERED:
            self._last.popitem(last=False)
        return least
