"""Options of torch's CUDA allocator in the environments of trainer ranks and engines.

Invariants:
- an option that the user set for ranks is kept;
- engines have no expandable segments, whatever the environment. vLLM's sleep mode refuses them, and
  memory in such segments cannot be exported by CUDA IPC. The carrier `cuda_ipc` allocates its
  buckets from the driver, so segments of the ranks do not affect it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

NEWER, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Names of the variable. torch reads the older name only if the newer one is not set."""
PAGE_LOCKED = "pinned_max_round_threshold_mb:1"
"""Rounding limit of page-locked tensors, in MiB. By default torch rounds them up to a power of two:
optimizer moments and weight copies in host memory could take twice the planned memory."""
EXPANDABLE = "expandable_segments:True"
"""Growing segments. Micro-batches differ in size, and segments of fixed size leave gaps that no
tensor fits into."""


def set_options_of_ranks(environment: MutableMapping[str, str]) -> None:
    """Add PAGE_LOCKED and EXPANDABLE, unless the environment sets these options already."""
    # Extend the variable that the user set: torch would ignore the other one.
    name = OLDER if OLDER in environment and NEWER not in environment else NEWER
    options = _options(environment.get(name, ""))
    there = {_key(option) for option in options}
    added = [option for option in (PAGE_LOCKED, EXPANDABLE) if _key(option) not in there]
    environment[name] = ",".join([*options, *added])


def drop_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Remove the option from both variables."""
    for name in {NEWER, OLDER} & environment.keys():
        options = [
            one for one in _options(environment[name]) if _key(one) != EXPANDABLE.partition(":")[0]
        ]
        if options:
            environment[name] = ",".join(options)
        else:
            del environment[name]


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Remove the option from this process's environment, for processes started in the body."""
    before = {name: os.environ[name] for name in (NEWER, OLDER) if name in os.environ}
    drop_expandable_segments(os.environ)
    try:
        yield
    finally:
        os.environ.update(before)


def _options(text: str) -> list[str]:
    return [option for option in text.split(",") if option.strip()]


def _key(option: str) -> str:
    return option.partition(":")[0].strip()
