"""Settings of the data: files and their columns, mixtures, chat options and filters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_async_rl.config.settings_model import OnlyJson, Strict, TextOrFile

DataColumn = Annotated[str, Field(min_length=1)]
TOOLS_COLUMN = "tools"
TASK_PREFIX = "reasoning_gym:"
GENERATED = re.compile(r"/reasoning_gym/(?P<task>\w+)-[0-9a-f]{12}/(train|test)\.jsonl$")
"""Matches the path of a generated file (data/generated.py), which a run's config has in place of
the task."""
"""Prefix of a task of reasoning-gym, which is not a path."""

# A user's value for these would change the tokens that the loss is computed on.
OWN_TEMPLATE_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "messages",
    "conversation",
    "chat_template",
)
"""Arguments of a chat template's rendering that this project sets itself."""


@dataclass(frozen=True, kw_only=True)
class DataColumns:
    """Columns of one file. `messages`: column of chat messages; None if `prompt` is read."""

    prompt: str = "prompt"
    answer: str | None = None
    messages: str | None = None
    tools: str | None = TOOLS_COLUMN
    system_prompt: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Constant columns that are added to every row: name -> value."""


def is_task(path: Path | None) -> TypeGuard[Path]:
    """Return True for the name of a task of reasoning-gym, `reasoning_gym:TASK`."""
    return path is not None and str(path).startswith(TASK_PREFIX)


def task_of(path: Path | None) -> str | None:
    """Return the name of the task of `reasoning_gym:TASK` or of a generated file; None for other
    data."""
    if is_task(path):
        return str(path).removeprefix(TASK_PREFIX)
    match = GENERATED.search(str(path))
    return match["task"] if match else None


class GenerateConfig(Strict):
    """Questions that are generated for `reasoning_gym:TASK`."""

    size: PositiveInt = 1000
    """Number of training rows. A task with fewer different questions gives fewer rows."""
    held_out: PositiveInt = 200
    """Number of held-out rows. Training and held-out rows have no question in common."""
    seed: NonNegativeInt = 0
    """Seed of the questions. The same seed, settings and version of reasoning-gym give the same
    questions."""
    level: NonNegativeInt | None = None
    """Level of the task's curriculum, which sets its options; 0 is the easiest. Null: the task's
    default options."""
    options: Annotated[Mapping[str, Any], OnlyJson] = {}
    """Options of the task, such as `{min_terms: 2, max_terms: 2}` of `chain_sum`; they take
    precedence over those of `level`."""


class FileConfig(Strict):
    """One file or folder of data, and its columns if they differ from those of `data`."""

    path: Path
    """File or folder, or a task, as in data.train."""
    generate: GenerateConfig | None = None
    """Questions of `reasoning_gym:TASK`; null uses data.generate."""
    prompt_key: DataColumn | None = None
    """Column of the prompt; null uses data.prompt_key, unless messages_key is set here."""
    answer_key: DataColumn | None = None
    """Column of the answer; null uses data.answer_key."""
    messages_key: DataColumn | None = None
    """Column of chat messages; null uses data.messages_key, unless prompt_key is set here."""
    tools_key: DataColumn | None = None
    """Column of the functions' schemas; null uses data.tools_key."""
    system_prompt: str | None = None
    """System message; null uses data.system_prompt."""
    # They become fields of samples, which the log writes as JSON.
    fields: Annotated[Mapping[str, Any], OnlyJson] = {}
    """Columns that are added to each row of the file, such as `{kind: math}`, for rewards and for
    the `where` of a part of the reward."""

    @model_validator(mode="after")
    def _one_column(self) -> FileConfig:
        if self.prompt_key is not None and self.messages_key is not None:
            raise ValueError(
                f"prompt_key: {self.prompt_key} and messages_key: {self.messages_key} both name"
                " the column of the prompt; keep one"
            )
        if self.generate is not None and task_of(self.path) is None:
            raise ValueError(
                f"generate has no effect on the file {self.path}; remove it, or set path to"
                f" {TASK_PREFIX}TASK"
            )
        return self


class SourceConfig(FileConfig):
    """One source of a mixture."""

    name: DataColumn | None = None
    """Prefix of the prompts' ids; null uses the name of the file or folder."""
    weight: PositiveFloat = 1.0
    """Relative share of the prompts: weight / sum of weights. Each prompt is taken from the source
    that is furthest behind its share."""

    @property
    def label(self) -> str:
        return self.name or self.path.stem.removeprefix(TASK_PREFIX)


class DataConfig(Strict):
    """Training and held-out prompts."""

    train: Path | None = None
    """Training prompts. A file of JSONL, JSON (a list), Parquet or CSV, by its extension; a folder
    of such files, or a pattern such as `data/train-*.parquet`; a file on the Hugging Face Hub,
    `hf://datasets/OWNER/NAME[@REVISION]/PATH`; or a whole split of a data set,
    `hf://datasets/OWNER/NAME[@REVISION][#SPLIT]`, by default the split `train`; or
    `reasoning_gym:TASK`, whose questions are generated. Each row has a prompt and the columns that
    the reward reads; with `loss: sft` a response and optionally a `weight`. Null: `sources`."""
    generate: GenerateConfig | None = None
    """Questions of `reasoning_gym:TASK` in train, eval, sources and eval.sets; null uses the
    defaults."""
    sources: tuple[SourceConfig, ...] = ()
    """Sources of a mixture, instead of `train`."""
    eval: Path | None = None
    """Held-out prompts, in the formats of `train`; with `loss: sft` their rows have responses. Name
    several sets as `eval.sets`."""
    shuffle: bool = True
    """Shuffle each source in every epoch, by the seed."""
    prompt_key: DataColumn = "prompt"
    """Column of the prompt: text, or a list of chat messages, which may be JSON text. This key and
    the three below may name a value inside a column: `extra_info.question`."""
    answer_key: DataColumn | None = None
    """Column that becomes `answer`, which rewards read; with `loss: sft` it becomes `response`.
    Null: columns keep their names."""
    messages_key: DataColumn | None = None
    """Column of chat messages, instead of prompt_key. With `loss: sft` each row has a whole
    conversation, and the loss is on the assistant's messages, except for those with `train: false`
    or `weight: 0`."""
    tools_key: DataColumn | None = TOOLS_COLUMN
    """Column of the JSON schemas of the functions that a row's chat messages may call, a list or
    its JSON text; the chat template gets them. The column `tools` is optional; a column of another
    name is required in each row. Null: no schemas are read."""
    system_prompt: str | None = None
    """System message that is prepended to messages without a system message."""
    as_chat: bool = False
    """True turns a text prompt into a user message, which the chat template renders; false passes
    the text to the model unchanged. With `loss: sft` a response to a chat ends with the template's
    end of a turn, and a response to plain text with the tokenizer's end of sequence."""
    chat_template: TextOrFile | None = None
    """Chat template: a Jinja file, or the text of the template; null uses the model's."""
    chat_template_options: Mapping[str, Any] = {}
    """Variables of the template, such as `enable_thinking: false`."""
    max_prompt_tokens: PositiveInt | None = None
    """Largest number of prompt tokens. Longer prompts are left out and counted in the plan and the
    log. Null: a prompt that leaves no room for a response is an error."""
    max_tokens: PositiveInt | None = None
    """Largest number of tokens of a row with `loss: sft`: prompt, response and end of sequence
    together. Longer rows are left out and counted in the plan and the log. Null: a row that exceeds
    the model's context or a micro-batch is an error."""

    @model_validator(mode="after")
    def _makes_sense(self) -> DataConfig:
        # Exactly one of the two is set.
        if (self.train is None) == (not self.sources):
            raise ValueError(
                "needs either data.train (a file or folder) or data.sources (a mixture); set one of"
                " them"
            )
        # Labels prefix the ids of prompts, which must be unique in a run.
        labels = [source.label for source in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f"data.sources: two sources are called {twice[0]}; give each its own `name`"
            )
        if self.messages_key is not None and self.prompt_key != "prompt":
            raise ValueError(
                f"data.prompt_key: {self.prompt_key} and data.messages_key: {self.messages_key}"
                " both name the column of the prompt; keep one"
            )
        own = [name for name in self.chat_template_options if name in OWN_TEMPLATE_OPTIONS]
        if own:
            raise ValueError(
                f"data.chat_template_options: {own[0]} is set by the run itself; remove it"
            )
        return self

    @property
    def training(self) -> tuple[SourceConfig, ...]:
        """Sources of the mixture; with `train` a single source."""
        # A single file is a mixture of one, so that the code has one path for both.
        return self.sources if self.train is None else (SourceConfig(path=self.train),)

    def columns(self, file: FileConfig) -> DataColumns:
        """Return the columns of `file`. Columns that `file` does not name are those of `data`."""
        messages = file.messages_key
        # A file that names its own prompt column does not inherit the message column.
        if messages is None and file.prompt_key is None:
            messages = self.messages_key
        return DataColumns(
            prompt=file.prompt_key or self.prompt_key,
            answer=file.answer_key or self.answer_key,
            messages=messages,
            tools=file.tools_key or self.tools_key,
            system_prompt=(
                self.system_prompt if file.system_prompt is None else file.system_prompt
            ),
            fields=file.fields,
        )
