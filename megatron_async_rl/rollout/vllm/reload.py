"""Reload of an engine's model: in place if this file supports every layer, otherwise by vLLM's own
reload.

`InPlaceReload`: the loader of each parameter writes into the existing memory. If a kernel uses a
packed copy of a weight (vLLM's CPU kernels), the weight is packed again as soon as its last piece
has arrived. `LayerwiseReload`: vLLM rebuilds every layer and copies it over the old one. It
supports every layer and quantization, and takes several times as long.

Invariants:
- after `end` no kernel uses a packed copy of an old weight, even if the update left the weight out;
- a parameter that is used directly keeps its memory, so a CUDA graph that captured it stays valid;
- a layer is packed only once all pieces of its weights have arrived;
- the size of a piece is the number of elements that vLLM's own loader wrote;
- memory is reused only if no kernel can refer to it: a packed copy belongs to its kernel.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

# A child of vLLM's logger, because vLLM's processes show only messages of that logger.
log = init_logger("vllm.megatron_async_rl.reload")


class Reload(ABC):
    """Steps of an update: `begin`, `load` for each bucket, `end`. `keeps`: true if the reload may
    hold a tensor after the `load` that received it."""

    keeps: bool

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @abstractmethod
    def begin(self) -> None: ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load full tensors with their Hugging Face names. Return the names of the parameters that
        were loaded."""
        loaded: set[str] = self._model.load_weights(tensors)
        return loaded

    @abstractmethod
    def end(self) -> list[str]:
        """End the update. Return the names of weights that are known to be incomplete; the model
        cannot run with an incomplete weight."""


def reload_of(
    model: torch.nn.Module, model_config: ModelConfig, take: Callable[[Tensor], None]
) -> Reload:
    """Return the reload of `model`: in place if that is known to be correct for all its layers.
    Log the choice, and the reason for vLLM's own reload. `take`: called with each tensor that is
    used without a copy.

    Raises RuntimeError if neither reload is correct for the model.
    """
    obstacle = _obstacle(model)
    if obstacle is None:
        log.info("loading new weights in place")
        return InPlaceReload(model, take)
    if current_platform.is_cpu() and any(
        isinstance(getattr(x, "quant_method", None), FusedMoEMethodBase) for x in model.modules()
    ):
        raise RuntimeError(
            "new weights cannot be loaded into this mixture of experts on a CPU, because"
            f" {obstacle}: run the engines on GPUs, or choose another model"
        )
    log.info("loading new weights with vLLM's layer-wise reload, because %s", obstacle)
    return LayerwiseReload(model, model_config)


def _obstacle(model: torch.nn.Module) -> str | None:
    """Return the reason why `model` cannot be reloaded in place; None if it can."""
    if current_platform.is_zen_cpu() or not (
        current_platform.is_cpu() or current_platform.is_cuda()
    ):
        return f"its kernels on {current_platform.device_name} may hold copies of a weight"
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        # A module of a layer's quantization method was checked with the layer.
        if "quant_method" in name.split("."):
            continue
        if is_deferred_attention_layer(layer):
            known = type(layer) is Attention and method is None
        elif isinstance(method, QuantizeMethodBase):
            known = type(method) in (
                UnquantizedLinearMethod,
                UnquantizedEmbeddingMethod,
            ) or are_packed_experts(layer)
        else:
            known = not callable(getattr(layer, "process_weights_after_loading", None))
        if not known:
            what = f" with {type(method).__name__}" if method is not None else ""
            return f"layer {name} is of type {type(layer).__name__}{what}"
    return None


class LayerwiseReload(Reload):
    """vLLM's own reload. vLLM holds the parts of a layer until the layer is complete, and packs
    only layers that receive a tensor. `end` packs tied output layers, which receive no tensor."""

    keeps = True

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().__init__(model)
        self._model_config = model_config
        self._tied = tied_layers(model)

    def begin(self) -> None:
        initialize_layerwise_reload(self._model)

    def end(self) -> list[str]:
        finalize_layerwise_reload(self._model, self._model_config)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)
        return []


class InPlaceReload(Reload):
    """Reload into existing memory. An embedding that only looks up rows needs no packed copy; it
    gets one at its first use as a linear layer."""

    keeps = False

    def __init__(self, model: torch.nn.Module, take: Callable[[Tensor], None]) -> None:
        super().__init__(model)
        self._packed: list[PackedLinear | PackedExperts] = []
        self._heads: list[Any] = []
        self._lookups: list[Any] = []
        scratch = Scratch()
        for name, layer in model.named_modules() if current_platform.is_cpu() else ():
            if isinstance(layer, ParallelLMHead):
                self._heads.append(layer)
            elif isinstance(layer, VocabParallelEmbedding):
                self._lookups.append(layer)
            elif are_packed_experts(layer):
                self._packed.append(PackedExperts(name, layer, take))
            elif keeps_only_packed(layer):
                self._packed.append(PackedLinear(name, layer, scratch, take))

    def begin(self) -> None:
        # Drop the packed copies of all layers, including those that this update leaves out.
        for layer in self._packed:
            layer.await_pieces()

    def end(self) -> list[str]:
        for layer in self._heads:
            pack_linear(layer)
        for layer in self._lookups:
            pack_when_used(layer)
        return [
            weight.name for layer in self._packed for weight in layer.weights if not weight.full
        ]


def loaded_parameters(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters that receive weights. Parameters that a quantized layer
    derives from its weights are excluded."""
    names = set()
    for name, _ in model.named_parameters():
        scope, _, own = name.rpartition(".")
        original = get_layerwise_info(model.get_submodule(scope)).restore_metadata[0]
        if not original or own in original:
            names.add(name)
    return frozenset(names)


def tied_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers whose `weight` is also that of an earlier layer."""
    owners: set[int] = set()
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        # On a CPU, packing leaves an empty weight in the layer.
        if weight is None or not weight.numel():
            continue
        if id(weight) in owners:
            tied.append(layer)
        owners.add(id(weight))
    return tied


class Scratch:
    """Memory for weights whose pieces are arriving. It is reused, because allocating new memory
    takes longer than the copy into it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def acquire(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        free = self._free.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


class AwaitedWeight:
    """A parameter of `layer` that has its original form, instead of the packed form, while its
    pieces arrive.

    `memory`: allocates memory for the pieces. `take`: called with a tensor that is the complete
    weight, and is used without a copy. `when_full`: called once all pieces have arrived.
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
        self._take_whole = take
        self._when_full = when_full
        original = get_layerwise_info(layer).restore_metadata[0][attribute]
        self._shape, self._total = original.shape, original.numel()
        self._empty = torch.empty(0, dtype=original.dtype)
        self.parameter = restore_layer_refs(_like(original, self._empty), layer)
        self._loader: Callable[..., Any] = self.parameter.weight_loader
        self._signature = inspect.signature(self._loader)
        self.parameter.weight_loader = self._load_piece
        self._received = 0
        """Number of elements received in this update."""
        self._buffer: Tensor | None = None
        """Memory for the pieces; None until the first piece that is copied."""
        self._sizes: dict[Hashable, int] = {}
        """Loader's arguments -> number of elements of the piece, measured at its first load."""

    def await_pieces(self) -> None:
        """Replace the packed weight of the layer with this empty parameter."""
        self.release()
        self._received = 0
        self.full = False
        self._layer.register_parameter(self._attribute, self.parameter)

    def release(self) -> Tensor | None:
        """Drop the pieces, and return the memory that they used, if any."""
        self.parameter.data = self._empty
        buffer, self._buffer = self._buffer, None
        return buffer

    def _load_piece(self, *args: Any, **named: Any) -> Any:
        """Load a piece. This is the `weight_loader` that the model calls."""
        bound = self._signature.bind(*args, **named)
        bound.apply_defaults()
        expert = bound.arguments.get("expert_id")
        if expert is not None and self._layer.expert_map_manager.map_global_to_local(expert) < 0:
            # The expert belongs to another worker: the loader itself skips it.
            return self._loader(*bound.args, **bound.kwargs)
        if self.full:
            raise RuntimeError(
                f"the update has more than the {self._total} elements of {self.name}; each of its"
                " tensors must arrive once"
            )
        _, piece, *part = bound.arguments.values()
        # The shape is not sufficient: with two workers, one complete matrix is as large as a
        # worker's halves of two matrices.
        whole = all(one is None for one in part)
        if whole and piece.shape == self._shape and piece.dtype == self._empty.dtype:
            self._take_whole(piece)
            self.parameter.data = piece
            result, size = None, self._total
        else:
            result, size = self._copy_piece(bound, (piece.shape, *part))
        self._received += size
        if self._received >= self._total:
            self.full = True
            self._when_full()
        return result

    def _copy_piece(self, bound: inspect.BoundArguments, key: Hashable) -> tuple[Any, int]:
        """Copy a piece with vLLM's loader. Return the loader's result and the number of elements.
        `key`: arguments that determine this number."""
        if self._buffer is None:
            self._buffer = self.parameter.data = self._memory(self._shape, self._empty.dtype)
        if key in self._sizes:
            return self._loader(*bound.args, **bound.kwargs), self._sizes[key]
        self._sizes[key], result = get_numel_loaded(self._loader, bound)
        return result, self._sizes[key]


class PackedLinear:
    """A linear layer whose kernel holds the only copy of the weight, a packed one."""

    def __init__(
        self, name: str, layer: Any, scratch: Scratch, take: Callable[[Tensor], None]
    ) -> None:
        self._layer = layer
        self._scratch = scratch
        self._weight = AwaitedWeight(name, layer, "weight", scratch.acquire, take, self._pack)
        self.weights = (self._weight,)

    def await_pieces(self) -> None:
        # Free the old packed copy before the new one is allocated.
        self._layer.cpu_linear = None
        self._weight.await_pieces()

    def _pack(self) -> None:
        pack_linear(self._layer)
        # The packed copy replaces the pieces, so their memory is free.
        buffer = self._weight.release()
        if buffer is not None:
            self._scratch.release(buffer)


class PackedExperts:
    """Experts of one layer, whose kernel packs both weights once. On a CPU, vLLM's own reload
    leaves the weights unpacked, and the kernel would read them as if they were packed."""

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
    """Return True if `layer` is a linear layer whose packed weight is the only copy."""
    if not isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod):
        return False
    return (
        not layer.weight.numel()
        and get_layerwise_info(layer).restore_metadata[0]["weight"].numel() > 0
    )


def are_packed_experts(layer: Any) -> bool:
    """Return True if `layer` has experts that PackedExperts supports."""
    method: Any = getattr(layer, "quant_method", None)
    if (
        type(method) is not UnquantizedFusedMoEMethod
        or method.moe_kernel is None
        or method.moe.has_bias
    ):
        return False
    return isinstance(method.moe_kernel.fused_experts, CPUUnquantizedExperts)


def pack_linear(layer: Any) -> None:
    """Pack the weight of a linear layer for vLLM's CPU kernel."""
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)


def pack_when_used(layer: Any) -> None:
    """Drop the packed weight of `layer`, and pack the weight again at its next use as a linear
    layer."""

    def packed_now(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pack_linear(layer)
        output: Tensor = layer.cpu_linear(inputs, weight, bias)
        return output

    layer.cpu_linear = packed_now


def _fresh(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _like(original: Tensor, data: Tensor) -> Any:
    """Return `data` as a parameter with the class and the attributes of `original`."""
    parameter = data.detach()
    # vLLM's loaders read attributes such as `output_dim` from the parameter.
    parameter.__class__ = original.__class__
    parameter.__dict__ = original.__dict__.copy()
    return parameter
