"""Training and held-out prompts: tokenizers, data files, and prompt sources whose position can be
saved and restored."""

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.prompts import (
    PromptSet,
    log_too_long,
    read_prompts,
    read_set,
    read_training,
)
from megatron_async_rl.data.source import (
    DataIdentity,
    PromptSource,
    SupervisedSource,
    fitting,
    supervised_source,
)
from megatron_async_rl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

__all__ = [
    "DataError",
    "DataIdentity",
    "PromptSet",
    "PromptSource",
    "SupervisedSource",
    "Tokenizer",
    "fitting",
    "load_tokenizer",
    "log_too_long",
    "read_prompts",
    "read_set",
    "read_training",
    "supervised_source",
    "tokenizer_of",
]
