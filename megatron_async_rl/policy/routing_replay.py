"""Routing replay: tokens of a mixture of experts use the experts that were chosen for them before.

    rollout   by the engine that sampled them; the sample contains the choice (R3, arXiv
              2510.11370)
    proximal  by the pass that scores the batch under the weights with which it begins (R2, arXiv
              2507.18071), which this module records

    router: scores -> own choice -> chosen = replayed if recorded, else own
            weights of experts = scores at `chosen`, normalised as usual

Only the choice is replayed. The weights of the experts are the current router's, so gradients flow
through them, and none through the choice.

Invariants:
- a layer that the backward pass recomputes replays the choice of its forward pass;
- a token without a recorded choice uses the router's: padding, and samples without recorded
  experts;
- recorded choices never leave the rank: they belong to a micro-batch, and the same micro-batches
  are scored and trained on. Other micro-batches, such as those that trace an anomaly, use the
  router's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.parallel import Layout

RoutingPass = Literal["replay", "record", "choose"]
"""Task of the routers in a pass over micro-batches."""


@dataclass(frozen=True, eq=False)
class Routing:
    """The choice for this rank's T tokens of a micro-batch, in the order in which layers read them.

    experts: by layer, [T, experts per token]. known: [T] bool, tokens that have a choice.
    """

    experts: Mapping[int, Tensor] | Sequence[Tensor]
    known: Tensor


class RoutingReplay:
    """The routers of one model. `chunks`: its Megatron modules; `config`: Megatron's, of the model.
    Raises UserError for a model without experts."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Any, layout: Layout) -> None:
        if not config.num_moe_experts:
            what = "the model has no experts, so there is no choice of them to replay"
            raise UserError.of("policy.routing_replay", what, "set it to none")
        self.config = config
        self.layout = layout
        self.recomputes = config.recompute_granularity == "full"
        self.trains = False
        self.now: Routing | None = None
        self.recording: dict[int, Tensor] | None = None
        self.recorded: dict[MicroBatch, dict[int, Tensor]] = {}
        """Recorded choices by layer, [T, experts per token]."""
        self._counts = torch.zeros(2, dtype=torch.float64, device=layout.device)
        """Tokens x layers of this rank in training passes since the batch began: those whose router
        would have chosen other experts than were replayed, and all."""
        routers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TopKRouter)
        ]
        self._layers = [LayerReplay(self, int(router.layer_number) - 1) for router in routers]
        for router, layer in zip(routers, self._layers, strict=True):
            # Megatron's router calls this object instead of its own replay.
            router.router_replay = layer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an expert's number in an engine's record; uint16 is read as int16."""
        return torch.uint8 if self.config.num_moe_experts <= 256 else torch.int16

    def begin(self, *, trains: bool) -> None:
        """Prepare for a run of Megatron's schedule. trains: with backward passes."""
        self.trains = trains
        for layer in self._layers:
            # A run that raised leaves choices, which the next run must not replay.
            layer.pending.clear()

    def enter(self, micro_batch: MicroBatch, what: RoutingPass) -> None:
        """Prepare for the micro-batch's forward pass through one chunk."""
        self.now = self.recording = None
        if what == "record":
            # The same micro-batch objects are trained on later, so identity is the key.
            self.recording = self.recorded.setdefault(micro_batch, {})
        elif what == "replay":
            self.now = self._routing(micro_batch)

    def end(self) -> None:
        """Finish the run. Raises RuntimeError for a layer that was recomputed too rarely, and so
        replayed another micro-batch's choice."""
        self.now = self.recording = None
        # Recomputation uses choices in the order of the forward passes: a leftover means that a
        # layer replayed another micro-batch's.
        left = [layer.layer for layer in self._layers if layer.pending]
        if left:
            raise RuntimeError(f"routing replay: layers {left} were not all computed again")

    def check(self, rows: NDArray[np.uint8] | None) -> None:
        """Raise ValueError if the engines' choices for a batch (RankBatch.routed_experts) do not
        belong to this model."""
        if rows is None:
            return
        wanted = self.config.num_layers * self.config.moe_router_topk * self.dtype.itemsize
        if rows.shape[-1] != wanted:
            raise ValueError(
                f"routed experts take {rows.shape[-1]} bytes a token, and this model's"
                f" {self.config.num_layers} layers need {wanted}"
            )
        number = np.uint8 if self.dtype == torch.uint8 else np.uint16
        maximum = int(np.ascontiguousarray(rows).view(number).max(initial=0))
        if maximum >= self.config.num_moe_experts:
            raise ValueError(
                f"a routed expert has the number {maximum}, and the model has"
                f" {self.config.num_moe_experts}"
            )

    def end_batch(self) -> dict[str, float]:
        """Drop the recorded choices. Return `policy/rerouted`, the share of the choices replayed
        since the last call that routers would not have made; absent if none was replayed.
        Collective over the world."""
        self.recorded.clear()
        counts = self._counts.clone()
        self._counts.zero_()
        dist.all_reduce(counts, group=self.layout.world_group)
        other, replayed = counts.tolist()
        return {"policy/rerouted": float(other / replayed)} if replayed else {}

    def count(self, own: Tensor, chosen: Tensor, known: Tensor) -> None:
        # Compared as sets, because the order of a token's experts has no effect.
        other = (own.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1) & known
        self._counts += torch.stack((other.sum(), known.sum()))

    def _routing(self, micro_batch: MicroBatch) -> Routing | None:
        recorded = self.recorded.get(micro_batch)
        if recorded is not None:
            return Routing(recorded, ~self._own(micro_batch.padding))
        rows = micro_batch.routed_experts
        if rows is None:
            return None
        own = self._own(rows).to(self.layout.device, non_blocking=True).view(self.dtype)
        by_layer = own.view(len(own), self.config.num_layers, -1).unbind(1)
        return Routing(by_layer, self._own(micro_batch.routed))

    def _own(self, values: Tensor) -> Tensor:
        """[rows, length, ...] -> [T, ...] of the tokens that this rank's layers read, which under
        sequence parallelism are a part of each row."""
        by_position = values.transpose(0, 1)
        if self.config.sequence_parallel:
            by_position = by_position.chunk(self.layout.tp_size)[self.layout.tp_rank]
        return by_position.flatten(0, 1).contiguous()


class LayerReplay:
    """Replacement of Megatron's `RouterReplay` in the router of layer `layer`, from 0.
    Megatron's class also has a queue for recomputed layers, but its caller must announce each
    recomputation, and all instances of a process share one list, whatever their model."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        self.replay = replay
        self.layer = layer
        self.pending: list[Routing | None] = []
        """Choices of forward passes whose layer will be recomputed, oldest first: backward passes
        have the order of a chunk's forward passes."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores at the chosen experts, and the experts, [T, topk] each. scores: [T,
        experts]."""
        assert default_compute_topk is not None
        # Always computed, because tokens without a recorded choice use the router's own.
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        replay = self.replay
        if replay.recording is not None:
            replay.recording[self.layer] = own.to(replay.dtype)
            return values, own

        # Under full recomputation the forward pass runs without gradients, and the recomputation
        # with them.
        again = replay.trains and replay.recomputes and torch.is_grad_enabled()
        if again:
            routing = self.pending.pop(0)
        else:
            routing = replay.now
            if replay.trains and replay.recomputes:
                self.pending.append(routing)
        if routing is None:
            return values, own
        known = routing.known[:, None]
        chosen = torch.where(known, routing.experts[self.layer].to(own.dtype), own)
        # Counted once per token, although recomputation repeats the forward pass.
        if replay.trains and not again:
            replay.count(own, chosen, routing.known)
        # Scores are the router's own, at the replayed experts, so gradients reach the router.
        return scores.gather(1, chosen), chosen
