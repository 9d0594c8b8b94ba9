"""The weighted mean of values that are compared with each other."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_means(values: Tensor, weights: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """b_c = sum of w v / sum of w over the entries of cell c, in two parts: -> (lowest, above), [C] each; b = lowest + above.

    values, weights: [n]; cell: [n] int64, 0..C-1. `v - lowest[cell] - above[cell]` is exactly 0 where all values of a cell are
    equal, which v - b is not. Weights that sum to 0 say nothing, and the plain mean is taken.
    """
    cells = int(cell.max()) + 1 if len(cell) else 0
    empty = values.new_zeros(cells)
    lowest = empty.scatter_reduce(0, cell, values, "amin", include_self=False)
    over = values - lowest[cell]
    total = empty.index_add(0, cell, weights)
    weighted = empty.index_add(0, cell, weights * over)
    plain = empty.index_add(0, cell, over) / empty.index_add(0, cell, torch.ones_like(over)).clamp(min=1)
    return lowest, torch.where(total == 0, plain, weighted / torch.where(total == 0, 1.0, total))
