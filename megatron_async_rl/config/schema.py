"""The whole configuration: what a user may say, typed and frozen. Imports no torch.

Relative paths are taken from the folder of the configuration file (`load.py` resolves them), so a
run does not depend on where it was started.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megatron_async_rl.config.controls import ControlConfig
from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.engine_options import refused_options
from megatron_async_rl.config.environment import OWN_REWARD, EnvironmentConfig
from megatron_async_rl.config.flow import OldestFirst, Selection
from megatron_async_rl.config.fp8 import Fp8Config, row_multiple
from megatron_async_rl.config.lora import LoraConfig
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.sampling import (
    EvalConfig,
    EvalSet,
    HeldOutFile,
    SamplingConfig,
    eval_sets,
    held_out_files,
)
from megatron_async_rl.config.settings_model import OnlyJson, Strict
from megatron_async_rl.config.weights import Fraction, WeightsConfig


class RunConfig(Strict):
    """Directory, length and seed of the run."""

    dir: Path
    """Run directory, which holds metrics, logs, checkpoints and the report."""
    steps: PositiveInt
    """Batches in the whole run, resumes included; each makes objective.minibatches x
    objective.epochs optimizer steps and one version of the weights."""
    seed: NonNegativeInt = 1234
    """Seed of the data order, sampling and initialisation."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the newest checkpoint in `dir`; `never` refuses a directory that
    already holds a run."""


class ModelConfig(Strict):
    """The model to train. The engines start from the same directory."""

    path: Path
    """A Hugging Face model directory: config.json, safetensors, tokenizer.json or
    tokenizer.model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the parameters and activations of policy and engines. Gradients and optimizer
    state are float32 unless policy.optimizer lowers their precision."""


class ParallelConfig(Strict):
    """Parallel layout of the policy. Data parallelism uses the remaining ranks."""

    ranks: PositiveInt = 1
    """Number of trainer processes: tensor x context x pipeline x data."""
    tensor: PositiveInt = 1
    """Ranks that share every layer; divides heads, key-value heads and MLP columns."""
    pipeline: PositiveInt = 1
    """Pipeline stages; divides the number of layers."""
    context: PositiveInt = 1
    """Ranks that share every sequence: each holds 1/context of its tokens, and attends to the keys
    and values of all. For long sequences; lengths are rounded up to a multiple of 2 x context."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks of each pipeline rank, which take turns (Megatron's interleaved schedule): less
    idle time, more messages. Needs pipeline > 1; pipeline x virtual_pipeline divides the number of
    layers."""
    expert: PositiveInt = 1
    """Ranks of a stage that share the experts of a mixture-of-experts model; divides ranks /
    pipeline and the number of experts. Experts are whole, not cut by tensor parallelism (no expert
    tensor parallelism); a mixture under tensor parallelism needs sequence and expert > 1."""
    sequence: bool = False
    """Megatron's sequence parallelism (needs tensor > 1)."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data- and context-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data- and context-parallel ranks bucket by bucket during the last
    micro-batch's backward pass, instead of after it. Useful with fast networks. The last stage
    also holds a float32 gradient of the output layer's weight and its copy in BF16."""
    overlap_param_gather: bool = False
    """Gather the weights that each rank has updated during the next optimizer step's forward pass,
    bucket by bucket, and not after each step. For batches that make several steps
    (objective.minibatches x objective.epochs): after a batch's last one they are gathered at once,
    since they are published. Needs distributed_optimizer and overlap_grad_reduce, whose buckets
    these are."""

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold and run one copy of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Data-parallel size: copies of the model."""
        return self.ranks // self.replica_ranks


class OptimizerConfig(Strict):
    """AdamW as Megatron-Core runs it: Transformer Engine's or Apex's fused one where they are
    installed, else torch's; with `moment_dtype: bfloat16` or `moment_offload: cpu` this project's
    own."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Term added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest global gradient norm; null disables clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of lr to min_lr by the run's last optimizer step; `constant` does not decay."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear increase from 0; a batch makes objective.minibatches x
    objective.epochs optimizer steps."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of the `linear` and `cosine` schedules."""
    log_update_norm: bool = False
    """Log `update/norm` and `staleness/drift`, at the cost of one more pass over Adam's state."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are summed over micro-batches and ranks. `bfloat16`, for a
    bfloat16 model, halves the buffer and the traffic, and rounds each addition. Controls,
    clipping and Adam read a float32 copy of the rank's own shard in both cases, which takes 2 +
    4 / sharding bytes per parameter instead of 4."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which Adam's moments are stored; Adam computes in float32. `bfloat16`: 4
    bytes per parameter instead of 8. Each step rounds, so a moment may be off by 2^-8 / (1 -
    beta) of its recent size at worst (8 % at 0.95), and betas above 0.996 are refused: what
    decays by less in a step would round back to where it was."""
    moment_offload: Literal["none", "cpu"] = "none"
    """Memory of the moments. `cpu` keeps them in page-locked host memory and moves them to the
    device and back block by block during the step. Results differ from those of a fused Adam by
    rounding. It has no effect on a CPU."""


class PolicyConfig(Strict):
    """The trained model and its training."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Null trains every weight; with adapters nothing else is trained but a value head."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of policy and engines; `auto` selects CUDA if there is a GPU."""
    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    """Kernels of the policy's layers. `local`: Megatron's own layers on torch's kernels.
    `transformer_engine`: NVIDIA's, on CUDA in bfloat16 without adapters, with fused norms, gates
    and rotations and with grouped experts. `auto`: those where they can be had. Weights, files
    and checkpoints are the same; numbers differ by rounding."""
    fp8: Fp8Config | None = None
    """Null computes products in model.dtype."""
    sequence: Literal["padded", "packed"] = "padded"
    """Layout of the samples in a micro-batch. `padded`: one sample per row, padded to the
    longest. `packed`: all samples in one row, end to end, without padding and without attention
    between samples. Results agree up to rounding."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Budget of prompt + response tokens, padding included, of one micro-batch, which the ranks of
    parallel.context share."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens whose vocabulary logits exist at a time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of storing, as in Megatron: those of
    attention between its projections (`selective`), or those of each layer (`full`, one more
    forward pass). Gradients do not change."""
    routing_replay: Literal["none", "proximal", "rollout"] = "none"
    """The experts that a mixture's tokens go to in passes of the policy. `none`: those that each
    pass chooses. `rollout` (R3, arXiv 2510.11370): those that the engine chose as it sampled, which
    come with the samples, layers x experts per token bytes for each token (two each above 256
    experts). `proximal` (R2, arXiv 2507.18071): those of the pass that scores the batch under the
    weights it begins with; for several optimizer steps per batch. Only the choice is replayed; the
    experts' weights are the router's own, with gradient. A reference policy chooses for itself."""
    on_anomaly: Literal["report", "skip"] = "report"
    """A gradient norm over 20 times the median of the last 50 steps, and over
    policy.optimizer.clip_grad (null: over the largest median so far), is logged and kept in
    RUN/anomalies.jsonl, with the parameter that holds most of it and the samples that made it, for
    which the batch's gradient is taken about twice more. Then the step is taken (`report`, clipped
    as usual) or not (`skip`)."""
    max_nonfinite_steps: PositiveInt = 5
    """Number of successive optimizer steps with an infinite or nan loss or gradient after which
    the run fails. Such steps change no weights; RUN/anomalies.jsonl names the samples that made
    them. Checkpoints wait for the next finite step, so the last good one stays."""

    @property
    def row_multiple(self) -> int:
        """Tokens that the length of a micro-batch's rows is rounded up to a multiple of: each
        context-parallel rank holds two pieces of a sequence, sequence parallelism divides what it
        holds, and 8-bit products want a multiple of their own of what is left."""
        parallel = self.parallel
        own = row_multiple(self.fp8, sequence=parallel.sequence)
        own *= parallel.tensor if parallel.sequence else 1
        return own if parallel.context == 1 else parallel.context * math.lcm(2, own)


class RewardPart(Strict):
    """One of several rewards of a response; `NAME` is its name in the metrics and the sample
    log."""

    name: str
    """Name of the reward, as in `rollout.reward.name`."""
    weight: float = 1.0
    """The response's reward is the sum of its parts times their weights; 0 only shows the part."""
    gate: bool = False
    """Multiply that sum by the part instead of adding it, so that a part of 0 makes the reward
    0."""
    settings: Mapping[str, Any] = {}
    """Settings of the reward, as in `rollout.reward.settings`."""
    per: Literal["response", "group"] = "response"
    """Unit of one call, as in `rollout.reward.per`."""
    where: Annotated[Mapping[str, Any], OnlyJson] = {}
    """Prompts to which the part applies, by their columns: `{kind: math}`, or one of several
    values, `{kind: [math, physics]}`. Empty: all prompts. `fields` of a source or a held-out set
    adds a column to all rows of a file."""

    def applies(self, fields: Mapping[str, Any]) -> bool:
        """`fields`: those of a prompt."""
        return all(
            name in fields
            and (fields[name] in value if isinstance(value, list) else fields[name] == value)
            for name, value in self.where.items()
        )


class RewardConfig(Strict):
    """The reward of a response."""

    name: str | None = None
    """`arithmetic`, `countdown`, `math`, `code`, `http`, `judge`, `environment`
    (rollout.environment's turns alone), or `module:function` (called as function(prompt, response)
    -> float). Null: `parts`."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the reward, such as `url` of `http` and `judge` (docs/rewards.md); of a
    function of your own, its parameters besides prompt and response."""
    parts: Mapping[str, RewardPart] = {}
    """Several rewards by names of your own, instead of `name`: each with a weight."""
    per: Literal["response", "group"] = "response"
    """Unit of one call. `group`: one call with all responses to a prompt, function(prompt,
    responses) -> a number for each, once the last has finished. The controller makes the call,
    on its machine."""
    on_error: Literal["drop", "stop"] = "drop"
    """Treatment of a reward that raises or is not finite: `drop` logs and counts the sample and
    leaves it out of training; `stop` ends the run."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of one call of one reward; beyond it the response counts as an error. The
    process of a plain function is killed; the call of an `async` one is cancelled. Below
    watchdog.timeout_s."""
    workers: PositiveInt = 4
    """Largest number of processes that call rewards, per engine and, for `per: group`, of the
    controller; they start when responses wait. The built-in `arithmetic` and `countdown` need
    none."""
    concurrency: PositiveInt = 64
    """Number of concurrent calls of an `async` reward, such as `http` and `judge`, per process."""
    batch: PositiveInt = 32
    """Largest number of responses in one call of a reward that takes lists, `function(prompts,
    responses)`; a free process takes the waiting ones."""
    memory_mib: PositiveInt | None = None
    """Memory limit (address space, MiB) of each process; null: no limit."""

    @model_validator(mode="after")
    def _name_or_parts(self) -> RewardConfig:
        if (self.name is None) != bool(self.parts):
            raise ValueError(
                "needs either `name`, one of arithmetic, countdown, math, code, http, judge or"
                " module:function, or `parts`, several of them"
            )
        if self.parts and self.settings:
            raise ValueError("`settings` belongs to `name`; each of `parts` has its own")
        if self.parts and self.per == "group":
            raise ValueError("`per` belongs to `name`; each of `parts` has its own")
        for part in self.parts:
            if not re.fullmatch(r"[A-Za-z][\w-]*", part):
                raise ValueError(
                    f"parts: {part!r} cannot be the name of a part, which is a metric"
                    f" `reward/part/{part}`: take letters, digits, _ and -"
                )
        gates = [name for name, part in self.parts.items() if part.gate]
        if gates and len(gates) == len(self.parts):
            raise ValueError(
                f"parts: {gates[0]!r} is a gate, and no part is left that it could multiply:"
                " remove `gate`, or add a part"
            )
        for name in gates:
            if self.parts[name].weight != 1.0:
                raise ValueError(
                    f"parts: {name!r} is a gate, which has no weight: remove one of the two"
                )
        return self

    def total(self, parts: Mapping[str, float]) -> float:
        """The reward of a response, of its `parts` by their names; others than these are only
        shown."""
        own = {name: part for name, part in self.parts.items() if name in parts}
        added = sum(part.weight * parts[name] for name, part in own.items() if not part.gate)
        return added * math.prod(parts[name] for name, part in own.items() if part.gate)

    @property
    def rewards(self) -> Mapping[str | None, RewardPart]:
        """The parts by their names; one reward alone has none."""
        if self.name is None:
            return {name: part for name, part in self.parts.items()}  # noqa: C416
        return {None: RewardPart(name=self.name, settings=self.settings, per=self.per)}


class RolloutConfig(Strict):
    """The vLLM engines; absent with `objective.loss: sft`."""

    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated`: engines have their own devices and sample while the policy trains.
    `colocated`: engines and policy share devices in alternating phases: generate, sleep, train,
    load the new weights, wake. While engines generate, only the policy's parameters stay on the
    device; its optimizer state is in host memory."""
    engines: PositiveInt = 1
    """Number of vLLM engines, each with the whole model."""
    tensor: PositiveInt = 1
    """Workers that share every layer of one engine (vLLM's tensor parallelism); divides heads and
    key-value heads."""
    pipeline: PositiveInt = 1
    """Stages of one engine, each with some of the layers (vLLM's pipeline parallelism); an engine
    has `tensor` times as many workers, each on a device of its own. At most the model's layers."""
    in_flight: Literal["keep", "recompute"] = "keep"
    """Effect of a weight update on running responses. `keep`: they continue on the key-value
    cache of the old weights. `recompute`: the cache is cleared, and the new weights read prompt
    and response again. Log-probs of tokens that were already sampled do not change in either
    case."""
    restarts_per_hour: NonNegativeInt = 3
    """Restarts of each engine per hour after it died or stopped answering; after that the run
    continues with the others."""
    unresponsive_s: PositiveFloat = 60.0
    """Seconds without an answer of its vLLM process after which an engine counts as dead; below
    watchdog.timeout_s."""
    sampling: SamplingConfig
    environment: EnvironmentConfig | None = None
    reward: RewardConfig = RewardConfig(name=OWN_REWARD)
    max_concurrent: PositiveInt = 256
    """Number of responses that one engine decodes at a time."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of the key-value cache of an engine on the CPU; on a GPU, set
    `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of its GPU's memory that an engine takes."""
    max_context: PositiveInt | None = None
    """Largest number of prompt and response tokens; null takes the model's own limit."""
    start_timeout_s: PositiveFloat = 600.0
    """Time limit for the start of an engine."""
    vllm: Mapping[str, Any] = {}
    """More arguments of vLLM's engine by their names in `AsyncEngineArgs`, such as
    `max_num_batched_tokens: 16384`, handed on as they are. `enable_expert_parallel: true` divides a
    mixture's experts, whole, over the `tensor` workers of a stage; `quantization: fp8_per_channel`
    (or `fp8_per_tensor`, `fp8_per_block`) has vLLM quantise the weights of every update as it loads
    them. An argument that another key sets, or that would break the loading of weights or the
    log-probs, is refused with the reason."""

    @property
    def quantised(self) -> bool:
        """vLLM quantises weights as it loads them."""
        return self.vllm.get("quantization") is not None

    @property
    def workers(self) -> int:
        """Processes of one engine, each with its device."""
        return self.tensor * self.pipeline

    @property
    def max_segments(self) -> int:
        """Sequences of one sample."""
        return 1 if self.environment is None else self.environment.max_segments

    @field_validator("vllm")
    @classmethod
    def _free_options(cls, vllm: Mapping[str, Any]) -> Mapping[str, Any]:
        refused = [f"{name}: {why}" for name, why in refused_options(vllm)]
        if refused:
            raise ValueError(f"may not be set here: {'; '.join(refused)}")
        return vllm


class FlowConfig(Strict):
    """Flow of samples from the engines to training."""

    prompts_per_step: PositiveInt
    """Number of prompts per batch, which is trained between two versions of the weights."""
    group_size: PositiveInt
    """Responses per prompt."""
    async_ratio: NonNegativeFloat = 1.0
    """alpha of ROLL Flash (arXiv 2510.11345): no sample starts more than ceil(alpha) versions
    before it is trained on; 0 is synchronous."""
    selection: Selection = OldestFirst()
    """Choice of the finished groups that a step trains on: a name, or a mapping with `name` and its
    settings."""
    late: Literal["wait", "drop"] = "wait"
    """Treatment of a group that must train now by the staleness law and is still running: `wait`
    for it, or `drop` it if enough others have finished. Dropping favours short responses. The
    report compares dropped with trained responses; dropped ones therefore run to their end,
    because cut ones have neither length nor reward. So `drop` saves waiting, not engine time."""
    oversample: NonNegativeFloat = 0.0
    """Groups in flight in addition to async_ratio's, as a share of prompts_per_step: with
    `selection: windowed` those that finish first train, and unfinished ones continue. The bound
    stays ceil(async_ratio), so it needs a fraction there, such as 0.5."""
    dynamic_sampling: bool = False
    """DAPO's dynamic sampling (arXiv 2503.14476): drop each group whose rewards are all equal,
    and sample one more prompt for it. After ten batches' worth of drops for one batch, such
    groups are used."""


class CheckpointConfig(Strict):
    """Checkpoints of the run."""

    every: NonNegativeInt = 100
    """Steps; 0 saves only at the end and when stopped."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay. With 1 the one before it stays too, until the next is written:
    no step has shown yet that the newest one's weights are good."""
    asynchronous: bool = True
    """Training continues while a checkpoint is written. Its state is copied first: each rank needs
    host memory for a copy of what it writes, which `mar plan` counts."""


class WatchdogConfig(Strict):
    """No wait without an end."""

    timeout_s: PositiveFloat = 600.0
    """Longest time without progress anywhere in the run, and longest wait for one named thing (a
    batch, a weight load, a rank), before the run ends and reports who waited for what. Starts,
    checkpoints and exports may take rollout.start_timeout_s."""


class ObserveConfig(Strict):
    """Outputs of the metrics besides RUN/metrics.jsonl."""

    tensorboard: bool = True
    """Write RUN/tensorboard in addition to RUN/metrics.jsonl."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Rank 0 serves the newest metrics at http://HOST:PORT/metrics; 0 takes a free port and logs
    it; null serves nothing."""
    prometheus_host: str = "127.0.0.1"
    """Address that it listens at, without a password: by default an address that only rank 0's
    machine reaches; 0.0.0.0 is every address of that machine."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that get the same numbers, each by its own library, which is installed
    separately, and its own environment variables (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`). A
    resumed run continues the same run of the tracker. The run does not wait for them, and a tracker
    that fails three times in a row, as TensorBoard may on a full disk, gets no more."""
    project: str = "megatron_async_rl"
    """The trackers' project, or experiment; the run's name there is that of `run.dir`."""
    beside: Path | None = None
    """Directory of another run, whose reward, effective sample size and cosine the report draws
    next to this one's, under that directory's name; null draws none."""

    @model_validator(mode="after")
    def _host_of_a_port(self) -> ObserveConfig:
        if "prometheus_host" in self.model_fields_set and self.prometheus_port is None:
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
    """The log of finished samples, RUN/samples, which `mar samples` and the report show."""

    keep_mib: NonNegativeInt = 2048
    """Room for it, compressed; the oldest samples go first. 0 logs none."""
    segment_mib: PositiveInt = 64
    """A new file is begun at this size; at most half of keep_mib."""
    experts: bool = False
    """Also log the experts that the engines chose (with policy.routing_replay: rollout). They
    make up most of a mixture-of-experts model's log; without them no step can be recomputed from
    the log."""

    @model_validator(mode="after")
    def _at_least_two_segments(self) -> SamplesConfig:
        if 0 < self.keep_mib < 2 * self.segment_mib:
            raise ValueError(
                f"segment_mib: {self.segment_mib} is more than half of keep_mib: {self.keep_mib},"
                " so nothing old could be kept; set segment_mib to"
                f" {max(1, self.keep_mib // 2)} or less, or keep_mib to"
                f" {2 * self.segment_mib} or more"
            )
        return self


class Config(Strict):
    """One run. With `objective.loss: sft` there are no engines: `rollout` is absent."""

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
        return self.objective.loss.name == "sft"

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """Precision that the engines of a run load weights and compute in."""
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
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, skipped ones included."""
        return self.run.steps * self.objective.steps_per_batch

    @property
    def fresh_steps(self) -> int:
        """Batches at the run's beginning that are synchronous whatever flow.async_ratio is:
        controls calibrate on their optimizer steps."""
        wanted = max((control.fresh_steps for control in self.controls), default=0)
        return math.ceil(wanted / self.objective.steps_per_batch)
