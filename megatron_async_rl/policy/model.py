"""The policy as Megatron chunks, loaded from a Hugging Face directory. The last stage returns
hidden states.

Invariants:
- no chunk ever computes logits: log-probs need the hidden states and the output weight
  (`logprobs.py`);
- the output weight is the module's own parameter (the embedding's, if it is tied on one stage), so
  gradients reach it through autograd, and Megatron's accumulation hooks and its all-reduce of tied
  embeddings work unchanged;
- a model from `build_model` is loaded completely: every parameter came from the directory, and
  every tensor of the directory was used; only the value head and adapters are not in it;
- no other module uses Megatron's GPTModel, which its later releases deprecate: a replacement only
  changes `HiddenStateModel`;
- the value head belongs to the last stage's module, so that gradient buffers, optimizer and
  checkpoints contain it, while Hugging Face's files and the engines do not (`parameters.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import get_te_version
from torch import Tensor, nn

from megatron_async_rl.config.objective import ValueConfig
from megatron_async_rl.config.policy import Fp8Config, LoraConfig, PolicyConfig
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy.bridge import PolicyBridge
from megatron_async_rl.policy.families import FAMILIES, RequestedLayers, choose_layers, unsupported
from megatron_async_rl.policy.fp8 import megatron_settings, refuse_device
from megatron_async_rl.policy.layers import LAYERS
from megatron_async_rl.policy.lora import freeze_base, initialise
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import load_hf, local_entries

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OVERRIDDEN = {"megatron.core.models.gpt.gpt_model.GPTModel": ("_preprocess", "_postprocess")}
"""Class -> methods that `HiddenStateModel` replaces and that Megatron does not promise to keep."""

# Megatron 0.19's only warning there is that the class is deprecated, once per process, which a user
# of this package cannot change.
logging.getLogger(GPTModel.__module__).setLevel(logging.ERROR)

log = logging.getLogger(__name__)


class UnsupportedModel(ValueError):
    """The model directory describes a model that this trainer would not compute exactly."""

    def __init__(self, path: Path, key: str, value: Any, supported: str) -> None:
        super().__init__(f"{path / 'config.json'}: {key} is {value!r}; supported: {supported}")


class ValueHead(nn.Module):
    """One linear output on the hidden states from which log-probs are computed: V_t = w . h_t + b,
    with h_t after the final norm, at the position that predicts token t; w and b start at zero.

    Arithmetic is float32, and so are the weights that the optimizer updates. The parameters have
    the model's dtype, like all in one gradient buffer and one optimizer. Hidden states are whole on
    every tensor-parallel rank (sequence parallelism gathers them first), so every rank computes the
    same values and the same gradient. The parameters are copies that count once, and nothing is
    summed over those ranks.

    config: Megatron's TransformerConfig. detach: the head learns from the hidden states without
    changing them.
    """

    def __init__(self, config: Any, *, detach: bool, device: torch.device) -> None:
        super().__init__()
        self.detach = detach
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N] float32, with gradient."""
        source = hidden.detach() if self.detach else hidden
        return nn.functional.linear(source.float(), self.weight.float(), self.bias.float())[:, 0]


class HiddenStateModel(GPTModel):
    """Megatron's GPTModel without its logits.

    Call as `chunk(input_ids, position_ids, attention_mask=None, packed_seq_params=...,
    padding_mask=...)`. packed_seq_params: null if a row is one sample. padding_mask: for a mixture
    of experts, true for tokens that its routers must not count. Under context parallelism rows are
    this rank's part of them. The last stage returns the hidden states after the final norm, [rows,
    length, hidden], whole on every tensor-parallel rank; other stages return the tensor that
    Megatron's schedule sends to the next stage. value_head: on the last stage, if the objective has
    one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.value_head: ValueHead | None = None
        self.embedding_scale = 1.0
        # Otherwise Megatron would cut the angles over context-parallel ranks in every pass.
        self.rotary_pos_emb.cp_group = None

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        if padding_mask is not None and self.config.sequence_parallel and not self.pre_process:
            # Megatron only does this on the first stage.
            group = self.pg_collection.tp
            padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
        hidden, rotary, *rest = super()._preprocess(
            input_ids,
            position_ids,
            *args,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
            **kwargs,
        )
        if self.pre_process and self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.pre_process and torch.is_grad_enabled() and not hidden.requires_grad:
            # The embedding is frozen, and a recomputed layer whose input needs no gradient would
            # give its adapters none.
            hidden.requires_grad_()
        if packed_seq_params is not None or self.config.context_parallel_size > 1:
            # Megatron's angles are those of 0, 1, ... up to the longest sample. Select here, once
            # for all layers, those of each token of the row. Padded rows have the same positions.
            rotary = rotary.index_select(0, position_ids[0])
        return (hidden, rotary, *rest)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # The backward pass of log-probs already sums over tensor-parallel ranks, so each rank's
            # slice of the gradient is whole.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.transpose(0, 1)

    def output_weight(self) -> Tensor:
        """Parameter [padded vocabulary / tp, hidden] that makes logits; last stage only."""
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        assert isinstance(weight, Tensor)
        return weight


@dataclass(frozen=True, eq=False)
class PolicyModel:
    """The model of this rank. chunks: its part as unwrapped Megatron modules, one per virtual
    pipeline stage.

    config: Megatron's TransformerConfig, shared by the chunks. vocab_size: rows of the true
    vocabulary; the last tensor-parallel rank's output weight may have padding rows beyond it.
    source: the model directory from which it was made. lora: null if all weights are trained.
    """

    chunks: list[HiddenStateModel]
    bridge: PolicyBridge
    config: Any
    vocab_size: int
    source: Path
    lora: LoraConfig | None = None

    def output_weight(self) -> Tensor:
        """Return [padded vocabulary / tp, hidden] of the last stage. Raises RuntimeError on other
        stages."""
        if not self.bridge.layout.is_last_stage:
            raise RuntimeError(
                f"pipeline stage {self.bridge.layout.pp_rank} has no output weight; only the last"
                " stage has"
            )
        return self.chunks[-1].output_weight()

    @property
    def value_head(self) -> ValueHead | None:
        """The last stage's value head; None on other stages, and if the objective has none."""
        return self.chunks[-1].value_head


def assemble_model(
    model: ModelConfig, policy: PolicyConfig, layout: Layout, value: ValueConfig | None = None
) -> PolicyModel:
    """Return this rank's stage of the model of `model.path`, in `model.dtype` on the layout's
    device, with undefined weights.

    Raises UnsupportedModel, and UserError for layers that are not available.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Megatron's layers fork this generator during construction; nothing in the policy draws from it
    # afterwards.
    model_parallel_cuda_manual_seed(0)
    bridge = build_bridge(
        model.path,
        dtype=DTYPES[model.dtype],
        layout=layout,
        sequence_parallel=policy.parallel.sequence,
        packed=policy.sequence == "packed",
        recompute=policy.recompute,
        lora=policy.lora,
        layers=policy.layers,
        fp8=policy.fp8,
    )
    chunks = []
    for index in range(layout.virtual_stages):
        vp_stage = index if layout.virtual_stages > 1 else None
        chunk = HiddenStateModel(
            config=bridge.config,
            transformer_layer_spec=bridge.layer_spec(vp_stage),
            pre_process=layout.is_first_chunk(index),
            post_process=layout.is_last_chunk(index),
            vp_stage=vp_stage,
            **bridge.gpt_arguments(),
        )
        bridge.set_rotation(chunk.rotary_pos_emb)
        chunk.embedding_scale = bridge.embedding_scale
        bridge.layers.finish(chunk)
        if value is not None and layout.is_last_chunk(index):
            chunk.value_head = ValueHead(bridge.config, detach=value.detach, device=layout.device)
        # Only the router is made on the CPU.
        chunk.to(layout.device)
        if policy.lora is not None:
            freeze_base(chunk)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return PolicyModel(
        chunks=chunks,
        bridge=bridge,
        config=bridge.config,
        vocab_size=bridge.vocab_size,
        source=model.path,
        lora=policy.lora,
    )


def build_model(
    model: ModelConfig,
    policy: PolicyConfig,
    layout: Layout,
    value: ValueConfig | None = None,
    *,
    seed: int = 0,
) -> PolicyModel:
    """Return the result of `assemble_model`, loaded from `model.path`; `seed` determines the
    initial adapters. Collective over pipeline ranks.

    Raises UnsupportedModel, or WeightsDoNotFit if directory and model differ in any tensor.
    """
    if policy.sequence == "packed" and policy.not_shared and layout.rank == 0:
        log.info("each response computes its own prompt %s", policy.not_shared)
    built = assemble_model(model, policy, layout, value)
    load_hf(built.bridge, built.chunks, model.path)
    if policy.lora is not None:
        entries = local_entries(built.bridge, built.chunks, adapters=True)
        initialise(entries, built.chunks, built.bridge.layout, seed)
    return built


RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    # Megatron's default for the recomputed modules is the core attention.
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Megatron's settings for each value of policy.recompute."""


def build_bridge(
    model_path: Path,
    *,
    dtype: torch.dtype,
    layout: Layout,
    sequence_parallel: bool,
    packed: bool,
    recompute: str,
    lora: LoraConfig | None,
    layers: RequestedLayers,
    fp8: Fp8Config | None,
) -> PolicyBridge:
    """Return the bridge of the model in `model_path`. packed: for packed rows. lora: layers get
    adapters. layers, fp8: `policy.layers`, `policy.fp8`. Raises UnsupportedModel, UserError for
    layers that are not available, or OSError/ValueError for an unreadable config."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(str(model_path), local_files_only=True)
    refuse_unsupported(model_path, hf_config)
    bridge: PolicyBridge = FAMILIES[hf_config.model_type].bridge()(
        hf_config, dtype=dtype, make_vocab_size_divisible_by=layout.tp_size
    )
    chosen = choose_layers(
        layers,
        model_type=hf_config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        device=layout.device_type,
        lora=lora is not None,
        engine=str(get_te_version()) if HAVE_TE else None,
        fp8=fp8 is not None,
    )
    refuse_device(fp8, layout)
    if layout.device_type == "cuda":
        refuse_mixed(layout.gathered(chosen.family))
    if chosen.why and layout.device_type == "cuda" and layout.rank == 0:
        log.warning("policy.layers: %s takes %s (%s)", layers, chosen.family, chosen.why)
    bridge.layers = LAYERS[chosen.family]
    bridge.set_extra_args(
        sequence_parallel=sequence_parallel and layout.tp_size > 1,
        **RECOMPUTE[recompute],
        **bridge.layers.settings(dtype, layout.device_type, lora=lora is not None),
        **megatron_settings(fp8),
    )
    bridge.layout = layout
    bridge.packed = packed
    bridge.lora = lora
    bridge.tied = bool(hf_config.tie_word_embeddings)
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = math.ceil(hf_config.vocab_size / layout.tp_size) * layout.tp_size
    return bridge


def refuse_mixed(families: Sequence[str]) -> None:
    """Raise UserError if ranks have chosen different layers: their parameters would have different
    orders, and gradients of different parameters would be added up. families: by rank."""
    if len(set(families)) > 1:
        without = [str(rank) for rank, family in enumerate(families) if family == "local"]
        what = (
            f"ranks {', '.join(without)} cannot use Transformer Engine's layers, and the others do"
        )
        fix = "install the same version on every machine, or set local"
        raise UserError.of("policy.layers", what, fix)


def refuse_unsupported(path: Path, hf_config: Any) -> None:
    """Raise UnsupportedModel with the key of config.json that rules the model out."""
    found = unsupported(hf_config.to_dict())
    if found is not None:
        raise UnsupportedModel(path, found.key, found.value, found.supported)
