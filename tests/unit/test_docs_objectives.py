"""The page of methods is complete, and shows every setting with the default it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic.fields import FieldInfo

from megatron_async_rl.config.keys import method_name, models_in
from megatron_async_rl.config.losses import Proximal
from megatron_async_rl.config.objective import ObjectiveConfig
from tests.cases import looped
from tests.method_settings import ADVANTAGES, CONTROLS, CORRECTIONS, LOSSES, models

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "objectives.md").read_text()
SECTIONS = {
    "Advantages": set(ADVANTAGES),
    "Losses": set(LOSSES),
    "Corrections": set(CORRECTIONS),
    "Proximal policies": set(get_args(Proximal)),
    "Gradient controls": set(CONTROLS),
}


def rows(section: str) -> dict[str, list[str]]:
    """Name -> the cells of its row in the section's table."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in cells}


def configured(row: list[str]) -> dict[str, Any]:
    """The snippet of a row, read as YAML."""
    return yaml.safe_load(re.fullmatch(r"`(.*)`", row[2]).group(1))


def shown_defaults(given: dict[str, Any], fields: dict[str, FieldInfo]) -> None:
    for key, value in given.items():
        if not fields[key].is_required() and key != "name":
            default = fields[key].default
            assert value == (list(default) if isinstance(default, tuple) else default), key


def snippets() -> list[Any]:
    sections = {
        "Advantages": "advantage",
        "Losses": "loss",
        "Corrections": "corrections",
        "Gradient controls": "controls",
    }
    return [
        pytest.param(key, configured(row), id=name)
        for section, key in sections.items()
        for name, row in rows(section).items()
    ]


@pytest.mark.parametrize(("section", "names"), SECTIONS.items(), ids=SECTIONS)
def test_every_method_has_its_row_and_no_row_is_of_nothing(section, names):
    assert set(rows(section)) == names


@looped(("key", "snippet"), snippets())
def test_a_row_shows_every_setting_with_its_default(key, snippet):
    given = snippet.get(key, snippet)
    model = next(model for model in models(key) if method_name(model) == given["name"])
    assert set(given) == set(model.model_fields)
    shown_defaults(given, model.model_fields)
    model.model_validate(given)


def test_a_loss_is_shown_with_its_own_aggregation():
    shown = {name: row[3] for name, row in rows("Losses").items()}
    assert shown == {method_name(model): model.default_aggregation for model in models("loss")}


@pytest.mark.parametrize("section", ["Proximal policies", "Penalties and shaping"])
def test_keys_of_the_objective_are_shown_with_their_defaults(section):
    for name, row in rows(section).items():
        for key, value in configured(row).items():
            field = ObjectiveConfig.model_fields[key]
            (model,) = models_in(field.annotation) or (None,)
            if model is not None:
                assert set(value) == set(model.model_fields)
                shown_defaults(value, model.model_fields)
                model.model_validate(value)
            elif key == "proximal":
                assert value == name
            else:
                assert value == field.default


def test_the_readme_leads_to_the_pages():
    readme = (ROOT / "README.md").read_text()
    assert "(docs/objectives.md)" in readme
    assert "(docs/add_a_method.md)" in readme
