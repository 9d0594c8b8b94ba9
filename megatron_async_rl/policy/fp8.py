"""FP8 GEMMs: Megatron's settings for a recipe, FP8 weights, and the state of delayed scaling.

Megatron enters Transformer Engine's recipe around each layer (for `delayed` around all of them),
and around the construction of layers with FP8 weights; Transformer Engine does the rounding.

Invariants:
- an FP8 weight is a function of Adam's float32 weights (optimizer.py), so copies and checkpoints
  contain those, and no other module depends on the layout of its bytes and scales;
- other weights are rounded in every forward pass, from their present values: no rounded copy in
  Transformer Engine survives a change of the weights (`disable_parameter_transpose_cache`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_recipe, is_float8tensor
from torch import Tensor, nn

from megatron_async_rl.config.policy import Fp8Config, lacking, needed, version_of
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.parallel import Layout

HISTORY = 1024
"""Number of passes whose largest value scales a tensor under `delayed`; Transformer Engine's
own."""
DIRECTIONS = ("scaling_fwd", "scaling_bwd")
"""Keys of a Transformer Engine module's `fp8_meta` that contain the state of delayed scaling."""


def megatron_settings(fp8: Fp8Config | None) -> dict[str, Any]:
    """Return changes to Megatron's TransformerConfig."""
    if fp8 is None:
        return {}
    kept = fp8.first_last_layers_bf16
    return {
        "fp8": fp8.facts.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.primary_weights,
        "fp8_amax_history_len": HISTORY,
        "fp8_amax_compute_algo": "max",
        # Within one replica of the model, whose ranks run the same micro-batches: replicas may run
        # different numbers of them (opob.py), and would wait for one another.
        "tp_only_amax_red": True,
        "first_last_layers_bf16": kept > 0,
        "num_layers_at_start_in_bf16": kept,
        "num_layers_at_end_in_bf16": kept,
    }


def refuse_device(fp8: Fp8Config | None, layout: Layout) -> None:
    """Raise UserError if this rank's GPU, or the CUDA version of its torch, lacks the recipe."""
    if fp8 is None:
        return
    capability = (
        torch.cuda.get_device_capability(layout.device) if layout.device_type == "cuda" else None
    )
    why = lacking(fp8.recipe, capability, version_of(torch.version.cuda))
    if why:
        raise UserError.of(
            "policy.fp8.recipe",
            f"rank {layout.rank}: {why}",
            "choose a recipe that it has (`mar doctor` lists them), or GPUs of"
            f" {needed(fp8.recipe)}",
        )


def is_quantised(parameter: Tensor) -> bool:
    """Return True for an FP8 weight."""
    return bool(is_float8tensor(parameter))


def plain(parameter: Tensor) -> Tensor:
    """Return the weight's values in the model's dtype, without gradient: the parameter itself, or
    for FP8 weights a dequantised tensor with the numbers that a GEMM reads."""
    values: Tensor = parameter.detach()
    return values.dequantize() if is_quantised(parameter) else values


def delayed_state(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the state of delayed scaling from earlier passes, on the CPU, by chunk, module and
    direction: the scales of each module that has scaled a tensor, and the largest values of its
    newest passes. Empty under other recipes, which have no state."""
    return {
        f"{name}.{direction}.{part}": getattr(meta[direction], part).detach().cpu().clone()
        for name, module in _scaling_modules(chunks)
        for meta in [module.fp8_meta]
        for direction in DIRECTIONS
        if hasattr(meta.get(direction), "amax_history")
        for part in ("scale", "amax_history")
    }


def restore_delayed_state(
    chunks: Sequence[nn.Module], state: Mapping[str, Tensor], config: Any
) -> None:
    """Restore the result of `delayed_state`, also in modules that have scaled nothing yet. config:
    Megatron's. Raises KeyError if the state belongs to other modules."""
    if not state:
        return
    modules, recipe = dict(_scaling_modules(chunks)), get_fp8_recipe(config)
    for name in sorted({key.rsplit(".", 2)[0] for key in state}):
        module = modules[name]
        # Otherwise Transformer Engine sets both at the first forward pass, and discards the state.
        module.fp8_meta["recipe"] = recipe
        module.fp8_meta.setdefault("num_gemms", getattr(module, "num_gemms", 1))
        module.init_fp8_meta_tensors(recipe)
        for direction in DIRECTIONS:
            for part in ("scale", "amax_history"):
                getattr(module.fp8_meta[direction], part).copy_(state[f"{name}.{direction}.{part}"])


def drop_workspaces(chunks: Sequence[nn.Module]) -> None:
    """Drop the FP8 weights that modules of Transformer Engine keep from one micro-batch to the
    next; a step computes them again."""
    for chunk in chunks:
        for module in chunk.modules():
            workspaces = getattr(module, "_fp8_workspaces", None)
            if workspaces is not None:
                # This is device memory that engines need while the policy's state is released.
                workspaces.clear()


def _scaling_modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if hasattr(module, "fp8_meta"):
                yield f"{index}.{name}", module
