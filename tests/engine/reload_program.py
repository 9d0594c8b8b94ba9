"""Compute the outputs of vLLM's model after updates, and right after loading the same checkpoints.

Arguments: the file for the results, then `A:B` or `A:B:HOW`: A and B are checkpoints of one shape.
The engine starts with A, and is updated to B, A and B with the reload that it selects. HOW is
- `both`: updates to A and B by vLLM's layer-wise reload follow;
- `halves`: two engines run one after another. Each has half of the experts, like one of two
  workers, and does not add the outputs of the other half;
- a value of vLLM's `quantization`.
Without a GPU, the last update to B reads buckets of the carrier `cuda_ipc`, two at a time. Their
memory is overwritten as soon as it has been read.

Results: name of A -> [reload, checkpoint (0: A, 1: B), log-probs and other outputs] for each state.
`faults`, for a quantized model: [tensors whose digests differ after a bit was flipped] and [the
error for a missing tensor].
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import batched
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from megatron_async_rl.rollout.vllm.loaded import Loaded, digests_of
from megatron_async_rl.rollout.vllm.plugin import BACKEND, WORKER_EXTENSION, register
from megatron_async_rl.rollout.vllm.reload import LayerwiseReload, PackedExperts, PackedLinear
from megatron_async_rl.weights.cuda_ipc import CudaIpc, IpcBuckets
from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef, require_equal
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import Staging
from megatron_async_rl.weights.transport import carrier
from tests.engine.reference import PROMPT, VICTIM
from tests.staged import flip_a_bit, parts, stage

OWN = [(1, False, False), (0, False, False), (1, False, True)]
LAYERWISE = [(0, True, False), (1, True, True)]
"""Updates: (checkpoint, True for the layer-wise reload, True for buckets on demand)."""
IPC_BUCKETS = 7


Proof = tuple[Mapping[str, str], list[dict[str, Loaded]]]
"""Digests of the sender, and the parts that the workers loaded."""


@dataclass
class Results:
    """Results of one engine: its states, and the digests of its updates."""

    states: list[tuple[str, int, list[float]]]
    proofs: list[Proof] = field(default_factory=list)
    faults: list[list[str]] = field(default_factory=list)


def main() -> None:
    register()
    by_model: dict[str, Any] = {}
    for pair in sys.argv[2:]:
        first, second, *how = pair.split(":")
        checkpoints = [Path(first), Path(second)]
        if how == ["both"]:
            results = [run(checkpoints, [*OWN, *LAYERWISE])]
        elif how == ["halves"]:
            results = [run(checkpoints, OWN, half=half) for half in (0, 1)]
        else:
            results = [run(checkpoints, OWN, quantization=how[0] if how else None)]
        for proofs in zip(*(one.proofs for one in results), strict=True):
            (sent, *_), loaded = zip(*proofs, strict=True)
            require_equal(
                "the engine", sent, digests_of([part for each in loaded for part in each])
            )
        by_model[checkpoints[0].name] = [state for one in results for state in one.states]
        by_model["faults"] = [fault for one in results for fault in one.faults]
    Path(sys.argv[1]).write_text(json.dumps(by_model))


def run(
    checkpoints: list[Path],
    updates: list[tuple[int, bool, bool]],
    *,
    quantization: str | None = None,
    half: int | None = None,
) -> Results:
    """Run an engine through `updates`, and return its results."""
    gc.freeze()  # as in the plugin; vLLM unfreezes when an engine ends
    with divided(half):
        engine = LLM(
            str(checkpoints[0]),
            dtype="bfloat16" if quantization else "float32",
            quantization=quantization,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=2**26,
            # Tests may share the GPU with one another and with other programs.
            **({"gpu_memory_utilization": 0.05} if torch.cuda.is_available() else {}),
            max_logprobs=-1,
            enable_prefix_caching=False,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=WORKER_EXTENSION,
        )
    engine.collective_rpc(
        "init_weight_transfer_engine",
        kwargs={"init_info": {"version": 0, "transport": "shared_memory"}},
    )
    if half is not None:
        engine.collective_rpc("complete_on_cpu")
    results = Results([("none", 0, outputs(engine))])
    staging, ipc_buckets = Staging(SharedMemory()), IpcBuckets(CudaIpc(torch.device("cpu")))
    for version, (which, layerwise, on_demand) in enumerate(updates, start=1):
        engine.collective_rpc(use_layerwise if layerwise else reuse_memory_of_experts)
        # The buckets of this program are in host memory, which an engine on a GPU cannot read.
        on_demand = on_demand and not torch.cuda.is_available()
        engine.collective_rpc(read_as, args=("cuda_ipc" if on_demand else "shared_memory",))
        if on_demand:
            digests, loaded = load_on_demand(engine, ipc_buckets, version, checkpoints[which])
        else:
            manifest = stage(staging, version, buckets(checkpoints[which]))
            digests = manifest.digests
            for index, ref in enumerate(manifest.buckets):
                loaded = load(engine, ref, version, index, len(manifest.buckets))
        results.proofs.append((digests, loaded))
        results.states.append((engine.collective_rpc(name_of_reload)[0], which, outputs(engine)))
    if quantization:
        results.faults.extend(faults(engine, staging, checkpoints[0], version))
    ipc_buckets.close()
    staging.close()
    del engine
    cleanup_dist_env_and_memory()
    return results


@contextmanager
def divided(half: int | None) -> Iterator[None]:
    """Make layers that are created inside the `with` block belong to worker `half` of two workers,
    over which the experts are divided. With None, they are not divided."""
    make = FusedMoEParallelConfig.make
    own = {"use_ep": True, "ep_size": 2, "ep_rank": half}
    if half is not None:
        FusedMoEParallelConfig.make = staticmethod(lambda **fields: replace(make(**fields), **own))
    yield
    FusedMoEParallelConfig.make = staticmethod(make)


def faults(engine: LLM, staging: Staging, checkpoint: Path, version: int) -> Iterator[list[str]]:
    """Yield [tensors whose digests differ] after a flipped bit, then [the error] for a missing
    tensor."""
    engine.collective_rpc(read_as, args=("shared_memory",))
    weights = load_file(checkpoint / "model.safetensors")
    manifest = stage(staging, version + 1, [weights])
    flip_a_bit(manifest, VICTIM)
    loaded = digests_of(load(engine, manifest.buckets[0], version + 1, 0, 1))
    yield [name for name in manifest.digests if loaded.get(name) != manifest.digests[name]]

    del weights[VICTIM]
    manifest = stage(staging, version + 2, [weights])
    try:
        load(engine, manifest.buckets[0], version + 2, 0, 1)
    except RuntimeError as error:
        yield [str(error)]


def load_on_demand(engine: LLM, ipc_buckets: IpcBuckets, version: int, checkpoint: Path) -> Proof:
    """Load a version from buckets that are filled one by one and overwritten after each load."""
    weights = load_file(checkpoint / "model.safetensors").items()
    contents = [dict(some) for some in batched(weights, -(-len(weights) // IPC_BUCKETS))]
    manifest = stage(ipc_buckets, version, contents)
    for index, bucket in enumerate(contents):
        ref = ipc_buckets.fill(index, index % IN_FLIGHT, parts([bucket]))
        loaded = load(engine, ref, version, index, len(contents))
        _, memory, _ = ipc_buckets._memory[index % IN_FLIGHT]
        memory.fill_(0xFF)
    ipc_buckets.release()
    return manifest.digests, loaded


def load(
    engine: LLM, ref: BucketRef, version: int, index: int, count: int
) -> list[dict[str, Loaded]]:
    arguments = (ref.as_plain(), version, index == 0, index == count - 1)
    return engine.collective_rpc("load_weight_bucket", args=arguments)


def read_as(worker: Any, transport: str) -> None:
    worker.weight_transfer_engine._reader = carrier(transport).reader()


def name_of_reload(worker: Any) -> str:
    return type(worker.weight_transfer_engine._reload).__name__


def use_layerwise(worker: Any) -> None:
    receiver = worker.weight_transfer_engine
    receiver._reload = LayerwiseReload(receiver.model, receiver.model_config)


def reuse_memory_of_experts(worker: Any) -> None:
    """Reuse memory like an allocator: the pieces of another weight, which arrives in three parts,
    are loaded into the memory of experts that were packed before this update."""
    packed = getattr(worker.weight_transfer_engine._reload, "_packed", [])
    experts = [one for one in packed if isinstance(one, PackedExperts)]
    fused = [
        one for one in packed if isinstance(one, PackedLinear) and "qkv" in one.weights[0].name
    ]
    if experts:
        (weight,) = fused[0].weights
        old = experts[0]._layer.w13_weight.detach().flatten()[: weight._total]
        fused[0]._scratch.release(old.view(weight._shape))


def buckets(checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """Return the weights in two buckets. The first bucket ends within a fused weight."""
    weights = list(load_file(checkpoint / "model.safetensors").items())
    cut = next(i for i, (name, _) in enumerate(weights) if "k_proj" in name) + 1
    return [dict(weights[:cut]), dict(weights[cut:])]


def outputs(engine: LLM) -> list[float]:
    """Return the log-probs of the prompt's tokens, the log-probs of every token after the prompt,
    and the output of the embedding as an output layer."""
    parameters = SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    after = output.outputs[0].logprobs[0]
    own = [
        step[token].logprob
        for step, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    ]
    return [
        *own,
        *(after[token].logprob for token in sorted(after)),
        *engine.collective_rpc(embedding_as_output_layer)[0],
    ]


def embedding_as_output_layer(worker: Any) -> list[float]:
    """Return the output of the embedding if it is used as an output layer, as in tied models."""
    embedding = worker.weight_transfer_engine.model.model.embed_tokens
    ones = torch.ones_like(embedding.weight[:1])
    output = embedding.quant_method.apply(embedding, ones)
    return output.flatten()[:8].tolist()


if __name__ == "__main__":
    main()
