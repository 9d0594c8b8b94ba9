"""One rank of the packing tests: a tiny policy takes the same steps on packed rows on every layout,
and on padded ones where there is one rank; arguments as those of layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np

from megatron_async_rl.config.objective import ObjectiveConfig, ValueConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.samples.rows import TrainBatch
from tests.parallel.layout_program import CONTROLS, Rank, received, run_each, save, scorable
from tests.parallel.layouts import BLANK, replaced
from tests.thorough import THOROUGH
from tests.train_batches import joined, samples_in

BUDGET = 96
"""Tokens of a packed micro-batch: three micro-batches on one rank, and an empty one where their
number must be even."""
OBJECTIVES = {
    "gspo": ObjectiveConfig(loss="gspo"),
    "recompute": ObjectiveConfig(proximal="recompute", aggregation="seq-mean-token-mean"),
}
DENSE_OBJECTIVES = {
    "trajectory_balance": ObjectiveConfig(
        loss="trajectory_balance", advantage="none", reference={}
    ),
    "oapl": ObjectiveConfig(loss="oapl", advantage="none"),
    "value": ObjectiveConfig(advantage="gae", loss="reinforce", value=ValueConfig()),
    "opob": ObjectiveConfig(
        advantage={"name": "opob", "mode": "exact"},
        loss="reinforce",
        aggregation="seq-mean-token-mean",
    ),
}
RUNS = ("controls", "one_by_one", "all_at_once", *OBJECTIVES)
DENSE_RUNS = (*RUNS, *DENSE_OBJECTIVES)
CONTEXT_PADDED_RUNS = (
    ("value", "opob", "trajectory_balance", "oapl") if THOROUGH else ("value", "opob")
)
"""Under context parallelism on padded rows, too, which layout_program does not run."""
CONTEXT_RUNS = ("controls", "all_at_once", "gspo", *CONTEXT_PADDED_RUNS)


def runs_of(layout: str, virtual_stages: int) -> tuple[str, ...]:
    """Return the policies that a layout trains.

    Interleaved stages do not measure a sequence's gradient. On several ranks the gate leaves out
    cuts into single samples, because the other runs have several micro-batches as well, and
    policies that differ in what they compute from log-probs, which layouts do not change.
    """
    if layout.startswith(("mixture", "expert")):
        runs: tuple[str, ...] = RUNS
    elif layout == "context":
        runs = CONTEXT_RUNS
    else:
        runs = DENSE_RUNS if virtual_stages == 1 else DENSE_RUNS[:-1]
    if THOROUGH or layout in ("single", "mixture_single"):
        return runs
    left_out = ("one_by_one", "recompute", "trajectory_balance", "oapl")
    return tuple(name for name in runs if name not in left_out)


def among_others(rank: Rank, policy, name: str) -> dict:
    """Scores of the batch's first sample, packed with the others and with others of the same
    lengths and other tokens."""
    batch = scorable(rank.batches[name])
    first = batch.samples.column("id")[0].as_py()

    def changed(sample):
        if sample.id == first:
            return {}
        other = (sample.response_ids + 1) % BLANK
        ids = tuple((token + 1) % BLANK for token in sample.prompt.token_ids)
        return {
            "prompt": dataclasses.replace(sample.prompt, id=f"{sample.id}-changed", token_ids=ids),
            "response_ids": other.astype(np.int32),
        }

    scores = [policy.score(received(policy, each)) for each in (batch, replaced(batch, changed))]
    return {"own": [found[0] for found in scores], "others": [found[-1] for found in scores]}


def paired(batch) -> TrainBatch:
    """Samples of two segments, which are two of the batch each."""
    alone = samples_in(scorable(batch))
    pairs = [joined(pair) for pair in itertools.batched(alone, 2)]
    return TrainBatch.of(batch.version, [[sample] for sample in pairs])


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, prefix = ("mixture", "mixture_") if mixture else ("tied", "")
    a, b = f"{prefix}a", f"{prefix}b"
    budgets = {"one_by_one": 26, "all_at_once": 4096}

    def trained(name: str, sequence: str) -> dict:
        # Of packed rows, those of the plain runs hold whole samples, and the others share prefixes.
        plain = name in ("controls", *budgets)
        objective = None if plain else (OBJECTIVES | DENSE_OBJECTIVES)[name]
        policy = rank.policy(
            model,
            objective=objective,
            controls=CONTROLS if plain else (),
            budget=budgets.get(name, BUDGET),
            sequence=sequence,
            sharing="never" if plain else "always",
        )
        return rank.train(policy, [a, b])

    policy = rank.policy(model, sequence="packed", budget=BUDGET, sharing="never")
    shared = rank.policy(model, sequence="packed", budget=BUDGET, sharing="always")
    results = {
        "shared_scores": shared.score(received(shared, scorable(rank.batches[a]))),
        "shared_joined_scores": shared.score(received(shared, paired(rank.batches[a]))),
        "scores": policy.score(received(policy, scorable(rank.batches[a]))),
        "shapes": [
            tuple(each.tokens.shape)
            for each in policy.batcher.of(received(policy, scorable(rank.batches[a]))).micro_batches
        ],
        "among_others": among_others(rank, policy, a),
        "joined_scores": policy.score(received(policy, paired(rank.batches[a]))),
        **{
            name: trained(name, "packed")
            for name in runs_of(output.stem, rank.layout.virtual_stages)
        },
    }
    if rank.layout.world_size == 1:
        results["padded"] = {name: trained(name, "padded") for name in runs_of(output.stem, 1)}
        padded = rank.policy(model)
        results["padded_scores"] = padded.score(received(padded, scorable(rank.batches[a])))
        results["padded_joined_scores"] = padded.score(received(padded, paired(rank.batches[a])))
    if output.stem == "context":
        results["padded"] = {name: trained(name, "padded") for name in CONTEXT_PADDED_RUNS}
    steps = [results[name]["steps"] for name in runs_of(output.stem, rank.layout.virtual_stages)]
    save(rank, results, steps, output)


if __name__ == "__main__":
    run_each(run_layout)
