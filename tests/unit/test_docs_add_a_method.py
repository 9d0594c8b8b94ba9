"""The example of the page on methods of your own runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_async_rl.objectives.registry import UnknownName, loss_method

PAGE = (Path(__file__).parents[2] / "docs" / "add_a_method.md").read_text()
FILE, USE = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """What the page's code leaves behind, its loss in a file of the current folder."""
    (tmp_path / "farthest_out.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    left: dict = {"__name__": "page"}
    # A name that is no file: who asks for the source of a frame would read the page as Python.
    exec(compile(USE, "<docs/add_a_method.md>", "exec"), left)
    yield left
    del sys.modules["farthest_out"]


def test_the_example_makes_good_responses_likelier_and_bad_ones_rarer(ran):
    before = torch.linspace(-2.1, -1.9, 32).view(4, 8).mean(dim=1)
    moved = ran["logp"].detach().view(4, 8).mean(dim=1) - before
    assert moved[0] < moved[1] < 0 < moved[2] < moved[3]


def test_the_examples_loss_leaves_out_the_share_of_tokens_it_says(ran):
    assert int((~ran["targets"].whole.decided.tokens["keep"]).sum()) == 8


def test_the_examples_loss_has_no_short_name():
    with pytest.raises(UnknownName):
        loss_method("farthest_out")


def test_the_page_names_files_that_exist():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / link).exists(), link
