"""Scoring in processes: a fault of a reward affects only its own response, never the engine."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from megatron_async_rl.config.rollout import RewardConfig
from megatron_async_rl.rollout.isolation import supervisor
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError
from megatron_async_rl.rollout.rewards.mathematics import REWARDS as MATHEMATICS
from megatron_async_rl.rollout.rewards.registry import RewardContext, RewardError
from megatron_async_rl.rollout.rewards.worker import Scored
from megatron_async_rl.rollout.scoring import (
    LOG,
    GroupRewards,
    Scorer,
    require_rewards,
    reward_fields,
)
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rows import SampleRow
from tests.thorough import thorough
from tests.train_batches import make_sample, row

BACKTRACKS = "a" * 40 + "b"
BOTH_LOOPS = pytest.mark.parametrize(
    "new_loop", [pytest.param(asyncio.new_event_loop, marks=thorough), uvloop.new_event_loop]
)
"""Both event loops: Ray's actors run on uvloop. The other tests run only on asyncio's own loop."""

REWARDS = """
import ctypes, os, re, subprocess, sys, time

def score(prompt, response):
    match prompt.fields.get("do"):
        case "backtrack":
            return float(bool(re.match(r"(a+)+$", response)))
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(3)
        case "crash":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), 9)
        case "fill memory":
            return float(len(bytearray(4 * 2**30)))
        case "print":
            print("a line of the reward", flush=True)
        case "huge":
            return 1e39
        case "text":
            return "0.5"
        case "mapping":
            return {"score": 0.5}
        case "nan":
            return float("nan")
        case "raise much":
            raise ValueError("x" * 10**6)
        case "start a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(prompt.fields["file"], "w") as file:
                file.write(f"{child.pid}.")
            while True:
                pass
        case "leave a child behind":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(prompt.fields["file"], "w") as file:
                file.write(f"{child.pid}.")
            os._exit(7)
        case "leave a daemon behind":
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    with open(prompt.fields["file"], "w") as file:
                        file.write(f"{os.getpid()}.")
                    time.sleep(600)
                os._exit(0)
            while True:
                pass
        case "return twice":
            return float(os.fork() == 0)
        case "close everything":
            os.closerange(3, 256)
            time.sleep(600)
        case "orphan the socket":
            if os.fork() == 0:
                with open(prompt.fields["file"], "w") as file:
                    file.write(f"{os.getpid()}.")
                time.sleep(600)
            while not os.path.exists(prompt.fields["file"]):
                pass
            os.kill(os.getppid(), 9)
            time.sleep(600)
        case "sockets of a command":
            command = ["sh", "-c", "ls -l /proc/self/fd"]
            listed = subprocess.run(command, close_fds=False, capture_output=True, text=True)
            return float(listed.stdout.count("socket:"))
        case "touch":
            open(prompt.fields["file"], "w").close()
        case "pid":
            return float(os.getpid())
        case "wait for":
            while not os.path.exists(prompt.fields["file"]):
                time.sleep(0.01)
    return float(len(response))

def of_lists(prompts, responses, *, finish_reason):
    if "bad" in responses:
        raise ValueError("a bad one")
    if "die" in responses:
        os._exit(3)
    return [len(responses) + 0.5 * (reason == "length") for reason in finish_reason]

def relative(prompt, responses, *, tokens, held_out):
    if "bad" in responses:
        raise ValueError("a bad one")
    assert isinstance(prompt.fields, dict) and len(tokens) == len(responses) == len(held_out)
    return [float("nan") if one == "nan" else 10.0 * place + len(responses)
            for place, one in enumerate(responses)]

WAITING = []

async def meet(prompt, response, *, parties=0):
    # Returns once `parties` calls are pending; with fewer calls, it would wait forever.
    import asyncio
    if response == "block":
        time.sleep(600)
    if response == "hang":
        await asyncio.sleep(600)
    if response == "die":
        os._exit(3)
    if response == "cancel":
        raise asyncio.CancelledError
    WAITING.append(asyncio.Event())
    if len(WAITING) >= parties:
        for event in WAITING:
            event.set()
    await WAITING[-1].wait()
    return 1.0

def context(
    prompt, response, *, tokens, seconds, version, held_out, finish_reason, timeout_s, more
):
    return tokens + seconds + version + held_out + (finish_reason == "length") + timeout_s + more
"""


def prompt(do: str = "", **fields: Any) -> Prompt:
    return Prompt(id="p7", text="?", token_ids=(1,), fields={"do": do, **fields})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the name of a module with REWARDS in the working directory."""
    name = f"scored_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def scored_by(
    config: RewardConfig,
    work: Callable[[Scorer], Awaitable[Any]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Any:
    async def run() -> Any:
        scorer = Scorer(config)
        scorer.start()
        try:
            await scorer.ready()
            return await work(scorer)
        finally:
            scorer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(run())


def config(module: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=f"{module}:score", **settings)


@BOTH_LOOPS
def test_a_regex_that_backtracks_forever_fails_only_its_response(
    module: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The regex holds the interpreter lock, so no thread of its process can interrupt it."""
    turns = 0

    async def work(scorer: Scorer) -> tuple[Scored, int, Scored]:
        nonlocal turns
        stuck = asyncio.create_task(scorer.score(prompt("backtrack"), BACKTRACKS))
        while not stuck.done():
            turns += 1
            await asyncio.sleep(0)
        during = turns
        (pool,) = scorer.pools
        pool.limits = replace(pool.limits, timeout_s=300.0)
        return await stuck, during, await scorer.score(prompt(), "four")

    stuck, during, after = scored_by(config(module, timeout_s=1, workers=1), work, new_loop)
    assert stuck == Scored(reward=0.0, error="no reward within rollout.reward.timeout_s: 1")
    assert during > 100, "the event loop was not blocked"
    assert after == Scored(reward=4.0)


def test_a_hanging_reward_reports_its_line_before_it_is_killed(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(scorer: Scorer) -> None:
        await scorer.score(prompt("backtrack"), BACKTRACKS)
        await scorer.score(prompt(), "scored by the next process")

    line = REWARDS[: REWARDS.index("re.match")].count("\n") + 1
    place = f'File "{tmp_path / module}.py", line {line} in score'

    def is_reported() -> bool:
        scored_by(config(module, timeout_s=1, workers=1), work)
        return place in capfd.readouterr().err

    # On a busy machine, the time for the report may not be enough, but not ten times in a row.
    assert any(is_reported() for _ in range(10))


def test_other_responses_are_scored_while_one_hangs(module: str, tmp_path: Path) -> None:
    """One process hangs until the other has scored twenty responses."""
    file = tmp_path / "go on"

    async def work(scorer: Scorer) -> list[Scored]:
        hangs = asyncio.create_task(scorer.score(prompt("wait for", file=str(file)), "ab"))
        done = [await scorer.score(prompt(), "abc") for _ in range(20)]
        assert not hangs.done()
        file.touch()
        return [await hangs, *done]

    assert scored_by(config(module, timeout_s=300, workers=2), work) == [
        Scored(reward=2.0),
        *[Scored(reward=3.0)] * 20,
    ]


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("exit", "the reward's process ended with code 7; see the engine's log"),
        ("crash", "the reward's process was ended by SIGSEGV; see the engine's log"),
        ("kill", "the reward's process was ended by SIGKILL; see the engine's log"),
        ("sys.exit", "SystemExit: 3"),
        ("nan", "the reward is nan, not a finite number of at most 1e+30"),
        ("huge", "the reward is 1e+39, not a finite number of at most 1e+30"),
        ("text", "the reward returned str '0.5', not a number"),
        ("mapping", "the reward returned dict {'score': 0.5}, not a number"),
        ("raise much", f"ValueError: {'x' * 4000}... (1000000 characters)"),
        ("fill memory", "MemoryError"),
    ],
)
def test_a_fault_of_a_reward_is_an_error_of_its_response(module: str, do: str, error: str) -> None:
    async def work(scorer: Scorer) -> list[Scored]:
        scores = [scorer.score(prompt(do), "abc"), scorer.score(prompt(), "abc")]
        return list(await asyncio.gather(*scores))

    settings = config(module, timeout_s=300, workers=1, memory_mib=2048)
    assert scored_by(settings, work) == [Scored(reward=0.0, error=error), Scored(reward=3.0)]


def test_a_child_of_a_reward_is_killed_with_its_process(module: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    async def work(scorer: Scorer) -> psutil.Process:
        scoring = asyncio.create_task(scorer.score(prompt("start a child", file=str(file)), ""))
        while not (file.exists() and file.read_text().endswith(".")):
            assert not scoring.done()
            await asyncio.sleep(0)
        return psutil.Process(int(file.read_text()[:-1]))

    child = scored_by(config(module, timeout_s=300, workers=1), work)
    assert psutil.wait_procs([child], timeout=600)[1] == []


def test_a_child_of_a_reward_is_killed_if_its_process_ends_by_itself(
    module: str, tmp_path: Path
) -> None:
    file = tmp_path / "pid"

    async def work(scorer: Scorer) -> Scored:
        return await scorer.score(prompt("leave a child behind", file=str(file)), "")

    scored = scored_by(config(module, timeout_s=300, workers=1), work)
    assert scored.error == "the reward's process ended with code 7; see the engine's log"
    pid = int(file.read_text()[:-1])
    children = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    assert psutil.wait_procs(children, timeout=600)[1] == []


@BOTH_LOOPS
def test_a_daemon_of_a_reward_ends_with_its_process(
    module: str, tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The daemon has a session of its own and a parent that has ended, and holds the socket
    open."""
    file = tmp_path / "pid"

    async def work(scorer: Scorer) -> list[Scored]:
        scoring = asyncio.create_task(
            scorer.score(prompt("leave a daemon behind", file=str(file)), "abc")
        )
        while not (file.exists() and file.read_text().endswith(".")):
            assert not scoring.done()
            await asyncio.sleep(0)
        (worker,) = scorer.pools[0].processes
        daemons.append(psutil.Process(int(file.read_text()[:-1])))
        worker._fail_all(supervisor.OutOfTime())
        worker.kill(show=True)
        return [await scoring, await asyncio.wait_for(scorer.score(prompt(), "abc"), 600)]

    daemons: list[psutil.Process] = []
    scored = scored_by(config(module, timeout_s=300, workers=1), work, new_loop)
    assert scored == [
        Scored(reward=0.0, error="no reward within rollout.reward.timeout_s: 300"),
        Scored(reward=3.0),
    ]
    assert psutil.wait_procs(daemons, timeout=60)[1] == []


@BOTH_LOOPS
def test_a_process_without_its_socket_is_replaced(
    module: str, tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The process closes its socket and continues, or ends while another process holds the socket
    open."""
    file = tmp_path / "pid"

    async def work(scorer: Scorer) -> list[Scored]:
        faults = [prompt("close everything"), prompt("orphan the socket", file=str(file))]
        return [await scorer.score(one, "abc") for one in (*faults, prompt())]

    scored = scored_by(config(module, timeout_s=60, workers=1), work, new_loop)
    os.kill(int(file.read_text()[:-1]), signal.SIGKILL)
    assert scored == [
        Scored(reward=0.0, error="the reward's process ended with code 1; see the engine's log"),
        Scored(reward=0.0, error="the reward's process was ended by SIGKILL; see the engine's log"),
        Scored(reward=3.0),
    ]


def test_a_command_of_a_reward_inherits_no_socket(module: str) -> None:
    async def work(scorer: Scorer) -> Scored:
        return await scorer.score(prompt("sockets of a command"), "abc")

    assert scored_by(config(module, timeout_s=300, workers=1), work) == Scored(reward=0.0)


def test_a_child_that_returns_from_the_reward_sends_no_reply(module: str) -> None:
    """`os.fork` copies the socket: a reply of the child would be the score of the next response."""

    async def work(scorer: Scorer) -> list[Scored]:
        return [await scorer.score(prompt("return twice"), "abc") for _ in range(20)]

    settings = config(module, timeout_s=300, workers=1)
    assert scored_by(settings, work) == [Scored(reward=0.0)] * 20


@BOTH_LOOPS
def test_a_reply_that_arrives_while_the_event_loop_is_busy_is_in_time(
    module: str, tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The loop is busy until after the time limit, and the reply arrives before the limit."""
    file = tmp_path / "go on"

    async def work(scorer: Scorer) -> Scored:
        scoring = asyncio.create_task(scorer.score(prompt("wait for", file=str(file)), "abc"))
        (worker,) = scorer.pools[0].processes
        assert worker._transport is not None
        while not worker.calls:
            await asyncio.sleep(0)

        submitted = time.monotonic()
        reply = worker._transport.get_extra_info("socket").fileno()
        reader, writer = socket.socketpair()

        def be_busy() -> None:
            reader.recv(1)
            file.touch()  # only here, because the reply must arrive while the loop is busy
            while not select.select([reply], [], [], 60)[0]:
                pass
            while time.monotonic() < submitted + 1.5:
                time.sleep(0.1)

        with reader, writer:
            # In a reader: the loop reads later data in its next turn, after the timers.
            loop = asyncio.get_running_loop()
            loop.add_reader(reader, be_busy)
            writer.send(b"x")
            try:
                return await scoring
            finally:
                loop.remove_reader(reader)

    assert scored_by(config(module, timeout_s=1, workers=1), work, new_loop) == Scored(reward=3.0)


def test_a_process_that_cannot_be_started_is_an_error_of_its_responses(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have no memory or process id left. Later responses try again."""

    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def work(scorer: Scorer) -> list[Scored]:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refused)
            server = scorer.pools[0].supervisor._server
            assert server is not None
            server.kill()  # also kills its processes, which cannot be replaced now
            await scorer.score(prompt("wait for", file=""), "")
            refusal = await asyncio.wait_for(scorer.score(prompt(), "abc"), 600)
        return [refusal, await scorer.score(prompt(), "abc")]

    refusal, after = scored_by(config(module, timeout_s=300, workers=1), work)
    assert "did not start: [Errno 11] Resource temporarily unavailable" in str(refusal.error)
    assert after == Scored(reward=3.0)


def test_a_response_without_a_waiter_is_not_scored(module: str, tmp_path: Path) -> None:
    file, go_on = tmp_path / "scored", tmp_path / "go on"

    async def work(scorer: Scorer) -> Scored:
        first = asyncio.create_task(scorer.score(prompt("wait for", file=str(go_on)), "abc"))
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(scorer.score(prompt("touch", file=str(file)), "abc"))
        await asyncio.sleep(0)
        cancelled.cancel()
        go_on.touch()
        await first
        return await scorer.score(prompt(), "abcd")

    assert scored_by(config(module, timeout_s=300, workers=1), work) == Scored(reward=4.0)
    assert not file.exists()


def test_processes_start_only_when_responses_wait(module: str) -> None:
    others = set(psutil.Process().children())  # from other tests, such as the ranks' fork server

    async def work(scorer: Scorer) -> tuple[int, int]:
        one_by_one = [await scorer.score(prompt("pid"), "") for _ in range(5)]
        started = set(psutil.Process().children()) - others
        return len({scored.reward for scored in one_by_one}), len(started)

    assert scored_by(config(module, timeout_s=300, workers=4), work) == (1, 1)


def test_an_import_does_not_count_against_the_time_limit(module: str, tmp_path: Path) -> None:
    """The import takes longer than the limit."""
    source = (tmp_path / f"{module}.py").read_text()
    (tmp_path / f"{module}.py").write_text(f"import time\ntime.sleep(1.5)\n{source}")

    async def scored() -> Scored:
        scorer = Scorer(config(module, timeout_s=1, workers=1))
        scorer.start()
        try:
            return await scorer.score(prompt(), "abc")
        finally:
            scorer.close()

    # On a busy machine, the response itself may exceed the limit, too, but not ten times in a row.
    assert any(asyncio.run(scored()) == Scored(reward=3.0) for _ in range(10))


def test_a_failed_import_is_reported_before_any_response(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("1/0\n")

    async def work(scorer: Scorer) -> None:
        pytest.fail("the reward was not imported")

    with pytest.raises(UserCodeStartError, match="ZeroDivisionError: division by zero; fix that"):
        scored_by(config(module), work)


def test_an_import_that_does_not_end_is_reported(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(supervisor, "START_S", 0.1)

    async def started() -> list[str]:
        scorer, ended = Scorer(config(module, timeout_s=300, workers=1)), list[str]()
        scorer.start()
        server = scorer.pools[0].supervisor
        try:
            with pytest.raises(UserCodeStartError, match=r"it was not imported within 0\.1 s"):
                await scorer.ready()
            process = server.process(lambda _: None, lambda _, reason: ended.append(reason))
            while not process.killed:
                await asyncio.sleep(0.01)
            timer = process._timer
            process.kill(show=True)  # without effect on a killed process
            assert process._timer is timer
        finally:
            scorer.close()
        return ended

    assert asyncio.run(started()) == ["it was not imported within 0.1 s"]


def test_output_of_a_reward_goes_to_the_engines_output(
    module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(scorer: Scorer) -> Scored:
        return await scorer.score(prompt("print"), "abc")

    assert scored_by(config(module, timeout_s=300), work) == Scored(reward=3.0)
    assert capfd.readouterr().out == "a line of the reward\n"


def test_a_trivial_reward_is_called_at_once_and_without_a_process() -> None:
    async def work(scorer: Scorer) -> tuple[Scored, Scored, int]:
        valid = Prompt(id="p7", text="?", token_ids=(1,), fields={"answer": "46"})
        wrong = Prompt(id="p8", text="?", token_ids=(1,), fields={})
        children = len(psutil.Process().children())
        return scorer.score_inline(valid, "46"), scorer.score_inline(wrong, "46"), children

    before = len(psutil.Process().children())
    right, wrong, children = scored_by(RewardConfig(name="arithmetic"), work)
    assert right == Scored(reward=1.0)
    assert "prompt p8: `answer` is None" in str(wrong.error)
    assert children == before


ENGINE = """
import asyncio, sys
from megatron_async_rl.config.rollout import RewardConfig
from megatron_async_rl.rollout.scoring import Scorer
from megatron_async_rl.samples import Prompt

async def run():
    scorer = Scorer(RewardConfig(name=sys.argv[1], workers=1, timeout_s=3600))
    scorer.start()
    await scorer.ready()
    print(scorer.pools[0].processes.copy().popitem()[0].pid, flush=True)
    fields = {"do": sys.argv[2], "file": sys.argv[3]}
    prompt = Prompt(id="p", text="", token_ids=(1,), fields=fields)
    await scorer.score(prompt, "a" * 40 + "b")

asyncio.run(run())
"""


@pytest.mark.parametrize("do", ["backtrack", "leave a daemon behind"])
def test_a_process_that_runs_a_reward_ends_with_its_engine(
    module: str, tmp_path: Path, do: str
) -> None:
    """This includes a reward that holds the interpreter lock, so that it cannot notice that its
    socket closed, and a daemon in a session of its own."""
    file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENGINE), f"{module}:score", do, str(file)],
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        worker = psutil.Process(int(engine.stdout.readline()))
        while worker.status() != psutil.STATUS_RUNNING:
            assert engine.poll() is None
        while do != "backtrack" and not (file.exists() and file.read_text().endswith(".")):
            assert engine.poll() is None
        ending = [
            worker,
            *(psutil.Process(int(file.read_text()[:-1])) for _ in (0,) if file.exists()),
        ]
        os.kill(engine.pid, signal.SIGKILL)
    assert psutil.wait_procs(ending, timeout=600)[1] == []


def test_math_compares_values() -> None:
    cases = [
        ("1/2", r"The answer is $\frac{1}{2}$", 1),
        (r"\frac{1}{2}", "so it is 0.5", 1),
        ("x^{2}+1", r"\boxed{1+x^2}", 1),
        (1234567, "1,234,567", 1),
        ("42", "43", 0),
        ("42", "", 0),
        ("42", r"\frac{" * 300, 0),
        ("42", 'two "lines"]\nso \\boxed{42}', 1),
    ]

    async def work(scorer: Scorer) -> list[Scored]:
        return [
            await scorer.score(
                Prompt(id="p7", text="?", token_ids=(1,), fields={"answer": a}), text
            )
            for a, text, _ in cases
        ]

    settings = RewardConfig(name="math", workers=1, timeout_s=600)
    assert scored_by(settings, work) == [Scored(reward=reward) for _, _, reward in cases]


def test_math_scores_a_response_with_an_endless_computation_as_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is not an error, because the prompt is valid."""
    assert MATHEMATICS["math"].cpu_limit_s == 5.0
    monkeypatch.setitem(MATHEMATICS, "math", replace(MATHEMATICS["math"], cpu_limit_s=1.5))
    valid = Prompt(id="p7", text="?", token_ids=(1,), fields={"answer": "42"})

    async def work(scorer: Scorer) -> list[Scored]:
        return [await scorer.score(valid, text) for text in ("$9^{9^{9^{9}}}$", r"\boxed{42}")]

    settings = RewardConfig(name="math", workers=1, timeout_s=600)
    assert scored_by(settings, work) == [Scored(reward=0.0), Scored(reward=1.0)]


def test_math_limits_cpu_time() -> None:
    """A right answer remains right on a loaded or suspended machine."""
    valid = Prompt(id="p7", text="?", token_ids=(1,), fields={"answer": "42"})

    async def work(scorer: Scorer) -> Scored:
        (worker,) = scorer.pools[0].processes
        os.kill(worker.pid, signal.SIGSTOP)
        scored = asyncio.create_task(scorer.score(valid, r"\boxed{42}"))
        await asyncio.sleep(0)
        assert worker.calls
        for _ in range(3):
            worker._out_of_time(1)
            await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGCONT)
        return await scored

    settings = RewardConfig(name="math", workers=1, timeout_s=300)
    assert scored_by(settings, work) == Scored(reward=1.0)


def test_math_past_both_time_limits_is_wrong() -> None:
    """The event loop was busy when the limit on CPU time passed, and until the other limit."""
    valid = Prompt(id="p7", text="?", token_ids=(1,), fields={"answer": "42"})

    async def work(scorer: Scorer) -> Scored:
        (worker,) = scorer.pools[0].processes
        os.kill(worker.pid, signal.SIGSTOP)
        scored = asyncio.create_task(scorer.score(valid, "1"))
        await asyncio.sleep(0)
        worker.calls[1].deadline = 0.0
        worker.calls[1].cpu_until_s = 0.0
        for _ in range(2):
            worker._out_of_time(1)
        return await scored

    settings = RewardConfig(name="math", workers=1, timeout_s=300)
    assert scored_by(settings, work) == Scored(reward=0.0)


def test_math_names_an_answer_that_it_cannot_read() -> None:
    unreadable = Prompt(id="p7", text="?", token_ids=(1,), fields={"answer": r"\text{}"})

    async def work(scorer: Scorer) -> Scored:
        return await scorer.score(unreadable, "42")

    error = scored_by(RewardConfig(name="math", workers=1, timeout_s=600), work).error
    assert r"prompt p7: `answer` '\\text{}' cannot be parsed by math-verify" in str(error)


def test_a_reward_that_takes_lists_gets_all_waiting_responses_in_one_call(module: str) -> None:
    """The first response is scored alone, because no other waits yet. A response that makes the
    reward raise or its process end affects no other response."""
    cut = RewardContext(finish_reason="length")

    async def work(scorer: Scorer) -> list[Scored]:
        texts = ["", "a", "b", "bad", "die", "c"]
        return list(await asyncio.gather(*(scorer.score(prompt(), one, cut) for one in texts)))

    settings = RewardConfig(name=f"{module}:of_lists", workers=1, timeout_s=300, batch=3)
    first, *rest = scored_by(settings, work)
    assert first == Scored(reward=1.5)
    assert [one.error for one in rest] == [
        None,
        None,
        "ValueError: a bad one",
        "the reward's process ended with code 3; see the engine's log",
        None,
    ]
    assert [rest[0].reward, rest[1].reward, rest[4].reward] == [1.5] * 3, "each was retried alone"

    async def fine(scorer: Scorer) -> list[Scored]:
        return list(await asyncio.gather(*(scorer.score(prompt(), one) for one in ("", "a", "b"))))

    assert [one.reward for one in scored_by(settings, fine)] == [1.0, 2.0, 2.0]


def test_calls_of_an_async_reward_are_pending_together(module: str) -> None:
    async def work(scorer: Scorer) -> list[Scored]:
        return list(await asyncio.gather(*(scorer.score(prompt(), "") for _ in range(64))))

    meeting = {"name": f"{module}:meet", "settings": {"parties": 64}}
    settings = RewardConfig(**meeting, workers=1, timeout_s=300)
    assert scored_by(settings, work) == [Scored(reward=1.0)] * 64


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("die", "the reward's process ended with code 3; see the engine's log"),
        ("cancel", "CancelledError"),
        ("hang", "no reward within rollout.reward.timeout_s: 1"),
        ("block", "no reward within rollout.reward.timeout_s: 1"),
    ],
)
def test_a_failed_call_of_an_async_reward_affects_no_other_call(
    module: str, response: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a response that ends or blocks the process of all calls."""
    monkeypatch.setattr(supervisor, "CANCEL_S", 0.5)

    async def work(scorer: Scorer) -> list[Scored]:
        (pool,) = scorer.pools
        scored = await asyncio.gather(*(scorer.score(prompt(), x) for x in (response, "a", "b")))
        pool.limits = replace(pool.limits, timeout_s=300.0)
        return [*scored, await scorer.score(prompt(), "c")]

    settings = RewardConfig(name=f"{module}:meet", workers=1, timeout_s=1)
    fine = Scored(reward=1.0)
    assert scored_by(settings, work) == [Scored(reward=0.0, error=error), fine, fine, fine]


def test_a_reward_receives_the_arguments_that_it_names(module: str) -> None:
    known = RewardContext(finish_reason="length", tokens=2, seconds=0.5, version=7, held_out=True)

    async def work(scorer: Scorer) -> Scored:
        return await scorer.score(prompt(), "", known)

    reward = {"name": f"{module}:context", "settings": {"more": 1000}}
    settings = RewardConfig(**reward, workers=1, timeout_s=300)
    assert scored_by(settings, work) == Scored(reward=2 + 0.5 + 7 + 1 + 1 + 300 + 1000)


def test_a_reward_of_parts_is_their_weighted_sum_and_names_a_failed_part(module: str) -> None:
    parts = {
        "right": {"name": "arithmetic"},
        "length": {"name": f"{module}:score", "weight": 0.5},
        "shown": {"name": f"{module}:meet", "weight": 0},
    }

    async def work(scorer: Scorer) -> list[Scored]:
        prompts = [prompt(answer="46"), prompt("nan", answer="46"), prompt()]
        return [await scorer.score(one, "46") for one in prompts]

    right, failed, twice = scored_by(RewardConfig(parts=parts, workers=1, timeout_s=300), work)
    assert right == Scored(reward=2.0, parts={"right": 1.0, "length": 2.0, "shown": 1.0})
    assert failed.error == "length: the reward is nan, not a finite number of at most 1e+30"
    assert str(twice.error).startswith("right: ColumnError: prompt p7: `answer` is None")


def test_a_gate_multiplies_the_weighted_sum_of_the_other_parts(module: str) -> None:
    parts = {
        "right": {"name": "arithmetic", "gate": True},
        "length": {"name": f"{module}:score", "weight": 0.5},
        "again": {"name": "arithmetic"},
    }

    async def work(scorer: Scorer) -> list[Scored]:
        return [await scorer.score(prompt(answer="46"), one) for one in ("46", "47")]

    assert scored_by(RewardConfig(parts=parts, workers=1, timeout_s=300), work) == [
        Scored(reward=2.0, parts={"right": 1.0, "length": 2.0, "again": 1.0}),
        Scored(reward=0.0, parts={"right": 0.0, "length": 2.0, "again": 0.0}),
    ]


def test_a_part_is_called_only_for_the_prompts_that_it_applies_to(module: str) -> None:
    parts = {
        "right": {"name": "arithmetic", "where": {"kind": ["sums", "products"]}},
        "long": {"name": f"{module}:score", "where": {"kind": "words"}},
        "shown": {"name": f"{module}:meet", "weight": 0},
    }
    settings = RewardConfig(parts=parts, workers=1, timeout_s=300)

    async def work(scorer: Scorer) -> list[Scored]:
        prompts = [prompt(kind="products", answer="46"), prompt(kind="words")]
        return [await scorer.score(one, "46") for one in prompts]

    of_sums, of_words = scored_by(settings, work)
    assert of_sums == Scored(reward=1.0, parts={"right": 1.0, "shown": 1.0})
    assert of_words == Scored(reward=2.0, parts={"long": 2.0, "shown": 1.0})
    needed = reward_fields(settings).columns
    assert needed({"kind": "sums"}) == ("answer",)
    assert needed({"kind": "words"}) == ()
    only = RewardConfig(parts={"right": parts["right"]})
    assert reward_fields(only).columns({"kind": "words"}) is None


RIGHT = {"right": 0.5}


def group_of(
    *texts: str, environment: float = 0.0, parts: dict[str, float] = RIGHT, **changes: Any
) -> list[SampleRow]:
    """Return responses to one prompt. The reward of each is 0.5 plus that of its `environment`."""
    return [
        row(
            replace(
                make_sample(
                    prompt(), f"7-{k}", [1, 2], reward=0.5 + environment, reward_error=error
                ),
                text=text,
                reward_parts=None if error else parts,
                **changes,
            ),
            7,
        )
        for k, text in enumerate(texts)
        for error in ("it failed before" if text == "failed" else None,)
    ]


def grouped_by(
    settings: RewardConfig, samples: list[SampleRow], log_dir: Path | None
) -> list[Sample]:
    async def run() -> list[Sample]:
        rewards = GroupRewards(settings, log_dir)
        try:
            await rewards.start()
            return [one.sample() for one in await rewards.of(prompt(), samples)]
        finally:
            rewards.close()

    return asyncio.run(run())


def test_a_reward_per_group_takes_all_its_responses_at_once(module: str, tmp_path: Path) -> None:
    parts = {
        "right": {"name": "arithmetic"},
        "relative": {"name": f"{module}:relative", "per": "group", "weight": 0.5},
    }
    settings = RewardConfig(parts=parts, workers=1, timeout_s=300)
    steps = np.array([0.25, 0.25], dtype=np.float32)
    found = grouped_by(settings, group_of("a", "failed", "b", "nan", step_rewards=steps), tmp_path)
    assert [one.id for one in found] == ["7-0", "7-1", "7-2", "7-3"]
    assert [one.reward for one in found] == [0.5 + 1.5, 0.5, 0.5 + 6.5, 0.0]
    (more,) = grouped_by(settings, group_of("a", environment=2.0), tmp_path)
    assert more.reward == 2.5 + 0.5, "includes the reward of the environment"
    assert [one.reward_parts for one in found] == [
        {"right": 0.5, "relative": 3.0},
        None,
        {"right": 0.5, "relative": 13.0},
        None,
    ], "the reward received three responses, without the failed one"
    assert [one.reward_error for one in found] == [
        None,
        "it failed before",
        None,
        "relative: the reward is nan, not a finite number of at most 1e+30",
    ]
    assert found[2].step_rewards.tolist() == [0.25, 0.25 + 6.5]
    (line,) = (tmp_path / LOG).read_text().splitlines()
    assert json.loads(line)["response"] == "nan"


@pytest.mark.parametrize("weight", [1e308, 1e31])
def test_a_reward_that_is_too_large_with_its_part_per_group_is_an_error(
    module: str, tmp_path: Path, weight: float
) -> None:
    parts = {
        "right": {"name": "arithmetic", "weight": weight},
        "relative": {"name": f"{module}:relative", "per": "group", "gate": True},
    }
    settings = RewardConfig(parts=parts, workers=1, timeout_s=300)
    found = grouped_by(settings, group_of("a", "b", "c", parts={"right": 1.0}), tmp_path)
    assert [one.reward for one in found] == [0.0] * 3
    assert all("the reward of the parts" in str(one.reward_error) for one in found)
    assert len((tmp_path / LOG).read_text().splitlines()) == 3


def test_a_row_to_which_only_gates_apply_has_no_reward() -> None:
    parts = {
        "right": {"name": "arithmetic", "where": {"kind": "sums"}},
        "format": {"name": "math", "gate": True},
    }
    needed = reward_fields(RewardConfig(parts=parts)).columns
    assert needed({"kind": "sums"}) == ("answer",)
    assert needed({"kind": "words"}) is None


def test_an_error_after_the_scoring_of_a_group_is_passed_on() -> None:
    group: Any = SimpleNamespace(index=7, prompt=prompt(), samples=())
    failed: list[BaseException] = []

    def done(group: Any, samples: Any) -> None:
        raise KeyError(group.index)

    async def run() -> None:
        rewards = GroupRewards(RewardConfig(name="arithmetic"), None)
        rewards.begin(group, done, failed.append)
        (task,) = rewards._tasks
        await task
        rewards.close()

    asyncio.run(run())
    assert [repr(one) for one in failed] == ["KeyError(7)"]


def test_a_group_whose_reward_raises_has_no_reward(module: str, tmp_path: Path) -> None:
    settings = RewardConfig(name=f"{module}:relative", per="group", workers=1, timeout_s=300)
    found = grouped_by(settings, group_of("a", "bad"), None)
    assert [one.reward_error for one in found] == ["ValueError: a bad one"] * 2
    (right, _) = grouped_by(settings, group_of("a", "b", parts={}), tmp_path)
    assert (right.reward, right.reward_parts) == (0.5 + 2.0, None)
    (kept,) = grouped_by(settings, group_of("a", parts={"steps": 3.0}), tmp_path)
    assert kept.reward_parts == {"steps": 3.0}, "the part that the sample had before"


@pytest.mark.parametrize(
    ("function", "per", "message"),
    [
        ("relative", "response", "takes (prompt, responses), so it needs all responses to a"),
        ("of_lists", "group", "does not accept all responses to a prompt; name a function"),
    ],
)
def test_the_parameters_of_a_reward_and_its_per_must_agree(
    module: str, function: str, per: Any, message: str
) -> None:
    settings = RewardConfig(parts={"mine": {"name": f"{module}:{function}", "per": per}})
    with pytest.raises(RewardError) as caught:
        require_rewards(settings)
    assert caught.value.where == "rollout.reward.parts.mine.per"
    assert message in str(caught.value)
