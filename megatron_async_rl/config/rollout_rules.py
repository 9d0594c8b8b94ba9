"""Refused combinations of engines, weight transports, environments and rewards.

Each conflict states the combination, the reason, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async_rl.config.environment import (
    AGENTS,
    CODE_CPU_S,
    CODE_SHARE_OF_TIME,
    OWN_REWARD,
    TOOLS,
)
from megatron_async_rl.config.schema import Config, RolloutConfig
from megatron_async_rl.config.weights import DEFAULT_CARRIER, carriers

AT_ONCE = ("arithmetic", "countdown", OWN_REWARD)
"""Rewards that take no time, so that no limit on it matters."""


def transport_conflicts(config: Config) -> Iterator[str]:
    """Reasons why weights cannot travel as configured; none: they can."""
    transport, carrier = config.weights.transport, config.weights.carrier
    if config.rollout is None:
        if transport == DEFAULT_CARRIER:
            return
        yield (
            f"weights.transport: {transport} has no engines to bring weights to: objective.loss:"
            f" {config.objective.loss.name} learns without; remove it"
        )
        return
    colocated = config.rollout.placement == "colocated"
    if carrier.ipc and not colocated:
        yield (
            f"weights.transport: {transport} passes weights between processes on the same devices,"
            " and rollout.placement: disaggregated gives engines devices of their own; set"
            f" weights.transport: {DEFAULT_CARRIER}, or rollout.placement: colocated"
        )
    elif carrier.other_machines and colocated:
        why = "brings weights to engines on other machines"
        if carrier.per_engine:
            why = "connects the policy's device with others, and NCCL accepts no device twice"
        yield (
            f"weights.transport: {transport} {why}, and rollout.placement: colocated has the"
            " engines on the policy's own devices; set weights.transport:"
            f" {carriers(other_machines=False)}, or rollout.placement: disaggregated"
        )


def engine_conflicts(config: Config) -> Iterator[str]:
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


def environment_conflicts(config: Config) -> Iterator[str]:
    """Reasons why there would be no reward, or no end to a tool; none: there are."""
    rollout = config.rollout
    if rollout is None:
        return
    yield from _reward_conflicts(rollout)
    turns, limit_s = rollout.environment, config.watchdog.timeout_s
    if turns is not None and turns.name == TOOLS and rollout.reward.name == OWN_REWARD:
        yield (
            "rollout.reward is missing, and the environment tools rewards nothing by itself; name"
            " the reward of the last turn, such as rollout.reward.name: math"
        )
    if turns is not None and turns.name not in AGENTS and turns.max_segments > 1:
        yield (
            f"rollout.environment.max_segments: {turns.max_segments} is of agents, and {turns.name}"
            " answers every turn of one conversation; remove it"
        )
    if turns is not None and turns.name in AGENTS and turns.format == "text":
        yield (
            f"rollout.environment.format: text has no use with {turns.name}, whose endpoint answers"
            " chats; remove it"
        )
    timed = [one.name for one in rollout.reward.rewards.values() if one.name not in AT_ONCE]
    if timed and rollout.reward.timeout_s >= limit_s:
        yield (
            f"rollout.reward.timeout_s: {rollout.reward.timeout_s:g} lets a reward take as long as"
            f" watchdog.timeout_s: {limit_s:g}, after which a run in which nothing moves ends;"
            " lower the one or raise the other"
        )
    if turns is not None and turns.name not in AGENTS and turns.timeout_s >= limit_s:
        yield (
            f"rollout.environment.timeout_s: {turns.timeout_s:g} lets a tool take as long as"
            f" watchdog.timeout_s: {limit_s:g}, after which a run in which no response grows ends;"
            " lower the one or raise the other"
        )


def _reward_conflicts(rollout: RolloutConfig) -> Iterator[str]:
    for name, part in rollout.reward.rewards.items():
        key = "rollout.reward" if name is None else f"rollout.reward.parts.{name}"
        if part.name == OWN_REWARD and rollout.environment is None:
            yield (
                f"{key} is missing, or names the environment's, and there is no"
                " rollout.environment; name a reward, such as rollout.reward.name: math"
                if name is None
                else f"{key}.name: {OWN_REWARD} is what rollout.environment gives, and there is"
                " none, so it would always be 0; remove the part or add the environment"
            )
        elif part.name == OWN_REWARD and part.weight != 1.0:
            yield (
                f"{key}.weight: {part.weight:g} would be without effect: what rollout.environment"
                " gives is added as it is; leave it out and scale it in the environment, or weigh"
                " the other parts"
            )
        if part.gate and rollout.environment is not None and rollout.environment.name != TOOLS:
            yield (
                f"{key}.gate: a gate multiplies the parts of rollout.reward, and what"
                f" rollout.environment ({rollout.environment.name}) gives is added to them;"
                " remove gate, and give 0 in the environment"
            )
        if part.name == "code":
            cpu_s = part.settings.get("cpu_s", CODE_CPU_S)
            most_s = CODE_SHARE_OF_TIME * rollout.reward.timeout_s
            if isinstance(cpu_s, (int, float)) and cpu_s > most_s:
                yield (
                    f"{key}.settings.cpu_s: {cpu_s:g} is more than programs get of"
                    f" rollout.reward.timeout_s: {rollout.reward.timeout_s:g}, {most_s:g} s for all"
                    f" tests of a response; set cpu_s to at most {most_s:g}, or timeout_s to at"
                    f" least {cpu_s / CODE_SHARE_OF_TIME:g}"
                )
