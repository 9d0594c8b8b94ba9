"""The policy's memory on its device: its owners, and the part that is released while engines use
the device.

    parameters       stay: publishing and scoring need them
    optimizer state  moments, float32 masters, and what gradient controls keep between steps are
                     moved to twins in host memory, page-locked on CUDA, and back
    gradients        are freed: those of the next step begin at zero

Invariants:
- a round trip changes neither a bit nor the identity of a tensor: references to a tensor stay
  valid;
- a released tensor is its twin: it can be read and saved in host memory, and its device storage has
  0 bytes for all its users;
- masters that are the model's own parameters stay, as do moments that already are in host memory;
- a training step on a policy that has released its state is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_async_rl.controls.decision import Control
from megatron_async_rl.policy.adam_view import optimizer_parameters
from megatron_async_rl.policy.fp8 import drop_workspaces, is_quantised
from megatron_async_rl.policy.megatron_private import gradient_buffers, optimizer_parts
from megatron_async_rl.policy.optimizer import MOMENTS

MEMORY_FREE_TIMEOUT_S, PAUSE_S = 30.0, 0.2
"""Longest wait for the memory of an engine that was killed, and interval between two attempts."""


class StateReleased(RuntimeError):
    """A training step was requested while the policy's training state is in host memory."""


class _MovedTensor(NamedTuple):
    """A released tensor. tensor: now its twin in host memory. place: the original, without
    storage."""

    tensor: Tensor
    place: Tensor


class _EmptiedStorage(NamedTuple):
    """A storage that had `nbytes`."""

    storage: torch.UntypedStorage
    nbytes: int


class DeviceMemory:
    """Device memory of a policy. wrapped: the model's chunks inside Megatron's DDP. device: of this
    rank."""

    def __init__(
        self,
        wrapped: Sequence[Any],
        optimizer: MegatronOptimizer,
        controls: Iterable[Control],
        device: torch.device,
    ) -> None:
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._controls = list(controls)
        self._device = device
        self._exchanged: list[_MovedTensor] = []
        self._emptied: list[_EmptiedStorage] = []
        self._released = False

    @torch.no_grad()
    def release(self) -> None:
        """Release all device memory except the parameters'. Does nothing if already released."""
        if self._released:
            return
        self._released = True
        # Before a control's reference is moved, its copies on a separate stream must be complete.
        self._synchronise()
        # Gradients that Adam read: views of the buffers, or float32 copies of them.
        self._optimizer.zero_grad()
        state = [
            tensor
            for tensor in (*self._state(), *self._references())
            if tensor.device.type == self._device.type and tensor.numel()
        ]
        twins = _copied(state)
        self._synchronise()
        for tensor, twin in zip(state, twins, strict=True):
            self._exchanged.append(_MovedTensor(tensor, tensor.detach()))
            tensor.data = twin
        for place in (*(each.place for each in self._exchanged), *gradient_buffers(self._wrapped)):
            storage = place.untyped_storage()
            if storage.nbytes():  # otherwise shared with another tensor, and empty already
                # Sizes are recorded, because an empty storage does not know its former size.
                self._emptied.append(_EmptiedStorage(storage, storage.nbytes()))
                storage.resize_(0)
        drop_workspaces(self._wrapped)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Return all tensors to the device. Does nothing if they are there."""
        if not self._released:
            return
        # All storages first, because several tensors may be views of one.
        for storage, nbytes in self._emptied:
            _take(storage, nbytes)
        twins = []
        for tensor, place in self._exchanged:
            twins.append(tensor.detach())
            place.copy_(tensor, non_blocking=True)
            tensor.data = place
        for buffer in gradient_buffers(self._wrapped):
            # New memory is not initialised, and the next step adds to it.
            buffer.zero_()
        self._synchronise()  # torch keeps the twins' page-locked memory for the next ones
        self._exchanged.clear()
        self._emptied.clear()
        self._released = False

    def require(self) -> None:
        """Raise StateReleased if the training state is released."""
        if self._released:
            raise StateReleased(
                "the policy's optimizer state is in host memory and its gradients are released:"
                " call `restore` before a training step"
            )

    def held(self) -> dict[str, int]:
        """Return bytes on this rank's device by owner; torch's other tensors and other processes
        are included only on CUDA."""
        away = {id(each.tensor) for each in self._exchanged}
        seen: set[int] = set()

        def count(tensors: Iterable[Tensor]) -> int:
            total = 0
            for tensor in tensors:
                storage = tensor.untyped_storage()
                here = tensor.device.type == self._device.type and id(tensor) not in away
                if here and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
            return total

        # The storage of FP8 weights is Transformer Engine's own.
        quantised = sum(p.numel() for p in self._parameters() if is_quantised(p))
        gradients = [p.grad for p in optimizer_parameters(self._optimizer) if p.grad is not None]
        found = {
            "parameters": quantised + count(self._plain_parameters()),
            "gradients": count([*gradient_buffers(self._wrapped), *gradients]),
            "optimizer state": count(self._state()),
            "references of gradient controls": count(self._references()),
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            found["activations, at their peak"] = max(0, peak - sum(found.values()))
            found["engines and other processes"] = max(0, total - free - reserved)
        return found

    def _state(self) -> Iterator[Tensor]:
        """Yield float32 masters that are not the model's own parameters, and moments."""
        own = {p.untyped_storage().data_ptr() for p in self._plain_parameters()}
        for master in optimizer_parameters(self._optimizer):
            if master.untyped_storage().data_ptr() not in own:
                yield master
        for part in optimizer_parts(self._optimizer):
            for state in part.optimizer.state.values():
                yield from (state[name] for name in MOMENTS if name in state)

    def _references(self) -> Iterator[Tensor]:
        for control in self._controls:
            yield from control.device_state()

    def _parameters(self) -> Iterator[nn.Parameter]:
        for chunk in self._wrapped:
            yield from chunk.parameters()

    def _plain_parameters(self) -> Iterator[nn.Parameter]:
        yield from (p for p in self._parameters() if not is_quantised(p))

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _take(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resize a storage to `nbytes`. A recently killed engine may still have memory: the driver
    reclaims it when the last of the engine's processes has ended."""
    until = time.monotonic() + MEMORY_FREE_TIMEOUT_S
    while True:
        try:
            storage.resize_(nbytes)
            return
        except torch.OutOfMemoryError:
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies in host memory, page-locked for CUDA tensors; complete once the device is
    synchronised."""
    try:
        return [
            torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
            ).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
    except RuntimeError as error:
        needed = sum(tensor.nbytes for tensor in tensors) / 2**30
        error.add_note(f"{needed:.1f} GiB of host memory are needed for the training state")
        raise
