"""Checks of a finished configuration. `validated` makes one and runs all of them.

Each conflict states the combination, the reason, and the fix. The facts about each method are class
attributes of its settings model, so a new method brings its own. Sections of the schema do
not depend on each other; they are combined here and in the other files of rules.
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
from megatron_async_rl.config.policy_rules import (
    fp8_conflicts,
    gather_conflicts,
    lora_conflicts,
    precision_conflicts,
    routing_conflicts,
)
from megatron_async_rl.config.rollout_rules import (
    engine_conflicts,
    environment_conflicts,
    eval_conflicts,
    sampling_conflicts,
    transport_conflicts,
)
from megatron_async_rl.config.schema import Config


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
