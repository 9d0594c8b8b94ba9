"""Attention of bfloat16 rows on a CPU, forward and backward: torch's kernel for both passes against
`policy/attention.py`, whose backward pass is in float32 for short sequences. One thread, elapsed
time; the two alternate. Ratio = torch's seconds / ours: above 1, ours is faster.

    python benchmarks/short_attention.py

The last column shows whether `policy/attention.py` uses its own backward pass for these sizes.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from megatron_async_rl.policy import attention

SHAPES = {"SmolLM2-135M": (9, 3, 64), "8 heads of 128": (8, 2, 128), "Gemma 3 270M": (4, 1, 256)}
"""Query heads, key-value heads, elements of a head."""
LENGTHS = [
    (22, 77),
    (64, 64),
    (64, 256),
    (128, 128),
    (128, 256),
    (128, 512),
    (192, 192),
    (512, 512),
]
"""Queries and keys."""
TOKENS = 704
REPEATS = 9


def seconds(inputs: list[torch.Tensor], upstream: torch.Tensor, short: bool) -> float:
    """Seconds of both passes. short: whether the backward pass is in float32."""
    attention._is_short = lambda query, key: short
    started = time.perf_counter()
    context = attention.causal_attention(*inputs, scale=None)
    torch.autograd.grad(context, inputs, upstream)
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    is_short = attention._is_short
    for name, (heads, groups, head) in SHAPES.items():
        for queries, keys in LENGTHS:
            rows = max(1, TOKENS // queries)
            inputs = [
                torch.randn(rows, length, count, head, dtype=torch.bfloat16, requires_grad=True)
                for length, count in ((queries, heads), (keys, groups), (keys, groups))
            ]
            upstream = torch.randn(inputs[0].shape, dtype=torch.bfloat16)
            taken: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(REPEATS):
                for short, each in taken.items():
                    each.append(seconds(inputs, upstream, short))
            torchs, ours = (statistics.median(each[1:]) for each in taken.values())
            print(
                json.dumps(
                    {
                        "model": name,
                        "queries": queries,
                        "keys": keys,
                        "torch_ms": round(torchs * 1e3, 1),
                        "ours_ms": round(ours * 1e3, 1),
                        "ratio": round(torchs / ours, 2),
                        "used": is_short(inputs[0], inputs[1]),
                    }
                )
            )


if __name__ == "__main__":
    main()
