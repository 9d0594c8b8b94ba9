"""Writes the arithmetic example: a tiny Qwen3-architecture model with a tokenizer.json, and sums of
1-2 digit numbers.

    python examples/arithmetic/prepare.py [--seed N]

Everything lands in `generated/` next to this file, from the seed alone, without network; a second
run writes the same.
- model/       randomly initialised, float32, character vocabulary
- sft.jsonl    sums with answers, for the supervised warm start
- train.jsonl  sums to learn by reinforcement
- eval.jsonl   held-out sums: in neither of the other two
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="
EVAL_SUMS = 256


def write_data(folder: Path, seed: int) -> None:
    sums = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(sums)
    held_out, known = sums[:EVAL_SUMS], sums[EVAL_SUMS:]
    _write_lines(
        folder / "eval.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in held_out]
    )
    _write_lines(
        folder / "train.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in known]
    )
    _write_lines(
        folder / "sft.jsonl", [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in known]
    )


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path, characters: str) -> dict[str, int]:
    """One token for each of `characters`, a BOS before every text. Returns the vocabulary."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    return vocabulary


def write_model(
    folder: Path, seed: int, *, characters: str = CHARACTERS, hidden_size: int = 128
) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder, characters)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=vocabulary["<bos>"],
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
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
