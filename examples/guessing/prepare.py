"""Writes the guessing game: a tiny Qwen3-architecture model with a character vocabulary, and one
prompt for each number.

    python examples/guessing/prepare.py [--seed N]

Everything lands in `generated/` next to this file, from the seed alone, without network; a second
run writes the same.
- model/       randomly initialised, float32
- train.jsonl  the prompt `?`, once for each number
- eval.jsonl   the same: what is learned is a way to guess, and the answers are all it needs
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUMBERS = range(1, 8)
CHARACTERS = "1234567?hl"


def write_model(folder: Path, seed: int) -> None:
    arithmetic = runpy.run_path(str(HERE.parent / "arithmetic" / "prepare.py"))
    arithmetic["write_model"](folder, seed, characters=CHARACTERS)


def write(folder: Path, seed: int) -> None:
    """The whole example; `folder` is made if it is missing."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": "?", "secret": number}) + "\n" for number in NUMBERS]
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
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
