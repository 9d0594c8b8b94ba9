"""One rank of the model tests: log-probs, export and checkpoints of tiny models on one parallel
layout.

Arguments: directory of the material (models, sequences), a JSON of ParallelConfig, the output
directory, a directory of checkpoints to load after this layout has saved its own, and the names of
the models.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_async_rl.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import block_files, blocks, checkpoint, device, past_weights
from megatron_async_rl.policy.adam_view import (
    adam_names,
    adam_shards,
    adam_steps,
    optimizer_slices,
)
from megatron_async_rl.policy.attention import ContextParallelSlice
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.batching import build_micro_batch, plan_micro_batches
from megatron_async_rl.policy.checkpoint_folder import read_file
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.model import PolicyModel, build_model
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from megatron_async_rl.policy.packing import sequence_layout
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.past_weights import WeightSnapshot
from megatron_async_rl.weights.convert import export_hf
from megatron_async_rl.weights.export import WeightExporter
from tests.parallel.allocations import Allocations
from tests.parallel.models import CHECKPOINTED, FAULTY, TEMPERATURE
from tests.parallel.staged_weights import faults, staging_of
from tests.parallel.whole_tensors import assembled
from tests.train_batches import columns_of

ROOT = Path(__file__).parents[2]


def load_model(path: Path, parallel: ParallelConfig, layout: Layout, dtype: str) -> PolicyModel:
    return build_model(ModelConfig(path=path, dtype=dtype), PolicyConfig(parallel=parallel), layout)


def logprobs(
    model: PolicyModel,
    samples,
    layout: Layout,
    parallel: ParallelConfig,
    sequence: str = "padded",
) -> list[torch.Tensor] | None:
    """Per sample the log-probs of its response, on the last stage."""
    schedule = Schedule(
        model.chunks, model, layout, temperature=TEMPERATURE, logprob_chunk_tokens=7
    )
    samples = columns_of(samples)
    sequences = sequence_layout(
        sequence,
        PolicyConfig(parallel=parallel).row_multiple,
        ContextParallelSlice(layout.cp_rank, layout.cp_size),
    )
    rounds = layout.pp_size if layout.virtual_stages > 1 else 1
    cuts, *_ = plan_micro_batches(
        samples, data_parallel=1, budget=100, sequences=sequences, in_groups_of=rounds
    )
    found = {}
    for micro_batch, outputs in schedule.forward(
        [build_micro_batch(samples, rows, layout.device, sequences) for rows in cuts[0]]
    ):
        for row, index in enumerate(micro_batch.samples):
            found[index] = outputs.logp[micro_batch.sequence == row]
    return [found[i] for i in range(len(samples))] if found else None


def exported(model: PolicyModel, max_bytes: int) -> dict[str, torch.Tensor] | None:
    """Copies of the tensors that rank 0 gets; None elsewhere."""
    found: dict[str, torch.Tensor] = {}
    for bucket in WeightExporter(model.bridge, model.chunks).buckets(max_bytes):
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
            assert (tensor is not None) == (model.bridge.layout.rank == 0)
            if tensor is not None:
                assert name not in found
                found[name] = tensor.clone()
    return found or None


def in_parameter_memory(model: PolicyModel) -> set[str] | None:
    """Names of the exported tensors that lie in a parameter's own memory; None where there are none
    to export."""
    memory = {
        parameter.untyped_storage().data_ptr()
        for chunk in model.chunks
        for parameter in chunk.parameters()
    }
    buckets = WeightExporter(model.bridge, model.chunks).buckets(1 << 30)
    named = [pair for bucket in buckets for pair in zip(bucket.names, bucket.tensors, strict=True)]
    if any(tensor is None for _, tensor in named):
        return None
    return {name for name, tensor in named if tensor.untyped_storage().data_ptr() in memory}


def collectives_of_one_export(model: PolicyModel, max_bytes: int) -> int:
    calls = 0
    originals = {
        name: getattr(dist, name)
        for name in ("gather", "send", "recv", "all_gather", "broadcast", "all_gather_object")
    }

    def counting(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        return call

    exporter = WeightExporter(model.bridge, model.chunks)
    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        for _ in exporter.buckets(max_bytes):
            pass
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return calls


class Trained:
    """A model with an optimizer that has taken steps on made-up gradients, equal on every
    layout."""

    def __init__(self, path: Path, parallel: ParallelConfig, layout: Layout) -> None:
        policy = PolicyConfig(parallel=parallel, optimizer=OptimizerConfig(lr=1e-2, clip_grad=None))
        self.layout = layout
        self.model = build_model(ModelConfig(path=path, dtype="float32"), policy, layout)
        self.wrapped = wrap_for_gradients(self.model.chunks, policy)
        self.optimizer = build_optimizer(self.wrapped, policy, torch.float32)

    def step(self) -> None:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                expert = not getattr(parameter, "allreduce", True)
                stage = self.layout.dp_size * self.layout.tp_size
                copies = stage // self.layout.ep_size if expert else self.layout.dp_size
                parameter.main_grad.copy_(torch.sin(100 * parameter.detach()) / copies)
            chunk.finish_grad_sync()
        self.optimizer.prepare_grads()
        self.optimizer.step_with_ready_grads()

    def save(
        self,
        directory: Path,
        step: int,
        keep: int = 2,
        mark: str = "",
        background: Background | None = None,
    ) -> None:
        checkpoint.save(
            directory,
            step,
            model=self.model,
            optimizer=self.optimizer,
            layout=self.layout,
            keep=keep,
            state={"version": step, "mark": mark, "nested": {"position": (3, 4)}},
            parameter_state={},
            files={"mark.bin": mark.encode()},
            background=background,
        )

    def load(self, directory: Path) -> checkpoint.Checkpoint | None:
        return checkpoint.load(
            directory, model=self.model, optimizer=self.optimizer, layout=self.layout
        )

    def weights(self) -> dict[str, torch.Tensor] | None:
        return exported(self.model, 1 << 30)

    def moments(self) -> list[torch.Tensor]:
        names = adam_names(self.model)
        return [shard for name in names for shard in adam_shards(self.optimizer, name)]


BLOCK = 4096
"""Bytes; more than a row of any model here, less than its matrices."""


def beside_a_step(trained: Trained, directory: Path) -> dict:
    """A save that is held up until the next step was taken, and then saves that fail."""
    background, released = Background("writing"), threading.Event()
    write = block_files.write

    def held_up(*arguments) -> dict:
        released.wait()
        return write(*arguments)

    def broken(*arguments) -> None:
        raise OSError("the disk is gone")

    at_save = trained.weights(), [moment.clone() for moment in trained.moments()]
    with mock.patch.object(block_files, "write", held_up):
        trained.save(directory, 2, mark="held up", background=background)
        trained.step()
        found = {"busy": background.busy, "early": (directory / "latest").exists()}
        released.set()
        background.finish()
    found["at_save"] = at_save
    with mock.patch.object(block_files, "write", broken):
        trained.save(directory, 3, mark="broken", background=background)
        raised = []
        for attempt in (background.finish, background.finish):
            try:
                attempt()
            except OSError as error:
                raised.append(str(error))
        trained.save(directory, 4, mark="broken", background=background)
        try:
            trained.save(directory, 5, mark="never begun", background=background)
        except OSError as error:
            raised.append(str(error))
    trained.layout.barrier()
    found |= {"raised": raised, "left": sorted(path.name for path in directory.iterdir())}
    return found


def memory(
    trained: Trained, resumed: Trained, directory: Path, samples, parallel: ParallelConfig
) -> dict:
    """Bytes that a rank allocates to save and to load, and what touches Adam's moments when weights
    are exported and samples scored. read: suffixes of the files that a save reads whole."""
    model, layout = trained.model, trained.layout
    with mock.patch.object(blocks, "BLOCK_BYTES", BLOCK):
        read, read_bytes = [], Path.read_bytes

        def recorded(path: Path) -> bytes:
            read.append(path.suffix)
            return read_bytes(path)

        with Allocations() as saving, mock.patch.object(Path, "read_bytes", recorded):
            trained.save(directory, 2)
        with Background("writing") as background, Allocations() as staging:
            trained.save(directory, 3, background=background)
        with Allocations() as loading:
            resumed.load(directory)
    with Allocations(trained.moments()) as using:
        trained.weights()
        logprobs(model, samples, layout, parallel)
    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    return {
        "saving": saving.sizes,
        "read": read,
        "staging": staging.sizes,
        "loading": loading.sizes,
        "touched": using.touched,
        "moments": 2
        * sum(place.end - place.start for place in optimizer_slices(trained.optimizer)),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "largest": max(parameter.nbytes for parameter in parameters),
    }


def divided_copies(model: PolicyModel, layout: Layout) -> dict:
    """same: copies that are divided over replicas hold and restore the same bits as whole ones.
    share: of the elements, on this rank. gathered: bytes of the largest gather, where parameters
    are larger than what is gathered at a time."""
    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    kept = [
        (WeightSnapshot(model.chunks, dtype), WeightSnapshot(model.chunks, dtype, layout))
        for dtype in (None, torch.float32, torch.bfloat16)
    ]

    def placed(copy: WeightSnapshot) -> list[torch.Tensor]:
        for parameter in parameters:
            parameter.data.fill_(torch.nan)
        copy.place()
        return [p.detach().clone() for p in parameters]

    for parameter in parameters:
        parameter.data.mul_(1.5).sin_()
    for pair in kept[1:]:
        for copy in pair:
            copy.average(0.7)
    gathers: list[int] = []

    def gather(output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        gathers.append(output.nbytes)
        all_gather(output, *args, **kwargs)

    all_gather = dist.all_gather_into_tensor
    with kept[0][1].restored_after():
        same = all(
            torch.equal(one, other)
            for pair in kept[1:]
            for one, other in zip(*map(placed, pair), strict=True)
        )
        with (
            mock.patch.object(past_weights, "GATHERED", BLOCK),
            mock.patch.object(dist, "all_gather_into_tensor", gather),
        ):
            same = same and all(map(torch.equal, *map(placed, kept[1])))
    moved = [value.mul(1.5).sin() for value in before]
    same = same and all(map(torch.equal, (p.detach() for p in parameters), moved))
    whole, part = (
        sum(tensor.numel() for chunk in copy.tensors for tensor in chunk.values())
        for copy in kept[1]
    )
    for parameter, value in zip(parameters, before, strict=True):
        parameter.data.copy_(value)
    return {"same": same, "share": part / whole, "gathered": max(gathers, default=0)}


def earlier_checkpoint(parallel: ParallelConfig, layout: Layout, folder: Path) -> dict:
    """A checkpoint of 2 tensor-parallel ranks, as they were before each rank wrote its own slices,
    and its content for a bfloat16 model; read on this layout, which does not cut parameters."""
    if layout.rank == 0:
        with tarfile.open(ROOT / "tests" / "data" / "earlier_checkpoint.tar.xz") as file:
            file.extractall(folder, filter="data")
    layout.barrier()
    policy = PolicyConfig(parallel=parallel, optimizer=OptimizerConfig())
    model = build_model(ModelConfig(path=folder / "model", dtype="bfloat16"), policy, layout)
    wrapped = wrap_for_gradients(model.chunks, policy)
    optimizer = build_optimizer(wrapped, policy, torch.bfloat16)
    loaded = checkpoint.load(folder / "checkpoint", model=model, optimizer=optimizer, layout=layout)
    average = WeightSnapshot(model.chunks, torch.float32, layout)
    loaded.read({"average": average.slices()})
    average.place()
    found = {"average": _parameters(model)}
    for name in adam_names(model):
        found[name] = assembled(adam_shards(optimizer, name), model, optimizer)
    checkpoint.load_model(loaded.path, model, loaded.content)
    found["model"] = _parameters(model)
    expected = load_file(folder / "expected.safetensors")
    return {
        "same": {
            f"{kind}/{name}": torch.equal(tensor, expected[f"{kind}/{name}"].to(tensor.dtype))
            for kind, chunks in found.items()
            for name, tensor in chunks[0].items()
        },
        "held": sorted(expected),
        "steps": adam_steps(optimizer),
    }


def _parameters(model: PolicyModel) -> list[dict[str, torch.Tensor]]:
    return [
        {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        for chunk in model.chunks
    ]


FILES = [("checkpoint", "mark.bin"), ("checkpoint", "never_saved.bin"), ("nowhere", "mark.bin")]


def checkpoints(
    source: Path, parallel: ParallelConfig, layout: Layout, output: Path, other: str, samples
) -> dict:
    trained = Trained(source, parallel, layout)
    trained.step()
    trained.step()
    at_save = trained.weights()
    torch.manual_seed(17)
    trained.save(output / "checkpoint", 2, mark="own")
    random_after = torch.rand(4)
    beside = beside_a_step(trained, output / "background")
    after = trained.weights()

    resumed = Trained(source, parallel, layout)
    loaded = resumed.load(output / "checkpoint")
    result = {
        "at_save": at_save,
        "after": after,
        "resumed": resumed.weights(),
        "random_restored": bool(torch.equal(torch.rand(4), random_after)),
        "state": loaded.state,
        "step": loaded.step,
        "files": [read_file(output / folder, name) for folder, name in FILES],
    }
    result["copies"] = divided_copies(resumed.model, layout)
    resumed.step()
    result["resumed_after"] = resumed.weights()
    later = Trained(source, parallel, layout)
    later.load(output / "background")
    moments = all(map(torch.equal, later.moments(), beside["at_save"][1]))
    beside |= {"at_save": beside["at_save"][0], "loaded": later.weights(), "moments": moments}
    result["beside"] = beside
    if layout.world_size == 2 and layout.tp_size * layout.pp_size == 1:
        result["memory"] = memory(resumed, later, output / "watched", samples, parallel)
    if other:
        stranger = Trained(source, parallel, layout)
        stranger.load(Path(other))
        result["other"] = stranger.weights()
        stranger.step()
        result["other_after"] = stranger.weights()
    export_hf(WeightExporter(resumed.model.bridge, resumed.model.chunks), source, output / "hf")
    result["after_export"] = resumed.weights()
    return result


class Killed(Exception):
    pass


def interrupted_saves(
    source: Path, parallel: ParallelConfig, layout: Layout, output: Path
) -> list[dict]:
    """Saves step 1, then dies at each file-system operation of saving step 2 in turn; what a fresh
    process then finds."""
    trained, fresh = Trained(source, parallel, layout), Trained(source, parallel, layout)
    trained.step()
    pristine = output / "pristine"
    trained.save(pristine, 1, mark="first")
    first = trained.weights()
    trained.step()
    second = trained.weights()
    operations = [
        (os, "rename"),
        (os, "replace"),
        (os, "fsync"),
        (shutil, "rmtree"),
        (Path, "open"),
        (Path, "mkdir"),
    ]
    found, tried = [], set()
    for survives in range(400):
        directory = output / f"killed_{survives}"
        shutil.copytree(pristine, directory)
        done = 0
        originals = [(owner, name, getattr(owner, name)) for owner, name in operations]

        def dying(original):
            def call(*args, **kwargs):
                nonlocal done
                if done == survives:  # noqa: B023 - used within this turn of the loop
                    raise Killed
                done += 1
                return original(*args, **kwargs)

            return call

        finished = False
        for owner, name, original in originals:
            setattr(owner, name, dying(original))
        try:
            trained.save(directory, 2, keep=1, mark="second")
            finished = True
        except BaseException:
            # torch's checkpoint writer wraps what it meets, Killed included.
            if done != survives:
                raise
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)
        loaded = fresh.load(directory)
        weights = fresh.weights()
        whole = {"first": first, "second": second}[loaded.state["mark"]]
        entry = {
            "mark": loaded.state["mark"],
            "step": loaded.step,
            "whole": all(torch.equal(weights[name], whole[name]) for name in whole),
            "file": read_file(directory, "mark.bin").decode(),
        }
        # What the next save finds differs by the files that are there.
        there = frozenset(path.relative_to(directory) for path in directory.rglob("*"))
        if there not in tried:
            tried.add(there)
            fresh.save(directory, 3, keep=1, mark="third")
            entry["saves_again"] = fresh.load(directory).state["mark"] == "third"
            entry["left"] = sorted(path.name for path in directory.iterdir())
        found.append(entry)
        shutil.rmtree(directory)
        if finished:
            return found
    raise AssertionError("saving never finished")


def refusals(source: Path, layout: Layout, output: Path) -> dict[str, str]:
    """Errors of building from directories that are broken in one way each."""

    def config(**changes):
        def change(directory: Path) -> None:
            content = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps(content | changes))

        return change

    def weights(edit):
        def change(directory: Path) -> None:
            tensors = load_file(directory / "model.safetensors")
            edit(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

        return change

    name = "model.layers.1.mlp.down_proj.weight"
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    breakages = {
        "missing tensor": weights(lambda tensors: tensors.pop(name)),
        "foreign tensor": weights(
            lambda tensors: tensors.update({"model.layers.1.mlp.extra.weight": torch.ones(2)})
        ),
        "wrong shape": weights(lambda tensors: tensors.update({name: torch.ones(3, 3)})),
        "derived tensor": weights(
            lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(2)})
        ),
        "tied copy": weights(
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
            )
        ),
        "truncated file": (
            lambda d: (d / "model.safetensors").write_bytes(
                (d / "model.safetensors").read_bytes()[:-100]
            )
        ),
        "no weights": lambda directory: (directory / "model.safetensors").unlink(),
        "model type": config(model_type="gpt2"),
        "rope": config(rope_parameters=rope),
        "sliding window": config(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    }
    found = {}
    for what, breakage in breakages.items():
        directory = output / what.replace(" ", "_")
        shutil.copytree(source, directory)
        breakage(directory)
        try:
            load_model(directory, ParallelConfig(), layout, "float32")
            found[what] = "built"
        except (ValueError, FileNotFoundError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    material, settings, output, other, chosen = (
        Path(sys.argv[1]),
        json.loads(sys.argv[2]),
        Path(sys.argv[3]),
        sys.argv[4],
        sys.argv[5:],
    )
    device.install("cpu")
    parallel = ParallelConfig(**settings)
    layout = initialise(parallel, "cpu", timeout_s=600)
    samples = torch.load(material / "samples.pt", weights_only=False)
    results: dict = {"models": {}}
    for path in (material / name for name in chosen):
        model = load_model(
            path, parallel, layout, "bfloat16" if path.name.endswith("bfloat16") else "float32"
        )
        started = time.perf_counter()
        whole = exported(model, 1 << 30)
        results["models"][path.name] = {
            "logprobs": logprobs(model, samples, layout, parallel),
            "logprobs_packed": logprobs(model, samples, layout, parallel, "packed"),
            "exported": whole,
            "exported_seconds": time.perf_counter() - started,
            "exported_in_small_buckets": exported(model, 5000),
            "staging": staging_of(WeightExporter(model.bridge, model.chunks), layout),
            "in_parameter_memory": in_parameter_memory(model),
            "collectives": collectives_of_one_export(model, 1 << 30),
        }
        if path.name in FAULTY:
            parameters = [p for chunk in model.chunks for p in chunk.parameters()]
            exporter = WeightExporter(model.bridge, model.chunks)
            results["models"][path.name]["faults"] = faults(exporter, layout, parameters)
    kind = "mixture" if (material / CHECKPOINTED["mixture"]).exists() else "dense"
    results["checkpoint"] = checkpoints(
        material / CHECKPOINTED[kind], parallel, layout, output, other, samples
    )
    if kind == "dense" and layout.tp_size * layout.pp_size == 1:
        results["earlier"] = earlier_checkpoint(parallel, layout, output / "earlier")
    if layout.world_size == 1 and kind == "dense":
        results["refusals"] = refusals(material / "qwen3-tied", layout, output)
        results["interrupted"] = interrupted_saves(material / "one-layer", parallel, layout, output)
    torch.save(results, output / f"results_{layout.rank}.pt")
    dist.barrier()
    layout.shutdown()


if __name__ == "__main__":
    main()
