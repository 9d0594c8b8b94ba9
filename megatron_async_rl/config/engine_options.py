"""Arguments of vLLM's engine that `rollout.vllm` refuses: those that another key sets, and those
that break an assumption of this system about its engines. All others are passed to vLLM.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron_async_rl.config.problem import Problem

CPU_CACHE_BLOCK = 32
"""Tokens per block of an engine's key-value cache on a CPU: the smallest size of vLLM's attention
there. Responses share only whole blocks of their prompt, so with vLLM's default, 128, each response
would compute a shorter prompt again."""

OWNED: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor",
    "pipeline_parallel_size": "rollout.pipeline",
    "max_model_len": "rollout.max_context",
    "max_num_seqs": "rollout.max_concurrent",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization (on the CPU rollout.kv_cache_gib)",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib (on a GPU rollout.gpu_memory_utilization)",
    "num_gpu_blocks_override": "rollout.gpu_memory_utilization (on the CPU rollout.kv_cache_gib)",
    "enable_return_routed_experts": "policy.routing_replay",
    "aux_output_config": "policy.routing_replay",
    "enable_sleep_mode": "rollout.placement (colocated enables it)",
    "skip_tokenizer_init": "rollout.sampling (stop and bad_words need the tokenizer)",
    "override_generation_config": "rollout.sampling",
    "generation_config": "rollout.sampling",
    "enable_fault_tolerance": "rollout.restarts_per_hour",
    "fault_tolerance_config": "rollout.restarts_per_hour",
}
"""Argument -> the key of this project that sets it."""

_WEIGHTS = "the code that loads new weights and computes their digests does not support it"
_MODEL = "policy and engines must have the same model, that of the files in model.path"
_COPIES = (
    "vLLM's data parallelism has its own coordinator, and this system fills, updates and restarts"
    " engines one by one: set rollout.engines instead"
)
_ONE_MACHINE = (
    "an engine's workers run on one machine, and this system sets the argument for them;"
    " rollout.tensor and rollout.pipeline set their number, and rollout.engines may be on any"
    " machine"
)
_CONTEXT = (
    "weight updates address the workers of rollout.tensor and rollout.pipeline: raise one of these"
)
_EXPERTS = (
    "enable_expert_parallel divides whole experts over the workers of rollout.tensor, and a"
    " weight update expects each expert on its worker: experts must not move or be duplicated"
)
_LOGPROBS = "the log-probs of sampled tokens must be those of the policy's own distribution"
_PREFIX = "it is always on, and a response reuses cached keys and values of one weight version only"
_CACHE = "a weight update could not clear keys and values of old weights that are stored elsewhere"
# Only online quantisation is allowed: every weight update uses the same loader again.
QUANTISED_AS_LOADED = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
"""Values of `quantization` for online quantisation: vLLM quantises all linear layers and experts
while it loads the policy's weights, at the start and in each update. vLLM has CPU kernels for the
first value only."""
_QUANTISED = (
    "new weights arrive in the policy's format; set `quantization` to one of"
    f" {', '.join(QUANTISED_AS_LOADED)}, so that vLLM quantises weights while it loads them"
)

# Patterns also refuse the arguments that a later vLLM adds to a family.
BREAKS: Mapping[str, str] = {
    **dict.fromkeys(("quantization_config", "allow_deprecated_quantization"), _QUANTISED),
    **dict.fromkeys(
        (
            "weight_transfer_config",
            "worker_extension_cls",
            "worker_cls",
            "*lora*",
            "cpu_offload_*",
            "offload_*",
            "sleep_*",
            "enable_cumem_allocator",
            "enable_nccl_comm_suspend",
            "model_impl",
            "linear_backend",
            "kernel_config",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        (
            "config_format",
            "load_format",
            "tokenizer_mode",
            "tokens_only",
            "model_weights",
            "model_class_overrides",
            "hf_overrides",
            "hf_config_path",
            "revision",
            "code_revision",
            "tokenizer_revision",
            "runner",
            "convert",
            "disable_sliding_window",
        ),
        _MODEL,
    ),
    "data_parallel_*": _COPIES,
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank", "master_*", "device_ids"),
        _ONE_MACHINE,
    ),
    **dict.fromkeys(
        (
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "dcp_*",
            "cp_kv_cache_interleave_size",
        ),
        _CONTEXT,
    ),
    **dict.fromkeys(
        (
            "enable_ep_weight_filter",
            "enable_eplb",
            "eplb_config",
            "expert_placement_strategy",
            "*elastic_ep*",
            "all2all_backend",
            "enable_dbo",
            "dbo_*",
            "ubatch_size",
        ),
        _EXPERTS,
    ),
    "enable_prefix_caching": _PREFIX,
    **dict.fromkeys(("logprobs_mode", "logits_processors", "watermark_config"), _LOGPROBS),
    **dict.fromkeys(
        ("speculative_config", "spec_*", "diffusion_config"),
        "log-probs and seeds are not tested with several tokens per step",
    ),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "kv_offloading_*"), _CACHE),
    **dict.fromkeys(
        ("scheduler_cls", "disable_log_stats", "max_num_queued_*"),
        "the run's scheduler fills the engines and reads the statistics of vLLM's scheduler",
    ),
}
"""Pattern of an argument -> the reason why the system depends on its present value."""

_CPU = (
    "a prompt that is processed in two parts draws an extra token from a seeded generator, which"
    " cannot be rewound"
)
BREAKS_ON_CPU: Mapping[str, str] = {
    "enforce_eager": "it has no effect: vLLM does not compile models there",
    "ir_op_priority": "the run selects vLLM's kernels of norms",
    "enable_chunked_prefill": _CPU,
    "long_prefill_token_threshold*": _CPU,
    "max_num_scheduled_tokens": _CPU,
}

_PLAIN = {"Any": Any, "Literal": Literal}
"""Names in argument types that are not Python built-ins."""


def refused_options(
    options: Mapping[str, Any], device: Literal["cpu", "cuda"] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each option that may not have its value on `device`; None stands for
    any device."""
    for name, value in options.items():
        # vLLM's command line writes arguments with hyphens.
        argument = name.replace("-", "_")
        if argument in OWNED:
            yield name, f"another key sets it: {OWNED[argument]}"
        elif reason := _matching(BREAKS, argument):
            yield name, reason
        # The schema does not know the device and passes None; the plan checks again with it.
        elif device == "cpu" and (reason := _matching(BREAKS_ON_CPU, argument)):
            yield name, f"on a CPU {reason}"
        elif device == "cpu" and argument == "block_size" and _splits_a_block(value):
            yield name, f"on a CPU vLLM reads blocks of a multiple of {CPU_CACHE_BLOCK} tokens"
        elif argument == "quantization" and value is not None:
            if value not in QUANTISED_AS_LOADED:
                yield name, f"{value} is for weights that are already quantised: {_QUANTISED}"
            elif device == "cpu" and value != QUANTISED_AS_LOADED[0]:
                yield (
                    name,
                    f"on a CPU vLLM has no kernels for {value}: set {QUANTISED_AS_LOADED[0]}",
                )


def whole_number(value: Any) -> int | None:
    """Return the number as which vLLM reads the value, which may be text; None for other values,
    which `wrong_value` reports."""
    try:
        return TypeAdapter(int).validate_python(value)
    except ValidationError:
        return None


def _splits_a_block(value: Any) -> bool:
    """Return True for a number that is not a multiple of the smallest block on a CPU."""
    size = whole_number(value)
    return size is not None and (size < 1 or size % CPU_CACHE_BLOCK != 0)


def unknown_option(name: str, known: Collection[str]) -> Problem:
    """Return the problem of a name that is not in `known`, vLLM's argument names."""
    # Sorted, because sets have no order and messages must not change between runs.
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    fix = "remove it, or find the right name in vLLM's `AsyncEngineArgs`"
    if near:
        # Do not propose an argument that would be refused next.
        refused = dict(refused_options({near[0]: None})).get(near[0])
        fix = (
            f"remove it; {near[0]} may not be set here either: {refused}"
            if refused
            else (f"did you mean {near[0]}?")
        )
    return Problem(
        key=f"rollout.vllm.{name}",
        what="is not an argument of the installed vLLM's engine",
        fix=fix,
    )


def _matching(reasons: Mapping[str, str], argument: str) -> str | None:
    # fnmatchcase respects case on all systems; `fnmatch` ignores it on some.
    return next((why for pattern, why in reasons.items() if fnmatchcase(argument, pattern)), None)


def wrong_value(name: str, value: Any, declared: str) -> Problem | None:
    """Return the problem of a value that vLLM would not accept, or None.

    `declared`: the argument's type in vLLM's source. If it names one of vLLM's own types, or if the
    value is None, this function returns None, and the engine reports a wrong value at its start.
    """
    if value is None:  # the default of some arguments whose declared type excludes None
        return None
    try:
        (kind,) = get_type_hints(
            # Evaluates the annotation as text, without importing vLLM's modules.
            type("_", (), {"__annotations__": {name: declared}}),
            _PLAIN,
        ).values()
        # Lax validation, as vLLM itself converts numbers and text.
        TypeAdapter(kind).validate_python(value)
    except NameError:
        return None
    except ValidationError:
        return Problem(
            key=f"rollout.vllm.{name}",
            what=f"is {value!r}, and the installed vLLM's engine takes {declared}",
            fix="set it to a value of that type, or remove it",
        )
    return None


def vllm_arguments() -> dict[str, str]:
    """Return the names and types of vLLM's `AsyncEngineArgs`. The result is empty if vLLM is not
    installed or defines them elsewhere; the engine then checks its arguments at its start."""
    return {
        field.target.id: ast.unparse(field.annotation).strip("'")
        # Parse the source: an import of vLLM takes seconds and may initialise a device.
        for node in _vllm_source("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def cpu_head_sizes() -> tuple[int, ...]:
    """Return the attention head sizes for which the installed vLLM has CPU kernels. The result is
    empty if vLLM is not installed or lists them elsewhere. vLLM itself checks the head size only at
    the first request."""
    lists = [
        statement.value
        for node in _vllm_source("v1/attention/backends/cpu_attn.py")
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "get_supported_head_sizes"
        for statement in method.body
        if isinstance(statement, ast.Return) and statement.value is not None
    ]
    try:
        # literal_eval accepts only literals; vLLM's own check covers a computed list.
        return tuple(ast.literal_eval(lists[0])) if lists else ()
    except ValueError:
        return ()


def _vllm_source(file: str) -> list[ast.stmt]:
    """Return the statements in a source file of the installed vLLM, without an import of vLLM."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        source = Path(folder) / file
        if source.is_file():
            return _statements(source)
    return []


@functools.cache
def _statements(source: Path) -> list[ast.stmt]:
    # Cached: vLLM's files are long, and a command that tries several plans reads them for each.
    return ast.parse(source.read_text(encoding="utf-8")).body
