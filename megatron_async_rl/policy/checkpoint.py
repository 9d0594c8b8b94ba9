"""Model, optimizer and run state on disk, written whole or not at all.

    DIR/latest                    the name of the newest complete checkpoint (checkpoint_folder.py)
    DIR/step_00000012/sharded/    the model, and the state of its parameters in the optimizer and
                                  elsewhere (adam_view.py), in blocks; each rank writes its own
                                  blocks (blocks.py): loads with any parallel layout
    DIR/step_00000012/state.pt    the run's own state, from rank 0; other files of the run under
                                  names that it chose
    DIR/step_00000012/rank_3.pt   state for rank 3 of the same layout only: RNG, and the state of
                                  delayed FP8 scaling (fp8.py)
    DIR/step_00000012/about.json  step, layout, dtype, vocabulary, layers, the source model
                                  directory, names of the parameter state, Adam's step count, place
                                  of the weights (in the model, or in Adam's float32 ones), the
                                  moments' dtype; for adapters their settings and the base model's
                                  digest (blocks.py); the digest of a reference that does not
                                  move; every other file with its digests (checkpoint_folder.py)

Invariants:
- a directory named step_N is complete: it is written under another name, read back against its
  digests, synced, and renamed; `latest` changes after that, by a rename too. After a kill at any
  moment, the next load finds the previous checkpoint or the new one, never a mixture;
- no checkpoint that `latest` names is deleted before `latest` names a newer one, and checkpoints
  are deleted only in favor of newer ones that are whole;
- loaded data has the digest with which it was saved, or the load fails;
- the written state is that at the call of `save`, even if a thread writes it later;
- files are read back without running code from them;
- FP8 weights are not saved: Adam's float32 weights are saved and replace them in every reader of
  the checkpoint;
- moments are saved and loaded in the dtype in which they are kept, and moments of another dtype are
  refused;
- weights that are not trained are not saved: a checkpoint of adapters needs the base model in its
  source directory, and is refused with another one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_async_rl.config.durable import PARTIAL, publish, sync, write_file
from megatron_async_rl.policy import block_files
from megatron_async_rl.policy.adam_view import (
    MASTER,
    Sliced,
    adam_names,
    adam_shards,
    adam_steps,
    optimizer_state,
    set_adam_steps,
)
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.blocks import (
    STATE,
    Content,
    ModelBlocks,
    base_entries,
    refuse_other_base,
    staged,
)
from megatron_async_rl.policy.checkpoint_folder import (
    ABOUT,
    LATEST,
    SHARDED,
    CheckpointBroken,
    about,
    damaged,
    is_step,
    named_latest,
    newest,
    outdated,
    read_checked,
    refuse_other_moments,
    require_whole,
)
from megatron_async_rl.policy.digested_folder import StoredFile, described, files_of
from megatron_async_rl.policy.fp8 import delayed_state, restore_delayed_state
from megatron_async_rl.policy.megatron_private import weights_from_masters
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout

log = logging.getLogger(__name__)

FULL_BYTES = 2**20
_checked: set[Path] = set()
"""Checkpoints that this process wrote or loaded."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded checkpoint, except model and optimizer, which `load` has filled.

    names: of the parameter state that `read` can load. content: about.json."""

    path: Path
    model: PolicyModel
    step: int
    state: dict[str, Any]
    names: frozenset[str]
    content: Mapping[str, Any]

    def read(self, named: Mapping[str, Sliced]) -> None:
        """Fill these slices with the state that was saved under these names. Collective over the
        world: the same names on every rank. Raises CheckpointBroken."""
        if named:
            blocks = ModelBlocks(self.model).state(named, writes=False)
            _read(self.path, self.content, blocks, self.model.bridge.layout)


def save(
    directory: Path,
    step: int,
    *,
    model: PolicyModel,
    optimizer: MegatronOptimizer,
    state: Mapping[str, Any],
    parameter_state: Mapping[str, Sliced],
    layout: Layout,
    keep: int | None,
    proven: int | None = None,
    entries: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    background: Background | None = None,
) -> Path:
    """Save step `step`. Keep the newest `keep` checkpoints (null: all) and that of step `proven`.
    Collective over the world; return the checkpoint.

    state: rank 0's is saved; numbers, text, tensors and containers of them (TypeError otherwise).
    parameter_state: slices by name; the same names on every rank. entries: further entries of
    about.json; the same on every rank. files: name and content of further files of rank 0; see
    checkpoint_folder.read_file. background: copy everything to host memory and return, while its
    thread writes; its next `start` or `finish` raises an error of the write. Given on every rank or
    on none. Raises FileExistsError if `latest` already names this step.
    """
    if background is not None:
        background.finish()
    final = directory / _name(step)
    unfinished = directory / f"unfinished_step_{step:08d}"
    # Before any file is written: state of a type that cannot be saved is refused here.
    payload = _serialised(state)
    rank_payload = _serialised({"rng": rng_state(layout), "fp8": delayed_state(model.chunks)})
    adam = {
        name: optimizer_state(optimizer, adam_shards(optimizer, name)) for name in adam_names(model)
    }
    parameter_state = {**parameter_state, **adam}
    description = {
        "step": step,
        **_description(model, optimizer, layout),
        **base_entries(model),
        "adam_steps": adam_steps(optimizer),
        "parameter_state": sorted(parameter_state),
        **(entries or {}),
    }

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        sync(directory.parent)
        # A folder that `latest` does not name is damaged or abandoned, and is replaced.
        if named_latest(directory) == final.name:
            raise FileExistsError(f"{final} is already saved")
        for leftover in directory.glob(f"{LATEST}*{PARTIAL}"):
            leftover.unlink()
        for leftover in directory.glob("unfinished_*"):
            shutil.rmtree(leftover)
        (unfinished / SHARDED).mkdir(parents=True)

    def commit(stored: dict[str, StoredFile]) -> None:
        # The index of the blocks, and files of ranks without a block. Files of blocks have their
        # digests, and are not read, because one may be larger than the memory.
        for path in (unfinished / SHARDED).iterdir():
            if (name := f"{SHARDED}/{path.name}") not in stored:
                stored[name] = StoredFile.of(path.read_bytes())
        for name, content in {"state.pt": payload, **(files or {})}.items():
            stored[name] = StoredFile.of(content)
            write_file(unfinished / name, content)
        # The last of the folder's files, because it contains the digests of the others.
        write_file(unfinished / ABOUT, described(description, stored))
        # Blocks were read back by the ranks that wrote them.
        require_whole(unfinished)
        if final.exists():
            # It is damaged, or left over from an older resume, or `latest` does not name it yet.
            shutil.rmtree(final)
        # A rename, so a folder with this name is whole or absent.
        publish(unfinished, final)
        # Atomic as well. After a crash before this line, the previous checkpoint is resumed.
        write_file(directory / LATEST, final.name)
        # Not earlier: the new checkpoint must be on disk, whole, and named.
        for old in outdated(final, keep, _checked, _name(proven)):
            shutil.rmtree(old)

    def write(content: Content) -> None:
        with _cleared_on_failure(unfinished):
            # A separate group, because the main thread's collectives continue during the write.
            group = layout.writing_group
            written = block_files.write(unfinished / SHARDED, content, group)
            stored = {f"{SHARDED}/{name}": file for name, file in written.items()}
            own = f"rank_{layout.rank}.pt"
            write_file(unfinished / own, rank_payload)
            for each in layout.gathered({own: StoredFile.of(rank_payload)}, group):
                stored |= each
            # After every rank has written its blocks and read them back.
            layout.from_rank_zero(lambda: commit(stored), group)

    with _cleared_on_failure(unfinished):
        layout.from_rank_zero(prepare)
        blocks = ModelBlocks(model)
        content = blocks.state(parameter_state, writes=True)
        if not model.config.fp8_param:
            content |= blocks.model(writes=True)
        if background is not None:
            # A copy, because the next step changes the originals while the thread writes.
            content = staged(content)
    if background is not None:
        background.start(lambda: write(content))
    else:
        write(content)
    return final


def _name(step: int | None) -> str:
    """Return the folder name of a step's checkpoint."""
    return "" if step is None else f"step_{step:08d}"


@contextlib.contextmanager
def _cleared_on_failure(unfinished: Path) -> Iterator[None]:
    """Remove the unfinished folder after an error, so that a full disk has room to record the
    error. Raises OSError (ENOSPC) instead of the various errors of a full disk."""
    try:
        yield
    except BaseException as error:
        full = False
        # Another rank that failed may remove the folder at any moment, which must not hide `error`.
        with contextlib.suppress(OSError):
            full = shutil.disk_usage(unfinished).free < FULL_BYTES
        shutil.rmtree(unfinished, ignore_errors=True)
        if full:
            raise OSError(
                errno.ENOSPC, "No space left for a checkpoint", str(unfinished.parent)
            ) from error
        raise


def load(
    directory: Path, *, model: PolicyModel, optimizer: MegatronOptimizer, layout: Layout
) -> Checkpoint | None:
    """Restore model, optimizer and this rank's RNG from the newest checkpoint in `directory`, or
    from `directory` if it is one step's folder; return None if there is none. Collective.

    Works with any parallel layout, with or without the distributed optimizer. Raises
    CheckpointBroken.
    """
    path = layout.from_rank_zero(lambda: directory if is_step(directory) else newest(directory))
    if path is None:
        return None
    # All digests before any tensor, so that no model is left half loaded.
    layout.from_rank_zero(lambda: require_whole(path))
    content = about(path)
    if layout.rank == 0 and files_of(content) is None:
        log.warning("%s has no digests: damage to its files may go unnoticed", path)
    refuse_other_base(path, content, model)
    refuse_other_moments(path, content, _dtype_name(optimizer.config.exp_avg_dtype))
    state = _read_tensors(path, "state.pt", content, torch.device("cpu"))
    names = frozenset(content.get("parameter_state", ()))
    adam = {
        name: optimizer_state(optimizer, adam_shards(optimizer, name)) for name in adam_names(model)
    }
    if layout.rank == 0:
        for name in sorted(adam.keys() - names):
            log.warning("%s holds no %s: the optimizer starts without it", path, name)
    if not model.config.fp8_param:
        load_model(path, model, content)
        # If a model's parameters are float32, its masters alias them; others are overwritten below
        # if the checkpoint has them.
        optimizer.reload_model_params()
    checkpoint = Checkpoint(path, model, content["step"], state, names, content)
    checkpoint.read({name: sliced for name, sliced in adam.items() if name in names})
    if MASTER in adam and MASTER not in names:
        _read_masters(checkpoint, adam[MASTER])
    if model.config.fp8_param:
        # FP8 bytes and scales are computed from the masters, as they were at the save.
        weights_from_masters(optimizer)
    set_adam_steps(optimizer, content.get("adam_steps", 0))
    # Checkpoints of earlier versions do not record the context-parallel size and the device.
    key = _layout_key(optimizer, layout)
    if {"context": 1, "device": layout.device_type, **content["layout"]} == key:
        rank_state = _read_tensors(path, f"rank_{layout.rank}.pt", content, layout.device)
        # Generator states are per rank, so they only fit the layout with which they were saved.
        restore_rng(rank_state.pop("rng"), layout)
        # Absent in checkpoints of earlier versions.
        restore_delayed_state(model.chunks, rank_state.pop("fp8", {}), model.config)
    elif layout.rank == 0:
        log.warning(
            "%s was saved on layout %s and is loaded on %s: random generators start afresh%s",
            path,
            content["layout"],
            key,
            ", and so does delayed scaling" if _delayed(model) else "",
        )
    _checked.add(path)
    return checkpoint


def load_model(path: Path, model: PolicyModel, content: Mapping[str, Any]) -> None:
    """Load only the weights of one checkpoint, whatever layout and optimizer it was saved with.
    content: its about.json. If the saved model had FP8 weights, Adam's float32 weights are loaded
    and rounded. The model must not have FP8 weights. Collective. Raises CheckpointBroken."""
    blocks = ModelBlocks(model).model(writes=False)
    if content.get("weights") == MASTER:
        blocks = {_master(key): held for key, held in blocks.items()}
    _read(path, content, blocks, model.bridge.layout)


def _read_masters(checkpoint: Checkpoint, masters: Sliced) -> None:
    """Fill Adam's float32 weights with those of the checkpoint, or with the model's weights if it
    has no others, which are then float32. Collective."""
    blocks = ModelBlocks(checkpoint.model).state({MASTER: masters}, writes=False)
    own = {key.removeprefix(_master("")): held for key, held in blocks.items()}
    _read(checkpoint.path, checkpoint.content, own, checkpoint.model.bridge.layout)


def _master(key: str) -> str:
    """Return the key of Adam's float32 weights of a tensor of the model."""
    return f"{STATE}.{MASTER}.{key}"


def _read_tensors(
    path: Path, name: str, content: Mapping[str, Any], place: torch.device
) -> dict[str, Any]:
    """Return a file of numbers and tensors. content: about.json. Raises CheckpointBroken."""
    held = read_checked(path, name, content)
    if held is None:
        raise damaged(path, f"{name} is not there")
    try:
        # `weights_only`, so that a checkpoint cannot run code.
        found: dict[str, Any] = torch.load(io.BytesIO(held), weights_only=True, map_location=place)
    except Exception as error:  # pickle and zip files raise many types; with digests this is rare
        raise damaged(path, f"{name} cannot be read ({type(error).__name__}: {error})") from error
    return found


def _read(path: Path, content: Mapping[str, Any], blocks: Content, layout: Layout) -> None:
    """Fill the blocks from the checkpoint. content: about.json."""
    listed = files_of(content)
    prefix = f"{SHARDED}/"
    files = None
    if listed is not None:
        files = {
            name.removeprefix(prefix): file
            for name, file in listed.items()
            if name.startswith(prefix)
        }
    try:
        block_files.read(path / SHARDED, blocks, layout.cpu_group, files)
    except block_files.BlocksDamaged as error:
        raise damaged(path, str(error)) from error
    except block_files.BlocksUnreadable as error:
        raise CheckpointBroken.of(
            "model.path",
            f"{path} cannot be loaded into this model: {error}",
            "use the model that the run began with, or choose another run.dir",
        ) from error


def _delayed(model: PolicyModel) -> bool:
    return bool(model.config.fp8) and model.config.fp8_recipe == "delayed"


def _layout_key(optimizer: MegatronOptimizer, layout: Layout) -> dict[str, Any]:
    return {
        "tensor": layout.tp_size,
        "context": layout.cp_size,
        "pipeline": layout.pp_size,
        "virtual_pipeline": layout.virtual_stages,
        "expert": layout.ep_size,
        "data": layout.dp_size,
        "distributed_optimizer": bool(optimizer.config.use_distributed_optimizer),
        "device": layout.device_type,
    }


def _description(
    model: PolicyModel, optimizer: MegatronOptimizer, layout: Layout
) -> dict[str, Any]:
    return {
        "layout": _layout_key(optimizer, layout),
        "model_path": str(model.source),
        "dtype": _dtype_name(model.config.params_dtype),
        "vocab_size": model.vocab_size,
        "layers": model.bridge.layers.name,
        "weights": MASTER if model.config.fp8_param else "model",
        "moments": _dtype_name(optimizer.config.exp_avg_dtype),
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rng_state(layout: Layout) -> dict[str, Any]:
    """Return the state of this rank's generators, which only the dropout of adapters uses."""
    state = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if layout.device_type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any], layout: Layout) -> None:
    """Set the generators to a state from `rng_state`."""
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
