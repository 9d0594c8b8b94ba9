"""Sampling groups of responses on a CPU: blocks of 32 tokens in the key-value cache, which this
project sets, against vLLM's default of 128.

Responses to one prompt share only whole blocks of it. Smaller blocks also leave less of the cache
unused, so with a small cache more responses run at a time; the default is large enough for all.
Attention computes one product per block, so smaller blocks cost more in long contexts. One engine
samples 16 x 8 responses of equal length with one thread; prompts are random tokens, new in each
round. Each side runs in a process of its own, and the sides take turns, `--repeats` times each.
Ratio = seconds per round with blocks of 128 / seconds with 32, of the medians.

    python benchmarks/cache_blocks.py                         # SmolLM2-135M, 59 + 16 tokens
    python benchmarks/cache_blocks.py --cache-gib 0.25        # as in examples/smollm2_*.yaml
    python benchmarks/cache_blocks.py --prompt-tokens 129     # both share all but the last token
    python benchmarks/cache_blocks.py --prompts 4 --prompt-tokens 129 --response-tokens 256   # long
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "examples" / "smollm2" / "generated" / "smollm2"
BLOCKS = (32, 128)
GROUP = 8
VOCABULARY = 40_000
"""Prompts have random token ids below this number, which the model has."""


def seconds_per_round(args: argparse.Namespace) -> float:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.response_tokens,
        max_num_seqs=256,
        block_size=args.block,
        kv_cache_memory_bytes=int(args.cache_gib * 2**30),
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        enable_chunked_prefill=False,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        disable_log_stats=True,
    )
    chance = random.Random(0)

    def one_round(number: int, tokens: int) -> None:
        prompts = [
            {"prompt_token_ids": [chance.randrange(VOCABULARY) for _ in range(args.prompt_tokens)]}
            for _ in range(args.prompts)
        ]
        parameters = [
            SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=number * args.prompts * GROUP + index,
            )
            for index in range(args.prompts * GROUP)
        ]
        asked = [prompt for prompt in prompts for _ in range(GROUP)]
        llm.generate(asked, parameters, use_tqdm=False)

    one_round(0, tokens=2)
    started = time.perf_counter()
    for number in range(1, args.rounds + 1):
        one_round(number, args.response_tokens)
    seconds: float = (time.perf_counter() - started) / args.rounds
    # At exit Python would wait for the engine process, which nothing else ends.
    llm.llm_engine.engine_core.shutdown()
    return seconds


def in_own_process(block: int) -> float:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--block", str(block)]
    out = subprocess.check_output(command, env=environment, text=True)
    return float(out.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=59)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--cache-gib", type=float, default=3.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.block is not None:
        print(seconds_per_round(args))
        return
    runs: dict[int, list[float]] = {block: [] for block in BLOCKS}
    for _ in range(args.repeats):
        for block in BLOCKS:
            runs[block].append(in_own_process(block))
    ours, theirs = (statistics.median(runs[block]) for block in BLOCKS)
    result = {
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "response_tokens": args.response_tokens,
        "cache_gib": args.cache_gib,
        "dtype": args.dtype,
        "seconds": {str(block): [round(one, 2) for one in runs[block]] for block in BLOCKS},
        "ratio": round(theirs / ours, 2),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
