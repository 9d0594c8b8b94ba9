"""Requests to running engine actors, as the controller makes them: submit, then report after
report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.columns import samples_of
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Aborted, Request


def submit(handle: Any, requests: Sequence[Request]) -> None:
    import ray

    ray.get(handle.submit.remote(list(requests)), timeout=400)


def abort(handle: Any, ids: Sequence[str]) -> None:
    import ray

    ray.get(handle.abort.remote(list(ids)), timeout=400)


def report(handle: Any, timeout_s: float = 5.0) -> EngineReport:
    import ray

    answer: EngineReport = ray.get(handle.report.remote(timeout_s), timeout=timeout_s + 400)
    return answer


def finished(answer: EngineReport) -> list[Sample]:
    return samples_of(answer.finished)


def grown(handle: Any) -> set[str]:
    """Waits until responses have grown since the report before, or all have finished; which ones
    finished meanwhile."""
    done: set[str] = set()
    while True:
        answer = report(handle, 0.05)
        done |= {sample.id for sample in finished(answer)}
        if answer.sampling or not answer.running:
            return done


def outcomes(
    handle: Any,
    ids: Sequence[str],
    timeout_s: float = 400.0,
    came: dict[str, Sample | Aborted] | None = None,
) -> list[Sample | Aborted]:
    """Outcomes of these requests, in order. `came`: outcomes by request that came before; those
    that come now, also of other requests, are added."""
    came = {} if came is None else came
    deadline = time.monotonic() + timeout_s
    while not came.keys() >= set(ids):
        assert time.monotonic() < deadline, f"no answer to {sorted(set(ids) - came.keys())}"
        answer = report(handle)
        came |= {outcome.id: outcome for outcome in (*finished(answer), *answer.aborted)}
    return [came[one] for one in ids]


def sampled(handle: Any, requests: Sequence[Request]) -> list[Sample]:
    """The samples that answer `requests`, in order."""
    submit(handle, requests)
    samples = outcomes(handle, [request.id for request in requests])
    assert all(isinstance(sample, Sample) for sample in samples)
    return samples  # type: ignore[return-value]
