"""Bucket files: what was written is what is read, and nothing is left behind."""

import errno
import os
import pickle
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_async_rl.watchdog.events import failure_of
from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY, WEIGHTS_PREFIX, remove_stale
from megatron_async_rl.weights import shared_memory
from megatron_async_rl.weights.manifest import BucketRef
from megatron_async_rl.weights.shared_memory import (
    BucketFile,
    BucketReader,
    BucketWriter,
)
from megatron_async_rl.weights.transport import TensorSpec, entries_of, size_of


def written(directory: Path, **tensors: torch.Tensor) -> tuple[BucketFile, BucketRef]:
    entries = entries_of([TensorSpec.of(name, tensor) for name, tensor in tensors.items()])
    file = BucketFile(directory, size_of(entries))
    nbytes = sum(entry.nbytes for entry in entries)
    ref = BucketRef(path=file.path, size=file.size, nbytes=nbytes, entries=entries)
    fill(ref, **tensors)
    return file, ref


def fill(ref: BucketRef, **tensors: torch.Tensor) -> None:
    writer = BucketWriter()
    for entry in ref.entries:
        writer.view(ref, entry).copy_(tensors[entry.name].detach())


def leftovers(directory: Path) -> list[Path]:
    return list(directory.glob(f"{WEIGHTS_PREFIX}*"))


def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sent = {
        "odd": torch.randn(3, 7),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "bytes": torch.arange(13, dtype=torch.uint8),
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(float("nan")),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "empty": torch.empty(0, 3),
    }
    _file, ref = written(tmp_path, **sent)
    received = dict(BucketReader().read(ref))
    assert list(received) == list(sent)
    assert ref.nbytes == sum(t.numel() * t.element_size() for t in sent.values())
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(
            received[name].contiguous().view(-1).view(torch.uint8),
            tensor.detach().contiguous().view(-1).view(torch.uint8),
        )


def test_tensors_stay_readable_after_the_file_is_gone(tmp_path: Path) -> None:
    file, ref = written(tmp_path, a=torch.full((1000,), 7.0))
    received = dict(BucketReader().read(ref))
    file.close()
    assert not leftovers(tmp_path)
    assert torch.equal(received["a"], torch.full((1000,), 7.0))


def test_a_reader_that_writes_changes_no_other_readers_tensors(tmp_path: Path) -> None:
    _file, ref = written(tmp_path, a=torch.zeros(4))
    dict(BucketReader().read(ref))["a"].fill_(1.0)
    assert torch.equal(dict(BucketReader().read(ref))["a"], torch.zeros(4))


def test_a_reader_sees_what_a_file_was_filled_with_again(tmp_path: Path) -> None:
    _file, ref = written(tmp_path, a=torch.zeros(4))
    reader = BucketReader()
    assert torch.equal(dict(reader.read(ref))["a"], torch.zeros(4))
    fill(ref, a=torch.ones(4))
    assert torch.equal(dict(reader.read(ref))["a"], torch.ones(4))


def test_a_reader_holds_the_memory_of_no_file_that_is_out_of_use(tmp_path: Path) -> None:
    _first, one = written(tmp_path, a=torch.zeros(4))
    _second, other = written(tmp_path, a=torch.zeros(4))
    reader = BucketReader()
    for ref in (one, other):
        list(reader.read(ref))
    reader.keep({other.path})
    mapped = Path("/proc/self/maps").read_text()
    assert other.path in mapped
    assert one.path not in mapped


def test_a_file_goes_with_its_writer(tmp_path: Path) -> None:
    file, _ref = written(tmp_path, a=torch.zeros(4))
    assert len(leftovers(tmp_path)) == 1
    del file
    assert not leftovers(tmp_path)


def test_a_directory_without_room_is_named_and_keeps_nothing(tmp_path: Path, monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    where = f"{tmp_path} of {socket.gethostname()} has .* MiB free, .* 1.0 MiB: .*No space left"
    with pytest.raises(OSError, match=where) as refused:
        BucketFile(tmp_path, 2**20)
    told = failure_of(pickle.loads(pickle.dumps(refused.value)), tmp_path)
    assert "--shm-size" in told.fix
    assert list(tmp_path.iterdir()) == []


def test_a_writer_reaches_the_places_of_its_machine(tmp_path: Path) -> None:
    file, _ref = written(tmp_path, a=torch.zeros(4))
    assert BucketWriter().reaches(file.path)
    assert not BucketWriter().reaches(f"{file.path}-elsewhere")


def test_a_truncated_file_is_refused_also_once_it_is_mapped(tmp_path: Path) -> None:
    _file, ref = written(tmp_path, a=torch.zeros(64))
    reader = BucketReader()
    list(reader.read(ref))
    os.truncate(ref.path, 16)
    for each in (reader, BucketReader()):
        with pytest.raises(ValueError, match="holds 16 bytes, its manifest has 256"):
            list(each.read(ref))


def test_a_manifest_that_points_past_the_file_is_refused(tmp_path: Path) -> None:
    _file, ref = written(tmp_path, a=torch.zeros(64))
    beyond = BucketRef(
        path=ref.path,
        size=ref.size,
        nbytes=ref.nbytes,
        entries=(replace(ref.entries[0], offset=128),),
    )
    with pytest.raises(ValueError, match="offset"):
        list(BucketReader().read(beyond))


def test_files_of_a_killed_process_are_swept_and_those_of_a_live_one_are_not(
    tmp_path: Path,
) -> None:
    program = """
import sys, time
from pathlib import Path
from megatron_async_rl.weights.shared_memory import BucketFile
file = BucketFile(Path(sys.argv[1]), 64)
print("written", flush=True)
time.sleep(3600)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "written"
        (left,) = leftovers(tmp_path)
        assert remove_stale(tmp_path) == []
        assert left.exists()
    finally:
        child.kill()
        child.wait(timeout=600)
        child.stdout.close()
    deadline = time.monotonic() + 600
    while (removed := remove_stale(tmp_path)) == [] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert removed == [left]
    assert not left.exists()


def test_a_launcher_of_engines_sweeps_by_a_command() -> None:
    left = SHARED_MEMORY / f"{WEIGHTS_PREFIX}of-nobody-{os.getpid()}"
    left.touch()
    module = "megatron_async_rl.watchdog.run_folder"
    subprocess.run([sys.executable, "-m", module], check=True, timeout=600)
    assert not left.exists()


def test_an_interrupted_start_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        BucketFile(tmp_path, 64)
    assert leftovers(tmp_path) == []


def test_a_file_that_a_sweeper_removes_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    closed: list[int] = []
    close = os.close

    def sweep_first(descriptor: int, how: int) -> None:
        locked.append(descriptor)
        if len(locked) == 1:
            (path,) = leftovers(tmp_path)
            path.unlink()

    monkeypatch.setattr(shared_memory.fcntl, "flock", sweep_first)
    monkeypatch.setattr(shared_memory.os, "close", lambda one: closed.append(one) or close(one))
    file = BucketFile(tmp_path, 64)
    assert [str(path) for path in leftovers(tmp_path)] == [file.path]
    assert len(locked) == 2
    assert closed == locked[:1]
    file.close()
