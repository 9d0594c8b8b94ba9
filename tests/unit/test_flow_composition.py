"""Refused combinations of settings of flow, engines and evaluation; the error names the key to
change."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from tests.cases import looped
from tests.written_run import config_tree

EXACT = {"selection": {"name": "exact_lag", "lag": 2}, "async_ratio": 2}
REINFORCE = {"objective": {"loss": "reinforce", "advantage": "reinforce_pp"}}
SFT = {"objective": {"loss": "sft", "advantage": "none"}, "rollout": None}


def build(
    flow: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **sections: Any
) -> Config:
    tree = config_tree()
    tree["flow"] |= flow or {}
    tree["rollout"] |= rollout or {}
    return validated({**tree, **sections})


@looped(
    ("flow", "sections", "reason"),
    [
        (EXACT | {"async_ratio": 1}, {}, "set flow.async_ratio: 2"),
        (EXACT | {"late": "drop"}, {}, "exact_lag waits for every response"),
        ({"selection": "replay", "late": "drop"}, {}, "replay stores every finished group"),
        (
            {"selection": "replay", "dynamic_sampling": True},
            {},
            "replay stores every finished group",
        ),
        (
            {"selection": "replay"},
            {"objective": {"loss": "decoupled_ppo", "proximal": "snapshot"}},
            "replay trains on samples of any age",
        ),
        ({"oversample": 0.5, "async_ratio": 0.5}, {}, "set flow.selection: windowed"),
        (
            {"selection": "windowed", "oversample": 0.25, "async_ratio": 2},
            {},
            "which is 0; lower it, or set async_ratio to 2.75",
        ),
        (
            {"selection": "windowed", "oversample": 0.75, "async_ratio": 0.5},
            {},
            "which is 0.5; lower it, or set async_ratio to 0.25",
        ),
        (
            {"selection": "windowed", "oversample": 1.5, "async_ratio": 0.5},
            {},
            r"which is 0\.5; lower it \[",
        ),
        ({"late": "drop", "async_ratio": 0}, {}, "set async_ratio above 0"),
        (
            {"selection": "windowed", "group_size": 1, "async_ratio": 0},
            SFT,
            "sft trains on given responses in their order",
        ),
        (
            {"late": "drop", "group_size": 1, "async_ratio": 0.5},
            SFT,
            "sft trains on given responses in their order",
        ),
        (
            {},
            {
                "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
                "eval": {"samples_per_prompt": 2, "pass_at": [4]},
            },
            "set eval.samples_per_prompt to at least 4",
        ),
        ({"dynamic_sampling": True, "group_size": 1}, REINFORCE, "every group of one response"),
    ],
)
def test_invalid_flow_settings_are_refused_with_the_reason(
    flow: dict[str, Any], sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        build(flow, **sections)


@pytest.mark.parametrize(
    ("rollout", "sections", "reason"),
    [
        (
            {"unresponsive_s": 60},
            {"watchdog": {"timeout_s": 60}},
            "must be below watchdog.timeout_s: 60",
        ),
        ({"placement": "colocated"}, {"eval": {"engines": 1}}, "set eval.engines: 0"),
    ],
)
def test_engines_that_cannot_do_it_are_refused_with_the_reason(
    rollout: dict[str, Any], sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        build(None, rollout, **sections)


@looped(
    "flow",
    [
        EXACT,
        EXACT | {"dynamic_sampling": True},
        {"selection": "windowed", "late": "drop", "async_ratio": 0.5},
        {"selection": {"name": "replay", "recent": 0.2}},
        {
            "selection": "windowed",
            "oversample": 0.5,
            "async_ratio": 1.5,
            "dynamic_sampling": True,
        },
        {"selection": {"name": "windowed", "window": 0}, "async_ratio": 0},
    ],
)
def test_the_others_go_together(flow: dict[str, Any]) -> None:
    assert build(flow).flow.selection.name in ("oldest_first", "windowed", "exact_lag", "replay")


@looped(
    "flow",
    [
        {"selection": {"name": "exact_lag", "lag": -1}, "async_ratio": 0},
        {"selection": {"name": "windowed", "window": -0.5}},
        {"selection": {"name": "replay", "recent": 1.5}},
        {"selection": {"name": "replay", "per_prompt": 0}},
        {"selection": "newest_first"},
        {"selection": {"name": "windowed", "windw": 1.0}},
        {"oversample": -1},
        {"async_ratio": -0.5},
        {"async_ratio": float("inf")},
        {"async_ratio": float("nan")},
        {"selection": {"name": "windowed", "window": float("inf")}},
        {"selection": {"name": "replay", "inverse_temperature": float("inf")}},
    ],
)
def test_values_out_of_range_are_refused_where_they_stand(flow: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"flow|selection"):
        build(flow)
