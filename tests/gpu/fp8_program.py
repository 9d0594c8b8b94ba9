"""Training steps of a tiny policy with FP8 GEMMs, compared with bfloat16 on the same rows: scores,
gradients, steps under each control, resumed runs, and FP8 weights.

Arguments: cpu or cuda, the recipe, the directory of the test data (test_fp8.py), and the file to
write. On a CPU tests/gpu/fp8_emulation.py rounds in Megatron's own layers.
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import Fp8Config, ParallelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.fp8 import is_quantised, plain
from megatron_async_rl.policy.parameters import whole_model_names
from tests.float8 import blockwise, restored, tensorwise
from tests.gpu.fp8_emulation import in_8_bits
from tests.gpu.layers_program import state_of
from tests.gpu.train_program import CONTROLS, controlled, cosines, cpu
from tests.parallel import objective_program
from tests.parallel.fp8_program import on_local_layers, on_rows_of
from tests.parallel.layout_program import Rank, received, scorable
from tests.parallel.objective_program import ReducedGradient

CASES = {
    "tied": ("tied", "padded", "a"),
    "packed": ("tied", "packed", "a"),
    "mixture": ("mixture", "padded", "mixture_a"),
}
"""Name -> model, sequence layout, batch."""
BUDGET = 2048
COPIES = ObjectiveConfig(kl=KlConfig(coef=0.1), reference=ReferenceConfig(refresh_every=1))
REFERENCES = {
    "tensorwise": [functools.partial(tensorwise, ulps=ulps) for ulps in (0, -1, 1)],
    "blockwise": [functools.partial(blockwise, block=(128, 128))],
}


class Fp8Rank(Rank):
    """Rank whose policies are bfloat16, on Transformer Engine's layers if they are available; with
    `fp8` by default."""

    fp8: Fp8Config | None = None

    def policy(self, model="tied", **settings):
        given = {"dtype": "bfloat16", "layers": "auto", "budget": BUDGET, "fp8": self.fp8}
        return super().policy(model, **given | settings)


def measured(rank: Fp8Rank, policy, batch: str) -> dict:
    """Return measurements after a pass that changes no weight, because delayed scaling begins
    at 1."""
    ReducedGradient(rank, policy, batch)
    gradient = cpu(ReducedGradient(rank, policy, batch).whole())
    scores = policy.score(received(policy, scorable(rank.batches[batch])))
    (step,) = rank.train(policy, [batch])["steps"]
    return {"gradient": gradient, "scores": scores, "step": step}


def compared(rank: Fp8Rank, recipe: str, kind: str) -> dict:
    """Return each case in FP8, and in bfloat16 on the same rows."""
    found = {}
    for name, (model, sequence, batch) in CASES.items():
        rounded = rank.policy(model, sequence=sequence, lr=1e-3)
        usual = on_rows_of(rank.policy(model, sequence=sequence, lr=1e-3, fp8=None), rounded)
        with emulated(kind, recipe):
            found[name] = {"fp8": measured(rank, rounded, batch)}
        found[name]["bfloat16"] = measured(rank, usual, batch)
        found[name]["layers"] = rounded.model.bridge.layers.name
    return found


def kept(rank: Fp8Rank, recipe: str, kind: str) -> dict:
    """Return FP8 weights as they were loaded, after a step, in a run with a reference, and
    resumed."""
    rank.fp8, rank.scratch = Fp8Config(recipe=recipe, primary_weights=True), rank.scratch / "kept"
    exact = rank.policy(dtype="float32", layers="local", fp8=None, budget=BUDGET)
    policy = rank.policy(objective=COPIES, lr=1e-2)
    found = {
        "file": canonical(exact, lambda parameter: parameter.detach()),
        "loaded": held(policy, recipe),
        "names": [
            name
            for parameter, name in whole_model_names(policy.model.bridge, policy.model.chunks[0])
            if is_quantised(parameter)
        ],
    }
    with emulated(kind, recipe):
        found["steps"] = rank.train(policy, ["a", "a", "b"])["steps"]
        found["stepped"] = held(policy, recipe)
        found["exported"] = cpu(rank.weights(policy))
        found["resumed"] = objective_program.resumed(rank, "tied", "a", "b")
    rank.fp8 = Fp8Config(recipe=recipe)
    return found


def held(policy, recipe: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return Adam's float32 weights, the model's, and the reference's rounding of the former, by
    canonical name. On a CPU, which has no FP8 weights, the model's are bfloat16."""
    state = {
        name.removeprefix("adam.master/"): tensor.cpu()
        for name, tensor in state_of(policy).items()
        if name.startswith("adam.master/")
    }
    quantised = canonical(policy, lambda parameter: torch.tensor(is_quantised(parameter)))
    weights = canonical(policy, plain)
    return {
        "masters": state,
        "weights": weights,
        "expected": {
            name: rounded(master, recipe, weights[name]) if quantised[name] else master.bfloat16()
            for name, master in state.items()
        },
    }


def rounded(master: torch.Tensor, recipe: str, found: torch.Tensor) -> torch.Tensor:
    """Return the reference of a weight, bfloat16, with the recipe's scale: of the permitted scales,
    the one with the result `found`, if there is one."""
    permitted = [
        restored(*reference(master.bfloat16())).bfloat16() for reference in REFERENCES[recipe]
    ]
    return next((each for each in permitted if torch.equal(each, found)), permitted[0])


def canonical(policy, read) -> dict[str, torch.Tensor]:
    model = policy.model
    named = whole_model_names(model.bridge, model.chunks[0])
    return {name: read(parameter).cpu().clone() for parameter, name in named}


def emulated(kind: str, recipe: str) -> ExitStack:
    stack = ExitStack()
    if kind == "cpu":
        stack.enter_context(in_8_bits(recipe))
    return stack


def main() -> None:
    kind, recipe, material, output = sys.argv[1:]
    rank = Fp8Rank(Path(material), ParallelConfig(), Path(output).with_suffix(".scratch"), kind)
    rank.fp8 = Fp8Config(recipe=recipe)
    with ExitStack() as stack:
        if kind == "cpu":
            stack.enter_context(on_local_layers())
        results = {"cases": compared(rank, recipe, kind)}
        with emulated(kind, recipe):
            results["controls"] = {
                each.name: controlled(rank, each, "bfloat16") for each in CONTROLS
            }
            results["cosines"] = cosines(rank, "bfloat16")
            results["resumed"] = objective_program.resumed(rank, "tied", "a", "b")
        if not rank.fp8.facts.primary:
            results["kept"] = kept(rank, recipe, kind)
    torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    device.install(sys.argv[1])
    main()
