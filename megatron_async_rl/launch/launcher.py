"""Launcher of a run: starts the ranks of this machine, shows progress, and ends every process.
Over several machines, one launcher runs on each.

The ranks run under torchrun in a session of their own, so Ctrl-C reaches only this process. It
requests a stop with a file (`RUN/stop`) that rank 0 reads between two steps; a second Ctrl-C kills
the run. A run without progress is ended, too, and its report states who waited for what.

Invariants:
- however the run ends, no process that it started remains: each has the run's id in its environment
  and is found by it. No temporary files remain, either (watchdog/run_folder.py);
- however the run ends, `RUN/status.json` then has a final phase and, for a failure, names the
  process and the signal that ended it, if one did;
- on one machine no process that it starts listens beyond 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from megatron_async_rl.config.durable import PARTIAL, write_file
from megatron_async_rl.config.load import dump
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.ending import (
    INTERRUPTED,
    deferred_signals,
    explain_failure,
    print_plain,
    record_end,
    record_stall,
    torchrun_failure,
)
from megatron_async_rl.launch.rendezvous import PeerNodes, RankStore
from megatron_async_rl.launch.run_lock import (
    FIX,
    RunDirectoryError,
    concerns,
    lock_run_dir,
    usable,
)
from megatron_async_rl.metrics.log import FILE as METRICS
from megatron_async_rl.metrics.log import cut_unreadable
from megatron_async_rl.metrics.trackers import IDENTITIES
from megatron_async_rl.plan.layout import PLANNED_DEVICE
from megatron_async_rl.report.progress import Progress, print_summary
from megatron_async_rl.rollout.allocator import set_options_of_ranks
from megatron_async_rl.rollout.cluster import prepare_environment, stay_on_this_machine
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.plugin import serving_engines
from megatron_async_rl.samples.frames import FOLDER as SAMPLES
from megatron_async_rl.samples.frames import MARK_FILE
from megatron_async_rl.watchdog import stall, watch
from megatron_async_rl.watchdog.events import (
    FINAL,
    STATUS_FILE,
    EventReader,
    Status,
    read_status,
    record_failure,
)
from megatron_async_rl.watchdog.preloaded import VARIABLE as PRELOADED
from megatron_async_rl.watchdog.preloaded import serving
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE, STOPPED, of_run
from megatron_async_rl.watchdog.progress_monitor import FOLDER
from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY, RunFolder, remove_stale, run_folder
from megatron_async_rl.watchdog.watchdog import Watchdog

RANK_IMPORTS = "megatron_async_rl.train"
"""Module that imports all modules that a rank imports."""
POLL_S = 0.25
KILL_GRACE_S = 10.0
CLOSING_S = 30.0
"""Longest time for a failed rank to stop its engines and itself."""
START_KEY = "rollout.start_timeout_s"
START_S = 600.0
"""Longest start of a run without engines, unless `watchdog.timeout_s` is longer; with engines,
START_KEY is the limit."""


def launch(
    config: Config,
    console: Console,
    nodes: Nodes,
    peers: PeerNodes,
    rank_environment: Mapping[str, str],
) -> int:
    """Run this machine's share of `config` until it finishes, fails or is stopped by Ctrl-C. Return
    the process exit code.

    `rank_environment`: default values of the ranks' environment variables.

    0: finished; 1: failed; 130: stopped by Ctrl-C, also after a clean stop (so that a script stops,
    too). SIGTERM and a closed terminal count as Ctrl-C. Raises RunDirectoryError, NodesError.
    """
    run_dir = config.run.dir
    # Lock and temporary folder are released only after every process has ended.
    with contextlib.ExitStack() as held:
        lock = None
        if nodes.rank == 0:
            with usable(run_dir):
                # Before any file in the directory is read or changed.
                lock = held.enter_context(lock_run_dir(run_dir))
                _put_aside(run_dir, console)
        # Repeated under the lock, because another run may have begun since the first check.
        refuse_second_run(config)
        if already_finished(config, console):
            return 0
        start_s = config.rollout.start_timeout_s if config.rollout is not None else START_S
        # Otherwise weight versions of killed runs would fill /dev/shm.
        remove_stale(SHARED_MEMORY)
        folder = held.enter_context(run_folder())
        if nodes.rank == 0:
            with usable(run_dir):
                _prepare_directory(config)
        if nodes.count > 1:
            console.print(
                f"node {nodes.rank} of {nodes.count}: waiting for the other nodes, up to"
                f" {start_s:g} s"
            )
        store = peers.meet(config, start_s)
        ranks = LocalRanks(config, nodes, store, rank_environment, folder, lock)
        exit_code = _run(ranks, console, start_s)
    if exit_code == 0:
        ended = read_status(run_dir)
        # torchrun's exit code 0 also follows a stop.
        if ended is not None and ended.phase == "finished":
            if config.run.numerics is not None:
                return 0  # `mar verify` shows the result
            if nodes.rank == 0:
                _report(run_dir, console)
            print_summary(run_dir, console)
            return 0
        text = f"Stopped at step {ended.step if ended else 0} of {config.run.last_step}"
        if config.run.replay is None and config.run.numerics is None:
            text += f"; the same command resumes. Run directory: {run_dir}"
        print_plain(console, text)
        return INTERRUPTED
    return exit_code


def _put_aside(run_dir: Path, console: Console) -> None:
    """Move lines that a crash left unreadable from the ends of the logs, and report them."""
    for file, count in cut_unreadable(run_dir).items():
        lines = "1 line" if count == 1 else f"{count} lines"
        print_plain(
            console,
            f"note: {lines} at the end of {run_dir / file} cannot be read, as after a crash or on a"
            f" full disk: moved to {Path(file).stem}.cut.jsonl",
        )


def refuse_second_run(config: Config) -> None:
    """Raise RunDirectoryError if `run.resume: never` finds steps of a run."""
    # Metrics are the first file that a completed step writes.
    if config.run.resume == "never" and (config.run.dir / METRICS).exists():
        raise RunDirectoryError.at(
            config.run.dir,
            "already holds a run, and run.resume is never",
            "choose another run.dir or run.resume: auto",
        )


def finished_before(config: Config, console: Console) -> bool:
    """Return `already_finished` for a directory that this process has not locked yet."""
    status = read_status(config.run.dir)
    if status is None or status.phase != "finished" or status.step < config.run.last_step:
        return False
    with lock_run_dir(config.run.dir):
        _put_aside(config.run.dir, console)
        return already_finished(config, console)


def already_finished(config: Config, console: Console) -> bool:
    """Return True, and show the summary, if the run in `run.dir` has made all its steps."""
    status = read_status(config.run.dir)
    if status is None or status.phase != "finished" or status.step < config.run.last_step:
        return False
    print_plain(
        console,
        f"{config.run.dir} already holds this run, finished at step {status.step}. "
        "To continue, raise run.steps; to repeat, change run.dir.",
    )
    print_summary(config.run.dir, console)
    return True


@dataclass(frozen=True)
class LocalRanks:
    """Start of this machine's ranks. `store`: rendezvous of the ranks. `lock`: a descriptor that
    torchrun holds, too, so that the directory stays locked while there are ranks."""

    config: Config
    nodes: Nodes
    store: RankStore
    environment: Mapping[str, str]
    folder: RunFolder
    lock: int | None

    @property
    def log(self) -> Path:
        name = "torchrun.log" if self.nodes.rank == 0 else f"torchrun_{self.nodes.rank}.log"
        return self.config.run.dir / "logs" / name


def _run(ranks: LocalRanks, console: Console, start_s: float) -> int:
    """Run the ranks, from their start to the end of the last process."""
    config, nodes = ranks.config, ranks.nodes
    # The id marks every process that this launcher may kill.
    run_dir, run_id = config.run.dir, uuid.uuid4().hex  # each machine ends its own processes
    earlier, stall_found, exit_code, error = read_status(run_dir), None, 1, None
    # From here on the loop handles signals, so that the cleanup below always runs.
    with deferred_signals() as interrupts, contextlib.ExitStack() as held:
        try:
            process = _start_ranks(ranks, run_id, held)
            progress = Progress(run_dir, config.run.last_step, console)
            watchdog = Watchdog(
                run_dir,
                run_id,
                timeout_s=config.watchdog.timeout_s,
                start_s=start_s,
                # Without engines the section `rollout` is absent.
                start_key="watchdog.timeout_s" if config.rollout is None else START_KEY,
                ranks=config.policy.parallel.ranks,
                node=nodes.rank,
                nodes=nodes.count,
            )
            with contextlib.closing(progress):
                exit_code, stall_found = _watch(
                    process,
                    earlier,
                    progress,
                    watchdog,
                    run_dir,
                    console,
                    nodes,
                    interrupts,
                    resumes=config.run.replay is None,
                )
            if exit_code == 1 and (failure := torchrun_failure(process, ranks.log)) is not None:
                record_failure(run_dir, failure)
        # Errors of the run directory are reported after the processes were ended.
        except BaseException as raised:
            error = raised
            if not isinstance(raised, OSError) or not concerns(raised, run_dir):
                raise
        finally:
            # First, because a rank that still runs could write a status after this one.
            _kill_leftovers(run_id)
            # After all ranks have ended, so none writes a status. On a full, lost or damaged disk
            # the status stays as it is; the terminal shows the result in any case.
            with contextlib.suppress(OSError, UserError):
                if stall_found is not None:
                    record_stall(run_dir, stall_found)
                record_end(
                    run_dir, config.run.last_step, nodes.rank, exit_code, earlier, error, interrupts
                )
            watch.stop()
    if error is not None:
        text = f"The run was ended because its directory cannot be used: {error}\n  fix: {FIX}"
        print_plain(console, text)
    elif exit_code not in (0, INTERRUPTED):
        with contextlib.suppress(OSError):  # the directory was lost since
            explain_failure(run_dir, console)
    return exit_code


def _prepare_directory(config: Config) -> None:
    run_dir = config.run.dir
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    # Requests to the previous run must not stop or resize this one.
    for asked_of_the_run_before in (watch.STOP, watch.ENGINES):
        (run_dir / asked_of_the_run_before).unlink(missing_ok=True)
    resolved = run_dir / "config.yaml"
    text = dump(config).encode("utf-8")
    before = resolved.read_bytes() if resolved.exists() else text
    if before != text:
        numbers = [
            int(number)
            for path in run_dir.glob("config.*.yaml")
            if (number := path.name.split(".")[1]).isdigit()
        ]
        # Kept, because steps of the run were made with the earlier config.
        write_file(run_dir / f"config.{max(numbers, default=-1) + 1}.yaml", before)
    write_file(resolved, text)
    for log in (run_dir / "logs").glob("*.log"):
        # find_cause must not find the cause of an earlier failure.
        log.rename(log.with_suffix(".log.old"))
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
    written_whole = (stall.FILE, STATUS_FILE, MARK_FILE, IDENTITIES, f"{watch.ENGINES}.", "config.")
    for files in (*written_whole, f"{SAMPLES}/"):
        for left in run_dir.glob(f"{files}*{PARTIAL}"):
            left.unlink(missing_ok=True)
    (run_dir / stall.FILE).unlink(missing_ok=True)


def environment_of_ranks(
    given: Mapping[str, str], run_id: str, wanted: Mapping[str, str], *, nodes: int = 1
) -> dict[str, str]:
    """Return the environment of ranks: `given` with the variables that they need. `wanted`: default
    values of this machine's variables. `nodes`: number of machines with ranks."""
    # The user's variables override defaults, and the run's id overrides both.
    environment = {**wanted, **given, RUN_ID_VARIABLE: run_id}
    for name in [one for one in environment if one.startswith(PRELOADED)]:
        del environment[name]  # servers of another run, whose forks would have its id
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault(
        "SPT_NOENV", "1"
    )  # a process that sets its own title would erase the id in its environment
    prepare_environment(environment)
    if environment.get(PLANNED_DEVICE) != "cuda":
        # Ranks on the CPU are forked, and torch's optimizers query CUDA, which a fork cannot
        # initialise.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if nodes == 1:
        stay_on_this_machine(environment)
    # All files were fetched before; a library must not wait for a hub.
    environment.setdefault("HF_HUB_OFFLINE", "1")
    set_options_of_ranks(environment)
    return environment


def _start_ranks(
    ranks: LocalRanks, run_id: str, held: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    """Start torchrun. `held`: closed after the ranks have ended."""
    config, nodes = ranks.config, ranks.nodes
    command = [
        sys.executable,
        "-m",
        "megatron_async_rl.launch.torchrun",
        *ranks.store.torchrun(nodes, config.policy.parallel.ranks),
        "-m",
        "megatron_async_rl.train",
        str(config.run.dir / "config.yaml"),
    ]
    environment = environment_of_ranks(os.environ, run_id, ranks.environment, nodes=nodes.count)
    ranks.folder.set_in(environment)
    inherited = [*ranks.folder.locks, *([] if ranks.lock is None else [ranks.lock])]
    inherited += _preload(ranks, environment, held)
    with contextlib.ExitStack() as until_started:
        if ranks.store.listener is not None:
            # From then on only torchrun has the socket: the port closes with torchrun.
            inherited.append(until_started.enter_context(ranks.store.listener).fileno())
        log = until_started.enter_context(open(ranks.log, "wb"))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C reaches only the launcher.
            start_new_session=True,
            pass_fds=inherited,
        )


def _preload(
    ranks: LocalRanks, environment: MutableMapping[str, str], held: contextlib.ExitStack
) -> list[int]:
    """Start the servers from which ranks and engines are forked, in parallel, and set their
    addresses in `environment`. Returns descriptors that keep the servers alive.

    GPU runs have no servers: some imports initialise CUDA, which a fork could not use."""
    config, folder = ranks.config, ranks.folder.path
    # A CUDA context does not survive a fork.
    if environment.get(PLANNED_DEVICE) == "cuda":
        return []
    logs = config.run.dir / "logs"
    log = logs / f"preloaded_ranks{ranks.log.stem.removeprefix('torchrun')}.log"
    servers: list[contextlib.AbstractContextManager[int]] = [
        serving("ranks", RANK_IMPORTS, environment, {}, folder, log)
    ]
    # Engines of a Ray that already runs inherit nothing from this process.
    if config.rollout and config.has_engines and not environment.get("RAY_ADDRESS"):
        spec = EngineSpec(
            index=0,
            model_path=config.model.path,
            dtype=config.engine_dtype,
            rollout=config.rollout,
            seed=config.run.seed,
            device="cpu",
            log_dir=logs,
            transport=config.weights.transport,
        )
        log = logs / "preloaded_engines.log"
        servers.append(serving_engines(spec, environment, folder, log))
    return [held.enter_context(server) for server in servers]


def _watch(
    process: subprocess.Popen[bytes],
    earlier: Status | None,
    progress: Progress,
    watchdog: Watchdog,
    run_dir: Path,
    console: Console,
    nodes: Nodes,
    interrupts: Sequence[int],
    *,
    resumes: bool,
) -> tuple[int, stall.Stall | None]:
    """Watch the run. Return the exit code and, if the run stalled, the stall. `earlier`: status
    from before the ranks started; they may have written another one by now. `resumes`: False for a
    replay, which starts from its first step."""
    stops = 0
    failed_at = float("inf")
    events = EventReader(run_dir)
    # Other nodes' torchrun may end before rank 0 has written checkpoint and export.
    while process.poll() is None or (
        process.returncode == 0 and nodes.rank > 0 and not _over(run_dir)
    ):
        progress.update()
        for text in events.new():
            print_plain(console, f"note: {text}")
        status = read_status(run_dir)
        if len(interrupts) > stops:
            stops = len(interrupts)
            # Nothing to save yet; with several machines, others may have begun a step.
            if nodes.count == 1 and (status in (None, earlier) or status.phase == "starting"):
                console.print(
                    "Stopped before a step was made: nothing is lost, and the same command starts"
                    " it again."
                )
                return INTERRUPTED, None
            if stops > 1:
                console.print(
                    "Killed. The last checkpoint is intact; the same command resumes from it."
                    if resumes
                    else "Killed. A replay cannot be resumed; the same command starts a new one."
                )
                return INTERRUPTED, None
            # A file, because rank 0 may run on another machine with the same file system.
            (run_dir / watch.STOP).touch()
            console.print("Stopping after this step. Ctrl-C again kills at once.")
        if status is not None and status != earlier and status.phase == "failed":
            failed_at = min(failed_at, time.monotonic())
            # Rank 0 ends its engines itself; after CLOSING_S this launcher does.
            if time.monotonic() - failed_at > CLOSING_S:
                return 1, None
        elif (stall_found := watchdog.look()) is not None:
            return 1, stall_found
        time.sleep(POLL_S)
    progress.update()
    return (0 if process.returncode == 0 else 1), None


def _over(run_dir: Path) -> bool:
    """Return True once rank 0 has recorded the end of the run."""
    status = read_status(run_dir)
    return status is not None and status.phase in FINAL


def _kill_leftovers(run_id: str) -> None:
    """Kill every process of the run and release the memory of its weights. A stopped process would
    not react to SIGTERM."""
    # SIGTERM first, so that vLLM can release its shared memory.
    for send in (psutil.Process.terminate, psutil.Process.kill):
        alive = of_run(run_id)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                (psutil.Process.kill if process.status() in STOPPED else send)(process)
        psutil.wait_procs(alive, timeout=KILL_GRACE_S)
    remove_stale(SHARED_MEMORY)


def _report(run_dir: Path, console: Console) -> None:
    """Write the report. A run counts as finished even if this fails."""
    # Imported here, because it loads matplotlib, which would delay the start by a second.
    from megatron_async_rl.report.report import write_report

    try:
        write_report(run_dir)
    except UserError as error:
        print_plain(console, f"The report was not written. {error}")
