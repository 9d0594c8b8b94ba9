"""Compute the trainer's log-probs of samples under each of several checkpoints, in one rank.

Arguments: a pickle of samples, the temperature, the file for the results ({checkpoint: [log-probs
of each sample]}), and the checkpoints.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.batching import build_micro_batch
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.model import build_model
from megatron_async_rl.policy.parallel import initialise
from tests.train_batches import columns_of


@torch.no_grad()
def main() -> None:
    samples = columns_of(pickle.loads(Path(sys.argv[1]).read_bytes()))
    device.install("cpu")
    layout = initialise(ParallelConfig(), "cpu", timeout_s=600)
    found = {}
    for checkpoint in sys.argv[4:]:
        model = build_model(
            ModelConfig(path=Path(checkpoint), dtype="float32"), PolicyConfig(), layout
        )
        schedule = Schedule(
            model.chunks, model, layout, temperature=float(sys.argv[2]), logprob_chunk_tokens=1024
        )
        alone = [build_micro_batch(samples, (row,), layout.device) for row in range(len(samples))]
        found[checkpoint] = [outputs.logp.numpy() for _, outputs in schedule.forward(alone)]
    Path(sys.argv[3]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
