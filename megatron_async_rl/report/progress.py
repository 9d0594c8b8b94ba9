"""The screens of `mar train` and `mar eval` while they work, and their last words. `mar train`
draws a run from its files, so that the display cannot disturb it.

Invariant: each line of metrics is read once, and of those before the start only the newest, however
long the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import MetricsReader, NewRows
from megatron_async_rl.metrics.status import read_status
from megatron_async_rl.report.anomalies import KINDS, AnomalyFinder
from megatron_async_rl.report.display import DisplayState, live_panel, plain_line, print_facts
from megatron_async_rl.report.metric_rows import MetricRows
from megatron_async_rl.report.run_data import RunData, read_run
from megatron_async_rl.report.samples import newest_trained
from megatron_async_rl.report.summary import Summary, span, summarise_run

REDRAW_S = 0.5
PLAIN_EVERY_S = 5.0
NEWEST_BYTES = 2**21
"""Bytes of the metrics before the start that are drawn."""
WARNED = ("gradient", "nonfinite")
"""Anomalies that the display warns of at once; an engine's loss is an event, which the launcher
shows."""


class Progress:
    """A live panel on a terminal; elsewhere a line every few seconds and at each new phase."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self._run_dir = run_dir
        self._console = console
        self._reader = MetricsReader(run_dir, NEWEST_BYTES)
        self._anomalies = AnomalyFinder(run_dir)
        self._state = DisplayState(run_dir=str(run_dir), steps=total_steps)
        self._started = self._phase_began = self._last_row = time.monotonic()
        self._earlier_status = read_status(run_dir)
        self._drawn_at = float("-inf")
        self._drawn_phase: tuple[str, str] | None = None
        self._drawn_step = -1
        self._sampled_step = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def update(self) -> None:
        """Read the new rows and redraw if due. Cheap: call it a few times a second."""
        now = time.monotonic()
        self._read(now)
        state = self._state
        phase = (state.phase, state.detail)
        if self._live is not None:
            if now - self._drawn_at >= REDRAW_S or phase != self._drawn_phase:
                self._read_sample()
                self._live.update(
                    live_panel(state, ascii_only=self._console.options.ascii_only), refresh=True
                )
                self._drawn_at, self._drawn_phase = now, phase
        elif phase[0] != (self._drawn_phase or ("",))[0] or (
            now - self._drawn_at >= PLAIN_EVERY_S and self._has_news(phase)
        ):
            self._console.print(plain_line(state), markup=False, highlight=False, soft_wrap=True)
            self._drawn_at, self._drawn_phase, self._drawn_step = now, phase, state.done

    def close(self) -> None:
        """Leaves the last picture standing."""
        if self._live is not None:
            self._read(time.monotonic())
            self._read_sample()
            self._live.update(
                live_panel(self._state, ascii_only=self._console.options.ascii_only), refresh=True
            )
            self._live.stop()
            self._live = None

    def _has_news(self, phase: tuple[str, str]) -> bool:
        return phase != self._drawn_phase or self._state.done != self._drawn_step

    def _warn(self, text: str) -> None:
        self._state.warning = text
        if self._live is None:
            self._console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)

    def _new_rows(self) -> NewRows:
        try:
            return self._reader.new_rows()
        except UserError as error:  # a damaged line ends no run: the lines after it are read
            problem = error.problems[0]
            self._warn(f"{problem.key} {problem.what}")
            return NewRows([], restarted=False)

    def _read_sample(self) -> None:
        """One of the newest step's, for a terminal."""
        if self._state.done != self._sampled_step:
            self._sampled_step = self._state.done
            try:
                self._state.sample = newest_trained(self._run_dir) or self._state.sample
            except UserError as error:
                self._state.warning = f"no sample can be shown: {error}"

    def _read(self, now: float) -> None:
        state = self._state
        news = self._new_rows()
        if news.restarted:
            state.rows.clear()
            self._anomalies = AnomalyFinder(self._run_dir)
        if news.rows:
            state.rows.extend(news.rows)
            self._last_row = now
        for anomaly in self._anomalies.find(news.rows):
            if anomaly.kind in WARNED:
                state.anomalies += 1
                self._warn(f"step {anomaly.step}: {KINDS[anomaly.kind][0]}, {anomaly.detail}")
        earlier = (state.phase, state.detail)
        status = read_status(self._run_dir)
        # What an earlier process of the same run left behind is not this one's status.
        state.status = None if status == self._earlier_status else status
        if (state.phase, state.detail) != earlier:
            self._phase_began = now
        state.elapsed_s = now - self._started
        state.phase_s = now - self._phase_began
        state.silence_s = now - self._last_row


def print_summary(run_dir: Path, console: Console) -> None:
    """A run's last words: held-out reward or loss before and after, steps, tokens, time, and where
    everything is."""
    summary, beside = _read_whole(run_dir)
    facts: list[tuple[str, str | Text]] = []
    if summary.before is not None and summary.after is not None:
        change = _change(summary.before, summary.after, style="bold")
        facts.append((f"held-out {summary.measure}", change))
    if beside is not None:
        before, after = beside.summary.before, beside.summary.after
        if before is not None and after is not None:
            facts.append((beside.name, _change(before, after)))
    facts.append(("steps", f"{summary.steps} in {span(summary.in_steps_s)}"))
    if summary.steps:
        counts = {"generated": summary.generated, "trained on": summary.trained}
        tokens = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        facts.append(("tokens", f"{tokens or 'none'}  ({summary.tokens_per_s:,.0f} tokens/s)"))
        facts.append(
            (
                "time",
                ", ".join(
                    f"{share:.0%} {name}"
                    for name, share in summary.shares.items()
                    if share >= 0.005
                ),
            )
        )
    if summary.lag_mean is not None and summary.lag_max is not None and summary.generated:
        facts.append(("lag", f"mean {summary.lag_mean:.2f}, max {summary.lag_max} versions"))
    if summary.failed:
        where = run_dir / "logs" / "*.reward_errors.jsonl"
        facts.append(("rewards", f"{summary.failed:,} failed: {where}"))
    if summary.regimes:
        facts.append(
            ("gradients", ", ".join(f"{count} {name}" for name, count in summary.regimes.items()))
        )
    facts.append(("run", str(run_dir)))
    facts += [
        ("plot", str(run_dir / name))
        for name in ("report.html", "report.png")
        if (run_dir / name).exists()
    ]
    print_facts(facts, console)


def _change(before: float, after: float, style: str = "") -> Text:
    return Text.assemble((f"{before:.3f} → {after:.3f}", style), f"  ({after - before:+.3f})")


def _read_whole(run_dir: Path) -> tuple[Summary, RunData | None]:
    """The run in a few numbers, and the run to compare with. A run that has no report, such as one
    without a step or without a readable configuration, has its last words all the same."""
    try:
        run = read_run(run_dir, alone=False)
        return run.summary, run.beside
    except UserError:
        rows = MetricRows()
        for news in MetricsReader(run_dir).blocks():
            rows.add(news.rows)
        return summarise_run(rows, read_status(run_dir)), None


@contextmanager
def sampling_progress(console: Console, prompts: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, elsewhere a line every few seconds; called with the number of answered
    prompts, and their tokens."""
    started = shown = time.monotonic()

    def rate(tokens: int) -> str:
        return f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"

    if console.is_terminal:
        columns = (
            TextColumn("sampling"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts, {task.fields[rate]}"),
        )
        with ProgressBar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=prompts, rate="0 tokens/s")
            yield lambda answered, tokens: bar.update(task, completed=answered, rate=rate(tokens))
        return

    def line(answered: int, tokens: int) -> None:
        nonlocal shown
        if answered == prompts or time.monotonic() - shown >= PLAIN_EVERY_S:
            shown = time.monotonic()
            console.print(
                f"sampled {answered} of {prompts} prompts, {rate(tokens)}",
                highlight=False,
                soft_wrap=True,
            )

    yield line


def show_evaluation(result: Mapping[str, Any], file: str, console: Console) -> None:
    """`result`: the JSON of one evaluation; `file`: where it was written."""
    facts: list[tuple[str, str | Text]] = []
    for one in (result, *result.get("others", ())):
        if "set" in one:
            facts.append(("set", Text(one["set"], style="bold")))
        facts += _evaluation_facts(one)
    seconds = result["seconds"]
    tokens = sum(one["tokens"] for one in (result, *result.get("others", ())))
    speed = tokens / max(seconds, 1e-9)
    facts += [
        ("tokens", f"{tokens:,} in {seconds:.1f} s  ({speed:,.0f} tokens/s)"),
        ("result", file),
    ]
    print_facts(facts, console)


def _evaluation_facts(result: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    """Lines about the evaluation of one set, as pairs of label and value."""
    mean = result["mean_reward"]
    failed = f", {result['reward_errors']} rewards failed" if result["reward_errors"] else ""
    return [
        ("mean reward", Text(f"{math.nan if mean is None else mean:.4f}", style="bold")),
        *((f"  {name}", f"{value:.4f}") for name, value in result.get("parts", {}).items()),
        *(
            (f"pass@{k}", "no reward" if value is None else f"{value:.4f}")
            for k, value in result["pass_at"].items()
        ),
        ("responses", f"{result['samples']} to {result['prompts']} prompts{failed}"),
        ("truncated", f"{result['truncated']:.1%}"),
    ]
