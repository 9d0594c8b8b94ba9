"""Trained tokens per second of streamed groups, against an asynchronous run and a synchronous one,
each side on a core of its own: with responses of one length and with a long tail of lengths.

For each distribution of lengths, one configuration runs as `async_ratio: 0`, as `async_ratio: 0`
with `stream: groups`, and as `async_ratio: 1`. The trainer rank runs on core 0, the engine's
processes on core 1. The goal of streamed groups is 0.85 of the asynchronous run.

An engine takes `--concurrent` samples at a time, a quarter of a batch: groups complete one after
another only if the batch is more than the engine samples at once.

The model is that of the arithmetic example, untrained and with a constant log-odds of the end of a
response. `equal`: responses never end by themselves, so all have `--length` tokens. `long tail`: a
response ends after each token with the same probability, on average after `--length` tokens, so the
longest of a batch is several times as long as the mean.
"""

from __future__ import annotations

import json
import math
import runpy
import tempfile
from pathlib import Path

import async_vs_sync

POSITIONS = 1024
WAYS = {
    "synchronous": (0.0, "none"),
    "streamed": (0.0, "groups"),
    "async_ratio 1": (1.0, "none"),
}
NEVER = 1e-12


def write_model(folder: Path, end: float) -> None:
    """Change the example's model: `end` is the probability that a response ends after a token."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.max_position_embeddings = POSITIONS
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        # A component that all embeddings share makes the last hidden state nearly constant, so its
        # product with the row of <eos> is, too; other tokens stay equally probable.
        model.get_input_embeddings().weight.add_(1.0)
        head.sub_(head.mean(dim=1, keepdim=True))
        odds = math.log(end * (len(head) - 1) / (1.0 - end))
        head[model.config.eos_token_id] = odds / head.shape[1]
    model.save_pretrained(folder)


def main() -> None:
    parser = async_vs_sync.parser_of_runs(__doc__, concurrent=32)
    parser.add_argument("--length", type=int, default=24)
    args = parser.parse_args()
    result: dict[str, object] = {}
    for lengths in ("equal", "long tail"):
        equal = lengths == "equal"
        args.max_tokens = args.length if equal else POSITIONS - 16
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write = runpy.run_path(str(async_vs_sync.ROOT / "examples/arithmetic/prepare.py"))
            write["write"](folder, seed=0)
            write_model(folder / "model", NEVER if equal else 1.0 / args.length)
            runs = {
                way: async_vs_sync.run(folder, ratio, args, stream=stream)
                for way, (ratio, stream) in WAYS.items()
            }
        rates = {way: run["tokens_per_step"] / run["step_s"] for way, run in runs.items()}
        result[lengths] = {
            **{way: {**run, "tokens_per_s": rates[way]} for way, run in runs.items()},
            "streamed / async_ratio 1": rates["streamed"] / rates["async_ratio 1"],
            "streamed / synchronous": rates["streamed"] / rates["synchronous"],
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
