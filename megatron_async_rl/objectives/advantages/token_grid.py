"""The trained tokens of each sequence as a row of a grid, in order, for estimators that work along
a response.

Invariant: environment tokens do not count as time steps. A discount counts trained tokens, and
masked tokens neither receive nor pass on credit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """M trained tokens of S sequences; the longest sequence has T trained tokens (at least 1).

    token: [M] int64, the token's index in the batch; row: [M], its sequence; column: [M], its
    number among the sequence's trained tokens; position: [M], its number among all tokens of the
    sequence. Ordered by row, then column.
    """

    token: Tensor
    row: Tensor
    column: Tensor
    position: Tensor
    rows: int
    columns: int
    total: int

    @classmethod
    def of(cls, batch: TokenBatch) -> TokenGrid:
        # Stable, so that tokens of a sequence keep their order.
        order = torch.argsort(batch.sequence, stable=True)
        position = _number_in_run(batch.sequence[order])
        trained = batch.mask[order] > 0
        token, position = order[trained], position[trained]
        row = batch.sequence[token]
        column = _number_in_run(row)
        columns = int(column.max()) + 1 if len(column) else 1
        return cls(token, row, column, position, batch.sequences, columns, len(batch.sequence))

    def by_sequence(self, values: Tensor) -> Tensor:
        """[N] -> [S, T], 0 beyond a sequence's end."""
        # Positions without a token stay 0, so sums along a row need no mask.
        empty = values.new_zeros(self.rows, self.columns)
        return empty.index_put((self.row, self.column), values[self.token])

    def flat(self, grid: Tensor) -> Tensor:
        """[S, T] -> [N], 0 where the mask is 0."""
        return self.on_tokens(grid[self.row, self.column])

    def on_tokens(self, values: Tensor) -> Tensor:
        """[M] -> [N], 0 where the mask is 0."""
        return values.new_zeros(self.total).index_put((self.token,), values)


def _number_in_run(sorted_ids: Tensor) -> Tensor:
    """[n] sorted -> [n]: number of equal entries before each entry."""
    index = torch.arange(len(sorted_ids))
    # The first index of each run is where its value would be inserted.
    return index - torch.searchsorted(sorted_ids, sorted_ids)


def discounted_sums(values: Tensor, discount: float) -> Tensor:
    """[..., T] -> [..., T]: sum over j >= t of discount^(j - t) values[j].

    Each pass doubles the reach of every sum until it covers T, so log2 T passes suffice, and a sum
    of one value and zeros is exact.
    """
    reach, factor = 1, discount
    while reach < values.shape[-1]:
        values = values + factor * torch.nn.functional.pad(values[..., reach:], (0, reach))
        reach, factor = 2 * reach, factor * factor
    return values


def sums_to_end_of_run(values: Tensor, run: Tensor) -> Tensor:
    """[M] -> [M]: sum of the value and the values after it in its run; run: [M] int64, sorted."""
    if not len(run):
        return values
    row = torch.unique_consecutive(run, return_inverse=True)[1]
    column = _number_in_run(row)
    grid = values.new_zeros(int(row[-1]) + 1, int(column.max()) + 1).index_put(
        (row, column), values
    )
    return discounted_sums(grid, 1.0)[row, column]
