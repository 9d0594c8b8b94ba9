"""`mar init`: five answers make a file that `mar plan` accepts, for the machine that was named."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.load import load
from megatron_async_rl.plan.new_config import STYLES
from tests.published_models import write_config
from tests.written_run import write_model, write_prompts


def run(*arguments: str | Path, answers: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments], input=answers)
    return done.exit_code, done.output


def init(out: Path, model: Path, data: Path, gpus: int, style: str) -> tuple[int, str]:
    options = ["--model", model, "--data", data, "--reward", "arithmetic"]
    return run("init", out, *options, "--gpus", str(gpus), "--style", style)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_makes_a_file_that_mar_plan_accepts_on_a_cpu(tmp_path, style):
    out = tmp_path / "run.yaml"
    code, told = init(out, write_model(tmp_path), write_prompts(tmp_path / "data.jsonl"), 0, style)
    assert code == 0, told
    code, told = run("plan", out)
    assert code == 0, told
    assert load(out).flow.async_ratio == (0 if style == "synchronous" else 2)


@pytest.mark.parametrize(
    ("gpus", "memory", "placement", "tensor"),
    [(1, 80, "colocated", 1), (8, 80, "disaggregated", 2), (8, 141, "disaggregated", 1)],
)
def test_the_layout_is_the_simplest_that_fits_the_gpus(tmp_path, gpus, memory, placement, tensor):
    name = "Qwen3-0.6B" if gpus == 1 else "Qwen3-8B"
    out = tmp_path / "run.yaml"
    write_config(tmp_path / name, name)
    options = ["--model", tmp_path / name, "--data", write_prompts(tmp_path / "data.jsonl")]
    options += ["--reward", "arithmetic", "--gpus", str(gpus), "--gpu-memory", str(memory)]
    code, told = run("init", out, *options, "--style", "asynchronous")
    assert code == 0, told
    config = load(out)
    assert config.rollout is not None
    assert (config.rollout.placement, config.policy.parallel.tensor) == (placement, tensor)
    code, told = run("plan", out, "--gpus", str(gpus), "--gpu-memory", str(memory))
    assert code == 0, told


def test_a_model_that_no_layout_fits_is_refused_and_nothing_is_written(tmp_path):
    write_config(tmp_path / "model", "Qwen2.5-32B")
    data = write_prompts(tmp_path / "data.jsonl")
    code, told = init(tmp_path / "run.yaml", tmp_path / "model", data, 1, "clipped")
    assert code == 2
    assert "no layout fits" in told
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    ("reward", "column", "words"),
    [
        ("mathh", "prompt", ("rollout.reward.name", "did you mean 'math'?")),
        ("arithmetic", "question", ("data.train", "--prompt-key question")),
        ("arithmetic", "messages", ("data.train", "--prompt-key messages")),
        ("environment", "prompt", ("run.yaml was not written", "rollout.reward")),
    ],
)
def test_a_fault_that_no_layout_mends_is_not_blamed_on_the_layout(tmp_path, reward, column, words):
    data = tmp_path / "data.jsonl"
    data.write_text(f'{{"{column}": "1+1=", "answer": "2"}}\n')
    options = ["--model", write_model(tmp_path), "--data", data, "--reward", reward]
    code, told = run("init", tmp_path / "run.yaml", *options, "--gpus", "0", "--style", "clipped")
    assert code == 2
    assert "no layout fits" not in told
    for word in words:
        assert word in told
    assert str(tmp_path / "tmp") not in told, "the name of a file that is gone"


def test_a_reward_of_whole_groups_is_written_as_one(tmp_path, monkeypatch):
    (tmp_path / "asked_rewards.py").write_text(
        "def unlike(prompt, responses):\n    return [0.0] * len(responses)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = write_prompts(tmp_path / "data.jsonl")
    options = ["--model", write_model(tmp_path), "--data", data, "--reward", "asked_rewards:unlike"]
    out = tmp_path / "run.yaml"
    code, told = run("init", out, *options, "--gpus", "0", "--style", "clipped")
    assert code == 0, told
    assert load(out).rollout.reward.per == "group"


def test_what_is_not_given_as_an_option_is_asked_for(tmp_path):
    out, model = tmp_path / "run.yaml", write_model(tmp_path)
    data = write_prompts(tmp_path / "data.jsonl")
    asked = "\n".join(map(str, (model, data, "arithmetic", 0, "clip", "Clipped"))) + "\n"
    code, told = run("init", out, answers=asked)
    assert code == 0, told
    assert load(out).objective.loss.name == "ppo_clip"
    assert load(out).data.train == data


@pytest.mark.parametrize("name", ["a, b #1: {c}", 'it\'s 50% "new"', "ünï~\\", "- x", "true"])
def test_a_path_of_any_characters_is_read_back_as_it_is(tmp_path, name):
    out, model = tmp_path / "run.yaml", write_model(tmp_path / f"{name}_model")
    data = write_prompts(tmp_path / f"{name}.jsonl")
    code, told = init(out, model, data, 0, "clipped")
    assert code == 0, told
    assert (load(out).model.path, load(out).data.train) == (model, data)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("style", "is not one of"), ("data", "data.train"), ("model", "hf://OWNER/NAME")],
)
def test_a_wrong_answer_is_named_and_nothing_is_written(tmp_path, wrong, named):
    answers = {
        "model": write_model(tmp_path),
        "data": write_prompts(tmp_path / "data.jsonl"),
        "style": "clipped",
    }
    answers[wrong] = "nosuch"
    pairs = itertools.chain.from_iterable((f"--{key}", one) for key, one in answers.items())
    code, told = run("init", tmp_path / "o.yaml", *pairs, "--reward", "arithmetic", "--gpus", "0")
    assert code == 2
    assert named in told
    assert not (tmp_path / "o.yaml").exists()


def test_columns_of_other_names_are_written_down(tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("question,solution\n1+1=,2\n2+2=,4\n")
    out, model = tmp_path / "run.yaml", write_model(tmp_path)
    options = ["--model", model, "--data", data, "--reward", "arithmetic", "--gpus", "0"]
    code, told = run("init", out, *options, "--style", "synchronous")
    assert code == 2
    assert "question" in told
    keys = ["--prompt-key", "question", "--answer-key", "solution"]
    code, told = run("init", out, *options, *keys, "--style", "synchronous")
    assert code == 0, told
    assert load(out).data.prompt_key == "question"
    code, told = run("plan", out)
    assert code == 0, told


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    data = write_prompts(tmp_path / "data.jsonl")
    code, told = init(out, write_model(tmp_path), data, 0, "clipped")
    assert code == 2
    assert "already exists" in told
    assert out.read_text() == "mine"
    code, told = run("init", out)  # before anything is asked
    assert (code, "already exists" in told, "Model" in told) == (2, True, False)
