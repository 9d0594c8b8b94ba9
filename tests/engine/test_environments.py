"""Multi-turn samples of a real engine that receives new weights, compared with transformers."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.types import Aborted
from tests.engine.asking import abort, outcomes, sampled, submit
from tests.engine.environments import AGENT, WORDY
from tests.engine.reference import save_checkpoint
from tests.engine.running import TOLERANCE, Engines, give_environment, prompt_of, running

pytestmark = pytest.mark.engine

WORDS = [7, 8]
TURNS = 3


@pytest.fixture(scope="module")
def engines(in_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    root = tmp_path_factory.mktemp("engines")
    settings = {
        "sampling": {"max_tokens": 200, "stop": ["7 w"]},
        "reward": {"name": "environment"},
        "environment": {"name": "tests.engine.environments:Counting", "format": "text"},
    }
    checkpoints = [save_checkpoint(root / f"model-{seed}", seed=seed) for seed in range(2)]
    with running(lambda: Engines(root, [settings], checkpoints)) as engines:
        yield engines


def until(path: Path) -> None:
    deadline = time.monotonic() + 400
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def turns(sample: Sample) -> list[tuple[int, int]]:
    """Return the start and the end of the sampled tokens of each turn."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], sample.loss_mask, [0]))))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def segments(sample: Sample) -> list[Sample]:
    """Return each segment as a sample of its own, whose prompt is the context of the segment."""
    if sample.segment_starts is None:
        return [sample]
    samples, edges = [], [0, *sample.segment_starts.tolist(), sample.length]
    for start, end in itertools.pairwise(edges):
        prompt = sample.prompt
        if start:
            first = start + int(sample.loss_mask[start:end].argmax())
            ids = tuple(sample.response_ids[start:first].tolist())
            start, prompt = first, replace(prompt, token_ids=ids)
        own = {
            name: getattr(sample, name)[start:end]
            for name in ("response_ids", "behavior_logprobs", "versions", "loss_mask")
        }
        samples.append(
            replace(sample, prompt=prompt, segment_starts=None, step_rewards=None, **own)
        )
    return samples


def differs(engines: Engines, sample: Sample) -> float:
    """Return the largest absolute difference between the log-probs of the engine and of
    transformers for sampled tokens, each turn with the weights of its version."""
    largest = 0.0
    for start, end in turns(sample):
        (version,) = set(sample.versions[start:end].tolist())
        reference = engines.reference(version).logprobs(
            sample.prompt.token_ids, sample.response_ids[:end].tolist(), 1.0
        )[start:]
        own = torch.from_numpy(sample.behavior_logprobs[start:end].copy())
        largest = max(largest, float((own - reference).abs().max()))
    return largest


def test_an_update_during_a_tool_call_does_not_wait_for_it(
    engines: Engines, tmp_path: Path
) -> None:
    (handle,) = engines.handles
    waiting = prompt_of(5, 1, fault="waits", folder=str(tmp_path))
    requests = engines.requests([waiting], 1)
    others = engines.requests([prompt_of(4, seed) for seed in range(4)], 2)
    submit(handle, requests)
    until(tmp_path / "waiting")
    for sample in sampled(handle, others):
        assert sample.versions.tolist() == [0] * sample.length
        assert differs(engines, sample) < TOLERANCE
    engines.publish(1)  # Returns during the call.
    (tmp_path / "go").touch()
    (sample,) = outcomes(handle, [requests[0].id])
    assert isinstance(sample, Sample)
    assert (sample.reward, sample.reward_error) == (1.5, None)

    spans = turns(sample)
    assert len(spans) == TURNS
    assert [sample.versions[start] for start, _ in spans] == [0, 0, 1]
    assert differs(engines, sample) < TOLERANCE
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert sample.response_ids[end:start].tolist() == WORDS
        assert sample.behavior_logprobs[end:start].tolist() == [0.0, 0.0]
    assert sample.step_rewards is not None
    assert [sample.step_rewards[end - 1] for _, end in spans] == [0.25, 0.5, 0.75]
    assert sample.text.count("[environment, reward") == TURNS


def test_a_stop_string_ends_its_turn_and_may_occur_in_content(
    engines: Engines,
) -> None:
    """The content of every sample contains `7 w`."""
    samples = sampled(engines.handles[0], engines.requests([prompt_of(4, 9)], 16))
    stopped = 0
    for sample in samples:
        for start, end in turns(sample):
            text = " ".join(f"w{one}" for one in sample.response_ids[start:end].tolist())
            assert "7 w" not in text[: text.rfind(" w")]
            stopped += "7 w" in text
    assert stopped


def test_a_sample_aborted_in_its_environment_begins_again(engines: Engines, tmp_path: Path) -> None:
    (handle,) = engines.handles
    requests = engines.requests([prompt_of(5, 1, fault="waits", folder=str(tmp_path))], 1)
    submit(handle, requests)
    until(tmp_path / "waiting")
    abort(handle, [requests[0].id])
    (cut,) = outcomes(handle, [requests[0].id])
    assert isinstance(cut, Aborted)
    assert cut.partial is None
    (tmp_path / "go").touch()
    (sample,) = sampled(handle, requests)
    assert len(turns(sample)) == TURNS


def test_a_failing_environment_fails_its_sample_and_is_logged(engines: Engines) -> None:
    prompts = [prompt_of(5, 1, fault=fault) for fault in ("reset", "raises", None)]
    failed, raised, fine = sampled(engines.handles[0], engines.requests(prompts, 1))
    assert (failed.reward_error, failed.loss_mask.tolist()) == (
        "reset raised KeyError: 'secret'",
        [0],
    )
    assert raised.reward_error == "step raised KeyError: 'answer'"
    assert len(turns(raised)) == 2
    assert fine.valid
    assert "KeyError: 'secret'" in engines.specs[0].reward_log.read_text()


def test_a_sample_has_what_the_client_of_openai_received(engines: Engines, tmp_path: Path) -> None:
    """The last test of the module, because it replaces the environment of the engine."""
    (handle,) = engines.handles
    give_environment(handle, AGENT, template=WORDY)

    before = engines.version
    requests = engines.requests([prompt_of(5, 1, folder=str(tmp_path))], 1)
    submit(handle, requests)
    until(tmp_path / "waiting")
    engines.publish(0)
    (tmp_path / "go").touch()
    (sample,) = outcomes(handle, [requests[0].id])
    assert isinstance(sample, Sample)
    assert (sample.reward, sample.reward_error) == (0.5, None)

    first, second = segments(sample)
    assert first.prompt.token_ids == (9, 5, 6, 10, 11)
    assert second.prompt.token_ids == (9, 5, 10, 11)
    logprobs, *counts, refused = json.loads((tmp_path / "results").read_text())
    assert "segment 3 of the sample" in refused
    spans = turns(first)
    assert [end - start for start, end in spans + turns(second)] == [len(logprobs), *counts]
    assert [first.versions[start] for start, _ in spans] == [before, before + 1, before + 1]
    assert first.behavior_logprobs[: len(logprobs)].tolist() == pytest.approx(logprobs, abs=1e-6)
    for segment in (first, second):
        assert differs(engines, segment) < TOLERANCE
    for words, (_, end), (start, _) in zip(([7, 8], [7]), spans, spans[1:], strict=False):
        ended = [] if first.response_ids[end - 1] == 0 else [10]
        assert first.response_ids[end:start].tolist() == [*ended, 9, *words, 10, 11]
