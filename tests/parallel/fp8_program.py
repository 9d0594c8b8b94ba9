"""One rank of the tests of 8-bit products; arguments as those of layout_program.

Without Transformer Engine Megatron leaves its recipe out, and everything else is as with it: its
settings, rows of the recipe's multiple, float32 weights that stand in for the model's in copies and
checkpoints. So a policy with `fp8` on local layers takes the steps of a plain one on the same rows,
bit for bit.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer import transformer_config

from megatron_async_rl.config.controls import DisplacementControl, GacControl
from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import Fp8Config, ParallelConfig, PolicyConfig
from megatron_async_rl.policy import checkpoint, families, model
from megatron_async_rl.policy import parameters as files
from megatron_async_rl.policy.adam_view import MASTER, adam_shards, masters_of, optimizer_state
from megatron_async_rl.policy.megatron_private import optimizer_parts
from megatron_async_rl.policy.optimizer import load_masters
from megatron_async_rl.policy.parameters import load_hf
from megatron_async_rl.policy.past_weights import MasterSnapshot
from tests.gpu.fp8_emulation import in_8_bits
from tests.parallel.allocations import Allocations
from tests.parallel.layout_program import (
    Rank,
    exporter_of,
    received,
    run_each,
    save,
    scorable,
)
from tests.parallel.layouts import OFFERED
from tests.parallel.objective_program import ReducedGradient
from tests.parallel.parameter_state_program import LEAN
from tests.parallel.reference_program import at_version
from tests.parallel.staged_weights import staged_as_exported
from tests.parallel.whole_tensors import assembled
from tests.thorough import THOROUGH

PARTS = {
    "rows": ("single", "sequence", "context"),
    "averaged": ("data_distributed_optimizer", "expert"),
    "kept": (
        "data_distributed_optimizer",
        *(["sequence", "virtual_pipeline", "expert"] if THOROUGH else []),
    ),
    "reference": ("data_distributed_optimizer",),
    "rounded": ("single", "sequence", "context", "data_distributed_optimizer"),
}
"""Checks besides loading, by layout: one layout for each way that a check may fail. The gate keeps
FP8 weights where the optimizer cuts parameters."""


def layouts_of(part: str) -> list[str]:
    """Return the layouts of a check that run."""
    return [name for name in PARTS[part] if name in OFFERED["fp8_program"]]


BUDGET = 4096
"""A sample takes up to 256 tokens on the rows of `blockwise`."""
COPIES = ObjectiveConfig(
    kl=KlConfig(coef=0.1),
    reference=ReferenceConfig(refresh_every=2),
    proximal="snapshot",
    snapshots=5,
)
KEPT = Fp8Config(recipe="blockwise", primary_weights=True)
DECAY = 0.6


@contextmanager
def on_local_layers() -> Iterator[None]:
    """Policies with `fp8` are built of local layers, on any device."""
    choose = families.choose_layers

    def local(asked: str, *, fp8: bool, **facts: object) -> families.ChosenLayers:
        return choose("local", **facts)

    with (
        mock.patch.object(model, "choose_layers", local),
        mock.patch.object(model, "refuse_device"),
        # Megatron requires it where a mixture of experts is to multiply in 8 bits.
        mock.patch.object(transformer_config, "is_te_min_version", return_value=True),
    ):
        yield


def on_rows_of(policy, other):
    """The policy on rows of the other's lengths."""
    policy.batcher = replace(policy.batcher, sequences=other.batcher.sequences)
    return policy


def everywhere(mine: object) -> list:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def masters(policy) -> list[dict[str, torch.Tensor]]:
    return assembled(adam_shards(policy.optimizer, MASTER), policy.model, policy.optimizer)


def parameters(policy) -> list[dict[str, torch.Tensor]]:
    return [
        {name: p.detach().clone() for name, p in chunk.named_parameters()}
        for chunk in policy.model.chunks
    ]


def alike(one, other) -> bool:
    """Bit for bit, on every rank."""
    mine = all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )
    return all(everywhere(mine))


def rounded(tensors) -> list[dict[str, torch.Tensor]]:
    return [{name: each.bfloat16() for name, each in own.items()} for own in tensors]


def loaded(rank: Rank, model: str, a: str) -> dict[str, bool]:
    """Comparison after loading a float32 file, and a float32 run's checkpoint, into a bfloat16
    policy."""
    exact = rank.policy(model, dtype="float32", budget=BUDGET)
    policy = rank.policy(model, dtype="bfloat16", budget=BUDGET)
    kept = masters(policy)
    found = {
        "masters are the file's": alike(kept, parameters(exact)),
        "weights are their rounding": alike(rounded(kept), parameters(policy)),
        "rounding loses something": not alike(kept, [_float(own) for own in rounded(kept)]),
    }
    found["files are read in blocks"] = all(everywhere(in_blocks(policy, rank.material / model)))
    found["and again the same"] = alike(masters(policy), kept)
    rank.train(exact, [a])
    exact.save(rank.scratch / "float32", 1, {}, keep=1)
    policy.load(rank.scratch / "float32")
    kept = masters(policy)
    return found | {
        "masters are the checkpoint's": alike(kept, parameters(exact)),
        "so are the weights": alike(rounded(kept), parameters(policy)),
    }


def in_blocks(policy, path: Path) -> bool:
    """Loads model and masters again; true where no tensor that is made for it has more elements
    than a block."""
    most = 512
    with mock.patch.object(files, "BLOCK_ELEMENTS", most), Allocations(meta=False) as made:
        load_hf(policy.model.bridge, policy.model.chunks, path)
        load_masters(policy.optimizer, policy.model, path)
    largest = max(p.numel() for chunk in policy.model.chunks for p in chunk.parameters())
    return max(made.sizes, default=0) <= 4 * most < 4 * largest


def _float(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.float() for name, each in own.items()}


def trained(rank: Rank, policy, names: list[str], version: int = 0) -> dict:
    """Steps of these versions, on samples that began under any version so far."""
    steps = []
    for later, name in enumerate(names):
        batch = at_version(rank.batches[name], version + later)
        found = policy.train_step(received(policy, batch))
        steps.append({k: v for k, v in found.items() if not k.startswith("time/")})
    return {"steps": steps, "weights": rank.weights(policy)}


def kept_in_8_bits(rank: Rank, model: str, a: str, b: str) -> dict:
    """Next to a plain policy, and resumed: with a reference that is refreshed, versions of two
    batches, and a control that looks at past weights."""
    settings = {
        "dtype": "bfloat16",
        "budget": BUDGET,
        "objective": COPIES,
        "controls": (GacControl(c_low=0.15), DisplacementControl()),
        "lr": 1e-2,
    }

    def policy(**more: object):
        with on_local_layers():
            return rank.policy(model, **settings, **more)

    kept = policy(fp8=KEPT)
    plain = on_rows_of(policy(), kept)
    copies = {type(one.references.reference).__name__ for one in (kept, plain)}
    runs = {
        "plain": trained(rank, plain, [a, a, b]),
        "kept": trained(rank, kept, [a, a, b]),
    }
    folder = rank.scratch / "kept"
    scales = {"0.scale": torch.full((2,), float(rank.layout.rank))}
    with mock.patch.object(checkpoint, "delayed_state", return_value=scales):
        kept.save(folder, 3, {"version": 3}, keep=1)
    own, again, foreign = rank.weights(kept), policy(fp8=KEPT), policy()
    staged_as_exported(exporter_of(kept), rank.layout, own)
    with mock.patch.object(checkpoint, "restore_delayed_state") as restored:
        again.load(folder)
        foreign.load(folder)
    found = {
        "settings": {name: settings_of(one) for name, one in (("kept", kept), ("plain", plain))},
        "copies": copies,
        "held": {name: held(one) for name, one in (("kept", kept), ("plain", plain))},
        "parameters": sum(p.numel() for each in parameters(plain) for p in each.values()),
        "runs": runs,
        "saved": own,
        "loaded": {"again": rank.weights(again), "plain": rank.weights(foreign)},
        "same masters": alike(masters(again), masters(kept)),
        "same scales": alike([call.args[1] for call in restored.call_args_list], [scales] * 2),
        "models in the checkpoint": sum(
            not key.startswith("parameter_state.") for key in keys(folder)
        ),
    }
    # The plain policy's own run, saved with its weights, is resumed by a policy with FP8 weights.
    plain.save(rank.scratch / "plain", 3, {}, keep=1)
    other = policy(fp8=KEPT)
    other.load(rank.scratch / "plain")
    found["from a plain one"] = alike(parameters(other), parameters(plain))
    found["after"] = {
        name: trained(rank, each, [b], 3) for name, each in (("kept", kept), ("again", again))
    }
    return found


def settings_of(policy) -> dict[str, set]:
    """Settings of Megatron's optimizer and gradient buffers about FP8 GEMMs and weights."""
    return {
        "recipe of the optimizer": {
            part.config.fp8_recipe for part in optimizer_parts(policy.optimizer)
        },
        "weights gathered in 8 bits": {
            chunk.ddp_config.fp8_param_gather for chunk in policy.schedule.chunks
        },
    }


def held(policy) -> dict[str, list[int]]:
    """Elements of each copy of the weights, and of each control's tensors, on every rank."""
    named = policy.references.parameter_state() | {
        f"{name}_{kind}": optimizer_state(policy.optimizer, shards)
        for name, control in policy.controls.items()
        for kind, shards in control.shard_state().items()
    }
    return {
        name: everywhere(sum(tensor.numel() for _, tensor in sliced))
        for name, sliced in named.items()
    }


def with_reference(rank: Rank, model: str, a: str) -> dict[str, dict]:
    """A step whose reference is another directory's model, which a plain policy puts in place as
    bfloat16 weights, and a policy with FP8 weights as float32 ones; both with gradients and moments
    in bfloat16."""
    path = rank.material / f"{model}_blank"
    objective = ObjectiveConfig(kl=KlConfig(coef=0.1), reference=ReferenceConfig(path=path))
    settings = {"budget": BUDGET, "objective": objective, "controls": (), **LEAN}
    with on_local_layers():
        kept = rank.policy(model, **settings, fp8=KEPT)
        plain = on_rows_of(rank.policy(model, **settings), kept)
    before = masters(kept)
    found = {"plain": trained(rank, plain, [a]), "kept": trained(rank, kept, [a])}
    moved = not alike(masters(kept), before)
    return found | {"moved": moved, "same masters": alike(masters(kept), masters(plain))}


def keys(folder: Path) -> set[str]:
    import torch.distributed.checkpoint as dcp

    (step,) = folder.glob("step_*")
    return set(dcp.FileSystemReader(step / "sharded").read_metadata().state_dict_metadata)


def averaged(rank: Rank, model: str, a: str) -> dict[str, bool]:
    """A copy of the optimizer's weights that is averaged, put in place, and taken away."""
    policy = rank.policy(model, dtype="bfloat16", budget=BUDGET, lr=1e-2)
    copy, then = MasterSnapshot(policy.optimizer), masters(policy)
    rank.train(policy, [a])
    now, weights = masters(policy), parameters(policy)
    copy.average(DECAY)
    expected = [
        {name: DECAY * old[name] + (1.0 - DECAY) * new[name] for name in old}
        for old, new in zip(then, now, strict=True)
    ]
    with MasterSnapshot(policy.optimizer).restored_after():
        copy.place()
        placed = masters(policy)
        close = all(
            torch.allclose(placed[i][name], each, rtol=1e-6, atol=1e-7)
            for i, own in enumerate(expected)
            for name, each in own.items()
        )
        follows = alike(rounded(placed), parameters(policy))
        moved = not alike(parameters(policy), weights)
    return {
        "the average is one": all(everywhere(close)),
        "the weights follow": follows,
        "and were others": moved,
        "they are back": alike(parameters(policy), weights) and alike(masters(policy), now),
        "all are float32": {p.dtype for p in masters_of(policy.optimizer)} == {torch.float32},
    }


def on_longer_rows(rank: Rank, model: str, a: str, b: str) -> dict[str, dict]:
    """The same float32 steps on plain rows, and on those of each recipe, padded and packed."""
    found = {}
    for sequence in ("padded", "packed"):
        policy = rank.policy(model, budget=BUDGET, sequence=sequence)
        found[sequence, "plain"] = rank.train(policy, [a, b])
        for recipe in ("tensorwise", "blockwise"):
            longer = PolicyConfig(parallel=rank.parallel, fp8=Fp8Config(recipe=recipe))
            policy = rank.policy(model, budget=BUDGET, sequence=sequence)
            policy.batcher = replace(
                policy.batcher,
                sequences=replace(policy.batcher.sequences, multiple=longer.row_multiple),
            )
            found[sequence, recipe] = rank.train(policy, [a, b])
    return found


def rounded_products(rank: Rank, model: str, a: str) -> dict:
    """Log-probs and gradient with products rounded as a recipe does, and in bfloat16 on the same
    rows."""
    found = {}
    for recipe in ("tensorwise", "blockwise"):
        with on_local_layers():
            policy = rank.policy(
                model, dtype="bfloat16", budget=BUDGET, fp8=Fp8Config(recipe=recipe)
            )
        for name, products in ((recipe, in_8_bits(recipe)), ("bfloat16", nullcontext())):
            with products:
                found[name] = {
                    "scores": policy.score(received(policy, scorable(rank.batches[a]))),
                    "gradient": ReducedGradient(rank, policy, a).whole(),
                }
    return found


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, a, b = ("mixture", "mixture_a", "mixture_b") if mixture else ("tied", "a", "b")
    results: dict = {"loaded": loaded(rank, model, a)}
    for part, run in (
        ("rows", lambda: on_longer_rows(rank, model, a, b)),
        ("averaged", lambda: averaged(rank, model, a)),
        ("kept", lambda: kept_in_8_bits(rank, model, a, b)),
        ("reference", lambda: with_reference(rank, model, a)),
        ("rounded", lambda: rounded_products(rank, model, a)),
    ):
        if output.stem in PARTS[part]:
            results[part] = run()
    runs = [run["steps"] for run in results.get("rows", {}).values()]
    save(rank, results, runs, output)


if __name__ == "__main__":
    run_each(run_layout)
