"""Settings of the trained policy: parallel layout, optimizer, FP8 recipe, adapters and
micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_async_rl.config.settings_model import Strict

# Sections do not check each other here: config/rules.py checks the complete configuration.
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class ParallelConfig(Strict):
    """Parallel layout of the policy. Data parallelism uses the remaining ranks."""

    ranks: PositiveInt = 1
    """Number of trainer processes: tensor x context x pipeline x data."""
    tensor: PositiveInt = 1
    """Tensor-parallel size, the number of ranks that share every layer; divides heads, key-value
    heads and MLP columns."""
    pipeline: PositiveInt = 1
    """Number of pipeline stages; divides the number of layers."""
    context: PositiveInt = 1
    """Context-parallel size, the number of ranks that share every sequence. Each holds 1/context of
    its tokens and attends to the keys and values of all. It is for long sequences; lengths are
    rounded up to a multiple of 2 x context."""
    virtual_pipeline: PositiveInt = 1
    """Number of model chunks per pipeline rank, which run interleaved (Megatron's interleaved
    schedule): less idle time, more messages. Needs pipeline > 1; pipeline x virtual_pipeline
    divides the number of layers."""
    expert: PositiveInt = 1
    """Expert-parallel size, the number of ranks of a stage that share the experts of a
    mixture-of-experts model; divides ranks / pipeline and the number of experts. Each expert is
    whole on one rank: there is no expert tensor parallelism. A mixture-of-experts model with tensor
    parallelism needs sequence and expert > 1."""
    sequence: bool = False
    """Megatron's sequence parallelism (needs tensor > 1)."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data- and context-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data- and context-parallel ranks bucket by bucket during the last
    micro-batch's backward pass, instead of after it. Useful with fast networks. The last stage
    needs memory for a float32 gradient of the output layer's weight and its copy in BF16."""
    overlap_param_gather: bool = False
    """Gather the updated weights of the ranks during the next optimizer step's forward pass, bucket
    by bucket, instead of after each step. It is for batches of several optimizer steps
    (objective.minibatches x objective.epochs): after the last step of a batch the weights are
    gathered at once, because they are published. Needs distributed_optimizer and
    overlap_grad_reduce, whose buckets it uses."""

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that hold and run one copy of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Data-parallel size, the number of copies of the model."""
        # The plan reports a layout whose ranks do not divide evenly.
        return self.ranks // self.replica_ranks


class OptimizerConfig(Strict):
    """AdamW of Megatron-Core: the fused implementation of Transformer Engine or Apex if it is
    installed, else torch's. With `moment_dtype: bfloat16` or `moment_offload: cpu`, this project's
    implementation."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest global gradient norm; null disables clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of lr, which reaches min_lr at the run's last optimizer step; `constant` does not
    decay."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps of linear increase from 0; a batch makes objective.minibatches x
    objective.epochs optimizer steps."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of the `linear` and `cosine` schedules."""
    log_update_norm: bool = False
    """Log `update/norm` and `staleness/drift`, at the cost of one more pass over Adam's state."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the sums of gradients over micro-batches and ranks. `bfloat16`, for a bfloat16
    model, halves the buffer and the traffic, and rounds each addition: gradients need 2 + 4 /
    sharding bytes per parameter instead of 4. In both cases controls, clipping and Adam read
    float32 gradients of the rank's own shard."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of Adam's stored moments; Adam computes in float32. `bfloat16` needs 4 bytes per
    parameter instead of 8. Each step rounds, so the error of a moment is at most 2^-8 / (1 - beta)
    of its recent size (8 % at 0.95). Betas above 0.996 are refused: the decay of one step would be
    smaller than the rounding, so a moment would not decay."""
    moment_offload: Literal["none", "cpu"] = "none"
    """Memory of the moments. `cpu` keeps them in page-locked host memory and moves them to the
    device and back, block by block, during the step. Results differ from those of a fused Adam by
    rounding. It has no effect on a CPU."""

    @model_validator(mode="after")
    def _decays_to_min_lr(self) -> OptimizerConfig:
        # A setting without effect would be ignored silently.
        if self.schedule == "constant" and self.min_lr:
            raise ValueError(
                f"min_lr: {self.min_lr:g} is the end of the schedules linear and cosine, and"
                " schedule is constant; set schedule: linear or cosine, or remove min_lr"
            )
        return self


Recipe = Literal["tensorwise", "blockwise", "delayed", "mxfp8"]


@dataclass(frozen=True)
class RecipeFacts:
    """Requirements of Transformer Engine on devices and shapes for one recipe.

    `capability`: lowest CUDA compute capability. `cuda`: lowest CUDA version of the torch build.
    `sizes`: divisor of both dimensions of every weight on a rank. `rows`: divisor of the rows
    (tokens) of a GEMM on a rank. `gathered`: divisor of these rows if sequence parallelism gathers
    them in FP8. `format`: Megatron's name of the number format, E4M3 for all tensors (`e4m3`) or
    E5M2 for gradients (`hybrid`). `primary`: reason why the recipe has no primary weights; empty if
    it has them.
    """

    capability: tuple[int, int]
    cuda: tuple[int, int]
    sizes: int
    rows: int
    gathered: int
    format: Literal["e4m3", "hybrid"]
    primary: str = ""


# Requirements of Transformer Engine 2.12. The plan checks them before ranks start.
RECIPES: Mapping[Recipe, RecipeFacts] = {
    "tensorwise": RecipeFacts((8, 9), (12, 1), 16, 16, 16, "hybrid"),
    "blockwise": RecipeFacts((9, 0), (12, 9), 128, 16, 128, "e4m3"),
    "delayed": RecipeFacts(
        (8, 9),
        (12, 1),
        16,
        16,
        16,
        "hybrid",
        primary="the bytes of its FP8 weights also depend on the scales of earlier steps, and"
        " copies and checkpoints recompute them from the float32 weights alone",
    ),
    "mxfp8": RecipeFacts(
        (10, 0),
        (12, 8),
        32,
        32,
        32,
        "e4m3",
        primary="Megatron gathers such weights through the gradient buffers, which controls read",
    ),
}
NO_MXFP8_FROM = (12, 0)
"""Compute capability from which Transformer Engine 2.12 lacks some GEMMs of mxfp8."""


class Fp8Config(Strict):
    """FP8 GEMMs in the layers of Transformer Engine: inputs, weights and gradients are rounded to
    FP8, and sums are not. The embedding, the output layer, the router, norms, and attention between
    its projections stay in bfloat16; the precision of gradients and optimizer state does not
    change. Null, the default, computes everything in bfloat16."""

    recipe: Recipe
    """Scaling recipe. `tensorwise`: one scale per tensor, from its largest value. `blockwise`: one
    scale per 1 x 128 activations and per 128 x 128 weights; Hopper and later, CUDA 12.9. `delayed`:
    one scale per tensor, from the largest value of its last 1024 passes; it is 1 at first, so the
    first steps are coarse, and two computations of the same log-probs differ. `mxfp8`: one scale
    per 32 numbers; Blackwell."""
    primary_weights: bool = False
    """Keep the layers' weights in FP8 without a bfloat16 copy; Adam updates the float32 weights
    as usual. Needs distributed_optimizer, and `tensorwise` or `blockwise`."""
    first_last_layers_bf16: NonNegativeInt = 0
    """Number of layers at each end of the model that compute in bfloat16; must be 0 with
    `delayed`."""

    @property
    def facts(self) -> RecipeFacts:
        return RECIPES[self.recipe]


def lacking(
    recipe: Recipe, capability: tuple[int, int] | None, cuda: tuple[int, int] | None
) -> str:
    """Return the requirement of the recipe that a device does not meet, as text; empty if it meets
    all of them. `capability` and `cuda`: None if unknown; an unknown version passes."""
    facts = RECIPES[recipe]
    # Unknown versions pass here, because the ranks check again on the GPU.
    if capability is not None and capability < facts.capability:
        return (
            f"{recipe} needs compute capability {_dotted(facts.capability)}, and the GPU has"
            f" {_dotted(capability)}"
        )
    if recipe == "mxfp8" and capability is not None and capability >= NO_MXFP8_FROM:
        return f"Transformer Engine has no mxfp8 for compute capability {_dotted(capability)} yet"
    if cuda is not None and cuda < facts.cuda:
        return f"{recipe} needs CUDA {_dotted(facts.cuda)}, and torch is built for {_dotted(cuda)}"
    return ""


def needed(recipe: Recipe) -> str:
    """Return the recipe's requirements on a device, as text."""
    facts = RECIPES[recipe]
    above = f" and below {_dotted(NO_MXFP8_FROM)}" if recipe == "mxfp8" else ""
    return (
        f"compute capability {_dotted(facts.capability)} or higher{above}, and CUDA"
        f" {_dotted(facts.cuda)} or later"
    )


def version_of(text: str | None) -> tuple[int, int] | None:
    """Return (major, minor) of a CUDA version or a compute capability; None for other text."""
    major, _, rest = (text or "").partition(".")
    minor = rest.partition(".")[0]
    # torch reports an absent version as `none`, and nvidia-smi as `[N/A]`.
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def row_multiple(fp8: Fp8Config | None, *, sequence: bool) -> int:
    """Return the divisor of a rank's rows (tokens) that the FP8 recipe requires; 1 without FP8.
    `sequence`: True with sequence parallelism."""
    if fp8 is None:
        return 1
    return fp8.facts.gathered if sequence else fp8.facts.rows


MIN_SHARING = 1 / 16
"""Share of a batch's tokens that shared prefixes must save with `prefix_sharing: auto`."""
KEYS_PER_TOKEN = 8
"""Number of keys, copied for responses that continue a shared prefix, that need as much of
`tokens_per_micro_batch` as one computed token."""

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
ROW_PARALLEL: tuple[Target, ...] = ("o_proj", "down_proj")
"""Targets whose columns tensor parallelism divides. It divides the rows of the other targets."""


def _distinct(targets: Sequence[Target]) -> Sequence[Target]:
    # With an empty tuple nothing except a value head would be trained.
    if not targets:
        raise ValueError(
            "policy.lora.targets is empty: name at least one, or set policy.lora: null"
        )
    twice = sorted({target for target in targets if targets.count(target) > 1})
    if twice:
        raise ValueError(f"policy.lora.targets names {', '.join(twice)} twice; name each once")
    return targets


class LoraConfig(Strict):
    """Low-rank adapters (arXiv 2106.09685): the model's weights stay frozen, and a product of two
    small matrices is trained for each target W, y = W x + alpha / rank B A x. Null, the default,
    trains every weight. Adapters usually need about ten times the learning rate."""

    rank: PositiveInt = 16
    """Number of rows of A and of columns of B; at most the smaller dimension of the smallest
    target."""
    alpha: PositiveFloat = 32.0
    """Scale of the product, whose factor is alpha / rank."""
    targets: Annotated[tuple[Target, ...], AfterValidator(_distinct)] = (*ATTENTION, *MLP)
    """Matrices of every layer with adapters, by their names in Hugging Face files and PEFT; each
    has its own A and B. Experts of a mixture-of-experts model have no adapters: set targets to
    q_proj, k_proj, v_proj and o_proj there."""
    # Below 1, because a rate of 1 drops the whole input.
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout rate of an adapter's inputs in training passes. Log-probs of the proximal and
    reference policies, and the engines, have no dropout. Therefore, above 0, the ratio pi / pi_prox
    is not 1 at the first step of a batch, and the policy gradient belongs to another model than the
    sampling one. Masks differ between parallel layouts."""
    merge: Literal["model", "float32"] = "model"
    """Precision of the merged weights that engines load. `model`: model.dtype; bfloat16 rounds off
    nearly all of a product that is still small. `float32`: the exact sum; engines compute in
    float32, which needs twice the bytes per weight and cached token and is slower."""


class PolicyConfig(Strict):
    """Settings of the trained model and its training."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Adapters; with them only adapters and a value head are trained. Null trains every weight."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of policy and engines; `auto` selects CUDA if there is a GPU."""
    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the policy's layers. `local`: Megatron's layers on torch's kernels.
    `transformer_engine`: NVIDIA's layers, on CUDA in bfloat16 without adapters, with fused norms,
    gates and rotations and with grouped experts. `auto`: Transformer Engine where it is available.
    Weights, files and checkpoints are the same; results differ by rounding."""
    fp8: Fp8Config | None = None
    """FP8 GEMMs; null computes GEMMs in model.dtype."""
    sequence: Literal["padded", "packed"] = "padded"
    """Layout of the samples in a micro-batch. `padded`: one sample per row, padded to the longest.
    `packed`: all samples in one row, without padding and without attention between samples.
    Results agree up to rounding."""
    prefix_sharing: Literal["auto", "always", "never"] = "auto"
    """Computation of the tokens with which responses of a group begin alike (their prompt), in
    packed rows. `auto`: once for all of them in a micro-batch, if that saves at least 1/16 of a
    batch's tokens; with context parallelism or adapter dropout, once for each response. `always`:
    once, whatever it saves; refused in padded rows, with context parallelism and with adapter
    dropout. `never`: once for each response. Log-probs and gradients are the same up to
    rounding."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Largest number of tokens (prompt, response and padding) of one micro-batch, which the ranks
    of parallel.context share. Where responses share a prompt, attention has its keys and values
    once for each response; those of a micro-batch are at most eight times as many."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens whose vocabulary logits are in memory at a time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of storing, as in Megatron.
    `selective`: those of attention between its projections. `full`: those of each layer, which
    costs one more forward pass. Gradients do not change."""
    routing_replay: Literal["none", "proximal", "rollout"] = "none"
    """Source of the experts of a mixture's tokens in passes of the policy. `none`: each pass
    chooses them. `rollout` (R3, arXiv 2510.11370): the engine's choice during sampling, which comes
    with the samples; layers x experts per token bytes for each token (two bytes per choice above
    256 experts). `proximal` (R2, arXiv 2507.18071): the choice of the pass that scores the batch
    under its first weights; for several optimizer steps per batch. Only the choice is replayed; the
    router computes the experts' weights, with gradient. A reference policy makes its own choice."""
    on_anomaly: Literal["report", "skip"] = "report"
    """Treatment of an anomaly, a gradient norm over 20 times the median of the last 50 steps and
    over policy.optimizer.clip_grad (null: over the largest median so far). The run logs it and
    records it in RUN/anomalies.jsonl, with the parameter and the samples that contribute most; this
    computes the batch's gradient about twice more. `report` then takes the step, clipped as usual;
    `skip` skips it."""
    max_nonfinite_steps: PositiveInt = 5
    """Number of consecutive optimizer steps with an infinite or nan loss or gradient after which
    the run fails. Such steps change no weights; RUN/anomalies.jsonl names the samples that caused
    them. Checkpoints wait for the next finite step, so the last good checkpoint stays."""

    @property
    def not_shared(self) -> str:
        """Reason why each response computes its own prefix, which follows a verb; empty if prefixes
        are shared."""
        if self.prefix_sharing == "never":
            return "with policy.prefix_sharing: never"
        if self.sequence != "packed":
            return f"in {self.sequence} rows, which are samples; it needs policy.sequence: packed"
        if self.parallel.context > 1:
            return (
                "with policy.parallel.context > 1, which divides the tokens of each sample over"
                " ranks"
            )
        # One mask would drop the same inputs for all responses, so their gradients would differ.
        if self.lora is not None and self.lora.dropout:
            return "with policy.lora.dropout, which draws a mask for each token of each response"
        return ""

    @property
    def min_sharing(self) -> float | None:
        """Least share of a batch's tokens that shared prefixes must save; null: none are shared."""
        if self.not_shared:
            return None
        return 0.0 if self.prefix_sharing == "always" else MIN_SHARING

    @property
    def row_multiple(self) -> int:
        """Number of tokens to whose multiples the length of a micro-batch's rows is rounded up.
        Each context-parallel rank holds two pieces of a sequence, sequence parallelism divides the
        pieces, and FP8 GEMMs require a divisor of the rest."""
        parallel = self.parallel
        # The smallest multiple that every kernel and every division of a row accepts.
        own = row_multiple(self.fp8, sequence=parallel.sequence)
        own *= parallel.tensor if parallel.sequence else 1
        # Each rank holds one early and one late piece, which balances causal attention.
        return own if parallel.context == 1 else parallel.context * math.lcm(2, own)
