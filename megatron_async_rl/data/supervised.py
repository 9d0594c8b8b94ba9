"""Given responses as train batches, for `loss: sft`. Responses are tokenized once, at the start.

A sample is prompt + response + end-of-sequence; its log-probs are zeros, which the `sft` loss never
reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.prompts import Order
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt, Sample


class SupervisedSource:
    """Endless batches of `prompts_per_step` given responses, with a resumable position.

    `prompts`: each with `fields["response"]` (text) and optionally `fields["weight"]` (>= 0, the
    sample's loss weight). Raises DataError, naming the prompt, for a response that is missing, not
    text, or too long for `max_context` (prompt + response + end-of-sequence tokens).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool,
        max_context: int | None,
    ) -> None:
        self._prompts = tuple(prompts)
        self._prompts_per_step = prompts_per_step
        texts = [_response(prompt) for prompt in self._prompts]
        self._weights = [_weight(prompt) for prompt in self._prompts]
        end = tokenizer.eos_ids[0]
        self._responses = [
            np.asarray([*ids, end], dtype=np.int32)
            for ids in tokenizer.encode_many(texts, special_tokens=False)
        ]
        for prompt, response in zip(self._prompts, self._responses, strict=True):
            total = len(prompt.token_ids) + len(response)
            if max_context is not None and total > max_context:
                raise DataError(
                    prompt.id,
                    None,
                    f"prompt and response have {total} tokens together, the model takes"
                    f" {max_context}",
                    "shorten the line or remove it",
                )
        self._order = Order(len(self._prompts), seed=seed, shuffle=shuffle)
        self._consumed = 0

    def next_batch(self, version: int) -> TrainBatch:
        samples = []
        for _ in range(self._prompts_per_step):
            samples.append([self._sample(self._order.next(), version)])
            self._consumed += 1
        return TrainBatch.of(version, samples)

    def _sample(self, position: int, version: int) -> Sample:
        prompt, response = self._prompts[position], self._responses[position]
        return Sample(
            id=f"{self._consumed}-0",
            prompt=prompt,
            response_ids=response,
            behavior_logprobs=np.zeros(len(response), dtype=np.float32),
            versions=np.full(len(response), version, dtype=np.int32),
            loss_mask=np.ones(len(response), dtype=np.uint8),
            text=prompt.fields["response"],
            finish_reason="given",
            reward=0.0,
            weight=self._weights[position],
        )

    def state(self) -> dict[str, Any]:
        return {"order": self._order.state(), "consumed": self._consumed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._order.load_state(state["order"])
        self._consumed = int(state["consumed"])


def _response(prompt: Prompt) -> str:
    response = prompt.fields.get("response")
    if not isinstance(response, str):
        raise DataError(
            prompt.id,
            None,
            f"`response` is {response!r}",
            "give every line a `response` text for `loss: sft`",
        )
    return response


def _weight(prompt: Prompt) -> float:
    weight = prompt.fields.get("weight", 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 <= weight < float("inf")
    ):
        raise DataError(
            prompt.id,
            None,
            f"`weight` is {weight!r}",
            "make it a finite number >= 0, or leave it out",
        )
    return float(weight)
