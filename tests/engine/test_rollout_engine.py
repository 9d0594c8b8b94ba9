"""Two vLLM engines as Ray actors that load new weights, compared with transformers.

The tests share the engines of conftest.py and run in order; every test that loads weights uses the
next version.
"""

import json
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async_rl.config.engine_options import CPU_CACHE_BLOCK
from megatron_async_rl.rollout.engine_process import EngineStartError
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.types import Aborted, PartialResponse, Request
from megatron_async_rl.weights.manifest import WeightMismatch
from tests.engine.asking import abort, attempts, grown, outcomes, report, sampled, submit
from tests.engine.reference import checkpoint_weights, save_checkpoint
from tests.engine.running import (
    CHECKPOINTS,
    EVALUATIONS,
    FEWER,
    KEEP,
    MAX_TOKENS,
    RECOMPUTE,
    REWARD_S,
    SHORT,
    TOLERANCE,
    Engines,
    buckets,
    call,
    prompt_of,
    started,
)
from tests.staged import flip_a_bit, stage

pytestmark = pytest.mark.engine

STEP_TOKENS = 2048
"""Tokens that vLLM computes in one step at most, without a setting."""
TOO_SLOW = f"no reward within rollout.reward.timeout_s: {REWARD_S:g}"
FAILURES = {
    "raises": "KeyError: 'answer'",
    "nan": "the reward is nan, not a finite number of at most 1e+30",
    "hangs": TOO_SLOW,
    "backtracks": TOO_SLOW,
    "dies": "the reward's process ended with code 7; see the engine's log",
}
"""Fault of the reward (rewards_that_fail.py) -> error of the sample."""


@pytest.mark.parametrize(
    ("engine", "sampling"),
    # Two workers sample fewer tokens: they share a core with other processes at every token.
    [(KEEP, SHORT), (KEEP, None), (RECOMPUTE, SHORT), (RECOMPUTE, FEWER)],
    ids=[
        "one worker, temperature 0.7",
        "one worker, temperature 1.0",
        "two workers, temperature 0.7",
        "two workers, temperature 1.0",
    ],
)
def test_logprobs_equal_those_of_transformers_at_the_sampling_temperature(
    engines: Engines, engine: int, sampling: str | None
) -> None:
    prompts = [prompt_of(3), prompt_of(40), prompt_of(1)]
    for group in engines.groups(engine, prompts, 4, sampling=sampling):
        for sample in group:
            assert sample.versions.tolist() == [0] * sample.length
            assert engines.difference(engine, sample, 0, sampling=sampling) < TOLERANCE


def drawn(engines: Engines, sampling: str, prompts: list[Prompt], n: int) -> list[Sample]:
    """Return `n` responses of KEEP to each prompt."""
    groups = engines.groups(KEEP, prompts, n, sampling=sampling)
    return [sample for group in groups for sample in group]


def test_prompts_that_exceed_the_token_budget_of_a_step_all_get_responses(
    engines: Engines,
) -> None:
    """If vLLM split the prompt at the end of its token budget, its seeded sampler on the CPU would
    raise."""
    prompts = [prompt_of(50, seed) for seed in range(90)]
    assert sum(len(prompt.token_ids) for prompt in prompts) > 2 * STEP_TOKENS
    assert len(drawn(engines, SHORT, prompts, 1)) == len(prompts)


@pytest.mark.parametrize("name", ["cut", "penalised"])
def test_log_probs_are_those_of_the_distribution_after_all_sampling_settings(
    engines: Engines, name: str
) -> None:
    sampling, different = EVALUATIONS[name], 0
    for sample in drawn(engines, name, [prompt_of(3), prompt_of(40)], 8):
        ids = sample.response_ids.tolist()
        logprobs = torch.from_numpy(sample.behavior_logprobs.copy())
        expected = engines.reference(0).drawn_from(sample.prompt.token_ids, ids, sampling)
        expected = expected.gather(1, sample_ids := torch.tensor(ids)[:, None])[:, 0]
        assert float((logprobs - expected).abs().max()) < 10 * TOLERANCE
        logits = engines.reference(0).logits(sample.prompt.token_ids, ids) / sampling.temperature
        trainers = logits.log_softmax(-1).gather(1, sample_ids)[:, 0]
        different += int(((logprobs - trainers).abs() > 0.01).sum())
        assert sample.length <= 12
        assert not {19, 400} & set(ids) or name == "cut"
    assert different > 20, "they differ from the trainer's, whose distribution has every token"


def test_greedy_sampling_and_a_grammar_select_the_expected_tokens(
    engines: Engines,
) -> None:
    first, second = drawn(engines, "greedy", [prompt_of(9)], 2)
    assert first.response_ids.tolist() == second.response_ids.tolist()
    logits = engines.reference(0).logits(first.prompt.token_ids, first.response_ids.tolist())
    assert logits.argmax(-1).tolist() == first.response_ids.tolist()
    for sample in drawn(engines, "grammar", [prompt_of(9)], 4):
        assert [2 <= i < 10 for i in sample.response_ids] == [True, True, True, False]
        assert sample.finish_reason == "stop"


def test_a_response_ends_with_its_eos_token_or_is_truncated(engines: Engines) -> None:
    samples = [
        s
        for group in engines.groups(KEEP, [prompt_of(5, seed) for seed in range(8)], 4)
        for s in group
    ]
    stopped = [s for s in samples if s.finish_reason == "stop"]
    cut = [s for s in samples if s.finish_reason == "length"]
    assert stopped
    assert cut
    assert len(stopped) + len(cut) == len(samples)
    for sample in stopped:
        assert sample.response_ids[-1] == 0
        assert 0 not in sample.response_ids[:-1]
        assert not sample.truncated
    for sample in cut:
        assert sample.length == MAX_TOKENS
        assert 0 not in sample.response_ids
    for sample in samples:
        assert sample.loss_mask.tolist() == [1] * sample.length
        assert sample.text.split() == [f"w{i}" for i in sample.response_ids if i != 0]
        assert sample.reward == len(sample.text.split())


def test_a_group_is_reproducible_by_its_index_and_its_samples_differ(engines: Engines) -> None:
    (first,), (again,), (other,) = (
        engines.groups(KEEP, [prompt_of(9)], 4, index, SHORT) for index in (77, 77, 78)
    )
    responses = [sample.response_ids.tolist() for sample in first]
    assert responses == [sample.response_ids.tolist() for sample in again]
    assert responses != [sample.response_ids.tolist() for sample in other]
    assert len({tuple(response) for response in responses}) == 4


def test_after_each_of_three_updates_both_engines_sample_from_the_new_weights(
    engines: Engines,
) -> None:
    """A prompt that is longer than a cache block is repeated after every update: the engine must
    not reuse a block of it."""
    import ray

    repeated = prompt_of(300)
    for checkpoint, per_bucket in ((1, 1000), (2, 5), (3, 1)):
        engines.groups(KEEP, [repeated], 2, sampling=SHORT)
        report = engines.publish(checkpoint, per_bucket=per_bucket)
        assert len(report.digests) == len(checkpoint_weights(engines.checkpoints[checkpoint]))
        for engine in (KEEP, RECOMPUTE):
            assert ray.get(engines.handles[engine].version.remote(), timeout=400) == engines.version
            for group in engines.groups(engine, [repeated, prompt_of(6)], 2, sampling=SHORT):
                for sample in group:
                    assert set(sample.versions.tolist()) == {engines.version}
                    new, old = (
                        engines.difference(engine, sample, version, sampling=SHORT)
                        for version in (engines.version, engines.version - 1)
                    )
                    assert new < TOLERANCE
                    assert old > 0.1, "the checkpoints must differ"


def note_cached(engine: Any) -> None:
    """Record the number of cached prompt tokens of each request in the attribute `cached`."""
    responses, engine.cached = engine._responses, {}
    on_output = type(responses)._on_output.__get__(responses)

    def noted(entry: Any, output: Any) -> None:
        engine.cached[entry.request.id] = output.num_cached_tokens
        on_output(entry, output)

    responses._on_output = noted


def note_no_more(engine: Any) -> None:
    """Stop recording, because in other tests an output may be an exception."""
    del engine._responses._on_output


def cached(handle: Any, requests: list[Request]) -> list[int]:
    """Wait for the requests, and return the numbers of their cached tokens, sorted."""
    ids = [request.id for request in requests]
    assert all(isinstance(outcome, Sample) for outcome in outcomes(handle, ids))
    by_request: dict[str, int] = call(handle, "__ray_call__", lambda engine: engine.cached)
    return sorted(by_request[one] for one in ids)


def test_a_groups_prompt_is_read_once_and_again_by_new_weights(
    engines: Engines,
) -> None:
    handle, prompt, blocks = engines.handles[KEEP], prompt_of(300, 1), 9 * CPU_CACHE_BLOCK
    call(handle, "__ray_call__", note_cached)
    for first in (0, blocks):
        requests = engines.requests([prompt], 3)
        submit(handle, requests)
        assert cached(handle, requests) == [first, blocks, blocks]

    # These requests wait while the weights change: they must not use cached keys and values.
    call(handle, "pause")
    requests = engines.requests([prompt], 3)
    submit(handle, requests)
    engines.publish(1)
    assert cached(handle, requests) == [0, blocks, blocks]
    call(handle, "__ray_call__", note_no_more)
    for (sample,) in engines.groups(KEEP, [prompt], 1):
        assert engines.difference(KEEP, sample, engines.version) < TOLERANCE


def test_responses_in_flight_continue_through_an_update_with_a_version_per_token(
    engines: Engines,
) -> None:
    """Tokens before the update have the log-probs of the old weights. Later tokens have those of
    the new weights, which attend to keys and values of the old weights."""
    handle = engines.handles[KEEP]
    both: list[Sample] = []
    for _ in attempts("sampled by both versions, 8 of them,"):
        old = engines.version
        requests = engines.requests([prompt_of(4, seed) for seed in range(16)], 4)
        submit(handle, requests)
        early = grown(handle)
        engines.publish((engines.of_version[old] + 1) % CHECKPOINTS)
        ids = [request.id for request in requests if request.id not in early]
        samples = [sample for sample in outcomes(handle, ids) if isinstance(sample, Sample)]
        assert len(samples) == len(ids)
        assert {v for one in samples for v in one.versions.tolist()} <= {old, old + 1}
        both += [sample for sample in samples if len(set(sample.versions.tolist())) == 2]
        if len(both) >= 8:
            break
    under_old = []
    for sample in both:
        logprobs = torch.from_numpy(sample.behavior_logprobs.copy())
        expected = engines.over_kept_caches(KEEP, sample)
        assert float((logprobs - expected).abs().max()) < TOLERANCE
        switch = int(np.argmax(np.diff(sample.versions))) + 1
        old = int(sample.versions[0])
        under_old.append(engines.difference(KEEP, sample, old, since=switch))
    # The maximum over all samples, because a single token may be as likely under both weights.
    assert max(under_old) > 0.1


def test_an_aborted_response_has_its_sampled_tokens_and_continues_with_other_weights(
    engines: Engines,
) -> None:
    handle, old = engines.handles[KEEP], engines.version
    prefixes: dict[str, PartialResponse] = {}
    for _ in attempts("aborted before its end, 3 of them,"):
        requests = engines.requests([prompt_of(7, seed) for seed in range(6)], 1)
        submit(handle, requests)
        early = grown(handle)
        ids = [request.id for request in requests if request.id not in early]
        abort(handle, [*ids, "no-such-request"])
        aborted = [outcome for outcome in outcomes(handle, ids) if isinstance(outcome, Aborted)]
        prefixes = {one.id: one.partial for one in aborted if one.partial is not None}
        if len(prefixes) >= 3:
            break
    uncut = {sample.id: sample for sample in sampled(handle, requests)}
    engines.publish(0)
    by_id = {request.id: request for request in requests}
    for sample in sampled(
        handle, [replace(by_id[one], prefix=prefix) for one, prefix in prefixes.items()]
    ):
        prefix = prefixes[sample.id]
        length = len(prefix.response_ids)
        assert prefix.response_ids.tolist() == uncut[sample.id].response_ids[:length].tolist(), (
            "the prefix is the beginning of the response without an abort"
        )
        assert sample.response_ids[:length].tolist() == prefix.response_ids.tolist()
        assert sample.behavior_logprobs[:length].tolist() == prefix.behavior_logprobs.tolist()
        assert sample.versions.tolist() == [old] * length + [old + 1] * (sample.length - length)
        assert engines.difference(KEEP, sample, old, limit=length) < TOLERANCE
        assert engines.difference(KEEP, sample, old + 1, since=length) < TOLERANCE
        assert length < sample.length <= MAX_TOKENS
        assert len(sample.text.split()) == sample.length - (sample.finish_reason == "stop")


def test_reports_without_results_show_that_responses_grow(engines: Engines) -> None:
    import ray

    handle, grew = engines.handles[KEEP], False
    for _ in attempts("running during a report"):
        requests = engines.requests([prompt_of(5, seed) for seed in range(8)], 1)
        submit(handle, requests)
        running = {request.id for request in requests}
        while running:
            report = ray.get(handle.report.remote(0.05), timeout=400)
            running -= set(report.finished.column("id").to_pylist())
            grew |= report.sampling
        if grew:
            break
    assert not ray.get(handle.report.remote(0.05), timeout=400).sampling


def test_a_request_that_is_aborted_before_its_first_token_has_only_its_prefix(
    engines: Engines,
) -> None:
    handle = engines.handles[KEEP]
    fresh, continued = engines.requests([prompt_of(7)], 2)
    prefix = PartialResponse(
        response_ids=np.array([5, 6], np.int32),
        behavior_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    before = report(handle, 0.1)
    call(handle, "pause")
    submit(handle, [fresh, replace(continued, prefix=prefix)])
    assert report(handle, 0.1).running == 2
    abort(handle, [fresh.id, continued.id])
    first, second = outcomes(handle, [fresh.id, continued.id])
    call(handle, "resume")
    assert isinstance(first, Aborted)
    assert isinstance(second, Aborted)
    assert first.partial is None
    assert second.partial is not None
    assert second.partial.response_ids.tolist() == [5, 6]
    after = report(handle, 0.1)
    assert (after.running, after.tokens, after.busy_s) == (0, before.tokens, before.busy_s)


def test_a_stop_string_ends_a_response_even_if_it_begins_in_the_prefix(engines: Engines) -> None:
    samples = [
        sample
        for group in engines.groups(
            KEEP, [prompt_of(3, seed) for seed in range(20)], 4, sampling=SHORT
        )
        for sample in group
    ]
    stopped = [sample for sample in samples if "19 w" in sample.text]
    assert stopped
    for sample in stopped:
        assert sample.finish_reason == "stop"
        assert "19 w" not in " ".join(sample.text.split()[:-1])
    prefix = PartialResponse(
        response_ids=np.array([5, 119], np.int32),
        behavior_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    requests = [
        replace(request, prefix=prefix)
        for request in engines.requests([prompt_of(3)], 2, sampling=SHORT)
    ]
    assert [
        (sample.length, sample.finish_reason) for sample in sampled(engines.handles[KEEP], requests)
    ] == [(3, "stop")] * 2


def test_an_invalid_request_is_refused_before_any_is_accepted(engines: Engines) -> None:
    handle = engines.handles[KEEP]
    requests = engines.requests([prompt_of(3)], 2)
    full = PartialResponse(
        response_ids=np.full(MAX_TOKENS, 5, np.int32),
        behavior_logprobs=np.zeros(MAX_TOKENS, np.float32),
        versions=np.zeros(MAX_TOKENS, np.int32),
    )
    with pytest.raises(ValueError, match=f"received requests twice: {requests[0].id}"):
        submit(handle, [*requests, requests[0]])
    with pytest.raises(
        ValueError,
        match=r"prefix of 400 tokens; .* fewer than rollout\.sampling\.max_tokens: 400",
    ):
        submit(handle, [requests[0], replace(requests[1], prefix=full)])
    assert report(handle, 0.1).running == 0


@dataclass
class Meanwhile:
    """Samples of prompts whose rewards fail, samples of other prompts, and the error and the log
    folder of an engine that could not start while rewards hung."""

    failed: list[list[Sample]]
    good: list[list[Sample]]
    error: EngineStartError
    logs: Path


@pytest.fixture(scope="module")
def meanwhile(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Meanwhile:
    handle, folder = engines.handles[KEEP], tmp_path_factory.mktemp("broken")
    failing = [prompt_of(4, seed, reward=name) for seed, name in enumerate(FAILURES)]
    good = [prompt_of(4, seed) for seed in range(10, 20)]
    requests = engines.requests([*failing, *good], 2, sampling=SHORT)
    ids = [request.id for request in requests]
    submit(handle, requests)
    # Before another engine starts, because a busy machine could delay these rewards, too.
    known: dict[str, Sample | Aborted] = {}
    outcomes(handle, ids[2 * len(failing) :], known=known)

    model = save_checkpoint(folder / "model", seed=0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"intermediate_size": config["intermediate_size"] + 16})
    )
    logs = folder / "logs"
    spec = replace(engines.specs[KEEP], index=7, model_path=model, log_dir=logs)
    with pytest.raises(EngineStartError, match="engine-7 did not start") as failure:
        started([spec])

    groups = [list(pair) for pair in batched(outcomes(handle, ids, known=known), 2)]
    count = len(FAILURES)
    return Meanwhile(groups[:count], groups[count:], failure.value, logs)  # type: ignore[arg-type]


def test_rewards_that_fail_are_recorded_and_affect_no_other(
    engines: Engines, meanwhile: Meanwhile
) -> None:
    for group, error in zip(meanwhile.failed, FAILURES.values(), strict=True):
        assert [sample.reward_error for sample in group] == [error] * 2
        assert all(sample.reward == 0.0 and not sample.valid for sample in group)
    for group in meanwhile.good:
        assert all(sample.valid and sample.reward == len(sample.text.split()) for sample in group)

    failed = [sample for group in meanwhile.failed for sample in group]
    lines = [json.loads(line) for line in engines.specs[KEEP].reward_log.read_text().splitlines()]
    assert sorted((line["error"], line["response"]) for line in lines) == sorted(
        (str(sample.reward_error), sample.text) for sample in failed
    )


def test_a_bit_that_flips_in_transit_stops_the_engine_and_names_the_tensor(
    engines: Engines,
) -> None:
    victim = "model.layers.1.mlp.up_proj.weight"
    manifest = engines.stage(1)
    flip_a_bit(manifest, victim)
    with pytest.raises(WeightMismatch, match=r"engine-0") as failure:
        engines.feed(manifest)
    assert failure.value.name == victim
    assert failure.value.sent != failure.value.loaded
    assert report(engines.handles[0], 0.1).state == "paused"
    engines.publish(1)


def test_a_version_that_is_not_newer_is_refused_and_the_weights_stay(engines: Engines) -> None:
    manifest = stage(engines.staging, engines.version, buckets(engines.checkpoints[2]))
    with pytest.raises(Exception, match=f"weight version {engines.version} was refused"):
        engines.feed(manifest, [KEEP])
    call(engines.handles[KEEP], "resume")
    (group,) = engines.groups(KEEP, [prompt_of(12)], 2)
    for sample in group:
        assert engines.difference(KEEP, sample, engines.version) < TOLERANCE


def test_an_update_without_a_part_of_a_fused_parameter_is_refused(engines: Engines) -> None:
    left_out = "model.layers.0.self_attn.k_proj.weight"
    weights = checkpoint_weights(engines.checkpoints[2])
    part = {name: tensor for name, tensor in weights.items() if name != left_out}
    engines.version += 1
    manifest = stage(engines.staging, engines.version, [part])
    with pytest.raises(Exception, match=f"left out 1: {left_out}"):
        engines.feed(manifest, [KEEP])
    engines.publish(2)
    (group,) = engines.groups(KEEP, [prompt_of(12)], 2)
    assert all(engines.difference(KEEP, sample, engines.version) < TOLERANCE for sample in group)


def test_engines_write_to_their_logs_only(
    engines: Engines, capfd: pytest.CaptureFixture[str]
) -> None:
    engines.groups(KEEP, [prompt_of(3)], 1)
    reports = [engines.publish(checkpoint) for checkpoint in (3, 0, 1)]
    print("publishes:", *reports, sep="\n")
    captured = capfd.readouterr()
    print(captured.out)
    assert "EngineCore" not in captured.out + captured.err
    for spec in engines.specs:
        assert "EngineCore" in spec.log.read_text()


def test_an_engine_that_cannot_start_reports_the_reason_and_its_log(meanwhile: Meanwhile) -> None:
    message = str(meanwhile.error)
    assert "cause: RuntimeError: start (0) + length (64) exceeds dimension size (48)" in message
    assert str(meanwhile.logs / "engine-7.log") in message
