"""The object that only rank 0 has (batches, logs, status, timeline, results of evaluations), and
its null counterpart.

Invariants:
- other ranks hold `OtherRank`, whose methods do nothing: the loop calls the same methods on every
  rank;
- `engines`, `given` and `next_batch` are used on rank 0 alone, inside `Layout.from_rank_zero`;
- `status.json` records the last state of the run, whatever ended it.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_async_rl.config.durable import file_digest
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import code_digests
from megatron_async_rl.flow.batches import (
    BatchSource,
    GivenResponses,
    RolloutBatches,
    open_batches,
)
from megatron_async_rl.flow.buffer import BUFFER_FILE
from megatron_async_rl.flow.controller_spec import DataState, Handout
from megatron_async_rl.flow.evaluation import EvalResult, EvalSchedule, LossResult
from megatron_async_rl.flow.running_checks import RunningChecks
from megatron_async_rl.flow.staleness import max_lag
from megatron_async_rl.flow.starts import Start, record_start
from megatron_async_rl.flow.summary import MetricValue, summarise
from megatron_async_rl.metrics.lag0_log import Lag0Log
from megatron_async_rl.metrics.log import EvalLog, MetricsLog
from megatron_async_rl.metrics.timeline import Timeline
from megatron_async_rl.metrics.trackers import open_trackers
from megatron_async_rl.metrics.weight_log import WeightLog
from megatron_async_rl.policy.checkpoint_folder import named_latest, read_file
from megatron_async_rl.policy.device import arithmetic_of
from megatron_async_rl.policy.lag0 import Lag0Differences
from megatron_async_rl.rollout.cluster import software
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.watchdog.events import Status, described, write_status
from megatron_async_rl.weights.manifest import BucketRef, Manifest


class OtherRank:
    """Null counterpart of `Rank0`, held by every other rank."""

    def open(
        self,
        version: int,
        schedule: EvalSchedule | None,
        position: Mapping[str, Any] | None,
        *,
        oldest: int,
        device_type: str,
        gpus: Mapping[str, Sequence[str]],
    ) -> None:
        """Open logs and batches of a run at `version`; with engines, start Ray, controller and
        engines. position: content of the checkpoint; null at a run's beginning. oldest: the oldest
        version whose tokens may train. gpus: of the ranks, by host name; Ray must not assign them
        to engines."""

    @property
    def engines(self) -> RolloutBatches:
        """Batches of engines."""
        raise RuntimeError("only rank 0 of a run with engines reaches them")

    @property
    def given(self) -> GivenResponses:
        """Batches of a supervised run."""
        raise RuntimeError("only rank 0 of a supervised run has its responses")

    def take_batch(self) -> None:
        raise RuntimeError("only rank 0 takes batches")

    def next_batch(self) -> TrainBatch | None:
        """Return the batch from `take_batch`, which trains this version, or a part of it; None if
        the user requested the run to stop."""
        raise RuntimeError("only rank 0 takes batches")

    def advance(self, version: int) -> None:
        """Set the run's version."""

    def digested(self, digest: str, tensors: Mapping[str, str]) -> None:
        """Note the digest of this version's weights, for its line of metrics, and those of its
        tensors by name."""

    def staged(self, manifest: Manifest) -> None:
        """Announce that this version is staged; engines may load it."""

    def buffer_filled(self, ref: BucketRef | None) -> None:
        """Report that the ranks have filled a bucket, or, with None, released all of them."""

    def take_evaluations(self, *, wait: bool) -> None:
        """Record results of the engines' evaluations."""

    def record(self, result: EvalResult | LossResult) -> None:
        """Record a result."""

    def log(
        self,
        batch: RankBatch,
        metrics: Mapping[str, MetricValue],
        lag0: Lag0Differences | None = None,
    ) -> None:
        """Write one line of metrics for the step that has just ended, and one of lag0.jsonl."""

    def position(self) -> DataState | None:
        """Position of the data for a checkpoint of this version."""
        return None

    def record_of(self, position: DataState | None) -> dict[str, Any]:
        """Return the content that the run's own files must have when the run resumes from here."""
        return {}

    def set_status(self, phase: str, detail: str = "") -> None:
        """Write the run's status."""

    def failed(self, error: BaseException) -> None:
        """Record in the status the error that ended the run."""

    def enter(self, state: str, waiting_for: str) -> None:
        """Note what this rank is doing from now on."""

    def close(self) -> None:
        """End engines and Ray; close the logs."""


class Rank0(OtherRank):
    """Rank 0's own part of a run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.version = 0
        self.schedule: EvalSchedule | None = None
        self._timeline = Timeline(config.run.dir, "rank 0")
        self._log: MetricsLog | None = None
        self._eval_log: EvalLog | None = None
        self._batches: BatchSource | None = None
        self._code: dict[str, str] = {}
        """Digests, at the start, of the Python files that the configuration names."""
        self._digest = ""
        """Digest of the weights of `version`."""
        self._weight_log: WeightLog | None = None
        """Null until the weights of the first version are known."""
        self._lag0_log: Lag0Log | None = None
        """Null in a run without engines."""
        self._checks = RunningChecks(config.run.dir, ())
        self._device_type = ""
        self._handout: Handout | None = None
        """Batch that was taken and not yet handed out."""
        self._flow_metrics: dict[str, MetricValue] = {}
        """Metrics of engines and controller, since the batch before."""
        self._state, self._since = "starting", time.monotonic()
        self._spent: dict[str, float] = {}
        """Seconds by state since the last line of metrics."""

    def open(
        self,
        version: int,
        schedule: EvalSchedule | None,
        position: Mapping[str, Any] | None,
        *,
        oldest: int,
        device_type: str,
        gpus: Mapping[str, Sequence[str]],
    ) -> None:
        config, self.version, self.schedule = self.config, version, schedule
        self._device_type = device_type
        self.set_status("starting", "Ray, engines and controller" if config.has_engines else "data")
        # At the start: files edited during the run are not those that it imported.
        self._code = code_digests(config.model_dump(mode="json"))
        self._log = MetricsLog(
            config.run.dir,
            tensorboard=config.observe.tensorboard,
            # Lines after the checkpoint belong to steps that will be repeated; the log removes
            # them.
            first_step=version + 1,
            prometheus_port=config.observe.prometheus_port,
            prometheus_host=config.observe.prometheus_host,
            trackers=open_trackers(
                config.observe.trackers,
                config.run.dir,
                config.observe.project,
                config.model_dump(mode="json"),
            ),
        )
        if config.has_engines:
            self._lag0_log = Lag0Log(config.run.dir, version + 1)
        if schedule is not None:
            self._eval_log = EvalLog(config.run.dir, schedule.means)
        data = None
        # The log of the replayed run has the batches of its engines.
        if position is not None and (config.run.replay is None or config.supervised):
            # Waiting groups of the checkpoint: no admitted sample is lost by a resume.
            buffer = read_file(config.run.dir / "checkpoint", BUFFER_FILE)
            data = DataState(state=position["data"], buffer=buffer, oldest=oldest)
        self._batches = open_batches(config, device_type, data, gpus)
        self._checks = RunningChecks(
            config.run.dir, self._batches.ends, replays=config.flow.selection.name == "replay"
        )

    @property
    def _open(self) -> BatchSource:
        assert self._batches is not None, "open comes first"
        return self._batches

    @property
    def engines(self) -> RolloutBatches:
        assert isinstance(self._batches, RolloutBatches)
        return self._batches

    @property
    def given(self) -> GivenResponses:
        assert isinstance(self._batches, GivenResponses)
        return self._batches

    def take_batch(self) -> None:
        self._handout = self._open.next_batch(self.version)

    def next_batch(self) -> TrainBatch | None:
        # Handed out once: every batch or part that is taken trains.
        handout, self._handout = self._handout, None
        if handout is None:
            return None
        # Not before: without a batch, the wait ends with the run.
        self.enter("distributing", "")
        batch = handout.batch
        # A part is in the batch that follows, which is checked and logged whole.
        if batch.complete:
            # Kept until `log`: they describe the wait before this step.
            self._flow_metrics = handout.metrics
            if self.config.flow.stream == "groups":
                self._flow_metrics["flow/parts"] = max(batch.parts, default=0) + 1
            self._checks.take(batch)
        return batch

    def advance(self, version: int) -> None:
        self.version = version

    def digested(self, digest: str, tensors: Mapping[str, str]) -> None:
        self._digest = digest
        if self._weight_log is None:
            self._weight_log = WeightLog(self.config.run.dir, self.version + 1)
            record_start(self.config.run.dir, self._start())
        self._weight_log.log(self.version, tensors)

    def _start(self) -> Start:
        config = self.config
        resolved = config.run.dir / "config.yaml"
        return Start(
            step=self.version,
            time=round(time.time(), 3),
            # Written by the launcher; a program that runs the loop itself may have no file.
            config=file_digest(resolved) if resolved.exists() else "",
            device=arithmetic_of(self._device_type),
            ranks=config.policy.parallel.ranks,
            # Set by torchrun; a program that runs the loop itself has one machine.
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            layout=config.policy.parallel.model_dump(mode="json"),
            threads=torch.get_num_threads(),
            software=software(),
            weights=self._digest,
            data=self._open.data,
            code=self._code,
        )

    def staged(self, manifest: Manifest) -> None:
        self.engines.publish(self.version, manifest)

    def buffer_filled(self, ref: BucketRef | None) -> None:
        self.engines.buffer_filled(ref)

    def take_evaluations(self, *, wait: bool) -> None:
        for result in self.engines.evaluated(wait=wait):
            self.record(result)

    def record(self, result: EvalResult | LossResult) -> None:
        assert self.schedule is not None
        assert self._log is not None
        values = self.schedule.record(result)
        if self._eval_log is not None:
            self._eval_log.append(result.as_json())
        self._log.evaluated(result.version, values)

    def log(
        self,
        batch: RankBatch,
        metrics: Mapping[str, MetricValue],
        lag0: Lag0Differences | None = None,
    ) -> None:
        assert self._log is not None
        if lag0 is not None and self._lag0_log is not None:
            # Before the line of metrics: a step that is logged has its differences.
            self._lag0_log.log(self.version, lag0.tokens, lag0.sums, lag0.ids, lag0.means)
        # Measured per optimizer step; a batch may make several steps.
        norm = metrics.get("update/norm")
        seen = summarise(
            batch,
            max_lag(self.config.flow.async_ratio),
            norm * self.config.objective.steps_per_batch if isinstance(norm, float) else None,
        )
        checked = self._checks.report(self.version)
        values = {**metrics, **seen, **checked, **self._flow_metrics, **self._step_times()}
        self._log.log(self.version, values, self._digest)
        self.set_status("training")

    def _step_times(self) -> dict[str, float]:
        """Return the seconds of each part since the batch was requested."""
        self._spend()
        # Reset per line of metrics: times are per step.
        spent, self._spent = self._spent, {}
        times = {
            "time/wait_batch_s": spent.get("waiting batch", 0.0),
            "time/distribute_s": spent.get("distributing", 0.0),
            "time/train_s": spent.get("training", 0.0),
            "time/publish_s": spent.get("publishing", 0.0),
        }
        if self.config.colocated:
            times["time/sleep_s"] = spent.get("waiting engines to sleep", 0.0)
            times["time/make_room_s"] = spent.get("restoring", 0.0) + spent.get("releasing", 0.0)
        return times | {"time/step_s": sum(times.values())}

    def position(self) -> DataState:
        # Every batch that was handed out has trained, so the position is that of this version.
        return self._open.state()

    def record_of(self, position: DataState | None) -> dict[str, Any]:
        # A resume cuts log and metrics back to this extent.
        mark = position.log if position is not None else None
        return {
            "metrics": self._log.sync() if self._log is not None else None,
            "samples": mark.as_json() if mark is not None else None,
            "code": self._code,
        }

    def set_status(self, phase: str, detail: str = "", error: str | None = None) -> None:
        run = self.config.run
        write_status(
            run.dir,
            Status(
                phase=phase,
                detail=detail,
                step=self.version,
                steps=run.last_step,
                time=time.time(),
                before=self.schedule.before if self.schedule else None,
                after=self.schedule.after if self.schedule else None,
                measure="loss" if self.config.supervised else "reward",
                error=error,
                log=str(run.dir / "logs" / "rank_0.log"),
                checkpoint=named_latest(run.dir / "checkpoint") or "",
            ),
        )

    def failed(self, error: BaseException) -> None:
        try:
            self.set_status("failed", error=described(error))
        except OSError:  # such as a full disk, which then is the error itself
            traceback.print_exc()

    def enter(self, state: str, waiting_for: str) -> None:
        self._timeline.enter(state, waiting_for)
        self._spend()
        self._state = f"{state} {waiting_for}".rstrip()

    def _spend(self) -> None:
        now = time.monotonic()
        self._spent[self._state] = self._spent.get(self._state, 0.0) + now - self._since
        self._since = now

    def close(self) -> None:
        self._timeline.close()
        if self._batches is not None:
            self._batches.close()
        if self._log is not None:
            self._log.close()
        if self._weight_log is not None:
            self._weight_log.close()
        if self._lag0_log is not None:
            self._lag0_log.close()
