"""Settings of one engine at its start. Plain data, picklable, imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.config.rollout import AGENTS, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.config.weights import CARRIERS, DEFAULT_CARRIER, CarrierCapabilities

HERE = ""
"""Name of rank 0's machine, where the controller is; another goes by its Ray node's id. By
collective an engine's own memory counts as one (`cluster.own_memory`)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One vLLM engine. `index` is unique in the run and names its log, `engine-<index>.log` in
    `log_dir`."""

    index: int
    model_path: Path
    """Hugging Face directory; the weights the engine starts with are those of `first_version`."""
    dtype: Literal["float32", "bfloat16"]
    rollout: RolloutConfig
    evaluations: Mapping[str, SamplingConfig] = field(default_factory=dict)
    """Sampling of each held-out set, by its name."""
    seed: int
    """The run's seed; every response's own seed derives from it."""
    device: Literal["cpu", "cuda"]
    log_dir: Path
    chat_template: str | None = None
    """Chat template of `data`, which also renders an environment's messages; null: the model's."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that training prompts name (the environment `tools`)."""
    run_dir: Path | None = None
    """The run in whose timeline the engine writes what it does; null: none."""
    first_version: int = 0
    """-1: weights of unknown origin. Sampling from them is an error until the first update numbers
    them."""
    records_experts: bool = False
    """Each sample has the experts that the engine chose (`policy.routing_replay: rollout`)."""
    threads: int = 1
    """OpenMP threads of the model on a CPU."""
    transport: str = DEFAULT_CARRIER
    """How new weights arrive: `weights.transport` of the configuration."""
    gpus: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """GPUs that an engine may use, by host name: if colocated, those of the ranks; empty: any."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Software of rank 0's machine (`cluster.software`), which the engine's machine must match;
    empty: any."""

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
        """Sampling settings of a set of held-out prompts, or of training (null)."""
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
