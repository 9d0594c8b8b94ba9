"""What the pages tell a reader to type or to look at exists: commands and their options, keys of the
configuration, metrics, files and headings of this repository."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from megatron_async_rl.cli import app
from megatron_async_rl.config.keys import walk
from megatron_async_rl.config.schema import Config
from megatron_async_rl.metrics.catalogue import METRICS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
] + sorted((ROOT / "docs").glob("*.md"))
NUMBERS = {"N": "1", "K": "1", "GIB": "80"}
SECTIONS = "|".join(Config.model_fields)


def commands(page: Path) -> Iterator[str]:
    """Lines of code blocks that call `mar`, without their comments."""
    for block in re.findall(r"^```\w*\n(.*?)^```|^((?: {4}.*\n)+)", page.read_text(), re.M | re.S):
        for line in "\n".join(block).splitlines():
            if re.match(r"\s*mar \w", line):
                yield line.partition(" #")[0].strip()


def keys() -> set[str]:
    """Every dotted key and section, without the names of methods, the places in lists and
    names of a user's own."""
    found = set(Config.model_fields)
    for section, _, leaves in walk():
        for name in (section, *(leaf.key for leaf in leaves)):
            found.add(re.sub(r"\(\w+\)|\[\]|\.NAME", "", name))
    return found


@pytest.mark.parametrize(
    ("page", "line"), [(page.name, line) for page in PAGES for line in commands(page)]
)
def test_a_command_on_a_page_is_one_that_mar_understands(page: str, line: str) -> None:
    synopsis = line.replace("key=value", "").replace("...", "")
    words = [NUMBERS.get(word, word) for word in shlex.split(re.sub(r"[][]", " ", synopsis))]
    if "=[" in line:  # an override with a list is not a synopsis
        words = shlex.split(line)
    _, name, *arguments = words
    command = typer.main.get_command(app).commands[name]
    for one in command.params:
        if getattr(one, "prompt", None):  # it would be asked for
            one.prompt, one.required, one.default = None, False, None
    context = command.make_context(name, arguments)
    overrides = [one.partition("=")[0] for one in context.params.get("overrides") or ()]
    assert [one for one in overrides if re.sub(r"\.\d+", "", one) not in keys()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_metrics_and_links_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming_from.md":  # other systems have keys that look like ours
        text = re.sub(r"^(\|[^|]*\|).*", r"\1", text, flags=re.M)
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))

    named = {
        one
        for each in code
        for one in re.findall(rf"^((?:{SECTIONS})\.[a-z_.0-9]+?)(?=:|=|$| )", each)
        if not one.endswith((".jsonl", ".yaml"))  # a file
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
