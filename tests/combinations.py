"""A set of runs in which every two methods that go together meet at least once.

The configuration decides which methods can be combined: combinations that its models refuse are
left out.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import Any, get_args

from pydantic import ValidationError

from megatron_async_rl.config.losses import Aggregation
from megatron_async_rl.config.objective import Proximal
from megatron_async_rl.config.schema import Config
from tests.method_settings import models
from tests.written_run import config_tree

TRIES = 150
"""Random companions with which a pair is tried before it counts as impossible."""
REQUIRED: dict[str, dict[str, Any]] = {
    "reject": {"high": 0.5},
    "matched_lr": {"target_update_norm": 0.01},
}
"""Settings of methods without a default."""


def _names(section: str) -> list[str]:
    return [model.model_fields["name"].default for model in models(section)]


def factors() -> dict[str, list[Any]]:
    """Factors and their values; None stands for none, or for the loss's own."""
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
    """The run with these methods and their requirements; None where the configuration refuses
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
        return Config.model_validate(tree)
    except ValidationError:
        return None


@cache
def pairwise(seed: int = 0) -> tuple[Config, ...]:
    """Greedy: each combination starts from a pair not met yet, and takes the companions that bring
    the most new pairs."""
    rng, given = random.Random(seed), factors()
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(given, 2)
        for x in range(len(given[a]))
        for y in range(len(given[b]))
    }
    chosen: list[Config] = []
    while missing:
        start = min(missing)
        best: tuple[set[Any], Config] | None = None
        for attempt in range(TRIES):
            index = {name: rng.randrange(len(values)) for name, values in given.items()}
            # Half of the tries leave out most of what may be left out: fewer companions refuse
            # less.
            if attempt % 2:
                index |= {
                    name: 0
                    for name, values in given.items()
                    if values[0] is None and rng.random() < 0.8
                }
            index |= dict(start)
            met = missing & set(combinations(index.items(), 2))
            if best is None or len(met) > len(best[0]):
                config = config_of({name: given[name][i] for name, i in index.items()})
                best = (met, config) if config is not None else best
        if best is None:
            missing.discard(start)
        else:
            missing -= best[0]
            chosen.append(best[1])
    return tuple(chosen)


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
