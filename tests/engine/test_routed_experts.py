"""An engine's choice of experts comes with its samples, and the trainer that replays it agrees with
the engine."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.types import Aborted, PartialResponse
from tests.engine.asking import abort, grown, outcomes, sampled, submit
from tests.engine.environments import AGENT, WORDY
from tests.engine.reference import save_checkpoint
from tests.engine.running import (
    Engines,
    give_environment,
    prompt_of,
    running,
    take_environment,
)
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.engine

LAYERS, EXPERTS, CHOSEN = 4, 16, 4
ROW = LAYERS * CHOSEN
"""Bytes of a token."""


@pytest.fixture(scope="module")
def engines(in_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    root = tmp_path_factory.mktemp("routed")
    checkpoints = [
        save_checkpoint(
            root / name,
            seed=seed,
            family="qwen3_moe",
            layers=LAYERS,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            moe_intermediate_size=32,
            dtype="bfloat16",
        )
        for seed, name in enumerate("ab")
    ]
    settings = {"sampling": {"max_tokens": 64}, "in_flight": "recompute"}
    with running(
        lambda: Engines(root, [settings], checkpoints, dtype="bfloat16", records_experts=True)
    ) as started:
        yield started


def experts(of: Sample | PartialResponse) -> np.ndarray:
    """[tokens but the last, layers, experts per token]."""
    assert of.routed_experts is not None
    return np.frombuffer(of.routed_experts, dtype=np.uint8).reshape(-1, LAYERS, CHOSEN)


def cut(engines: Engines, version: int | None = None) -> tuple[list, dict[str, PartialResponse]]:
    """Requests, and what some of them had sampled when they were cut: by `version` last, if any."""
    handle, prefixes = engines.handles[0], {}
    while not prefixes:  # until some were cut in time
        asked = engines.asked([prompt_of(9, seed) for seed in range(6)], 1)
        submit(handle, asked)
        done = grown(handle)
        if version is not None:
            engines.publish(version)
            done |= grown(handle) | grown(handle)
        ids = [request.id for request in asked if request.id not in done]
        abort(handle, ids)
        cuts = [one for one in outcomes(handle, ids) if isinstance(one, Aborted)]
        prefixes = {
            one.id: one.partial
            for one in cuts
            if one.partial is not None
            and (version is None or len(set(one.partial.versions.tolist())) == 2)
        }
    return [replace(one, prefix=prefixes[one.id]) for one in asked if one.id in prefixes], prefixes


def of_several_turns(engines: Engines, folder: Path) -> list[Sample]:
    """An agent's: each turn brings the experts of what was put behind the one before, and of its
    second segment all."""
    (handle,) = engines.handles
    (folder / "go").touch()
    give_environment(handle, AGENT, template=WORDY)
    prompts = [prompt_of(20, seed, folder=str(folder)) for seed in range(8)]
    samples = sampled(handle, engines.asked(prompts, 1))
    take_environment(handle)
    for sample in samples:
        assert sample.valid
        assert sample.segment_starts is not None
        assert len(experts(sample)) == sample.total_length - 1 - len(sample.segment_starts)
    return samples


def test_the_engines_choice_replayed_brings_the_log_probs_together(
    engines: Engines, tmp_path: Path
) -> None:
    # Long enough for the others of a group to find the prompt in the cache.
    groups = engines.groups(0, [prompt_of(140 + seed, seed) for seed in range(6)], 4)
    samples = [sample for group in groups for sample in group]
    rest, _ = cut(engines)
    samples += sampled(engines.handles[0], rest)
    samples += of_several_turns(engines, tmp_path)
    (tmp_path / "samples").write_bytes(pickle.dumps(samples))
    arguments = [tmp_path / "samples", engines.checkpoints[0], tmp_path / "found"]
    run_ranks(1, "tests.engine.routing_program", arguments)
    found = pickle.loads((tmp_path / "found").read_bytes())
    known = np.concatenate([sample.behavior_logprobs for sample in samples])
    trained = np.concatenate([sample.loss_mask for sample in samples]) > 0
    apart = {
        replay: np.abs(np.concatenate(found[replay]) - known)[trained]
        for replay in ("none", "rollout")
    }
    # The figures of docs/models.md.
    print(found["rerouted"], {k: (v.mean(), v.max(), len(v)) for k, v in apart.items()})
    # A row that lay a token or a layer off would be another choice nearly always.
    assert 0.0 < found["rerouted"] < 0.1
    assert apart["rollout"].mean() < 0.8 * apart["none"].mean()


def test_a_cut_response_keeps_its_experts_across_updates(engines: Engines) -> None:
    rest, prefixes = cut(engines, version=1)
    engines.publish(0)
    for sample in sampled(engines.handles[0], rest):
        prefix = prefixes[sample.id]
        kept = experts(prefix)
        assert len(kept) == 9 + len(prefix.response_ids) - 1
        assert len(experts(sample)) == sample.total_length - 1
        assert np.array_equal(experts(sample)[: len(kept)], kept)
        assert sample.versions[0] < sample.versions[-1]
        assert (np.diff(np.sort(experts(sample), axis=-1), axis=-1) > 0).all()
