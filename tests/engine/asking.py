"""Requests to running engine actors. Like the controller, the functions submit requests and then
call `report` repeatedly."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.columns import samples_of
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Aborted, Request

ATTEMPTS = 40


def submit(handle: Any, requests: Sequence[Request]) -> None:
    import ray

    ray.get(handle.submit.remote(list(requests)), timeout=400)


def abort(handle: Any, ids: Sequence[str]) -> None:
    import ray

    ray.get(handle.abort.remote(list(ids)), timeout=400)


def report(handle: Any, timeout_s: float = 5.0) -> EngineReport:
    import ray

    received: EngineReport = ray.get(handle.report.remote(timeout_s), timeout=timeout_s + 400)
    return received


def finished(received: EngineReport) -> list[Sample]:
    return samples_of(received.finished)


def attempts(purpose: str) -> Iterator[int]:
    """Yield the numbers of repeated attempts: responses may finish before a test acts on them. The
    test ends the loop. Raises AssertionError after ATTEMPTS."""
    yield from range(ATTEMPTS)
    raise AssertionError(f"no response was {purpose} in {ATTEMPTS} attempts")


def grown(handle: Any) -> set[str]:
    """Wait until responses have grown since the previous report, or all have finished. Return the
    ids of the responses that finished meanwhile."""
    done: set[str] = set()
    while True:
        received = report(handle, 0.05)
        done |= {sample.id for sample in finished(received)}
        if received.sampling or not received.running:
            return done


def outcomes(
    handle: Any,
    ids: Sequence[str],
    timeout_s: float = 400.0,
    known: dict[str, Sample | Aborted] | None = None,
) -> list[Sample | Aborted]:
    """Wait for the outcomes of these requests, and return them in order. `known`: outcomes by
    request that earlier reports had. New outcomes are added to it, including those of other
    requests."""
    known = {} if known is None else known
    deadline = time.monotonic() + timeout_s
    while not known.keys() >= set(ids):
        assert time.monotonic() < deadline, f"no outcome of {sorted(set(ids) - known.keys())}"
        received = report(handle)
        known |= {outcome.id: outcome for outcome in (*finished(received), *received.aborted)}
    return [known[one] for one in ids]


def sampled(handle: Any, requests: Sequence[Request]) -> list[Sample]:
    """Submit `requests`, and return their samples in order."""
    submit(handle, requests)
    samples = outcomes(handle, [request.id for request in requests])
    assert all(isinstance(sample, Sample) for sample in samples)
    return samples  # type: ignore[return-value]
