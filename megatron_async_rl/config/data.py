"""The schema of data: files and their columns, mixtures, chat options, filters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_async_rl.config.settings_model import OnlyJson, Strict, TextOrFile

DataColumn = Annotated[str, Field(min_length=1)]
TOOLS_COLUMN = "tools"

# A user's value for these would change what the loss is computed on.
OWN_TEMPLATE_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "messages",
    "conversation",
    "chat_template",
)
"""Arguments of a rendering that this project sets itself."""


@dataclass(frozen=True, kw_only=True)
class DataColumns:
    """The columns of one file. `messages`: of chat messages; null where `prompt` is read."""

    prompt: str = "prompt"
    answer: str | None = None
    messages: str | None = None
    tools: str | None = TOOLS_COLUMN
    system_prompt: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further ones, with the value that each row has in them."""


class FileConfig(Strict):
    """One file or folder of data, and its columns where they are not those of `data`."""

    path: Path
    """File or folder, as in data.train."""
    prompt_key: DataColumn | None = None
    """Null: data.prompt_key, unless messages_key is given here."""
    answer_key: DataColumn | None = None
    """Null: data.answer_key."""
    messages_key: DataColumn | None = None
    """Null: data.messages_key, unless prompt_key is given here."""
    tools_key: DataColumn | None = None
    """Null: data.tools_key."""
    system_prompt: str | None = None
    """Null: data.system_prompt."""
    # They become fields of samples, which the log writes as JSON.
    fields: Annotated[Mapping[str, Any], OnlyJson] = {}
    """Columns that each of its rows is given, such as `{kind: math}`: for rewards, and for the
    `where` of a part of the reward."""

    @model_validator(mode="after")
    def _one_column(self) -> FileConfig:
        if self.prompt_key is not None and self.messages_key is not None:
            raise ValueError(
                f"prompt_key: {self.prompt_key} and messages_key: {self.messages_key} both name"
                " the column of the prompt; keep one"
            )
        return self


class SourceConfig(FileConfig):
    """One source of a mixture."""

    name: DataColumn | None = None
    """Prefix of the ids of its prompts; null: the file's or folder's name."""
    weight: PositiveFloat = 1.0
    """Relative share of the prompts: weight / sum of weights. The next prompt always comes from
    the source that is furthest behind its share."""

    @property
    def label(self) -> str:
        return self.name or self.path.stem


class DataConfig(Strict):
    """Training and held-out prompts."""

    train: Path | None = None
    """JSONL, JSON (a list), Parquet or CSV, by its ending; a folder or a pattern such as
    `data/train-*.parquet` of them; `hf://datasets/OWNER/NAME[@REVISION]/PATH`, or a whole data
    set's split, `hf://datasets/OWNER/NAME[@REVISION][#SPLIT]`, for training `train` where none is
    named. Each row has a prompt and whatever the reward reads; with `loss: sft` a response and
    optionally a `weight`. Null: `sources`."""
    sources: tuple[SourceConfig, ...] = ()
    """A mixture that replaces `train`."""
    eval: Path | None = None
    """Held-out prompts, as `train`, with `loss: sft` and their responses; several sets are
    `eval.sets`."""
    shuffle: bool = True
    """Shuffle each source in every epoch, by the seed."""
    prompt_key: DataColumn = "prompt"
    """Column of the prompt: text, or a list of chat messages, which may be JSON text. This key and
    the three below may name a value inside a column: `extra_info.question`."""
    answer_key: DataColumn | None = None
    """Column that becomes `answer`, which rewards read; with `loss: sft` it becomes `response`.
    Null: columns keep their names."""
    messages_key: DataColumn | None = None
    """Column of chat messages, in place of prompt_key. With `loss: sft` they are whole
    conversations: the loss is on the assistant's messages, except for those with `train: false` or
    `weight: 0`."""
    tools_key: DataColumn | None = TOOLS_COLUMN
    """Column of JSON schemas of the functions that a row's chat messages may call, a list or its
    JSON, which the chat template is given. Rows may lack the column `tools`, but not one of another
    name. Null: none is read."""
    system_prompt: str | None = None
    """System message that is prepended to messages without one."""
    as_chat: bool = False
    """True makes a text prompt one message of the user, which the chat template renders; false
    gives the model the text unchanged. A response to a chat (`loss: sft`) ends with the
    template's end of a turn, and one to plain text with the tokenizer's end of sequence."""
    chat_template: TextOrFile | None = None
    """Chat template: a Jinja file or the template itself; null: the model's."""
    chat_template_options: Mapping[str, Any] = {}
    """Variables of the template, such as `enable_thinking: false`."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out, and counted in the plan and the log; null: a prompt that leaves
    no room for a response is an error."""
    max_tokens: PositiveInt | None = None
    """Longest row with `loss: sft`, in tokens of prompt, response and end-of-sequence together.
    Longer rows are left out and counted in the plan and the log. Null: a row that exceeds the
    model's context or a micro-batch is an error."""

    @model_validator(mode="after")
    def _makes_sense(self) -> DataConfig:
        # Exactly one of the two.
        if (self.train is None) == (not self.sources):
            raise ValueError(
                "data.train (one file or folder) or data.sources (a mixture): give one of them"
            )
        # Labels prefix the ids of prompts, which must be unique in a run.
        labels = [source.label for source in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f"data.sources: two are called {twice[0]}; give each a `name` of its own"
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
        """The mixture; `train` alone is a mixture of one."""
        # One path through the code for one file and for a mixture.
        return self.sources if self.train is None else (SourceConfig(path=self.train),)

    def columns(self, file: FileConfig) -> DataColumns:
        """Columns of `file`; those it does not name are the ones of `data`."""
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
