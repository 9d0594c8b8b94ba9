"""vLLM's engine arguments, sampling parameters and grammars for the run's configuration."""

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
from megatron_async_rl.rollout.vllm.plugin import BACKEND, WORKER_EXTENSION

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Import path of the executor. On a CPU, vLLM replaces the short name `uni` by a second process."""


def sampling_parameters(sampling: SamplingConfig, eos_ids: Sequence[int]) -> SamplingParams:
    """Return the parameters of responses with this sampling; each response sets its own seed and
    token limit."""
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
        # 0: the log-prob of the sampled token alone, which is all that training needs.
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # A deep copy for each request, and vLLM's copy of that, would cost more than the rest of
        # the request. Attributes of a shallow copy are replaced, never changed in place.
        skip_clone=True,
    )


def structured(sampling: SamplingConfig) -> StructuredOutputsParams | None:
    if not isinstance(sampling, EvalSampling):
        return None
    if sampling.json_schema is not None:
        return StructuredOutputsParams(json=dict(sampling.json_schema))
    return StructuredOutputsParams(regex=sampling.regex) if sampling.regex is not None else None


def engine_arguments(spec: EngineSpec) -> AsyncEngineArgs:
    """Return vLLM's engine arguments. Raises UserError for a name in `rollout.vllm` that this
    machine's vLLM lacks: the preflight checked only rank 0's machine."""
    rollout = spec.rollout
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    unknown = [unknown_option(name, known) for name in rollout.vllm if name not in known]
    if unknown:
        raise UserError("", unknown)
    return AsyncEngineArgs(
        model=str(spec.model_path),
        hf_overrides=_head(spec.dtype),
        # The policy's own files. "auto" would take params.json and consolidated.safetensors, which
        # Mistral's directories also contain.
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
        # After temperature and top-p: log-probs of the distribution that was really sampled.
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        enable_return_routed_experts=spec.records_experts,
        # The run records its own metrics.
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=WORKER_EXTENSION,
        **(_cpu_arguments(spec) if spec.device == "cpu" else _gpu_arguments(spec)),
        **rollout.vllm,
    )


def _head(dtype: str) -> dict[str, str]:
    """Overrides of the model's config.json for logits in float32.

    vLLM computes logits in the model's dtype and the trainer in float32. Between 16 and 32
    neighbouring bfloat16 numbers are 0.125 apart, which would be the error of a log-prob. On CUDA
    the product of bfloat16 operands is accumulated and returned in float32; on a CPU vLLM converts
    both operands first. Tied and quantised models are included: the output layer is never
    quantised.
    """
    return {} if dtype == "float32" else {"head_dtype": "float32"}


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        # Per worker; the configured size is that of the whole engine.
        "kv_cache_memory_bytes": int(spec.rollout.kv_cache_gib * 2**30) // spec.rollout.workers,
        # Compiling takes up to 40 s of the first start and was not measurably faster in steady
        # state.
        "enforce_eager": True,
        # For a prompt in two chunks vLLM draws a token and discards it, and a seeded CPU generator
        # cannot be rewound: it raises. Without chunks vLLM reads a prompt, or a preempted request's
        # prompt and response, in one step, and ensures that it fits.
        "enable_chunked_prefill": False,
        # With one worker the model runs in the engine core. vLLM's default on a CPU is a second
        # process behind a queue, which starts later and costs time at every step.
        "distributed_executor_backend": "mp" if spec.rollout.workers > 1 else UNIPROC,
    }


def _gpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": spec.rollout.gpu_memory_utilization,
        "enable_sleep_mode": spec.rollout.placement == "colocated",
        # In a Ray actor vLLM might choose Ray for its workers, which would outlive the engine.
        "distributed_executor_backend": "mp" if spec.rollout.workers > 1 else "uni",
    }


def require_grammar(model_path: str, sampling: SamplingConfig, config: Any) -> None:
    """Raise ValueError for a grammar of `sampling` that an engine would refuse in a request.
    `config`: vLLM's `structured_outputs_config`, if rollout.vllm has one."""
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers import get_tokenizer

    given = StructuredOutputsConfig(**config) if isinstance(config, dict) else config
    SamplingParams(structured_outputs=structured(sampling))._validate_structured_outputs(
        SimpleNamespace(is_diffusion=False),
        given or StructuredOutputsConfig(),
        get_tokenizer(model_path),
    )
