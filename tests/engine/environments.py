"""Environments of tests: an environment that counts its turns and misbehaves as its prompt
requests, and an agent that uses the client of OpenAI's package."""

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from openai import BadRequestError, OpenAI

from megatron_async_rl.rollout.environments import EpisodeStep
from megatron_async_rl.samples import Prompt


class Counting:
    """Environment that responds with `words` and ends after `turns`. The prompt's field `fault`
    selects its behavior at the second turn."""

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

    def step(self, response: str) -> EpisodeStep:
        self.taken += 1
        if self.taken == 2:
            match self.fault:
                case "raises":
                    raise KeyError("answer")
                case "nan":
                    return EpisodeStep(reward=float("nan"))
                case "none":
                    return None  # type: ignore[return-value]
                case "hangs":
                    time.sleep(3600)
                case "exits":
                    os._exit(3)
                case "huge":
                    return EpisodeStep(reward=1e39)
                case "parts":
                    return EpisodeStep(observation=[{"role": "tool", "content": [{"text": "w7"}]}])
                case "unreadable":
                    return EpisodeStep(observation="what")
                case "floods":
                    return EpisodeStep(observation="w7 " * 10_000)
                case "leaves":
                    leave(self.folder)
                    time.sleep(3600)
                case "waits":
                    (self.folder / "waiting").touch()
                    while not (self.folder / "go").exists():
                        time.sleep(0.01)
        return EpisodeStep(
            observation=self.words,
            reward=0.25 * self.taken,
            done=self.taken == self.turns,
            train=self.fault != "untrained" or self.taken != 1,
        )

    async def close(self) -> None:
        if self.slow_to_close:
            await asyncio.sleep(3600)


def leave(folder: Path) -> None:
    """Start a process in a session of its own, which survives the signal to a process group. Its
    number is in the file `left`."""
    program = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(3600)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    (folder / "left").write_bytes(process.stdout.readline())


AGENT = {
    "name": "agent",
    "settings": {"function": "tests.engine.environments:agent"},
    "timeout_s": 400,
    "max_segments": 2,
}
WORDY = (
    "{% for m in messages %}{{ 'w11' if m.role == 'assistant' else 'w9' }} {{ m.content }} w10 "
    "{% endfor %}{% if add_generation_prompt %}w11 {% endif %}"
)
"""Chat template whose marks are words."""


def agent(prompt: Prompt, base_url: str) -> float:
    """Run three turns in one thread, one turn in a second thread, and a third thread, which exceeds
    the limit. The second turn is streamed, and new weights arrive before it."""
    folder, client = Path(prompt.fields["folder"]), OpenAI(base_url=base_url, api_key="unused")
    assert [model.id for model in client.models.list()] == ["policy"]
    create: Any = partial(client.chat.completions.create, model="policy", max_tokens=8)
    messages: list[Any] = [{"role": "user", "content": "w5 w6"}]
    results: list[Any] = []

    answer = create(messages=messages, logprobs=True, temperature=0.1)
    results.append([one.logprob for one in answer.choices[0].logprobs.content])
    messages += [answer.choices[0].message, {"role": "user", "content": "w7 w8"}]

    (folder / "waiting").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    chunks = list(create(messages=messages, stream=True, stream_options={"include_usage": True}))
    results.append(chunks[-1].usage.completion_tokens)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "w7"}]

    results.append(create(messages=messages).usage.completion_tokens)
    results.append(create(messages=[{"role": "user", "content": "w5"}]).usage.completion_tokens)
    try:
        create(messages=[{"role": "user", "content": "w6"}])
    except BadRequestError as error:
        results.append(error.body["message"])
    (folder / "results").write_text(json.dumps(results))
    return 0.5


class Waiting:
    """Environment whose methods are all `async`."""

    def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hello"}]

    async def step(self, response: str) -> EpisodeStep:
        await asyncio.sleep(0.001)
        return EpisodeStep(reward=1.0, done=True)

    async def close(self) -> None:
        await asyncio.sleep(0)
