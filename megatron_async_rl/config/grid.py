"""A study's grid: one base configuration, axes of named overrides, and sweeps over them. Imports no
torch.

Invariants:
- nothing a user wrote is ignored: unknown keys, axes and values raise ConfigError with the nearest
  one;
- a run's name contains its value on every axis, so that two runs with other settings have two
  names;
- relative paths in a grid start at its folder.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from megatron_async_rl.config.errors import Origins
from megatron_async_rl.config.load import as_written, resolve_paths
from megatron_async_rl.config.problem import ConfigError, Problem, UserError, shipped, suggestion
from megatron_async_rl.config.settings_model import Strict
from megatron_async_rl.config.yaml_tree import (
    KeyPath,
    YamlDocument,
    YamlFault,
    is_null,
    mapping_of,
    read_document,
    unquoted_below,
)

StudyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]


class Grid(Strict):
    """A study's file. Relative paths in it start at its folder."""

    base: Path
    """The configuration that every run changes."""
    runs: Path
    """Folder of the runs' directories."""
    axes: dict[StudyName, dict[StudyName, dict[str, Any]]]
    """Axis -> name of a value -> the overrides that make it: dotted key -> value."""
    sweeps: dict[StudyName, dict[StudyName, tuple[StudyName, ...]]]
    """Sweep -> axis -> the values it takes: a sweep is their product, and an axis that it does not
    name takes all of its values. Sweeps run in the order of the file, each run once."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Grid:
        for sweep, chosen in self.sweeps.items():
            for axis, values in chosen.items():
                # Axes before their values: a value of an unknown axis cannot be looked up.
                _require(axis, self.axes, f"sweeps.{sweep}: there is no axis")
                for value in values:
                    _require(value, self.axes[axis], f"sweeps.{sweep}.{axis}: there is no value")
        return self


def _require(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r}; {suggestion(name, known)}there are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study. `name` is that of its directory."""

    name: str
    settings: Mapping[str, str]
    """Axis -> name of its value."""
    sweeps: Sequence[str]
    """Names of the sweeps that contain the run, in the order of the file."""
    directory: Path
    overrides: Sequence[str]


def read_grid(path: Path) -> Grid:
    """The grid in `path`, paths absolute. Raises ConfigError naming key, line and fix."""
    try:
        document = read_document(path.read_text(encoding="utf-8"))
        lines = document.lines
        # Before validation, which would see `on` and `010` as YAML reads them.
        tree = _as_written(mapping_of(document), document, path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.of("GRID", f"{path} cannot be read: {error}", "name a YAML file") from error
    except YamlFault as fault:
        problem = Problem(
            key=fault.key or "YAML", what=fault.what, fix=fault.fix, where=f"{path}:{fault.line}"
        )
        raise ConfigError(str(path), [problem]) from fault
    folder = path.parent.absolute()
    try:
        # Through JSON, whose strict mode takes a list for a tuple and text for a path.
        grid = Grid.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise ConfigError(str(path), _problems(error, lines)) from error
    return grid.model_copy(
        update={
            # Absolute at once: runs start from other folders.
            "base": Path(os.path.abspath(folder / grid.base)),
            "runs": Path(os.path.abspath(folder / grid.runs)),
            "axes": {
                axis: {
                    value: {
                        key: resolve_paths(given, key, folder) for key, given in changes.items()
                    }
                    for value, changes in values.items()
                }
                for axis, values in grid.axes.items()
            },
        }
    )


def _as_written(tree: dict[str, Any], document: YamlDocument, path: Path) -> dict[str, Any]:
    """`tree` with what its user wrote: names and paths are text, and an override is what its key
    takes. Raises ConfigError."""
    problems: list[Problem] = []

    def settled(value: Any, place: KeyPath) -> Any:
        # axes.AXIS.VALUE.KEY: the override's type is that of its key in a run's configuration.
        if len(place) == 4 and place[0] == "axes":
            key = tuple(place[3].split("."))
            below = unquoted_below(document.unquoted, place)
            unquoted = {(*key, *at): written for at, written in below.items()}
            line = document.lines[".".join(place)]
            # An empty tree: which method the base chooses is checked when the run's config is
            # loaded.
            return as_written(value, unquoted, key, {}, Origins(f"{path}:{line}", {}), problems)
        if isinstance(value, dict):
            return {key: settled(one, (*place, key)) for key, one in value.items()}
        if isinstance(value, list):
            return [settled(one, (*place, str(at))) for at, one in enumerate(value)]
        # A run may be called `010` or `on`: names stay as they are spelled.
        written = document.unquoted.get(place)
        return value if written is None or is_null(written) else written

    tree = settled(tree, ())
    if problems:
        raise ConfigError(str(path), problems)
    return tree


def _problems(error: ValidationError, lines: Mapping[str, int]) -> list[Problem]:
    problems = []
    for one in error.errors(include_url=False):
        key = ".".join(map(str, one["loc"])) or "grid"
        where = f"line {lines[key]}" if key in lines else None
        # Pydantic's text for an unknown key names no nearest key.
        if one["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(one["loc"][-1]), Grid.model_fields, n=1)
            fix = f"did you mean `{near[0]}`?" if near else f"keys: {', '.join(Grid.model_fields)}"
            problems.append(Problem(key=key, what="is not a key of a grid", fix=fix, where=where))
        else:
            what = one["msg"].removeprefix("Value error, ")
            fix = f"see {shipped('docs/study.md')}"
            problems.append(Problem(key=key, what=what, fix=fix, where=where))
    return problems


def _override(value: Any) -> str:
    """YAML of one line. JSON is YAML except for the names of non-finite numbers and for the two
    escapes in which it writes one character beyond 16 bits."""
    if isinstance(value, dict):
        parts = (f"{json.dumps(key)}: {_override(given)}" for key, given in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_override, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False)


def runs_of(grid: Grid, only: Sequence[str] = ()) -> list[StudyRun]:
    """The runs in the order in which they start. `only`: names of sweeps, or names of runs with
    `*`; empty takes all. Raises UserError for a pattern that names nothing."""
    found: dict[str, StudyRun] = {}
    for sweep, chosen in grid.sweeps.items():
        # In the order of the axes: the same settings of two sweeps are one run with one name.
        for values in itertools.product(*(chosen.get(axis, grid.axes[axis]) for axis in grid.axes)):
            settings = dict(zip(grid.axes, values, strict=True))
            name = "-".join(values)
            known = found.get(name)
            if known is not None and known.settings != settings:
                fix = "give the values of the axes names that differ"
                raise UserError.of("axes", f"two runs would be called {name}", fix)
            overrides = [
                f"{key}={_override(given)}"
                for axis, value in settings.items()
                for key, given in grid.axes[axis][value].items()
            ]
            directory = grid.runs / name
            found[name] = StudyRun(
                name=name,
                settings=settings,
                sweeps=(*(known.sweeps if known else ()), sweep),
                directory=directory,
                # Last, so that no axis moves a run out of the study's folder.
                overrides=(*overrides, f"run.dir={_override(str(directory))}"),
            )
    for wanted in only:
        if wanted not in grid.sweeps and not fnmatch.filter(found, wanted):
            near = difflib.get_close_matches(wanted, [*grid.sweeps, *found], n=1)
            fix = f"did you mean {near[0]}?" if near else f"sweeps: {', '.join(grid.sweeps)}"
            raise UserError.of("--only", f"no sweep and no run is called {wanted!r}", fix)
    return [
        run
        for run in found.values()
        if not only
        or any(want in run.sweeps or fnmatch.fnmatchcase(run.name, want) for want in only)
    ]
