"""One Ray for all engines of these tests, and the two engines that test_rollout_engine.py and then
test_through_updates.py look at, in this order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
def in_ray() -> Iterator[None]:
    """Ray, for fixtures that start engines."""
    import ray

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
    """KEEP keeps the key-value cache through an update; RECOMPUTE recomputes it, over two
    workers."""
    root = tmp_path_factory.mktemp("engines")
    of_both = {"sampling": SAMPLING, "reward": {"name": REWARD, "timeout_s": REWARD_S}}
    settings = [of_both, {**of_both, "in_flight": "recompute", "tensor": 2}]
    checkpoints = [
        save_checkpoint(root / f"model-{seed}", seed=seed, kv_heads=2)
        for seed in range(CHECKPOINTS)
    ]
    with running(lambda: Engines(root, settings, checkpoints, EVALUATIONS)) as engines:
        yield engines
