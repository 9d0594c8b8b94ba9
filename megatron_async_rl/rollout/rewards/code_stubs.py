"""The two sides of a test with `assert`. Each side runs in a sandbox of its own (code.py).

    test(...)                          serve(...)
    assert f([1, 2]) == 3  --call-->   f([1, 2]) of the response's code
                           <--value--

Invariants:
- only plain values are copied to the tester. Any other value stays with the code and has a number.
  The tester receives a stand-in that supports calls, iteration, attributes and items, but no
  comparison, so that the code cannot decide which values are equal. A value of a subclass, such as
  a Counter, is copied as a value of its plain base class: comparisons use the base class, and only
  attributes that the base class lacks are requested from the code;
- each test starts with fresh copies of the code's names. The code can replace neither built-in
  names of Python nor a function that the test defines;
- each verdict is written when its test ends, so that a test that hangs does not affect earlier
  verdicts;
- a test that passes without checking the code has a verdict of its own.

This file runs without the package: its text is the beginning of both programs.
"""

import builtins
import contextlib
import itertools
import json
import os
import socket
import sys
from typing import Any

MAX_MESSAGE = 1 << 22
MAX_INITIAL = 1 << 16
"""Maximum characters of a message, and of the initial value of one name."""
MAX_ITEMS = 100_000
"""Maximum items of an iteration, because the code may return an endless generator."""
CODE_NAME = "program.py"


MAX_DECIMAL = 1 << 63
"""Limit of integers that are written in decimal. Larger integers are hexadecimal, because the
conversion to decimal digits takes quadratic time."""


class TooLong(Exception):
    """The encoded value exceeds the limit on characters."""


class Encoder:
    """Encoder of values as JSON. `keep`: function that returns the number of a value whose class is
    not plain, or None if the value has no number on this side. `limit`: maximum characters."""

    def __init__(self, keep: Any, limit: int) -> None:
        self._keep, self._left = keep, limit

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, float):
            return self._within(value, 1)
        # bool, a subclass of int, is encoded above.
        for kind in (int, str, list, tuple, set, frozenset, dict, bytes, bytearray, float, complex):
            if isinstance(value, kind):
                plain = self._plain(kind, value)
                number = None if type(value) is kind else self._keep(value)
                return plain if number is None else {"like": [plain, number]}
        number = self._keep(value)
        if number is None:
            raise TypeError(f"a {type(value).__name__} cannot be passed to the code")
        return self._within({"object": number}, 1)

    def _plain(self, kind: Any, value: Any) -> Any:
        """Encode a value with the methods of its built-in class `kind`, because a subclass may
        override them."""
        if kind is int:
            # `kind.method(value)`, not `value.method()`, so that a subclass cannot fake its value.
            value = int.__index__(value)
            short = -MAX_DECIMAL < value < MAX_DECIMAL
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
            # `value.items()`, because an OrderedDict has an order of its own.
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        return {kind.__name__: [self.encode(one) for one in kind.__iter__(value)]}

    def _within(self, encoded: Any, length: int) -> Any:
        """Return `encoded`. Raises TooLong if its `length` exceeds the remaining characters."""
        self._left -= length
        if self._left < 0:
            raise TooLong
        return encoded


def decode(value: Any, find: Any, like: Any) -> Any:
    """Decode a value. `find`: function that returns the value with a number. `like`: function that
    returns the value of a subclass from the value of its plain base class and its number."""
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
    """Run the code, send its names, and process requests until the tester closes the socket."""
    objects = []  # Never shrinks, because the tester may keep any number.

    def keep(value: Any) -> Any:
        objects.append(value)
        return len(objects) - 1

    def encode(value: Any) -> Any:
        return Encoder(keep, MAX_MESSAGE).encode(value)

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
            return list(itertools.islice(value, MAX_ITEMS)), []
        if do == "len":
            return len(value), []
        if do == "item":
            return value[args[0]], []
        # The arguments are sent back, because a test may check that a list was sorted in place.
        return value(*args, **kwargs), args

    def at_start(value: Any) -> Any:
        try:
            return Encoder(keep, MAX_INITIAL).encode(value)
        except BaseException:  # noqa: BLE001 - the value is too long or recursive
            return {"object": keep(value)}

    main = {"__name__": "__main__"}
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as channel:
        # Definitions before an exception may suffice for the tests.
        with contextlib.suppress(BaseException):
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
            except BaseException as error:  # noqa: BLE001 - the test receives exceptions of the code
                reply = {"error": type(error).__name__, "text": str(error)[:1000]}
            channel.write(json.dumps(reply) + "\n")
            channel.flush()


class Channel:
    """Channel of the tester to the code. It sends one request at a time."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self) -> Any:
        # Bounded, because the code could send an endless line.
        line = self.file.readline(MAX_MESSAGE)
        if not line.endswith("\n"):
            raise RuntimeError("the code ended, or sent too long a message")
        return json.loads(line)

    def names(self) -> Any:
        """Yield (name, encoded value) for each definition of the code, without built-in names."""
        while (defined := self.read()) is not None:
            name, value = defined
            if name.isidentifier() and not name.startswith("_") and not hasattr(builtins, name):
                yield name, value

    def request(self, do: Any, target: Any, name: Any, args: Any, kwargs: Any) -> Any:
        requested = Encoder(number_of, MAX_MESSAGE).encode([do, target, name, list(args), kwargs])
        self.file.write(json.dumps(requested) + "\n")
        self.file.flush()
        reply = self.read()
        if "error" in reply:
            # The code names its exception. Any name but that of an exception class becomes
            # RuntimeError.
            kind = getattr(builtins, str(reply["error"]), RuntimeError)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            # StopIteration would end a loop of the test before its assertions.
            if issubclass(kind, StopIteration):
                kind = RuntimeError
            raised: Any
            try:
                raised = kind(reply["text"])
            # Some exceptions, such as UnicodeDecodeError, take several arguments.
            except TypeError:
                raised = RuntimeError(reply["text"])
            # Checks.raised reads this attribute: only an exception of the code counts as a check.
            raised.from_code = True
            raise raised
        # Apply in-place changes of the code to the objects of the test.
        after = self.decode(reply["args"])
        for argument, changed in zip(args, after, strict=False):
            if isinstance(argument, list) and isinstance(changed, list):
                argument[:] = changed
            elif any(
                isinstance(argument, kind) and isinstance(changed, kind) for kind in (dict, set)
            ):
                argument.clear()
                argument.update(changed)
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
    """Stand-in of the tester for a value of the code that cannot be copied."""

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
        # The code must decide neither a comparison with its value nor the truth of its value.
        raise TypeError("a test can only compare plain values: numbers, text, lists and the like")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused


def like_class(kind: Any) -> Any:
    """Return a subclass of `kind` that requests attributes missing in `kind` from the code."""
    members: Any = {"__getattr__": StandIn.__getattr__}
    if kind is dict:
        members["__missing__"] = StandIn.__getitem__
    return type(kind.__name__, (kind,), members)


LIKE: Any = {
    kind: like_class(kind)
    for kind in (int, float, str, list, tuple, set, frozenset, dict, bytes, bytearray, complex)
}


def number_of(value: Any) -> Any:
    """Return the number of a value that the code keeps, or None for a value of the test."""
    kinds: Any = (StandIn, *LIKE.values())
    return value._number if isinstance(value, kinds) else None


class Checks:
    """Counter of the checks that ran in a test: assertions, and caught exceptions of the code.
    code_asserts.py inserts the calls."""

    def __init__(self) -> None:
        self.count = 0

    def asserted(self) -> None:
        self.count += 1

    def raised(self) -> None:
        self.count += isinstance(getattr(sys.exception(), "from_code", None), bool)


def test(descriptor: Any, tests: Any, entry_point: Any) -> Any:
    """Write one verdict per test: 1 if it passed, 0 if it failed, - if it passed without a
    check."""
    verdict, nothing = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 1)  # The output of a test must not look like a verdict.
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as file:
        channel, names = Channel(file), []
        # The code may send invalid messages; its missing names then fail the tests.
        with contextlib.suppress(BaseException):
            names.extend(channel.names())
        for source in tests:
            checks = Checks()
            passed = passes(source, channel, names, entry_point, checks)
            os.write(verdict, (b"1" if checks.count else b"-") if passed else b"0")


def passes(source: Any, channel: Any, names: Any, entry_point: Any, checks: Any) -> Any:
    """Return True if the test, including its functions test...() and check(candidate), ends without
    an exception."""
    try:
        # Decoded again for each test, because an earlier test may have changed its copies.
        defined = {name: channel.decode(value) for name, value in names}
        own = {"__name__": "__main__", "__builtins__": builtins}
        marks = {"_mar_asserted": checks.asserted, "_mar_raised": checks.raised}
        # In this order, so that the code cannot replace the marks or `__builtins__`.
        space = {**defined, **own, **marks}
        exec(compile(source, "tests.py", "exec"), space)
        for name, value in list(space.items()):
            # A function test...() of the code is not a test.
            if isinstance(value, StandIn) or not callable(value):
                continue
            if name.startswith("test"):
                value()
            elif name == "check" and entry_point is not None:
                value(defined[entry_point])
    except BaseException:  # noqa: BLE001 - any exception fails the test
        return False
    return True
