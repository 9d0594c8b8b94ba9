"""Checks of a complete configuration. `validated` builds a configuration and runs all of them.

Each conflict states the combination, the reason and the fix. The properties of each method are
class attributes of its settings model, so a new method brings its own. Sections of the schema do
not depend on each other; this file and the other *_rules.py check their combinations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.config.controls import ControlConfig
from megatron_async_rl.config.flow import ExactLag, Replay, Windowed
from megatron_async_rl.config.policy_rules import lora_conflicts, sharing_conflicts
from megatron_async_rl.config.rollout_rules import (
    engine_conflicts,
    environment_conflicts,
    eval_conflicts,
    sampling_conflicts,
    transport_conflicts,
)
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.stream_rules import stream_conflicts

BFLOAT16_BETA = 1.0 - 2.0**-8
"""Largest beta at which a moment in bfloat16 decays at every step without new gradients: rounding
changes a number by at most 2^-8 of itself."""


def validated(tree: Mapping[str, Any]) -> Config:
    """Return the configuration that `tree`, plain JSON, describes. Raises ValidationError if `tree`
    does not follow the schema, or if a rule refuses it."""
    # Strict JSON accepts a list for a tuple and text for a path, but not "3" for a number or true
    # for 1.
    return _CHECKED.validate_json(json.dumps(tree), strict=True)


def _checked(config: Config) -> Config:
    for reason in run_conflicts(config):
        # The first conflict only: later ones are often consequences of it.
        raise ValueError(reason)
    return config


# The checks are a validator, so that pydantic reports a conflict like any other error.
_CHECKED = TypeAdapter(Annotated[Config, AfterValidator(_checked)])


def run_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons to refuse the configuration."""
    # Controls come first, because they decide what the rest of the run needs.
    yield from _controls(config)
    yield from flow_conflicts(config)
    yield from stream_conflicts(config)
    yield from lora_conflicts(config)
    yield from sharing_conflicts(config)
    yield from fp8_conflicts(config)
    yield from precision_conflicts(config)
    yield from gather_conflicts(config)
    yield from transport_conflicts(config)
    yield from engine_conflicts(config)
    yield from routing_conflicts(config)
    yield from sampling_conflicts(config)
    yield from eval_conflicts(config)
    yield from environment_conflicts(config)
    yield from _overlong(config)
    objective, flow = config.objective, config.flow
    # Groups stay whole, because baselines compare all responses of a group.
    if objective.minibatches > flow.prompts_per_step:
        yield (
            f"objective.minibatches: {objective.minibatches} is more than the number of groups in a"
            " batch, which stay whole; set it to at most flow.prompts_per_step:"
            f" {flow.prompts_per_step}"
        )
    loss, advantage = objective.loss, objective.advantage
    # Given responses are not sampled, so they have no staleness and no groups.
    if config.supervised:
        if config.rollout is not None:
            yield "objective.loss: sft trains on given responses; remove `rollout`"
        if flow.group_size != 1 or flow.async_ratio != 0:
            yield "objective.loss: sft needs flow.group_size: 1 and flow.async_ratio: 0"
    elif config.rollout is None:
        yield f"objective.loss: {loss.name} learns from sampled responses; add `rollout`"
    elif config.data.max_tokens is not None:
        yield (
            f"data.max_tokens: {config.data.max_tokens} is for given responses (objective.loss:"
            " sft); set data.max_prompt_tokens and rollout.sampling.max_tokens instead"
        )
    if flow.group_size == 1 and advantage.needs_group:
        yield (
            f"objective.advantage: {advantage.name} compares the responses of a group; set"
            " flow.group_size to at least 2"
        )
    # Exact mode measures one gradient per sequence, before any reduction over ranks.
    if isinstance(advantage, OpobAdvantage) and advantage.mode == "exact":
        if config.policy.parallel.virtual_pipeline > 1:
            yield (
                "objective.advantage: opob, mode: exact runs one sequence at a time, and"
                " policy.parallel.virtual_pipeline > 1 needs at least as many micro-batches as"
                " stages; set virtual_pipeline to 1, or mode: cheap"
            )
        if config.policy.parallel.overlap_grad_reduce:
            yield (
                "objective.advantage: opob, mode: exact needs gradients that are reduced once, at"
                " the end of a step; remove policy.parallel.overlap_grad_reduce, or set mode: cheap"
            )
        if config.policy.parallel.expert > 1:
            yield (
                "objective.advantage: opob, mode: exact measures each sequence's gradient on one"
                " model replica, and policy.parallel.expert > 1 divides it over several; set expert"
                " to 1, or mode: cheap"
            )
    if flow.group_size == 1 and loss.compares_group:
        yield (
            f"objective.loss: {loss.name} compares the responses of a group; set flow.group_size to"
            " at least 2"
        )
    versions = config.batch_versions
    kept = [
        f"controls: {control.name}" for control in config.controls if control.needs_past_weights
    ]
    kept += ["objective.proximal: snapshot"] if objective.proximal == "snapshot" else []
    if kept and objective.snapshots is not None and objective.snapshots < versions:
        yield (
            f"objective.snapshots: {objective.snapshots} is too small for"
            f" {' and '.join(kept)}: with flow.async_ratio: {flow.async_ratio:g} a batch contains"
            f" tokens of up to {versions} weight versions; remove it, or set it to at least"
            f" {versions}"
        )
    if loss.whole_group_of_one_version and flow.selection.name == "replay":
        yield (
            f"objective.loss: {loss.name} is defined for groups of a single weight version, and"
            " flow.selection: replay draws stored responses of several; set flow.selection:"
            " oldest_first, or exact_lag"
        )
    # In asynchronous runs only exact_lag samples a group with a single version.
    elif (
        loss.whole_group_of_one_version
        and flow.async_ratio > 0
        and flow.selection.name != "exact_lag"
    ):
        yield (
            f"objective.loss: {loss.name} is defined for groups of a single weight version, and"
            f" with flow.async_ratio: {flow.async_ratio:g} responses continue across weight"
            " updates; set flow.async_ratio: 0, or flow.selection: exact_lag"
        )


def _overlong(config: Config) -> Iterator[str]:
    """Yield the reason why no response could be long enough for a length penalty."""
    penalty, rollout = config.objective.overlong, config.rollout
    if penalty is None or rollout is None:
        return
    start, longest = penalty.max_length - penalty.buffer, rollout.sampling.max_tokens
    # All segments of a sample count.
    if start >= longest * rollout.max_segments:
        yield (
            f"objective.overlong: the penalty begins above max_length - buffer = {start} tokens,"
            f" and rollout.sampling.max_tokens: {longest} allows no such response, so it would have"
            " no effect; lower objective.overlong.max_length, or remove objective.overlong"
        )


def _controls(config: Config) -> Iterator[str]:
    """Yield the reasons why the gradient controls conflict with each other or with this run."""
    controls = config.controls
    names = [control.name for control in controls]
    if len(set(names)) != len(names):
        yield f"controls: each at most once, got {names}"
    # Test properties of the settings, not names, so that plug-ins are covered, too.
    judging = [control.name for control in controls if control.judges_alignment]
    if len(judging) > 1:
        yield (
            f"controls: {' and '.join(judging)} both act on the cosine of consecutive gradients,"
            " and matched_norm is the null baseline of gac; set one per run"
        )
    for name in ("gac", "displacement"):
        if "matched_lr" in names and name in names:
            yield (
                f"controls: matched_lr is the null baseline of {name}, at the same mean update"
                f" norm; run {name} alone with policy.optimizer.log_update_norm: true, and set the"
                " mean of its `update/norm` as target_update_norm of matched_lr in another run"
            )
    objective = config.objective
    # The cosine of two gradients of the same samples does not measure staleness.
    if judging and objective.minibatches == 1 and objective.epochs > 1:
        yield (
            f"controls: {judging[0]} compares the gradients of consecutive optimizer steps, and"
            f" with objective.minibatches: 1 and objective.epochs: {objective.epochs} those are"
            " gradients of the same samples; set objective.minibatches to at least 2, or"
            " objective.epochs: 1"
        )
    # A decision has one value, so the last control would silently override the others.
    setting = [control.name for control in controls if control.sets_beta1]
    if len(setting) > 1:
        yield (
            f"controls: {' and '.join(setting)} both set beta1, and the last would override the"
            " others; keep one"
        )
    scaling = [control.name for control in controls if control.scales_lr]
    if len(scaling) > 1:
        yield (
            f"controls: {' and '.join(scaling)} both scale the learning rate, and matched_lr is the"
            " null baseline of the other; set one per run"
        )
    for control in controls:
        if config.supervised and control.needs_sampled:
            yield (
                f"controls: {control.name} reads pi / pi_behavior, and objective.loss: sft learns"
                " from given responses, which no policy sampled; remove it"
            )
        if config.supervised and control.needs_past_weights:
            yield (
                f"controls: {control.name} compares with the weights that sampled the batch, and"
                " objective.loss: sft learns from given responses, which no policy sampled; remove"
                " it"
            )
        # Calibration must end before the run does; otherwise the control never acts.
        if control.fresh_steps >= config.optimizer_steps:
            yield (
                f"controls: {control.name} would calibrate over the first {control.fresh_steps}"
                f" optimizer steps, and run.steps: {config.run.steps} makes"
                f" {config.optimizer_steps}, so it would never act; lower calibrate.steps, or set"
                " c_low and remove calibrate"
            )
        yield from _beta1(config, control)


def _beta1(config: Config, control: ControlConfig) -> Iterator[str]:
    own = config.policy.optimizer.betas[0]
    if control.name == "beta1" and control.beta1 == own:
        yield (
            f"controls: beta1 sets the value of policy.optimizer.betas, {own:g}, so it would have"
            " no effect; remove it"
        )
    if (
        control.name == "momentum_by_alignment"
        and control.beta1_max is None
        and own <= control.beta1_min
    ):
        yield (
            f"controls: momentum_by_alignment lowers beta1 from policy.optimizer.betas ({own:g}) to"
            f" beta1_min ({control.beta1_min:g}); set beta1_min below {own:g}, or beta1_max"
        )


def flow_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why the settings of `flow` do not fit the run."""
    yield from _selection(config)
    yield from _admission(config)
    yield from _deadlines(config)


def _selection(config: Config) -> Iterator[str]:
    flow, selection = config.flow, config.flow.selection
    if isinstance(selection, ExactLag):
        # Admission follows async_ratio, so a different lag is impossible.
        if flow.async_ratio != selection.lag:
            yield (
                f"flow.selection: exact_lag trains every sample exactly {selection.lag} updates"
                f" later, and with flow.async_ratio: {flow.async_ratio:g} samples have another lag;"
                f" set flow.async_ratio: {selection.lag}"
            )
        if flow.late == "drop":
            yield "flow.selection: exact_lag waits for every response; set flow.late: wait"
    # Replay draws groups of any age, so it excludes everything that needs a bounded lag.
    if isinstance(selection, Replay):
        if flow.late == "drop" or flow.dynamic_sampling:
            yield (
                "flow.selection: replay stores every finished group; set flow.late: wait and"
                " flow.dynamic_sampling: false"
            )
        kept = [
            f"controls: {control.name}" for control in config.controls if control.needs_past_weights
        ]
        kept += ["objective.proximal: snapshot"] if config.objective.proximal == "snapshot" else []
        if kept:
            yield (
                f"flow.selection: replay trains on samples of any age, and {' and '.join(kept)}"
                " needs the weights that sampled them, while a run keeps only the newest versions;"
                " set another selection"
            )


def _admission(config: Config) -> Iterator[str]:
    flow, bound = config.flow, math.ceil(config.flow.async_ratio)
    if flow.oversample and not isinstance(flow.selection, Windowed):
        yield (
            "flow.oversample requests more groups than a step needs and trains those that finish"
            " first; set flow.selection: windowed"
        )
    # Oversampled groups must train within the staleness bound, too.
    if flow.async_ratio + flow.oversample > bound:
        room = bound - flow.async_ratio
        # A whole async_ratio leaves no room below its bound, and none leaves room for 1.
        other = f", or set async_ratio to {bound + (room == 0) - flow.oversample:g}"
        yield (
            f"flow.oversample: {flow.oversample:g} exceeds ceil(async_ratio) - async_ratio, which"
            f" is {room:g}; lower it{other if flow.oversample < 1 else ''}"
        )
    if flow.dynamic_sampling and (flow.group_size == 1 or config.supervised):
        yield (
            "flow.dynamic_sampling drops groups whose rewards are all equal, which is every group"
            " of one response; set it to false"
        )
    if config.supervised and (
        flow.oversample or flow.late == "drop" or flow.selection.name != "oldest_first"
    ):
        yield (
            "objective.loss: sft trains on given responses in their order; remove flow.selection,"
            " flow.late and flow.oversample"
        )
    if flow.late == "drop" and math.ceil(flow.async_ratio) == 0:
        yield (
            "flow.late: drop trains on other groups instead, and with flow.async_ratio: 0 there are"
            " no others; set async_ratio above 0"
        )


def _deadlines(config: Config) -> Iterator[str]:
    rollout, evaluation = config.rollout, config.eval
    if rollout is None:
        return
    # The engine's deadline must expire before the run's; otherwise it never restarts.
    if rollout.unresponsive_s >= config.watchdog.timeout_s:
        yield (
            f"rollout.unresponsive_s: {rollout.unresponsive_s:g} must be below watchdog.timeout_s:"
            f" {config.watchdog.timeout_s:g}, or the run ends before an engine is restarted"
        )
    if evaluation is None:
        return
    # Colocated engines sleep while the policy trains, so they cannot evaluate meanwhile.
    if evaluation.engines and rollout.placement == "colocated":
        yield (
            "eval.engines need their own devices, and with rollout.placement: colocated engines"
            " share the policy's; set eval.engines: 0"
        )


def fp8_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why FP8 GEMMs do not fit the run."""
    policy = config.policy
    fp8 = policy.fp8
    if fp8 is None:
        return
    # The plan resolves `auto` on the machine, and checks it there.
    if policy.device == "cpu":
        yield "policy.fp8: FP8 GEMMs need CUDA; set policy.device: cuda, or policy.fp8: null"
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
            "policy.fp8.first_last_layers_bf16 needs a recipe that is entered layer by layer, and"
            " Megatron enters recipe: delayed once for all layers; set it to 0, or recipe:"
            " tensorwise"
        )
    if not fp8.primary_weights:
        return
    # Copies, checkpoints and engines recompute FP8 weights from the float32 weights.
    if fp8.facts.primary:
        yield (
            f"policy.fp8.primary_weights does not work with recipe: {fp8.recipe}:"
            f" {fp8.facts.primary}; set it to false, or recipe: tensorwise or blockwise"
        )
    # Megatron quantises primary weights from the optimizer's float32 shards.
    if not policy.parallel.distributed_optimizer:
        yield (
            "policy.fp8.primary_weights needs the distributed optimizer, because no other one"
            " computes FP8 weights from float32 weights; set policy.parallel.distributed_optimizer:"
            " true, or primary_weights: false"
        )


def precision_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why the precision of gradients or moments does not fit the run."""
    settings = config.policy.optimizer
    if settings.gradient_dtype == "bfloat16" and config.model.dtype != "bfloat16":
        yield (
            "policy.optimizer.gradient_dtype: bfloat16 sums gradients in the model's precision, and"
            f" model.dtype is {config.model.dtype}, so it would have no effect; set model.dtype:"
            " bfloat16, or gradient_dtype: float32"
        )
    if settings.moment_dtype == "bfloat16":
        for key, beta in _betas(config):
            # Controls may raise beta1, so check their values, too.
            if beta > BFLOAT16_BETA:
                yield (
                    f"{key}: {beta:g} is too large for policy.optimizer.moment_dtype: bfloat16: a"
                    f" step changes a moment by {1.0 - beta:.2g} of itself, and bfloat16 rounds by"
                    " up to 2^-8 = 0.0039 of it, so the moment would not decay; set it to at most"
                    " 0.996, or moment_dtype: float32"
                )


def _betas(config: Config) -> Iterator[tuple[str, float]]:
    """Yield (key, value) for every beta of Adam in the configuration."""
    for index, beta in enumerate(config.policy.optimizer.betas):
        yield f"policy.optimizer.betas.{index}", beta
    for index, control in enumerate(config.controls):
        for name in ("beta1", "beta1_max") if control.sets_beta1 else ():
            own = getattr(control, name, None)
            if own is not None:
                yield f"controls.{index}.{name}", own


def gather_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why weights cannot be gathered during a forward pass."""
    policy, key = config.policy, "policy.parallel.overlap_param_gather"
    if not policy.parallel.overlap_param_gather:
        return
    if not policy.parallel.distributed_optimizer:
        yield (
            f"{key}: without the distributed optimizer every rank updates all weights, and there is"
            " nothing to gather; set policy.parallel.distributed_optimizer: true, or remove it"
        )
    # Megatron gathers weights in the buckets of the gradient reduction.
    elif not policy.parallel.overlap_grad_reduce:
        yield (
            f"{key} needs gradients in buckets; otherwise the first layer would wait for all"
            " weights; set policy.parallel.overlap_grad_reduce: true, or remove it"
        )
    # The publication needs whole weights, so there is no forward pass to overlap with.
    if config.objective.steps_per_batch == 1:
        yield (
            f"{key}: a batch makes one optimizer step, whose weights are published at once; set"
            " objective.minibatches or objective.epochs to more than 1, or remove it"
        )
    # Megatron's hooks wait for a layer's own parameters, not for those of its adapters.
    if policy.lora is not None:
        yield (
            f"{key} waits for a layer's own weights when the layer begins, and not for its"
            " adapters (policy.lora); remove one of the two"
        )


def routing_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why routing cannot be replayed."""
    objective, replay = config.objective, config.policy.routing_replay
    if config.samples.experts and replay != "rollout":
        yield (
            "samples.experts logs the experts that engines record with policy.routing_replay:"
            f" rollout, and routing_replay is {replay}; remove samples.experts, or set"
            " policy.routing_replay: rollout"
        )
    if replay == "none":
        return
    if config.supervised:
        yield (
            f"policy.routing_replay: {replay} replays the experts of sampled responses, and"
            " objective.loss: sft learns from given responses; set it to none"
        )
    elif replay == "proximal":
        # Without these settings there is no scoring pass whose routing could be replayed.
        if objective.proximal != "recompute" or objective.steps_per_batch == 1:
            yield (
                "policy.routing_replay: proximal replays the experts of the pass that computes"
                " pi_prox at the start of a batch of several optimizer steps; set"
                " objective.proximal: recompute and objective.minibatches or epochs above 1, or"
                " policy.routing_replay: rollout"
            )
        elif not (objective.loss.uses_proximal or objective.corrections):
            yield (
                "policy.routing_replay: proximal replays the experts of the pass that computes"
                f" pi_prox, and objective.loss: {objective.loss.name} without corrections needs no"
                " such pass; set another loss, or policy.routing_replay: rollout"
            )
        # Recorded routing is stored per micro-batch, in the order of its rows.
        elif isinstance(objective.advantage, OpobAdvantage) and objective.advantage.mode == "exact":
            yield (
                "policy.routing_replay: proximal replays the micro-batches of the scoring pass, and"
                " objective.advantage: opob, mode: exact trains one sequence at a time; set mode:"
                " cheap, or policy.routing_replay: rollout"
            )
