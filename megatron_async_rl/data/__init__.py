"""Where prompts come from: tokenizers, JSONL files, and sources whose position can be saved and
restored."""

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.prompts import PromptSource, read_prompts
from megatron_async_rl.data.supervised import SupervisedSource
from megatron_async_rl.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "PromptSource",
    "SupervisedSource",
    "Tokenizer",
    "load_tokenizer",
    "read_prompts",
]
