"""How full engines are with long-tailed response lengths: scheduling response by response against a
batch barrier.

By default a table of simulations (simulate/simulation.py): two engines of 32 places, which each
make a token per unit of time whatever the others do; new weights are there at once. `--real`: one
real vLLM engine under the real controller, lengths drawn log-normal, against a batch at a time:
share of the engine's places that are taken, and tokens per second that train, in one run. Training
takes no time in the real run: the barrier is not charged for it, and asynchrony gains by filling
engines alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.rollout.spec import HERE
from megatron_async_rl.simulate.rates import ResponseLengths, SimulationRates
from megatron_async_rl.simulate.simulation import SimulationResult, simulate

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "examples" / "arithmetic" / "generated"

WAYS: dict[str, dict[str, Any]] = {
    "barrier": {"async_ratio": 1.0},
    "synchronous": {"async_ratio": 0.0},
    "oldest_first, 1": {"async_ratio": 1.0},
    "windowed, 1": {"async_ratio": 1.0, "selection": "windowed"},
    "oldest_first, 2": {"async_ratio": 2.0},
    "windowed, 2": {"async_ratio": 2.0, "selection": "windowed"},
    "windowed, 1, late groups dropped": {
        "async_ratio": 1.0,
        "selection": "windowed",
        "late": "drop",
    },
    "windowed, 0.5": {"async_ratio": 0.5, "selection": "windowed"},
    "windowed, 0.5, over-sampled by 0.5": {
        "async_ratio": 0.5,
        "selection": "windowed",
        "oversample": 0.5,
    },
}


def drawn(median: float, longest: int, chance: np.random.Generator) -> int:
    """A log-normal length, in tokens."""
    return int(np.clip(round(median * np.exp(chance.standard_normal())), 1, longest))


def simulated(
    settings: dict[str, Any], *, train_time: float, steps: int, seed: int, barrier: bool = False
) -> SimulationResult:
    """Times are in tokens of one place."""
    chance = np.random.default_rng([3, seed])
    groups = [tuple(drawn(200.0, 4096, chance) for _ in range(8)) for _ in range(400)]
    return simulate(
        FlowConfig(prompts_per_step=8, group_size=8, **settings),
        RolloutConfig(
            engines=2, sampling=SamplingConfig(max_tokens=4096), reward=RewardConfig(name="math")
        ),
        SimulationRates(decode=((1.0, 0.0),), places=32, train_s=train_time),
        ResponseLengths(groups=tuple(groups), prompts=(1,) * len(groups)),
        steps=steps,
        seed=seed,
        barrier=barrier,
    )


def table(args: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, settings in WAYS.items():
        runs = [
            simulated(
                settings,
                train_time=args.train_time,
                steps=40,
                seed=seed,
                barrier=name == "barrier",
            )
            for seed in range(5)
        ]
        first = next(iter(rows.values()), None)
        rate = float(np.mean([run.tokens_per_s for run in runs]))
        rows[name] = {
            "occupied": round(float(np.mean([run.places_taken for run in runs])), 3),
            "tokens_per_time": round(rate, 1),
            "ratio_to_barrier": round(rate / (first["tokens_per_time"] if first else rate), 2),
            "mean_start_lag": round(float(np.mean([run.lag_mean for run in runs])), 2),
        }
    return rows


def spec(logs: Path) -> Any:
    from megatron_async_rl.rollout.spec import EngineSpec

    rollout = RolloutConfig(
        sampling=SamplingConfig(max_tokens=LONGEST),
        reward=RewardConfig(name="arithmetic"),
        max_concurrent=64,
        kv_cache_gib=0.5,
    )
    return EngineSpec(
        index=0,
        model_path=GENERATED / "model",
        dtype="float32",
        rollout=rollout,
        seed=1,
        device="cpu",
        log_dir=logs,
        transport="shared_memory",
    )


LONGEST = 44
"""The model has 64 positions."""


class DrawnLengths:
    """vLLM, but every response has a length of its own, drawn in advance by its number."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def add_request(self, name: str, prompt: Any, parameters: Any) -> Any:
        chance = np.random.default_rng([7, self._asked])
        self._asked += 1
        parameters.ignore_eos = True
        parameters.stop_token_ids = []
        parameters.max_tokens = drawn(8.0, LONGEST, chance)
        return await self._llm.add_request(name, prompt, parameters)


async def real(args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    from megatron_async_rl.rollout.engine import RolloutEngine

    engine = RolloutEngine(spec(logs))
    await engine.start()
    try:
        return await parts(engine, args)
    finally:
        await engine.stop()


class Numbered:
    """A running engine whose weights stay as they are and get a new number, and that continues when
    its controller ends."""

    machine = HERE

    def __init__(self, engine: Any, vllm: Any) -> None:
        self._engine = engine
        self._vllm = vllm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def update(self, version: int, manifest: Any) -> dict[str, str]:
        await self._vllm.update_weight_version(str(version))
        return {}

    async def stop(self) -> None: ...
    def kill(self) -> None: ...
    async def until_ended(self) -> None: ...


async def parts(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    from megatron_async_rl.data import PromptSource
    from megatron_async_rl.data.prompts import read_prompts
    from megatron_async_rl.data.tokenizer import load_tokenizer
    from megatron_async_rl.flow.controller import Controller
    from megatron_async_rl.flow.controller_spec import ControllerSpec
    from megatron_async_rl.flow.fleet import FleetSettings
    from megatron_async_rl.samples.segments import load, read_entries
    from megatron_async_rl.weights.manifest import Manifest

    responses: Any = engine._responses
    vllm = responses._llm
    prompts = read_prompts(
        GENERATED / "train.jsonl", load_tokenizer(GENERATED / "model"), limit=200
    )
    nothing = Manifest(buckets=(), digests={})

    async def launch(spec: Any, *, again: bool) -> Any:
        return Numbered(engine, vllm)

    rows: dict[str, Any] = {}
    for name, ratio in (
        ("warm up", 0.0),
        ("barrier", 0.0),
        ("oldest_first, 1", 1.0),
        ("oldest_first, 2", 2.0),
    ):
        responses._llm = DrawnLengths(vllm)
        await vllm.update_weight_version("0")
        steps = 2 if name == "warm up" else args.steps
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            controller = Controller(
                PromptSource(prompts, seed=1, shuffle=True),
                ControllerSpec(
                    flow=FlowConfig(prompts_per_step=8, group_size=8, async_ratio=ratio),
                    engines=[engine.spec],
                    fleet=FleetSettings(capacity=64),
                    steps=steps,
                    fresh_steps=0,
                    seed=0,
                    run_dir=run,
                ),
                launch,
            )
            await controller.start()
            began = time.time()
            await controller.staged(0, nothing)
            for version in range(steps):
                await controller.next_batch(version)
                await controller.staged(version + 1, nothing)
            wall = time.time() - began
            await controller.close()
            samples = [sample for _, sample in load(run, list(read_entries(run)))]
        tokens = sum(sample.length for sample in samples)
        rows[name] = {
            "occupied": round(
                sum(sample.finished_at - sample.started_at for sample in samples) / (wall * 64), 3
            ),
            "tokens_per_s": round(tokens / wall),
            "tokens": tokens,
            "seconds": round(wall, 2),
        }
    del rows["warm up"]
    for row in rows.values():
        row["ratio_to_barrier"] = round(row["tokens_per_s"] / rows["barrier"]["tokens_per_s"], 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--train-time",
        type=float,
        default=200.0,
        help="of the simulation: tokens that a slot makes meanwhile",
    )
    parser.add_argument(
        "--real", action="store_true", help="needs the model of examples/arithmetic/prepare.py"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="batches of 64 responses in each part of the real run"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        with tempfile.TemporaryDirectory() as logs:
            found = asyncio.run(asyncio.wait_for(real(args, Path(logs)), 10 + 5 * args.steps))
        args.inside.write_text(
            json.dumps(found, indent=2), encoding="utf-8"
        )  # the engine has redirected its output
        return
    if args.real:
        from megatron_async_rl.rollout.vllm.plugin import environment

        env = {**os.environ, **environment(spec(Path(tempfile.gettempdir())))}
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--inside", str(result)]
            subprocess.run(command, check=True, env=env)
            print(result.read_text(encoding="utf-8"))
    else:
        print(json.dumps(table(args), indent=2))


if __name__ == "__main__":
    main()
