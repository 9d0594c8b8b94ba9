"""Explanation of one step's gradient: the samples, groups, tokens and parameters that made it.

    g = sum_i g_i                   gradient of the step before the controls; g_i: of sample i
    share of sample i = <g_i, g> / |g|^2       sums to 1; negative: it opposes the other samples
    norm share of sample i = |g_i| / sum_j |g_j|
    size of a token = |dL / d logp| sqrt(1 - 2 p + sum_v p_v^2)

For the temperature 1, the size is the norm of the loss's gradient with respect to the token's
logits, as far as it flows through the token's log-prob: d logp / d logit_v is [v is the token] -
p_v. dL / d logp contains advantage, ratio, corrections and the denominator of the loss.

Each g_i is a pass of its own (part_gradients.py), so an explanation takes about as many passes as
there are samples that contribute. Samples without any derivative contribute exactly 0 and have no
pass. Where passes differ (dropout of adapters, experts that a pass chooses), the shares of the
samples add up to another number than 1.

Invariants:
- the step afterwards has the same bits as without an explanation;
- the numbers do not depend on the layout, except for float32 rounding of the gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.gradients import Gradients, dot
from megatron_async_rl.policy.adam_view import gradients_of
from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.forward import Consume, Schedule, TokenOutputs
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.part_gradients import (
    BuildRows,
    PartGradients,
    described_sample,
    number_or_text,
)
from megatron_async_rl.samples.rank_batch import RankBatch

TOKENS = 32
"""Number of tokens with the largest sizes that are written."""
PARAMETERS = 16
"""Number of parameters with the largest shares that are written."""
WHOLE = 32
"""Number of samples with the longest gradients that are written with their tokens."""


@dataclass(frozen=True)
class _TokenPart:
    """Derivatives of a rank's loss at a token. row: of the sample. position: in its response."""

    row: int
    position: int
    token: int
    derivative: float
    size: float
    logp: float


class TokenDerivatives:
    """A loss that also records its derivatives at each token. recorded: this rank's tokens, if it
    records outputs; `contributes`, [S] int64: 1 for each of its samples with a derivative."""

    def __init__(self, consume: Consume, samples: RankBatch, *, records: bool) -> None:
        self._consume = consume
        self._samples = samples
        self._records = records
        self.recorded: list[_TokenPart] = []
        self.contributes = torch.zeros(len(samples), dtype=torch.int64)

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
        loss = self._consume(micro_batch, outputs)
        if self._records and micro_batch.samples:
            self._record(micro_batch, outputs, loss)
        return loss

    def _record(self, micro_batch: MicroBatch, outputs: TokenOutputs, loss: Tensor) -> None:
        inputs = [
            each
            for each in (outputs.logp, outputs.entropy, outputs.values)
            if each is not None and each.requires_grad
        ]
        # The graph above the model's outputs alone: no collective, and the model's is kept.
        found = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        rows = micro_batch.batch_samples[micro_batch.sequence].cpu().numpy()
        used = torch.zeros(len(rows), dtype=torch.bool, device=loss.device)
        for each in found:
            if each is not None:
                used |= each != 0  # true for nan
        self.contributes[rows[used.cpu().numpy()]] = 1
        derivative = found[0]
        if derivative is None:
            return
        with torch.no_grad():
            p = outputs.logp.double().exp()
            # Rounding may make it slightly negative where p is almost 1.
            spread = (1.0 - 2.0 * p + outputs.sum_p_squared.double()).clamp(min=0.0).sqrt()
            sizes = derivative.double().abs() * spread
        largest = torch.topk(sizes.nan_to_num(nan=math.inf), min(TOKENS, len(sizes))).indices
        positions = micro_batch.owned_tokens.cpu().numpy() - self._samples.owned_starts[rows]
        logp = outputs.logp.detach()
        self.recorded += [
            _TokenPart(
                int(rows[token]),
                int(positions[token]),
                int(micro_batch.targets[token]),
                float(derivative[token]),
                float(sizes[token]),
                float(logp[token]),
            )
            for token in largest.tolist()
        ]
        self.recorded = _largest(self.recorded)


def _largest(tokens: Sequence[_TokenPart]) -> list[_TokenPart]:
    def order(one: _TokenPart) -> tuple[float, int, int]:
        # Equal sizes in the order of the batch, so that every layout writes the same tokens.
        return (-math.inf if math.isnan(one.size) else -one.size, one.row, one.position)

    return sorted((one for one in tokens if one.size != 0.0), key=order)[:TOKENS]


class GradientExplanation(PartGradients):
    """Writer of the explanation of every optimizer step that the batch of `step` makes."""

    def __init__(
        self,
        schedule: Schedule,
        model: PolicyModel,
        optimizer: MegatronOptimizer,
        layout: Layout,
        *,
        step: int,
        file: Path,
    ) -> None:
        super().__init__(schedule, model, optimizer, layout)
        self.step = step
        self._file = file
        self._updates: list[dict[str, Any]] = []

    def write(
        self,
        *,
        samples: RankBatch,
        micro_batches: Sequence[MicroBatch],
        build: BuildRows,
        consume: Consume,
        advantages: NDArray[np.float64],
        loss: float,
    ) -> None:
        """Explain the reduced gradient in the buffers, and restore it. Collective over the world.

        micro_batches: the step's, of this rank. build, consume: as in `AnomalyReport.write`.
        advantages: [N]. loss: of the step.
        """
        with self._preserved():
            self._updates.append(
                self._explained(samples, micro_batches, build, consume, advantages) | {"loss": loss}
            )
        if self._layout.rank == 0:
            content = {"step": self.step, "updates": self._updates}
            text = json.dumps(_plain(content), indent=1, allow_nan=False)
            write_file(self._file, text.encode())

    def _explained(
        self,
        samples: RankBatch,
        micro_batches: Sequence[MicroBatch],
        build: BuildRows,
        consume: Consume,
        advantages: NDArray[np.float64],
    ) -> dict[str, Any]:
        self._optimizer.prepare_grads()
        total = gradients_of(self._optimizer, self._layout)
        squares = self._squares_of_parameters(total)
        # On the host, because each part replaces the gradient on the device.
        whole = [shard.grad.to("cpu", torch.float32, copy=True) for shard in total.shards]
        (square,) = self._products(total, (whole, whole))
        recorder = TokenDerivatives(consume, samples, records=self._layout.records_outputs)
        # The step's own micro-batches, to which recorded choices of experts belong.
        self._gradient_of(micro_batches, recorder)
        contributes = np.maximum.reduce(self._of_all_ranks(recorder.contributes.numpy()))
        mine = {row for each in micro_batches for row in each.samples}
        parts, groups = self._parts(samples, contributes, mine, build, consume, whole)
        norms = np.sqrt(parts[:, 0])
        longest = np.argsort(-np.nan_to_num(norms, nan=math.inf), kind="stable")
        tokens = self._tokens(recorder, samples, advantages)
        named = {int(row) for row in longest[:WHOLE] if contributes[row]}
        named |= {one["row"] for one in tokens}
        described = self._gathered(
            {row: described_sample(samples, row, whole=True) for row in named & mine}
        )
        ordered = sorted(squares, key=lambda name: -squares[name])[:PARAMETERS]
        return {
            "norm": math.sqrt(square),
            "sum_of_shares": _share(float(parts[:, 1].sum()), square),
            "parameters": [
                {"name": name, "share": _share(squares[name], square)} for name in ordered
            ],
            "groups": _by_norm(
                [
                    {
                        "group": group,
                        "samples": int((samples.group == group).sum()),
                        "reward": float(samples.rewards[samples.group == group].mean()),
                        "norm": norm,
                        "norm_share": _share(norm, sum(groups.values())),
                        "share": _share(float(parts[samples.group == group, 1].sum()), square),
                    }
                    for group, norm in groups.items()
                ]
            ),
            "samples": [
                {
                    "id": samples.ids[int(row)].as_py(),
                    "group": int(samples.group[row]),
                    "reward": float(samples.rewards[row]),
                    "length": int(samples.lengths[row]),
                    "lag_max": _lag(samples, int(row)),
                    "norm": float(norms[row]),
                    "norm_share": _share(float(norms[row]), float(norms.sum())),
                    "share": _share(float(parts[row, 1]), square),
                }
                for row in longest
            ],
            "tokens": [{key: one[key] for key in one if key != "row"} for one in tokens],
            "texts": {
                one["id"]: {name: one[name] for name in ("prompt_ids", "response_ids")}
                for _, one in sorted(described.items())
            },
        }

    def _parts(
        self,
        samples: RankBatch,
        contributes: NDArray[np.int64],
        mine: set[int],
        build: BuildRows,
        consume: Consume,
        whole: Sequence[Tensor],
    ) -> tuple[NDArray[np.float64], dict[int, float]]:
        """Return [S, 2] of each sample: |g_i|^2 and <g_i, g>; and the norm of each group's
        gradient. mine: samples of this rank."""
        layout = self._layout
        # The interleaved schedule needs a multiple of the pipeline's size.
        fill = [()] * (layout.pp_size - 1 if layout.virtual_stages > 1 else 0)
        parts = np.zeros((len(samples), 2))
        groups: dict[int, float] = {}
        for group in np.unique(samples.group).tolist():
            members = np.flatnonzero((samples.group == group) & (contributes > 0)).tolist()
            added = [torch.zeros_like(each) for each in whole]
            groups[group] = 0.0
            for row in members:
                one = (row,) if row in mine else ()
                gradient = self._gradient_of([build(each) for each in (one, *fill)], consume)
                own = [shard.grad for shard in gradient.shards]
                parts[row] = self._products(gradient, (own, own), (own, whole))
                for sum_of_group, grad in zip(added, own, strict=True):
                    sum_of_group.add_(grad.to("cpu"))
                if row == members[-1]:
                    (square,) = self._products(gradient, (added, added))
                    groups[group] = math.sqrt(square)
        return parts, groups

    def _products(
        self, gradients: Gradients, *pairs: tuple[Sequence[Tensor], Sequence[Tensor]]
    ) -> list[float]:
        """Return the inner product of each pair, whose tensors are cut like the shards. Collective
        over the world."""
        sums = torch.zeros(len(pairs), dtype=torch.float64, device=gradients.device)
        for place, pair in enumerate(pairs):
            for shard, left, right in zip(gradients.shards, *pair, strict=True):
                # A parameter with several copies counts once.
                if shard.counted:
                    sums[place] += dot(*(each.to(gradients.device) for each in (left, right)))
        return gradients.all_reduce_sum(sums).tolist()

    def _tokens(
        self, recorder: TokenDerivatives, samples: RankBatch, advantages: NDArray[np.float64]
    ) -> list[dict[str, Any]]:
        """Return the tokens with the largest sizes of all ranks, largest first."""
        everyone = [token for own in self._of_all_ranks(recorder.recorded) for token in own]
        found = []
        for one in _largest(everyone):
            at = int(samples.starts[one.row]) + one.position
            log_ratio = one.logp - float(samples.behavior_logprobs[at])
            found.append(
                {
                    "row": one.row,
                    "sample": samples.ids[one.row].as_py(),
                    "position": one.position,
                    "token_id": one.token,
                    "size": one.size,
                    "derivative": one.derivative,
                    "advantage": float(advantages[at]),
                    "log_ratio": log_ratio,
                    "logprob": one.logp,
                    "lag": samples.version - int(samples.versions[at]),
                }
            )
        return found


def _lag(samples: RankBatch, row: int) -> int:
    versions = samples.versions[samples.starts[row] : samples.starts[row + 1]]
    return int(samples.version - versions.min(initial=samples.version))


def _share(part: float, whole: float) -> float:
    return part / whole if whole != 0.0 else 0.0


def _by_norm(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(groups, key=lambda one: -math.inf if math.isnan(one["norm"]) else -one["norm"])


def _plain(value: Any) -> Any:
    """Return the value with numbers that are not finite as text."""
    if isinstance(value, float):
        return number_or_text(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
