"""`mar replay` on several ranks: identical bits on the layout that made a step, and results within
the stated tolerance on another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.starts import read_starts
from megatron_async_rl.metrics.log import digests_of_steps
from megatron_async_rl.replay.repetition import TOLERANCES
from tests.loop.one_process import OneProcess
from tests.loop.replays import repeated, replaying, run, run_on_ranks
from tests.loop.routed import write_mixture
from tests.thorough import thorough

pytestmark = pytest.mark.parallel

STEPS = 4
SMALL = ("flow.async_ratio=2", f"run.steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=9")
KILLED = ("take_devices", 4)
"""The fourth step: a resume repeats it and the third, after the checkpoint of the second."""
LAYOUTS = {
    "tensor": "{ranks: 2, tensor: 2}",
    "sequence": "{ranks: 2, tensor: 2, sequence: true}",
    "pipeline": "{ranks: 2, pipeline: 2}",
    "context": "{ranks: 2, context: 2}",
    "data": "{ranks: 2}",
    "data, whole optimizer": "{ranks: 2, distributed_optimizer: false}",
    "tensor x pipeline": "{ranks: 4, tensor: 2, pipeline: 2}",
    "data x context": "{ranks: 4, context: 2}",
    "data, overlapped": "{ranks: 2, overlap_grad_reduce: true, overlap_param_gather: true}",
}
EXPERTS = {"expert": "{ranks: 2, expert: 2}", "data of a mixture": "{ranks: 2}"}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with replaying(tmp_path_factory.mktemp("layouts")) as process:
        yield process


@pytest.fixture(scope="module")
def mixture(loop: OneProcess) -> Path:
    return write_mixture(loop.root / "mixture")


def require_identical(run_dir: Path, first: int = 1) -> None:
    code, shown = repeated(run_dir, first=first)
    assert (code, shown.splitlines()[-1]) == (0, f"{STEPS - first + 1} steps, identical bits")
    assert len(set(digests_of_steps(run_dir).values())) == STEPS, "every step changed weights"


def on(config: Config, ranks: int, **sizes: int) -> Config:
    parallel = config.policy.parallel.model_copy(update={"ranks": ranks, "tensor": 1, **sizes})
    policy = config.policy.model_copy(update={"parallel": parallel})
    return config.model_copy(update={"policy": policy})


@thorough
def test_a_resume_on_another_layout_is_repeated_on_both(loop: OneProcess) -> None:
    config = loop.config("both", *SMALL, "policy.parallel={ranks: 2, tensor: 2}")
    run_on_ranks(config, KILLED)
    run_dir = run_on_ranks(on(config, ranks=2))
    assert [start.layout["tensor"] for start in read_starts(run_dir)] == [2, 1]
    require_identical(run_dir)
    parts = [digests_of_steps(run_dir / "replays" / "1" / f"part_{n}") for n in (1, 2)]
    assert [list(part) for part in parts] == [[1, 2], [3, 4]]


@thorough
@pytest.mark.parametrize("parallel", [pytest.param(one, id=name) for name, one in LAYOUTS.items()])
def test_a_run_on_several_ranks_is_repeated_to_the_last_bit(
    loop: OneProcess, parallel: str
) -> None:
    settings = ["objective.minibatches=2", "objective.epochs=2"] if "overlap" in parallel else []
    config = loop.config("ranks", *SMALL, f"policy.parallel={parallel}", *settings)
    run_on_ranks(config, KILLED)
    run_dir = run_on_ranks(config)
    require_identical(run_dir)
    require_identical(run_dir, first=STEPS - 1)


@thorough
@pytest.mark.parametrize("parallel", [pytest.param(one, id=name) for name, one in EXPERTS.items()])
def test_a_mixture_on_several_ranks_is_repeated_to_the_last_bit(
    loop: OneProcess, mixture: Path, parallel: str
) -> None:
    routing = ("policy.routing_replay=rollout", "samples.experts=true")
    settings = (f"model.path={mixture}", f"policy.parallel={parallel}", *routing)
    config = loop.config("mixture", *SMALL, *settings)
    run_on_ranks(config, KILLED)
    require_identical(run_on_ranks(config))


@thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_layout_meets_its_tolerance(loop: OneProcess, dtype: str) -> None:
    run_dir = run(loop, loop.config("alone", *SMALL, f"model.dtype={dtype}"))
    for name in ("tensor", "pipeline", "context", "data"):
        code, shown = repeated(run_dir, f"policy.parallel={LAYOUTS[name]}")
        assert code == 0, (name, shown)
        tolerance = f"the tolerance is {TOLERANCES[dtype]:g}"
        assert tolerance in shown or "identical bits" in shown, (name, shown)
