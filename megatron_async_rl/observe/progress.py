"""What `mar train` shows: the run, drawn from its files, so that the display cannot disturb it.

Invariant: each line of metrics is read once, however long the run.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_async_rl.observe.display import View, picture, plain_line
from megatron_async_rl.observe.fact_lines import print_facts
from megatron_async_rl.observe.read import MetricsReader, read_metrics
from megatron_async_rl.observe.status import read_status
from megatron_async_rl.observe.summary import span, summarise_run

REDRAW_S = 0.5
PLAIN_EVERY_S = 5.0


class Progress:
    """A live panel on a terminal; elsewhere a line every few seconds and at each new phase."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self._run_dir = run_dir
        self._console = console
        self._reader = MetricsReader(run_dir)
        self._view = View(run_dir=str(run_dir), steps=total_steps)
        self._started = self._phase_began = self._last_row = time.monotonic()
        self._earlier_status = read_status(run_dir)
        self._drawn_at = float("-inf")
        self._drawn_phase: tuple[str, str] | None = None
        self._drawn_step = -1
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def update(self) -> None:
        """Reads what is new and redraws when due. Cheap: call it a few times a second."""
        now = time.monotonic()
        self._read(now)
        view = self._view
        phase = (view.phase, view.detail)
        if self._live is not None:
            if now - self._drawn_at >= REDRAW_S or phase != self._drawn_phase:
                self._live.update(picture(view, ascii_only=self._console.options.ascii_only), refresh=True)
                self._drawn_at, self._drawn_phase = now, phase
        elif phase[0] != (self._drawn_phase or ("",))[0] or (now - self._drawn_at >= PLAIN_EVERY_S and self._has_news(phase)):
            self._console.print(plain_line(view), markup=False, highlight=False, soft_wrap=True)
            self._drawn_at, self._drawn_phase, self._drawn_step = now, phase, view.done

    def close(self) -> None:
        """Leaves the last picture standing."""
        if self._live is not None:
            self._read(time.monotonic())
            self._live.update(picture(self._view, ascii_only=self._console.options.ascii_only), refresh=True)
            self._live.stop()
            self._live = None

    def _has_news(self, phase: tuple[str, str]) -> bool:
        return phase != self._drawn_phase or self._view.done != self._drawn_step

    def _read(self, now: float) -> None:
        view = self._view
        news = self._reader.news()
        if news.restarted:
            view.rows.clear()
        if news.rows:
            view.rows.extend(news.rows)
            self._last_row = now
        earlier = (view.phase, view.detail)
        status = read_status(self._run_dir)
        # What an earlier process of the same run left behind is not this one's status.
        view.status = None if status == self._earlier_status else status
        if (view.phase, view.detail) != earlier:
            self._phase_began = now
        view.elapsed_s = now - self._started
        view.phase_s = now - self._phase_began
        view.silence_s = now - self._last_row


def print_summary(run_dir: Path, console: Console) -> None:
    """A run's last words: held-out reward before and after, steps, tokens, time, and where everything is."""
    summary = summarise_run(read_metrics(run_dir), read_status(run_dir))
    facts: list[tuple[str, str | Text]] = []
    if summary.before is not None and summary.after is not None:
        change = f"  ({summary.after - summary.before:+.3f})"
        facts.append(("held-out reward", Text.assemble((f"{summary.before:.3f} → {summary.after:.3f}", "bold"), change)))
    facts.append(("steps", f"{summary.steps} in {span(summary.in_steps_s)}"))
    if summary.steps:
        counts = {"generated": summary.generated, "trained on": summary.trained}
        tokens = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        facts.append(("tokens", f"{tokens or 'none'}  ({summary.tokens_per_s:,.0f} tokens/s)"))
        facts.append(("time", ", ".join(f"{share:.0%} {name}" for name, share in summary.shares.items() if share >= 0.005)))
    if summary.lag_mean is not None and summary.lag_max is not None and summary.generated:
        facts.append(("lag", f"mean {summary.lag_mean:.2f}, max {summary.lag_max} versions"))
    if summary.regimes:
        facts.append(("gradients", ", ".join(f"{count} {name}" for name, count in summary.regimes.items())))
    facts.append(("run", str(run_dir)))
    facts += [("plot", str(run_dir / name)) for name in ("report.html", "report.png") if (run_dir / name).exists()]
    print_facts(facts, console)
