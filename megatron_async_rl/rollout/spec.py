"""Settings of one engine at its start. Plain data, picklable, imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.config.rollout import AGENTS, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.config.weights import CARRIERS, CarrierCapabilities

HERE = ""
"""Name of rank 0's machine, where the controller runs. Other machines are named by their Ray node's
id; an engine that receives weights itself counts as a machine (`cluster.own_memory`)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Settings of one vLLM engine."""

    index: int
    """Number of the engine, unique in the run. Its log is `engine-<index>.log` in `log_dir`."""
    model_path: Path
    """Hugging Face directory with the weights of `first_version`."""
    dtype: Literal["float32", "bfloat16"]
    rollout: RolloutConfig
    evaluations: Mapping[str, SamplingConfig] = field(default_factory=dict)
    """Name of a held-out set -> its sampling settings."""
    seed: int
    """The run's seed; every response's own seed derives from it."""
    device: Literal["cpu", "cuda"]
    log_dir: Path
    transport: str
    """Carrier of new weights: `weights.transport` of the configuration."""
    chat_template: str | None = None
    """Chat template of `data`, which also renders an environment's messages; None: the model's."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that training prompts name (the environment `tools`)."""
    run_dir: Path | None = None
    """Directory of the run in whose timeline the engine records its states; None: no timeline."""
    first_version: int = 0
    """Version of the initial weights. -1: unknown; sampling is an error until the first update."""
    records_experts: bool = False
    """True if samples record the chosen experts (`policy.routing_replay: rollout`)."""
    threads: int = 1
    """OpenMP threads of the model on a CPU."""
    gpus: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Host name -> GPUs that the engine may use: the ranks' if colocated; empty: any GPU."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Software of rank 0's machine (`cluster.software`), which the engine's machine must match;
    empty: no requirement."""

    def __post_init__(self) -> None:
        if self.first_version < -1:
            raise ValueError(
                f"engine {self.index}: first_version is {self.first_version}; versions count from"
                " 0, and -1 means none yet"
            )

    @property
    def carrier(self) -> CarrierCapabilities:
        return CARRIERS[self.transport]

    def sampling(self, held_out: str | None) -> SamplingConfig:
        """Return the sampling settings of a held-out set, or of training (None)."""
        return self.rollout.sampling if held_out is None else self.evaluations[held_out]

    @property
    def needs_tokenizer(self) -> bool:
        turns = self.rollout.environment
        if turns is not None and turns.name in AGENTS:
            return True  # an agent's calls may name strings that end them
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
        """JSONL, one object per failed reward, with the response it failed on."""
        return self.log_dir / f"{self.name}.reward_errors.jsonl"
