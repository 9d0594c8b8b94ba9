"""Methods that do not go together. Each conflict states the combination, the reason, and the fix.

`objective_conflicts` looks at the objective alone, `run_conflicts` at the objective and the
gradient controls within a run. The facts about each method are class attributes of its settings
model, so a new method brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_async_rl.config.advantages import OpobAdvantage, OtbAdvantage
from megatron_async_rl.config.environment import environment_conflicts
from megatron_async_rl.config.flow import flow_conflicts
from megatron_async_rl.config.fp8 import fp8_conflicts
from megatron_async_rl.config.lora import lora_conflicts
from megatron_async_rl.config.sampling import eval_conflicts, sampling_conflicts

if TYPE_CHECKING:
    from megatron_async_rl.config.controls import ControlConfig
    from megatron_async_rl.config.objective import ObjectiveConfig
    from megatron_async_rl.config.schema import Config

BFLOAT16_BETA = 1.0 - 2.0**-8
"""Largest beta at which a moment in bfloat16, left alone, still decays at every step: half the
distance of two neighbouring numbers is at most 2^-8 of them."""


def objective_conflicts(objective: ObjectiveConfig) -> Iterator[str]:
    """Reasons why the parts of this objective do not compose; none: they do."""
    loss, advantage = objective.loss, objective.advantage
    yield from _aggregation(objective)
    if not loss.uses_advantage and advantage.name != "none":
        yield (
            f"loss: {loss.name} reads no advantage, so advantage: {advantage.name} would be without"
            " effect; set advantage: none"
        )
    yield from _advantage(objective)
    yield from _corrections(objective)
    if loss.name == "sft" and objective.kl is not None and objective.kl.ratios:
        yield (
            "kl.weight: truncated weighs by pi / pi_behavior, and loss: sft learns from given"
            " responses, which no policy sampled; set kl.weight: none"
        )
    if loss.uses_reference and objective.reference is None:
        yield (
            f"loss: {loss.name} compares with a reference policy: add `reference: {{}}` (the run's"
            " first weights, kept in host memory), or name another model or a refresh there"
        )
    if loss.name == "decoupled_ppo" and objective.proximal == "behavior":
        yield (
            "loss: decoupled_ppo weighs by pi_prox / pi_behavior, which is 1 with proximal:"
            " behavior, so it would be ppo_clip; set proximal: recompute (or another), or loss:"
            " ppo_clip"
        )
    if objective.reference is not None and not objective.needs_reference:
        yield (
            "reference is set, but nothing compares with it: add kl, or remove reference (loss:"
            f" {loss.name} does not use it)"
        )


def _aggregation(objective: ObjectiveConfig) -> Iterator[str]:
    used, loss = objective.aggregation_used, objective.loss
    if (used == "seq-mean") != (loss.level == "sequence"):
        own = loss.default_aggregation
        yield (
            f"aggregation: {used} does not fit loss: {loss.name}, which is defined per"
            f" {loss.level}; leave aggregation out (it is {own})"
        )
    if (used == "seq-mean-token-sum-norm") != (objective.norm_length is not None):
        yield (
            "norm_length and aggregation: seq-mean-token-sum-norm go together; "
            f"got aggregation={used}, norm_length={objective.norm_length}"
        )


def _advantage(objective: ObjectiveConfig) -> Iterator[str]:
    advantage = objective.advantage
    if advantage.reads_values and objective.value is None:
        yield f"advantage: {advantage.name} reads the estimates of a value head; add value"
    if objective.value is not None and not advantage.reads_values:
        yield (
            f"value is set, but advantage: {advantage.name} makes no returns for it to learn; set"
            " advantage: gae or remove it"
        )
    if isinstance(advantage, OtbAdvantage) and objective.proximal != "recompute":
        yield (
            "advantage: otb reads 1 - 2 p + sum p^2, with p of the proximal policy and the sum of"
            f" the policy in training; they are not the same with proximal: {objective.proximal};"
            " set proximal: recompute"
        )
    if isinstance(advantage, OpobAdvantage):
        yield from _opob(objective, advantage)


def _opob(objective: ObjectiveConfig, advantage: OpobAdvantage) -> Iterator[str]:
    loss, used = objective.loss, objective.aggregation_used
    if loss.uses_advantage and not loss.linear_in_advantage:
        yield (
            "advantage: opob is the baseline of least variance for gradients that are the"
            f" advantage times something it does not change, and loss: {loss.name} clips or weighs"
            " by the advantage; set a loss that does not, like reinforce"
        )
    signed = [correction.name for correction in objective.corrections if correction.uses_advantage]
    if signed and advantage.mode == "exact":
        yield (
            f"corrections {signed} look at the sign of the advantage, which advantage: opob, mode:"
            " exact knows only after the backward passes; remove them, or set mode: cheap"
        )
    if advantage.mode == "cheap" and used not in ("seq-mean", "seq-mean-token-mean"):
        yield (
            "advantage: opob, mode: cheap estimates the score gradient of a mean over the"
            f" response's tokens, and aggregation: {used} takes another; set aggregation:"
            " seq-mean-token-mean, or mode: exact"
        )


def _corrections(objective: ObjectiveConfig) -> Iterator[str]:
    loss = objective.loss
    names = [correction.name for correction in objective.corrections]
    if names and loss.name == "sft":
        yield (
            f"corrections {names} compare with the policy that sampled, and loss: sft learns from"
            " given responses; remove them"
        )
    idle = [
        correction.name
        for correction in objective.corrections
        if correction.compares_prox_with_behavior
    ]
    if idle and objective.proximal == "behavior":
        yield (
            f"corrections {idle} look at pi_prox / pi_behavior, which is 1 with proximal: behavior;"
            " set proximal: recompute (or another), or remove the corrections"
        )
    idle = [
        correction.name
        for correction in objective.corrections
        if correction.compares_current_with_prox
    ]
    if idle and objective.proximal == "recompute" and objective.steps_per_batch == 1:
        yield (
            f"corrections {idle} look at pi / pi_prox, which is 1 with proximal: recompute, as each"
            " batch is one step; set proximal: behavior (or another), minibatches or epochs above"
            " 1, or remove the corrections"
        )
    for correction in objective.corrections:
        if correction.weighs and loss.against_behavior:
            yield (
                f"correction {correction.name} weighs by an importance ratio that loss: {loss.name}"
                " already holds (its ratio is against the behaviour policy); remove one of the two"
            )
        if correction.per_token and loss.level == "sequence":
            yield (
                f"correction {correction.name} gives each token its own factor, and loss:"
                f" {loss.name} is one number per sequence; use its sequence level"
            )


def run_conflicts(config: Config) -> Iterator[str]:
    """Reasons why objective and controls do not fit the run around them; none: they do."""
    yield from _controls(config)
    yield from flow_conflicts(config)
    yield from lora_conflicts(config)
    yield from fp8_conflicts(config)
    yield from _precision(config)
    yield from _gather(config)
    yield from _transport(config)
    yield from _engines(config)
    yield from _routing(config)
    yield from sampling_conflicts(config)
    yield from eval_conflicts(config)
    yield from environment_conflicts(config)
    objective, flow = config.objective, config.flow
    if objective.minibatches > flow.prompts_per_step:
        yield (
            f"objective.minibatches: {objective.minibatches} is more than the groups of a batch,"
            f" which stay whole; set it to at most flow.prompts_per_step: {flow.prompts_per_step}"
        )
    loss, advantage = objective.loss, objective.advantage
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


def _gather(config: Config) -> Iterator[str]:
    """Reasons why weights cannot be gathered during a forward pass; none: they can."""
    policy, key = config.policy, "policy.parallel.overlap_param_gather"
    if not policy.parallel.overlap_param_gather:
        return
    if not policy.parallel.distributed_optimizer:
        yield (
            f"{key}: without the distributed optimizer every rank updates all weights, and there is"
            " nothing to gather; set policy.parallel.distributed_optimizer: true, or remove it"
        )
    elif not policy.parallel.overlap_grad_reduce:
        yield (
            f"{key} needs gradients in buckets, or the first layer would wait for all weights; set"
            " policy.parallel.overlap_grad_reduce: true, or remove it"
        )
    if config.objective.steps_per_batch == 1:
        yield (
            f"{key}: a batch makes one optimizer step, whose weights are published at once; set"
            " objective.minibatches or objective.epochs to more than 1, or remove it"
        )
    if policy.lora is not None:
        yield (
            f"{key} waits for the weights of a layer where the layer begins, and adapters"
            " (policy.lora) are read by the layers that they adapt; remove one of the two"
        )


def _engines(config: Config) -> Iterator[str]:
    """Reasons why no engine can be as the configuration has it; none: one can."""
    rollout = config.rollout
    if rollout is None:
        return
    if rollout.pipeline > 1 and config.policy.routing_replay == "rollout":
        yield (
            f"rollout.pipeline: {rollout.pipeline}, and vLLM records the experts of"
            " policy.routing_replay: rollout where one stage has all layers; set rollout.pipeline:"
            " 1 and a larger rollout.tensor, or policy.routing_replay: none or proximal"
        )
    if rollout.vllm.get("enable_expert_parallel") and rollout.tensor == 1:
        yield (
            "rollout.vllm.enable_expert_parallel divides experts over the workers of"
            " rollout.tensor, and that is 1; set it to more, or remove the option"
        )
    if rollout.quantised and config.model.dtype == "float32":
        yield (
            f"rollout.vllm.quantization: {rollout.vllm['quantization']} multiplies in 8 bits what"
            " is bfloat16 else, and model.dtype is float32; set model.dtype: bfloat16, or remove it"
        )


def _transport(config: Config) -> Iterator[str]:
    """Reasons why weights cannot travel as configured; none: they can."""
    transport = config.weights.transport
    if transport == "shared_memory":
        return
    if config.rollout is None:
        yield (
            f"weights.transport: {transport} has no engines to bring weights to: objective.loss:"
            f" {config.objective.loss.name} learns without; remove it"
        )
        return
    colocated = config.rollout.placement == "colocated"
    if transport == "cuda_ipc" and not colocated:
        yield (
            "weights.transport: cuda_ipc passes weights between processes on the same devices, and"
            " rollout.placement: disaggregated gives engines devices of their own; set"
            " weights.transport: shared_memory, or rollout.placement: colocated"
        )
    elif transport != "cuda_ipc" and colocated:
        why = {
            "relay": "brings weights to engines on other machines",
            "collective": "connects the policy's device with others, as NCCL takes none twice",
        }[transport]
        yield (
            f"weights.transport: {transport} {why}, and rollout.placement: colocated has the"
            " engines on the policy's own devices; set weights.transport: shared_memory or"
            " cuda_ipc, or rollout.placement: disaggregated"
        )


def _routing(config: Config) -> Iterator[str]:
    """Reasons why there is no choice of experts to replay; none: there is one."""
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
        elif isinstance(objective.advantage, OpobAdvantage) and objective.advantage.mode == "exact":
            yield (
                "policy.routing_replay: proximal belongs to micro-batches as they are scored, and"
                " objective.advantage: opob, mode: exact trains one sequence at a time; set mode:"
                " cheap, or policy.routing_replay: rollout"
            )


def _controls(config: Config) -> Iterator[str]:
    """Reasons why the gradient controls do not go together, or not with this run; none: they do."""
    controls = config.controls
    names = [control.name for control in controls]
    if len(set(names)) != len(names):
        yield f"controls: each at most once, got {names}"
    judging = [control.name for control in controls if control.judges_alignment]
    if len(judging) > 1:
        yield (
            f"controls: {' and '.join(judging)} both act on the cosine of consecutive gradients,"
            " and matched_norm is what gac is compared with: run them one at a time"
        )
    for name in ("gac", "displacement"):
        if "matched_lr" in names and name in names:
            yield (
                f"controls: matched_lr stands in for {name} at the same mean update norm; run"
                f" {name} alone with policy.optimizer.log_update_norm: true, read the mean of its"
                " `update/norm`, and give it to matched_lr in a run of its own"
            )
    objective = config.objective
    if judging and objective.minibatches == 1 and objective.epochs > 1:
        yield (
            f"controls: {judging[0]} compares the gradients of consecutive optimizer steps, and"
            f" with objective.minibatches: 1 and objective.epochs: {objective.epochs} those are"
            " gradients of the same samples; set objective.minibatches to at least 2, or"
            " objective.epochs: 1"
        )
    setting = [control.name for control in controls if control.sets_beta1]
    if len(setting) > 1:
        yield (
            f"controls: {' and '.join(setting)} both set beta1, and the later would overrule the"
            " earlier; keep one"
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
            f"controls: beta1 is {own:g} in policy.optimizer.betas already, so the control would be"
            " without effect; remove it"
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


def _precision(config: Config) -> Iterator[str]:
    """Reasons why the numbers of gradients and moments do not fit the run; none: they do."""
    settings = config.policy.optimizer
    if settings.gradient_dtype == "bfloat16" and config.model.dtype != "bfloat16":
        yield (
            "policy.optimizer.gradient_dtype: bfloat16 sums gradients in the model's numbers, and"
            f" model.dtype is {config.model.dtype}, so it would change nothing; set model.dtype:"
            " bfloat16, or gradient_dtype: float32"
        )
    if settings.moment_dtype == "bfloat16":
        for key, beta in _betas(config):
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
