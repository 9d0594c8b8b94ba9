"""Responses of `mar eval --responses FILE`: one JSON object per response, in the order of the
prompts. The file is a data file (docs/data.md) with the columns of the prompt's row and the fields
of the response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Prompt


def write_responses(
    file: Path, sets: Sequence[str], responses: Sequence[tuple[Prompt, Sequence[SampleRow]]]
) -> None:
    """Write the responses to each prompt. sets: name of each prompt's held-out set, empty for the
    only one."""
    lines = []
    for name, (prompt, rows) in zip(sets, responses, strict=True):
        for sample in (row.sample() for row in rows):
            parts = sample.reward_parts
            line = {
                # Columns come first, so that a response's field overrides a column of the same
                # name.
                **prompt.fields,
                "prompt_id": prompt.id,
                "prompt": prompt.text,
                "response": sample.text,
                "reward": sample.reward if sample.valid else None,
                **({} if parts is None else {"reward_parts": dict(parts)}),
                **({} if sample.valid else {"reward_error": sample.reward_error}),
                "finish_reason": sample.finish_reason,
                **({"set": name} if name else {}),
            }
            lines.append(json.dumps(line) + "\n")
    write_file(file, "".join(lines))
