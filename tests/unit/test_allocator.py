"""Options of torch's allocator: ranks have expandable segments, engines never do."""

from __future__ import annotations

import os

import pytest
import ray
import torch

from megatron_async_rl.launch.launcher import environment_of_ranks
from megatron_async_rl.rollout.allocator import (
    EXPANDABLE,
    NEWER,
    OLDER,
    PAGE_LOCKED,
    drop_expandable_segments,
    set_options_of_ranks,
)
from megatron_async_rl.rollout.cluster import join_ray
from megatron_async_rl.rollout.engine import RolloutEngine
from tests.cases import looped
from tests.unit.fake_engine import specs

BOTH_SETTINGS = f"{PAGE_LOCKED},{EXPANDABLE}"


def test_torch_knows_the_options_that_ranks_get():
    """A name that it does not know would end every rank on CUDA as it starts."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(PAGE_LOCKED)
    with pytest.raises(ValueError, match="Unrecognized"):
        torch._C._accelerator_setAllocatorSettings(PAGE_LOCKED.replace("round", "rounds"))
    torch._C._accelerator_setAllocatorSettings(EXPANDABLE)
    torch._C._accelerator_setAllocatorSettings(before)


@looped(
    ("given", "then"),
    [
        ({}, {NEWER: BOTH_SETTINGS}),
        ({NEWER: "a:1"}, {NEWER: f"a:1,{BOTH_SETTINGS}"}),
        ({OLDER: "a:1"}, {OLDER: f"a:1,{BOTH_SETTINGS}"}),
        ({NEWER: "a:1", OLDER: "b:1"}, {NEWER: f"a:1,{BOTH_SETTINGS}", OLDER: "b:1"}),
        ({NEWER: PAGE_LOCKED + "0"}, {NEWER: f"{PAGE_LOCKED}0,{EXPANDABLE}"}),
        ({NEWER: "expandable_segments:False"}, {NEWER: f"expandable_segments:False,{PAGE_LOCKED}"}),
    ],
)
def test_a_users_options_for_ranks_stay_beside_ours(given, then):
    environment = dict(given)
    set_options_of_ranks(environment)
    assert environment == then


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, {}),
        ({NEWER: BOTH_SETTINGS}, {NEWER: PAGE_LOCKED}),
        ({NEWER: EXPANDABLE, OLDER: f"a:1, {EXPANDABLE}"}, {OLDER: "a:1"}),
        ({OLDER: "max_split_size_mb:64"}, {OLDER: "max_split_size_mb:64"}),
    ],
)
def test_only_expandable_segments_are_dropped(given, then):
    environment = dict(given)
    drop_expandable_segments(environment)
    assert environment == then


def test_ranks_have_expandable_segments_and_their_ray_does_not(monkeypatch):
    ranks = environment_of_ranks({}, "id", {})
    assert EXPANDABLE in ranks[NEWER]
    seen = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(NEWER, ranks[NEWER])
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ[NEWER]))
    join_ray()
    assert seen == [PAGE_LOCKED]
    assert os.environ[NEWER] == ranks[NEWER]


def test_an_engine_on_a_ray_of_the_users_has_none_either(monkeypatch):
    for name in (NEWER, OLDER):
        monkeypatch.setenv(name, EXPANDABLE)
    monkeypatch.setattr("megatron_async_rl.rollout.engine.redirect_output", lambda path: None)
    monkeypatch.setattr("megatron_async_rl.rollout.engine.name_this_process", lambda name: None)
    monkeypatch.setattr("megatron_async_rl.rollout.engine.watch.join", lambda name: None)
    monkeypatch.setattr("megatron_async_rl.rollout.engine.environment", lambda spec: {})
    (spec,) = specs(1)
    RolloutEngine(spec)
    assert not {NEWER, OLDER} & os.environ.keys()
