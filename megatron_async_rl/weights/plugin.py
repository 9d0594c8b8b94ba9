"""What vLLM is told about us. It calls `register` in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass

from megatron_async_rl.rollout.core_watch import watch_this_process
from megatron_async_rl.rollout.lifetime import die_with_the_actor

ENTRY_POINT = "mar_shared_memory"
"""Name of this plugin in the package's `vllm.general_plugins` entry points."""


@dataclass(frozen=True)
class Transport:
    """A weight transfer engine as vLLM's factory knows it: its key there, and where its class is."""

    backend: str
    module: str
    receiver: str


TRANSPORTS = {
    "shared_memory": Transport("mar_shared_memory", "megatron_async_rl.weights.receive", "SharedMemoryReceiver"),
}
"""Key: `weights.transport` of the configuration."""

WORKER_EXTENSION = "megatron_async_rl.weights.receive.WeightLoadingWorker"


def register() -> None:
    """Our transports, by name, and that an engine ends with its actor, and fast. Idempotent: vLLM may call it several times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    die_with_the_actor()
    watch_this_process()
    # Python looks through all that vLLM imported for garbage, once more, before a process ends: seconds that a stop waits for.
    atexit.register(gc.freeze)
    for transport in TRANSPORTS.values():
        if transport.backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(transport.backend, transport.module, transport.receiver)
