"""The only module that depends on whether there is a GPU.

Megatron-Core uses CUDA by name: `device="cuda"`, `torch.cuda.current_device()`, `tensor.cuda()`,
streams and the CUDA random generator. `install("cpu")` redirects these names to the CPU, for the
lifetime of the process, so that the same Megatron runs over gloo. `install("cuda")` redirects
nothing: it selects this rank's device and disables cuDNN's attention.

Invariants:
- a device is installed once, before a process group or a model exists; a second call must request
  the same device;
- only names of CUDA change meaning: code that never mentions CUDA behaves as before;
- `torch.cuda.is_available()` remains correct;
- if this module is the first to import Megatron, a start without a GPU does not load torch's
  compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Megatron applies `torch.compile` to its fused functions at import, which loads the compiler: a
    # fifth of a trainer's imports, for functions that a CPU does not use.
    compiler, torch.compile = torch.compile, lambda function: function
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
_installed: str | None = None


def launched_rank() -> int:
    """Return the global rank given by torchrun; 0 in a process started without it."""
    return int(os.environ.get("RANK", "0"))


def install(device: str) -> str:
    """Install `auto` (cuda if available), `cpu` or `cuda`. Return `cpu` or `cuda`.

    Raises RuntimeError if CUDA is requested and missing, or if another device is already installed.
    """
    global _installed
    chosen = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise ValueError(f"policy.device: {device!r} is not one of auto, cpu, cuda")
    if _installed is not None:
        if _installed != chosen:
            raise RuntimeError(
                f"this process already runs on {_installed}; it cannot change to {chosen}"
            )
        return chosen
    if chosen == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                "the policy should run on CUDA, and torch sees no CUDA device (torch"
                f" {torch.__version__}, built for CUDA {torch.version.cuda}); set policy.device:"
                " cpu, or see `mar doctor` for what makes CUDA unavailable"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # From compute capability 9.0 on torch prefers cuDNN's attention, which compiles a plan for
        # each new shape and keeps all of them. Micro-batches have many shapes; flash attention has
        # no plans.
        torch.backends.cuda.enable_cudnn_sdp(False)

    if chosen == "cpu":
        # Import Megatron before any name is replaced: its import loads torch's compiler, which
        # catalogues torch's functions and must find the originals.
        from megatron_async_rl.policy import megatron_private

        megatron_private.point_at_cpu(_get_cpu_state, _set_cpu_state)
        _point_factories_at_cpu()
        _point_tensors_at_cpu()
        _point_torch_cuda_at_cpu()
    _installed = chosen
    return chosen


def device() -> torch.device:
    """Return this rank's device. Raises RuntimeError before `install`."""
    if _installed is None:
        raise RuntimeError("device.install has not been called in this process")
    return _CPU if _installed == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _names_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def _point_factories_at_cpu() -> None:
    # torch caches which functions are factories for `with torch.device(...)`; fill that cache with
    # the originals.
    from torch.utils._device import _device_constructors

    _device_constructors()

    # Wrap the factories instead of using a TorchFunctionMode, because a mode doubles the cost of
    # every small operation and does not affect other threads.
    def redirect(factory: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(factory)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return redirected

    for name in _FACTORIES:
        setattr(torch, name, redirect(getattr(torch, name)))


def _point_tensors_at_cpu() -> None:
    plain_type = Tensor.type

    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def reported_type(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Megatron's optimizers sort parameters by this name and refuse those not on a GPU.
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, *args, **kwargs)

    Tensor.cuda = cuda
    Tensor.type = reported_type


class _Stream:
    """Stream or event for a device on which all operations run in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _get_cpu_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_cpu_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _point_torch_cuda_at_cpu() -> None:
    # One function object per name, because torch's compiler refuses a catalogue with the same
    # object under two names.
    def answering(make: Callable[[], Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make()

    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, answering(lambda: None))
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, answering(_Stream))
    # The generator itself, because torch.manual_seed would call back into torch.cuda.
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    torch.cuda.current_device = answering(lambda: _CPU)
    torch.cuda.stream = answering(nullcontext)
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.get_rng_state = lambda *args, **kwargs: _get_cpu_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: _set_cpu_state(state)


def arithmetic_of(device_type: str) -> str:
    """Return a text that is equal on two machines if their kernels add in the same order: the name
    of the GPU, or the instructions of the CPU that torch uses."""
    if device_type == "cuda":
        return f"cuda {torch.cuda.get_device_name()}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
