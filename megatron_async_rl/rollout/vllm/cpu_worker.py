"""Additions to vLLM's CPU workers: parts that vLLM lacks for engines of several CPU workers, and a
record of the selected experts.

vLLM itself records experts only in the model runner of GPUs. `record_on_cpu` adds vLLM's recorder
to the model runner of CPUs:

    scheduler -> execute_model -> sample_tokens -> scheduler -> CompletionOutput.routed_experts
                 a step begins    rows of the step's requests

Invariants:
- vLLM records the experts, stores them with the prefix cache and returns them: a token of a cached
  prefix has the experts that were selected when its keys and values were computed;
- `config/engine_options.py` replaces vLLM's own checks of a configuration that records: the model
  is a mixture of experts, the prefix cache is on, and the engine has neither pipeline stages nor
  speculative decoding.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np


def complete_cpu_worker(worker: Any) -> None:
    """Complete a CPU worker of an engine that has several: call `compute_own_experts`, and allocate
    memory for the output of the previous pipeline stage. vLLM allocates that memory in a warm-up,
    which it skips if nothing is compiled."""
    from vllm.distributed import get_pp_group

    compute_own_experts()
    runner = worker.model_runner
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def compute_own_experts() -> None:
    """Make each worker compute only the experts whose weights it has. vLLM's CPU kernel itself
    takes an expert's global number as its position in the worker's weights. Idempotent."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply_all = CPUUnquantizedExperts.apply
    if hasattr(apply_all, "__wrapped__"):
        return

    @functools.wraps(apply_all)
    def apply(self: Any, **arguments: Any) -> None:
        # [experts]: position of each expert in this worker, -1 for an expert of another worker.
        positions = arguments["expert_map"]
        if positions is not None:
            if arguments["apply_router_weight_on_input"]:
                raise ValueError(
                    "enable_expert_parallel on a CPU: this model weights the inputs of experts, so"
                    " a weight of 0 cannot mask experts of other workers; remove"
                    " enable_expert_parallel from rollout.vllm"
                )
            own = positions[arguments["topk_ids"].long()]
            # Weight 0 here: the worker that has the expert adds its output in the all-reduce.
            weights = arguments["topk_weights"].masked_fill(own < 0, 0.0)
            arguments |= {"topk_weights": weights, "topk_ids": own.clamp_min(0)}
        apply_all(self, **arguments)

    CPUUnquantizedExperts.apply = apply


def record_on_cpu() -> None:
    """Make vLLM's CPU workers record routed experts. Call this function in each of vLLM's processes
    before it creates its configuration. Idempotent."""
    from vllm.config.vllm import VllmConfig
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    initialize, execute = CPUModelRunner.initialize_kv_cache, CPUModelRunner.execute_model
    sample = CPUModelRunner.sample_tokens
    if hasattr(initialize, "__wrapped__"):
        return

    @functools.wraps(initialize)
    def initialize_kv_cache(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, config, *args, **kwargs)
        if not self.vllm_config.aux_output_config.enabled:
            return
        self.mar_recorder = AuxOutputWorkerConnector(
            vllm_config=self.vllm_config, model=self.model, kv_cache_config=config
        )

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "mar_recorder"):
            self.mar_recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.execute_model_state is None or not hasattr(self, "mar_recorder"):
            return sample(self, *args, **kwargs)
        batch, count = self.input_batch, self.input_batch.num_reqs
        # Copies: sampling changes the batch.
        step = SimpleNamespace(
            req_ids=list(batch.req_ids),
            query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
        )
        pending = self.mar_recorder.prepare_output(step)
        output = sample(self, *args, **kwargs)
        # Only the first tensor-parallel worker reports experts.
        if pending is not None:
            tokens = [output.sampled_token_ids[output.req_id_to_index[one]] for one in step.req_ids]
            sampled = np.array([len(each) for each in tokens])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    VllmConfig._verify_aux_output_compatibility = lambda self: None
    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens
