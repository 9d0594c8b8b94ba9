"""`Policy.train_step` against a bare Megatron-Core loop on the same token batches, in one process
each turn about.

The bare loop is what a pre-training script does: model, vocabulary-parallel cross-entropy on the
full logits, backward, gradient reduction, Megatron's own `optimizer.step()`. Ours adds log-probs in
chunks with entropy, the objective, GAC and the diagnostics. Ratio = bare seconds / our seconds: 1
means that all of it is free.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from megatron_async_rl.config.advantages import GrpoAdvantage
from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.config.losses import PpoClipLoss
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.batching import build_micro_batch, plan_micro_batches
from megatron_async_rl.policy.model import DTYPES, build_model
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch, rows_of

ROOT = Path(__file__).resolve().parents[1]


def batch_of(
    prompts: int,
    group: int,
    prompt_tokens: int,
    response_tokens: int,
    vocab: int,
    mean_response: int | None,
) -> TrainBatch:
    """Random tokens. Responses of at most `response_tokens` tokens: of half as many at least, or of
    geometric lengths with this mean."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(prompts):
        prompt = Prompt(
            id=str(index), text="", token_ids=tuple(rng.integers(0, vocab, prompt_tokens).tolist())
        )
        samples = []
        for k in range(group):
            length = (
                int(rng.integers(response_tokens // 2, response_tokens + 1))
                if mean_response is None
                else min(int(rng.geometric(1 / mean_response)), response_tokens)
            )
            samples.append(
                Sample(
                    id=f"{index}-{k}",
                    prompt=prompt,
                    response_ids=rng.integers(0, vocab, length).astype(np.int32),
                    behavior_logprobs=np.full(length, -np.log(vocab), dtype=np.float32),
                    versions=np.zeros(length, dtype=np.int32),
                    loss_mask=np.ones(length, dtype=np.uint8),
                    text="",
                    finish_reason="stop",
                    reward=float(rng.integers(0, 2)),
                )
            )
        groups.append(samples)
    return TrainBatch.of(0, groups)


class BareLoop:
    """Megatron-Core alone, on the micro-batches our planner would cut."""

    def __init__(self, model: ModelConfig, policy: PolicyConfig, layout: Layout) -> None:
        self.layout, self.policy = layout, policy
        self.model = build_model(model, policy, layout)
        self.wrapped = wrap_for_gradients(self.model.chunks, policy)
        self.optimizer = build_optimizer(self.wrapped, policy, DTYPES[model.dtype])

    def step(self, batch: RankBatch) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        cuts, *_ = plan_micro_batches(
            batch, data_parallel=self.layout.dp_size, budget=self.policy.tokens_per_micro_batch
        )
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        weight = self.model.output_weight()
        for rows in cuts[self.layout.dp_rank]:
            micro = build_micro_batch(batch, rows, self.layout.device)
            hidden = self.wrapped[0](micro.tokens, micro.position_ids, None).transpose(0, 1)
            hidden = _copy_to_tensor_parallel(hidden)
            logits = torch.nn.functional.linear(hidden, weight)
            labels = torch.roll(micro.tokens, -1, dims=1).transpose(0, 1).contiguous()
            vocab_parallel_cross_entropy(logits.float(), labels).mean().backward()
        finalize_model_grads(self.wrapped, None)
        self.optimizer.step()


def _copy_to_tensor_parallel(hidden: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    return copy_to_tensor_model_parallel_region(hidden)


def _received(policy: Policy, whole: TrainBatch) -> tuple[RankBatch, float]:
    """The batch as this rank gets it, and the seconds from samples to columns."""
    started = time.perf_counter()
    batch = policy.receive(lambda: whole)
    assert batch is not None
    return batch, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "examples" / "arithmetic" / "generated" / "model"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--tensor", type=int, default=1, help="start under torchrun with as many ranks"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument(
        "--mean-response", type=int, help="geometric lengths with this mean, up to the former"
    )
    args = parser.parse_args()
    device_type = device.install("auto")
    parallel = ParallelConfig(ranks=int(os.environ.get("WORLD_SIZE", "1")), tensor=args.tensor)
    layout = initialise(parallel, device_type, timeout_s=300)
    model = ModelConfig(path=args.model, dtype=args.dtype)
    policy_config = PolicyConfig(parallel=parallel, optimizer=OptimizerConfig(lr=1e-4))
    objective = ObjectiveConfig(advantage=GrpoAdvantage(), loss=PpoClipLoss())
    policy = Policy.build(
        model,
        policy_config,
        objective,
        (GacControl(),),
        layout=layout,
        temperature=1.0,
        total_steps=10**6,
    )
    bare = BareLoop(model, policy_config, layout)
    vocab = json.loads((args.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    whole = batch_of(
        args.prompts, 8, args.prompt_tokens, args.response_tokens, vocab, args.mean_response
    )
    received = [_received(policy, whole) for _ in range(4)]
    batch = received[-1][0]
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for turn in range(args.steps + 3):
        for name, step in (("bare", bare.step), ("ours", policy.train_step)):
            layout.barrier()
            started = time.perf_counter()
            step(batch)
            if layout.device_type == "cuda":
                torch.cuda.synchronize()
            layout.barrier()
            if turn >= 3:
                times[name].append(time.perf_counter() - started)
    if layout.rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        seconds = min(seconds for _, seconds in received)
        plan = plan_micro_batches(
            batch, data_parallel=layout.dp_size, budget=policy_config.tokens_per_micro_batch
        )
        tokens = sum(row.total_length for row in rows_of(whole.samples))
        print(
            json.dumps(
                {
                    "bare_step_s": medians["bare"],
                    "our_step_s": medians["ours"],
                    "ratio": medians["bare"] / medians["ours"],
                    "tokens_per_step": tokens,
                    "micro_batches": len(plan.ranks[0]),
                    "padding_share": plan.padding_share,
                    "receive_us_per_sample": 1e6 * seconds / len(batch),
                    "ranks": layout.world_size,
                    "tensor": args.tensor,
                    "device": layout.device_type,
                    "dtype": args.dtype,
                },
                indent=2,
            )
        )
    layout.shutdown()


if __name__ == "__main__":
    main()
