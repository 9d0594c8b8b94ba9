"""Two sides of a test with `assert`, each in a sandbox of its own (code.py).

    test(...)                          serve(...)
    assert f([1, 2]) == 3  --call-->   f([1, 2]) of the response's code
                           <--value--

Invariants:
- only plain values cross. Any other value stays with the code, under a number. Its stand-in
  supports calls, iteration, attributes and items, but no comparison, so the code cannot decide what
  equals what. A value of a subclass, such as a Counter, crosses as its plain base: the base
  compares, and the code answers only for attributes that the base lacks;
- each test starts with fresh names of the code. The code cannot replace built-in names of Python,
  nor a function that the test defines;
- each verdict is written when its test ends, so a test that hangs leaves earlier verdicts intact;
- a test that passes without checking the code is distinguished from a pass.

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
"""Maximum characters of a message, and of the initial value of one name."""
MOST = 100_000
"""Maximum items of an iteration: the code may return an endless generator."""
CODE_NAME = "program.py"


WORD = 1 << 63
"""Bound of integers written in decimal. Larger ones are hexadecimal: decimal digits take quadratic
time."""


class TooLong(Exception):
    """The encoded value exceeds the limit on characters."""


class Encoder:
    """Encoder of values as JSON. `keep`: returns the number of a value that is not of a plain
    class, or None if it has none on this side. `room`: limit on characters."""

    def __init__(self, keep: Any, room: int) -> None:
        self._keep, self._room = keep, room

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, float):
            return self._within(value, 1)
        # bool is a subclass of int, and is handled above.
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
            # `kind.method(value)` instead of `value.method()`: a subclass cannot fake its value.
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
            # The order of `value.items()`: an OrderedDict has its own order.
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        return {kind.__name__: [self.encode(one) for one in kind.__iter__(value)]}

    def _within(self, encoded: Any, length: int) -> Any:
        self._room -= length
        if self._room < 0:
            raise TooLong
        return encoded


def decode(value: Any, find: Any, like: Any) -> Any:
    """Decode a value. `find`: returns the value with a number. `like`: makes the value of a
    subclass from its plain base and its number."""
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
    """Run the code, send its names, then answer requests until the tester closes the socket."""
    objects = []  # never shrinks: the tester may hold any number

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
        # The arguments return, too: a test may check that a list was sorted in place.
        return value(*args, **kwargs), args

    def at_start(value: Any) -> Any:
        try:
            return Encoder(keep, LONGEST_NAME).encode(value)
        except BaseException:  # noqa: BLE001 - too long, or recursive
            return {"object": keep(value)}

    main = {"__name__": "__main__"}
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as channel:
        with contextlib.suppress(BaseException):  # earlier definitions may suffice
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
            except BaseException as error:  # noqa: BLE001 - raised by the code, for the test
                reply = {"error": type(error).__name__, "text": str(error)[:1000]}
            channel.write(json.dumps(reply) + "\n")
            channel.flush()


class Channel:
    """Requests of the tester to the code, one at a time."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self) -> Any:
        # Bounded: the code could send an endless line.
        line = self.file.readline(LONGEST)
        if not line.endswith("\n"):
            raise RuntimeError("the code ended, or wrote too much")
        return json.loads(line)

    def names(self) -> Any:
        """Yield (name, encoded value) of the code's definitions, without built-in names."""
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
            # The code names its exception; anything but a class of exceptions becomes RuntimeError.
            kind = getattr(builtins, str(reply["error"]), RuntimeError)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if issubclass(kind, StopIteration):  # would end a loop of the test before its asserts
                kind = RuntimeError
            raised: Any
            try:
                raised = kind(reply["text"])
            except TypeError:  # takes several arguments, like UnicodeDecodeError
                raised = RuntimeError(reply["text"])
            # Read by Checks.raised: only an exception of the code counts as a check.
            raised.from_code = True
            raise raised
        # Changes in place become visible in the test's own objects.
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
        # The code must not answer a comparison with itself, nor its own truth.
        raise TypeError("a test can only compare plain values: numbers, text, lists and the like")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused


def like_class(kind: Any) -> Any:
    """Return a subclass of `kind` that forwards attributes which `kind` lacks to the code."""
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
    """Number of checks that ran in a test: assertions, and caught exceptions of the code.
    code_asserts.py inserts the calls."""

    def __init__(self) -> None:
        self.count = 0

    def asserted(self) -> None:
        self.count += 1

    def raised(self) -> None:
        self.count += isinstance(getattr(sys.exception(), "from_code", None), bool)


def test(descriptor: Any, tests: Any, entry_point: Any) -> Any:
    """Write one verdict per test: 1 passed, 0 failed, - passed without a check."""
    verdict, nothing = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 1)  # the output of a test must not look like a verdict
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as file:
        channel, names = Channel(file), []
        with contextlib.suppress(BaseException):  # the code may answer anything
            names.extend(channel.names())
        for source in tests:
            checks = Checks()
            passed = passes(source, channel, names, entry_point, checks)
            os.write(verdict, (b"1" if checks.count else b"-") if passed else b"0")


def passes(source: Any, channel: Any, names: Any, entry_point: Any, checks: Any) -> Any:
    """Return True if the test ends without an exception, its functions test...() and
    check(candidate) included."""
    try:
        # Decoded again for each test: an earlier test may have changed its copies.
        given = {name: channel.decode(value) for name, value in names}
        own = {"__name__": "__main__", "__builtins__": builtins}
        marks = {"_mar_asserted": checks.asserted, "_mar_raised": checks.raised}
        # The order matters: the code cannot replace the marks or `__builtins__`.
        space = {**given, **own, **marks}
        exec(compile(source, "tests.py", "exec"), space)
        for name, value in list(space.items()):
            # A function of the code named test...() is not a test.
            if isinstance(value, StandIn) or not callable(value):
                continue
            if name.startswith("test"):
                value()
            elif name == "check" and entry_point is not None:
                value(given[entry_point])
    except BaseException:  # noqa: BLE001 - a test that did not end has failed
        return False
    return True
