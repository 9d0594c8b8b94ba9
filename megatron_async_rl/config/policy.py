"""The trained policy: parallel layout, optimizer, FP8 recipe, adapters and micro-batches."""

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
)

from megatron_async_rl.config.settings_model import Strict

# Sections do not check each other here: config/rules.py sees the finished whole.
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


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
        # Whether it divides is a problem of the layout, which the plan reports.
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


Recipe = Literal["tensorwise", "blockwise", "delayed", "mxfp8"]


@dataclass(frozen=True)
class RecipeFacts:
    """Demands of Transformer Engine on a device and on shapes.

    capability: CUDA's compute capability, at least. cuda: the version torch is built for, at least.
    sizes: both sides of every weight on a rank are multiples of it; rows: the rows (tokens) of a
    product on a rank; gathered: the same where sequence parallelism gathers them in 8 bits.
    `format`: Megatron's name of the numbers, E4M3 throughout or with E5M2 for gradients.
    primary: why there are no primary weights, if so.
    """

    capability: tuple[int, int]
    cuda: tuple[int, int]
    sizes: int
    rows: int
    gathered: int
    format: Literal["e4m3", "hybrid"]
    primary: str = ""


# Read from Transformer Engine 2.12; the plan refuses by this table before ranks start.
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
        primary="a weight's bytes then depend on the scales of earlier steps, not on the float32"
        " weights alone, from which copies and checkpoints make them again",
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
"""Compute capability from which Transformer Engine 2.12 lacks some of mxfp8's products."""


class Fp8Config(Strict):
    """FP8 GEMMs of the layers, with Transformer Engine's layers: inputs, weights and gradients are
    rounded, and sums are not. Embedding, output layer, router, norms and attention between its
    projections stay in bfloat16, and gradients and optimizer state are what they are without it.
    Null, the default, computes everything in bfloat16."""

    recipe: Recipe
    """Scaling recipe. `tensorwise`: one scale per tensor, from its largest value. `blockwise`:
    one scale per 1 x 128 activations and 128 x 128 weights; Hopper and later, CUDA 12.9.
    `delayed`: one scale per tensor, from the largest value of its last 1024 passes and at first
    1, so that the first steps are coarse and log-probs computed twice differ. `mxfp8`: one scale
    per 32 numbers; Blackwell."""
    primary_weights: bool = False
    """Keep the layers' weights in FP8 without a bfloat16 copy; Adam updates the float32 weights
    as usual. Needs distributed_optimizer, and `tensorwise` or `blockwise`."""
    first_last_layers_bf16: NonNegativeInt = 0
    """Layers at each end of the model that compute in bfloat16; not with `delayed`."""

    @property
    def facts(self) -> RecipeFacts:
        return RECIPES[self.recipe]


def lacking(
    recipe: Recipe, capability: tuple[int, int] | None, cuda: tuple[int, int] | None
) -> str:
    """The lack of a device of that compute capability, under that CUDA, for the recipe, as text;
    empty if there is none. Null: not known, and not held against it."""
    facts = RECIPES[recipe]
    # Unknown hardware passes: the ranks check again on the GPU itself.
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
    """Text on the recipe's demands on a device."""
    facts = RECIPES[recipe]
    above = f" and below {_dotted(NO_MXFP8_FROM)}" if recipe == "mxfp8" else ""
    return (
        f"compute capability {_dotted(facts.capability)} or higher{above}, and CUDA"
        f" {_dotted(facts.cuda)} or later"
    )


def version_of(text: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version of CUDA or a compute capability; null for anything else."""
    major, _, rest = (text or "").partition(".")
    minor = rest.partition(".")[0]
    # `none` and `[N/A]` are answers of torch and nvidia-smi.
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def row_multiple(fp8: Fp8Config | None, *, sequence: bool) -> int:
    """Tokens that a rank's rows are a multiple of, whatever else divides a sequence. `sequence`:
    sequence parallelism does."""
    if fp8 is None:
        return 1
    return fp8.facts.gathered if sequence else fp8.facts.rows


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
ROW_PARALLEL: tuple[Target, ...] = ("o_proj", "down_proj")
"""Targets whose columns tensor parallelism divides; of the others it divides the rows."""


def _distinct(targets: Sequence[Target]) -> Sequence[Target]:
    # An empty tuple would train nothing but a value head.
    if not targets:
        raise ValueError(
            "policy.lora.targets is empty: name at least one, or set policy.lora: null"
        )
    twice = sorted({target for target in targets if targets.count(target) > 1})
    if twice:
        raise ValueError(f"policy.lora.targets names {', '.join(twice)} twice; name each once")
    return targets


class LoraConfig(Strict):
    """Low-rank adapters (arXiv 2106.09685): the model's own weights stay as they are, and a product
    of two small matrices is trained for each target W, y = W x + alpha / rank B A x. Null, the
    default, trains every weight. Adapters usually need about ten times the learning rate."""

    rank: PositiveInt = 16
    """Rows of A and columns of B; at most the smaller side of the smallest target."""
    alpha: PositiveFloat = 32.0
    """The product's factor is alpha / rank."""
    targets: Annotated[tuple[Target, ...], AfterValidator(_distinct)] = (*ATTENTION, *MLP)
    """Matrices of every layer, as Hugging Face's files and PEFT name them, each with an A and a B
    of its own. Experts of a mixture have no adapters: name q_proj, k_proj, v_proj and o_proj
    there."""
    # At 1 nothing of the input would be left.
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout rate of an adapter's inputs in training passes. Log-probs of proximal and
    reference policies and the engines' weights have none, so above 0 the ratio pi / pi_prox is
    not 1 at a batch's first step and the policy gradient is that of another model than the
    sampling one; masks differ between parallel layouts."""
    merge: Literal["model", "float32"] = "model"
    """Precision of the merged weights that engines load. `model`: model.dtype; in bfloat16
    rounding loses nearly all of a product that is still small. `float32`: the exact sum, in
    engines that compute in float32 (twice the bytes per weight and cached token, and slower)."""


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
        context-parallel rank holds two pieces of a sequence, sequence parallelism divides
        these, and FP8 GEMMs need a multiple of their own of the remainder."""
        parallel = self.parallel
        # The smallest multiple that every kernel and every split of a row accepts.
        own = row_multiple(self.fp8, sequence=parallel.sequence)
        own *= parallel.tensor if parallel.sequence else 1
        # Causal attention is balanced by giving each rank one early and one late piece.
        return own if parallel.context == 1 else parallel.context * math.lcm(2, own)
