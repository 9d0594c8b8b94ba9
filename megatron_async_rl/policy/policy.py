"""The policy: a model that learns from batches, scores samples, and can be saved and loaded.

Invariants:
- every rank is handed the same batch and returns the same metrics (times are the rank's own);
- a batch makes minibatches x epochs optimizer steps: log-probs of the batch once; then for each
  minibatch loss, gradient, controls, step;
- the loss and its gradient do not depend on the parallel layout, on the token budget or on the
  order of samples;
- weights that are not finite are neither published nor saved, and no checkpoint holds optimizer
  state that is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.controls import ControlConfig as ControlConfig
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.controls.decision import Control, build_controls
from megatron_async_rl.gradients import Gradients
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.objectives.targets import BatchTargets, StepTargets, valid_samples
from megatron_async_rl.policy import checkpoint
from megatron_async_rl.policy.adam_view import optimizer_parameters
from megatron_async_rl.policy.anomaly import AnomalyReport, NotFinite, Spike
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.batches import Minibatch, divide, over_steps, receive
from megatron_async_rl.policy.context_parallel import ContextParallelSlice
from megatron_async_rl.policy.device_memory import DeviceMemory
from megatron_async_rl.policy.finite import refuse_nonfinite_steps, require_finite
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.microbatch import Batcher, MicroBatch
from megatron_async_rl.policy.model import DTYPES, PolicyModel, build_model
from megatron_async_rl.policy.opob import ExactBaseline, exact_baseline
from megatron_async_rl.policy.optimizer import (
    build_optimizer,
    load_masters,
    wrap_for_gradients,
)
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameter_state import MOMENT_NAMES, adam_shards, optimizer_state
from megatron_async_rl.policy.past_versions import MasterSnapshot, Snapshots, weight_displacement
from megatron_async_rl.policy.reference_policies import (
    REFERENCE_DIGEST,
    Precompute,
    PrecomputeTable,
    ReferencePolicies,
    passes,
)
from megatron_async_rl.policy.routing_replay import RoutingReplay
from megatron_async_rl.policy.sequence_layout import sequence_layout
from megatron_async_rl.policy.step import (
    OptimizerStep,
    RecordedLoss,
    StepFacts,
    StepTable,
    step_metrics,
)
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Policy:
    """Built by `build`; every public method is collective over the world."""

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
    batcher: Batcher
    memory: DeviceMemory
    _nonfinite_ids: list[str] = field(default_factory=list, init=False)
    """Samples that the newest steps in a row that were not finite are traced to."""

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
    ) -> Policy:
        """Loads the model of `model_config.path` on this layout. `temperature`: the one the
        responses are sampled at.

        `total_steps`: optimizer steps of the whole run, for the learning-rate schedule. `seed`
        decides how adapters begin, and their dropout. Nothing else in the policy is random but how
        a batch is divided into minibatches, which its version decides.
        `anomalies`: the file that anomalous gradients are traced to.
        """
        model = build_model(model_config, policy_config, layout, objective_config.value, seed=seed)
        wrapped = wrap_for_gradients(model.chunks, policy_config)
        optimizer = build_optimizer(wrapped, policy_config, DTYPES[model_config.dtype])
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
            Snapshots(lambda: MasterSnapshot(optimizer), objective_config.snapshots)
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
            Batcher(
                layout,
                policy_config.tokens_per_micro_batch,
                sequence_layout(
                    policy_config.sequence,
                    policy_config.row_multiple,
                    ContextParallelSlice(layout.cp_rank, layout.cp_size),
                ),
            ),
            DeviceMemory(wrapped, optimizer, controls.values(), layout.device),
        )

    def receive(self, take: Callable[[], TrainBatch | None]) -> RankBatch | None:
        """Hands each rank its part of what rank 0 takes: see `batches.receive`."""
        return receive(
            take,
            self.layout,
            minibatches=self.objective.config.minibatches,
            whole_groups=self.baseline is not None,
        )

    def train_step(self, batch: RankBatch) -> dict[str, float]:
        """The optimizer steps on `batch`, which end in the next version of the weights. Keys are
        those of metrics/catalogue.py.

        A minibatch without a single trainable token makes no step. Raises SampleTooLong,
        SnapshotMissing, and Released while the policy makes room for engines.
        """
        self.memory.require()
        samples, settings = valid_samples(batch), self.objective.config
        if self.schedule.routing is not None:
            self.schedule.routing.check(samples.routed_experts)
        self.references.begin(batch.version)
        if not samples.loss_mask.any():
            return over_steps([self.step.skip() for _ in range(settings.steps_per_batch)])
        started, updates = time.perf_counter(), self.step.updates
        minibatches = [
            Minibatch(rows, *self.batcher.of(samples.select(rows)))
            for rows in divide(samples.group, batch.version, settings.minibatches)
        ]
        targets = self.objective.prepare(samples, self._precompute(samples, minibatches))
        precomputed = time.perf_counter()
        steps = []
        for minibatch in minibatches * settings.epochs:
            steps.append(
                self._optimizer_step(
                    minibatch,
                    targets.select(minibatch.rows),
                    lag_max=_largest_lag(samples),
                    moved=self.step.updates > updates,
                )
            )
            if self.step.nonfinite_in_a_row >= self.config.max_nonfinite_steps:
                break
        # Before they are published: an engine that samples from them fails in other ways.
        if self.step.updates > updates:
            masters = optimizer_parameters(self.optimizer)
            require_finite({"weights": masters}, self.step.steps, self.layout)
        # Whatever reads weights between two batches (engines, checkpoints, copies) finds them
        # whole.
        self.schedule.gather_weights()
        metrics = {**over_steps(steps), **targets.metrics}
        metrics["time/precompute_s"] += precomputed - started
        if self.schedule.routing is not None:
            self.schedule.routing.forget()
            metrics |= self._rerouted(self.schedule.routing)
        return metrics

    @property
    def untried(self) -> bool:
        """True while the newest steps were not finite: the weights may be at fault, so a checkpoint
        of them must not take the place of an older one."""
        return self.step.nonfinite_in_a_row > 0

    def require_finite_steps(self, *, ended: bool = False) -> None:
        """Raise NonFiniteError after `max_nonfinite_steps` optimizer steps in a row that were not
        finite; ended: also where the run has not made a single other step."""
        refuse_nonfinite_steps(
            self.step, self.config.max_nonfinite_steps, self._nonfinite_ids, ended=ended
        )

    def _rerouted(self, routing: RoutingReplay) -> dict[str, float]:
        """`policy/rerouted`: share of the choices replayed since the last call that routers would
        not have made; absent where none was replayed. Collective."""
        counts = routing.take_counts()
        dist.all_reduce(counts, group=self.layout.world_group)
        other, replayed = counts.tolist()
        return {"policy/rerouted": float(other / replayed)} if replayed else {}

    def _optimizer_step(
        self, minibatch: Minibatch, batch: BatchTargets, *, lag_max: int, moved: bool
    ) -> dict[str, float]:
        """moved: the weights are no longer those that the batch began with."""
        samples, plan, mine = batch.samples, minibatch.plan, minibatch.own
        if not samples.loss_mask.any():
            return {"time/precompute_s": 0.0, **self.step.skip()}
        started = time.perf_counter()
        past = self.references.past_masters
        displaced = (
            weight_displacement(samples, past, self.optimizer, moved=moved)
            if past is not None
            else None
        )
        targets = self.objective.decide(batch, self._again(samples, mine) if moved else None)
        precomputed = time.perf_counter()
        table = StepTable(len(samples), self.layout.device)
        # Without the distributed optimizer a parameter's grad is its gradient buffer: left in
        # place, the next backward would add to the buffer twice.
        self.optimizer.zero_grad()
        if self.baseline is None:
            self.schedule.forward_backward(mine, self._loss(targets, table))
            chosen: dict[str, float] = {}
        else:
            chosen, targets = self._with_measured_baseline(self.baseline, targets, mine, table)
        dist.all_reduce(table.values, group=self.layout.world_group)
        reduced = time.perf_counter()
        measured = step_metrics(table.values.cpu().numpy(), samples)
        if moved:
            # Engine and trainer no longer have the same weights: this would not be rounding.
            measured.pop("ratio/logp_diff_lag0_max", None)
        facts = StepFacts(
            loss=measured["policy/loss"],
            log_weights=table.log_weights(samples),
            lag_max=lag_max,
            moved=moved,
            kl=measured.get("ratio/kl_k2", 0.0),
        )

        def report(found: Spike | NotFinite, gradients: Gradients) -> None:
            scratch = StepTable(len(samples), self.layout.device)
            ids = self.anomalies.write(
                found,
                gradients,
                step=samples.version + 1,
                samples=samples,
                rows=plan.ranks[self.layout.dp_rank],
                build=lambda rows: self.batcher.build(samples, rows),
                consume=self._loss(targets, scratch),
                losses=table.losses,
            )
            if isinstance(found, NotFinite):
                self._nonfinite_ids += ids

        taken = self.step.take(facts, displaced, report)
        if not self.step.nonfinite_in_a_row:
            self._nonfinite_ids.clear()
        if not taken["policy/skipped"]:
            self.schedule.weights_moved()
            if self.references.follows:
                self.schedule.gather_weights()
            self.references.stepped(self.step.updates)
        return {
            **measured,
            **targets.metrics,
            **chosen,
            **taken,
            "policy/micro_batches": float(plan.micro_batches),
            "policy/padding_share": plan.padding_share,
            "time/precompute_s": precomputed - started,
            "time/forward_backward_s": reduced - precomputed,
            "time/optimizer_s": time.perf_counter() - reduced,
        }

    def score(self, samples: RankBatch) -> list[NDArray[np.float32]]:
        """Log-probs (nats, after temperature) of each sample's response tokens under the current
        weights, on every rank."""
        if not len(samples):
            return []
        if self.schedule.routing is not None:
            self.schedule.routing.check(samples.routed_experts)
        table = PrecomputeTable(samples, ["logp"], self.layout)
        table.run(self.schedule, self.batcher.of(samples)[1], [Precompute("logp", "logp")])
        return np.split(table.finish()["logp"].numpy(), samples.starts[1:-1])

    def mean_loss(self, take: Callable[[], TrainBatch | None]) -> tuple[float, int]:
        """The loss `sft` of the samples in all batches that `take` gives on rank 0, up to its None,
        under the current weights: the sum of -log p over the tokens that are trained on, each by
        its sample's weight, over their number, and that number. Nothing is trained. Collective."""
        total, tokens = 0.0, 0
        while (samples := receive(take, self.layout)) is not None:
            trained = samples.loss_mask.astype(bool)
            logp = np.concatenate(self.score(samples)).astype(np.float64)
            total -= float((samples.weights[samples.rows] * logp)[trained].sum())
            tokens += int(trained.sum())
        return total / max(tokens, 1), tokens

    def _precompute(
        self, samples: RankBatch, minibatches: Sequence[Minibatch]
    ) -> dict[str, Tensor]:
        """The columns the objective needs, over the tokens of `samples`. Collective. Raises
        SnapshotMissing.

        A pass over all samples runs the micro-batches that training runs, so that at a batch's
        first step pi and a recomputed pi_prox are the same numbers."""
        table = PrecomputeTable(samples, sorted(self.objective.needs), self.layout)
        planned = passes(
            table.columns,
            samples,
            self.references,
            record=self.config.routing_replay == "proximal",
        )
        with self.references.trained_restored(
            after=any(each.weights is not None for each in planned)
        ):
            for each in planned:
                if each.weights is not None:
                    each.weights.place()
                if each.rows is not None:
                    own = self.batcher.of(samples.select(each.rows))[1]
                    table.run(self.schedule, own, each.fills, each.rows, each.routing)
                    continue
                for minibatch in minibatches:
                    table.run(
                        self.schedule, minibatch.own, each.fills, minibatch.rows, each.routing
                    )
        return table.finish()

    def _again(self, samples: RankBatch, mine: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """The columns that an optimizer step needs under its own weights. Collective."""
        table = PrecomputeTable(samples, sorted(self.objective.needs_again), self.layout)
        if table.columns:
            table.run(self.schedule, mine, [Precompute(name, name) for name in table.columns])
        return table.finish()

    def _loss(
        self,
        targets: StepTargets,
        table: StepTable,
        *,
        advantage: float | None = None,
        with_terms: bool = True,
    ) -> RecordedLoss:
        return RecordedLoss(
            self.objective,
            targets,
            table if self.layout.records_outputs else None,
            owner=self.layout.dp_rank,
            advantage=advantage,
            with_terms=with_terms,
        )

    def _with_measured_baseline(
        self,
        baseline: ExactBaseline,
        targets: StepTargets,
        mine: Sequence[MicroBatch],
        table: StepTable,
    ) -> tuple[dict[str, float], StepTargets]:
        """Gradients and table of a step whose advantages are known only after the backward passes;
        returns metrics, and the targets with those advantages. Collective."""
        alone = self._loss(targets, table, advantage=1.0, with_terms=False)
        measured = baseline.accumulate(
            targets, lambda rows: self.batcher.build(targets.samples, rows), alone
        )
        table.weigh(measured.advantages)
        if self.objective.adds_terms:
            # What is added to the loss knows no advantage: at advantage 0 it is all there is.
            terms = StepTable(len(targets.samples), self.layout.device)
            self.schedule.accumulate(mine, self._loss(targets, terms, advantage=0.0))
            table.add_terms(terms)
        self.schedule.reduce()
        whole = targets.whole
        weighed = whole.replace(advantages=whole.per_token(measured.advantages))
        return measured.metrics(whole), replace(targets, whole=weighed)

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
        """Saves weights, optimizer, schedule, controls and the run's own `state` and `files` (rank
        0's) as a checkpoint of `version`.

        Keeps the newest `keep` checkpoints of `directory`, null all, and that of the version
        `proven`, from whose weights a finite step was made; returns the new one.
        `background` and what else is raised: see `checkpoint.save`. Raises NonFiniteError, and
        writes nothing, where weights or moments are not finite.
        """
        state_of_adam = {name: adam_shards(self.optimizer, name) for name in MOMENT_NAMES}
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
                **{
                    _of_control(name, kind): optimizer_state(self.optimizer, shards)
                    for name, control in self.controls.items()
                    for kind, shards in control.shard_state().items()
                },
            },
            entries={REFERENCE_DIGEST: self.references.fixed_digest()},
            layout=self.layout,
            keep=keep,
            proven=proven,
            files=files,
            background=background,
        )

    def load(self, directory: Path) -> dict[str, Any] | None:
        """Restores the newest checkpoint and returns the run's own state; None if there is none.

        On another parallel layout than it was saved on, too. A control that it does not have starts
        afresh, with a warning.
        """
        loaded = checkpoint.load(
            directory, model=self.model, optimizer=self.optimizer, layout=self.layout
        )
        if loaded is None:
            return None
        self.step.load_state_dict(loaded.state["step"])
        self.references.load(loaded, warn=self.layout.rank == 0)
        numbers = loaded.state.get("controls", {})
        for name, control in self.controls.items():
            if name in numbers:
                control.load_state_dict(numbers[name])
                kinds = {
                    held.removeprefix(_of_control(name, "")): _zeros_like(self.optimizer)
                    for held in sorted(loaded.names)
                    if held.startswith(_of_control(name, ""))
                }
                loaded.read(
                    {
                        _of_control(name, kind): optimizer_state(self.optimizer, shards)
                        for kind, shards in kinds.items()
                    }
                )
                control.load_shard_state(kinds)
            elif self.layout.rank == 0:
                log.warning(
                    "the checkpoint in %s has no state of control %s: it starts afresh",
                    directory,
                    name,
                )
        run: dict[str, Any] = loaded.state["run"]
        return run


def _zeros_like(optimizer: MegatronOptimizer) -> list[Tensor]:
    """float32, on the CPU."""
    return [torch.zeros(p.shape, dtype=torch.float32) for p in optimizer_parameters(optimizer)]


def _of_control(name: str, kind: str) -> str:
    """The name in a checkpoint of this shard state of a control."""
    return f"control.{name}.{kind}"


def _largest_lag(samples: RankBatch) -> int:
    """Largest lag of a token that is trained on; what an environment wrote was not sampled."""
    lags = samples.version - samples.versions[samples.loss_mask > 0]
    return int(lags.max(initial=0))
