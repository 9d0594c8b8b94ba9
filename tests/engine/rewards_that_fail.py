"""Reward that fails as its prompt requests."""

import os
import re
import time

from megatron_async_rl.samples import Prompt


def misbehave(prompt: Prompt, response: str) -> float:
    match prompt.fields.get("reward"):
        case "raises":
            raise KeyError("answer")
        case "nan":
            return float("nan")
        case "hangs":
            time.sleep(3600)
        case "backtracks":  # Runs for years and holds the interpreter lock.
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        case "dies":
            os._exit(7)
    return float(len(response.split()))
