"""Arguments of vLLM's engine that a user may not set in `rollout.vllm`: those that another key
sets, and those that would break what the system does with an engine. All others are vLLM's affair.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron_async_rl.config.problem import Problem

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
    "enable_sleep_mode": "rollout.placement (colocated has it on)",
    "skip_tokenizer_init": "rollout.sampling (texts to stop at or to avoid need the tokenizer)",
    "override_generation_config": "rollout.sampling",
    "generation_config": "rollout.sampling",
    "enable_fault_tolerance": "rollout.restarts_per_hour",
    "fault_tolerance_config": "rollout.restarts_per_hour",
}
"""Argument -> our key for it."""

_WEIGHTS = "the code that loads new weights and takes their digests does not support it"
_MODEL = "policy and engines must have the same model, that of the files in model.path"
_COPIES = (
    "vLLM's data parallelism puts engines behind its own coordinator: set rollout.engines, which"
    " are filled, updated and restarted one by one"
)
_ONE_MACHINE = (
    "an engine's workers are processes of one machine, and this is set for them; rollout.tensor and"
    " rollout.pipeline set their number, and rollout.engines may be on any machine"
)
_CONTEXT = (
    "weights are updated over workers of rollout.tensor and rollout.pipeline: raise one of these"
)
_EXPERTS = (
    "enable_expert_parallel divides whole experts over the workers of rollout.tensor, and a"
    " weight update expects each of them there: they must not move or be duplicated"
)
_LOGPROBS = "the log-probs of sampled tokens must be those of the policy's own distribution"
_PREFIX = "it is on, and no response begins with cached keys and values of older weights"
_CACHE = "a weight update could not clear keys and values of old weights that are stored elsewhere"
# Only online quantisation: every weight update passes through the same loader again.
QUANTISED_AS_LOADED = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
"""Values of `quantization` with which vLLM quantises all linear layers, and experts, as it loads
the policy's weights, at the start and in each update. Of the first its CPU kernels know, too."""
_QUANTISED = (
    "new weights arrive in the policy's format; set `quantization` to one of"
    f" {', '.join(QUANTISED_AS_LOADED)}, with which vLLM quantises them as it loads them"
)

# Patterns, so that new arguments of a family are refused with vLLM's next version.
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
        "log-probs and seeds are not tested where a step draws several tokens",
    ),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "kv_offloading_*"), _CACHE),
    **dict.fromkeys(
        ("scheduler_cls", "disable_log_stats", "max_num_queued_*"),
        "the run's own scheduler fills the engines and watches vLLM's",
    ),
}
"""Pattern of argument -> why the system depends on what it is now."""

_CPU = (
    "a prompt that is processed in two parts draws a token from a seeded generator, which cannot"
    " be rewound"
)
BREAKS_ON_CPU: Mapping[str, str] = {
    "enforce_eager": "it has no effect: models are not compiled there",
    "enable_chunked_prefill": _CPU,
    "long_prefill_token_threshold*": _CPU,
    "max_num_scheduled_tokens": _CPU,
}

_PLAIN = {"Any": Any, "Literal": Literal}
"""Names in the types of arguments, besides Python's own."""


def refused_options(
    options: Mapping[str, Any], device: Literal["cpu", "cuda"] | None = None
) -> Iterator[tuple[str, str]]:
    """(name, why not) of each that may not be set so on `device`; null: on any."""
    for name, value in options.items():
        # vLLM's command line writes arguments with hyphens.
        argument = name.replace("-", "_")
        if argument in OWNED:
            yield name, f"another key sets it: {OWNED[argument]}"
        elif reason := _matching(BREAKS, argument):
            yield name, reason
        # The schema has no device yet and passes null; the plan checks again with the real one.
        elif device == "cpu" and (reason := _matching(BREAKS_ON_CPU, argument)):
            yield name, f"on a CPU {reason}"
        elif argument == "quantization" and value is not None:
            if value not in QUANTISED_AS_LOADED:
                yield name, f"{value} is for weights that were quantised before: {_QUANTISED}"
            elif device == "cpu" and value != QUANTISED_AS_LOADED[0]:
                yield name, f"on a CPU vLLM has no kernels for {value}: {QUANTISED_AS_LOADED[0]}"


def unknown_option(name: str, known: Collection[str]) -> Problem:
    """The problem of a name that vLLM, `known`, does not have."""
    # Sorted: sets have no order, and messages must not change between runs.
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    fix = "remove it, or look its name up in vLLM's `AsyncEngineArgs`"
    if near:
        # Do not propose an argument that would be refused next.
        refused = dict(refused_options({near[0]: None})).get(near[0])
        fix = (
            f"remove it; nor may {near[0]} be set here: {refused}"
            if refused
            else (f"did you mean {near[0]}?")
        )
    return Problem(
        key=f"rollout.vllm.{name}",
        what="is not an argument of the installed vLLM's engine",
        fix=fix,
    )


def _matching(reasons: Mapping[str, str], argument: str) -> str | None:
    # Case counts: `fnmatch` would ignore it on some systems.
    return next((why for pattern, why in reasons.items() if fnmatchcase(argument, pattern)), None)


def wrong_value(name: str, value: Any, wanted: str) -> Problem | None:
    """Problem of a value that vLLM would not accept. wanted: the argument's type in vLLM's source.
    If that names a type of vLLM's own, or the value is null, its engine reports the problem at its
    start."""
    if value is None:  # the default of some that are declared without it
        return None
    try:
        (kind,) = get_type_hints(
            # Evaluates the annotation as text, without importing vLLM's modules.
            type("_", (), {"__annotations__": {name: wanted}}),
            _PLAIN,
        ).values()
        # Lax validation, as vLLM itself converts numbers and text.
        TypeAdapter(kind).validate_python(value)
    except NameError:
        return None
    except ValidationError:
        return Problem(
            key=f"rollout.vllm.{name}",
            what=f"is {value!r}, and the installed vLLM's engine takes {wanted}",
            fix="set it to one of that type, or remove it",
        )
    return None


def vllm_arguments() -> dict[str, str]:
    """Names of vLLM's `AsyncEngineArgs` and their types. Empty where vLLM is not installed, or
    keeps them elsewhere: the engine's start then checks them."""
    return {
        field.target.id: ast.unparse(field.annotation).strip("'")
        # Read from source: importing vLLM takes seconds and may initialise a device.
        for node in _vllm_source("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def cpu_head_sizes() -> tuple[int, ...]:
    """Sizes of an attention head for which the installed vLLM has CPU kernels. Empty where vLLM is
    not installed, or lists them elsewhere. vLLM itself compares them only at the first request."""
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
        # Only literals; a computed list is left to vLLM's own check.
        return tuple(ast.literal_eval(lists[0])) if lists else ()
    except ValueError:
        return ()


def _vllm_source(file: str) -> list[ast.stmt]:
    """Statements of a file of the installed vLLM, read from its source: an import takes seconds."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        source = Path(folder) / file
        if source.is_file():
            return ast.parse(source.read_text(encoding="utf-8")).body
    return []
