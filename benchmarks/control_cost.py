"""Cost of each gradient control: time as a share of the optimizer step, bytes moved against a
memory copy, peak extra memory.

One random model, its gradient put back before every step, so that nothing but the optimizer step is
timed; the same gradient every time is fully aligned with the one before, so that GAC takes its
dearest path (it projects every step). Turns alternate between the step without controls and the
step with them.

    share the control's own time over that of the optimizer step without controls, medians extra
    what else the step takes longer with a control, over the same; below 0 where the
                 control has measured what the step would have measured without it
    copies       the control's own time over the time of one copy of the gradient (read once,
                 written once)
    floor        the control's own time over that of the transfers that it cannot do without, each
                 by the fastest of torch's operations that makes it: `read` is a dot product of two
                 gradients, `rewritten` a multiplication in place, `copied` a copy, from and to
                 memory. A copy reads what it writes over, too, so that one costs three transfers
    moved        bytes that the control's tensor operations read and write, the cache's included,
                 over the bytes of that copy. Of GAC's, 6 gradient-sized reads and writes go to
                 memory, two in the sweep of the products and four in that of the projection
    step_moved   the same of the whole optimizer step, above that of the step without controls: 0.5
                 is one gradient read again, or one written

With --memory instead, nothing is timed and every large allocation is a mapping of its own, so that
resident memory is exact; over the gradient's bytes:

    kept         what a control keeps from step to step
    peak         the process's peak during a step, above that of the step without controls, what is
                 kept included
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_async_rl.config.controls import ControlConfig
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import gradients_of
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.policy.step import StepFacts

CONTROLS = (
    "gac",
    "{name: gac, reference_dtype: bf16}",
    "{name: gac, reference_dtype: fp8}",
    "{name: gac, reference_offload: cpu}",
    "matched_norm",
    "{name: matched_lr, target_update_norm: 0.01}",
    "momentum_by_alignment",
    "ess_lr",
)
SMALL = 4096
"""Tensors below this many bytes are not counted as moved: they stay in the cache."""

FLOORS = {
    "gac": {"read": 2.0, "rewritten": 2.0},
    "{name: gac, reference_dtype: bf16}": {"read": 1.5, "rewritten": 1.5},
    "{name: gac, reference_dtype: fp8}": {"read": 1.26, "rewritten": 1.26},
    "{name: gac, reference_offload: cpu}": {"read": 2.0, "rewritten": 2.0},
    "matched_norm": {"read": 2.0, "copied": 1.0},
    "momentum_by_alignment": {"read": 2.0},
}
"""Gradients' bytes that a control reads; reads and writes in the same place; copies over others."""


class BytesMoved(TorchDispatchMode):  # type: ignore[misc]
    """Adds up what operations read and write; views move nothing, and an operand written in place
    counts again."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        viewing = not function.is_view and schema.name.split("::")[1] not in (
            "detach",
            "alias",
            "_unsafe_view",
        )
        if viewing:
            for leaf in [*tree_leaves(args), *tree_leaves(kwargs or {}), *tree_leaves(result)]:
                if isinstance(leaf, torch.Tensor) and leaf.nbytes >= SMALL:
                    self.total += leaf.nbytes
        return result


def save_model(directory: Path, hidden: int, layers: int, vocabulary: int) -> int:
    """A random Qwen3; returns its parameters."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=3 * hidden,
        head_dim=hidden // 8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def peak_of(step: Callable[[dict[str, Any]], float], controls: dict[str, Any]) -> int:
    """Bytes: the peak resident memory of one step above what was resident at its start; the median
    of three."""
    peaks = []
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = _status("VmRSS")
        step(controls)
        peaks.append(_status("VmHWM") - before)
    return sorted(peaks)[len(peaks) // 2]


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--controls",
        nargs="*",
        default=list(CONTROLS),
        help="each as it would stand in the config's list",
    )
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    if args.memory and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        )
    # As a trainer rank on the CPU runs: torchrun gives each one thread.
    torch.set_num_threads(1)
    layout = initialise(ParallelConfig(), device.install("cpu"), timeout_s=300)
    with tempfile.TemporaryDirectory() as scratch:
        parameters = save_model(Path(scratch), args.hidden, args.layers, args.vocabulary)
        policy = Policy.build(
            ModelConfig(path=Path(scratch), dtype="float32"),
            PolicyConfig(optimizer=OptimizerConfig(lr=1e-6, clip_grad=1.0)),
            ObjectiveConfig(),
            (),
            layout=layout,
            temperature=1.0,
            total_steps=10**6,
        )
    for chunk in policy.schedule.chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.normal_(std=1e-3)
    original = [
        buffer.grad_data.clone() for chunk in policy.schedule.chunks for buffer in chunk.buffers
    ]
    gradient_bytes = sum(tensor.nbytes for tensor in original)
    facts = StepFacts(
        loss=1.0, log_weights=np.random.default_rng(0).normal(size=512) * 0.3, lag_max=1
    )

    def put_back() -> None:
        live = [buffer.grad_data for chunk in policy.schedule.chunks for buffer in chunk.buffers]
        for tensor, saved in zip(live, original, strict=True):
            tensor.copy_(saved)

    def timed_step(controls: dict[str, Any]) -> float:
        put_back()
        policy.step.controls = controls
        started = time.process_time()
        policy.step.take(facts)
        return time.process_time() - started

    others = [tensor.clone() for tensor in original]

    def transfers() -> dict[str, float]:
        """Seconds of one gradient read, rewritten and copied."""
        seconds = dict.fromkeys(("read", "rewritten", "copied"), 0.0)
        for mine, other in zip(original, others, strict=True):
            for name, run in (
                ("read", lambda a=mine, b=other: torch.dot(a.view(-1), b.view(-1))),
                ("rewritten", lambda b=other: b.mul_(1.0)),
                ("copied", lambda a=mine, b=other: b.copy_(a)),
            ):
                started = time.process_time()
                run()
                seconds[name] += time.process_time() - started
        # The dot product reads two.
        seconds["read"] /= 2
        return seconds

    copy_s = statistics.median(transfers()["copied"] for _ in range(args.steps))
    print(
        f"{parameters / 1e6:.1f} M parameters, gradient {gradient_bytes / 2**20:.0f} MiB,"
        f" copy {copy_s * 1e3:.1f} ms "
        f"({2 * gradient_bytes / copy_s / 2**30:.1f} GiB/s), {torch.get_num_threads()} thread(s)"
    )

    from megatron_async_rl.controls.decision import build_controls

    for _ in range(3):
        timed_step({})
    for text in args.controls if args.memory else ():
        plain = peak_of(timed_step, {})
        resident = _status("VmRSS")
        controls = build_controls(
            [TypeAdapter(ControlConfig).validate_python(yaml.safe_load(text))]
        )
        for _ in range(3):
            timed_step(controls)
        kept = _status("VmRSS") - resident
        peak = peak_of(timed_step, controls) + kept - plain
        row = {
            "control": text,
            "kept": round(kept / gradient_bytes, 2),
            "peak": round(peak / gradient_bytes, 2),
        }
        print(json.dumps(row), flush=True)
        del controls
    for text in () if args.memory else args.controls:
        setting = TypeAdapter(ControlConfig).validate_python(yaml.safe_load(text))
        controls = build_controls([setting])
        applied: list[float] = []
        moved: list[float] = []
        (control,) = controls.values()
        plain_apply = control.apply
        counting = False

        def apply(
            step: Any, plain_apply: Any = plain_apply, applied: Any = applied, moved: Any = moved
        ) -> Any:
            if counting:  # noqa: B023 - the flag as it is now
                with BytesMoved() as mode:
                    decision = plain_apply(step)
                moved.append(mode.total / (2 * gradient_bytes))
                return decision
            started = time.process_time()
            decision = plain_apply(step)
            applied.append(time.process_time() - started)
            return decision

        control.apply = apply  # type: ignore[method-assign]
        for _ in range(3):
            timed_step({})
            timed_step(controls)
        applied.clear()
        without, with_control, floors, copies = [], [], [], []
        for _ in range(args.steps):
            seconds = transfers()
            copies.append(seconds["copied"])
            floors.append(sum(n * seconds[name] for name, n in FLOORS.get(text, {}).items()))
            without.append(timed_step({}))
            with_control.append(timed_step(controls))
        counting = True
        timed_step(controls)
        counting = False
        totals = []
        for chosen in ({}, controls):
            with BytesMoved() as mode:
                timed_step(chosen)
            totals.append(mode.total)
        base = statistics.median(without)
        row = {
            "control": text,
            "step_ms": round(base * 1e3, 1),
            "share": round(statistics.median(applied) / base, 3),
            "beside": round(
                (statistics.median(with_control) - statistics.median(applied) - base) / base, 3
            ),
            "apply_ms": round(statistics.median(applied) * 1e3, 2),
            "copies": round(statistics.median(applied) / statistics.median(copies), 2),
            "floor": round(statistics.median(applied) / statistics.median(floors), 2)
            if text in FLOORS
            else None,
            "moved": round(statistics.median(moved), 2),
            "step_moved": round((totals[1] - totals[0]) / (2 * gradient_bytes), 2),
        }
        print(json.dumps(row), flush=True)
        del controls, control
    assert gradients_of(policy.optimizer, layout).shards
    layout.shutdown()


if __name__ == "__main__":
    main()
