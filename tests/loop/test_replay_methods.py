"""`mar replay` repeats every method to the last bit: from the model and from a checkpoint, of a run
that was killed and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async_rl.metrics.log import digests_of_steps, read_metrics
from tests.loop.one_process import Crash, Engines, OneProcess
from tests.loop.replays import ASYNCHRONOUS, repeated, replaying, run
from tests.loop.routed import with_experts, write_mixture
from tests.thorough import thorough

DECOUPLED = "objective.loss=decoupled_ppo"
ADAPTERS = "policy.lora={rank: 4, dropout: 0.3}"
PASSES = ("objective.minibatches=2", "objective.epochs=2")
VALUES = ("objective.advantage=gae", "objective.value={clip: 0.2}")
STORE = "flow.selection={name: replay, recent: 0.4, per_prompt: 4}"
DISPLACED = "controls=[{name: displacement}]"
SNAPSHOTS = ("objective.proximal=snapshot", "objective.snapshots=4", DECOUPLED)
METHODS = {
    # The gate runs methods together that keep different states.
    "adapters, passes, average, GAC": (
        ADAPTERS,
        *PASSES,
        "objective.proximal=ewma",
        DECOUPLED,
        "controls=[{name: gac}]",
    ),
    "values, snapshots, displacement, moving reference": (
        *VALUES,
        *SNAPSHOTS,
        DISPLACED,
        "objective.kl={coef: 0.1, estimator: k3}",
        "objective.reference={ema: 0.8}",
    ),
    "store, exact baseline": (
        STORE,
        "objective.loss=reinforce",
        "objective.advantage={name: opob, mode: exact}",
    ),
}
ALONE = {
    "adapters with dropout": (ADAPTERS,),
    "minibatches and epochs": PASSES,
    "average": ("objective.proximal=ewma", DECOUPLED),
    "GAC": ("controls=[{name: gac}]",),
    "matched norm": ("controls=[{name: matched_norm}]",),
    "effective sample size": ("controls=[{name: ess_lr, reference_ratio: auto}]",),
    "momentum": ("controls=[{name: momentum_by_alignment}]",),
    "snapshots": SNAPSHOTS,
    "displacement": (DISPLACED, "objective.snapshots=4"),
    "reference that is refreshed": (
        "objective.kl={coef: 0.1, estimator: k3}",
        "objective.reference={refresh_every: 2}",
    ),
    "values": VALUES,
    "exact baseline": (
        "objective.loss=reinforce",
        "objective.advantage={name: opob, mode: exact}",
    ),
    "store": (STORE,),
    "window": ("flow.selection=windowed",),
    "exact lag": ("flow.selection={name: exact_lag, lag: 2}",),
    "packed rows": ("policy.sequence=packed",),
    "skipped anomalies": ("policy.on_anomaly=skip",),
    "bfloat16": ("model.dtype=bfloat16",),
}
OF_SOURCE = {
    "rollout": ("samples.experts=true",),
    "proximal": (*PASSES, "objective.proximal=recompute"),
    "none": (),
}
CASES = [
    *(pytest.param(settings, id=name) for name, settings in METHODS.items()),
    *(pytest.param(settings, id=name, marks=thorough) for name, settings in ALONE.items()),
]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with replaying(tmp_path_factory.mktemp("methods")) as process:
        yield process


def require_same_numbers(run_dir: Path, replay_dir: Path) -> None:
    """Check every number of a step except times and those of the engines."""
    of_run = {row["step"]: row for row in read_metrics(run_dir)}
    for row in read_metrics(replay_dir):
        there = of_run[row["step"]]
        different = {
            name: (value, there.get(name))
            for name, value in row.items()
            if not name.startswith(("time", "memory/", "throughput/")) and value != there.get(name)
        }
        assert not different, f"step {row['step']}: {different}"


def require_repeated(run_dir: Path, steps: int = 6) -> None:
    """Check a replay from the model, and one from the checkpoint before the last two steps."""
    for number, first in ((1, 1), (2, steps - 1)):
        code, shown = repeated(run_dir, first=first)
        assert (code, shown.splitlines()[-1]) == (0, f"{steps - first + 1} steps, identical bits")
        replay_dir = run_dir / "replays" / str(number)
        assert list(digests_of_steps(replay_dir)) == [*range(first, steps + 1)]
        require_same_numbers(run_dir, replay_dir)


@pytest.mark.parametrize("settings", CASES)
def test_a_run_that_was_killed_is_repeated_to_the_last_bit(
    loop: OneProcess, settings: tuple[str, ...]
) -> None:
    config = loop.config("method", *ASYNCHRONOUS, *settings)
    with pytest.raises(Crash):
        run(loop, config, crashes_at=("take_devices", 4))
    require_repeated(run(loop, config))
    assert len(set(digests_of_steps(config.run.dir).values())) == 6, "every step changed weights"


@pytest.fixture(scope="module")
def mixture(loop: OneProcess) -> Path:
    return write_mixture(loop.root / "mixture")


@pytest.mark.parametrize(
    "source",
    ["rollout", pytest.param("none", marks=thorough), pytest.param("proximal", marks=thorough)],
)
def test_tokens_of_a_mixture_take_their_experts_again(
    loop: OneProcess, mixture: Path, source: str
) -> None:
    """`rollout`: the experts of the log; the model alone would choose others."""
    settings = [f"model.path={mixture}", f"policy.routing_replay={source}"]
    settings += OF_SOURCE[source]
    config = loop.config("mixture", *ASYNCHRONOUS, *settings)
    run_dir = run(loop, config, engines=Engines(prepare=with_experts))
    require_repeated(run_dir)
    if source == "rollout":
        _, shown = repeated(run_dir, "policy.routing_replay=none", first=5)
        assert "step 5 is the first whose weights differ" in shown
