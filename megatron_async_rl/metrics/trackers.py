"""Experiment trackers as sinks of metrics: Weights & Biases, MLflow, trackio, each by its own
library and its own environment variables.

Invariants:
- a tracker that cannot be opened is refused at the start; a tracker that fails, hangs or is slow
  later loses its own lines and nothing of the run, which never waits for it;
- a resumed run continues the tracker's same run: its identity is in RUN/trackers.json;
- without a server, the data is in the run directory (Weights & Biases with WANDB_MODE=offline,
  MLflow) or where the tracker keeps it (trackio).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import reading, write_file
from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.metrics.catalogue import METRICS, Value
from megatron_async_rl.metrics.sinks import Sink

IDENTITIES = "trackers.json"
END_S = 30.0
FAILURES_LIMIT = 3
"""Number of consecutive failures after which a sink is dropped."""
MOST_LINES = 1000
"""Number of waiting lines at which a sink is dropped."""


class BackgroundSink:
    """A sink with a thread that writes to it in order."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._left = False
        # Unbounded by itself; _put bounds it without ever blocking the run.
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"metrics to {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        self._put(step, lambda: self._sink.write(step, time, values))

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        self._put(version, lambda: self._sink.write_evaluation(version, time, values))

    def close(self) -> None:
        """Wait at most END_S. Lines that an unreachable server did not receive by then stay with
        the library."""
        # The end marker comes after all lines, so they are sent first.
        self._calls.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._report(f"was not closed within {END_S:.0f} s")

    def _put(self, step: int, call: Callable[[], None]) -> None:
        if self._left:
            return
        if self._calls.qsize() == MOST_LINES:
            # Reported once: later lines are dropped without a message.
            self._left = True
            self._report(f"is {MOST_LINES} lines behind at step {step}; it gets no more")
        else:
            self._calls.put((step, call))

    def _work(self) -> None:
        failures = 0
        for step, call in iter(self._calls.get, None):
            # The queue is still drained, or close would wait for it.
            if failures == FAILURES_LIMIT:
                continue
            try:
                call()
                # Only consecutive failures count: a short outage loses few lines.
                failures = 0
            except Exception as error:  # noqa: BLE001 - a sink must not end a run
                failures += 1
                self._left |= failures == FAILURES_LIMIT
                then = "; it gets no more" if failures == FAILURES_LIMIT else ""
                self._report(f"did not take step {step}{then}: {error!r}")
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - a sink must not end a run
            self._report(f"was not closed: {error!r}")

    def _report(self, what: str) -> None:
        sys.stderr.write(f"{self.name} {what}\n")


class Tracker(ABC):
    """A sink of numbers. Histograms are only in `RUN/metrics.jsonl` and TensorBoard; a metric per
    engine becomes one number for each engine."""

    name: str
    package: str
    """The library to install, as pip knows it."""
    offline: str
    """Advice on how to track without a server."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            self.open(run_dir, project, config)
        # Libraries raise what they like; the user sees one kind of error with a way out.
        except Exception as error:
            what = f"{self.name} cannot be opened: {type(error).__name__}: {error}".strip()
            fix = f"{self.offline}; or leave {self.name} out of observe.trackers"
            raise UserError.of("observe.trackers", what, fix) from error

    @abstractmethod
    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        """Begin the tracker's run, or continue the run that RUN/trackers.json names."""

    @abstractmethod
    def send(self, step: int, time: float, numbers: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        self.send(step, time, dict(_numbers(values)))

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        self.write(version, time, values)


class WandB(Tracker):
    """Weights & Biases. Its steps only grow, so an evaluation, which may be of an older version, is
    sent with the newest step and its `eval/version`. Steps that a crashed run repeats keep the
    values that were sent first."""

    name, package = "wandb", "wandb"
    offline = "log in with `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"

    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._newest = 0
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            # Chosen here, so that a resumed run can name it again.
            id=_identity(run_dir, self.name, uuid.uuid4().hex[:12]),
            resume="allow",
            config=dict(config),
            dir=run_dir,
        )

    def send(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        # wandb drops lines of an older step without an error.
        self._newest = max(self._newest, step)
        self._run.log(dict(numbers), step=self._newest)

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        super().write_evaluation(version, time, {**values, "eval/version": version})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow; it writes RUN/mlruns unless MLFLOW_TRACKING_URI names a server. MLflow permits no
    `@` in a name, so pass@k becomes pass_at_k."""

    name, package = "mlflow", "mlflow-skinny"
    offline = "unset MLFLOW_TRACKING_URI to track in RUN/mlruns"

    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        # Files need no database and no server; MLflow requires an explicit opt-in.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(server or (run_dir / "mlruns").resolve().as_uri())
        known = _identities(run_dir).get(self.name)
        if known is None:
            experiment = self._client.get_experiment_by_name(project)
            where = (
                experiment.experiment_id if experiment else self._client.create_experiment(project)
            )
            known = self._client.create_run(where, run_name=run_dir.name).info.run_id
            # Right after the run exists: a crash in between would begin a second one.
            _identity(run_dir, self.name, known)
            for key, value in _flat(config):
                self._client.log_param(known, key, str(value)[:500])
        self._client.update_run(known, status="RUNNING")
        self._id = known

    def send(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        at = int(time * 1000)
        self._client.log_batch(
            self._id,
            [Metric(key.replace("@", "_at_"), one, at, step) for key, one in numbers.items()],
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """trackio; it writes its own folder (TRACKIO_DIR), which `trackio show` displays."""

    name, package = "trackio", "trackio"
    offline = "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to track on this machine"

    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        name = _identity(run_dir, self.name, f"{run_dir.name}-{uuid.uuid4().hex[:6]}")
        self._run = trackio.init(
            project=project, name=name, config=dict(config), resume="allow", embed=False
        )

    def send(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, type[Tracker]] = {one.name: one for one in (WandB, MLflow, Trackio)}


def open_trackers(
    names: Sequence[str], run_dir: Path, project: str, config: Mapping[str, Any]
) -> list[BackgroundSink]:
    """Open the trackers. Raises UserError for the first that cannot be opened."""
    return [BackgroundSink(name, TRACKERS[name](run_dir, project, config)) for name in names]


def lacking(names: Sequence[str]) -> list[Problem]:
    """Return a problem for each tracker whose library is not installed."""
    return [
        Problem(
            key="observe.trackers",
            what=f"{name} is not installed",
            fix=f"pip install {TRACKERS[name].package}, or leave it out",
        )
        for name in names
        # A folder of a tracker's files in the current one, such as wandb/, is a package without a
        # file.
        # Not imported: wandb alone takes a second.
        if (found := find_spec(name)) is None or found.origin is None
    ]


def _numbers(values: Mapping[str, Value]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if not isinstance(value, list):
            yield name, value
        elif METRICS[name].kind == "per engine":
            yield from ((f"{name}/{engine}", number) for engine, number in enumerate(value))


def _identities(run_dir: Path) -> dict[str, str]:
    """Return the identities in RUN/trackers.json. Raises UserError for a damaged file: without it
    the run would start again in its trackers."""
    file = run_dir / IDENTITIES
    fix = "restore it from a copy, or remove it: the run then starts again in its trackers"
    try:
        with reading(file, fix):
            found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError.of(str(file), f"is damaged: {error}", fix) from error
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise UserError.of(str(file), "is damaged: it holds no identities by tracker", fix)
    return found


def identity_problems(run_dir: Path, names: Sequence[str]) -> list[Problem]:
    """Return the problem of RUN/trackers.json, if the trackers `names` need the file."""
    try:
        if names:
            _identities(run_dir)
    except UserError as error:
        return list(error.problems)
    return []


def _identity(run_dir: Path, name: str, new: str) -> str:
    """Return the identity of a tracker in RUN/trackers.json; store `new` if there is none."""
    known = _identities(run_dir)
    # The first identity stays for the life of the run directory.
    if name not in known:
        write_file(run_dir / IDENTITIES, json.dumps(known | {name: new}) + "\n")
    # The stored identity wins over the new one.
    return known.get(name, new)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
