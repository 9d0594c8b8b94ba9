"""Conversion of a policy into a Hugging Face directory for transformers and vLLM, and of its
adapters into a directory for PEFT: from a live run, or from a checkpoint.

Invariants:
- a directory appears whole: it is written under a temporary name next to its final path, synced,
  and renamed; DIGESTS contains the digests of its files, which `require_export` checks before the
  directory is used;
- the whole checkpoint is checked before any weight is written;
- everything but weights and config.json's dtype is copied from the directory from which the model
  was made;
- memory holds one bucket and one file's tensors, never the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_async_rl.config.durable import file_digest, publish
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.digested_folder import DIGESTS, StoredFile, described
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.weights.export import Bucket, WeightExporter

BUCKET_BYTES = 512 * 2**20
FILE_BYTES = 4 * 2**30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export_hf(exporter: WeightExporter, source_model_dir: Path, out_dir: Path) -> None:
    """Write the live weights to `out_dir`, replacing its content. Collective on all ranks; rank 0
    writes."""
    buckets = exporter.buckets(BUCKET_BYTES)
    if not exporter.receives:
        # Every rank takes part in the gathers, but only rank 0 gets tensors.
        for _ in buckets:
            pass
        return
    with _in_place_of(out_dir) as partial:
        dtype = _write_weights(buckets, partial)
        _copy_rest(source_model_dir, partial, dtype)


def export_adapter(model: PolicyModel, out_dir: Path) -> None:
    """Write the live adapters to `out_dir` in PEFT's format, replacing its content; write nothing
    for a model without adapters. Collective on all ranks; rank 0 writes."""
    lora = model.lora
    if lora is None:
        return
    exporter = WeightExporter(model.bridge, model.chunks, adapters=True)
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for bucket in exporter.buckets(BUCKET_BYTES)
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True)
        if tensor is not None
    }
    if not exporter.receives:
        return
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.source),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with _in_place_of(out_dir) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(
            json.dumps(settings, indent=2), encoding="utf-8"
        )


@contextmanager
def _in_place_of(out_dir: Path) -> Iterator[Path]:
    """Yield a new directory that replaces `out_dir` at the end."""
    partial = out_dir.with_name(out_dir.name + ".unfinished")
    if partial.exists():
        # Left over from a killed conversion.
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    # No `finally`: after an error the unfinished directory keeps its temporary name.
    yield partial
    files = {
        file.name: StoredFile(file.stat().st_size, file_digest(file)) for file in partial.iterdir()
    }
    (partial / DIGESTS).write_text(described({}, files), encoding="utf-8")
    if out_dir.exists():
        shutil.rmtree(out_dir)
    publish(partial, out_dir)


def convert(checkpoint: Path, out_dir: Path, dtype: str | None = None) -> None:
    """Write a checkpoint to `out_dir`, with adapters merged into the weights, and the adapters
    alone to its folder `adapter`. The checkpoint is a run's checkpoint folder or one step of it,
    saved with any layout. dtype: of the weights, `float32` or `bfloat16`; None: those of the model.
    Uses one process and the CPU.

    Raises UserError if the checkpoint is damaged, if it or its model directory is missing, if that
    directory is not the adapters' base model, or if `out_dir` holds files.
    """
    from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
    from megatron_async_rl.config.schema import ModelConfig
    from megatron_async_rl.policy import device
    from megatron_async_rl.policy.blocks import refuse_other_base
    from megatron_async_rl.policy.checkpoint import load_model
    from megatron_async_rl.policy.checkpoint_folder import about, is_step, newest, require_whole
    from megatron_async_rl.policy.model import assemble_model, build_model
    from megatron_async_rl.policy.parallel import initialise

    path = checkpoint if is_step(checkpoint) else newest(checkpoint)
    if path is None:
        raise UserError.of(
            "CHECKPOINT",
            f"{checkpoint} holds no checkpoint",
            "name RUN/checkpoint, or a step_* folder in it",
        )
    if out_dir.exists() and any(out_dir.iterdir()):
        raise UserError.of("OUT", f"{out_dir} is not empty", "name a new directory")
    # Checked before minutes of work: a damaged checkpoint must not become a model.
    require_whole(path, blocks=True)
    content = about(path)
    source = Path(content["model_path"])
    if not (source / "config.json").exists():
        raise UserError.of(
            "CHECKPOINT",
            f"{path} was trained from {source}, whose config.json and tokenizer are needed and not"
            " there",
            "put that model directory back",
        )
    layout = initialise(ParallelConfig(), device.install("cpu"), timeout_s=600)
    try:
        # A checkpoint of adapters contains no other weights.
        build = build_model if "lora" in content else assemble_model
        settings = PolicyConfig(lora=content.get("lora"))
        model = build(ModelConfig(path=source, dtype=content["dtype"]), settings, layout)
        refuse_other_base(path, content, model)
        load_model(path, model, content)
        # Without a request, each parameter keeps its own precision.
        rounded = None if dtype in (None, content["dtype"]) else getattr(torch, str(dtype))
        exporter = WeightExporter(model.bridge, model.chunks, dtype=rounded)
        export_hf(exporter, source, out_dir)
        export_adapter(model, out_dir / "adapter")
    finally:
        layout.shutdown()


def _write_weights(buckets: Iterator[Bucket], directory: Path) -> str:
    """Write all tensors; return the name of their dtype."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    bytes_of: Counter[str] = Counter()

    def flush() -> None:
        nonlocal size
        save_file(held, directory / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        # Names only: the tensors are freed with `held`.
        files.append(list(held))
        held.clear()
        size = 0

    for bucket in buckets:
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
            assert tensor is not None
            # A copy, because a bucket's tensor may be the live parameter, or a part of it.
            held[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            bytes_of[str(tensor.dtype).removeprefix("torch.")] += held[name].nbytes
            size += held[name].nbytes
            total += held[name].nbytes
        if size >= FILE_BYTES:
            flush()
    if held:
        flush()
    # Parameters may differ: a model's router or norms may be float32.
    dtype = bytes_of.most_common(1)[0][0] if bytes_of else ""
    if len(files) == 1:
        os.rename(directory / "part-0.safetensors", directory / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        # Renamed at the end, when the number of files is known.
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        os.rename(directory / f"part-{index}.safetensors", directory / file)
        weight_map |= dict.fromkeys(names, file)
    index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps(index_content, indent=1), encoding="utf-8"
    )
    return dtype


def _copy_rest(source: Path, directory: Path, dtype: str) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes `dtype`, older versions read `torch_dtype`.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in source.iterdir():
        if (
            file.is_file()
            # The source's digests do not apply to this directory.
            and file.name not in ("config.json", DIGESTS)
            and not file.name.endswith(_WEIGHT_SUFFIXES)
        ):
            shutil.copyfile(file, directory / file.name)
