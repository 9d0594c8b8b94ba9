"""Experiment trackers as sinks of metrics: Weights & Biases, MLflow and trackio. Each one is
configured by its own library's environment variables.

Invariants:
- a tracker that cannot be opened is refused at the start. A tracker that fails, hangs or is slow
  later loses its own lines only, and the run never waits for it;
- a resumed run continues the same run of the tracker, whose id is in RUN/trackers.json;
- without a server, the data is in the run directory (Weights & Biases with WANDB_MODE=offline, and
  MLflow) or in the tracker's own directory (trackio).
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
"""File in the run directory: name of a tracker -> id of its run."""
CLOSE_TIMEOUT_S = 30.0
FAILURES_LIMIT = 3
"""Number of consecutive failures after which a sink is abandoned."""
WAITING_LINES_LIMIT = 1000
"""Number of waiting lines at which a sink is abandoned."""


class BackgroundSink:
    """Sink that passes its calls, in order, to another sink in a thread."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._abandoned = False
        # The queue itself is unbounded, because a full one would block the run; `_put` limits it.
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"metrics to {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        self._put(step, lambda: self._sink.write(step, time, values))

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        self._put(version, lambda: self._sink.write_evaluation(version, time, values))

    def close(self) -> None:
        """Send the waiting lines and close the sink; wait at most CLOSE_TIMEOUT_S. Lines that an
        unreachable server has not received by then remain with the tracker's library."""
        # The thread ends at this marker, after all waiting lines.
        self._calls.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._report(f"was not closed within {CLOSE_TIMEOUT_S:.0f} s")

    def _put(self, step: int, call: Callable[[], None]) -> None:
        if self._abandoned:
            return
        if self._calls.qsize() == WAITING_LINES_LIMIT:
            # Report only once: later lines are dropped without a message.
            self._abandoned = True
            self._report(
                f"is {WAITING_LINES_LIMIT} lines behind at step {step}; it receives no further"
                " lines"
            )
        else:
            self._calls.put((step, call))

    def _work(self) -> None:
        failures = 0
        for step, call in iter(self._calls.get, None):
            # Drain the queue after the last failure, or `close` would wait for it.
            if failures == FAILURES_LIMIT:
                continue
            try:
                call()
                # Count only consecutive failures: after a short outage the sink continues.
                failures = 0
            except Exception as error:  # noqa: BLE001 - a sink must not end a run
                failures += 1
                self._abandoned |= failures == FAILURES_LIMIT
                then = "; it receives no further lines" if failures == FAILURES_LIMIT else ""
                self._report(f"did not accept step {step}{then}: {error!r}")
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - a sink must not end a run
            self._report(f"was not closed: {error!r}")

    def _report(self, what: str) -> None:
        sys.stderr.write(f"{self.name} {what}\n")


class Tracker(ABC):
    """Sink of single numbers. A metric per engine becomes one number per engine; histograms are
    omitted (`RUN/metrics.jsonl`, TensorBoard and Prometheus have them)."""

    name: str
    """Name in `observe.trackers`, and of the library's Python package."""
    package: str
    """Name of the library for pip."""
    offline: str
    """Advice for tracking without a server."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            self.open(run_dir, project, config)
        # The libraries raise errors of any type; convert them to a UserError with advice.
        except Exception as error:
            what = f"{self.name} cannot be opened: {type(error).__name__}: {error}".strip()
            fix = f"{self.offline}; or leave {self.name} out of observe.trackers"
            raise UserError.of("observe.trackers", what, fix) from error

    @abstractmethod
    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        """Begin a run of the tracker, or continue the run whose id is in RUN/trackers.json."""

    @abstractmethod
    def send(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step. `time`: Unix seconds."""

    @abstractmethod
    def close(self) -> None:
        """End the tracker's run; no call follows."""

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        self.send(step, time, dict(_numbers(values)))

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        self.write(version, time, values)


class WandB(Tracker):
    """Weights & Biases. Its steps must not decrease, but an evaluation may be of an older version;
    it is therefore sent with the newest step and `eval/version`. If a resumed run repeats steps,
    they keep the values that were sent first."""

    name, package = "wandb", "wandb"
    offline = "log in with `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later"

    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._newest = 0
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            # Choose the id here, so that a resumed run can pass the same one.
            id=_identity(run_dir, self.name, uuid.uuid4().hex[:12]),
            resume="allow",
            config=dict(config),
            dir=run_dir,
        )

    def send(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        # wandb drops a line of an older step without an error.
        self._newest = max(self._newest, step)
        self._run.log(dict(numbers), step=self._newest)

    def write_evaluation(self, version: int, time: float, values: Mapping[str, Value]) -> None:
        super().write_evaluation(version, time, {**values, "eval/version": version})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow. It writes to RUN/mlruns unless MLFLOW_TRACKING_URI names a server. MLflow permits no
    `@` in a name, so pass@k becomes pass_at_k."""

    name, package = "mlflow", "mlflow-skinny"
    offline = "unset MLFLOW_TRACKING_URI to track in RUN/mlruns"

    def open(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        # MLflow requires an opt-in for its file store, which needs no database and no server.
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
            # Store the id at once: after a crash without it, a resume would begin a second run.
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
    """trackio. It writes to its own directory (TRACKIO_DIR), which `trackio show` displays."""

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
    """Open the trackers `names` and return their sinks. Raises UserError if a tracker cannot be
    opened."""
    return [BackgroundSink(name, TRACKERS[name](run_dir, project, config)) for name in names]


def lacking(names: Sequence[str]) -> list[Problem]:
    """Return a problem for each tracker whose library is not installed."""
    return [
        Problem(
            key="observe.trackers",
            what=f"{name} is not installed",
            fix=f"run `pip install {TRACKERS[name].package}`, or remove {name} from the list",
        )
        for name in names
        # Do not import the library, which may take a second. A folder with a tracker's files in the
        # current directory, such as wandb/, looks like a package, but has no origin.
        if (found := find_spec(name)) is None or found.origin is None
    ]


def _numbers(values: Mapping[str, Value]) -> Iterator[tuple[str, float]]:
    """Yield the names and values that are single numbers."""
    for name, value in values.items():
        if not isinstance(value, list):
            yield name, value
        elif METRICS[name].kind == "per engine":
            yield from ((f"{name}/{engine}", number) for engine, number in enumerate(value))


def _identities(run_dir: Path) -> dict[str, str]:
    """Return the ids in RUN/trackers.json, empty without the file. Raises UserError for a damaged
    file, because the trackers would otherwise begin a new run."""
    file = run_dir / IDENTITIES
    fix = "restore it from a copy, or remove it to begin a new run in every tracker"
    try:
        with reading(file, fix):
            found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError.of(str(file), f"is damaged: {error}", fix) from error
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        what = "is damaged: expected a JSON object with one id per tracker"
        raise UserError.of(str(file), what, fix)
    return found


def identity_problems(run_dir: Path, names: Sequence[str]) -> list[Problem]:
    """Return the problem of a damaged RUN/trackers.json, if any tracker is configured."""
    try:
        if names:
            _identities(run_dir)
    except UserError as error:
        return list(error.problems)
    return []


def _identity(run_dir: Path, name: str, new: str) -> str:
    """Return the id of a tracker in RUN/trackers.json. Store and return `new` if there is none."""
    known = _identities(run_dir)
    # Never replace a stored id: the tracker's run belongs to the run directory.
    if name not in known:
        write_file(run_dir / IDENTITIES, json.dumps(known | {name: new}) + "\n")
    return known.get(name, new)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values of nested settings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
