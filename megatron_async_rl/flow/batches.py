"""Sources of rank 0's batches: the controller and its engines, given responses, or the log of
another run.

All keep one contract with the loop:
- `state()` is called only when every batch that was handed out has trained; its result belongs in a
  checkpoint with the weights of that version;
- `next_batch(version)` returns None only if `RUN/stop` exists and the controller has not taken the
  next batch: a batch that was taken is handed out and trains;
- with streamed groups, `next_batch(version)` also returns parts of the batch (`complete` is False);
  the loop calls it again until the batch is complete.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config, ReplayConfig
from megatron_async_rl.data import (
    DataIdentity,
    PromptSet,
    PromptSource,
    SupervisedSource,
    fitting,
    log_too_long,
    read_set,
    read_training,
    supervised_source,
    tokenizer_of,
)
from megatron_async_rl.data.canaries import canary_prompts
from megatron_async_rl.flow.controller import NAME, STOP_ENGINES_S, Controller
from megatron_async_rl.flow.controller_spec import (
    ControllerSpec,
    DataState,
    Handout,
    PromptProvider,
)
from megatron_async_rl.flow.evaluation import EvalResult, HeldOut, read_held_out
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.flow.ipc_buckets import BufferRequest
from megatron_async_rl.flow.router import capacity_of
from megatron_async_rl.rollout.cluster import (
    join_ray,
    object_store_bytes,
    preloaded_worker,
    software,
    visible_gpus,
)
from megatron_async_rl.rollout.environments.built_in.tools import prompt_tokenizer, tool_schemas
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.frames import SegmentBroken
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.watch import ray_get
from megatron_async_rl.weights.manifest import BucketRef, Manifest

DAY_S = 86400.0
"""Time limit of calls whose progress the controller watches itself: it fails a batch, a sleep or an
evaluation that makes none."""


class BatchSource(Protocol):
    """`data`: digests of all prompts. `ends`: tokens that end a sampled response; empty if the
    source does not know them."""

    data: dict[str, Any]
    ends: frozenset[int]

    def next_batch(self, version: int) -> Handout | None:
        """Return the batch that trains `version`, or a part of it; None if the user requested the
        run to stop."""

    def state(self) -> DataState: ...
    def close(self) -> None: ...


class RolloutBatches:
    """Batches of the controller and its engines, and rank 0's other requests to the controller."""

    def __init__(
        self,
        config: Config,
        device_type: str,
        position: DataState | None,
        gpus: Mapping[str, Sequence[str]],
    ) -> None:
        assert config.rollout is not None
        self._timeout_s = config.watchdog.timeout_s
        self._colocated = config.rollout.placement == "colocated"
        self._separate = config.eval is not None and config.eval.engines > 0
        self._controller: Any = None
        self._released: Any = None
        """Answered once no engine reads a version before the one staged last."""
        self._buffer_request: Any = None
        """Answered with the ranks' next task."""
        self._buffer_filled: BucketRef | None = None
        self._evaluation: Any = None
        self._results: list[EvalResult] = []
        spec = controller_spec(config, device_type, gpus)
        tokenizer = prompt_tokenizer(config.model.path, config)
        self.ends = frozenset((*tokenizer.eos_ids, *config.rollout.sampling.stop_token_ids))
        training = read_training(config.data, tokenizer)
        log_too_long(training)
        prompts, parts = training.prompts, training.parts
        if config.run.numerics is not None:
            # As many as a batch has groups, so that every version samples all of them.
            prompts, parts = tuple(canary_prompts(training.prompts, config.run.numerics)), ()
        source = PromptSource(
            prompts,
            seed=config.run.seed,
            shuffle=config.data.shuffle and config.run.numerics is None,
            parts=parts,
        )

        if position is not None:
            # The controller repeats this after the engines have started.
            # Refuses a position that does not fit the data before any engine starts.
            source.load_state(position.state["source"])
        held_out = [DataIdentity.of(one.prompts) for one in spec.held_out]
        self.data = data_digests(config, source.identities, held_out)

        longest = max(len(prompt.token_ids) for prompt in prompts)
        lends = config.weights.carrier.ipc
        self._reserved = join_ray(
            # Reserved, so that Ray places engines elsewhere; colocated engines share them.
            {} if self._colocated else gpus,
            object_store_bytes(
                config.flow.prompts_per_step * config.flow.group_size,
                config.rollout.max_segments * (longest + config.rollout.sampling.max_tokens),
            ),
            shared=gpus.get(socket.gethostname(), ()) if lends else (),
        )
        try:
            # `close` ends Ray, too: a failed start leaves no process behind.
            self._controller = start_controller(source, spec)
            limit_s = spec.start_timeout_s + self._timeout_s
            ray_get(self._controller.start.remote(position), "the engines to start", limit_s)
        except BaseException:
            self.close()
            raise

    def next_batch(self, version: int) -> Handout | None:
        # The controller has its own deadline, counted from the newest response, and knows what is
        # missing; this call only needs the controller to be alive.
        pending = self._controller.next_batch.remote(version)
        handout: Handout | None = ray_get(pending, f"the batch for version {version}", DAY_S)
        return handout

    def sleep(self) -> None:
        """Wait until colocated engines have released their memory. They acquire it again with the
        next version."""
        ray_get(self._controller.sleep.remote(), "the engines to sleep", DAY_S)

    def until_loaded(self, version: int) -> None:
        """Wait until every present engine holds `version`, whose buckets are filled on demand."""
        loaded = self._controller.loaded.remote(version)
        ray_get(loaded, f"the engines to load version {version}", DAY_S)

    def next_buffer_request(self, made: Future[Any]) -> BufferRequest | None:
        """Return what the ranks do next with the buckets that engines request; null once `made` is
        done."""
        # One request at a time: the answer is kept until the ranks have served it.
        if self._buffer_request is None:
            self._buffer_request = self._controller.next_buffer_request.remote(self._buffer_filled)
        wanted = self._buffer_request.future()
        wait((made, wanted), return_when=FIRST_COMPLETED)
        if not wanted.done():
            return None
        fill: BufferRequest = ray_get(
            self._buffer_request, "the next bucket to fill", self._timeout_s
        )
        self._buffer_request = None
        return fill

    def buffer_filled(self, done: BucketRef | None) -> None:
        """Record that the ranks have served the last request. `done`: location of the bucket."""
        # Sent with the next request: a call of its own would be another round trip.
        self._buffer_filled = done

    def until_released(self, version: int) -> None:
        """Wait until no engine reads the weights that `version` will overwrite."""
        if self._released is not None:
            # Each engine's load began before this wait and has the same time limit; the other
            # ranks wait for it in a collective with a longer deadline.
            name = f"engines to be done with version {version - 2} before {version} takes its place"
            ray_get(self._released, name, self._timeout_s)

    def publish(self, version: int, manifest: Manifest) -> None:
        """Announce that `version` is staged. Engines load it while the loop continues."""
        self._released = self._controller.staged.remote(version, manifest)

    def evaluate(self, version: int) -> None:
        """Begin to evaluate `version`, which was published before, on the held-out prompts. Wait
        for the previous evaluation and, if the training engines evaluate, for this one."""
        self._take_result(wait=True)
        # One evaluation at a time: the line above waited for the one before.
        self._evaluation = self._controller.evaluate.remote(version)
        if not self._separate:
            self._take_result(wait=True)

    def evaluated(self, *, wait: bool = False) -> list[EvalResult]:
        """Return the results since the last call. With `wait`, wait for the running evaluation
        first."""
        self._take_result(wait=wait)
        results, self._results = self._results, []
        return results

    def _take_result(self, *, wait: bool) -> None:
        pending = self._evaluation
        if pending is not None and (wait or ray.wait([pending], timeout=0)[0]):
            self._evaluation = None
            result = ray_get(pending, "the evaluation", DAY_S)
            self._results += [result] if result is not None else []

    def state(self) -> DataState:
        state: DataState = ray_get(
            self._controller.state.remote(), "the controller's position", self._timeout_s
        )
        # The controller does not know the prompts' digests.
        return replace(state, data=self.data)

    def close(self) -> None:
        if self._controller is not None:
            closing = self._controller.close.remote()
            with watch.doing("wait", "the controller to end the engines", 2 * STOP_ENGINES_S):
                ray.wait([closing], timeout=2 * STOP_ENGINES_S)
            # After the deadline as well: its process must not outlive the run.
            ray.kill(self._controller)
        ray.shutdown()


class GivenResponses:
    """Batches of a supervised run, which has no engines. The ranks measure held-out responses."""

    def __init__(self, config: Config, position: DataState | None) -> None:
        tokenizer = tokenizer_of(config.model.path, config.data)

        def source(read: PromptSet) -> SupervisedSource:
            given = fitting(read, tokenizer, config.data.max_tokens)
            log_too_long(given)
            return supervised_source(given, tokenizer, config)

        self.ends = frozenset[int]()
        self._stop = config.run.dir / watch.STOP
        self._source = source(read_training(config.data, tokenizer, supervised=True))
        self._held_out = [
            source(read_set(config.data, one.file, tokenizer, supervised=True))
            for one in config.held_out_files
        ]
        if position is not None:
            self._source.load_state(position.state)
        held_out = [one.identities[0] for one in self._held_out]
        self.data = data_digests(config, self._source.identities, held_out)

    def next_batch(self, version: int) -> Handout | None:
        if self._stop.exists():
            return None
        return Handout(batch=self._source.next_batch(version), metrics={})

    def held_out(self, place: int, version: int) -> Iterator[TrainBatch]:
        """Yield the responses of held-out set number `place` once, for the weights `version`."""
        return self._held_out[place].once(version)

    def state(self) -> DataState:
        return DataState(state=self._source.state(), data=self.data)

    def close(self) -> None:
        pass


class RecordedSteps:
    """Batches of another run's log, for a replay. One batch is read ahead. streams: True to train
    on the parts in which they arrived, with streamed groups."""

    def __init__(self, replay: ReplayConfig, run_dir: Path, *, streams: bool) -> None:
        self.data: dict[str, Any] = {}
        self.ends = frozenset[int]()
        self._stop = run_dir / watch.STOP
        self._last = replay.last
        self._streams = streams
        self._recorded = RecordedBatches(replay.run)
        # Reading ahead hides the log behind the training of a step.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="recorded steps")
        self._ahead = self._reader.submit(self._recorded.batch, replay.first)

    def next_batch(self, version: int) -> Handout | None:
        if self._stop.exists():
            return None
        try:
            batch = self._ahead.result()
        except (NotRecorded, SegmentBroken) as error:
            fix = "replay the steps before (--steps), or those after a later checkpoint (--from)"
            raise UserError.of(f"step {version + 1}", str(error), fix) from error
        # Batches are read in the order of steps, so another version means another start.
        if batch.version != version:
            raise ValueError(f"the batch of version {batch.version} was read for {version}")
        if version + 2 <= self._last:
            self._ahead = self._reader.submit(self._recorded.batch, version + 2)
        return Handout(batch=batch if self._streams else replace(batch, parts=()), metrics={})

    def state(self) -> DataState:
        return DataState(state={}, data={})

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)


def data_digests(
    config: Config, training: Sequence[DataIdentity], held_out: Sequence[DataIdentity]
) -> dict[str, Any]:
    """Return the digests of all prompts as plain JSON. `held_out`: of `config.held_out_files`."""
    sets = zip(config.held_out_files, held_out, strict=True)
    return {
        "training": [one.as_json() for one in training],
        "held_out": {
            one.name: {"path": str(one.file.path), **identity.as_json()} for one, identity in sets
        },
    }


def open_batches(
    config: Config,
    device_type: str,
    position: DataState | None,
    gpus: Mapping[str, Sequence[str]],
) -> BatchSource:
    """Return the batches that `config` requests, from `position` on (None: from the beginning).
    `gpus`: those of the trainer's ranks, by host name."""
    if config.supervised:
        return GivenResponses(config, position)
    if config.run.replay is not None:
        streams = config.flow.stream == "groups"
        return RecordedSteps(config.run.replay, config.run.dir, streams=streams)
    return RolloutBatches(config, device_type, position, gpus)


def start_controller(source: PromptProvider, spec: ControllerSpec) -> Any:
    """Start the controller's actor on this machine and return its handle. Ray must be
    initialised."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Pinned to rank 0's machine: both read the run's folder and the staged weights there.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=1000)(Controller)
    return remote_class.options(name=NAME, scheduling_strategy=here, **preloaded_worker()).remote(
        source, spec
    )


def controller_spec(
    config: Config, device_type: str, gpus: Mapping[str, Sequence[str]]
) -> ControllerSpec:
    """Return the controller's settings. `gpus`: of the ranks, by host name. Colocated engines share
    them, as far as they suffice."""
    rollout = config.rollout
    assert rollout is not None
    shares = rollout.placement == "colocated"
    # Engines share the ranks' GPUs only where each has one; otherwise Ray chooses.
    fits = rollout.engines * rollout.workers <= sum(map(len, gpus.values()))
    evaluators = config.eval.engines if config.eval is not None else 0
    sends = config.weights.carrier.per_engine
    sets = config.eval_sets
    samplings = {one.name: one.sampling for one in sets}
    engines = [
        EngineSpec(
            index=index,
            model_path=config.model.path,
            dtype=config.engine_dtype,
            rollout=rollout,
            seed=config.run.seed,
            device="cuda" if device_type == "cuda" else "cpu",
            log_dir=config.run.dir / "logs",
            chat_template=config.data.chat_template,
            chat_template_options=config.data.chat_template_options,
            tools=tool_schemas(rollout.environment),
            run_dir=config.run.dir,
            evaluations=samplings,
            first_version=-1,
            transport=config.weights.transport,
            gpus=gpus if shares and fits else {},
            software=software(),
            records_experts=config.policy.routing_replay == "rollout",
        )
        for index in range(rollout.engines + evaluators)
    ]
    held_out: list[HeldOut] = []
    if sets:
        tokenizer = prompt_tokenizer(config.model.path, config)
        held_out = [read_held_out(config.data, one, tokenizer) for one in sets]
    return ControllerSpec(
        flow=config.flow,
        engines=engines,
        evaluators=evaluators,
        fleet=FleetSettings(
            capacity=capacity_of(rollout.max_concurrent),
            unresponsive_s=rollout.unresponsive_s,
            update_timeout_s=config.watchdog.timeout_s,
            restarts_per_hour=rollout.restarts_per_hour,
            max_paused=config.weights.max_paused,
            run_dir=config.run.dir,
            # Every engine samples every canary, under both versions.
            even=rollout.engines if config.run.numerics is not None else 0,
        ),
        timeout_s=config.watchdog.timeout_s,
        start_timeout_s=rollout.start_timeout_s,
        reward=rollout.reward,
        steps=config.run.steps,
        fresh_steps=config.fresh_steps,
        seed=config.run.seed,
        held_out=held_out,
        samples=config.samples,
        sender_gpu=visible_gpus()[0] if device_type == "cuda" and sends else None,
        run_dir=config.run.dir,
    )
