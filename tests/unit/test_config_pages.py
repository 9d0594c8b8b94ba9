"""Whole answers of the config package: each refusal with its key, place and fix, the properties of
every method, and trees of YAML texts with the places of their values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config import policy, rollout_rules, weights
from megatron_async_rl.config.advantages import AdvantageSettings
from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.config.corrections import CorrectionSettings
from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.losses import LossSettings, engine_ratios
from megatron_async_rl.config.problem import ConfigError, UserError
from megatron_async_rl.config.yaml_tree import YamlFault, parse_value, read_document, write
from tests.stored_pages import cases_of, listed, require_page
from tests.written_run import config_tree


def written(folder: Path) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config_tree(), sort_keys=False))
    return file


def split(given: str) -> list[str]:
    """Return the overrides in text with a blank between them."""
    parts: list[str] = []
    for word in given.split(" "):
        name = word.partition("=")[0]
        if "=" in word and name and "{" not in name and "[" not in name:
            parts.append(word)
        elif parts:
            parts[-1] += f" {word}"
        elif word:
            parts.append(word)
    return parts


def test_every_refusal_is_the_one_on_its_page(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = set(dump(load(file)).splitlines())
    text = ""
    for given in cases_of("config/refusals"):
        try:
            lines = [
                one for one in dump(load(file, split(given))).splitlines() if one not in before
            ]
            found = "\n".join(lines)
        except ConfigError as error:
            found = str(error)
        text += f"$ {given}\n{found}\n"
    text = text.replace(str(tmp_path), "FOLDER").replace(str(Path.cwd()), "HERE")
    require_page("config/refusals", text)


def methods(base: type[Any]) -> list[type[Any]]:
    """Return the package's classes below `base`, by name."""
    found = [
        *base.__subclasses__(),
        *(one for sub in base.__subclasses__() for one in methods(sub)),
    ]
    own = {one for one in found if one.__module__.startswith("megatron_async_rl.")}
    return sorted(own, key=lambda one: one.__name__)


def facts(one: Any) -> dict[str, Any]:
    """Return the settings, class attributes and properties of a method."""
    base = {"model_config", "model_fields", "model_computed_fields", "model_extra", "method_type"}
    names = [
        name
        for name in dir(type(one))
        if not name.startswith(("_", "model_")) and name not in base
        if name not in ("copy", "dict", "json", "construct", "schema", "validate")
    ]
    values = {name: getattr(one, name) for name in names}
    shown = {name: value for name, value in values.items() if not callable(value)}
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in shown.items()
    }


def test_every_method_has_the_properties_on_its_page() -> None:
    needed: dict[str, dict[str, Any]] = {
        "AlignmentSettings": {"name": "x"},
        "MatchedLrControl": {"target_update_norm": 1.0},
        "RejectCorrection": {"high": 1.0},
    }
    variants: dict[str, list[dict[str, Any]]] = {
        "OtbAdvantage": [{"importance": one} for one in ("token", "sequence")],
        "OpobAdvantage": [{"mode": one} for one in ("exact", "cheap")],
        "PartialReturnAdvantage": [{"baseline": "none"}, {"horizon": "k", "k": 2}],
        "TisCorrection": [{"level": "sequence"}, {"normalize": True}],
        "IcepopCorrection": [{"level": "sequence"}],
        "RejectCorrection": [
            {"high": 1.0, "level": level, "statistic": statistic}
            for level, statistic in (
                ("token", "k1"),
                ("sequence_sum", "k1"),
                ("sequence_product", "ratio"),
                ("sequence_geometric", "ratio"),
            )
        ],
        "EssLrControl": [{"use_truncated": True}, {"reference_ratio": "auto"}],
        "GacControl": [{"calibrate": {"steps": 7}}],
    }
    shown: dict[str, Any] = {}
    for base in (LossSettings, AdvantageSettings, CorrectionSettings, ControlSettings):
        for kind in methods(base):
            for settings in ({}, *variants.get(kind.__name__, ())):
                given = needed.get(kind.__name__, {}) | settings
                try:
                    one = kind(**given)
                except ValueError as error:
                    shown[f"{kind.__name__} {given}"] = str(error).splitlines()[-2]
                    continue
                shown[f"{kind.__name__} {given}"] = facts(one)
                ratios = {
                    p: sorted(engine_ratios(one, p)) for p in ("behavior", "loglinear", "ewma")
                }
                shown[f"{kind.__name__} {given}"]["engine ratios"] = ratios
    require_page("config/methods", listed(shown))


def test_recipes_and_carriers_have_the_properties_on_their_page() -> None:
    shown: dict[str, Any] = {name: vars(one) for name, one in weights.CARRIERS.items()}
    for capability, ipc in itertools.product((None, True, False), repeat=2):
        shown[f"carriers {capability} {ipc}"] = weights.carriers(other_machines=capability, ipc=ipc)
    for recipe in policy.RECIPES:
        shown[recipe] = [policy.RECIPES[recipe], policy.needed(recipe)]
        for chip in (None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
            for cuda in (None, (12, 0), (12, 8), (12, 9), (13, 0)):
                shown[f"{recipe} {chip} {cuda}"] = policy.lacking(recipe, chip, cuda)
        fp8 = policy.Fp8Config(recipe=recipe)
        shown[f"rows {recipe}"] = [policy.row_multiple(fp8, sequence=one) for one in (True, False)]
    shown["rows"] = [policy.row_multiple(None, sequence=one) for one in (True, False)]
    shown["versions"] = [policy.version_of(one) for one in (None, "13.0", "12.8.1", "x", "12", "")]
    require_page("config/properties", listed(shown))


def test_every_config_has_the_derived_values_on_its_page(tmp_path: Path) -> None:
    file, text = written(tmp_path), ""
    for given in cases_of("config/derived"):
        config = load(file, split(given))
        shown = {
            "sampling": rollout_rules.sampling_warnings(config),
            "length": rollout_rules.length_warnings(config),
            "sets": [str(one) for one in config.eval_sets],
            "held out": [str(one) for one in config.held_out_files],
            "config": [
                *(config.supervised, config.colocated, config.has_engines, config.engine_dtype),
                *(config.optimizer_steps, config.fresh_steps, config.run.last_step),
                *(config.policy.parallel.data, config.policy.parallel.replica_ranks),
                *(config.policy.row_multiple, config.objective.steps_per_batch),
                *(config.objective.aggregation_used, config.objective.needs_reference),
            ],
        }
        text += f"$ {given}\n{listed(shown)}"
    require_page("config/derived", text.replace(str(Path.cwd()), "HERE"))


TEXTS = (
    *("", "a: 1", "a:\n  b: [1, x, {c: null}]\n", "- 1\n- 2", "x", "a: {b: 1", "a: 1\n b: 2"),
    *("a: 1\na: 2", "a: &x {b: 1}\nc: {<<: *x, b: 2}\n", "a: &x [*x]", "1: a\non: b\n1.0: c"),
    *("a: yes", "a: 'yes'", "a: 010", "a: 0x1F", "a: 1_0", "a: 1:30", "a: .5", "a: 1e3", "a: 1.e3"),
    *("a: +1", "a: -0", "a: .inf", "a: -.inf", "a: .nan", "a: 1.", "a: 0o7", "a: 0b1", "a: ~"),
    *("a: Null", "a: nULL", "a: true", "a: TRUE", "a: tRUE", "a: b # c", "a: b #c", "a: b#c"),
    *("a: 'b' #c", "a: |\n  x\n  y\n", "a: !!int 3", "a: !x 3", "a: !!str 3", "? [a]\n: 1"),
    *("a: {<<: 1}", "a: &x {b: 1, c: {d: 2}}\ne: {<<: [*x, *x], c: {d: 3}}\nf: *x", "{[a]: 1}"),
    "a: &x {b: yes, c: d #e, f: 1}\ng:\n  <<: *x\n  f: 2\n",
    *("[" * 600, "a: \t1", "a: *b", "%x", "a: '\n", "--- 1\n--- 2", "1e-4", "[]", "{name: gac}"),
    *("null", "x #y", "a b", "2026-01-02", "12:30", "-", "=", "<<: {a: 1}\nb: 2"),
)


def test_every_yaml_text_is_read_as_on_its_page() -> None:
    shown: dict[str, Any] = {}
    for text in TEXTS:
        for name, read in (("document", read_document), ("value", parse_value)):
            try:
                found: Any = read(text)
            except YamlFault as fault:
                found = [fault.what, fault.fix, fault.line, fault.key]
            shown[f"{name} of {text[:60]!r}"] = repr(found)
    values = (
        "yes",
        "1e-4",
        "0o17",
        "a\x85b",
        "é",
        "",
        "1",
        None,
        1.0,
        True,
        {"a": [1, {"b": "c"}]},
    )
    shown["written"] = [[write(one), write(one, one_line=True)] for one in values]
    require_page("config/yaml", listed(shown))


GRID = """
base: config.yaml
runs: runs
axes:
  lag: {010: {flow.async_ratio: 0}, one: {flow.async_ratio: 1, data.train: x.jsonl}}
  seed: {a: {run.seed: 1}, b: {run.seed: 2, controls: [{name: gac, c_low: 0.25}]}}
sweeps:
  all: {}
  few: {lag: [one], seed: [b]}
"""
EDITS = (
    *(("", ""), ("seed: [b]", "seed: [c]"), ("lag: [one]", "log: [one]"), ("runs: runs", "run: x")),
    *(
        ("runs: runs", ""),
        ("base: config.yaml", "base: [1]"),
        ("one:", "on e:"),
        ("few:", "a:\n b"),
    ),
    *(("run.seed: 1", "run.seed: 1_0"), ("run.seed: 1", "run.seed: [yes, .inf, {a: -.inf}]")),
    *(("  all: {}", "  all: {}\n  all: {}"), ("axes:", "extra: 1\naxes:"), ("axes:", "axis:")),
    *(("{a: {run", "{'010-a': {}, a: {run"), ("010:", "on:"), ("  all: {}\n", "")),
)
ONLY: tuple[tuple[str, ...], ...] = ((), ("few",), ("*-a",), ("one-b", "010-*"), ("fw",), ("x",))


def test_every_grid_is_read_as_on_its_page(tmp_path: Path) -> None:
    text = ""
    written(tmp_path)
    file = tmp_path / "grid.yaml"
    for old, new in EDITS:
        file.write_text(GRID.replace(old, new, 1) if old else GRID)
        try:
            runs = runs_of(read_grid(file))
            found = "\n".join(map(str, runs))
        except UserError as error:
            found = str(error)
        text += f"$ {old!r} -> {new!r}\n{found}\n"
    file.write_text(GRID)
    for only in ONLY:
        try:
            found = ", ".join(one.name for one in runs_of(read_grid(file), only))
        except UserError as error:
            found = str(error)
        text += f"$ {only}\n{found}\n"
    twice = GRID.replace("010:", "one-a:").replace("a: {run.seed: 1}", "a-a: {}, a: {}")
    file.write_text(twice)
    with pytest.raises(UserError) as named_twice:
        runs_of(read_grid(file))
    with pytest.raises(UserError) as absent:
        read_grid(tmp_path / "absent.yaml")
    text += f"{named_twice.value}\n{absent.value}\n"
    require_page("config/grids", text.replace(str(tmp_path), "FOLDER"))
