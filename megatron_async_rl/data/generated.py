"""Tasks of reasoning-gym as data: `reasoning_gym:TASK` in place of a file.

    name and settings --> questions, drawn once --> two files of rows --> read like any other data

Invariants:
- the same task, settings and version of reasoning-gym give the same rows, in every process, on
  every node and on every day;
- training and held-out rows of a task have no question in common, and no question comes twice. The
  held-out rows come first in the generator's sequence, so they do not depend on the number of
  training rows (except for acre, whose generator shuffles all rows);
- a row's entry is scored as its generator scores it: an entry that JSON would change is refused;
- files appear complete or not at all;
- the config of a run has the files' paths and keeps the settings, so files that were deleted, or
  that another machine has, are generated again. Only the same files are: their digest is in the
  path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from megatron_async_rl.config.data import (
    TASK_PREFIX,
    FileConfig,
    GenerateConfig,
    SourceConfig,
    is_task,
    task_of,
)
from megatron_async_rl.config.durable import publish
from megatron_async_rl.config.problem import UserError, number_of, suggestion
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.files import count_rows
from megatron_async_rl.data.task_entries import PACKAGE, dataset_of, entry_of

TRAINING, HELD_OUT = "train.jsonl", "test.jsonl"
"""Names of the files. Their words are those of splits, so that held-out rows cannot be trained."""
DISTRIBUTION = PACKAGE.replace("_", "-")
DRAWS = 4
"""Largest number of questions that are drawn for each row, because a simple task repeats them."""
MISSES = 100
"""Number of draws without a question, one after another, after which no more are made."""
CHILD = f"from {__name__} import print_rows; print_rows()"


def with_generated(config: Config) -> tuple[Config, list[str]]:
    """Return `config` with a local file for each name of a task, and a report of one line for each.
    The files are generated unless the cache has them. Raises UserError for an unknown task or
    option, if reasoning-gym is not installed, and for the path of a missing file that would get
    other questions."""
    notes: list[str] = []
    data = config.data

    def place(key: str, path: Path, own: GenerateConfig | None, file: str) -> Path:
        settings = own or data.generate or GenerateConfig()
        # The section with the settings, which messages name.
        inherited = own is None and data.generate is not None
        section = "data" if inherited else _section_of(key)
        if not is_task(path):
            if not path.exists():
                return _again(key, path, section, settings)
            given = own or data.generate
            installed = importlib.util.find_spec(PACKAGE) is not None
            # Not an error: a run continues on its file with a newer reasoning-gym, too, even if
            # that has removed the task or an option.
            if given and installed and (why := _changed(key, section, path, given)):
                notes.append(f"{key}: keeps {path}, although {why}")
            return path
        task = str(path).removeprefix(TASK_PREFIX)
        local = _folder(key, section, task, settings) / file
        wanted = settings.size if file == TRAINING else settings.held_out
        rows = count_rows(local)
        # Fewer rows are not an error: a simple task has only so many questions.
        fewer = f", {rows} rows instead of {wanted}: the task gave no more different questions"
        fewer = fewer if rows < wanted else ""
        notes.append(f"{key}: {path} is {local}{fewer}")
        return local

    def placed[File: FileConfig](key: str, one: File, file: str) -> File:
        if task_of(one.path) is None:
            return one
        local = place(f"{key}.path", one.path, one.generate, file)
        if local == one.path:
            return one
        changes: dict[str, Any] = {"path": local}
        if isinstance(one, SourceConfig):
            # The files of all tasks have one name, and the labels of sources must differ.
            changes["name"] = one.label
        return one.model_copy(update=changes)

    changed: dict[str, Any] = {}
    for name, file in (("train", TRAINING), ("eval", HELD_OUT)):
        path: Path | None = getattr(data, name)
        if path is not None and task_of(path) is not None:
            changed[name] = place(f"data.{name}", path, None, file)
    if any(task_of(one.path) for one in data.sources):
        changed["sources"] = tuple(
            placed(f"data.sources.{index}", one, TRAINING) for index, one in enumerate(data.sources)
        )
    result: dict[str, Any] = {}
    if any(getattr(data, name) != value for name, value in changed.items()):
        result["data"] = data.model_copy(update=changed)
    evaluation = config.eval
    if evaluation is not None:
        sets = tuple(
            placed(f"eval.sets.{index}", one, HELD_OUT) for index, one in enumerate(evaluation.sets)
        )
        if sets != evaluation.sets:
            result["eval"] = evaluation.model_copy(update={"sets": sets})
    return (config.model_copy(update=result) if result else config), notes


def _changed(key: str, section: str, file: Path, settings: GenerateConfig) -> str:
    """Return why the settings no longer give the rows of a run's existing file; "" if they do."""
    task = task_of(file)
    try:
        folder, _ = _named(key, section, str(task), settings)
    except UserError as error:
        (problem,) = error.problems
        return f"{section}.generate cannot give its questions: {problem.what}"
    if folder.name == file.parent.name:
        return ""
    return (
        f"{section}.generate, or reasoning-gym, has changed since;"
        f" {TASK_PREFIX}{task} generates other questions"
    )


def _again(key: str, file: Path, section: str, settings: GenerateConfig) -> Path:
    """Return the missing file of a run in this machine's cache."""
    task = str(task_of(file))
    folder, _ = _named(key, section, task, settings)
    if folder.name != file.parent.name:
        version = importlib.metadata.version(DISTRIBUTION)
        raise UserError.of(
            key,
            f"{file} is missing, and {section}.generate with reasoning-gym {version} would give"
            " other questions",
            f"install the reasoning-gym of the run's first start, or set {key} to"
            f" {TASK_PREFIX}{task}",
        )
    return _folder(key, section, task, settings) / file.name


def task_file(key: str, name: Path, settings: GenerateConfig, *, held_out: bool = False) -> Path:
    """Return the file with the rows of the task `name`. Errors: see `with_generated`."""
    task = str(name).removeprefix(TASK_PREFIX)
    return _folder(key, _section_of(key), task, settings) / (HELD_OUT if held_out else TRAINING)


def _folder(key: str, section: str, task: str, settings: GenerateConfig) -> Path:
    """Return the folder with the two files of a task. `section`: key of the section with the
    settings."""
    folder, options = _named(key, section, task, settings)
    if not folder.is_dir():
        _write(key, section, task, options, settings, folder)
    return folder


def _named(
    key: str, section: str, task: str, settings: GenerateConfig
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a task's files, which may not exist yet, and the generator's options."""
    options = _options(key, section, task, settings)
    version = importlib.metadata.version(DISTRIBUTION)
    # Everything that determines the rows is in the name, so a file is never out of date.
    identity = json.dumps(
        [version, task, options, settings.seed, settings.size, settings.held_out], sort_keys=True
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron_async_rl" / PACKAGE / f"{task}-{digest}", options


def _options(key: str, section: str, task: str, settings: GenerateConfig) -> dict[str, Any]:
    """Return the generator's options: those of the level, changed by the user's."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError.of(
            key,
            f"{TASK_PREFIX}{task} needs the package reasoning-gym",
            "install it: pip install reasoning-gym",
        )
    from reasoning_gym import factory

    if task not in factory.DATASETS:
        hint = suggestion(task, factory.DATASETS)
        raise UserError.of(
            key,
            f"reasoning-gym has no task {task!r}",
            hint.strip() or f"name one of {', '.join(sorted(factory.DATASETS))}",
        )
    names = [one.name for one in dataclasses.fields(factory.DATASETS[task][1])]
    # `size` and `seed` are settings of their own.
    known = [one for one in names if one not in ("size", "seed")]
    unknown = next((one for one in settings.options if one not in known), None)
    if unknown is not None:
        raise UserError.of(
            f"{section}.generate.options.{unknown}",
            f"{task} has no option {unknown!r}",
            f"{suggestion(unknown, known)}its options are {', '.join(known)}",
        )
    return {**_of_level(section, task, settings.level), **settings.options}


def _of_level(section: str, task: str, level: int | None) -> dict[str, Any]:
    """Return the options of a level of the task's curriculum."""
    from reasoning_gym import factory
    from reasoning_gym.coaching import RangeAttributeDefinition

    if level is None:
        return {}
    if task not in factory.CURRICULA:
        what = f"{task} has no levels"
        raise UserError.of(
            f"{section}.generate.level", what, "remove level, and set options instead"
        )
    curriculum = factory.create_curriculum(task)
    highest = max(len(one.levels) for one in curriculum.attributes.values()) - 1
    if level > highest:
        what = f"the highest level of {task} is {highest}"
        raise UserError.of(f"{section}.generate.level", what, f"set it to {highest} or less")
    curriculum.set_global_level(level)
    made = curriculum.generate_configuration()
    # Only the options that the curriculum sets: others may be objects that JSON lacks.
    names = [
        name
        for one in curriculum.attributes.values()
        for name in (
            (one.lower_field_name, one.upper_field_name)
            if isinstance(one, RangeAttributeDefinition)
            else (one.field_name,)
        )
    ]
    return {name: getattr(made, name) for name in names}


def _section_of(key: str) -> str:
    """Return the section whose `generate` belongs to the data that `key` names."""
    return "data" if key in ("data.train", "data.eval") else key.removesuffix(".path")


def _write(
    key: str,
    section: str,
    task: str,
    options: Mapping[str, Any],
    settings: GenerateConfig,
    folder: Path,
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows_of_child(key, section, task, options, settings)
    console = Console(stderr=True)
    # Some generators need a second for each question.
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as temporary,
        contextlib.closing(rows),
        progress,
    ):
        shown = progress.add_task(f"generating {task}", total=settings.size + settings.held_out)
        made = Path(temporary) / folder.name
        made.mkdir()
        counts = dict.fromkeys((HELD_OUT, TRAINING), 0)
        for name, wanted in ((HELD_OUT, settings.held_out), (TRAINING, settings.size)):
            with open(made / name, "w", encoding="utf-8") as file:
                while counts[name] < wanted and (row := next(rows, None)) is not None:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    counts[name] += 1
                    progress.advance(shown)
        if not counts[TRAINING]:
            found = number_of("different question", counts[HELD_OUT])
            what = f"{task} gave only {found}, and all are held out"
            fix = f"lower {section}.generate.held_out, or set options that give more questions"
            raise UserError.of(key, what, fix)
        try:
            # Atomic: another process may generate the same rows at the same time.
            publish(made, folder)
        except OSError:
            if not folder.is_dir():
                raise


def _rows_of_child(
    key: str, section: str, task: str, options: Mapping[str, Any], settings: GenerateConfig
) -> Generator[dict[str, Any]]:
    """Yield the rows of `_rows`, computed in a child process. Raises UserError as it does, and if
    the child is killed."""
    request = json.dumps([key, section, task, options, settings.model_dump(mode="json")])
    # Some generators iterate over sets of text, whose order depends on the seed of the hashes, and
    # an interpreter takes this seed only when it starts.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        encoding="utf-8",
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended; its code is reported below
                child.stdin.write(request)
                child.stdin.close()
            for line in child.stdout:
                row = json.loads(line)
                if "fix" in row:
                    raise UserError.of(**row)
                yield row
            code = child.wait()
        finally:
            # Enough rows were read, or the caller was interrupted.
            child.kill()
    if code:
        what = f"the process that generates the questions of {task} ended with exit code {code}"
        raise UserError.of(
            key, what, "read its output above; a negative code is the number of a signal"
        )


def print_rows() -> None:
    """Print the rows of the request on standard input as lines of JSON. A line with `fix` is a
    UserError."""
    # Ctrl-C also reaches the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    key, section, task, options, settings = json.load(sys.stdin)
    lines = sys.stdout
    # Some generators print.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            for row in _rows(key, section, task, options, GenerateConfig(**settings)):
                print(json.dumps(row), file=lines)
        except UserError as error:
            (problem,) = error.problems
            print(
                json.dumps({"key": problem.key, "what": problem.what, "fix": problem.fix}),
                file=lines,
            )


def _rows(
    key: str, section: str, task: str, options: Mapping[str, Any], settings: GenerateConfig
) -> Iterator[dict[str, Any]]:
    """Yield a row for each different question of the task, at most DRAWS times as many draws as
    requested rows."""
    dataset, count = _generator(section, task, options, settings)
    seen = set[str]()
    misses, missed = 0, None
    for index in range(count):
        # Some generators draw from the module `random` instead of a generator with their seed.
        random.seed(settings.seed + index)
        try:
            entry = dataset[index]
        # This draw, or every draw with these options, has no question.
        except IndexError as error:
            misses, missed = misses + 1, error
            if misses == MISSES:
                break
            continue
        except Exception as error:
            what = f"{task} cannot generate question {index}"
            raise _refusal(section, settings, what, error) from error
        misses = 0
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        yield _row(key, task, options, index, entry, dataset.score_answer)
    if missed is not None and not seen:
        raise _refusal(section, settings, f"{task} cannot generate a question", missed) from missed


def _generator(
    section: str, task: str, options: Mapping[str, Any], settings: GenerateConfig
) -> tuple[Any, int]:
    """Return the task's generator, and the number of its questions."""
    wanted = settings.size + settings.held_out
    refused: list[Exception] = []
    # Some generators have a largest size.
    for size in (DRAWS * wanted, wanted, 1):
        try:
            dataset = dataset_of(task, options, size=size, seed=settings.seed)
        # Generators check their options with assertions and exceptions of any kind.
        except Exception as error:  # noqa: BLE001 - reported below
            refused.append(error)
            continue
        if size >= wanted:
            return dataset, size
        raise UserError.of(
            f"{section}.generate.size",
            f"{task} refuses {wanted} questions: {_text_of(refused[-1])}",
            f"lower size or {section}.generate.held_out",
        ) from refused[-1]
    # Some levels of the library have options that its own generators refuse.
    used = "its options" if settings.level is None else f"the options of level {settings.level}"
    raise _refusal(section, settings, f"{task} refuses {used}", refused[1]) from refused[1]


def _refusal(section: str, settings: GenerateConfig, what: str, cause: Exception) -> UserError:
    """Return the error for options with which a generator fails."""
    of_level = settings.level is not None
    return UserError.of(
        f"{section}.generate.{'level' if of_level else 'options'}",
        f"{what}: {_text_of(cause)}",
        "name another level, or correct the options" if of_level else "correct the options",
    )


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _row(
    key: str,
    task: str,
    options: Mapping[str, Any],
    index: int,
    entry: Mapping[str, Any],
    score: Callable[..., float],
) -> dict[str, Any]:
    stored = {name: value for name, value in entry.items() if name != "question"}
    stored |= {"task": task, "options": dict(options), "tuples": False}
    row = {"id": f"{task}-{index}", "prompt": entry["question"], "task": task, "entry": stored}
    # Some tasks accept any valid solution and have no answer of their own.
    if entry["answer"] is None:
        return row
    row["answer"] = str(entry["answer"])
    why = "JSON changes how it is scored"
    try:
        expected = score(entry["answer"], dict(entry))
        for tuples in (False, True):
            stored["tuples"] = tuples
            # The entry as a run reads it: scored otherwise, it would train on other rewards.
            text = json.dumps(stored, allow_nan=False)
            if score(entry["answer"], entry_of(json.loads(text))) == expected:
                return row
    # A scorer may raise anything, and an entry may contain any object.
    except Exception as error:  # noqa: BLE001 - reported below
        why = f"{type(error).__name__}: {error}"
    what = f"question {index} of {task} cannot be stored: {why}"
    raise UserError.of(key, what, "change the seed or the options, or use another task")
