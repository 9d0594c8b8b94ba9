"""Experts that an engine records with its samples, and the agreement of a trainer that replays
them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.types import Aborted, PartialResponse
from tests.engine.asking import abort, attempts, grown, outcomes, sampled, submit
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
"""Bytes per token."""


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
    """Return the recorded experts, [tokens without the last, layers, experts per token]."""
    assert of.routed_experts is not None
    return np.frombuffer(of.routed_experts, dtype=np.uint8).reshape(-1, LAYERS, CHOSEN)


def cut(engines: Engines, version: int | None = None) -> tuple[list, dict[str, PartialResponse]]:
    """Abort requests. Return those that had sampled tokens, with their prefixes, and the prefixes
    by request. `version`: checkpoint that is loaded before the abort and samples the last tokens of
    each prefix."""
    handle, prefixes = engines.handles[0], {}
    for _ in attempts("aborted before its end"):
        requests = engines.requests([prompt_of(9, seed) for seed in range(6)], 1)
        submit(handle, requests)
        done = grown(handle)
        if version is not None:
            engines.publish(version)
            done |= grown(handle) | grown(handle)
        ids = [request.id for request in requests if request.id not in done]
        abort(handle, ids)
        aborted = [one for one in outcomes(handle, ids) if isinstance(one, Aborted)]
        prefixes = {
            one.id: one.partial
            for one in aborted
            if one.partial is not None
            and (version is None or len(set(one.partial.versions.tolist())) == 2)
        }
        if prefixes:
            break
    return [
        replace(one, prefix=prefixes[one.id]) for one in requests if one.id in prefixes
    ], prefixes


def of_several_turns(engines: Engines, folder: Path) -> list[Sample]:
    """Return samples of an agent. A turn records the experts of the tokens since the previous turn;
    the first turn of a segment records those of all its tokens."""
    (handle,) = engines.handles
    (folder / "go").touch()
    give_environment(handle, AGENT, template=WORDY)
    prompts = [prompt_of(20, seed, folder=str(folder)) for seed in range(8)]
    samples = sampled(handle, engines.requests(prompts, 1))
    take_environment(handle)
    for sample in samples:
        assert sample.valid
        assert sample.segment_starts is not None
        assert len(experts(sample)) == sample.total_length - 1 - len(sample.segment_starts)
    return samples


def test_replaying_the_engines_experts_makes_the_log_probs_agree(
    engines: Engines, tmp_path: Path
) -> None:
    # Longer than a cache block, so that the other samples of a group use the cached prompt.
    groups = engines.groups(0, [prompt_of(140 + seed, seed) for seed in range(6)], 4)
    samples = [sample for group in groups for sample in group]
    rest, _ = cut(engines)
    samples += sampled(engines.handles[0], rest)
    samples += of_several_turns(engines, tmp_path)
    (tmp_path / "samples").write_bytes(pickle.dumps(samples))
    arguments = [tmp_path / "samples", engines.checkpoints[0], tmp_path / "found"]
    run_ranks(1, "tests.engine.routing_program", arguments)
    by_replay = pickle.loads((tmp_path / "found").read_bytes())
    sampled_logprobs = np.concatenate([sample.behavior_logprobs for sample in samples])
    trained = np.concatenate([sample.loss_mask for sample in samples]) > 0
    differences = {
        replay: np.abs(np.concatenate(by_replay[replay]) - sampled_logprobs)[trained]
        for replay in ("none", "rollout")
    }
    # docs/models.md has these figures.
    print(by_replay["rerouted"], {k: (v.mean(), v.max(), len(v)) for k, v in differences.items()})
    # A row in the position of another token or layer would nearly always have other experts.
    assert 0.0 < by_replay["rerouted"] < 0.1
    assert differences["rollout"].mean() < 0.8 * differences["none"].mean()


def test_an_aborted_response_keeps_its_experts_across_updates(engines: Engines) -> None:
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
