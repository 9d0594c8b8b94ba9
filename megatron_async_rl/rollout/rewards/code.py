"""Programs: 1 if the response's code passes all of the prompt's `tests`, else 0.

Tests are pairs of input and output, for a program that reads and prints, or Python with `assert`,
for functions. Both the code and the tests run in sandboxes (sandbox.py), and never in the same: the
expected outputs do not enter the sandbox of the code, and an `assert` runs in one of its own, where
the functions of the code are stand-ins that send arguments over and get plain values back
(code_stubs.py). So nothing that the code does to its interpreter can make a test pass.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_async_rl.rollout.rewards.registry import BuiltInReward, RewardError
from megatron_async_rl.rollout.rewards.sandbox import Isolation, Limits, Sandbox, SandboxError, run
from megatron_async_rl.samples.types import Prompt

SHARE_OF_TIME = 0.8
"""Of the call's time limit that programs may take: what takes longer is wrong, not an error."""
WALL_PER_CPU = 4
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```", re.S | re.M | re.I)
_STUBS = Path(__file__).with_name("code_stubs.py")


def code(
    prompt: Prompt,
    response: str,
    /,
    *,
    timeout_s: float,
    partial: bool = False,
    cpu_s: float = 5.0,
    memory_mib: int = 512,
    processes: int = 8,
    isolation: Isolation = "namespaces",
) -> float:
    """`partial`: the share of the tests that pass, in the place of all or nothing."""
    limits = Limits(
        cpu_s=cpu_s,
        wall_s=min(WALL_PER_CPU * cpu_s, SHARE_OF_TIME * timeout_s),
        memory_mib=memory_mib,
        processes=processes,
        isolation=isolation,
    )
    deadline = time.monotonic() + SHARE_OF_TIME * timeout_s
    tests: Any = tests_of(prompt)
    source = source_of(response)
    passed: Iterable[bool]
    if isinstance(tests[0], str):
        passed = _asserts(source, tests, prompt.fields.get("entry_point"), limits)
    else:
        passed = _outputs(source, tests, limits, deadline)
    if partial:
        return sum(passed) / len(tests)
    return float(all(passed))


def source_of(response: str) -> str:
    """The last block of Python between ``` and ```, else all of the response."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


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
        given = [
            {"input": one, "output": other}
            for one, other in zip(given["inputs"], given["outputs"], strict=False)
        ]
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given) and "assert" in "".join(given):
            return given
        pairs: Any = [
            (one.get("input"), one.get("output")) for one in given if isinstance(one, dict)
        ]
        if len(pairs) == len(given) and all(isinstance(t, str) for pair in pairs for t in pair):
            return pairs
    raise RewardError(
        f"prompt {prompt.id}",
        f"`tests` is {str(given)[:80]!r}",
        "give its row a list of {input, output}, both text, or Python with `assert`",
    )


def _outputs(
    source: str, tests: Sequence[tuple[str, str]], limits: Limits, deadline: float
) -> Iterator[bool]:
    for given, expected in tests:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            yield False
            continue
        ended = run(source, stdin=given, limits=replace(limits, wall_s=min(limits.wall_s, left_s)))
        yield ended.code == 0 and _lines(ended.output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _asserts(source: str, tests: Sequence[str], entry_point: object, limits: Limits) -> list[bool]:
    """The tester's sandbox says which passed. None of them where it says nothing."""
    stubs = _STUBS.read_text()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serve = f"{stubs}\nserve({theirs.fileno()}, {source!r})"
        test = f"{stubs}\ntest({ours.fileno()}, {list(tests)!r}, {entry_point!r})"
        with Sandbox(serve, limits=limits, passed=[theirs.fileno()]):
            theirs.close()
            with Sandbox(test, limits=limits, passed=[ours.fileno()]) as tester:
                ours.close()
                said = tester.wait()
    try:
        passed = json.loads(said.output) if said.code == 0 else []
    except ValueError:
        passed = []
    return [*passed, *[False] * (len(tests) - len(passed))]


def _check(*, key: str, isolation: Isolation = "namespaces", **_: Any) -> None:
    try:
        run("pass", limits=Limits(isolation=isolation))
    except SandboxError as error:
        raise RewardError(
            f"{key}.isolation",
            f"this machine does not allow the namespaces that {isolation!r} needs: {error}",
            "allow unprivileged user namespaces (in a container: --security-opt seccomp=unconfined"
            " or --cap-add SYS_ADMIN), or set isolation: limits, which leaves network and files open"
            " to the code",
        ) from error


REWARDS = {"code": BuiltInReward(function=code, required_fields=("tests",), check=_check)}
