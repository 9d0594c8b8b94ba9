"""The value head: one linear output on the hidden states that log-probs are made from.

    V_t = w . h_t + b        h_t: after the final norm, at the position that predicts token t; w and b start at zero

Invariants:
- arithmetic is float32, and so are the weights that the optimizer moves. The module's parameters have the model's dtype: in
  Megatron 0.16.1 neither optimizer can checkpoint a bfloat16 model that has float32 parameters as well;
- hidden states are whole on every tensor-parallel rank (sequence parallelism gathers them first), so every rank computes the
  same values and the same gradient: the parameters are copies, counted once, and nothing has to be summed over those ranks;
- it belongs to the last stage's module, so that gradient buffers, optimizer and checkpoints hold it; Hugging Face's files and
  the engines do not (`weights/parameters.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """config: Megatron's TransformerConfig. detach: it learns from the hidden states without changing them."""

    def __init__(self, config: Any, *, detach: bool, device: torch.device) -> None:
        super().__init__()
        self.detach = detach
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N] float32, with gradient."""
        source = hidden.detach() if self.detach else hidden
        return torch.nn.functional.linear(source.float(), self.weight.float(), self.bias.float())[:, 0]
