"""Settings of the vLLM engines: placement, rewards and environments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_async_rl.config.engine_options import CPU_CACHE_BLOCK, refused_options, whole_number
from megatron_async_rl.config.policy import Fraction
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.config.settings_model import OnlyJson, Strict

TOOLS = "tools"
"""Name of the environment that executes the model's function calls."""
AGENTS = ("agent", "verifiers")
"""Names of the environments that call the model themselves, over an endpoint."""
# Rules and processes both use these constants; here neither needs to import the other.
OWN_REWARD = "environment"
"""Name of the reward that adds nothing to the environment's rewards."""
CODE_CPU_S = 5.0
"""Default of `cpu_s` in the settings of the reward `code`: CPU time limit of one program, in
seconds."""
CODE_SHARE_OF_TIME = 0.8
"""Share of `rollout.reward.timeout_s` in which the programs of the reward `code` must finish. A
response whose programs take longer is wrong; it is not an error."""


class EnvironmentConfig(Strict):
    """Environment that responds to each turn of the model; null: a response is one turn.
    `rollout.sampling.max_tokens` limits all turns of a sample together, including the environment's
    tokens."""

    name: str
    """Kind of the environment (docs/environments.md). `module:factory`: your own; the factory's
    result has reset(prompt) and step(response). `tools`: functions that the model may call.
    `openenv`: an OpenEnv server. `verifiers`: an environment of that package. `agent`: a program or
    a function that gets the base URL of an OpenAI-compatible endpoint."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the factory."""
    format: Literal["chat", "text"] = "chat"
    """Conversion of the environment's output into tokens. `chat`: messages, which the chat template
    of the prompts renders. `text`: plain text."""
    max_turns: PositiveInt = 8
    """Largest number of turns of the model in a sample."""
    max_segments: PositiveInt = 1
    """Largest number of sequences in a sample of `agent` or `verifiers`. A call that does not
    continue an earlier one (the agent has compacted its context or started a sub-agent) starts
    another sequence, with the token limit of a sample; calls beyond this number of sequences are
    refused."""
    tool_parser: str = "hermes"
    """Name of vLLM's parser of the model's tool calls, for `tools`, `agent` and `verifiers`."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of one reset or step, or of an agent's whole run, in seconds; below
    watchdog.timeout_s. When it expires the environment's process is killed, and the sample counts
    as an error."""
    processes: PositiveInt = 64
    """Largest number of samples per engine that use an environment at a time, each in its own
    process. Other samples wait."""
    memory_mib: PositiveInt | None = None
    """Memory limit (address space, MiB) of each process; null: no limit."""


class RewardPart(Strict):
    """One of several rewards of a response. `NAME` is its name in the metrics and the sample
    log."""

    name: str
    """Name of the reward, as in `rollout.reward.name`."""
    weight: float = 1.0
    """Weight of the part in the response's reward, the weighted sum of the parts. A part of weight
    0 is only logged."""
    gate: bool = False
    """Multiply the sum by the part instead of adding the part, so that the reward is 0 if the part
    is 0."""
    settings: Mapping[str, Any] = {}
    """Settings of the reward, as in `rollout.reward.settings`."""
    per: Literal["response", "group"] = "response"
    """Unit of one call, as in `rollout.reward.per`."""
    where: Annotated[Mapping[str, Any], OnlyJson] = {}
    """Prompts to which the part applies, by their columns: `{kind: math}`, or one of several
    values, `{kind: [math, physics]}`. Empty: all prompts. `fields` of a source or a held-out set
    adds a column to all rows of a file."""

    def applies(self, fields: Mapping[str, Any]) -> bool:
        """Return True if the part applies to a prompt with these `fields`."""
        return all(
            # A part does not apply to a prompt that lacks its column.
            name in fields
            and (fields[name] in value if isinstance(value, list) else fields[name] == value)
            for name, value in self.where.items()
        )


class RewardConfig(Strict):
    """Reward of a response."""

    name: str | None = None
    """Name of the reward: `arithmetic`, `countdown`, `math`, `code`, `http`, `judge`,
    `reasoning_gym`, `environment` (only the rewards of rollout.environment's turns), or
    `module:function`, which is called as function(prompt, response) -> float. Null: `parts`."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the reward, such as `url` of `http` and `judge` (docs/rewards.md). For
    your own function these are its parameters besides prompt and response."""
    parts: Mapping[str, RewardPart] = {}
    """Several weighted rewards, instead of `name`, under names that you choose."""
    per: Literal["response", "group"] = "response"
    """Unit of one call. `group`: one call for all responses to a prompt, function(prompt,
    responses) -> a number for each response, after the last response has finished. The controller
    makes the call, on its machine."""
    on_error: Literal["drop", "stop"] = "drop"
    """Treatment of a reward that raises or is not finite. `drop` logs and counts the sample and
    leaves it out of training; `stop` ends the run."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of one call of one reward, in seconds; below watchdog.timeout_s. When it expires
    the response counts as an error: the process of a plain function is killed, and the call of an
    `async` function is cancelled."""
    workers: PositiveInt = 4
    """Largest number of processes of a reward, or of each part, per engine and, for `per: group`,
    in the controller. The first starts with the engine, others when responses wait. The built-in
    `arithmetic` and `countdown` need no process."""
    concurrency: PositiveInt = 64
    """Number of concurrent calls of an `async` reward, such as `http` and `judge`, per process."""
    batch: PositiveInt = 32
    """Largest number of responses in one call of a reward that takes lists, `function(prompts,
    responses)`. A free process takes the responses that wait."""
    memory_mib: PositiveInt | None = None
    """Memory limit (address space, MiB) of each process; null: no limit."""

    @model_validator(mode="after")
    def _name_or_parts(self) -> RewardConfig:
        # Exactly one of the two forms is set.
        if (self.name is None) != bool(self.parts):
            raise ValueError(
                "needs either `name`, a reward such as math or module:function, or `parts`,"
                " several rewards"
            )
        if self.parts and self.settings:
            raise ValueError("`settings` is for `name`; set the `settings` of each part instead")
        # Parts may differ in their unit, so a common `per` would be ambiguous.
        if self.parts and self.per == "group":
            raise ValueError("`per` is for `name`; set the `per` of each part instead")
        for part in self.parts:
            if not re.fullmatch(r"[A-Za-z][\w-]*", part):
                raise ValueError(
                    f"parts: {part!r} cannot be the name of a part, because the metric"
                    f" `reward/part/{part}` contains it: use letters, digits, _ and -"
                )
        gates = [name for name, part in self.parts.items() if part.gate]
        # Without any other part a gate would multiply an empty sum.
        if gates and len(gates) == len(self.parts):
            raise ValueError(
                f"parts: {gates[0]!r} is a gate, and there is no part that it could multiply:"
                " remove `gate`, or add a part"
            )
        for name in gates:
            if self.parts[name].weight != 1.0:
                raise ValueError(
                    f"parts: {name!r} is a gate, which has no weight: remove `gate` or `weight`"
                )
        return self

    def total(self, parts: Mapping[str, float]) -> float:
        """Return the reward of a response from its `parts`, name -> value. Names outside
        `self.parts` do not count."""
        # A part that does not apply to a prompt is absent, so it neither adds nor gates.
        own = {name: part for name, part in self.parts.items() if name in parts}
        added = sum(part.weight * parts[name] for name, part in own.items() if not part.gate)
        return added * math.prod(parts[name] for name, part in own.items() if part.gate)

    @property
    def rewards(self) -> Mapping[str | None, RewardPart]:
        """The parts by name; with `name`, a single part whose key is None."""
        if self.name is None:
            return {name: part for name, part in self.parts.items()}  # noqa: C416
        return {None: RewardPart(name=self.name, settings=self.settings, per=self.per)}


class RolloutConfig(Strict):
    """Settings of the vLLM engines; absent with `objective.loss: sft`."""

    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Placement of the engines. `disaggregated`: engines have their own devices and sample while
    the policy trains. `colocated`: engines and policy share devices in alternating phases:
    generate, sleep, train, load the new weights, wake. While engines generate, only the policy's
    parameters stay on the device; its optimizer state is in host memory."""
    engines: PositiveInt = 1
    """Number of vLLM engines, each with the whole model."""
    tensor: PositiveInt = 1
    """Number of workers that share every layer of one engine (vLLM's tensor parallelism); divides
    heads and key-value heads."""
    pipeline: PositiveInt = 1
    """Number of stages of one engine, each with some of the layers (vLLM's pipeline parallelism);
    at most the model's layers. An engine has tensor x pipeline workers, each on its own device."""
    in_flight: Literal["keep", "recompute"] = "keep"
    """Effect of a weight update on running responses. `keep`: they continue on the key-value
    cache of the old weights. `recompute`: the cache is cleared, and the new weights prefill prompt
    and response again. Log-probs of tokens that were already sampled do not change in either
    case."""
    restarts_per_hour: NonNegativeInt = 3
    """Number of restarts of each engine per hour after it died or stopped responding. If it fails
    more often, the run continues with the other engines."""
    unresponsive_s: PositiveFloat = 60.0
    """Seconds without a response of its vLLM process after which an engine counts as dead; below
    watchdog.timeout_s."""
    sampling: SamplingConfig
    environment: EnvironmentConfig | None = None
    reward: RewardConfig = RewardConfig(name=OWN_REWARD)
    max_concurrent: PositiveInt = 256
    """Largest number of responses that one engine decodes at a time."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of an engine's key-value cache on the CPU, in GiB; on a GPU, set
    `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of its GPU's memory that an engine uses."""
    max_context: PositiveInt | None = None
    """Largest number of prompt and response tokens together; null uses the model's limit. The
    key-value cache of an engine must hold one sequence of this length."""
    start_timeout_s: PositiveFloat = 600.0
    """Time limit for the start of an engine, in seconds."""
    vllm: Mapping[str, Any] = {}
    """Further arguments of vLLM's engine, by their names in `AsyncEngineArgs`, such as
    `max_num_batched_tokens: 16384`; they are passed on unchanged. `enable_expert_parallel: true`
    divides the whole experts of a mixture-of-experts model over the `tensor` workers of a stage.
    With `quantization: fp8_per_channel` (or `fp8_per_tensor`, `fp8_per_block`) vLLM quantises the
    weights of every update while it loads them. On a CPU `block_size` is 32 unless it is set here:
    responses share whole blocks of their prompt. An argument that another key sets, or that would
    break weight updates or log-probs, is refused with the reason."""

    @property
    def quantised(self) -> bool:
        """True if vLLM quantises weights while it loads them."""
        return self.vllm.get("quantization") is not None

    @property
    def cache_block(self) -> int:
        """Tokens per block of an engine's key-value cache on a CPU."""
        size = whole_number(self.vllm.get("block_size"))
        # The plan reports other values.
        return CPU_CACHE_BLOCK if size is None or size < 1 else size

    @property
    def workers(self) -> int:
        """Number of worker processes of one engine, each with its own device."""
        return self.tensor * self.pipeline

    @property
    def max_segments(self) -> int:
        """Largest number of sequences in one sample."""
        return 1 if self.environment is None else self.environment.max_segments

    @field_validator("vllm")
    @classmethod
    def _refuse_reserved_options(cls, vllm: Mapping[str, Any]) -> Mapping[str, Any]:
        # Checks that hold on any device; the plan checks the ones that depend on the device.
        refused = [f"{name}: {why}" for name, why in refused_options(vllm)]
        if refused:
            raise ValueError(f"may not be set here: {'; '.join(refused)}")
        return vllm
