"""The vLLM engines: placement, rewards and environments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_async_rl.config.engine_options import refused_options
from megatron_async_rl.config.policy import Fraction
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.config.settings_model import OnlyJson, Strict

TOOLS = "tools"
"""Name of the environment that calls functions for the model."""
AGENTS = ("agent", "verifiers")
"""Names of the environments that call the model themselves, over an endpoint."""
# Constants that both rules and processes use, so that neither imports the other.
OWN_REWARD = "environment"
"""Name of the reward that adds nothing to what the environment gives."""
CODE_CPU_S = 5.0
"""Processor time of a program of the reward `code`, where its settings have no cpu_s."""
CODE_SHARE_OF_TIME = 0.8
"""Share of `rollout.reward.timeout_s` that the reward `code` gives its programs: what takes longer
is wrong, not an error."""


class EnvironmentConfig(Strict):
    """Environment that answers each turn of the model; null: a response is one turn.
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


class RewardPart(Strict):
    """One of several rewards of a response; `NAME` is its name in the metrics and the sample
    log."""

    name: str
    """Name of the reward, as in `rollout.reward.name`."""
    weight: float = 1.0
    """The response's reward is the sum of its parts times their weights; 0 only shows the part."""
    gate: bool = False
    """Multiply that sum by the part instead of adding it, so that a part of 0 makes the reward
    0."""
    settings: Mapping[str, Any] = {}
    """Settings of the reward, as in `rollout.reward.settings`."""
    per: Literal["response", "group"] = "response"
    """Unit of one call, as in `rollout.reward.per`."""
    where: Annotated[Mapping[str, Any], OnlyJson] = {}
    """Prompts to which the part applies, by their columns: `{kind: math}`, or one of several
    values, `{kind: [math, physics]}`. Empty: all prompts. `fields` of a source or a held-out set
    adds a column to all rows of a file."""

    def applies(self, fields: Mapping[str, Any]) -> bool:
        """`fields`: those of a prompt."""
        return all(
            # A part never applies to a prompt without its column.
            name in fields
            and (fields[name] in value if isinstance(value, list) else fields[name] == value)
            for name, value in self.where.items()
        )


class RewardConfig(Strict):
    """The reward of a response."""

    name: str | None = None
    """`arithmetic`, `countdown`, `math`, `code`, `http`, `judge`, `environment`
    (rollout.environment's turns alone), or `module:function` (called as function(prompt, response)
    -> float). Null: `parts`."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the reward, such as `url` of `http` and `judge` (docs/rewards.md); of a
    function of your own, its parameters besides prompt and response."""
    parts: Mapping[str, RewardPart] = {}
    """Several rewards by names of your own, instead of `name`: each with a weight."""
    per: Literal["response", "group"] = "response"
    """Unit of one call. `group`: one call with all responses to a prompt, function(prompt,
    responses) -> a number for each, once the last has finished. The controller makes the call,
    on its machine."""
    on_error: Literal["drop", "stop"] = "drop"
    """Treatment of a reward that raises or is not finite: `drop` logs and counts the sample and
    leaves it out of training; `stop` ends the run."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of one call of one reward; beyond it the response counts as an error. The
    process of a plain function is killed; the call of an `async` one is cancelled. Below
    watchdog.timeout_s."""
    workers: PositiveInt = 4
    """Largest number of processes that call rewards, per engine and, for `per: group`, of the
    controller; they start when responses wait. The built-in `arithmetic` and `countdown` need
    none."""
    concurrency: PositiveInt = 64
    """Number of concurrent calls of an `async` reward, such as `http` and `judge`, per process."""
    batch: PositiveInt = 32
    """Largest number of responses in one call of a reward that takes lists, `function(prompts,
    responses)`; a free process takes the waiting ones."""
    memory_mib: PositiveInt | None = None
    """Memory limit (address space, MiB) of each process; null: no limit."""

    @model_validator(mode="after")
    def _name_or_parts(self) -> RewardConfig:
        # Exactly one of the two forms.
        if (self.name is None) != bool(self.parts):
            raise ValueError(
                "needs either `name`, one of arithmetic, countdown, math, code, http, judge or"
                " module:function, or `parts`, several of them"
            )
        if self.parts and self.settings:
            raise ValueError("`settings` belongs to `name`; each of `parts` has its own")
        # Parts may differ in their unit, so the common key would be ambiguous.
        if self.parts and self.per == "group":
            raise ValueError("`per` belongs to `name`; each of `parts` has its own")
        for part in self.parts:
            if not re.fullmatch(r"[A-Za-z][\w-]*", part):
                raise ValueError(
                    f"parts: {part!r} cannot be the name of a part, which is a metric"
                    f" `reward/part/{part}`: use letters, digits, _ and -"
                )
        gates = [name for name, part in self.parts.items() if part.gate]
        # A product of gates alone would multiply an empty sum.
        if gates and len(gates) == len(self.parts):
            raise ValueError(
                f"parts: {gates[0]!r} is a gate, and no part is left that it could multiply:"
                " remove `gate`, or add a part"
            )
        for name in gates:
            if self.parts[name].weight != 1.0:
                raise ValueError(
                    f"parts: {name!r} is a gate, which has no weight: remove one of the two"
                )
        return self

    def total(self, parts: Mapping[str, float]) -> float:
        """The reward of a response, of its `parts` by their names; others than these are only
        shown."""
        # A part that does not apply to a prompt neither adds nor gates.
        own = {name: part for name, part in self.parts.items() if name in parts}
        added = sum(part.weight * parts[name] for name, part in own.items() if not part.gate)
        return added * math.prod(parts[name] for name, part in own.items() if part.gate)

    @property
    def rewards(self) -> Mapping[str | None, RewardPart]:
        """The parts by their names; one reward alone has none."""
        if self.name is None:
            return {name: part for name, part in self.parts.items()}  # noqa: C416
        return {None: RewardPart(name=self.name, settings=self.settings, per=self.per)}


class RolloutConfig(Strict):
    """The vLLM engines; absent with `objective.loss: sft`."""

    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated`: engines have their own devices and sample while the policy trains.
    `colocated`: engines and policy share devices in alternating phases: generate, sleep, train,
    load the new weights, wake. While engines generate, only the policy's parameters stay on the
    device; its optimizer state is in host memory."""
    engines: PositiveInt = 1
    """Number of vLLM engines, each with the whole model."""
    tensor: PositiveInt = 1
    """Workers that share every layer of one engine (vLLM's tensor parallelism); divides heads and
    key-value heads."""
    pipeline: PositiveInt = 1
    """Stages of one engine, each with some of the layers (vLLM's pipeline parallelism); an engine
    has `tensor` times as many workers, each on a device of its own. At most the model's layers."""
    in_flight: Literal["keep", "recompute"] = "keep"
    """Effect of a weight update on running responses. `keep`: they continue on the key-value
    cache of the old weights. `recompute`: the cache is cleared, and the new weights read prompt
    and response again. Log-probs of tokens that were already sampled do not change in either
    case."""
    restarts_per_hour: NonNegativeInt = 3
    """Restarts of each engine per hour after it died or stopped answering; after that the run
    continues with the others."""
    unresponsive_s: PositiveFloat = 60.0
    """Seconds without an answer of its vLLM process after which an engine counts as dead; below
    watchdog.timeout_s."""
    sampling: SamplingConfig
    environment: EnvironmentConfig | None = None
    reward: RewardConfig = RewardConfig(name=OWN_REWARD)
    max_concurrent: PositiveInt = 256
    """Number of responses that one engine decodes at a time."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of the key-value cache of an engine on the CPU; on a GPU, set
    `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of its GPU's memory that an engine takes."""
    max_context: PositiveInt | None = None
    """Largest number of prompt and response tokens; null takes the model's own limit."""
    start_timeout_s: PositiveFloat = 600.0
    """Time limit for the start of an engine."""
    vllm: Mapping[str, Any] = {}
    """More arguments of vLLM's engine by their names in `AsyncEngineArgs`, such as
    `max_num_batched_tokens: 16384`, handed on as they are. `enable_expert_parallel: true` divides a
    mixture's experts, whole, over the `tensor` workers of a stage; `quantization: fp8_per_channel`
    (or `fp8_per_tensor`, `fp8_per_block`) has vLLM quantise the weights of every update as it loads
    them. An argument that another key sets, or that would break the loading of weights or the
    log-probs, is refused with the reason."""

    @property
    def quantised(self) -> bool:
        """vLLM quantises weights as it loads them."""
        return self.vllm.get("quantization") is not None

    @property
    def workers(self) -> int:
        """Processes of one engine, each with its device."""
        return self.tensor * self.pipeline

    @property
    def max_segments(self) -> int:
        """Sequences of one sample."""
        return 1 if self.environment is None else self.environment.max_segments

    @field_validator("vllm")
    @classmethod
    def _free_options(cls, vllm: Mapping[str, Any]) -> Mapping[str, Any]:
        # Refused here for any device; the plan checks those that depend on it.
        refused = [f"{name}: {why}" for name, why in refused_options(vllm)]
        if refused:
            raise ValueError(f"may not be set here: {'; '.join(refused)}")
        return vllm
