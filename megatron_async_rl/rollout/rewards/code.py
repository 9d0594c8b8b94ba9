"""Programs: 1 if the response's code passes all of the prompt's `tests`, else 0.

Tests are pairs of input and output, for a program that reads and prints, or Python with `assert`,
for functions. Both the code and the tests run in sandboxes (sandbox.py), and never in the same: the
expected outputs do not enter the sandbox of the code, and an `assert` runs in one of its own, where
the functions of the code are stand-ins that send arguments over and get plain values back
(code_stubs.py). So nothing that the code does to its interpreter can make a test pass; but a name
that a test uses and does not import is the code's, as the function that it tests is.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_async_rl.config.environment import CODE_CPU_S, CODE_SHARE_OF_TIME
from megatron_async_rl.rollout.rewards.registry import BuiltInReward, RewardError
from megatron_async_rl.rollout.rewards.sandbox import (
    Ended,
    Isolation,
    Limits,
    Sandbox,
    SandboxError,
    run,
)
from megatron_async_rl.samples.types import Prompt

WALL_PER_CPU = 4
STARVED = 0.5
"""Share of the processor time that programs could have had, below which the machine was busy."""
PYTHON = ("python", "python3", "py")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+.#-]*)[^`]*")
_CLASS = re.compile(r"^class Test|\bTestCase\b", re.M)
_CHECK, _CHECK_CALLED = re.compile(r"^def check\b", re.M), re.compile(r"^check\(", re.M)
_STUBS = Path(__file__).with_name("code_stubs.py")


def code(
    prompt: Prompt,
    response: str,
    /,
    *,
    timeout_s: float,
    partial: bool = False,
    cpu_s: float = CODE_CPU_S,
    memory_mib: int = 512,
    processes: int = 8,
    isolation: Isolation = "namespaces",
) -> float:
    """`partial`: the share of the tests that pass, in the place of all or nothing."""
    tests: Any = tests_of(prompt)
    budget = _Budget(timeout_s, cpu_s)
    limits = Limits(
        cpu_s=cpu_s,
        wall_s=budget.left_s,
        memory_mib=memory_mib,
        processes=processes,
        isolation=isolation,
    )
    source = source_of(response)
    passed: Iterable[bool]
    if isinstance(tests[0], str):
        passed = _asserts(source, tests, prompt.fields.get("entry_point"), limits, budget)
    else:
        passed = _outputs(source, tests, limits, budget)
    if partial:
        return sum(passed) / len(tests)
    return float(all(passed))


class Starved(RuntimeError):
    """The time was up for programs that were computing and had had little of the processor: the
    machine was too busy, which says nothing of them."""


class _Budget:
    """The time of one call. What takes longer is wrong, unless it was starved."""

    def __init__(self, timeout_s: float, cpu_s: float) -> None:
        self._deadline = time.monotonic() + CODE_SHARE_OF_TIME * timeout_s
        self._cpu_s = cpu_s
        self._used_s = self._allowed_s = 0.0

    @property
    def left_s(self) -> float:
        """By the clock, for the next program."""
        return min(WALL_PER_CPU * self._cpu_s, self._deadline - time.monotonic())

    def count(self, ended: Ended) -> None:
        """Raises Starved."""
        usage = ended.usage
        if ended.timed_out and not usage.computing:
            return  # it slept: its own fault, whatever the machine did
        allowed_s = min(self._cpu_s, usage.elapsed_s)
        self._allowed_s += allowed_s
        self._used_s += min(allowed_s, usage.cpu_s)
        if ended.timed_out:
            self.require_fair()

    def require_fair(self) -> None:
        """Raises Starved."""
        if self._used_s < STARVED * self._allowed_s:
            raise Starved(
                f"programs had {self._used_s:.2g} s of the processor and were to have"
                f" {self._allowed_s:.2g}: the machine is busy"
            )


def source_of(response: str) -> str:
    """The last block between ``` and ``` that is tagged as Python; where there is none the last
    one without a tag; without one all of the response."""
    tagged, untagged = None, None
    lines = iter(response.splitlines(keepends=True))
    for line in lines:
        fence = _FENCE.fullmatch(line.rstrip())
        if fence is None:
            continue
        mark, language = fence[1], fence[2].lower()
        block = []
        for inside in lines:
            end = inside.strip()
            if end.startswith(mark) and not end.strip(mark[0]):
                break
            block.append(inside)
        if language in PYTHON:
            tagged = "".join(block)
        elif not language:
            untagged = "".join(block)
    return next((block for block in (tagged, untagged) if block is not None), response)


def tests_of(prompt: Prompt) -> list[str] | list[tuple[str, str]]:
    """The prompt's `tests`, which may be written as JSON: Python source, or a list of it; or a list
    of {input, output}, or {inputs: [...], outputs: [...]}. Raises RewardError."""
    given = prompt.fields.get("tests")
    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):
            given = json.loads(given)
    if isinstance(given, str):
        given = [given]
    if isinstance(given, dict) and given.keys() >= {"inputs", "outputs"} and "fn_name" not in given:
        columns = given["inputs"], given["outputs"]
        if all(isinstance(one, list) for one in columns) and len({*map(len, columns)}) == 1:
            given = [{"input": one, "output": other} for one, other in zip(*columns, strict=True)]
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given) and "assert" in "".join(given):
            for one in given:
                _require_called(prompt, one)
            trees = [ast.parse(one) for one in given]
            if any(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree)):
                return given
        pairs: Any = [
            (one.get("input"), one.get("output")) for one in given if isinstance(one, dict)
        ]
        whole = len(pairs) == len(given) and all(isinstance(t, str) for one in pairs for t in one)
        # A program that prints nothing would pass a test whose output is empty.
        if whole and all(output.strip() for _, output in pairs):
            return pairs
    raise RewardError(
        f"prompt {prompt.id}",
        f"`tests` is {str(given)[:80]!r}",
        "give its row a list of {input, output}, both text, or Python with `assert`",
    )


def _require_called(prompt: Prompt, test: str) -> None:
    """Raises RewardError for a test that would pass because nothing in it is run."""
    where = f"prompt {prompt.id}"
    try:
        ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"`tests` has {test[:60]!r}, which is no Python: {error}"
        raise RewardError(where, what, "write it as Python with `assert`") from error
    if _CLASS.search(test):
        fix = "write the tests as functions test...(), or as plain `assert`"
        raise RewardError(where, "`tests` has a class of tests, and only functions are called", fix)
    no_entry = prompt.fields.get("entry_point") is None
    if no_entry and _CHECK.search(test) and not _CHECK_CALLED.search(test):
        what = "`tests` defines check(candidate), and there is no `entry_point` to call it with"
        raise RewardError(where, what, "give its row the name of the function as `entry_point`")


def _outputs(
    source: str, tests: Sequence[tuple[str, str]], limits: Limits, budget: _Budget
) -> Iterator[bool]:
    for given, expected in tests:
        left_s = budget.left_s
        if left_s <= 0:
            budget.require_fair()
            yield False
            continue
        ended = run(source, stdin=given, limits=replace(limits, wall_s=left_s))
        budget.count(ended)
        yield ended.code == 0 and _lines(ended.output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _asserts(
    source: str, tests: Sequence[str], entry_point: object, limits: Limits, budget: _Budget
) -> list[bool]:
    """The tester's sandbox says which passed; those that it says nothing of did not."""
    stubs = _STUBS.read_text(encoding="utf-8")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serve = f"{stubs}\nserve({theirs.fileno()}, {source!r})"
        test = f"{stubs}\ntest({ours.fileno()}, {list(tests)!r}, {entry_point!r})"
        with Sandbox(serve, limits=limits, passed=[theirs.fileno()]) as server:
            theirs.close()
            with Sandbox(test, limits=limits, passed=[ours.fileno()]) as tester:
                ours.close()
                said = tester.wait(server)
                budget.count(said)
    return [one == "1" for one in said.output.ljust(len(tests), "0")]


def _check(*, key: str, isolation: Isolation = "namespaces", **_: Any) -> None:
    try:
        run("pass", limits=Limits(isolation=isolation))
    except SandboxError as error:
        if isolation == "limits":
            fix = (
                "start as another user than root, or as a root that may change its user, with a"
                " Python whose library every user can read"
            )
            raise RewardError(f"{key}.isolation", f"no program can be run: {error}", fix) from error
        raise RewardError(
            f"{key}.isolation",
            f"this machine does not allow the namespaces that {isolation!r} needs: {error}",
            "allow unprivileged user namespaces (in a container: --security-opt seccomp=unconfined"
            " or --cap-add SYS_ADMIN), or set isolation: limits, which leaves files readable to"
            " the code",
        ) from error


def _validate(prompt: Prompt, **_: Any) -> None:
    tests_of(prompt)
    entry = prompt.fields.get("entry_point")
    if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
        what = f"`entry_point` is {entry!r}"
        raise RewardError(f"prompt {prompt.id}", what, "write the name of the tested function")


REWARDS = {
    "code": BuiltInReward(
        function=code, required_fields=("tests",), check=_check, validate=_validate
    )
}
