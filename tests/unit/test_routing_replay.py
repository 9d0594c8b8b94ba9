"""Routing replay with stand-ins for routers: which experts a pass uses, what it records and what it
counts. tests/parallel/test_routing_replay.py trains with Megatron's routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.routing_replay import LayerReplay, Routing, RoutingReplay

EXPERTS, TOP = 4, 2
SCORES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2]])
OWN = [[3, 2], [0, 1], [1, 2]]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(values: torch.Tensor, group: str) -> None:
        assert group == "world"
        values *= 2  # another rank with the same counts

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def replay_of(layers: int = 2, *, tp: tuple[int, int] = (1, 0), **config: Any) -> Any:
    routers = [TopKRouter.__new__(TopKRouter) for _ in range(layers)]
    for number, router in enumerate(routers, 1):
        torch.nn.Module.__init__(router)
        router.layer_number = number
    settings = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP,
        "num_layers": layers,
        "recompute_granularity": None,
        "sequence_parallel": False,
    }
    layout: Any = SimpleNamespace(
        device=torch.device("cpu"), world_group="world", tp_size=tp[0], tp_rank=tp[1]
    )
    chunks = [torch.nn.ModuleList(routers)]
    replay: Any = RoutingReplay(chunks, SimpleNamespace(**settings | config), layout)
    replay.layers = [router.router_replay for router in routers]
    return replay


def topk(scores: torch.Tensor, k: int, groups: int | None, group_k: int | None) -> Any:
    assert (groups, group_k) == (3, 1)
    return torch.topk(scores, k)


def choose(layer: LayerReplay) -> tuple[list[list[float]], list[list[int]]]:
    values, chosen = layer.get_replay_topk(SCORES, TOP, 3, 1, topk)
    return [[round(one, 1) for one in row] for row in values.tolist()], chosen.tolist()


class MicroBatchStandIn:
    """A micro-batch that is hashed by its identity."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"policy\.routing_replay"):
        replay_of(num_moe_experts=None)


def test_a_recorded_choice_is_replayed_with_the_scores_of_now() -> None:
    replay = replay_of()
    first, second = replay.layers
    assert (first.layer, second.layer) == (0, 1)
    batch = MicroBatchStandIn(routed_experts=None, padding=torch.tensor([[False, False, True]]))
    replay.begin(trains=False)
    replay.enter(batch, "record")
    assert choose(first) == ([[0.4, 0.3], [0.4, 0.3], [0.4, 0.3]], OWN)
    replay.end()
    assert replay.recorded[batch][0].tolist() == OWN
    assert replay.recorded[batch][0].dtype == torch.uint8
    # The pass that trains: other experts were recorded, and the last token is padding.
    replay.recorded[batch][0] = torch.tensor([[0, 1], [1, 0], [3, 0]], dtype=torch.uint8)
    replay.begin(trains=True)
    replay.enter(batch, "replay")
    values = [[0.1, 0.2], [0.3, 0.4], [0.4, 0.3]]
    assert choose(first) == (values, [[0, 1], [1, 0], [1, 2]])
    replay.enter(batch, "choose")
    assert choose(first) == ([[0.4, 0.3], [0.4, 0.3], [0.4, 0.3]], OWN)
    replay.end()
    # One of two known tokens would have had other experts; the order does not count.
    assert replay.end_batch() == {"policy/rerouted": 0.5}
    assert replay.recorded == {}
    assert replay.end_batch() == {}


def test_a_pass_without_training_counts_nothing() -> None:
    replay = replay_of()
    batch = MicroBatchStandIn(routed_experts=None, padding=torch.zeros(1, 3, dtype=torch.bool))
    replay.recorded[batch] = {0: torch.zeros(3, TOP, dtype=torch.uint8)}
    replay.begin(trains=False)
    replay.enter(batch, "replay")
    assert choose(replay.layers[0])[1] == [[0, 0]] * 3
    assert replay.end_batch() == {}
    other = MicroBatchStandIn(routed_experts=None, padding=None)
    replay.enter(other, "replay")
    assert choose(replay.layers[0])[1] == OWN


@pytest.mark.parametrize(("rank", "mine"), [(None, [0, 1, 2, 3]), (0, [0, 1]), (1, [2, 3])])
def test_the_engines_choice_is_read_by_layer_for_the_ranks_tokens(
    rank: int | None, mine: list[int]
) -> None:
    replay = replay_of(tp=(1, 0) if rank is None else (2, rank), sequence_parallel=rank is not None)
    # [rows, length, layers x topk]: two rows of two tokens, whose layers read position first.
    rows = torch.arange(16, dtype=torch.uint8).view(2, 2, 4) % EXPERTS
    rows[1, 1] = torch.tensor([3, 2, 1, 0])
    routed = torch.tensor([[True, False], [True, True]])
    batch = MicroBatchStandIn(routed_experts=rows, routed=routed)
    replay.enter(batch, "replay")
    tokens = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[3, 2], [1, 0]]]
    known = [True, True, False, True]
    assert [layer.tolist() for layer in replay.now.experts] == [
        [tokens[at][layer] for at in mine] for layer in (0, 1)
    ]
    assert replay.now.known.tolist() == [known[at] for at in mine]


def test_a_recomputed_layer_replays_the_choice_of_its_forward_pass() -> None:
    replay = replay_of(layers=1, recompute_granularity="full")
    (layer,) = replay.layers
    assert replay.recomputes
    known = torch.ones(3, dtype=torch.bool)
    replay.begin(trains=True)
    with torch.no_grad():
        for first in (0, 1):
            replay.now = Routing([torch.full((3, TOP), first)], known)
            assert choose(layer)[1] == [[first, first]] * 3
    assert len(layer.pending) == 2
    with pytest.raises(RuntimeError, match=r"layers \[0\] were not all computed again"):
        replay.end()
    for first in (0, 1):
        assert choose(layer)[1] == [[first, first]] * 3
    replay.end()
    assert replay._counts.tolist() == [6, 6]
    layer.pending.append(None)
    replay.begin(trains=False)
    assert layer.pending == []
    replay.now = Routing([torch.zeros(3, TOP)], known)
    choose(layer)
    assert layer.pending == []


def test_choices_of_another_model_are_refused() -> None:
    for experts, dtype, last in ((256, np.uint8, 255), (257, np.uint16, 256)):
        replay = replay_of(num_moe_experts=experts)
        assert replay.dtype == (torch.uint8 if experts == 256 else torch.int16)
        rows = np.zeros((1, 3, 4), dtype=dtype)
        replay.check(None)
        rows[0, 2, 3] = last
        replay.check(rows.view(np.uint8))
        width = 4 * rows.itemsize
        with pytest.raises(ValueError, match=rf"take {width - 1} bytes .* 2 layers need {width}$"):
            replay.check(rows.view(np.uint8)[..., :-1])
    rows[0, 2, 3] = 257
    with pytest.raises(ValueError, match=r"has the number 257, and the model has 257$"):
        replay.check(rows.view(np.uint8))
