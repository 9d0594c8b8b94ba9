"""Files of tensors' blocks that cannot be written, are damaged, or belong to another model."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async_rl.policy import block_files
from megatron_async_rl.policy.block_files import BlocksDamaged, BlocksUnreadable, BlocksUnwritten
from megatron_async_rl.policy.blocks import Block, Blocks, Content
from megatron_async_rl.policy.digested_folder import StoredFile
from megatron_async_rl.policy.parallel import Layout

TENSORS = {"v": torch.arange(6.0).view(3, 2), "w": torch.arange(8.0).view(4, 2)}


@pytest.fixture
def files(layout: Layout, tmp_path: Path) -> dict[str, StoredFile]:
    """The files of TENSORS in `tmp_path / "sharded"`."""
    return block_files.write(tmp_path / "sharded", content_of(TENSORS), layout.cpu_group)


def content_of(tensors: dict[str, torch.Tensor]) -> Content:
    return {
        key: Blocks([Block(one, (0,) * one.dim(), tuple(one.shape), False)])
        for key, one in tensors.items()
    }


def damage(layout: Layout, folder: Path, files: dict[str, StoredFile] | None) -> str:
    """The damage that a read of TENSORS reports; empty if it reads them back."""
    found = {key: torch.zeros_like(one) for key, one in TENSORS.items()}
    try:
        block_files.read(folder, content_of(found), layout.cpu_group, files)
    except BlocksDamaged as error:
        return str(error)
    assert all(torch.equal(found[key], one) for key, one in TENSORS.items())
    return ""


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_files_have_blocks_by_which_they_are_read_back(
    layout: Layout, tmp_path: Path, files: dict[str, StoredFile]
) -> None:
    assert sorted(files) == ["__0_0.distcp"]
    assert {block.key for block in files["__0_0.distcp"].blocks} == {"v", "w"}
    index = StoredFile.of((tmp_path / "sharded" / ".metadata").read_bytes())
    assert damage(layout, tmp_path / "sharded", {**files, ".metadata": index}) == ""
    assert damage(layout, tmp_path / "sharded", None) == "", "releases without digests"


def test_damage_names_the_file_and_what_it_lacks(
    layout: Layout, tmp_path: Path, files: dict[str, StoredFile]
) -> None:
    folder = tmp_path / "sharded"
    index = (folder / ".metadata").read_bytes()
    listed = {**files, ".metadata": StoredFile.of(index)}
    data = files["__0_0.distcp"]
    first, second = data.blocks
    assert damage(layout, folder, files) == "sharded/.metadata: unknown"
    without = {**listed, "__0_0.distcp": replace(data, blocks=(first,))}
    assert damage(layout, folder, without) == (
        f"sharded/__0_0.distcp: no block is known at byte {second.offset}"
    )
    flip(folder / ".metadata", len(index) // 2)
    assert damage(layout, folder, listed) == (
        "sharded/.metadata: its digest differs from the saved one"
    )
    (folder / ".metadata").write_bytes(index[:-20])
    assert damage(layout, folder, None) == (
        "sharded/.metadata: it cannot be read (UnpicklingError: pickle data was truncated)"
    )
    (folder / ".metadata").write_bytes(index)
    flip(folder / "__0_0.distcp", second.offset + second.length // 2)
    assert damage(layout, folder, listed) == (
        f"sharded/__0_0.distcp: tensor {second.key} (bytes {second.offset} to"
        f" {second.offset + second.length - 1} of the file) differs from the saved one"
    )
    (folder / "__0_0.distcp").unlink()
    assert damage(layout, folder, listed).startswith("rank 0: FileNotFoundError: ")


def test_a_tensor_that_the_files_do_not_have_is_a_mistake_and_no_damage(
    layout: Layout, tmp_path: Path, files: dict[str, StoredFile]
) -> None:
    other = content_of({"u": torch.zeros(2)})
    with pytest.raises(BlocksUnreadable, match=r"^it holds no u$"):
        block_files.read(tmp_path / "sharded", other, layout.cpu_group, None)


def test_blocks_that_cannot_be_written_name_the_rank_and_the_reason(
    layout: Layout, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BlocksUnwritten, match=r"^rank 0: \w+: .*/file'$") as raised:
        block_files.write(tmp_path / "file", content_of(TENSORS), layout.cpu_group)
    assert isinstance(raised.value.__cause__, OSError)


def test_a_block_that_reads_back_differently_is_reported_at_the_write(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = block_files._BlockStream.write

    def spoiling(stream: Any, content: Any) -> int:
        written = write(stream, content)
        stream._file.seek(-1, io.SEEK_CUR)
        stream._file.write(bytes([bytes(content)[-1] ^ 1]))
        return written

    monkeypatch.setattr(block_files._BlockStream, "write", spoiling)
    message = r"^sharded/__0_0\.distcp: tensor \w \(.*\) differs .*, right after it was written$"
    with pytest.raises(BlocksUnwritten, match=message):
        block_files.write(tmp_path / "sharded", content_of(TENSORS), layout.cpu_group)


def test_a_block_is_a_file_that_readers_of_python_accept() -> None:
    content = io.BufferedReader(block_files._Bytes(memoryview(b"abcdef")))
    assert content.read(2) == b"ab"
    content.seek(-1, io.SEEK_END)
    assert content.read() == b"f"
