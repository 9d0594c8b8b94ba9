"""A method without settings may be written as its bare name: `loss: reinforce` is `loss: {name: reinforce}`."""

from __future__ import annotations

from typing import Any


def bare_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value
