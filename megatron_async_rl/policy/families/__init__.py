"""Model families, one file each: `FAMILY` contains facts as plain data and the class that maps the
model to Megatron. A new file adds a family; no other file lists them.

Invariant: a family's file does not import torch before its bridge is called, so that `mar plan` and
`mar doctor` read the facts without torch. A function therefore defines the class.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Window = Literal["none", "every layer", "chosen layers"]

NO_BIAS = {"attention_bias": (False, "false: the family has no biases")}
QWEN3_BIAS = {
    "attention_bias": (
        False,
        "false: with it the output projection has a bias, which vLLM leaves out",
    )
}
"""Rules that several families share, in the format of `supported.EXPECTED`."""


@dataclass(frozen=True)
class Family:
    """Facts about the models with one `model_type` in config.json."""

    model_type: str
    architecture: str
    models: str
    """Names of the models, as text."""
    bridge: Callable[[], Any]
    """Returns the class that maps the model and the names of its weights to Megatron."""
    window: Window = "none"
    """Layers in which a configured `sliding_window` applies."""
    biases: str = "none"
    """Projections with biases, as text."""
    mixture: bool = False
    """True for a mixture of experts in every layer."""
    tied: bool = False
    """Default of a missing `tie_word_embeddings`."""
    layer_norms: int = 2
    """Norms per layer over the hidden state."""
    head_norms: int = 0
    """Norms per layer over a head."""
    float32_norms: bool = False
    """True if norms compute in float32 for every dtype of the model."""
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Supported values of `rope_type`."""
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Rules of this family, in the format of `supported.EXPECTED`."""
    local: str = ""
    """Reason why Transformer Engine cannot compute its layers; empty if it can."""
    window_switch: bool = False
    """True if `sliding_window` applies only with `use_sliding_window`."""
    first_layers_full: bool = False
    """True if `max_window_layers` is the number of layers before the first window."""


def found_families() -> dict[str, Family]:
    """Return `model_type` -> family, for each file of this folder."""
    modules = [
        importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)
    ]
    return {module.FAMILY.model_type: module.FAMILY for module in modules}


# Last, because the files import Family from here.
FAMILIES: Mapping[str, Family] = found_families()
