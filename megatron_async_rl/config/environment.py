"""Environments: what answers a response, so that another turn follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megatron_async_rl.config.settings_model import Strict

TOOLS = "tools"
"""Name of the environment that calls functions for the model."""
AGENTS = ("agent", "verifiers")
"""Names of the environments that ask the model by themselves, over an endpoint."""
OWN_REWARD = "environment"
"""Name of the reward that adds nothing to what the environment gives."""
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
