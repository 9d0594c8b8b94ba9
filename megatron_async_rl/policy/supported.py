"""Which model configs this trainer computes exactly, decided on config.json as plain data. Loads no
torch, so that `mar plan` refuses what the ranks would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The constants that Megatron's rope scaling has built in."""

EXPECTED = {
    "hidden_act": ("silu", "silu"),
    "use_sliding_window": (False, "false (full attention)"),
    "mlp_bias": (False, "false"),
    "attention_bias": (False, "false (Qwen2's query, key and value biases need no key)"),
    "decoder_sparse_step": (1, "1: experts in every layer"),
    "mlp_only_layers": ([], "none: experts in every layer"),
    "quantization_config": (None, "none: unquantised weights"),
}
"""Key -> (the only value, which is also what a missing key means; in words)."""

ROPES = ("default", "linear", "llama3")


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
    for key, (value, supported) in EXPECTED.items():
        found = config.get(key, value)
        if found != value and not (found is None and not value):
            return Unsupported(key, found, supported)

    section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(section) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        return Unsupported(f"{section}.rope_type", kind, ", ".join(ROPES))

    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        return Unsupported("partial_rotary_factor", share, "1.0")

    if kind == "llama3":
        for key, constant in LLAMA3_ROPE.items():
            if rope.get(key) != constant:
                words = f"{constant} with rope_type llama3"
                return Unsupported(f"{section}.{key}", rope.get(key), words)
    return None
