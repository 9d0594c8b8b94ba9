"""A Hugging Face directory into this rank's Megatron parameters.

Invariants:
- every parameter of every stage is loaded and every tensor of the directory is used, or WeightsDoNotFit names what is not;
- the check comes first, on all ranks alike, from the files' headers: a model is never left half loaded;
- only this rank's shards are copied; files are mapped, not read whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_async_rl.weights.parameters import all_entries, local_entries, shard_of

DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints store although the configuration determines them."""


class WeightsDoNotFit(ValueError):
    """The tensors of a model directory are not those of the model its config.json describes."""


class HuggingFaceTensors:
    """The safetensors of a directory by name. Raises FileNotFoundError or WeightsDoNotFit for a broken set of files."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._handles: dict[str, Any] = {}
        for file in safetensor_files(directory):
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
            except SafetensorError as error:
                raise WeightsDoNotFit(f"{file} is not a complete safetensors file: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                if name in self._handles:
                    raise WeightsDoNotFit(f"{directory}: tensor {name} is in two files, one of them {file.name}")
                self._handles[name] = handle

    @property
    def names(self) -> set[str]:
        return set(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor


def safetensor_files(directory: Path) -> list[Path]:
    """The files that hold the model: those of the index where there is one. Raises FileNotFoundError."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing) or 'safetensors files'}; the model's weights must lie there"
        )
    return files


def load_hf(bridge: Any, chunks: Sequence[torch.nn.Module], directory: Path) -> None:
    """Loads this rank's stage and shards. Collective over the pipeline group. Raises WeightsDoNotFit."""
    entries = all_entries(bridge, chunks)
    with ExitStack() as stack:
        tensors = HuggingFaceTensors(directory, stack)
        wanted = {name: shape for entry in entries for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)}
        problems = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.names)]
        problems += [
            f"{name} is in the files but not in the model"
            for name in sorted(tensors.names - wanted.keys())
            if not _implied(bridge, name)
        ]
        problems += [
            f"{name} has shape {list(tensors.shape(name))}, the model wants {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors.names and tensors.shape(name) != shape
        ]
        if problems:
            more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise WeightsDoNotFit(f"the weights in {directory} do not fit its config.json: {'; '.join(problems[:8])}{more}")
        with torch.no_grad():
            for entry in local_entries(bridge, chunks):
                parameter = chunks[entry.chunk].get_parameter(entry.local_name)
                parameter.copy_(shard_of(bridge, entry, [tensors[name] for name in entry.hf_names]))


def _implied(bridge: Any, name: str) -> bool:
    # A tied model's lm_head is its embedding, whatever a checkpoint stores beside it.
    return name.endswith(DERIVED) or (bridge.tied and name == "lm_head.weight")
