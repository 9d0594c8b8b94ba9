"""Generated-and-trained response tokens per second: this system against TRL's GRPOTrainer, one
after the other.

Same model, prompts, group size, response limit, learning rate and number of cores. Both sides are
timed over their steady steps (start-up and the first `--warm` steps left out). TRL runs one process
with all cores; this system spreads two tensor-parallel trainer ranks and one engine over them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic_cpu.yaml"
PROMPTS, GROUP, LEARNING_RATE = 64, 8, 7e-4


def ours(
    model: Path, max_tokens: int, steps: int, warm: int, run_dir: Path, overrides: list[str]
) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "megatron_async_rl",
        "train",
        str(EXAMPLE),
        f"run.dir={run_dir}",
        f"run.steps={steps}",
    ]
    command += [
        f"model.path={model}",
        f"flow.prompts_per_step={PROMPTS}",
        f"flow.group_size={GROUP}",
        "eval=null",
    ]
    command += [
        f"rollout.sampling.max_tokens={max_tokens}",
        f"policy.optimizer.lr={LEARNING_RATE}",
        "checkpoint.every=0",
        *overrides,
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = rows[warm:]
    seconds = rows[-1]["time"] - rows[warm - 1]["time"]
    tokens = sum(row["tokens/trained"] for row in counted)
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "tokens_per_step": tokens / len(counted),
        "train_s": sum(row["time/train_s"] for row in counted) / len(counted),
        "wait_batch_s": sum(row["time/wait_batch_s"] for row in counted) / len(counted),
        "publish_s": sum(row["time/publish_s"] for row in counted) / len(counted),
    }


def trl(model: Path, max_tokens: int, steps: int, warm: int) -> dict[str, float]:
    """Runs in a process of its own (`--trl-only`), so that neither side's libraries or threads
    disturb the other's."""
    command = [sys.executable, __file__, "--trl-only", "--model", str(model)]
    command += ["--max-tokens", str(max_tokens), "--steps", str(steps), "--warm", str(warm)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    out = subprocess.run(
        command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
    result: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return result


def trl_here(model: Path, max_tokens: int, steps: int, warm: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    lines = [
        json.loads(line)
        for line in (EXAMPLE.parent / "arithmetic" / "generated" / "train.jsonl")
        .read_text()
        .splitlines()
    ]
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
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=max_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=exact,
            args=settings,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = ends[-1] - ends[warm - 1]
    tokens = sum(counts[warm:steps])
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / (steps - warm),
        "tokens_per_step": tokens / (steps - warm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "arithmetic_sft" / "hf")
    parser.add_argument("--max-tokens", type=int, default=6, help="6 is the demo's")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--trl-only", action="store_true")
    parser.add_argument("overrides", nargs="*", help="dotted overrides for our side")
    args = parser.parse_args()
    if args.trl_only:
        print(json.dumps(trl_here(args.model, args.max_tokens, args.steps, args.warm)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        us = ours(
            args.model.resolve(),
            args.max_tokens,
            args.steps,
            args.warm,
            Path(scratch) / "run",
            args.overrides,
        )
    peer = trl(args.model.resolve(), args.max_tokens, args.steps, args.warm)
    ratio = us["tokens_per_s"] / peer["tokens_per_s"]
    print(
        json.dumps(
            {"megatron_async_rl": us, "trl": peer, "ratio": ratio, "cores": os.cpu_count()},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
