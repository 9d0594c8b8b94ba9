"""Operations of a block of code that make the host wait for the device, that copy numbers to it one
tensor at a time, or that add numbers in an order that CUDA does not define.

On CUDA torch itself reports its waits. On a CPU nothing waits, so the operations are found by their
names, whatever called them, in the forward and the backward pass.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = (
    *("local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "allclose"),
    *("unique", "bincount", "repeat_interleave"),
)
"""Operations whose result, or its shape, the host needs to know."""
FROM_THE_HOST = ("lift_fresh",)
"""A tensor made of Python numbers, such as an index that is a list."""

UNORDERED = ("index_add", "scatter_add", "index_reduce", "scatter_reduce", "cumsum", "bincount")
"""Sums of floats whose bits are not reproducible on CUDA."""

CROSSING = (
    (torch, "from_numpy"),
    *((torch.Tensor, name) for name in ("tolist", "numpy", "cpu")),
)
"""Transfers to and from the host that are not operations on a CPU."""
OURSELVES = ("host_syncs", "policy/device.py")


class Seen(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_", "index_put") else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if by_mask or name.lstrip("_").startswith(WAITING) or name in FROM_THE_HOST:
            self.found.append(f"{name} {place()}")
        return func(*args, **(kwargs or {}))


def place() -> str:
    """Return the innermost line of the package, of Megatron or of a test that is being executed."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not any(name in frame.filename for name in OURSELVES)
    ]
    frame = [frame for frame in frames if "/torch/" not in frame.filename][-1]
    # Packages may be installed anywhere on the path.
    folders = [f"{folder}/" for folder in sys.path if folder and frame.filename.startswith(folder)]
    return f"{frame.filename.removeprefix(max(folders, key=len, default=''))}:{frame.lineno}"


def counted(name: str, original: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    def crossing(*args: Any, **kwargs: Any) -> Any:
        found.append(f"{name} {place()}")
        return original(*args, **kwargs)

    return crossing


class Sums(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        name = func.overloadpacket.__name__
        # The maximum or the minimum of numbers is the same in any order.
        extreme = any(each in ("amin", "amax") for each in args if isinstance(each, str))
        sums = name.lstrip("_").startswith(UNORDERED) and not extreme
        if sums and args[0].is_floating_point():
            self.found.append(f"{name} {place()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def unordered_sums() -> Iterator[list[str]]:
    """Yield a list that receives such sums, of the forward and the backward pass on a CPU."""
    found: list[str] = []
    with Sums(found):
        yield found


@contextmanager
def host_syncs(device: str) -> Iterator[list[str]]:
    """Yield a list that receives each operation found, with its place."""
    found: list[str] = []
    with ExitStack() as stack:
        for owner, name in CROSSING:
            crossed = counted(name, getattr(owner, name), found)
            stack.enter_context(mock.patch.object(owner, name, crossed))
        if device == "cpu":
            stack.enter_context(Seen(found))
            yield found
            return
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [
            f"{str(each.message).splitlines()[0]} {each.filename}:{each.lineno}"
            for each in told
            if "called a synchronizing CUDA operation" in str(each.message)
        ]
