"""Code that runs inside vLLM's processes or uses vLLM's names. No other folder imports vLLM.

    engine's actor                     engine core         worker
    client.py, engine_arguments.py     engine_core.py      receive.py, reload.py, cpu_worker.py,
                                                           cpu_sampling.py

vLLM calls `plugin.register` in each of its processes. The code uses names that vLLM exports, which
it imports, and private attributes and methods, which PRIVATE_NAMES lists. A test looks up both in
the installed vLLM, so that a version that lacks one of the names fails before an engine starts.
"""

PRIVATE_NAMES = {
    "client": (
        "vllm.v1.engine.async_llm.AsyncLLM.output_processor",
        "vllm.v1.engine.core_client.AsyncMPClient.pause_scheduler_async",
        "vllm.v1.engine.detokenizer.IncrementalDetokenizer.num_output_tokens",
        "vllm.v1.engine.output_processor.OutputProcessor.request_states",
        "vllm.v1.engine.output_processor.RequestOutputCollector.output",
        "vllm.v1.engine.output_processor.RequestOutputCollector.put",
        "vllm.v1.engine.output_processor.RequestState.detokenizer",
    ),
    "cpu_sampling": (
        "torch.ops._C.fused_add_rms_norm",
        "torch.ops._C.rms_norm",
        "vllm.ir.op.IrOp.impls",
        "vllm.model_executor.layers.logits_processor.LogitsProcessor._apply_head",
        "vllm.model_executor.layers.logits_processor.LogitsProcessor.head_dtype",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.logprobs_mode",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.use_fp64_gumbel",
        "vllm.v1.sample.sampler.Sampler.gather_logprobs",
    ),
    "cpu_worker": (
        "vllm.config.vllm.VllmConfig._verify_aux_output_compatibility",
        "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector.begin_step",
        "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector.prepare_output",
        "vllm.distributed.aux_output_connector.worker.PendingAuxOutput.enqueue_cpu_copy",
        "vllm.distributed.aux_output_connector.worker.PendingAuxOutput.process_output",
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply",
        "vllm.v1.outputs.ModelRunnerOutput.aux_output_connector_output",
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner.execute_model",
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner.initialize_kv_cache",
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner.sample_tokens",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.device",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model_state",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.input_batch",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.intermediate_tensors",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.max_num_tokens",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.model_config",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.query_start_loc",
    ),
    "engine_arguments": ("vllm.sampling_params.SamplingParams._validate_structured_outputs",),
    "engine_core": (
        "vllm.v1.core.sched.scheduler.Scheduler._pause_state",
        "vllm.v1.core.sched.scheduler.Scheduler.get_request_counts",
        "vllm.v1.core.sched.scheduler.Scheduler.requests",
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
        "vllm.v1.engine.async_llm.AsyncLLM.engine_core",
        "vllm.v1.engine.core.EngineCore.add_request",
        "vllm.v1.engine.core.EngineCore.collective_rpc",
        "vllm.v1.engine.core.EngineCore.get_weight_version",
        "vllm.v1.engine.core.EngineCore.preprocess_add_request",
        "vllm.v1.engine.core.EngineCore.resume_scheduler",
        "vllm.v1.engine.core.EngineCore.set_weight_version",
        "vllm.v1.engine.core.EngineCoreProc.input_queue",
        "vllm.v1.engine.core.EngineCoreProc.pause_scheduler",
        "vllm.v1.engine.core_client.AsyncMPClient.call_utility_async",
        "vllm.v1.executor.uniproc_executor.UniProcExecutor.collective_rpc",
        "vllm.v1.request.Request.block_hashes",
        "vllm.v1.request.Request.cache_salt",
        "vllm.v1.request.Request.num_computed_tokens",
        "vllm.v1.request.Request.num_preemptions",
        "vllm.v1.request.Request.update_block_hashes",
    ),
    "plugin": ("vllm.distributed.weight_transfer.WeightTransferEngineFactory._registry",),
    "reload": (
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase.moe_kernel",
        "vllm.model_executor.layers.fused_moe.expert_map_manager.ExpertMapManager.map_global_to_local",
        "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts.expert_map_manager",
        "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo.restore_metadata",
    ),
    "tool_parser": (
        "vllm.parser.engine.adapters.ParserEngineToolAdapter._parser_engine",
        "vllm.parser.engine.parser_engine.ParserEngine.parser_engine_config",
    ),
}
"""File of this folder -> private names of vLLM that it uses, including attributes of instances."""
