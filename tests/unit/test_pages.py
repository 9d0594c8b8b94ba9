"""Instructions of the pages work: commands are run in the order of their page, up to where they
would start a run or a server; configurations load, and code imports. Keys, metrics, files and
headings that a page names exist."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.keys import walk
from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import read_tree
from megatron_async_rl.metrics.catalogue import METRICS
from megatron_async_rl.plan.machine import described_machine
from megatron_async_rl.rollout.environments import load_factory
from megatron_async_rl.rollout.rewards.registry import RewardError, load_reward
from megatron_async_rl.study import check
from megatron_async_rl.verify.scorecard import Scorecard
from megatron_async_rl.verify.verified_run import read_records
from tests.cases import looped
from tests.logged_samples import logged_run
from tests.published_models import PUBLISHED, write_config
from tests.reward_trials import untried_rewards
from tests.unit.test_report import sampled_run
from tests.written_run import config_tree, write_model, write_prompts

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        "examples/recipes/README.md",
    )
] + sorted((ROOT / "docs").glob("*.md"))
SECTIONS = "|".join(Config.model_fields)

MEANT = {"N": "1", "K": "1", "N,N": "64", "STEP": "4", "RUN...": "OTHER_RUN", "key=value": ""}
"""Words of a synopsis, and one of the things they stand for."""
A_RUN = {"40": "4", "20": "0"}
"""Steps and versions of runs on pages, and of RUN here."""
NOT_TRIED = {
    "buildah": "no container builder",
    "cd": "part of cloning",
    "chroot": "part of building an image",
    "cp": "part of building an image",
    "debootstrap": "needs a Debian mirror",
    "docker": "no container builder",
    "git": "clones the repository",
    "nft": "changes the machine's firewall",
    "ray": "starts a cluster",
    "vllm": "starts a server; RUN/hf is loaded by vLLM in tests/engine",
}
"""Commands of pages that no test types, and why."""


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, title and text of every fenced block. A block without a language holds commands."""
    found = re.findall(r"^```(\w*)([^\n]*)\n(.*?)^```", page.read_text(), re.M | re.S)
    for language, rest, text in found:
        title = re.search(r'title="(.+?)"', rest) or re.match(r"# (\S+\.(?:py|yaml))\n", text)
        yield language, title[1] if title else "", text


def commands(page: Path) -> list[str]:
    """Lines to type, without their comments."""
    lines = [
        line.partition(" #")[0].strip()
        for language, _, text in blocks(page)
        if language in ("", "sh", "bash", "console")
        for line in text.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def words_of(line: str) -> list[str]:
    """Words of a command or of its synopsis: options in brackets are given, and words of MEANT
    filled in."""
    if not re.search(r"=\[|'\[", line):
        line = re.sub(r"[][]", " ", line)
    words = [MEANT.get(one, one).removesuffix("...") for one in shlex.split(line)]
    if words[:2] == ["mar", "samples"]:
        words = [A_RUN.get(one, one) for one in words]
    return [one for one in words if one]


def keys() -> set[str]:
    """Every dotted key and section, without the names of methods, the places in lists and
    names of a user's own."""
    found = set(Config.model_fields)
    for section, _, leaves in walk():
        for name in (section, *(leaf.key for leaf in leaves)):
            found.add(re.sub(r"\(\w+\)|\[\]|\.NAME", "", name))
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkout that pages name, and what words in capitals stand for."""
    tmp_path = tmp_path_factory.mktemp("reader") / "folder"
    tmp_path.mkdir()
    for name in ("benchmarks", "launchers", "tests", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    kept = shutil.ignore_patterns("results", "generated")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=kept)
    write_model(tmp_path / "MODEL")
    write_prompts(tmp_path / "test.jsonl")
    write_model(tmp_path / "runs" / "arithmetic_sft" / "hf")  # the demo's warm start
    generated = tmp_path / "examples" / "arithmetic" / "generated"
    generated.mkdir(exist_ok=True)
    for part in ("train", "eval"):
        write_prompts(generated / f"{part}.jsonl")
    for name in PUBLISHED:
        write_config(tmp_path / "models" / name, name)

    tree = config_tree() | {"eval": {}}
    tree["model"]["path"] = "MODEL"
    tree["data"] = {"train": "test.jsonl", "eval": "test.jsonl"}
    (tmp_path / "CONFIG").write_text(yaml.safe_dump(tree))
    grid = {"base": "CONFIG", "runs": "runs", "axes": {"a": {"b": {}}}, "sweeps": {"NAME": {}}}
    (tmp_path / "GRID").write_text(yaml.safe_dump(grid))
    shutil.copy(ROOT / "tests" / "data" / "golden" / "losses_seed1.json", tmp_path / "FILE")
    finish(tmp_path / "OTHER_RUN")
    finish(tmp_path / "RUN")
    (tmp_path / "RUN" / "config.yaml").write_text(
        (tmp_path / "CONFIG").read_text().replace("MODEL", "../MODEL").replace("test", "../test")
    )
    step = tmp_path / "RUN" / "checkpoint" / "step_00000200"
    step.mkdir(parents=True)
    (step / "about.json").write_text('{"step": 200}')
    (step.parent / "latest").write_text(step.name)
    return tmp_path


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a reader. No process starts from it."""
    shutil.copytree(original, tmp_path, symlinks=True, dirs_exist_ok=True)
    for page in (ROOT / "docs" / "one_gpu_node.md", ROOT / "docs" / "ten_minutes.md"):
        write_files(page, tmp_path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    modules = {
        Path(title).stem for page in PAGES for _, title, _ in blocks(page) if title[-3:] == ".py"
    }
    for name in modules:  # other tests have files of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in modules:
        sys.modules.pop(name, None)


def finish(run: Path) -> None:
    """Write the files of a run that reports and samples read."""
    logged_run(run)
    sampled_run(run, 5)


def write_files(page: Path, folder: Path) -> None:
    """The blocks of a page that are files; what begins at the root begins in `folder`."""
    for _, title, text in blocks(page):
        if title:
            (folder / title).write_text(re.sub(r"(: )/(?=\w)", rf"\1{folder}/", text))


@pytest.fixture
def nothing_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call of each command that starts processes, takes minutes, or reads what only a real
    run has, is replaced: what it was given has been checked by then."""

    def launch(config: Config, *_: Any) -> int:
        finish(config.run.dir)
        return 0

    def study(path: Path, only: list[str], *_: Any, jobs: int, retry: bool) -> int:
        grid = read_grid(path)
        check(grid, runs_of(grid, only), jobs=jobs, again=["waiting", "stopped"])
        return 0

    def verified(run: Path, *_: Any) -> Scorecard:
        read_records(run)
        return Scorecard(subject=str(run), rows=())

    def convert(checkpoint: Path, out: Path, dtype: str | None) -> None:
        assert list(checkpoint.glob("**/about.json"))
        write_model(out)

    for name, instead in {
        "launch.launcher.launch": launch,
        "study.study": study,
        "evaluate.run": lambda *_: None,
        "replay.repetition.replay": lambda *_: 0,
        "verify.verified_run.verify_run": verified,
        "launch.run_lock.request_engines": lambda run, count: (run / "config.yaml").stat(),
        "report.dashboard.serve": lambda runs, *_: [logged.stat() for logged in runs],
        "simulate.choose.predict_from_run": lambda *_: None,
        "simulate.choose.predict_from_hardware": lambda *_, **__: None,
        "plan.doctor.examine": list,
        "plan.interview.at_terminal": lambda: True,
    }.items():
        monkeypatch.setattr(f"megatron_async_rl.{name}", instead)
    stand_in = SimpleNamespace(convert=convert)
    monkeypatch.setitem(sys.modules, "megatron_async_rl.weights.convert", stand_in)


def mar(words: list[str]) -> Result:
    """`mar WORDS`; the questions of `mar init` are answered from docs/ten_minutes.md."""
    answers = "MODEL\nprompts.jsonl\n\nmy_rewards:score\n0\nasynchronous\n"
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words, input=answers)


@pytest.mark.parametrize(
    "page", [one for one in PAGES if commands(one)], ids=lambda page: page.stem
)
@pytest.mark.usefixtures("nothing_starts")
def test_the_commands_of_a_page_work_in_their_order(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in ("one_gpu_node.md", "several_machines.md"):
        machine = "megatron_async_rl.plan.machine.this_machine"
        monkeypatch.setattr(
            machine,
            lambda nodes=1, engine_nodes=0: described_machine(
                gpus=8, gpu_memory_gib=80, nodes=nodes, engine_nodes=engine_nodes
            ),
        )
        # The machine of the page has a larger disk, too.
        monkeypatch.setattr("megatron_async_rl.plan.totals._too_small", lambda needs, jobs: [])
    write_files(page, folder)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in (one for whole in commands(page) for one in whole.split(" && ")):
        words = words_of(line)
        while words and re.match(r"\w+=", words[0]):  # a variable, of it or of what follows
            words.pop(0)
        if not words:
            continue
        program, *arguments = words
        if program == "mar" and not arguments[0].startswith("--"):
            # The rewards of examples are tried in test_recipes.py and test_examples.py.
            with nullcontext() if page.name == "ten_minutes.md" else untried_rewards():
                done = mar(arguments)
            assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
            continue
        if program == "make":
            assert arguments[0] in targets, line
            continue
        files = [one for one in words if re.search(r"\w/\w.*\.(py|sh|sbatch)$", one)]
        if program in ("mar", ".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/lint-imports"):
            continue  # completion of a shell: test_cli.py; the linters: `make lint`
        known = re.search(rf"\b({'|'.join(NOT_TRIED)})\b", line)
        assert files or known, f"{line}: try it, or say why not"
        for file in files:
            assert (ROOT / file).is_file(), line
            text = (ROOT / file).read_text()
            assert program != file or os.access(ROOT / file, os.X_OK), line
            assert not [one for one in arguments if one.startswith("--") and one not in text], line


def base_for(block: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration in which `block` replaces the sections that it names."""
    tree: dict[str, Any] = config_tree()
    if "sources" in block.get("data", {}):
        del tree["data"]["train"]
    if "snapshots" in block.get("objective", {}):
        tree["flow"]["async_ratio"] = block["objective"]["snapshots"] - 1
    if block.get("weights", {}).get("transport") == "cuda_ipc":
        tree["rollout"]["placement"] = "colocated"
    if "eval" in block.get("data", {}):
        tree["eval"] = {}
    if block.get("objective", {}).get("loss") == "sft":
        del tree["rollout"]
        tree["flow"] |= {"group_size": 1, "async_ratio": 0}
    for section, values in block.items():
        inside = isinstance(values, dict) and isinstance(tree.get(section), dict)
        tree[section] = tree[section] | values if inside else values
    return tree


def yaml_blocks() -> list[Any]:
    return [
        pytest.param(page, title, text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (language, title, text) in enumerate(blocks(page))
        if language == "yaml"
    ]


@pytest.mark.parametrize(("page", "title", "text"), yaml_blocks())
def test_a_configuration_on_a_page_loads(page: Path, title: str, text: str, folder: Path) -> None:
    block, _ = read_tree(text)
    if "axes" in block:
        (folder / "grid").write_text(text)
        (folder / "base.yaml").write_text(yaml.safe_dump(config_tree()))
        assert runs_of(read_grid(folder / "grid"), ())
        return
    write_files(page, folder)
    (folder / "page.yaml").write_text(yaml.safe_dump(block if "run" in block else base_for(block)))
    config = load(folder / "page.yaml")
    if config.rollout is None:
        return
    for part in config.rollout.reward.parts.values() if config.rollout.reward.parts else ():
        try:
            load_reward(part.name, part.settings)
        except RewardError as error:
            # A machine without bubblewrap refuses this setting, and only this one.
            if not error.where.endswith(".isolation"):
                raise
    environment = config.rollout.environment
    if environment is not None and ":" in environment.name:
        load_factory(environment)


@pytest.mark.parametrize(
    "page",
    [one for one in PAGES if "python" in {language for language, _, _ in blocks(one)}],
    ids=lambda page: page.stem,
)
def test_python_on_a_page_imports_what_exists(page: Path, folder: Path) -> None:
    write_files(page, folder)
    for language, title, text in blocks(page):
        if language != "python" or page.name == "add_a_method.md":  # it has its own test
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_async_rl"):
                module = importlib.import_module(node.module)
                assert not [one.name for one in node.names if not hasattr(module, one.name)]
        if title:
            importlib.import_module(title.removesuffix(".py"))


@looped("page", PAGES, ids=lambda page: page.stem)
def test_a_command_in_the_text_of_a_page_has_the_options_it_is_named_with(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    known = typer.main.get_command(app).commands
    for name, rest in re.findall(r"`mar ([a-z]+)([^`]*)`", text):
        options = {option for one in known[name].params for option in one.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, name


@looped("page", PAGES, ids=lambda page: page.stem)
def test_keys_metrics_and_links_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming_from.md":  # other systems have keys that look like ours
        text = re.sub(r"^(\|[^|]*\|).*", r"\1", text, flags=re.M)
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))

    named = {
        one
        for each in code
        for one in re.findall(rf"^((?:{SECTIONS})\.[a-z_.0-9]+?)(?=:|=|$| )", each)
        if not one.endswith((".jsonl", ".yaml", ".sh"))  # a file
    }
    known = keys()
    missing = {one for one in named if re.sub(r"\.\d+", "", one) not in known}
    assert not missing

    groups = {name.partition("/")[0] for name in METRICS if "/" in name}
    metrics = {one for one in code if re.fullmatch(rf"(?:{'|'.join(groups)})/[a-z0-9_]+", one)}
    assert not metrics - set(METRICS)

    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in slugs, target
