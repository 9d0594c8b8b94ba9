"""Questions of `mar init`. An option answers its question in advance. Without a terminal, every
other question takes its default.

    model -> data (its columns are read) -> prompt column -> held-out data -> reward
          -> answer column, if the reward reads one -> GPUs -> style

Invariants:
- every answer is checked before the next question;
- if a later check refuses an answer, only its question is repeated;
- without a terminal nothing reads the standard input, and every default is reported.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from megatron_async_rl.config.data import TASK_PREFIX, GenerateConfig, is_task
from megatron_async_rl.config.keys import nearest
from megatron_async_rl.config.problem import DataError, Problem, UserError
from megatron_async_rl.data.files import read_rows
from megatron_async_rl.data.generated import task_file
from megatron_async_rl.data.hub import fetch, parse
from megatron_async_rl.data.row_columns import SYNONYMS
from megatron_async_rl.data.task_entries import PACKAGE
from megatron_async_rl.plan.machine import GIB, this_machine
from megatron_async_rl.plan.new_config import STYLES, InitAnswers, InitColumns
from megatron_async_rl.plan.reward_choice import SETTING, RewardChoice, names_of
from megatron_async_rl.rollout.rewards.registry import RewardError, required_fields

ROWS = 50
"""Number of rows whose columns are read."""
SPLIT, NONE = "5%", "none"
MODEL_FIX = "name a model's directory, or a model on a hub: hf://OWNER/NAME"
GPU_MEMORY_GIB = 80.0
REQUIRED = {"model": "--model MODEL", "data": "--data FILE"}
OPTIONS = {
    "model": "--model",
    "data": "--data",
    "prompt_key": "--prompt-key",
    "eval": "--eval",
    "reward": "--reward",
    "answer_key": "--answer-key",
    "gpus": "--gpus",
    "style": "--style",
}
"""Option that answers each question, in the order of the questions: checks use earlier answers."""
# The first match counts, so a longer key precedes its section.
QUESTION_OF_KEY = (
    ("model", "model"),
    ("data.eval", "eval"),
    ("data.prompt_key", "prompt_key"),
    ("data", "data"),
    ("eval", "eval"),
    ("rollout.reward", "reward"),
    ("rollout.environment", "reward"),
    ("policy", "gpus"),
    ("rollout", "gpus"),
    ("weights", "gpus"),
    ("host memory", "gpus"),
    *((option, name) for name, option in OPTIONS.items()),
)
"""(prefix of a problem's key, the question whose answer causes such problems)."""

Check = Callable[[str], Any]
"""Function that returns the value of an answer. Raises UserError."""


def at_terminal() -> bool:
    """Return True if a user can answer questions."""
    # A process without a standard input, such as a daemon, has None there.
    return sys.stdin is not None and sys.stdin.isatty()


class Interview:
    """The questions and the answers so far.

    `given`: answers from options, by question. `out`: file to write. `settings`: values of
    `--setting`, for the reward. `report`: prints a message to the user.
    """

    def __init__(
        self,
        given: Mapping[str, str],
        *,
        out: Path,
        settings: Sequence[str] = (),
        as_chat: bool = False,
        gpu_memory_gib: float | None = None,
        terminal: bool,
        report: Callable[[str], None],
    ) -> None:
        # Each entry is removed when it is used: if it is refused, the user answers.
        self._given = dict(given)
        self._out = out
        self._settings, self._as_chat = settings, as_chat
        self._gpu_memory_gib = gpu_memory_gib
        self._terminal, self._report = terminal, report
        self._texts: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._columns: list[str] = []
        self._questions: Mapping[str, Callable[[], None]] = {
            "model": self._model,
            "data": self._data,
            "prompt_key": self._prompt_key,
            "eval": self._eval,
            "reward": self._reward,
            "answer_key": self._answer_key,
            "gpus": self._gpus,
            "style": self._style,
        }

    def run(self) -> InitAnswers:
        """Get all answers. Raises UserError for a wrong option and, without a terminal, for a
        missing answer that has no default."""
        # All missing options at once, so that a script does not fail once for each.
        missing = [options for name, options in REQUIRED.items() if name not in self._given]
        if missing and not self._terminal:
            fix = f"add {' '.join(missing)}; every other question has a default"
            problems = [
                Problem(key=one.split()[0], what="is required without a terminal", fix=fix)
                for one in missing
            ]
            raise UserError("mar init", problems)
        try:
            for question in self._questions.values():
                question()
        # Ctrl-C or the end of the input.
        except typer.Abort:
            self._report_command()
            raise
        return self._answers()

    def repeat(self, error: UserError) -> InitAnswers:
        """Repeat the question whose answer caused `error`, and keep all other answers. Raises
        `error` itself without a terminal, or if no answer caused it."""
        key = error.problems[0].key if error.problems else ""
        name = next((name for start, name in QUESTION_OF_KEY if key.startswith(start)), None)
        if not self._terminal or name is None:
            raise error
        self._report(f"{error}\nThe other answers are kept.")
        try:
            self._questions[name]()
            # Other data may have other columns, and another reward may read other columns.
            if name == "data":
                self._prompt_key()
            if name in ("data", "reward"):
                self._answer_key()
        except typer.Abort:
            self._report_command()
            raise
        return self._answers()

    def _answers(self) -> InitAnswers:
        values = self._values
        return InitAnswers(
            model=values["model"],
            data=values["data"],
            held_out=values["eval"],
            columns=InitColumns(
                prompt_key=values["prompt_key"],
                answer_key=values["answer_key"],
                as_chat=self._as_chat,
            ),
            reward=values["reward"],
            gpus=values["gpus"],
            gpu_memory_gib=self._memory_gib(values["gpus"]),
            style=values["style"],
        )

    def _report_command(self) -> None:
        """Report a command with the answers so far, so that they are not lost."""
        # Options that were not used yet are answers, too.
        answers = {**self._given, **self._texts}
        if not answers:
            return
        words = ["mar", "init", str(self._out)]
        for name, text in answers.items():
            words += [OPTIONS[name], text]
        for setting in self._settings:
            words += ["--setting", setting]
        words += ["--as-chat"] if self._as_chat else []
        if self._gpu_memory_gib is not None:
            words += ["--gpu-memory", f"{self._gpu_memory_gib:g}"]
        self._report(f"\nTo continue with the same answers: {shlex.join(words)}")

    def _resolve(self, name: str, question: str, default: str | None, check: Check) -> None:
        """Get one answer: from its option, from the terminal, or its default."""
        # Removed, so that the option does not answer a repeated question.
        given = self._given.pop(name, None)
        if given is not None:
            try:
                self._store(name, given, check)
                return
            except UserError as error:
                if not self._terminal or _is_setting(error):
                    raise
                self._report(str(error))
        if self._terminal:

            def checked(text: str) -> str:
                try:
                    self._store(name, text, check)
                except UserError as error:
                    if _is_setting(error):
                        raise  # `--setting` is wrong, which no other answer would fix
                    problem = error.problems[0]
                    # click repeats its prompt after a BadParameter.
                    raise typer.BadParameter(f"{problem.what}; {problem.fix}") from None
                return text

            typer.prompt(question, default=default, err=True, value_proc=checked)
            return
        assert default is not None, "questions without a default have required options"
        self._store(name, default, check)
        self._report(f"note: {OPTIONS[name]} {shlex.quote(default)} by default")

    def _store(self, name: str, text: str, check: Check) -> None:
        # If the check raises, neither the value nor the text is stored.
        self._values[name] = check(text)
        self._texts[name] = text

    def _model(self) -> None:
        self._resolve(
            "model", "Model: a Hugging Face directory, or hf://OWNER/NAME", None, _is_model
        )

    def _data(self) -> None:
        question = (
            "Data: a file of prompts (JSONL, JSON, Parquet, CSV), hf://datasets/OWNER/NAME, or"
            f" {TASK_PREFIX}TASK"
        )
        self._resolve("data", question, None, self._read_columns)

    def _read_columns(self, text: str) -> str:
        columns = columns_of("--data", "data.train", text)
        for name in ("prompt_key", "answer_key"):
            # Options that name columns are checked as soon as the columns are known.
            if name in self._given:
                _require_column(OPTIONS[name], self._given[name], columns)
        self._columns = columns
        return text

    def _prompt_key(self) -> None:
        columns = self._columns
        if "prompt" in columns and "prompt_key" not in self._given:
            self._values["prompt_key"] = "prompt"
            return
        # The first of SYNONYMS, which start with the most common names, not the first column.
        guess = next((one for one in SYNONYMS["prompt"] if one in columns), None)
        if guess is None and not self._terminal:
            _require_column("--prompt-key", self._given.get("prompt_key", "prompt"), columns)
        self._resolve(
            "prompt_key",
            f"Column of the prompts ({', '.join(columns)})",
            guess,
            self._prompt_column,
        )

    def _prompt_column(self, text: str) -> str:
        _require_column("--prompt-key", text, self._columns)
        return text

    def _eval(self) -> None:
        question = (
            "Held-out data: a file, hf://datasets/OWNER/NAME#SPLIT, a share to split off, or"
            f" {NONE}"
        )
        # A task has held-out questions of its own.
        data = self._values["data"]
        self._resolve("eval", question, data if is_task(Path(data)) else SPLIT, self._held_out)

    def _held_out(self, text: str) -> str | float | None:
        """Return a path, the share of the data to split off, or None for no held-out data."""
        if text == NONE:
            return None
        share = re.fullmatch(r"(\d+(?:\.\d+)?) *%", text)
        if share is not None:
            if not 0 < float(share[1]) < 100:
                fix = f"write a share between 0 and 100 %, such as {SPLIT}"
                raise UserError.of("--eval", f"{text} leaves one side without rows", fix)
            data = self._values["data"]
            if is_task(Path(data)):
                what = f"{data} is not a file that can be split"
                raise UserError.of("--eval", what, f"write {data} for its held-out questions")
            return float(share[1]) / 100
        columns = columns_of("--eval", "data.eval", text)
        # data.prompt_key also applies to held-out data.
        _require_column("--eval", self._values["prompt_key"], columns, of=text)
        return text

    def _reward(self) -> None:
        question = (
            "Reward: math, code, arithmetic, countdown, reasoning_gym, judge, http or"
            " module:function; or an environment: tools, agent, verifiers, openenv or module:Class"
        )
        default = PACKAGE if is_task(Path(self._values["data"])) else "math"
        self._resolve("reward", question, default, self._choose_reward)

    def _choose_reward(self, text: str) -> RewardChoice:
        try:
            names_of(text)
        except ValueError as error:
            raise UserError.of("--reward", str(error), "use one of these names") from None
        choice = RewardChoice.of(text, self._settings)
        read = self._columns_read_by(choice)
        # The next question selects a column for `answer`, so it need not exist.
        missing = sorted(read - {*self._columns, "answer"})
        if missing:
            what = (
                f"{text} reads the column {missing[0]}, and the data has {_listed(self._columns)}"
            )
            raise UserError.of("--reward", what, "choose another reward, or add the column")
        if "answer" in read and not (self._has_answer_column() or self._terminal):
            raise _no_answer(text, self._columns)
        return choice

    def _columns_read_by(self, choice: RewardChoice) -> set[str]:
        """Return the columns that the chosen rewards read, as far as they declare them."""
        read: set[str] = set()
        for name in choice.names:
            try:
                read |= set(required_fields(name, choice.settings.get(name) or {}))
            except (RewardError, TypeError):
                continue  # the plan reports what is wrong with the settings
        return read

    def _has_answer_column(self) -> bool:
        names = {"answer", *SYNONYMS["answer"]} - {self._values["prompt_key"]}
        return "answer_key" in self._given or bool(names & set(self._columns))

    def _answer_key(self) -> None:
        """Get the column of the answers if the reward reads `answer` and the data has no such
        column."""
        columns = [one for one in self._columns if one != self._values["prompt_key"]]
        read = self._columns_read_by(self._values["reward"])
        needed = "answer" in read and "answer" not in columns
        if not needed and "answer_key" not in self._given:
            self._values["answer_key"] = ""
            return
        guess = next((one for one in SYNONYMS["answer"] if one in columns), None)
        question = f"Column of the answers ({', '.join(columns)})"
        self._resolve("answer_key", question, guess, self._answer_column)

    def _answer_column(self, text: str) -> str:
        _require_column("--answer-key", text, self._columns)
        return text

    def _gpus(self) -> None:
        default = str(len(this_machine().gpus))
        question = "Number of GPUs of the machine; 0 trains on the CPU"
        self._resolve("gpus", question, default, _is_count)

    def _memory_gib(self, gpus: int) -> float:
        """Return the memory of each GPU in GiB: from the option, else of this machine's GPUs if it
        has that many, else GPU_MEMORY_GIB."""
        here = this_machine().gpus
        if self._gpu_memory_gib is not None:
            return self._gpu_memory_gib
        if 0 < gpus <= len(here):
            return min(gpu.memory for gpu in here) // GIB
        return GPU_MEMORY_GIB

    def _style(self) -> None:
        self._resolve("style", f"Style: {', '.join(STYLES)}", next(iter(STYLES)), _is_style)


def _is_setting(error: UserError) -> bool:
    return error.problems[0].key == SETTING


def columns_of(option: str, key: str, text: str) -> list[str]:
    """Return the columns in the first rows of a file or of a data set on a hub. `option` and `key`
    name it in errors; `key`, a config key, also selects the split on a hub. Raises UserError."""
    try:
        place = _local(key, Path(text))
        # A dict for unique columns in their order; rows may have different columns.
        columns = {one: None for _, _, row in islice(read_rows(place), ROWS) for one in row}
    except DataError as error:
        # With the config key, as in the message of `mar plan`.
        raise UserError("", [error.problem(f"{option} ({key})")]) from None
    if not columns:
        raise UserError.of(option, f"{text} has no rows", "name a file of prompts")
    return list(columns)


def _local(key: str, path: Path) -> Path:
    """Return a file with the first rows of the data that `path` names."""
    if is_task(path):
        # A few questions have the columns of all; the run generates as many as it needs.
        return task_file(key, path, GenerateConfig(size=1, held_out=1))
    name = parse(path)
    return fetch(key, name) if name is not None else path.expanduser()


def _require_column(option: str, column: str, columns: Sequence[str], of: str = "the data") -> None:
    if column in columns:
        return
    role, named = (
        ("answer", option) if option == "--answer-key" else ("prompt", OPTIONS["prompt_key"])
    )
    # A misspelt name first: the usual names may be columns of something else.
    likely = nearest(column, columns)
    likely = likely or next((one for one in SYNONYMS[role] if one in columns), "COLUMN")
    what = f"{of} has no column {column!r} (its columns: {_listed(columns)})"
    raise UserError.of(option, what, f"name an existing column: {named} {likely}")


def _no_answer(reward: str, columns: Sequence[str]) -> UserError:
    what = f"{reward} reads the column answer, and the data has {_listed(columns)}"
    return UserError.of("--answer-key", what, "name the column of the answers: --answer-key COLUMN")


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"


def _is_model(text: str) -> str:
    if not text.startswith("hf:") and not Path(text).expanduser().is_dir():
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", text)
        fix = f"for the model of that name on a hub, write hf://{text}" if on_hub else MODEL_FIX
        raise UserError.of("--model", f"{text} is not a directory", fix)
    return text


def _is_count(text: str) -> int:
    if not text.isdecimal():
        raise UserError.of("--gpus", f"{text!r} is not a number of GPUs", "write 0, 1, 2, ...")
    return int(text)


def _is_style(text: str) -> str:
    if text.lower() not in STYLES:
        what = f"{text!r} is not one of {', '.join(STYLES)}"
        raise UserError.of("--style", what, f"write {next(iter(STYLES))}")
    return text.lower()
