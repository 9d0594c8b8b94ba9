"""The imports of the server that the controller, engine actors and vLLM's processes on a CPU are
forked from (`watchdog.preloaded`).

All but Ray: its C++ part reads a worker's variables as it is imported, and never again.
"""

# ruff: noqa: F401, E402
from __future__ import annotations

import sys

assert "ray" not in sys.modules
# vLLM does without it, and so lacks its executor over Ray, which no engine uses.
sys.modules["ray"] = None  # type: ignore[assignment]

import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker

import megatron_async_rl.flow.controller
import megatron_async_rl.rollout.engine_arguments
import megatron_async_rl.rollout.responses
import megatron_async_rl.weights.receive
import megatron_async_rl.weights.vllm_private

del sys.modules["ray"]
