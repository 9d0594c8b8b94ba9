"""Tells vLLM about our weight transports. vLLM calls `register` in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Idempotent, as vLLM asks: plugins may be loaded several times in one process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for transport in TRANSPORTS.values():
        if transport.backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(transport.backend, transport.module, transport.receiver)
