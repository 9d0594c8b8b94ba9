"""The imports of the process that ranks and `mar` commands are forked from: all that takes long. It
starts no thread, so that it may be forked."""

import atexit
import gc
import os
import warnings

# Warnings of libraries would reach the terminal of the tests.
with warnings.catch_warnings(action="ignore"):
    import megatron.core.models.mimo.optimizer
    import pandas
    import pyarrow.pandas_compat
    import torch.export._trace
    import transformers.models.llama.configuration_llama
    import transformers.models.qwen2.configuration_qwen2
    import transformers.models.qwen3.configuration_qwen3
    import transformers.models.qwen3_moe.configuration_qwen3_moe

    import megatron_async_rl.cli
    import megatron_async_rl.controls.gac
    import megatron_async_rl.launch.launcher
    import megatron_async_rl.objectives.losses.ppo_clip
    import megatron_async_rl.plan.preflight
    import megatron_async_rl.policy.policy
    import megatron_async_rl.weights.convert
    import megatron_async_rl.weights.export
    import tests.parallel.layouts
    import tests.parallel.model_program
    import tests.parallel.models
    import tests.parallel.objective_program
    import tests.parallel.staged_weights

# Megatron collects garbage at every save: nothing of the above is any.
gc.collect()
gc.freeze()
gc.set_threshold(100_000)  # as in tests/conftest.py
# At an orderly end triton's bindings list everything they leaked, after pytest's summary.
atexit.register(os._exit, 0)
