"""One rank of the tests of real weights: log-probs of a model, of it packed and in bfloat16, and of
adapters on it, with the weights that engines load.

Arguments: directory of the model, file of samples, a JSON of ParallelConfig, output directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_async_rl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.model import PolicyModel, build_model
from megatron_async_rl.policy.parallel import initialise
from tests.parallel.model_program import exported, logprobs


def draw_adapters(model: PolicyModel) -> None:
    """Give B, which begins as zeros, random numbers: the same on each rank, which has another part
    of it, or a copy."""
    torch.default_generator.manual_seed(5)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.data.normal_(std=0.02)


def main() -> None:
    folder, samples, output = Path(sys.argv[1]), torch.load(sys.argv[2], weights_only=False), None
    parallel, output = ParallelConfig(**json.loads(sys.argv[3])), Path(sys.argv[4])
    device.install("cpu")
    layout = initialise(parallel, "cpu", timeout_s=600)

    def built(dtype: str, lora: LoraConfig | None = None) -> PolicyModel:
        settings = PolicyConfig(parallel=parallel, lora=lora)
        return build_model(ModelConfig(path=folder, dtype=dtype), settings, layout)

    model = built("float32")
    found = {
        "padded": logprobs(model, samples, layout, parallel),
        "packed": logprobs(model, samples, layout, parallel, "packed"),
    }
    del model
    found["bfloat16"] = logprobs(built("bfloat16"), samples, layout, parallel)
    adapted = built("float32", LoraConfig(rank=4))
    draw_adapters(adapted)
    found["adapted"] = logprobs(adapted, samples, layout, parallel)
    merged = exported(adapted, 1 << 28)
    if merged is not None:
        merged = {name: tensor.contiguous() for name, tensor in merged.items()}
        save_file(merged, output / "merged.safetensors", metadata={"format": "pt"})
    if found["padded"] is not None and layout.tp_rank == 0:
        torch.save(found, output / "logprobs.pt")


if __name__ == "__main__":
    main()
