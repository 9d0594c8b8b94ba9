"""Cost of the weight digest of each step in a supervised run, relative to the step.

The runs are real (`train.main` under torchrun): the warm start of the arithmetic example, and a
random model of 100 million parameters on the same data. A run with engines computes the same
digests while it stages a version, which verifies what every engine loads; of those only `log` is
added by the record of a step.

    digest_ms      processor time of a rank for the digests of a step
    meet_ms        the part of it in which the ranks add up their sums
    log_ms         processor time of rank 0 for the digest of the version and the log of its tensors
    step_ms        processor time of a rank for a step, all included
    share_percent  (digest + log) / step, the larger of the ranks', medians over the steps
    wall_percent   the same in wall time, with the wait for the other ranks
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/arithmetic_sft_cpu.yaml"
SKIPPED = 5
"""Steps before the first that counts."""


class Spent:
    """Processor and wall time of named parts, by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, tuple[float, float]]] = [{}]
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Measure every call of a function."""
        call: Callable[..., Any] = getattr(owner, name)

        def measured(*arguments: Any) -> Any:
            began = self._now()
            try:
                return call(*arguments)
            finally:
                self._add(part, began)

        setattr(owner, name, measured)

    def step_ended(self) -> None:
        self._add("step", self._began)
        self._began = self._now()
        self.steps.append({})

    def _add(self, part: str, began: tuple[float, float]) -> None:
        spent = [now - then for now, then in zip(self._now(), began, strict=True)]
        before = self.steps[-1].get(part, (0.0, 0.0))
        self.steps[-1][part] = before[0] + spent[0], before[1] + spent[1]


def rank(config: Path, result: Path) -> None:
    """Run one rank of the training; write what it measured."""
    from megatron_async_rl import train
    from megatron_async_rl.flow.trainer_rank import TrainerRank
    from megatron_async_rl.policy.parallel import Layout
    from megatron_async_rl.weights.staging import WeightDigests

    spent = Spent()
    spent.timed(WeightDigests, "digests", "digest")
    spent.timed(Layout, "summed", "meet")
    spent.timed(TrainerRank, "_record_digest", "log")
    publish = TrainerRank.publish

    def published(self: TrainerRank, version: int) -> None:
        publish(self, version)
        spent.step_ended()

    TrainerRank.publish = published  # type: ignore[method-assign]
    train.main(config)
    name = f"{os.environ['RANK']}.json"
    (result / name).write_text(json.dumps(spent.steps[SKIPPED:-1]), encoding="utf-8")


def measure(name: str, ranks: int, steps: int, *overrides: str) -> dict[str, Any]:
    from megatron_async_rl.config.load import dump, load

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        sizes = [f"policy.parallel.ranks={ranks}", f"run.steps={steps + SKIPPED}"]
        config = load(EXAMPLE, [f"run.dir={folder / 'run'}", *sizes, *overrides])
        (folder / "run").mkdir()
        file = folder / "run" / "config.yaml"
        file.write_text(dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", __file__, "--rank", str(file), str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}\ndigest_cost.py: the ranks ended with code {done.returncode}")
        found = [_medians(json.loads((folder / f"{n}.json").read_text())) for n in range(ranks)]
    worst = max(found, key=lambda one: one["share_percent"])
    return {"run": name, "ranks": ranks, **{key: float(f"{worst[key]:.3g}") for key in worst}}


def _medians(steps: list[dict[str, list[float]]]) -> dict[str, float]:
    def median(part: str, clock: int) -> float:
        return statistics.median(step.get(part, (0.0, 0.0))[clock] for step in steps)

    (cost, wall) = (median("digest", clock) + median("log", clock) for clock in (0, 1))
    return {
        "digest_ms": 1e3 * median("digest", 0),
        "meet_ms": 1e3 * median("meet", 0),
        "log_ms": 1e3 * median("log", 0),
        "step_ms": 1e3 * median("step", 0),
        "share_percent": 100 * cost / median("step", 0),
        "wall_percent": 100 * wall / median("step", 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of the demo")
    parser.add_argument("--millions", type=int, default=100, choices=list(random_model.SHAPES))
    parser.add_argument("--large-steps", type=int, default=4, help="of the random model")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(*map(Path, args.rank))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for ranks in (1, 2):
        print(json.dumps(measure("demo", ranks, args.steps)), flush=True)
    if args.large_steps:
        with tempfile.TemporaryDirectory() as made:
            model = random_model.save(Path(made), args.millions, "float32")
            tokenizer = ROOT / "examples/arithmetic/generated/model/tokenizer.json"
            (model / "tokenizer.json").write_bytes(tokenizer.read_bytes())
            large = measure(
                f"{args.millions} M", 1, args.large_steps, f"model.path={json.dumps(str(model))}"
            )
        print(json.dumps(large), flush=True)


if __name__ == "__main__":
    main()
