"""The environment `agent`: a program, or a function, that is given the base URL of an OpenAI-compatible
endpoint and the prompt, asks the model what it likes there, and ends with a reward.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from megatron_async_rl.rollout.environments.protocol import settled
from megatron_async_rl.samples.types import Prompt

KEY = "unused"
"""Clients want a key; the endpoint reads none."""


class Agent:
    """`function`: `module:function`, called as function(prompt, base_url), may be `async`.
    `command`: program and arguments; it finds the prompt as JSON (`text`, `fields`) on standard
    input, OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and ends with a line that is its
    reward, a number."""

    def __init__(self, *, function: str | None = None, command: Sequence[str] = ()) -> None:
        if (function is None) == (not command):
            raise ValueError("give either `function`, as module:function, or `command`, a list")
        self._function = None if function is None else _found(function)
        self._command = [command] if isinstance(command, str) else list(command)

    async def run(self, prompt: Prompt, base_url: str) -> float:
        """The reward."""
        if self._function is not None:
            return float(await settled(self._function(prompt, base_url)))
        program = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY},
        )
        asked = json.dumps({"text": prompt.text, "fields": dict(prompt.fields)}).encode()
        said, _ = await program.communicate(asked)
        if program.returncode != 0:
            raise RuntimeError(f"{self._command[0]} ended with code {program.returncode}")
        lines = said.decode(errors="replace").strip().splitlines()
        if not lines:
            raise ValueError(f"{self._command[0]} wrote no reward, a number on its last line")
        return float(lines[-1])


def _found(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module_name), attribute)
