"""A set of runs in which every two compatible methods are combined at least once.

The configuration decides which methods can be combined: combinations that its models refuse are
left out. The search takes seconds, so tests/data/combinations.json stores the set:
`python -m tests.combinations` writes the file, and `make test-all` compares it with a new search.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from megatron_async_rl.config.losses import Aggregation, Proximal
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from tests.method_settings import models
from tests.thorough import THOROUGH
from tests.written_run import config_tree

STORED = Path(__file__).parent / "data/combinations.json"
TRIES = 150
"""Number of random companions with which a pair is tried before it counts as impossible."""
REQUIRED: dict[str, dict[str, Any]] = {
    "reject": {"high": 0.5},
    "matched_lr": {"target_update_norm": 0.01},
}
"""Settings of methods without a default."""


def _names(section: str) -> list[str]:
    return [model.model_fields["name"].default for model in models(section)]


def factors() -> dict[str, list[Any]]:
    """Return factors and their values; None means none, or the loss's own."""
    return {
        "advantage": _names("advantage"),
        "loss": _names("loss"),
        "first correction": [None, *_names("corrections")],
        "second correction": [None, *_names("corrections")],
        "proximal": list(get_args(Proximal)),
        "aggregation": [None, *(one for one in get_args(Aggregation) if one != "seq-mean")],
        "first control": [None, *_names("controls")],
        "second control": [None, *_names("controls")],
        "kl": [None, "loss", "reward"],
        "steps per batch": [None, 4],
    }


def config_of(chosen: dict[str, Any]) -> Config | None:
    """Return the run with these methods and their requirements; None if the configuration refuses
    it."""
    tree = config_tree()

    def method(name: str) -> dict[str, Any]:
        return {"name": name, **REQUIRED.get(name, {})}

    objective: dict[str, Any] = {
        "advantage": chosen["advantage"],
        "loss": chosen["loss"],
        "corrections": [
            method(c) for c in (chosen["first correction"], chosen["second correction"]) if c
        ],
        "proximal": chosen["proximal"],
        "aggregation": chosen["aggregation"],
    }
    if chosen["aggregation"] == "seq-mean-token-sum-norm":
        objective["norm_length"] = 16
    if chosen["steps per batch"]:
        objective |= {"minibatches": 2, "epochs": 2}
    if chosen["kl"]:
        objective["kl"] = {"coef": 0.01, "where": chosen["kl"]}
    loss = next(
        model for model in models("loss") if model.model_fields["name"].default == chosen["loss"]
    )
    advantage = next(
        model
        for model in models("advantage")
        if model.model_fields["name"].default == chosen["advantage"]
    )
    if loss.uses_reference or chosen["kl"]:
        objective["reference"] = {}
    if advantage.reads_values:
        objective["value"] = {}
    tree["objective"] = objective
    tree["controls"] = [method(c) for c in (chosen["first control"], chosen["second control"]) if c]
    if loss.whole_group_of_one_version:
        tree["flow"]["async_ratio"] = 0
    if chosen["loss"] == "sft":
        tree["flow"] |= {"async_ratio": 0, "group_size": 1}
        del tree["rollout"]
    try:
        return validated(tree)
    except ValidationError:
        return None


def search(seed: int = 0) -> list[dict[str, Any]]:
    """Search greedily: each combination starts with an uncovered pair, and gets the companions that
    add the most new pairs."""
    rng, given = random.Random(seed), factors()
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(given, 2)
        for x in range(len(given[a]))
        for y in range(len(given[b]))
    }
    found: list[dict[str, Any]] = []
    while missing:
        start = min(missing)
        best: tuple[set[Any], dict[str, Any]] | None = None
        for attempt in range(TRIES):
            index = {name: rng.randrange(len(values)) for name, values in given.items()}
            # Half of the tries leave out most optional companions, because fewer companions cause
            # fewer refusals.
            if attempt % 2:
                index |= {
                    name: 0
                    for name, values in given.items()
                    if values[0] is None and rng.random() < 0.8
                }
            index |= dict(start)
            met = missing & set(combinations(index.items(), 2))
            if best is None or len(met) > len(best[0]):
                chosen = {name: given[name][i] for name, i in index.items()}
                best = (met, chosen) if config_of(chosen) is not None else best
        if best is None:
            missing.discard(start)
        else:
            missing -= best[0]
            found.append(best[1])
    return found


@cache
def pairwise() -> tuple[Config, ...]:
    """Return all combinations of the set."""
    return tuple(map(_accepted, stored()))


@cache
def trained() -> tuple[Config, ...]:
    """Return the combinations that train a policy: all in `make test-all`; in the gate, enough to
    contain every choice of every factor once."""
    if THOROUGH:
        return pairwise()
    chosen, met = [], set[tuple[str, Any]]()
    # Combinations of many methods first, so that fewer are needed.
    for one in sorted(stored(), key=lambda one: -sum(value is not None for value in one.values())):
        if not met.issuperset(one.items()):
            met.update(one.items())
            chosen.append(_accepted(one))
    return tuple(chosen)


def _accepted(chosen: dict[str, Any]) -> Config:
    config = config_of(chosen)
    assert config is not None, f"{chosen} is refused: run python -m tests.combinations"
    return config


def stored() -> list[dict[str, Any]]:
    """Return the choice of each factor, for all combinations of the set."""
    return [dict(zip(factors(), row, strict=True)) for row in json.loads(STORED.read_text())]


def label(config: Config) -> str:
    """Name of the combination for a test id."""
    objective = config.objective
    parts = [
        objective.advantage.name,
        objective.loss.name,
        *(c.name for c in objective.corrections),
        objective.proximal,
    ]
    parts += [objective.aggregation_used, *(c.name for c in config.controls)]
    parts += [f"{objective.steps_per_batch}_steps"] if objective.steps_per_batch > 1 else []
    return "-".join(parts + ([f"kl_{objective.kl.where}"] if objective.kl else []))


def main() -> None:
    rows = [json.dumps([*chosen.values()]) for chosen in search()]
    STORED.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
