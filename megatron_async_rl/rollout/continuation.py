"""Continued responses, which start with a prefix of tokens that this or another engine sampled.

Invariants:
- the tokens of a prefix keep their log-probs, versions and routed experts; new tokens follow them;
- a continuation has its own seed; with the seed of the prefix it would repeat the same draws;
- a stop string ends a response at its first occurrence in the decoded text, even if the string
  begins in the prefix (vLLM treats the prefix as part of the prompt and does not search it) or if
  vLLM's detokenizer joins the tokens differently.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from megatron_async_rl.samples.types import PartialResponse, Request


def sample_seed(run_seed: int, group: int, sample: int, prefix: int = 0) -> int:
    """Return the seed of one response, 63 bits. The seed depends only on the run's seed, the
    response's position in the run and the length of its prefix, so a replay draws the same
    tokens."""
    place = f"{run_seed}/{group}/{sample}" + (f"/{prefix}" if prefix else "")
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1


def require_room(request: Request, max_tokens: int) -> None:
    """Raise ValueError for a prefix that leaves no token to sample."""
    length = 0 if request.prefix is None else len(request.prefix.response_ids)
    if length >= max_tokens:
        raise ValueError(
            f"request {request.id} has a prefix of {length} tokens; it must have fewer than"
            f" rollout.sampling.max_tokens: {max_tokens}, so that a token is left to sample"
        )


def joined(
    prefix: PartialResponse | None, sampled: PartialResponse | None
) -> PartialResponse | None:
    """Return `prefix` followed by `sampled`. The routed experts of `sampled` start at the position
    that `recorded_from` returns for the prefix."""
    if prefix is None or sampled is None:
        return prefix or sampled
    return PartialResponse(
        response_ids=np.concatenate([prefix.response_ids, sampled.response_ids]),
        behavior_logprobs=np.concatenate([prefix.behavior_logprobs, sampled.behavior_logprobs]),
        versions=np.concatenate([prefix.versions, sampled.versions]),
        # Each token has the same number of bytes, so the records can be concatenated.
        routed_experts=(
            None
            if sampled.routed_experts is None
            else (prefix.routed_experts or b"") + sampled.routed_experts
        ),
    )


def recorded_from(prompt: int, prefix: PartialResponse | None) -> int:
    """Return the position of the first token without recorded experts, counted from the start of
    the prompt. `prompt`: number of tokens of the prompt."""
    if prefix is None or prefix.routed_experts is None:
        return 0
    # The model has not read the last sampled token, so that token has no experts yet.
    return prompt + len(prefix.response_ids) - 1


def truncated(tokens: PartialResponse, length: int, prompt: int) -> PartialResponse:
    """Return the first `length` tokens of a response to a prompt of `prompt` tokens."""
    experts = tokens.routed_experts
    if experts is not None:
        # One row of bytes per token of prompt and response, except the last token.
        row = len(experts) // (prompt + len(tokens.response_ids) - 1)
        experts = experts[: row * (prompt + length - 1)]
    return PartialResponse(
        response_ids=tokens.response_ids[:length],
        behavior_logprobs=tokens.behavior_logprobs[:length],
        versions=tokens.versions[:length],
        routed_experts=experts,
    )


def stopped_length(
    ids: Sequence[int], prefix: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return the number of tokens up to and including the first token that completes a string of
    `stop`; None if no token does. The caller ensures that the first `prefix` tokens complete no
    string."""

    def has_stop(length: int) -> bool:
        text = decode(ids[:length])
        return any(string in text for string in stop)

    if not stop or not has_stop(len(ids)):
        return None
    # Binary search: if a text contains a string, every longer text does, too. Decoding the text of
    # each length would take quadratic time.
    lengths = range(prefix + 1, len(ids) + 1)
    return lengths[bisect_left(lengths, True, key=has_stop)]
