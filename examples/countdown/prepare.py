"""Writes the Countdown example: a tiny Llama-architecture model with a SentencePiece
tokenizer.model, and its tasks.

    python examples/countdown/prepare.py [--seed N]

A task gives three numbers and a target: `use 3 5 7 for 22:` is answered by `3*5+7`. Every number is
used exactly once. Everything lands in `generated/` next to this file, from the seed alone, without
network; a second run writes the same.
- model/       randomly initialised, float32
- sft.jsonl    tasks with one answer each, for the supervised warm start
- train.jsonl  tasks to learn by reinforcement
- eval.jsonl   held-out tasks: no order of their numbers is in the other two with the same target
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUMBERS = range(1, 21)
TARGETS = range(1, 100)
EVAL_TASKS = 256
VOCABULARY = 40

Task = tuple[tuple[int, int, int], int]


def solutions(numbers: tuple[int, int, int]) -> Iterator[tuple[int, str]]:
    """(value, expression) for the numbers in any order under + - *, left to right with the
    parentheses that needs."""
    for a, b, c in sorted(set(itertools.permutations(numbers))):
        for first, second in itertools.product("+-*", repeat=2):
            inner = f"{a}{first}{b}"
            text = (
                f"({inner}){second}{c}" if second == "*" and first != "*" else f"{inner}{second}{c}"
            )
            yield _apply(second, _apply(first, a, b), c), text


def _apply(operator: str, left: int, right: int) -> int:
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def tasks() -> dict[Task, str]:
    """Every solvable task, numbers ascending, with its first solution."""
    found: dict[Task, str] = {}
    for numbers in itertools.combinations_with_replacement(NUMBERS, 3):
        for value, text in solutions(numbers):
            if value in TARGETS:
                found.setdefault((numbers, value), text)
    return found


def prompt(numbers: Sequence[int], target: int) -> str:
    return f"use {' '.join(map(str, numbers))} for {target}:"


def write_data(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    solved = list(tasks().items())
    chance.shuffle(solved)
    held_out, known = solved[:EVAL_TASKS], solved[EVAL_TASKS:]
    for name, part in (("eval", held_out), ("train", known), ("sft", known)):
        rows = []
        for (numbers, target), solution in part:
            order = chance.sample(numbers, 3)
            row: dict[str, object] = {"prompt": prompt(order, target)}
            row |= {"response": solution} if name == "sft" else {"numbers": order, "target": target}
            rows.append(row)
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )


def write_tokenizer(folder: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    texts = [
        text
        for (numbers, target), solution in tasks().items()
        for text in (prompt(numbers, target), solution)
    ]
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCABULARY,
        hard_vocab_limit=True,
        split_digits=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def write_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    # An engine may sample <pad> like any other token. Left at zeros, as transformers begins it, its
    # embedding would multiply the gradient by 1/sqrt(norm_eps).
    with torch.no_grad():
        model.get_input_embeddings().weight[config.pad_token_id].normal_(
            std=config.initializer_range
        )
    model.save_pretrained(folder)


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
