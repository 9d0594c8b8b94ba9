"""The policy: a model that learns from batches, scores samples, and can be saved and loaded.

Invariants:
- every rank gets the same batch and returns the same metrics (times are the rank's own);
- a batch makes minibatches x epochs optimizer steps: log-probs of the batch once; then for each
  minibatch loss, gradient, controls, step;
- the loss and its gradient do not depend on the parallel layout, on the token budget, on the
  order of samples or on the parts in which a batch arrives (streamed_step.py);
- weights that are not finite are neither published nor saved, and no checkpoint contains optimizer
  state that is not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from numpy.typing import NDArray

from megatron_async_rl.config.controls import ControlConfig
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.controls.decision import Control, build_controls
from megatron_async_rl.metrics.over_steps import over_steps
from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.objective import Objective, valid_samples
from megatron_async_rl.policy import checkpoint
from megatron_async_rl.policy.adam_view import (
    MOMENT_NAMES,
    adam_shards,
    optimizer_parameters,
)
from megatron_async_rl.policy.anomaly import AnomalyReport, refuse_nonfinite_steps, require_finite
from megatron_async_rl.policy.attention import ContextParallelSlice
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.batch_shares import divide, receive
from megatron_async_rl.policy.batching import Batcher, Minibatch
from megatron_async_rl.policy.control_state import control_slices, load_controls
from megatron_async_rl.policy.device_memory import DeviceMemory
from megatron_async_rl.policy.explanation import GradientExplanation
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.gradient_coverage import CoverageReport, GradientCoverage
from megatron_async_rl.policy.lag0 import Lag0Differences, Lag0Table
from megatron_async_rl.policy.model import DTYPES, PolicyModel, build_model
from megatron_async_rl.policy.opob import ExactBaseline, exact_baseline
from megatron_async_rl.policy.optimizer import (
    build_optimizer,
    load_masters,
    wrap_for_gradients,
)
from megatron_async_rl.policy.packing import row_divisor, sequence_layout
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.past_weights import MasterSnapshot, Snapshots, weight_displacement
from megatron_async_rl.policy.references import (
    REFERENCE_DIGEST,
    ReferencePolicies,
    current_columns,
    precompute,
)
from megatron_async_rl.policy.routing_replay import RoutingReplay
from megatron_async_rl.policy.step import (
    OptimizerStep,
    RecordedLoss,
    StepFacts,
    StepTable,
    sample_log_weights,
    sample_losses,
    step_metrics,
)
from megatron_async_rl.policy.streamed_step import StreamedStep
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch


@dataclass(eq=False)
class Policy:
    """A model in training, made by `build`. Every public method is collective over the world."""

    config: PolicyConfig
    layout: Layout
    model: PolicyModel
    schedule: Schedule
    optimizer: MegatronOptimizer
    objective: Objective
    references: ReferencePolicies
    controls: Mapping[str, Control]
    step: OptimizerStep
    baseline: ExactBaseline | None
    anomalies: AnomalyReport
    coverage: CoverageReport
    explanation: GradientExplanation | None
    batcher: Batcher
    streamed: StreamedStep
    memory: DeviceMemory
    lag0: Lag0Differences | None = None
    """Differences from the engines' log-probs in the last step; null without tokens at lag 0."""

    @classmethod
    def build(
        cls,
        model_config: ModelConfig,
        policy_config: PolicyConfig,
        objective_config: ObjectiveConfig,
        controls_config: Sequence[ControlConfig],
        *,
        layout: Layout,
        temperature: float,
        total_steps: int,
        seed: int = 0,
        anomalies: Path | None = None,
        explained: tuple[int, Path] | None = None,
    ) -> Policy:
        """Load the model of `model_config.path` on this layout. `temperature`: that of sampling.

        `total_steps`: optimizer steps of the whole run, for the learning-rate schedule. `seed`
        determines the initial adapters and their dropout. Nothing else in the policy is random,
        except the division of a batch into minibatches, which its version determines.
        `anomalies`: file for the causes of anomalous gradients; parameters without a gradient are
        written next to it. `explained`: step whose gradient is explained, and the file for it.
        """
        model = build_model(model_config, policy_config, layout, objective_config.value, seed=seed)
        # In this order: DDP allocates the buffers, the optimizer's shards are views of them, and
        # masters are then read from the files.
        wrapped = wrap_for_gradients(model.chunks, policy_config)
        optimizer = build_optimizer(wrapped, policy_config, DTYPES[model_config.dtype])
        # Before any copy, because references and snapshots copy the masters of FP8 models.
        load_masters(optimizer, model, model_config.path)
        controls = build_controls(controls_config)
        schedule = Schedule(
            wrapped,
            model,
            layout,
            temperature=temperature,
            logprob_chunk_tokens=policy_config.logprob_chunk_tokens,
            routing=(
                RoutingReplay(model.chunks, model.config, layout)
                if policy_config.routing_replay != "none"
                else None
            ),
        )
        step = OptimizerStep(
            optimizer,
            policy_config.optimizer,
            controls,
            layout,
            total_steps,
            on_anomaly=policy_config.on_anomaly,
        )
        objective = Objective(objective_config)
        past_masters = (
            Snapshots(lambda: MasterSnapshot(optimizer), objective_config.past_versions)
            # Float32 copies of all weights, made only for a control that reads them.
            if any(config.needs_past_weights for config in controls_config)
            else None
        )
        references = ReferencePolicies(
            objective_config,
            objective.needs,
            model,
            past_masters=past_masters,
            optimizer=optimizer if model.config.fp8_param else None,
        )
        baseline = exact_baseline(objective_config, schedule, layout)
        explanation = (
            None
            if explained is None
            else GradientExplanation(
                schedule, model, optimizer, layout, step=explained[0], file=explained[1]
            )
        )
        batcher = Batcher(
            layout,
            policy_config.tokens_per_micro_batch,
            sequence_layout(
                policy_config.sequence,
                row_divisor(policy_config, dtype=model_config.dtype, device=layout.device_type),
                ContextParallelSlice(layout.cp_rank, layout.cp_size),
            ),
        )
        return cls(
            policy_config,
            layout,
            model,
            schedule,
            optimizer,
            objective,
            references,
            controls,
            step,
            baseline,
            AnomalyReport(schedule, model, optimizer, layout, anomalies),
            CoverageReport(GradientCoverage(model, layout), layout, anomalies and anomalies.parent),
            explanation,
            batcher,
            StreamedStep(schedule, optimizer, objective, references, batcher, layout),
            DeviceMemory(wrapped, optimizer, controls.values(), layout.device),
        )

    def receive(self, take: Callable[[], TrainBatch | None]) -> RankBatch | None:
        """Return this rank's part of the batch that rank 0 takes; see `batch_shares.receive`."""
        return receive(
            take,
            self.layout,
            minibatches=self.objective.config.minibatches,
            whole_groups=self.baseline is not None,
            sharing=self.config.min_sharing,
        )

    def accumulate(self, part: RankBatch) -> None:
        """Add the gradient of a part of the next batch, which is not complete yet; `train_step` on
        the batch completes the step. Nothing else changes. Raises SampleTooLong."""
        self.memory.require()
        if self.schedule.routing is not None:
            self.schedule.routing.check(part.routed_experts)
        self.references.begin(part.version)
        self.streamed.add(part)

    def train_step(self, batch: RankBatch) -> dict[str, float]:
        """Make the optimizer steps on `batch`, which end in the next version of the weights. Keys
        of the result are those of metrics/catalogue.py.

        Parts of the batch that `accumulate` has not added are added first. A minibatch without a
        trainable token makes no step. Raises SampleTooLong, SnapshotMissing, ReadsOtherGroups, and
        StateReleased while the training state is released for engines.
        """
        self.memory.require()
        # Before any return: the differences of the last batch are not those of this one.
        self.lag0 = None
        samples, settings = valid_samples(batch), self.objective.config
        routing = self.schedule.routing
        if routing is not None:
            routing.check(samples.routed_experts)
        # Before the first step, because these weights are those of `batch.version`.
        self.references.begin(batch.version)
        if not samples.loss_mask.any():
            self.streamed.discard()
            if routing is not None:
                # Passes of parts that were added have counted choices.
                routing.end_batch()
            return over_steps([self.step.skip() for _ in range(settings.steps_per_batch)])

        started, updates = time.perf_counter(), self.step.updates
        # A batch of one part is the ordinary case, whose denominators are known from the start.
        if in_parts := bool(batch.part.any()):
            self.streamed.add_missing(batch)
            started = time.perf_counter()
            minibatches = [self.streamed.minibatch(samples)]
            columns = self.streamed.columns(samples)
        else:
            # Divided once for all epochs, so that every pass runs the same micro-batches.
            minibatches = [
                self.batcher.of(samples, rows)
                for rows in divide(samples.group, batch.version, settings.minibatches)
            ]
            columns = precompute(
                sorted(self.objective.needs),
                samples,
                minibatches,
                self.references,
                self.schedule,
                self.batcher,
                record=self.config.routing_replay == "proximal",
            )
        whole = self.objective.prepare(samples, columns)
        precomputed = time.perf_counter()

        steps = []
        for minibatch in minibatches * settings.epochs:
            # Advantages depend on the whole batch; decisions and denominators on the minibatch.
            prepared = whole.select(torch.from_numpy(minibatch.rows))
            moved = self.step.updates > updates
            steps.append(
                self._optimizer_step(
                    minibatch, prepared, samples.lag_max, moved=moved, in_parts=in_parts
                )
            )
            if self.step.nonfinite_in_a_row >= self.config.max_nonfinite_steps:
                break

        # Before they are published, because an engine that samples from them fails in other ways.
        if self.step.updates > updates:
            masters = optimizer_parameters(self.optimizer)
            require_finite({"weights": masters}, self.step.steps, self.layout)
        # Readers of weights between two batches (engines, checkpoints, copies) need whole weights.
        self.schedule.gather_weights()
        metrics = {**over_steps(steps), **self.objective.metrics(whole, columns)}
        metrics["time/precompute_s"] += precomputed - started
        if in_parts:
            metrics["time/precompute_s"] += self.streamed.precompute_s
            metrics["time/forward_backward_s"] += self.streamed.forward_backward_s
            self.streamed.discard()
        return metrics if routing is None else metrics | routing.end_batch()

    def _optimizer_step(
        self,
        minibatch: Minibatch,
        prepared: TokenBatch,
        lag_max: int,
        *,
        moved: bool,
        in_parts: bool,
    ) -> dict[str, float]:
        """Make one optimizer step. moved: True if the weights differ from those with which the
        batch began. in_parts: True if `streamed` has the sums of the minibatch's parts."""
        samples, mine = minibatch.samples, minibatch.micro_batches
        rows = minibatch.plan.ranks[self.layout.dp_rank]
        if not samples.loss_mask.any():
            return {"time/precompute_s": 0.0, **self.step.skip()}
        started = time.perf_counter()
        past = self.references.past_masters
        displaced = (
            None
            if past is None
            else weight_displacement(samples, past, self.optimizer, moved=moved)
        )
        again = sorted(self.objective.needs_again) if moved else ()
        current = current_columns(again, minibatch, self.schedule)
        targets = self.objective.decide(samples, prepared, current)
        precomputed = time.perf_counter()

        # Without the distributed optimizer a parameter's grad is its gradient buffer. If it stayed,
        # the next backward pass would add to the buffer twice.
        self.optimizer.zero_grad()
        owner, chosen = self.layout.dp_rank, dict[str, float]()
        if in_parts:
            table: StepTable = self.streamed.finish(targets)
        elif self.baseline is None:
            table = Lag0Table(samples, self.layout.device)
            recorded = table if self.layout.records_outputs else None
            loss = RecordedLoss(self.objective, targets, recorded, owner=owner)
            self.schedule.forward_backward(mine, loss)
        else:
            table, targets, chosen = self.baseline.forward_backward(
                self.objective, targets, minibatch, self.batcher
            )
        # The step's only copy to the host before the optimizer.
        measurements = table.complete(self.layout.world_group)
        reduced = time.perf_counter()

        measured = step_metrics(measurements, samples)
        if moved:
            # Engine and trainer hold different weights here, so this would not be rounding.
            measured.pop("ratio/logp_diff_lag0_max", None)
        elif isinstance(table, Lag0Table):
            self.lag0 = table.differences()
        facts = StepFacts(
            loss=measured["policy/loss"],
            log_weights=sample_log_weights(measurements, samples),
            lag_max=lag_max,
            moved=moved,
            kl=measured.get("ratio/kl_k2", 0.0),
        )
        parts: dict[str, Any] = {
            "samples": samples,
            "build": partial(self.batcher.build, samples),
            "consume": RecordedLoss(self.objective, targets, None, owner=owner),
        }
        trace = partial(
            self.anomalies.write,
            step=samples.version + 1,
            rows=rows,
            losses=sample_losses(measurements),
            **parts,
        )
        # Before controls and optimizer change the gradients.
        self.coverage.add()
        if self.explanation is not None and self.explanation.step == samples.version + 1:
            # Before the controls, which change the gradient.
            self.explanation.write(
                micro_batches=mine or [self.batcher.build(samples, each) for each in rows],
                advantages=targets.whole.advantages.numpy(),
                loss=facts.loss,
                **parts,
            )
        taken = self.step.take(facts, displaced, trace)
        self.coverage.stepped(taken["policy/grad_norm"], samples.version + 1)
        if not taken["policy/skipped"]:
            self.schedule.weights_moved()
            if self.references.follows:
                # The next lines read whole weights, which `overlap_param_gather` leaves in parts.
                self.schedule.gather_weights()
            self.references.stepped(self.step.updates)
        return {
            **measured,
            **targets.metrics,
            **chosen,
            **taken,
            "policy/micro_batches": float(len(rows)),
            "policy/computed_tokens": float(minibatch.plan.computed),
            "policy/padding_share": minibatch.plan.padding_share,
            "policy/shared_share": minibatch.plan.shared_share,
            "time/precompute_s": precomputed - started,
            "time/forward_backward_s": reduced - precomputed,
            "time/optimizer_s": time.perf_counter() - reduced,
        }

    @property
    def untried(self) -> bool:
        """True while the newest steps were not finite: the weights may be at fault, so a checkpoint
        of them must not replace an older one."""
        return self.step.nonfinite_in_a_row > 0

    def require_finite_steps(self, *, ended: bool = False) -> None:
        """Raise NonFiniteError after `max_nonfinite_steps` optimizer steps in a row that were not
        finite. ended: also raise if the run has made no other step."""
        refuse_nonfinite_steps(self.step, self.config.max_nonfinite_steps, ended=ended)

    def score(self, samples: RankBatch) -> list[NDArray[np.float32]]:
        """Return log-probs (nats, after temperature) of each sample's response tokens under the
        current weights, on every rank."""
        if not len(samples):
            return []
        if self.schedule.routing is not None:
            self.schedule.routing.check(samples.routed_experts)
        columns = current_columns(["logp"], self.batcher.of(samples), self.schedule)
        return np.split(columns["logp"].numpy(), samples.starts[1:-1])

    def mean_loss(self, take: Callable[[], TrainBatch | None]) -> tuple[float, int]:
        """Return the loss `sft` under the current weights of the samples in all batches that `take`
        returns on rank 0 until None, and the number of trained tokens in this mean. A token's -log
        p has its sample's weight. Nothing is trained. Collective."""
        total, tokens = 0.0, 0
        while (samples := receive(take, self.layout)) is not None:
            trained = samples.loss_mask.astype(bool)
            logp = np.concatenate(self.score(samples)).astype(np.float64)
            total -= float((samples.weights[samples.rows] * logp)[trained].sum())
            tokens += int(trained.sum())
        return total / max(tokens, 1), tokens

    def save(
        self,
        directory: Path,
        version: int,
        state: Mapping[str, Any],
        *,
        keep: int | None,
        proven: int | None = None,
        files: Mapping[str, bytes] | None = None,
        background: Background | None = None,
    ) -> Path:
        """Save weights, optimizer, schedule, controls and the run's own `state` and `files` (rank
        0's) as a checkpoint of `version`.

        Keeps the newest `keep` checkpoints of `directory` (null: all), and that of the version
        `proven`, with whose weights a finite step was made; returns the new one. `background` and
        other errors: see `checkpoint.save`. Raises NonFiniteError, and writes nothing, if weights
        or moments are not finite.
        """
        # Views, so nothing is copied before the check.
        state_of_adam = {name: adam_shards(self.optimizer, name) for name in MOMENT_NAMES}
        # Before anything is written, because a checkpoint with NaN could not be resumed.
        held = {"weights": optimizer_parameters(self.optimizer), **state_of_adam}
        require_finite(held, self.step.steps, self.layout)
        return checkpoint.save(
            directory,
            version,
            model=self.model,
            optimizer=self.optimizer,
            state={
                "run": dict(state),
                "step": self.step.state_dict(),
                "controls": {name: control.state_dict() for name, control in self.controls.items()},
            },
            parameter_state={
                **self.references.parameter_state(),
                **control_slices(self.controls, self.optimizer),
            },
            entries={REFERENCE_DIGEST: self.references.fixed_digest()},
            layout=self.layout,
            keep=keep,
            proven=proven,
            files=files,
            background=background,
        )

    def load(self, directory: Path) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return the run's own state; None if there is none.

        Works with another parallel layout than that of the save, too. A control without state in
        the checkpoint starts afresh, with a warning.
        """
        loaded = checkpoint.load(
            directory, model=self.model, optimizer=self.optimizer, layout=self.layout
        )
        if loaded is None:
            return None
        self.step.load_state_dict(loaded.state["step"])
        # After the model, because a missing average starts from the loaded weights.
        self.references.load(loaded, warn=self.layout.rank == 0)
        load_controls(loaded, self.controls, self.optimizer, directory, warn=self.layout.rank == 0)
        run: dict[str, Any] = loaded.state["run"]
        return run
