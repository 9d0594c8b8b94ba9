"""The experts that vLLM chose, on a CPU. vLLM records them in its newer model runner, which runs on
GPUs; this gives its runner of CPUs the same recorder.

    scheduler -> execute_model -> sample_tokens -> scheduler -> CompletionOutput.routed_experts
                 a step begins    rows of the step's requests

Invariants:
- what is recorded, kept with the prefix cache and handed out is vLLM's own doing: a token of a
  cached prefix has the experts that were chosen as its keys and values were made;
- the checks that vLLM would make of a configuration that records are the configuration's here: a
  mixture, with prefix cache, no pipeline, no speculation (`config/engine_options.py`).
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

NAMES = (
    "vllm.config.vllm.VllmConfig._verify_aux_output_compatibility",
    "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector.begin_step",
    "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector.prepare_output",
    "vllm.distributed.aux_output_connector.worker.PendingAuxOutput.enqueue_cpu_copy",
    "vllm.distributed.aux_output_connector.worker.PendingAuxOutput.process_output",
    "vllm.v1.outputs.ModelRunnerOutput.aux_output_connector_output",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner.execute_model",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model_state",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner.initialize_kv_cache",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.input_batch",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.query_start_loc",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner.sample_tokens",
)
"""Private names of vLLM that this file uses, as `vllm_private.NAMES`."""

RECORD = "MAR_RECORD_EXPERTS"
"""Environment variable of an engine on a CPU whose samples have their experts."""


def record_on_cpu() -> None:
    """Record routed experts on a CPU. Call in each of vLLM's processes before it makes its
    configuration. Idempotent."""
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
        step = SimpleNamespace(
            req_ids=list(batch.req_ids),
            query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
        )
        pending = self.mar_recorder.prepare_output(step)
        output = sample(self, *args, **kwargs)
        if pending is not None:  # the first of tensor-parallel workers
            tokens = [output.sampled_token_ids[output.req_id_to_index[one]] for one in step.req_ids]
            sampled = np.array([len(each) for each in tokens])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    VllmConfig._verify_aux_output_compatibility = lambda self: None
    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens
