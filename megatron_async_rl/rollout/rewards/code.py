"""Programs: 1 if the response's code passes all of the prompt's `tests`, else 0.

Tests are pairs of input and output, for a program that reads and prints, or Python with `assert`,
for functions (code_tests.py). Both the code and the tests run in sandboxes (sandbox.py), and never
in the same: the expected outputs do not enter the sandbox of the code, and an `assert` runs in one
of its own, where the functions of the code are stand-ins that send arguments over and get plain
values back (code_stubs.py). So nothing that the code does to its interpreter can make a test pass;
but a name that a test uses and does not import is the code's, as the function that it tests is.

Tests that accept a response without having tested it are an error of the prompt, not a reward:
those in which no assertion ran, and those that a response without code passes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_async_rl.config.rollout import CODE_CPU_S, CODE_SHARE_OF_TIME
from megatron_async_rl.rollout.isolation.sandbox import (
    Isolation,
    Limits,
    ProgramEnd,
    Sandbox,
    SandboxError,
    run,
)
from megatron_async_rl.rollout.rewards.code_tests import entry_point_of, tests_of
from megatron_async_rl.rollout.rewards.registry import BuiltInReward, ColumnError, RewardError
from megatron_async_rl.samples.types import Prompt

_log = logging.getLogger(__name__)
WALL_PER_CPU = 4
STARVED = 0.5
"""Share of the processor time that programs could have had, below which the machine was busy."""
PYTHON = ("python", "python3", "py")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([\w+.#-]*)[^`]*")
PASSED, FAILED, VACUOUS = "1", "0", "-"
"""Verdicts of the tester. The last: passed without a check of the code's work."""
MAX_KNOWN = 4096
_STUBS = Path(__file__).with_name("code_stubs.py")
_rejecting_nothing: set[bytes] = set()
"""Digests of tests that a response without code fails, MAX_KNOWN at most."""


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
    """Return 1.0 if the code passes all tests, else 0.0; with `partial` the share of them that it
    passes. Raises ColumnError for tests that accept code without having tested it."""
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
        entry_point = entry_point_of(prompt)
        passed = _asserts(prompt, source, tests, entry_point, limits, budget, partial)
    else:
        passed = _outputs(source, tests, limits, budget)
    if partial:
        return sum(passed) / len(tests)
    return float(all(passed))


class ProgramsStarved(RuntimeError):
    """The time was up for programs that were computing and had had little of the processor: the
    machine was too busy, so there is no result for them."""


class _Budget:
    """The time of one call. What takes longer is wrong, unless it was starved."""

    def __init__(self, timeout_s: float, cpu_s: float) -> None:
        self._deadline = time.monotonic() + CODE_SHARE_OF_TIME * timeout_s
        self._cpu_s = cpu_s
        self._used_s = self._allowed_s = 0.0

    @property
    def left_s(self) -> float:
        """Wall-clock seconds left for the next program."""
        return min(WALL_PER_CPU * self._cpu_s, self._deadline - time.monotonic())

    def count(self, ended: ProgramEnd) -> None:
        """Raises ProgramsStarved."""
        usage = ended.usage
        if ended.timed_out and not usage.computing:
            return  # it slept: its own fault, whatever the machine did
        allowed_s = min(self._cpu_s, usage.elapsed_s)
        self._allowed_s += allowed_s
        self._used_s += min(allowed_s, usage.cpu_s)
        if ended.timed_out:
            self.require_fair()

    def require_fair(self) -> None:
        """Raises ProgramsStarved."""
        if self._used_s < STARVED * self._allowed_s:
            raise ProgramsStarved(
                f"programs had {self._used_s:.2g} s of the processor and were to have"
                f" {self._allowed_s:.2g}: the machine is busy"
            )


def source_of(response: str) -> str:
    """The last block between ``` and ``` that is tagged as Python; if there is none the last
    one without a tag; without one all of the response."""
    tagged, untagged = None, None
    lines = iter(response.splitlines(keepends=True))
    for line in lines:
        fence = _FENCE.fullmatch(line.rstrip())
        if fence is None:
            continue
        indent, mark, language = len(fence[1]), fence[2], fence[3].lower()
        block = []
        for inside in lines:
            end = inside.strip()
            if end.startswith(mark) and not end.strip(mark[0]):
                break
            block.append(inside[min(indent, len(inside) - len(inside.lstrip(" \t"))) :])
        if language in PYTHON:
            tagged = "".join(block)
        elif not language:
            untagged = "".join(block)
    return next((block for block in (tagged, untagged) if block is not None), response)


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
    prompt: Prompt,
    source: str,
    tests: Sequence[str],
    entry_point: str | None,
    limits: Limits,
    budget: _Budget,
    partial: bool,
) -> list[bool]:
    """Return which tests the code passes. Raises ColumnError for tests that accept it without
    having tested it."""
    verdicts = _verdicts(source, tests, entry_point, limits, budget)
    if FAILED in verdicts and not partial:
        return [False]  # wrong, whatever the other tests are worth
    if VACUOUS in verdicts:
        _refuse(prompt, tests, verdicts.index(VACUOUS), "passed, and no assertion ran in it")

    # Whether a test accepts no code at all is found out once, when a response first passes.
    key = hashlib.sha256(repr((tests, entry_point)).encode(errors="surrogatepass")).digest()
    if PASSED in verdicts and key not in _rejecting_nothing and (left_s := budget.left_s) > 0:
        limits = replace(limits, wall_s=left_s)
        nothing = _verdicts("", tests, entry_point, limits, budget)
        if accepted := [place for place, one in enumerate(nothing) if one != FAILED]:
            _refuse(prompt, tests, accepted[0], "passes for a response without any code")
        if len(_rejecting_nothing) >= MAX_KNOWN:
            _rejecting_nothing.clear()
        _rejecting_nothing.add(key)
    return [one == PASSED for one in verdicts]


def _refuse(prompt: Prompt, tests: Sequence[str], place: int, what: str) -> NoReturn:
    which = f"(test {place + 1} of {len(tests)}) " if len(tests) > 1 else ""
    fix = "compare what the code returns: assert NAME(INPUT) == OUTPUT"
    raise ColumnError(f"prompt {prompt.id}", "tests", f"{which}{what}", fix)


def _verdicts(
    source: str, tests: Sequence[str], entry_point: str | None, limits: Limits, budget: _Budget
) -> str:
    """A character for each test, as the tester's sandbox writes them; tests without one failed."""
    stubs = _STUBS.read_text(encoding="utf-8")
    local, remote = socket.socketpair()
    with local, remote:
        serve = f"{stubs}\nserve({remote.fileno()}, {source!r})"
        test = f"{stubs}\ntest({local.fileno()}, {list(tests)!r}, {entry_point!r})"
        with Sandbox(serve, limits=limits, passed=[remote.fileno()]) as server:
            remote.close()
            with Sandbox(test, limits=limits, passed=[local.fileno()]) as tester:
                local.close()
                message = tester.wait(server)
                budget.count(message)
    return message.output.ljust(len(tests), FAILED)


def _check(*, key: str, isolation: Isolation = "namespaces", **_: Any) -> None:
    try:
        run("pass", limits=Limits(isolation=isolation))
    except SandboxError as error:
        if isolation == "rlimits":
            fix = (
                "start as another user than root, or as a root that may change its user, with a"
                " Python whose library every user can read"
            )
            raise RewardError(f"{key}.isolation", f"no program can be run: {error}", fix) from error
        raise RewardError(
            f"{key}.isolation",
            f"this machine does not run programs in namespaces, which {isolation!r} needs: {error}",
            "install bubblewrap (apt-get install bubblewrap) and allow user namespaces (in a"
            " container: --security-opt seccomp=unconfined or --cap-add SYS_ADMIN), or set"
            " isolation: rlimits, which leaves files readable to the code",
        ) from error
    _log.info("the code reward runs programs in a sandbox with isolation: %s", isolation)


REWARDS = {
    "code": BuiltInReward(
        function=code,
        required_fields=("tests",),
        check=_check,
        validate=lambda prompt, **_: tests_of(prompt),
    )
}
