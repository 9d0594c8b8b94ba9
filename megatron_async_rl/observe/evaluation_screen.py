"""What `mar eval` shows: how far it is, and what it found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from megatron_async_rl.observe.fact_lines import print_facts

PLAIN_EVERY_S = 5.0


@contextmanager
def sampling_progress(console: Console, prompts: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, elsewhere a line every few seconds; told how many prompts are answered, and with how many tokens."""
    started = shown = time.monotonic()

    def rate(tokens: int) -> str:
        return f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"

    if console.is_terminal:
        columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts, {task.fields[rate]}"))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=prompts, rate="0 tokens/s")
            yield lambda answered, tokens: bar.update(task, completed=answered, rate=rate(tokens))
        return

    def line(answered: int, tokens: int) -> None:
        nonlocal shown
        if answered == prompts or time.monotonic() - shown >= PLAIN_EVERY_S:
            shown = time.monotonic()
            console.print(f"sampled {answered} of {prompts} prompts, {rate(tokens)}", highlight=False, soft_wrap=True)

    yield line


def show_evaluation(result: Mapping[str, Any], file: str, console: Console) -> None:
    """`result`: the JSON of one evaluation; `file`: where it was written."""
    mean = result["mean_reward"]
    failed = f", {result['reward_errors']} rewards failed" if result["reward_errors"] else ""
    speed = result["tokens"] / max(result["seconds"], 1e-9)
    facts: list[tuple[str, str | Text]] = [
        ("mean reward", Text(f"{math.nan if mean is None else mean:.4f}", style="bold")),
        *((f"pass@{k}", f"{value:.4f}") for k, value in result["pass_at"].items()),
        ("responses", f"{result['samples']} to {result['prompts']} prompts{failed}"),
        ("truncated", f"{result['truncated']:.1%}"),
        ("tokens", f"{result['tokens']:,} in {result['seconds']:.1f} s  ({speed:,.0f} tokens/s)"),
        ("result", file),
    ]
    print_facts(facts, console)
