"""Receiving side of a weight update, in vLLM's worker processes.

Invariants:
- versions only increase: an update to a version that is not newer is refused before it changes a
  weight;
- digests are those of the memory that the loaders wrote, not of the received data (`loaded.py`);
- a bucket that the sender overwrites later is read completely before the call with that bucket
  returns;
- an update succeeds only if it loads every parameter of the model. A fused parameter (qkv, gate_up)
  counts as loaded once all its parts were received;
- kernels discard all data that was derived from old weights (`reload.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_async_rl.rollout.vllm.cpu_worker import complete_cpu_worker
from megatron_async_rl.rollout.vllm.loaded import Loaded, LoadWatch
from megatron_async_rl.rollout.vllm.reload import loaded_parameters, reload_of
from megatron_async_rl.watchdog.freed_memory import return_freed_memory
from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY, remove_stale
from megatron_async_rl.weights.manifest import BucketRef, TensorEntry
from megatron_async_rl.weights.transport import (
    TransportReader,
    VersionReceiver,
    carrier,
    carrier_module,
)


@dataclass
class FirstVersion(WeightTransferInitInfo):
    """Settings of a worker's WeightReceiver. `version`: version of the initial weights.
    `transport`: name of the carrier."""

    version: int
    transport: str


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Location of a bucket, with the fields of `BucketRef.as_plain`."""

    path: str
    size: int
    nbytes: int
    entries: list[dict[str, Any]]

    def ref(self) -> BucketRef:
        entries = tuple(
            TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in self.entries
        )
        return BucketRef(path=self.path, size=self.size, nbytes=self.nbytes, entries=entries)


def missing_parameters(
    parameters: Collection[str],
    loaded: Collection[str],
    received: Collection[str],
    fused: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return those of the model's `parameters` that an update did not load, sorted. The result has
    the missing parts of a fused parameter, not the parameter.

    `loaded`: names that `load_weights` returned. `received`: names of the received tensors.
    `fused`: the model's map from a fused module to its parts (`qkv_proj` -> `q_proj`, `k_proj`,
    `v_proj`).
    """
    missing = []
    for parameter in parameters:
        *scope, module, kind = ["", *parameter.split(".")]
        if module in fused:
            parts = [".".join([*scope[1:], part, kind]) for part in fused[module]]
            missing += [part for part in parts if part not in received]
        elif parameter not in loaded:
            missing.append(parameter)
    return sorted(missing)


class WeightReceiver(WeightTransferEngine[FirstVersion, BucketInfo]):
    """Weight transfer engine of vLLM that loads full tensors with Hugging Face names from a
    carrier's buckets."""

    init_info_cls = FirstVersion
    update_info_cls = BucketInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = loaded_parameters(self.model)
        self._watch = LoadWatch()
        self._reload = reload_of(self.model, self.model_config, self._watch.take)
        self._loaded: set[str] = set()
        """Parameters that this update loaded, by the names of the model."""
        self._incomplete: list[str] = []
        """Weights that the last update loaded only in part."""
        self._version, self._transport = -1, ""
        self._reader: TransportReader | None = None
        self.receiver: VersionReceiver | None = None
        """Receiver of versions in the background, for a carrier that sends to each engine."""
        self._paths: set[str] = set()
        self._paths_before: set[str] = set()
        """Paths of the buckets of this update and of the previous one."""

    def init_transfer_engine(self, init_info: FirstVersion) -> None:
        # Remove buckets of a killed engine: only the launcher's machine has another process that
        # removes them.
        remove_stale(SHARED_MEMORY)
        self._version = init_info.version
        self._transport = init_info.transport
        self._reader = carrier(init_info.transport).reader()

    def new_receiver(self, worker: int, device: torch.device) -> VersionReceiver:
        """Return the receiver of the run's carrier for this worker."""
        receiver: VersionReceiver = carrier_module(self._transport).Receiver(worker, device)
        return receiver

    def accept(self, version: int) -> None:
        """Record `version`. Raises ValueError unless it is newer than the engine's version."""
        if version <= self._version:
            raise ValueError(
                f"weight version {version} was refused: it must be newer than the engine's version,"
                f" {self._version}"
            )
        self._version = version

    def start_weight_update(self) -> None:
        self._loaded = set()
        self._paths_before, self._paths = self._paths, set()
        self._reload.begin()
        # After `begin`, which removes parameters from the model that the reload fills in temporary
        # memory: they must not count as lasting.
        self._watch.begin(self.model.parameters())

    def receive_weights(self, update_info: BucketInfo) -> None:
        assert self._reader is not None
        self._paths.add(update_info.path)
        with self._watch:
            # Inside of the watch, which must observe every copy of the loaders.
            self._loaded |= self._reload.load(self._offered(update_info.ref()))
        if not self._reader.lasting and self.device.type == "cuda":
            # Wait for the copies: the ranks overwrite the bucket once this call returns.
            torch.cuda.current_stream(self.device).synchronize()

    def finish_weight_update(self) -> None:
        with self._watch:
            self._incomplete = self._reload.end()
        assert self._reader is not None
        # Versions alternate between two slots, so the next version reuses the mappings of the
        # previous one.
        kept = self._paths | self._paths_before if self._reader.lasting else ()
        self._reader.keep(kept)

    def require_complete(self) -> None:
        """Raise RuntimeError if the last update did not load a parameter of the model, or not all
        of it."""
        fused = getattr(self.model, "packed_modules_mapping", {})
        missing = (
            missing_parameters(self._parameters, self._loaded, self._watch.names, fused)
            or self._incomplete
        )
        if missing:
            raise RuntimeError(
                f"the update to version {self._version} had {len(self._watch.names)} tensors"
                f" and left out {len(missing)}:"
                f" {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}"
            )

    def shutdown(self) -> None:
        """Unmap the buckets, which stay mapped between updates, and close the receiver."""
        if self._reader is not None:
            self._reader.keep(())
        if self.receiver is not None:
            self.receiver.close()

    def loaded(self) -> dict[str, Loaded]:
        """Return name -> the parts of each tensor that this worker holds after the last update."""
        return self._watch.loaded()

    def _offered(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors of a bucket, and register each with the watch before a loader reads
        it."""
        assert self._reader is not None
        copies = self._reload.keeps and not self._reader.lasting
        for name, view in self._reader.read(ref):
            if name in self._watch.names:
                raise ValueError(
                    f"the update to version {self._version} has tensor {name} more than once"
                )
            # Copy if the reload holds tensors beyond this call: the sender writes the next bucket
            # into the same memory.
            tensor = view.clone() if copies else view
            self._watch.offer(name, tensor)
            yield name, tensor


class WeightLoadingWorker:
    """Methods that vLLM adds to its workers (`worker_extension_cls`). `self` is a worker of
    vLLM."""

    def complete_on_cpu(self: Any) -> None:
        """Complete a CPU worker. Call this method once, before the first request."""
        complete_cpu_worker(self)

    def receive_version(self: Any, update: bytes) -> None:
        """Start receiving a version in the background. `update`: a pickled WeightUpdate."""
        engine = self.weight_transfer_engine
        if engine.receiver is None:
            engine.receiver = engine.new_receiver(self.rank, self.device)
        engine.receiver.receive(pickle.loads(update))

    def load_weight_bucket(
        self: Any, bucket: dict[str, Any], version: int, first: bool, last: bool
    ) -> dict[str, Loaded]:
        """Load a bucket. The `first` bucket begins an update, and the `last` one ends it. Return
        name of a tensor -> the parts that this worker loaded with the last bucket; otherwise an
        empty dict."""
        receiver = self.weight_transfer_engine
        if first:
            # Before the update changes any weight.
            receiver.accept(version)
            self.start_weight_update()
        self.update_weights(bucket)
        if not last:
            return {}
        self.finish_weight_update()
        receiver.require_complete()
        loaded: dict[str, Loaded] = receiver.loaded()
        if self.device.type == "cpu":
            # plugin.py makes the C library keep all freed memory, and each number of running
            # requests has logits of another size. Without this, the engine of SmolLM2-135M grew
            # from 1.6 to 5.2 GiB within half an hour.
            return_freed_memory()
        return loaded
