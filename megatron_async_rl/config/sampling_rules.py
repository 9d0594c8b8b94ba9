"""Refused combinations of sampling with the objective and of held-out sets, and notes on sampling.

Each conflict states the combination, the reason, and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_async_rl.config.problem import shipped
from megatron_async_rl.config.ratios import (
    LONG_RESPONSE,
    NATS_PER_ROOT_TOKEN,
    ReadsRatios,
    engine_ratios,
)
from megatron_async_rl.config.sampling import EvalConfig, SamplingConfig, shown
from megatron_async_rl.config.schema import Config

SAMPLED_ONLY = ("sampling", "samples_per_prompt", "pass_at", "pass_reward", "engines")
"""Settings of `eval` and its sets that say how to sample, or how to score it."""


def sampling_conflicts(config: Config) -> Iterator[str]:
    """Reasons why training's sampling does not go with the objective; none: it does."""
    if config.rollout is None:
        return
    sampling, objective = config.rollout.sampling, config.objective
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature: 0 takes the likeliest token: the responses of a group"
            " are all the same, and the trainer's log-probs are those of temperature 1; set it"
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
    if loss.uses_proximal and engine_ratios(loss, proximal) == {"pi/prox"}:
        yield (
            f"objective.proximal: {proximal}",
            loss,
            "takes the engines' log-probs for the trainer's: a ratio would not be 1 where nothing"
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
    for control in config.controls:
        yield (
            f"controls: {control.name}",
            control,
            "takes pi / pi_behavior for staleness: it would act on the difference; remove it, or"
            " {off}",
        )


def eval_conflicts(config: Config) -> Iterator[str]:
    """Reasons why the held-out sets cannot be sampled; none: they can."""
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
        maximum = max(one.pass_at, default=1)
        if maximum > one.samples_per_prompt:
            yield (
                f"{place}.pass_at: {maximum} needs as many responses per prompt; set"
                f" {place}.samples_per_prompt to at least {maximum}"
            )
        if one.sampling.temperature == 0 and one.samples_per_prompt > 1:
            yield (
                f"{place}.sampling.temperature: 0 takes the likeliest token, so all"
                f" {one.samples_per_prompt} responses to a prompt would be one; set"
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
        if name in SAMPLED_ONLY and getattr(one, name) != field.default
    ]
    if set_here:
        yield (
            f"{set_here[0]} is of sampled responses, and objective.loss: sft measures the loss of"
            f" held-out responses that are given; remove {' and '.join(set_here)}"
        )


def sampling_warnings(config: Config) -> list[str]:
    """Notes on training's sampling, for a reader of the metrics."""
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
    always_one = objective.proximal == "recompute" and objective.steps_per_batch == 1
    found = [
        name
        for name, method in _methods(config)
        if method.multiplies_over_response and not (always_one and method.ratios == {"pi/prox"})
    ]
    if not found:
        return []
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
