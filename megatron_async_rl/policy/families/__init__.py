"""The model families, one file each: `FAMILY`, facts as plain data, and the class that maps the
model to Megatron. Nothing else lists the families.

Invariant: a family's file loads no torch before its bridge is called, so that `mar plan` and `mar
doctor` read the facts without it. The class is therefore made inside a function.
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
"""Rules that several families share, as `supported.EXPECTED`."""


@dataclass(frozen=True)
class Family:
    """A value of `model_type` in config.json.

    models, biases: as text. window: which layers have `sliding_window`, where it is used. mixture:
    of experts, in every layer. tied: what a missing `tie_word_embeddings` means. layer_norms,
    head_norms: of each layer, over the hidden state and over a head. float32_norms: they compute in
    float32 whatever the model's dtype. ropes: the values of rope_type. only: the family's own
    rules, as `EXPECTED`. local: why its layers cannot be Transformer Engine's, if so.
    window_switch: `sliding_window` is used only with `use_sliding_window`. first_layers_full:
    `max_window_layers` is the number of layers before the first window. bridge: makes the class
    that maps the model to Megatron, and its weights to their names.
    """

    model_type: str
    architecture: str
    models: str
    bridge: Callable[[], Any]
    window: Window = "none"
    biases: str = "none"
    mixture: bool = False
    tied: bool = False
    layer_norms: int = 2
    head_norms: int = 0
    float32_norms: bool = False
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    local: str = ""
    window_switch: bool = False
    first_layers_full: bool = False


def found_families() -> dict[str, Family]:
    """Return the family of each file in this folder, by its `model_type`."""
    modules = [
        importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)
    ]
    return {module.FAMILY.model_type: module.FAMILY for module in modules}


# Last, because the files import Family from here.
FAMILIES: Mapping[str, Family] = found_families()
