"""Floating-point memory that operations of this thread allocate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """sizes: bytes of each new tensor, in order, with `meta` of those without memory, too. touched:
    operations that were given memory of the `watched` tensors."""

    def __init__(self, watched: Iterable[torch.Tensor] = (), *, meta: bool = True) -> None:
        super().__init__()
        self._meta = meta
        self.sizes: list[int] = []
        self.touched: list[str] = []
        self._watched = {_place(tensor) for tensor in watched if tensor.numel()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        if given & self._watched:
            self.touched.append(str(func))
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            new = _is_tensor(leaf) and leaf.is_floating_point() and _place(leaf) not in given
            if new and leaf.untyped_storage().nbytes() and (self._meta or not leaf.is_meta):
                self.sizes.append(leaf.untyped_storage().nbytes())
        return found


def _is_tensor(leaf) -> bool:
    return isinstance(leaf, torch.Tensor)


def _place(tensor: torch.Tensor) -> int:
    memory = tensor.untyped_storage()
    return memory.data_ptr() or memory._cdata  # the meta device has no addresses
