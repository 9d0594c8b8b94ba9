"""The rollout engine as a run uses it (Ray actor, continuous submission, scoring, versions) against
vLLM's offline `generate`.

Same model, prompts, sampling, a seed of its own for each response, log-probs of the sampled tokens,
engine settings and number of sequences at a time; each side in a process of its own, every prompt
sampled once per round. Response tokens per second over the rounds after the first. The sides take
turns, `--repeats` times each. Ratio = ours / bare, of the medians.
The prompts are those of examples/arithmetic, which must be prepared.

    python benchmarks/rollout_vs_bare_vllm.py
    python benchmarks/rollout_vs_bare_vllm.py --dtype bfloat16 --prompts 32 --max-tokens 12 \\
        --model examples/smollm2/generated/smollm2     # a real model, on a CPU with AMX
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "examples" / "arithmetic" / "generated"
GROUP = 8


def settings(args: argparse.Namespace) -> Any:
    from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
    from megatron_async_rl.config.sampling import SamplingConfig

    return RolloutConfig(
        sampling=SamplingConfig(max_tokens=args.max_tokens),
        reward=RewardConfig(name="arithmetic"),
        max_concurrent=args.concurrent,
        kv_cache_gib=0.5,
    )


def spec(args: argparse.Namespace, logs: Path) -> Any:
    from megatron_async_rl.rollout.spec import EngineSpec

    return EngineSpec(
        index=0,
        model_path=args.model,
        dtype=args.dtype,
        rollout=settings(args),
        seed=1,
        device="cpu",
        log_dir=logs,
        transport="shared_memory",
        first_version=0,
    )


def prompts(args: argparse.Namespace) -> list[Any]:
    from megatron_async_rl.data.prompts import read_prompts
    from megatron_async_rl.data.tokenizer import load_tokenizer

    return read_prompts(GENERATED / "train.jsonl", load_tokenizer(args.model), limit=args.prompts)


def ours(args: argparse.Namespace, logs: Path) -> dict[str, float]:
    import ray

    from megatron_async_rl.rollout.engine_process import start_engine
    from megatron_async_rl.samples.rows import rows_of
    from megatron_async_rl.samples.types import Request

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 * 2**20,
    )
    # The actor itself: the loop of asyncio would add to the time of a call.
    engine: Any = asyncio.run(start_engine(spec(args, logs)))
    engine = engine.actor

    def one_round(number: int) -> int:
        numbered = enumerate(asked, start=number * args.prompts)
        requests = [
            Request(group=group, k=k, prompt=prompt)
            for group, prompt in numbered
            for k in range(GROUP)
        ]
        ray.get(engine.submit.remote(requests))
        came = tokens = 0
        while came < len(requests):
            rows = rows_of(ray.get(engine.report.remote(10.0)).finished)
            came, tokens = came + len(rows), tokens + sum(row.length for row in rows)
        return tokens

    def rounds() -> dict[str, float]:
        one_round(0)
        started, tokens = time.perf_counter(), 0
        for number in range(1, args.rounds + 1):
            tokens += one_round(number)
        seconds = time.perf_counter() - started
        return {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds}

    asked = prompts(args)
    result = rounds()
    ray.wait([engine.stop.remote()], timeout=15)
    ray.kill(engine)
    ray.shutdown()
    return result


def bare(args: argparse.Namespace, logs: Path) -> dict[str, float]:
    from vllm import LLM, SamplingParams

    from megatron_async_rl.config.engine_options import CPU_CACHE_BLOCK
    from megatron_async_rl.rollout.vllm.plugin import environment

    ours_alone = ("LD_PRELOAD", "VLLM_PLUGINS")
    os.environ.update(
        {
            key: value
            for key, value in environment(spec(args, logs)).items()
            if key not in ours_alone
        }
    )
    os.environ["VLLM_PLUGINS"] = ""
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        # Ours also computes float32 logits, which a bfloat16 model needs.
        hf_overrides={"head_dtype": "float32"},
        max_num_seqs=args.concurrent,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        block_size=CPU_CACHE_BLOCK,
        kv_cache_memory_bytes=2**29,
        enforce_eager=True,
        enable_chunked_prefill=False,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        disable_log_stats=True,
    )
    from megatron_async_rl.data.tokenizer import load_tokenizer

    stop = list(load_tokenizer(args.model).eos_ids)
    asked = [
        {"prompt_token_ids": list(prompt.token_ids)}
        for prompt in prompts(args)
        for _ in range(GROUP)
    ]

    def one_round(number: int) -> int:
        # Made within the time measured, as ours are.
        parameters = [
            SamplingParams(
                temperature=1.0,
                max_tokens=args.max_tokens,
                logprobs=0,
                flat_logprobs=True,
                stop_token_ids=stop,
                detokenize=False,
                seed=number * len(asked) + index,
                skip_clone=True,
            )
            for index in range(len(asked))
        ]
        outputs = llm.generate(asked, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    one_round(0)
    started, tokens = time.perf_counter(), 0
    for number in range(1, args.rounds + 1):
        tokens += one_round(number)
    seconds = time.perf_counter() - started
    # At exit Python would wait for the engine process, which nothing else ends.
    llm.llm_engine.engine_core.shutdown()
    return {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds}


def in_own_process(side: str) -> dict[str, float]:
    environment = dict(os.environ)
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    if side == "bare" and openmp.is_file():
        environment["LD_PRELOAD"] = str(
            openmp
        )  # our actor sets it for its engine; the peer gets the same
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    out = subprocess.run(
        command,
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ).stdout
    result: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=GENERATED / "model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=["ours", "bare"])
    args = parser.parse_args()
    if not (GENERATED / "train.jsonl").is_file():
        parser.error("the prompts are missing: first run python examples/arithmetic/prepare.py")
    if args.side:
        with tempfile.TemporaryDirectory() as logs:
            print(json.dumps({"ours": ours, "bare": bare}[args.side](args, Path(logs))))
        return
    sides: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    for _ in range(args.repeats):
        for side, measured in sides.items():
            measured.append(in_own_process(side))
    rates = {
        side: [round(one["tokens_per_s"]) for one in measured] for side, measured in sides.items()
    }
    medians = {side: statistics.median(measured) for side, measured in rates.items()}
    found = {
        "tokens_per_s": rates,
        "tokens": {side: measured[0]["tokens"] for side, measured in sides.items()},
        "ratio": medians["ours"] / medians["bare"],
        "cores": os.cpu_count(),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
