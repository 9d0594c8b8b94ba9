"""Bucket files: what was written is what is read, and nothing is left behind."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron_async_rl.weights.shared_memory import PREFIX, BucketRef, read_bucket, remove_stale, write_bucket


@dataclass
class Bucket:
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor | None, ...]


def bucket_of(**tensors: torch.Tensor | None) -> Bucket:
    return Bucket(tuple(tensors), tuple(tensors.values()))


def leftovers(directory: Path) -> list[Path]:
    return list(directory.glob(f"{PREFIX}*"))


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
    with write_bucket(bucket_of(**sent), tmp_path) as ref:
        received = dict(read_bucket(ref))
    assert list(received) == list(sent)
    assert ref.nbytes == sum(t.numel() * t.element_size() for t in sent.values())
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(
            received[name].contiguous().view(-1).view(torch.uint8), tensor.detach().contiguous().view(-1).view(torch.uint8)
        )


def test_tensors_stay_readable_after_the_file_is_gone(tmp_path: Path) -> None:
    with write_bucket(bucket_of(a=torch.full((1000,), 7.0)), tmp_path) as ref:
        received = dict(read_bucket(ref))
    assert not leftovers(tmp_path)
    assert torch.equal(received["a"], torch.full((1000,), 7.0))


def test_a_reader_that_writes_changes_nobody_elses_tensors(tmp_path: Path) -> None:
    with write_bucket(bucket_of(a=torch.zeros(4)), tmp_path) as ref:
        dict(read_bucket(ref))["a"].fill_(1.0)
        assert torch.equal(dict(read_bucket(ref))["a"], torch.zeros(4))


def test_the_file_goes_also_when_the_block_fails(tmp_path: Path) -> None:
    def fail_while_lent() -> None:
        with write_bucket(bucket_of(a=torch.zeros(4)), tmp_path):
            assert len(leftovers(tmp_path)) == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_lent()
    assert not leftovers(tmp_path)


def test_a_rank_without_the_gathered_tensors_cannot_send(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="b: only the rank"), write_bucket(bucket_of(a=torch.zeros(4), b=None), tmp_path):
        pass
    assert not leftovers(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    with write_bucket(bucket_of(a=torch.zeros(64)), tmp_path) as ref:
        os.truncate(ref.path, 16)
        with pytest.raises(ValueError, match="holds 16 bytes, its manifest says 256"):
            dict(read_bucket(ref))


def test_a_manifest_that_points_past_the_file_is_refused(tmp_path: Path) -> None:
    with write_bucket(bucket_of(a=torch.zeros(64)), tmp_path) as ref:
        beyond = BucketRef(path=ref.path, size=ref.size, nbytes=ref.nbytes, entries=(replace(ref.entries[0], offset=128),))
        with pytest.raises(ValueError, match="offset"):
            dict(read_bucket(beyond))


def test_files_of_a_killed_process_are_swept_and_those_of_a_live_one_are_not(tmp_path: Path) -> None:
    program = """
import sys, time, torch
from types import SimpleNamespace
from pathlib import Path
from megatron_async_rl.weights.shared_memory import write_bucket
with write_bucket(SimpleNamespace(names=("a",), tensors=(torch.zeros(4),)), Path(sys.argv[1])):
    print("written", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "written"
        (left,) = leftovers(tmp_path)
        assert remove_stale(tmp_path) == []
        assert left.exists()
    finally:
        child.kill()
        child.wait(timeout=30)
        child.stdout.close()
    deadline = time.monotonic() + 10
    while (removed := remove_stale(tmp_path)) == [] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert removed == [left]
    assert not left.exists()
