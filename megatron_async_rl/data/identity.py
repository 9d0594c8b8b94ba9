"""Digests of prompts, with which a resume recognizes its data, whatever the files are called.

Invariants:
- the digests cover what a row gives to training: text, columns, tokens, and the order of the rows;
- they do not cover ids, which contain the name of the file if the data has no ids.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_async_rl.config.durable import Digest
from megatron_async_rl.data.conversation import TrainingConversation
from megatron_async_rl.samples.types import Prompt


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The prompts of one file. `rows`: digest of text and columns; `tokens`: of token ids, and for
    given responses of their tokens and masks."""

    count: int
    rows: str
    tokens: str

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], given: Sequence[TrainingConversation] = ()
    ) -> DataIdentity:
        """given: the responses to `prompts` that are trained on, if any."""
        rows, tokens = Digest(), Digest()
        for index, prompt in enumerate(prompts):
            # One line each, so that what moves from one row to the next changes the digest.
            row = json.dumps([prompt.text, prompt.fields], sort_keys=True, default=_plain)
            rows.add(f"{row}\n".encode())
            parts = [array("i", prompt.token_ids).tobytes()]
            if given:
                parts += [given[index].ids.tobytes(), given[index].mask.tobytes()]
            for part in parts:
                tokens.add(len(part).to_bytes(8))
                tokens.add(part)
        return cls(count=len(prompts), rows=rows.text, tokens=tokens.text)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> DataIdentity | None:
        """Read the result of `as_json`; null if an earlier release saved none."""
        if not {"count", "rows", "tokens"} <= saved.keys():
            return None
        return cls(count=saved["count"], rows=saved["rows"], tokens=saved["tokens"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, now: DataIdentity) -> str | None:
        """How the data `now` differs from this; null: not at all."""
        if self.count != now.count:
            return f"{self.count} prompts there, {now.count} here"
        if self.rows != now.rows:
            return f"{self.count} prompts there and here, with other text, columns or order"
        if self.tokens != now.tokens:
            return (
                "the same rows there and here, with other tokens: the tokenizer in model.path is"
                " another one"
            )
        return None


def _plain(value: object) -> str:
    """Text for a value of a column that JSON does not have, such as a date."""
    return value.text if isinstance(value, TrainingConversation) else repr(value)
