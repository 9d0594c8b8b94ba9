"""The reward `code`: 1 if the response's code passes all `tests` of the prompt, else 0.

A test is a pair of input and output, for a program that reads and prints, or Python with `assert`,
for functions (code_tests.py). Code and tests run in separate sandboxes (sandbox.py), so that the
code cannot pass a test by changing its own interpreter: expected outputs never enter the sandbox of
the code, and an `assert` runs in a sandbox of its own, where stand-ins for the code's functions
send arguments and receive plain values (code_stubs.py). If a test uses a name without importing it,
the code defines that name, as it defines the tested function.

Tests that accept a response without testing it are an error of the prompt, not a reward: tests in
which no assertion ran, and tests that a response without code passes.
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
"""Wall-clock seconds that a program may take for each second of its CPU limit."""
MIN_CPU_SHARE = 0.5
"""Share of the permitted CPU time that programs must have received; otherwise, a timeout is an
error, not a wrong response."""
PYTHON = ("python", "python3", "py")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([\w+.#-]*)[^`]*")
PASSED, FAILED, VACUOUS = "1", "0", "-"
"""Verdicts of the tester. VACUOUS: the test passed without checking the code."""
MAX_DIGESTS = 4096
_STUBS = Path(__file__).with_name("code_stubs.py")
_sound_tests: set[bytes] = set()
"""Digests of tests that a response without code fails; at most MAX_DIGESTS."""


def code(
    prompt: Prompt,
    response: str,
    /,
    *,
    timeout_s: float,
    partial: bool = False,
    cpu_s: float = CODE_CPU_S,
    memory_mib: int = Limits.memory_mib,
    processes: int = Limits.processes,
    isolation: Isolation = Limits.isolation,
) -> float:
    """Return 1.0 if the code passes all tests, else 0.0; with `partial`, the share of passed tests.
    Raises ColumnError for tests that accept code without testing it, and ProgramsStarved."""
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
    """Programs ran out of time because they received too little CPU time on a busy machine. The
    response has no result."""


class _Budget:
    """Time limit of one call. A program that exceeds it fails its test, unless the programs were
    starved of CPU time."""

    def __init__(self, timeout_s: float, cpu_s: float) -> None:
        # Earlier than the time limit of the call, at which the pool kills the process.
        self._deadline = time.monotonic() + CODE_SHARE_OF_TIME * timeout_s
        self._cpu_s = cpu_s
        self._used_s = self._allowed_s = 0.0

    @property
    def left_s(self) -> float:
        """Wall-clock seconds left for the next program."""
        return min(WALL_PER_CPU * self._cpu_s, self._deadline - time.monotonic())

    def count(self, ended: ProgramEnd) -> None:
        """Add the CPU time of a program that has ended. Raises ProgramsStarved."""
        usage = ended.usage
        if ended.timed_out and not usage.computing:
            return  # A program that sleeps exceeds its limit on any machine.
        allowed_s = min(self._cpu_s, usage.elapsed_s)
        self._allowed_s += allowed_s
        self._used_s += min(allowed_s, usage.cpu_s)
        if ended.timed_out:
            self.require_fair()

    def require_fair(self) -> None:
        """Raise ProgramsStarved if the programs of this call received too little CPU time."""
        if self._used_s < MIN_CPU_SHARE * self._allowed_s:
            raise ProgramsStarved(
                f"programs received {self._used_s:.2g} of {self._allowed_s:.2g} s of CPU time: the"
                " machine is too busy"
            )


def source_of(response: str) -> str:
    """Return the last fenced block tagged as Python; without such a block, the last block without a
    tag; without any of these, the whole response."""
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
            # A closing fence is at least as long as the opening one (CommonMark).
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
    for stdin, expected in tests:
        # The tests share one time limit, so that an endless program uses it only once.
        left_s = budget.left_s
        if left_s <= 0:
            budget.require_fair()
            yield False
            continue
        ended = run(source, stdin=stdin, limits=replace(limits, wall_s=left_s))
        budget.count(ended)
        # Compared outside of the sandbox, so that the code cannot read `expected`.
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
    """Return one boolean per test: true if the code passes it. Without `partial`, the result is
    [False] if any test fails. Raises ColumnError for tests that accept code without testing it."""
    verdicts = _verdicts(source, tests, entry_point, limits, budget)
    if FAILED in verdicts and not partial:
        return [False]  # The code is wrong even if other tests are vacuous.
    if VACUOUS in verdicts:
        _refuse(prompt, tests, verdicts.index(VACUOUS), "passed, and no assertion ran in it")

    # When a response first passes, run its tests once without code. Most tests never need this.
    key = hashlib.sha256(repr((tests, entry_point)).encode(errors="surrogatepass")).digest()
    if PASSED in verdicts and key not in _sound_tests and (left_s := budget.left_s) > 0:
        limits = replace(limits, wall_s=left_s)
        without_code = _verdicts("", tests, entry_point, limits, budget)
        if accepted := [place for place, one in enumerate(without_code) if one != FAILED]:
            _refuse(prompt, tests, accepted[0], "passes for a response without any code")
        if len(_sound_tests) >= MAX_DIGESTS:
            _sound_tests.clear()
        _sound_tests.add(key)
    return [one == PASSED for one in verdicts]


def _refuse(prompt: Prompt, tests: Sequence[str], place: int, what: str) -> NoReturn:
    which = f"(test {place + 1} of {len(tests)}) " if len(tests) > 1 else ""
    fix = "compare what the code returns: assert NAME(INPUT) == OUTPUT"
    raise ColumnError(f"prompt {prompt.id}", "tests", f"{which}{what}", fix)


def _verdicts(
    source: str, tests: Sequence[str], entry_point: str | None, limits: Limits, budget: _Budget
) -> str:
    """Return the tester's verdicts, one per test. A test without a verdict has failed."""
    stubs = _STUBS.read_text(encoding="utf-8")
    local, remote = socket.socketpair()
    with local, remote:
        serve = f"{stubs}\nserve({remote.fileno()}, {source!r})"
        test = f"{stubs}\ntest({local.fileno()}, {list(tests)!r}, {entry_point!r})"
        # This process closes each socket after passing it to a sandbox; otherwise, neither side
        # would read end-of-file when the other side ends.
        with Sandbox(serve, limits=limits, passed=[remote.fileno()]) as server:
            remote.close()
            with Sandbox(test, limits=limits, passed=[local.fileno()]) as tester:
                local.close()
                # Only the tester decides. The server is killed together with its sandbox.
                message = tester.wait(server)
                budget.count(message)
    return message.output.ljust(len(tests), FAILED)


def _check(*, key: str, isolation: Isolation = "namespaces", **_: Any) -> None:
    try:
        run("pass", limits=Limits(isolation=isolation))
    except SandboxError as error:
        if isolation == "rlimits":
            fix = (
                "start as a user other than root, or as root with the right to change its user, and"
                " with a Python whose library every user can read"
            )
            raise RewardError(f"{key}.isolation", f"programs cannot run: {error}", fix) from error
        raise RewardError(
            f"{key}.isolation",
            f"this machine cannot run programs in namespaces, which {isolation!r} needs: {error}",
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
