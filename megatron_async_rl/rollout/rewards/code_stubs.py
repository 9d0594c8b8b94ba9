"""Two sides of a test with `assert`, each in a sandbox of its own (code.py).

    test(...)                          serve(...)
    assert f([1, 2]) == 3  --call-->   f([1, 2]) of the response's code
                           <--value--

Invariants:
- only plain values cross: what else the code returns stays with it, under a number. A stand-in for
  it can be called, gone through, and asked for or given attributes and items, and never compared,
  so the code has no say in what equals what. A value of a subclass, such as a Counter, crosses as
  its plain base: the base compares, and only what the base does not have is asked of the code;
- each test begins with the names of the code afresh. Python's own names are never the code's, and a
  function that a test defines is the test's own, whatever the code calls its own;
- each verdict is written as its test ends, so a test that does not end costs none before it;
- a test that passes without a check of the code's work having run is distinguished from a pass.

Runs without this package.
"""

import builtins
import contextlib
import itertools
import json
import os
import socket
import sys
from typing import Any

LONGEST = 1 << 22
LONGEST_NAME = 1 << 16
"""Characters of a message, and of one of the values that the code's names have at the start."""
MOST = 100_000
CODE_NAME = "program.py"


WORD = 1 << 63
"""Whole numbers up to it are written as JSON's; digits of longer ones would take too long."""


class TooLong(Exception):
    """The value takes more than `room` characters."""


class Encoder:
    """`keep`: called with a value that is not of a plain class; its number, or None for a value
    that has none here."""

    def __init__(self, keep: Any, room: int) -> None:
        self._keep, self._room = keep, room

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, float):
            return self._within(value, 1)
        for kind in (int, str, list, tuple, set, frozenset, dict, bytes, bytearray, float, complex):
            if isinstance(value, kind):
                plain = self._plain(kind, value)
                number = None if type(value) is kind else self._keep(value)
                return plain if number is None else {"like": [plain, number]}
        number = self._keep(value)
        if number is None:
            raise TypeError(f"a {type(value).__name__} cannot be given to the code")
        return self._within({"object": number}, 1)

    def _plain(self, kind: Any, value: Any) -> Any:
        """Encode a value by the methods of its built-in class `kind`; a subclass may have
        overridden its own."""
        if kind is int:
            value = int.__index__(value)
            short = -WORD < value < WORD
            self._within(None, value.bit_length() // 3 + 1)
            return value if short else {"i": hex(value)}
        if kind is str:
            return self._within(str.__str__(value), str.__len__(value) + 1)
        if kind is float:
            return self._within(float.__float__(value), 1)
        if kind is complex:
            return self._within({"complex": [value.real, value.imag]}, 1)
        self._within(None, kind.__len__(value) + 1)
        if kind in (bytes, bytearray):
            return {kind.__name__: kind.hex(value)}
        if kind is dict:
            # In the order of `value`: an OrderedDict keeps one of its own.
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        return {kind.__name__: [self.encode(one) for one in kind.__iter__(value)]}

    def _within(self, encoded: Any, length: int) -> Any:
        self._room -= length
        if self._room < 0:
            raise TooLong
        return encoded


def decode(value: Any, find: Any, like: Any) -> Any:
    """`like`: makes a value of a subclass out of its plain base and its number."""
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "i":
        return int(inside, 16)
    if kind == "dict":
        return {decode(k, find, like): decode(v, find, like) for k, v in inside}
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(inside)
    if kind == "complex":
        return complex(*inside)
    if kind == "object":
        return find(inside)
    if kind == "like":
        return like(decode(inside[0], find, like), inside[1])
    plain = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return plain[kind](decode(one, find, like) for one in inside)


def serve(descriptor: Any, source: Any) -> Any:
    objects = []

    def keep(value: Any) -> Any:
        objects.append(value)
        return len(objects) - 1

    def encode(value: Any) -> Any:
        return Encoder(keep, LONGEST).encode(value)

    def answer(do: Any, target: Any, name: Any, args: Any, kwargs: Any) -> Any:
        value = objects[target]
        if do == "get":
            return getattr(value, name), []
        if do == "set":
            setattr(value, name, args[0])
            return None, []
        if do == "put":
            return value.__setitem__(*args), []
        if do == "list":
            return list(itertools.islice(value, MOST)), []
        if do == "len":
            return len(value), []
        if do == "item":
            return value[args[0]], []
        return value(*args, **kwargs), args

    def at_start(value: Any) -> Any:
        try:
            return Encoder(keep, LONGEST_NAME).encode(value)
        except BaseException:  # noqa: BLE001 - long, or holds itself
            return {"object": keep(value)}

    main = {"__name__": "__main__"}
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as channel:
        with contextlib.suppress(BaseException):  # what it defined before may do
            exec(compile(source, CODE_NAME, "exec"), main)
        for name, value in list(main.items()):
            if not name.startswith("_") and type(value).__name__ != "module":
                channel.write(json.dumps([name, at_start(value)]) + "\n")
        channel.write("null\n")
        channel.flush()
        for line in channel:
            requested = decode(
                json.loads(line), objects.__getitem__, lambda _, number: objects[number]
            )
            try:
                result, args = answer(*requested)
                reply = {"value": encode(result), "args": encode(args)}
            except BaseException as error:  # noqa: BLE001 - the code's own, passed to the test
                reply = {"error": type(error).__name__, "text": str(error)[:1000]}
            channel.write(json.dumps(reply) + "\n")
            channel.flush()


class Channel:
    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self) -> Any:
        line = self.file.readline(LONGEST)
        if not line.endswith("\n"):
            raise RuntimeError("the code ended, or wrote too much")
        return json.loads(line)

    def names(self) -> Any:
        """(name, encoded value) of what the code defined, which has no say in Python's own."""
        while (defined := self.read()) is not None:
            name, value = defined
            if name.isidentifier() and not name.startswith("_") and not hasattr(builtins, name):
                yield name, value

    def request(self, do: Any, target: Any, name: Any, args: Any, kwargs: Any) -> Any:
        requested = Encoder(number_of, LONGEST).encode([do, target, name, list(args), kwargs])
        self.file.write(json.dumps(requested) + "\n")
        self.file.flush()
        reply = self.read()
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), RuntimeError)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if issubclass(kind, StopIteration):  # would end a loop of the test's, and its asserts
                kind = RuntimeError
            raised: Any
            try:
                raised = kind(reply["text"])
            except TypeError:  # one of several arguments, such as UnicodeDecodeError
                raised = RuntimeError(reply["text"])
            raised.from_code = True
            raise raised
        after = self.decode(reply["args"])
        for given, changed in zip(args, after, strict=False):
            if isinstance(given, list) and isinstance(changed, list):
                given[:] = changed
            elif any(isinstance(given, kind) and isinstance(changed, kind) for kind in (dict, set)):
                given.clear()
                given.update(changed)
        return self.decode(reply["value"])

    def decode(self, value: Any) -> Any:
        return decode(value, self.stand_in, self.like)

    def stand_in(self, number: Any) -> Any:
        return StandIn(self, number)

    def like(self, plain: Any, number: Any) -> Any:
        value = LIKE[type(plain)](plain)
        value._channel, value._number = self, number
        return value


class StandIn:
    """Stand-in, on the test's side, for a value of the code that cannot be copied."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, channel: Any, number: Any) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.request("call", self._number, "", args, kwargs)

    def __getattr__(self, name: Any) -> Any:
        return self._channel.request("get", self._number, name, (), {})

    def __setattr__(self, name: Any, value: Any) -> None:
        self._channel.request("set", self._number, name, (value,), {})

    def __iter__(self) -> Any:
        return iter(self._channel.request("list", self._number, "", (), {}))

    def __len__(self) -> Any:
        return self._channel.request("len", self._number, "", (), {})

    def __getitem__(self, key: Any) -> Any:
        return self._channel.request("item", self._number, "", (key,), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._channel.request("put", self._number, "", (key, value), {})

    def _refused(self, *_: Any) -> Any:
        raise TypeError("a test can only judge plain values: numbers, text, lists and the like")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused


def like_class(kind: Any) -> Any:
    """A subclass whose values have what `kind` has, and request the rest from the code."""
    members: Any = {"__getattr__": StandIn.__getattr__}
    if kind is dict:
        members["__missing__"] = StandIn.__getitem__
    return type(kind.__name__, (kind,), members)


LIKE: Any = {
    kind: like_class(kind)
    for kind in (int, float, str, list, tuple, set, frozenset, dict, bytes, bytearray, complex)
}


def number_of(value: Any) -> Any:
    kinds: Any = (StandIn, *LIKE.values())
    return value._number if isinstance(value, kinds) else None


class Checks:
    """Checks of the code's work that ran in a test: assertions, and exceptions of the code that the
    test caught. code_asserts.py marks them."""

    def __init__(self) -> None:
        self.count = 0

    def asserted(self) -> None:
        self.count += 1

    def raised(self) -> None:
        self.count += isinstance(getattr(sys.exception(), "from_code", None), bool)


def test(descriptor: Any, tests: Any, entry_point: Any) -> Any:
    """Write a verdict for each test: 1 if it passes, 0 if it fails, - if it passes and checked
    nothing."""
    verdict, nothing = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 1)  # what a test prints
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as file:
        channel, names = Channel(file), []
        with contextlib.suppress(BaseException):  # whatever the code answers
            names.extend(channel.names())
        for source in tests:
            checks = Checks()
            passed = passes(source, channel, names, entry_point, checks)
            os.write(verdict, (b"1" if checks.count else b"-") if passed else b"0")


def passes(source: Any, channel: Any, names: Any, entry_point: Any, checks: Any) -> Any:
    """Return True if the test ends without an exception; functions test... and check(candidate)
    that it defines are called."""
    try:
        given = {name: channel.decode(value) for name, value in names}
        own = {"__name__": "__main__", "__builtins__": builtins}
        marks = {"_mar_asserted": checks.asserted, "_mar_raised": checks.raised}
        space = {**given, **own, **marks}
        exec(compile(source, "tests.py", "exec"), space)
        for name, value in list(space.items()):
            if isinstance(value, StandIn) or not callable(value):
                continue
            if name.startswith("test"):
                value()
            elif name == "check" and entry_point is not None:
                value(given[entry_point])
    except BaseException:  # noqa: BLE001 - a test that did not end has failed
        return False
    return True
