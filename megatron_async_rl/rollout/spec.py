"""Settings of one engine: plain data that pickle can copy. This module imports neither torch nor
vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.config.rollout import AGENTS, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.config.weights import CARRIERS, CarrierCapabilities

HERE = ""
"""Name of rank 0's machine, where the controller runs. The name of another machine is the id of its
Ray node; an engine that receives weights itself counts as a machine (`cluster.own_memory`)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Settings of one vLLM engine."""

    index: int
    """Index of the engine in the run; its log is `engine-<index>.log` in `log_dir`."""
    model_path: Path
    """Hugging Face directory with the weights of `first_version`."""
    dtype: Literal["float32", "bfloat16"]
    rollout: RolloutConfig
    evaluations: Mapping[str, SamplingConfig] = field(default_factory=dict)
    """Name of a held-out set -> its sampling settings."""
    seed: int
    """Seed of the run, from which the seed of every response derives."""
    device: Literal["cpu", "cuda"]
    log_dir: Path
    transport: str
    """Name of the carrier of new weights (`weights.transport` of the configuration)."""
    chat_template: str | None = None
    """Chat template of `data`, which also renders the messages of an environment; None: the
    model's own template."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that training prompts may call (environment `tools`)."""
    run_dir: Path | None = None
    """Directory of the run, whose timeline records the states of the engine; None: no timeline."""
    first_version: int = 0
    """Version of the initial weights. -1: none; sampling is an error until the first update."""
    records_experts: bool = False
    """True if samples record the experts that the model selected (`policy.routing_replay:
    rollout`)."""
    threads: int = 1
    """Number of OpenMP threads of the model on a CPU."""
    gpus: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Host name -> GPUs that the engine may use, which are the ranks' GPUs if the engine is
    colocated; empty: any GPU."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Software of rank 0's machine (`cluster.software`). The engine's machine must have the same;
    empty: any software."""

    def __post_init__(self) -> None:
        if self.first_version < -1:
            raise ValueError(
                f"engine {self.index}: first_version is {self.first_version}; it must be 0 or"
                " greater, or -1 if the engine has no weights yet"
            )

    @property
    def carrier(self) -> CarrierCapabilities:
        return CARRIERS[self.transport]

    def sampling(self, held_out: str | None) -> SamplingConfig:
        """Return the sampling settings of a held-out set, or of training (None)."""
        return self.rollout.sampling if held_out is None else self.evaluations[held_out]

    @property
    def needs_tokenizer(self) -> bool:
        """True if vLLM needs its own tokenizer, for example to search a text for stop strings."""
        environment = self.rollout.environment
        if environment is not None and environment.name in AGENTS:
            return True  # an agent's calls may pass stop strings
        samplings = (self.rollout.sampling, *self.evaluations.values())
        return any(one.needs_tokenizer for one in samplings)

    @property
    def name(self) -> str:
        return f"engine-{self.index}"

    @property
    def log(self) -> Path:
        return self.log_dir / f"{self.name}.log"

    @property
    def reward_log(self) -> Path:
        """JSONL file with one object per failed reward, including the response."""
        return self.log_dir / f"{self.name}.reward_errors.jsonl"
