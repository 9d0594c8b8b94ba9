"""One rank's part in a run besides the policy: device phases, staging, evaluations, checkpoints.

Invariants:
- every public method is collective: all ranks call it at the same point of the loop, and ranks
  differ only inside `rank0` and `Layout.from_rank_zero`;
- while rank 0 waits for the controller, the ranks' main threads fill on-demand buckets: no other
  collective of these ranks may run at that time (`_meanwhile`).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.buffer import BUFFER_FILE
from megatron_async_rl.flow.device_phases import DevicePhases
from megatron_async_rl.flow.errors import WeightsChanged
from megatron_async_rl.flow.evaluation import EvalSchedule, LossResult
from megatron_async_rl.flow.ipc_buckets import BufferRequest
from megatron_async_rl.flow.rank0 import OtherRank, Rank0
from megatron_async_rl.policy.checkpoint_folder import CONFIG_FILE, DATA_FILE, RECORD_FILE
from megatron_async_rl.policy.device import arithmetic_of
from megatron_async_rl.policy.device_memory import DeviceMemory
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.rollout.cluster import gpu_of_rank
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.watchdog import watch
from megatron_async_rl.weights.export import WeightExporter, WeightShards
from megatron_async_rl.weights.staging import Staging, WeightDigests, staging_of
from megatron_async_rl.weights.version_digest import version_digest

MeanLoss = Callable[[Callable[[], TrainBatch | None]], tuple[float, int]]
"""`Policy.mean_loss`."""


class TrainerRank:
    """One rank of the trainer. rank0: the object that only rank 0 has; its null counterpart on
    other ranks. version: of the weights."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config = config
        self.layout = layout
        self.rank0 = Rank0(config) if layout.rank == 0 else OtherRank()
        self.version = 0
        self.schedule: EvalSchedule | None = None
        # Building a policy and loading a checkpoint need all of its memory.
        self.devices = DevicePhases("policy", "train")
        self.memory: DeviceMemory | None = None
        """Device memory of the policy; null until it is built."""
        self._staging: Staging | None = None
        self._digests: WeightDigests | None = None
        """Null in a run with engines, whose staging computes the digests."""
        self._shards: WeightShards | None = None
        self._digest = ""
        """Digest of the weights of `version`, from `publish` on."""
        self._expected: str | None = None
        """Digest that the weights of the first version must have; null if it is not known."""

    def stage_from(self, exporter: WeightExporter) -> None:
        """Set the source of the weights for `publish`. A run without engines has no receivers; it
        computes digests alone."""
        weights, layout = self.config.weights, self.layout
        sender: WeightDigests
        if self.config.has_engines:
            self._staging = sender = staging_of(weights.transport, layout.device, layout)
        else:
            self._digests = sender = WeightDigests(layout)
        self._shards = WeightShards(exporter, sender.reached, weights.bucket_mib * 2**20)

    def begin(self, version: int, resumed: dict[str, Any] | None, oldest: int) -> None:
        """Begin the run at `version`; `resumed`: content of the checkpoint. `oldest`: the oldest
        version whose tokens may train. Engines start while the policy has released its training
        state."""
        self.version = version
        if resumed is not None:
            self._expected = expected_digest(resumed, weights_form(self.config, self.layout))
        # The timeline shows this as part of the start: next, the engines start.
        with self.devices.phase("publish"), self.devices.step("release"):
            self._make_room()
        evaluation = self.config.eval
        if evaluation is not None:
            # Equal on all ranks, because `evaluate` is collective for versions that are due.
            means = {} if resumed is None else resumed["evaluated"]
            self.schedule = EvalSchedule(
                every=evaluation.every, steps=self.config.run.steps, means=means
            )
        gpus: dict[str, list[str]] = {}
        if self.layout.device_type == "cuda":
            for host, gpu in self.layout.gathered((socket.gethostname(), gpu_of_rank())):
                gpus.setdefault(host, []).append(gpu)
        self.rank0.open(
            version,
            self.schedule,
            resumed,
            oldest=oldest,
            device_type=self.layout.device_type,
            gpus=gpus,
        )

    @property
    def digest(self) -> str:
        """Digest of the weights that were published last."""
        return self._digest

    def await_batch(self) -> None:
        """Wait until rank 0 has the batch that trains this version."""
        self._meanwhile(self.rank0.take_batch)

    def take_devices(self) -> None:
        """Put colocated engines to sleep, then restore the policy's training state."""
        with self.devices.phase("train"):
            with self.devices.step("sleep"):
                self._sleep_engines()
            with self.devices.step("restore"):
                if self.config.colocated and self.memory is not None:
                    self.enter("restoring")
                    self.memory.restore()

    def give_devices(self) -> None:
        """Release everything but the policy's parameters, on every rank of a colocated run."""
        with self.devices.phase("publish"), self.devices.step("release"):
            if self.config.colocated:
                self.enter("releasing")
            self._make_room()

    def publish(self, version: int) -> None:
        """Stage the weights of this rank; the engines load while the loop continues. Raises
        WeightsChanged if a resumed run does not begin with the weights of its checkpoint."""
        self.version = version
        self.rank0.advance(version)
        self.enter("publishing")
        with self.devices.phase("generate"), self.devices.step("stage"):
            self._stage()

    def _sleep_engines(self) -> None:
        if self.config.colocated:
            self.enter("waiting", "engines to sleep")
            self._meanwhile(lambda: self.rank0.engines.sleep())
            if self._staging is not None:
                # The policy needs this memory, and no engine reads it any more.
                self._staging.release()

    def _make_room(self) -> None:
        if self.config.colocated and self.memory is not None:
            self.memory.release()
            # An engine uses devices of several ranks, or of another rank than rank 0: none may wake
            # before all ranks have released theirs.
            self.layout.barrier()

    def _stage(self) -> None:
        if self._shards is None:
            return
        if self._staging is None:
            assert self._digests is not None, "stage_from comes first"
            digests = self._digests.digests(
                self.version, self._shards.buckets, self._shards.parts()
            )
            self._record_digest(digests)
            return
        # This overwrites the slot of the version before the last, once no engine reads it.
        manifest = self._staging.stage(
            self.version,
            self._shards.buckets,
            self._shards.parts(),
            lambda: self.rank0.engines.until_released(self.version),
        )
        # Before any engine may load the version.
        self._record_digest(manifest.digests)
        self.rank0.staged(manifest)
        if self._staging.on_demand:
            # The buckets are filled from the live weights: the next step must not change these
            # before every engine has loaded.
            self._meanwhile(lambda: self.rank0.engines.until_loaded(self.version))

    def _record_digest(self, digests: Mapping[str, str]) -> None:
        self._digest, expected = version_digest(digests), self._expected
        self._expected = None
        if expected not in (None, self._digest):
            raise WeightsChanged.at(self.version, str(expected), self._digest)
        self.rank0.digested(self._digest, digests)

    def _meanwhile(self, wait: Callable[[], None]) -> None:
        """Run `wait` on rank 0, like `Layout.from_rank_zero`. Until it returns, all ranks fill the
        buckets that engines request."""
        if self._staging is None or not self._staging.on_demand:
            self.layout.from_rank_zero(wait)
            return
        waiting = _begun(wait) if self.layout.rank == 0 else Future[None]()
        while (
            request := self.layout.from_rank_zero(
                lambda: self.rank0.engines.next_buffer_request(waiting)
            )
        ) is not None:
            self._serve(self._staging, request)
        self.layout.from_rank_zero(waiting.result)

    def _serve(self, staging: Staging, request: BufferRequest) -> None:
        ref = None
        if request.number is None:
            staging.release()
        # An engine may still request a bucket of a version that was replaced meanwhile.
        elif request.version == self.version and self._shards is not None:
            ref = staging.fill(request.number, request.place, self._shards.parts(request.number))
        self.rank0.buffer_filled(ref)

    def evaluate(self, mean_loss: MeanLoss) -> None:
        """Evaluate this version if it is due. Rank 0 waits for the previous result, and the other
        ranks wait for rank 0. `mean_loss`: measures given responses, on all ranks."""
        if self.schedule is None:
            return
        last, due = self.version == self.config.run.steps, self.schedule.due(self.version)
        if self.config.supervised:
            if due:
                self._measure(mean_loss)
        elif due or last:
            self.enter("waiting", "evaluation")
            self._meanwhile(lambda: self._evaluate(due=due, wait=last))
        else:
            self.rank0.take_evaluations(wait=False)

    def _measure(self, mean_loss: MeanLoss) -> None:
        """Measure the loss of every held-out set of given responses."""
        self.enter("evaluating")
        self.rank0.set_status("evaluating", f"held-out responses, version {self.version}")
        started, measured = time.monotonic(), []
        for place, one in enumerate(self.config.held_out_files):
            loss, tokens = mean_loss(self._batches_of(place))
            measured.append((one.name, loss, tokens))
        seconds = time.monotonic() - started
        first, *others = (
            LossResult(version=self.version, name=name, loss=loss, tokens=tokens, seconds=seconds)
            for name, loss, tokens in measured
        )
        self.rank0.record(replace(first, others=tuple(others)))

    def _batches_of(self, place: int) -> Callable[[], TrainBatch | None]:
        """Return a function that on rank 0 returns one batch per call from held-out set number
        `place`."""
        if self.layout.rank != 0:
            return self.rank0.next_batch  # never called
        return partial(next, self.rank0.given.held_out(place, self.version), None)

    def _evaluate(self, *, due: bool, wait: bool) -> None:
        """Evaluate with engines, on rank 0, in the thread that waits."""
        if due and self.schedule is not None:
            self.schedule.begin(self.version)
            self.enter("evaluating")
            self.rank0.set_status("evaluating", f"held-out prompts, version {self.version}")
            self.rank0.engines.evaluate(self.version)
        self.rank0.take_evaluations(wait=wait)

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return a checkpoint's content besides the policy, and its further files. Waits for
        evaluations of older versions, whose weights a resume would not have."""
        self.rank0.set_status("checkpointing")
        self.enter("checkpointing")
        if self.schedule is not None and not self.config.supervised:
            unfinished = self.schedule.unfinished(self.version)
            self._meanwhile(lambda: self.rank0.take_evaluations(wait=unfinished))
        position = self.rank0.position()
        state = {
            "version": self.version,
            "data": position.state if position else None,
            "evaluated": self.schedule.means if self.schedule else {},
            "model_path": str(self.config.model.path),
            "weights": {
                "digest": self._digest,
                "form": weights_form(self.config, self.layout),
            },
        }
        files = {
            CONFIG_FILE: dump(self.config).encode("utf-8"),
            RECORD_FILE: json.dumps(self.rank0.record_of(position), indent=1).encode("utf-8"),
        }
        if position is not None:
            files[DATA_FILE] = json.dumps(position.data, indent=1).encode("utf-8")
            if position.buffer is not None:
                files[BUFFER_FILE] = position.buffer
        return state, files

    def held(self) -> dict[str, int]:
        """Bytes on this rank's device, by owner."""
        return {} if self.memory is None else self.memory.held()

    def enter(self, state: str, waiting_for: str = "") -> None:
        """Report what this rank is doing from now on."""
        watch.enter(
            "wait" if waiting_for else "work", f"the {waiting_for}" if waiting_for else state
        )
        self.rank0.enter(state, waiting_for)

    def close(self) -> None:
        """End the run; end engines first, because they may still read staged weights."""
        watch.enter("work", "ending engines and Ray" if self.config.has_engines else "ending")
        self.rank0.close()
        if self._staging is not None:
            self._staging.close()


def weights_form(config: Config, layout: Layout) -> str:
    """Return a text that is equal for two starts if the same weights have the same digest. Merged
    adapters are products, and FP8 weights have scales: their bits depend on kernels and cuts."""
    text = f"{config.model.dtype} {config.engine_dtype}"
    if config.policy.lora is not None or config.policy.fp8 is not None:
        kernels = f"{arithmetic_of(layout.device_type)}, torch {torch.__version__}"
        text += f", {kernels}, {config.policy.parallel}"
    return text


def expected_digest(resumed: Mapping[str, Any], form: str) -> str | None:
    """Return the digest of the loaded weights that a checkpoint's content states; null if it states
    none, or one of weights in another form."""
    saved = resumed.get("weights", {})
    return saved["digest"] if saved.get("form") == form else None


def _begun(wait: Callable[[], None]) -> Future[None]:
    """Return a future of `wait`, which runs in a thread."""
    waiting: Future[None] = Future()

    def work() -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            waiting.set_exception(error)
        else:
            waiting.set_result(None)

    # No executor: the process would not exit before the executor's thread ends.
    threading.Thread(target=work, name="wait", daemon=True).start()
    return waiting
