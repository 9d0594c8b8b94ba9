"""Families of transformer layers: Megatron's own, on torch's kernels and any device, and
Transformer Engine's, on CUDA.

A model has the same parameters in both families, under different names:

    local, and everywhere outside a family          transformer_engine
    input_layernorm.weight                          self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight, before a dense MLP    mlp.linear_fc1.layer_norm_weight
    mlp.experts.local_experts.3.linear_fc1.weight   mlp.experts.linear_fc1.weight3

Invariants:
- no other module uses a family's own names: Hugging Face's names, messages and all other data that
  leaves a rank use canonical ones, and checkpoints have CHECKPOINT_KEYS for both families;
- a parameter has the same shape and the same cut over tensor-parallel ranks in both, so a parameter
  that one family has loaded, exported or saved fits the other bit for bit;
- families/__init__.py lists the models and settings that a family does not compute; no layer here
  approximates one.

Local layers on CUDA use NVIDIA Apex's kernels if Apex is built with its extensions:
- weight gradients: the product adds to Megatron's float32 buffer. Without Apex the product is
  rounded to bfloat16 in separate memory, and a second kernel adds it to the buffer;
- RMSNorm: one kernel for each direction;
- Adam: Megatron itself uses Apex's FusedAdam if Transformer Engine is not installed.

Transformer Engine's layers have such kernels of their own.

Invariants of Apex's kernels:
- without Apex torch's kernels compute everything, with the same results up to rounding;
- float32 models only use torch's kernels, so a GPU computes the same as a CPU;
- adapters (policy.lora) need no gradient of the weights that they adapt.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megatron_async_rl.policy.families import APEX_WEIGHT_GRADIENTS, LayerFamily

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Name of a norm that Transformer Engine fuses with the following GEMM -> name of the separate
norm."""
CHECKPOINT_KEYS = {norm: fused for fused, norm in FUSED_NORMS.items()}
"""Prefixes of a layer's parameters -> prefixes of their keys in a checkpoint, for every family."""
GROUPED_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)(\w+)\.(weight|bias)(\d+)$")


class Layers(ABC):
    """Construction of a family's transformer layer, and names of the layer's parameters."""

    name: ClassVar[LayerFamily]

    @abstractmethod
    def settings(self, dtype: torch.dtype, device_type: str, *, lora: bool) -> Mapping[str, Any]:
        """Return changes to the Megatron configuration that bridge.py makes."""

    @abstractmethod
    def norm(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return the norm outside the layers. own: the model's norm on torch's kernels."""

    @abstractmethod
    def layer(self, config: TransformerConfig, own: Callable[..., Any]) -> ModuleSpec:
        """Return one layer, with Megatron's attention. own: as for `norm`."""

    @abstractmethod
    def canonical(self, name: str) -> str:
        """Return a parameter's name in the local family from its name in this family."""

    @abstractmethod
    def finish(self, chunk: torch.nn.Module) -> None:
        """Set properties of the chunk that exist only once its layers are built."""


class LocalLayers(Layers):
    """Megatron's own layers, with the norms below. Experts run one after another."""

    name = "local"

    def settings(self, dtype: torch.dtype, device_type: str, *, lora: bool) -> Mapping[str, Any]:
        return apex_settings(dtype, device_type, lora=lora)

    def norm(self, own: Callable[..., Any]) -> Callable[..., Any]:
        return own

    def layer(self, config: TransformerConfig, own: Callable[..., Any]) -> ModuleSpec:
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        parts = layer.submodules
        # Megatron's spec would use torch's norm, without the mark for sequence parallelism.
        parts.input_layernorm = parts.pre_mlp_layernorm = own
        if config.qk_layernorm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = own
        return layer

    def canonical(self, name: str) -> str:
        return name

    def finish(self, chunk: torch.nn.Module) -> None:
        """Do nothing."""


class TransformerEngineLayers(Layers):
    """Transformer Engine's layers: a norm and the following GEMM are one module, all experts of a
    rank are one grouped GEMM, and gate and rotation are one kernel each."""

    name = "transformer_engine"
    SETTINGS: ClassVar[Mapping[str, Any]] = {
        "bias_activation_fusion": True,
        "apply_rope_fusion": True,
        "moe_grouped_gemm": True,
        # Adds up a token's experts in a fixed order, unlike torch's scatter on CUDA.
        "moe_permute_fusion": True,
        # Otherwise the first micro-batch of a forward-backward pass overwrites the gradient to
        # which `finish` lets GEMMs add, and the gradient of an earlier pass is lost.
        "disable_parameter_transpose_cache": True,
    }

    def settings(self, dtype: torch.dtype, device_type: str, *, lora: bool) -> Mapping[str, Any]:
        return self.SETTINGS

    def norm(self, own: Callable[..., Any]) -> Callable[..., Any]:
        # Families with norms of their own use local layers (families/).
        assert own is RMSNorm, f"Transformer Engine has no {own}"
        return TENorm

    def layer(self, config: TransformerConfig, own: Callable[..., Any]) -> ModuleSpec:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )

    def canonical(self, name: str) -> str:
        for fused, norm in FUSED_NORMS.items():
            name = name.replace(fused, norm)
        return GROUPED_EXPERT.sub(r"local_experts.\3.\1.\2", name)

    def finish(self, chunk: torch.nn.Module) -> None:
        """Make GEMMs add weight gradients directly to Megatron's float32 buffers. Megatron's own
        setting would require this of the output layer, too, which only Apex supports."""
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


LAYERS: Mapping[LayerFamily, Layers] = {
    family.name: family for family in (LocalLayers(), TransformerEngineLayers())
}


def with_bias(linear: Callable[..., Any]) -> Callable[..., Any]:
    """Return the constructor of a row-parallel linear layer with a bias, for transformer layers
    whose other linear layers have none. Each tensor-parallel rank has the whole bias, and adds it
    once, after the sum over ranks."""

    def build(*args: Any, bias: bool, **kwargs: Any) -> Any:
        # Megatron passes the model-wide `bias: false` here.
        return linear(*args, bias=True, **kwargs)

    return build


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, or Apex's kernel for it, with Megatron's constructor.

    Its weight is marked `sequence_parallel` so that Megatron sums its gradient over tensor-parallel
    ranks, since each rank reads only a part of the sequence.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.config = config
        # Megatron sums gradients of marked parameters over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel
        self.kernel = apex_norm(config.params_dtype, self.weight.device.type)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.normalised(hidden, self.weight)

    def normalised(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of `hidden` with `weight`, in their common dtype."""
        if self.kernel is not None:
            return self.kernel(hidden, weight, self.normalized_shape, self.eps)
        return F.rms_norm(hidden, self.normalized_shape, weight, self.eps)


class GemmaNorm(RMSNorm):
    """Gemma's norm, in float32; its weights are relative to 1."""

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.normalised(hidden.float(), 1.0 + self.weight.float())
        return found.to(hidden.dtype)


class NormedAdd(GemmaNorm):
    """The norm of the output of attention or the MLP, followed by the residual sum. It has the
    interface of Megatron's sum with bias and dropout, which it replaces; Gemma has neither."""

    def forward(  # type: ignore[override]
        self, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            output, _ = output_and_bias
            # Megatron enables gradients around this sum, even if scoring has disabled them.
            with torch.set_grad_enabled(output.requires_grad):
                return residual + GemmaNorm.forward(self, output)

        return add


NORMS = "fused_layer_norm_cuda"
Norm = Callable[[Tensor, Tensor, tuple[int, ...], float], Tensor]
"""Function of hidden, weight, shape of the weight and epsilon."""


def apex_settings(dtype: torch.dtype, device_type: str, *, lora: bool) -> Mapping[str, Any]:
    """Return changes to Megatron's configuration for local layers."""
    fused = apex_applies(dtype, device_type) and not lora and _imports(APEX_WEIGHT_GRADIENTS)
    return {"gradient_accumulation_fusion": True} if fused else {}


def apex_norm(dtype: torch.dtype, device_type: str) -> Norm | None:
    """Return Apex's RMSNorm for a model in `dtype`; null if torch's applies."""
    if not apex_applies(dtype, device_type) or not _imports(NORMS):
        return None
    kernel: Norm = import_module("apex.normalization.fused_layer_norm").fused_rms_norm_affine
    return kernel


def apex_applies(dtype: torch.dtype, device_type: str) -> bool:
    """Return True if the kernels can be used: they need CUDA and, here, a bfloat16 model."""
    return device_type == "cuda" and dtype == torch.bfloat16


@cache
def _imports(extension: str) -> bool:
    """Return True if the extension exists and was built for this torch."""
    try:
        import_module(extension)
    except ImportError:
        return False
    return True
