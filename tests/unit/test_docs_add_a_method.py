"""The example of the page on methods of your own runs unchanged."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.load import load
from megatron_async_rl.plan.new_config import STYLES
from tests.forked import python
from tests.method_settings import LOSSES
from tests.written_run import write_model, write_prompts

PAGE = (Path(__file__).parents[2] / "docs" / "add_a_method.md").read_text()
FILE, USE = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
(OUTPUT,) = re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^mar train CONFIG (.*)$", PAGE, flags=re.MULTILINE)


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Namespace after the page's code has run, with its loss in a file of the current folder."""
    (tmp_path / "farthest_out.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    left: dict = {"__name__": "page"}
    # A name that is not a file: who requests the source of a frame would read the page as Python.
    exec(compile(USE, "<docs/add_a_method.md>", "exec"), left)
    yield left
    del sys.modules["farthest_out"]


def test_the_example_makes_good_responses_likelier_and_bad_ones_rarer(ran):
    before = torch.linspace(-2.1, -1.9, 32).view(4, 8).mean(dim=1)
    moved = ran["logp"].detach().view(4, 8).mean(dim=1) - before
    assert moved[0] < moved[1] < 0 < moved[2] < moved[3]


def test_the_example_prints_what_the_page_shows(tmp_path):
    (tmp_path / "farthest_out.py").write_text(FILE)
    done = python(USE, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, OUTPUT), done.stderr


@pytest.mark.parametrize("style", STYLES)
def test_the_pages_command_takes_a_config_of_mar_init(tmp_path, monkeypatch, style):
    (tmp_path / "farthest_out.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "data.jsonl")
    given = ["init", "run.yaml", "--model", str(model), "--data", str(data), "--style", style]
    done = CliRunner().invoke(app, [*given, "--reward", "arithmetic", "--gpus", "0"])
    assert done.exit_code == 0, done.output
    assert COMMANDS
    for command in COMMANDS:
        config = load(tmp_path / "run.yaml", shlex.split(command))
        assert config.objective.loss.name == "farthest_out:FarthestOut"
    del sys.modules["farthest_out"]


def test_the_examples_loss_leaves_out_its_configured_share_of_tokens(ran):
    assert int((~ran["targets"].whole.decided.tokens["keep"]).sum()) == 8


def test_the_examples_loss_has_no_short_name():
    assert "farthest_out" not in LOSSES


def test_the_page_names_files_that_exist():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / link).exists(), link
