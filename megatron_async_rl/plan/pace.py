"""Text of a plan on the staleness of a config and on the overlap of sampling and training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.config.flow import ExactLag, OldestFirst, Replay, Windowed
from megatron_async_rl.config.problem import number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.flow.staleness import admitted_limit, max_lag
from megatron_async_rl.plan.estimate import MeasuredRates, Overlap, run_ahead


def staleness_law(config: Config) -> str:
    """Return lines on the staleness bound of `config` and on the settings that affect staleness:
    selection, late groups, running responses and placement."""
    flow, rollout = config.flow, config.rollout
    ratio, prompts, responses = (
        flow.async_ratio,
        flow.prompts_per_step,
        flow.group_size,
    )
    # The scheduler calls this function, too, so plan and run agree.
    limit = admitted_limit(0, prompts, ratio, fresh_steps=0, oversample=flow.oversample)
    fresh = config.fresh_steps
    lines = (
        [
            f"fresh      the first {number_of('step', fresh)} {'is' if fresh == 1 else 'are'}"
            " synchronous, because a control calibrates on them"
        ]
        if fresh and ratio
        else []
    )
    lines.append(f"lag        {_lag(config)}")
    if ratio:
        lines.append(
            f"admission  at version t at most (t + 1) x {prompts} + {limit - prompts} prompts have"
            " been admitted"
        )
    lines.append(
        f"queue      at most {limit} prompts ({limit * responses} responses) are admitted and not"
        " yet trained on"
    )
    lines.append(f"selection  {_selection(config)}")
    lines.append(
        f"late       {flow.late}: when a group that has to train now is still running,"
        f" {LATE[flow.late]}"
    )
    if flow.stream == "groups":
        lines.append(
            "stream     groups: the policy trains on finished groups while the engines sample the"
            " others of the step; estimated times of a step do not count this overlap"
        )
    if flow.oversample:
        lines.append(
            f"oversample {flow.oversample:g} x {prompts} of those prompts exceed what async_ratio"
            " requests; the first to finish train, the others continue"
        )
    if rollout is not None:
        # In the other cases no response is running while weights change.
        if ratio and not isinstance(flow.selection, ExactLag):
            lines.append(
                f"in flight  {rollout.in_flight}: running responses {IN_FLIGHT[rollout.in_flight]}"
            )
        lines.append(f"placement  {rollout.placement}: {PLACEMENT[rollout.placement]}")
    return "\n".join(lines)


# Text by value of the setting; a new value without a text raises KeyError.
LATE = {
    "wait": "the trainer waits for it",
    "drop": "it is dropped if enough others are there, which favours short responses",
}
IN_FLIGHT = {
    "keep": "continue under new weights with the key-value cache of the old ones",
    "recompute": "continue under new weights, which recompute the key-value cache",
}
PLACEMENT = {
    "disaggregated": "engines have their own devices and sample while the policy trains",
    "colocated": "engines and policy alternate on the same devices",
}


def _lag(config: Config) -> str:
    flow, bound = config.flow, max_lag(config.flow.async_ratio)
    # First, because an exact lag is more specific than a bound.
    if isinstance(flow.selection, ExactLag) and bound:
        return (
            f"exactly {bound}: every sample trains {bound} updates after the version that sampled"
            f" it; samples from before the first update have lag 0 to {bound}"
        )
    if isinstance(flow.selection, Replay):
        return (
            f"no bound: stored responses train at any age; new ones are stored at most {bound}"
            " versions old"
        )
    if bound == 0:
        return "async_ratio 0: synchronous; every token trains the weights that sampled it (lag 0)"
    return (
        f"version_now - start_version <= ceil({flow.async_ratio:g}) = {bound}; the limit on"
        " admission below ensures it"
    )


def _selection(config: Config) -> str:
    selection, prompts = config.flow.selection, config.flow.prompts_per_step
    match selection:
        case Windowed():
            older = math.ceil((1 + selection.window) * prompts)
            return (
                "windowed: groups train as they finish; a group may overtake while fewer than"
                f" {older} older groups wait to train"
            )
        case ExactLag():
            return (
                f"exact_lag: {selection.lag} batches wait in host memory; no response runs while"
                " the weights change"
            )
        case Replay():
            return (
                f"replay: a step trains on the newest batch with probability {selection.recent:g},"
                f" else on stored responses; the newest {selection.per_prompt} of each prompt are"
                " stored"
            )
        case OldestFirst():
            return "oldest_first: groups train in the order of their admission"


def overlap_of(config: Config, rates: MeasuredRates, run_dir: Path) -> Overlap:
    """Return the overlap that `config` would have with `rates`, measured in `run_dir`."""
    assert config.rollout is not None
    # Sampling and training time are proportional to the number of samples.
    factor = _samples_ratio(config, run_dir)
    return Overlap(
        generate_s=factor * rates.generate_s(config.rollout.engines),
        train_s=factor * rates.train_s,
        publish_s=rates.publish_s,
        pause_s=rates.pause_s,
        engines=config.rollout.engines,
        run_ahead=run_ahead(config),
    )


def _samples_ratio(config: Config, run_dir: Path) -> float:
    """Return the samples per step of `config` divided by those of the run."""
    measured = run_sizes(run_dir)
    planned = sizes_of(config.model_dump(mode="json"))
    # If the run's config cannot be read, its batches are assumed to be equal.
    return planned["samples"] / measured["samples"] if measured else 1.0


def expected_overlap(config: Config, rates: MeasuredRates, run_dir: Path) -> str:
    """Return lines on `overlap_of` and on the source of its rates."""
    measured, planned = run_sizes(run_dir), sizes_of(config.model_dump(mode="json"))
    factor = _samples_ratio(config, run_dir)
    speed = f"a busy engine samples {rates.tokens_per_busy_s:,.0f} tokens/s"
    source = f"measured       in {run_dir}, {rates.steps} steps: {speed}"
    if factor != 1.0:
        source += f"; scaled by {factor:.3g} in samples per step"
    # Training time does not scale linearly with ranks, so it is not converted.
    if measured and measured["ranks"] != planned["ranks"]:
        source += (
            f"; T_train was measured with {measured['ranks']} ranks, and this plan has"
            f" {planned['ranks']}"
        )
    return f"{source}\n{overlap_of(config, rates, run_dir).as_text()}"


def run_sizes(run_dir: Path) -> dict[str, int] | None:
    """Return `sizes_of` the run's config; None if it cannot be read."""
    try:
        # Not parsed as a Config: another release may have written it.
        return sizes_of(read_tree((run_dir / "config.yaml").read_text(encoding="utf-8"))[0])
    except (OSError, UnicodeDecodeError, KeyError, TypeError, YamlFault):
        return None


def sizes_of(tree: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of samples per step and of ranks in `tree`, a config with its defaults."""
    samples = int(tree["flow"]["prompts_per_step"]) * int(tree["flow"]["group_size"])
    return {"samples": samples, "ranks": int(tree["policy"]["parallel"]["ranks"])}


def planning_rule(config: Config, measured: float | None) -> str:
    """Return a line with S·η·G and T·η·G of arXiv 2607.01083, and G = `measured`. By that rule a
    run is stable while each product is below its radius."""
    lag, lr = max_lag(config.flow.async_ratio), config.policy.optimizer.lr
    steps, per_version = config.optimizer_steps, config.objective.steps_per_batch
    # Stored samples may have any age, so S is unbounded.
    if isinstance(config.flow.selection, Replay):
        return "drift      S·η·G has no bound, because replay does not limit the lag S"
    text = (
        f"drift      S·η·G: largest lag S = {lag}, learning rate η = {lr:g}, update per learning"
        " rate G = "
    )
    if measured is None:
        return f"{text}not measured (runs with a control log it: mar plan --from RUN)"
    return (
        f"{text}{measured:.3g}: {lag * per_version * lr * measured:.3g} from the oldest sample to"
        f" the policy, against T·η·G = {steps * lr * measured:.3g} in all {steps} steps"
    )
