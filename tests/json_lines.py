"""Files of JSON lines in tests: the objects without their checksums, and lines without checksums,
which readers accept as those of an earlier version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.metrics.json_lines import without_checksum


def read_objects(file: Path) -> list[dict[str, Any]]:
    return objects(file.read_bytes())


def objects(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(without_checksum(line)) for line in content.splitlines()]


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
