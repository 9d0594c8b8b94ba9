"""Generated-and-trained response tokens per second: this system against TRL's GRPOTrainer, one
after the other.

Same model, prompts, group size, response limit, learning rate and number of cores. Both sides are
timed over their steady steps (start-up and the first `--warm` steps left out). TRL runs one process
with all cores; this system spreads two tensor-parallel trainer ranks and one engine over them.

`--constant-reward MILLIONS`: a random model of so many parameters over 16 tokens, each as likely as
the others, and answers that nothing can hit. Every reward is 0, so neither side learns, and lengths
stay geometric with mean 16 on both (response limit 128).

`--real`: SmolLM2-135M-Instruct (examples/smollm2/prepare.py) on sums of reasoning-gym, chat prompts
of 37 tokens on average, again with answers that nothing can hit; one trainer rank and one engine.

`gflops` is 8 operations per parameter and token (2 to sample, 6 to train), of the tokens that a
side has to compute: each prompt once per group, and all responses. `peak` is the rate of matrix
products with a weight of the model's MLP on all cores, in the same `--dtype`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic_cpu.yaml"
GENERATED = ROOT / "examples" / "arithmetic" / "generated"
REAL_EXAMPLE = ROOT / "examples" / "smollm2_chain_sum_cpu.yaml"
SMOLLM2 = ROOT / "examples" / "smollm2" / "generated" / "smollm2"
GROUP, LEARNING_RATE = 8, 7e-4


SHAPES = {
    0.3: {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "heads": 4},
    10: {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 1024, "heads": 10},
}
"""Settings of `--constant-reward`, by million parameters."""


def write_constant_reward(folder: Path, millions: float) -> None:
    """The arithmetic example's tokenizer and prompts, a model without a preference, answers other
    than text."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, model = dict(SHAPES[millions]), folder / "model"
    heads = shape.pop("heads")
    config = Qwen3Config(
        **shape,
        vocab_size=16,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight.normal_(std=1e-3)
        network.model.embed_tokens.weight.normal_(std=0.02)
    network.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GENERATED / "model" / name, model / name)
    lines = [
        json.loads(line)
        for line in (GENERATED / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(line | {"answer": "none"}) + "\n" for line in lines), encoding="utf-8"
    )


def write_chat_prompts(path: Path) -> None:
    """Write 512 sums of reasoning-gym as texts of the model's chat template, with an answer that no
    response equals."""
    import reasoning_gym
    from transformers import AutoTokenizer

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    tasks = reasoning_gym.create_dataset("chain_sum", size=512, seed=1, **options)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    with path.open("w", encoding="utf-8") as out:
        for task in tasks:
            chat = [
                {"role": "system", "content": "Answer with the number only."},
                {"role": "user", "content": task["question"]},
            ]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            out.write(json.dumps({"prompt": text, "answer": "none"}) + "\n")


def peak_gflops(model: Path, dtype: str, rows: int = 1024, seconds: float = 2.0) -> float:
    """Return 10^9 operations per second of [rows, h] x [h, f] products on all cores, where h and f
    are the model's hidden and MLP sizes."""
    import torch

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    h, f = config["hidden_size"], config["intermediate_size"]
    torch.set_num_threads(os.cpu_count() or 1)
    a = torch.randn(rows, h, dtype=getattr(torch, dtype))
    b = torch.randn(h, f, dtype=getattr(torch, dtype))
    for _ in range(3):
        a @ b
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ b
        count += 1
    return float(2 * rows * h * f * count / (time.perf_counter() - start) / 1e9)


def parameters_of(model: Path) -> int:
    """Return the number of parameters in the model's files, from their headers."""
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(
            math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__"
        )
    return total


def ours(args: argparse.Namespace, run_dir: Path) -> dict[str, float]:
    real = []
    if args.real:
        real = [
            "data.generate=null",
            "data.as_chat=false",
            "data.system_prompt=null",
            "flow.dynamic_sampling=false",
            "rollout.reward={name: arithmetic}",
            "controls=[]",
        ]
    command = [
        sys.executable,
        "-m",
        "megatron_async_rl",
        "train",
        str(REAL_EXAMPLE if args.real else EXAMPLE),
        f"run.dir={run_dir}",
        f"run.steps={args.steps}",
        f"model.dtype={args.dtype}",
        *real,
        f"model.path={args.model}",
        f"data.train={args.train}",
        f"flow.prompts_per_step={args.prompts}",
        f"flow.group_size={GROUP}",
        "eval=null",
        f"rollout.sampling.max_tokens={args.max_tokens}",
        f"policy.optimizer.lr={LEARNING_RATE}",
        "checkpoint.every=0",
        *args.overrides,
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    counted = rows[args.warm :]
    seconds = rows[-1]["time"] - rows[args.warm - 1]["time"]
    tokens = sum(row["tokens/trained"] for row in counted)
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "tokens_per_step": tokens / len(counted),
        "train_s": sum(row["time/train_s"] for row in counted) / len(counted),
        "wait_batch_s": sum(row["time/wait_batch_s"] for row in counted) / len(counted),
        "publish_s": sum(row["time/publish_s"] for row in counted) / len(counted),
    }


def prompt_tokens(args: argparse.Namespace) -> float:
    """Return the mean number of tokens of a prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [
        json.loads(line)["prompt"] for line in args.train.read_text(encoding="utf-8").splitlines()
    ]
    return sum(len(ids) for ids in tokenizer(texts)["input_ids"]) / len(texts)


def trl(args: argparse.Namespace) -> dict[str, float]:
    """Runs in a process of its own (`--trl-only`), so that neither side's libraries or threads
    disturb the other's."""
    command = [sys.executable, __file__, "--trl-only"]
    for name in ("model", "train", "prompts", "max_tokens", "steps", "warm", "dtype"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    out = subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ).stdout
    result: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return result


def trl_here(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    lines = [json.loads(line) for line in args.train.read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list(
        [{"prompt": line["prompt"], "answer": line["answer"]} for line in lines]
    )
    counts: list[int] = []
    ends: list[float] = []

    def exact(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        counts.append(sum(len(ids) for ids in completion_ids))
        return [
            float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)
        ]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=args.prompts * GROUP,
            num_generations=GROUP,
            max_completion_length=args.max_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            max_steps=args.steps,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                args.model, dtype=getattr(torch, args.dtype)
            ),
            reward_funcs=exact,
            args=settings,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[Clock()],
        )
        trainer.train()
    seconds, counted = ends[-1] - ends[args.warm - 1], args.steps - args.warm
    tokens = sum(counts[args.warm : args.steps])
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / counted,
        "tokens_per_step": tokens / counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "arithmetic_sft" / "hf")
    parser.add_argument("--train", type=Path, default=GENERATED / "train.jsonl")
    parser.add_argument("--constant-reward", type=float, choices=list(SHAPES), metavar="MILLIONS")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, help="a step; of each 8 responses; default: 64 or 4")
    parser.add_argument("--max-tokens", type=int, help="default: 6, the demo's")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--trl-only", action="store_true")
    parser.add_argument("overrides", nargs="*", help="dotted overrides for our side")
    args = parser.parse_args()
    if args.trl_only:
        print(json.dumps(trl_here(args)))
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if args.constant_reward:
            write_constant_reward(scratch, args.constant_reward)
            args.model, args.train = scratch / "model", scratch / "train.jsonl"
            args.max_tokens = args.max_tokens or 128
        if args.real:
            write_chat_prompts(scratch / "train.jsonl")
            args.model, args.train = SMOLLM2, scratch / "train.jsonl"
            args.max_tokens, args.prompts = args.max_tokens or 48, args.prompts or 4
        args.model, args.train = args.model.resolve(), args.train.resolve()
        args.max_tokens = args.max_tokens or 6
        args.prompts = args.prompts or 64
        us = ours(args, scratch / "run")
        peer = trl(args)
        shared = args.prompts * prompt_tokens(args)
        flops = 8 * parameters_of(args.model)
        for side in (us, peer):
            tokens = side["tokens_per_step"] + shared
            side["gflops"] = flops * tokens / side["step_s"] / 1e9
        peak = peak_gflops(args.model, args.dtype)
    ratio = us["tokens_per_s"] / peer["tokens_per_s"]
    figures = {"megatron_async_rl": us, "trl": peer, "ratio": ratio, "cores": os.cpu_count()}
    print(json.dumps({**figures, "peak": peak}, indent=2))


if __name__ == "__main__":
    main()
