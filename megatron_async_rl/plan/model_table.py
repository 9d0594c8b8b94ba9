"""The families of models that can be trained (`mar doctor --models`), from the table that `mar
plan` and the ranks refuse by (policy/supported.py)."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_async_rl.policy.families import FAMILIES, Family
from megatron_async_rl.policy.supported import EXPECTED, REFUSED


def show_families(console: Console) -> None:
    """Prints the families and what each may have, the keys of config.json that are bound in all or
    in one of them, and the families that are refused by name."""
    families = _table("model_type", "models", "sliding_window", "rope_type", "biases", "experts")
    for family in FAMILIES.values():
        families.add_row(
            f"[bold]{family.model_type}[/]",
            family.models,
            family.window,
            ", ".join(family.ropes),
            family.biases,
            "every layer" if family.mixture else "none",
        )
    console.print(families)

    bound = _table("only", "config.json")
    bound.add_row(
        "every family", "; ".join(_text(key, text) for key, (_, text) in EXPECTED.items())
    )
    for family in FAMILIES.values():
        if family.only:
            bound.add_row(family.model_type, _bound(family))
    console.print(bound)

    refused = _table("refused", "why")
    for model_type, why in REFUSED.items():
        refused.add_row(model_type, why)
    console.print(refused)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _bound(family: Family) -> str:
    return "; ".join(_text(key, text) for key, (_, text) in family.only.items())


def _text(key: str, text: str) -> str:
    return f"{key} {text}" if ":" in text else f"{key}: {text}"
