"""Grid of a study: one base configuration, axes of named overrides, and sweeps over the axes.
Imports no torch.

Invariants:
- nothing that a user wrote is ignored: unknown keys, axes and values raise ConfigError, which names
  the nearest valid one;
- a run's name contains its value on every axis, so runs with different settings have different
  names;
- relative paths in a grid start at the folder of the grid's file.
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
    """File of a study. Relative paths start at its folder."""

    base: Path
    """Configuration to which every run applies its overrides."""
    runs: Path
    """Folder of the run directories."""
    axes: dict[StudyName, dict[StudyName, dict[str, Any]]]
    """Axis -> name of a value -> its overrides: dotted key -> value."""
    sweeps: dict[StudyName, dict[StudyName, tuple[StudyName, ...]]]
    """Sweep -> axis -> names of values. A sweep is the product of its axes' values; an axis that it
    does not name has all of its values. Sweeps run in the order of the file, each run once."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Grid:
        for sweep, chosen in self.sweeps.items():
            for axis, values in chosen.items():
                # Check the axis first: a value of an unknown axis cannot be looked up.
                _require(axis, self.axes, f"sweeps.{sweep}: there is no axis")
                for value in values:
                    _require(value, self.axes[axis], f"sweeps.{sweep}.{axis}: there is no value")
        return self


def _require(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r}; {suggestion(name, known)}there are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study. `name` is the name of its directory."""

    name: str
    settings: Mapping[str, str]
    """Axis -> name of its value."""
    sweeps: Sequence[str]
    """Names of the sweeps that contain the run, in the order of the file."""
    directory: Path
    overrides: Sequence[str]


def read_grid(path: Path) -> Grid:
    """Return the grid in `path`, with absolute paths. Raises ConfigError with key, line and fix."""
    try:
        document = read_document(path.read_text(encoding="utf-8"))
        lines = document.lines
        # Restore the text before validation, which would see `on` and `010` as YAML reads them.
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
        # Validate JSON, whose strict mode accepts a list for a tuple and text for a path.
        grid = Grid.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise ConfigError(str(path), _problems(error, lines)) from error
    return grid.model_copy(
        update={
            # Make paths absolute now, because runs start from other folders.
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
    """Return `tree` with names and paths as text, as the user wrote them, and each override in the
    type of its key. Raises ConfigError."""
    problems: list[Problem] = []

    def converted(value: Any, place: KeyPath) -> Any:
        # At axes.AXIS.VALUE.KEY, an override has the type of its key in a run's configuration.
        if len(place) == 4 and place[0] == "axes":
            key = tuple(place[3].split("."))
            below = unquoted_below(document.unquoted, place)
            unquoted = {(*key, *at): written for at, written in below.items()}
            line = document.lines[".".join(place)]
            # Pass an empty tree: the load of the run's config checks keys of the base's methods.
            return as_written(value, unquoted, key, {}, Origins(f"{path}:{line}", {}), problems)
        if isinstance(value, dict):
            return {key: converted(one, (*place, key)) for key, one in value.items()}
        if isinstance(value, list):
            return [converted(one, (*place, str(at))) for at, one in enumerate(value)]
        # A run may be called `010` or `on`, so names keep their spelling.
        written = document.unquoted.get(place)
        return value if written is None or is_null(written) else written

    tree = converted(tree, ())
    if problems:
        raise ConfigError(str(path), problems)
    return tree


def _problems(error: ValidationError, lines: Mapping[str, int]) -> list[Problem]:
    problems = []
    for one in error.errors(include_url=False):
        key = ".".join(map(str, one["loc"])) or "grid"
        where = f"line {lines[key]}" if key in lines else None
        # Pydantic's message for an unknown key does not name the nearest valid key.
        if one["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(one["loc"][-1]), Grid.model_fields, n=1)
            keys = ", ".join(Grid.model_fields)
            fix = f"did you mean `{near[0]}`?" if near else f"valid keys: {keys}"
            problems.append(Problem(key=key, what="is not a key of a grid", fix=fix, where=where))
        else:
            what = one["msg"].removeprefix("Value error, ")
            fix = f"see {shipped('docs/study.md')}"
            problems.append(Problem(key=key, what=what, fix=fix, where=where))
    return problems


def _override(value: Any) -> str:
    """Return `value` as YAML on one line. JSON is YAML except for the names of non-finite numbers
    and for the surrogate escapes of characters beyond 16 bits."""
    if isinstance(value, dict):
        parts = (f"{json.dumps(key)}: {_override(given)}" for key, given in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_override, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False)


def runs_of(grid: Grid, only: Sequence[str] = ()) -> list[StudyRun]:
    """Return the runs in the order in which they start.

    `only`: names of sweeps, and names of runs, which may contain `*`; empty selects all runs.
    Raises UserError for an entry that matches nothing.
    """
    runs: dict[str, StudyRun] = {}
    for sweep, chosen in grid.sweeps.items():
        # Names follow the order of the axes, so equal settings in two sweeps are one run.
        for values in itertools.product(*(chosen.get(axis, grid.axes[axis]) for axis in grid.axes)):
            settings = dict(zip(grid.axes, values, strict=True))
            name = "-".join(values)
            known = runs.get(name)
            if known is not None and known.settings != settings:
                fix = "rename values of the axes so that the names differ"
                raise UserError.of("axes", f"two runs would be called {name}", fix)
            overrides = [
                f"{key}={_override(given)}"
                for axis, value in settings.items()
                for key, given in grid.axes[axis][value].items()
            ]
            directory = grid.runs / name
            runs[name] = StudyRun(
                name=name,
                settings=settings,
                sweeps=(*(known.sweeps if known else ()), sweep),
                directory=directory,
                # run.dir comes last, so that no axis moves a run out of the study's folder.
                overrides=(*overrides, f"run.dir={_override(str(directory))}"),
            )
    for pattern in only:
        if pattern not in grid.sweeps and not fnmatch.filter(runs, pattern):
            near = difflib.get_close_matches(pattern, [*grid.sweeps, *runs], n=1)
            fix = f"did you mean {near[0]}?" if near else f"sweeps: {', '.join(grid.sweeps)}"
            raise UserError.of("--only", f"no sweep and no run is called {pattern!r}", fix)
    return [
        run
        for run in runs.values()
        if not only
        or any(pattern in run.sweeps or fnmatch.fnmatchcase(run.name, pattern) for pattern in only)
    ]
