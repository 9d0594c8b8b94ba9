"""How an engine's model takes new weights while it lives: in place where every layer is known, else by vLLM's own reload.

`InPlaceReload`: each tensor goes through its parameter's own loader into memory that is there. Kernels that keep a packed copy of
a weight, as vLLM's do on a CPU, get a new one as soon as the last piece of the weight came.
`LayerwiseReload`: vLLM builds every layer anew and copies it over the old one. It knows every layer and quantisation, and takes
several times as long.

Invariants, of both:
- after `end` no kernel uses an old weight: one whose weight did not come, or in part, is gone;
- a parameter that is used directly keeps its memory, so what was captured with it stays valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

log = init_logger("vllm.megatron_async_rl.reload")  # below vLLM's own, which alone is shown in its processes


class Reload(Protocol):
    """Once for each update: `begin`, `load` for each part of it, `end`."""

    def begin(self) -> None: ...
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Full tensors by their Hugging Face names. Returns the names of the parameters that took one."""
        ...

    def end(self) -> list[str]:
        """Returns the weights that are known to be incomplete; with any of these the model cannot run."""
        ...


def reload_of(model: torch.nn.Module, model_config: ModelConfig) -> Reload:
    """In place where that is known to be right for every layer of `model`; the log says which it is, and why.

    Raises RuntimeError for a model whose reload by vLLM is known to be wrong.
    """
    obstacle = _obstacle(model)
    if obstacle is None:
        log.info("new weights are loaded in place")
        return InPlaceReload(model)
    if current_platform.is_cpu() and any(
        isinstance(getattr(x, "quant_method", None), FusedMoEMethodBase) for x in model.modules()
    ):
        raise RuntimeError(f"vLLM cannot take new weights of this mixture of experts on a CPU: {obstacle}")
    log.info("new weights are loaded by vLLM's layer-wise reload: %s", obstacle)
    return LayerwiseReload(model, model_config)


def _obstacle(model: torch.nn.Module) -> str | None:
    if current_platform.is_zen_cpu() or not (current_platform.is_cpu() or current_platform.is_cuda()):
        return f"its kernels on {current_platform.device_name} may keep a weight that was handed to them"
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if "quant_method" in name.split("."):  # judged with its layer
            continue
        if is_deferred_attention_layer(layer):
            known = type(layer) is Attention and method is None
        elif isinstance(method, QuantizeMethodBase):
            known = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) or _are_packed_experts(layer)
        else:
            known = not callable(getattr(layer, "process_weights_after_loading", None))
        if not known:
            what = f" with {type(method).__name__}" if method is not None else ""
            return f"{name} is a {type(layer).__name__}{what}"
    return None


class LayerwiseReload:
    """Only layers that receive a tensor are packed by vLLM; a tied output layer receives none, so it is packed here."""

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        self._model = model
        self._model_config = model_config
        self._tied = tied_layers(model)

    def begin(self) -> None:
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = self._model.load_weights(tensors)
        return loaded

    def end(self) -> list[str]:
        finalize_layerwise_reload(self._model, self._model_config)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)
        return []


class InPlaceReload:
    """An embedding that only looks rows up needs no packed copy: it gets one when it is first used as a linear layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._packed: list[PackedLinear | PackedExperts] = []
        self._heads: list[Any] = []
        self._lookups: list[Any] = []
        scratch = Scratch()
        for name, layer in model.named_modules() if current_platform.is_cpu() else ():
            if isinstance(layer, ParallelLMHead):
                self._heads.append(layer)
            elif isinstance(layer, VocabParallelEmbedding):
                self._lookups.append(layer)
            elif _are_packed_experts(layer):
                self._packed.append(PackedExperts(name, layer))
            elif _keeps_only_packed(layer):
                self._packed.append(PackedLinear(name, layer, scratch))

    def begin(self) -> None:
        for layer in self._packed:
            layer.await_pieces()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = self._model.load_weights(tensors)
        return loaded

    def end(self) -> list[str]:
        for layer in self._heads:
            _pack_linear(layer)
        for layer in self._lookups:
            _pack_when_used(layer)
        return [weight.name for layer in self._packed for weight in layer.weights if not weight.full]


class Scratch:
    """Memory for weights whose pieces are coming in, kept and lent again. Fresh memory costs more than what is copied to it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        free = self._free.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype)

    def give(self, tensor: Tensor) -> None:
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


class AwaitedWeight:
    """A parameter of `layer` as vLLM first made it, in place of what its kernel made of it, while its pieces come in.

    `memory`: where they are put. `when_full` is called as soon as all are there.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        attribute: str,
        memory: Callable[[torch.Size, torch.dtype], Tensor],
        when_full: Callable[[], None],
    ) -> None:
        self.name = f"{name}.{attribute}"
        self.full = True
        self._layer = layer
        self._attribute = attribute
        self._memory = memory
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
        """Elements that a piece brings, by what the loader was told of it; found out at its first time."""

    def await_pieces(self) -> None:
        self.release()
        self._received = 0
        self.full = False
        self._layer.register_parameter(self._attribute, self.parameter)

    def release(self) -> Tensor | None:
        """Nobody reads the pieces any more. Returns the memory that was taken for them."""
        self.parameter.data = self._nothing
        taken, self._taken = self._taken, None
        return taken

    def _take(self, *args: Any, **named: Any) -> Any:
        if self.full:
            raise RuntimeError(f"{self.name} received more than its {self._total} elements")
        told = self._signature.bind(*args, **named)
        told.apply_defaults()
        _, piece, *part = told.arguments.values()
        # A part may have this shape too: over two workers, one matrix is as large as a worker's halves of two.
        whole = all(one is None for one in part)
        if whole and piece.shape == self._shape and piece.dtype == self._nothing.dtype:
            self.parameter.data = piece
            answer, size = None, self._total
        else:
            answer, size = self._load(told, (piece.shape, *part))
        self._received += size
        if self._received >= self._total:
            self.full = True
            self._when_full()
        return answer

    def _load(self, told: inspect.BoundArguments, key: Hashable) -> tuple[Any, int]:
        if self._taken is None:
            self._taken = self.parameter.data = self._memory(self._shape, self._nothing.dtype)
        if key in self._sizes:
            return self._loader(*told.args, **told.kwargs), self._sizes[key]
        self._sizes[key], answer = get_numel_loaded(self._loader, told)
        return answer, self._sizes[key]


class PackedLinear:
    """A linear layer whose kernel holds a packed copy of the weight, and nobody anything else."""

    def __init__(self, name: str, layer: Any, scratch: Scratch) -> None:
        self._layer = layer
        self._scratch = scratch
        self._weight = AwaitedWeight(name, layer, "weight", scratch.take, self._pack)
        self.weights = (self._weight,)

    def await_pieces(self) -> None:
        self._layer.cpu_linear = None  # its memory is used again
        self._weight.await_pieces()

    def _pack(self) -> None:
        _pack_linear(self._layer)
        taken = self._weight.release()
        if taken is not None:
            self._scratch.give(taken)


class PackedExperts:
    """The experts of one layer, whose kernel packs both their weights once. vLLM's own reload leaves them unpacked on a CPU, and
    the kernel then reads them as if they were packed."""

    def __init__(self, name: str, layer: Any) -> None:
        self._layer = layer
        self.weights = tuple(
            AwaitedWeight(name, layer, attribute, _fresh, self._pack_if_full) for attribute in ("w13_weight", "w2_weight")
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


def tied_layers(model: torch.nn.Module) -> list[Any]:
    """Layers whose `weight` is also the weight of a layer before them."""
    owners: set[int] = set()
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel():  # on a CPU, packing leaves an empty weight behind
            continue
        if id(weight) in owners:
            tied.append(layer)
        owners.add(id(weight))
    return tied


def _keeps_only_packed(layer: Any) -> bool:
    if not isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod):
        return False
    return not layer.weight.numel() and get_layerwise_info(layer).restore_metadata[0]["weight"].numel() > 0


def _are_packed_experts(layer: Any) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    if type(method) is not UnquantizedFusedMoEMethod or method.moe_kernel is None or method.moe.has_bias:
        return False
    return isinstance(method.moe_kernel.fused_experts, CPUUnquantizedExperts)


def _pack_linear(layer: Any) -> None:
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)


def _pack_when_used(layer: Any) -> None:
    def packed_now(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _pack_linear(layer)
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
