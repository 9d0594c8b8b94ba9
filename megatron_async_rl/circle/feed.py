"""What feeds the policy, as rank 0 sees it: the circle of engines, controller and publisher, or given data.

Both feeds keep one contract with the loop:
- `position()` is asked for only when everything that was handed out is trained on; it is what to checkpoint with the weights of
  that version;
- `next_batch(version)` returns None once `RUN/stop` exists and no batch is taken: one that is taken is handed out, and trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.prompts import read_prompts
from megatron_async_rl.data.supervised import SupervisedSource
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.flow.evaluation import EvalResult
from megatron_async_rl.flow.summary import MetricValue
from megatron_async_rl.observe import watch
from megatron_async_rl.samples import TrainBatch
from megatron_async_rl.weights.export import Bucket


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the data stands. `state`: plain JSON. `buffer`: what waits (flow/buffer_file.py); null where nothing can.
    `oldest`: the oldest version whose tokens may train when the run goes on."""

    state: Mapping[str, Any]
    buffer: bytes | None = None
    oldest: int = 0


class Feed(Protocol):
    def next_batch(self, version: int) -> TrainBatch | None:
        """What trains version `version`; None when the user asked the run to stop."""

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        """Takes the weights `version`; the engines get them while the loop goes on."""

    def position(self) -> Position: ...

    def evaluate(self, version: int) -> None:
        """Begins to evaluate `version`, published before, on the held-out prompts. Training engines: blocks until it is done."""

    def evaluated(self, *, wait: bool = False) -> Sequence[EvalResult]:
        """Results since the last call; with `wait`, also of what is still being evaluated."""

    def metrics(self) -> dict[str, MetricValue]:
        """What happened since the last call. Keys are documented in docs/metrics.md."""

    def close(self) -> None: ...


def open_feed(config: Config, device_type: str, version: int, position: Position | None) -> Feed:
    """The feed that `config` asks for, at `version`, from `position` (None: the beginning)."""
    if config.supervised:
        return SupervisedFeed(config, position)
    from megatron_async_rl.circle.rollout_feed import RolloutFeed

    return RolloutFeed(config, device_type, version, position)


class SupervisedFeed:
    """Given responses; no engines, nobody to publish to or to evaluate."""

    def __init__(self, config: Config, position: Position | None) -> None:
        tokenizer = load_tokenizer(config.model.path)
        self._stop = config.run.dir / watch.STOP
        self._source = SupervisedSource(
            read_prompts(config.data.train, tokenizer, required=("prompt", "response")),
            tokenizer,
            prompts_per_step=config.flow.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            max_context=None,
        )
        if position is not None:
            self._source.load_state(position.state)

    def next_batch(self, version: int) -> TrainBatch | None:
        return None if self._stop.exists() else self._source.next_batch(version)

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        raise RuntimeError("a supervised run has no engines to publish to")

    def position(self) -> Position:
        return Position(state=self._source.state())

    def evaluate(self, version: int) -> None:
        raise RuntimeError("a supervised run has no engines to sample with")

    def evaluated(self, *, wait: bool = False) -> Sequence[EvalResult]:
        return ()

    def metrics(self) -> dict[str, MetricValue]:
        return {}

    def close(self) -> None:
        pass
