"""Finding the cause of a failure in logs such as torchrun, gloo, Ray and vLLM write."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from megatron_async_rl.watchdog import logs
from megatron_async_rl.watchdog.logs import find_cause, survived, tail

GLOO = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 80, in train
[rank1]:     dist.all_reduce(total)
[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:41237
"""  # noqa: E501 - verbatim
SUMMARY = """\
E1121 07:06:36.120000 4711 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 4712)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/env/torch/distributed/launcher/api.py", line 300, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
megatron_async_rl.train FAILED
  exitcode  : {code} (pid: 4712)
  traceback : {traceback}
============================================================
"""  # noqa: E501 - verbatim
TWO_FAILED = """\
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 5256)  (SIGABRT)
  traceback : Signal 6 (SIGABRT) received by PID 5256
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 5257)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 5257
"""
OWN = """\
loading the model
Traceback (most recent call last):
  File "/app/prompts.py", line 12, in read_prompts
    row = json.loads(line)
          ^^^^^^^^^^^^^^^^
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/app/train.py", line 40, in main
    prompts = read_prompts(path)
megatron_async_rl.config.problem.DataError: train.jsonl:3: not JSON; each line is one object
"""
RAY = """\
Traceback (most recent call last):
  File "/app/train.py", line 66, in train
    batch = ray.get(ref)
  File "/env/ray/_private/worker.py", line 2858, in get
    raise value.as_instanceof_cause()
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::Controller.next_batch()\x1b[39m (pid=915, ip=10.0.0.2)
  File "/app/controller.py", line 88, in next_batch
    reward = self.reward(prompt, text)
ValueError: reward table has no row 7
"""  # noqa: E501 - verbatim
ACTOR_DIED = """\
Traceback (most recent call last):
  File "/app/train.py", line 66, in train
    ray.get(ref)
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: RolloutEngine
"""
VLLM = """\
(EngineCore_DP0 pid=5230) ERROR 11-21 07:10:11 [core.py:843] EngineCore failed to start.
(EngineCore_DP0 pid=5230) ERROR 11-21 07:10:11 [core.py:843] Traceback (most recent call last):
(EngineCore_DP0 pid=5230) ERROR 11-21 07:10:11 [core.py:843]   File "/env/vllm/worker.py", line 70, in init_device
(EngineCore_DP0 pid=5230) ERROR 11-21 07:10:11 [core.py:843]     check(memory)
(EngineCore_DP0 pid=5230) ERROR 11-21 07:10:11 [core.py:843] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "/app/engine.py", line 31, in start
    self._llm = AsyncLLM.from_engine_args(arguments)
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""  # noqa: E501 - verbatim
SURVIVED = """\
reward failed on sample 12-3:
Traceback (most recent call last):
  File "/app/reward.py", line 5, in score
    return 1 / count
ZeroDivisionError: division by zero
sample left out of training
"""


def write(directory: Path, **logs: str) -> None:
    """Files that fell silent in the order given."""
    for age, (name, text) in enumerate(logs.items()):
        path = directory / f"{name}.log"
        path.write_text(text)
        os.utime(path, (1000.0 + age, 1000.0 + age))


def cause_of(directory: Path) -> tuple[str, str, str]:
    cause = find_cause(directory)
    assert cause is not None
    return cause.message, cause.file.name, cause.file.read_text().splitlines()[cause.line - 1]


def test_a_peer_that_lost_its_connection_is_not_the_cause(tmp_path: Path) -> None:
    write(
        tmp_path,
        rank_1=GLOO,
        rank_0=OWN,
        torchrun=SUMMARY.format(code=1, traceback="To enable traceback see: ..."),
    )
    message, file, line = cause_of(tmp_path)
    assert message == "DataError: train.jsonl:3: not JSON; each line is one object"
    assert file == "rank_0.log"
    assert line.endswith(message.removeprefix("DataError: "))


def test_the_same_in_one_file_of_all_ranks(tmp_path: Path) -> None:
    primary = "".join(f"[rank0]: {line}\n" for line in OWN.splitlines())
    write(
        tmp_path,
        torchrun=GLOO + primary + SUMMARY.format(code=1, traceback="To enable traceback see: ..."),
    )
    assert cause_of(tmp_path)[0].startswith("DataError: train.jsonl:3")


def test_ranks_that_write_over_each_other_are_distinguished(tmp_path: Path) -> None:
    primary = [f"[rank0]: {line}\n" for line in SURVIVED.splitlines()[1:5]]
    mixed = [
        line for pair in zip(primary, GLOO.splitlines(keepends=True), strict=True) for line in pair
    ]
    write(tmp_path, torchrun="".join(mixed[:6] + mixed[:5:-1]))
    assert cause_of(tmp_path)[0] == "ZeroDivisionError: division by zero"


def test_of_a_ray_error_the_remote_exception_counts(tmp_path: Path) -> None:
    write(tmp_path, rank_0=RAY)
    assert cause_of(tmp_path) == (
        "ValueError: reward table has no row 7",
        "rank_0.log",
        "ValueError: reward table has no row 7",
    )


def test_an_actor_that_died_is_explained_by_its_own_log(tmp_path: Path) -> None:
    write(tmp_path, rank_0=ACTOR_DIED, engine_0=VLLM)
    assert cause_of(tmp_path)[:2] == (
        "ValueError: No available memory for the cache blocks.",
        "engine_0.log",
    )


def test_a_killed_rank_explains_its_peers(tmp_path: Path) -> None:
    write(
        tmp_path,
        rank_1=GLOO,
        torchrun=SUMMARY.format(code=-9, traceback="Signal 9 (SIGKILL) received by PID 4712"),
    )
    assert cause_of(tmp_path)[:2] == ("Signal 9 (SIGKILL) received by PID 4712", "torchrun.log")


def test_of_ranks_that_died_the_first_is_named(tmp_path: Path) -> None:
    write(tmp_path, rank_0=GLOO, torchrun=TWO_FAILED)
    assert cause_of(tmp_path)[:2] == (
        "rank 1: Signal 9 (SIGKILL) received by PID 5257",
        "torchrun.log",
    )


def test_a_rank_that_ray_ended_without_its_head_reports_it(tmp_path: Path) -> None:
    ray = (
        "[01:26:43 E 6613 7097] rpc_client.h:204: Failed to connect to GCS within 60 seconds. GCS"
        " may have been killed."
    )
    write(tmp_path, rank_0=ray + "\n", torchrun=SUMMARY.format(code=1, traceback="none"))
    assert cause_of(tmp_path)[:2] == (ray, "rank_0.log")


def test_an_exception_that_a_process_survived_is_not_what_ended_it(tmp_path: Path) -> None:
    write(tmp_path, rank_0=SURVIVED + "step 8\n" + OWN)
    assert cause_of(tmp_path)[0].startswith("DataError")


def test_the_process_that_fell_silent_first_is_the_cause(tmp_path: Path) -> None:
    write(tmp_path, rank_1=OWN, rank_0=RAY)
    assert cause_of(tmp_path)[1] == "rank_1.log"
    write(tmp_path, rank_0=RAY, rank_1=OWN)
    assert cause_of(tmp_path)[1] == "rank_0.log"


def test_a_deadline_gives_way_to_what_it_waited_for(tmp_path: Path) -> None:
    deadline = (
        'Traceback (most recent call last):\n  File "/app/train.py", line 3, in'
        " f\nmegatron_async_rl.watchdog.watch.DeadlineExceeded: rank 0 waited 600.0 s for engine"
        " 0, which did not come\n"
    )
    write(tmp_path, rank_0=deadline, rank_1=GLOO)
    assert (
        cause_of(tmp_path)[0]
        == "DeadlineExceeded: rank 0 waited 600.0 s for engine 0, which did not come"
    )
    write(tmp_path, rank_0=deadline, rank_1=GLOO, engine_0=VLLM)
    assert cause_of(tmp_path)[0].startswith("ValueError: No available memory")


def test_a_deadline_of_ray_gives_way_to_the_name_of_the_wait(tmp_path: Path) -> None:
    """The package raises its own error from that of Ray, such as for a stopped controller."""
    chained = (
        'Traceback (most recent call last):\n  File "/app/cluster.py", line 3, in ray_get\n'
        "ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready.\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/app/train.py", line 3, in f\n'
        "megatron_async_rl.watchdog.watch.DeadlineExceeded: rank 0 waited 90.3 s for the"
        " controller's position, which did not come\n"
    )
    write(tmp_path, rank_0=chained)
    name = "DeadlineExceeded: rank 0 waited 90.3 s for the controller's position"
    assert cause_of(tmp_path)[0].startswith(name)


def test_a_secondary_failure_is_better_than_none(tmp_path: Path) -> None:
    write(tmp_path, rank_1=GLOO)
    assert "Connection closed by peer" in cause_of(tmp_path)[0]


def test_of_a_large_log_with_a_long_line_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 4096)
    path = tmp_path / "engine-0.log"
    error = "Traceback (most recent call last):\n  File 'a'\nValueError: gloo " + "gloo " * 500
    path.write_text("x" * 9000 + "\nTraceback\n" * 500 + error + "\n")
    cause = find_cause(tmp_path)
    assert cause is not None
    assert cause.line == len(path.read_text().splitlines())
    assert cause.message.startswith("ValueError: gloo ")
    assert len(cause.message) < 2100
    assert not survived(cause)
    assert [len(line) < 2100 for line in tail(path, 2)] == [True, True]
    tracemalloc.start()
    path.write_bytes(bytes(10_000_000))
    tracemalloc.reset_peak()
    assert find_cause(tmp_path) is None
    assert tail(path, 3) == ["\0" * logs.MAX_CHARACTERS + " ..."]
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


BEGUN = "Traceback (most recent call last):\n  File 'a'\n"
IGNORED = "Exception ignored in: <function Store.__del__ at 0x7f>\n"


def test_an_exception_that_python_ignores_is_not_the_cause(tmp_path: Path) -> None:
    write(tmp_path, rank_0=f"{OWN}{IGNORED}{BEGUN}TypeError: late\n")
    assert cause_of(tmp_path)[0].startswith("DataError: train.jsonl:3")
    write(tmp_path, rank_0=f"{IGNORED}{BEGUN}TypeError: late\n")
    cause = find_cause(tmp_path)
    assert cause is not None
    assert (cause.message, cause.kind) == ("TypeError: late", logs.SECONDARY)


def test_a_traceback_without_its_end_has_no_exception(tmp_path: Path) -> None:
    """A process may be killed while it writes, and a thread may write into the traceback of
    another."""
    write(tmp_path, rank_0=BEGUN)
    assert find_cause(tmp_path) is None
    write(tmp_path, rank_0=f"{BEGUN}{BEGUN}ValueError: a\n{BEGUN}")
    assert cause_of(tmp_path)[0] == "ValueError: a"
    write(tmp_path, rank_0=f"{BEGUN}{IGNORED}{BEGUN}ValueError: b\n")
    cause = find_cause(tmp_path)
    assert cause is not None
    assert (cause.message, cause.kind) == ("ValueError: b", logs.SECONDARY)


def test_logs_without_a_failure_have_no_cause(tmp_path: Path) -> None:
    write(tmp_path, rank_0="step 1\nstep 2\n")
    (tmp_path / "rank_0.log.old").write_text(OWN)
    assert find_cause(tmp_path) is None
    assert find_cause(tmp_path / "missing") is None


def test_redirected_output_has_lines_of_python_of_descriptors_and_of_children(
    tmp_path: Path,
) -> None:
    path = tmp_path / "logs" / "rank_0.log"
    code = (
        "import os, pathlib, subprocess, sys\n"
        "from megatron_async_rl.watchdog.logs import redirect_output\n"
        f"redirect_output(pathlib.Path({str(path)!r}))\n"
        "print('from python')\n"
        "print('from stderr', file=sys.stderr)\n"
        "os.write(1, b'from a descriptor\\n')\n"
        "subprocess.run(['echo', 'from a child'], check=True)\n"
        "os._exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert path.read_text().splitlines() == [
        "from python",
        "from stderr",
        "from a descriptor",
        "from a child",
    ]


@pytest.mark.parametrize("lines", [0, 1, 3, 5000])
def test_tail_is_the_last_lines(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "x.log"
    text = [f"line {index} {'x' * 60}" for index in range(3000)]
    path.write_text("\n".join(text) + "\n")
    assert tail(path, lines) == (text[-lines:] if lines else [])
