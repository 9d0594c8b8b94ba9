"""The policy: a model that learns from batches, scores samples, and can be saved and loaded.

Invariants:
- every rank is handed the same batch and returns the same metrics (times are the rank's own);
- one batch is one optimizer step: log-probs, loss, gradient, controls, step;
- the loss and its gradient do not depend on the parallel layout, on the token budget or on the order of samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.controls.decision import Control
from megatron_async_rl.controls.registry import build_controls
from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.objective import Objective, StepTargets
from megatron_async_rl.policy import checkpoint
from megatron_async_rl.policy.diagnostics import StepTable, step_metrics
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.microbatch import MicroBatch, Plan, build_micro_batch, plan_micro_batches
from megatron_async_rl.policy.model import DTYPES, PolicyModel, build_model
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from megatron_async_rl.policy.step import OptimizerStep
from megatron_async_rl.samples.types import Sample, TrainBatch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.config.objective import GacControl, ObjectiveConfig
    from megatron_async_rl.config.schema import ModelConfig, PolicyConfig
    from megatron_async_rl.policy.parallel import Layout


@dataclass(eq=False)
class Policy:
    """Built by `build`; every public method is collective over the world."""

    config: PolicyConfig
    layout: Layout
    model: PolicyModel
    schedule: Schedule
    optimizer: MegatronOptimizer
    objective: Objective
    controls: Mapping[str, Control]
    step: OptimizerStep

    @classmethod
    def build(
        cls,
        model_config: ModelConfig,
        policy_config: PolicyConfig,
        objective_config: ObjectiveConfig,
        controls_config: Sequence[GacControl],
        *,
        layout: Layout,
        temperature: float,
        total_steps: int,
    ) -> Policy:
        """Loads the model of `model_config.path` on this layout. `temperature`: the one the responses are sampled at.

        `total_steps`: optimizer steps of the whole run, for the learning-rate schedule. Nothing in the policy is random.
        """
        model = build_model(model_config, policy_config, layout)
        wrapped = wrap_for_gradients(model.chunks, policy_config)
        optimizer = build_optimizer(wrapped, policy_config, DTYPES[model_config.dtype])
        controls = build_controls(controls_config)
        schedule = Schedule(
            wrapped, model, layout, temperature=temperature, logprob_chunk_tokens=policy_config.logprob_chunk_tokens
        )
        step = OptimizerStep(optimizer, policy_config.optimizer, controls, layout, total_steps)
        return cls(policy_config, layout, model, schedule, optimizer, Objective(objective_config), controls, step)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on `batch`. Keys are those of observe/keys.py.

        A batch without a single trainable token makes no step. Raises SampleTooLong.
        """
        targets = self.objective.targets(batch)
        if targets.denominators.tokens == 0:
            return self.step.pass_over()
        started = time.perf_counter()
        plan, mine = self._micro_batches(targets.samples)
        table = StepTable(len(targets.samples), self.layout.device)
        # Without the distributed optimizer a parameter's grad is its gradient buffer: left in place, the next backward would
        # add to the buffer twice.
        self.optimizer.zero_grad()
        self.schedule.forward_backward(mine, _Consumer(self, targets, table, batch.version))
        dist.all_reduce(table.values, group=self.layout.world_group)
        reduced = time.perf_counter()
        trained_tokens = [int(sample.loss_mask.sum()) for sample in targets.samples]
        sampled = any(sample.finish_reason != "given" for sample in targets.samples)
        measured = step_metrics(table.values.cpu().numpy(), trained_tokens, sampled=sampled)
        return {
            **measured,
            **self.step.take(measured["policy/loss"]),
            "policy/micro_batches": float(plan.micro_batches),
            "policy/padding_share": plan.padding_share,
            "time/forward_backward_s": reduced - started,
            "time/optimizer_s": time.perf_counter() - reduced,
        }

    def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Log-probs (nats, after temperature) of each sample's response tokens under the current weights, on every rank."""
        if not samples:
            return []
        lengths = [sample.length for sample in samples]
        ends = np.cumsum(lengths)
        flat = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self.layout.device)
        _, mine = self._micro_batches(samples)
        for micro_batch, logp in self.schedule.forward(mine):
            if self.layout.tp_rank == 0 and micro_batch.samples:
                # A token is scored by one rank and is 0 on the others, so that their sum is its log-prob.
                for row, index in enumerate(micro_batch.samples):
                    flat[ends[index] - lengths[index] : ends[index]] = logp[micro_batch.sequence == row].float()
        dist.all_reduce(flat, group=self.layout.world_group)
        return np.split(flat.cpu().numpy(), ends[:-1])

    def save(self, directory: Path, version: int, state: Mapping[str, Any], *, keep: int) -> Path:
        """Saves weights, optimizer, schedule, controls and the run's own `state` (rank 0's) as a checkpoint of `version`.

        Keeps the newest `keep` checkpoints of `directory`; returns the new one. Raises as `checkpoint.save` does.
        """
        return checkpoint.save(
            directory,
            version,
            model=self.model,
            optimizer=self.optimizer,
            state={"run": dict(state), "step": self.step.state_dict()},
            rank_state={"controls": {name: control.state_dict() for name, control in self.controls.items()}},
            layout=self.layout,
            keep=keep,
        )

    def load(self, directory: Path) -> dict[str, Any] | None:
        """Restores the newest checkpoint and returns the run's own state; None where there is none.

        On another parallel layout than it was saved on, and for controls it does not have, controls start afresh.
        """
        loaded = checkpoint.load(directory, model=self.model, optimizer=self.optimizer, layout=self.layout)
        if loaded is None:
            return None
        self.step.load_state_dict(loaded.state["step"])
        controls = loaded.rank_state["controls"] if loaded.rank_state is not None else {}
        for name, control in self.controls.items():
            if name in controls:
                control.load_state_dict(controls[name])
        run: dict[str, Any] = loaded.state["run"]
        return run

    def _micro_batches(self, samples: Sequence[Sample]) -> tuple[Plan, list[MicroBatch]]:
        """The plan of all ranks, and this rank's micro-batches."""
        multiple = self.layout.tp_size if self.model.config.sequence_parallel else 1
        plan = plan_micro_batches(
            samples, data_parallel=self.layout.dp_size, budget=self.config.tokens_per_micro_batch, multiple=multiple
        )
        mine = plan.ranks[self.layout.dp_rank]
        return plan, [build_micro_batch(samples, rows, self.layout.device, multiple) for rows in mine]


class _Consumer:
    """What the last stage does with a micro-batch's log-probs: the objective, and the samples' rows of the table."""

    def __init__(self, policy: Policy, targets: StepTargets, table: StepTable, version: int) -> None:
        self.policy = policy
        self.targets = targets
        self.table = table
        self.version = version

    def __call__(self, micro_batch: MicroBatch, logp: Tensor, entropy: Tensor) -> Tensor:
        objective = self.policy.objective
        rows = list(micro_batch.samples)
        tokens = TokenBatch(
            logp=logp,
            logp_prox=objective.proximal(logp, micro_batch.behavior_logprobs),
            logp_behavior=micro_batch.behavior_logprobs,
            advantages=_per_token(self.targets.advantages[rows] if rows else np.zeros(1), micro_batch),
            weights=_per_token(np.array([self.targets.samples[i].weight for i in rows] or [1.0]), micro_batch),
            mask=micro_batch.mask,
            sequence=micro_batch.sequence,
            sequences=max(len(rows), 1),
        )
        parts, token_loss = objective.loss(tokens, self.targets.denominators)
        if self.policy.layout.tp_rank == 0:
            self.table.record(micro_batch, tokens, entropy, parts, token_loss, self.version)
        return parts.sum()


def _per_token(values: NDArray[np.float64], micro_batch: MicroBatch) -> Tensor:
    """[B] per row -> [N] float32 per token."""
    rows = torch.from_numpy(values).to(device=micro_batch.sequence.device, dtype=torch.float32)
    return rows[micro_batch.sequence]
