"""How the reward `code` decides about programs that a stand-in of the sandbox ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron_async_rl.rollout.isolation.sandbox import Limits, ProgramEnd, SandboxError, Usage
from megatron_async_rl.rollout.rewards import code as code_module
from megatron_async_rl.rollout.rewards.code import ProgramsStarved, _Budget, code, source_of
from megatron_async_rl.rollout.rewards.registry import ColumnError, RewardError
from megatron_async_rl.samples import Prompt

PAIRS = [{"input": "1", "output": "1\n"}, {"input": "2", "output": "4"}]


class Programs:
    """Stand-in of `run`: ends programs in turn, and records what they were given."""

    def __init__(self, *ends: ProgramEnd) -> None:
        self.ends = list(ends)
        self.given: list[tuple[str, str, Limits]] = []

    def __call__(self, source: str, *, stdin: str = "", limits: Limits) -> ProgramEnd:
        self.given.append((source, stdin, limits))
        return self.ends.pop(0)


def ended(
    output: str = "",
    code: int | None = 0,
    *,
    timed_out: bool = False,
    cpu_s: float = 0.0,
    elapsed_s: float = 0.0,
    computing: bool = True,
) -> ProgramEnd:
    usage = Usage(cpu_s=cpu_s, elapsed_s=elapsed_s, computing=computing)
    return ProgramEnd(code=code, output=output, timed_out=timed_out, usage=usage)


def prompt(tests: Any, **fields: Any) -> Prompt:
    return Prompt(id="p", text="?", token_ids=(1,), fields={"tests": tests, **fields})


def test_every_pair_must_have_its_output_and_the_share_is_partial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for first, second, whole, share in (
        ("1", "4", 1.0, 1.0),
        (" 1 \n", "4  \n", 1.0, 1.0),
        ("1", "5", 0.0, 0.5),
        ("0", "4", 0.0, 0.5),
        ("1\n1", "4 4", 0.0, 0.0),
    ):
        for partial, expected in ((False, whole), (True, share)):
            programs = Programs(ended(first), ended(second))
            monkeypatch.setattr(code_module, "run", programs)
            assert code(prompt(PAIRS), "source", timeout_s=60, partial=partial) == expected
    assert [(source, stdin) for source, stdin, _ in programs.given] == [
        ("source", "1"),
        ("source", "2"),
    ]
    monkeypatch.setattr(code_module, "run", Programs(ended("1", code=1), ended("4")))
    assert code(prompt(PAIRS), "source", timeout_s=60, partial=True) == 0.5


def test_programs_have_the_limits_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(ended("1"), ended("4"))
    monkeypatch.setattr(code_module, "run", programs)
    settings: Mapping[str, Any] = {"memory_mib": 99, "processes": 3, "isolation": "rlimits"}
    code(prompt(PAIRS), "x", timeout_s=1000, cpu_s=2.0, **settings)
    (_, _, limits), _ = programs.given
    assert (limits.cpu_s, limits.wall_s) == (2.0, 8.0)
    assert (limits.memory_mib, limits.processes, limits.isolation) == (99, 3, "rlimits")


def test_tests_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(code_module.time, "monotonic", lambda: now)

    class Slow(Programs):
        def __call__(self, source: str, *, stdin: str = "", limits: Limits) -> ProgramEnd:
            nonlocal now
            now += limits.wall_s
            return super().__call__(source, stdin=stdin, limits=limits)

    fair = ended(code=None, timed_out=True, cpu_s=5.0, elapsed_s=10.0)
    programs = Slow(fair, fair)
    monkeypatch.setattr(code_module, "run", programs)
    share = code_module.CODE_SHARE_OF_TIME
    assert code(prompt([*PAIRS, *PAIRS]), "x", timeout_s=30 / share, partial=True) == 0.0
    assert [limits.wall_s for _, _, limits in programs.given] == pytest.approx([20.0, 10.0])


def test_programs_without_cpu_time_have_no_result() -> None:
    budget = _Budget(60.0, cpu_s=4.0)
    # A program that sleeps exceeds its limit on any machine.
    budget.count(ended(code=None, timed_out=True, elapsed_s=20.0, computing=False))
    budget.count(ended(cpu_s=9.0, elapsed_s=9.0))
    budget.count(ended(code=None, timed_out=True, cpu_s=0.0, elapsed_s=4.0))
    with pytest.raises(ProgramsStarved, match=r"received 4 of 12 s of CPU time: the machine is"):
        budget.count(ended(code=None, timed_out=True, cpu_s=0.0, elapsed_s=20.0))
    starved = _Budget(60.0, cpu_s=4.0)
    starved.count(ended(cpu_s=0.9, elapsed_s=2.0))
    with pytest.raises(ProgramsStarved, match=r"received 0\.9 of 2 s"):
        starved.require_fair()


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Verdicts of the tester, for the code and without code. Its calls are in `calls`."""
    given = {"code": "1", "nothing": "0", "calls": ""}

    def found(source: str, tests: Sequence[str], *_: Any) -> str:
        given["calls"] += f"{source};"
        return given["code"] if source else given["nothing"]

    monkeypatch.setattr(code_module, "_verdicts", found)
    monkeypatch.setattr(code_module, "_sound_tests", set())
    return given


def asserts(count: int, number: int = 0, **settings: Any) -> float:
    tests = [f"assert f({at}) == {number}" for at in range(count)]
    return code(prompt(tests), "def f(x): pass", timeout_s=60, **settings)


def test_one_failed_assertion_fails_the_code(verdicts: dict[str, str]) -> None:
    for found, whole, share in (("111", 1.0, 1.0), ("101", 0.0, 2 / 3), ("000", 0.0, 0.0)):
        verdicts |= {"code": found, "nothing": "000"}
        assert asserts(3) == whole
        assert asserts(3, partial=True) == pytest.approx(share)
    # The code is wrong even if other tests are vacuous.
    verdicts["code"] = "0-1"
    assert asserts(3) == 0.0


def test_tests_that_accept_nothing_are_an_error_of_the_prompt(verdicts: dict[str, str]) -> None:
    for found, nothing, message in (
        ("1-1", "000", r"\(test 2 of 3\) passed, and no assertion ran in it"),
        ("111", "001", r"\(test 3 of 3\) passes for a response without any code"),
        ("111", "-00", r"\(test 1 of 3\) passes for a response without any code"),
    ):
        verdicts |= {"code": found, "nothing": nothing}
        with pytest.raises(ColumnError, match=message) as refused:
            asserts(3)
        assert refused.value.column == "tests"
    verdicts |= {"code": "-", "nothing": "0"}
    with pytest.raises(ColumnError, match=r"^[^(]*passed, and no assertion ran in it"):
        asserts(1)


def test_tests_run_without_code_once_when_a_response_first_passes(
    verdicts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_module, "MAX_DIGESTS", 2)
    verdicts["code"] = "0"
    asserts(1)
    assert verdicts["calls"] == "def f(x): pass;"
    verdicts |= {"code": "1", "calls": ""}
    for number in (0, 0, 1, 1):
        asserts(1, number)
    assert verdicts["calls"].count(";;") == 2
    assert len(code_module._sound_tests) == 2
    asserts(1, 2)
    assert len(code_module._sound_tests) == 1, "the digests take a limited amount of memory"


def test_the_last_block_of_python_is_the_code() -> None:
    for response, source in (
        ("x = 1", "x = 1"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```py\na\n```\n```Python3\nb\n```", "b\n"),
        ("```c\na\n```", "```c\na\n```"),
        ("````python\n```\na\n````", "```\na\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("  ```python\n    a\n  b\n c\n  ```", "  a\nb\nc\n"),
        ("```python\na", "a"),
        ("```python\na\n```` \nb", "a\n"),
        ("```python title\na\n```", "a\n"),
    ):
        assert source_of(response) == source, response


@pytest.mark.parametrize(
    ("isolation", "fix"), [("namespaces", "install bubblewrap"), ("rlimits", "start as a user")]
)
def test_a_machine_without_a_sandbox_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, isolation: str, fix: str
) -> None:
    def refuse(source: str, *, limits: Limits) -> ProgramEnd:
        assert (source, limits.isolation) == ("pass", isolation)
        raise SandboxError("no namespaces")

    monkeypatch.setattr(code_module, "run", refuse)
    with pytest.raises(RewardError) as refused:
        code_module._check(key="rollout.reward", isolation=isolation)
    assert "rollout.reward.isolation" in str(refused.value)
    assert "no namespaces" in refused.value.what
    assert fix in refused.value.fix
