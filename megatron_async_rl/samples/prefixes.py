"""Tokens with which the samples of a group begin alike, so that a policy can compute them once.

A family is the k-th segments of a group's samples. Its shared prefix is the longest run of tokens
with which all of them begin: the prompt, a context, and response tokens if they are equal. The last
token of a segment is only a target, so it does not belong to a prefix. If an engine recorded the
experts of the tokens, those of the prefix are equal, too; a segment with a record shares nothing
with a segment without.

Invariant: rank 0 decides what is shared, from the whole batch, so every rank and every layout makes
the same plan.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megatron_async_rl.samples.columns import ROUTED, flat, list_array, spans
from megatron_async_rl.samples.rank_batch import (
    SHARED,
    routed_experts_of,
    segment_lengths,
    tokens_of,
)

FIRST_COMPARED = 256
"""Number of tokens that are compared first."""


def shared_prefixes(
    samples: pa.RecordBatch, rows: NDArray[np.int64], *, minimum: float = 0.0
) -> pa.ListArray:
    """Return the column SHARED of a batch with columns NUMERIC or SCHEMA: for each segment of the
    samples `rows`, the number of tokens in the shared prefix of its family, 0 for a family of one
    segment; null for other samples, and for all if prefixes save less than the share `minimum` of
    the tokens that the model reads."""
    tokens = tokens_of(samples, rows)
    ids, totals = flat(tokens.column("token_ids"))
    chosen = pa.array(rows)
    prompts = pc.list_value_length(samples.column("prompt_ids").take(chosen)).to_numpy()
    segments, counts = segment_lengths(
        prompts.astype(np.int64), totals, samples.column("segment_starts").take(chosen)
    )
    experts, recorded = routed_experts_of(tokens.column(ROUTED), segments, counts)

    group = np.repeat(samples.column("group").to_numpy()[rows], counts)
    number = spans(np.zeros_like(counts), counts)
    ordered = np.lexsort((number, group))
    starts, has = np.cumsum(segments) - segments, np.repeat(recorded, counts)
    shared, saved = np.zeros(len(segments), dtype=np.int32), 0
    edges = np.flatnonzero((np.diff(group[ordered]) != 0) | (np.diff(number[ordered]) != 0)) + 1
    for family in np.split(ordered, edges):
        if len(family) < 2 or len(np.unique(has[family])) > 1:
            continue
        common = _common(
            ids,
            experts if has[family[0]] else None,
            starts[family],
            int(segments[family].min()) - 1,
        )
        shared[family] = common
        saved += (len(family) - 1) * common

    found: list[NDArray[np.int32] | None] = [None] * samples.num_rows
    if saved and saved >= minimum * int((segments - 1).sum()):
        for row, own in zip(rows.tolist(), np.split(shared, np.cumsum(counts)[:-1]), strict=True):
            found[row] = own
    return list_array(found, SHARED.type)


def _common(
    ids: NDArray[np.int32],
    experts: NDArray[np.uint8] | None,
    starts: NDArray[np.int64],
    longest: int,
) -> int:
    """Return the number of tokens, at most `longest`, that are equal from each of `starts` on."""
    done, width = 0, FIRST_COMPARED
    while done < longest:
        stop = min(done + width, longest)
        at = starts[:, None] + np.arange(done, stop)
        equal = (ids[at] == ids[at[0]]).all(axis=0)
        if experts is not None:
            # Other experts make other hidden states of the same tokens.
            equal &= (experts[at] == experts[at[0]]).all(axis=(0, 2))
        if not equal.all():
            return done + int(equal.argmin())
        # Few tokens first, because most of the tokens of responses differ.
        done, width = stop, 2 * width
    return longest
