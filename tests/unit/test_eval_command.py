"""Tests of `mar eval` before any process starts: how it finds weights and config, and which inputs
it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
import yaml
from rich.console import Console

from megatron_async_rl import evaluate as evaluate_module
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.evaluate import EvalJob, EvaluationFailed, resolve
from megatron_async_rl.plan.machine import GIB, Gpu, Machine
from megatron_async_rl.report import progress as progress_module
from megatron_async_rl.report.progress import sampling_progress, show_evaluation
from megatron_async_rl.report.responses_file import write_responses
from megatron_async_rl.rollout import cluster
from megatron_async_rl.samples import Prompt
from tests.mar_command import mar
from tests.stored_pages import RecordedConsole
from tests.train_batches import make_sample, row
from tests.written_run import config_tree, write_model, write_prompts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run with checkpoints of steps 4 and 8. The checkpoints have only
    the files that `mar eval` reads without torch."""
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "held_out.jsonl", prompts=3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").touch()
    for step in (4, 8):
        folder = tmp_path / "out" / "checkpoint" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "about.json").write_text(json.dumps({"step": step}))
    (tmp_path / "out" / "checkpoint" / "latest").write_text("step_00000008")
    configure(
        tmp_path / "out",
        data={"eval": "../held_out.jsonl"},
        eval={"samples_per_prompt": 4, "pass_at": [1, 4]},
    )
    return tmp_path / "out"


def configure(folder: Path, **changes: Any) -> Path:
    tree = config_tree()
    tree["model"]["path"] = "../model"
    for section, values in changes.items():
        tree[section] = (
            {**(tree.get(section) or {}), **values} if isinstance(values, dict) else values
        )
    file = folder / "config.yaml"
    file.write_text(
        yaml.safe_dump({name: section for name, section in tree.items() if section is not None})
    )
    return file


def resolved(
    named: Path,
    *overrides: str,
    config: Path | None = None,
    out: Path | None = None,
    responses: Path | None = None,
) -> EvalJob:
    return resolve(named, config, overrides, out, responses)


def test_the_checkpoint_folder_stands_for_its_newest_step_and_the_runs_config(run: Path) -> None:
    job = resolved(run / "checkpoint")
    assert job.target.checkpoint == run / "checkpoint" / "step_00000008"
    assert (job.target.version, job.target.result) == (8, run / "eval_8.json")
    (held_out,) = job.held_out
    assert (held_out.n, held_out.pass_at, held_out.name) == (4, (1, 4), "")
    assert [prompt.text for prompt in held_out.prompts] == ["0+0=", "1+1=", "2+2="]


def test_any_step_may_be_named_and_overrides_change_the_sampling(run: Path) -> None:
    job = resolved(
        run / "checkpoint" / "step_00000004", "rollout.sampling.temperature=0.5", "run.seed=7"
    )
    assert (job.target.version, job.target.result) == (4, run / "eval_4.json")
    assert (job.rollout.sampling.temperature, job.seed) == (0.5, 7)


def test_a_named_model_directory_replaces_the_model_of_the_config(
    run: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other")
    config = configure(
        tmp_path / "out", model={"path": "nowhere"}, data={"eval": "../held_out.jsonl"}
    )
    job = resolved(other, config=config, out=tmp_path / "here.json")
    assert (job.model, job.target.checkpoint, job.target.version) == (
        other,
        None,
        0,
    )
    assert job.target.result == tmp_path / "here.json"


def test_a_model_may_be_named_and_filled_as_other_trainers_do(run: Path, tmp_path: Path) -> None:
    for name in ("step_500_hf", "checkpoint-500"):
        other = write_model(tmp_path / name)
        (other / "latest").write_text("global_step500")
        job = resolved(other, config=run / "config.yaml")
        assert (job.model, job.target.checkpoint) == (other, None)
    # The fix never removes a folder that may hold more than checkpoints.
    (tmp_path / "step_9").mkdir()
    message = refusal(tmp_path / "step_9", config=run / "config.yaml")
    assert f"no other checkpoint of {tmp_path} is whole; restore one from a copy" in message


def test_engines_load_merged_adapters_in_the_precision_of_the_run(run: Path) -> None:
    assert resolved(run / "checkpoint", "model.dtype=bfloat16").dtype == "bfloat16"
    merged = "policy.lora={merge: float32}"
    assert resolved(run / "checkpoint", "model.dtype=bfloat16", merged).dtype == "float32"


def test_the_eval_section_has_defaults_and_the_command_may_name_the_data(run: Path) -> None:
    configure(run)
    job = resolved(run / "checkpoint", f"data.eval={run.parent / 'held_out.jsonl'}")
    assert [(one.n, len(one.prompts)) for one in job.held_out] == [(4, 3)]


def refusal(named: Path, *overrides: str, **more: Any) -> str:
    """Return the message of the UserError that `resolve` raises."""
    with pytest.raises(UserError) as caught:
        resolved(named, *overrides, **more)
    return str(caught.value)


def test_a_path_without_a_checkpoint_is_refused_with_a_fix(run: Path) -> None:
    assert "is not a directory" in refusal(run / "checkpoints")
    assert f"fix: name {run / 'checkpoint'}" in refusal(run)
    assert "neither a checkpoint nor a Hugging Face model" in refusal(run.parent)
    (run / "checkpoint" / "latest").write_text("step_00000009")
    assert "names 'step_00000009', which is not a checkpoint" in refusal(run / "checkpoint")


def test_a_model_outside_a_run_needs_a_config(run: Path) -> None:
    assert "--config CONFIG" in refusal(run.parent / "model")


def test_a_config_without_held_out_prompts_is_refused(run: Path) -> None:
    configure(run)
    message = refusal(run / "checkpoint")
    assert "data.eval" in message
    assert "add data.eval=FILE.jsonl" in message


def test_a_model_whose_head_size_has_no_cpu_kernel_is_refused_on_a_cpu(run: Path) -> None:
    write_model(run.parent / "model", head_dim=16)
    assert "16 elements (head_dim)" in refusal(run / "checkpoint")


def test_the_config_of_a_supervised_run_is_refused(run: Path) -> None:
    configure(
        run,
        objective={"loss": "sft", "advantage": "none"},
        rollout=None,
        flow={"group_size": 1, "async_ratio": 0},
        data={"eval": "../held_out.jsonl"},
    )
    assert "name a config with a `rollout` section" in refusal(run / "checkpoint")


@pytest.mark.parametrize("section", ["in the file", "by default"])
def test_pass_at_above_the_number_of_responses_is_refused(run: Path, section: str) -> None:
    if section == "by default":
        configure(run, data={"eval": "../held_out.jsonl"})
    assert "eval.pass_at: 8 needs at least 8 responses per prompt" in refusal(
        run / "checkpoint", "eval.pass_at=[8]"
    )


def test_prompts_and_rewards_that_do_not_match_are_refused(run: Path) -> None:
    assert "no `numbers`" in refusal(run / "checkpoint", "rollout.reward.name=countdown")
    assert "rollout.reward.name" in refusal(run / "checkpoint", "rollout.reward.name=countdow")
    assert "the limit is 2" in refusal(run / "checkpoint", "rollout.sampling.max_tokens=62")
    assert "no room for a prompt" in refusal(run / "checkpoint", "rollout.sampling.max_tokens=64")
    assert "cannot be read" in refusal(run / "checkpoint", "data.eval=nowhere.jsonl")


def test_an_environment_and_a_tokenizer_that_cannot_load_are_refused(run: Path) -> None:
    message = refusal(run / "checkpoint", "rollout.environment={name: 'tests.unit.agents:nothing'}")
    assert "rollout.environment.name" in message
    assert "tests.unit.agents" in message
    (run.parent / "model" / "tokenizer.json").write_text("{")
    message = refusal(run / "checkpoint")
    assert "model.path" in message
    assert "tokenizer" in message


def test_an_unwritable_result_file_is_refused(run: Path) -> None:
    assert "name a file with --out FILE" in refusal(
        run / "checkpoint", out=run / "nowhere" / "result.json"
    )


def test_every_response_is_written_with_the_columns_of_its_prompt(run: Path) -> None:
    prompt = Prompt(id="p", text="1+1=", token_ids=(1,), fields={"answer": "2", "response": "old"})
    answers = [
        (
            prompt,
            [row(make_sample(prompt, "a", [5], reward=1.0)), row(make_sample(prompt, "b", [6]))],
        ),
        (prompt, [row(make_sample(prompt, "c", [5], reward_error="no idea"))]),
        (prompt, []),
    ]
    write_responses(run / "responses.jsonl", ["", "", "b"], answers)
    lines = [json.loads(line) for line in (run / "responses.jsonl").read_text().splitlines()]
    assert [one["reward"] for one in lines] == [1.0, 0.0, None]
    assert [one.get("reward_error") for one in lines] == [None, None, "no idea"]
    of_prompt = {"answer": "2", "prompt_id": "p", "prompt": "1+1="}
    assert all(one.items() >= of_prompt.items() and one["response"] != "old" for one in lines)
    assert not any("set" in one for one in lines)
    assert not list(run.glob("*.partial"))


def test_an_unwritable_file_of_responses_is_refused(run: Path) -> None:
    message = refusal(run / "checkpoint", responses=run / "nowhere" / "responses.jsonl")
    assert "name a file with --responses FILE" in message
    assert "--responses" in refusal(run / "checkpoint", responses=run)


def test_the_command_refuses_with_exit_code_2_and_without_a_traceback(run: Path) -> None:
    done = mar("eval", run / "checkpoint", "eval.pass_at=[5]", folder=run)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "eval.pass_at: 5 needs at least 5 responses per prompt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(run.glob("eval*"))


def test_a_result_is_shown_with_its_speed_even_if_every_reward_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_EVERY_S", 3600.0)
    console = Console(record=True, width=100, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with sampling_progress(console, 2) as progress:
        progress(1, 10)
        progress(2, 20)
    counts = {
        "samples": 8,
        "prompts": 2,
        "truncated": 0.25,
        "tokens": 400,
        "seconds": 2.0,
        "reward_errors": 8,
    }
    show_evaluation(
        {"mean_reward": None, "parts": {"style": 0.25}, "pass_at": {"1": 0.5}, **counts},
        "RUN/eval_8.json",
        console,
    )
    shown = console.export_text()
    for words in (
        "sampled 2 of 2 prompts",
        "nan",
        "style",
        "0.2500",
        "pass@1",
        "0.5000",
        "8 to 2 prompts, 8 rewards failed",
        "200 tokens/s",
        "25.0%",
    ):
        assert words in shown
    assert "sampled 1 of 2" not in shown


calls: list[Any] = []
"""Calls of the stand-ins below, in order."""


class StandInFleet:
    """Records how an evaluation starts and ends its engines."""

    made: ClassVar[list[StandInFleet]] = []

    def __init__(self, specs: Any, start: Any, listener: Any, settings: Any) -> None:
        self.specs, self.settings = specs, settings
        self.requests = "requests"
        self.closed: list[float] = []
        StandInFleet.made.append(self)

    async def started(self) -> None:
        calls.append("engines")

    async def close(self, seconds: float) -> None:
        calls.append("closed engines")
        self.closed.append(seconds)


class StandInRewards:
    def __init__(self, reward: Any, log_dir: Path) -> None:
        calls.append(("rewards", log_dir.name))

    async def start(self) -> None:
        calls.append("started rewards")

    def close(self) -> None:
        calls.append("closed rewards")


def test_engines_and_rewards_start_and_end_with_the_evaluation(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved(run / "checkpoint", "rollout.engines=2", "run.seed=5")
    result: list[Any] = ["the result"]

    async def evaluated(
        requests: str, held_out: Any, version: int, timeout_s: float, **given: Any
    ) -> Any:
        same = held_out is job.held_out
        calls.append((requests, same, version, timeout_s, given["on_reward_error"]))
        given["on_answers"]("the answers")
        assert isinstance(given["rewards"], StandInRewards)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    monkeypatch.setattr(evaluate_module, "Fleet", StandInFleet)
    monkeypatch.setattr(evaluate_module, "GroupRewards", StandInRewards)
    monkeypatch.setattr(evaluate_module, "evaluate", evaluated)
    monkeypatch.setattr(cluster, "join_ray", lambda quiet: calls.append(("ray", quiet)))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shut down"))
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    expected = [
        ("ray", True),
        ("rewards", "eval_8.logs"),
        *("engines", "started rewards"),
        ("requests", True, 8, 600.0, "drop"),
        *("closed rewards", "closed engines", "shut down"),
    ]
    engines = evaluate_module._engines(job, Path("model"))
    answers: list[Any] = []
    for outcome in ("the result", RuntimeError("no engine"), KeyError("x")):
        result[0] = outcome
        calls.clear()
        console = RecordedConsole()
        if isinstance(outcome, str):
            assert evaluate_module._sample(job, engines, console, answers.append) == outcome
        else:
            kind = EvaluationFailed if isinstance(outcome, RuntimeError) else KeyError
            with pytest.raises(kind):
                evaluate_module._sample(job, engines, console, answers.append)
        assert calls == expected
        assert console.text == "starting 2 engines on the CPU\n"
    assert answers == ["the answers"] * 3
    fleet = StandInFleet.made[-1]
    assert fleet.closed == [15.0]
    settings = fleet.settings
    assert (settings.capacity, settings.unresponsive_s, settings.restarts_per_hour) == (256, 60, 0)
    first, second = fleet.specs
    assert (first.index, second.index) == (0, 1)
    assert (first.seed, first.device, first.dtype, first.first_version) == (5, "cpu", "float32", 8)
    assert (first.model_path, first.transport) == (Path("model"), "shared_memory")
    assert first.evaluations == {"": job.sets[0].sampling}
    assert first.log_dir == run / "eval_8.logs"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0", "before Ray is imported"


@pytest.mark.parametrize(
    ("device", "ray", "imported"), [("cpu", "", True), ("cuda", "", False), ("cpu", "auto", False)]
)
def test_engines_import_while_a_checkpoint_is_converted_unless_they_cannot_be_forked(
    run: Path, monkeypatch: pytest.MonkeyPatch, device: str, ray: str, imported: bool
) -> None:
    job = replace(resolved(run / "checkpoint"), device=device)
    happened: list[Any] = []

    @contextlib.contextmanager
    def serving(spec: Any, environment: Any, folder: Path, log: Path) -> Iterator[None]:
        assert spec.model_path.name == "hf"
        assert folder.parent == run, "the run folder, whose path is short"
        assert environment is os.environ
        assert log == run / "eval_8.logs" / "preloaded_engines.log"
        assert log.parent.is_dir()
        happened.append("imports")
        yield

    def sampled(*_: Any) -> Any:
        happened.append("samples")
        raise KeyError

    monkeypatch.setattr(evaluate_module, "serving_engines", serving)
    # Python reads TMPDIR once.
    use = partial(monkeypatch.setattr, tempfile, "tempdir", str(run))
    monkeypatch.setattr(evaluate_module, "use_run_folder", use)
    monkeypatch.setattr(evaluate_module, "_convert", lambda *_: happened.append("converted"))
    monkeypatch.setattr(evaluate_module, "_sample", sampled)
    monkeypatch.setenv("RAY_ADDRESS", ray)
    with contextlib.suppress(KeyError):
        evaluate_module.run(job, RecordedConsole())
    expected = ["imports", "converted", "samples"] if imported else ["converted", "samples"]
    assert happened == expected


def test_as_many_engines_start_as_fit_the_gpus_of_this_machine(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(gpus: int) -> None:
        gpu = Gpu(name="H100", memory=80 * GIB, capability=(9, 0))
        machine = Machine(cores=8, memory=64 * GIB, shared_memory=GIB, gpus=(gpu,) * gpus)
        monkeypatch.setattr(evaluate_module, "this_machine", lambda: machine)

    wanted = ["policy.device=cuda", "rollout.engines=8", "rollout.tensor=2"]
    for gpus, engines in ((8, 4), (16, 8), (32, 8), (3, 1)):
        on(gpus)
        assert resolved(run / "checkpoint", *wanted).rollout.engines == engines
    on(1)
    message = refusal(run / "checkpoint", *wanted)
    assert "rollout.tensor" in message
    assert "an engine needs 2 GPUs, and this machine has 1" in message
    on(0)
    assert resolved(run / "checkpoint", "rollout.engines=3").rollout.engines == 3, "on a CPU"
