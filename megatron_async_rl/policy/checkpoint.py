"""Model, optimizer and run state on disk, whole or not at all.

    DIR/latest                    the name of the newest complete checkpoint (checkpoint_folder.py)
    DIR/step_00000012/sharded/    the model, and the state of the optimizer and others that goes
                                  with its parameters (parameter_state.py), in Megatron's
                                  dist_checkpointing: loads on any parallel layout
    DIR/step_00000012/state.pt    the run's own state, from rank 0; other files of the run by names
                                  that it chose
    DIR/step_00000012/rank_3.pt   what only makes sense to rank 3 of the same layout: RNG
    DIR/step_00000012/about.json  step, layout, dtype, vocabulary, the source model directory, names
                                  of the parameter state, and Adam's step count

Invariants:
- a directory named step_N is complete: it is written under another name, synced, and renamed;
  `latest` moves after that, by a rename too. Killed at any moment, the next load finds the previous
  checkpoint or the new one, never a mixture;
- nothing that `latest` names is deleted before `latest` names something newer;
- files are read back without running code from them (`weights_only`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_async_rl.policy.checkpoint_folder import LATEST, CheckpointBroken, about, newest
from megatron_async_rl.policy.megatron_private import ShardedSave
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameter_state import (
    ModelTensors,
    Numbers,
    adam_names,
    adam_shards,
    adam_steps,
    assembled,
    blank,
    cut,
    numbers_of,
    set_adam_steps,
    sharded,
)

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel

log = logging.getLogger(__name__)

PARAMETER_STATE = "parameter_state"
FULL_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded checkpoint, but for model and optimizer, which `load` has filled.

    names: of the parameter state that `read` brings."""

    path: Path
    model: PolicyModel
    step: int
    state: dict[str, Any]
    names: Mapping[str, Numbers]

    def read(self, name: str) -> ModelTensors:
        """Model tensors of this rank, whole on every data-parallel rank, on the CPU. Collective
        over the world.

        One name at a time, because a rank's host memory may not hold them all. Raises
        CheckpointBroken.
        """
        tensors = blank(self.model, self.names[name])
        content = {
            PARAMETER_STATE: {
                name: sharded(_key(name), tensors, list(_sharded(self.model).values()))
            }
        }
        loaded = _load_sharded(self.path, content)[PARAMETER_STATE][name]
        return [loaded[str(index)] for index in range(len(self.model.chunks))]


def save(
    directory: Path,
    step: int,
    *,
    model: PolicyModel,
    optimizer: MegatronOptimizer,
    state: Mapping[str, Any],
    parameter_state: Mapping[str, ModelTensors],
    layout: Layout,
    keep: int,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Saves step `step` and keeps the newest `keep` checkpoints. Collective over the world; returns
    the checkpoint.

    state: rank 0's is saved; numbers, text, tensors and containers of them (TypeError otherwise).
    parameter_state: by name, model tensors of this rank's parameters; the same names on every rank.
    files: name and content of what rank 0 wants beside it; see checkpoint_folder.read_file.
    Raises FileExistsError when `latest` already names this step.
    """
    final = directory / f"step_{step:08d}"
    unfinished = directory / f"unfinished_step_{step:08d}"
    payload, rank_payload = _serialised(state), _serialised({"rng": _rng_state(layout)})
    adam = {
        name: assembled(adam_shards(optimizer, name), model, optimizer)
        for name in adam_names(model)
    }
    parameter_state = {**parameter_state, **adam}
    description = {
        "step": step,
        **_description(model, optimizer, layout),
        "adam_steps": adam_steps(optimizer),
        "parameter_state": {name: numbers_of(tensors) for name, tensors in parameter_state.items()},
    }

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if newest(directory) == final:
            raise FileExistsError(f"{final} is already saved")
        for leftover in (*directory.glob("unfinished_*"), final):
            # A step_N that `latest` does not name is from a run that died between the two renames.
            if leftover.exists():
                shutil.rmtree(leftover)
        (unfinished / "sharded").mkdir(parents=True)

    def commit() -> None:
        (unfinished / "state.pt").write_bytes(payload)
        for name, held in (files or {}).items():
            (unfinished / name).write_bytes(held)
        (unfinished / "about.json").write_text(json.dumps(description, indent=1))
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

    with _cleared_on_failure(unfinished):
        layout.from_rank_zero(prepare)
        content = _sharded(model)
        entries = [dict(chunk) for chunk in content.values()]
        content[PARAMETER_STATE] = {
            name: sharded(_key(name), tensors, entries) for name, tensors in parameter_state.items()
        }

        def write(tensors: Any, target: str | Path, planner: Any) -> None:
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(target, sync_files=True),
                planner=planner,
                process_group=layout.cpu_group,
            )

        dist_checkpointing.save(content, str(unfinished / "sharded"), ShardedSave(write))
        (unfinished / f"rank_{layout.rank}.pt").write_bytes(rank_payload)
        layout.barrier()
        layout.from_rank_zero(commit)
    return final


@contextlib.contextmanager
def _cleared_on_failure(unfinished: Path) -> Iterator[None]:
    """On a full disk there is room again to say what happened. Raises OSError (ENOSPC) for whatever
    a full disk raised."""
    try:
        yield
    except BaseException as error:
        full = unfinished.exists() and shutil.disk_usage(unfinished).free < FULL_BYTES
        shutil.rmtree(unfinished, ignore_errors=True)
        if full:
            raise OSError(
                errno.ENOSPC, "No space left for a checkpoint", str(unfinished.parent)
            ) from error
        raise


def load(
    directory: Path, *, model: PolicyModel, optimizer: MegatronOptimizer, layout: Layout
) -> Checkpoint | None:
    """Restores model, optimizer and this rank's RNG from the newest checkpoint; None where there is
    none. Collective.

    Any parallel layout may load it, with or without the distributed optimizer. Raises
    CheckpointBroken.
    """
    path = layout.from_rank_zero(lambda: newest(directory))
    if path is None:
        return None
    content = about(path)
    state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    checkpoint = Checkpoint(path, model, content["step"], state, content.get("parameter_state", {}))
    load_model(path, model)
    optimizer.reload_model_params()
    for name in adam_names(model):
        if name in checkpoint.names:
            shards = adam_shards(optimizer, name)
            for held, loaded in zip(
                shards, cut(checkpoint.read(name), model, optimizer), strict=True
            ):
                held.copy_(loaded)
        elif layout.rank == 0:
            log.warning("%s holds no %s: the optimizer starts without it", path, name)
    set_adam_steps(optimizer, content.get("adam_steps", 0))
    # Checkpoints of earlier versions do not name the context-parallel size.
    if {"context": 1, **content["layout"]} == _layout_key(optimizer, layout):
        rank_state = torch.load(
            path / f"rank_{layout.rank}.pt", weights_only=True, map_location=layout.device
        )
        _restore_rng(rank_state.pop("rng"), layout)
    elif layout.rank == 0:
        log.warning(
            "%s was saved on layout %s and is loaded on %s: random generators start afresh",
            path,
            content["layout"],
            _layout_key(optimizer, layout),
        )
    return checkpoint


def load_model(path: Path, model: PolicyModel) -> None:
    """The weights alone of one checkpoint, whatever layout and optimizer it was saved with.
    Collective."""
    loaded = _load_sharded(path, _sharded(model))
    for index, chunk in enumerate(model.chunks):
        chunk.load_state_dict(loaded[_chunk_key(index)])


def _sharded(model: PolicyModel) -> dict[str, Any]:
    return {
        _chunk_key(index): chunk.sharded_state_dict() for index, chunk in enumerate(model.chunks)
    }


def _key(name: str) -> str:
    return f"{PARAMETER_STATE}.{name}"


def _load_sharded(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(content, str(path / "sharded"))
    except (OSError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        raise CheckpointBroken.of(
            "model.path",
            f"{path} cannot be loaded into this model: {error}",
            "use the model that the run began with, or choose another run.dir",
        ) from error
    return loaded


def _chunk_key(index: int) -> str:
    return f"model{index}"


def _layout_key(optimizer: MegatronOptimizer, layout: Layout) -> dict[str, Any]:
    return {
        "tensor": layout.tp_size,
        "context": layout.cp_size,
        "pipeline": layout.pp_size,
        "virtual_pipeline": layout.virtual_stages,
        "expert": layout.ep_size,
        "data": layout.dp_size,
        "distributed_optimizer": bool(optimizer.config.use_distributed_optimizer),
    }


def _description(
    model: PolicyModel, optimizer: MegatronOptimizer, layout: Layout
) -> dict[str, Any]:
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
    get_cuda_rng_tracker().set_states(
        {name: value.cpu() for name, value in state["megatron"].items()}
    )
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
            "a checkpoint holds numbers, text, tensors and containers of them; reading it back"
            f" fails: {error}"
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
