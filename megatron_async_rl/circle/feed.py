"""What feeds the policy, as rank 0 sees it: the circle of engines, controller and publisher, or given data.

Both feeds keep one contract with the loop:
- `position()` says that everything handed out before was trained on; what it returns is the data position to checkpoint
  with the weights of that version;
- `next_batch(version)` returns None once `RUN/stop` exists; a batch asked for but not trained on is in no position
  that was returned, so a resume issues its prompts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.prompts import read_prompts
from megatron_async_rl.data.supervised import SupervisedSource
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.flow.evaluation import EvalResult
from megatron_async_rl.flow.summary import MetricValue
from megatron_async_rl.samples import TrainBatch
from megatron_async_rl.weights.export import Bucket

State = Mapping[str, Any]


class Feed(Protocol):
    def next_batch(self, version: int) -> TrainBatch | None:
        """What trains version `version`; None when the user asked the run to stop."""

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        """Takes the weights `version`; the engines get them while the loop goes on."""

    def position(self) -> State: ...

    def evaluate(self, version: int) -> None:
        """Begins to evaluate `version`, published before, on the held-out prompts. Training engines: blocks until it is done."""

    def evaluated(self, *, wait: bool = False) -> Sequence[EvalResult]:
        """Results since the last call; with `wait`, also of what is still being evaluated."""

    def metrics(self) -> dict[str, MetricValue]:
        """What happened since the last call. Keys are documented in docs/metrics.md."""

    def close(self) -> None: ...


def open_feed(config: Config, device_type: str, version: int, state: State | None) -> Feed:
    """The feed that `config` asks for, at `version`, from the data position `state` (None: the beginning)."""
    if config.supervised:
        return SupervisedFeed(config, state)
    from megatron_async_rl.circle.rollout_feed import RolloutFeed

    return RolloutFeed(config, device_type, version, state)


class SupervisedFeed:
    """Given responses; no engines, nobody to publish to or to evaluate."""

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

    def position(self) -> State:
        return self._source.state()

    def evaluate(self, version: int) -> None:
        raise RuntimeError("a supervised run has no engines to sample with")

    def evaluated(self, *, wait: bool = False) -> Sequence[EvalResult]:
        return ()

    def metrics(self) -> dict[str, MetricValue]:
        return {}

    def close(self) -> None:
        pass
