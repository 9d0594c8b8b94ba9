"""Names and values in a terminal, a line each: a value longer than the line stays whole, so that a path can be copied."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text


def print_facts(facts: Sequence[tuple[str, str | Text]], console: Console) -> None:
    """Of (name, value), the values in one column. Nothing in them is taken for markup."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        console.print(Text.assemble((name.ljust(width), "dim"), "  ", value), soft_wrap=True)
