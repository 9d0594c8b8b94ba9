"""The picture of a running run in a terminal: from the recent rows and the status to something rich
can draw, or to one line."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.metrics.status import Status
from megatron_async_rl.report.samples import visible
from megatron_async_rl.report.series import total
from megatron_async_rl.report.summary import IN_A_STEP, REGIMES, span
from megatron_async_rl.samples.types import Sample

WIDTH = 92
SPARK_WIDTH = 16
RECENT = 240
PROMPT_SHOWN = 60
"""Characters of a sample's prompt, its last; of the response what the line holds."""
PACE = 20
"""Rows that the pace (seconds per step, tokens per second, shares of time) is taken from."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#%"
REGIME_STYLES = ("green", "yellow", "red")


@dataclass
class DisplayState:
    """Everything known at the moment of drawing."""

    run_dir: str
    steps: int
    rows: deque[MetricRow] = field(default_factory=lambda: deque(maxlen=RECENT))
    status: Status | None = None
    elapsed_s: float = 0.0
    phase_s: float = 0.0
    silence_s: float = 0.0
    """Since the last row came."""
    anomalies: int = 0
    """Grave ones, so far."""
    warning: str = ""
    """The newest of them."""
    sample: Sample | None = None
    """The newest that was trained on."""

    @property
    def phase(self) -> str:
        return self.status.phase if self.status else "starting"

    @property
    def detail(self) -> str:
        return self.status.detail if self.status else "the ranks"

    @property
    def done(self) -> int:
        return (
            int(self.latest("step") or 0) if self.rows else (self.status.step if self.status else 0)
        )

    @property
    def recent(self) -> list[MetricRow]:
        return list(self.rows)[-PACE:]

    @property
    def step_s(self) -> float | None:
        """Median seconds of the recent steps."""
        seconds = [
            second for row in self.recent if (second := number(row, "time/step_s")) is not None
        ]
        return statistics.median(seconds) if seconds else None

    @property
    def left_s(self) -> float | None:
        return (
            self.step_s * (self.steps - self.done)
            if self.step_s is not None and self.done < self.steps
            else None
        )

    @property
    def tokens_per_s(self) -> float | None:
        seconds = total(self.recent, "time/step_s")
        tokens = total(self.recent, "tokens/generated") or total(self.recent, "tokens/trained")
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    @property
    def held_out(self) -> str:
        """Reward, or loss, before the first step, and that of the newest evaluation among the rows;
        empty if there is none."""
        before = self.status.before if self.status else None
        measure = self.status.measure if self.status else "reward"
        key = "eval/loss" if measure == "loss" else "eval/mean"
        newest = next(
            (row for row in reversed(self.rows) if row.get("eval/version") and key in row),
            None,
        )
        parts = [f"before {before:.3f}"] if before is not None else []
        if newest is not None:
            parts.append(f"version {number(newest, 'eval/version')}: {number(newest, key):.3f}")
        return f"held-out {measure} {', '.join(parts)}" if parts else ""

    @property
    def supervised(self) -> bool:
        """True for a run on given responses, which has a loss and neither reward nor lag."""
        return self.status is not None and self.status.measure == "loss"

    def latest(self, key: str) -> float | None:
        """The value in the last row; None where that has no such number."""
        return number(self.rows[-1], key) if self.rows else None


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH, blocks: str = BLOCKS) -> str:
    """At most `width` characters, each the mean of its share of `values`, scaled to their smallest
    and largest mean."""
    finite = [value for value in values if abs(value) != float("inf") and value == value]
    if not finite:
        return ""
    bins = min(width, len(finite))
    edges = [round(index * len(finite) / bins) for index in range(bins + 1)]
    means = [statistics.fmean(finite[low:high]) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def live_panel(state: DisplayState, *, ascii_only: bool) -> RenderableType:
    """The live display, ten or so lines."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    head = Table.grid(expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    now = f"{state.phase}: {state.detail}" if state.detail else state.phase
    head.add_row(
        Text(f"{now}  {span(state.phase_s)}", style="bold cyan"),
        Text(f"elapsed {span(state.elapsed_s)}", style="dim"),
    )

    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    left = f"about {span(state.left_s)} left" if state.left_s is not None else ""
    bar.add_row(
        ProgressBar(total=state.steps, completed=state.done),
        f"step {state.done}/{state.steps}  {left}",
    )

    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True, min_width=8)
    body.add_column(no_wrap=True, min_width=SPARK_WIDTH + 7)
    body.add_column(no_wrap=True, overflow="ellipsis")
    for name, value, aside in _lines(state, blocks):
        body.add_row(name, value, aside)
    parts: list[RenderableType] = [head, bar]
    if body.row_count:
        parts += ["", body]
    if state.sample is not None:
        parts += ["", _sample(state.sample)]
    if state.warning:
        count = f" ({state.anomalies} anomalies so far)" if state.anomalies > 1 else ""
        parts.append(Text(f"warning: {state.warning}{count}", style="bold red"))
    return Panel(
        Group(*parts), title=state.run_dir, title_align="left", border_style="dim", width=WIDTH
    )


def _sample(sample: Sample) -> RenderableType:
    """Two lines: reward and the end of the prompt, and the beginning of the response."""
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    reward = f"reward {sample.reward:.3f}" if sample.valid else "reward failed"
    prompt = " ".join(visible(sample.prompt.text).split())
    shown = prompt if len(prompt) <= PROMPT_SHOWN else "…" + prompt[-PROMPT_SHOWN:]
    grid.add_row("sample", Text.assemble((reward, "bold"), "  ", (shown, "dim")))
    grid.add_row("", Text(" ".join(visible(sample.text).split())))
    return grid


def _lines(state: DisplayState, blocks: str) -> list[tuple[str, Text, Text]]:
    """(name, value, aside) of every number there is."""
    lines: list[tuple[str, Text, Text]] = []

    def add(name: str, value: str, aside: str = "", style: str = "") -> None:
        lines.append((name, Text(value, style=style), Text(aside, style="dim")))

    def trend(key: str) -> str:
        return sparkline(
            [value for row in state.rows if (value := number(row, key)) is not None], blocks=blocks
        )

    sampled = state.latest("ratio/ess_ratio") is not None and not state.supervised
    reward, loss = state.latest("reward/mean"), state.latest("policy/loss")
    if reward is not None and sampled:
        add("reward", f"{reward:.3f}  {trend('reward/mean')}", state.held_out, "bold")
    elif loss is not None and (state.supervised or not state.held_out):
        add("loss", f"{loss:.4f}  {trend('policy/loss')}", state.held_out, "bold")
    elif state.held_out:
        add("loss" if state.supervised else "reward", "", state.held_out)
    if failed := state.latest("reward/errors"):
        add(
            "failed",
            f"{failed:,.0f} rewards",
            "logs/*.reward_errors.jsonl has the reasons",
            "yellow",
        )
    if (lag := state.latest("lag/mean")) is not None and sampled:
        add(
            "lag",
            f"mean {lag:.2f}  max {state.latest('lag/max') or 0:.0f}",
            "weight versions behind",
        )
    if (ess := state.latest("ratio/ess_ratio")) is not None:
        add("ESS", f"{ess:.3f}", "effective share of the samples")
    if (regime := state.latest("gac/regime")) is not None:
        cosine = state.latest("gac/cosine")
        skips = state.latest("gac/skips") or 0
        value = (
            f"cosine {cosine:+.3f} {REGIMES[int(regime)]}"
            if cosine is not None
            else REGIMES[int(regime)]
        )
        add(
            "gradient",
            value,
            f"{skips:.0f} steps skipped so far" if skips else "",
            REGIME_STYLES[int(regime)],
        )
    if (busy := state.latest("engine/busy_share")) is not None:
        versions = state.rows[-1].get("engine/versions")
        alive = int(state.latest("engine/alive") or 0)
        engines = len(versions) if isinstance(versions, list) else alive
        restarts = state.latest("engine/restarts") or 0
        aside = f"{restarts:.0f} restarts so far" if restarts else ""
        add(
            "engines",
            f"{busy:.0%} busy  {alive} of {engines} alive",
            aside,
            "" if alive == engines else "yellow",
        )
    if (speed := state.tokens_per_s) is not None:
        publish = state.latest("time/publish_s")
        generated = total(state.recent, "tokens/generated") > 0
        aside = (
            f"new weights published in {publish:.2f} s" if publish is not None and generated else ""
        )
        add("speed", f"{speed:,.0f} tokens/s", aside)
    if (seconds := total(state.recent, "time/step_s")) > 0:
        shares = [
            f"{total(state.recent, key) / seconds:.0%} {name}"
            for name, key in IN_A_STEP.items()
            if total(state.recent, key) > 0
        ]
        add("time", f"{state.step_s or 0:.2f} s per step", ", ".join(shares))
    if (
        state.phase == "training"
        and state.step_s is not None
        and state.silence_s > max(10.0, 5 * state.step_s)
    ):
        add(
            "waiting",
            f"no step for {span(state.silence_s)}",
            "see the logs folder of the run",
            "yellow",
        )
    return lines


def plain_line(state: DisplayState) -> str:
    """The same in one line, for a file or a pipe."""
    parts = [
        f"[{span(state.elapsed_s)}]",
        f"{state.phase}: {state.detail}" if state.detail else state.phase,
    ]
    if state.rows:
        parts.append(f"step {state.done}/{state.steps}")
        names = {
            "reward/mean": "reward {:.3f}",
            "lag/mean": "lag {:.2f}",
            "ratio/ess_ratio": "ESS {:.3f}",
            "gac/cosine": "cosine {:+.3f}",
        }
        if state.supervised or state.latest("ratio/ess_ratio") is None:
            names = {"policy/loss": "loss {:.4f}"}
        parts += [
            text.format(value)
            for key, text in names.items()
            if (value := state.latest(key)) is not None
        ]
        if failed := state.latest("reward/errors"):
            parts.append(f"{failed:,.0f} rewards failed")
        if (speed := state.tokens_per_s) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if state.left_s:
            parts.append(f"about {span(state.left_s)} left")
    return "  ".join(parts)


def print_facts(facts: Sequence[tuple[str, str | Text]], console: Console) -> None:
    """Prints (name, value), a line each, the values in one column. A value longer than the line
    stays whole, so that a path can be copied; nothing in it is taken for markup."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        console.print(Text.assemble((name.ljust(width), "dim"), "  ", value), soft_wrap=True)
