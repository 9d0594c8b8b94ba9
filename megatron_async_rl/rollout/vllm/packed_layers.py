"""Layers of vLLM's model whose kernels keep a packed copy of their weights, as on a CPU, and how
they get another.

Invariants:
- a layer is packed anew once all pieces of its weights came, and never from a part of them;
- what a piece brings is counted by what vLLM's own loader wrote of it;
- memory is reused only when no kernel can refer to it: a packed copy is the kernel's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


class Scratch:
    """Memory for weights whose pieces are coming in, kept and reused. Fresh memory costs more than
    what is copied to it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        free = self._free.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype)

    def give(self, tensor: Tensor) -> None:
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


class AwaitedWeight:
    """A parameter of `layer` as vLLM first made it, in place of what its kernel made of it, while
    its pieces come in.

    `memory`: where they are put. `take` is called with a tensor that is the whole weight and is
    used where it lies, `when_full` as soon as all pieces are there.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        attribute: str,
        memory: Callable[[torch.Size, torch.dtype], Tensor],
        take: Callable[[Tensor], None],
        when_full: Callable[[], None],
    ) -> None:
        self.name = f"{name}.{attribute}"
        self.full = True
        self._layer = layer
        self._attribute = attribute
        self._memory = memory
        self._take_as_it_is = take
        self._when_full = when_full
        original = get_layerwise_info(layer).restore_metadata[0][attribute]
        self._shape, self._total = original.shape, original.numel()
        self._nothing = torch.empty(0, dtype=original.dtype)
        self.parameter = restore_layer_refs(_like(original, self._nothing), layer)
        self._loader: Callable[..., Any] = self.parameter.weight_loader
        self._signature = inspect.signature(self._loader)
        self.parameter.weight_loader = self._take
        self._received = 0
        self._taken: Tensor | None = None
        self._sizes: dict[Hashable, int] = {}
        """Elements that a piece brings, by the loader's arguments; found out at its first time."""

    def await_pieces(self) -> None:
        self.release()
        self._received = 0
        self.full = False
        self._layer.register_parameter(self._attribute, self.parameter)

    def release(self) -> Tensor | None:
        """Drop the pieces, which have been packed, and return their memory."""
        self.parameter.data = self._nothing
        taken, self._taken = self._taken, None
        return taken

    def _take(self, *args: Any, **named: Any) -> Any:
        bound = self._signature.bind(*args, **named)
        bound.apply_defaults()
        expert = bound.arguments.get("expert_id")
        if expert is not None and self._layer.expert_map_manager.map_global_to_local(expert) < 0:
            return self._loader(*bound.args, **bound.kwargs)  # another worker has it
        if self.full:
            raise RuntimeError(f"{self.name} received more than its {self._total} elements")
        _, piece, *part = bound.arguments.values()
        # A part may have this shape too: over two workers, one matrix is as large as a worker's
        # halves of two.
        whole = all(one is None for one in part)
        if whole and piece.shape == self._shape and piece.dtype == self._nothing.dtype:
            self._take_as_it_is(piece)
            self.parameter.data = piece
            answer, size = None, self._total
        else:
            answer, size = self._load(bound, (piece.shape, *part))
        self._received += size
        if self._received >= self._total:
            self.full = True
            self._when_full()
        return answer

    def _load(self, bound: inspect.BoundArguments, key: Hashable) -> tuple[Any, int]:
        if self._taken is None:
            self._taken = self.parameter.data = self._memory(self._shape, self._nothing.dtype)
        if key in self._sizes:
            return self._loader(*bound.args, **bound.kwargs), self._sizes[key]
        self._sizes[key], answer = get_numel_loaded(self._loader, bound)
        return answer, self._sizes[key]


class PackedLinear:
    """A linear layer whose kernel holds a packed copy of the weight, the only one."""

    def __init__(
        self, name: str, layer: Any, scratch: Scratch, take: Callable[[Tensor], None]
    ) -> None:
        self._layer = layer
        self._scratch = scratch
        self._weight = AwaitedWeight(name, layer, "weight", scratch.take, take, self._pack)
        self.weights = (self._weight,)

    def await_pieces(self) -> None:
        self._layer.cpu_linear = None  # its memory is used again
        self._weight.await_pieces()

    def _pack(self) -> None:
        pack_linear(self._layer)
        taken = self._weight.release()
        if taken is not None:
            self._scratch.give(taken)


class PackedExperts:
    """The experts of one layer, whose kernel packs both their weights once. vLLM's own reload
    leaves them unpacked on a CPU, and the kernel then reads them as if they were packed."""

    def __init__(self, name: str, layer: Any, take: Callable[[Tensor], None]) -> None:
        self._layer = layer
        self.weights = tuple(
            AwaitedWeight(name, layer, attribute, _fresh, take, self._pack_if_full)
            for attribute in ("w13_weight", "w2_weight")
        )

    def await_pieces(self) -> None:
        for weight in self.weights:
            weight.await_pieces()

    def _pack_if_full(self) -> None:
        if not all(weight.full for weight in self.weights):
            return
        method = self._layer.quant_method
        method.process_weights_after_loading(self._layer)
        method.moe_kernel.fused_experts.process_weights_after_loading(self._layer)
        for weight in self.weights:
            weight.release()


def keeps_only_packed(layer: Any) -> bool:
    if not isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod):
        return False
    return (
        not layer.weight.numel()
        and get_layerwise_info(layer).restore_metadata[0]["weight"].numel() > 0
    )


def are_packed_experts(layer: Any) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    if (
        type(method) is not UnquantizedFusedMoEMethod
        or method.moe_kernel is None
        or method.moe.has_bias
    ):
        return False
    return isinstance(method.moe_kernel.fused_experts, CPUUnquantizedExperts)


def pack_linear(layer: Any) -> None:
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)


def pack_when_used(layer: Any) -> None:
    def packed_now(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pack_linear(layer)
        output: Tensor = layer.cpu_linear(inputs, weight, bias)
        return output

    layer.cpu_linear = packed_now


def _fresh(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _like(original: Tensor, data: Tensor) -> Any:
    """`data` as a parameter of the class and with the attributes of `original`."""
    parameter = data.detach()
    parameter.__class__ = original.__class__
    parameter.__dict__ = original.__dict__.copy()
    return parameter
