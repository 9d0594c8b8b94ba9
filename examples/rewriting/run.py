"""The whole rewriting example, from nothing to its table.

    python examples/rewriting/run.py [SEED ...]         default: 1

Run it from the folder that holds examples/. Each seed has a folder of its own under
`runs/rewriting/`; a stage whose result is there is not run again. In the order of the stages:

1. prepare.py writes model and data, and base.yaml trains the learner;
2. rewriter.yaml trains the rewriter, from the learner;
3. `mar eval --responses` has the learner itself, merely asked to, and the rewriter restate every
   demonstration four times; the first that is consistent is kept, else the demonstration;
4. finetune.yaml trains the learner on the demonstrations, on its own rewrites and on the rewriter's;
5. evaluate.yaml measures each of the four models on the new operation and on the known ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUNS = Path("runs/rewriting")
ARMS = {
    "base": "none",
    "demonstrations": "demonstrations as they stand",
    "asked": "rewrites of the learner, merely asked",
    "rewriter": "rewrites of the trained rewriter",
}
"""What the learner is fine-tuned on, by the name of its folder."""


def mar(*arguments: str | Path) -> None:
    print("$ mar", *arguments, flush=True)
    command = [sys.executable, "-m", "megatron_async_rl", *map(str, arguments)]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})


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
            known, new = self.evaluate(arm, model)
            found[arm] = {"known": known, "new": new}
            if arm in taught:
                found[arm] |= described(taught[arm], self.learner)
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

    def evaluate(self, arm: str, model: Path) -> tuple[float, float]:
        """Shares of the known operations' and of the new one's held-out tasks answered right."""
        out = self.folder / f"accuracy_{arm}.json"
        if not out.is_file():
            sets = [
                f"eval.sets.{i}.path={self.data / name}.jsonl"
                for i, name in enumerate(("known", "new"))
            ]
            train = f"data.train={self.data / 'demonstrations.jsonl'}"
            mar("eval", model, "--config", HERE / "evaluate.yaml", "--out", out, train, *sets)
        known = json.loads(out.read_text())
        return known["mean_reward"], known["others"][0]["mean_reward"]


def verified(responses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each demonstration its first response that is consistent with it, as a row to learn from;
    the demonstration itself where there is none."""
    kept: dict[str, dict[str, Any]] = {}
    for one in responses:
        fallback = {"prompt": one["question"], "response": one["demonstration"], "rewritten": False}
        kept.setdefault(one["question"], fallback)
        consistent = one["reward"] is not None and one["reward_parts"]["consistent"] == 1.0
        if consistent and not kept[one["question"]]["rewritten"]:
            kept[one["question"]] |= {"response": one["response"], "rewritten": True}
    return list(kept.values())


def described(data: Path, learner: Path) -> dict[str, float]:
    """Of the rows to learn from: nats per token under the learner, how many forms they have in
    effect, and the share that are rewrites. The form of a response is what is left of it without
    its numbers; in effect: the exponential of the entropy of forms."""
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


def table(found: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown: the mean over seeds, and where there are several the range."""

    def cell(arm: str, key: str) -> str:
        values = [one[arm][key] for one in found if key in one[arm]]
        if not values:
            return ""
        mean = f"{sum(values) / len(values):.2f}"
        return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"

    head = (
        "fine-tuned on",
        "new operation",
        "known operations",
        "log-prob per token",
        "forms",
        "rewritten",
    )
    keys = ("new", "known", "nats", "forms", "rewritten")
    lines = [head, ("---",) * len(head)]
    lines += [(name, *(cell(arm, key) for key in keys)) for arm, name in ARMS.items()]
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
    print(table([Recipe(seed).run() for seed in parser.parse_args().seeds]))


if __name__ == "__main__":
    main()
