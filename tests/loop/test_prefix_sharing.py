"""One rank computes a group's prefix once: log-probs and gradients are those of rows in which each
response has its own."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async_rl.config.objective import ObjectiveConfig, ValueConfig
from megatron_async_rl.config.policy import (
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
)
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy.megatron_private import gradient_buffers
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Sample
from tests.tiny_models import save_tiny_model
from tests.train_batches import groups_of, joined, ragged_batch

BUDGET = 100
"""Tokens of a micro-batch: several, and one group exceeds it."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tied": True},
    "window": {"family": "mistral", "sliding_window": 5},
    "mixed windows": {
        "family": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "experts": {"family": "qwen3_moe"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny_model(root / str(number), layers=2, **settings)
        for number, (name, settings) in enumerate(MODELS.items())
    }


def with_edges(group: list[Sample]) -> list[Sample]:
    """A group with equal beginnings, and a response that begins another."""
    first, second, *others = group
    names = ("response_ids", "behavior_logprobs", "versions", "loss_mask")
    whole = {name: np.concatenate((getattr(first, name), getattr(second, name))) for name in names}
    whole["versions"].sort()
    return [first, replace(second, **whole), *others]


GROUPS = [[one for one in group if one.valid] for group in groups_of(ragged_batch(group_size=4))]
EDGES = [*GROUPS[:3], with_edges(GROUPS[3])[:2], GROUPS[4]]
SEVERAL = [[joined(pair) for pair in pairwise([*group, group[0]])] for group in GROUPS]


def routed(groups: list[list[Sample]]) -> list[list[Sample]]:
    """Samples with an engine's choice of 2 of 4 experts in each of 2 layers."""
    draw = np.random.default_rng(0)
    chosen = np.array([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=np.uint8)

    def experts(tokens: int) -> np.ndarray:
        return chosen[draw.integers(0, 4, (tokens, 2))].reshape(tokens, 4)

    found = []
    for group in groups:
        start = experts(len(group[0].prompt.token_ids))
        found.append(
            [
                replace(
                    sample,
                    routed_experts=np.concatenate((start, experts(sample.length - 1))).tobytes(),
                )
                for sample in group
            ]
        )
    return found


def policy(layout: Layout, model: Path, sharing: str, settings: dict[str, Any]) -> Policy:
    settings = dict(settings)
    objective = settings.pop("objective", ObjectiveConfig())
    return Policy.build(
        ModelConfig(path=model, dtype="float32"),
        PolicyConfig(
            **{"tokens_per_micro_batch": BUDGET, **settings},
            sequence="packed",
            prefix_sharing=sharing,
            logprob_chunk_tokens=16,
            optimizer=OptimizerConfig(lr=1e-3, eps=0.01, clip_grad=None),
        ),
        objective,
        (),
        layout=layout,
        temperature=0.7,
        total_steps=10,
    )


def received(policy: Policy, groups: list[list[Sample]]) -> RankBatch:
    batch = policy.receive(lambda: TrainBatch.of(3, groups))
    assert batch is not None
    return batch


def measured(
    layout: Layout, model: Path, sharing: str, groups: list[list[Sample]], settings: dict[str, Any]
) -> dict[str, Any]:
    trained = policy(layout, model, sharing, settings)
    batch = received(trained, groups)
    scores = np.concatenate(trained.score(batch))
    first = trained.train_step(batch)
    gradients = torch.cat([one.flatten() for one in gradient_buffers(trained.schedule.chunks)])
    return {
        "scores": scores,
        "gradients": gradients.clone(),
        "metrics": [first, trained.train_step(batch)],
        "computed": first["policy/computed_tokens"],
    }


CASES: dict[str, tuple[str, list[list[Sample]], dict[str, Any]]] = {
    "edges": ("qwen3", EDGES, {}),
    "recomputed layers": ("qwen3", GROUPS, {"recompute": "full"}),
    "values, recomputed attention": (
        "qwen3",
        GROUPS,
        {
            "recompute": "selective",
            "objective": ObjectiveConfig(advantage="gae", loss="reinforce", value=ValueConfig()),
        },
    ),
    "whole sequences, a proximal pass": (
        "qwen3",
        GROUPS,
        {"objective": ObjectiveConfig(loss="gspo", proximal="recompute")},
    ),
    "whole groups": (
        "qwen3",
        GROUPS,
        {"objective": ObjectiveConfig(loss="trajectory_balance", advantage="none", reference={})},
    ),
    "samples of several segments": ("qwen3", SEVERAL, {"tokens_per_micro_batch": 200}),
    "adapters": ("qwen3", GROUPS, {"lora": LoraConfig(rank=4)}),
    "windows": ("mixed windows", GROUPS, {}),
    "replayed experts": ("experts", routed(GROUPS), {"routing_replay": "rollout"}),
    "recorded experts": (
        "experts",
        GROUPS,
        {
            "routing_replay": "proximal",
            "recompute": "full",
            "objective": ObjectiveConfig(proximal="recompute"),
        },
    ),
}


def test_where_prefixes_are_not_shared_the_reason_is_logged(layout, models, caplog):
    caplog.set_level("INFO", "megatron_async_rl")
    dropout = {"lora": LoraConfig(rank=4, dropout=0.1)}
    trained = policy(layout, models["qwen3"], "auto", dropout)
    assert "each response computes its own prompt with policy.lora.dropout" in caplog.text
    assert received(trained, GROUPS).shared.null_count == sum(map(len, GROUPS))


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_gradients_are_those_of_prefixes_computed_for_each(layout, models, name):
    model, groups, settings = CASES[name]
    shared, apart = (
        measured(layout, models[model], sharing, groups, settings)
        for sharing in ("always", "never")
    )
    assert shared["computed"] < apart["computed"], "prefixes were meant to be shared"
    np.testing.assert_allclose(shared["scores"], apart["scores"], atol=3e-6)
    largest = float(apart["gradients"].abs().max())
    torch.testing.assert_close(
        shared["gradients"], apart["gradients"], atol=2e-6 * largest, rtol=0.0
    )
    own = ("time/", "policy/padding_share", "policy/micro_batches", "policy/computed_tokens")
    for found, expected in zip(shared["metrics"], apart["metrics"], strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # Choices of experts are counted once for each computed token.
            if not key.startswith((*own, "policy/shared_share", "policy/rerouted")):
                assert found[key] == pytest.approx(value, rel=2e-5, abs=2e-6), key
