"""Tokens of groups whose responses share their prompt (`policy.prefix_sharing`), in estimates."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async_rl.config.policy import KEYS_PER_TOKEN
from megatron_async_rl.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class GroupTokens:
    """Tokens of one group on a rank. responses: number of them; shared: they share the prompt."""

    prompt: float
    response: float
    responses: int
    shared: bool

    @classmethod
    def of(
        cls, config: Config, prompt: float, response: float, *, responses: int | None = None
    ) -> GroupTokens:
        """Return a group of the run. responses: on one rank; null for all of the group."""
        count = config.flow.group_size if responses is None else responses
        saved = (count - 1) * prompt
        minimum = config.policy.min_sharing
        shared = (
            minimum is not None and saved > 0 and saved >= minimum * count * (prompt + response)
        )
        return cls(prompt=prompt, response=response, responses=count, shared=shared)

    @property
    def computed(self) -> float:
        """Number of tokens that a pass computes for each response."""
        return self.response + self.prompt / (self.responses if self.shared else 1)

    @property
    def budgeted(self) -> float:
        """Number of tokens of a micro-batch's budget that each response needs: the computed ones,
        or more where attention copies many keys (policy/packing.py)."""
        keys = self.prompt + self.response if self.shared else 0.0
        return max(self.computed, keys / KEYS_PER_TOKEN)

    @property
    def pairs(self) -> float:
        """Number of pairs (query, key) of each response under the causal mask."""
        of_prompt = self.prompt**2 / 2 / (self.responses if self.shared else 1)
        return of_prompt + self.response * (self.prompt + self.response / 2)

    @property
    def repeated_keys(self) -> float:
        """Number of keys that attention copies for each token of a micro-batch's budget: each
        response's own, after those of the prompt."""
        return (self.prompt + self.response) / self.budgeted if self.shared else 0.0

    @property
    def copied_queries(self) -> float:
        """Number of queries that attention copies for each computed token: those of responses."""
        return self.response / self.computed if self.shared else 0.0


def longest_group(config: Config, longest: int, samples: int) -> GroupTokens:
    """Return a group whose samples have `longest` tokens each. samples: number of samples that a
    rank has."""
    response = longest if config.rollout is None else config.rollout.sampling.max_tokens
    response = min(response, longest)
    responses = max(1, min(config.flow.group_size, samples))
    return GroupTokens.of(config, longest - response, response, responses=responses)
