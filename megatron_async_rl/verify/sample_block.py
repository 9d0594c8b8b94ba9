"""Rows of the sample log as checks read them: arrays over all tokens of a record batch, and the
facts of a sample that its outcome needs later.

Invariant: arrays have the order of the rows; the tokens of row i are `starts[i]` to
`starts[i + 1]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megatron_async_rl.samples.columns import flat, row_starts, value_rows


class SampleFacts(NamedTuple):
    """Numbers of a finished sample. log_prob: of the whole response, in nats, over its trained
    tokens; squares: sum of the squares of the tokens' log-probs; start, last: oldest and newest
    version of a trained token. digest: of the sampled tokens."""

    id: str
    group: int
    engine: int
    finished_at: float
    reward: float
    valid: bool
    tokens: int
    trained: int
    log_prob: float
    squares: float
    start: int
    last: int
    digest: int
    prompt_id: str


class EndedSample(NamedTuple):
    """A sample and one of its outcomes: `trained`, `dropped` or `evaluated` at `step`."""

    facts: SampleFacts
    outcome: str
    step: int
    reason: str | None
    place: int | None


@dataclass(frozen=True, eq=False)
class SampleBlock:
    """Training samples of one record batch (held-out responses are left out).

    response_ids, log_probs, versions, mask: flat, [N]; starts: [S + 1] int64.
    """

    batch: pa.RecordBatch

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> SampleBlock:
        return cls(batch.filter(pc.greater_equal(batch["group"], 0)))

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def text_column(self, name: str) -> Sequence[str]:
        """Return a column of strings."""
        found: Sequence[str] = self.batch.column(name).to_pylist()
        return found

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a column of numbers, [S]."""
        return self.batch.column(name).to_numpy(zero_copy_only=False)

    @cached_property
    def ids(self) -> Sequence[str]:
        return self.text_column("id")

    @cached_property
    def _responses(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        return flat(self.batch.column("response_ids"))

    @property
    def response_ids(self) -> NDArray[np.int32]:
        return self._responses[0]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._responses[1]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return row_starts(self.lengths)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Row of each token, [N]."""
        return value_rows(self.lengths)

    @cached_property
    def log_probs(self) -> NDArray[np.float32]:
        return flat(self.batch.column("behavior_logprobs"))[0]

    @cached_property
    def versions(self) -> NDArray[np.int32]:
        return flat(self.batch.column("versions"))[0]

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """True for trained tokens, [N]."""
        return flat(self.batch.column("loss_mask"))[0].astype(bool)

    @cached_property
    def fields(self) -> Sequence[dict[str, Any]]:
        """Other keys of each prompt's row."""
        # Rows of a group share the text, so each is parsed once.
        parsed: dict[str, dict[str, Any]] = {}
        found = []
        for text in self.text_column("fields"):
            if text not in parsed:
                parsed[text] = json.loads(text)
            found.append(parsed[text])
        return found

    def unequal_lengths(self) -> list[int]:
        """Return the rows whose per-token columns have another length than the response."""
        wrong = np.zeros(len(self), dtype=bool)
        for name in ("behavior_logprobs", "versions", "loss_mask"):
            wrong |= flat(self.batch.column(name))[1] != self.lengths
        return [int(row) for row in np.flatnonzero(wrong)]

    def facts(self) -> list[SampleFacts]:
        """Return the facts of each row."""
        size = len(self)
        used = self.rows[self.mask]
        kept = self.log_probs[self.mask].astype(np.float64)
        trained = np.bincount(used, minlength=size)
        total = np.bincount(used, kept, minlength=size)
        squares = np.bincount(used, kept * kept, minlength=size)
        oldest = np.full(size, np.iinfo(np.int64).max)
        newest = np.full(size, -1, dtype=np.int64)
        of_versions = self.versions[self.mask].astype(np.int64)
        np.minimum.at(oldest, used, of_versions)
        np.maximum.at(newest, used, of_versions)
        content = self.response_ids.astype(np.int32)
        groups, engines = self.numbers("group").tolist(), self.numbers("engine").tolist()
        finished, rewards = self.numbers("finished_at").tolist(), self.numbers("reward").tolist()
        valid = self.numbers("valid").tolist()
        prompts = self.text_column("prompt_id")
        starts = self.starts
        return [
            SampleFacts(
                id=self.ids[row],
                group=groups[row],
                engine=engines[row],
                finished_at=finished[row],
                reward=rewards[row],
                valid=valid[row],
                tokens=int(self.lengths[row]),
                trained=int(trained[row]),
                log_prob=float(total[row]),
                squares=float(squares[row]),
                start=int(oldest[row]) if trained[row] else -1,
                last=int(newest[row]),
                digest=hash(content[starts[row] : starts[row + 1]].tobytes()),
                prompt_id=prompts[row],
            )
            for row in range(size)
        ]
