"""Samples of a run for people: `mar samples`, and their section of the report's page.

Invariants:
- prompts and responses are untrusted text: control characters are escaped on a terminal, and
  everything is escaped in HTML;
- reading never changes the log and works while it is being written (samples/segments.py); damage
  is reported by the name of its file;
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
"""Number of samples that are shown by default."""
LOOKED_AT = 4_000
"""Number of newest samples that are searched for a trained one."""
LONGEST = 2000
"""Number of characters of a prompt or response on a terminal; --json has all."""
PAGE_STEPS, PAGE_EACH, PAGE_OPEN, PAGE_LONGEST = 3, 3, 400, 5_000
"""On the page: number of last steps, of samples of each kind, of unfolded characters of a text, and
of all its characters."""


@dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """Selection of samples by at most one of `worst`, `best` and `random`; by default the newest
    few, or all of `step`."""

    step: int | None = None
    worst: int | None = None
    best: int | None = None
    random: int | None = None
    seed: int = 0
    held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleSelection:
    """Selected samples."""

    samples: Sequence[tuple[Entry, Sample]]
    missing: int = 0
    """Number of samples of the requested step that the log does not hold."""
    lost: str | None = None
    """Text on segments that the log lacks at its end."""


@contextmanager
def log_readable() -> Iterator[None]:
    """Raises UserError for a file of the log that cannot be read."""
    try:
        yield
    except SegmentBroken as error:
        raise UserError.of(str(error.path), error.what, error.fix) from error


@log_readable()
def choose(run_dir: Path, wanted: SampleQuery) -> SampleSelection:
    """Select samples of a run. Raises UserError for a missing run or step, and for an unreadable
    log."""
    counts = {
        name: count
        for name in ("worst", "best", "random")
        if (count := getattr(wanted, name)) is not None
    }
    # Options that exclude each other are refused: ignoring one would answer another question.
    if len(counts) > 1:
        options = " and ".join(f"--{name}" for name in counts)
        raise UserError.of(options, "exclude each other", "give one of them")
    check_log(run_dir)

    missing = 0
    # Groups of held-out evaluations have negative numbers. A generator: the log is read newest
    # first.
    entries = (one for one in read_entries(run_dir) if (one.group < 0) == wanted.held_out)
    if wanted.step is not None:
        of_step, missing = _of_step(run_dir, entries, wanted)
        chosen = _pick(of_step, wanted)
    elif counts:
        chosen = _pick(list(entries), wanted)
    else:
        chosen = list(itertools.islice(entries, NEWEST))
    if not chosen:
        kind = "held-out evaluation" if wanted.held_out else "training"
        fix = "try again when one has finished, or look without --eval and --step"
        raise UserError.of("RUN", f"the log of {run_dir} holds no such sample of {kind}", fix)
    return SampleSelection(samples=load(run_dir, chosen), missing=missing, lost=lost_end(run_dir))


def newest_trained(run_dir: Path) -> Sample | None:
    """Return the newest sample that a step trained on; None if it is not among the newest few
    thousand. Raises UserError for a damaged log."""
    with log_readable():
        # Bounded, because the live panel calls this after every step.
        entries = itertools.islice(read_entries(run_dir), LOOKED_AT)
        chosen = next((one for one in entries if one.state == "trained"), None)
        loaded = load(run_dir, [chosen]) if chosen else []
    return loaded[0][1] if loaded else None


def print_samples(chosen: SampleSelection, console: Console, *, as_json: bool) -> None:
    """Print the samples for people or, with `as_json`, one whole sample per line for tools."""
    for entry, sample in chosen.samples:
        if as_json:
            # One line per sample without colours or wrapping, for pipes.
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
    if chosen.missing and not as_json:
        console.print(f"{chosen.missing:,} more of them are no longer kept", style="dim")
    if chosen.lost is not None and not as_json:
        console.print(Text(f"note: {chosen.lost}", style="red"))


def as_dict(entry: Entry, sample: Sample) -> dict[str, Any]:
    """Return plain JSON; numbers that are not finite are null."""
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
    """Return HTML with the best, the worst and some random samples of the last steps in the log.
    Without readable samples it is a sentence; for a run that keeps none it is empty."""
    try:
        return _section(run_dir)
    except UserError as error:
        message = "; ".join(f"{one.key} {one.what}: {one.fix}" for one in error.problems)
        return _sentence(f"They cannot be shown. {message}.")


def _sentence(text: str) -> str:
    return f'<section class="card samples"><h2>Samples</h2><p>{html.escape(text)}</p></section>'


@log_readable()
def _section(run_dir: Path) -> str:
    outcomes = _outcomes(run_dir, "trained")
    # The last steps only: they show the policy as it is now.
    steps = sorted(pc.unique(outcomes["step"]).to_pylist())[-PAGE_STEPS:]
    of_steps = outcomes.filter(pc.is_in(outcomes["step"], pa.array(steps, pa.int64())))
    trained, _ = _find(read_entries(run_dir), of_steps)
    if not trained:
        lost = lost_end(run_dir)
        config = read_config(run_dir)
        # A run that keeps no samples on purpose gets no section instead of a complaint.
        off = config.get("rollout") is None or (config.get("samples") or {}).get("keep_mib") == 0
        if off and lost is None:
            return ""
        return _sentence(
            "The samples folder of the run is missing, or holds none that a step has trained on."
            + (f" {lost}." if lost is not None else "")
        )
    scored = sum(entry.valid for entry in trained)
    # A third each, so that few samples are not all called the best.
    each = min(PAGE_EACH, max(1, scored // 3))
    parts = []
    shown: set[Entry] = set()
    for name, wanted in (
        ("Best", SampleQuery(best=each)),
        ("Worst", SampleQuery(worst=each)),
        ("Random", SampleQuery(random=each, seed=steps[-1])),
    ):
        # A sample appears under one heading only.
        picked = _pick([entry for entry in trained if entry not in shown], wanted)
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
    if not run_dir.is_dir():
        raise UserError.of("RUN", f"{run_dir} is not a directory", "name the run.dir of a run")
    if segments_in(run_dir / FOLDER):
        return
    if (lost := lost_end(run_dir)) is not None:
        raise UserError.of("RUN", lost, "restore the folder from a copy")

    config = read_config(run_dir)
    if not config and not (run_dir / "metrics.jsonl").exists():
        what, fix = "holds no run", "name the run.dir of a run"
    elif config and config.get("rollout") is None:
        what, fix = "is a supervised run, which samples nothing", "look at its data.train"
    elif (config.get("samples") or {}).get("keep_mib") == 0:
        what, fix = "logged no samples (samples.keep_mib: 0)", "give the next run room for them"
    else:
        what, fix = "has no samples yet", "try again when a response has finished"
    raise UserError.of("RUN", f"{run_dir} {what}", fix)


def _of_step(
    run_dir: Path, entries: Iterable[Entry], wanted: SampleQuery
) -> tuple[list[Entry], int]:
    """Return the samples of the requested step (or of the evaluation of the requested version), and
    the number of those that the log does not hold."""
    assert wanted.step is not None
    outcome: SampleOutcome = "evaluated" if wanted.held_out else "trained"
    noun = "version" if wanted.held_out else "step"
    known = _outcomes(run_dir, outcome)
    steps = sorted(pc.unique(known["step"]).to_pylist())
    if wanted.step not in steps:
        there = f"its log holds {noun} {_ranges(steps)}" if steps else "look without --step"
        raise UserError.of("--step", f"{run_dir} has no sample of {noun} {wanted.step}", there)
    found, missing = _find(entries, known.filter(pc.equal(known["step"], wanted.step)))
    if not found:
        raise UserError.of(
            "--step",
            f"{run_dir} keeps the samples of {noun} {wanted.step} no longer",
            f"look at a later {noun}, up to {steps[-1]}; samples.keep_mib limits how many are kept,"
            f" and {run_dir / FOLDER} should hold them",
        )
    return found, missing


def _outcomes(run_dir: Path, outcome: SampleOutcome) -> pa.Table:
    table = read_table(run_dir, "outcomes")
    return table.filter(pc.equal(table["outcome"], outcome))


def _find(entries: Iterable[Entry], outcomes: pa.Table) -> tuple[list[Entry], int]:
    """Return the entries of `outcomes`, and the number of those that are missing. `entries` are
    read, newest first, until all are found."""
    # id and time: a resumed run samples an id again, and only one of both was trained on.
    keys = set(zip(outcomes["id"].to_pylist(), outcomes["finished_at"].to_pylist(), strict=True))
    found: list[Entry] = []
    for entry in entries:
        if not keys:
            break
        if (entry.id, entry.finished_at) in keys:
            keys.remove((entry.id, entry.finished_at))
            found.append(entry)
    return found, len(keys)


def _pick(entries: Sequence[Entry], wanted: SampleQuery) -> list[Entry]:
    """Return the requested number of entries, or all of them by group. A failed reward is neither
    best nor worst; among equal rewards, newer samples come first."""
    scored = [entry for entry in entries if entry.valid]
    if wanted.best is not None:
        # nlargest is stable, and entries come newest first, which gives the order of ties.
        return heapq.nlargest(wanted.best, scored, key=lambda entry: entry.reward)
    if wanted.worst is not None:
        return heapq.nsmallest(wanted.worst, scored, key=lambda entry: entry.reward)
    if wanted.random is not None:
        count = min(wanted.random, len(entries))
        # Seeded, so that the same command shows the same samples.
        return random.Random(wanted.seed).sample(list(entries), count)
    # Numbers of held-out groups are negative, hence the absolute value.
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
    yield {
        "trained": f"trained at step {' and '.join(str(step) for step in entry.steps)}",
        "evaluated": f"evaluation of version {entry.steps[0] if entry.steps else '?'}",
        "dropped": f"dropped ({entry.reason})",
        "waiting": "not trained on so far",
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
    """Return the lag of the first token at the sample's first step; None for other samples."""
    if entry.state != "trained":
        return None
    # Step n trains version n - 1.
    return entry.steps[0] - 1 - sample.start_version


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except line ends and tabs, and characters that turn the direction of text."""


def visible(text: str) -> str:
    """Return a text for a terminal: control characters are escaped, and a long text is cut."""
    # Cut before escaping: the number of characters is that of the original text.
    more = len(text) - LONGEST
    if more > 0:
        text = text[:LONGEST]
    shown = "".join(
        one.encode("unicode_escape").decode() if _CONTROL.match(one) else one for one in text
    )
    return shown + (f" ... {more:,} more characters; --json has all" if more > 0 else "")


def _plain(value: Any) -> Any:
    """Return a field of a prompt for JSON: Python reads NaN, and other tools refuse it."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    # NaN fails every comparison, so it is excluded as well.
    return value if abs(value) < float("inf") else None


def card(entry: Entry, sample: Sample) -> str:
    """Return HTML of one sample."""
    facts = html.escape(" · ".join(_facts(entry, sample)))
    prompt, response = _folded("prompt", sample.prompt.text), _folded("response", sample.text)
    failed = "" if sample.reward_error is None else _folded("error", sample.reward_error)
    return f'<div class="sample"><p>{facts}</p>{prompt}{response}{failed}</div>\n'


def _folded(name: str, text: str) -> str:
    def block(part: str) -> str:
        return f'<pre class="{name}">{html.escape(part)}</pre>'

    if len(text) <= PAGE_OPEN:
        return block(text)
    cut = text[:PAGE_LONGEST]
    end = "" if len(cut) == len(text) else f"\n... {len(text) - len(cut):,} more characters"
    summary = f"<summary>{len(text):,} characters</summary>"
    return f"{block(text[:PAGE_OPEN] + '...')}<details>{summary}{block(cut + end)}</details>"
