"""The part of a run that only rank 0 has: batches, logs, status, timeline, evaluations; and its
null twin, so that the loop is the same on every rank.

Invariants:
- a method whose docstring begins with "Collective" is called by all ranks at the same point; it
  differs by rank only inside `Layout.from_rank_zero`;
- on-demand buckets are filled while rank 0 waits for the controller, by the ranks' main threads: no
  other collective of theirs can be under way (`_meanwhile`);
- `status.json` has the last state of the run, whatever ended it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.plug_in_code import code_digests
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow import buffer_file
from megatron_async_rl.flow.batches import BatchSource, open_batches
from megatron_async_rl.flow.colocated import DevicePhases
from megatron_async_rl.flow.copies import BufferRequest
from megatron_async_rl.flow.evaluation import EvalResult, EvalSchedule, LossResult
from megatron_async_rl.flow.spec import DataState, Handout
from megatron_async_rl.flow.staleness import max_lag
from megatron_async_rl.flow.summary import MetricValue, summarise
from megatron_async_rl.metrics.log import EvalLog, MetricsLog
from megatron_async_rl.metrics.status import Status, write_status
from megatron_async_rl.metrics.timeline import Timeline
from megatron_async_rl.metrics.trackers import open_trackers
from megatron_async_rl.policy.checkpoint_folder import (
    CONFIG_FILE,
    DATA_FILE,
    RECORD_FILE,
    named_latest,
    read_file,
)
from megatron_async_rl.policy.device_memory import DeviceMemory
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.rollout.cluster import gpu_of_rank
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import described
from megatron_async_rl.weights.cuda_ipc import IpcBuckets
from megatron_async_rl.weights.export import WeightExporter
from megatron_async_rl.weights.manifest import BucketRef, Manifest
from megatron_async_rl.weights.shards import WeightShards
from megatron_async_rl.weights.staging import Staging, staging_of

MeanLoss = Callable[[Callable[[], TrainBatch | None]], tuple[float, int]]
"""`Policy.mean_loss`."""


class OtherRank:
    """The part of every rank; on ranks other than 0, all there is."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config = config
        self.layout = layout
        self.version = 0
        self.schedule: EvalSchedule | None = None
        self.phases = DevicePhases("policy", "train")
        """A policy is built, and a checkpoint loaded, with all of its memory."""
        self.memory: DeviceMemory | None = None
        """Device memory of the policy; null until it is built."""
        self._makes_room = config.rollout is not None and config.rollout.placement == "colocated"
        self._staging: Staging | None = None
        self._shards: WeightShards | None = None
        self._gpus: dict[str, list[str]] = {}
        """GPUs of the ranks by host name; Ray must not assign them to engines."""

    def stage_from(self, exporter: WeightExporter) -> None:
        """Collective: what `publish` takes the weights from. A supervised run has no receivers."""
        if self.config.rollout is not None:
            weights, layout = self.config.weights, self.layout
            self._staging = staging_of(weights.transport, layout.device, layout)
            max_bytes = weights.bucket_mib * 2**20
            self._shards = WeightShards(exporter, self._staging.reached, max_bytes)

    def begin(self, version: int, resumed: Mapping[str, Any] | None, oldest: int) -> None:
        """Collective: the run is at `version`; `resumed`: what the checkpoint holds. `oldest`: the
        oldest version whose tokens may train. Engines start while the policy has released its
        training state."""
        self.version = version
        # Still part of the start, also in the timeline: what follows is the start of the engines.
        self.phases.to("publish", {"release": self._make_room})
        evaluation = self.config.eval
        if evaluation is not None:
            means = {} if resumed is None else resumed["evaluated"]
            self.schedule = EvalSchedule(
                every=evaluation.every, steps=self.config.run.steps, means=means
            )
        if self.layout.device_type == "cuda":
            for host, gpu in self.layout.gathered((socket.gethostname(), gpu_of_rank())):
                self._gpus.setdefault(host, []).append(gpu)

    def await_batch(self) -> None:
        """Collective: returns once rank 0 has what trains this version."""
        self._meanwhile(self._take_batch)

    def _take_batch(self) -> None:
        """On rank 0."""

    def next_batch(self) -> TrainBatch | None:
        """On rank 0, after `await_batch`: what trains this version; None when the user asked the
        run to stop."""
        raise RuntimeError("only rank 0 takes batches")

    def take_devices(self) -> None:
        """Collective. Colocated: the engines sleep, then the policy gets back its training
        state."""
        self.phases.to("train", {"sleep": self._sleep_engines, "restore": self._restore})

    def give_devices(self) -> None:
        """Collective. Colocated: on every rank the policy keeps its parameters alone."""
        self.phases.to("publish", {"release": self._release})

    def publish(self, version: int) -> None:
        """Collective: every rank stages what it holds; the engines load while the loop
        continues."""
        self.version = version
        self.enter("publishing")
        self.phases.to("generate", {"stage": self._stage})

    def _sleep_engines(self) -> None:
        if self._makes_room:
            self.enter("waiting", "engines to sleep")
            self._meanwhile(self._until_asleep)
            if isinstance(self._staging, IpcBuckets):
                self._staging.release()

    def _until_asleep(self) -> None:
        """On rank 0."""

    def _restore(self) -> None:
        if self._makes_room and self.memory is not None:
            self.enter("restoring")
            self.memory.restore()

    def _release(self) -> None:
        if self._makes_room:
            self.enter("releasing")
        self._make_room()

    def _make_room(self) -> None:
        if self._makes_room and self.memory is not None:
            self.memory.release()
            # An engine is on the devices of several ranks, or of another than rank 0's.
            self.layout.barrier()

    def _stage(self) -> None:
        if self._staging is not None and self._shards is not None:
            buckets, parts = self._shards.buckets, self._shards.parts()
            self._staged(self._staging.stage(self.version, buckets, parts, self._until_released))
            if isinstance(self._staging, IpcBuckets):
                self._meanwhile(self._until_loaded)

    def _meanwhile(self, wait: Callable[[], None]) -> None:
        """Collective: `wait` runs on rank 0, as in `Layout.from_rank_zero`; until it returns, all
        ranks fill the buckets of the weights that engines want."""
        if not isinstance(self._staging, IpcBuckets):
            self.layout.from_rank_zero(wait)
            return
        waiting = self._begin(wait)
        while (
            fill := self.layout.from_rank_zero(lambda: self._next_buffer_request(waiting))
        ) is not None:
            self._buffer_request(self._staging, fill)
        self.layout.from_rank_zero(waiting.result)

    def _begin(self, wait: Callable[[], None]) -> Future[None]:
        """On rank 0 `wait`, begun in a thread."""
        return Future()

    def _next_buffer_request(self, waiting: Future[None]) -> BufferRequest | None:
        """On rank 0."""
        return None

    def _buffer_request(self, staging: IpcBuckets, fill: BufferRequest) -> BucketRef | None:
        if fill.number is None:
            staging.release()
        elif fill.version == self.version and self._shards is not None:
            return staging.fill(fill.number, fill.place, self._shards.parts(fill.number))
        return None

    def _until_released(self) -> None:
        """On rank 0."""

    def _until_loaded(self) -> None:
        """On rank 0."""

    def _staged(self, manifest: Manifest) -> None:
        """On rank 0."""

    def evaluate(self, mean_loss: MeanLoss) -> None:
        """Collective where this version is evaluated or is the last one, whose result is waited
        for: while rank 0 does that, the others wait as long as it takes. `mean_loss`: measures
        given responses, on all ranks."""
        if self.schedule is None:
            return
        last, due = self.version == self.config.run.steps, self.schedule.due(self.version)
        if self.config.supervised:
            if due:
                self._measure(mean_loss)
        elif due or last:
            self.enter("waiting", "evaluation")
            self._meanwhile(lambda: self._evaluate(due=due, wait=last))
        else:
            self._take_evaluations(wait=False)

    def _measure(self, mean_loss: MeanLoss) -> None:
        """Collective: the loss of every held-out set of given responses."""
        self.enter("evaluating")
        self.set_status("evaluating", f"held-out responses, version {self.version}")
        started, measured = time.monotonic(), []
        for place, one in enumerate(self.config.held_out_files):
            loss, tokens = mean_loss(partial(next, self._held_out(place), None))
            measured.append((one.name, loss, tokens))
        self._measured(measured, time.monotonic() - started)

    def _held_out(self, place: int) -> Iterator[TrainBatch]:
        """On rank 0: set number `place`, batch by batch."""
        return iter(())

    def _measured(self, sets: Sequence[tuple[str, float, int]], seconds: float) -> None:
        """(name, loss, tokens) of each set. Other ranks know that it was measured, and no more."""

    def _evaluate(self, *, due: bool, wait: bool) -> None:
        """On rank 0."""

    def _take_evaluations(self, *, wait: bool) -> None:
        """On rank 0."""

    def log(self, batch: RankBatch, metrics: Mapping[str, MetricValue]) -> None:
        """One line of metrics for the step that has just ended."""

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Collective: what a checkpoint of this version holds besides the policy, and its further
        files. Evaluations of older versions are waited for: their weights will be gone."""
        self.set_status("checkpointing")
        self.enter("checkpointing")
        if self.schedule is not None:
            unfinished = self.schedule.unfinished(self.version)
            self._meanwhile(lambda: self._take_evaluations(wait=unfinished))
        position = self._position()
        state = {
            "version": self.version,
            "data": position.state if position else None,
            "evaluated": self.schedule.means if self.schedule else {},
            "model_path": str(self.config.model.path),
        }
        files = {
            CONFIG_FILE: dump(self.config).encode("utf-8"),
            RECORD_FILE: json.dumps(self._record_of(position), indent=1).encode("utf-8"),
        }
        if position is not None:
            files[DATA_FILE] = json.dumps(position.data, indent=1).encode("utf-8")
            if position.buffer is not None:
                files[buffer_file.NAME] = position.buffer
        return state, files

    def held(self) -> dict[str, int]:
        """Bytes on this rank's device, by what holds them."""
        return {} if self.memory is None else self.memory.held()

    def _position(self) -> DataState | None:
        return None

    def _record_of(self, position: DataState | None) -> dict[str, Any]:
        """Return the content that the run's own files must have at a resume from here."""
        return {}

    def set_status(self, phase: str, detail: str = "") -> None:
        """Writes the run's status."""

    def failed(self, error: BaseException) -> None:
        """Writes what ended the run into its status."""

    def enter(self, state: str, waiting_for: str = "") -> None:
        """Says what this rank does from now on."""
        watch.enter(
            "wait" if waiting_for else "work", f"the {waiting_for}" if waiting_for else state
        )

    def close(self) -> None:
        self.enter("ending")
        self._close_staging()

    def _close_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()


class Rank0(OtherRank):
    """Rank 0. `begin` starts Ray, the controller and the engines."""

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__(config, layout)
        self._timeline = Timeline(config.run.dir, "rank 0")
        self._log: MetricsLog | None = None
        self._eval_log: EvalLog | None = None
        self._batches: BatchSource | None = None
        self._code: dict[str, str] = {}
        """Digests of the Python files that the configuration names, as they were at the start."""
        self._handout: Handout | None = None
        """The batch that was awaited."""
        self._flow_metrics: dict[str, MetricValue] = {}
        """Metrics of engines and controller, since the batch before."""
        self._state, self._since = "starting", time.monotonic()
        self._spent: dict[str, float] = {}
        """Seconds by what was done, since the last line of metrics."""

    def begin(self, version: int, resumed: Mapping[str, Any] | None, oldest: int) -> None:
        super().begin(version, resumed, oldest)
        config = self.config
        self.set_status("starting", "Ray, engines and controller" if config.rollout else "data")
        self._code = code_digests(config.model_dump(mode="json"))
        self._log = MetricsLog(
            config.run.dir,
            tensorboard=config.observe.tensorboard,
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
        if self.schedule is not None:
            self._eval_log = EvalLog(config.run.dir, self.schedule.means)
        position = None
        if resumed is not None:
            buffer = read_file(config.run.dir / "checkpoint", buffer_file.NAME)
            position = DataState(state=resumed["data"], buffer=buffer, oldest=oldest)
        self._batches = open_batches(config, self.layout.device_type, position, self._gpus)

    @property
    def _open(self) -> BatchSource:
        assert self._batches is not None, "begin comes first"
        return self._batches

    def _take_batch(self) -> None:
        self._handout = self._open.next_batch(self.version)

    def next_batch(self) -> TrainBatch | None:
        handout, self._handout = self._handout, None
        if handout is None:
            return None
        self._flow_metrics = handout.metrics
        return handout.batch

    def _begin(self, wait: Callable[[], None]) -> Future[None]:
        waiting: Future[None] = Future()

        def work() -> None:
            try:
                wait()
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                waiting.set_exception(error)
            else:
                waiting.set_result(None)

        # No executor: the process would wait for its thread before it ends.
        threading.Thread(target=work, name="wait", daemon=True).start()
        return waiting

    def _next_buffer_request(self, waiting: Future[None]) -> BufferRequest | None:
        return self._open.next_buffer_request(waiting)

    def _buffer_request(self, staging: IpcBuckets, fill: BufferRequest) -> BucketRef | None:
        ref = super()._buffer_request(staging, fill)
        self._open.buffer_filled(ref)
        return ref

    def _until_loaded(self) -> None:
        self._open.until_loaded(self.version)

    def _until_asleep(self) -> None:
        self._open.sleep()

    def _until_released(self) -> None:
        self._open.until_released(self.version)

    def _staged(self, manifest: Manifest) -> None:
        self._open.publish(self.version, manifest)

    def _evaluate(self, *, due: bool, wait: bool) -> None:
        if due and self.schedule is not None:
            self.schedule.begin(self.version)
            self.enter("evaluating")
            self.set_status("evaluating", f"held-out prompts, version {self.version}")
            self._open.evaluate(self.version)
        self._take_evaluations(wait=wait)

    def _take_evaluations(self, *, wait: bool) -> None:
        if self.schedule is not None:
            for result in self._open.evaluated(wait=wait):
                self._record(result)

    def _held_out(self, place: int) -> Iterator[TrainBatch]:
        return self._open.held_out(place, self.version)

    def _measured(self, sets: Sequence[tuple[str, float, int]], seconds: float) -> None:
        first, *others = (
            LossResult(version=self.version, name=name, loss=loss, tokens=tokens, seconds=seconds)
            for name, loss, tokens in sets
        )
        self._record(replace(first, others=tuple(others)))

    def _record(self, result: EvalResult | LossResult) -> None:
        if self.schedule is None or self._log is None:
            return
        values = self.schedule.record(result)
        if self._eval_log is not None:
            self._eval_log.append(result.as_json())
        self._log.evaluated(result.version, values)

    def log(self, batch: RankBatch, metrics: Mapping[str, MetricValue]) -> None:
        assert self._log is not None
        norm = metrics.get("update/norm")
        seen = summarise(
            batch,
            max_lag(self.config.flow.async_ratio),
            norm * self.config.objective.steps_per_batch if isinstance(norm, float) else None,
        )
        self._log.log(self.version, {**metrics, **seen, **self._flow_metrics, **self._step_times()})
        self.set_status("training")

    def _step_times(self) -> dict[str, float]:
        """Seconds of each part since the batch was asked for."""
        self._spend()
        spent, self._spent = self._spent, {}
        times = {
            "time/wait_batch_s": spent.get("waiting batch", 0.0),
            "time/train_s": spent.get("training", 0.0),
            "time/publish_s": spent.get("publishing", 0.0),
        }
        if self._makes_room:
            times["time/sleep_s"] = spent.get("waiting engines to sleep", 0.0)
            times["time/make_room_s"] = spent.get("restoring", 0.0) + spent.get("releasing", 0.0)
        return times | {"time/step_s": sum(times.values())}

    def _position(self) -> DataState:
        # Nothing is handed out that has not trained, so the position is that of this version.
        return self._open.state()

    def _record_of(self, position: DataState | None) -> dict[str, Any]:
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
                steps=run.steps,
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

    def enter(self, state: str, waiting_for: str = "") -> None:
        super().enter(state, waiting_for)
        self._timeline.enter(state, waiting_for)
        self._spend()
        self._state = f"{state} {waiting_for}".rstrip()

    def _spend(self) -> None:
        now = time.monotonic()
        self._spent[self._state] = self._spent.get(self._state, 0.0) + now - self._since
        self._since = now

    def close(self) -> None:
        watch.enter("work", "ending engines and Ray" if self.config.rollout else "ending")
        self._timeline.close()
        if self._batches is not None:
            self._batches.close()
        self._close_staging()
        if self._log is not None:
            self._log.close()
