"""Refused combinations of engines, weight transports, environments, rewards, sampling and
evaluation, and notes on sampling.

Each conflict states the combination, the reason, and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
"""Rewards that take no time, so that no limit on it matters."""


def transport_conflicts(config: Config) -> Iterator[str]:
    """Reasons why the weight transport does not work; empty if it does."""
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
    # A CUDA IPC handle can be opened only on the device that allocated it.
    if carrier.ipc and not colocated:
        yield (
            f"weights.transport: {transport} passes weights between processes on the same devices,"
            " and rollout.placement: disaggregated gives engines devices of their own; set"
            f" weights.transport: {DEFAULT_CARRIER}, or rollout.placement: colocated"
        )
    # Carriers to other devices gain nothing where policy and engines share one.
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
    """Reasons why engines cannot have these settings; empty if they can."""
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
            f"rollout.vllm.quantization: {rollout.vllm['quantization']} quantises bfloat16"
            " weights, and model.dtype is float32; set model.dtype: bfloat16, or remove it"
        )


def environment_conflicts(config: Config) -> Iterator[str]:
    """Reasons why there would be no reward, or no end to a tool; empty if there are."""
    rollout = config.rollout
    if rollout is None:
        return
    yield from _reward_conflicts(rollout)
    turns, limit_s = rollout.environment, config.watchdog.timeout_s
    if turns is not None and turns.name == TOOLS and rollout.reward.name == OWN_REWARD:
        yield (
            "rollout.reward is missing, and the environment tools gives no reward by itself; name"
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
            " answers chats; remove it"
        )
    # The watchdog sees no progress during a reward, so its limit must be the longer one.
    timed = [one.name for one in rollout.reward.rewards.values() if one.name not in AT_ONCE]
    if timed and rollout.reward.timeout_s >= limit_s:
        yield (
            f"rollout.reward.timeout_s: {rollout.reward.timeout_s:g} permits a reward as long as"
            f" watchdog.timeout_s: {limit_s:g}, after which a run without progress ends; lower it,"
            " or raise watchdog.timeout_s"
        )
    if turns is not None and turns.name not in AGENTS and turns.timeout_s >= limit_s:
        yield (
            f"rollout.environment.timeout_s: {turns.timeout_s:g} permits a tool call as long as"
            f" watchdog.timeout_s: {limit_s:g}, after which a run without progress ends; lower it,"
            " or raise watchdog.timeout_s"
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
        # The environment's reward reaches the sum without passing through weights.
        elif part.name == OWN_REWARD and part.weight != 1.0:
            yield (
                f"{key}.weight: {part.weight:g} would have no effect: the environment's reward is"
                " added unchanged; remove the weight and scale the reward in the environment, or"
                " weigh the other parts"
            )
        if part.gate and rollout.environment is not None and rollout.environment.name != TOOLS:
            yield (
                f"{key}.gate: a gate multiplies the parts of rollout.reward, and the reward of"
                f" rollout.environment ({rollout.environment.name}) is added to them; remove gate,"
                " and give 0 in the environment"
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


SAMPLED_ONLY = ("sampling", "samples_per_prompt", "pass_at", "pass_reward", "engines")
"""Settings of `eval` and its sets that say how to sample, or how to score it."""


def sampling_conflicts(config: Config) -> Iterator[str]:
    """Reasons why training's sampling does not go with the objective; empty if it does."""
    if config.rollout is None:
        return
    sampling, objective = config.rollout.sampling, config.objective
    # Evaluation may be greedy: only training needs a distribution.
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature: 0 selects the likeliest token, so that the responses of"
            " a group are equal, and the trainer's log-probs are those of temperature 1; set it"
            " above 0 (held-out prompts: eval.sampling.temperature: 0)"
        )
    if not sampling.renormalised:
        return
    what = (
        f"rollout.sampling.{sampling.renormalised[0]} makes the engines draw from another"
        " distribution than the trainer's softmax over all tokens, and"
    )
    name = sampling.renormalised[0].partition(":")[0]
    off = f"set {name}: {shown(SamplingConfig.model_fields[name].default)}"
    for key, method, template in _readers(config):
        if not method.weighs_each_token and engine_ratios(method, objective.proximal):
            yield f"{what} {key} {template.format(off=off)}"


def _readers(config: Config) -> Iterator[tuple[str, ReadsRatios, str]]:
    """(key, method, why it must not read a ratio of the engines' log-probs and what to do) of every
    part of the objective and of every control."""
    objective = config.objective
    loss, proximal = objective.loss, objective.proximal
    # The ratio is wrong only because the proximal policy is the engine's.
    if loss.uses_proximal and engine_ratios(loss, proximal) == {"pi/prox"}:
        yield (
            f"objective.proximal: {proximal}",
            loss,
            "treats the engines' log-probs as the trainer's: a ratio would not be 1 where nothing"
            " changed, and clipping would act on the difference; set objective.proximal:"
            " recompute, or {off}",
        )
    else:
        yield (
            f"objective.loss: {loss.name}",
            loss,
            "holds pi / pi_behavior with the engines' log-probs: its ratio would not be 1 where"
            " nothing changed; set a loss that does not, such as ppo_clip with objective.proximal:"
            " recompute, or {off}",
        )
    yield (
        f"objective.advantage: {objective.advantage.name}",
        objective.advantage,
        "weighs responses by the engines' log-probs: the difference would decide the baseline, more"
        " so for longer responses; set an advantage that does not, such as rloo, or {off}",
    )
    for correction in objective.corrections:
        if "pi/prox" in correction.ratios:
            template = (
                f"compares with objective.proximal: {proximal}, which holds the engines' log-probs:"
                " it would act on the difference; set objective.proximal: recompute with several"
                " optimizer steps per batch, or {off}"
            )
        else:
            template = (
                "multiplies or averages the difference over a whole response: its weight would fall"
                " with the length; give it level: token, or {off}"
            )
        yield f"correction {correction.name}", correction, template
    # Controls that read pi / mu measure staleness, and would measure the renormalisation instead.
    for control in config.controls:
        yield (
            f"controls: {control.name}",
            control,
            "treats pi / pi_behavior as staleness: it would act on the difference; remove it, or"
            " {off}",
        )


def eval_conflicts(config: Config) -> Iterator[str]:
    """Reasons why the held-out sets cannot be sampled; empty if they can."""
    evaluation = config.eval
    if evaluation is None:
        return
    if evaluation.sets and config.data.eval is not None:
        yield "data.eval and eval.sets both name held-out prompts; name all of them in eval.sets"
    if not evaluation.sets and config.data.eval is None:
        yield "`eval` needs held-out prompts: name a file as data.eval, or several as eval.sets"
    if config.supervised:
        yield from _sampled_only(evaluation)
    for one in config.eval_sets:
        place = one.key
        # pass@k is estimated from at least k responses.
        maximum = max(one.pass_at, default=1)
        if maximum > one.samples_per_prompt:
            yield (
                f"{place}.pass_at: {maximum} needs as many responses per prompt; set"
                f" {place}.samples_per_prompt to at least {maximum}"
            )
        # Greedy decoding is deterministic, apart from the order of sums.
        if one.sampling.temperature == 0 and one.samples_per_prompt > 1:
            yield (
                f"{place}.sampling.temperature: 0 selects the likeliest token, so all"
                f" {one.samples_per_prompt} responses to a prompt would be equal; set"
                f" {place}.samples_per_prompt: 1"
            )


def _sampled_only(evaluation: EvalConfig) -> Iterator[str]:
    """Settings of an evaluation that samples, where responses are given."""
    places = {"eval": evaluation} | {
        f"eval.sets.{index}": one for index, one in enumerate(evaluation.sets)
    }
    set_here = [
        f"{key}.{name}"
        for key, one in places.items()
        for name, field in type(one).model_fields.items()
        # Compared with the default, since a file may spell a default out.
        if name in SAMPLED_ONLY and getattr(one, name) != field.default
    ]
    if set_here:
        yield (
            f"{set_here[0]} applies to sampled responses, and objective.loss: sft measures the"
            f" loss of given ones; remove {' and '.join(set_here)}"
        )


def sampling_warnings(config: Config) -> list[str]:
    """Notes on training's sampling, for a reader of the metrics."""
    # A note, not a refusal: the ratios stay valid importance weights of what was sampled.
    if config.rollout is None or not config.rollout.sampling.renormalised:
        return []
    objective = config.objective
    weighed = [f"correction {one.name}" for one in objective.corrections if one.weighs_each_token]
    if objective.kl is not None and engine_ratios(objective.kl, objective.proximal):
        weighed.append("kl")
    also = f", and so do the weights of {' and '.join(weighed)}" if weighed else ""
    return [
        f"rollout.sampling: {', '.join(config.rollout.sampling.renormalised)}: engines report"
        " log-probs of the distribution they draw from, and the trainer's are of the whole softmax,"
        f" so ratio/* holds that difference too{also}"
        f" ({shipped('docs/sampling.md')})"
    ]


def length_warnings(config: Config) -> list[str]:
    """Notes on methods that multiply ratios over responses longer than any that they were tested
    on."""
    rollout, objective = config.rollout, config.objective
    if rollout is None or rollout.sampling.max_tokens <= LONG_RESPONSE:
        return []
    length = rollout.sampling.max_tokens
    # Without a ratio to the engine's log-probs, one step per batch leaves nothing to multiply.
    # pi / pi_prox is then exactly 1 at every token.
    always_one = objective.proximal == "recompute" and objective.steps_per_batch == 1
    found = [
        name
        for name, method in _methods(config)
        if method.multiplies_over_response and not (always_one and method.ratios == {"pi/prox"})
    ]
    if not found:
        return []
    # Rounding errors of tokens are nearly independent, so their sum grows as a root.
    spread = NATS_PER_ROOT_TOKEN * math.sqrt(length)
    return [
        f"{' and '.join(found)} multiply ratios over a whole response: with"
        f" rollout.sampling.max_tokens: {length} their logarithm is off by about {spread:.1f} nats"
        " from rounding alone, so most weights are at a bound; tested on answers of 6 to 14 tokens."
        " Set level: token where a method has a level, or reject by sequence_geometric"
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
