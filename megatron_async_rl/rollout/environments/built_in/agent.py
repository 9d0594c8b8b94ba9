"""The environment `agent`: a program or function that calls the model itself."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from megatron_async_rl.rollout.environments import SETTINGS
from megatron_async_rl.rollout.rewards.registry import imported
from megatron_async_rl.samples.types import Prompt

KEY = "unused"
"""API key for clients that require a key. The endpoint ignores it."""


class AgentEnvironment:
    """Agent that calls the model through a base URL.

    `function`: `module:function`, called as function(prompt, base_url); may be `async`. `command`:
    program and arguments. The program reads the prompt as JSON (`text`, `fields`) from standard
    input, reads OPENAI_BASE_URL and OPENAI_API_KEY from its environment variables, and prints its
    reward, a number, as its last line."""

    def __init__(self, *, function: str | None = None, command: Sequence[str] = ()) -> None:
        if (function is None) == (not command):
            raise ValueError("set either `function`, as module:function, or `command`, a list")
        self._function = None
        if function is not None:
            module_name, _, attribute = function.partition(":")
            self._function = getattr(imported(module_name, function, SETTINGS), attribute)
        self._command = [command] if isinstance(command, str) else list(command)

    def run(self, prompt: Prompt, base_url: str) -> Any:
        """Return the reward or an awaitable that yields it."""
        if self._function is not None:
            return self._function(prompt, base_url)
        return self._program(prompt, base_url)

    async def _program(self, prompt: Prompt, base_url: str) -> float:
        program = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            # Standard error is inherited, so the program's messages appear in the engine's log.
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY},
        )
        # JSON has neither NaN nor infinity, so both become null.
        fields = to_jsonable_python(dict(prompt.fields), inf_nan_mode="null")
        requested = json.dumps({"text": prompt.text, "fields": fields}).encode()
        output, _ = await program.communicate(requested)
        # A failed program may still print a number; it must not become a reward.
        if program.returncode != 0:
            raise RuntimeError(f"{self._command[0]} ended with code {program.returncode}")
        lines = output.decode(errors="replace").strip().splitlines()
        if not lines:
            raise ValueError(
                f"{self._command[0]} printed no reward; its last line must be a number"
            )
        return float(lines[-1])


ENVIRONMENT = AgentEnvironment
