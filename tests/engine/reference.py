"""Log-probs of a response from transformers, and the small checkpoints of the engine tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.config.sampling import SamplingConfig
from tests.tiny_models import save_tiny_model

VOCABULARY = 512
"""Size of the vocabulary. It is large, so that a random model ends its responses late."""
PROMPT = [5, 17, 80, 3, 42, 9, 61, 2, 33, 75, 18, 50, 7, 94, 26, 11, 68, 39, 84, 1]
"""Prompt of the reload tests, which is longer than the models' attention windows."""


def save_checkpoint(
    directory: Path, *, seed: int, kv_heads: int = 1, family: str = "qwen3", **more: Any
) -> Path:
    """Save a tiny model with a word-level tokenizer `w0 w1 ...`, whose id 0 ends a sequence."""
    # 32 is the smallest head of vLLM's attention on a CPU.
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "heads": 2,
        "kv_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
    }
    save_tiny_model(directory, family, tied=True, seed=seed, **shape, **more)
    tokens = {f"w{i}": i for i in range(VOCABULARY)}
    special = {
        "id": 0,
        "content": "w0",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [special],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "w1"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    # Otherwise vLLM loads the model family's own tokenizer class, whose text has no spaces.
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"})
    )
    return directory


def checkpoint_weights(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


VICTIM = "model.layers.1.self_attn.k_proj.weight"
"""Tensor that tests damage or leave out; it is a part of a fused weight."""


class Reference:
    """Model of transformers with the same checkpoint, in float32."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs_over(
        self, cache: Any, inputs: Sequence[int], sampled: Sequence[int], temperature: float
    ) -> Tensor:
        """Return the log-probs of the tokens `sampled`, [len(sampled)]. The last token of `inputs`
        precedes the last sampled token, and so on backwards. `inputs` attend to `cache`, to which
        their keys and values are added."""
        logits = self._model(
            torch.tensor([list(inputs)]), past_key_values=cache, use_cache=True
        ).logits[0, -len(sampled) :]
        return torch.log_softmax(logits.float() / temperature, dim=-1).gather(
            1, torch.tensor(sampled)[:, None]
        )[:, 0]

    @torch.no_grad()
    def logprobs(
        self, prompt_ids: tuple[int, ...], response_ids: list[int], temperature: float
    ) -> Tensor:
        """Return the log-probs of the response tokens, float32 [T]."""
        logits = self.logits(prompt_ids, response_ids)
        return torch.log_softmax(logits / temperature, dim=-1).gather(
            1, torch.tensor(response_ids)[:, None]
        )[:, 0]

    @torch.no_grad()
    def logits(self, prompt_ids: tuple[int, ...], response_ids: list[int]) -> Tensor:
        """Return the logits of each response token, float32 [T, vocabulary]."""
        ids = torch.tensor([[*prompt_ids, *response_ids]])
        return self._model(ids).logits[0, len(prompt_ids) - 1 : -1].float()

    def drawn_from(
        self, prompt_ids: tuple[int, ...], response_ids: list[int], sampling: SamplingConfig
    ) -> Tensor:
        """Return the log-probs of the distributions from which an engine draws the tokens according
        to docs/sampling.md, [T, vocabulary]. Each of `bad_words` is one token, `wN`."""
        logits = self.logits(prompt_ids, response_ids)
        for place, row in enumerate(logits):
            before = torch.tensor(response_ids[:place], dtype=torch.long)
            counts = torch.bincount(before, minlength=len(row))
            seen = torch.bincount(torch.tensor(prompt_ids), minlength=len(row)) + counts > 0
            for word in sampling.bad_words:
                row[int(word[1:])] = -torch.inf
            factor = torch.where(
                row > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty
            )
            row[seen] *= factor[seen]
            row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
            row /= sampling.temperature
            probs = row.softmax(-1)
            row[probs < sampling.min_p * probs.max()] = -torch.inf
            if sampling.top_k:
                row[row < row.topk(sampling.top_k).values[-1]] = -torch.inf
            probs, order = row.softmax(-1).sort(descending=True)
            row[order[probs.cumsum(-1) - probs >= sampling.top_p]] = -torch.inf
        return logits.log_softmax(-1)
