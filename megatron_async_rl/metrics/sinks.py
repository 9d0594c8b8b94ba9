"""Sinks of metrics: TensorBoard and Prometheus.

Both receive checked values and do not depend on the log. In TensorBoard, a list becomes a histogram
or, for a metric per engine, one scalar per engine (`engine/tokens/0`, ...). In Prometheus, a list
becomes one gauge with a label: `engine` for a metric per engine, else `bin`, the smallest value
that the bin counts.

Invariants:
- values are on disk or served when the call returns. The log calls TensorBoard in a thread, because
  a disk may be full or slow;
- Prometheus serves one complete line, never parts of two. It serves only the keys of the newest
  line, and the newest evaluation, which it serves until the next one, so that every scrape contains
  it, no matter how short the steps are;
- the registry contains only these metrics, not those of vLLM and Ray in the same process;
- Prometheus listens at the address in the config, and its clients use at most `_Scrapes.slots`
  threads of rank 0.
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
    """Destination of metrics, in addition to the log."""

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        """Write the metrics of a step. `time`: Unix seconds."""

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        """Write the metrics of the held-out evaluation of a version. `time`: Unix seconds."""

    def close(self) -> None:
        """Release the resources of the sink; no call follows."""


class TensorBoard:
    """Sink that writes event files with TensorBoard's own writer, which does not import torch."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open a new event file. TensorBoard discards the values of earlier files from `first_step`
        on."""
        self._writer = EventFileWriter(str(directory))
        self._writer.add_event(
            Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        summary = Summary()
        for name, value in values.items():
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
        """Write the metrics at the evaluated version, which may be older than the newest step."""
        self.write(version, time, values)

    def close(self) -> None:
        self._writer.close()


class _Scrapes(LimitedThreads, WSGIServer):
    """HTTP server with a limited number of threads."""

    slots = 16
    admission_s = 30.0
    """Limit for a whole scrape in seconds, even if the client sends or reads bytes all the time."""

    def __init__(self, host: str, port: int) -> None:
        # socketserver assumes IPv4, so an IPv6 address needs its own family.
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = addresses[0][0]
        super().__init__((host, port), _Scrape)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a client that closes its connection leaves no traceback in rank 0's log."""


class _Scrape(WSGIRequestHandler):
    """Handler of one scrape."""

    timeout = 10
    """Limit for each wait for the client in seconds."""

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: rank 0's log is for messages of the run."""


class Prometheus:
    """Sink that serves the newest line over HTTP from a thread of this process: a gauge `mar_<key>`
    for each number, and a counter `mar_<key>_total` for each total."""

    def __init__(self, run_dir: Path, port: int, host: str = "127.0.0.1") -> None:
        """Start the server. Port 0 selects a free port. RUN/prometheus.txt and the log of this
        process contain the address. The server requires no password.

        Raises UserError if the server cannot listen on the port and host.
        """
        self._newest = _NewestLine()
        # Use a registry of its own: vLLM and Ray add their metrics to the global one.
        registry = CollectorRegistry()
        registry.register(self._newest)
        try:
            self._server = _Scrapes(host, port)
        except OSError as error:
            raise _unavailable(host, port, error) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(
            # A daemon thread, because a scraper that hangs must not keep rank 0 alive.
            target=self._server.serve_forever,
            name="prometheus",
            daemon=True,
        )
        self._thread.start()
        self.port = int(self._server.server_port)
        self._file = run_dir / ADDRESS_FILE
        # Other machines cannot connect to a wildcard address, so show the machine's name.
        name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        address = f"http://{f'[{name}]' if ':' in name else name}:{self.port}/metrics"
        self._file.write_text(f"{address}\n", encoding="utf-8")
        sys.stderr.write(f"serving metrics for Prometheus at {address}\n")

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        # A single assignment, so that a scrape reads either the old line or the new one.
        self._newest.line = {"step": step, **values}

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        self._newest.evaluation = dict(values)

    def close(self) -> None:
        # Remove the address first, so that the file never names a stopped server.
        self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _NewestLine(Collector):
    """Collector of the newest line and the newest evaluation."""

    def __init__(self) -> None:
        self.line: Mapping[str, Value] = {}
        self.evaluation: Mapping[str, Value] = {}

    def describe(self) -> list[Family]:
        """Return no names. Without this method, the registry would call `collect` at registration
        to get them."""
        return []

    def collect(self) -> Iterator[Family]:
        # Read each attribute once, because `write` may replace it during the scrape.
        for name, value in (*self.line.items(), *self.evaluation.items()):
            metric = find_metric(name)
            about = (
                f"{metric.meaning} Unit: {metric.unit}."
                if metric
                else "Number of batches trained on."
            )
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
    """Return the error for a server that cannot listen."""
    # Name the key to change: the host if the address is wrong, else the port.
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return UserError.of(
            "observe.prometheus_host",
            f"{host} is not an address of this machine: {error.strerror or error}",
            "name an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of its"
            " addresses",
        )
    return UserError.of(
        "observe.prometheus_port",
        f"cannot listen on port {port}: {error.strerror or error}",
        "name a free port, 0 to select one automatically, or null to serve no metrics",
    )


def gauge_name(key: str) -> str:
    """Return the Prometheus name of a key: `lag/start_max` -> `mar_lag_start_max`."""
    # Names of parts may have letters that Prometheus lacks; each becomes its own code point, so
    # that such names stay different.
    escaped = re.sub(r"[^\x00-\x7f]", lambda one: f"_u{ord(one[0]):x}_", key)
    return "mar_" + re.sub(r"[^a-zA-Z0-9_]", "_", escaped)


def _histogram(counts: Sequence[float], *, doubling: bool) -> HistogramProto:
    """Return a histogram of counts per bin. Bin i has the value i or, with `doubling`, the values
    from 2^i up to, but not including, 2^(i + 1); sums use the middle of the bin."""
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
        # A bucket of TensorBoard has only an upper bound.
        bucket_limit=[2 ** (index + 1) - 0.5 if doubling else index + 0.5 for index in bins],
        bucket=counts,
    )
