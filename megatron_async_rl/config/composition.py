"""Which methods go together. Each refusal says what was combined, why that is wrong, and what to change.

`objective_refusals` looks at the objective alone, `run_refusals` at the objective and the step controls within a run. The facts
about each method are class attributes of its settings model, so a new method brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_async_rl.config.advantages import OpobAdvantage, OtbAdvantage
from megatron_async_rl.config.control_composition import control_refusals
from megatron_async_rl.config.flow_composition import flow_refusals

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import ObjectiveConfig
    from megatron_async_rl.config.schema import Config


def objective_refusals(objective: ObjectiveConfig) -> Iterator[str]:
    """Reasons why the parts of this objective do not compose; none: they do."""
    loss, advantage = objective.loss, objective.advantage
    yield from _aggregation(objective)
    if not loss.uses_advantage and advantage.name != "none":
        yield f"loss: {loss.name} reads no advantage, so advantage: {advantage.name} would be without effect; set advantage: none"
    yield from _advantage(objective)
    yield from _corrections(objective)
    if loss.uses_reference and objective.reference is None:
        yield (
            f"loss: {loss.name} compares with a reference policy: add `reference: {{}}` (the run's first weights, kept in host "
            "memory), or name another model or a refresh there"
        )
    if loss.name == "decoupled_ppo" and objective.proximal == "behavior":
        yield (
            "loss: decoupled_ppo weighs by pi_prox / pi_behavior, which is 1 with proximal: behavior, so it would be ppo_clip; "
            "set proximal: recompute (or another), or loss: ppo_clip"
        )
    if objective.reference is not None and not objective.needs_reference:
        yield f"reference is set, but nothing compares with it: add kl, or remove reference (loss: {loss.name} does not use it)"


def _aggregation(objective: ObjectiveConfig) -> Iterator[str]:
    used, loss = objective.aggregation_used, objective.loss
    if (used == "seq-mean") != (loss.level == "sequence"):
        own = loss.default_aggregation
        yield (
            f"aggregation: {used} does not fit loss: {loss.name}, which is defined per {loss.level}; "
            f"leave aggregation out (it is {own})"
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
        yield f"value is set, but advantage: {advantage.name} makes no returns for it to learn; set advantage: gae or remove it"
    if isinstance(advantage, OtbAdvantage) and objective.proximal != "recompute":
        yield (
            "advantage: otb reads 1 - 2 p + sum p^2, with p of the proximal policy and the sum of the policy in training; they "
            f"are not the same with proximal: {objective.proximal}; set proximal: recompute"
        )
    if isinstance(advantage, OpobAdvantage):
        yield from _opob(objective, advantage)


def _opob(objective: ObjectiveConfig, advantage: OpobAdvantage) -> Iterator[str]:
    loss, used = objective.loss, objective.aggregation_used
    if loss.uses_advantage and not loss.linear_in_advantage:
        yield (
            "advantage: opob is the baseline of least variance for gradients that are the advantage times something it does not "
            f"change, and loss: {loss.name} clips or weighs by the advantage; set a loss that does not, like reinforce"
        )
    signed = [correction.name for correction in objective.corrections if correction.uses_advantage]
    if signed and advantage.mode == "exact":
        yield (
            f"corrections {signed} look at the sign of the advantage, which advantage: opob, mode: exact knows only after the "
            "backward passes; remove them, or set mode: cheap"
        )
    if advantage.mode == "cheap" and used not in ("seq-mean", "seq-mean-token-mean"):
        yield (
            "advantage: opob, mode: cheap estimates the score gradient of a mean over the response's tokens, and aggregation: "
            f"{used} takes another; set aggregation: seq-mean-token-mean, or mode: exact"
        )


def _corrections(objective: ObjectiveConfig) -> Iterator[str]:
    loss = objective.loss
    names = [correction.name for correction in objective.corrections]
    if names and loss.name == "sft":
        yield f"corrections {names} compare with the policy that sampled, and loss: sft learns from given responses; remove them"
    idle = [correction.name for correction in objective.corrections if correction.compares_prox_with_behavior]
    if idle and objective.proximal == "behavior":
        yield (
            f"corrections {idle} look at pi_prox / pi_behavior, which is 1 with proximal: behavior; "
            "set proximal: recompute (or another), or remove the corrections"
        )
    idle = [correction.name for correction in objective.corrections if correction.compares_current_with_prox]
    if idle and objective.proximal == "recompute":
        yield (
            f"corrections {idle} look at pi / pi_prox, which is 1 with proximal: recompute, as each batch is one step; "
            "set proximal: behavior (or another), or remove the corrections"
        )
    for correction in objective.corrections:
        if correction.weighs and loss.against_behavior:
            yield (
                f"correction {correction.name} weighs by an importance ratio that loss: {loss.name} already holds "
                "(its ratio is against the behaviour policy); remove one of the two"
            )
        if correction.per_token and loss.level == "sequence":
            yield (
                f"correction {correction.name} gives each token its own factor, and loss: {loss.name} is one number per "
                "sequence; use its sequence level"
            )


def run_refusals(config: Config) -> Iterator[str]:
    """Reasons why objective and controls do not fit the run around them; none: they do."""
    yield from control_refusals(config)
    yield from flow_refusals(config)
    objective, flow = config.objective, config.flow
    loss, advantage = objective.loss, objective.advantage
    if config.supervised:
        if config.rollout is not None or config.eval is not None:
            yield "objective.loss: sft trains on given responses: remove `rollout` and `eval`"
        if flow.group_size != 1 or flow.async_ratio != 0:
            yield "objective.loss: sft needs flow.group_size: 1 and flow.async_ratio: 0"
    elif config.rollout is None:
        yield f"objective.loss: {loss.name} learns from sampled responses: add `rollout`"
    if flow.group_size == 1 and advantage.needs_group:
        yield (f"objective.advantage: {advantage.name} compares the responses of a group: flow.group_size must be at least 2")
    if isinstance(advantage, OpobAdvantage) and advantage.mode == "exact":
        if config.policy.parallel.virtual_pipeline > 1:
            yield (
                "objective.advantage: opob, mode: exact runs one sequence at a time, and policy.parallel.virtual_pipeline > 1 "
                "wants at least as many micro-batches as there are stages; set it to 1, or mode: cheap"
            )
        if config.policy.parallel.expert > 1:
            yield (
                "objective.advantage: opob, mode: exact measures each sequence's gradient on one model replica, and "
                "policy.parallel.expert > 1 spreads it over several; set it to 1, or mode: cheap"
            )
    if flow.group_size == 1 and loss.compares_group:
        yield f"objective.loss: {loss.name} compares the responses of a group: flow.group_size must be at least 2"
    versions = math.ceil(flow.async_ratio) + 1
    kept = [f"controls: {control.name}" for control in config.controls if control.needs_past_weights]
    kept += ["objective.proximal: snapshot"] if objective.proximal == "snapshot" else []
    if kept and objective.snapshots < versions:
        yield (
            f"objective.snapshots: {objective.snapshots} does not reach back to the version that sampled the oldest token: with "
            f"flow.async_ratio: {flow.async_ratio:g} a batch holds up to {versions} versions ({' and '.join(kept)}); "
            f"set it to at least {versions}"
        )
    if loss.whole_group_of_one_version and flow.async_ratio > 0 and flow.selection.name != "exact_lag":
        yield (
            f"objective.loss: {loss.name} is defined for groups sampled by one weight version, and with "
            f"flow.async_ratio: {flow.async_ratio:g} responses continue across weight updates; set flow.async_ratio: 0, or "
            "flow.selection: exact_lag"
        )
