"""Writes the tasks of the stability study, each with its prompts and its tiny Qwen3-architecture
model (227,168 parameters, one token per character).

    python examples/stability/prepare.py [--seed N]

- chain      `314159=` is answered by the running sums of its digits, modulo 10: `348943`
- add        `37+5=` is answered by `42`: sums of two numbers of one or two digits
- countdown  `use 3 5 7 for 22:` is answered by `3*5+7`; the tasks of examples/countdown

Everything lands in `generated/TASK/` next to this file, from the seed alone, without network; a
second run writes the same.
- model/       randomly initialised, float32, the same vocabulary for every task
- sft.jsonl    prompts with answers, for the supervised warm start
- train.jsonl  prompts to learn by reinforcement
- eval.jsonl   held-out prompts
No prompt is in two of the three files of a task.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHARACTERS = "0123456789+-*()=: usefor"
HIDDEN_SIZE = 96
CHAIN_DIGITS = 6
CHAIN_PROMPTS = 40_000
EVAL_PROMPTS = 256

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Task:
    rows: Sequence[tuple[Row, str]]
    """A line of train.jsonl and eval.jsonl, and the response that a warm start imitates; all
    prompts differ, in random order."""
    sft: int
    """How many prompts after the first EVAL_PROMPTS are for the warm start; the rest are to learn
    from."""


def chain(chance: random.Random) -> Task:
    rows: list[tuple[Row, str]] = []
    for number in chance.sample(range(10**CHAIN_DIGITS), CHAIN_PROMPTS):
        digits = f"{number:0{CHAIN_DIGITS}}"
        total, answer = 0, ""
        for digit in digits:
            total = (total + int(digit)) % 10
            answer += str(total)
        rows.append(({"prompt": f"{digits}=", "answer": answer}, answer))
    return Task(rows=rows, sft=8_000)


def add(chance: random.Random) -> Task:
    sums = [(a, b) for a in range(100) for b in range(100)]
    chance.shuffle(sums)
    rows: list[tuple[Row, str]] = [
        ({"prompt": f"{a}+{b}=", "answer": str(a + b)}, str(a + b)) for a, b in sums
    ]
    return Task(rows=rows, sft=5_000)


def countdown(chance: random.Random) -> Task:
    example = example_of("countdown")
    solved = list(example["tasks"]().items())
    chance.shuffle(solved)
    rows: list[tuple[Row, str]] = []
    for (numbers, target), solution in solved:
        order = chance.sample(numbers, len(numbers))
        prompt = example["prompt"](order, target)
        rows.append(({"prompt": prompt, "numbers": order, "target": target}, solution))
    return Task(rows=rows, sft=len(rows) // 2)


def example_of(name: str) -> dict[str, Any]:
    """The names of another example's script."""
    return runpy.run_path(str(HERE.parent / name / "prepare.py"))


TASKS = {"chain": chain, "add": add, "countdown": countdown}


def write_data(folder: Path, task: Task) -> None:
    held_out, known = task.rows[:EVAL_PROMPTS], task.rows[EVAL_PROMPTS:]
    warm, train = known[: task.sft], known[task.sft :]
    imitated = [{"prompt": row["prompt"], "response": response} for row, response in warm]
    _write_lines(folder / "sft.jsonl", imitated)
    _write_lines(folder / "train.jsonl", [row for row, _ in train])
    _write_lines(folder / "eval.jsonl", [row for row, _ in held_out])


def _write_lines(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write(folder: Path, seed: int) -> None:
    """Every task; `folder` is made if it is missing."""
    write_model = example_of("arithmetic")["write_model"]
    for name, make in TASKS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_data(folder / name, make(random.Random(seed)))
        write_model(folder / name / "model", seed, characters=CHARACTERS, hidden_size=HIDDEN_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    folder = HERE / "generated"
    write(folder, seed)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
