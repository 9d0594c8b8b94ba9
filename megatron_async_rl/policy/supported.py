"""The model families that this trainer computes exactly and vLLM serves alike, and what rules a
model of one out: decided on config.json as plain data.

Loads no torch, so that `mar plan` refuses what the ranks would, from this table, and `mar doctor
--models` prints it.

Invariants:
- a setting is supported where the policy, transformers and vLLM give it one meaning; where vLLM
  would serve another model, the setting is refused and the reason says so;
- a family is what both `model_type`, which transformers goes by, and `architectures`, which vLLM
  goes by, name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Window = Literal["none", "all layers", "all layers or none"]


@dataclass(frozen=True)
class Family:
    """`models`: in words. window: which layers may have a sliding window; "all layers or none" where
    the family can name single ones. biases: in words. mixture: of experts. only: this family's own
    rules, as `EXPECTED`."""

    model_type: str
    architecture: str
    models: str
    window: Window = "none"
    biases: str = "none"
    mixture: bool = False
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


EXPECTED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "silu"),
    "mlp_bias": (False, "false"),
    "decoder_sparse_step": (1, "1: experts in every layer"),
    "mlp_only_layers": ([], "none: experts in every layer"),
    "quantization_config": (None, "none: unquantised weights"),
}
"""Key -> (the only value, which is also what a missing key means; in words), for every family."""
NO_BIAS = {"attention_bias": (False, "false: the family has no biases")}
QWEN2_BIAS = {"attention_bias": (False, "false: the family's biases need no key")}
QWEN3_BIAS = {
    "attention_bias": (
        False,
        "false: with it the output projection has a bias, which vLLM leaves out",
    )
}
FULL_ATTENTION = {"sliding_window": (None, "null: the family has full attention")}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            "Llama 2 and 3",
            biases="attention_bias: query, key, value, output",
            only=FULL_ATTENTION,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            "Qwen 2 and 2.5",
            window="all layers or none",
            biases="query, key, value",
            only=QWEN2_BIAS,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "Qwen 3",
            window="all layers or none",
            only=QWEN3_BIAS,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen 3 MoE",
            window="all layers",
            mixture=True,
            only=QWEN3_BIAS,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            "Mistral 7B, Nemo, Small (text)",
            window="all layers",
            only=NO_BIAS,
        ),
    )
}

DEFAULT_FULL_LAYERS = 28
"""What a missing `max_window_layers` means in Qwen's families: layers before the first window."""
ROPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""rope_type -> the positive numbers that it needs."""


@dataclass(frozen=True)
class Unsupported:
    """A key of config.json that rules the model out. `supported`: in words."""

    key: str
    value: Any
    supported: str

    def __str__(self) -> str:
        return f"{self.key} is {self.value!r}; supported: {self.supported}"


def unsupported(config: Mapping[str, Any]) -> Unsupported | None:
    """The first key that rules the model out. `config`: as transformers 4 or 5 writes it."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        return Unsupported("model_type", kind, ", ".join(FAMILIES))
    named = (config.get("architectures") or [None])[0]
    if named != family.architecture:
        return Unsupported(
            "architectures", named, f"{family.architecture}, as model_type {kind} says"
        )
    for key, (value, supported) in {**EXPECTED, **family.only}.items():
        found = config.get(key, value)
        if found != value and not (found is None and not value):
            return Unsupported(key, found, supported)
    return _window(config, family) or _rope(config)


def used_window(config: Mapping[str, Any]) -> Any:
    """`sliding_window`, null where it is not used: Qwen's families need `use_sliding_window`."""
    switched = str(config.get("model_type")).startswith("qwen")
    used = config.get("use_sliding_window", not switched)
    return config.get("sliding_window") if used else None


def _window(config: Mapping[str, Any], family: Family) -> Unsupported | None:
    """The key that gives some layers another window than vLLM would."""
    window = used_window(config)
    if window is not None and not _positive(window):
        return Unsupported("sliding_window", window, "null or a positive number of tokens")

    wanted = "full_attention" if window is None else "sliding_attention"
    words = (
        "a window in every layer, or in none with use_sliding_window false: vLLM knows nothing"
        " between them here"
    )
    kinds = config.get("layer_types")
    if kinds is not None:
        other = [kind for kind in kinds if kind != wanted]
        return Unsupported("layer_types", sorted(set(kinds)), words) if other else None
    if window is not None and family.window == "all layers or none":
        full = config.get("max_window_layers", DEFAULT_FULL_LAYERS)
        if full > 0:
            return Unsupported("max_window_layers", full, f"0: {words}")
    return None


def _rope(config: Mapping[str, Any]) -> Unsupported | None:
    section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(section) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        return Unsupported(f"{section}.rope_type", kind, ", ".join(ROPES))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        return Unsupported("partial_rotary_factor", share, "1.0")
    for key in ROPES[kind]:
        if not _positive(rope.get(key)):
            words = f"a positive number, with rope_type {kind}"
            return Unsupported(f"{section}.{key}", rope.get(key), words)
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
