"""The complete configuration, typed and frozen. Imports no torch.

Relative paths start at the folder of the configuration file (`load.py` resolves them), so a run
does not depend on the folder in which it was started.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_async_rl.config.controls import ControlConfig
from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import PolicyConfig
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.sampling import (
    EvalConfig,
    EvalSet,
    HeldOutFile,
    eval_sets,
    held_out_files,
)
from megatron_async_rl.config.settings_model import Strict
from megatron_async_rl.config.weights import WeightsConfig


class ReplayConfig(Strict):
    """Repetition of another run's steps on its recorded samples, without engines. `mar replay`
    writes this section."""

    run: Path
    """The run whose sample log has the batches."""
    first: PositiveInt
    """First step to repeat. The weights come from the checkpoint of the step before; step 1 starts
    from the model."""
    last: PositiveInt
    """Last step to repeat."""
    checkpoint: Path | None = None
    """Folder of the checkpoint to start from, `.../step_NNNNNNNN`; null for the model."""
    save: bool = False
    """Write a checkpoint of the last step."""
    explain: bool = False
    """Write which samples, tokens and parameters made the gradient of the last step."""

    @model_validator(mode="after")
    def _in_order(self) -> ReplayConfig:
        if self.first > self.last:
            raise ValueError(f"first: {self.first} is after last: {self.last}; exchange them")
        return self


class NumericsConfig(Strict):
    """Comparison of trainer and engines on canary prompts, without training. `mar verify CONFIG
    --numerics` writes this section."""

    prompts: PositiveInt = 4
    """Number of canary prompts, taken from the training data. Every second one is lengthened."""
    long_prompt: NonNegativeInt = 288
    """Length in tokens of the lengthened canary prompts, more than a block of the engines' prefix
    cache; 0 lengthens none."""


NUMERICS_VERSIONS = 2
"""Versions that a run with `run.numerics` publishes and compares: the model's weights, and the same
weights multiplied by a factor."""


class RunConfig(Strict):
    """Directory, length and seed of the run."""

    # Absolute, like every path: `load` has resolved it.
    dir: Path
    """Run directory, with metrics, logs, checkpoints and the report."""
    steps: PositiveInt
    """Number of batches in the whole run, resumes included. Each makes objective.minibatches x
    objective.epochs optimizer steps and one version of the weights."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the data order, sampling and initialisation; engines give it to numpy, which takes 32
    bits."""
    resume: Literal["auto", "never"] = "auto"
    """Treatment of a directory that contains a run: `auto` continues from its newest checkpoint;
    `never` refuses it."""
    replay: ReplayConfig | None = None
    """Null for a run of its own."""
    numerics: NumericsConfig | None = None
    """Null for a run that trains."""

    @model_validator(mode="after")
    def _one_purpose(self) -> RunConfig:
        if self.replay is not None and self.numerics is not None:
            raise ValueError("replay repeats steps and numerics trains none; remove one of the two")
        return self

    @property
    def last_step(self) -> int:
        """Step after which the run ends. `steps` counts for schedules in any case."""
        if self.numerics is not None:
            return NUMERICS_VERSIONS
        return self.steps if self.replay is None else self.replay.last


class ModelConfig(Strict):
    """The model to train. Ranks and engines start from the same directory."""

    # One directory for ranks and engines, so that both have the same weights at version 0.
    path: Path
    """A Hugging Face model directory: config.json, safetensors, tokenizer.json or
    tokenizer.model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the parameters and activations of policy and engines. Gradients and optimizer
    state are float32 unless policy.optimizer lowers their precision."""


class CheckpointConfig(Strict):
    """Checkpoints of the run."""

    every: NonNegativeInt = 100
    """Number of steps between checkpoints; 0 saves only at the end of the run and when it is
    stopped."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep. With 1, the previous checkpoint also stays until the
    next one is written, because no step has confirmed the newest weights yet."""
    asynchronous: bool = True
    """Write checkpoints while training continues. Each rank first copies its state, and needs host
    memory for the copy, which `mar plan` counts."""


class WatchdogConfig(Strict):
    """Time limits of waits."""

    timeout_s: PositiveFloat = 600.0
    """Longest time without progress anywhere in the run, and longest wait for one event (a batch, a
    weight load, a rank), in seconds. When it expires the run ends and reports which process waited
    for what. Starts, checkpoints and exports may take rollout.start_timeout_s."""


class ObserveConfig(Strict):
    """Outputs of the metrics in addition to RUN/metrics.jsonl."""

    tensorboard: bool = True
    """Write RUN/tensorboard in addition to RUN/metrics.jsonl."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on which rank 0 serves the newest metrics, at http://HOST:PORT/metrics. 0 selects a free
    port and logs it; null serves no metrics."""
    prometheus_host: str = "127.0.0.1"
    """Address to listen on, without a password. The default accepts connections from rank 0's
    machine only; 0.0.0.0 listens on all of its addresses."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that receive the same metrics. Each needs its own library, which is
    installed separately, and its own environment variables (`WANDB_MODE=offline`,
    `MLFLOW_TRACKING_URI`). A resumed run continues the same run of the tracker. The run does not
    wait for trackers. After three consecutive failures a tracker, like TensorBoard on a full disk,
    receives no more metrics."""
    project: str = "megatron_async_rl"
    """Project, or experiment, of the trackers; the run has the name of `run.dir` there."""
    beside: Path | None = None
    """Directory of another run. The report draws its reward, effective sample size and cosine next
    to those of this run, under the directory's name; null draws none."""

    @model_validator(mode="after")
    def _host_of_a_port(self) -> ObserveConfig:
        if "prometheus_host" in self.model_fields_set and self.prometheus_port is None:
            # A stored config contains all defaults and must load again, so accept the default.
            default = type(self).model_fields["prometheus_host"].default
            if self.prometheus_host != default:
                raise ValueError("prometheus_host has no effect without prometheus_port")
        return self

    @model_validator(mode="after")
    def _each_tracker_once(self) -> ObserveConfig:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers: each at most once, got {', '.join(self.trackers)}")
        return self


class SamplesConfig(Strict):
    """Log of finished samples, RUN/samples, which `mar samples` and the report show."""

    keep_mib: NonNegativeInt = 2048
    """Size limit of the compressed log, in MiB; the oldest samples are deleted first, except those
    that a replay from the oldest kept checkpoint needs. 0 disables the log."""
    segment_mib: PositiveInt = 64
    """Size at which a new file begins, in MiB; at most half of keep_mib."""
    experts: bool = False
    """Also log the experts that the engines chose (with policy.routing_replay: rollout). They are
    most of the log of a mixture-of-experts model; without them the steps of such a run cannot be
    recomputed from the log."""

    @model_validator(mode="after")
    def _at_least_two_segments(self) -> SamplesConfig:
        # The current segment is never deleted, so a second one must fit.
        if 0 < self.keep_mib < 2 * self.segment_mib:
            raise ValueError(
                f"segment_mib: {self.segment_mib} is more than half of keep_mib: {self.keep_mib},"
                " so no finished segment could be kept; set segment_mib to"
                f" {max(1, self.keep_mib // 2)} or less, or keep_mib to"
                f" {2 * self.segment_mib} or more"
            )
        return self


class Config(Strict):
    """Configuration of one run. With `objective.loss: sft` there are no engines, and `rollout` is
    absent."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    flow: FlowConfig
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig | None = None
    objective: ObjectiveConfig = ObjectiveConfig()
    controls: tuple[ControlConfig, ...] = ()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    observe: ObserveConfig = ObserveConfig()
    samples: SamplesConfig = SamplesConfig()

    @property
    def supervised(self) -> bool:
        # `sft` is the only method without engines; all others sample.
        return self.objective.loss.name == "sft"

    @property
    def colocated(self) -> bool:
        """True if engines and policy share devices in alternating phases."""
        return (
            self.has_engines and self.rollout is not None and self.rollout.placement == "colocated"
        )

    @property
    def has_engines(self) -> bool:
        """False for a supervised run and for a replay."""
        return self.rollout is not None and self.run.replay is None

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """Precision in which the engines load weights and compute."""
        lora = self.policy.lora
        return "float32" if lora is not None and lora.merge == "float32" else self.model.dtype

    @property
    def eval_sets(self) -> list[EvalSet]:
        """Held-out prompts that the run evaluates on."""
        training = None if self.rollout is None else self.rollout.sampling
        return [] if self.eval is None else eval_sets(self.data, training, self.eval)

    @property
    def held_out_files(self) -> list[HeldOutFile]:
        """Held-out rows that the run evaluates on, sampled or given."""
        return [] if self.eval is None else held_out_files(self.data, self.eval)

    @property
    def batch_versions(self) -> int:
        """Largest number of weight versions that sampled the tokens of one batch."""
        # Every version from the staleness bound to the current one.
        return math.ceil(self.flow.async_ratio) + 1

    @property
    def resolved_objective(self) -> ObjectiveConfig:
        """The objective with the number of past weight versions that the run keeps."""
        kept = self.objective.snapshots or self.batch_versions
        return self.objective.model_copy(update={"snapshots": kept})

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the whole run, skipped steps included."""
        return self.run.steps * self.objective.steps_per_batch

    @property
    def fresh_steps(self) -> int:
        """Number of batches at the start of the run that are synchronous with any
        flow.async_ratio, because controls calibrate on their optimizer steps."""
        # Controls count optimizer steps, and a batch makes several of them.
        steps = max((control.fresh_steps for control in self.controls), default=0)
        return math.ceil(steps / self.objective.steps_per_batch)
