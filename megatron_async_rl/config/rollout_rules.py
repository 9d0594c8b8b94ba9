"""Refused combinations of engines, weight transports, environments, rewards, sampling and
evaluation, and warnings about sampling.

Each conflict states the combination, the reason and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_async_rl.config.data import TASK_PREFIX, task_of
from megatron_async_rl.config.losses import (
    LONG_RESPONSE,
    NATS_PER_ROOT_TOKEN,
    ReadsRatios,
    engine_ratios,
)
from megatron_async_rl.config.problem import shipped
from megatron_async_rl.config.rollout import (
    AGENTS,
    CODE_CPU_S,
    CODE_SHARE_OF_TIME,
    OWN_REWARD,
    TOOLS,
    RolloutConfig,
)
from megatron_async_rl.config.sampling import EvalConfig, SamplingConfig, shown
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import DEFAULT_CARRIER, carriers

AT_ONCE = ("arithmetic", "countdown", OWN_REWARD)
"""Rewards without a process or a call, to which `rollout.reward.timeout_s` does not apply."""


def transport_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why the weight transport does not fit the run."""
    transport, carrier = config.weights.transport, config.weights.carrier
    if config.rollout is None:
        if transport == DEFAULT_CARRIER:
            return
        yield (
            f"weights.transport: {transport} has no engines to send weights to, as objective.loss:"
            f" {config.objective.loss.name} uses none; remove it"
        )
        return
    colocated = config.rollout.placement == "colocated"
    # A process can open a CUDA IPC handle only on the device that allocated the memory.
    if carrier.ipc and not colocated:
        yield (
            f"weights.transport: {transport} passes weights between processes on the same devices,"
            " and rollout.placement: disaggregated gives engines devices of their own; set"
            f" weights.transport: {DEFAULT_CARRIER}, or rollout.placement: colocated"
        )
    # Carriers to other devices are useless if policy and engines share devices.
    elif carrier.other_machines and colocated:
        why = "sends weights to engines on other machines"
        if carrier.per_engine:
            why = "sends weights between devices over NCCL, which accepts each device only once"
        yield (
            f"weights.transport: {transport} {why}, and rollout.placement: colocated places the"
            " engines on the policy's devices; set weights.transport:"
            f" {carriers(other_machines=False)}, or rollout.placement: disaggregated"
        )


def engine_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why engines cannot have these settings."""
    rollout = config.rollout
    if rollout is None:
        if config.run.numerics is not None:
            yield "run.numerics compares the trainer with engines; add `rollout`, or remove it"
        return
    if rollout.pipeline > 1 and config.policy.routing_replay == "rollout":
        yield (
            f"rollout.pipeline: {rollout.pipeline} divides the layers into stages, and vLLM records"
            " experts (policy.routing_replay: rollout) only if one stage has all layers; set"
            " rollout.pipeline: 1 and a larger rollout.tensor, or policy.routing_replay: none or"
            " proximal"
        )
    if rollout.vllm.get("enable_expert_parallel") and rollout.tensor == 1:
        yield (
            "rollout.vllm.enable_expert_parallel divides experts over the workers of"
            " rollout.tensor, which is 1; set rollout.tensor above 1, or remove the option"
        )
    if rollout.quantised and config.model.dtype == "float32":
        yield (
            f"rollout.vllm.quantization: {rollout.vllm['quantization']} quantises bfloat16"
            " weights, and model.dtype is float32; set model.dtype: bfloat16, or remove the option"
        )


def environment_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why the environment or the rewards do not fit the run."""
    rollout = config.rollout
    if rollout is None:
        return
    yield from _reward_conflicts(rollout)
    turns, limit_s = rollout.environment, config.watchdog.timeout_s
    if turns is not None and turns.name == TOOLS and rollout.reward.name == OWN_REWARD:
        yield (
            "rollout.reward is missing, and the environment tools has no reward of its own; set"
            " the reward of the last turn, such as rollout.reward.name: math"
        )
    if turns is not None and turns.name not in AGENTS and turns.max_segments > 1:
        yield (
            f"rollout.environment.max_segments: {turns.max_segments} applies to agents, and"
            f" {turns.name} has a single conversation; remove it"
        )
    if turns is not None and turns.name in AGENTS and turns.format == "text":
        yield (
            f"rollout.environment.format: text has no effect with {turns.name}, whose endpoint"
            " completes chats; remove it"
        )
    # The watchdog sees no progress during a reward, so its limit must be the longer limit.
    timed = [one.name for one in rollout.reward.rewards.values() if one.name not in AT_ONCE]
    if timed and rollout.reward.timeout_s >= limit_s:
        yield (
            f"rollout.reward.timeout_s: {rollout.reward.timeout_s:g} must be below"
            f" watchdog.timeout_s: {limit_s:g}, after which a run without progress ends; lower it,"
            " or raise watchdog.timeout_s"
        )
    if turns is not None and turns.name not in AGENTS and turns.timeout_s >= limit_s:
        yield (
            f"rollout.environment.timeout_s: {turns.timeout_s:g} must be below"
            f" watchdog.timeout_s: {limit_s:g}, after which a run without progress ends; lower it,"
            " or raise watchdog.timeout_s"
        )


def _reward_conflicts(rollout: RolloutConfig) -> Iterator[str]:
    for name, part in rollout.reward.rewards.items():
        key = "rollout.reward" if name is None else f"rollout.reward.parts.{name}"
        if part.name == OWN_REWARD and rollout.environment is None:
            yield (
                f"{key} is missing, or names the environment's reward, and there is no"
                " rollout.environment; set a reward, such as rollout.reward.name: math"
                if name is None
                else f"{key}.name: {OWN_REWARD} is the reward of rollout.environment, which is"
                " missing, so the part would always be 0; remove the part, or add the environment"
            )
        # The environment's reward is added to the sum without a weight.
        elif part.name == OWN_REWARD and part.weight != 1.0:
            yield (
                f"{key}.weight: {part.weight:g} would have no effect: the environment's reward is"
                " added unchanged; remove the weight and scale the reward in the environment, or"
                " set the weights of the other parts"
            )
        if part.gate and rollout.environment is not None and rollout.environment.name != TOOLS:
            yield (
                f"{key}.gate: a gate multiplies the parts of rollout.reward, and the reward of"
                f" rollout.environment ({rollout.environment.name}) is added to them; remove gate,"
                " and return 0 from the environment"
            )
        if part.name == "code":
            cpu_s = part.settings.get("cpu_s", CODE_CPU_S)
            limit_s = CODE_SHARE_OF_TIME * rollout.reward.timeout_s
            if isinstance(cpu_s, (int, float)) and cpu_s > limit_s:
                yield (
                    f"{key}.settings.cpu_s: {cpu_s:g} is more than {limit_s:g} s, the share of"
                    f" rollout.reward.timeout_s: {rollout.reward.timeout_s:g} for all tests of a"
                    f" response; set cpu_s to at most {limit_s:g}, or timeout_s to at least"
                    f" {cpu_s / CODE_SHARE_OF_TIME:g}"
                )


SAMPLED_ONLY = ("sampling", "samples_per_prompt", "pass_at", "pass_reward", "engines")
"""Settings of `eval` and its sets that apply only to sampled responses."""


def sampling_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why the sampling of training does not fit the objective."""
    if config.rollout is None:
        return
    sampling, objective = config.rollout.sampling, config.objective
    # Evaluation may be greedy: only training needs a distribution.
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature: 0 selects the likeliest token, so the responses of a"
            " group are equal, and the trainer computes log-probs at temperature 1; set it above 0"
            " (for held-out prompts you may set eval.sampling.temperature: 0)"
        )
    if not sampling.renormalised:
        return
    what = (
        f"rollout.sampling.{sampling.renormalised[0]} makes the engines sample from another"
        " distribution than the trainer's softmax over all tokens, and"
    )
    name = sampling.renormalised[0].partition(":")[0]
    off = f"set {name}: {shown(SamplingConfig.model_fields[name].default)}"
    for key, method, template in _readers(config):
        if not method.weighs_each_token and engine_ratios(method, objective.proximal):
            yield f"{what} {key} {template.format(off=off)}"


def _readers(config: Config) -> Iterator[tuple[str, ReadsRatios, str]]:
    """Yield (key, method, template) of every part of the objective and of every control. The
    template states why the method must not read a ratio of the engines' log-probs, and the fix;
    `{off}` stands for the setting that restores the trainer's distribution."""
    objective = config.objective
    loss, proximal = objective.loss, objective.proximal
    # Here the ratio is wrong only because the proximal log-probs are the engine's.
    if loss.uses_proximal and engine_ratios(loss, proximal) == {"pi/prox"}:
        yield (
            f"objective.proximal: {proximal}",
            loss,
            "uses the engines' log-probs as the trainer's: ratios would differ from 1 for equal"
            " weights, and clipping would act on the difference; set objective.proximal:"
            " recompute, or {off}",
        )
    else:
        yield (
            f"objective.loss: {loss.name}",
            loss,
            "contains pi / pi_behavior with the engines' log-probs: its ratio would differ from 1"
            " for equal weights; set a loss without this ratio, such as ppo_clip with"
            " objective.proximal: recompute, or {off}",
        )
    yield (
        f"objective.advantage: {objective.advantage.name}",
        objective.advantage,
        "weights responses by the engines' log-probs: the difference would dominate the baseline"
        " for long responses; set an advantage without these weights, such as rloo, or {off}",
    )
    for correction in objective.corrections:
        if "pi/prox" in correction.ratios:
            template = (
                f"compares with objective.proximal: {proximal}, which contains the engines'"
                " log-probs: it would act on the difference; set objective.proximal: recompute"
                " with several optimizer steps per batch, or {off}"
            )
        else:
            template = (
                "multiplies or averages the difference over a whole response: its weight would"
                " decrease with the length; set its level to token, or {off}"
            )
        yield f"correction {correction.name}", correction, template
    # Controls that read pi / mu measure staleness; they would measure the renormalisation instead.
    for control in config.controls:
        yield (
            f"controls: {control.name}",
            control,
            "measures staleness by pi / pi_behavior: it would act on the difference; remove it, or"
            " {off}",
        )


def _unused_generate(config: Config) -> Iterator[str]:
    data = config.data
    paths = [data.train, data.eval, *(one.path for one in data.sources)]
    # Held-out sets use `data.generate`, too.
    paths += [one.path for one in config.eval.sets] if config.eval is not None else []
    if data.generate is not None and not any(map(task_of, paths)):
        yield (
            "data.generate has no effect on files; remove it, or set data.train to"
            f" {TASK_PREFIX}TASK"
        )


def eval_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why the held-out sets cannot be evaluated, and settings of generated data
    without such data."""
    yield from _unused_generate(config)
    evaluation = config.eval
    if evaluation is None:
        return
    if evaluation.sets and config.data.eval is not None:
        yield "data.eval and eval.sets both name held-out prompts; name all of them in eval.sets"
    if not evaluation.sets and config.data.eval is None:
        yield "`eval` needs held-out prompts; name a file as data.eval, or several as eval.sets"
    if config.supervised:
        yield from _sampled_only(evaluation)
    for one in config.eval_sets:
        place = one.key
        # The estimate of pass@k needs at least k responses.
        maximum = max(one.pass_at, default=1)
        if maximum > one.samples_per_prompt:
            yield (
                f"{place}.pass_at: {maximum} needs at least {maximum} responses per prompt; set"
                f" {place}.samples_per_prompt to at least {maximum}"
            )
        # Greedy decoding is deterministic, apart from the order of floating-point sums.
        if one.sampling.temperature == 0 and one.samples_per_prompt > 1:
            yield (
                f"{place}.sampling.temperature: 0 selects the likeliest token, so all"
                f" {one.samples_per_prompt} responses to a prompt would be equal; set"
                f" {place}.samples_per_prompt: 1"
            )


def _sampled_only(evaluation: EvalConfig) -> Iterator[str]:
    """Yield a conflict for settings that apply only to sampled responses, in a supervised run."""
    places = {"eval": evaluation} | {
        f"eval.sets.{index}": one for index, one in enumerate(evaluation.sets)
    }
    set_here = [
        f"{key}.{name}"
        for key, one in places.items()
        for name, field in type(one).model_fields.items()
        # Compare with the default, because a file may contain defaults.
        if name in SAMPLED_ONLY and getattr(one, name) != field.default
    ]
    if set_here:
        yield (
            f"{set_here[0]} applies to sampled responses, and objective.loss: sft measures the"
            f" loss of given ones; remove {' and '.join(set_here)}"
        )


def sampling_warnings(config: Config) -> list[str]:
    """Return a warning if the sampling of training affects the metrics `ratio/*`."""
    # A warning, not an error: the ratios stay valid importance weights of the sampled tokens.
    if config.rollout is None or not config.rollout.sampling.renormalised:
        return []
    objective = config.objective
    weighted = [f"correction {one.name}" for one in objective.corrections if one.weighs_each_token]
    if objective.kl is not None and engine_ratios(objective.kl, objective.proximal):
        weighted.append("kl")
    also = f", and so do the weights of {' and '.join(weighted)}" if weighted else ""
    return [
        f"rollout.sampling: {', '.join(config.rollout.sampling.renormalised)}: engines report"
        " log-probs of the distribution that they sample from, and the trainer computes log-probs"
        f" of the whole softmax, so ratio/* includes this difference{also}"
        f" ({shipped('docs/sampling.md')})"
    ]


def length_warnings(config: Config) -> list[str]:
    """Return a warning for methods that multiply ratios over longer responses than the tested
    ones."""
    rollout, objective = config.rollout, config.objective
    if rollout is None or rollout.sampling.max_tokens <= LONG_RESPONSE:
        return []
    length = rollout.sampling.max_tokens
    # With `recompute` and one step per batch, pi / pi_prox is exactly 1 at every token.
    always_one = objective.proximal == "recompute" and objective.steps_per_batch == 1
    multiplying = [
        name
        for name, method in _methods(config)
        if method.multiplies_over_response and not (always_one and method.ratios == {"pi/prox"})
    ]
    if not multiplying:
        return []
    # Rounding errors of tokens are nearly independent, so their sum grows as the square root.
    spread = NATS_PER_ROOT_TOKEN * math.sqrt(length)
    return [
        f"{' and '.join(multiplying)} multiply ratios over a whole response: with"
        f" rollout.sampling.max_tokens: {length} rounding alone changes their logarithm by about"
        f" {spread:.1f} nats, so most weights are at a bound; tested on answers of 6 to 14 tokens."
        " Set level: token if a method has a level, or reject by sequence_geometric"
        f" ({shipped('docs/choosing_a_method.md')})"
    ]


def _methods(config: Config) -> Iterator[tuple[str, ReadsRatios]]:
    objective = config.objective
    yield f"objective.loss: {objective.loss.name}", objective.loss
    yield f"objective.advantage: {objective.advantage.name}", objective.advantage
    for correction in objective.corrections:
        yield f"correction {correction.name}", correction
    for control in config.controls:
        yield f"controls: {control.name}", control
