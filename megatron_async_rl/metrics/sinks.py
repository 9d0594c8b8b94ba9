"""The sinks of a line of metrics besides `RUN/metrics.jsonl`: TensorBoard and Prometheus.

Both receive checked values and do not depend on the log. A list becomes a histogram in TensorBoard,
or a scalar per engine (`engine/tokens/0`, ...). In Prometheus it becomes one gauge with a label:
`engine` for a value per engine, else `bin`, the smallest value that the bin counts.

Invariants:
- values are on disk, or served, when the call returns; a thread calls TensorBoard for the log,
  because a disk may be full or slow;
- Prometheus serves one whole line, never parts of two; a key that the newest line does not have is
  not served, except the newest evaluation, which is served until the next one, so that a scrape
  finds it however short the steps are;
- the process's other prometheus clients (vLLM's, Ray's) are not in it: the registry is our own;
- Prometheus listens at the address that the config names, and strangers who connect to it take no
  more than `_Scrapes.slots` threads of rank 0.
"""

from __future__ import annotations

import errno
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.catalogue import METRICS, Value, find_metric
from megatron_async_rl.watchdog.limited_server import LimitedThreads

ADDRESS_FILE = "prometheus.txt"
"""File of the run directory with the address of the Prometheus endpoint, while it is served."""


class Sink(Protocol):
    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        """Write the numbers of a step; `time` in Unix seconds."""

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        """Write the numbers of the held-out evaluation of a version."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files through TensorBoard's own writer: no torch."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open a new event file. TensorBoard discards what earlier files hold from `first_step`
        on."""
        self._writer = EventFileWriter(str(directory))
        self._writer.add_event(
            Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        summary = Summary()
        for name, value in values.items():
            # Most values: checked first.
            if not isinstance(value, list):
                summary.value.add(tag=name, simple_value=value)
            elif METRICS[name].kind == "per engine":
                for engine, number in enumerate(value):
                    summary.value.add(tag=f"{name}/{engine}", simple_value=number)
            else:
                doubling = METRICS[name].kind == "doubling counts"
                summary.value.add(tag=name, histo=_histogram(value, doubling=doubling))
        self._writer.add_event(Event(step=step, wall_time=time, summary=summary))
        # The values must be on disk when the call returns.
        self._writer.flush()

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        """Write the numbers at the evaluated version, which may be older than the newest step."""
        self.write(version, time, values)

    def close(self) -> None:
        self._writer.close()


class _Scrapes(LimitedThreads, WSGIServer):
    slots = 16
    admission_s = 30.0
    """Longest scrape, however often its client sends or reads a byte."""

    def __init__(self, host: str, port: int) -> None:
        # IPv6 addresses need another family than socketserver's default.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), _Scrape)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that closed its connection: no traceback in rank 0's log."""


class _Scrape(WSGIRequestHandler):
    timeout = 10
    """Limit of a scraper's request in seconds."""

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: rank 0's log is for the run."""


class Prometheus:
    """Server of the newest line over HTTP, in a thread of this process: a gauge `mar_<key>` for
    each number, and a counter `mar_<key>_total` for each count so far."""

    def __init__(self, run_dir: Path, port: int, host: str = "127.0.0.1") -> None:
        """`port` 0 takes a free one; the address is in RUN/prometheus.txt and in this process's
        log. Scrapers need no password.

        Raises UserError for a port or a host that cannot be listened on.
        """
        self._newest = _NewestLine()
        # Not the global one, to which vLLM and Ray add their own metrics.
        registry = CollectorRegistry()
        registry.register(self._newest)
        try:
            self._server = _Scrapes(host, port)
        except OSError as error:
            raise _unavailable(host, port, error) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(
            # Daemon: a scraper that hangs must not keep rank 0 alive.
            target=self._server.serve_forever,
            name="prometheus",
            daemon=True,
        )
        self._thread.start()
        self.port = int(self._server.server_port)
        self._file = run_dir / ADDRESS_FILE
        # Another machine cannot connect to these addresses.
        name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        address = f"http://{f'[{name}]' if ':' in name else name}:{self.port}/metrics"
        self._file.write_text(f"{address}\n", encoding="utf-8")
        sys.stderr.write(f"metrics for Prometheus at {address}\n")

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        # One assignment: a scrape sees the old line or the new one.
        self._newest.line = {"step": step, **values}

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        self._newest.evaluation = dict(values)

    def close(self) -> None:
        # The address must not outlive the server.
        self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _NewestLine(Collector):
    def __init__(self) -> None:
        self.line: Mapping[str, Value] = {}
        self.evaluation: Mapping[str, Value] = {}

    def describe(self) -> list[Family]:
        """Return nothing: without this method a registry would collect at once to learn the
        names."""
        return []

    def collect(self) -> Iterator[Family]:
        # Read once: `line` may be replaced during the scrape.
        for name, value in (*self.line.items(), *self.evaluation.items()):
            metric = find_metric(name)
            about = f"{metric.meaning} Unit: {metric.unit}." if metric else "Optimizer steps done."
            kind = metric.kind if metric else "number"
            if not isinstance(value, list):
                family = CounterMetricFamily if kind == "total" else GaugeMetricFamily
                yield family(gauge_name(name), about, value=value)
                continue

            label = "engine" if kind == "per engine" else "bin"
            gauge = GaugeMetricFamily(gauge_name(name), about, labels=[label])
            for index, entry in enumerate(value):
                gauge.add_metric([str(2**index if kind == "doubling counts" else index)], entry)
            yield gauge


def _unavailable(host: str, port: int, error: OSError) -> UserError:
    # A wrong host and a taken port have different keys to change.
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return UserError.of(
            "observe.prometheus_host",
            f"{host} is not an address of this machine: {error.strerror or error}",
            "name one, such as 127.0.0.1, or 0.0.0.0 for all of them",
        )
    return UserError.of(
        "observe.prometheus_port",
        f"cannot listen on port {port}: {error.strerror or error}",
        "name a free port, 0 to have one found, or null to serve nothing",
    )


def gauge_name(key: str) -> str:
    """`lag/start_max` -> `mar_lag_start_max`."""
    return "mar_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _histogram(counts: Sequence[float], *, doubling: bool) -> HistogramProto:
    """`counts[i]` values equal to i or, doubling, from 2^i up to 2^(i + 1); those count as the
    bin's middle in the sums."""
    # TensorBoard's buckets are bounded above only.
    bins = range(len(counts))
    middles = [1.5 * 2**index - 0.5 if doubling else index for index in bins]
    weighted = list(zip(middles, counts, strict=True))
    used = [middle for middle, count in weighted if count]
    return HistogramProto(
        min=used[0] if used else 0,
        max=used[-1] if used else 0,
        num=sum(counts),
        sum=sum(middle * count for middle, count in weighted),
        sum_squares=sum(middle * middle * count for middle, count in weighted),
        bucket_limit=[2 ** (index + 1) - 0.5 if doubling else index + 0.5 for index in bins],
        bucket=counts,
    )
