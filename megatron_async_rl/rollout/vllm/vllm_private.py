"""All that we use of vLLM beyond its interface, in one place.

Classes and functions of vLLM are imported where they are used (the ones that load weights in
`reload.py` and `packed_layers.py`); attributes and methods that are vLLM's own affair are used here
alone and listed in `NAMES`. A test holds both against the installed vLLM, so that another version
reports what it lacks before an engine starts.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch

from megatron_async_rl.rollout.vllm.loaded import digests_of

NAMES = (
    "vllm.distributed.weight_transfer.WeightTransferEngineFactory._registry",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase.moe_kernel",
    "vllm.model_executor.layers.fused_moe.expert_map_manager.ExpertMapManager.map_global_to_local",
    "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts.expert_map_manager",
    "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo.restore_metadata",
    "vllm.parser.engine.adapters.ParserEngineToolAdapter._parser_engine",
    "vllm.parser.engine.parser_engine.ParserEngine.parser_engine_config",
    "vllm.sampling_params.SamplingParams._validate_structured_outputs",
    "vllm.v1.core.sched.scheduler.Scheduler._pause_state",
    "vllm.v1.core.sched.scheduler.Scheduler.get_request_counts",
    "vllm.v1.core.sched.scheduler.Scheduler.requests",
    "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
    "vllm.v1.engine.async_llm.AsyncLLM.engine_core",
    "vllm.v1.engine.async_llm.AsyncLLM.output_processor",
    "vllm.v1.engine.core.EngineCore.add_request",
    "vllm.v1.engine.core.EngineCore.collective_rpc",
    "vllm.v1.engine.core.EngineCore.get_weight_version",
    "vllm.v1.engine.core.EngineCore.preprocess_add_request",
    "vllm.v1.engine.core.EngineCore.resume_scheduler",
    "vllm.v1.engine.core.EngineCore.set_weight_version",
    "vllm.v1.engine.core.EngineCoreProc.input_queue",
    "vllm.v1.engine.core.EngineCoreProc.pause_scheduler",
    "vllm.v1.engine.core_client.AsyncMPClient.call_utility_async",
    "vllm.v1.engine.core_client.AsyncMPClient.pause_scheduler_async",
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer.num_output_tokens",
    "vllm.v1.engine.output_processor.OutputProcessor.request_states",
    "vllm.v1.engine.output_processor.RequestOutputCollector.output",
    "vllm.v1.engine.output_processor.RequestOutputCollector.put",
    "vllm.v1.engine.output_processor.RequestState.detokenizer",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor.collective_rpc",
    "vllm.v1.request.Request.block_hashes",
    "vllm.v1.request.Request.cache_salt",
    "vllm.v1.request.Request.num_computed_tokens",
    "vllm.v1.request.Request.num_preemptions",
    "vllm.v1.request.Request.update_block_hashes",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.logprobs_mode",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.use_fp64_gumbel",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.device",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.intermediate_tensors",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.max_num_tokens",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.model_config",
)
"""Module, class and name; attributes that only instances have included."""

DRAWS = 32
"""Numbers drawn from a request's generator at a time. One costs as much as thirty."""


def register_transfer_engine(backend: str, module: str, name: str) -> None:
    """Idempotent, which vLLM's own registration is not."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, module, name)


def on_output(collector: Any, call: Callable[[Any], None]) -> None:
    """Call `call` with vLLM's output for a request, or the exception that ended it, instead of
    keeping it for the waiting task. `collector`: the answer of `AsyncLLM.add_request`."""
    early, collector.output = collector.output, None
    collector.put = call
    if early is not None:
        call(early)


def tokens_so_far(llm: Any) -> int:
    """Tokens that vLLM has handed over of the responses it works on."""
    states = llm.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states)


async def pause_scheduler(llm: Any, *, clear_cache: bool) -> None:
    """`AsyncLLM.pause_generation` does just this, and then sleeps 20 ms to order outputs for its
    callers; we need no order."""
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


LOAD = "mar_load_bucket"
"""Name under which vLLM's engine process knows `_load_bucket`."""


async def load_between_steps(
    llm: Any,
    bucket: dict[str, Any],
    version: int,
    *,
    first: bool,
    last: bool,
    clear_cache: bool,
    resume_if: Mapping[str, str] | None,
) -> dict[str, str]:
    """Loads one bucket of an update to `version`, which `first` opens and `last` closes. Sampling
    stops before the first; after the last the weights are numbered, and sampling continues if their
    digests equal `resume_if` (None: it does not). All this is one call into vLLM's engine process:
    several would each wait for their turn there while nothing is sampled.

    Returns, with the last bucket, name -> digest of every tensor of the update as loaded.
    """
    digests: dict[str, str] = await llm.engine_core.call_utility_async(
        LOAD, bucket, version, first, last, clear_cache, resume_if
    )
    return digests


def take_loads_between_steps() -> None:
    """Let vLLM's engine process accept the calls of `load_between_steps`. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, LOAD, _load_bucket)


def _load_bucket(
    core: Any,
    bucket: dict[str, Any],
    version: int,
    first: bool,
    last: bool,
    clear_cache: bool,
    resume_if: Mapping[str, str] | None,
) -> dict[str, str] | Future[dict[str, str]]:
    """`load_between_steps`, in vLLM's engine process."""

    def load() -> dict[str, str]:
        answers = core.collective_rpc("load_weight_bucket", None, (bucket, version, first, last))
        digests = digests_of(answers)
        if last:
            core.set_weight_version(str(version))
            for request in core.scheduler.requests.values():
                _salt(request, str(version))
            if digests == resume_if:
                core.resume_scheduler()
        return digests

    paused = core.pause_scheduler("keep", clear_cache) if first else None
    if paused is None:
        return load()

    # A step is still running.
    loaded: Future[dict[str, str]] = Future()

    def on_pause(_: Any) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        try:
            paused.result()
            loaded.set_result(load())
        except Exception as error:  # noqa: BLE001 - vLLM hands it to the caller
            loaded.set_exception(error)
        # The engine would next wait for a request: it is to look for work first.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    paused.add_done_callback(on_pause)
    return loaded


def cache_by_version() -> None:
    """Salt the prefix cache of vLLM's engine process with the weight version, so that requests
    share keys and values only if the same weights computed them. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    preprocess, add = EngineCore.preprocess_add_request, EngineCore.add_request
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        request.cache_salt = self.get_weight_version()  # before it is hashed, in another thread
        return preprocess(self, request)

    @functools.wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _salt(request, self.get_weight_version())  # there may be others meanwhile
        return add(self, request, *args, **kwargs)

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.add_request = add_request


def _salt(request: Any, version: str) -> None:
    """One that has begun keeps its own: its keys and values are, in part, of those weights."""
    begun = request.num_computed_tokens or request.num_preemptions
    if not begun and request.cache_salt != version:
        request.cache_salt = version
        request.block_hashes.clear()
        request.update_block_hashes()


def after_each_step(call: Callable[[int, Any], None]) -> None:
    """Make vLLM's scheduler process call `call(tokens, scheduler)` after every step that
    computed tokens. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            call(scheduler_output.total_num_scheduled_tokens, self)
        return outputs

    Scheduler.update_from_output = update_from_output


def describe_scheduler(scheduler: Any) -> str:
    running, waiting = scheduler.get_request_counts()
    return f"{running} running, {waiting} waiting, {scheduler._pause_state.name.lower()}"


def draw_in_batches() -> None:
    """Draw random numbers for vLLM's CPU sampler in batches. If every request has its own seed,
    vLLM draws one number per token from each generator, in a Python loop that costs more than
    the rest of the sampler. A generator that draws several at a time returns the same numbers in
    the same order. Idempotent."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

    one_by_one = TopKTopPSampler.forward_cpu
    if hasattr(one_by_one, "__wrapped__"):
        return
    draws = SeededDraws()

    @functools.wraps(one_by_one)
    def forward_cpu(
        self: Any, logits: Any, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        all_seeded = len(generators) == len(logits)
        if not all_seeded or self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return one_by_one(self, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = torch.tensor(draws.next(generators), dtype=torch.long)
        return torch.ops._C.fused_gumbel_argmax(logits.to(dtype=torch.float32), seeds), logprobs

    TopKTopPSampler.forward_cpu = forward_cpu


def complete_cpu_worker(worker: Any) -> None:
    """Gives a CPU worker what it lacks where there are several: memory for what the pipeline stage
    before it computed, which vLLM makes in a warm-up that it leaves out where nothing is compiled,
    and `compute_own_experts`."""
    from vllm.distributed import get_pp_group

    compute_own_experts()
    runner = worker.model_runner
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def compute_own_experts() -> None:
    """A worker that has some of the experts computes those alone. vLLM's kernel on a CPU takes
    experts' numbers for places in the worker's weights. Idempotent."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply_all = CPUUnquantizedExperts.apply
    if hasattr(apply_all, "__wrapped__"):
        return

    @functools.wraps(apply_all)
    def apply(self: Any, **given: Any) -> None:
        places = given["expert_map"]  # [experts]: where this worker has each, -1 for another's
        if places is not None:
            if given["apply_router_weight_on_input"]:
                raise ValueError(
                    "enable_expert_parallel on a CPU: this model weighs an expert's inputs, so what"
                    " another worker's would add cannot be weighed with 0; leave it out"
                )
            own = places[given["topk_ids"].long()]
            weights = given["topk_weights"].masked_fill(own < 0, 0.0)
            given |= {"topk_weights": weights, "topk_ids": own.clamp_min(0)}
        apply_all(self, **given)

    CPUUnquantizedExperts.apply = apply


CALL_BEGINS = re.compile(
    r"_?(tool_calls?|tools?|bot|tc)_(start|begin|open|token|string)(_token)?", re.I
)
"""Attributes in which tool parsers that read text by themselves keep what a call begins with."""


def call_beginnings(parser: Any) -> tuple[str, ...]:
    """The marks that a call begins with for one of vLLM's tool parsers, as it has them itself; none
    where it keeps none, or a plain word, which stands in other texts too."""
    found = {
        value
        for name in dir(parser)
        if CALL_BEGINS.fullmatch(name) and isinstance(value := getattr(parser, name), str)
    }
    engine = getattr(parser, "_parser_engine", None)
    if engine is not None:
        config = engine.parser_engine_config
        for (state, terminal), transition in config.transitions.items():
            if state.name == "CONTENT" and transition.next_state.name.startswith("TOOL_"):
                spelt = config.terminals.get(terminal, ())
                found |= {spelt} if isinstance(spelt, str) else set(spelt)
    return tuple(sorted(one for one in found if one and not one.isidentifier()))


def require_grammar(model_path: str, settings: Any, config: Any) -> None:
    """Reads `settings`, StructuredOutputsParams, as an engine reads them of a request. `config`:
    vLLM's `structured_outputs_config`, where rollout.vllm has one. Raises ValueError with what
    cannot be read."""
    from vllm import SamplingParams
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers import get_tokenizer

    given = StructuredOutputsConfig(**config) if isinstance(config, dict) else config
    SamplingParams(structured_outputs=settings)._validate_structured_outputs(
        SimpleNamespace(is_diffusion=False),
        given or StructuredOutputsConfig(),
        get_tokenizer(model_path),
    )


class SeededDraws:
    """Numbers below 2**31 from generators, `DRAWS` at a time, kept until they are asked for or
    their generator is gone."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Generator], list[int]]] = {}

    def next(self, generators: Mapping[int, torch.Generator]) -> list[int]:
        """The next number of each generator. Its key, from 0 to the count, is its place."""
        numbers = [0] * len(generators)
        kept = self._kept
        for place, generator in generators.items():
            entry = kept.get(id(generator))
            if entry is None:
                entry = kept[id(generator)] = (self._forgetting(generator), [])
            left = entry[1]
            if not left:
                drawn = torch.randint(0, 2**31, (DRAWS,), generator=generator, dtype=torch.long)
                left.extend(reversed(drawn.tolist()))
            numbers[place] = left.pop()
        return numbers

    def _forgetting(self, generator: torch.Generator) -> weakref.ref[torch.Generator]:
        key, kept = id(generator), self._kept
        return weakref.ref(generator, lambda _: kept.pop(key, None))
