"""The loop, on one screen: next batch, update, publish, log, checkpoint.

Every rank runs this file (SPMD, under torchrun). Ranks differ in one thing: rank 0 also holds the circle (Ray engines,
controller, publisher) or, for supervised runs, the data source, and tells the others what comes next.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.circle.feed import Feed, Position, open_feed
from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow import buffer_file
from megatron_async_rl.flow.eval_schedule import EvalSchedule
from megatron_async_rl.flow.law import max_lag
from megatron_async_rl.flow.summary import summarise
from megatron_async_rl.observe import watch
from megatron_async_rl.observe.deadline import name_this_process
from megatron_async_rl.observe.evaluations import EvalLog
from megatron_async_rl.observe.logs import redirect_output
from megatron_async_rl.observe.metrics import MetricsLog
from megatron_async_rl.observe.stall import gather_if_timed_out
from megatron_async_rl.observe.status import Status, write_status
from megatron_async_rl.observe.timeline import Timeline
from megatron_async_rl.policy import device
from megatron_async_rl.policy.checkpoint_folder import read_file
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.weights.convert import export_hf
from megatron_async_rl.weights.export import WeightExporter

COLLECTIVE_GRACE_S = 60.0
END_ALONE = 1.5
"""Of watchdog.timeout_s: after it a rank of a run that does not move ends itself, where no launcher watches."""


class Run:
    """One rank's share of a run: the policy, what feeds it, and where it writes."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config = config
        self.layout = layout
        self.directory = config.run.dir
        self.policy = Policy.build(
            config.model,
            config.policy,
            config.objective,
            config.controls,
            layout=layout,
            temperature=config.rollout.sampling.temperature if config.rollout else 1.0,
            total_steps=config.run.steps,
        )
        self.exporter = WeightExporter(self.policy.model.bridge, self.policy.model.chunks)
        resumed = self.policy.load(self.directory / "checkpoint")
        self.version = 0 if resumed is None else int(resumed["version"])
        self.saved_version = self.version if resumed is not None else -1
        means: dict[int, float] = {} if resumed is None else resumed["evaluated"]
        self.schedule = EvalSchedule(every=config.eval.every, steps=config.run.steps, means=means) if config.eval else None
        self.feed: Feed | None = None
        self.log: MetricsLog | None = None
        self.eval_log: EvalLog | None = None
        self.timeline: Timeline | None = None
        if layout.rank == 0:
            self.say("starting", "Ray, engines and controller" if config.rollout else "data")
            self.timeline = Timeline(self.directory, "rank 0")
            self.log = MetricsLog(
                self.directory,
                tensorboard=config.observe.tensorboard,
                first_step=self.version + 1,
                prometheus_port=config.observe.prometheus_port,
            )
            if self.schedule is not None:
                self.eval_log = EvalLog(self.directory, means)
            self.feed = open_feed(config, layout.device_type, self.version, self.saved_position(resumed))

    def saved_position(self, resumed: Mapping[str, Any] | None) -> Position | None:
        if resumed is None:
            return None
        buffer = read_file(self.directory / "checkpoint", buffer_file.NAME)
        return Position(state=resumed["data"], buffer=buffer, oldest=self.policy.others.oldest(self.version))

    def train(self) -> None:
        self.publish()
        self.evaluate()
        self.say("training")
        while self.version < self.config.run.steps:
            started = self.now("waiting", "batch")
            batch = self.layout.from_rank_zero(lambda: self.feed.next_batch(self.version) if self.feed else None)
            if batch is None:
                self.save()
                self.say("stopped")
                return
            got = self.now("training")
            metrics = self.policy.train_step(batch)
            trained = self.now("publishing")
            self.version += 1
            self.publish()
            ended = time.monotonic()
            self.evaluate()
            if self.feed is not None and self.log is not None:
                times = {"time/wait_batch_s": got - started, "time/train_s": trained - got}
                times |= {"time/publish_s": ended - trained, "time/step_s": ended - started}
                seen = summarise(batch, max_lag(self.config.flow.async_ratio), metrics.get("update/norm"))
                self.log.log(self.version, {**metrics, **seen, **self.feed.metrics(), **times})
                self.say("training")
            if self.config.checkpoint.every and self.version % self.config.checkpoint.every == 0:
                self.save()
        self.save()
        self.say("exporting", "Hugging Face checkpoint")
        with watch.phase("exporting the model", quiet_s(self.config)):
            export_hf(self.exporter, self.config.model.path, self.directory / "hf")
        self.say("finished")

    def publish(self) -> None:
        """Collective: the gather runs on every rank, rank 0 stages; the engines load while the loop goes on. A supervised run
        has nobody to send to."""
        if self.config.rollout is not None:
            buckets = self.exporter.buckets(self.config.weights.bucket_mib * 2**20)
            if self.feed is None:
                for _ in buckets:
                    pass
            else:
                self.feed.publish(self.version, buckets)

    def evaluate(self) -> None:
        """Collective where this version is evaluated or is the last one, whose result is waited for: while rank 0 sees to that,
        the others wait as long as it takes."""
        if self.schedule is None:
            return
        last, due = self.version == self.config.run.steps, self.schedule.due(self.version)
        if due or last:
            self.now("evaluating" if self.feed is not None else "waiting", "" if self.feed is not None else "evaluation")
            self.layout.from_rank_zero(lambda: self.evaluate_here(due=due, wait=last))
        else:
            self.take_evaluations(wait=False)

    def evaluate_here(self, *, due: bool, wait: bool) -> None:
        if due and self.feed is not None and self.schedule is not None:
            self.schedule.begin(self.version)
            self.say("evaluating", f"held-out prompts, version {self.version}")
            self.feed.evaluate(self.version)
        self.take_evaluations(wait=wait)

    def take_evaluations(self, *, wait: bool) -> None:
        if self.schedule is None or self.feed is None:
            return
        for result in self.feed.evaluated(wait=wait):
            values = self.schedule.record(result)
            if self.eval_log is not None:
                self.eval_log.append(result.as_json())
            if self.log is not None:
                self.log.evaluated(result.version, values)

    def save(self) -> None:
        if self.saved_version == self.version:
            return
        self.now("checkpointing")
        self.say("checkpointing")
        if self.schedule is not None:
            unfinished = self.schedule.unfinished(self.version)
            self.layout.from_rank_zero(lambda: self.take_evaluations(wait=unfinished))
        # Nothing is handed out that has not trained, so the position is that of this version.
        position = self.feed.position() if self.feed is not None else None
        state = {
            "version": self.version,
            "data": position.state if position else None,
            "evaluated": self.schedule.means if self.schedule else {},
            "model_path": str(self.config.model.path),
        }
        with watch.phase("saving a checkpoint", quiet_s(self.config)):
            files = {buffer_file.NAME: position.buffer} if position and position.buffer is not None else {}
            self.policy.save(self.directory / "checkpoint", self.version, state, keep=self.config.checkpoint.keep, files=files)
        self.saved_version = self.version
        self.say("training")

    def say(self, phase: str, detail: str = "", error: str | None = None) -> None:
        if self.layout.rank == 0:
            log = str(self.directory / "logs" / "rank_0.log")
            write_status(
                self.directory,
                Status(
                    phase=phase,
                    detail=detail,
                    step=self.version,
                    steps=self.config.run.steps,
                    time=time.time(),
                    before=self.schedule.before if self.schedule else None,
                    after=self.schedule.after if self.schedule else None,
                    error=error,
                    log=log,
                ),
            )

    def now(self, state: str, waiting_for: str = "") -> float:
        """What the run does from now on, in rank 0's timeline; the time, in monotonic seconds."""
        watch.enter("wait" if waiting_for else "work", f"the {waiting_for}" if waiting_for else state)
        if self.timeline is not None:
            self.timeline.enter(state, waiting_for)
        return time.monotonic()

    def close(self) -> None:
        watch.enter("work", "ending engines and Ray" if self.config.rollout is not None else "ending")
        if self.timeline is not None:
            self.timeline.close()
        if self.feed is not None:
            self.feed.close()
        if self.log is not None:
            self.log.close()


def collective_deadline_s(config: Config) -> float:
    """Deadline of a collective. Other ranks wait in one while rank 0 starts engines or waits for a batch; those waits have
    deadlines and words of their own, so this one comes after them."""
    return quiet_s(config) + COLLECTIVE_GRACE_S


def quiet_s(config: Config) -> float:
    """How long a start, a checkpoint or an export may show no progress."""
    return max(config.watchdog.timeout_s, config.rollout.start_timeout_s if config.rollout is not None else 0.0)


def main(config_path: Path) -> int:
    config = load(config_path)
    rank = device.launched_rank()
    redirect_output(config.run.dir / "logs" / f"rank_{rank}.log")
    name_this_process(f"rank {rank}")
    watch.start(config.run.dir, f"rank {rank}", end_after_s=END_ALONE * config.watchdog.timeout_s)
    device_type = device.install(config.policy.device)
    # Megatron collects garbage at every checkpoint, and Python at its end: what is imported by now need not be looked through.
    gc.freeze()
    with watch.phase("joining the other ranks", quiet_s(config)):
        layout = initialise(config.policy.parallel, device_type, timeout_s=collective_deadline_s(config))
    run = None
    try:
        with watch.phase("starting model and engines", quiet_s(config)):
            run = Run(config, layout)
        run.train()
    except BaseException as error:
        traceback.print_exc()
        if run is not None:
            try:
                run.say("failed", error=f"{type(error).__name__}: {error}")
            except OSError:  # such as a full disk, which then is the error itself
                traceback.print_exc()
        gather_if_timed_out(config.run.dir, error, config.watchdog.timeout_s)
        raise
    finally:
        if run is not None:
            run.close()
    with watch.working("leaving the other ranks"):
        layout.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
