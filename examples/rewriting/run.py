"""The whole rewriting example, from nothing to its tables.

    python examples/rewriting/run.py [SEED ...]         default: 1

Run it from the folder that holds examples/. Each seed has a folder of its own under
`runs/rewriting/`; a stage whose result is there is not run again. In the order of the stages:

1. prepare.py writes model and data, and base.yaml trains the learner;
2. rewriter.yaml trains the rewriter, from the learner;
3. `mar eval --responses` has the untrained learner and the trained rewriter restate every
   demonstration four times; the first that is consistent is kept, else the demonstration;
4. finetune.yaml trains the learner on the demonstrations, on its own rewrites and on the
   rewriter's;
5. evaluate.yaml measures each of the four models on the new operation and on the known ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_async_rl.launch.foreground import run_in_foreground

HERE = Path(__file__).resolve().parent
RUNS = Path("runs/rewriting")
ARMS = {
    "base": "none",
    "demonstrations": "unchanged demonstrations",
    "asked": "rewrites of the untrained learner",
    "rewriter": "rewrites of the trained rewriter",
}
"""Data on which the learner is fine-tuned, by the name of its folder."""
SKILLS = {"new": "new operation", "known": "known operations", "S": "sums"}
SKILLS |= {"M": "maxima", "N": "minima", "working": "whole workings"}
TAUGHT = {"consistent": "consistent", "alignment": "alignment", "diversity": "diversity"}
TAUGHT |= {"rewritten": "rewritten", "nats": "log-prob per token", "forms": "forms"}
"""Columns of the two tables, by the names of the numbers."""


def mar(*arguments: str | Path) -> None:
    print("$ mar", *arguments, flush=True)
    command = [sys.executable, "-m", "megatron_async_rl", *map(str, arguments)]
    run_in_foreground(command, env={"OMP_NUM_THREADS": "1", **os.environ})


class Recipe:
    """The stages of one seed, in a folder of their own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.folder = RUNS / f"seed_{seed}"
        self.data = self.folder / "data"
        self.learner = self.folder / "base" / "hf"

    def run(self) -> dict[str, dict[str, float]]:
        """The numbers of each arm."""
        if not (self.data / "model" / "model.safetensors").is_file():
            self.data.mkdir(parents=True, exist_ok=True)
            runpy.run_path(str(HERE / "prepare.py"))["write"](self.data, self.seed)
        self.train("base", "base", self.data / "model", self.data / "base.jsonl")
        self.train(
            "rewriter", "rewriter", self.learner, self.data / "rewriting.jsonl", *self.rewriting()
        )
        taught = {"demonstrations": self.data / "demonstrations.jsonl"}
        for arm, model in (("asked", self.learner), ("rewriter", self.folder / "rewriter" / "hf")):
            taught[arm] = self.rewrites(arm, model)
        models = {"base": self.learner}
        for arm, data in taught.items():
            self.train("finetune", f"on_{arm}", self.learner, data)
            models[arm] = self.folder / f"on_{arm}" / "hf"

        found = {}
        for arm, model in models.items():
            found[arm] = self.evaluate(arm, model)
            if arm in taught:
                found[arm] |= described(taught[arm], self.learner)
            if arm in ("asked", "rewriter"):
                found[arm] |= json.loads((self.folder / f"{arm}.json").read_text(encoding="utf-8"))[
                    "parts"
                ]
        return found

    def rewriting(self) -> list[str]:
        learner = f"rollout.reward.parts.alignment.settings.learner={self.learner}"
        return [learner, f"data.eval={self.data / 'rewriting.jsonl'}"]

    def train(self, config: str, name: str, model: Path, data: Path, *more: str) -> None:
        run_dir = self.folder / name
        if (run_dir / "hf" / "config.json").is_file():
            return
        settings = [f"run.dir={run_dir}", f"run.seed={self.seed}", f"model.path={model}"]
        mar("train", HERE / f"{config}.yaml", *settings, f"data.train={data}", *more)

    def rewrites(self, arm: str, model: Path) -> Path:
        """The file of one rewrite for each demonstration."""
        responses, out = self.folder / f"{arm}.responses.jsonl", self.folder / f"{arm}.jsonl"
        if not responses.is_file():
            settings = [f"run.seed={self.seed}", f"data.train={self.data / 'rewriting.jsonl'}"]
            result = ["--out", self.folder / f"{arm}.json", "--responses", responses]
            config = ["--config", HERE / "rewriter.yaml"]
            mar("eval", model, *config, *result, *settings, *self.rewriting())
        _write(out, verified(_read(responses)))
        return out

    def evaluate(self, arm: str, model: Path) -> dict[str, float]:
        """SKILLS of a model."""
        answers = self.folder / f"{arm}.answers.jsonl"
        if not answers.is_file():
            sets = [
                f"eval.sets.{i}.path={self.data / name}.jsonl"
                for i, name in enumerate(("known", "new"))
            ]
            train = f"data.train={self.data / 'demonstrations.jsonl'}"
            result = ["--out", self.folder / f"{arm}.accuracy.json", "--responses", answers]
            mar("eval", model, "--config", HERE / "evaluate.yaml", *result, train, *sets)
        return skills(_read(answers))


def skills(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the answers to held-out tasks whose last number is right: of the new operation, of
    the known ones, and of each of these; and of the known ones whose every number is. An answer
    without a reward does not count."""
    sys.path.insert(0, str(HERE.parents[1]))
    from examples.rewriting.prepare import NEW, steps
    from examples.rewriting.rewards import values

    found = defaultdict[str, list[float]](list)
    for one in (one for one in answers if one["reward"] is not None):
        operation, *digits = one["prompt"].rstrip("=")
        found[operation].append(one["reward"])
        found["new" if operation == NEW else "known"].append(one["reward"])
        if operation != NEW:
            whole = values(one["response"]) == steps(operation, [int(digit) for digit in digits])
            found["working"].append(float(whole))
    return {name: sum(right) / len(right) for name, right in found.items()}


def verified(responses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Training rows: for each demonstration, its first consistent response, or the demonstration
    itself if there is none."""
    kept: dict[str, dict[str, Any]] = {}
    for one in responses:
        fallback = {"prompt": one["question"], "response": one["demonstration"], "rewritten": False}
        kept.setdefault(one["question"], fallback)
        consistent = one["reward"] is not None and one["reward_parts"]["consistent"] == 1.0
        if consistent and not kept[one["question"]]["rewritten"]:
            kept[one["question"]] |= {"response": one["response"], "rewritten": True}
    return list(kept.values())


def described(data: Path, learner: Path) -> dict[str, float]:
    """Statistics of the training rows: nats per token under the learner, how many forms they
    have in effect, and the share that are rewrites. The form of a response is what is left of it
    without its numbers; in effect: the exponential of the entropy of forms."""
    sys.path.insert(0, str(HERE.parents[1]))
    from examples.rewriting.alignment import mean_logprobs
    from examples.rewriting.rewards import VALUES

    rows = _read(data)
    responses = [row["response"] for row in rows]
    nats = mean_logprobs(
        str(learner), [row["prompt"] for row in rows], responses, [True] * len(rows)
    )
    forms = Counter(
        "".join("#" if one in VALUES else one for one in response) for response in responses
    )
    shares = [count / len(rows) for count in forms.values()]
    return {
        "nats": sum(nats) / len(rows),
        "forms": math.exp(-sum(share * math.log(share) for share in shares)),
        "rewritten": sum(row.get("rewritten", False) for row in rows) / len(rows),
    }


def table(found: Sequence[Mapping[str, Mapping[str, float]]], columns: Mapping[str, str]) -> str:
    """Markdown, of the arms that have any of the `columns`: the mean over seeds, and where there
    are several the range."""

    def cell(arm: str, key: str) -> str:
        values = [one[arm][key] for one in found if key in one[arm]]
        if not values:
            return ""
        mean = f"{sum(values) / len(values):.2f}"
        return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"

    lines = [("fine-tuned on", *columns.values()), ("---",) * (1 + len(columns))]
    for arm, name in ARMS.items():
        cells = [cell(arm, key) for key in columns]
        if any(cells):
            lines.append((name, *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="*", default=[1], metavar="SEED")
    found = [Recipe(seed).run() for seed in parser.parse_args().seeds]
    print(table(found, SKILLS), table(found, TAUGHT), sep="\n\n")


if __name__ == "__main__":
    main()
