"""Ray cluster of all engines of these tests, and the two engines that test_rollout_engine.py and
then test_through_updates.py use, in this order."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.rollout.cluster import prepare_environment
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.plugin import serving_engines
from tests.engine.reference import save_checkpoint
from tests.engine.running import (
    CHECKPOINTS,
    EVALUATIONS,
    REWARD,
    REWARD_S,
    SAMPLING,
    Engines,
    running,
)


@pytest.fixture(scope="session")
def in_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray, and the server from which engines are forked, for fixtures that start engines."""
    import ray

    folder = tmp_path_factory.mktemp("server")
    spec = EngineSpec(
        index=0,
        model_path=folder,
        dtype="float32",
        rollout=RolloutConfig.model_validate({"sampling": SAMPLING, "reward": {"name": REWARD}}),
        seed=11,
        device="cpu",
        log_dir=folder,
        transport="shared_memory",
    )
    prepare_environment(os.environ)  # inherited by the server and the engines
    with serving_engines(spec, os.environ, folder, folder / "log"):
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def engines(in_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engine KEEP, which keeps the key-value cache through an update, and engine RECOMPUTE, which
    recomputes it and has two workers."""
    root = tmp_path_factory.mktemp("engines")
    of_both = {"sampling": SAMPLING, "reward": {"name": REWARD, "timeout_s": REWARD_S}}
    settings = [of_both, {**of_both, "in_flight": "recompute", "tensor": 2}]
    checkpoints = [
        save_checkpoint(root / f"model-{seed}", seed=seed, kv_heads=2)
        for seed in range(CHECKPOINTS)
    ]
    with running(lambda: Engines(root, settings, checkpoints, EVALUATIONS)) as engines:
        yield engines
