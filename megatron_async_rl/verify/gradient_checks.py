"""Gradients: every parameter moves, and steps are finite.

weights.jsonl has eight bits of each tensor's digest after each step. A tensor that changes has the
same eight bits with a probability of 1/256, so a tensor that kept them over MIN_CHANGES steps that
changed the weights has not changed (probability below 1e-9): it receives no gradient. In bfloat16,
norms and biases may keep their bits although their float32 originals move, because a small learning
rate is below the spacing of numbers near 1; they are left out. A matrix has values near every
rounding boundary, so it shows the smallest update.

A single step that is not finite happens in healthy runs, and is skipped; MAX_IN_A_ROW of them, or
more than MAX_NONFINITE of all steps, mean that the weights or the data are at fault.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.metrics.weight_log import WeightLines
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, damaged, row

MOVED, FINITE = "parameters that move", "finite gradients"
MIN_CHANGES = 4
MAX_IN_A_ROW, MAX_NONFINITE = 3, 0.01
MOVED_BOUND = "every parameter changes"
FINITE_BOUND = (
    f"fewer than {MAX_IN_A_ROW} steps in a row, and at most {MAX_NONFINITE:.0%} of all steps, are"
    " not finite"
)
MOVED_REMEDY = (
    "the named parameters receive no gradient: check that they take part in the forward pass and"
    " are in the optimizer"
)
FINITE_REMEDY = "read anomalies.jsonl: it names the parameter and the samples of each such step"


class MovedTensors(RunCheck):
    """Reads weights.jsonl line by line."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._effective: set[int] = set()
        self._last = 0

    def measured(self, row: MetricRow) -> None:
        lr, skipped = number(row, "policy/lr"), number(row, "policy/skipped")
        # A skipped step, and one at learning rate 0, move nothing.
        if lr and skipped != 1 and number(row, "policy/grad_norm") != 0:
            self._effective.add(int(row["step"]))  # type: ignore[arg-type]
        self._last = int(row["step"])  # type: ignore[arg-type]

    def result(self) -> Iterable[ScorecardRow]:
        config = self._records.config
        if config.policy.lora is not None:
            why = "with policy.lora only the adapters' targets change"
            yield absent(MOVED, why, MOVED_BOUND, MOVED_REMEDY)
            return
        before: np.ndarray | None = None
        names: list[str] = []
        moved = np.zeros(0, dtype=bool)
        changes = 0
        try:
            for step, of_step, bits in WeightLines(self._records.run_dir):
                if of_step != names:
                    names, moved, before = of_step, np.zeros(len(of_step), dtype=bool), None
                    changes = 0
                now = np.frombuffer(bits, dtype=np.uint8)
                if before is not None and step in self._effective:
                    differs = before != now
                    moved |= differs
                    changes += bool(differs.any())
                before = now
        except UserError as error:
            yield damaged(MOVED, error, MOVED_BOUND)
            return
        if changes < MIN_CHANGES:
            why = (
                f"weights.jsonl has {changes} steps that changed weights; {MIN_CHANGES} are needed"
            )
            yield absent(MOVED, why, MOVED_BOUND, MOVED_REMEDY)
            return
        counted = [
            place
            for place, name in enumerate(names)
            if config.engine_dtype == "float32" or not _is_small(name)
        ]
        still = [names[place] for place in counted if not moved[place]]
        value = f"{len(counted) - len(still)} of {len(counted)} changed in {changes} steps"
        wrong = Places()
        wrong.add_all((f"tensor {name} never changed" for name in still), len(still))
        yield row(MOVED, value, MOVED_BOUND, not wrong, MOVED_REMEDY, wrong.first)


def _is_small(name: str) -> bool:
    return "norm" in name or name.endswith(".bias")


class FiniteSteps(RunCheck):
    """Counts steps whose loss or gradient was not finite."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._steps = self._nonfinite = self._in_a_row = self._longest = self._zero = 0
        self._spikes = 0
        self._wrong = Places()

    def measured(self, row: MetricRow) -> None:
        total = number(row, "policy/nonfinite")
        if total is None:
            return
        self._steps += 1
        self._zero += number(row, "policy/grad_norm") == 0
        self._spikes += number(row, "policy/grad_anomaly") is not None
        # The total continues from the checkpoint after a resume, and may be lower there.
        new = total - self._before if self._before is not None else total
        self._before = total
        if new > 0:
            self._nonfinite += 1
            self._in_a_row += 1
            self._wrong.add(f"step {row['step']}: the loss or the gradient is not finite")
        else:
            self._in_a_row = 0
        self._longest = max(self._longest, self._in_a_row)

    def result(self) -> Iterable[ScorecardRow]:
        if not self._steps:
            yield absent(
                FINITE, "metrics.jsonl has no policy/nonfinite", FINITE_BOUND, FINITE_REMEDY
            )
            return
        few = self._nonfinite <= max(1, MAX_NONFINITE * self._steps)
        value = (
            f"{self._nonfinite} of {self._steps} steps not finite, at most {self._longest} in a"
            f" row; {self._spikes} spikes; {self._zero} gradients of 0"
        )
        ok = few and self._longest < MAX_IN_A_ROW
        yield row(FINITE, value, FINITE_BOUND, ok, FINITE_REMEDY, self._wrong.first)
