"""`mar init` writes a config that `mar plan` accepts for the described machine."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.load import load
from megatron_async_rl.config.rollout import AGENTS
from megatron_async_rl.plan import held_out, interview, new_config
from megatron_async_rl.plan.new_config import STYLES
from megatron_async_rl.plan.reward_choice import (
    ENVIRONMENTS,
    REWARDS,
    STARTERS,
    Choice,
    is_environment,
    names_of,
)
from tests.cases import looped
from tests.mar_command import mar
from tests.published_models import write_config
from tests.reward_trials import untried_rewards
from tests.thorough import THOROUGH, thorough
from tests.written_run import write_model, write_prompts


def run(*arguments: str | Path, answers: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments], input=answers)
    return done.exit_code, done.output


def init(out: Path, model: Path, data: Path, gpus: int, style: str) -> tuple[int, str]:
    options = ["--model", model, "--data", data, "--reward", "arithmetic", "--eval", "none"]
    return run("init", out, *options, "--gpus", str(gpus), "--style", style)


@pytest.mark.parametrize("style", STYLES)
def test_mar_plan_accepts_the_file_of_every_style_on_a_cpu(tmp_path, style):
    out = tmp_path / "run.yaml"
    code, output = init(
        out, write_model(tmp_path), write_prompts(tmp_path / "data.jsonl"), 0, style
    )
    assert code == 0, output
    code, output = run("plan", out)
    assert code == 0, output
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
    code, output = run("init", out, *options, "--style", "asynchronous")
    assert code == 0, output
    config = load(out)
    assert config.rollout is not None
    assert (config.rollout.placement, config.policy.parallel.tensor) == (placement, tensor)
    code, output = run("plan", out, "--gpus", str(gpus), "--gpu-memory", str(memory))
    assert code == 0, output


@pytest.mark.parametrize("style", ["asynchronous", "synchronous"])
def test_the_batch_divides_over_any_number_of_gpus(tmp_path, style):
    write_config(tmp_path / "model", "Qwen3-0.6B")
    data = write_prompts(tmp_path / "data.jsonl")
    for gpus in (3, 6, 7, 12):
        out = tmp_path / f"{gpus}.yaml"
        code, output = init(out, tmp_path / "model", data, gpus, style)
        assert code == 0, output
        assert 32 <= load(out).flow.prompts_per_step < 32 + gpus
        code, output = run("plan", out, "--gpus", str(gpus))
        assert code == 0, output


def test_a_model_without_a_fitting_layout_is_refused_and_nothing_written(tmp_path):
    write_config(tmp_path / "model", "Qwen2.5-32B")
    data = write_prompts(tmp_path / "data.jsonl")
    code, output = init(tmp_path / "run.yaml", tmp_path / "model", data, 1, "clipped")
    assert code == 2
    assert "no layout fits" in output
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    ("reward", "column", "words"),
    [
        ("nowhere:score", "prompt", ("rollout.reward.name", "no module 'nowhere'")),
        (
            "arithmetic",
            "first_text",
            ("--prompt-key", "its columns: first_text, answer"),
        ),
        (
            "openenv",
            "prompt",
            ("rollout.environment.name", "fix: pip install -U 'openenv>=0.10,<0.11'"),
        ),
    ],
)
def test_a_problem_that_no_layout_fixes_is_not_reported_as_one_of_layouts(
    tmp_path, reward, column, words
):
    data = tmp_path / "data.jsonl"
    data.write_text(f'{{"{column}": "1+1=", "answer": "2"}}\n')
    options = ["--model", write_model(tmp_path), "--data", data, "--reward", reward]
    code, output = run("init", tmp_path / "run.yaml", *options, "--gpus", "0", "--style", "clipped")
    assert code == 2
    assert "no layout fits" not in output
    for word in words:
        assert word in output
    assert str(tmp_path / "tmp") not in output, "the name of a temporary file"


@pytest.mark.parametrize(("gpus", "memory"), [(8, 80), (8, 36)])
def test_a_missing_chat_template_is_not_reported_as_lack_of_memory(tmp_path, gpus, memory):
    """The first layout does not fit and a later one does. Prompts that cannot be rendered have no
    length."""
    name = "Qwen3-8B"
    write_config(tmp_path / name, name)
    for file in write_model(tmp_path / "small").iterdir():
        if file.name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            shutil.copy(file, tmp_path / name)
    (tmp_path / name / "generation_config.json").write_text('{"eos_token_id": 1}')
    options = ["--model", tmp_path / name, "--data", write_prompts(tmp_path / "data.jsonl")]
    options += ["--reward", "arithmetic", "--eval", "none", "--as-chat"]
    options += ["--gpus", str(gpus), "--gpu-memory", str(memory)]
    code, output = run("init", tmp_path / "run.yaml", *options)
    assert code == 2
    assert "has no chat template" in output
    assert "was not written: 1 problem\n" in output, output


CHAT = (
    "{% if tools %}{{ tools | length }}{% endif %}{% for one in messages %}{{ one.role }}:"
    "{{ one.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
OPENENV = """
class Result:
    observation, reward, done = {"text": "on"}, 0.5, False

class GenericEnvClient:
    def __init__(self, base_url, message_timeout_s): pass
    async def connect(self): pass
    async def reset(self, **values): return Result
    async def step(self, action): return Result
    async def close(self): pass
"""
VERIFIERS = """
from verifiers.v1 import AgentConfig

class Environment:
    taskset = ["the only task"]

class EnvConfig:
    agent = AgentConfig()
    def __init__(self, taskset, agent=None): self.taskset = type("Taskset", (), taskset)
    def __iter__(self): return iter({"taskset": self.taskset, "agent": self.agent}.items())

def resolve_env_config(env): return EnvConfig(**env)
def load_environment(config): return Environment
def default_harness_id(taskset): return "bash"
def harness_class(name): return type("Null", (), {"EXECUTES_CODE": False})
"""
OWN = """
from megatron_async_rl.rollout.environments import EpisodeStep

def score(prompt, response):
    return 1.0

class Game:
    def __init__(self, *, top=7): pass
    def reset(self, prompt): return "a number"
    def step(self, response): return EpisodeStep(reward=1.0, done=True)
"""
"""Contents of a user's module, and the used parts of packages that are not installed."""


@pytest.fixture
def other_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | Path]]:
    """Return the options for all other answers, in a folder of a user who has every package."""
    for name, text in {
        "openenv/core/generic_client.py": OPENENV,
        "verifiers/v1/__init__.py": "class AgentConfig: harness = None",
        "verifiers/v1/utils/loaders.py": VERIFIERS,
        "asked_files.py": OWN,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    row = {"prompt": "1+1=", "answer": "2", "tests": ["assert f(1) == 2"], "task": 0}
    row["entry"] = {"task": "chain_sum", "options": {}, "metadata": {}, "answer": "2"}
    row |= {"numbers": [1, 1], "target": 2}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    (write_model(tmp_path / "model") / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield [
        *("--model", "model", "--data", "data.jsonl", "--eval", "none"),
        *("--gpus", "0", "--style", "clipped"),
    ]
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("openenv", "verifiers", "asked_files", *STARTERS):
            del sys.modules[name]


ANSWERS = [
    *REWARDS,
    *ENVIRONMENTS,
    "asked_files:score",
    "asked_files:Game",
    "math + asked_files:score",
    "tools+arithmetic",
    "asked_files:Game+judge+math",
]


@pytest.mark.parametrize(
    ("answer", "template"),
    [
        *(pytest.param(answer, True, id=f"{answer}-chat") for answer in ANSWERS),
        # Without a template, only environments are configured in another way.
        *(
            pytest.param(
                answer,
                False,
                id=f"{answer}-text",
                marks=thorough if answer in ENVIRONMENTS else (),
            )
            for answer in ("math", *ENVIRONMENTS, "asked_files:Game")
        ),
    ],
)
def test_mar_plan_accepts_the_file_of_every_reward(other_options, answer, template, tmp_path):
    if not template:
        (tmp_path / "model" / "chat_template.jinja").unlink()
    if answer == "reasoning_gym":
        pytest.importorskip(answer)
    if answer == "code":  # this machine may not have a sandbox
        other_options += ["--setting", "isolation=rlimits"]
    # Trials do not depend on the template, so only one answer is also tried without it.
    tried = THOROUGH or template or answer == "asked_files:Game"
    with nullcontext() if tried else untried_rewards():
        code, output = run("init", "run.yaml", *other_options, "--reward", answer)
    if not template and answer in AGENTS:
        assert (code, "has no chat template" in output) == (2, True)
        assert not (tmp_path / "run.yaml").exists()
        assert not (tmp_path / "my_agent.py").exists()
        return
    assert code == 0, output
    with untried_rewards():  # mar init has already tried them
        code, output = run("plan", "run.yaml")
    assert code == 0, output

    rollout, names = load(tmp_path / "run.yaml").rollout, names_of(answer)
    environment = next((one for one in names if is_environment(one)), None)
    rewards = [one for one in names if one != environment]
    assert (rollout.environment and rollout.environment.name) == environment
    assert (load(tmp_path / "run.yaml").data.tools_key is None) == (environment == "tools")
    default = ["math"] if environment == "tools" else ["environment"]
    assert [one.name for one in rollout.reward.rewards.values()] == (rewards or default)
    if environment is not None:
        assert rollout.environment.format == ("chat" if template else "text")
    written = (tmp_path / "run.yaml").read_text()
    for name in names:
        for key in {**REWARDS, **ENVIRONMENTS}.get(name, Choice()).settings:
            assert re.search(rf"# .*\b{key}:", written), f"{key} has no comment"


def test_settings_are_named_and_unknown_names_are_refused(other_options, tmp_path):
    given = ["--setting", "penalty=0", "--reward", "asked_files:Game+judge"]
    code, output = run("init", "run.yaml", *other_options, *given)
    assert (code, "rollout.environment.settings" in output) == (2, True)
    judge = ["--reward", "judge+math", "--setting"]
    code, output = run("init", "run.yaml", *other_options, *judge, "modle=m")
    assert (code, "did you mean 'model'?" in output) == (2, True)
    code, output = run("init", "run.yaml", *other_options, *judge, "juge.model=m")
    assert (code, "did you mean 'judge'?" in output) == (2, True)
    code, output = run("init", "run.yaml", *other_options, *judge, "url")
    assert (code, "KEY=VALUE" in output) == (2, True)
    both = ["judge.model=1e-4", "--setting", "lowest=-1", "--setting", "url=http://h:1/v1"]
    code, output = run("init", "run.yaml", *other_options, *judge, *both)
    assert (code, "judge.settings.model" in output) == (2, True), "a number, as in the file"
    both[0] = "judge.model='1e-4'"
    code, output = run("init", "run.yaml", *other_options, *judge, *both)
    assert code == 0, output
    settings = load(tmp_path / "run.yaml").rollout.reward.parts["judge"].settings
    assert settings == {"url": "http://h:1/v1", "model": "1e-4", "lowest": -1}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("mathh", "did you mean 'math'?"),
        ("openev", "did you mean 'openenv'?"),
        ("environment", "environments tools, agent"),
        ("tools+agent", "are environments, and a run has only one"),
        ("math+math", "contains a name twice"),
    ],
)
def test_an_unknown_reward_is_refused_and_its_question_repeated(
    other_options, answer, words, tmp_path, monkeypatch
):
    code, output = run("init", "run.yaml", *other_options, "--reward", answer)
    assert code == 2
    assert words in output
    monkeypatch.setattr(interview, "at_terminal", lambda: True)
    code, output = run("init", "run.yaml", *other_options, answers=f"{answer}\narithmetic\n")
    assert code == 0, output
    assert words in output
    for name in {**REWARDS, **ENVIRONMENTS}:
        assert name in output.splitlines()[0], "the question lists all names"
    assert load(tmp_path / "run.yaml").rollout.reward.name == "arithmetic"


def test_a_missing_model_is_requested_again_before_the_next_question(
    other_options, tmp_path, monkeypatch
):
    model = ["--model", "Qwen/Qwen3-0.6B"]
    code, output = run("init", "run.yaml", *model, *other_options[2:], "--reward", "math")
    assert (code, "name on a hub, write hf://Qwen/Qwen3-0.6B" in output) == (2, True)
    monkeypatch.setattr(interview, "at_terminal", lambda: True)
    answers = "nowhere\nmodel\n"
    code, output = run("init", "run.yaml", *other_options[2:], "--reward", "math", answers=answers)
    assert code == 0, output
    assert "nowhere is not a directory" in output
    assert load(tmp_path / "run.yaml").model.path == tmp_path / "model"


def test_an_agent_receives_the_prompt_without_the_chat_template(other_options, tmp_path):
    """The endpoint applies the template to the agent's messages."""
    code, output = run("init", "run.yaml", *other_options, "--reward", "agent")
    assert code == 0, output
    assert not load(tmp_path / "run.yaml").data.as_chat
    for given, noted in ((False, 0), (True, 1)):
        code, output = run("plan", "run.yaml", f"data.as_chat={str(given).lower()}")
        assert (code, output.count("applies it again to the agent's messages; remove as_chat")) == (
            0,
            noted,
        )


def test_a_users_module_is_not_overwritten(other_options, tmp_path):
    mine = '"""Mine."""\n\n\ndef look(place: str) -> str:\n    """Looks."""\n    return place\n'
    (tmp_path / "my_tools.py").write_text(mine)
    code, output = run("init", "run.yaml", *other_options, "--reward", "tools")
    assert code == 0, output
    assert (tmp_path / "my_tools.py").read_text() == mine


def test_a_reward_of_whole_groups_is_configured_per_group(tmp_path, monkeypatch):
    (tmp_path / "asked_rewards.py").write_text(
        "def unlike(prompt, responses):\n    return [0.0] * len(responses)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = write_prompts(tmp_path / "data.jsonl")
    options = ["--model", write_model(tmp_path), "--data", data, "--reward", "asked_rewards:unlike"]
    out = tmp_path / "run.yaml"
    code, output = run("init", out, *options, "--gpus", "0", "--style", "clipped")
    assert code == 0, output
    assert load(out).rollout.reward.per == "group"


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interview, "at_terminal", lambda: True)


@pytest.mark.usefixtures("at_terminal")
def test_answers_without_an_option_are_prompted_for(tmp_path):
    out, model = tmp_path / "run.yaml", write_model(tmp_path)
    data = write_prompts(tmp_path / "data.jsonl")
    answers = "\n".join(map(str, (model, data, "none", "arithmetic", 0, "clip", "Clipped"))) + "\n"
    code, output = run("init", out, answers=answers)
    assert code == 0, output
    assert "'clip' is not one of asynchronous, clipped, synchronous" in output
    assert load(out).objective.loss.name == "ppo_clip"
    assert load(out).data.train == data


@pytest.mark.usefixtures("at_terminal")
def test_the_prompt_column_follows_the_data(tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("question,solution\n1+1=,2\n2+2=,4\n")
    out, model = tmp_path / "run.yaml", write_model(tmp_path)
    answers = ("nowhere.csv", data, "questoin", "question", "none", "arithmetic", "", 0, "clipped")
    code, output = run("init", out, "--model", model, answers="\n".join(map(str, answers)) + "\n")
    assert code == 0, output
    questions = (
        "Data: ",
        "nowhere.csv: ",
        "Column of the prompts",
        "Held-out",
        "Reward",
        "Column of",
    )
    places = [output.index(words) for words in questions[:-1]] + [output.rindex(questions[-1])]
    assert places == sorted(places)
    assert "Column of the prompts (question, solution) [question]" in output
    assert "has no column 'questoin' (its columns: question, solution)" in output
    assert "Column of the answers (solution) [solution]" in output
    config = load(out)
    assert (config.data.prompt_key, config.data.answer_key) == ("question", "solution")


@pytest.mark.usefixtures("at_terminal")
def test_a_refused_answer_keeps_the_other_answers(tmp_path):
    """The plan refuses the model for these GPUs, so only their number is requested again."""
    write_config(tmp_path / "Qwen3-8B", "Qwen3-8B")
    data = write_prompts(tmp_path / "data.jsonl")
    out = tmp_path / "run.yaml"
    answers = (tmp_path / "Qwen3-8B", data, "none", "arithmetic", 1, "clipped", 8)
    code, output = run("init", out, answers="\n".join(map(str, answers)) + "\n")
    assert code == 0, output
    assert "no layout fits" in output
    assert output.count("Model: a") == output.count("Data: a") == output.count("Style") == 1
    assert output.count("Number of GPUs of the machine") == 2
    assert "The other answers are kept." in output
    assert load(out).objective.loss.name == "ppo_clip"


@pytest.mark.usefixtures("at_terminal")
def test_an_interrupted_interview_reports_the_command_with_its_answers(tmp_path):
    model, data = write_model(tmp_path), write_prompts(tmp_path / "my data.jsonl")
    out = tmp_path / "run.yaml"
    options = ("--as-chat", "--gpu-memory", "40", "--setting", "judge.model=it's", "--gpus", "1")
    code, output = run("init", out, *options, answers=f"{model}\n{data}\n")
    assert code == 1
    _, _, command = output.partition("To continue with the same answers: ")
    answers = ["--gpus", "1", "--model", str(model), "--data", str(data)]
    repeated = ["--setting", "judge.model=it's", "--as-chat", "--gpu-memory", "40"]
    assert shlex.split(command.splitlines()[0]) == ["mar", "init", str(out), *answers, *repeated]


def test_without_a_terminal_every_question_takes_its_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_prompts(tmp_path / "data.jsonl", prompts=40)
    given = ["--model", write_model(tmp_path), "--data", data]
    code, output = run("init", "run.yaml", *given, answers="countdown\n7\nclipped\n")
    assert code == 0, output
    for words in ("--reward math", "--gpus 0", "--style asynchronous", "--eval 5%"):
        assert f"note: {words} by default" in output
    config = load(tmp_path / "run.yaml")
    assert config.rollout.reward.name == "math", "nothing is read from the standard input"
    assert (config.eval.every, config.eval.samples_per_prompt) == (20, 1)
    code, output = run("init", "other.yaml")
    assert code == 2
    assert "add --model MODEL --data FILE" in output


def test_questions_appear_only_at_a_terminal(tmp_path):
    """The standard input of the command is a pseudo-terminal, /dev/null, or a pipe that stays open
    and empty."""
    model, data = write_model(tmp_path), write_prompts(tmp_path / "data.jsonl")
    reader, writer = os.pipe()
    for name, stdin in (
        ("null.yaml", os.devnull),
        ("pipe.yaml", f"/proc/{os.getpid()}/fd/{reader}"),
    ):
        given = ["--model", model, "--data", data, "--eval", "none"]
        done = mar("init", name, *given, folder=tmp_path, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert " by default" in done.stderr
    os.close(reader)
    os.close(writer)

    master, slave = pty.openpty()
    os.write(master, f"{model}\n{data}\nnone\narithmetic\n0\nclipped\n".encode())
    done = mar("init", "tty.yaml", folder=tmp_path, stdin=os.ttyname(slave))
    os.close(slave)
    os.close(master)
    assert done.returncode == 0, done.stderr
    assert "Model: a Hugging Face directory" in done.stderr, "the output may be a file"
    assert load(tmp_path / "tty.yaml").objective.loss.name == "ppo_clip"


def test_five_percent_of_the_prompts_are_held_out(tmp_path):
    rows = [{"prompt": f"{i % 60}+1=", "answer": str(i % 60 + 1), "n": i} for i in range(100)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    out, model = tmp_path / "run.yaml", write_model(tmp_path)
    given = ["--model", model, "--reward", "arithmetic", "--gpus", "0", "--style", "clipped"]
    code, output = run("init", out, *given, "--data", data)
    assert code == 0, output
    config = load(out)
    assert config.data.train == tmp_path / "run_data" / "train.jsonl"
    sides = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (config.data.train, config.data.eval)
    ]
    assert sorted((row for side in sides for row in side), key=lambda row: row["n"]) == rows
    trained, held_out = ({row["prompt"] for row in side} for side in sides)
    assert (len(held_out), trained & held_out) == (3, set())
    assert f"held-out rows: {len(sides[1])}, training rows: {len(sides[0])};" in output
    assert config.eval.every == 20
    code, output = run("plan", out)
    assert code == 0, output

    code, output = run("init", tmp_path / "same.yaml", *given, "--data", data)
    assert code == 0, output
    same = (tmp_path / "same_data" / "held_out.jsonl").read_text()
    assert same == config.data.eval.read_text(), "the same data give the same split"
    out.unlink()
    code, output = run("init", out, *given, "--data", data)
    assert (code, "run_data already exists" in output) == (2, True)
    code, output = run("init", tmp_path / "run2.yaml", *given[:-2], "--style", "x", "--data", data)
    assert (code, (tmp_path / "run2_data").exists()) == (2, False)


def test_data_that_cannot_be_split_leaves_no_files(tmp_path, monkeypatch):
    """The questions read only the first rows, and the split reads all of them."""
    data = write_prompts(tmp_path / "data.jsonl", prompts=1000)
    given = ["--model", write_model(tmp_path), "--reward", "arithmetic", "--gpus", "0"]
    given += ["--style", "clipped", "--data", data]
    before = sorted(tmp_path.iterdir())

    long = "a" * 251
    code, output = run("init", tmp_path / f"{long}.yml", *given)
    assert (code, sorted(tmp_path.iterdir())) == (2, before)
    assert "--eval" in output
    assert "File name too long" in output
    assert "name held-out data, or OUT in another folder" in output

    def interrupted(*arguments: object) -> None:
        assert (tmp_path / "run_data").is_dir()
        (tmp_path / "run_data" / "train.jsonl").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(held_out, "_write", interrupted)
        code, output = run("init", tmp_path / "run.yaml", *given)
    assert (code, sorted(tmp_path.iterdir())) == (2, before)
    assert "run_data: No space left on device" in output

    with data.open("a") as file:
        file.write("{\n")
    code, output = run("init", tmp_path / "run.yaml", *given)
    assert (code, sorted(tmp_path.iterdir())) == (2, before)
    assert "data.jsonl:1001" in output
    assert "is not JSON" in output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("0%", "between 0 and 100 %"),
        ("100%", "between 0 and 100 %"),
        ("nowhere.jsonl", "cannot be read"),
        ("other.jsonl", "other.jsonl has no column 'prompt' (its columns: question)"),
    ],
)
def test_wrong_held_out_data_is_reported_before_anything_is_written(
    tmp_path, given, words, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"question": "1+1="}\n')
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "data.jsonl")
    options = ["--model", "model", "--data", "data.jsonl", "--eval", given]
    code, output = run("init", "run.yaml", *options)
    assert code == 2
    assert "--eval" in output
    assert words in output
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data.jsonl", "model", "other.jsonl"]


def test_data_with_one_prompt_is_not_split_and_held_out_data_may_be_a_file(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", prompts=1)
    held_out = write_prompts(tmp_path / "held_out.jsonl", prompts=2)
    given = ["--model", write_model(tmp_path), "--data", data, "--reward", "arithmetic"]
    given += ["--gpus", "0"]
    code, output = run("init", tmp_path / "run.yaml", *given)
    assert code == 0, output
    assert "no two distinct prompts, so none is held out" in output
    assert load(tmp_path / "run.yaml").eval is None
    code, output = run("init", tmp_path / "file.yaml", *given, "--eval", held_out)
    assert code == 0, output
    assert load(tmp_path / "file.yaml").data.eval == held_out
    assert load(tmp_path / "file.yaml").eval.every == 20


@pytest.mark.parametrize("style", ["asynchronous", "clipped", "synchronous"])
def test_a_config_with_a_colocated_layout_is_synchronous(tmp_path, style):
    write_config(tmp_path / "Qwen3-0.6B", "Qwen3-0.6B")
    data = write_prompts(tmp_path / "data.jsonl")
    code, output = init(tmp_path / "run.yaml", tmp_path / "Qwen3-0.6B", data, 1, style)
    assert code == 0, output
    config, text = load(tmp_path / "run.yaml"), (tmp_path / "run.yaml").read_text()
    assert (config.rollout.placement, config.flow.async_ratio) == ("colocated", 0)
    assert (config.controls, config.objective.corrections) == ((), ())
    assert text.startswith("# Synchronous: ")
    assert "keep sampling while the policy trains" not in text
    why = "only a colocated layout fits 1 GPU of 80 GiB"
    output = re.sub(r"\s+", " ", output)
    another = style != "synchronous"
    assert (f"synchronous instead of {style}: {why}" in output) == another
    assert (f"# Not {style}: {why}" in text) == another


def test_a_synchronous_run_is_colocated_if_that_fits(tmp_path):
    write_config(tmp_path / "Qwen3-8B", "Qwen3-8B")
    data = write_prompts(tmp_path / "data.jsonl")
    for style, placement in (("synchronous", "colocated"), ("clipped", "disaggregated")):
        out = tmp_path / f"{style}.yaml"
        code, output = init(out, tmp_path / "Qwen3-8B", data, 8, style)
        assert code == 0, output
        assert load(out).rollout.placement == placement


THINKING = "{% if enable_thinking %}<think>{% endif %}{{ messages }}"


@looped(
    ("name", "template", "gpus", "tokens"),
    [
        ("Qwen3-8B", THINKING, 8, 8192),
        ("Qwen3-8B", None, 8, 8192),
        ("Qwen3-8B-Base", THINKING, 8, 1024),
        ("Qwen3-8B-Instruct", "{{ messages }}", 8, 1024),
        ("mine", [{"name": "default", "template": THINKING}], 8, 8192),
        ("mine", None, 8, 1024),
        ("Qwen2.5-7B", None, 8, 1024),
        ("DeepSeek-R1-Distill", None, 8, 8192),
        ("mine", THINKING, 0, 2048),
        ("mine", None, 0, 256),
    ],
)
def test_a_model_that_thinks_gets_longer_responses(tmp_path, name, template, gpus, tokens):
    write_config(tmp_path / "sizes", "Qwen3-8B")
    (tmp_path / "sizes").rename(tmp_path / name)
    if not gpus:
        write_model(tmp_path / name, max_position_embeddings=8192)
    if template is not None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
    out = tmp_path / "run.yaml"
    code, output = init(
        out, tmp_path / name, write_prompts(tmp_path / "data.jsonl"), gpus, "clipped"
    )
    assert code == 0, output
    assert load(out).rollout.sampling.max_tokens == tokens


@pytest.mark.parametrize("name", ["a, b #1: {c}", 'it\'s 50% "new"', "ünï~\\", "- x", "true"])
def test_paths_with_special_characters_are_quoted(tmp_path, name):
    out, model = tmp_path / "run.yaml", write_model(tmp_path / f"{name}_model")
    data = write_prompts(tmp_path / f"{name}.jsonl")
    code, output = init(out, model, data, 0, "clipped")
    assert code == 0, output
    assert (load(out).model.path, load(out).data.train) == (model, data)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("style", "is not one of"), ("data", "data.train"), ("model", "hf://OWNER/NAME")],
)
def test_a_wrong_answer_is_reported_and_nothing_written(tmp_path, wrong, named):
    answers = {
        "model": write_model(tmp_path),
        "data": write_prompts(tmp_path / "data.jsonl"),
        "style": "clipped",
    }
    answers[wrong] = "nosuch"
    pairs = itertools.chain.from_iterable((f"--{key}", one) for key, one in answers.items())
    code, output = run("init", tmp_path / "o.yaml", *pairs, "--reward", "arithmetic", "--gpus", "0")
    assert code == 2
    assert named in output
    assert not (tmp_path / "o.yaml").exists()


def test_columns_with_other_names_are_configured(tmp_path):
    """Usual names of columns are recognised; other columns must be named."""
    data = tmp_path / "data.csv"
    data.write_text("question,solution\n1+1=,2\n2+2=,4\n")
    out, model = tmp_path / "run.yaml", write_model(tmp_path)
    options = ["--model", model, "--data", data, "--reward", "arithmetic", "--gpus", "0"]
    code, output = run("init", out, *options, "--eval", "none", "--style", "synchronous")
    assert code == 0, output
    assert "note: --prompt-key question by default" in output
    assert "note: --answer-key solution by default" in output
    assert (load(out).data.prompt_key, load(out).data.answer_key) == ("question", "solution")
    code, output = run("plan", out)
    assert code == 0, output

    data.write_text("q,a\n1+1=,2\n2+2=,4\n")
    other = [tmp_path / "other.yaml", *options, "--eval", "none"]
    code, output = run("init", *other)
    assert (code, "(its columns: q, a)" in output) == (2, True)
    code, output = run("init", *other, "--prompt-key", "q")
    assert (code, "--answer-key COLUMN" in output) == (2, True)
    code, output = run("init", *other, "--prompt-key", "q", "--answer-key", "b")
    assert (code, "has no column 'b'" in output) == (2, True)
    code, output = run("init", *other, "--prompt-key", "q", "--answer-key", "a")
    assert code == 0, output
    countdown = [*options[:4], "--reward", "countdown", "--prompt-key", "q"]
    code, output = run("init", tmp_path / "c.yaml", *countdown)
    assert (code, "countdown reads the column" in output) == (2, True)


def test_an_existing_file_is_not_overwritten(tmp_path):
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    data = write_prompts(tmp_path / "data.jsonl")
    code, output = init(out, write_model(tmp_path), data, 0, "clipped")
    assert code == 2
    assert "already exists" in output
    assert out.read_text() == "mine"
    code, output = run("init", out)  # before anything is requested
    assert (code, "already exists" in output, "Model" in output) == (2, True, False)


def test_a_task_has_its_own_reward_and_held_out_questions(other_options, monkeypatch, tmp_path):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = "reasoning_gym:chain_sum"
    given = ["--model", "model", "--data", task, "--gpus", "0", "--style", "clipped"]
    code, output = run("init", "run.yaml", *given, "--as-chat", "--eval", "10%")
    assert code == 2
    assert f"{task} is not a file that can be split" in output
    assert f"fix: write {task} for its held-out questions" in output
    names = [new_config._path(name, tmp_path / "sub") for name in (task, "hf://A/B")]
    assert names == [task, "hf://A/B"], "whatever the folder of the file"
    code, output = run("init", "run.yaml", *given, "--as-chat")
    assert f"note: --eval {task} by default\nnote: --reward reasoning_gym by default\n" in output
    # The files of a task are named, and the prompts are too long for this model.
    assert code == 2
    assert "/reasoning_gym/chain_sum-" in output
    assert "tokens, and the limit is" in output
