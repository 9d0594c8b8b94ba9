"""How likely the learner is to have written a rewrite itself: the frozen learner, loaded by each
process that calls the reward, reads it as an answer to the question."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_async_rl.samples import Prompt


def alignment(
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    *,
    finish_reason: Sequence[str],
    learner: str,
    floor: float = 10.0,
) -> list[float]:
    """max(0, 1 + l / floor), l the learner's mean log-prob per token of the response after the
    row's `question`, in nats: 1 for what it is sure of, 0 from -floor on. `learner`: a Hugging Face
    directory."""
    if not Path(learner, "config.json").is_file():
        raise FileNotFoundError(f"learner: {learner} holds no model; train base.yaml first")
    questions = [prompt.fields["question"] for prompt in prompts]
    ended = [reason == "stop" for reason in finish_reason]
    found = mean_logprobs(learner, questions, responses, ended)
    return [max(0.0, 1.0 + one / floor) for one in found]


def mean_logprobs(
    learner: str, questions: Sequence[str], responses: Sequence[str], ended: Sequence[bool]
) -> list[float]:
    """Nats per token of each response, its end included where it `ended`; -inf for no token."""
    tokenizer, model = _load(learner)
    asked = [tokenizer(question).input_ids for question in questions]
    given = [
        tokenizer(response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] * end
        for response, end in zip(responses, ended, strict=True)
    ]
    rows = [[*question, *response] for question, response in zip(asked, given, strict=True)]
    width = max(map(len, rows))
    # Padding stands to the right, where causal attention does not see it.
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    with torch.inference_mode():
        logits = model(input_ids=tokens).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    found = []
    for row, question, response in zip(logprobs, asked, given, strict=True):
        own = row[len(question) - 1 : len(question) - 1 + len(response)]
        found.append(float(own.mean()) if response else float("-inf"))
    return found


@cache
def _load(learner: str) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(learner, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(learner), model.eval()
