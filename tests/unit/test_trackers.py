"""Tests of the experiment trackers with the real libraries and no server: they receive the numbers
of `RUN/metrics.jsonl`, a resume continues the same run, and their failures do not end the run."""

from __future__ import annotations

import json
import sqlite3
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, UserError
from megatron_async_rl.metrics import trackers
from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.metrics.trackers import (
    TRACKERS,
    BackgroundSink,
    identity_problems,
    open_trackers,
)
from tests.thorough import thorough
from tests.written_run import config_tree

CONFIG = {"policy": {"optimizer": {"lr": 1e-3}}, "controls": [{"name": "gac"}]}
Read = Mapping[str, Mapping[int, float]]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # wandb makes folders for media and artifacts and does not remove them.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "a_run"
    folder.mkdir()
    return folder


def track(run_dir: Path, name: str, steps: range) -> None:
    """Log the steps of a run, or of its continuation, as rank 0 does."""
    sinks = open_trackers([name], run_dir, "a_project", CONFIG)
    log = MetricsLog(run_dir, tensorboard=False, first_step=steps.start, trackers=sinks)
    for step in steps:
        log.log(step, {"reward/mean": step / 8, "engine/busy_shares": [0.25, 0.5]})
    log.evaluated(steps.stop - 1, {"eval/mean": 0.75, "eval/pass@1": 0.5})
    log.close()


def read_mlflow(run_dir: Path) -> Read:
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("a_project")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["policy.optimizer.lr"] == "0.001"
    return {
        key: {one.step: one.value for one in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records that `wandb sync` would send. The file has LevelDB's log format after a
    header of 7 bytes. A block has 32 KiB; a record may continue in the next block."""
    data = file.read_bytes()
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # zeros fill the rest of the block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def read_wandb(run_dir: Path) -> Read:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # ends the process that writes the files
    read: dict[str, dict[int, float]] = {}
    identities = set()
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, wandb_records(file)):
            if record.run.run_id:
                identities.add(record.run.run_id)
            items = {
                "/".join(one.nested_key) or one.key: json.loads(one.value_json)
                for one in record.history.item
            }
            for key, value in items.items():
                if not key.startswith("_") and key != "eval/version":
                    read.setdefault(key, {})[items["_step"]] = value
    assert len(identities) == 1
    return read


def read_trackio(run_dir: Path) -> Read:
    (file,) = (run_dir.parent / "trackio").glob("a_project*.db")
    read: dict[str, dict[int, float]] = {}
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({row[0] for row in rows}) == 1
    for _, step, metrics in rows:
        for key, value in json.loads(metrics).items():
            read.setdefault(key, {})[step] = value
    return read


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=thorough) if one == "mlflow" else one for one in TRACKERS],
)
def test_a_tracker_has_every_number_and_a_resume_continues_its_run(run_dir, name):
    track(run_dir, name, range(1, 4))
    # wandb names a folder by the current second, which may be the same for both.
    for folder in run_dir.glob("wandb/offline-run-*"):
        folder.rename(folder.with_name(folder.name.replace("offline-run-", "offline-run-0")))
    track(run_dir, name, range(4, 6))
    reader = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}[name]
    read = reader(run_dir)
    pass_at = "eval/pass_at_1" if name == "mlflow" else "eval/pass@1"
    assert read["reward/mean"] == {step: step / 8 for step in range(1, 6)}
    assert read["engine/busy_shares/1"] == dict.fromkeys(range(1, 6), 0.5)
    assert read["eval/mean"] == {3: 0.75, 5: 0.75}
    assert read[pass_at] == {3: 0.5, 5: 0.5}


class Failing:
    """Sink that blocks until `responds` is set and then accepts step 3 only."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.responds = threading.Event()

    def write(self, step, time, values):
        assert self.responds.wait(600)
        self.sent.append(step)
        if step != 3:
            raise ConnectionError("the server is away")

    def write_evaluation(self, version, time, values): ...

    def close(self):
        raise ConnectionError("still away")


def log_steps(run_dir: Path, count: int, failing: Failing, responds_after: int) -> None:
    """Log `count` steps; `failing` responds after step `responds_after`."""
    sink = BackgroundSink("failing", failing)
    log = MetricsLog(run_dir, tensorboard=False, first_step=1, trackers=[sink])
    for step in range(1, count + 1):
        log.log(step, {"reward/mean": 0.5})
        if step == responds_after:
            assert failing.sent == []  # the log has not waited for the sink
            failing.responds.set()
    log.close()
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == count


def test_a_tracker_is_abandoned_after_three_consecutive_failures(run_dir, capsys):
    failing = Failing()
    log_steps(run_dir, 8, failing, responds_after=8)
    # Step 3 was accepted, so steps 4 to 6 are the three consecutive failures.
    assert failing.sent == [1, 2, 3, 4, 5, 6]
    output = capsys.readouterr().err
    assert "failing did not accept step 6; it receives no further lines" in output
    assert "failing was not closed: ConnectionError" in output


def test_a_tracker_that_hangs_is_abandoned_at_the_limit_of_waiting_lines(
    run_dir, monkeypatch, capsys
):
    monkeypatch.setattr(trackers, "WAITING_LINES_LIMIT", 2)
    failing = Failing()
    failing.write = lambda step, *_: failing.responds.wait(600) and failing.sent.append(step)
    log_steps(run_dir, 5, failing, responds_after=5)
    # The thread may or may not have taken step 1 from the queue before the limit was reached.
    assert failing.sent in ([1, 2], [1, 2, 3])
    assert "failing is 2 lines behind at step" in capsys.readouterr().err


def test_a_tracker_that_does_not_close_delays_the_end_by_a_limit_only(monkeypatch, capsys):
    never = threading.Event()
    monkeypatch.setattr(Failing, "close", lambda self: never.wait())
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.01)
    BackgroundSink("failing", Failing()).close()
    never.set()
    assert "failing was not closed within" in capsys.readouterr().err


# TensorBoard's own thread also ends with the error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_does_not_affect_the_run(run_dir, capsys):
    log = MetricsLog(run_dir, tensorboard=True, first_step=1)
    (events,) = (run_dir / "tensorboard").iterdir()
    # In one call: TensorBoard's thread may write, and then create a file that is missing.
    full = run_dir / "full"
    full.symlink_to("/dev/full")
    full.replace(events)
    for step in range(1, 6):
        log.log(step, {"reward/mean": 0.5})
    log.close()
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 5
    output = capsys.readouterr().err
    assert "TensorBoard did not accept step" in output
    assert "No space left on device" in output


def test_a_tracker_that_cannot_be_opened_is_refused_with_advice(run_dir, monkeypatch):
    monkeypatch.setattr(trackers.MLflow, "open", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="mlflow cannot be opened: ZeroDivisionError") as refused:
        open_trackers(["mlflow"], run_dir, "a_project", CONFIG)
    assert "unset MLFLOW_TRACKING_URI" in str(refused.value)


def test_a_tracker_that_is_not_installed_is_a_problem_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "not_there", trackers.MLflow)
    for _ in range(2):
        (problem,) = trackers.lacking(["wandb", "not_there"])
        assert problem.key == "observe.trackers"
        assert "pip install mlflow-skinny" in problem.fix
        # A tracker would leave its files in such a folder.
        (tmp_path / "not_there").mkdir(exist_ok=True)
        monkeypatch.syspath_prepend(tmp_path)


def test_a_tracker_may_be_named_only_once(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_tree()))
    with pytest.raises(ConfigError, match="each at most once, got wandb, wandb"):
        load(file, ["observe.trackers=[wandb, wandb]"])


def test_damaged_identities_are_refused_before_a_new_run_begins(tmp_path: Path) -> None:
    file = tmp_path / trackers.IDENTITIES
    assert identity_problems(tmp_path, ["wandb"]) == []
    for content, what in (
        ("{", "is damaged: Expecting property name"),
        ("[]", "is damaged: expected a JSON object with one id per tracker"),
        ('{"wandb": 7}', "is damaged: expected a JSON object with one id per tracker"),
    ):
        file.write_text(content)
        (problem,) = identity_problems(tmp_path, ["wandb"])
        assert (problem.key, problem.what[: len(what)]) == (str(file), what)
        assert "remove it to begin a new run in every tracker" in problem.fix
        assert identity_problems(tmp_path, []) == []
    file.write_text('{"wandb": "abc"}')
    assert identity_problems(tmp_path, ["wandb"]) == []
