"""Settings of low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from megatron_async_rl.config.settings_model import Strict

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
ROW_PARALLEL: tuple[Target, ...] = ("o_proj", "down_proj")
"""Targets whose columns tensor parallelism divides; of the others it divides the rows."""


def _distinct(targets: Sequence[Target]) -> Sequence[Target]:
    if not targets:
        raise ValueError(
            "policy.lora.targets is empty: name at least one, or set policy.lora: null"
        )
    twice = sorted({target for target in targets if targets.count(target) > 1})
    if twice:
        raise ValueError(f"policy.lora.targets names {', '.join(twice)} twice; name each once")
    return targets


class LoraConfig(Strict):
    """Low-rank adapters (arXiv 2106.09685): the model's own weights stay as they are, and a product
    of two small matrices is trained for each target W, y = W x + alpha / rank B A x. Null, the
    default, trains every weight. Adapters want about ten times the learning rate."""

    rank: PositiveInt = 16
    """Rows of A and columns of B; at most the smaller side of the smallest target."""
    alpha: PositiveFloat = 32.0
    """The product's factor is alpha / rank."""
    targets: Annotated[tuple[Target, ...], AfterValidator(_distinct)] = (*ATTENTION, *MLP)
    """Matrices of every layer, as Hugging Face's files and PEFT name them, each with an A and a B
    of its own. Experts of a mixture have no adapters: name q_proj, k_proj, v_proj and o_proj
    there."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout rate of an adapter's inputs in training passes. Log-probs of proximal and
    reference policies and the engines' weights have none, so above 0 the ratio pi / pi_prox is
    not 1 at a batch's first step and the policy gradient is that of another model than the
    sampling one; masks differ between parallel layouts."""
    merge: Literal["model", "float32"] = "model"
    """Precision of the merged weights that engines load. `model`: model.dtype; in bfloat16
    rounding loses nearly all of a product that is still small. `float32`: the exact sum, in
    engines that compute in float32 (twice the bytes per weight and cached token, and slower)."""
