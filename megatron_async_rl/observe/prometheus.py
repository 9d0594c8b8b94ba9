"""The newest line of metrics over HTTP, as Prometheus scrapes it: one gauge `mar_<key>` for each key of the line, and one counter
`mar_<key>_total` for each count that only grows.

Invariants:
- what is served is one whole line, never parts of two; a key that the newest line does not have is not served;
- the numbers of the newest evaluation are served until the next one, so that a scrape finds them however short the steps are;
- a list is one gauge with a label: `engine` for what every engine has, else `bin`, the smallest value its count is of;
- the process's other prometheus clients (vLLM's, Ray's) are not in it: the registry is our own.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megatron_async_rl.observe.keys import find_key
from megatron_async_rl.observe.metrics import MetricsError, Value

FILE = "prometheus.txt"
"""In the run directory: the address, while it is served."""


class _NewestLine(Collector):
    def __init__(self) -> None:
        self.line: Mapping[str, Value] = {}
        self.evaluation: Mapping[str, Value] = {}

    def describe(self) -> list[Metric]:
        """Nothing is promised: a registry without this would collect at once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in (*self.line.items(), *self.evaluation.items()):
            key = find_key(name)
            about = f"{key.meaning} Unit: {key.unit}." if key else "Optimizer steps done."
            kind = key.kind if key else "number"
            if not isinstance(value, list):
                family = CounterMetricFamily if kind == "total" else GaugeMetricFamily
                yield family(gauge_name(name), about, value=value)
                continue
            gauge = GaugeMetricFamily(gauge_name(name), about, labels=["engine" if kind == "per engine" else "bin"])
            for index, entry in enumerate(value):
                gauge.add_metric([str(2**index if kind == "doubling counts" else index)], entry)
            yield gauge


class Prometheus:
    """Serves from a thread of this process, on all of the machine's addresses."""

    def __init__(self, run_dir: Path, port: int) -> None:
        """`port` 0 takes a free one; the address is in RUN/prometheus.txt and in this process's log.

        Raises MetricsError, naming the key, for a port that cannot be had.
        """
        self._newest = _NewestLine()
        registry = CollectorRegistry()
        registry.register(self._newest)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise MetricsError(
                f"observe.prometheus_port {port} cannot be served: {error.strerror or error}\n"
                "  fix: name a free port, 0 to have one found, or null to serve nothing"
            ) from error
        self.port = int(self._server.server_port)
        self._file = run_dir / FILE
        address = f"http://{socket.gethostname()}:{self.port}/metrics"
        self._file.write_text(f"{address}\n", encoding="utf-8")
        sys.stderr.write(f"metrics for Prometheus at {address}\n")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        self._newest.line = {"step": step, **values}

    def evaluated(self, values: Mapping[str, Value]) -> None:
        self._newest.evaluation = dict(values)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def gauge_name(key: str) -> str:
    """`lag/start_max` -> `mar_lag_start_max`."""
    return "mar_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
