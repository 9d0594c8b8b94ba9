"""Staleness of a config, and the overlap of sampling and training, as text of a plan."""

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
    """Text on the staleness bound of this config, and what selection, late groups and placement
    make of it."""
    flow, rollout = config.flow, config.rollout
    ratio, prompts, responses = (
        flow.async_ratio,
        flow.prompts_per_step,
        flow.group_size,
    )
    # The scheduler's own function, so that plan and run cannot disagree.
    limit = admitted_limit(0, prompts, ratio, fresh_steps=0, oversample=flow.oversample)
    fresh = config.fresh_steps
    lines = (
        [
            f"fresh      the first {number_of('step', fresh)} {'is' if fresh == 1 else 'are'}"
            " synchronous: a control calibrates on them"
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
    if flow.oversample:
        lines.append(
            f"oversample {flow.oversample:g} x {prompts} of those prompts are beyond what"
            " async_ratio requests; the first to finish train, the others continue"
        )
    if rollout is not None:
        # Otherwise nothing runs while weights change.
        if ratio and not isinstance(flow.selection, ExactLag):
            lines.append(
                f"in flight  {rollout.in_flight}: running responses {IN_FLIGHT[rollout.in_flight]}"
            )
        lines.append(f"placement  {rollout.placement}: {PLACEMENT[rollout.placement]}")
    return "\n".join(lines)


# One entry per value of the setting; a new value without a text fails at once.
LATE = {
    "wait": "the trainer waits for it",
    "drop": "it is dropped if enough others are there, which favours short responses",
}
IN_FLIGHT = {
    "keep": "continue under new weights over the key-value cache of the old ones",
    "recompute": "continue under new weights, which read prompt and response so far again",
}
PLACEMENT = {
    "disaggregated": "engines have devices of their own and sample while the policy trains",
    "colocated": "engines and policy take turns on the same devices",
}


def _lag(config: Config) -> str:
    flow, bound = config.flow, max_lag(config.flow.async_ratio)
    # Before Replay and the bound of 0: the exact lag is a stronger statement.
    if isinstance(flow.selection, ExactLag) and bound:
        return (
            f"exactly {bound}: every sample trains {bound} updates after the one version that made"
            f" it; those made before the first update wait 0 to {bound}"
        )
    if isinstance(flow.selection, Replay):
        return (
            f"no bound: stored responses train at any age; what enters the store is at most {bound}"
            " versions old"
        )
    if bound == 0:
        return (
            "async_ratio 0: synchronous; every token is trained on by the weights that sampled it"
            " (lag 0)"
        )
    return (
        f"version_now - start_version <= ceil({flow.async_ratio:g}) = {bound}, kept by admitting"
        " later"
    )


def _selection(config: Config) -> str:
    selection, prompts = config.flow.selection, config.flow.prompts_per_step
    match selection:
        case Windowed():
            older = math.ceil((1 + selection.window) * prompts)
            return (
                f"windowed: groups train as they finish; one may overtake while fewer than {older}"
                " older ones wait to train"
            )
        case ExactLag():
            return (
                f"exact_lag: {selection.lag} batches wait in host memory; no response runs while"
                " the weights change"
            )
        case Replay():
            return (
                f"replay: a step takes the newest batch with probability {selection.recent:g}, else"
                f" stored responses; the newest {selection.per_prompt} of each prompt are"
                " kept"
            )
        case OldestFirst():
            return "oldest_first: groups train in the order they were admitted"


def overlap_of(config: Config, rates: MeasuredRates, run_dir: Path) -> Overlap:
    """Apply the rates of the run in `run_dir` to this config: more samples take longer in
    proportion, on either side."""
    assert config.rollout is not None
    # Rates are per sample; a batch of another size takes proportionally longer.
    factor = _more_samples(config, run_dir)
    return Overlap(
        generate_s=factor * rates.generate_s(config.rollout.engines),
        train_s=factor * rates.train_s,
        publish_s=rates.publish_s,
        pause_s=rates.pause_s,
        engines=config.rollout.engines,
        run_ahead=run_ahead(config),
    )


def _more_samples(config: Config, run_dir: Path) -> float:
    """Ratio of this config's samples per step to the run's."""
    measured = run_sizes(run_dir)
    planned = sizes_of(config.model_dump(mode="json"))
    # Without the run's config its batches are taken to be like this one's.
    return planned["samples"] / measured["samples"] if measured else 1.0


def expected_overlap(config: Config, rates: MeasuredRates, run_dir: Path) -> str:
    """Lines for a screen on `overlap_of`, and where its rates come from."""
    measured, planned = run_sizes(run_dir), sizes_of(config.model_dump(mode="json"))
    factor = _more_samples(config, run_dir)
    speed = f"an engine that is busy samples {rates.tokens_per_busy_s:,.0f} tokens/s"
    of = f"measured       in {run_dir}, {rates.steps} steps: {speed}"
    if factor != 1.0:
        of += f"; scaled by {factor:.3g} in samples per step"
    # Training time does not scale simply with ranks, so it is reported and not converted.
    if measured and measured["ranks"] != planned["ranks"]:
        of += (
            f"; T_train was measured with {measured['ranks']} ranks, and this plan has"
            f" {planned['ranks']}"
        )
    return f"{of}\n{overlap_of(config, rates, run_dir).as_text()}"


def run_sizes(run_dir: Path) -> dict[str, int] | None:
    """The sizes in the config that a run was started with; null if it cannot be read."""
    try:
        # A tree, not a Config: the run may be of another version.
        return sizes_of(read_tree((run_dir / "config.yaml").read_text(encoding="utf-8"))[0])
    except (OSError, UnicodeDecodeError, KeyError, TypeError, YamlFault):
        return None


def sizes_of(tree: Mapping[str, Any]) -> dict[str, int]:
    """Samples of a step and trainer ranks, of a whole config as a tree."""
    samples = int(tree["flow"]["prompts_per_step"]) * int(tree["flow"]["group_size"])
    return {"samples": samples, "ranks": int(tree["policy"]["parallel"]["ranks"])}


def planning_rule(config: Config, measured: float | None) -> str:
    """S·η·G and T·η·G of arXiv 2607.01083, with `measured` for G; stable while they stay below the
    two radii of the rule."""
    lag, lr = max_lag(config.flow.async_ratio), config.policy.optimizer.lr
    steps, per_version = config.optimizer_steps, config.objective.steps_per_batch
    # Stored samples may be of any version, so S is unbounded.
    if isinstance(config.flow.selection, Replay):
        return "drift      S·η·G has no bound: with replay the largest lag S has none"
    text = (
        f"drift      S·η·G: largest lag S = {lag}, learning rate η = {lr:g}, update per learning"
        " rate G = "
    )
    if measured is None:
        return f"{text}not measured (a run with any control logs it: mar plan --from RUN)"
    return (
        f"{text}{measured:.3g}: {lag * per_version * lr * measured:.3g} from the oldest sample to"
        f" the policy, against T·η·G = {steps * lr * measured:.3g} in all {steps} steps"
    )
