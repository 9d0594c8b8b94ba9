"""Questions of `mar init`. Options answer them in advance; without a terminal every other question
takes its default.

    model -> data, whose columns are read -> prompt column -> held-out data -> reward
          -> answer column, if the reward reads one -> GPUs -> style

Invariants:
- an answer is checked before the next question;
- when a later check refuses an answer, only that question is repeated;
- without a terminal nothing reads the standard input, and each default that was taken is reported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from megatron_async_rl.config.problem import DataError, Problem, UserError
from megatron_async_rl.data.files import read_rows
from megatron_async_rl.data.hub import fetch, parse
from megatron_async_rl.data.row_columns import SYNONYMS
from megatron_async_rl.plan.machine import GIB, this_machine
from megatron_async_rl.plan.new_config import STYLES, InitAnswers, InitColumns
from megatron_async_rl.plan.reward_choice import SETTING, RewardChoice, names_of
from megatron_async_rl.rollout.rewards.registry import RewardError, required_fields

ROWS = 50
"""Rows from which the columns are read."""
SPLIT, NONE = "5%", "none"
ON_HUB = "name a model's folder, or a model on a hub: hf://OWNER/NAME"
GPU_MEMORY_GIB = 80.0
REQUIRED = {"model": "--model MODEL", "data": "--data FILE"}
# The order is that of the questions: later checks use earlier answers.
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
"""Question -> the option that answers it, in the order of the questions."""
# The first match wins, so longer keys come before their sections.
BLAMED = (
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
"""Beginning of a problem's key -> the question whose answer is at fault."""

Check = Callable[[str], Any]
"""Turn an answer into its value. Raises UserError."""


def at_terminal() -> bool:
    """True if a user can answer."""
    # A daemon has no standard input at all.
    return sys.stdin is not None and sys.stdin.isatty()


class Interview:
    """`given`: what options answered, by question; `settings`: of the reward. `report`: called with
    lines for the user."""

    def __init__(
        self,
        given: Mapping[str, str],
        *,
        settings: Sequence[str] = (),
        as_chat: bool = False,
        gpu_memory_gib: float | None = None,
        terminal: bool,
        report: Callable[[str], None],
    ) -> None:
        # Consumed as questions are asked: an option answers once, then the user does.
        self._given = dict(given)
        self._settings, self._as_chat = settings, as_chat
        self._gpu_memory_gib = gpu_memory_gib
        self._terminal, self._report = terminal, report
        self._texts: dict[str, str] = {}
        self._found: dict[str, Any] = {}
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

    def ask(self) -> InitAnswers:
        """Prompt for every answer. Raises UserError for an option that is wrong, and for a question
        without a default if there is no terminal."""
        # All at once, so that a script does not fail once per option.
        missing = [options for name, options in REQUIRED.items() if name not in self._given]
        if missing and not self._terminal:
            fix = f"add {' '.join(missing)}; every other question has a default"
            problems = [
                Problem(key=one.split()[0], what="is needed without a terminal", fix=fix)
                for one in missing
            ]
            raise UserError("mar init", problems)
        try:
            for question in self._questions.values():
                question()
        # Ctrl-C or end of input: answers that were given must not be lost.
        except typer.Abort:
            self._keep()
            raise
        return self._answers()

    def again(self, error: UserError) -> InitAnswers:
        """Repeat the question whose answer caused `error`, and keep every other answer. Raises the
        error itself without a terminal, or if no question caused it."""
        key = error.problems[0].key if error.problems else ""
        blamed = next((name for start, name in BLAMED if key.startswith(start)), None)
        # Asking again makes sense only where a user can answer differently.
        if not self._terminal or blamed is None:
            raise error
        self._report(f"{error}\nThe other answers are kept.")
        try:
            self._questions[blamed]()
            if blamed == "data":  # other data, other columns
                self._prompt_key()
            # Another reward may read another column.
            if blamed in ("data", "reward"):
                self._answer_key()
        except typer.Abort:
            self._keep()
            raise
        return self._answers()

    def _answers(self) -> InitAnswers:
        found = self._found
        return InitAnswers(
            model=found["model"],
            data=found["data"],
            held_out=found["eval"],
            columns=InitColumns(
                prompt_key=found["prompt_key"],
                answer_key=found["answer_key"],
                as_chat=self._as_chat,
            ),
            reward=found["reward"],
            gpus=found["gpus"],
            gpu_memory_gib=self._memory_gib(found["gpus"]),
            style=found["style"],
        )

    def _keep(self) -> None:
        """Report the command that has the answers so far."""
        given = " ".join(f"{OPTIONS[name]} {_shown(text)}" for name, text in self._texts.items())
        if given:
            self._report(f"\nTo continue with the same answers: mar init {given}")

    def _ask(self, name: str, question: str, default: str | None, check: Check) -> None:
        """Answer one question: by its option, at the terminal, or by its default."""
        # Popped: when the question is asked again, the option must not answer it again.
        given = self._given.pop(name, None)
        if given is not None:
            try:
                self._take(name, given, check)
                return
            except UserError as error:
                if not self._terminal or _is_setting(error):
                    raise
                self._report(str(error))
        if self._terminal:

            def checked(text: str) -> str:
                try:
                    self._take(name, text, check)
                except UserError as error:
                    if _is_setting(error):
                        raise  # no other answer helps
                    problem = error.problems[0]
                    # click prompts again after a BadParameter.
                    raise typer.BadParameter(f"{problem.what}; {problem.fix}") from None
                return text

            typer.prompt(question, default=default, err=True, value_proc=checked)
            return
        assert default is not None, "those without a default are required"
        self._take(name, default, check)
        self._report(f"note: {OPTIONS[name]} {_shown(default)}, as nothing else was given")

    def _take(self, name: str, text: str, check: Check) -> None:
        # The check may raise; then neither value nor text is kept.
        self._found[name] = check(text)
        self._texts[name] = text

    def _model(self) -> None:
        self._ask("model", "Model, a Hugging Face directory or hf://OWNER/NAME", None, _is_model)

    def _data(self) -> None:
        question = "Data, a file of prompts (JSONL, JSON, Parquet, CSV) or hf://datasets/OWNER/NAME"
        self._ask("data", question, None, self._read_columns)

    def _read_columns(self, text: str) -> str:
        columns = columns_of("--data", "data.train", text)
        for name in ("prompt_key", "answer_key"):
            # Columns given as options are checked as soon as the columns are known.
            if name in self._given:
                _require_column(OPTIONS[name], self._given[name], columns)
        self._columns = columns
        return text

    def _prompt_key(self) -> None:
        columns = self._columns
        if "prompt" in columns and "prompt_key" not in self._given:
            self._found["prompt_key"] = "prompt"
            return
        # The first synonym in the list, not in the file: it is the most common name.
        guess = next((one for one in SYNONYMS["prompt"] if one in columns), None)
        if guess is None and not self._terminal:
            _require_column("--prompt-key", self._given.get("prompt_key", "prompt"), columns)
        self._ask(
            "prompt_key", f"Column of the prompts ({', '.join(columns)})", guess, self._column
        )

    def _column(self, text: str) -> str:
        _require_column("--prompt-key", text, self._columns)
        return text

    def _eval(self) -> None:
        question = (
            "Held-out data: a file, hf://datasets/OWNER/NAME#SPLIT, a share to split off, or"
            f" {NONE}"
        )
        self._ask("eval", question, SPLIT, self._held_out)

    def _held_out(self, text: str) -> str | float | None:
        """A path, a share of the data, or null for none."""
        if text == NONE:
            return None
        share = re.fullmatch(r"(\d+(?:\.\d+)?) *%", text)
        if share is not None:
            if not 0 < float(share[1]) < 100:
                fix = f"write a share between 0 and 100 %, such as {SPLIT}"
                raise UserError.of("--eval", f"{text} leaves no rows on one side", fix)
            return float(share[1]) / 100
        columns = columns_of("--eval", "data.eval", text)
        # Held-out prompts are read by the same column.
        _require_column("--eval", self._found["prompt_key"], columns, of=text)
        return text

    def _reward(self) -> None:
        question = (
            "Reward: math, code, arithmetic, countdown, judge, http or module:function; or an"
            " environment: tools, agent, verifiers, openenv or module:Class"
        )
        self._ask("reward", question, "math", self._choose_reward)

    def _choose_reward(self, text: str) -> RewardChoice:
        try:
            names_of(text)
        except ValueError as error:
            raise UserError.of("--reward", str(error), "name one of these") from None
        choice = RewardChoice.of(text, self._settings)
        read = self._read_by(choice)
        # `answer` may come from another column.
        there = {*self._columns, "answer"}  # the next question is the column for it
        lacking = [one for one in read if one not in there]
        if lacking:
            what = f"{text} reads the column {lacking[0]}; the data has {_listed(self._columns)}"
            raise UserError.of("--reward", what, "name another reward, or add the column")
        if "answer" in read and not (self._answer_there() or self._terminal):
            raise _no_answer(text, self._columns)
        return choice

    def _read_by(self, choice: RewardChoice) -> set[str]:
        """Columns that a reward reads, as far as it is known."""
        read: set[str] = set()
        for name in choice.names:
            try:
                read |= set(required_fields(name, choice.settings.get(name) or {}))
            except (RewardError, TypeError):
                continue  # the plan names what is wrong with its settings
        return read

    def _answer_there(self) -> bool:
        guessed = {"answer", *SYNONYMS["answer"]} - {self._found["prompt_key"]}
        return "answer_key" in self._given or bool(guessed & set(self._columns))

    def _answer_key(self) -> None:
        """Prompt only if the reward reads a column that the data lacks."""
        columns = [one for one in self._columns if one != self._found["prompt_key"]]
        # A column that nothing reads is not asked for.
        needed = "answer" in self._read_by(self._found["reward"]) and "answer" not in columns
        if not needed and "answer_key" not in self._given:
            self._found["answer_key"] = ""
            return
        guess = next((one for one in SYNONYMS["answer"] if one in columns), None)
        question = f"Column of the answers ({', '.join(columns)})"
        self._ask("answer_key", question, guess, self._answer_column)

    def _answer_column(self, text: str) -> str:
        _require_column("--answer-key", text, self._columns)
        return text

    def _gpus(self) -> None:
        default = str(len(this_machine().gpus))
        question = "GPUs of the machine; 0: train on the CPU"
        self._ask("gpus", question, default, _is_count)

    def _memory_gib(self, gpus: int) -> float:
        """GiB of each GPU: the given size, or that of this machine's GPUs if it has enough of
        them."""
        here = this_machine().gpus
        if self._gpu_memory_gib is not None:
            return self._gpu_memory_gib
        if 0 < gpus <= len(here):
            return min(gpu.memory for gpu in here) // GIB
        return GPU_MEMORY_GIB

    def _style(self) -> None:
        self._ask("style", f"Style: {', '.join(STYLES)}", next(iter(STYLES)), _is_style)


def _is_setting(error: UserError) -> bool:
    return error.problems[0].key == SETTING


def columns_of(option: str, key: str, text: str) -> list[str]:
    """Columns of the first rows of a file or of a data set on a hub. `key`: of the config, which
    decides the split. Raises UserError."""
    try:
        name = parse(Path(text))
        place = fetch(key, name) if name is not None else Path(text).expanduser()
        # A dict keeps the order of the columns, and rows may differ in them.
        columns = {one: None for _, _, row in islice(read_rows(place), ROWS) for one in row}
    except DataError as error:
        # The config's key, too: a message is the same whenever the file is found wanting.
        raise UserError("", [error.problem(f"{option} ({key})")]) from None
    if not columns:
        raise UserError.of(option, f"{text} has no rows", "name a file of prompts")
    return list(columns)


def _require_column(option: str, column: str, columns: Sequence[str], of: str = "the data") -> None:
    if column in columns:
        return
    role, named = (
        ("answer", option) if option == "--answer-key" else ("prompt", OPTIONS["prompt_key"])
    )
    likely = next((one for one in SYNONYMS[role] if one in columns), "COLUMN")
    what = f"{of} has no column {column!r} (its columns: {_listed(columns)})"
    raise UserError.of(option, what, f"name an existing one: {named} {likely}")


def _no_answer(reward: str, columns: Sequence[str]) -> UserError:
    what = f"{reward} reads the column answer; the data has {_listed(columns)}"
    return UserError.of("--answer-key", what, "name the column of the answers: --answer-key COLUMN")


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"


def _is_model(text: str) -> str:
    if not text.startswith("hf:") and not Path(text).expanduser().is_dir():
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", text)
        fix = f"the model of that name on a hub is hf://{text}" if on_hub else ON_HUB
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


def _shown(text: str) -> str:
    return text if re.fullmatch(r"[\w./:@#%+=,-]+", text) else f"'{text}'"
