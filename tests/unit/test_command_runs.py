"""`mar eval` and `mar train` without engines and ranks: their steps, their order and their exit
codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from megatron_async_rl import cli, evaluate
from megatron_async_rl.cli import application, runs
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, Problem, UserError
from megatron_async_rl.evaluate import EvaluationFailed
from megatron_async_rl.launch import launcher, rendezvous
from megatron_async_rl.launch.addresses import NodesError
from megatron_async_rl.plan import host, machine, nodes, preflight, resume, totals
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.nodes import ClusterReport, NodeReport
from tests.stored_pages import RecordedConsole
from tests.written_run import write_run

LAPTOP = Machine(cores=4, memory=16 * GIB, shared_memory=2 * GIB, gpus=())


def finished(code: int, out: str = "", err: str = "") -> Any:
    return SimpleNamespace(returncode=code, stdout=out, stderr=err)


def test_a_checkpoint_is_converted_in_a_child_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    result: list[Any] = [finished(0)]

    def run(command: list[str], **given: Any) -> Any:
        started.append((command, given))
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    monkeypatch.setattr(subprocess, "run", run)

    def converted() -> str:
        try:
            evaluate._convert(Path("c"), Path("o"), 9.5, "float32")
        except EvaluationFailed as error:
            return str(error)
        return ""

    assert converted() == ""
    ((command, given),) = started
    own = [sys.executable, "-m", "megatron_async_rl"]
    assert command == [*own, "convert", "c", "o", "--dtype", "float32"]
    assert given["timeout"] == 9.5
    assert (given["stdin"], given["capture_output"]) == (subprocess.DEVNULL, True)
    lines = "\n".join(str(line) for line in range(9))
    last = "\n".join(str(line) for line in range(3, 9))
    for one, text in (
        (finished(1, "out", f"{lines}\n"), f"c cannot be converted: {last}"),
        (finished(2, "out\n"), "c cannot be converted: out"),
        (
            subprocess.TimeoutExpired("x", 9.5),
            "converting c took more than 9.5 s\n  fix: raise watchdog.timeout_s, or convert the"
            " checkpoint with `mar convert` first",
        ),
    ):
        result[0] = one
        assert converted() == text


def test_an_evaluation_converts_samples_writes_and_then_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    sampling = SimpleNamespace(temperature=0.5, max_tokens=7)
    sets = [
        SimpleNamespace(
            file=SimpleNamespace(path=Path(name)),
            samples_per_prompt=3,
            pass_reward=1.5,
            sampling=sampling,
        )
        for name in ("a", "b")
    ]
    settings = {"samples_per_prompt": 3, "pass_reward": 1.5, "temperature": 0.5, "max_tokens": 7}
    monkeypatch.setattr(evaluate, "_convert", lambda *given: done.append(given))
    numbers: dict[str, Any] = {"mean": 0.5}
    monkeypatch.setattr(evaluate, "_engines", lambda job, model: [model])
    monkeypatch.setattr(evaluate, "_imports_of_engines", lambda spec: nullcontext())
    monkeypatch.setattr(
        evaluate,
        "_sample",
        lambda job, specs, console, on_answers: (
            done.append(*specs) or on_answers("answers") or SimpleNamespace(as_json=numbers.copy)
        ),
    )

    def write(*given: Any) -> None:
        done.append(given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "write_responses", write)
    monkeypatch.setattr(
        evaluate,
        "show_evaluation",
        lambda content, file, console: done.append((content, json.loads(Path(file).read_text()))),
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        for checkpoint, count in ((None, 1), (Path("c"), 2)):
            target = SimpleNamespace(
                checkpoint=checkpoint, named=Path("named"), result=tmp_path / "out.json"
            )
            job: Any = SimpleNamespace(
                target=target,
                model=Path("model"),
                dtype="float32",
                timeout_s=5.0,
                seed=3,
                sets=sets[:count],
                held_out=[SimpleNamespace(name=name, prompts=[0, 1]) for name in "ab"[:count]],
                responses=None if count == 1 else tmp_path / "responses.jsonl",
            )
            if count == 2:
                numbers["others"] = [{"mean": 0.25}]
            console = RecordedConsole()
            done.clear()
            # The result is on disk before the larger file, whose disk may be full.
            with nullcontext() if count == 1 else pytest.raises(OSError, match="No space"):
                evaluate.run(job, console)
            named = "named" if checkpoint is None else "c"
            content = {"checkpoint": named, "seed": 3, "data": "a", **settings, "mean": 0.5}
            if count == 2:
                content["others"] = [{"data": "b", **settings, "mean": 0.25}]
                ((given, out, *more), model, shown, written) = done
                assert (given, more, out, out.name) == (Path("c"), [5.0, "float32"], model, "hf")
                assert written == (job.responses, ["a", "a", "b", "b"], "answers")
                assert not out.parent.exists(), "the converted model is temporary"
                assert console.text == "converting c\n"
            else:
                model, shown = done
                assert model == Path("model")
                assert console.text == ""
            assert shown == (content, content)
            assert (tmp_path / "out.json").read_text().endswith("}\n")
            assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_failed_evaluation_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(job: Any, console: Any) -> None:
        assert job == "job"
        raise EvaluationFailed("no engine")

    monkeypatch.setattr(evaluate, "resolve", lambda *given: "job")
    monkeypatch.setattr(evaluate, "run", failed)
    done = CliRunner().invoke(cli.app, ["eval", "somewhere"])
    assert (done.exit_code, done.output) == (1, "no engine\n")


class Peers:
    """Stands in for the other machines."""

    def __init__(self, nodes: Any) -> None:
        self.told: list[Any] = []
        Peers.last = self

    last: Peers

    def refuse(self, why: str, **given: Any) -> None:
        self.told.append((why, given))


def test_the_other_machines_hear_why_a_start_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PeerNodes", Peers)
    monkeypatch.setattr(runs, "let_children_import_from_here", lambda: None)
    given: list[Any] = []
    outcome: list[Any] = [0]

    def train(*arguments: Any) -> int:
        given.append(arguments)
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return int(outcome[0])

    monkeypatch.setattr(runs, "_train", train)
    for one, code, told in (
        (0, 0, []),
        (130, 130, []),
        (UserError.of("k", "w", "f"), 2, [("k\n  w\n  fix: f", {})]),
        (RuntimeError("odd"), 1, [("RuntimeError odd", {"within_s": 1.0})]),
        (RuntimeError(), 1, [("RuntimeError", {"within_s": 1.0})]),
    ):
        outcome[0] = one
        arguments = ["train", "c.yaml", "a=1", "--engine-nodes", "3"]
        done = CliRunner().invoke(cli.app, arguments)
        assert (done.exit_code, Peers.last.told) == (code, told)
        assert isinstance(done.exception, RuntimeError) == isinstance(one, RuntimeError)
    config, overrides, ours, _, engine_nodes = given[0]
    assert (config, overrides, engine_nodes) == (Path("c.yaml"), ["a=1"], 3)
    assert (ours.count, ours.rank) == (1, 0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`start(rank, engine_nodes, **results)`: (exit code or problems, output, names of the checks
    in their order), with `results` instead of what the checks of `mar train` find."""
    config = load(write_run(tmp_path))
    monkeypatch.setattr(machine, "this_machine", lambda nodes=1: LAPTOP)

    def started(rank: int = 0, engine_nodes: int = 0, **results: Any) -> tuple[Any, str, list[str]]:
        calls: list[str] = []
        plan = SimpleNamespace(
            device="cpu", hosts=(), problems=(), warnings=("slow",), totals="totals"
        )
        plan.problems = results.pop("planned", ())
        defaults = {
            "conflicts": (resume, []),
            "finished_before": (launcher, False),
            "already_finished": (launcher, False),
            "preflight": (preflight, plan),
            "free_memory_problems": (host, []),
            "free_disk_problems": (totals, []),
            "occupied_gpus": (nodes, []),
            "query_cluster": (nodes, ClusterReport()),
            "cluster_problems": (nodes, []),
            "differences": (resume, []),
            "launch": (launcher, 7),
        }
        for name, (module, value) in defaults.items():
            found = results.get(name, value)

            def call(*_: Any, name: str = name, found: Any = found, **__: Any) -> Any:
                calls.append(name)
                return found

            monkeypatch.setattr(module, name, call)
        ours: Any = SimpleNamespace(rank=rank, count=2)
        console = RecordedConsole()
        monkeypatch.setattr(runs, "print_text", lambda text: console.print(text, soft_wrap=True))
        try:
            code: Any = runs.checked_launch(
                Path("c.yaml"),
                config,
                ["found a model"],
                ours,
                None,
                engine_nodes,  # type: ignore[arg-type]
            )
        except (ConfigError, NodesError) as error:
            code = [one.key for one in error.problems]
        return code, console.text.replace(str(tmp_path), "FOLDER"), calls

    return started


def problem(key: str) -> Problem:
    return Problem(key=key, what="w", fix="f")


CHECKS = [
    "conflicts",
    "finished_before",
    "preflight",
    "free_memory_problems",
    "free_disk_problems",
    "occupied_gpus",
]


def test_a_start_checks_in_order_and_prints_what_it_found(start: Any) -> None:
    code, output, calls = start()
    assert (code, output) == (7, "note: found a model\nnote: slow\n")
    assert calls == [*CHECKS, "query_cluster", "cluster_problems", "differences", "launch"]
    code, output, calls = start(rank=1)
    assert calls == [
        *("already_finished", "preflight", "free_memory_problems", "occupied_gpus", "launch"),
    ]
    assert start(finished_before=True) == (0, "", CHECKS[:2])
    assert start(rank=1, already_finished=True) == (0, "", ["already_finished"])


def test_a_start_is_refused_with_each_key_once(start: Any) -> None:
    one, other = problem("a"), problem("b")
    code, _, calls = start(conflicts=[one], planned=[one, other], finished_before=True)
    assert (code, calls) == (["a", "b"], ["conflicts", *CHECKS[2:5]])
    assert start(free_memory_problems=[other])[0] == ["b"]
    assert start(free_disk_problems=[one])[0] == ["a"]
    assert start(rank=1, free_disk_problems=[one])[0] == 7
    assert start(occupied_gpus=[one], cluster_problems=[other])[0] == ["a", "b"]
    assert start(cluster_problems=[other])[0] == ["b"]


def test_a_start_reports_absent_machines_and_changed_settings(start: Any) -> None:
    report = ClusterReport(
        missing=2, nodes=[NodeReport(host="h1", silent="lost"), NodeReport(host="h2")]
    )
    code, output, _ = start(engine_nodes=3, query_cluster=report, differences=["lr: 1 -> 2", "x"])
    assert code == 7
    assert output == (
        "waiting for 3 rollout nodes to join Ray\n"
        "note: 2 of 3 machines have not joined Ray yet\n"
        "note: h1, a machine of the Ray cluster, did not answer: lost\n"
        "FOLDER/out continues with other settings:\n  lr: 1 -> 2\n  x\n"
        "note: found a model\nnote: slow\n"
    )


def test_the_current_folder_is_appended_to_the_path_of_children_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for before, after in (
        ("", str(tmp_path)),
        ("/a::/b", f"/a:/b:{tmp_path}"),
        (f"{tmp_path}:/a", f"{tmp_path}:/a"),
    ):
        monkeypatch.setenv("PYTHONPATH", before)
        application.let_children_import_from_here()
        assert os.environ["PYTHONPATH"] == after


def test_errors_of_files_end_with_code_2_and_others_are_raised() -> None:
    outcome: list[Exception] = []

    def failing() -> None:
        raise outcome[0]

    app = typer.Typer(cls=application.Commands, pretty_exceptions_enable=False)
    app.command()(failing)
    app.command("other")(lambda: None)
    for error, code, output in (
        (
            OSError(13, "Permission denied", "a/b"),
            2,
            "a/b\n  Permission denied\n  fix: check the file, its folder and their permissions, or"
            " name another one\n",
        ),
        (OSError(111, "Connection refused"), 1, ""),
        (ValueError("x"), 1, ""),
    ):
        outcome[:] = [error]
        done = CliRunner().invoke(app, ["failing"])
        assert (done.exit_code, done.output) == (code, output)
        assert (done.exception is error) == (code == 1)
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.output.split()[0]) == (0, "megatron-async-rl")
