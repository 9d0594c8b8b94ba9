"""Environments: what answers a response, so that another turn follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megatron_async_rl.config.settings_model import Strict

if TYPE_CHECKING:
    from megatron_async_rl.config.schema import Config, RolloutConfig

TOOLS = "tools"
"""Name of the environment that calls functions for the model."""
AGENTS = ("agent", "verifiers")
"""Names of the environments that ask the model by themselves, over an endpoint."""
OWN_REWARD = "environment"
"""Name of the reward that adds nothing to what the environment gives."""
AT_ONCE = ("arithmetic", "countdown", OWN_REWARD)
"""Rewards that take no time, so that no limit on it matters."""
CODE_CPU_S = 5.0
"""Processor time of a program of the reward `code`, where its settings have no cpu_s."""
CODE_SHARE_OF_TIME = 0.8
"""Share of `rollout.reward.timeout_s` that the reward `code` gives its programs: what takes longer
is wrong, not an error."""


class EnvironmentConfig(Strict):
    """The partner that answers each turn of the model; null: a response is one turn.
    `rollout.sampling.max_tokens` bounds all turns of a sample together, the environment's tokens
    included."""

    name: str
    """`module:factory`, whose result has reset(prompt) and step(response); `tools`: functions that
    the model may call; `openenv`: an OpenEnv
    server; `verifiers`: an environment of that package; `agent`: a program or a function that is
    given the base URL of an OpenAI-compatible endpoint (docs/environments.md)."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the factory."""
    format: Literal["chat", "text"] = "chat"
    """Conversion of the environment's output into tokens. `chat`: as messages, by the chat
    template that also renders the prompts; `text`: as plain text."""
    max_turns: PositiveInt = 8
    """Largest number of turns of the model in a sample."""
    max_segments: PositiveInt = 1
    """Largest number of sequences in a sample of `agent` or `verifiers`. A call that does not
    continue an earlier one (the agent has compacted its context, or begun a sub-agent) begins
    another sequence, with the same token limit as any sample; a call beyond the limit is
    refused."""
    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls, by its name there, for `tools`, `agent` and
    `verifiers`."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of one reset or step, or of an agent's whole run; below watchdog.timeout_s.
    Beyond it the environment's process is killed, and the sample counts as an error."""
    processes: PositiveInt = 64
    """Largest number of samples per engine that are in an environment at a time, each with its
    own process. Other samples wait."""
    memory_mib: PositiveInt | None = None
    """Memory limit (address space, MiB) of each process; null: no limit."""


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
