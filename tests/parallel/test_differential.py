"""Random combinations of methods and layouts, compared with an independent trainer.

tests/reference_trainer.py knows the formulas of docs/objectives.md, float64 and one sample at a
time, and nothing else. Each case draws an objective, a control, minibatches, a way to lay out
sequences, a model and a parallel layout, and compares the whole gradient of every optimizer step
and the final weights, by name.

The advantages `otb`, `opob`, `gae` and `partial_return` and the loss `sft` are not drawn: they have
tests of their own.

MAR_DIFFERENTIAL_CASES=N draws N cases (`make test-all` takes 300, the gate those of `IN_GATE`), and
MAR_DIFFERENTIAL_FIRST=SEED the first one's seed: a failure names the seed of its case.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.objective import ObjectiveConfig
from tests.parallel.layouts import loaded, run_program, temporary, with_behavior
from tests.parallel.reference_program import at_version
from tests.reference_trainer import Adapted, Model, Response, Trainer
from tests.thorough import THOROUGH
from tests.tiny_models import save_tiny_model
from tests.train_batches import groups_of, ragged_batch

pytestmark = pytest.mark.parallel

CASES_PER_START = 40
IN_GATE = (0, 1, 4, 6, 7, 11, 19, 32, 55, 60, 140)
"""Seeds of cases that together have every proximal policy, control and kind of model, both ways to
lay out sequences, every dimension of a layout, and both optimizers. The last three are the gate's
control of displacements with experts, and a reference and adapters on virtual stages."""


def chosen_seeds() -> Sequence[int]:
    cases, first = (os.environ.get(f"MAR_DIFFERENTIAL_{name}") for name in ("CASES", "FIRST"))
    if cases is first is None and not THOROUGH:
        return IN_GATE
    start = int(first or 0)
    return range(start, start + int(cases or 300))


SEEDS = chosen_seeds()
TOLERANCE = 1e-5
"""Largest error of a tensor, relative to the norm of the whole gradient. The policy computes in
float32, whose rounding of logits (about 1e-7 of values near 8) reaches log-probs as 1e-6; sums over
a sequence, and their exponentials, have several times that."""
VOCABULARY = 97
LORA = {"rank": 3, "alpha": 4.5}
DENSE: list[dict[str, Any]] = [
    {"ranks": 1},
    {"ranks": 2, "tensor": 2},
    {"ranks": 2, "tensor": 2, "sequence": True},
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    {"ranks": 2, "context": 2},
    {"ranks": 2},
    {"ranks": 2, "distributed_optimizer": False},
    {"ranks": 4, "tensor": 2, "pipeline": 2},
    {"ranks": 4, "tensor": 2, "context": 2},
    {"ranks": 4, "pipeline": 2},
    {"ranks": 4, "tensor": 2, "sequence": True},
    {"ranks": 4},
]
MIXTURE: list[dict[str, Any]] = [
    {"ranks": 1},
    {"ranks": 2, "expert": 2},
    {"ranks": 2, "expert": 2, "distributed_optimizer": False},
    {"ranks": 2, "tensor": 2, "sequence": True},
    {"ranks": 4, "expert": 2, "tensor": 2, "sequence": True},
    {"ranks": 4, "expert": 2},
]
RATIO_LEVELS = ("token", "sequence_product", "sequence_geometric")
CORRECTIONS: list[dict[str, Any]] = [
    {"name": "tis"},
    {"name": "tis", "level": "sequence", "cap": 1.5},
    {"name": "tis", "normalize": True},
    {"name": "tis", "level": "sequence", "normalize": True},
    {"name": "icepop", "low": 0.8, "high": 1.3},
    {"name": "icepop", "level": "sequence", "low": 0.5, "high": 2.0},
    {"name": "reject", "statistic": "k3", "level": "sequence_mean", "high": 0.03},
    {"name": "reject", "statistic": "k2", "level": "token", "high": 0.03},
    {"name": "reject", "statistic": "k1", "level": "sequence_sum", "low": -0.5, "high": 0.5},
    {
        "name": "reject",
        "statistic": "ratio",
        "level": "sequence_geometric",
        "low": 0.9,
        "high": 1.1,
    },
    {"name": "reject", "statistic": "ratio", "level": "sequence_product", "low": 0.6, "high": 1.7},
    {"name": "reject", "statistic": "ratio", "level": "token", "low": 0.8, "high": 1.25},
    {"name": "token_veto", "threshold": 0.75},
    {"name": "opsm", "delta": 0.01},
]
LOSSES: list[dict[str, Any]] = [
    {"name": "reinforce"},
    {"name": "ppo_clip"},
    {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.2},
    {"name": "decoupled_ppo"},
    {"name": "cispo"},
    {"name": "gspo"},
    {"name": "gmpo", "clip_low": 0.1, "clip_high": 0.1},
    {"name": "sapo"},
    {"name": "dppo_tv", "threshold": 0.01},
    {"name": "dppo_kl", "threshold": 0.001},
    {"name": "topr"},
    {"name": "trajectory_balance", "beta": 0.5},
    {"name": "oapl", "beta_policy": 0.05},
    {"name": "kimi"},
    {"name": "vespo"},
    {"name": "gipo", "sigma": 0.3},
    {"name": "aspo"},
    {"name": "minirl"},
    {"name": "m2po", "second_moment": 0.01},
    {"name": "m2po", "candidates": "all", "second_moment": 0.01},
    {"name": "m2po", "mode": "cap", "second_moment": 0.01},
    {"name": "bapo", "target_share": 0.5, "low": [0.9, 0.99, 0.01], "high": [1.01, 1.2, 0.01]},
]
ADVANTAGES: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "grpo", "normalize_std": False},
    {"name": "rloo"},
    {"name": "opo"},
    {"name": "reinforce_pp"},
    {"name": "reinforce_pp_baseline"},
    {"name": "none"},
]
CONTROLS: list[list[dict[str, Any]]] = [
    [],
    [{"name": "gac", "c_low": 0.05}],
    [{"name": "gac", "c_low": 0.05, "target": "zero"}],
    [{"name": "ess_lr"}],
    [{"name": "ess_lr", "rule": "linear", "use_truncated": True, "cap": 1.2}],
    [{"name": "beta1", "beta1": 0.3}],
    [{"name": "momentum_by_alignment", "c_low": 0.0, "c_high": 0.5}],
    [{"name": "displacement"}],
    [{"name": "displacement", "target": "threshold", "c_low": 0.02}],
    [{"name": "gac", "c_low": 0.05}, {"name": "ess_lr"}],
]


def case_of(seed: int) -> dict[str, Any]:
    """The combination of this seed: the first one drawn that the configuration accepts."""
    draw = random.Random(seed)
    while True:
        case = _drawn(draw)
        try:
            accepted = ObjectiveConfig.model_validate(case["objective"])
        except ValidationError:
            continue
        case["objective"]["aggregation"] = accepted.aggregation_used
        case["objective"]["advantage"] = {
            "name": accepted.advantage.name,
            **case["objective"].get("advantage", {}),
        }
        return case


def _drawn(draw: random.Random) -> dict[str, Any]:
    mixture, lora = draw.random() < 0.25, draw.random() < 0.15
    parallel = draw.choice(MIXTURE if mixture else DENSE)
    loss = draw.choice(LOSSES)
    objective: dict[str, Any] = {
        "loss": loss,
        "proximal": draw.choice(["behavior", "recompute", "loglinear", "ewma", "snapshot"]),
        "corrections": draw.sample(CORRECTIONS, draw.choice([0, 0, 1, 1, 2])),
        "snapshots": 4,
    }
    if objective["proximal"] == "ewma":
        objective["ewma_decay"] = 0.6
    if draw.random() < 0.9:
        objective["advantage"] = draw.choice(ADVANTAGES)
    if draw.random() < 0.4:
        objective["aggregation"] = draw.choice(
            ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        )
        if objective["aggregation"] == "seq-mean-token-sum-norm":
            objective["norm_length"] = 16
    if draw.random() < 0.4:
        objective |= {"minibatches": 2, "epochs": draw.choice([1, 2])}
    if draw.random() < 0.3:
        objective["kl"] = {
            "coef": 0.1,
            "estimator": draw.choice(["k1", "k2", "k3"]),
            "where": draw.choice(["loss", "reward"]),
        }
        if objective["kl"]["where"] == "loss" and draw.random() < 0.5:
            objective["kl"] |= {"weight": "truncated", "cap": 1.1}
    if draw.random() < 0.2:
        objective["entropy_bonus"] = 0.05
    if "kl" in objective or loss["name"] == "trajectory_balance":
        objective["reference"] = {}
    packed = draw.random() < 0.4
    return {
        "model": "mixture" if mixture else draw.choice(["tied", "untied"]),
        "parallel": parallel,
        "objective": objective,
        "controls": draw.choice(CONTROLS),
        "optimizer": {
            "lr": 3e-3,
            "clip_grad": draw.choice([0.3, None]),
            "weight_decay": draw.choice([0.0, 1.0]),
            "betas": (0.9, 0.95),
            "eps": 0.01,
        },
        "sequence": "packed" if packed else "padded",
        "budget": draw.choice([40, 96, 4096]),
        "recompute": draw.choice(["none", "none", "full"]),
        "lora": {**LORA, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]} if lora else None,
        "batches": ["mixture_0", "mixture_1", "mixture_2"] if mixture else ["0", "1", "2"],
    }


@functools.cache
def material() -> Path:
    """Models, the batches of versions 0, 1 and 2 for each, and the cases."""
    directory = temporary()
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "scale": 2.0}
    for name, tied in (("tied", True), ("untied", False)):
        save_tiny_model(directory / name, tied=tied, seed=1, layers=4, **shape)
    save_tiny_model(directory / "mixture", "qwen3_moe", tied=True, seed=2, layers=2, **shape)
    batches = {}
    for prefix, model in (("", "tied"), ("mixture_", "mixture")):
        for version in range(3):
            raw = ragged_batch(vocabulary=VOCABULARY, seed=10 + version, max_response=9)
            batches[f"{prefix}{version}"] = at_version(
                with_behavior(directory / model, raw), version
            )
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    cases = {str(seed): case_of(seed) for seed in SEEDS}
    (directory / "cases.json").write_text(json.dumps(cases))
    return directory


def batch(name: str) -> Any:
    return pickle.loads((material() / "batches.pickle").read_bytes())[name]


@functools.cache
def results(ranks: int) -> dict[str, Any]:
    cases = json.loads((material() / "cases.json").read_text())
    found: dict[str, Any] = {}
    # In parts: each start of the ranks has one deadline, whatever the number of its cases.
    for part in itertools.batched(cases.items(), CASES_PER_START):
        offered = {name: case["parallel"] for name, case in part}
        outcome = run_program("differential_program", material(), offered, ranks)
        if isinstance(outcome, AssertionError):
            raise outcome
        found |= outcome
    return found


def responses(name: str) -> list[Response]:
    """The samples whose reward did not fail."""
    return [
        Response(
            id=sample.id,
            group=index,
            prompt=list(sample.prompt.token_ids),
            tokens=sample.response_ids.tolist(),
            mu=torch.from_numpy(sample.behavior_logprobs).double(),
            mask=torch.from_numpy(sample.loss_mask).double(),
            versions=sample.versions.tolist(),
            reward=float(sample.reward),
        )
        for index, group in enumerate(groups_of(batch(name)))
        for sample in group
        if sample.valid
    ]


def reference(case: dict[str, Any], found: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The reference's steps and final weights; it takes adapters' first values and the division
    into minibatches from the policy."""
    module = loaded(material() / case["model"])
    model: Model
    if case["lora"] is None:
        model = Model(module, 0.7)
    else:
        model = Adapted(module, 0.7, found["first"], LORA["alpha"] / LORA["rank"])
    trainer = Trainer(model, case["objective"], case["controls"], case["optimizer"])
    minibatches = case["objective"].get("minibatches", 1)
    per_batch = minibatches * case["objective"].get("epochs", 1)
    steps = []
    for version, name in enumerate(case["batches"]):
        given = responses(name)
        mine = found["parts"][version * per_batch : (version + 1) * per_batch]
        assert all(part == mine[index % minibatches] for index, part in enumerate(mine))
        ids = [one for part in mine[:minibatches] for one in part]
        assert sorted(ids) == sorted(one.id for one in given), "every sample is in one minibatch"
        steps += trainer.train(version, given, mine[:minibatches])
    return steps, trainer.weights


def worst(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Largest error of any tensor relative to the norm of all, and its name."""
    assert found.keys() == expected.keys()
    norm = sum(float(one.square().sum()) for one in expected.values()) ** 0.5
    errors = [
        (float((found[name].double() - expected[name]).norm()) / max(norm, 1e-12), name)
        for name in expected
    ]
    return max(errors)


def label(seed: int) -> str:
    case = case_of(seed)
    objective = case["objective"]
    layout = "-".join(f"{k}{v}" for k, v in case["parallel"].items() if k != "ranks") or "data"
    names = [one["name"] for one in (*objective["corrections"], *case["controls"])]
    kind = "lora" if case["lora"] else case["model"]
    return "-".join(
        [
            *(str(seed), objective["loss"]["name"], objective["advantage"]["name"]),
            *(objective["proximal"], *names, case["sequence"], kind),
            f"{case['parallel']['ranks']}x{layout}",
        ]
    )


def test_the_gates_cases_have_every_kind() -> None:
    cases = [case_of(seed) for seed in IN_GATE]
    assert {case["objective"]["proximal"] for case in cases} == {
        "behavior",
        "recompute",
        "loglinear",
        "ewma",
        "snapshot",
    }
    assert {one["name"] for case in cases for one in case["controls"]} == {
        one["name"] for controls in CONTROLS for one in controls
    }
    assert {"lora" if case["lora"] else case["model"] for case in cases} == {
        "tied",
        "untied",
        "mixture",
        "lora",
    }
    assert {case["sequence"] for case in cases} == {"padded", "packed"}
    assert {name for case in cases for name in case["parallel"]} == {
        name for layout in (*DENSE, *MIXTURE) for name in layout
    }


@pytest.mark.parametrize("seed", SEEDS, ids=label)
def test_every_gradient_and_the_final_weights_are_the_references(seed: int) -> None:
    case = case_of(seed)
    found = results(case["parallel"]["ranks"])[str(seed)]
    steps, weights = reference(case, found)
    assert len(steps) == len(found["gradients"])
    repeat = f"MAR_DIFFERENTIAL_FIRST={seed} MAR_DIFFERENTIAL_CASES=1\n{json.dumps(case, indent=1)}"
    for number, (step, gradient) in enumerate(zip(steps, found["gradients"], strict=True)):
        error, name = worst(gradient, step.gradient)
        assert error <= TOLERANCE, f"gradient of step {number}: {name} is {error:.2g} off; {repeat}"
    start = {name: tensor.double() for name, tensor in found["first"].items()}
    moved = {name: weight - start[name] for name, weight in weights.items()}
    made = {name: found["weights"][name].double() - start[name] for name in weights}
    error, name = worst(made, moved)
    assert error <= 10 * TOLERANCE, f"weights: {name} moved {error:.2g} off; {repeat}"
