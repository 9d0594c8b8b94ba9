"""What feeds the policy, as rank 0 sees it: the circle of engines, controller and publisher, or given data.

Both feeds keep one contract with the loop:
- `advance(version)` says that everything handed out before was trained on; what it returns is the data position to
  checkpoint with the weights of that version;
- `next_batch(version)` returns None once `RUN/stop` exists; a batch asked for but not trained on is in no position
  that `advance` returned, so a resume issues its prompts again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.prompts import PromptSource, read_prompts
from megatron_async_rl.data.supervised import SupervisedSource
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.observe.deadline import DeadlineExceeded, ray_get, this_process
from megatron_async_rl.samples import Prompt, TrainBatch
from megatron_async_rl.weights.export import Bucket

State = Mapping[str, Any]
STOP_POLL_S = 0.5
STOP_ENGINES_S = 15.0
OBJECT_STORE_BYTES = 256 * 2**20


class Feed(Protocol):
    def next_batch(self, version: int) -> TrainBatch | None:
        """What trains version `version`; None when the user asked the run to stop."""

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        """Gives the engines the weights `version`."""

    def advance(self, version: int) -> State: ...

    def evaluate(self, version: int) -> float:
        """Mean reward on the held-out prompts, sampled as in training."""

    def metrics(self) -> dict[str, float]:
        """What happened since the last call. Keys are documented in docs/metrics.md."""

    def close(self) -> None: ...


def open_feed(config: Config, device_type: str, version: int, state: State | None) -> Feed:
    """The feed that `config` asks for, at `version`, from the data position `state` (None: the beginning)."""
    if config.supervised:
        return SupervisedFeed(config, state)
    return RolloutFeed(config, device_type, version, state)


class SupervisedFeed:
    """Given responses; no engines, nobody to publish to."""

    def __init__(self, config: Config, state: State | None) -> None:
        tokenizer = load_tokenizer(config.model.path)
        self._stop = config.run.dir / "stop"
        self._source = SupervisedSource(
            read_prompts(config.data.train, tokenizer, required=("prompt", "response")),
            tokenizer,
            prompts_per_step=config.flow.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            max_context=None,
        )
        if state is not None:
            self._source.load_state(state)

    def next_batch(self, version: int) -> TrainBatch | None:
        return None if self._stop.exists() else self._source.next_batch(version)

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        raise RuntimeError("a supervised run has no engines to publish to")

    def advance(self, version: int) -> State:
        return self._source.state()

    def evaluate(self, version: int) -> float:
        raise RuntimeError("a supervised run has no engines to sample with")

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class RolloutFeed:
    """Engines and controller as Ray actors, and the publisher between them and the trainer."""

    def __init__(self, config: Config, device_type: str, version: int, state: State | None) -> None:
        import ray

        from megatron_async_rl.flow.actor import start_controller
        from megatron_async_rl.rollout.actor import start_engines
        from megatron_async_rl.rollout.spec import EngineSpec
        from megatron_async_rl.weights.publish import Publisher, PublishReport, RayEngine

        assert config.rollout is not None
        self._config = config
        self._ray = ray
        self._timeout_s = config.watchdog.timeout_s
        self._stop = config.run.dir / "stop"
        self._engines: list[Any] = []
        self._controller: Any = None
        self._started = False
        self._published: PublishReport | None = None
        self._tokens_reported = 0.0
        source, self._held_out = _prompts(config)
        logs = config.run.dir / "logs"
        _join_ray(config.policy.parallel.ranks if device_type == "cuda" else 0)
        try:
            specs = [
                EngineSpec(
                    index=index,
                    model_path=config.model.path,
                    dtype=config.model.dtype,
                    rollout=config.rollout,
                    seed=config.run.seed,
                    device="cuda" if device_type == "cuda" else "cpu",
                    log_dir=logs,
                    first_version=-1,
                )
                for index in range(config.rollout.engines)
            ]
            self._engines = start_engines(specs)
            self._controller = start_controller(
                source,
                self._engines,
                config.flow,
                on_reward_error=config.rollout.reward.on_error,
                steps=config.run.steps,
                fresh_steps=config.fresh_steps,
                log_path=logs / "controller.log",
            )
            if state is not None:
                self._call("controller to take up its position", self._controller.load_state.remote(state))
        except BaseException:
            self.close()
            raise
        clients = [RayEngine(spec.name, engine) for spec, engine in zip(specs, self._engines, strict=True)]
        self._publisher = Publisher(clients, timeout_s=self._timeout_s)

    def next_batch(self, version: int) -> TrainBatch | None:
        started = time.monotonic()
        pending = self._controller.next_batch.remote(version, self._timeout_s)
        # The controller has the same deadline and knows what is missing; this one is for a controller that is gone.
        while time.monotonic() - started < self._timeout_s + 10 * STOP_POLL_S:
            if self._stop.exists():
                return None
            done, _ = self._ray.wait([pending], timeout=STOP_POLL_S)
            if done:
                batch: TrainBatch = self._call(f"batch for version {version}", pending)
                return batch
        raise DeadlineExceeded(this_process(), f"the batch for version {version} from the controller", time.monotonic() - started)

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        self._published = self._publisher.publish(version, buckets)

    def advance(self, version: int) -> State:
        # One call after the other on the actor's loop: the position is taken before the next batch is asked for.
        turn = self._controller.advance if self._started else self._controller.start
        turned, state = turn.remote(version), self._controller.state.remote()
        self._started = True
        self._call(f"controller to advance to version {version}", turned)
        position: State = self._call("controller's position", state)
        return position

    def evaluate(self, version: int) -> float:
        assert self._config.eval is not None
        samples = self._config.eval.samples_per_prompt
        pending = self._controller.evaluate.remote(self._held_out, samples, version, self._timeout_s)
        result = self._call("held-out evaluation", pending)
        return float(result.mean_reward)

    def metrics(self) -> dict[str, float]:
        stats = self._call("controller's counts", self._controller.stats.remote())
        values = {
            "tokens/generated": stats["tokens"] - self._tokens_reported,
            "flow/in_flight": stats["in_flight"],
            "flow/buffer": stats["buffered"],
            "flow/admitted": stats["admitted"],
            "flow/dropped_equal": stats["dropped_equal"],
        }
        self._tokens_reported = stats["tokens"]
        if self._published is not None:
            values |= {
                "weights/publish_s": self._published.seconds,
                "weights/publish_bytes": self._published.bytes,
                "weights/pause_s": self._published.paused_s,
            }
        return values

    def close(self) -> None:
        from megatron_async_rl.rollout.actor import stop_engines

        if self._controller is not None:
            self._ray.kill(self._controller)
        stop_engines(self._engines, timeout_s=STOP_ENGINES_S)
        self._ray.shutdown()

    def _call(self, name: str, reference: Any) -> Any:
        return ray_get(reference, name, self._timeout_s)


def _prompts(config: Config) -> tuple[PromptSource, list[Prompt]]:
    """The training source and the held-out prompts, all of them checked."""
    tokenizer = load_tokenizer(config.model.path)
    train = read_prompts(config.data.train, tokenizer)
    held_out = read_prompts(config.data.eval, tokenizer) if config.eval is not None and config.data.eval is not None else []
    return PromptSource(train, seed=config.run.seed, shuffle=config.data.shuffle), held_out


def _join_ray(trainer_gpus: int) -> None:
    """The cluster named by RAY_ADDRESS, or one of our own on this machine that ends with this process.

    `trainer_gpus`: GPUs of this machine, from the first, that the trainer ranks hold and Ray must not hand out.
    """
    import ray

    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return
    if trainer_gpus:
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[trainer_gpus:])
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        num_cpus=os.cpu_count(),
    )
