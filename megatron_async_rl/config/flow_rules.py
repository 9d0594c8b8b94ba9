"""Refused combinations of the settings of `flow`, and of `flow` with engines and evaluation.

Each conflict states the combination, the reason, and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_async_rl.config.flow import ExactLag, Replay, Windowed
from megatron_async_rl.config.schema import Config


def flow_conflicts(config: Config) -> Iterator[str]:
    """Reasons why samples cannot flow as the config asks; none: they can."""
    yield from _selection(config)
    yield from _admission(config)
    yield from _deadlines(config)


def _selection(config: Config) -> Iterator[str]:
    flow, selection = config.flow, config.flow.selection
    if isinstance(selection, ExactLag):
        if flow.async_ratio != selection.lag:
            yield (
                f"flow.selection: exact_lag trains every sample {selection.lag} updates after it"
                f" was made, and flow.async_ratio: {flow.async_ratio:g} states how far rollouts run"
                f" ahead; set flow.async_ratio: {selection.lag}"
            )
        if flow.late == "drop":
            yield "flow.selection: exact_lag waits for every response; set flow.late: wait"
    if isinstance(selection, Replay):
        if flow.late == "drop" or flow.dynamic_sampling:
            yield (
                "flow.selection: replay stores every group that finishes; set flow.late: wait and"
                " flow.dynamic_sampling: false"
            )
        kept = [
            f"controls: {control.name}" for control in config.controls if control.needs_past_weights
        ]
        kept += ["objective.proximal: snapshot"] if config.objective.proximal == "snapshot" else []
        if kept:
            yield (
                f"flow.selection: replay trains on samples of any age, and {' and '.join(kept)}"
                " reads the weights that sampled them, and only objective.snapshots of them are"
                " kept; choose another selection"
            )


def _admission(config: Config) -> Iterator[str]:
    flow, bound = config.flow, math.ceil(config.flow.async_ratio)
    if flow.oversample and not isinstance(flow.selection, Windowed):
        yield (
            "flow.oversample asks for more groups than a step needs and trains those that finish"
            " first: set flow.selection: windowed"
        )
    if flow.async_ratio + flow.oversample > bound:
        yield (
            f"flow.oversample: {flow.oversample:g} on top of flow.async_ratio:"
            f" {flow.async_ratio:g} is more than the {bound} batches ahead that the bound,"
            f" ceil({flow.async_ratio:g}), leaves time to train; lower it, or set async_ratio to a"
            f" fraction, such as {bound + 0.5 if flow.async_ratio == bound else bound - 0.5:g}"
        )
    if flow.dynamic_sampling and (flow.group_size == 1 or config.supervised):
        yield (
            "flow.dynamic_sampling drops groups whose rewards are all equal, and a group of one"
            " always is; set it to false"
        )
    if config.supervised and (
        flow.oversample or flow.late == "drop" or flow.selection.name != "oldest_first"
    ):
        yield (
            "objective.loss: sft trains on given responses in their order: remove flow.selection,"
            " late and oversample"
        )
    if flow.late == "drop" and math.ceil(flow.async_ratio) == 0:
        yield (
            "flow.late: drop needs other groups to train on, and flow.async_ratio: 0 has none; set"
            " async_ratio above 0"
        )


def _deadlines(config: Config) -> Iterator[str]:
    rollout, evaluation = config.rollout, config.eval
    if rollout is None:
        return
    if rollout.unresponsive_s >= config.watchdog.timeout_s:
        yield (
            f"rollout.unresponsive_s: {rollout.unresponsive_s:g} must be below watchdog.timeout_s: "
            f"{config.watchdog.timeout_s:g}, or the run ends before an engine is restarted"
        )
    if evaluation is None:
        return
    if evaluation.engines and rollout.placement == "colocated":
        yield (
            "eval.engines need devices of their own, and rollout.placement: colocated has none; set"
            " eval.engines: 0"
        )
