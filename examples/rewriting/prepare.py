"""Writes the rewriting example: a tiny Qwen3-architecture model with a character vocabulary, and
what it is to know, to learn and to rewrite.

    python examples/rewriting/prepare.py [--seed N]

A task is four digits under an operation, and an answer goes through them: `S3572=` is answered with
the running sums, modulo 10, `3,8,5,7`, whose last one is the result. `M` takes the largest so far,
`N` the smallest, `D` the difference. The learner separates its numbers by `,`, `;` or a space, the
same one throughout an answer. The expert writes letters: `d:i:b:j.` is 3, 8, 1, 9.

Everything lands in `generated/` next to this file, from the seed alone, without network; a second
run writes the same.
- model/                randomly initialised, float32
- base.jsonl            what the learner starts from: S, M and N in its own style, and letters read
                        aloud as digits, `>d:i:b:j.=` to `3819`
- demonstrations.jsonl  the skill to learn: D, as the expert writes it
- rewriting.jsonl       the same as a task of the rewriter: the question, and the demonstration to
                        restate
- known.jsonl, new.jsonl  held-out tasks of S, M and N, and of D
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "S": lambda value, digit: (value + digit) % 10,
    "M": max,
    "N": min,
    "D": lambda value, digit: (value - digit) % 10,
}
KNOWN, NEW = "SMN", "D"
SEPARATORS = ",; "
CHARACTERS = "0123456789abcdefghij" + KNOWN + NEW + SEPARATORS + ":.>="
DIGITS = 4
EACH, READINGS, DEMONSTRATIONS, HELD_OUT = 3000, 3000, 1000, 256
SEPARATED = 0.2
"""Tasks of each known operation, of reading, of the new one; and held out of each kind."""


def steps(operation: str, digits: Sequence[int]) -> list[int]:
    """The written steps: the first digit, and the value after each further one."""
    values = [digits[0]]
    for digit in digits[1:]:
        values.append(OPERATIONS[operation](values[-1], digit))
    return values


def expert(values: Sequence[int]) -> str:
    return ":".join("abcdefghij"[value] for value in values) + "."


def _row(operation: str, digits: Sequence[int]) -> dict[str, str]:
    question = operation + "".join(map(str, digits)) + "="
    return {"prompt": question, "answer": str(steps(operation, digits)[-1])}


def _to_rewrite(question: str, demonstration: str) -> str:
    return f"{question[:-1]}>{demonstration}="


def write_data(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    tasks = {}
    for operation in OPERATIONS:
        numbers = chance.sample(range(10**DIGITS), EACH + HELD_OUT)
        tasks[operation] = [[int(one) for one in f"{number:0{DIGITS}}"] for number in numbers]

    base = []
    for operation in KNOWN:
        for digits in tasks[operation][HELD_OUT:]:
            written = chance.choice(SEPARATORS).join(map(str, steps(operation, digits)))
            base.append(_row(operation, digits) | {"response": written})
    for _ in range(READINGS):
        operation, digits = chance.choice(KNOWN), chance.choices(range(10), k=DIGITS)
        values = chance.choices(range(10), k=DIGITS)
        separator = chance.choice(SEPARATORS) if chance.random() < SEPARATED else ""
        base.append(
            {
                "prompt": _to_rewrite(_row(operation, digits)["prompt"], expert(values)),
                "response": separator.join(map(str, values)),
            }
        )
    chance.shuffle(base)
    _write(folder / "base.jsonl", base)

    new = [
        _row(NEW, digits) | {"response": expert(steps(NEW, digits))}
        for digits in tasks[NEW][HELD_OUT : HELD_OUT + DEMONSTRATIONS]
    ]
    _write(folder / "demonstrations.jsonl", new)
    rewriting = []
    for row in new:
        question, demonstration = row["prompt"], row["response"]
        prompt = _to_rewrite(question, demonstration)
        rewriting.append({"prompt": prompt, "question": question, "demonstration": demonstration})
    _write(folder / "rewriting.jsonl", rewriting)

    held_out = [
        _row(operation, digits) for operation in KNOWN for digits in tasks[operation][:HELD_OUT]
    ]
    chance.shuffle(held_out)
    _write(folder / "known.jsonl", held_out[:HELD_OUT])
    _write(folder / "new.jsonl", [_row(NEW, digits) for digits in tasks[NEW][:HELD_OUT]])


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path, seed: int) -> None:
    arithmetic = runpy.run_path(str(HERE.parent / "arithmetic" / "prepare.py"))
    arithmetic["write_model"](folder, seed, characters=CHARACTERS)


def write(folder: Path, seed: int) -> None:
    """The whole example; `folder` is made if it is missing."""
    folder.mkdir(exist_ok=True)
    write_data(folder, seed)
    write_model(folder / "model", seed)


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
