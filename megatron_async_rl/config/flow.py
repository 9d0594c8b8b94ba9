"""Settings of selection, one small model per rule, chosen by its `name`; and settings of flow,
engines and evaluation that do not go together. Each conflict states the combination, the reason,
and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_async_rl.config.settings_model import Strict, bare_name

if TYPE_CHECKING:
    from megatron_async_rl.config.schema import Config

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class OldestFirst(Strict):
    """Train groups in the order of their admission."""

    name: Literal["oldest_first"] = "oldest_first"


class Windowed(Strict):
    """Train groups in the order in which they finish, as far as the staleness law permits, from
    among the oldest untrained ones."""

    name: Literal["windowed"] = "windowed"
    window: NonNegativeFloat = 1.0
    """f: a group may overtake as long as fewer than (1 + f) prompts_per_step older ones are not
    trained yet."""


class ExactLag(Strict):
    """Train every sample exactly `lag` updates after it was sampled, by a single weight version:
    the controlled experiment of M2PO and GAC. Samples from before the first update wait up to
    `lag` steps. Needs flow.async_ratio to be the same number."""

    name: Literal["exact_lag"] = "exact_lag"
    lag: NonNegativeInt
    """s, in updates; lag x prompts_per_step groups wait in host memory."""


class Replay(Strict):
    """TBA's buffer (arXiv 2503.18929): finished groups go into a store, and a step trains on the
    newest batch or on stored ones.

    A stored response may train many times, at any lag: the bound holds for what enters the store.
    """

    name: Literal["replay"] = "replay"
    recent: Share = 0.5
    """m: probability that a step takes the groups that finished since the last one, instead of
    stored ones."""
    inverse_temperature: NonNegativeFloat = 1.0
    """Stored responses are drawn with probability proportional to exp(inverse_temperature x
    reward)."""
    per_prompt: PositiveInt = 100
    """Newest distinct responses kept of each prompt."""


Selection = Annotated[
    Union[OldestFirst, Windowed, ExactLag, Replay],
    Field(discriminator="name"),
    BeforeValidator(bare_name),
]


def flow_conflicts(config: Config) -> Iterator[str]:
    """Reasons why samples cannot flow as the config asks; none: they can."""
    yield from _selection(config)
    yield from _admission(config)
    yield from _engines(config)


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


def _engines(config: Config) -> Iterator[str]:
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
