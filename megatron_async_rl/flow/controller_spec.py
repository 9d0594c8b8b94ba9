"""Plain data that rank 0 and the controller exchange across processes: the controller's settings,
the position of the data, and a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_async_rl.config.schema import SamplesConfig, WatchdogConfig
from megatron_async_rl.flow.evaluation import HeldOut
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.flow.summary import MetricValue
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.frames import LogMark
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt


class PromptProvider(Protocol):
    """Provider of the training prompts (data.PromptSource)."""

    def next(self) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DataState:
    """Position of the data for a checkpoint. `state`: plain JSON. `buffer`: the waiting groups
    (flow/buffer.py); null for supervised runs. `oldest`: the oldest version whose tokens
    may train after a resume. `data`: digests of the prompts (batches.data_digests). `log`:
    extent of the sample log on disk; null without a log."""

    state: Mapping[str, Any]
    buffer: bytes | None = None
    oldest: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    log: LogMark | None = None


@dataclass(frozen=True, kw_only=True)
class Handout:
    """A batch, and metrics of engines and controller since the previous one; or a part of a batch
    that is not complete yet, without metrics."""

    batch: TrainBatch
    metrics: dict[str, MetricValue]


@dataclass(frozen=True, kw_only=True)
class ControllerSpec:
    """Settings of the controller. `engines`: all engines; the last `evaluators` only evaluate.
    `run_dir`: None in tests of the controller alone, which write no events and have no stop file.
    `steps` to `seed`: see Scheduler. `timeout_s`: longest time without progress."""

    flow: FlowConfig
    engines: Sequence[EngineSpec]
    steps: int | None
    fresh_steps: int
    seed: int
    evaluators: int = 0
    fleet: FleetSettings = field(default_factory=FleetSettings)
    timeout_s: float = WatchdogConfig.default_of("timeout_s")
    start_timeout_s: float = RolloutConfig.default_of("start_timeout_s")
    reward: RewardConfig = field(default_factory=lambda: RolloutConfig.default_of("reward"))
    held_out: Sequence[HeldOut] = field(default=(), repr=False)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    run_dir: Path | None = None
    sender_gpu: str | None = None
    """GPU of rank 0 from which weights are sent by collective; None: from its host memory."""
