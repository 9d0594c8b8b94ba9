"""How an engine's model takes new weights while it lives: in place where every layer is known, else
by vLLM's own reload.

`InPlaceReload`: each tensor goes through its parameter's own loader into memory that is there.
Kernels that keep a packed copy of a weight, as vLLM's do on a CPU, get a new one as soon as the
last piece of the weight came. `LayerwiseReload`: vLLM builds every layer anew and copies it over
the old one. It knows every layer and quantisation, and takes several times as long.

Invariants, of both:
- after `end` no kernel uses an old weight: one whose weight did not come, or in part, is gone;
- a parameter that is used directly keeps its memory, so what was captured with it stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
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
from vllm.platforms import current_platform

from megatron_async_rl.rollout.vllm.packed_layers import (
    PackedExperts,
    PackedLinear,
    Scratch,
    are_packed_experts,
    keeps_only_packed,
    pack_linear,
    pack_when_used,
)

log = init_logger(
    "vllm.megatron_async_rl.reload"
)  # below vLLM's own, which alone is shown in its processes


class Reload(Protocol):
    """Once for each update: `begin`, `load` for each part of it, `end`. `keeps`: it may hold
    tensors beyond the `load` that brought them."""

    keeps: bool

    def begin(self) -> None: ...
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Full tensors by their Hugging Face names. Returns the names of the parameters that took
        one."""
        ...

    def end(self) -> list[str]:
        """Returns the weights that are known to be incomplete; with any of these the model cannot
        run."""
        ...


def reload_of(
    model: torch.nn.Module, model_config: ModelConfig, take: Callable[[Tensor], None]
) -> Reload:
    """Choose how `model` takes new weights: in place if that is known to be right for each of its
    layers. The log states the choice and the reason. take: called with tensors that are used where
    they lie, without a copy.

    Raises RuntimeError for a model whose reload by vLLM is known to be wrong.
    """
    obstacle = _obstacle(model)
    if obstacle is None:
        log.info("new weights are loaded in place")
        return InPlaceReload(model, take)
    if current_platform.is_cpu() and any(
        isinstance(getattr(x, "quant_method", None), FusedMoEMethodBase) for x in model.modules()
    ):
        raise RuntimeError(
            f"vLLM cannot take new weights of this mixture of experts on a CPU: {obstacle}"
        )
    log.info("new weights are loaded by vLLM's layer-wise reload: %s", obstacle)
    return LayerwiseReload(model, model_config)


def _obstacle(model: torch.nn.Module) -> str | None:
    if current_platform.is_zen_cpu() or not (
        current_platform.is_cpu() or current_platform.is_cuda()
    ):
        return (
            f"its kernels on {current_platform.device_name} may keep a weight that was handed to"
            " them"
        )
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if "quant_method" in name.split("."):  # judged with its layer
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
            return f"{name} is a {type(layer).__name__}{what}"
    return None


class LayerwiseReload:
    """Only layers that receive a tensor are packed by vLLM; a tied output layer receives none, so
    it is packed here. vLLM holds the received parts of a layer until the layer is complete."""

    keeps = True

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
    """An embedding that only looks rows up needs no packed copy: it gets one when it is first used
    as a linear layer."""

    keeps = False

    def __init__(self, model: torch.nn.Module, take: Callable[[Tensor], None]) -> None:
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
            elif are_packed_experts(layer):
                self._packed.append(PackedExperts(name, layer, take))
            elif keeps_only_packed(layer):
                self._packed.append(PackedLinear(name, layer, scratch, take))

    def begin(self) -> None:
        for layer in self._packed:
            layer.await_pieces()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = self._model.load_weights(tensors)
        return loaded

    def end(self) -> list[str]:
        for layer in self._heads:
            pack_linear(layer)
        for layer in self._lookups:
            pack_when_used(layer)
        return [
            weight.name for layer in self._packed for weight in layer.weights if not weight.full
        ]


def loaded_parameters(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters that weights are loaded to; others a quantised layer made of
    these."""
    found = set()
    for name, _ in model.named_parameters():
        scope, _, own = name.rpartition(".")
        original = get_layerwise_info(model.get_submodule(scope)).restore_metadata[0]
        if not original or own in original:
            found.add(name)
    return frozenset(found)


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
