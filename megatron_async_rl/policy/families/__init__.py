"""Model families that this trainer computes exactly and vLLM serves with the same results, the
settings that rule a model out, and the layers that compute it. All decisions use config.json as
plain data.

Each family is one file: `FAMILY` contains facts as plain data and the class that maps the model to
Megatron. A new file adds a family; no other file lists them.

Loads no torch, so that `mar plan` refuses the same models as the ranks, by this table, and `mar
doctor --models` prints it.

Invariants:
- a family's file does not import torch before its bridge is called: a function therefore defines
  the class;
- a setting is supported if the policy, transformers and vLLM give it the same meaning; if vLLM
  would serve another model, the setting is refused with this reason;
- a family is identified by both `model_type`, which transformers reads, and `architectures`, which
  vLLM reads.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_async_rl.config.policy import version_of
from megatron_async_rl.config.problem import UserError

Window = Literal["none", "every layer", "chosen layers"]
LayerFamily = Literal["local", "transformer_engine"]
RequestedLayers = Literal["auto", "local", "transformer_engine"]
EXPECTED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "silu"),
    "mlp_bias": (False, "false"),
    "decoder_sparse_step": (1, "1: experts in every layer"),
    "mlp_only_layers": ([], "none: experts in every layer"),
    "quantization_config": (None, "none: unquantised weights"),
    "dual_chunk_attention_config": (None, "none: attention over the whole sequence"),
}
"""Key -> (the only value, which a missing key also means; as text), for every family."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Values in `layer_types`."""
DEFAULT_FULL_LAYERS = 28
"""Value of a missing `max_window_layers`."""
REFUSED: Mapping[str, str] = {
    "gemma2": "scores and logits are capped by a tanh",
    "gemma3": "a vision tower; the text models are gemma3_text",
    "deepseek_v3": "attention through a latent vector, and experts after some dense layers",
    "glm4_moe": "experts after some dense layers, chosen with a bias that no gradient moves",
    "gpt_oss": "experts with biases and a clamped gate, and an attention sink in every head",
    "llama4": "experts in some layers, and attention in chunks",
    "mistral3": "a vision tower; the text models are mistral",
    "mixtral": "its router's softmax and expert names are not mapped",
    "phi3": "fused query, key, value and gate matrices in its files",
    "qwen2_moe": "shared experts",
    "qwen3_next": "linear attention in most layers",
}
"""model_type -> features that the policy lacks. Any other type is refused without a reason."""
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

NO_BIAS = {"attention_bias": (False, "false: the family has no biases")}
QWEN3_BIAS = {
    "attention_bias": (
        False,
        "false: with it the output projection has a bias, which vLLM leaves out",
    )
}
"""Rules that several families share, in the format of `EXPECTED`."""


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
    """Rules of this family, in the format of `EXPECTED`."""
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


@dataclass(frozen=True)
class Unsupported:
    """A key of config.json that rules the model out. `supported`: as text."""

    key: str
    value: Any
    supported: str


def unsupported(config: Mapping[str, Any]) -> Unsupported | None:
    """Return the first key that rules the model out. `config`: as transformers 4 or 5 writes it."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        why = REFUSED.get(kind) if isinstance(kind, str) else None
        return Unsupported(
            "model_type", kind, ", ".join(FAMILIES) + (f" ({kind}: {why})" if why else "")
        )
    named = config.get("architectures")
    if named != [family.architecture]:
        expected = f"[{family.architecture}], with model_type {kind}"
        return Unsupported("architectures", named, expected)
    for key, (value, supported) in {**EXPECTED, **family.only}.items():
        found = config.get(key, value)
        if found != value and not (found is None and not value):
            return Unsupported(key, found, supported)
    return _window(config, family) or _rope(config, family)


def used_window(config: Mapping[str, Any]) -> Any:
    """Return `sliding_window`, null if it is not used: some families need `use_sliding_window`."""
    family = FAMILIES.get(str(config.get("model_type")))
    used = config.get("use_sliding_window", family is None or not family.window_switch)
    return config.get("sliding_window") if used else None


def _window(config: Mapping[str, Any], family: Family) -> Unsupported | None:
    """Return the key that gives some layers another window than in vLLM."""
    window = used_window(config)
    if window is not None and not _positive(window):
        return Unsupported("sliding_window", window, "null or a positive number of tokens")

    kinds = config.get("layer_types")
    if family.window == "chosen layers":
        unknown = sorted(set(kinds or ()) - {FULL, SLIDING})
        if unknown:
            return Unsupported("layer_types", unknown, f"{FULL} and {SLIDING}")
        layers = config.get("num_hidden_layers")
        if kinds is not None and len(kinds) != layers:
            return Unsupported("layer_types", kinds, f"one for each of {layers} layers")
        if window is None and (kinds is None or SLIDING in kinds):
            return Unsupported("sliding_window", None, "a positive number of tokens")
        return None

    expected = (
        "a window in every layer, or in none with use_sliding_window false: vLLM supports nothing"
        " between them here"
    )
    if kinds is not None:
        alike = set(kinds) == {FULL if window is None else SLIDING}
        return None if alike else Unsupported("layer_types", sorted(set(kinds)), expected)
    if window is not None and family.first_layers_full:
        full = config.get("max_window_layers", DEFAULT_FULL_LAYERS)
        if full != 0:
            return Unsupported("max_window_layers", full, f"0: {expected}")
    return None


def _rope(config: Mapping[str, Any], family: Family) -> Unsupported | None:
    section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(section) or {}
    parts = (rope, *rope.values()) if isinstance(rope, Mapping) and FULL in rope else (rope,)
    if not all(isinstance(part, Mapping) for part in parts):
        return Unsupported(section, rope, "a mapping")
    found = None
    for kind in (FULL, SLIDING) if FULL in rope else ():
        found = found or _rope_of(f"{section}.{kind}", rope.get(kind) or {}, config, family)
    return found if FULL in rope else _rope_of(section, rope, config, family)


def _rope_of(
    section: str, rope: Mapping[str, Any], config: Mapping[str, Any], family: Family
) -> Unsupported | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.ropes:
        return Unsupported(f"{section}.rope_type", kind, ", ".join(family.ropes))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        return Unsupported("partial_rotary_factor", share, "1.0")
    for key in ROPES[kind]:
        if not _positive(rope.get(key)):
            expected = f"a positive number, with rope_type {kind}"
            return Unsupported(f"{section}.{key}", rope.get(key), expected)
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


OLDEST, NEWEST = (2, 11), (2, 12)
"""Releases of Transformer Engine, (major, minor), that were checked with this Megatron-Core and
cuBLAS. Later ones can be imported, but fail in a GEMM because a function of cuBLAS is missing."""
PINNED = "2.12.0"
"""Release in requirements/gpu.txt."""


APEX_WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""Apex's extension for weight gradients. PyPI's `apex` is another project without a module of that
name."""


@dataclass(frozen=True)
class ChosenLayers:
    """A family of layers (layers.py). why: reason why Transformer Engine's are not used although
    the config permits them."""

    family: LayerFamily
    why: str = ""


def engine_obstacle(version: str | None) -> str:
    """Return a text on what an installation of Transformer Engine lacks; empty if nothing. version:
    null if it is not installed."""
    if version is None:
        return f"it is not installed; {PINNED} is the tested version"
    found = version_of(version)
    if found is not None and OLDEST <= found <= NEWEST:
        return ""
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    return (
        f"its version is {version}, and {oldest} and {newest} are the ones checked with this"
        f" Megatron-Core and cuBLAS; install transformer-engine=={PINNED} with its parts"
    )


def choose_layers(
    requested: RequestedLayers,
    *,
    model_type: str,
    dtype: str,
    device: str,
    lora: bool,
    engine: str | None,
    fp8: bool = False,
) -> ChosenLayers:
    """Return the layers of a model under `policy.layers`. engine: Transformer Engine's version,
    null if it is not installed. fp8: True if GEMMs are in FP8. Raises UserError if Transformer
    Engine's layers are needed and not available."""
    local, unfit = FAMILIES[model_type].local, engine_obstacle(engine)
    obstacles = (
        (device != "cuda", "it needs CUDA, and the policy is on the CPU"),
        (bool(unfit), unfit),
        (dtype != "bfloat16", f"it rounds products of {dtype} to TF32; set model.dtype: bfloat16"),
        (lora, "adapters (policy.lora) need Megatron's own layers"),
        (bool(local), f"{model_type} has {local}, which it does not"),
    )
    why = next((text for found, text in obstacles if found), "")
    if requested == "transformer_engine" and why:
        what = f"transformer_engine is not available: {why}"
        raise UserError.of("policy.layers", what, "set it to auto, or to local")
    if fp8 and (requested == "local" or why):
        what = f"FP8 GEMMs need Transformer Engine: {why or 'policy.layers is local'}"
        raise UserError.of("policy.fp8", what, "set it to null, or remove the obstacle")
    if requested == "local" or why:
        return ChosenLayers("local", f"Transformer Engine: {why}" if requested == "auto" else "")
    return ChosenLayers("transformer_engine")


# Last, because the files import Family from here.
FAMILIES: Mapping[str, Family] = found_families()
