"""Campaign of faults against one live run: inject, repeat the same command, check.

    start -> moment -> fault -> end or recovery -> checks -> the same command -> ... -> finished

Every fault has a seed, which chooses its kind, target and moment. Moments are events in the run's
own files: its processes are there, a step was logged, a checkpoint is being written. Nothing
depends on a sleep.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import read_metrics
from megatron_async_rl.policy.checkpoint_folder import newest, require_whole
from megatron_async_rl.samples.frames import SegmentBroken, numbers_in, replace_whole
from megatron_async_rl.samples.segments import payload_of, read_batches
from tests.chaos import record
from tests.chaos.faults import TOLERATED, DamageFault, DiskFault, ProcessFault, draw
from tests.chaos.invariants import FlowLaw, Violation, ViolationKind, broken
from tests.chaos.live_run import LiveRun

STEPS_PER_FAULT = 14
RECOVERED = 8
"""Steps after a fault that show that the run has survived it: more than the samples that were
finished before it suffice for."""
PER_CAMPAIGN = 5
INTERRUPTED = 130
"""Exit code of a run that was stopped by a signal."""
SPACE_MIB = 96
"""Size of the file system that holds the run directory."""
WHOLE_RUN = "whole runs after their faults: log, metrics, checkpoint, replay, files"


class Campaign:
    """Faults of `seeds` against one run in `folder`."""

    def __init__(
        self, folder: Path, seeds: range, options: argparse.Namespace, *, disk: bool
    ) -> None:
        """disk: True if the run directory has a file system of its own."""
        self.seeds = seeds
        self._disk = disk
        self.options = options
        steps = STEPS_PER_FAULT * len(seeds) + 6
        self.run = LiveRun(folder, seeds[0], steps, options.model)
        self.law = FlowLaw(steps=steps, prompts_per_step=8, group_size=4, async_ratio=2)
        self.found: list[Violation] = []
        """Violations of the present fault."""
        self.injected = self.violations = 0
        self.loses_rows = False
        """True once a disk was full."""

    def __call__(self, deadline: float) -> None:
        run = self.run
        try:
            for seed in self.seeds:
                if time.monotonic() < deadline:
                    self._one(seed)
            self._finish()
        finally:
            run.end()

    def _one(self, seed: int) -> None:
        chance = random.Random(seed)
        fault = draw(chance, self.options.kinds)
        if isinstance(fault, DiskFault) and not self._disk:
            return
        self.found, started, starts = [], time.monotonic(), self.run.starts
        print(f"fault {seed}: {fault.kind}", flush=True)
        if self.run.starts and self.run.code is not None:
            self._restart()
        elif not self.run.starts:
            self.run.start()
        if isinstance(fault, DamageFault):
            injected = self._damage(fault, chance)
        else:
            injected = self._hit(fault, chance)
        seconds = time.monotonic() - started
        for one in self.found:
            print(f"  {one}", flush=True)
        state = "" if injected else "not injected, "
        print(f"  {state}{self.run.starts - starts} starts, {seconds:.0f} s", flush=True)
        if injected:
            self.injected += 1
            self._record("process", seed, fault.kind, seconds)

    def _record(self, layer: record.Layer, seed: int, kind: str, seconds: float) -> None:
        self.violations += len(self.found)
        if self.options.record is None:
            return
        own = record.FaultRecord(
            layer=layer,
            first=seed,
            last=seed,
            date=time.strftime("%Y-%m-%d"),
            command=f"python -m tests.chaos.run --seed {self.seeds[0]} --histories 0"
            f" --faults {len(self.seeds)}",
            tried={kind: 1},
            found=record.counts(self.found),
            details=[str(one) for one in self.found],
            seconds=round(seconds, 1),
        )
        # At once: a later fault may exhaust the time of the driver.
        record.append(own, self.options.record)

    def _violation(self, kind: ViolationKind, text: str) -> None:
        self.found.append(Violation(kind, text))

    # The command

    def _restart(self) -> None:
        """Repeat the command until it is not refused because an earlier start still ends."""
        deadline = time.monotonic() + 300
        while True:
            self.run.start()
            step = self.run.step
            self.run.wait(lambda: self.run.status().get("phase") == "starting")
            if self.run.code is None or "is in use" not in self.run.output():
                return
            if time.monotonic() > deadline:
                self._violation("hung", f"the directory is in use, at step {step}")
                return
            time.sleep(1.0)

    def _wait(self, done: object, what: str) -> bool:
        """Wait for `done`, or the end of the launcher. End a hung run."""
        if self.run.wait(done):  # type: ignore[arg-type]
            return True
        self._violation("hung", what)
        self.run.end()
        return False

    # Faults during a start

    def _hit(self, fault: ProcessFault | DiskFault, chance: random.Random) -> bool:
        run = self.run
        if not self._await_moment(fault, chance):
            return False
        at, events = run.step, len(run.events())
        with contextlib.ExitStack() as held:
            if isinstance(fault, DiskFault):
                held.enter_context(fault.held(run))
                self.loses_rows = True
            elif not fault.inject(run):
                return False
            if not self._wait(lambda: run.step >= at + RECOVERED, f"{fault.kind} at step {at}"):
                return True
        text = run.output() + "\n".join(run.events()[events:])
        if run.code is None:
            if isinstance(fault, ProcessFault):
                tolerated = fault.process in TOLERATED or fault.number == signal.SIGSTOP
            else:  # the log's open files can still grow
                tolerated = fault.folder == "samples"
            if not tolerated and not re.search(fault.names, text):
                self._violation("silent", f"{fault.kind}: the run continues without a message")
            # A stopped launcher or server would not end the run when it finishes.
            if isinstance(fault, ProcessFault) and fault.number == signal.SIGSTOP:
                with contextlib.suppress(Exception):
                    found = run.find(fault.process)
                    if found is not None:
                        found.send_signal(signal.SIGCONT)
            return True
        self._check_end(fault, text)
        return True

    def _await_moment(self, fault: ProcessFault | DiskFault, chance: random.Random) -> bool:
        run, at = self.run, self.run.step
        needed = run.find if isinstance(fault, ProcessFault) else None
        if fault.moment == "start":
            process = fault.process if isinstance(fault, ProcessFault) else "rank 0"
            reached = lambda: run.find(process) is not None  # noqa: E731
        else:
            after = at + chance.randint(1, 3)
            reached = lambda: run.step >= after  # noqa: E731
        if not self._wait(reached, f"start before {fault.kind}"):
            return False
        if fault.moment == "checkpoint":
            folder = run.directory / "checkpoint"
            latest = folder / "latest"
            before = latest.read_text() if latest.exists() else ""
            self._wait(
                lambda: (
                    list(folder.glob("unfinished_*"))
                    or (latest.exists() and latest.read_text() != before)
                ),
                f"checkpoint before {fault.kind}",
            )
        if needed is not None and isinstance(fault, ProcessFault):
            self._wait(lambda: needed(fault.process) is not None, f"process of {fault.kind}")
        return run.code is None

    def _check_end(self, fault: ProcessFault | DiskFault, text: str) -> None:
        run = self.run
        if run.code == 0:
            return
        dead = isinstance(fault, ProcessFault) and fault.process == "launcher"
        if not dead:
            failed = text[text.rfind("The run failed:") :] if "The run failed:" in text else text
            if not text.strip():
                self._violation("silent", f"{fault.kind}: exit code {run.code} and no output")
            elif not re.search(fault.names, failed):
                tail = " | ".join(failed.strip().splitlines()[-4:])[:300]
                self._violation("unnamed", f"{fault.kind}: {tail}")
            elif not re.search(r"fix: |same command resumes", failed) and run.status().get(
                "checkpoint"
            ):
                self._violation("unnamed", f"{fault.kind}: no fix in the message")
        # The ranks of a killed launcher stop after their step and save a checkpoint.
        left = run.left_processes(240.0 if dead else 60.0)
        if left:
            self._violation("left over", f"processes after {fault.kind}: {left}")

    # Damage between two starts

    def _damage(self, fault: DamageFault, chance: random.Random) -> bool:
        run = self.run
        at = run.step
        if not self._wait(lambda: run.step >= at + 3, f"start before {fault.kind}"):
            return False
        if run.code is None:
            assert run.process is not None
            run.process.send_signal(signal.SIGTERM)
            self._wait(lambda: False, "stop by SIGTERM")
        if run.code != INTERRUPTED:
            self._violation("hung", f"SIGTERM: exit code {run.code}")
        path = fault.path(run)
        if path is None:
            return False
        copy = run.folder / "copy"
        shutil.copy2(path, copy)
        fault.apply(path, chance)
        damaged, events, at = path.read_bytes(), len(run.events()), run.step
        run.start()
        if not self._wait(lambda: run.step >= at + 3, f"start after {fault.kind}"):
            shutil.copy2(copy, path)
            return True
        text = run.output() + "\n".join(run.events()[events:])
        named = path.name in text or path.parent.name in text
        if run.code not in (None, 0):
            if not named:
                tail = " | ".join(text.strip().splitlines()[-4:])[:300]
                self._violation("unnamed", f"{fault.kind}: {tail}")
            elif "fix: " not in text:
                self._violation("unnamed", f"{fault.kind}: no fix in the message")
            if run.left_processes():
                self._violation("left over", f"processes after {fault.kind}")
            shutil.copy2(copy, path)
            return True
        kept = path.exists() and path.read_bytes()[: len(damaged)] == damaged
        if not named and kept and not fault.reported_by_readers(run):
            self._violation("silent", f"{fault.kind}: the run continues with {path.name}")
        # Later starts meet an intact log; only its repaired copy can prove the invariants.
        if kept and path.suffix in (".segment", ".jsonl"):
            content = path.read_bytes()[len(damaged) :]
            if path.suffix == ".segment" or fault.flip:
                path.write_bytes(copy.read_bytes() + content)
            if path.name.startswith("outcomes-"):
                remove_repeated(path)
        return True

    # The end

    def _finish(self) -> None:
        """Finish the run, and check what all its starts wrote."""
        run, self.found = self.run, []
        starts = run.starts
        while run.status().get("phase") != "finished" and run.starts < starts + 5:
            if run.code is not None:
                self._restart()
            if not self._wait(lambda: False, "the last start"):
                break
        if run.status().get("phase") != "finished":
            tail = " | ".join(run.output().strip().splitlines()[-4:])[:300]
            self._violation("hung", f"not finished after {run.starts} starts: {tail}")
        else:
            self._check_files()
        if left := run.left_processes():
            self._violation("left over", f"processes: {left}")
        if left := run.left_files():
            self._violation("left over", f"files: {left}")
        for one in self.found:
            print(f"  at the end: {one}", flush=True)
        self._record("run", self.seeds[0], WHOLE_RUN, 0.0)

    def _check_files(self) -> None:
        run = self.run
        try:
            steps = [row["step"] for row in read_metrics(run.directory)]
        except UserError as error:
            self._violation("lost", str(error))
            steps = []
        if steps != list(range(1, run.steps + 1)):
            missing = sorted(set(range(1, run.steps + 1)) - {int(step) for step in steps})
            self._violation("lost", f"metrics.jsonl lacks the steps {missing}")
        try:
            path = newest(run.directory / "checkpoint")
            if path is None:
                self._violation("lost", "there is no checkpoint")
            else:
                require_whole(path, blocks=True)
        except UserError as error:
            self._violation("lost", str(error))
        with contextlib.suppress(SegmentBroken):
            violations = broken(run.directory, self.law)
            noted = any("sample log" in text for text in run.events())
            # Rows of a full disk are lost, which the run's events report.
            self.found += [] if noted and self.loses_rows else violations
        self._replay()

    def _replay(self) -> None:
        """Repeat the last steps on the recorded samples: the weights must be the same bits."""
        run = self.run
        arguments = ["replay", "run", "--from", str(run.steps - 1), "--steps", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_async_rl", *arguments],
            cwd=run.folder,
            env={**os.environ, "TMPDIR": str(run.folder / "tmp")},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if "identical bits" not in done.stdout:
            self._violation("lost", f"mar replay: {(done.stdout + done.stderr)[-300:]}")


def remove_repeated(path: Path) -> None:
    """Remove from a segment of outcomes the rows after the checkpoint with which a later start
    began. That start removes them from every file that is intact, and writes its own rows with
    their numbers; this file was damaged then, so it still has them."""
    own = int(path.stem.partition("-")[2])
    later = [
        pc.min(batch["seq"]).as_py()
        for number in numbers_in(path.parent)
        if number > own
        for _, batch in read_batches(path.parent, "outcomes", number)
        if len(batch)
    ]
    if later:
        batches = [batch for _, batch in read_batches(path.parent, "outcomes", own)]
        kept = [batch.filter(pc.less(batch["seq"], min(later))) for batch in batches]
        replace_whole(path, map(payload_of, kept))


@contextlib.contextmanager
def own_file_system(folder: Path) -> Iterator[bool]:
    """Give `folder`/run a small file system of its own, which can be full and whose files can be
    immutable. Yield False if this is not permitted here: without it, no disk fault is possible."""
    place, image = folder / "run", folder / "image"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(SPACE_MIB * 2**20)
    commands = (
        ["mkfs.ext4", "-q", "-m", "0", image],
        ["mount", "-o", "loop", image, place],
    )
    made = all(
        shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0
        for command in commands
    )
    try:
        if made:
            (place / "lost+found").rmdir()
        yield made
    finally:
        if made:
            subprocess.run(["umount", "--lazy", place], check=True)


def run_faults(options: argparse.Namespace, deadline: float) -> int:
    """Inject `options.faults` faults; return the number of broken invariants."""
    seed = options.seed or record.next_seed("process", options.record or record.FILE)
    end, injected, violations = seed + options.faults, 0, 0
    while seed < end and time.monotonic() < deadline:
        seeds = range(seed, min(seed + PER_CAMPAIGN, end))
        # A short path, because Ray's sockets have long ones.
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with own_file_system(folder) as own:
                if not own:
                    print("no file system of its own (needs root): no disk faults", flush=True)
                campaign = Campaign(folder, seeds, options, disk=own)
                campaign(deadline)
        injected += campaign.injected
        violations += campaign.violations
        seed = seeds[-1] + 1
    print(f"{injected} faults of live runs, {violations} violations", flush=True)
    return violations
