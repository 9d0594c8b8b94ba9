"""Updates during responses, and engines that sleep, hang, die and restart.

The tests share the two engines of conftest.py and run in order; every test that loads weights uses
the next version, and the last tests end the engines.
"""

import contextlib
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.types import Aborted
from megatron_async_rl.watchdog.watch import remote_cause
from megatron_async_rl.weights.collective import Sender
from megatron_async_rl.weights.manifest import Manifest, WeightUpdate
from tests.engine.asking import abort, attempts, finished, grown, outcomes, report, sampled, submit
from tests.engine.running import (
    CHECKPOINTS,
    DOUBLE,
    FEWER,
    FOURFOLD,
    KEEP,
    RECOMPUTE,
    SHORT,
    TEMPERATURE,
    TOLERANCE,
    Engines,
    buckets,
    call,
    prompt_of,
    spans,
    started,
)
from tests.parallel.ranks import run_ranks
from tests.staged import stage
from tests.vllm_process import actor_of, core_of, workers_of

pytestmark = pytest.mark.engine

BOTH = pytest.mark.parametrize("engine", [KEEP, RECOMPUTE], ids=["keep", "recompute, two workers"])
EMPTY = Manifest(buckets=(), digests={})
UPDATES = CHECKPOINTS - 1
LENGTHS = ((None, FEWER), (FOURFOLD, DOUBLE), *[(FOURFOLD, FOURFOLD)] * 3)
"""Sampling settings of KEEP and RECOMPUTE at each attempt to sample responses through the updates.
Later attempts sample longer responses, because on a busy machine too many responses of the earlier
attempts may have ended."""


@pytest.fixture(scope="module")
def through_updates(engines: Engines) -> dict[int, list[Sample]]:
    """Responses of each engine that four versions sampled. Responses are requested again if too
    many finished before the last update."""
    through: dict[int, list[Sample]] = {KEEP: [], RECOMPUTE: []}
    for samplings in LENGTHS:
        prompts = [prompt_of(20, seed) for seed in range(6)]
        requests = {
            engine: engines.requests(prompts, 2, sampling=sampling)
            for engine, sampling in zip((KEEP, RECOMPUTE), samplings, strict=True)
        }
        for engine, handle in enumerate(engines.handles):
            submit(handle, requests[engine])
        done: list[set[str]] = [set(), set()]
        for checkpoint in range(1, UPDATES + 1):
            for engine, handle in enumerate(engines.handles):
                done[engine] |= grown(handle)
            engines.publish(checkpoint)
        for engine, handle in enumerate(engines.handles):
            ids = [request.id for request in requests[engine] if request.id not in done[engine]]
            samples = [sample for sample in outcomes(handle, ids) if isinstance(sample, Sample)]
            through[engine] += [s for s in samples if len(set(s.versions.tolist())) == UPDATES + 1]
        if min(map(len, through.values())) >= 2:
            return through
    pytest.fail(f"in {len(LENGTHS)} attempts, too few responses were sampled through the updates")


def difference(sample: Sample, start: int, end: int, reference: torch.Tensor) -> float:
    return float(
        (torch.from_numpy(sample.behavior_logprobs[start:end].copy()) - reference).abs().max()
    )


def alone(engines: Engines, sample: Sample, version: int, start: int, end: int) -> torch.Tensor:
    """Return the log-probs of the tokens `start` to `end` if the weights of `version` compute all
    keys and values."""
    ids = sample.response_ids.tolist()
    return engines.reference(version).logprobs(sample.prompt.token_ids, ids[:end], TEMPERATURE)[
        start:
    ]


def test_with_recompute_every_token_has_the_logprob_of_the_weights_that_sampled_it(
    engines: Engines, through_updates: dict[int, list[Sample]]
) -> None:
    under_previous = []
    for sample in through_updates[RECOMPUTE]:
        for version, start, end in spans(sample):
            assert (
                difference(sample, start, end, alone(engines, sample, version, start, end))
                < TOLERANCE
            )
            if version:
                before = alone(engines, sample, version - 1, start, end)
                under_previous.append(difference(sample, start, end, before))
    assert max(under_previous) > 0.1, "the previous weights must have other log-probs"


def test_with_recompute_logprobs_equal_the_trainers(
    engines: Engines, through_updates: dict[int, list[Sample]], tmp_path: Path
) -> None:
    samples = through_updates[RECOMPUTE][:2]
    (tmp_path / "samples").write_bytes(pickle.dumps(samples))
    arguments = [
        tmp_path / "samples",
        str(TEMPERATURE),
        tmp_path / "logprobs",
        *engines.checkpoints,
    ]
    run_ranks(1, "tests.engine.trainer_program", arguments)
    logprobs = pickle.loads((tmp_path / "logprobs").read_bytes())
    for row, sample in enumerate(samples):
        for version, start, end in spans(sample):
            under = torch.from_numpy(
                logprobs[str(engines.checkpoints[engines.of_version[version]])][row]
            )
            assert difference(sample, start, end, under[start:end]) < TOLERANCE


def test_with_keep_every_token_has_the_logprob_of_its_weights_over_the_earlier_cache(
    engines: Engines, through_updates: dict[int, list[Sample]]
) -> None:
    recomputed = []
    for sample in through_updates[KEEP]:
        expected = engines.over_kept_caches(KEEP, sample)
        for version, start, end in spans(sample):
            assert difference(sample, start, end, expected[start:end]) < TOLERANCE
            to_alone = difference(sample, start, end, alone(engines, sample, version, start, end))
            if start == 0:
                assert to_alone < TOLERANCE
            else:
                recomputed.append(to_alone)
    assert max(recomputed) > 0.1, "a recomputed cache must have other log-probs"


@BOTH
def test_weights_arrive_over_a_communicator_while_the_engine_samples(
    engines: Engines, engine: int
) -> None:
    handle, spec = engines.handles[engine], engines.specs[engine]
    sender = Sender("127.0.0.1", torch.device("cpu"), 400.0)
    meeting = sender.open(spec.rollout.workers)
    requests = engines.requests([prompt_of(20)], 2, sampling=FEWER)
    submit(handle, requests)
    remaining = {request.id for request in requests}
    for kept in (None, engines.version + 1):
        manifest = engines.stage(2, per_bucket=5)
        version = engines.version
        assert len(manifest.buckets) > 2
        weight_update = WeightUpdate(meeting=meeting, version=version, manifest=manifest, kept=kept)
        call(handle, "receive", weight_update)
        copy = sender.send(meeting, version, manifest)
        received = report(handle, 0.05)
        assert received.state == "running"
        remaining -= {sample.id for sample in finished(received)}
        assert set(copy.manifest.paths).isdisjoint(manifest.paths)
        assert call(handle, "update", version, copy.manifest) == manifest.digests
    assert all(isinstance(outcome, Sample) for outcome in outcomes(handle, sorted(remaining)))
    engines.feed(engines.stage(2))


@BOTH
def test_a_pause_changes_no_draw(engines: Engines, engine: int) -> None:
    """The test compares responses with and without pauses. An engine with `in_flight: recompute`
    reads a response again from its beginning, and its random generator must keep its state."""
    requests = engines.requests([prompt_of(30)], 4, 900, FEWER)
    handle, responses = engines.handles[engine], []
    for pauses in (0, 3):
        submit(handle, requests)
        for _ in range(pauses):
            time.sleep(0.1)
            call(handle, "pause")
            call(handle, "resume")
        ended = outcomes(handle, [request.id for request in requests])
        responses.append([s.response_ids.tolist() for s in ended if isinstance(s, Sample)])
    assert responses[0] == responses[1]
    assert max(len(response) for response in responses[0]) > 100


@BOTH
def test_a_sleeping_engine_keeps_its_requests_loads_weights_and_continues(
    engines: Engines, engine: int
) -> None:
    handle = engines.handles[engine]
    requests = engines.requests([prompt_of(10, seed) for seed in range(4)], 1, sampling=FEWER)
    submit(handle, requests)
    call(handle, "sleep")
    asleep, done = report(handle, 0.3), set[str]()
    while asleep.finished.num_rows:  # responses that ended before the sleep and were scored later
        done |= {sample.id for sample in finished(asleep)}
        asleep = report(handle, 2.0)
    later = report(handle, 0.3)
    assert later.state == "asleep"
    assert (later.running, later.finished.num_rows) == (asleep.running, 0)
    assert later.busy_s == asleep.busy_s
    version = engines.version + 1
    for method, refusal, *arguments in (
        ("pause", "cannot pause: it is asleep"),
        ("resume", "cannot resume: it is asleep"),
        ("sleep", "cannot sleep: it is asleep"),
        ("wake", "cannot wake cache", ("cache",)),
        ("update", "cannot load weights: their memory is asleep", version, EMPTY),
    ):
        refused(handle, refusal, method, *arguments)
    call(handle, "wake", ("weights",))
    refused(handle, "cannot wake: weights is awake already", "wake", ("weights",))
    assert report(handle, 0.1).state == "asleep"
    manifest = stage(engines.staging, version, buckets(engines.checkpoints[0]))
    assert call(handle, "update", version, manifest) == manifest.digests
    assert report(handle, 0.1).state == "asleep", "the cache is asleep"
    call(handle, "wake")
    refused(handle, "cannot wake: it is awake already", "wake", None)
    engines.of_version[version] = 0
    if engine == RECOMPUTE:
        engines.version = version
    for sample in outcomes(handle, [request.id for request in requests if request.id not in done]):
        assert isinstance(sample, Sample)
        assert sample.versions[-1] == version


def refused(handle: Any, reason: str, method: str, *arguments: Any) -> None:
    with pytest.raises(Exception, match=reason):
        call(handle, method, *arguments)


def test_an_aborted_response_continues_on_another_engine_with_its_versions_and_logprobs(
    engines: Engines,
) -> None:
    first, second = engines.handles[KEEP], engines.handles[RECOMPUTE]
    through: set[str] = set()
    for _ in attempts("aborted after the update, not before"):
        requests = engines.requests([prompt_of(12, seed) for seed in range(6)], 1)
        submit(first, requests)
        done = grown(first)
        engines.publish(1)
        done |= grown(first) | grown(first)
        ids = [request.id for request in requests if request.id not in done]
        abort(first, ids)
        prefixes = {
            one.id: one.partial
            for one in outcomes(first, ids)
            if isinstance(one, Aborted) and one.partial is not None
        }
        through = {
            one for one, prefix in prefixes.items() if len(set(prefix.versions.tolist())) == 2
        }
        if through:
            break
    before = engines.version
    engines.publish(3)
    continued = [
        replace(request, prefix=prefixes[request.id])
        for request in requests
        if request.id in through
    ]
    for sample in sampled(second, continued):
        prefix = prefixes[sample.id]
        assert prefix is not None
        length = len(prefix.response_ids)
        assert sample.response_ids[:length].tolist() == prefix.response_ids.tolist()
        assert sample.behavior_logprobs[:length].tolist() == prefix.behavior_logprobs.tolist()
        assert sample.versions.tolist() == [
            *prefix.versions.tolist(),
            *[before + 1] * (sample.length - length),
        ]
        assert sample.length > length
        assert (
            difference(
                sample,
                length,
                sample.length,
                alone(engines, sample, before + 1, length, sample.length),
            )
            < TOLERANCE
        )


def test_an_engine_that_dies_during_an_update_reports_it_and_a_new_engine_loads_the_version(
    engines: Engines,
) -> None:
    import ray

    handle, spec, core = (
        engines.handles[KEEP],
        engines.specs[KEEP],
        core_of(engines.specs[KEEP].log),
    )
    manifest = engines.stage(2, per_bucket=5)
    requests = engines.requests([prompt_of(8)], 2)
    core.suspend()  # otherwise it could complete the requests or the update before the kill
    submit(handle, requests)
    update = handle.update.remote(engines.version, manifest)
    engines.feed(manifest, [RECOMPUTE])
    core.kill()
    with pytest.raises(ray.exceptions.RayTaskError, match="the vLLM process of engine-0 died"):
        ray.get(update, timeout=400)
    with pytest.raises(ray.exceptions.RayTaskError) as failure:
        outcomes(handle, [request.id for request in requests])
    assert (
        f"the vLLM process of engine-0 died while it worked on 2 responses; see {spec.log}"
        in str(remote_cause(failure.value))
    )
    ray.kill(handle)
    (engines.handles[KEEP],) = started([spec], again=True)
    assert "EngineDeadError" in spec.log.with_name("engine-0.log.1").read_text()
    assert "EngineDeadError" not in spec.log.read_text()
    engines.feed(manifest, [KEEP])
    for engine in (KEEP, RECOMPUTE):
        prompts = [prompt_of(8, seed) for seed in range(2)]
        for (sample,) in engines.groups(engine, prompts, 1, sampling=SHORT):
            assert set(sample.versions.tolist()) == {engines.version}
            assert engines.difference(engine, sample, engines.version, sampling=SHORT) < TOLERANCE


def test_an_engine_that_hangs_is_silent_and_no_process_outlives_its_kill(
    engines: Engines,
) -> None:
    import ray

    core, actor = core_of(engines.specs[RECOMPUTE].log), actor_of(engines.specs[RECOMPUTE].log)
    workers = workers_of(engines.specs[RECOMPUTE].log)
    assert len(workers) == 2
    while report(engines.handles[RECOMPUTE], 0.1).silent_s > 2:
        pass  # a busy machine may delay the reply, but not forever
    core.send_signal(signal.SIGSTOP)
    while report(engines.handles[RECOMPUTE], 0.1).silent_s <= 5:
        pass  # the silence must grow from now on
    stopped = [core, actor, *workers, *actor.children(recursive=True)]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    core.kill()
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive, "a stopped worker ends with the process that started it"
    ray.kill(engines.handles[RECOMPUTE])
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()  # processes of rewards notice themselves that the engine has ended
    _, alive = psutil.wait_procs(stopped, timeout=300)
    assert not alive


def test_the_engine_process_ends_when_its_actor_is_killed(engines: Engines) -> None:
    log = engines.specs[KEEP].log
    core = core_of(log)
    actor_of(log).kill()
    _, alive = psutil.wait_procs([core], timeout=300)
    assert not alive
