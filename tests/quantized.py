"""Values in the number formats of a gradient reference."""

from __future__ import annotations

from torch import Tensor

from megatron_async_rl.controls.quantize import (
    QuantizedTensors,
    ReferenceDtype,
    room_for,
    write,
)


def quantize(values: Tensor, dtype: ReferenceDtype) -> QuantizedTensors:
    """Return new tensors that hold `values` (any shape, finite)."""
    written = room_for(values.numel(), dtype, values.device)
    write(values, written)
    return written
