"""Writes the calculator example: a tiny Qwen3-architecture model with a character vocabulary, and
products of two numbers below 100, which it is too small to learn by heart.

    python examples/calculator/prepare.py [--seed N]

Everything lands in `generated/` next to this file, from the seed alone, without network; a second
run writes the same.
- model/       randomly initialised, float32
- sft.jsonl    for the supervised warm start: calls of the calculator, and what follows its answers
- train.jsonl  products to learn by reinforcement
- eval.jsonl   held-out products: in neither of the other two
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHARACTERS = "".join(map(chr, range(32, 127)))
"""Characters of the prompts, the answers and the error messages of the tools."""
EVAL_PRODUCTS = 256


def write_data(folder: Path, seed: int) -> None:
    products = [(a, b) for a in range(2, 100) for b in range(2, 100)]
    random.Random(seed).shuffle(products)
    held_out, known = products[:EVAL_PRODUCTS], products[EVAL_PRODUCTS:]
    given = []
    for a, b in known:
        asked, call = f"{a}*{b}=", f"[times(a={a},b={b})]"
        given.append({"prompt": asked, "response": call})
        given.append({"prompt": f"{asked}{call}{a * b}=", "response": str(a * b)})
    _write_lines(folder / "sft.jsonl", given)
    for name, some in (("train", known), ("eval", held_out)):
        rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in some]
        _write_lines(folder / f"{name}.jsonl", rows)


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
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
