"""The recipes in examples/recipes fit the machines that they name, and their script runs its steps
in order. The hub and `mar` are stand-ins, because network and GPUs are not available."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from examples.recipes.second_look import SecondLook
from megatron_async_rl.cli import app
from megatron_async_rl.config.load import load
from megatron_async_rl.plan.estimate import Estimate
from megatron_async_rl.plan.machine import described_machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.samples import Prompt
from tests.cases import looped
from tests.ports import free_ports
from tests.published_models import PUBLISHED, write_config
from tests.reward_trials import untried_rewards
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
MAR = """#!/bin/bash
echo "$*" >> "$ASKED"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_checkout(tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that no test changes."""
    return write_checkout(tmp_path_factory.mktemp("checkout"))


def write_checkout(tmp_path: Path) -> Path:
    """Write recipes and launchers, with the files that the script would download."""
    shutil.copytree(RECIPES, tmp_path / "examples" / "recipes")
    (tmp_path / "launchers").symlink_to(ROOT / "launchers")
    for name, files in {"gsm8k": ("train", "test"), "dapo_math_17k": ("train", "aime24")}.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for part in files:
            line = {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
            (tmp_path / "data" / name / f"{part}.jsonl").write_text(json.dumps(line) + "\n")
    for name in PUBLISHED:
        write_config(tmp_path / "models" / name, name)
        (tmp_path / "models" / name / ".fetched").touch()
    return tmp_path


@looped("name", NAMES)
def test_a_recipe_fits_the_gpus_of_its_machines(unchanged: Path, name: str) -> None:
    """Its reward also scores a response to its data."""
    file = unchanged / "examples" / "recipes" / f"{name}.yaml"
    nodes, trainer_nodes, gpus = machines_of(file)
    counts = {"nodes": nodes, "trainer_nodes": trainer_nodes, "gpus": gpus}
    require_fit(file, (), 80, **counts)
    with untried_rewards():
        require_fit(file, (), 141, **counts)


@looped("name", NAMES)
@untried_rewards()
def test_a_recipe_is_planned_on_an_empty_machine(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither model nor data nor network is needed, and the plan fits a screen."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(RECIPES, tmp_path / "examples" / "recipes")
    file = tmp_path / "examples" / "recipes" / f"{name}.yaml"
    nodes, trainer_nodes, gpus = machines_of(file)
    arguments = ["plan", str(file), "--nodes", str(nodes), "--trainer-nodes", str(trainer_nodes)]
    done = CliRunner().invoke(app, [*arguments, "--gpus", str(gpus)])
    assert done.exit_code == 0, done.output
    words = re.sub(r"\s+", " ", done.output)
    assert "its sizes come from the table of published models (Qwen/" in words
    assert "verdict: can run on the machines described" in words
    assert "GPU-hours on" in words
    assert "of this in /dev/shm" in words
    too_wide = [one for one in done.output.splitlines() if len(one) > 100]
    assert [one for one in too_wide if " " in one.strip()] == []
    done = CliRunner().invoke(app, ["plan", str(file)])
    assert done.exit_code == 2
    assert "policy.device" in done.output
    assert "plan for other machines with --gpus 8 --gpu-memory 80" in done.output


def test_the_table_of_sizes_contains_all_models_of_recipes_and_pages() -> None:
    pages = [*RECIPES.glob("*"), *(ROOT / "docs").glob("*.md"), *(ROOT / "launchers").rglob("*")]
    text = "\n".join(page.read_text() for page in pages if page.is_file())
    named = set(re.findall(r"\bQwen[\d.]+-[\d.]+B(?:-A\d+B)?\b", text))
    assert named >= {"Qwen3-8B", "Qwen3-30B-A3B", "Qwen2.5-32B"}
    assert named <= set(PUBLISHED)


def machines_of(file: Path) -> tuple[int, int, int]:
    """Return (machines, machines with ranks, GPUs per machine) from the recipe's first lines."""
    named = re.search(r"NNODES=(\d+) TRAINER_NODES=(\d+)", file.read_text())
    nodes, trainer_nodes = (int(named[1]), int(named[2])) if named else (1, 1)
    return nodes, trainer_nodes, 1 if "one GPU" in file.read_text() else 8


def require_fit(
    file: Path,
    overrides: Sequence[str],
    gigabytes: int,
    *,
    nodes: int,
    trainer_nodes: int,
    gpus: int = 8,
) -> None:
    """Require a plan without problems and doubts, in which every GPU has a process and activations
    stay within one machine."""
    machine = described_machine(
        nodes=trainer_nodes,
        engine_nodes=nodes - trainer_nodes,
        gpus=gpus,
        gpu_memory_gib=gigabytes,
    )
    config = load(file, overrides)
    plan = preflight(config, all_data=True, machine=machine)
    assert not plan.problems
    slow_or_close = ("the estimate may be", "over the network")
    assert not [one for one in plan.warnings if any(words in one for words in slow_or_close)]
    assert plan.ranks
    assert isinstance(plan.estimate, Estimate)
    assert plan.estimate.chip.name == {80: "h100", 141: "h200"}[gigabytes]
    rollout = config.rollout
    assert rollout is not None
    ranks, engines = config.policy.parallel.ranks, rollout.engines * rollout.workers
    taken = ranks if rollout.placement == "colocated" else ranks + engines
    assert taken == nodes * gpus


DIVISIONS = re.findall(
    r"^\| (\d+) \| (\d+) \| `(.*)` \|", (RECIPES / "README.md").read_text(), re.M
)


@thorough
@looped("gigabytes", [80, 141])
@looped(("nodes", "trainer_nodes", "overrides"), DIVISIONS)
@looped("name", [name for name in NAMES if "_32b" in name])
@untried_rewards()
def test_the_32b_recipe_fits_the_documented_numbers_of_machines(
    unchanged: Path, name: str, nodes: str, trainer_nodes: str, overrides: str, gigabytes: int
) -> None:
    file = unchanged / "examples" / "recipes" / f"{name}.yaml"
    counts = {"nodes": int(nodes), "trainer_nodes": int(trainer_nodes)}
    require_fit(file, overrides.split(), gigabytes, **counts)


def test_the_page_divides_the_32b_recipes_over_2_to_16_machines() -> None:
    assert [int(nodes) for nodes, _, _ in DIVISIONS] == [2, 8, 16]


def fetched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.delitem(sys.modules, "fetch", raising=False)
    import fetch

    return fetch


def test_a_prompt_is_a_chat_message_and_its_answer_the_final_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"question": " How many? ", "answer": "Half of 2,468 is 1,234.\n#### 1,234"}]
    fetch = fetched(monkeypatch)
    [line] = fetch.prompts(fetch.DATA["gsm8k"]["train.jsonl"], rows)
    assert line["answer"] == "1234"
    contest = fetch.DATA["dapo_math_17k"]
    [aime] = fetch.prompts(contest["aime24.jsonl"], [{"problem": "n?", "answer": "033"}])
    [dapo] = fetch.prompts(contest["train.jsonl"], [{"prompt": "m?", "solution": "34"}])
    assert (aime["answer"], dapo["answer"]) == ("33", "34")
    [message] = line["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("How many?\n")


@looped("name", NAMES)
def test_the_data_of_a_recipe_are_files_that_fetch_writes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(RECIPES / f"{name}.yaml")
    assert config.data.train is not None
    assert config.data.eval is not None
    files = fetched(monkeypatch).DATA[config.data.train.parent.name]
    assert {config.data.train.name, config.data.eval.name} == set(files)


@pytest.mark.parametrize("name", [name for name in NAMES if "_32b" in name or "_30b" in name])
def test_a_large_model_has_a_task_with_room_to_improve_and_saves_every_ten_steps(name: str) -> None:
    config = load(RECIPES / f"{name}.yaml")
    assert config.checkpoint.every == 10
    assert "gsm8k" not in str(config.data.train)


def test_only_interrupted_downloads_are_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch, asked = fetched(monkeypatch), []
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["How many?"], "answer": ["#### 3"]}), table)

    def data(repository: str, file: str, repo_type: str) -> str:
        asked.append(file)
        return str(table)

    def model(repository: str, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append(repository)
        local_dir.mkdir(parents=True, exist_ok=True)
        if asked.count(repository) == 1:
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(fetch, "hf_hub_download", data)
    monkeypatch.setattr(fetch, "snapshot_download", model)
    fetch.fetch_data(tmp_path / "gsm8k")
    fetch.fetch_data(tmp_path / "gsm8k")
    assert len(asked) == 2
    assert json.loads((tmp_path / "gsm8k" / "test.jsonl").read_text())["answer"] == "3"
    with pytest.raises(SystemExit, match="none of gsm8k, dapo_math_17k"):
        fetch.fetch_data(tmp_path / "data")
    with pytest.raises(ConnectionError):
        fetch.fetch_model(tmp_path / "Qwen3-8B")
    fetch.fetch_model(tmp_path / "Qwen3-8B")
    fetch.fetch_model(tmp_path / "Qwen3-8B")
    assert asked[2:] == ["Qwen/Qwen3-8B"] * 2


def run(checkout: Path, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    asked, commands = checkout / "asked", checkout / "venv" / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in (("mar", MAR), ("python", python), ("ray", "#!/bin/bash\nexit 1\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    done = subprocess.run(
        [checkout / "examples" / "recipes" / "run.sh", *arguments],
        env=os.environ | {"VENV": str(checkout / "venv"), "ASKED": str(asked)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = asked.read_text().splitlines() if asked.exists() else []
    return done.returncode, done.stdout + done.stderr, lines


def test_a_recipe_is_planned_trained_converted_and_evaluated(checkout: Path) -> None:
    code, said, asked = run(checkout, "qwen3_8b", "run.steps=3")
    assert code == 0, said
    recipe = checkout / "examples" / "recipes" / "qwen3_8b.yaml"
    trained = checkout / "runs" / "qwen3_8b"
    assert asked == [
        f"plan {recipe} run.steps=3 --nodes 1 --trainer-nodes 1",
        f"train {recipe} run.steps=3",
        f"convert {trained}/checkpoint {trained}/hf",
        f"eval {trained}/checkpoint",
    ]
    assert f"vllm serve {trained}/hf" in said


def test_the_first_machine_plans_for_all_of_them(checkout: Path) -> None:
    """A plan for one machine would refuse a recipe for several, which needs more GPUs."""
    places = {"NNODES": "4", "TRAINER_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    (port,) = free_ports(1)
    _, said, asked = run(checkout, "qwen2.5_32b", **places, RAY_PORT=str(port))
    assert asked[0].endswith("qwen2.5_32b.yaml --nodes 4 --trainer-nodes 2"), said


def test_another_machine_only_trains(checkout: Path) -> None:
    places = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    code, said, asked = run(checkout, "qwen2.5_32b", **places)
    assert code == 0, said
    [trained] = asked
    assert trained.endswith("qwen2.5_32b.yaml --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29500")


def test_a_machine_that_waits_for_the_model_reports_it(checkout: Path) -> None:
    (checkout / "models" / "Qwen2.5-32B" / ".fetched").unlink()
    places = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "FETCH_S": "0"}
    code, said, asked = run(checkout, "qwen2.5_32b", **places)
    assert (code, asked) == (1, [])
    assert "machine 0 has not fetched" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of these recipes: qwen2.5_32b qwen3_0.6b"),
        (("qwen4",), "give one of these recipes"),
        (("qwen3_8b", "model.path=/m"), "a recipe has its own model and data"),
    ],
)
def test_an_unknown_recipe_is_refused(
    checkout: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, words, asked = run(checkout, *arguments)
    assert (code, asked) == (2, [])
    assert said in words


def test_a_second_look_is_requested_once_and_reveals_nothing_of_the_answer() -> None:
    game, prompt = SecondLook(), Prompt(id="p", text="", token_ids=(1,), fields={"answer": "42"})
    game.reset(prompt)
    first, second = game.step("It is 42."), game.step("It is 42.")
    assert (first.done, second.done) == (False, True)
    assert str(first.observation).startswith("Look at each step again")
    assert "42" not in str(first.observation)
