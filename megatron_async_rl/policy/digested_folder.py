"""A folder with a description that lists every other file of it with its digests: a checkpoint, or
an exported model. Loads no torch.

    "files": {"state.pt": {"bytes": 1261, "digest": "5b0f..."},
              "sharded/__0_0.distcp": {"bytes": 200428, "blocks": ["0 1408 81c2... KEY", ...]}},
    "digest": "..."                           of the text of the description without this entry

A block is a part of a tensor: its first byte, its length, its digest, and the tensor's key. Blocks
cover their file from the first byte to the last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Buffer, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_async_rl.config.durable import digest, file_digest
from megatron_async_rl.config.problem import UserError

DIGESTS = "digests.json"
"""Description of an exported model."""
READERS = 8
"""Threads that check blocks: hashing and reading release the interpreter's lock."""
CHANGED = "its digest differs from the saved one"


@dataclass(frozen=True)
class StoredBlock:
    """A part of the tensor `key`, as bytes `offset` to `offset + length` of a file."""

    offset: int
    length: int
    digest: str
    key: str

    def __str__(self) -> str:
        return f"{self.offset} {self.length} {self.digest} {self.key}"

    @classmethod
    def parse(cls, text: str) -> StoredBlock:
        # The key comes last, because it may contain spaces.
        offset, length, held, key = text.split(" ", 3)
        return cls(int(offset), int(length), held, key)


@dataclass(frozen=True)
class StoredFile:
    """Required content of a checkpoint's file. `digest`: null if `blocks` have digests."""

    size: int
    digest: str | None = None
    blocks: tuple[StoredBlock, ...] = ()

    @classmethod
    def of(cls, content: bytes) -> StoredFile:
        return cls(len(content), digest(content))

    @classmethod
    def of_blocks(cls, blocks: Sequence[StoredBlock]) -> StoredFile:
        # In file order, so that checks read forwards.
        ordered = tuple(sorted(blocks, key=lambda block: block.offset))
        return cls(sum(block.length for block in ordered), None, ordered)

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> StoredFile:
        blocks = tuple(map(StoredBlock.parse, entry.get("blocks", ())))
        return cls(entry["bytes"], entry.get("digest"), blocks)

    def as_json(self) -> dict[str, Any]:
        if self.digest is not None:
            return {"bytes": self.size, "digest": self.digest}
        return {"bytes": self.size, "blocks": [str(block) for block in self.blocks]}

    def fault(self, content: bytes) -> str | None:
        """Return the difference between `content` and the required content; null: none."""
        if len(content) != self.size:
            return f"it has {len(content)} bytes of {self.size}"
        if self.digest is not None and digest(content) != self.digest:
            return CHANGED
        return None


def described(content: Mapping[str, Any], files: Mapping[str, StoredFile]) -> str:
    """Return the text of about.json."""
    # Files sorted and the digest last, so that the text is a function of the content.
    whole = {**content, "files": {name: files[name].as_json() for name in sorted(files)}}
    return _text({**whole, "digest": digest(_text(whole).encode())})


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1)


def files_of(content: Mapping[str, Any]) -> dict[str, StoredFile] | None:
    """Return the files that a description lists; null for a release without digests."""
    if "files" not in content:
        return None
    return {name: StoredFile.parse(entry) for name, entry in content["files"].items()}


def read_description(file: Path) -> tuple[dict[str, Any], str | None]:
    """Return the content of a description, and its fault; null: none."""
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        return {}, f"{type(error).__name__}: {error}"
    if not isinstance(content, dict):
        return {}, "it holds no mapping"
    if not {"digest", "files"} & content.keys():
        return content, None
    # The exact text, so that the digest covers every byte of the file.
    rest = {name: value for name, value in content.items() if name != "digest"}
    if _text(content) != text or content.get("digest") != digest(_text(rest).encode()):
        return {}, CHANGED
    return content, None


def faults(folder: Path, files: Mapping[str, StoredFile], *, blocks: bool) -> Iterator[str]:
    """Yield the files of `folder` that are missing or damaged. blocks: also check blocks, which
    reads the whole folder."""
    for name, file in files.items():
        if (fault := _fault_of_file(folder / name, file)) is not None:
            yield f"{name}: {fault}"
    if not blocks:
        return
    pieces = [
        # Interleaved, so that readers of one file are near each other on the disk.
        (name, file.blocks[start::READERS])
        for name, file in files.items()
        for start in range(min(READERS, len(file.blocks)))
    ]
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        # Threads, because reading and hashing release the interpreter's lock.
        found = pool.map(lambda piece: _fault_of_blocks(folder / piece[0], piece[1]), pieces)
        for (name, _), fault in zip(pieces, found, strict=True):
            if fault is not None:
                yield f"{name}: {fault}"


def require_export(folder: Path, key: str) -> None:
    """Check every file of a model that this package exported. Other models have no digests and
    pass. key: the option that names the folder. Raises UserError for the first file that is missing
    or has changed."""
    if not (folder / DIGESTS).exists():
        return
    content, fault = read_description(folder / DIGESTS)
    found = [f"{DIGESTS}: {fault}"] if fault is not None else []
    found += list(islice(faults(folder, files_of(content) or {}, blocks=False), 1))
    if found:
        raise UserError.of(
            key,
            f"{folder} is damaged: {found[0]}",
            "export the model again (`mar convert`, or the same `mar train` command); if you"
            f" changed the file yourself, remove {folder / DIGESTS}",
        )


def _fault_of_file(path: Path, file: StoredFile) -> str | None:
    try:
        # Compare the size first, because this needs no read.
        size = path.stat().st_size
        if size != file.size:
            return f"it has {size} bytes of {file.size}"
        if file.digest is not None and file_digest(path) != file.digest:
            return CHANGED
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def _fault_of_blocks(path: Path, blocks: Sequence[StoredBlock]) -> str | None:
    reader = BlockReader()
    try:
        with path.open("rb") as file:
            for block in blocks:
                if (fault := block_fault(reader.read(file, block), block)) is not None:
                    return fault
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


class BlockReader:
    """Reader of blocks, one after another, into the same memory: allocating memory for each would
    take longer than its digest."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray())

    def read(self, file: BinaryIO, block: StoredBlock) -> memoryview:
        """Return the bytes of the block in its file, valid until the next call."""
        if len(self._room) < block.length:
            # The buffer grows to the largest block and is reused.
            self._room = memoryview(bytearray(block.length))
        file.seek(block.offset)
        content = self._room[: block.length]
        return content[: file.readinto(content)]  # type: ignore[attr-defined]


def block_fault(content: Buffer, block: StoredBlock) -> str | None:
    """Return the difference between `content` and the block; null: none."""
    if memoryview(content).nbytes == block.length and digest(content) == block.digest:
        return None
    last = block.offset + block.length - 1
    place = f"bytes {block.offset} to {last} of the file"
    return f"tensor {block.key} ({place}) differs from the saved one"
