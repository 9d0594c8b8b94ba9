"""Checks of streamed groups (`flow.stream: groups`) with other sections; see rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import MethodSettings

KEY = "flow.stream: groups"
OR_NONE = ", or flow.stream: none"


def stream_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why groups cannot be streamed into the gradient of a step."""
    if config.flow.stream == "none":
        return
    yield from _run(config)
    yield from _steps(config)
    yield from _state(config)
    yield from _whole_batch(config)
    yield from _denominators(config)


def _run(config: Config) -> Iterator[str]:
    flow, rollout = config.flow, config.rollout
    if config.supervised:
        yield (
            f"{KEY} trains while engines sample, and objective.loss: sft has no engines; set"
            " flow.stream: none"
        )
    # All groups of the step come from the weights that train: otherwise a part of them would wait.
    if flow.async_ratio != 0:
        yield (
            f"{KEY} sums the gradient of groups that the trained weights sample, and with"
            f" flow.async_ratio: {flow.async_ratio:g} engines sample ahead instead; set"
            f" flow.async_ratio: 0{OR_NONE}"
        )
    # A group that was added must be in the batch, whatever other groups do.
    if flow.selection.name != "oldest_first":
        yield (
            f"{KEY} adds a group to the gradient as soon as it is finished, and flow.selection:"
            f" {flow.selection.name} chooses groups later; set flow.selection:"
            f" oldest_first{OR_NONE}"
        )
    if rollout is not None and rollout.placement == "colocated":
        yield (
            f"{KEY} trains while engines sample, and with rollout.placement: colocated they sleep"
            f" meanwhile; set rollout.placement: disaggregated{OR_NONE}"
        )
    if config.run.numerics is not None:
        yield f"{KEY} has no effect on run.numerics, which trains nothing; set flow.stream: none"


def _steps(config: Config) -> Iterator[str]:
    objective, advantage = config.objective, config.objective.advantage
    for key in ("minibatches", "epochs"):
        count = getattr(objective, key)
        # The first optimizer step changes the weights, which sample the rest of the batch.
        if count > 1:
            yield (
                f"{KEY} makes one optimizer step when the batch is complete, and"
                f" objective.{key}: {count} makes several; set objective.{key}: 1{OR_NONE}"
            )
    if isinstance(advantage, OpobAdvantage) and advantage.mode == "exact":
        yield (
            f"{KEY} adds the gradients of groups in the gradient buffers, and objective.advantage:"
            f" opob, mode: exact needs them for single sequences; set mode: cheap{OR_NONE}"
        )
    if config.policy.parallel.overlap_grad_reduce:
        yield (
            f"{KEY} reduces gradients once, at the end of a step, and"
            " policy.parallel.overlap_grad_reduce reduces them during each backward pass; remove"
            f" overlap_grad_reduce{OR_NONE}"
        )


def _state(config: Config) -> Iterator[str]:
    # A stop discards the sums of parts, but not what their passes left in the policy, which a
    # checkpoint would have: a replay, which runs no discarded part, would make other bits.
    policy = config.policy
    if policy.lora is not None and policy.lora.dropout:
        yield (
            f"{KEY} may discard parts whose passes drew masks, and policy.lora.dropout:"
            f" {policy.lora.dropout:g} would then draw others in a replay; set"
            f" policy.lora.dropout: 0{OR_NONE}"
        )
    if policy.fp8 is not None and policy.fp8.recipe == "delayed":
        yield (
            f"{KEY} may discard parts whose passes changed the scales of policy.fp8.recipe:"
            f" delayed; set another recipe{OR_NONE}"
        )


def _whole_batch(config: Config) -> Iterator[str]:
    objective = config.objective
    methods: list[tuple[str, MethodSettings]] = [
        ("loss", objective.loss),
        ("advantage", objective.advantage),
        *(("corrections", correction) for correction in objective.corrections),
    ]
    for section, method in methods:
        # Test a property, not names, so that plug-ins are covered, too.
        if method.needs_batch:
            name = getattr(method, "name", type(method).__name__)
            yield (
                f"{KEY} computes the gradient of a group before the batch is complete, and"
                f" objective.{section}: {name} reads all groups of the batch first; set"
                f" {_without(method) or 'another method'}{OR_NONE}"
            )


def _without(method: MethodSettings) -> str:
    """Return the setting without which the method reads its own group alone; empty if there is
    none."""
    for name, value in method:
        if isinstance(value, bool):
            other = method.model_copy(update={name: not value})
            if not other.needs_batch:
                return f"{name}: {str(not value).lower()}"
    return ""


def _denominators(config: Config) -> Iterator[str]:
    objective = config.objective
    terms = [name for name in ("entropy_bonus", "value") if getattr(objective, name)]
    terms += ["kl"] if objective.kl is not None and objective.kl.where == "loss" else []
    if not terms:
        return
    # One buffer holds one sum, which one number divides.
    if objective.renormalize:
        yield (
            f"{KEY} divides the gradient by one number, and with objective.renormalize the loss and"
            f" objective.{terms[0]} have two; set objective.renormalize: false{OR_NONE}"
        )
    if objective.aggregation_used == "seq-mean":
        yield (
            f"{KEY} divides the gradient by one number, and objective.loss: {objective.loss.name}"
            f" averages over responses, objective.{terms[0]} over tokens; remove"
            f" {terms[0]}{OR_NONE}"
        )
