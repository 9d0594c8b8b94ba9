"""Run directory with every file that a command reads, and functions that damage a file."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import code_digests
from megatron_async_rl.metrics.log import digest_of_step
from megatron_async_rl.policy.checkpoint_folder import CONFIG_FILE, RECORD_FILE
from megatron_async_rl.policy.digested_folder import DIGESTS, StoredFile, described
from megatron_async_rl.samples.frames import read_mark
from megatron_async_rl.watchdog.events import Status, write_status
from tests.json_lines import write_lines
from tests.logged_samples import logged_run
from tests.written_run import write_run

STEPS = 5


def damageable_run(folder: Path) -> Path:
    """Write a run that was stopped after STEPS steps, with a checkpoint, samples and an exported
    model. Return its config file; the run directory is `out`, next to the config."""
    config = write_run(folder)
    loaded = load(config, ["run.steps=9", "checkpoint.every=2"])
    config.write_text(dump(loaded))
    run_dir = loaded.run.dir
    logged_run(run_dir)
    (run_dir / "config.yaml").write_text(dump(loaded))
    rows = [{"step": step, "version": step, "time": step} for step in range(1, STEPS + 1)]
    write_lines(run_dir / "metrics.jsonl", [{**row, "time/step_s": 0.5} for row in rows])
    write_lines(run_dir / "eval.jsonl", [{"version": 0, "time": 0.0, "mean_reward": 0.5}])
    write_lines(run_dir / "events.jsonl", [{"time": 1.0, "text": "an engine was lost"}])
    write_lines(run_dir / "anomalies.jsonl", [{"step": 3, "kind": "gradient"}])
    spans = [{"state": "training", "for": "", "start": t, "end": t + 0.5} for t in range(STEPS)]
    (run_dir / "timeline").mkdir()
    write_lines(run_dir / "timeline" / "rank 0.jsonl", spans)
    for name in ("logs", "watch"):
        (run_dir / name).mkdir()
        (run_dir / name / "rank_0.log").write_text("a line\n")
    (run_dir / "simulation.json").write_text("[]")
    (run_dir / "lock").write_text("1 elsewhere\n")
    save(loaded, STEPS)
    status = Status(phase="stopped", step=STEPS, steps=9, time=STEPS, checkpoint=name_of(STEPS))
    write_status(run_dir, status)
    shutil.copytree(folder / "model", run_dir / "hf")
    files = {one.name: StoredFile.of(one.read_bytes()) for one in (run_dir / "hf").iterdir()}
    (run_dir / "hf" / DIGESTS).write_text(described({}, files))
    return config


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def save(config: Config, step: int) -> Path:
    """Write the files of a checkpoint that are read without torch; return its folder."""
    run_dir = config.run.dir
    folder = run_dir / "checkpoint" / name_of(step)
    (folder / "sharded").mkdir(parents=True)
    mark = read_mark(run_dir)
    record = {
        "metrics": {"step": step, "digest": digest_of_step(run_dir, step)},
        "samples": mark.as_json() if mark is not None else None,
        "code": code_digests(config.model_dump(mode="json")),
    }
    contents = {
        CONFIG_FILE: dump(config).encode(),
        RECORD_FILE: json.dumps(record).encode(),
        "sharded/.metadata": b"index",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    stored = {name: StoredFile.of(content) for name, content in contents.items()}
    about = {"step": step, "model_path": str(config.model.path), "dtype": "float32"}
    (folder / "about.json").write_text(described(about, stored))
    (folder.parent / "latest").write_text(folder.name)
    return folder


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        remove(path)
        make(path)

    return damage


def _torn(path: Path) -> None:
    """Truncate a file, or remove all but the first entry of a folder."""
    if path.is_dir():
        for one in sorted(path.iterdir())[1:]:
            remove(one)
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2 + 1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": remove,
    "a folder": _replaced(lambda path: path.mkdir()),
    "empty": _replaced(lambda path: path.touch()),
    "text": _replaced(lambda path: path.write_text("[1, {\n")),
    "another JSON": _replaced(lambda path: path.write_text('{"step": "x", "a": [null]}\n')),
    "binary": _replaced(lambda path: path.write_bytes(bytes(range(256)) * 3)),
    "torn": _torn,
    "dangling": _replaced(lambda path: path.symlink_to(path.with_name("gone"))),
    "looping": _replaced(lambda path: path.symlink_to(path)),
    "locked": lambda path: path.chmod(0),
}


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextlib.contextmanager
def permissions_count() -> Iterator[None]:
    """Enforce file modes for this thread, even as root, by dropping the capabilities that override
    them (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, original = _Header(0x20080522, 0), (_Data * 2)()
    assert libc.capget(ctypes.byref(header), original) == 0
    reduced = (_Data * 2)(*original)
    reduced[0].effective &= ~0b110
    assert libc.capset(ctypes.byref(header), reduced) == 0
    try:
        yield
    finally:
        assert libc.capset(ctypes.byref(header), original) == 0
