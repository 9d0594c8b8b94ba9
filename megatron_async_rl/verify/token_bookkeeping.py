"""Bookkeeping of trained tokens: each was sampled by the model, once, with its log-prob.

Every bound is 0, because the engines guarantee these properties; one violation means that the loss
covers tokens that the policy did not choose. A log-prob may exceed 0 by the rounding of a softmax.

Text and tokens: a sampled sequence may be another division of the same text than the tokenizer's,
so the share of responses that re-encode differently is reported, without a bound. The decoded
tokens must give the recorded text, which the reward read. Detokenizers differ at cut characters and
stop strings, so a share of MAX_OTHER_TEXT is permitted; a shift between rows affects all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_async_rl.config.problem import DataError, UserError, number_of
from megatron_async_rl.data.tokenizer import Tokenizer, tokenizer_of
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import SampleBlock
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, one_line, row

MAX_LOGPROB = 1e-3
MAX_OTHER_TEXT = 0.2
DECODED_FIRST, DECODED_PER_BATCH = 2000, 4
"""Responses that are decoded: all of the first, then some of each batch of rows."""

LOGPROBS, AFTER_END = "behaviour log-probs", "tokens after EOS"
SAMPLED, TEXT = "tokens not sampled", "text and tokens"
LOGPROB_BOUND = "each trained token has a finite log-prob of at most 0"
END_BOUND = "0 trained tokens directly after an end-of-sequence token"
SAMPLED_BOUND = "0 untrained response tokens without an environment"
TEXT_BOUND = f"text is the decoded tokens, except {MAX_OTHER_TEXT:.0%}"
REMEDIES = {
    LOGPROBS: "the ratio of such a token is not defined: check the engine's log-probs and any code"
    " that edits samples",
    AFTER_END: "cut responses at their first end-of-sequence token, and check stop_token_ids",
    SAMPLED: "check the loss mask: without an environment, the model sampled every response token",
    TEXT: "the reward read other text than the tokens that train: check that text, tokens and"
    " rewards of a response stay together",
}


def _tokenizer(records: RunRecords) -> tuple[Tokenizer | None, str]:
    """Return the run's tokenizer, or None and the reason."""
    try:
        return tokenizer_of(records.config.model.path, records.config.data), ""
    except (DataError, UserError, OSError) as error:
        return None, f"the tokenizer cannot be read ({one_line(error)})"


class TokenBookkeeping(RunCheck):
    """Counts trained tokens without a usable log-prob, after an end, or that nothing sampled."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._tokenizer, self._why = _tokenizer(records)
        rollout = records.config.rollout
        ends = set(self._tokenizer.eos_ids) if self._tokenizer is not None else set()
        if rollout is not None:
            ends |= set(rollout.sampling.stop_token_ids)
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._one_turn = rollout is not None and rollout.environment is None
        self._trained = 0
        self._wrong = {name: Places() for name in (LOGPROBS, AFTER_END, SAMPLED)}

    def block(self, block: SampleBlock) -> None:
        mask, logp = block.mask, block.log_probs
        self._trained += int(mask.sum())
        bad = mask & ~(np.isfinite(logp) & (logp <= MAX_LOGPROB))
        self._note(LOGPROBS, block, bad, "log-prob")
        if len(self._ends):
            ended = np.isin(block.response_ids, self._ends) & mask
            # Both trained and adjacent: a later turn has the environment's tokens in between.
            after = np.zeros(len(mask), dtype=bool)
            after[1:] = ended[:-1] & mask[1:] & (block.rows[1:] == block.rows[:-1])
            self._note(AFTER_END, block, after, "after EOS")
        if self._one_turn:
            self._note(SAMPLED, block, ~mask, "not trained")

    def _note(self, name: str, block: SampleBlock, wrong: np.ndarray, what: str) -> None:
        count = int(wrong.sum())
        if not count:
            return
        tokens = np.flatnonzero(wrong)[:20]
        texts = (
            f"sample {block.ids[block.rows[at]]}, token {at - block.starts[block.rows[at]]}: {what}"
            + (f" {block.log_probs[at]:g}" if name == LOGPROBS else "")
            for at in tokens
        )
        self._wrong[name].add_all(texts, count)

    def result(self) -> Iterable[ScorecardRow]:
        bounds = {LOGPROBS: LOGPROB_BOUND, AFTER_END: END_BOUND, SAMPLED: SAMPLED_BOUND}
        for name, bound in bounds.items():
            why = self._absence(name)
            if why:
                yield absent(name, why, bound, REMEDIES[name])
                continue
            wrong = self._wrong[name]
            value = f"{wrong.count:,} of {self._trained:,} trained tokens"
            if name == SAMPLED:
                value = number_of("untrained token", wrong.count)
            yield row(name, value, bound, not wrong, REMEDIES[name], wrong.first)

    def _absence(self, name: str) -> str:
        if not self._trained:
            return "no samples were read"
        if name == AFTER_END and not len(self._ends):
            return self._why
        if name == SAMPLED and not self._one_turn:
            return "an environment's tokens are not trained on"
        return ""


class Reencoding(RunCheck):
    """Decodes responses and compares them with the recorded text."""

    def __init__(self, records: RunRecords) -> None:
        rollout = records.config.rollout
        self._one_turn = rollout is not None and rollout.environment is None
        self._tokenizer, self._why = _tokenizer(records) if self._one_turn else (None, "")
        self._decoded = self._encoded_otherwise = 0
        self._other = Places()

    def block(self, block: SampleBlock) -> None:
        if self._tokenizer is None:
            return
        limit = max(DECODED_FIRST - self._decoded, DECODED_PER_BATCH)
        rows = range(0, len(block), max(1, len(block) // limit))
        texts = block.text_column("text")
        for at in rows:
            ids = block.response_ids[block.starts[at] : block.starts[at + 1]].tolist()
            self._decoded += 1
            decoded = self._tokenizer.decode(ids)
            if not _same(decoded, texts[at]):
                self._other.add(
                    f"sample {block.ids[at]}: tokens {decoded[:40]!r}, text {texts[at][:40]!r}"
                )
            kept = [one for one in ids if one not in self._tokenizer.eos_ids]
            again = self._tokenizer.encode(decoded, special_tokens=False)
            self._encoded_otherwise += again != kept

    def result(self) -> Iterable[ScorecardRow]:
        if not self._decoded:
            why = self._why or "no samples of a single turn"
            yield absent(TEXT, why, TEXT_BOUND, REMEDIES[TEXT])
            return
        share = self._other.count / self._decoded
        value = (
            f"{self._other.count} of {self._decoded:,} decoded responses have other text;"
            f" {self._encoded_otherwise} ({self._encoded_otherwise / self._decoded:.1%}) re-encode"
            " to other tokens"
        )
        ok = share <= MAX_OTHER_TEXT
        yield row(TEXT, value, TEXT_BOUND, ok, REMEDIES[TEXT], () if ok else self._other.first)


def _same(decoded: str, text: str) -> bool:
    one, other = (_plain(part) for part in (decoded, text))
    # vLLM removes a stop string from the text, and its tokens remain.
    return one == other or (bool(other) and one.startswith(other)) or not one


def _plain(text: str) -> str:
    # A character that a token cuts decodes to U+FFFD.
    return "".join(text.replace("\ufffd", "").split())
