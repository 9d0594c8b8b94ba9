"""Samples in the dashboard: the form and its responses.

Invariants:
- a file of the log is read again only if it grew, and only the columns that samples are selected
  by; text and tokens are read for the shown samples alone;
- a request has the fields and choices of the form, or is refused;
- the text of a sample is escaped (samples.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.report.samples import card, check_log, log_readable
from megatron_async_rl.samples.frames import FOLDER, TableName, lost_end, present_file, segments_in
from megatron_async_rl.samples.segments import (
    KEY,
    OUTCOMES,
    Entry,
    Outcomes,
    load,
    newest_rows,
    read_batches,
)

AT_ONCE = 20
"""Number of samples per response."""
KINDS = {
    "trained": "trained on",
    "evaluated": "of held-out evaluation",
    "dropped": "dropped",
    "all": "all",
}
ORDERS = {
    "newest": "newest first",
    "best": "best reward first",
    "worst": "worst reward first",
    "random": "random",
}
_CHOSEN_BY = ("id", "group", "reward", "valid", "finished_at")
_PLACE = ("segment", "batch", "row")


class Question(BaseModel):
    """Fields of the form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["trained", "evaluated", "dropped", "all"] = "trained"
    order: Literal["newest", "best", "worst", "random"] = "newest"
    step: NonNegativeInt | None = None
    """Optimizer step of `trained`, weight version of `evaluated`, next step of `dropped`; any of
    them for `all`."""
    least: FiniteFloat | None = None
    most: FiniteFloat | None = None
    """Bounds of the reward."""
    start: NonNegativeInt = 0
    """Number of samples that were shown before."""


@dataclass(frozen=True)
class _Read:
    size: int
    table: pa.Table


class SampleBrowser:
    """Samples of one run. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, _Read] = {}

    def answer(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return `html` of at most AT_ONCE samples, `words` with their number, and whether there
        are `more`. Raises UserError for an invalid question and for an unreadable log."""
        try:
            question = Question.model_validate(query)
        except ValidationError as error:
            # The first fault is enough: the form cannot produce several.
            fault = error.errors()[0]
            name = ".".join(map(str, fault["loc"]))
            raise UserError.of(name, fault["msg"], "choose in the form") from error
        with log_readable():
            check_log(self._run_dir)
            found = self._find(question)
            # Text and tokens are loaded for this slice only; the log may have gigabytes of them.
            entries = self._entries(found.slice(question.start, AT_ONCE))
            shown = load(self._run_dir, entries)
            lost = lost_end(self._run_dir)
        total, end = found.num_rows, question.start + len(entries)
        text = f"{end:,} of {total:,} samples" if total else "no such sample in the log"
        # An empty answer names the steps that exist, because old ones are removed.
        if not total and (steps := self._steps(question.kind)):
            text += f"; it has those of steps {steps[0]:,} to {steps[1]:,}"
        if lost is not None:
            text += f"; {lost}"
        return {
            "html": "".join(card(entry, sample) for entry, sample in shown),
            "words": text,
            "more": end < total,
        }

    def _find(self, question: Question) -> pa.Table:
        """Return the positions in the log of the requested samples, in the requested order."""
        samples = self._samples()
        outcomes = self._of_samples(samples)
        if question.kind != "all":
            outcomes = outcomes.filter(pc.equal(outcomes["outcome"], question.kind))
        if question.step is not None:
            # One row of outcomes must match kind and step together.
            outcomes = outcomes.filter(pc.equal(outcomes["step"], question.step))
        if question.kind != "all" or question.step is not None:
            # A semi join: a sample with two outcomes, such as trained twice, appears once.
            samples = samples.join(outcomes.select(KEY), keys=KEY, join_type="left semi")
        if question.order in ("best", "worst") or not question.least is question.most is None:
            # A failed reward has no value that could be sorted or compared.
            samples = samples.filter(samples["valid"])
        if question.least is not None:
            samples = samples.filter(pc.greater_equal(samples["reward"], question.least))
        if question.most is not None:
            samples = samples.filter(pc.less_equal(samples["reward"], question.most))

        newest = [(name, "descending") for name in _PLACE]
        if question.order in ("best", "worst"):
            direction = "descending" if question.order == "best" else "ascending"
            # Ties are broken by place, so that `More` neither repeats nor skips a sample.
            return samples.sort_by([("reward", direction), *newest])
        samples = samples.sort_by(newest)
        if question.order == "random":
            # A fixed seed, so that all parts of a long response have the same order.
            order = list(range(samples.num_rows))
            random.Random(0).shuffle(order)
            samples = samples.take(pa.array(order, pa.int64()))
        return samples

    def _entries(self, chosen: pa.Table) -> list[Entry]:
        """Return `chosen` with their outcomes."""
        rows = chosen.to_pylist()
        ids = pa.array({row["id"] for row in rows}, pa.string())
        groups = pa.array({row["group"] for row in rows}, pa.int64())
        outcomes, samples = self._outcomes(), self._samples()
        became = Outcomes(whole=segments_in(self._run_dir / FOLDER)[:1] == [0])
        # A dropped group has one row without an id, which concerns all of its samples.
        of_groups = pc.and_(pc.is_null(outcomes["id"]), pc.is_in(outcomes["group"], groups))
        chosen_by = pc.or_(pc.is_in(outcomes["id"], ids), of_groups)
        became.add(outcomes.filter(chosen_by).to_pylist())
        newest: dict[str, float] = {}
        for one in samples.filter(pc.is_in(samples["id"], ids)).to_pylist():
            # After a crash, an id is sampled again; only the newest sample can be trained on.
            newest[one["id"]] = max(one["finished_at"], newest.get(one["id"], 0.0))
        entries = []
        for row in rows:
            key = row["id"], row["finished_at"]
            again = row["finished_at"] < newest[row["id"]]
            state, steps, reason = became.of(key, row["group"], again=again)
            entries.append(Entry(state=state, steps=steps, reason=reason, **row))
        return entries

    def _of_samples(self, samples: pa.Table) -> pa.Table:
        """Return the outcomes of samples, and those that samples without one have from their
        dropped group: a resumed run does not know the history that had their own rows."""
        outcomes = self._outcomes()
        of_group = pc.is_null(outcomes["id"])
        # A sample's own outcome takes precedence over the one of its group.
        own = outcomes.filter(pc.invert(of_group))
        dropped = outcomes.filter(pc.and_(of_group, pc.equal(outcomes["outcome"], "dropped")))
        open_ones = samples.select([*KEY, "group"]).join(
            own.select(KEY), keys=KEY, join_type="left anti"
        )
        last = samples.select(KEY).group_by("id").aggregate([("finished_at", "max")])
        last = last.rename_columns(["id", "finished_at"])
        # Earlier samples of the same id were lost in a crash, not dropped.
        open_ones = open_ones.join(last, keys=KEY, join_type="left semi")
        given = open_ones.join(
            dropped.select(["group", "seq", "outcome", "step", "reason", "place"]),
            "group",
            join_type="inner",
        )
        return pa.concat_tables([own, given.select(own.schema.names).cast(own.schema)])

    def _steps(self, kind: str) -> tuple[int, int] | None:
        """Return the first and the last step of the samples of a kind."""
        outcomes = self._of_samples(self._samples())
        if kind != "all":
            outcomes = outcomes.filter(pc.equal(outcomes["outcome"], kind))
        if not outcomes.num_rows:
            return None
        ends = pc.min_max(outcomes["step"]).as_py()
        return ends["min"], ends["max"]

    def _samples(self) -> pa.Table:
        schema = pa.schema(
            [
                pa.field("id", pa.string()),
                pa.field("group", pa.int64()),
                pa.field("reward", pa.float64()),
                pa.field("valid", pa.bool_()),
                pa.field("finished_at", pa.float64()),
                *(pa.field(name, pa.int64()) for name in _PLACE),
            ]
        )
        return newest_rows(self._all("samples", schema))

    def _outcomes(self) -> pa.Table:
        return self._all("outcomes", OUTCOMES)

    def _all(self, table: TableName, schema: pa.Schema) -> pa.Table:
        folder = self._run_dir / FOLDER
        paths = {
            path: segment
            for segment in segments_in(folder)
            if (path := present_file(folder, table, segment)) is not None
        }
        for path in [one for one in self._files if one.name.startswith(table)]:
            if path not in paths:
                # The run removes old segments; their columns would fill the memory of the server.
                del self._files[path]
        tables = []
        for path, segment in paths.items():
            # Segments only grow, so the size shows whether one was written since.
            size = path.stat().st_size if path.exists() else 0
            read = self._files.get(path)
            if read is None or read.size != size:
                read = _Read(size, _read(folder, segment, table, schema))
                self._files[path] = read
            tables.append(read.table)
        return pa.concat_tables(tables) if tables else schema.empty_table()


def _read(folder: Path, segment: int, table: TableName, schema: pa.Schema) -> pa.Table:
    if table == "outcomes":
        every = [batch for _, batch in read_batches(folder, table, segment)]
        return pa.Table.from_batches(every, schema=schema)
    batches = []
    for number, batch in read_batches(folder, table, segment, _CHOSEN_BY):
        count = batch.num_rows
        # Where `load` finds the whole row later.
        place = (np.full(count, segment), np.full(count, number), np.arange(count))
        columns = [batch[name] for name in _CHOSEN_BY] + [pa.array(one) for one in place]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def form() -> str:
    """Return HTML of the form and of the places for its response."""
    kinds = "".join(f'<option value="{value}">{name}</option>' for value, name in KINDS.items())
    orders = "".join(f'<option value="{value}">{name}</option>' for value, name in ORDERS.items())
    fields = (
        f'<label>Samples<select name="kind">{kinds}</select></label>'
        f'<label>Order<select name="order">{orders}</select></label>'
        '<label>Step<input name="step" type="number" min="0" placeholder="any"></label>'
        '<label>Reward from<input name="least" type="number" step="any" placeholder="any"></label>'
        '<label>to<input name="most" type="number" step="any" placeholder="any"></label>'
        "<button>Show</button>"
    )
    return (
        f'<section class="card samples"><h2>Samples</h2><form>{fields}</form>'
        '<p class="words" role="status"></p><div class="list"></div>'
        '<button type="button" class="more" hidden>More</button></section>'
    )
