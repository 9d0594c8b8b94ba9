"""Continued responses: seeds, stop strings, and the record of tokens and experts."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from megatron_async_rl.rollout.continuation import (
    joined,
    recorded_from,
    require_room,
    sample_seed,
    stopped_length,
    truncated,
)
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.types import PartialResponse, Request

STOP = ("the end", "\n\n")


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(one) for one in ids)


def ids(text: str) -> list[int]:
    return [ord(one) for one in text]


def tokens(*values: int, version: int = 0) -> PartialResponse:
    count = len(values)
    return PartialResponse(
        response_ids=np.array(values, np.int32),
        behavior_logprobs=np.full(count, -0.5, np.float32),
        versions=np.full(count, version, np.int32),
    )


def test_experts_of_a_response_in_three_parts_are_recorded_once_per_token() -> None:
    """The prompt has 3 tokens. The experts of a token are 2 bytes, each with its position."""

    def experts(start: int, end: int) -> bytes:
        return bytes(place for place in range(start, end) for _ in range(2))

    whole, done = None, 0
    for count in (1, 4, 2):
        start = recorded_from(3, whole)
        assert start == (0 if whole is None else 3 + done - 1)
        done += count
        part = dataclasses.replace(
            tokens(*range(count)), routed_experts=experts(start, 3 + done - 1)
        )
        whole = joined(whole, part)
    assert whole is not None
    assert whole.routed_experts == experts(0, 3 + 7 - 1)
    assert truncated(whole, 4, prompt=3).routed_experts == experts(0, 3 + 4 - 1)
    assert recorded_from(3, tokens(1, 2)) == 0, "a prefix without a record is recorded now"


def test_seeds_depend_only_on_the_run_the_position_and_the_prefix() -> None:
    places = [
        (run, group, k, prefix)
        for run in (0, 1)
        for group in (-1, 0, 1, 11)
        for k in (0, 1, 11)
        for prefix in (0, 1, 11)
    ]
    seeds = [sample_seed(*place) for place in places]
    assert seeds == [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("text", "prefix", "length"),
    [
        ("this is the end of it", 10, 15),
        ("this is the end of it", 14, 15),
        ("this\n\n", 5, 6),
        ("this goes on", 4, None),
        ("this is the end of it", 0, 15),
    ],
    ids=["across", "only its last token is new", "second string", "none", "without a prefix"],
)
def test_a_stop_string_ends_the_response_at_any_position(
    text: str, prefix: int, length: int | None
) -> None:
    assert stopped_length(ids(text), prefix, STOP, decode) == length


def test_sampled_tokens_follow_the_prefix() -> None:
    both = joined(tokens(1, 2, version=3), tokens(4, version=5))
    assert both is not None
    assert both.response_ids.tolist() == [1, 2, 4]
    assert both.versions.tolist() == [3, 3, 5]
    assert both.start_version == 3
    only = tokens(7)
    assert joined(None, only) is only
    assert joined(only, None) is only
    assert joined(None, None) is None


def test_a_prefix_leaves_a_token_to_sample() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,))
    for prefix in (None, tokens(1), tokens(1, 2)):
        require_room(Request(group=4, k=1, prompt=prompt, prefix=prefix), 3)
    with pytest.raises(
        ValueError, match="request 4-1 has a prefix of 3 tokens; it must have fewer"
    ):
        require_room(Request(group=4, k=1, prompt=prompt, prefix=tokens(1, 2, 3)), 3)
