"""Options of torch's CUDA allocator for trainer ranks and engines, set as environment variables.

Invariants:
- an option that the user set for the ranks is kept;
- engines never use expandable segments, even if the user set the option: vLLM's sleep mode refuses
  them, and CUDA IPC cannot export memory in such segments. Expandable segments of the ranks are
  harmless, because the carrier `cuda_ipc` allocates its buckets from the driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

NEWER, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Names of torch's variable. torch reads the older name only if the newer one is not set."""
PAGE_LOCKED = "pinned_max_round_threshold_mb:1"
"""Largest page-locked tensor that torch rounds up to a power of two, in MiB. torch's default has no
such limit: optimizer moments and weight copies in host memory could then take twice the planned
memory."""
EXPANDABLE = "expandable_segments:True"
"""Segments that grow. Micro-batches differ in size, so segments of fixed size would leave gaps that
are too small for the next tensors."""


def set_options_of_ranks(environment: MutableMapping[str, str]) -> None:
    """Add PAGE_LOCKED and EXPANDABLE, unless the environment sets these options already."""
    # Extend the variable that the user set: setting NEWER would make torch ignore OLDER.
    name = OLDER if OLDER in environment and NEWER not in environment else NEWER
    options = _options(environment.get(name, ""))
    user_keys = {_key(option) for option in options}
    added = [option for option in (PAGE_LOCKED, EXPANDABLE) if _key(option) not in user_keys]
    environment[name] = ",".join([*options, *added])


def drop_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Remove EXPANDABLE from both variables."""
    for name in {NEWER, OLDER} & environment.keys():
        options = [one for one in _options(environment[name]) if _key(one) != _key(EXPANDABLE)]
        if options:
            environment[name] = ",".join(options)
        else:
            del environment[name]


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Remove EXPANDABLE from the environment of processes that start inside the `with` block."""
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
