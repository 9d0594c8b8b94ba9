"""Plugin that vLLM calls in each of its processes (`vllm.general_plugins`), the environment
variables of these processes, and the server from which they are forked.

Invariant: this module imports neither vLLM nor torch, because the launcher and the engine's actor
import it before they set variables that both read at import.
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
"""Environment variable that is set for an engine on CPUs that records experts."""

BACKEND = "mar_weights"
"""Name of this package's weight transfer engine in vLLM's factory; it supports every carrier."""

OPENMP = ("libgomp", "libiomp", "libomp.")
"""Prefixes of the file names of OpenMP libraries: GNU, Intel and LLVM."""

IMPORTS = "megatron_async_rl.rollout.vllm.engine_imports"
"""Module of the server, which imports all modules that an engine needs."""

WORKER_EXTENSION = "megatron_async_rl.rollout.vllm.receive.WeightLoadingWorker"


def register() -> None:
    """Bind this process of vLLM to its engine and to the run's watchdog, and install the hooks.
    Idempotent, because vLLM may call it several times."""
    from megatron_async_rl.rollout.vllm import cpu_sampling, cpu_worker, engine_core

    # First, because a process of vLLM must not outlive its engine, even if a later line fails.
    die_with_parent()
    spawn_by_fork("engines")
    watch.join()
    name_shared_memory()
    # vLLM collects garbage six times while it starts, and Python does so at exit. Without `freeze`,
    # each collection would scan the objects of all imported modules, for about half a second.
    gc.freeze()
    atexit.register(gc.freeze)

    engine_core.show_progress()
    engine_core.take_loads_between_steps()
    engine_core.cache_by_version()
    cpu_sampling.speed_up_sampling()
    cpu_sampling.register_norms()
    if RECORD_EXPERTS in os.environ:
        cpu_worker.record_on_cpu()
    _register_transfer_engine()


def _register_transfer_engine() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # vLLM raises an error if a name is registered twice.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_async_rl.rollout.vllm.receive", "WeightReceiver"
        )


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return the variables that vLLM and its libraries read at import. Call this function in the
    process that starts vLLM."""
    values = {
        # All processes of an engine run on one machine, and no other machine may reach their ports.
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
    # With a carrier that sends to each engine, NCCL receives weights from rank 0's machine.
    if not spec.carrier.per_engine:
        values["NCCL_SOCKET_IFNAME"] = loopback_interface()
    if spec.records_experts and spec.device == "cpu":
        values[RECORD_EXPERTS] = "1"
    if spec.device == "cpu":
        values |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(spec.threads),
            # Otherwise vLLM compiles parts of its sampler at the first request, even in eager mode.
            "TORCHDYNAMO_DISABLE": "1",
            # Time in ms for which a thread spins after a parallel region. It is short, because the
            # trainer may need the core.
            "KMP_BLOCKTIME": "1",
            # Make the C library keep freed blocks, large ones too: every update needs as much
            # memory as the previous one freed, and allocating new memory takes several times as
            # long as the copy into it.
            "MALLOC_MMAP_MAX_": "0",
            # Each thread reuses only what was freed in its own arena. With two arenas, the engine
            # of SmolLM2-135M had 2.3 GiB after five steps, and with the default 3.0 to 6.6 GiB.
            "MALLOC_ARENA_MAX": "2",
            "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        }
        # Binding threads to cores would need a NUMA node for each worker.
        if spec.rollout.workers > 1:
            values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        openmp = Path(sys.prefix, "lib", "libiomp5.so")
        if openmp.is_file():
            values["LD_PRELOAD"] = _preloaded(openmp, os.environ.get("LD_PRELOAD", ""))
    return values


def serving_engines(
    spec: EngineSpec, variables: MutableMapping[str, str], folder: Path, log: Path
) -> AbstractContextManager[int]:
    """Run the server from which the actors and vLLM's processes of engines on CPUs are forked.
    `spec`: settings of one of these engines. See `preloaded.serving`."""
    own = {name: value for name, value in environment(spec).items() if name != PARENT}
    return serving("engines", IMPORTS, variables, own, folder, log)


def _preloaded(openmp: Path, inherited: str) -> str:
    """Return a value of LD_PRELOAD that starts with `openmp` and has the libraries in `inherited`
    except other OpenMP libraries."""
    # vLLM does not start with two OpenMP libraries, and each would create threads of its own.
    others = (
        file
        for file in re.split(r"[:\s]+", inherited)  # the loader accepts colons and spaces
        if file and not Path(file).name.startswith(OPENMP)
    )
    return ":".join([str(openmp), *others])
