"""Normalisation for Megatron's local layer spec, on torch kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under Megatron's constructor.

    Its weight is marked `sequence_parallel` so that Megatron sums its gradient over tensor-parallel
    ranks, each of which sees a part of the sequence.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.config = config
        self.weight.sequence_parallel = config.sequence_parallel


class GemmaNorm(RMSNorm):
    """Gemma's, in float32 and with weights that stand for their distance from 1."""

    def forward(self, hidden: Tensor) -> Tensor:
        found = F.rms_norm(
            hidden.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps
        )
        return found.to(hidden.dtype)


class NormedAdd(GemmaNorm):
    """The norm of what attention or the MLP gave, and then the residual sum: in the place, and with
    the interface, of Megatron's sum with bias and dropout, of which Gemma has neither."""

    def forward(  # type: ignore[override]
        self, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            output, _ = output_and_bias
            # Megatron turns gradients on around this sum, also where scoring has them off.
            with torch.set_grad_enabled(output.requires_grad):
                return residual + GemmaNorm.forward(self, output)

        return add
