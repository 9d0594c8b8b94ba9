"""Refused combinations of the settings of `policy` with each other and with the run.

Each conflict states the combination, the reason, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.config.schema import Config

BFLOAT16_BETA = 1.0 - 2.0**-8
"""Largest beta at which a moment in bfloat16, left alone, still decays at every step: half the
distance of two neighbouring numbers is at most 2^-8 of them."""


def lora_conflicts(config: Config) -> Iterator[str]:
    """Reasons why adapters do not fit the run; empty if they do."""
    if config.policy.lora is None:
        return
    # Merged weights leave the trainer in this precision; engines must be able to hold it.
    if config.policy.lora.merge == "float32":
        if config.model.dtype == "float32":
            yield (
                "policy.lora.merge: float32 keeps what bfloat16 would round away, and model.dtype"
                " is float32 already; remove it"
            )
        if config.rollout is not None and config.rollout.quantised:
            yield (
                "policy.lora.merge: float32 has engines compute in float32, and"
                f" rollout.vllm.quantization: {config.rollout.vllm['quantization']} quantises their"
                " weights from bfloat16; remove one of the two"
            )
    reference = config.objective.reference
    # With adapters the base weights are shared by policy and reference and are held once.
    if reference is not None and reference.path is not None:
        yield (
            "objective.reference.path names a model of its own, and with policy.lora ranks hold one"
            " set of whole weights, the base model's; leave it out (the reference is then"
            " model.path without adapters), or set policy.lora: null"
        )


def fp8_conflicts(config: Config) -> Iterator[str]:
    """Reasons why FP8 GEMMs do not fit the run; empty if they do."""
    policy = config.policy
    fp8 = policy.fp8
    if fp8 is None:
        return
    # `auto` is decided on the machine, by the plan, not here.
    if policy.device == "cpu":
        yield ("policy.fp8: FP8 GEMMs need CUDA; set policy.device: cuda, or policy.fp8: null")
    if policy.layers == "local":
        yield (
            "policy.fp8 is for Transformer Engine's layers, and policy.layers is local; set"
            " policy.layers: transformer_engine, or policy.fp8: null"
        )
    if config.model.dtype != "bfloat16":
        yield (
            f"policy.fp8 rounds from bfloat16, and model.dtype is {config.model.dtype}; set"
            " model.dtype: bfloat16, or policy.fp8: null"
        )
    if policy.lora is not None:
        yield (
            "policy.fp8 is for Transformer Engine's layers, and policy.lora adds adapters to"
            " Megatron's own; set one of the two to null"
        )
    # Megatron opens the delayed recipe's context once around all layers.
    if fp8.recipe == "delayed" and fp8.first_last_layers_bf16:
        yield (
            "policy.fp8.first_last_layers_bf16 needs a recipe that scales each product by itself,"
            " and Megatron enters recipe: delayed once for all layers; set it to 0, or recipe:"
            " tensorwise"
        )
    if not fp8.primary_weights:
        return
    # Copies, checkpoints and engines recreate FP8 weights from the float32 ones.
    if fp8.facts.primary:
        yield (
            f"policy.fp8.primary_weights does not go with recipe: {fp8.recipe}:"
            f" {fp8.facts.primary}; set it to false, or recipe: tensorwise or blockwise"
        )
    # Megatron quantises primary weights from the optimizer's float32 shards.
    if not policy.parallel.distributed_optimizer:
        yield (
            "policy.fp8.primary_weights needs the distributed optimizer, which alone makes FP8"
            " weights from float32 ones; set policy.parallel.distributed_optimizer: true, or"
            " primary_weights: false"
        )


def precision_conflicts(config: Config) -> Iterator[str]:
    """Reasons why the precision of gradients or moments does not fit the run; may be empty."""
    settings = config.policy.optimizer
    if settings.gradient_dtype == "bfloat16" and config.model.dtype != "bfloat16":
        yield (
            "policy.optimizer.gradient_dtype: bfloat16 sums gradients in the model's numbers, and"
            f" model.dtype is {config.model.dtype}, so it would change nothing; set model.dtype:"
            " bfloat16, or gradient_dtype: float32"
        )
    if settings.moment_dtype == "bfloat16":
        for key, beta in _betas(config):
            # Controls may raise beta1, so their values are checked as well as the optimizer's.
            if beta > BFLOAT16_BETA:
                yield (
                    f"{key}: {beta:g} does not go with policy.optimizer.moment_dtype: bfloat16: a"
                    f" step changes a moment by {1.0 - beta:.2g} of itself, and bfloat16 rounds by"
                    " up to 2^-8 = 0.0039 of it, so that it would stay where it is; set it to at"
                    " most 0.996, or moment_dtype: float32"
                )


def _betas(config: Config) -> Iterator[tuple[str, float]]:
    """(key, value) of every beta that the configuration gives Adam."""
    for index, beta in enumerate(config.policy.optimizer.betas):
        yield f"policy.optimizer.betas.{index}", beta
    for index, control in enumerate(config.controls):
        for name in ("beta1", "beta1_max") if control.sets_beta1 else ():
            own = getattr(control, name, None)
            if own is not None:
                yield f"controls.{index}.{name}", own


def gather_conflicts(config: Config) -> Iterator[str]:
    """Reasons why weights cannot be gathered during a forward pass; empty if they can."""
    policy, key = config.policy, "policy.parallel.overlap_param_gather"
    if not policy.parallel.overlap_param_gather:
        return
    if not policy.parallel.distributed_optimizer:
        yield (
            f"{key}: without the distributed optimizer every rank updates all weights, and there is"
            " nothing to gather; set policy.parallel.distributed_optimizer: true, or remove it"
        )
    # Megatron gathers by the buckets that it reduces by.
    elif not policy.parallel.overlap_grad_reduce:
        yield (
            f"{key} needs gradients in buckets, or the first layer would wait for all weights; set"
            " policy.parallel.overlap_grad_reduce: true, or remove it"
        )
    # Publishing needs whole weights, so the gather has nothing to overlap with.
    if config.objective.steps_per_batch == 1:
        yield (
            f"{key}: a batch makes one optimizer step, whose weights are published at once; set"
            " objective.minibatches or objective.epochs to more than 1, or remove it"
        )
    # Megatron's hooks wait on a layer's own parameters, not on those of its adapters.
    if policy.lora is not None:
        yield (
            f"{key} waits for the weights of a layer where the layer begins, and adapters"
            " (policy.lora) are read by the layers that they adapt; remove one of the two"
        )


def routing_conflicts(config: Config) -> Iterator[str]:
    """Reasons why routing cannot be replayed; empty if it can."""
    objective, replay = config.objective, config.policy.routing_replay
    if config.samples.experts and replay != "rollout":
        yield (
            "samples.experts keeps the experts that policy.routing_replay: rollout has the engines"
            f" record, and it is {replay}; remove samples.experts, or set policy.routing_replay:"
            " rollout"
        )
    if replay == "none":
        return
    if config.supervised:
        yield (
            f"policy.routing_replay: {replay} replays the experts of sampled responses, and"
            " objective.loss: sft learns from given ones; set it to none"
        )
    elif replay == "proximal":
        # Only then does a separate scoring pass exist whose routing can be replayed.
        if objective.proximal != "recompute" or objective.steps_per_batch == 1:
            yield (
                "policy.routing_replay: proximal replays the experts of the pass that makes"
                " pi_prox under the weights at the start of a batch of several optimizer steps; set"
                " objective.proximal: recompute and objective.minibatches or epochs above 1, or"
                " policy.routing_replay: rollout"
            )
        elif not (objective.loss.uses_proximal or objective.corrections):
            yield (
                "policy.routing_replay: proximal replays the experts of the pass that makes"
                f" pi_prox, and objective.loss: {objective.loss.name} without corrections has none;"
                " set another loss, or policy.routing_replay: rollout"
            )
        # Recorded routing is stored per micro-batch, in the order of its rows.
        elif isinstance(objective.advantage, OpobAdvantage) and objective.advantage.mode == "exact":
            yield (
                "policy.routing_replay: proximal belongs to micro-batches as they are scored, and"
                " objective.advantage: opob, mode: exact trains one sequence at a time; set mode:"
                " cheap, or policy.routing_replay: rollout"
            )
