"""Samples in the dashboard: the form and the responses to its queries.

Invariants:
- a file of the log is read again only if it has grown, and only its columns that select samples;
  text and tokens are read for the shown samples only;
- a query with other fields or choices than those of the form is refused;
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
"""Maximum number of samples per response."""
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
_SELECTED_BY = ("id", "group", "reward", "valid", "finished_at")
"""Columns of the log that select samples."""
_POSITION = ("segment", "batch", "row")
"""Columns with the position of a sample in the log."""


class FormQuery(BaseModel):
    """Fields of the form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["trained", "evaluated", "dropped", "all"] = "trained"
    order: Literal["newest", "best", "worst", "random"] = "newest"
    step: NonNegativeInt | None = None
    """Optimizer step of `trained`, weight version of `evaluated`, next step of `dropped`; any of
    these for `all`."""
    minimum: FiniteFloat | None = None
    """Lower bound of the reward."""
    maximum: FiniteFloat | None = None
    """Upper bound of the reward."""
    start: NonNegativeInt = 0
    """Number of samples that the page already shows."""


@dataclass(frozen=True)
class _CachedFile:
    size: int
    """Size in bytes when the file was read."""
    table: pa.Table


class SampleBrowser:
    """Samples of one run. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, _CachedFile] = {}

    def answer(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the response to a query as JSON: `html` of at most AT_ONCE samples, a `message`
        with their number, and True in `more` if there are more samples. Raises UserError for an
        invalid query and for an unreadable log."""
        try:
            query = FormQuery.model_validate(fields)
        except ValidationError as error:
            # Report only the first error: the form itself produces none.
            fault = error.errors()[0]
            name = ".".join(map(str, fault["loc"]))
            raise UserError.of(name, fault["msg"], "use the values of the form") from error
        with log_readable():
            check_log(self._run_dir)
            found = self._find(query)
            # Load text and tokens of this slice only, because the log may have gigabytes of them.
            entries = self._entries(found.slice(query.start, AT_ONCE))
            shown = load(self._run_dir, entries)
            lost = lost_end(self._run_dir)
        total = found.num_rows
        # The run may have removed samples that the page already shows.
        end = min(total, query.start + len(entries))
        message = f"{end:,} of {total:,} samples" if total else "no such sample in the log"
        # Name the steps in the log, because the run removes old samples.
        if not total and (steps := self._steps(query.kind)):
            message += f", which has steps {steps[0]:,} to {steps[1]:,}"
        if lost is not None:
            message += f"; {lost}"
        return {
            "html": "".join(card(entry, sample) for entry, sample in shown),
            "message": message,
            "more": end < total,
        }

    def _find(self, query: FormQuery) -> pa.Table:
        """Return the rows of the samples that a query selects, in its order."""
        samples = self._samples()
        outcomes = self._of_samples(samples)
        if query.kind != "all":
            outcomes = outcomes.filter(pc.equal(outcomes["outcome"], query.kind))
        if query.step is not None:
            # Filter the same table again: one outcome must match both kind and step.
            outcomes = outcomes.filter(pc.equal(outcomes["step"], query.step))
        if query.kind != "all" or query.step is not None:
            # A semi join keeps a sample once, even if it has several outcomes (trained twice).
            samples = samples.join(outcomes.select(KEY), keys=KEY, join_type="left semi")
        if query.order in ("best", "worst") or not query.minimum is query.maximum is None:
            # A sample whose reward failed has no value to compare.
            samples = samples.filter(samples["valid"])
        if query.minimum is not None:
            samples = samples.filter(pc.greater_equal(samples["reward"], query.minimum))
        if query.maximum is not None:
            samples = samples.filter(pc.less_equal(samples["reward"], query.maximum))

        newest = [(name, "descending") for name in _POSITION]
        if query.order in ("best", "worst"):
            direction = "descending" if query.order == "best" else "ascending"
            # Sort equal rewards by position, so that `More` neither repeats nor skips a sample.
            return samples.sort_by([("reward", direction), *newest])
        samples = samples.sort_by(newest)
        if query.order == "random":
            # Use a fixed seed, so that successive parts come from the same order.
            order = list(range(samples.num_rows))
            random.Random(0).shuffle(order)
            samples = samples.take(pa.array(order, pa.int64()))
        return samples

    def _entries(self, selected: pa.Table) -> list[Entry]:
        """Return the selected samples with their outcomes."""
        rows = selected.to_pylist()
        ids = pa.array({row["id"] for row in rows}, pa.string())
        groups = pa.array({row["group"] for row in rows}, pa.int64())
        outcomes, samples = self._outcomes(), self._samples()
        admitted = outcomes.filter(pc.equal(outcomes["outcome"], "admitted"))["group"]
        # Of all groups, because `history` has only those that are shown.
        oldest = pc.min(admitted).as_py()
        history = Outcomes(whole=segments_in(self._run_dir / FOLDER)[:1] == [0], oldest=oldest)
        # A dropped group has one outcome without an id, which applies to all of its samples.
        of_groups = pc.and_(pc.is_null(outcomes["id"]), pc.is_in(outcomes["group"], groups))
        relevant = pc.or_(pc.is_in(outcomes["id"], ids), of_groups)
        history.add(outcomes.filter(relevant).to_pylist())
        newest: dict[str, float] = {}
        for one in samples.filter(pc.is_in(samples["id"], ids)).to_pylist():
            # After a crash, an id is sampled again, and only its newest sample can be trained on.
            newest[one["id"]] = max(one["finished_at"], newest.get(one["id"], 0.0))
        entries = []
        for row in rows:
            key = row["id"], row["finished_at"]
            again = row["finished_at"] < newest[row["id"]]
            state, steps, reason = history.of(key, row["group"], again=again)
            entries.append(Entry(state=state, steps=steps, reason=reason, **row))
        return entries

    def _of_samples(self, samples: pa.Table) -> pa.Table:
        """Return the outcomes of samples. A sample without an outcome of its own has the outcome of
        its dropped group: a resumed run logs only the group's outcome, because it does not have the
        list of the group's samples."""
        outcomes = self._outcomes()
        of_group = pc.is_null(outcomes["id"])
        own = outcomes.filter(pc.invert(of_group))
        dropped = outcomes.filter(pc.and_(of_group, pc.equal(outcomes["outcome"], "dropped")))
        # A sample's own outcome takes precedence over that of its group.
        without_own = samples.select([*KEY, "group"]).join(
            own.select(KEY), keys=KEY, join_type="left anti"
        )
        last = samples.select(KEY).group_by("id").aggregate([("finished_at", "max")])
        last = last.rename_columns(["id", "finished_at"])
        # Earlier samples of the same id were lost in a crash, not dropped.
        without_own = without_own.join(last, keys=KEY, join_type="left semi")
        inherited = without_own.join(
            dropped.select(["group", "seq", "outcome", "step", "reason", "place"]),
            "group",
            join_type="inner",
        )
        return pa.concat_tables([own, inherited.select(own.schema.names).cast(own.schema)])

    def _steps(self, kind: str) -> tuple[int, int] | None:
        """Return the first and the last step of the samples of a kind; None if there are none."""
        outcomes = self._of_samples(self._samples())
        if kind != "all":
            outcomes = outcomes.filter(pc.equal(outcomes["outcome"], kind))
        if not outcomes.num_rows:
            return None
        ends = pc.min_max(outcomes["step"]).as_py()
        return ends["min"], ends["max"]

    def _samples(self) -> pa.Table:
        """Return the columns _SELECTED_BY and _POSITION of the newest copy of every sample."""
        schema = pa.schema(
            [
                pa.field("id", pa.string()),
                pa.field("group", pa.int64()),
                pa.field("reward", pa.float64()),
                pa.field("valid", pa.bool_()),
                pa.field("finished_at", pa.float64()),
                *(pa.field(name, pa.int64()) for name in _POSITION),
            ]
        )
        return newest_rows(self._all("samples", schema))

    def _outcomes(self) -> pa.Table:
        return self._all("outcomes", OUTCOMES)

    def _all(self, table: TableName, schema: pa.Schema) -> pa.Table:
        """Return the rows of all files of a table of the log, from the cache if unchanged."""
        folder = self._run_dir / FOLDER
        paths = {
            path: segment
            for segment in segments_in(folder)
            if (path := present_file(folder, table, segment)) is not None
        }
        for path in [one for one in self._files if one.name.startswith(table)]:
            if path not in paths:
                # The run has removed this segment; its columns would only use memory.
                del self._files[path]
        tables = []
        for path, segment in paths.items():
            # A segment only grows, so its size changes with every write.
            size = path.stat().st_size if path.exists() else 0
            cached = self._files.get(path)
            if cached is None or cached.size != size:
                cached = _CachedFile(size, _read(folder, segment, table, schema))
                self._files[path] = cached
            tables.append(cached.table)
        return pa.concat_tables(tables) if tables else schema.empty_table()


def _read(folder: Path, segment: int, table: TableName, schema: pa.Schema) -> pa.Table:
    """Return the rows of one file: all columns of outcomes, or those of `_samples`."""
    if table == "outcomes":
        every = [batch for _, batch in read_batches(folder, table, segment)]
        return pa.Table.from_batches(every, schema=schema)
    batches = []
    for number, batch in read_batches(folder, table, segment, _SELECTED_BY):
        count = batch.num_rows
        # `load` reads a whole row by its position.
        position = (np.full(count, segment), np.full(count, number), np.arange(count))
        columns = [batch[name] for name in _SELECTED_BY] + [pa.array(one) for one in position]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def form() -> str:
    """Return HTML of the form and of the elements for its response."""
    kinds = "".join(f'<option value="{value}">{name}</option>' for value, name in KINDS.items())
    orders = "".join(f'<option value="{value}">{name}</option>' for value, name in ORDERS.items())
    fields = (
        f'<label>Samples<select name="kind">{kinds}</select></label>'
        f'<label>Order<select name="order">{orders}</select></label>'
        '<label>Step<input name="step" type="number" min="0" placeholder="any"></label>'
        '<label>Reward from<input name="minimum" type="number" step="any" placeholder="any">'
        '</label><label>to<input name="maximum" type="number" step="any" placeholder="any"></label>'
        "<button>Show</button>"
    )
    return (
        f'<section class="card samples"><h2>Samples</h2><form>{fields}</form>'
        '<p class="message" role="status"></p><div class="list"></div>'
        '<button type="button" class="more" hidden>More</button></section>'
    )
