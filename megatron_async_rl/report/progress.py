"""Terminal output of `mar train` and `mar eval`: a live panel or, in a pipe, lines; and a summary.

Invariants:
- the display only reads files of the run, so it cannot disturb the run;
- it reads each line of metrics once. Of the lines from before its start, it reads only the newest,
  so its memory does not depend on the length of the run.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import MetricRow, MetricsReader, NewRows, number
from megatron_async_rl.report.anomalies import KINDS, AnomalyFinder
from megatron_async_rl.report.metric_rows import MetricRows
from megatron_async_rl.report.run_data import (
    IN_A_STEP,
    REGIMES,
    RunData,
    Summary,
    read_run,
    span,
    summarise_run,
)
from megatron_async_rl.report.samples import newest_trained, visible
from megatron_async_rl.samples.types import Sample
from megatron_async_rl.watchdog.events import Status, read_status

REDRAW_S = 0.5
PLAIN_EVERY_S = 5.0
NEWEST_BYTES = 2**21
"""Number of bytes of earlier metrics that the panel reads."""
WARNED = ("gradient", "nonfinite")
"""Kinds of anomalies with a warning. The launcher warns about the loss of an engine."""
WIDTH = 92
SPARK_WIDTH = 16
RECENT = 240
"""Number of last rows that the panel uses."""
PACE = 20
"""Number of last rows over which speed and shares of time are measured."""
PROMPT_SHOWN = 60
"""Maximum number of characters of a prompt; the panel shows its end."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#%"
REGIME_STYLES = ("green", "yellow", "red")


@dataclass
class DisplayState:
    """Content of the display."""

    run_dir: str
    steps: int
    rows: deque[MetricRow] = field(default_factory=lambda: deque(maxlen=RECENT))
    status: Status | None = None
    elapsed_s: float = 0.0
    phase_s: float = 0.0
    silence_s: float = 0.0
    """Seconds since the last row."""
    anomalies: int = 0
    """Number of anomalies of the kinds in WARNED so far."""
    warning: str = ""
    """Text of the newest warning."""
    sample: Sample | None = None
    """The newest trained sample."""

    @property
    def phase(self) -> tuple[str, str]:
        """(phase, detail) of the status."""
        return (self.status.phase, self.status.detail) if self.status else ("starting", "the ranks")

    @property
    def now(self) -> str:
        return ": ".join(filter(None, self.phase))

    @property
    def done(self) -> int:
        """Number of finished steps."""
        if self.rows:
            return int(self.latest("step") or 0)
        return self.status.step if self.status else 0

    @property
    def step_s(self) -> float | None:
        """Median duration of the recent steps in seconds."""
        seconds = self.recent("time/step_s")
        return statistics.median(seconds) if seconds else None

    @property
    def left_s(self) -> float | None:
        step_s, left = self.step_s, self.steps - self.done
        return step_s * left if step_s is not None and left > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = sum(self.recent("time/step_s"))
        tokens = sum(self.recent("tokens/generated")) or sum(self.recent("tokens/trained"))
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    @property
    def measure(self) -> str:
        """`reward`, or `loss` for a supervised run."""
        return self.status.measure if self.status else "reward"

    @property
    def held_out(self) -> str:
        """Text with the held-out result before the first step and of the last evaluation."""
        key = "eval/loss" if self.measure == "loss" else "eval/mean"
        parts = []
        if self.status is not None and self.status.before is not None:
            parts.append(f"before {self.status.before:.3f}")
        for row in reversed(self.rows):
            if row.get("eval/version") and key in row:
                parts.append(f"version {number(row, 'eval/version')}: {number(row, key):.3f}")
                break
        return f"held-out {self.measure} {', '.join(parts)}" if parts else ""

    @property
    def sampled(self) -> bool:
        """True if the newest step trained on samples, so that reward and lag have a meaning."""
        return self.measure != "loss" and self.latest("ratio/ess_ratio") is not None

    def latest(self, key: str) -> float | None:
        """Return the number in the newest row; None if the row has none."""
        return number(self.rows[-1], key) if self.rows else None

    def recent(self, key: str) -> list[float]:
        """Return the finite values of the last PACE rows."""
        values = (number(row, key) for row in list(self.rows)[-PACE:])
        return [value for value in values if value is not None and math.isfinite(value)]

    def trend(self, key: str, blocks: str) -> str:
        values = (number(row, key) for row in self.rows)
        return sparkline([value for value in values if value is not None], blocks=blocks)


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH, blocks: str = BLOCKS) -> str:
    """Return at most `width` characters that show the finite `values`. Each character is the mean
    of an equal part of them, scaled to the range of the means."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    bins = min(width, len(finite))
    edges = [round(index * len(finite) / bins) for index in range(bins + 1)]
    means = [statistics.fmean(finite[low:high]) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def live_panel(state: DisplayState, *, ascii_only: bool) -> RenderableType:
    """Return the live display, about ten lines high."""
    now = Text(f"{state.now}  {span(state.phase_s)}", style="bold cyan")
    head = _two_ends(now, Text(f"elapsed {span(state.elapsed_s)}", style="dim"))
    left = f"about {span(state.left_s)} left" if state.left_s is not None else ""
    bar = ProgressBar(total=state.steps, completed=state.done)
    steps = _two_ends(bar, f"step {state.done}/{state.steps}  {left}")
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True, min_width=8)
    body.add_column(no_wrap=True, min_width=SPARK_WIDTH + 7)
    body.add_column(no_wrap=True, overflow="ellipsis", style="dim")
    for name, value, remark, style in _lines(state, ASCII_BLOCKS if ascii_only else BLOCKS):
        body.add_row(name, Text(value, style=style), Text(remark))

    parts: list[RenderableType] = [head, steps]
    if body.row_count:
        parts += ["", body]
    if state.sample is not None:
        parts += ["", _sample(state.sample)]
    if state.warning:
        count = f" ({state.anomalies} anomalies so far)" if state.anomalies > 1 else ""
        # Text, because a str with square brackets would be parsed as markup.
        parts.append(Text(f"warning: {state.warning}{count}", style="bold red"))
    return Panel(
        Group(*parts), title=state.run_dir, title_align="left", border_style="dim", width=WIDTH
    )


def _two_ends(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _sample(sample: Sample) -> RenderableType:
    """Return two lines: reward and end of the prompt, and the beginning of the response."""
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    reward = f"reward {sample.reward:.3f}" if sample.valid else "reward failed"
    # A sample is untrusted: `visible` escapes control characters, and Text does not parse markup.
    prompt = " ".join(visible(sample.prompt.text).split())
    shown = prompt if len(prompt) <= PROMPT_SHOWN else "…" + prompt[-PROMPT_SHOWN:]
    grid.add_row("sample", Text.assemble((reward, "bold"), "  ", (shown, "dim")))
    grid.add_row("", Text(" ".join(visible(sample.text).split())))
    return grid


def _lines(state: DisplayState, blocks: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, value, remark, style) of each line that has data in the newest row."""
    reward, loss = state.latest("reward/mean"), state.latest("policy/loss")
    if reward is not None and state.sampled:
        trend = state.trend("reward/mean", blocks)
        yield "reward", f"{reward:.3f}  {trend}", state.held_out, "bold"
    elif loss is not None and (state.measure == "loss" or not state.held_out):
        yield "loss", f"{loss:.4f}  {state.trend('policy/loss', blocks)}", state.held_out, "bold"
    elif state.held_out:
        yield state.measure, "", state.held_out, ""
    if failed := state.latest("reward/errors"):
        where = "logs/*.reward_errors.jsonl has the reasons"
        yield "failed", f"{failed:,.0f} rewards", where, "yellow"
    if (lag := state.latest("lag/mean")) is not None and state.sampled:
        largest = "" if (maximum := state.latest("lag/max")) is None else f"  max {maximum:.0f}"
        yield "lag", f"mean {lag:.2f}{largest}", "weight versions behind", ""
    if (ess := state.latest("ratio/ess_ratio")) is not None:
        yield "ESS", f"{ess:.3f}", "effective share of the samples", ""
    if (code := state.latest("gac/regime")) is not None:
        cosine, skips = state.latest("gac/cosine"), state.latest("gac/skips")
        value = f"cosine {cosine:+.3f} " if cosine is not None else ""
        remark = f"{skips:.0f} steps skipped so far" if skips else ""
        yield "gradient", value + REGIMES[int(code)], remark, REGIME_STYLES[int(code)]
    if (busy := state.latest("engine/busy_share")) is not None:
        alive = int(state.latest("engine/alive") or 0)
        versions = state.rows[-1].get("engine/versions")
        engines = len(versions) if isinstance(versions, list) else alive
        restarts = state.latest("engine/restarts")
        remark = f"{restarts:.0f} restarts so far" if restarts else ""
        value = f"{busy:.0%} busy  {alive} of {engines} alive"
        yield "engines", value, remark, "" if alive == engines else "yellow"
    if (speed := state.tokens_per_s) is not None:
        publish = state.latest("time/publish_s")
        # A supervised run has no engines to publish to.
        published = publish is not None and sum(state.recent("tokens/generated")) > 0
        remark = f"new weights published in {publish:.2f} s" if published else ""
        yield "speed", f"{speed:,.0f} tokens/s", remark, ""
    if (seconds := sum(state.recent("time/step_s"))) > 0:
        parts = ((name, sum(state.recent(key))) for name, key in IN_A_STEP.items())
        shares = [f"{part / seconds:.0%} {name}" for name, part in parts if part > 0]
        yield "time", f"{state.step_s or 0:.2f} s per step", ", ".join(shares), ""
    step_s = state.step_s
    if state.phase[0] == "training" and step_s and state.silence_s > max(10.0, 5 * step_s):
        remark = "see the logs folder of the run"
        yield "waiting", f"no step for {span(state.silence_s)}", remark, "yellow"


def plain_line(state: DisplayState) -> str:
    """Return a line with the main numbers of the panel, for a file or a pipe."""
    parts = [f"[{span(state.elapsed_s)}]", state.now]
    if state.rows:
        parts.append(f"step {state.done}/{state.steps}")
        names = {"policy/loss": "loss {:.4f}"}
        if state.sampled:
            names = {
                "reward/mean": "reward {:.3f}",
                "lag/mean": "lag {:.2f}",
                "ratio/ess_ratio": "ESS {:.3f}",
                "gac/cosine": "cosine {:+.3f}",
            }
        names["reward/errors"] = "{:,.0f} rewards failed"
        for key, text in names.items():
            value = state.latest(key)
            if value or (value is not None and key != "reward/errors"):
                parts.append(text.format(value))
        if (speed := state.tokens_per_s) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if state.left_s:
            parts.append(f"about {span(state.left_s)} left")
    return "  ".join(parts)


class Progress:
    """Display of an active run: a live panel on a terminal, else a line every few seconds and for
    each new phase."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self._run_dir = run_dir
        self._console = console
        self._reader = MetricsReader(run_dir, NEWEST_BYTES)
        self._anomalies = AnomalyFinder(run_dir)
        self._state = DisplayState(run_dir=str(run_dir), steps=total_steps)
        self._started = self._phase_began = self._last_row = time.monotonic()
        self._earlier_status = read_status(run_dir)
        self._drawn_at = float("-inf")
        self._drawn_phase = ("", "")
        self._drawn_step = -1
        self._sampled_step = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def update(self) -> None:
        """Read new rows, and redraw if due. Fast enough to be called several times per second."""
        now = time.monotonic()
        self._read(now)
        state, drawn = self._state, self._drawn_phase
        if self._live is not None:
            if now - self._drawn_at < REDRAW_S and state.phase == drawn:
                return
            self._draw(self._live)
        else:
            changed = state.phase != drawn or state.done != self._drawn_step
            due = changed and now - self._drawn_at >= PLAIN_EVERY_S
            if state.phase[0] == drawn[0] and not due:
                return
            self._print(plain_line(state))
        self._drawn_at, self._drawn_phase, self._drawn_step = now, state.phase, state.done

    def close(self) -> None:
        """Draw the final state and leave it on the screen."""
        if self._live is not None:
            self._read(time.monotonic())
            self._draw(self._live)
            self._live.stop()
            self._live = None

    def _draw(self, live: Live) -> None:
        state = self._state
        if state.done != self._sampled_step:
            self._sampled_step = state.done
            try:
                state.sample = newest_trained(self._run_dir) or state.sample
            except UserError as error:
                state.warning = f"no sample can be shown: {error}"
        live.update(live_panel(state, ascii_only=self._console.options.ascii_only), refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._state.warning = text
        if self._live is None:
            self._print(f"warning: {text}")

    def _new_rows(self) -> NewRows:
        try:
            return self._reader.new_rows()
        except UserError as error:
            # A damaged line must not end the display, which continues with the next line.
            problem = error.problems[0]
            self._warn(f"{problem.key} {problem.what}")
            return NewRows([], restarted=False)

    def _read(self, now: float) -> None:
        state = self._state
        new = self._new_rows()
        if new.restarted:
            state.rows.clear()
            self._anomalies = AnomalyFinder(self._run_dir)
        if new.rows:
            state.rows.extend(new.rows)
            self._last_row = now
        for anomaly in self._anomalies.find(new.rows):
            if anomaly.kind in WARNED:
                state.anomalies += 1
                self._warn(f"step {anomaly.step}: {KINDS[anomaly.kind][0]}, {anomaly.detail}")
        earlier, status = state.phase, read_status(self._run_dir)
        # Ignore the status of an earlier start, which is in the file until this start writes one.
        state.status = None if status == self._earlier_status else status
        if state.phase != earlier:
            self._phase_began = now
        state.elapsed_s = now - self._started
        state.phase_s = now - self._phase_began
        state.silence_s = now - self._last_row


def print_facts(facts: Sequence[tuple[str, str | Text]], console: Console) -> None:
    """Print (name, value) pairs, one per line, with the values in one column. Long values are not
    wrapped, so that a path can be copied."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        # Text, because a value must not be parsed as markup.
        console.print(Text.assemble((name.ljust(width), "dim"), "  ", value), soft_wrap=True)


def print_summary(run_dir: Path, console: Console) -> None:
    """Print the results of a run: held-out reward or loss, steps, tokens, time and files."""
    summary, other = _read_whole(run_dir)
    facts: list[tuple[str, str | Text]] = []
    if summary.before is not None and summary.after is not None:
        change = _change(summary.before, summary.after, style="bold")
        facts.append((f"held-out {summary.measure}", change))
    if other is not None:
        before, after = other.summary.before, other.summary.after
        if before is not None and after is not None:
            facts.append((other.name, _change(before, after)))
    facts.append(("steps", f"{summary.steps} in {span(summary.in_steps_s)}"))
    if summary.steps:
        counts = {"generated": summary.generated, "trained on": summary.trained}
        tokens = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        shares = [f"{share:.0%} {name}" for name, share in summary.shares.items() if share >= 0.005]
        facts.append(("tokens", f"{tokens or 'none'}  ({summary.tokens_per_s:,.0f} tokens/s)"))
        facts.append(("time", ", ".join(shares)))
    if summary.lag_ends and summary.generated:
        facts.append(("lag", f"{summary.lag_ends} versions"))
    if summary.failed:
        where = run_dir / "logs" / "*.reward_errors.jsonl"
        facts.append(("rewards", f"{summary.failed:,} failed: {where}"))
    if summary.regimes:
        regimes = (f"{count} {name}" for name, count in summary.regimes.items())
        facts.append(("gradients", ", ".join(regimes)))
    facts.append(("run", str(run_dir)))
    plots = (run_dir / name for name in ("report.html", "report.png"))
    facts += [("plot", str(path)) for path in plots if path.exists()]
    print_facts(facts, console)


def _change(before: float, after: float, style: str = "") -> Text:
    return Text.assemble((f"{before:.3f} → {after:.3f}", style), f"  ({after - before:+.3f})")


def _read_whole(run_dir: Path) -> tuple[Summary, RunData | None]:
    """Return (summary of a run, data of the run in `observe.beside`). A run without a report, such
    as a run without a finished step, has a summary, too."""
    try:
        run = read_run(run_dir, alone=False)
        return run.summary, run.beside
    except UserError:
        rows = MetricRows()
        for block in MetricsReader(run_dir).blocks():
            rows.add(block.rows)
        return summarise_run(rows, read_status(run_dir)), None


@contextmanager
def sampling_progress(console: Console, prompts: int) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, else a line every few seconds. Yields a function to call
    with (number of finished prompts, number of sampled tokens)."""
    started = shown = time.monotonic()

    def rate(tokens: int) -> str:
        return f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"

    if console.is_terminal:
        columns = (
            progress.TextColumn("sampling"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("prompts, {task.fields[rate]}"),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=prompts, rate="0 tokens/s")
            yield lambda answered, tokens: bar.update(task, completed=answered, rate=rate(tokens))
        return

    def line(answered: int, tokens: int) -> None:
        nonlocal shown
        if answered == prompts or time.monotonic() - shown >= PLAIN_EVERY_S:
            shown = time.monotonic()
            text = f"sampled {answered} of {prompts} prompts, {rate(tokens)}"
            console.print(text, highlight=False, soft_wrap=True)

    yield line


def show_evaluation(result: Mapping[str, Any], file: str, console: Console) -> None:
    """Print the result of an evaluation, as written to `file`."""
    facts: list[tuple[str, str | Text]] = []
    every = (result, *result.get("others", ()))
    for one in every:
        if "set" in one:
            facts.append(("set", Text(one["set"], style="bold")))
        facts += _evaluation_facts(one)
    seconds, tokens = result["seconds"], sum(one["tokens"] for one in every)
    speed = tokens / max(seconds, 1e-9)
    facts.append(("tokens", f"{tokens:,} in {seconds:.1f} s  ({speed:,.0f} tokens/s)"))
    print_facts([*facts, ("result", file)], console)


def _evaluation_facts(result: Mapping[str, Any]) -> Iterator[tuple[str, str | Text]]:
    mean = math.nan if result["mean_reward"] is None else result["mean_reward"]
    failed = f", {result['reward_errors']} rewards failed" if result["reward_errors"] else ""
    yield "mean reward", Text(f"{mean:.4f}", style="bold")
    for name, value in result.get("parts", {}).items():
        yield f"  {name}", f"{value:.4f}"
    for k, value in result["pass_at"].items():
        yield f"pass@{k}", "no reward" if value is None else f"{value:.4f}"
    yield "responses", f"{result['samples']} to {result['prompts']} prompts{failed}"
    yield "truncated", f"{result['truncated']:.1%}"
