"""A reward that does what its prompt says."""

import time

from megatron_async_rl.samples import Prompt


def misbehave(prompt: Prompt, response: str) -> float:
    match prompt.fields.get("reward"):
        case "raises":
            raise KeyError("answer")
        case "nan":
            return float("nan")
        case "hangs":
            time.sleep(30)
    return float(len(response.split()))
