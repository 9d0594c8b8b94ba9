"""A run's temporary files are in a folder of its own, which goes with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog import run_folder as module
from megatron_async_rl.watchdog.run_folder import (
    LONGEST,
    SHARED_MEMORY,
    VARIABLE,
    remove_stale,
    remove_stale_folders,
    remove_stale_shared_memory,
    run_folder,
)

OWNER = """
import os, sys, time
from megatron_async_rl.watchdog.run_folder import name_shared_memory, use_run_folder
use_run_folder()
name_shared_memory()
import multiprocessing, tempfile
from multiprocessing.shared_memory import SharedMemory
context = multiprocessing.get_context("spawn")
socket = open(tempfile.gettempdir() + "/socket", "w")
kept = SharedMemory(create=True, size=64), context.Lock(), socket
print(os.environ["TMPDIR"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR, and the folder of links."""
    (tmp_path / "t").mkdir()
    (tmp_path / "s").mkdir()
    for name in ("RAY_TMPDIR", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(module, "SHORT", tmp_path / "s")
    monkeypatch.setattr(module, "LONGEST", 1000)
    return tmp_path / "t"


def owner(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder and shared memory of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "TMPDIR": str(base)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def in_shared_memory(folder: Path) -> list[str]:
    return sorted(path.name for path in SHARED_MEMORY.iterdir() if folder.name[4:] in path.name)


def test_a_folder_goes_with_its_run_and_is_where_its_processes_write(base: Path) -> None:
    with run_folder() as folder:
        environment = {"HOME": "/root"}
        folder.set_in(environment)
        names = ("TMPDIR", "RAY_TMPDIR", VARIABLE)
        assert {environment[name] for name in names} == {str(folder.path)}
        assert folder.path.parent == base
        assert folder.path.stat().st_mode & 0o077 == 0, "nobody else looks into it"
        (folder.path / "ray" / "session").mkdir(parents=True)
        assert remove_stale_folders() == []
    assert list(base.iterdir()) == []
    assert in_shared_memory(folder.path) == []


def test_what_a_killed_process_left_goes_with_the_next_start_and_a_live_one_keeps_its_own(
    base: Path,
) -> None:
    """Its folder, its shared memory and its semaphores."""
    (dead, left), (live, kept) = owner(base), owner(base)
    try:
        for folder in (left, kept):
            assert len(in_shared_memory(folder)) == 3, "memory, a semaphore and the lock"
        # Python's own tracker would remove what is in shared memory: it is killed, too.
        for child in psutil.Process(dead.pid).children():
            child.kill()
        dead.kill()
        dead.wait()
        with run_folder():
            assert not left.exists()
            assert in_shared_memory(left) == []
            assert (kept / "socket").exists()
            assert len(in_shared_memory(kept)) == 3
    finally:
        for process in (dead, live):
            process.kill()
            process.communicate()
    deadline = time.monotonic() + 600
    while not (remove_stale_folders() or not kept.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    remove_stale_shared_memory(SHARED_MEMORY)
    assert in_shared_memory(kept) == []


def test_a_process_that_ends_well_takes_its_folder_along(base: Path) -> None:
    process, folder = owner(base)
    assert folder.exists()
    process.communicate()
    assert process.returncode == 0
    assert not folder.exists()
    assert in_shared_memory(folder) == []


def test_a_killed_engines_sandboxes_go_with_its_run(base: Path) -> None:
    """Root's programs cannot pass through the run's own folder, so theirs is next to it."""
    source = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from megatron_async_rl.watchdog.run_folder import public_folder\n"
        "place = public_folder(Path(sys.argv[1]))\n"
        "(place / 'mar-sandbox-x').mkdir()\n"
        "os.chdir(place / 'mar-sandbox-x')\n"
        "for _ in range(2000):\n"
        "    os.mkdir('d'); os.chdir('d')\n"
        "print(place, flush=True)\n"
        "sys.stdin.read()"
    )
    with run_folder():
        engine = subprocess.Popen(
            [sys.executable, "-c", source, module.SHORT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdout is not None
        place = Path(engine.stdout.readline().strip())
        assert place.stat().st_mode & 0o777 == 0o711
        assert remove_stale_folders() == [], "its engine lives"
        engine.kill()
        engine.wait()
        assert place.parent == module.SHORT
        assert place.exists()
    assert list(module.SHORT.iterdir()) == []


def test_what_the_workers_of_a_killed_engine_shared_goes_with_its_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    for name in ("vllm_dist_ab-tp:0-[0-1]-cpushm_1", "vllm_dist_cd-tp:0-[0-1]-cpushm_1"):
        (tmp_path / name).touch()
    with run_folder() as folder:
        (folder.path / "vllm_dist_ab").touch()
    assert [one.name for one in tmp_path.glob("vllm*")] == ["vllm_dist_cd-tp:0-[0-1]-cpushm_1"]


def test_a_public_folder_goes_with_its_process(base: Path) -> None:
    source = (
        "import sys; from pathlib import Path\n"
        "from megatron_async_rl.watchdog.run_folder import public_folder\n"
        "assert public_folder(Path(sys.argv[1])) is public_folder(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", source, base], check=True)
    assert list(base.iterdir()) == []


def test_a_folder_of_somebody_else_is_left_alone(base: Path) -> None:
    for name in ("mar-01234567", "mar-notes", "ray"):
        (base / name).mkdir()
        (base / name / "file").touch()
    assert remove_stale_folders() == []
    assert len(list(base.iterdir())) == 3


def test_a_long_tmpdir_is_used_by_a_short_link(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gives each job such a folder; Ray refuses socket paths over 107 bytes."""
    long = base / ("job_" + "1234567890" * 8)
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(module, "LONGEST", len(str(base.parent / "s")) + len("/mar-01234567"))
    long.mkdir()
    with run_folder() as folder:
        assert folder.path.parent == base.parent / "s"
        assert folder.path.resolve().parent == long
        (folder.path / "file").touch()
    assert list(long.iterdir()) == list((base.parent / "s").iterdir()) == []


def test_the_link_of_a_killed_run_goes_whether_slurm_has_removed_its_folder_or_not(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = base.parent / "s"
    (links / "mar-00000000").symlink_to(base / "mar-00000000")
    left = base.parent / "gone" / "mar-11111111"
    left.mkdir(parents=True)
    (left / module.LOCK).touch()
    (links / "mar-11111111").symlink_to(left)
    assert remove_stale_folders() == [left]
    assert list(links.iterdir()) == list(left.parent.iterdir()) == []


def test_links_and_folders_of_somebody_else_stop_no_start(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They stay: in a circle, where this user may not look (here: a name that is too long), and a
    folder where a file of weights would be."""
    circle, beyond = base / "mar-00000001", base / "mar-00000002"
    circle.symlink_to(circle)
    beyond.symlink_to("x" * 300)
    with run_folder():
        pass
    assert sorted(base.iterdir()) == [circle, beyond]
    shared = tmp_path_factory.mktemp("shared")
    (shared / "mar-weights-folder").mkdir()
    (shared / "mar-weights-link").symlink_to("nowhere")
    (shared / "__KMP_REGISTERED_LIB_4194999_0").mkdir()
    (shared / f"__KMP_REGISTERED_LIB_4194999_{os.getuid()}").mkdir(exist_ok=True)
    assert remove_stale(shared) == []


def test_a_tmpdir_that_cannot_be_used_is_refused_by_name(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(base / "file"))
    with (
        pytest.raises(UserError, match=r"RAY_TMPDIR\n  .*file cannot hold a run's temporary files"),
        run_folder(),
    ):
        pass
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(module, "LONGEST", LONGEST)
    monkeypatch.setattr(module, "SHORT", base / "file")
    longer = base / ("d" * 50)
    longer.mkdir()
    monkeypatch.setenv("TMPDIR", str(longer))
    monkeypatch.setattr(tempfile, "tempdir", None)
    words = r"TMPDIR\n  .* is too long for the paths of Ray's sockets .*\n  fix: .*at most 26 bytes"
    with pytest.raises(UserError, match=words), run_folder():
        pass
    assert list(longer.iterdir()) == []


def test_the_longest_socket_of_ray_fits_the_longest_folder() -> None:
    from ray._private.utils import validate_socket_filepath

    session = "session_2026-12-31_23-59-59_999999_4194304"
    for length, fits in ((LONGEST, True), (LONGEST + 1, False)):
        path = f"/{'f' * (length - 1)}/ray/{session}/sockets/plasma_store"
        if fits:
            validate_socket_filepath(path)
            continue
        with pytest.raises(OSError, match="cannot exceed 107 bytes"):
            validate_socket_filepath(path)


def test_openmp_s_file_of_a_dead_process_goes(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    files = {
        name: tmp_path / f"__KMP_REGISTERED_LIB_{pid}_{user}"
        for name, pid, user in (
            ("dead", ended.pid, os.getuid()),
            ("live", os.getpid(), os.getuid()),
            ("another's", ended.pid, os.getuid() + 1),
        )
    }
    for file in files.values():
        file.touch()
    assert remove_stale(tmp_path) == [files["dead"]]


def test_a_public_folder_can_be_passed_through_and_is_removed_at_the_end(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(module.atexit, "register", lambda *given: at_exit.append(given))
    stale = base / "mar-00000000"
    stale.mkdir()
    (stale / module.LOCK).touch()
    module.public_folder.cache_clear()
    place = module.public_folder(base)
    assert module.public_folder(base) == place, "one for a process"
    assert not stale.exists()
    assert place.parent == base
    assert module._NAME.fullmatch(place.name)
    assert place.stat().st_mode & 0o777 == 0o711
    ((remove, folder, owner),) = at_exit
    assert (folder.path, folder.place, len(folder.locks)) == (place, place, 1)
    remove(folder, owner + 1)
    assert place.exists(), "a fork removes nothing"
    remove(folder, owner)
    assert not place.exists()
    module.public_folder.cache_clear()


def test_only_a_link_that_certainly_leads_nowhere_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert module._leads_nowhere(link)
    (tmp_path / "target").mkdir()
    assert not module._leads_nowhere(link)

    def refuse(path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(module.os, "stat", refuse)
    assert not module._leads_nowhere(link)


def test_a_file_that_is_gone_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, files = os.getuid(), []
    for pid, owner in ((10, user), (11, user), (12, user + 1), (13, user)):
        files.append(tmp_path / f"__KMP_REGISTERED_LIB_{pid}_{owner}")
        files[-1].touch()
    (tmp_path / "__KMP_REGISTERED_LIB_9_x").touch()

    def condition(pid: int, written: float) -> str | None:
        if pid == 10:
            raise PermissionError
        return "sleeping" if pid == 13 else None

    monkeypatch.setattr(module, "condition", condition)
    assert remove_stale(tmp_path) == [files[1]]
    assert [path.exists() for path in files] == [True, False, True, True]


def test_what_python_cannot_remove_programs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(module.subprocess, "run", lambda given, **_: commands.append(given))
    (tmp_path / "a" / "b").mkdir(parents=True)
    module.remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert commands == []
    (tmp_path / "c").symlink_to("nowhere")

    def deep(*_: Any, **__: Any) -> None:
        raise RecursionError

    monkeypatch.setattr(module.shutil, "rmtree", deep)
    module.remove_tree(tmp_path / "c")
    end = ["--", tmp_path / "c"]
    assert commands == [["chmod", "-R", "u+rwx", *end], ["rm", "-rf", *end]]
