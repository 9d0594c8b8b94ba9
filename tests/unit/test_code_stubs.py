"""Encoding of values between the test and the code of the response (code_stubs.py)."""

from __future__ import annotations

import collections
import json

import pytest

from megatron_async_rl.rollout.rewards.code_stubs import Encoder, TooLong, decode

VALUES = [
    None,
    True,
    7,
    -(2**200),
    2**63,
    0.25,
    float("inf"),
    2 - 3j,
    "text",
    b"bytes",
    bytearray(b"array"),
    [1, [2, "x"]],
    (1, ()),
    {1, 2},
    frozenset({"a"}),
    {"key": [1], 2: {"i": 3}, (1, 2): None},
]


class Kept:
    """Numbers of the values that stay on this side."""

    def __init__(self) -> None:
        self.values: list[object] = []

    def number(self, value: object) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def like(self, plain: object, number: int) -> tuple[object, object]:
        return plain, self.values[number]


def crossed(value: object, kept: Kept, limit: int = 10_000) -> object:
    sent = json.loads(json.dumps(Encoder(kept.number, limit).encode(value)))
    return decode(sent, kept.values.__getitem__, kept.like)


def test_plain_values_arrive_equal_and_of_the_same_class() -> None:
    for value in VALUES:
        kept = Kept()
        found = crossed(value, kept)
        assert (type(found), found) == (type(value), value)
        assert kept.values == []


def test_a_subclass_arrives_as_its_base_with_its_number() -> None:
    kept, counter = Kept(), collections.Counter("aab")
    assert crossed(counter, kept) == ({"a": 2, "b": 1}, counter)


def test_any_other_value_stays_and_has_a_number() -> None:
    kept, value = Kept(), object()
    assert crossed([1, value], kept) == [1, value]
    with pytest.raises(TypeError, match="a object cannot be passed"):
        Encoder(lambda value: None, 100).encode(value)


@pytest.mark.parametrize(
    ("value", "length"),
    [("abc", 4), (True, 1), (2**29, 11), ([1.0], 3), (b"12", 3), ({1.5: 2.5}, 4)],
)
def test_a_value_needs_exactly_its_length(value: object, length: int) -> None:
    assert crossed(value, Kept(), length) == value
    with pytest.raises(TooLong):
        crossed(value, Kept(), length - 1)
