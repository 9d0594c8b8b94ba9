"""Imports of the server from which the controller, engine actors and vLLM's processes on a CPU are
forked (`watchdog.preloaded`).

Invariant: the server does not import Ray, whose C++ library reads the environment of a worker only
once, at its import.
"""

# ruff: noqa: F401, E402
from __future__ import annotations

import sys

assert "ray" not in sys.modules
# `None` makes vLLM's `import ray` fail. vLLM then lacks its Ray executor, which no engine uses.
sys.modules["ray"] = None  # type: ignore[assignment]

import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker

import megatron_async_rl.flow.controller
import megatron_async_rl.rollout.vllm.cpu_sampling
import megatron_async_rl.rollout.vllm.cpu_worker
import megatron_async_rl.rollout.vllm.engine_arguments
import megatron_async_rl.rollout.vllm.engine_core
import megatron_async_rl.rollout.vllm.receive

del sys.modules["ray"]
