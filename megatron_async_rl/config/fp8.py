"""Settings of FP8 GEMMs, and the requirements of each recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt

from megatron_async_rl.config.settings_model import Strict

Recipe = Literal["tensorwise", "blockwise", "delayed", "mxfp8"]


@dataclass(frozen=True)
class RecipeFacts:
    """Demands of Transformer Engine on a device and on shapes.

    capability: CUDA's compute capability, at least. cuda: the version torch is built for, at least.
    sizes: both sides of every weight on a rank are multiples of it; rows: the rows (tokens) of a
    product on a rank; gathered: the same where sequence parallelism gathers them in 8 bits.
    `format`: Megatron's name of the numbers, E4M3 throughout or with E5M2 for gradients.
    primary: why there are no primary weights, if so.
    """

    capability: tuple[int, int]
    cuda: tuple[int, int]
    sizes: int
    rows: int
    gathered: int
    format: Literal["e4m3", "hybrid"]
    primary: str = ""


RECIPES: Mapping[Recipe, RecipeFacts] = {
    "tensorwise": RecipeFacts((8, 9), (12, 1), 16, 16, 16, "hybrid"),
    "blockwise": RecipeFacts((9, 0), (12, 9), 128, 16, 128, "e4m3"),
    "delayed": RecipeFacts(
        (8, 9),
        (12, 1),
        16,
        16,
        16,
        "hybrid",
        primary="a weight's bytes then depend on the scales of earlier steps, not on the float32"
        " weights alone, from which copies and checkpoints make them again",
    ),
    "mxfp8": RecipeFacts(
        (10, 0),
        (12, 8),
        32,
        32,
        32,
        "e4m3",
        primary="Megatron gathers such weights through the gradient buffers, which controls read",
    ),
}
NO_MXFP8_FROM = (12, 0)
"""Compute capability from which Transformer Engine 2.12 lacks some of mxfp8's products."""


class Fp8Config(Strict):
    """FP8 GEMMs of the layers, with Transformer Engine's layers: inputs, weights and gradients are
    rounded, and sums are not. Embedding, output layer, router, norms and attention between its
    projections stay in bfloat16, and gradients and optimizer state are what they are without it.
    Null, the default, computes everything in bfloat16."""

    recipe: Recipe
    """Scaling recipe. `tensorwise`: one scale per tensor, from its largest value. `blockwise`:
    one scale per 1 x 128 activations and 128 x 128 weights; Hopper and later, CUDA 12.9.
    `delayed`: one scale per tensor, from the largest value of its last 1024 passes and at first
    1, so that the first steps are coarse and log-probs computed twice differ. `mxfp8`: one scale
    per 32 numbers; Blackwell."""
    primary_weights: bool = False
    """Keep the layers' weights in FP8 without a bfloat16 copy; Adam updates the float32 weights
    as usual. Needs distributed_optimizer, and `tensorwise` or `blockwise`."""
    first_last_layers_bf16: NonNegativeInt = 0
    """Layers at each end of the model that compute in bfloat16; not with `delayed`."""

    @property
    def facts(self) -> RecipeFacts:
        return RECIPES[self.recipe]


def lacking(
    recipe: Recipe, capability: tuple[int, int] | None, cuda: tuple[int, int] | None
) -> str:
    """The lack of a device of that compute capability, under that CUDA, for the recipe, as text;
    empty if there is none. Null: not known, and not held against it."""
    facts = RECIPES[recipe]
    if capability is not None and capability < facts.capability:
        return (
            f"{recipe} needs compute capability {_dotted(facts.capability)}, and the GPU has"
            f" {_dotted(capability)}"
        )
    if recipe == "mxfp8" and capability is not None and capability >= NO_MXFP8_FROM:
        return f"Transformer Engine has no mxfp8 for compute capability {_dotted(capability)} yet"
    if cuda is not None and cuda < facts.cuda:
        return f"{recipe} needs CUDA {_dotted(facts.cuda)}, and torch is built for {_dotted(cuda)}"
    return ""


def needed(recipe: Recipe) -> str:
    """Text on the recipe's demands on a device."""
    facts = RECIPES[recipe]
    above = f" and below {_dotted(NO_MXFP8_FROM)}" if recipe == "mxfp8" else ""
    return (
        f"compute capability {_dotted(facts.capability)} or higher{above}, and CUDA"
        f" {_dotted(facts.cuda)} or later"
    )


def version_of(text: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version of CUDA or a compute capability; null for anything else."""
    major, _, rest = (text or "").partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def row_multiple(fp8: Fp8Config | None, *, sequence: bool) -> int:
    """Tokens that a rank's rows are a multiple of, whatever else divides a sequence. `sequence`:
    sequence parallelism does."""
    if fp8 is None:
        return 1
    return fp8.facts.gathered if sequence else fp8.facts.rows
