"""The process behind the `math` reward: one JSON line [answer, response] in, one word out.

Invariants:
- a request that takes longer than LIMIT_S ends the process by SIGALRM's default action: no Python code has to run for it;
- its memory is bounded, so a huge number is an error of that request, not of the machine;
- it ends when its input closes, so it never outlives its caller by more than LIMIT_S.
"""

from __future__ import annotations

import json
import os
import resource
import signal

LIMIT_S = 5
MEMORY_BYTES = 4 * 2**30
EQUAL, DIFFERENT, UNREADABLE = "equal", "different", "unreadable"


def compare(answer: str, response: str) -> str:
    from math_verify import parse, verify

    marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    gold = parse(answer if marked else f"${answer}$", parsing_timeout=None)
    if not gold:
        return UNREADABLE
    return EQUAL if verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None) else DIFFERENT


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not pass for a reply
    import math_verify  # noqa: F401  # the first import takes seconds, which are no request's

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in os.fdopen(os.dup(0), encoding="utf-8"):
        answer, response = json.loads(line)
        signal.alarm(LIMIT_S)
        try:
            reply = compare(answer, response)
        except (MemoryError, RecursionError, OverflowError):
            reply = DIFFERENT
        signal.alarm(0)
        replies.write(reply + "\n")
