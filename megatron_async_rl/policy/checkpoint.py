"""Model, optimizer and run state on disk, whole or not at all.

    DIR/latest                    the name of the newest complete checkpoint
    DIR/step_00000012/sharded/    model and optimizer, Megatron's dist_checkpointing: loads on any parallel layout
    DIR/step_00000012/state.pt    the run's own state, from rank 0
    DIR/step_00000012/rank_3.pt   what only makes sense to rank 3 of the same layout: RNG, controls
    DIR/step_00000012/about.json  step, layout, dtype, vocabulary and the source model directory

Invariants:
- a directory named step_N is complete: it is written under another name, synced, and renamed; `latest` moves after that, by
  a rename too. Killed at any moment, the next load finds the previous checkpoint or the new one, never a mixture;
- nothing that `latest` names is deleted before `latest` names something newer;
- files are read back without running code from them (`weights_only`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_async_rl.policy.optimizer_state import materialise, restore
from megatron_async_rl.policy.parallel import Layout

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel

log = logging.getLogger(__name__)

LATEST = "latest"
RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


class CheckpointBroken(RuntimeError):
    """A checkpoint directory does not hold what its names promise."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What `load` brings back beside model and optimizer. `rank_state` is None when the parallel layout has changed."""

    step: int
    state: dict[str, Any]
    rank_state: dict[str, Any] | None


def newest(directory: Path) -> Path | None:
    """The checkpoint that `latest` names; None where nothing was ever saved. Raises CheckpointBroken."""
    pointer = directory / LATEST
    if not pointer.exists():
        return None
    path = directory / pointer.read_text().strip()
    if not (path / "about.json").exists():
        raise CheckpointBroken(
            f"{pointer} names {path.name}, which is not a checkpoint; name another step_* of {directory} in it"
        )
    return path


def about(path: Path) -> dict[str, Any]:
    """about.json of one checkpoint."""
    content: dict[str, Any] = json.loads((path / "about.json").read_text())
    return content


def save(
    directory: Path,
    step: int,
    *,
    model: PolicyModel,
    optimizer: MegatronOptimizer,
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    layout: Layout,
    keep: int,
) -> Path:
    """Saves step `step` and keeps the newest `keep` checkpoints. Collective over the world; returns the checkpoint.

    state: rank 0's is saved. Both states hold numbers, text, tensors and containers of them (TypeError otherwise).
    Raises FileExistsError when `latest` already names this step.
    """
    final = directory / f"step_{step:08d}"
    unfinished = directory / f"unfinished_step_{step:08d}"
    payload, rank_payload = _serialised(state), _serialised({"rng": _rng_state(layout), **rank_state})

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if newest(directory) == final:
            raise FileExistsError(f"{final} is already saved")
        for leftover in (*directory.glob("unfinished_*"), final):
            # A step_N that `latest` does not name is from a run that died between the two renames.
            if leftover.exists():
                shutil.rmtree(leftover)
        (unfinished / "sharded").mkdir(parents=True)

    layout.from_rank_zero(prepare)
    dist_checkpointing.save(_sharded(model, optimizer), str(unfinished / "sharded"), _InProcessSave(layout))
    (unfinished / f"rank_{layout.rank}.pt").write_bytes(rank_payload)
    layout.barrier()

    def commit() -> None:
        (unfinished / "state.pt").write_bytes(payload)
        (unfinished / "about.json").write_text(json.dumps({"step": step, **_description(model, optimizer, layout)}, indent=1))
        _sync_tree(unfinished)
        os.rename(unfinished, final)
        _sync(directory)
        pointer = directory / f"{LATEST}.new"
        pointer.write_text(final.name)
        _sync(pointer)
        os.replace(pointer, directory / LATEST)
        _sync(directory)
        for old in sorted(directory.glob("step_*"))[:-keep]:
            if old != final:
                shutil.rmtree(old)

    layout.from_rank_zero(commit)
    return final


def load(directory: Path, *, model: PolicyModel, optimizer: MegatronOptimizer, layout: Layout) -> Checkpoint | None:
    """Restores model, optimizer and this rank's RNG from the newest checkpoint; None where there is none. Collective.

    Any parallel layout may load it. Raises CheckpointBroken.
    """
    path = layout.from_rank_zero(lambda: newest(directory))
    if path is None:
        return None
    loaded = _load_sharded(path, _sharded(model, optimizer, loading=True))
    _restore_model(model, loaded)
    restore(optimizer, loaded["optimizer"])
    content = about(path)
    rank_state = None
    if content["layout"] == _layout_key(optimizer, layout):
        rank_state = torch.load(path / f"rank_{layout.rank}.pt", weights_only=True, map_location=layout.device)
        _restore_rng(rank_state.pop("rng"), layout)
    elif layout.rank == 0:
        log.warning(
            "%s was saved on layout %s and is loaded on %s: random generators and controls start afresh",
            path, content["layout"], _layout_key(optimizer, layout),
        )  # fmt: skip
    state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    return Checkpoint(step=content["step"], state=state, rank_state=rank_state)


def load_model(path: Path, model: PolicyModel) -> None:
    """The weights alone of one checkpoint, whatever layout and optimizer it was saved with. Collective."""
    _restore_model(model, _load_sharded(path, _sharded(model, None)))


def _sharded(model: PolicyModel, optimizer: MegatronOptimizer | None, *, loading: bool = False) -> dict[str, Any]:
    content = {_chunk_key(i): chunk.sharded_state_dict(metadata=dict(RESHARDABLE)) for i, chunk in enumerate(model.chunks)}
    if optimizer is not None:
        materialise(optimizer)
        content["optimizer"] = optimizer.sharded_state_dict(content, is_loading=loading, metadata=dict(RESHARDABLE))
    return content


def _load_sharded(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(content, str(path / "sharded"))
    except (OSError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        raise CheckpointBroken(f"{path} cannot be loaded into this model: {error}") from error
    return loaded


def _restore_model(model: PolicyModel, loaded: Mapping[str, Any]) -> None:
    for index, chunk in enumerate(model.chunks):
        chunk.load_state_dict(loaded[_chunk_key(index)])


def _chunk_key(index: int) -> str:
    return f"model{index}"


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's format, written by this process.

    Megatron's own writer forks workers and starts a manager process, which outlives a killed trainer; and forking
    beside Ray's and gloo's threads is not safe.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__("torch_dist", 1)
        self._layout = layout

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
            process_group=self._layout.cpu_group,
        )


def _layout_key(optimizer: MegatronOptimizer, layout: Layout) -> dict[str, Any]:
    return {
        "tensor": layout.tp_size,
        "pipeline": layout.pp_size,
        "virtual_pipeline": layout.virtual_stages,
        "data": layout.dp_size,
        "distributed_optimizer": bool(optimizer.config.use_distributed_optimizer),
    }


def _description(model: PolicyModel, optimizer: MegatronOptimizer, layout: Layout) -> dict[str, Any]:
    return {
        "layout": _layout_key(optimizer, layout),
        "model_path": str(model.source),
        "dtype": str(model.config.params_dtype).removeprefix("torch."),
        "vocab_size": model.vocab_size,
    }


def _rng_state(layout: Layout) -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if layout.device_type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: Mapping[str, Any], layout: Layout) -> None:
    torch.set_rng_state(state["torch"].cpu())
    get_cuda_rng_tracker().set_states({name: value.cpu() for name, value in state["megatron"].items()})
    if layout.device_type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _serialised(content: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:
        raise TypeError(
            f"a checkpoint holds numbers, text, tensors and containers of them; reading it back fails: {error}"
        ) from error
    return buffer.getvalue()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))
