"""Plugin that vLLM calls in each of its processes (`vllm.general_plugins`), their environment
variables, and the server that they are forked from.

Invariant: this module imports no vLLM and no torch, because the launcher and the engine's actor set
variables that both read at import.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_async_rl.rollout.cluster import loopback_interface
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.preloaded import serving, spawn_by_fork
from megatron_async_rl.watchdog.processes import PARENT, die_with_parent
from megatron_async_rl.watchdog.run_folder import name_shared_memory

ENTRY_POINT = "mar_shared_memory"
"""Name of this plugin in the package's `vllm.general_plugins` entry points."""

RECORD_EXPERTS = "MAR_RECORD_EXPERTS"
"""Environment variable of an engine on a CPU that records experts."""

BACKEND = "mar_weights"
"""Name of our weight transfer engine in vLLM's factory; it serves every carrier."""

OPENMP = ("libgomp", "libiomp", "libomp.")
"""Prefixes of the file names of OpenMP libraries: GNU, Intel and LLVM."""

IMPORTS = "megatron_async_rl.rollout.vllm.engine_imports"
"""Module that imports all modules of an engine."""

WORKER_EXTENSION = "megatron_async_rl.rollout.vllm.receive.WeightLoadingWorker"


def register() -> None:
    """Bind this process of vLLM to its engine and to the run's watchdog, and install the hooks.
    Idempotent: vLLM may call it several times."""
    from megatron_async_rl.rollout.vllm import cpu_worker, engine_core

    # First: a process of vLLM must not outlive its engine, even if a later line fails.
    die_with_parent()
    spawn_by_fork("engines")
    watch.join()
    name_shared_memory()
    # vLLM collects garbage six times while it starts, and Python at exit. Each collection
    # would scan all imported modules for about half a second.
    gc.freeze()
    atexit.register(gc.freeze)

    engine_core.show_progress()
    engine_core.take_loads_between_steps()
    engine_core.cache_by_version()
    cpu_worker.draw_in_batches()
    if RECORD_EXPERTS in os.environ:
        cpu_worker.record_on_cpu()
    _register_transfer_engine()


def _register_transfer_engine() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # vLLM refuses a second registration of a name.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_async_rl.rollout.vllm.receive", "WeightReceiver"
        )


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return the variables that vLLM and its libraries read at import. Call it in the process that
    starts vLLM."""
    values = {
        # All processes of an engine run on one machine; no port may be reachable from others.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(spec.rollout.start_timeout_s))),
        "VLLM_PLUGINS": ENTRY_POINT,
        PARENT: str(os.getpid()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not spec.carrier.per_engine:  # NCCL receives weights from rank 0's machine
        values["NCCL_SOCKET_IFNAME"] = loopback_interface()
    if spec.records_experts and spec.device == "cpu":
        values[RECORD_EXPERTS] = "1"
    if spec.device == "cpu":
        values |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(spec.threads),
            # vLLM compiles parts of its sampler at the first request even in eager mode.
            "TORCHDYNAMO_DISABLE": "1",
            # Milliseconds a thread spins after a parallel region; the trainer may need the core.
            "KMP_BLOCKTIME": "1",
            # New memory costs several times as much as copying to it, and every update needs as
            # much as the previous one freed. So the C library keeps freed blocks, large ones too.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        }
        if spec.rollout.workers > 1:  # binding needs a NUMA node for each worker
            values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        openmp = Path(sys.prefix, "lib", "libiomp5.so")
        if openmp.is_file():
            values["LD_PRELOAD"] = _preloaded(openmp, os.environ.get("LD_PRELOAD", ""))
    return values


def serving_engines(
    spec: EngineSpec, variables: MutableMapping[str, str], folder: Path, log: Path
) -> AbstractContextManager[int]:
    """Run the server from which the actor and vLLM's processes of a CPU engine with the settings
    `spec` are forked; see `preloaded.serving`."""
    own = {name: value for name, value in environment(spec).items() if name != PARENT}
    return serving("engines", IMPORTS, variables, own, folder, log)


def _preloaded(openmp: Path, inherited: str) -> str:
    """Return LD_PRELOAD with `openmp` first, and without other OpenMP libraries."""
    # vLLM refuses to start with two, and both would create threads of their own.
    others = (
        file
        for file in re.split(r"[:\s]+", inherited)  # the loader accepts both separators
        if file and not Path(file).name.startswith(OPENMP)
    )
    return ":".join([str(openmp), *others])
