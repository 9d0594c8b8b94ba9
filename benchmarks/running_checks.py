"""The checks of every batch during training, as a share of the step that they check: parameters
without a gradient, bookkeeping of tokens and repeated responses, and differences of log-probs at
lag 0. All functions of the checks are timed inside the same steps, on one rank with one thread, in
CPU time, with batches of the size of examples/arithmetic_cpu.yaml: 64 groups of 8 responses. The
step is that of the trainer alone: a run's steps are longer by the wait for engines.

    demo            share with the demo's model and lengths (prompts of 6 tokens, responses of 5)
    100             share with a random model of 100 million parameters, prompts of 64 tokens and
                    responses of 64; two groups of 8
    first           share in the first five steps, in which all gradients are looked at
    later           share in the steps after them
    parts           milliseconds per step of each check, over all steps
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import random_model
import torch

FIRST = 5
VOCABULARY = {"demo": 14, "100": 32768}


class Clock:
    """Seconds of CPU time spent in the wrapped functions, by name, without other wrapped functions
    that they call."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: type, method: str) -> None:
        call, name = getattr(owner, method), f"{owner.__name__}.{method}"

        @functools.wraps(call)
        def timed(*arguments: Any, **settings: Any) -> Any:
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return call(*arguments, **settings)
            finally:
                whole = time.process_time() - began
                inner = self._inner.pop()
                self.spent[name] += whole - inner
                self._inner[-1] += whole

        setattr(owner, method, timed)


def batch(version: int, groups: int, prompt: int, response: int, vocabulary: int) -> Any:
    from megatron_async_rl.samples.rows import TrainBatch
    from megatron_async_rl.samples.types import Prompt, Sample

    draw = np.random.default_rng(version)

    def sample(group: int, k: int) -> Sample:
        length = int(draw.integers(max(1, response - 2), response + 1))
        return Sample(
            id=f"{group}-{k}",
            prompt=Prompt(
                id=str(group), text="", token_ids=tuple(draw.integers(1, vocabulary, prompt))
            ),
            response_ids=draw.integers(1, vocabulary, length).astype(np.int32),
            behavior_logprobs=draw.uniform(-3, -0.1, length).astype(np.float32),
            versions=np.full(length, version, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.uint8),
            text="",
            finish_reason="stop",
            reward=float(draw.integers(2)),
        )

    members = [[sample(group, k) for k in range(8)] for group in range(groups)]
    return TrainBatch.of(version, members)


def measure(
    model: Path, name: str, sizes: tuple[int, int, int], steps: int, folder: Path
) -> dict[str, Any]:
    from megatron_async_rl.config.objective import ObjectiveConfig
    from megatron_async_rl.config.policy import PolicyConfig
    from megatron_async_rl.config.schema import ModelConfig
    from megatron_async_rl.flow.running_checks import RunningChecks
    from megatron_async_rl.policy.gradient_coverage import CoverageReport
    from megatron_async_rl.policy.lag0 import Lag0Table
    from megatron_async_rl.policy.policy import Policy

    policy = Policy.build(
        ModelConfig(path=model, dtype="float32"),
        PolicyConfig(device="cpu"),
        ObjectiveConfig.model_validate({"loss": "reinforce"}),
        (),
        layout=random_model.one_rank(),
        temperature=1.0,
        total_steps=steps,
        anomalies=folder / "anomalies.jsonl",
    )
    # One thread, as a rank of the demo on two cores: idle threads would count as processor time.
    torch.set_num_threads(1)
    checks, clock = RunningChecks(folder, {0}), Clock()
    wrapped: tuple[tuple[type, str], ...] = (
        (CoverageReport, "add"),
        (CoverageReport, "stepped"),
        (RunningChecks, "take"),
        (RunningChecks, "report"),
        (Lag0Table, "_record_depths"),
        (Lag0Table, "differences"),
    )
    for owner, method in wrapped:
        clock.wrap(owner, method)
    shares: list[float] = []
    parts: dict[str, float] = defaultdict(float)
    for step in range(steps):
        taken = batch(step, *sizes, VOCABULARY[name])
        clock.spent.clear()
        began = time.process_time()
        checks.take(taken)
        received = policy.receive(functools.partial(lambda one: one, taken))
        assert received is not None
        policy.train_step(received)
        checks.report(step + 1)
        whole = time.process_time() - began
        shares.append(sum(clock.spent.values()) / whole)
        for part, seconds in clock.spent.items():
            parts[part] += 1000 * seconds / steps
        parts["step"] += 1000 * whole / steps
    return {
        "first": round(float(np.mean(shares[:FIRST])), 5),
        "later": round(float(np.mean(shares[FIRST:])), 5),
        "parts": {part: round(spent, 3) for part, spent in parts.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="the demo's warm start, .../hf")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", choices=["demo", "100"])
    wanted = parser.parse_args()
    if wanted.model is None and wanted.only != "100":
        parser.error("--model is required, unless --only 100 is given")
    results = {}
    with tempfile.TemporaryDirectory() as made:
        if wanted.only != "100":
            folder = Path(made) / "demo"
            folder.mkdir()
            results["demo"] = measure(wanted.model, "demo", (64, 6, 5), wanted.steps, folder)
        if wanted.only != "demo":
            folder = Path(made) / "100"
            folder.mkdir()
            path = random_model.save(folder, 100, "float32")
            results["100"] = measure(path, "100", (2, 64, 64), wanted.steps, folder)
    print(json.dumps(results, indent=2))
