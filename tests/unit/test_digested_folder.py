"""A folder with a description of its files (policy/digested_folder.py): which damage is reported,
with its exact place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_async_rl.config.durable import digest
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.digested_folder import (
    CHANGED,
    DIGESTS,
    BlockReader,
    StoredBlock,
    StoredFile,
    block_fault,
    described,
    faults,
    files_of,
    read_description,
    require_export,
)

CONTENT = bytes(range(100))
BLOCKS = (
    StoredBlock(0, 60, digest(CONTENT[:60]), "layer 0.weight"),
    StoredBlock(60, 40, digest(CONTENT[60:]), "norm"),
)


def saved(folder: Path) -> dict[str, StoredFile]:
    """Write a folder with two files and its description."""
    (folder / "state").write_bytes(b"state")
    (folder / "blocks").write_bytes(CONTENT)
    files = {"state": StoredFile.of(b"state"), "blocks": StoredFile.of_blocks(BLOCKS[::-1])}
    (folder / DIGESTS).write_text(described({"step": 3}, files))
    return files


def test_a_description_lists_files_by_name_and_ends_with_its_digest(tmp_path: Path) -> None:
    files = saved(tmp_path)
    content, fault = read_description(tmp_path / DIGESTS)
    assert fault is None
    assert [*content] == ["step", "files", "digest"]
    assert content["files"] == {
        "blocks": {
            "bytes": 100,
            "blocks": [
                f"0 60 {digest(CONTENT[:60])} layer 0.weight",
                f"60 40 {digest(CONTENT[60:])} norm",
            ],
        },
        "state": {"bytes": 5, "digest": digest(b"state")},
    }
    assert files_of(content) == files
    assert files_of({"step": 3}) is None
    assert files["blocks"].blocks == BLOCKS


def test_the_description_itself_is_checked_to_the_byte(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / DIGESTS
    text = path.read_text()
    missing = tmp_path / "none"
    for written, expected in (
        (text.replace(" 3", " 4"), ({}, CHANGED)),
        (f"{text}\n", ({}, CHANGED)),
        (json.dumps({"files": {}}), ({}, CHANGED)),
        (json.dumps({"digest": "x"}), ({}, CHANGED)),
        (json.dumps({"step": 3}), ({"step": 3}, None)),
        ("[1]", ({}, "it holds no mapping")),
    ):
        path.write_text(written)
        assert read_description(path) == expected
    path.write_text("{")
    assert str(read_description(path)[1]).startswith("JSONDecodeError: Expecting property name")
    assert read_description(missing) == (
        {},
        f"FileNotFoundError: [Errno 2] No such file or directory: '{missing}'",
    )


def test_damage_is_reported_with_the_tensor_and_its_bytes(tmp_path: Path) -> None:
    files = saved(tmp_path)
    assert list(faults(tmp_path, files, blocks=True)) == []

    def found(*, blocks: bool = True) -> list[str]:
        return list(faults(tmp_path, files, blocks=blocks))

    place = "(bytes 60 to 99 of the file)"
    changed = f"blocks: tensor norm {place} differs from the saved one"
    (tmp_path / "blocks").write_bytes(CONTENT[:-1] + b"\0")
    assert (found(), found(blocks=False)) == ([changed], [])
    (tmp_path / "state").write_bytes(b"stat3")
    assert found() == [f"state: {CHANGED}", changed]
    (tmp_path / "blocks").write_bytes(CONTENT[:-1])
    assert found(blocks=False) == [f"state: {CHANGED}", "blocks: it has 99 bytes of 100"]
    (tmp_path / "blocks").write_bytes(b"x" + CONTENT[1:])
    first = "blocks: tensor layer 0.weight (bytes 0 to 59 of the file) differs from the saved one"
    assert found() == [f"state: {CHANGED}", first]
    for name in ("blocks", "state"):
        (tmp_path / name).unlink()
    gone = "it cannot be read (No such file or directory)"
    both = [f"state: {gone}", f"blocks: {gone}"]
    assert found(blocks=False) == both
    # Each of the readers of the missing file reports it.
    assert found() == [*both, f"blocks: {gone}", f"blocks: {gone}"]


def test_a_file_in_memory_is_compared_by_size_and_digest() -> None:
    file = StoredFile.of(b"abc")
    assert [file.fault(one) for one in (b"abc", b"abd", b"ab")] == [
        *(None, CHANGED, "it has 2 bytes of 3"),
    ]
    assert StoredFile(3).fault(b"xyz") is None
    assert block_fault(b"ab", StoredBlock(4, 3, digest(b"ab"), "k")) is not None


def test_a_reader_reuses_its_memory_for_the_largest_block(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_bytes(CONTENT)
    reader = BlockReader()
    with (tmp_path / "blocks").open("rb") as file:
        parts = [bytes(reader.read(file, block)) for block in (*BLOCKS, BLOCKS[0])]
        assert parts == [CONTENT[:60], CONTENT[60:], CONTENT[:60]]
        assert len(reader._room) == 60
        assert bytes(reader.read(file, StoredBlock(90, 20, "", "k"))) == CONTENT[90:]


def test_a_damaged_export_is_refused_with_its_first_fault(tmp_path: Path) -> None:
    require_export(tmp_path, "model.path")  # another model has no digests
    saved(tmp_path)
    require_export(tmp_path, "model.path")
    (tmp_path / "blocks").write_bytes(b"x" + CONTENT[1:])
    require_export(tmp_path, "model.path")  # blocks are checked when they are read
    for damage, fault in (
        (lambda: (tmp_path / "state").unlink(), "state: it cannot be read (No such file"),
        (lambda: (tmp_path / DIGESTS).write_text("{}x"), f"{DIGESTS}: JSONDecodeError: Extra data"),
    ):
        damage()
        with pytest.raises(UserError, match=r"model\.path") as refused:
            require_export(tmp_path, "model.path")
        assert f"{tmp_path} is damaged: {fault}" in str(refused.value)
        assert f"remove {tmp_path / DIGESTS}" in str(refused.value)
