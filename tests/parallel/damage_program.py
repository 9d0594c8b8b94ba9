"""One rank that saves a checkpoint with every kind of state and finds each damage to it; arguments
as those of layout_program.

The number of ranks does not matter to a file's digest, so one is enough.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_async_rl.config.objective import (
    KlConfig,
    ObjectiveConfig,
    ReferenceConfig,
    ValueConfig,
)
from megatron_async_rl.config.policy import LoraConfig, ParallelConfig
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy import block_files, blocks, checkpoint
from megatron_async_rl.policy.checkpoint_folder import about, newest, require_whole
from megatron_async_rl.policy.digested_folder import DIGESTS, files_of, require_export
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.weights.convert import export_hf
from tests.parallel.layout_program import Rank, exporter_of, received, run_each
from tests.train_batches import groups_of

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {
        "objective": ObjectiveConfig(
            proximal="snapshot", snapshots=2, kl=KlConfig(coef=0.1), reference=ReferenceConfig()
        )
    },
    "adapters": {
        "lora": LoraConfig(rank=2),
        "objective": ObjectiveConfig(
            advantage="gae",
            value=ValueConfig(),
            kl=KlConfig(coef=0.1),
            reference=ReferenceConfig(ema=0.5),
        ),
    },
}
"""Policies with GAC's past gradient, past versions and a fixed reference; and with adapters, a
value head and a moving reference."""
FLIPS = 12


def trained(rank: Rank, settings: dict[str, Any]) -> Policy:
    policy = rank.policy("untied", dtype="bfloat16", **settings)
    groups = [
        [dataclasses.replace(one, versions=np.zeros_like(one.versions)) for one in group]
        for group in groups_of(rank.batches["a"])
    ]
    for version in range(2):
        policy.train_step(received(policy, TrainBatch.of(version, groups)))
    return policy


def damages(file: Path, chance: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """A name, and what damages the file."""
    content = file.read_bytes()

    def flipped(bit: int) -> Callable[[], None]:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        return lambda: file.write_bytes(changed)

    for _ in range(FLIPS):
        bit = chance.randrange(8 * len(content))
        yield f"bit {bit} flipped", flipped(bit)
    for size in (0, len(content) // 2, len(content) - 1):
        yield f"cut to {size} bytes", lambda size=size: file.write_bytes(content[:size])
    yield "deleted", file.unlink


def unnoticed(path: Path, use: Callable[[], object]) -> list[str]:
    """Damages to files of the folder that `use` does not report as such, by the file's name."""
    missed = []
    chance = random.Random(0)
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        content = file.read_bytes()
        name = str(file.relative_to(path))
        for what, damage in damages(file, chance) if content else ():
            if (name, what) == (DIGESTS, "deleted"):
                continue  # a model from elsewhere has none
            damage()
            try:
                use()
                missed.append(f"{name}, {what}: no error")
            except UserError as error:
                if "damaged" not in str(error) or name not in str(error):
                    missed.append(f"{name}, {what}: {error}")
            file.write_bytes(content)
    return missed


def kinds(path: Path) -> list[str]:
    """Kinds of blocks in a checkpoint: names of parameter state, and `model`."""
    files = files_of(about(path)) or {}
    keys = {block.key for file in files.values() for block in file.blocks}
    return sorted(
        {".".join(key.split(".")[1:3]) if key.startswith(blocks.STATE) else "model" for key in keys}
    )


def refusal(use: Callable[[], object]) -> str:
    try:
        use()
    except UserError as error:
        return str(error)
    return ""


def flip_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def alone(rank: Rank) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        policy = trained(rank, settings)
        folder = rank.scratch / name
        policy.save(folder, 2, {"version": 2}, keep=1, files={"position.bin": b"a" * 100})
        path = newest(folder)
        again = partial(rank.policy("untied", dtype="bfloat16", **settings).load, folder)
        found[name] = {
            "kinds": kinds(path),
            "load": unnoticed(path, again),
            "all": unnoticed(path, partial(require_whole, path, blocks=True)),
            "whole": refusal(again),
        }
    found["rotation"] = rotation(rank, policy)
    found["reference"] = other_reference(rank)
    found["write"] = spoiled_write(rank, policy)
    found["export"] = exports(rank, policy)
    return found


def rotation(rank: Rank, policy: Policy) -> dict[str, Any]:
    """Steps that stay when the newest one is damaged, left aside, and passed again."""
    folder = rank.scratch / "rotated"

    def save(step: int) -> list[str]:
        policy.save(folder, step, {"version": step}, keep=2)
        return sorted(path.name for path in folder.iterdir())

    for step in (2, 4, 6):
        save(step)
    flip_middle(folder / "step_00000006" / "sharded" / "__0_0.distcp")
    found: dict[str, Any] = {"refused": refusal(lambda: policy.load(folder))}
    # As a new process, which has not seen any step.
    checkpoint._checked.clear()
    (folder / "latest").write_text("step_00000004")
    policy.load(folder)
    found["left behind"] = save(5)
    found["passed"] = save(7)
    (folder / "step_00000007" / "state.pt").unlink()
    found["incomplete"] = save(8)
    found["whole"] = save(9)
    policy.load(folder)
    (folder / "latest").unlink()
    policy.load(folder)
    (folder / "latest").write_bytes(b"step_0000000\xff")
    found["pointer"] = refusal(lambda: policy.load(folder))
    return found


def other_reference(rank: Rank) -> str:
    """The refusal to continue with a fixed reference whose weights have changed."""
    model = rank.scratch / "reference_model"
    shutil.copytree(rank.material / "untied", model)
    settings = SETTINGS["whole"]["objective"].model_copy(
        update={"reference": ReferenceConfig(path=model)}
    )
    policy = rank.policy("untied", objective=settings)
    folder = rank.scratch / "with_reference"
    policy.save(folder, 1, {"version": 1}, keep=1)
    rank.policy("untied", objective=settings).load(folder)
    # A weight's last mantissa bit.
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)
    return refusal(lambda: rank.policy("untied", objective=settings).load(folder))


def spoiled_write(rank: Rank, policy: Policy) -> dict[str, Any]:
    """A disk that keeps other bytes than it was given."""
    folder = rank.scratch / "spoiled"
    policy.save(folder, 1, {"version": 1}, keep=1)
    write = block_files._BlockStream.write

    def spoiling(stream: Any, content: Any) -> int:
        changed = bytearray(content)
        written = write(stream, content)
        if len(changed) > 100:
            changed[50] ^= 1
            stream._file.seek(-len(changed), 1)
            stream._file.write(changed)
        return written

    with mock.patch.object(block_files._BlockStream, "write", spoiling):
        try:
            policy.save(folder, 2, {"version": 2}, keep=1)
            raised = ""
        except block_files.BlocksUnwritten as error:
            raised = str(error)
    return {"raised": raised, "left": sorted(path.name for path in folder.iterdir())}


def exports(rank: Rank, policy: Policy) -> dict[str, Any]:
    """Damages to an exported model that are not noticed, and a checkpoint with a damaged moment."""
    hf, folder = rank.scratch / "hf", rank.scratch / "to_convert"
    export_hf(exporter_of(policy), rank.material / "untied", hf)
    policy.save(folder, 1, {"version": 1}, keep=1)
    file = folder / "step_00000001" / "sharded" / "__0_0.distcp"
    moment = next(
        block
        for block in files_of(about(file.parents[1]))["sharded/__0_0.distcp"].blocks
        if block.key.startswith("parameter_state.adam.exp_avg.")
    )
    content = bytearray(file.read_bytes())
    content[moment.offset + moment.length // 2] ^= 1
    file.write_bytes(content)
    return {"unnoticed": unnoticed(hf, lambda: require_export(hf, "MODEL")), "damaged": folder}


def run(material: Path, parallel: ParallelConfig, file: Path) -> None:
    rank = Rank(material, parallel, file.with_suffix(".scratch"))
    torch.save(alone(rank), file)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run)
