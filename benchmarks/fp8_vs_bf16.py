"""`Policy.train_step` with each FP8 recipe against BF16, on one CUDA device and the same batch.

Each policy is built, timed and freed in turn. Ratio = BF16 seconds / FP8 seconds: above 1, FP8 is
faster. `mfu` relates the step to the time that the model's products alone would take at the rate of
a large BF16 product, measured in the same run (attention scores, Adam and the log-probs are not
counted as work).

    python benchmarks/random_model.py /tmp/model 2000
    python benchmarks/fp8_vs_bf16.py --model /tmp/model
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from trainer_vs_bare_megatron import batch_of

from megatron_async_rl.config.advantages import GrpoAdvantage
from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.config.losses import PpoClipLoss
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import (
    Fp8Config,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.rows import TrainBatch, rows_of

VARIANTS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "tensorwise": {"recipe": "tensorwise"},
    "tensorwise, primary weights": {"recipe": "tensorwise", "primary_weights": True},
    "blockwise": {"recipe": "blockwise"},
    "delayed": {"recipe": "delayed"},
}


def bf16_rate() -> float:
    """FLOP/s of a large BF16 product."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        left @ right
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * 8192**3 / statistics.median(seconds)


def measure(
    policy_config: PolicyConfig, model: ModelConfig, layout: Layout, whole: TrainBatch, steps: int
) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    policy = Policy.build(
        model,
        policy_config,
        ObjectiveConfig(advantage=GrpoAdvantage(), loss=PpoClipLoss()),
        (GacControl(),),
        layout=layout,
        temperature=1.0,
        total_steps=10**6,
    )
    batch = policy.receive(lambda: whole)
    assert batch is not None
    seconds = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        policy.train_step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "step_s": statistics.median(seconds[3:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def product_weights(config: dict[str, Any]) -> int:
    """Weights of the layers and of the output layer, each a multiplication and an addition per
    token in the forward pass and two of each in the backward pass."""
    hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[k] * head for k in ("num_attention_heads", "num_key_value_heads"))
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=1024)
    args = parser.parse_args()
    device_type = device.install("cuda")
    parallel = ParallelConfig()
    layout = initialise(parallel, device_type, timeout_s=300)
    model = ModelConfig(path=args.model, dtype="bfloat16")
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    whole = batch_of(
        args.prompts, 8, args.prompt_tokens, args.response_tokens, config["vocab_size"], None
    )
    tokens = sum(row.total_length for row in rows_of(whole.samples))
    floor = 6 * product_weights(config) * tokens / bf16_rate()
    found: dict[str, Any] = {"tokens_per_step": tokens, "products_at_bf16_rate_s": floor}
    for name in args.variants:
        settings = VARIANTS[name]
        policy = PolicyConfig(
            device="cuda",
            parallel=parallel,
            optimizer=OptimizerConfig(lr=1e-6),
            sequence="packed",
            fp8=None if settings is None else Fp8Config(**settings),
        )
        try:
            found[name] = measure(policy, model, layout, whole, args.steps)
        except Exception as error:  # noqa: BLE001  # the other variants are still of interest
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        else:
            step_s = found[name]["step_s"]
            found[name]["tokens_per_s"] = tokens / step_s
            found[name]["mfu"] = floor / step_s
        if "step_s" in found[name] and "step_s" in found.get("bfloat16", {}):
            found[name]["ratio"] = found["bfloat16"]["step_s"] / found[name]["step_s"]
        print(name, found[name], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    found["device"] = torch.cuda.get_device_name()
    print(json.dumps(found, indent=2))
    layout.shutdown()


if __name__ == "__main__":
    main()
