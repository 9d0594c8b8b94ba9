"""Component histories: the real controller, scheduler, buffer, sample log, metrics log and
checkpoint folder, with fake engines and a fake trainer, in one process and in virtual time.

    settings, faults <- seed
    life 1: start, train, checkpoint, ... crash     life 2: resume, ...     the last life finishes

A history makes all steps of a small run. Each of its lives ends at a place that the seed chooses: a
crash at an operation of the disk or between two events of engines and trainer, an error of the run,
or a requested stop. The next life resumes from the newest checkpoint. At the end the log must prove
that nothing was lost, duplicated or too old (invariants.py), and must equal what the trainer got.

A history is a pure function of its seed: one thread, no real clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_async_rl.config.durable import PARTIAL, publish, write_file
from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.rollout import RewardConfig
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.data import PromptSource
from megatron_async_rl.flow import controller as controller_module
from megatron_async_rl.flow.buffer import BUFFER_FILE
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import ControllerSpec, DataState
from megatron_async_rl.flow.errors import FlowError
from megatron_async_rl.flow.evaluation import HeldOut
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.metrics.log import MetricsLog, digest_of_step, read_metrics
from megatron_async_rl.policy.checkpoint_folder import (
    LATEST,
    RECORD_FILE,
    about,
    newest,
    outdated,
    read_checked,
    step_of,
)
from megatron_async_rl.policy.digested_folder import StoredFile, described
from megatron_async_rl.rollout.engine_process import EngineStartError
from megatron_async_rl.samples.columns import rows_of_lists
from megatron_async_rl.samples.frames import (
    FOLDER,
    HEADER_BYTES,
    MARK_FILE,
    OPEN,
    TORN_ZEROS,
    LogMark,
    SegmentBroken,
    lost_end,
    read_frames,
    read_mark,
)
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Request, Sample
from megatron_async_rl.watchdog.events import read_events
from megatron_async_rl.watchdog.watch import STOP
from megatron_async_rl.weights.manifest import WeightMismatch
from tests.chaos.disk import Crash, FaultyDisk
from tests.chaos.invariants import FlowLaw, Violation, broken
from tests.unit import virtual_time
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest, specs
from tests.unit.flow_setup import PROMPTS, WholeRewards

LIVES = 60
"""Starts after which a history counts as hung."""
LIFE_S = 100_000.0
"""Virtual seconds after which a life counts as hung."""
TIMEOUT_S = 900.0
FAULTY_LIVES = 8
"""Number of lives with faults; later ones run undisturbed, so that every history can finish."""


class EngineDied(RuntimeError):
    """Simulated death of an engine."""


@dataclass(frozen=True, kw_only=True)
class HistorySettings:
    """Settings of one history, drawn from its seed."""

    flow: FlowConfig
    engines: int
    evaluators: int
    steps: int
    fresh_steps: int
    every: int
    keep: int
    whole: bool
    """True if the reward is one per group."""
    on_error: str
    failing: float
    """Share of rewards that fail."""
    dying: float
    """Probability that an engine dies at one of its calls."""
    segment_bytes: int
    keep_bytes: int
    evaluate: int
    """Steps between evaluations; 0: none."""

    @property
    def law(self) -> FlowLaw:
        return FlowLaw(
            steps=self.steps,
            prompts_per_step=self.flow.prompts_per_step,
            group_size=self.flow.group_size,
            async_ratio=self.flow.async_ratio,
            fresh_steps=self.fresh_steps,
            exact=self.flow.selection.name == "exact_lag",
            replay=self.flow.selection.name == "replay",
        )


def draw_settings(chance: random.Random) -> HistorySettings:
    ratio = chance.choice([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
    selection: Any = chance.choice(["oldest_first", "oldest_first", "windowed", "exact", "replay"])
    if selection == "exact":
        ratio = float(int(ratio))
        selection = {"name": "exact_lag", "lag": int(ratio)}
    elif selection == "replay":
        selection = {"name": "replay", "recent": chance.choice([0.3, 0.7])}
    whole = chance.random() < 0.3
    # The combinations that config/rules.py permits.
    name = selection if isinstance(selection, str) else selection["name"]
    size = chance.randint(1, 3)
    drops = ratio > 0 and name in ("oldest_first", "windowed")
    flow = FlowConfig(
        prompts_per_step=chance.randint(1, 4),
        group_size=size,
        async_ratio=ratio,
        selection=selection,
        late=chance.choice(["wait", "drop"]) if drops else "wait",
        oversample=0.5 if selection == "windowed" and ratio % 1 else 0.0,
        dynamic_sampling=size > 1 and name != "replay" and chance.random() < 0.3,
    )
    return HistorySettings(
        flow=flow,
        engines=chance.randint(1, 3),
        evaluators=chance.choice([0, 0, 1]),
        steps=chance.randint(5, 12),
        fresh_steps=chance.choice([0, 0, 0, 3]),
        every=chance.randint(1, 4),
        keep=chance.randint(1, 3),
        whole=whole,
        on_error=chance.choice(["drop", "drop", "drop", "stop"]),
        failing=chance.choice([0.0, 0.0, 0.05, 0.2]),
        dying=chance.choice([0.0, 0.003, 0.01]),
        segment_bytes=chance.choice([2**12, 2**13, 2**15]),
        keep_bytes=chance.choice([2**16, 2**31, 2**31, 2**31]),
        evaluate=chance.choice([0, 0, 3]),
    )


@dataclass
class HistoryResult:
    """Outcome of a history. `tried`: number of faults by kind; `lives`: number of starts."""

    seed: int
    tried: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    lives: int = 0
    errors: int = 0
    """Number of lives that a fault ended by an error of the run."""
    settings: HistorySettings | None = None


class _InlineLoop(virtual_time._Loop):
    """Event loop without threads: a call for another thread is made at once."""

    def run_in_executor(self, executor: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


def _run(body: Coroutine[Any, Any, None]) -> None:
    with (
        asyncio.Runner(loop_factory=_InlineLoop) as runner,
        mock.patch("time.monotonic", runner.get_loop().time),
    ):
        runner.get_loop().set_exception_handler(lambda *_: None)
        runner.run(body)


class SteppedLog(SampleLogWriter):
    """Sample log whose thread runs only when it is called: `step`, and wherever the controller
    waits for it."""

    def __init__(self, run_dir: Path, settings: HistorySettings) -> None:
        super().__init__(run_dir, SamplesConfig(), settings.flow.async_ratio)
        self._segment_size = settings.segment_bytes
        self._keep = settings.keep_bytes
        self._thread = self  # type: ignore[assignment]
        self._wake = self  # type: ignore[assignment]

    def step(self) -> None:
        self._take_queued()

    # The thread

    def start(self) -> None: ...
    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float) -> None:
        self._write_on()

    # The event that wakes it

    def set(self) -> None:
        if not self._closing:
            self._take_queued()

    def wait(self, timeout: float) -> None: ...
    def clear(self) -> None: ...


class HistoryEngine(FakeEngine):
    """Engine whose responses are unique, and that may die at any of its calls."""

    def __init__(self, history: ComponentHistory) -> None:
        super().__init__(lambda _: history.delay())
        self._history = history
        self.before_update = self._before_update
        self.reward = history.reward
        self.alter = history.finished

    async def submit(self, requests: Sequence[Request]) -> None:
        self._history.reach("submit")
        self._fate()
        await super().submit(requests)

    def say(self, outcome: Any) -> None:
        self._history.reach("response")
        super().say(outcome)
        with contextlib.suppress(EngineDied):
            self._fate()

    def _before_update(self, version: int) -> Any:
        self._history.reach("update")
        self._fate()
        return asyncio.sleep(self._history.delay() / 10)

    def _fate(self) -> None:
        fate = self._history.fate()
        if fate == "engine stalls":
            self.wedged = True
            self._news.set()
        elif fate == "engine dies":
            error = EngineDied("simulated")
            self.fail(error)
            raise error
        elif fate == "wrong weights":
            self.spoil = True


class ComponentHistory:
    """One history in `run_dir`."""

    def __init__(self, seed: int, run_dir: Path, settings: HistorySettings | None = None) -> None:
        self.chance = random.Random(seed)
        drawn = draw_settings(self.chance)
        self.settings = settings or drawn
        self.result = HistoryResult(seed, settings=self.settings)
        self.run_dir = run_dir
        self.disk = FaultyDisk(self.chance)
        self.disk.on_death = self._on_death
        self.ledger: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        """Samples that each step of the surviving history got: id and tokens."""
        self._clock = 1000.0
        self._calm = False
        self._crash_at: int | None = None
        self._reached = 0
        self._crashed: asyncio.Future[None] | None = None
        self._log: SteppedLog | None = None
        self._trained = False
        """True if the last life made a step."""
        self._filled = False
        """True once the disk was full."""

    # Fate

    def delay(self) -> float:
        chance = self.chance
        return 0.0 if chance.random() < 0.2 else chance.expovariate(1.0 / 2.0)

    def reward(self, request: Request) -> float | None:
        if not self._calm and self.chance.random() < self.settings.failing:
            self.result.tried["reward fails"] += 1
            return None
        return float(self.chance.randint(0, 2))

    def finished(self, sample: Sample) -> Sample:
        """Return the sample with tokens that no other sample has."""
        self._clock += 0.001
        ids = np.array([self.chance.randrange(1, 2**31) for _ in sample.versions], dtype=np.int32)
        return replace(sample, response_ids=ids, finished_at=self._clock)

    def fate(self) -> str:
        """Return what happens to an engine at this call; empty: nothing."""
        if self._calm or self.chance.random() >= self.settings.dying:
            return ""
        what = self.chance.choices(
            ["engine dies", "engine stalls", "wrong weights"], [0.7, 0.25, 0.05]
        )[0]
        self.result.tried[what] += 1
        return what

    def reach(self, _: str) -> None:
        """Mark an event between two operations. Raises Crash at the chosen one."""
        self._reached += 1
        if self._reached == self._crash_at:
            self.disk.die()
            self._on_death()
            raise Crash("between two events")

    def _on_death(self) -> None:
        # The loop learns of it even if the code that died has a caller that survives.
        if self._crashed is not None and not self._crashed.done():
            self._crashed.set_result(None)

    # Lives

    def run(self) -> HistoryResult:
        result = self.result
        with self._installed():
            for life in range(LIVES):
                result.lives += 1
                self._calm = life >= FAULTY_LIVES
                if self._live():
                    self._judge()
                    return result
        result.violations.append(Violation("hung", f"not finished after {LIVES} starts"))
        return result

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        def log_of(*_: Any) -> SteppedLog:
            self._log = SteppedLog(self.run_dir, self.settings)
            return self._log

        quiet = logging.root.manager.disable
        state = random.getstate()
        random.seed(self.result.seed)
        logging.disable(logging.CRITICAL)
        with contextlib.ExitStack() as held:
            # The names and logs of the controller's process are not this process's.
            for name in ("log_package_to", "name_this_process", "watch.join", "watch.fact"):
                held.enter_context(
                    mock.patch(f"megatron_async_rl.flow.controller.{name}", return_value=None)
                )
            held.enter_context(mock.patch.object(controller_module, "open_sample_log", log_of))
            held.enter_context(mock.patch.object(controller_module, "collect_rarely", int))
            held.enter_context(self.disk.installed())
            try:
                yield
            finally:
                logging.disable(quiet)
                random.setstate(state)

    def _live(self) -> bool:
        """Run one life. Return True if the run finished."""
        chance, tried = self.chance, self.result.tried
        self._crash_at, crash_operation = None, None
        self._reached = 0
        kind = "" if self._calm else chance.choice(["event", "disk", "disk", "stop", ""])
        if kind == "event":
            self._crash_at = 1 + int(chance.expovariate(1 / 60))
        elif kind == "disk":
            crash_operation = 1 + int(chance.expovariate(1 / 40))
        self.disk.start(crash_operation)
        finished = False
        try:
            _run(self._life(stops=kind == "stop"))
            finished = self._steps_done() == self.settings.steps
        except Crash:
            tried["crash at a disk operation" if kind == "disk" else "crash between events"] += 1
            self._tear()
        except TimeoutError:
            self.result.violations.append(Violation("hung", f"life {self.result.lives}"))
        except Exception as error:  # noqa: BLE001 - judged by its kind
            self._judge_error(error)
        self.disk.start(None)
        return finished

    def _steps_done(self) -> int:
        path = newest(self.run_dir / "checkpoint")
        return 0 if path is None else step_of(path)

    async def _life(self, *, stops: bool) -> None:
        self._crashed = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self._train(stops=stops))
        other = asyncio.create_task(self._disturb())
        await asyncio.wait(
            [work, self._crashed, other], timeout=LIFE_S, return_when=asyncio.FIRST_COMPLETED
        )
        if work.done():
            work.result()
        elif self._crashed.done():
            raise Crash("the process died")
        elif other.done():
            other.result()
        else:
            raise TimeoutError

    async def _disturb(self) -> None:
        """Run the log's thread, and fill and empty the disk."""
        chance = self.chance
        while True:
            await asyncio.sleep(chance.uniform(0.2, 2.0))
            if self._log is not None and chance.random() < 0.8:
                self._log.step()
            if not self._calm and not self.disk.full and chance.random() < 0.01:
                self.disk.full = self._filled = True
                self.result.tried["disk is full"] += 1
            elif self.disk.full and chance.random() < 0.1:
                self.disk.full = False

    async def _train(self, *, stops: bool) -> None:
        """Life of rank 0: resume, train to the end or a stop, save."""
        settings, run_dir = self.settings, self.run_dir
        run_dir.mkdir(exist_ok=True)
        (run_dir / STOP).unlink(missing_ok=True)
        for left in run_dir.glob(f"{MARK_FILE}*{PARTIAL}"):  # as the launcher does
            left.unlink()
        version, position = self._resume()
        launch = FakeLaunch(
            [HistoryEngine(self) for _ in range(settings.engines + settings.evaluators)],
            again=lambda _: HistoryEngine(self),
        )
        metrics = MetricsLog(run_dir, tensorboard=False, first_step=version + 1)
        controller = self._controller(launch)
        await controller.start(position)
        self._trained = version < settings.steps
        stop_at = version + self.chance.randint(0, 3) if stops else -1
        saved = version if position is not None else -1
        released = asyncio.create_task(controller.staged(version, manifest(version)))
        while version < settings.steps:
            if version == stop_at:
                (run_dir / STOP).touch()
                self.result.tried["stop"] += 1
            self.reach("before a batch")
            handout = await controller.next_batch(version)
            if handout is None:
                break
            self.reach("after a batch")
            self.ledger[version + 1] = _samples_of(handout.batch)
            await asyncio.sleep(self.delay())
            version += 1
            await released
            released = asyncio.create_task(controller.staged(version, manifest(version)))
            if settings.evaluate and version % settings.evaluate == 0:
                await controller.evaluate(version)
            metrics.log(version, {})
            self.reach("after a line of metrics")
            if version % settings.every == 0:
                await self._save(controller, metrics, version)
                saved = version
        if saved != version:
            await self._save(controller, metrics, version)
        await released
        metrics.close()
        await controller.close()

    def _controller(self, launch: FakeLaunch) -> Controller:
        settings = self.settings
        spec = ControllerSpec(
            flow=settings.flow,
            engines=specs(settings.engines + settings.evaluators),
            evaluators=settings.evaluators,
            fleet=FleetSettings(
                capacity=self.chance.choice([2, 8]), unresponsive_s=5.0, restarts_per_hour=4
            ),
            held_out=[HeldOut(prompts=PROMPTS[:2], n=1, pass_at=(1,))],
            reward=RewardConfig(
                name="its:own",
                per="group" if settings.whole else "response",
                on_error=settings.on_error,  # type: ignore[arg-type]
            ),
            steps=settings.steps,
            fresh_steps=settings.fresh_steps,
            seed=0,
            timeout_s=TIMEOUT_S,
            run_dir=self.run_dir,
        )
        controller = Controller(PromptSource(PROMPTS, seed=5, shuffle=True), spec, launch)
        if settings.whole:
            controller._rewards = WholeRewards(lambda _: self.delay())
        return controller

    # Checkpoints

    async def _save(self, controller: Controller, metrics: MetricsLog, version: int) -> None:
        """Write a checkpoint in the order of policy/checkpoint.py: a whole folder, then `latest`,
        then the removal of old ones."""
        self.reach("before a checkpoint")
        state = await controller.state()
        record = {
            "metrics": metrics.sync(),
            "samples": state.log.as_json() if state.log is not None else None,
        }
        files = {
            "data.json": json.dumps(dict(state.state)).encode(),
            RECORD_FILE: json.dumps(record).encode(),
            BUFFER_FILE: state.buffer or b"",
        }
        folder = self.run_dir / "checkpoint"
        unfinished, final = folder / f"unfinished_{version}", folder / f"step_{version:08d}"
        for leftover in folder.glob("unfinished_*"):
            self._remove(leftover)
        unfinished.mkdir(parents=True)
        for name, content in files.items():
            write_file(unfinished / name, content)
        stored = {name: StoredFile.of(content) for name, content in files.items()}
        write_file(unfinished / "about.json", described({"step": version}, stored))
        self.reach("before a checkpoint's name")
        if final.exists():  # of a life that died before it wrote `latest`
            self._remove(final)
        publish(unfinished, final)
        self.reach("before latest")
        write_file(folder / LATEST, final.name)
        for old in outdated(final, self.settings.keep, set()):
            self._remove(old)

    @staticmethod
    def _remove(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    def _resume(self) -> tuple[int, DataState | None]:
        """Return version and position of the newest checkpoint, after the checks of a resume."""
        path = newest(self.run_dir / "checkpoint")
        if path is None:
            self.ledger.clear()
            return 0, None
        content = about(path)
        read = {name: read_checked(path, name, content) for name in ("data.json", RECORD_FILE)}
        assert all(read.values())
        version = step_of(path)
        record = json.loads(read[RECORD_FILE] or b"")
        self._check_record(version, record)
        for step in [step for step in self.ledger if step > version]:
            del self.ledger[step]
        buffer = read_checked(path, BUFFER_FILE, content)
        return version, DataState(state=json.loads(read["data.json"] or b""), buffer=buffer)

    def _check_record(self, version: int, record: dict[str, Any]) -> None:
        """Check that log and metrics have all that the checkpoint counts, as `mar train` does."""
        line = record["metrics"]
        if line is not None and digest_of_step(self.run_dir, line["step"]) != line["digest"]:
            text = f"the line of step {line['step']}, which the checkpoint counts"
            self.result.violations.append(Violation("lost", text))
        mark = LogMark.of(record["samples"]) if record["samples"] is not None else None
        with contextlib.suppress(SegmentBroken):
            if mark is not None and (lost := lost_end(self.run_dir, mark)) is not None:
                text = f"{lost}, which the checkpoint of step {version} counts"
                self.result.violations.append(Violation("lost", text))

    def _tear(self) -> None:
        """Damage the unsynced end of the newest segment, as a kill or a power failure may."""
        self.disk.start(None)
        mark = read_mark(self.run_dir)
        for path in sorted((self.run_dir / FOLDER).glob(f"*{OPEN}")):
            if self.chance.random() < 0.5:
                continue
            number = int(path.stem.rpartition("-")[2])
            if mark is not None and (mark.segment > number or mark.closed):
                continue
            synced = 0
            if mark is not None and mark.segment == number:
                table = "samples" if path.name.startswith("samples") else "outcomes"
                synced = mark.batches(table)
            frames = [len(payload) for _, payload in read_frames(path, torn=True)]
            safe = sum(frames[:synced]) + HEADER_BYTES * synced
            content = path.read_bytes()
            cut = self.chance.randint(safe, len(content))
            # After a power failure the file may have its length, and zeros instead of blocks.
            zeros = self.chance.choice([0, 0, len(content) - cut])
            path.write_bytes(content[:cut] + bytes(zeros if zeros >= TORN_ZEROS else 0))
            self.result.tried["torn frame"] += 1

    # Judgement

    def _judge_error(self, error: Exception) -> None:
        """Judge the message of a run that ended by an error."""
        expected = isinstance(error, FlowError | EngineStartError | OSError | WeightMismatch)
        if not expected or not str(error):
            text = f"{type(error).__name__}: {error}"
            self.result.violations.append(Violation("unnamed", text))
        self.result.errors += 1

    def _judge(self) -> None:
        settings, found = self.settings, self.result.violations
        path = newest(self.run_dir / "checkpoint")
        assert path is not None
        state = json.loads(read_checked(path, "data.json", about(path)) or b"")
        waiting = [index for index, _ in state["pending"]]
        violations = broken(
            self.run_dir, settings.law, waiting=waiting, position=state["sample_log"]
        )
        noted = [event.text for event in read_events(self.run_dir)]
        if self._filled and self.disk.refused:
            # Rows of a full disk are lost by design; the run must not be silent about them.
            gaps = bool(violations)
            if gaps and not any("sample log" in text or FOLDER in text for text in noted):
                violations = [Violation("silent", f"lost rows and no event: {violations[0]}")]
            else:
                violations = []
        else:
            violations += self._compare(settings)
        found += violations
        steps = [row["step"] for row in read_metrics(self.run_dir)]
        if steps != list(range(1, settings.steps + 1)):
            found.append(Violation("lost", f"metrics.jsonl has the steps {steps}"))
        # A life that had no step left to make may end before an engine has loaded its version, with
        # which the log begins: the files of the life before then stay open.
        endings = (PARTIAL, OPEN) if self._trained else (PARTIAL,)
        left = [
            file.relative_to(self.run_dir).as_posix()
            for file in self.run_dir.rglob("*")
            if file.name.endswith(endings) and "checkpoint/unfinished" not in str(file)
        ]
        if left and not self._filled:
            found.append(Violation("left over", ", ".join(left)))

    def _compare(self, settings: HistorySettings) -> list[Violation]:
        """Compare the batches of the log with those that the trainer got."""
        recorded = RecordedBatches(self.run_dir)
        if not recorded.whole:
            return []
        for step in range(1, settings.steps + 1):
            try:
                logged = _samples_of(recorded.batch(step))
            except NotRecorded as error:
                return [Violation("lost", str(error))]
            got = [(name.partition("@")[0], tokens) for name, tokens in self.ledger[step]]
            if logged != got:
                return [Violation("lost", f"the log has another batch of step {step}")]
        return []


def _samples_of(batch: TrainBatch) -> list[tuple[str, tuple[int, ...]]]:
    names = batch.samples.column("id").to_pylist()
    tokens = rows_of_lists(batch.samples.column("response_ids"))
    return [(name, tuple(ids.tolist())) for name, ids in zip(names, tokens, strict=True)]


def run_history(seed: int, folder: Path | None = None) -> HistoryResult:
    """Run the history of `seed` in a temporary folder, or in `folder`, which stays."""
    with contextlib.ExitStack() as held:
        if folder is None:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        return ComponentHistory(seed, folder / "run").run()
