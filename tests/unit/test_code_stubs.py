"""Encoding of values between the test and the code of the response (code_stubs.py)."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import operator
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_async_rl.rollout.rewards import code_stubs
from megatron_async_rl.rollout.rewards.code_stubs import (
    MAX_INITIAL,
    Channel,
    Checks,
    Encoder,
    TooLong,
    decode,
    passes,
    serve,
)
from tests.cases import looped

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
    class Length(float):
        pass

    kept, counter, length = Kept(), collections.Counter("aab"), Length(2.5)
    assert crossed(counter, kept) == ({"a": 2, "b": 1}, counter)
    assert crossed(length, kept, limit=1) == (2.5, length)
    with pytest.raises(TooLong):
        crossed(length, kept, limit=0)


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


@contextlib.contextmanager
def served(source: str) -> Iterator[tuple[Channel, dict[str, Any]]]:
    """Yield the tester's channel to `source` and the names that `source` defines, decoded."""
    local, remote = socket.socketpair()
    code = threading.Thread(target=serve, args=(remote.detach(), source))
    code.start()
    with local, local.makefile("rw") as file:
        channel = Channel(file)
        yield channel, {name: channel.decode(value) for name, value in channel.names()}
    code.join()


def test_the_code_sends_its_names_and_short_plain_values() -> None:
    source = (
        f"import math\nx = [1]\n_own = abs = 3\nfits = 'x' * {MAX_INITIAL - 1}\n"
        f"long = 'x' * {MAX_INITIAL}\nloop = []\nloop.append(loop)\n1/0\ny = 2"
    )
    with served(source) as (_, names):
        numbers = {name: vars(names.pop(name)).get("_number") for name in ("long", "loop")}
        assert numbers == {"long": 0, "loop": 1}
        assert names == {"x": [1], "fits": "x" * (MAX_INITIAL - 1)}
    forged = [["x y", 1], ["_x", 2], ["abs", 3], ["ok", 4], None, ["late", 5]]
    lines = io.StringIO("".join(f"{json.dumps(one)}\n" for one in forged))
    assert list(Channel(lines).names()) == [("ok", 4)]


BOX = """
class Box:
    x = 5
    def __init__(self): self.items = {}
    def __len__(self): return 3
    def __getitem__(self, key): return self.items[key]
    def __setitem__(self, key, value): self.items[key] = value
    def __iter__(self): return iter(range(10**6))
    def both(self, a, *, b): return [a, b, self.x]
box = Box()
def same(one): return one is box
"""


def test_a_stand_in_passes_operations_on_and_refuses_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_stubs, "MAX_ITEMS", 4)
    with served(BOX) as (_, names):
        box = names["box"]
        box["key"] = 7
        assert (len(box), box["key"], list(box)) == (3, 7, [0, 1, 2, 3])
        box.x = 6
        assert box.both(1, b={2}) == [1, {2}, 6]
        assert names["same"](box) is True
        assert names["same"](names["Box"]()) is False
        for compare in (
            bool,
            *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        ):
            with pytest.raises(TypeError, match="only compare plain values"):
                compare(*([box] if compare is bool else [box, box]))
        with pytest.raises(TypeError):
            hash(box)


SUBCLASSES = """
import collections, enum
counter = collections.Counter("aab")
default = collections.defaultdict(lambda: 9)
ordered = collections.OrderedDict(a=1, b=2)
ordered.move_to_end("a")
Point = collections.namedtuple("Point", "x y")
point = Point(1, 2)
class Level(enum.IntEnum): HIGH = 3
level = Level.HIGH
def is_level(one): return one is level
"""


def test_a_value_of_a_subclass_compares_as_plain_and_keeps_its_attributes() -> None:
    with served(SUBCLASSES) as (_, names):
        assert names["counter"] == {"a": 2, "b": 1}
        assert names["counter"].most_common(1) == [("a", 2)]
        assert (names["default"] == {}, names["default"]["new"]) == (True, 9)
        assert list(names["ordered"]) == ["b", "a"]
        assert (names["point"], names["point"].y) == ((1, 2), 2)
        assert (names["level"], names["level"].name) == (3, "HIGH")
        assert names["is_level"](names["level"]) is True
        assert names["is_level"](3) is False


def test_changes_of_arguments_reach_the_objects_of_the_test() -> None:
    change = (
        "def f(l, d, s, t):\n  l.sort(); d.pop(1); d[2] = 'x'; s.add(3); t[0].append(1)\n"
        "  return len(l)"
    )
    with served(change) as (_, names):
        given: tuple[Any, ...] = ([2, 1], {1: 1}, {1}, ([],))
        assert names["f"](*given) == 2
        assert given == ([1, 2], {2: "x"}, {1, 3}, ([],))


@looped(
    ("statement", "kind", "text"),
    [
        ("raise KeyError('k')", KeyError, "\"'k'\""),
        ("raise ValueError('x' * 1001)", ValueError, "x" * 1000),
        ("raise StopIteration('s')", RuntimeError, "s"),
        ("raise StopAsyncIteration('s')", StopAsyncIteration, "s"),
        ("raise type('Own', (Exception,), {})('own')", RuntimeError, "own"),
        ("raise type('abs', (Exception,), {})('no class')", RuntimeError, "no class"),
        ("raise type('int', (Exception,), {})('no exception')", RuntimeError, "no exception"),
        ("raise SystemExit('end')", RuntimeError, "end"),
        ("b'\\xff'.decode()", RuntimeError, "'utf-8' codec can't decode byte 0xff in position 0"),
        ("return 'x' * 2**22", RuntimeError, ""),
    ],
)
def test_an_exception_of_the_code_is_raised_in_the_test(
    statement: str, kind: type[Exception], text: str
) -> None:
    with served(f"def f(): {statement}") as (_, names):
        with pytest.raises(kind) as raised:
            names["f"]()
        assert type(raised.value) is kind
        assert str(raised.value) == text or str(raised.value).startswith(f"{text}:")
        assert raised.value.from_code is True  # type: ignore[attr-defined]


def test_a_line_without_an_end_within_the_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Channel(io.StringIO('"ab"\n')).read() == "ab"
    monkeypatch.setattr(code_stubs, "MAX_MESSAGE", 5)
    assert Channel(io.StringIO('"ab"\n')).read() == "ab"
    monkeypatch.setattr(code_stubs, "MAX_MESSAGE", 4)
    for text in ('"ab"\n', ""):
        with pytest.raises(RuntimeError, match="the code ended, or sent too long a message"):
            Channel(io.StringIO(text)).read()


JUDGED = "def f(x): return x + 1\ndef test_g(): raise KeyError\ncount = 1\ncheck = 2"


@looped(
    ("source", "entry_point", "verdict"),
    [
        ("_mar_asserted()\nassert f(1) == 2", None, (True, 1)),
        ("_mar_asserted()\nassert f(1) == 3", None, (False, 1)),
        ("assert __name__ == '__main__' and count == 1", None, (True, 0)),
        ("def test_it(): f(1, 2)", None, (False, 0)),
        ("test_it = 1", None, (True, 0)),
        ("def other(): raise KeyError", None, (True, 0)),
        ("def check(candidate):\n  _mar_asserted()\n  assert candidate(1) == 2", "f", (True, 1)),
        ("def check(candidate):\n  assert candidate(1) == 3", "f", (False, 0)),
        ("def check(candidate): raise KeyError", None, (True, 0)),
        ("def check(candidate): pass", "g", (False, 0)),
        ("try: f('')\nexcept TypeError: _mar_raised()", None, (True, 1)),
        ("try: 1 / 0\nexcept ZeroDivisionError: _mar_raised()", None, (True, 0)),
        ("_mar_raised()", None, (True, 0)),
        ("raise SystemExit", None, (False, 0)),
    ],
)
def test_a_test_passes_without_an_exception_and_counts_its_checks(
    source: str, entry_point: str | None, verdict: tuple[bool, int]
) -> None:
    with served(JUDGED) as (channel, _):
        checks = Checks()
        # An encoded value and a function, as the code sends them.
        names = [("f", {"object": 0}), ("test_g", {"object": 1}), ("count", 1), ("check", 2)]
        assert (passes(source, channel, names, entry_point, checks), checks.count) == verdict
