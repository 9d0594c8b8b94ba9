"""Qwen3 models of 1 to 2,000 million parameters with random weights, and one engine that serves
such a model.

    python benchmarks/random_model.py DIRECTORY 600      # for a GPU: write the model alone
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES = {
    1: {
        "hidden_size": 128,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 2048,
    },
    10: {
        "hidden_size": 320,
        "layers": 6,
        "heads": 10,
        "kv_heads": 5,
        "intermediate_size": 1024,
        "vocab_size": 8192,
    },
    100: {
        "hidden_size": 768,
        "layers": 10,
        "heads": 12,
        "kv_heads": 6,
        "intermediate_size": 2304,
        "vocab_size": 32768,
    },
    600: {
        "hidden_size": 1024,
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "positions": 4096,
    },
    2000: {
        "hidden_size": 4096,
        "layers": 8,
        "heads": 32,
        "kv_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 32768,
        "positions": 4096,
    },
}
"""Key: million parameters, roughly. 600 has Qwen3-0.6B's sizes, and 2000 Qwen3-8B's with 8 of its
36 layers and a smaller vocabulary."""
ON_A_CPU = (1, 10, 100)
BUCKET_BYTES = 256 * 2**20
"""The default of weights.bucket_mib."""


def save(directory: Path, millions: int, dtype: str) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[millions]
    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape.get("head_dim", shape["hidden_size"] // shape["heads"]),
        intermediate_size=shape["intermediate_size"],
        max_position_embeddings=shape.get("positions", 512),
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() and millions not in ON_A_CPU else "cpu"):
        network = Qwen3ForCausalLM(config)
    network.to("cpu", getattr(torch, dtype)).save_pretrained(directory)
    vocabulary = {f"w{i}": i for i in range(shape["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w1"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    # Without a class, transformers would rebuild it as a byte-level tokenizer of Qwen.
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8"
    )
    return directory


def weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()
    }


def policy(directory: Path, dtype: str) -> tuple[Any, Any]:
    """The model in Megatron, on one rank, and its weights to publish."""
    from megatron_async_rl.config.policy import PolicyConfig
    from megatron_async_rl.config.schema import ModelConfig
    from megatron_async_rl.policy.model import build_model
    from megatron_async_rl.weights.export import WeightExporter

    model = build_model(ModelConfig(path=directory, dtype=dtype), PolicyConfig(), one_rank())
    exporter = WeightExporter(model.bridge, model.chunks)
    return model, shards_of(exporter)


def shards_of(exporter: Any, bucket_bytes: int = BUCKET_BYTES) -> Any:
    from megatron_async_rl.weights.export import WeightShards

    return WeightShards(exporter, [True], bucket_bytes)


@functools.cache
def one_rank() -> Any:
    from megatron_async_rl.config.policy import ParallelConfig
    from megatron_async_rl.policy import device
    from megatron_async_rl.policy.parallel import initialise

    return initialise(ParallelConfig(), device.install("cpu"), timeout_s=600)


def spec(model: Path, dtype: str, logs: Path) -> Any:
    from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
    from megatron_async_rl.config.sampling import SamplingConfig
    from megatron_async_rl.rollout.spec import EngineSpec

    return EngineSpec(
        index=0,
        model_path=model,
        dtype=dtype,  # type: ignore[arg-type]
        rollout=RolloutConfig(
            sampling=SamplingConfig(max_tokens=16),
            reward=RewardConfig(name="arithmetic"),
            kv_cache_gib=0.25,
        ),
        seed=0,
        device="cpu",
        log_dir=logs,
        transport="shared_memory",
    )


def join_ray() -> None:
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        num_cpus=2,
    )


@dataclass(frozen=True, kw_only=True)
class Published:
    """Seconds: staging alone, gathering included; that and all that follows; the engine's update,
    in which it paused, as seen from here. brought_s: by collective, before that, while it
    samples."""

    staged_s: float
    seconds: float
    paused_s: float
    brought_s: float = 0.0


class Publisher:
    """Stages versions and feeds one engine, the actor `handle`, as a run's rank 0 and controller
    do. buckets: of every version."""

    def __init__(self, handle: Any, buckets: Any) -> None:
        from megatron_async_rl.weights.shared_memory import SharedMemory
        from megatron_async_rl.weights.staging import Staging

        self._handle = handle
        self._buckets = buckets
        self._staging = Staging(SharedMemory())
        self._communicator: Any = None
        self._ipc_buckets: Any = None

    def connect(self, logs: Path) -> None:
        """Connect the engine to a collective, which carries all later versions."""
        import ray

        from megatron_async_rl.rollout.engine_process import RemoteEngine
        from megatron_async_rl.weights.agents import ReceivingEngine
        from megatron_async_rl.weights.collective_agents import EngineCommunicator, SenderActor

        sender = ray.remote(num_cpus=0)(SenderActor).remote("127.0.0.1", logs, 60.0, None)
        meeting = ray.get(sender.open.remote(1), timeout=60)
        engine = ReceivingEngine("here", 1, RemoteEngine(self._handle).receive)
        self._communicator = EngineCommunicator("here", sender, engine, meeting)

    def publish_on_demand(self, version: int, shards: Any) -> Published:
        """Publish by cuda_ipc: bucket by bucket, each filled while the engine loads the previous
        one."""
        from dataclasses import replace

        import torch

        from megatron_async_rl.weights.cuda_ipc import CudaIpc, IpcBuckets
        from megatron_async_rl.weights.manifest import IN_FLIGHT, require_equal

        if self._ipc_buckets is None:
            self._ipc_buckets = IpcBuckets(CudaIpc(torch.device("cpu")))
        staging, last = self._ipc_buckets, len(shards.buckets) - 1
        manifest = staging.stage(version, shards.buckets, shards.parts())
        began = time.perf_counter()
        following = staging.fill(0, 0, shards.parts(0))
        for number in range(last + 1):
            part = replace(manifest, buckets=(following,))
            call = self._handle.update.remote(version, part, number == 0, number == last)
            if number < last:
                ahead = number + 1
                following = staging.fill(ahead, ahead % IN_FLIGHT, shards.parts(ahead))
            loaded = self._answer(call)
        staging.release()
        require_equal("engine-0", manifest.digests, loaded)
        spent_s = time.perf_counter() - began
        return Published(
            staged_s=manifest.seconds, seconds=manifest.seconds + spent_s, paused_s=spent_s
        )

    def publish(self, version: int, parts: Any) -> Published:
        from megatron_async_rl.weights.manifest import require_equal

        manifest = self._staging.stage(version, self._buckets, parts)
        began = time.perf_counter()
        copy = manifest
        if self._communicator is not None:
            copy = asyncio.run(self._communicator.fetch(version, manifest)).manifest
        brought_s = time.perf_counter() - began
        require_equal("engine-0", manifest.digests, self.update(version, copy))
        spent_s = time.perf_counter() - began
        return Published(
            staged_s=manifest.seconds,
            seconds=manifest.seconds + spent_s,
            paused_s=spent_s - brought_s,
            brought_s=brought_s,
        )

    def update(self, version: int, manifest: Any) -> dict[str, str]:
        return self._answer(self._handle.update.remote(version, manifest))

    @staticmethod
    def _answer(call: Any) -> dict[str, str]:
        import ray

        loaded: dict[str, str] = ray.get(call, timeout=300)
        return loaded

    def close(self) -> None:
        self._staging.close()
        if self._ipc_buckets is not None:
            self._ipc_buckets.close()


def measure_all(
    measure: Callable[[Path, str, int], dict[str, Any]],
    about: str | None,
    directory: str | None = None,
) -> None:
    """The command line of a benchmark: `measure(model, dtype, rounds)` for each size and dtype,
    printed as JSON. Models are made in `directory`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--millions", type=int, nargs="+", default=list(ON_A_CPU), choices=list(SHAPES)
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    join_ray()
    results = []
    for millions in args.millions:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory(dir=directory) as made:
                model = save(Path(made), millions, dtype)
                results.append({"millions": millions, **measure(model, dtype, args.rounds)})
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("millions", type=int, choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    wanted = parser.parse_args()
    wanted.directory.mkdir(parents=True, exist_ok=True)
    save(wanted.directory, wanted.millions, wanted.dtype)
