"""Mathematical answers: 1 if math-verify finds the prompt's `answer` in the response, else 0.

math-verify computes what it reads: a response such as 9^9^9^9 keeps the interpreter inside one multiplication, which no
thread or signal handler can interrupt and which would stall the whole engine. So each calling thread has a process of its
own for it (math_worker.py), killed by the kernel after `math_worker.LIMIT_S` seconds; the response is wrong then.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

from megatron_async_rl.rollout.rewards import math_worker
from megatron_async_rl.rollout.rewards.reward import RewardError, text_field
from megatron_async_rl.samples.types import Prompt

REQUIRED_FIELDS = ("answer",)
_thread = threading.local()


def math(prompt: Prompt, response: str, /) -> float:
    answer = text_field(prompt, "answer")
    reply = _ask(json.dumps([answer, response]))
    if reply == math_worker.UNREADABLE:
        raise RewardError(f"prompt {prompt.id}: math-verify cannot read `answer` {answer!r}; write it as LaTeX or a number")
    return 1.0 if reply == math_worker.EQUAL else 0.0


def _ask(request: str) -> str:
    """The worker's reply; DIFFERENT if it ran into its limit. Raises RuntimeError if it ended for another reason."""
    worker = getattr(_thread, "worker", None)
    if worker is None or worker.poll() is not None:
        worker = _thread.worker = _start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(request + "\n")
        worker.stdin.flush()
        reply = worker.stdout.readline().strip()
    except BrokenPipeError:
        reply = ""
    if reply:
        return str(reply)
    code = worker.wait()
    if code == -signal.SIGALRM:
        return math_worker.DIFFERENT
    raise RuntimeError(f"the math-verify process ended with code {code}; its error output is in this process's log")


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"from {math_worker.__name__} import main; main()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
