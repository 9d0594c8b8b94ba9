"""Checks of a finished configuration. `validated` makes one and runs all of them.

Each conflict states the combination, the reason, and the fix. The facts about each method are class
attributes of its settings model, so a new method brings its own. Sections of the schema do
not depend on each other; they are combined here and in rollout_rules.py.
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
from megatron_async_rl.config.rollout_rules import (
    engine_conflicts,
    environment_conflicts,
    eval_conflicts,
    sampling_conflicts,
    transport_conflicts,
)
from megatron_async_rl.config.schema import Config

BFLOAT16_BETA = 1.0 - 2.0**-8
"""Largest beta at which a moment in bfloat16, left alone, still decays at every step: half the
distance of two neighbouring numbers is at most 2^-8 of them."""


def validated(tree: Mapping[str, Any]) -> Config:
    """Return the configuration that `tree`, plain JSON, describes. Raises ValidationError where it
    does not follow the schema, or where a rule refuses it."""
    # As JSON, strict: a list is a tuple and text is a path, but "3" is not a number and true is
    # not 1.
    return _CHECKED.validate_json(json.dumps(tree), strict=True)


def _checked(config: Config) -> Config:
    for reason in run_conflicts(config):
        # The first conflict only: later ones are often consequences of it.
        raise ValueError(reason)
    return config


# A validator, so that pydantic reports a conflict in the way it reports every other error.
_CHECKED = TypeAdapter(Annotated[Config, AfterValidator(_checked)])


def run_conflicts(config: Config) -> Iterator[str]:
    """Reasons to refuse the configuration; empty if it is valid."""
    # Conflicts of objective and controls first: they decide what the rest of the run needs.
    yield from _controls(config)
    yield from flow_conflicts(config)
    yield from lora_conflicts(config)
    yield from fp8_conflicts(config)
    yield from precision_conflicts(config)
    yield from gather_conflicts(config)
    yield from transport_conflicts(config)
    yield from engine_conflicts(config)
    yield from routing_conflicts(config)
    yield from sampling_conflicts(config)
    yield from eval_conflicts(config)
    yield from environment_conflicts(config)
    objective, flow = config.objective, config.flow
    # Groups are never cut: baselines compare all responses of a group.
    if objective.minibatches > flow.prompts_per_step:
        yield (
            f"objective.minibatches: {objective.minibatches} is more than the groups of a batch,"
            f" which stay whole; set it to at most flow.prompts_per_step: {flow.prompts_per_step}"
        )
    loss, advantage = objective.loss, objective.advantage
    # Given responses are not sampled, so nothing is asynchronous or compared.
    if config.supervised:
        if config.rollout is not None:
            yield "objective.loss: sft trains on given responses: remove `rollout`"
        if flow.group_size != 1 or flow.async_ratio != 0:
            yield "objective.loss: sft needs flow.group_size: 1 and flow.async_ratio: 0"
    elif config.rollout is None:
        yield f"objective.loss: {loss.name} learns from sampled responses: add `rollout`"
    elif config.data.max_tokens is not None:
        yield (
            f"data.max_tokens: {config.data.max_tokens} is for given responses (objective.loss:"
            " sft); set data.max_prompt_tokens and rollout.sampling.max_tokens"
        )
    if flow.group_size == 1 and advantage.needs_group:
        yield (
            f"objective.advantage: {advantage.name} compares the responses of a group:"
            " flow.group_size must be at least 2"
        )
    # The exact mode measures one gradient per sequence, before any reduction over ranks.
    if isinstance(advantage, OpobAdvantage) and advantage.mode == "exact":
        if config.policy.parallel.virtual_pipeline > 1:
            yield (
                "objective.advantage: opob, mode: exact runs one sequence at a time, and"
                " policy.parallel.virtual_pipeline > 1 needs at least as many micro-batches as"
                " there are stages; set it to 1, or mode: cheap"
            )
        if config.policy.parallel.overlap_grad_reduce:
            yield (
                "objective.advantage: opob, mode: exact needs gradients that are reduced once, at"
                " the end of a step: remove policy.parallel.overlap_grad_reduce, or set mode: cheap"
            )
        if config.policy.parallel.expert > 1:
            yield (
                "objective.advantage: opob, mode: exact measures each sequence's gradient on one"
                " model replica, and policy.parallel.expert > 1 spreads it over several; set it to"
                " 1, or mode: cheap"
            )
    if flow.group_size == 1 and loss.compares_group:
        yield (
            f"objective.loss: {loss.name} compares the responses of a group: flow.group_size must"
            " be at least 2"
        )
    # A batch may hold every version from the bound to the current one.
    versions = math.ceil(flow.async_ratio) + 1
    kept = [
        f"controls: {control.name}" for control in config.controls if control.needs_past_weights
    ]
    kept += ["objective.proximal: snapshot"] if objective.proximal == "snapshot" else []
    if kept and objective.snapshots < versions:
        yield (
            f"objective.snapshots: {objective.snapshots} does not reach back to the version that"
            f" sampled the oldest token: with flow.async_ratio: {flow.async_ratio:g} a batch holds"
            f" up to {versions} versions ({' and '.join(kept)}); set it to at least {versions}"
        )
    if loss.whole_group_of_one_version and flow.selection.name == "replay":
        yield (
            f"objective.loss: {loss.name} is defined for groups sampled by one weight version, and"
            " flow.selection: replay draws stored responses of several; set flow.selection:"
            " oldest_first, or exact_lag"
        )
    # Only exact_lag keeps a group's tokens on one version once generation runs ahead.
    elif (
        loss.whole_group_of_one_version
        and flow.async_ratio > 0
        and flow.selection.name != "exact_lag"
    ):
        yield (
            f"objective.loss: {loss.name} is defined for groups sampled by one weight version, and"
            f" with flow.async_ratio: {flow.async_ratio:g} responses continue across weight"
            " updates; set flow.async_ratio: 0, or flow.selection: exact_lag"
        )


def _controls(config: Config) -> Iterator[str]:
    """Reasons why the gradient controls conflict with each other or with this run; may be empty."""
    controls = config.controls
    names = [control.name for control in controls]
    if len(set(names)) != len(names):
        yield f"controls: each at most once, got {names}"
    # Facts of the settings, not names: a plug-in control is covered too.
    judging = [control.name for control in controls if control.judges_alignment]
    if len(judging) > 1:
        yield (
            f"controls: {' and '.join(judging)} both act on the cosine of consecutive gradients,"
            " and matched_norm is what gac is compared with: run them one at a time"
        )
    for name in ("gac", "displacement"):
        if "matched_lr" in names and name in names:
            yield (
                f"controls: matched_lr replaces {name} at the same mean update norm; run {name}"
                " alone with policy.optimizer.log_update_norm: true, read the mean of its"
                " `update/norm`, and give it to matched_lr in a run of its own"
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
    # Each decision holds one value; the last control would silently win.
    setting = [control.name for control in controls if control.sets_beta1]
    if len(setting) > 1:
        yield (
            f"controls: {' and '.join(setting)} both set beta1, and the later one would override"
            " the earlier; keep one"
        )
    scaling = [control.name for control in controls if control.scales_lr]
    if len(scaling) > 1:
        yield (
            f"controls: {' and '.join(scaling)} both scale the learning rate, and matched_lr is the"
            " null baseline of the other: run them one at a time"
        )
    for control in controls:
        if config.supervised and control.needs_sampled:
            yield (
                f"controls: {control.name} looks at pi / pi_behavior, and objective.loss: sft"
                " learns from given responses, which were not sampled; remove it"
            )
        if config.supervised and control.needs_past_weights:
            yield (
                f"controls: {control.name} compares with the weights that sampled the batch, and"
                " objective.loss: sft learns from given responses, which were not sampled; remove"
                " it"
            )
        # Calibration must end before the run does, or the control never acts.
        if control.fresh_steps >= config.optimizer_steps:
            yield (
                f"controls: {control.name} would calibrate over the first {control.fresh_steps}"
                f" steps, and run.steps: {config.run.steps} makes {config.optimizer_steps}, so it"
                " would never act; lower calibrate.steps, or give c_low and no calibrate"
            )
        yield from _beta1(config, control)


def _beta1(config: Config, control: ControlConfig) -> Iterator[str]:
    own = config.policy.optimizer.betas[0]
    if control.name == "beta1" and control.beta1 == own:
        yield (
            f"controls: beta1 is {own:g} in policy.optimizer.betas already, so the control would"
            " have no effect; remove it"
        )
    if (
        control.name == "momentum_by_alignment"
        and control.beta1_max is None
        and own <= control.beta1_min
    ):
        yield (
            f"controls: momentum_by_alignment lowers beta1 from policy.optimizer.betas ({own:g}) to"
            f" beta1_min ({control.beta1_min:g}), which must be below it"
        )


def flow_conflicts(config: Config) -> Iterator[str]:
    """Reasons why the settings of `flow` do not work; empty if they do."""
    yield from _selection(config)
    yield from _admission(config)
    yield from _deadlines(config)


def _selection(config: Config) -> Iterator[str]:
    flow, selection = config.flow, config.flow.selection
    if isinstance(selection, ExactLag):
        # Admission follows async_ratio; a different lag could never be met.
        if flow.async_ratio != selection.lag:
            yield (
                f"flow.selection: exact_lag trains every sample {selection.lag} updates after it"
                f" was made, and flow.async_ratio: {flow.async_ratio:g} states how far rollouts run"
                f" ahead; set flow.async_ratio: {selection.lag}"
            )
        if flow.late == "drop":
            yield "flow.selection: exact_lag waits for every response; set flow.late: wait"
    # Replay draws groups of any age: nothing that is bounded by versions works with it.
    if isinstance(selection, Replay):
        if flow.late == "drop" or flow.dynamic_sampling:
            yield (
                "flow.selection: replay stores every group that finishes; set flow.late: wait and"
                " flow.dynamic_sampling: false"
            )
        kept = [
            f"controls: {control.name}" for control in config.controls if control.needs_past_weights
        ]
        kept += ["objective.proximal: snapshot"] if config.objective.proximal == "snapshot" else []
        if kept:
            yield (
                f"flow.selection: replay trains on samples of any age, and {' and '.join(kept)}"
                " reads the weights that sampled them, and only objective.snapshots of them are"
                " kept; choose another selection"
            )


def _admission(config: Config) -> Iterator[str]:
    flow, bound = config.flow, math.ceil(config.flow.async_ratio)
    if flow.oversample and not isinstance(flow.selection, Windowed):
        yield (
            "flow.oversample requests more groups than a step needs and trains those that finish"
            " first: set flow.selection: windowed"
        )
    # The staleness bound is ceil(async_ratio); oversampled groups must train within it, too.
    if flow.async_ratio + flow.oversample > bound:
        yield (
            f"flow.oversample: {flow.oversample:g} on top of flow.async_ratio:"
            f" {flow.async_ratio:g} is more than the {bound} batches ahead that the bound,"
            f" ceil({flow.async_ratio:g}), leaves time to train; lower it, or set async_ratio to a"
            f" fraction, such as {bound + 0.5 if flow.async_ratio == bound else bound - 0.5:g}"
        )
    if flow.dynamic_sampling and (flow.group_size == 1 or config.supervised):
        yield (
            "flow.dynamic_sampling drops groups whose rewards are all equal, and in a group of"
            " one they always are; set it to false"
        )
    if config.supervised and (
        flow.oversample or flow.late == "drop" or flow.selection.name != "oldest_first"
    ):
        yield (
            "objective.loss: sft trains on given responses in their order: remove flow.selection,"
            " late and oversample"
        )
    if flow.late == "drop" and math.ceil(flow.async_ratio) == 0:
        yield (
            "flow.late: drop needs other groups to train on, and flow.async_ratio: 0 has none; set"
            " async_ratio above 0"
        )


def _deadlines(config: Config) -> Iterator[str]:
    rollout, evaluation = config.rollout, config.eval
    if rollout is None:
        return
    # The engine's deadline must fire before the run's, or a restart never happens.
    if rollout.unresponsive_s >= config.watchdog.timeout_s:
        yield (
            f"rollout.unresponsive_s: {rollout.unresponsive_s:g} must be below watchdog.timeout_s: "
            f"{config.watchdog.timeout_s:g}, or the run ends before an engine is restarted"
        )
    if evaluation is None:
        return
    # Colocated engines sleep while the policy trains.
    if evaluation.engines and rollout.placement == "colocated":
        yield (
            "eval.engines need devices of their own, and rollout.placement: colocated has none; set"
            " eval.engines: 0"
        )


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
