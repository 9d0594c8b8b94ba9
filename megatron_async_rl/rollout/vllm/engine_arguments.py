"""Engine arguments, sampling parameters and grammars of vLLM for the run's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from megatron_async_rl.config.engine_options import unknown_option
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.sampling import EvalSampling, SamplingConfig
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.cpu_sampling import NORMS
from megatron_async_rl.rollout.vllm.plugin import BACKEND, WORKER_EXTENSION

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Import path of the executor without worker processes. On a CPU, vLLM replaces the short name
`uni` with an executor that starts a second process."""


def sampling_parameters(sampling: SamplingConfig, eos_ids: Sequence[int]) -> SamplingParams:
    """Return the parameters that responses with this sampling have in common. The copy of each
    response gets its own seed and token limit."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bad_words=list(sampling.bad_words),
        structured_outputs=structured(sampling),
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(dict.fromkeys((*eos_ids, *sampling.stop_token_ids))),
        detokenize=bool(sampling.stop),
        # 0: only the log-prob of the sampled token, because training needs no others.
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Shallow copies: a deep copy per request, and vLLM's copy of it, would take longer than the
        # rest of the request. Attributes of a copy are replaced, never changed in place.
        skip_clone=True,
    )


def structured(sampling: SamplingConfig) -> StructuredOutputsParams | None:
    """Return the grammar of responses to a held-out set; None if there is none."""
    if not isinstance(sampling, EvalSampling):
        return None
    if sampling.json_schema is not None:
        return StructuredOutputsParams(json=dict(sampling.json_schema))
    return StructuredOutputsParams(regex=sampling.regex) if sampling.regex is not None else None


def engine_arguments(spec: EngineSpec) -> AsyncEngineArgs:
    """Return vLLM's engine arguments. Raises UserError for a name in `rollout.vllm` that vLLM on
    this machine lacks, because the preflight checked only rank 0's machine."""
    rollout = spec.rollout
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    unknown = [unknown_option(name, known) for name in rollout.vllm if name not in known]
    if unknown:
        raise UserError("", unknown)
    options = dict(rollout.vllm)
    if spec.device == "cpu":
        options["block_size"] = rollout.cache_block
    return AsyncEngineArgs(
        model=str(spec.model_path),
        hf_overrides=_head(spec.dtype),
        # The files that the policy reads. "auto" would read params.json and
        # consolidated.safetensors, which directories of Mistral's models also contain.
        config_format="hf",
        load_format="hf",
        tokenizer_mode="hf",
        dtype=spec.dtype,
        seed=spec.seed,
        max_model_len=rollout.max_context,
        max_num_seqs=rollout.max_concurrent,
        tensor_parallel_size=rollout.tensor,
        pipeline_parallel_size=rollout.pipeline,
        skip_tokenizer_init=not spec.needs_tokenizer,
        # After temperature and top-p, because log-probs must belong to the sampled distribution.
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        enable_return_routed_experts=spec.records_experts,
        # The run records its own metrics.
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=WORKER_EXTENSION,
        **(_cpu_arguments(spec) if spec.device == "cpu" else _gpu_arguments(spec)),
        **options,
    )


def _head(dtype: str) -> dict[str, str]:
    """Return overrides of the model's config.json that make vLLM compute logits in float32.

    The trainer computes logits in float32, vLLM by default in the model's dtype. Neighbouring
    bfloat16 numbers between 16 and 32 differ by 0.125, so rounding a logit would change a log-prob
    as much. The product of bfloat16 operands is accumulated and returned in float32, on a CPU by
    `cpu_sampling.speed_up_sampling`. The override also applies to tied models and to
    quantized models, because vLLM does not quantize the output layer.
    """
    return {} if dtype == "float32" else {"head_dtype": "float32"}


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        # Per worker: the configured size is for the whole engine.
        "kv_cache_memory_bytes": int(spec.rollout.kv_cache_gib * 2**30) // spec.rollout.workers,
        # Compilation takes up to 40 s at the first start, and measurements showed no gain
        # afterwards.
        "enforce_eager": True,
        # vLLM's default is several operations of torch in place of each kernel.
        "ir_op_priority": {"rms_norm": [NORMS], "fused_add_rms_norm": [NORMS]},
        # After the first chunk of a prompt, vLLM draws a token and discards it; it then raises,
        # because a seeded CPU generator cannot be rewound. Without chunks, vLLM reads a prompt, or
        # the prompt and response of a preempted request, in one step, and ensures that it fits.
        "enable_chunked_prefill": False,
        # With one worker, the model runs in the engine core. vLLM's default on a CPU is a second
        # process behind a queue, which delays the start and every step.
        "distributed_executor_backend": "mp" if spec.rollout.workers > 1 else UNIPROC,
    }


def _gpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": spec.rollout.gpu_memory_utilization,
        "enable_sleep_mode": spec.rollout.placement == "colocated",
        # In a Ray actor, vLLM might start its workers with Ray, and they would outlive the engine.
        "distributed_executor_backend": "mp" if spec.rollout.workers > 1 else "uni",
    }


def require_grammar(model_path: str, sampling: SamplingConfig, config: Any) -> None:
    """Raise ValueError for a grammar of `sampling` that vLLM would refuse in a request. `config`:
    value of `rollout.vllm.structured_outputs_config`, or None."""
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers import get_tokenizer

    parsed = StructuredOutputsConfig(**config) if isinstance(config, dict) else config
    SamplingParams(structured_outputs=structured(sampling))._validate_structured_outputs(
        SimpleNamespace(is_diffusion=False),
        parsed or StructuredOutputsConfig(),
        get_tokenizer(model_path),
    )
