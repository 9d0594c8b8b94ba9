"""Samples of a run as text (`mar samples`) and as a section of the report's page.

Invariants:
- prompts and responses are untrusted text: control characters are escaped on a terminal, and all
  text is escaped in HTML;
- reading never changes the log, and works while the log is being written (samples/segments.py). An
  error for a damaged log names the file;
- the same log and options give the same samples in the same order.
"""

from __future__ import annotations

import heapq
import html
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.text import Text

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.report.run_data import read_config
from megatron_async_rl.samples.frames import FOLDER, SegmentBroken, lost_end, segments_in
from megatron_async_rl.samples.segments import Entry, SampleOutcome, load, read_entries, read_table
from megatron_async_rl.samples.types import Sample

NEWEST = 5
"""Default number of samples."""
SEARCHED = 4_000
"""Number of newest samples that `newest_trained` searches."""
LONGEST = 2000
"""Maximum number of characters of a prompt or response on a terminal. `--json` prints all."""
PAGE_STEPS, PAGE_EACH, PAGE_OPEN, PAGE_LONGEST = 3, 3, 400, 5_000
"""Limits of the page: number of last steps, samples per heading, visible characters of a text, and
characters of a text including the folded ones."""


@dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """Selection of samples: all samples of `step`, or of the whole log, reduced by at most one of
    `worst`, `best` and `random`. Without any of these, the newest samples."""

    step: int | None = None
    """Optimizer step or, with `held_out`, weight version."""
    worst: int | None = None
    """Number of samples with the lowest rewards."""
    best: int | None = None
    """Number of samples with the highest rewards."""
    random: int | None = None
    """Number of random samples, drawn with `seed`."""
    seed: int = 0
    held_out: bool = False
    """Select samples of held-out evaluations instead of training samples."""


@dataclass(frozen=True, kw_only=True)
class SampleSelection:
    """Selected samples."""

    samples: Sequence[tuple[Entry, Sample]]
    missing: int = 0
    """Number of samples of the requested step that are no longer in the log."""
    lost: str | None = None
    """Text about the end of the log, if it is missing."""


@contextmanager
def log_readable() -> Iterator[None]:
    """Turn the error for an unreadable file of the log into a UserError."""
    try:
        yield
    except SegmentBroken as error:
        raise UserError.of(str(error.path), error.what, error.fix) from error


@log_readable()
def choose(run_dir: Path, query: SampleQuery) -> SampleSelection:
    """Return the selected samples of a run. Raises UserError for an invalid query, for a missing
    run or step, and for an unreadable log."""
    counts = {
        name: count
        for name in ("worst", "best", "random")
        if (count := getattr(query, name)) is not None
    }
    # Refuse conflicting options: no option may be ignored silently.
    if len(counts) > 1:
        options = " and ".join(f"--{name}" for name in counts)
        raise UserError.of(options, "exclude each other", "set only one of them")
    check_log(run_dir)

    missing = 0
    # Groups of held-out evaluations have negative numbers. Keep a generator, which reads only as
    # much of the log as is needed, newest samples first.
    entries = (one for one in read_entries(run_dir) if (one.group < 0) == query.held_out)
    if query.step is not None:
        of_step, missing = _of_step(run_dir, entries, query)
        selected = _pick(of_step, query)
    elif counts:
        selected = _pick(list(entries), query)
    else:
        selected = list(itertools.islice(entries, NEWEST))
    if not selected:
        kind = "held-out evaluation" if query.held_out else "training"
        fix = "try again when a response has finished, or omit --eval and --step"
        raise UserError.of("RUN", f"the log of {run_dir} has no such sample of {kind}", fix)
    return SampleSelection(samples=load(run_dir, selected), missing=missing, lost=lost_end(run_dir))


def newest_trained(run_dir: Path) -> Sample | None:
    """Return the newest sample that a step trained on; None if the SEARCHED newest samples have no
    such sample. Raises UserError for a damaged log."""
    with log_readable():
        # Limit the search, because the live panel calls this function after every step.
        entries = itertools.islice(read_entries(run_dir), SEARCHED)
        newest = next((one for one in entries if one.state == "trained"), None)
        loaded = load(run_dir, [newest]) if newest else []
    return loaded[0][1] if loaded else None


def print_samples(selection: SampleSelection, console: Console, *, as_json: bool) -> None:
    """Print the samples as text or, with `as_json`, as one JSON object per line."""
    for entry, sample in selection.samples:
        if as_json:
            # Write to the file directly, because the console would wrap the line.
            line = json.dumps(as_dict(entry, sample), allow_nan=False)
            console.file.write(line + "\n")
            continue
        heading = Text(" · ".join(_facts(entry, sample)), style="bold")
        console.rule(style="dim")
        console.print(heading)
        for name, text, style in (
            ("prompt", sample.prompt.text, "cyan"),
            ("response", sample.text, "green" if sample.valid else "red"),
        ):
            console.print(Text(f"{name}: ", style="dim") + Text(visible(text), style=style))
        if sample.reward_error is not None:
            console.print(Text(f"reward failed: {visible(sample.reward_error)}", style="red"))
    if selection.missing and not as_json:
        console.print(f"{selection.missing:,} more are no longer in the log", style="dim")
    if selection.lost is not None and not as_json:
        console.print(Text(f"note: {selection.lost}", style="red"))


def as_dict(entry: Entry, sample: Sample) -> dict[str, Any]:
    """Return a sample as plain JSON values; numbers that are not finite become null."""
    rewards, segments = sample.step_rewards, sample.segment_starts
    return {
        "id": sample.id,
        "group": entry.group,
        "state": entry.state,
        "steps": list(entry.steps),
        "reason": entry.reason,
        "lag": _lag(entry, sample),
        "reward": _finite(sample.reward),
        "reward_error": sample.reward_error,
        "reward_parts": _plain(sample.reward_parts and dict(sample.reward_parts)),
        "step_rewards": None if rewards is None else [_finite(one) for one in rewards.tolist()],
        "prompt_id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "fields": _plain(dict(sample.prompt.fields)),
        "response": sample.text,
        "finish_reason": sample.finish_reason,
        "prompt_ids": list(sample.prompt.token_ids),
        "response_ids": sample.response_ids.tolist(),
        "behavior_logprobs": [_finite(one) for one in sample.behavior_logprobs.tolist()],
        "versions": sample.versions.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "segment_starts": None if segments is None else segments.tolist(),
        "engine": sample.engine,
        "started_at": sample.started_at,
        "finished_at": sample.finished_at,
    }


def samples_section(run_dir: Path) -> str:
    """Return HTML with the best, the worst and some random samples of the last steps in the log; a
    message if there are none or they are unreadable; empty for a run that logs no samples."""
    try:
        return _section(run_dir)
    except UserError as error:
        message = "; ".join(f"{one.key} {one.what}: {one.fix}" for one in error.problems)
        return _message(f"The samples cannot be shown. {message}.")


def _message(text: str) -> str:
    return f'<section class="card samples"><h2>Samples</h2><p>{html.escape(text)}</p></section>'


@log_readable()
def _section(run_dir: Path) -> str:
    outcomes = _outcomes(run_dir, "trained")
    # Use only the last steps, which show the current policy.
    steps = sorted(pc.unique(outcomes["step"]).to_pylist())[-PAGE_STEPS:]
    of_steps = outcomes.filter(pc.is_in(outcomes["step"], pa.array(steps, pa.int64())))
    trained, _ = _find(read_entries(run_dir), of_steps)
    if not trained:
        lost = lost_end(run_dir)
        config = read_config(run_dir)
        # A run that is configured to log no samples needs no message.
        off = config.get("rollout") is None or (config.get("samples") or {}).get("keep_mib") == 0
        if off and lost is None:
            return ""
        return _message(
            "The samples folder of the run is missing, or contains no sample that a step trained"
            " on." + (f" {lost}." if lost is not None else "")
        )
    scored = sum(entry.valid for entry in trained)
    # Limit each heading to a third, so that a few samples are not all listed as the best.
    each = min(PAGE_EACH, max(1, scored // 3))
    parts = []
    shown: set[Entry] = set()
    for name, query in (
        ("Best", SampleQuery(best=each)),
        ("Worst", SampleQuery(worst=each)),
        ("Random", SampleQuery(random=each, seed=steps[-1])),
    ):
        # List a sample under one heading only.
        picked = _pick([entry for entry in trained if entry not in shown], query)
        shown |= {*picked}
        cards = "".join(card(entry, sample) for entry, sample in load(run_dir, picked))
        if cards:
            parts.append(f"<h3>{name}</h3>\n{cards}")
    lost = lost_end(run_dir)
    if lost is not None:
        parts.insert(0, f"<p>{html.escape(lost)}.</p>")
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return (
        f'<section class="card samples">\n'
        f"<h2>Samples that {span} trained on</h2>\n" + "\n".join(parts) + "</section>"
    )


def check_log(run_dir: Path) -> None:
    """Raise UserError, with the reason, if the run has no log of samples."""
    if not run_dir.is_dir():
        raise UserError.of("RUN", f"{run_dir} is not a directory", "name the run.dir of a run")
    if segments_in(run_dir / FOLDER):
        return
    if (lost := lost_end(run_dir)) is not None:
        raise UserError.of("RUN", lost, "restore the folder from a copy")

    config = read_config(run_dir)
    if not config and not (run_dir / "metrics.jsonl").exists():
        what, fix = "is not a run", "name the run.dir of a run"
    elif config and config.get("rollout") is None:
        what, fix = "is a supervised run, which samples no responses", "see its data.train"
    elif (config.get("samples") or {}).get("keep_mib") == 0:
        what, fix = "logs no samples (samples.keep_mib: 0)", "set a larger size in the next run"
    else:
        what, fix = "has no samples yet", "try again when a response has finished"
    raise UserError.of("RUN", f"{run_dir} {what}", fix)


def _of_step(
    run_dir: Path, entries: Iterable[Entry], query: SampleQuery
) -> tuple[list[Entry], int]:
    """Return (samples of the requested step or evaluated version, number of its samples that are no
    longer in the log). Raises UserError if there are none."""
    assert query.step is not None
    outcome: SampleOutcome = "evaluated" if query.held_out else "trained"
    noun = "version" if query.held_out else "step"
    outcomes = _outcomes(run_dir, outcome)
    steps = sorted(pc.unique(outcomes["step"]).to_pylist())
    if query.step not in steps:
        fix = f"name a {noun} in the log: {_ranges(steps)}" if steps else "omit --step"
        raise UserError.of("--step", f"{run_dir} has no sample of {noun} {query.step}", fix)
    found, missing = _find(entries, outcomes.filter(pc.equal(outcomes["step"], query.step)))
    if not found:
        raise UserError.of(
            "--step",
            f"{run_dir} no longer has the samples of {noun} {query.step}",
            f"name a later {noun}, up to {steps[-1]}; samples.keep_mib limits the size of the log"
            f" in {run_dir / FOLDER}",
        )
    return found, missing


def _outcomes(run_dir: Path, outcome: SampleOutcome) -> pa.Table:
    table = read_table(run_dir, "outcomes")
    return table.filter(pc.equal(table["outcome"], outcome))


def _find(entries: Iterable[Entry], outcomes: pa.Table) -> tuple[list[Entry], int]:
    """Return (entries of `outcomes`, number of outcomes without an entry). Consumes `entries`,
    newest first, until all are found."""
    # Compare id and time: a resumed run may sample an id again, and a step trains on only one of
    # both samples.
    keys = set(zip(outcomes["id"].to_pylist(), outcomes["finished_at"].to_pylist(), strict=True))
    found: list[Entry] = []
    for entry in entries:
        if not keys:
            break
        if (entry.id, entry.finished_at) in keys:
            keys.remove((entry.id, entry.finished_at))
            found.append(entry)
    return found, len(keys)


def _pick(entries: Sequence[Entry], query: SampleQuery) -> list[Entry]:
    """Return the best, worst or random entries of a query, or all entries sorted by group. Samples
    without a reward are neither best nor worst. Of equal rewards, newer samples come first."""
    scored = [entry for entry in entries if entry.valid]
    if query.best is not None:
        # nlargest and nsmallest are stable, so ties keep the order of entries, newest first.
        return heapq.nlargest(query.best, scored, key=lambda entry: entry.reward)
    if query.worst is not None:
        return heapq.nsmallest(query.worst, scored, key=lambda entry: entry.reward)
    if query.random is not None:
        count = min(query.random, len(entries))
        # With the seed, the same command shows the same samples.
        return random.Random(query.seed).sample(list(entries), count)
    # The numbers of held-out groups are negative.
    return sorted(entries, key=lambda entry: (abs(entry.group), entry.id))


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: `3 to 9, 12`."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last in parts]
    return ", ".join(ranges if len(ranges) <= 6 else [*ranges[:3], "...", *ranges[-2:]])


def _facts(entry: Entry, sample: Sample) -> Iterator[str]:
    """Yield the parts of a sample's heading."""
    yield {
        "trained": f"trained at step {' and '.join(str(step) for step in entry.steps)}",
        "evaluated": f"evaluation of version {entry.steps[0] if entry.steps else '?'}",
        "dropped": f"dropped ({entry.reason})",
        "waiting": "not trained on yet",
        "repeated": "lost in a crash, sampled again",
        "lost": "lost in a crash",
    }[entry.state]
    parts = [f"{name} {value:.4g}" for name, value in (sample.reward_parts or {}).items()]
    each = f" ({', '.join(parts)})" if parts else ""
    yield f"reward {sample.reward:.4g}{each}" if sample.valid else "reward failed"
    yield f"sample {sample.id}"
    yield f"prompt {visible(sample.prompt.id)}"
    plural = "" if sample.length == 1 else "s"
    yield f"{sample.length} token{plural}, {sample.finish_reason}"
    first, last = sample.start_version, int(sample.versions.max())
    yield f"version {first}" if first == last else f"versions {first} to {last}"
    lag = _lag(entry, sample)
    if lag is not None:
        yield f"lag {lag}"
    yield f"engine {sample.engine}"


def _lag(entry: Entry, sample: Sample) -> int | None:
    """Return the lag of a trained sample's first token at the first step that trained on it; None
    for other samples."""
    if entry.state != "trained":
        return None
    # Step n trains version n - 1.
    return entry.steps[0] - 1 - sample.start_version


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except line feed and tab, and characters that change the text direction."""


def visible(text: str) -> str:
    """Return a text for a terminal, with control characters escaped and truncated to LONGEST
    characters."""
    # Truncate before escaping, so that the number of omitted characters is that of the text.
    more = len(text) - LONGEST
    if more > 0:
        text = text[:LONGEST]
    shown = "".join(
        one.encode("unicode_escape").decode() if _CONTROL.match(one) else one for one in text
    )
    return shown + (f" ... {more:,} more characters (use --json to print all)" if more > 0 else "")


def _plain(value: Any) -> Any:
    """Return a JSON value with null for numbers that are not finite, which most tools refuse."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    # The comparison is also false for NaN.
    return value if abs(value) < float("inf") else None


def card(entry: Entry, sample: Sample) -> str:
    """Return HTML of one sample."""
    facts = html.escape(" · ".join(_facts(entry, sample)))
    prompt, response = _folded("prompt", sample.prompt.text), _folded("response", sample.text)
    failed = "" if sample.reward_error is None else _folded("error", sample.reward_error)
    return f'<div class="sample"><p>{facts}</p>{prompt}{response}{failed}</div>\n'


def _folded(name: str, text: str) -> str:
    """Return HTML of a text that shows its first PAGE_OPEN characters until it is unfolded."""

    def block(part: str) -> str:
        return f'<pre class="{name}">{html.escape(part)}</pre>'

    if len(text) <= PAGE_OPEN:
        return block(text)
    cut = text[:PAGE_LONGEST]
    end = "" if len(cut) == len(text) else f"\n... {len(text) - len(cut):,} more characters"
    summary = f"<summary>{len(text):,} characters</summary>"
    return f"{block(text[:PAGE_OPEN] + '...')}<details>{summary}{block(cut + end)}</details>"
