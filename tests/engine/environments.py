"""Environments of tests: one that counts its turns, and does what its prompt says."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_async_rl.rollout.environments import Step
from megatron_async_rl.samples import Prompt


class Counting:
    """Answers with `words`, and is done after `turns`. `fault`: what it does at its second turn."""

    def __init__(self, turns: int = 3, words: str = "w7 w8") -> None:
        self.turns, self.words = turns, words
        self.taken = 0

    async def reset(self, prompt: Prompt) -> str:
        self.fault = prompt.fields.get("fault")
        self.folder = Path(prompt.fields.get("folder", "."))
        self.slow_to_close = bool(prompt.fields.get("slow_to_close"))
        if self.fault == "reset":
            raise KeyError("secret")
        return str(prompt.fields.get("opening", ""))

    def step(self, response: str) -> Step:
        self.taken += 1
        if self.taken == 2:
            match self.fault:
                case "raises":
                    raise KeyError("answer")
                case "nan":
                    return Step(reward=float("nan"))
                case "none":
                    return None  # type: ignore[return-value]
                case "hangs":
                    time.sleep(3600)
                case "exits":
                    os._exit(3)
                case "huge":
                    return Step(reward=1e39)
                case "parts":
                    return Step(observation=[{"role": "tool", "content": [{"text": "w7"}]}])
                case "unreadable":
                    return Step(observation="what")
                case "floods":
                    return Step(observation="w7 " * 10_000)
                case "leaves":
                    leave(self.folder)
                    time.sleep(3600)
                case "waits":
                    (self.folder / "waiting").touch()
                    while not (self.folder / "go").exists():
                        time.sleep(0.01)
        return Step(
            observation=self.words,
            reward=0.25 * self.taken,
            done=self.taken == self.turns,
            train=self.fault != "untrained" or self.taken != 1,
        )

    async def close(self) -> None:
        if self.slow_to_close:
            await asyncio.sleep(3600)


def leave(folder: Path) -> None:
    """A process in a session of its own, which outlives what kills a group; its number is in
    `left`."""
    program = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(3600)"
    left = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    assert left.stdout is not None
    (folder / "left").write_bytes(left.stdout.readline())


class Waiting:
    """Async all through, and counts how often it was closed."""

    def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hello"}]

    async def step(self, response: str) -> Step:
        await asyncio.sleep(0.001)
        return Step(reward=1.0, done=True)

    async def close(self) -> None:
        await asyncio.sleep(0)
