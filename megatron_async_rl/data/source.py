"""Sources of prompts and of batches of given responses: one file, or a mixture of several.

Invariants:
- a source yields each of its prompts exactly once per epoch;
- digests identify the data of a resume. They cover what a row gives to training (text, columns,
  tokens, and the order of the rows), and neither ids nor names of files;
- the order of an epoch depends only on (seed, epoch), and the choice of the next source only on the
  number of prompts that each has yielded, so a saved position continues the same sequence. The
  position contains the digests of its prompts, and a source of other prompts refuses it;
- no source of a mixture is ever a whole prompt ahead of its share;
- a given response (`loss: sft`) is tokenized once, at the start, and ends with end-of-sequence. The
  loss of a conversation covers the assistant's messages. The log-probs of given responses are
  zeros, which the `sft` loss never reads.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_async_rl.config.durable import Digest
from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.messages import TrainingConversation, loss_weight, response_text
from megatron_async_rl.data.prompts import MixturePart, PromptSet
from megatron_async_rl.data.tokenizer import Tokenizer, encode_rows
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identity of one file's prompts. `rows`: digest of text and columns; `tokens`: digest of token
    ids, and of the tokens and masks of given responses."""

    count: int
    rows: str
    tokens: str

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], given: Sequence[TrainingConversation] = ()
    ) -> DataIdentity:
        """given: the responses to `prompts` that are trained on, if any."""
        rows, tokens = Digest(), Digest()
        for index, prompt in enumerate(prompts):
            # One line per row: text that moves to the next row must change the digest.
            row = json.dumps([prompt.text, prompt.fields], sort_keys=True, default=_plain)
            rows.add(f"{row}\n".encode())
            parts = [array("i", prompt.token_ids).tobytes()]
            if given:
                parts += [given[index].ids.tobytes(), given[index].mask.tobytes()]
            for part in parts:
                # The length comes first, for the same reason.
                tokens.add(len(part).to_bytes(8))
                tokens.add(part)
        return cls(count=len(prompts), rows=rows.text, tokens=tokens.text)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> DataIdentity | None:
        """Read the result of `as_json`; null if an earlier release saved none."""
        # Positions of earlier releases load without the comparison instead of being refused.
        if not {"count", "rows", "tokens"} <= saved.keys():
            return None
        return cls(count=saved["count"], rows=saved["rows"], tokens=saved["tokens"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, now: DataIdentity) -> str | None:
        """Return how the data `now` differs from this; null if it does not."""
        # From the plainest difference to the subtlest: each implies that the later ones differ,
        # too.
        if self.count != now.count:
            return f"{self.count} prompts there, {now.count} here"
        if self.rows != now.rows:
            return f"{self.count} prompts there and here, with other text, columns or order"
        if self.tokens != now.tokens:
            return (
                "the same rows there and here, with other tokens: the tokenizer in model.path is"
                " another one"
            )
        return None


def _plain(value: object) -> str:
    """Return text for a value that JSON does not have, such as a date."""
    return value.text if isinstance(value, TrainingConversation) else repr(value)


class Order:
    """Positions of `count` items, one permutation per epoch (or file order without `shuffle`)."""

    def __init__(self, count: int, *, seed: int, shuffle: bool) -> None:
        if count < 1:
            raise ValueError("an order needs at least one item")
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute()

    def _permute(self) -> Sequence[int]:
        if not self._shuffle:
            return range(self._count)
        # A generator of its own per epoch: a resume draws the same order without earlier epochs.
        permutation: list[int] = (
            np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()
        )
        return permutation

    def next(self) -> int:
        # The new permutation is drawn on demand, so a saved position at the end of an epoch stays
        # valid.
        if self._position == self._count:
            self._epoch += 1
            self._position = 0
            self._permutation = self._permute()
        item = self._permutation[self._position]
        self._position += 1
        return item

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "count": self._count,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises DataError if the position belongs to another order,
        which would repeat or lose items."""
        # Any of the three changes the permutation, so items would repeat or be skipped.
        for key, mine in (("count", self._count), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise _other_data(
                    "",
                    f"the saved data position was made with {key}={state[key]}, this run has"
                    f" {key}={mine}",
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._permutation = self._permute()

    @property
    def given(self) -> int:
        """Number of items that were returned so far."""
        return self._epoch * self._count + self._position


class Mixture:
    """Positions in the concatenated parts. The next position comes from the part that is furthest
    behind its share, and from the first of equal ones. `identities`: one per part, for the saved
    state."""

    def __init__(
        self,
        parts: Sequence[MixturePart],
        *,
        seed: int,
        shuffle: bool,
        identities: Sequence[DataIdentity] = (),
    ) -> None:
        self._parts = tuple(parts)
        self._identities = tuple(identities) or (None,) * len(self._parts)
        self._orders = [Order(part.count, seed=seed, shuffle=shuffle) for part in parts]
        # Exact fractions, so that rounding never decides which source is next.
        total = sum(Fraction(part.weight) for part in parts)
        self._shares = [Fraction(part.weight) / total for part in parts]
        self._offsets = [sum(part.count for part in parts[:index]) for index in range(len(parts))]

    def next(self) -> int:
        given = [order.given for order in self._orders]
        # Compared after one more prompt, so that no source is ever a whole prompt ahead of its
        # share.
        after = sum(given) + 1
        behind = [share * after - own for share, own in zip(self._shares, given, strict=True)]
        chosen = behind.index(max(behind))
        return self._offsets[chosen] + self._orders[chosen].next()

    def state(self) -> dict[str, Any]:
        """Return the position: order and digests of a single source, or those of each source by its
        label."""
        states = [
            order.state() | (identity.as_json() if identity is not None else {})
            for order, identity in zip(self._orders, self._identities, strict=True)
        ]
        # The flat form of a single source is what earlier releases saved.
        if len(states) == 1:
            return states[0]
        labels = [part.label for part in self._parts]
        return {"sources": dict(zip(labels, states, strict=True))}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises DataError if it belongs to other data."""
        # A run with one source may resume a flat position, and a mixture a named one.
        saved = state.get("sources", {self._parts[0].label: state})
        labels = [part.label for part in self._parts]
        known = [DataIdentity.read(each) for each in saved.values()]
        # A label follows its file's name. Digests recognise a source whose file was renamed.
        if len(saved) != len(labels) or (None in known and list(saved) != labels):
            raise _other_data(
                "",
                f"the saved data position is of the sources {', '.join(saved)}, this run has"
                f" {', '.join(labels)}",
            )
        # All sources are compared before any position changes.
        for label, before, now in zip(labels, known, self._identities, strict=True):
            if before is not None and now is not None and (what := before.difference(now)):
                raise _other_data(label, f"the saved data position is of other prompts: {what}")
        for order, own in zip(self._orders, saved.values(), strict=True):
            order.load_state(own)


def _other_data(label: str, what: str) -> DataError:
    fix = "resume with the same data file, run.seed and data.shuffle, or start in a new run.dir"
    return DataError(label or "the training data", None, what, fix)


def _identities(
    prompts: Sequence[Prompt],
    parts: Sequence[MixturePart],
    given: Sequence[TrainingConversation] = (),
) -> list[DataIdentity]:
    """Identity of each part."""
    ends = list(accumulate(part.count for part in parts))
    return [
        DataIdentity.of(prompts[start:end], given[start:end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]


class PromptSource:
    """Endless prompts with a position that can be saved and restored. `parts`: parts of the mixture
    in the order of `prompts`; null if the prompts are one part."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        parts: Sequence[MixturePart] | None = None,
    ) -> None:
        self._prompts = tuple(prompts)
        parts = parts or [MixturePart(count=len(prompts))]
        self.identities = _identities(self._prompts, parts)
        """Identity of each part."""
        self._order = Mixture(parts, seed=seed, shuffle=shuffle, identities=self.identities)

    def next(self) -> Prompt:
        return self._prompts[self._order.next()]

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON, for `load_state`."""
        return self._order.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._order.load_state(state)


def fitting(rows: PromptSet, tokenizer: Tokenizer, longest: int | None) -> PromptSet:
    """Return rows of given responses, tokenized. Rows of more than `longest` tokens are left out
    and counted in `too_long`. Raises DataError if a part has no row left, and those of
    SupervisedSource."""
    if longest is None:
        return rows
    # Tokenized here and stored in the field, so that SupervisedSource does not tokenize again.
    given = _given(rows.prompts, tokenizer)
    fits = [
        len(prompt.token_ids) + len(one.ids) <= longest
        for prompt, one in zip(rows.prompts, given, strict=True)
    ]
    kept = tuple(
        replace(prompt, fields={**prompt.fields, "response": one})
        for prompt, one, fit in zip(rows.prompts, given, fits, strict=True)
        if fit
    )
    parts, start = [], 0
    for part in rows.parts:
        # Counts per part keep the mixture's offsets in step with the shortened list.
        stay = sum(fits[start : start + part.count])
        if not stay:
            what = f"has no row of at most {longest} tokens: all {part.count} are longer"
            raise DataError(
                part.label or "the data", None, what, "raise data.max_tokens, or leave it out"
            )
        left_out = part.too_long + part.count - stay
        parts.append(replace(part, count=stay, too_long=left_out))
        start += part.count
    return PromptSet(prompts=kept, parts=tuple(parts))


class SupervisedSource:
    """Endless batches of `prompts_per_step` given responses, with a resumable position.

    `prompts`: each with `fields["response"]` (text, or a TrainingConversation) and optionally
    `fields["weight"]` (>= 0, the sample's loss weight); `parts` as for PromptSource. Raises
    DataError, naming the prompt, for a response that is missing, not text, or too long for
    `max_context` (prompt + response + end-of-sequence tokens).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool,
        max_context: int | None,
        parts: Sequence[MixturePart] | None = None,
    ) -> None:
        self._prompts = tuple(prompts)
        self._prompts_per_step = prompts_per_step
        self._weights = [loss_weight(prompt.id, None, prompt.fields) for prompt in self._prompts]
        # With every weight 0, no step would change the policy.
        if not any(self._weights):
            fix = "give rows to learn from a weight above 0, or leave `weight` out"
            raise DataError(self._prompts[0].id, None, "every `weight` is 0, here and below", fix)
        self._given = _given(self._prompts, tokenizer)
        # The fields of a sample are what JSON holds.
        self._prompts = tuple(
            replace(prompt, fields={**prompt.fields, "response": given.text})
            for prompt, given in zip(self._prompts, self._given, strict=True)
        )
        for prompt, given in zip(self._prompts, self._given, strict=True):
            total = len(prompt.token_ids) + len(given.ids)
            if max_context is not None and total > max_context:
                raise DataError(
                    prompt.id,
                    None,
                    f"prompt and response have {total} tokens together, and {max_context} fit the"
                    " model and a micro-batch",
                    f"leave such rows out (data.max_tokens={max_context}), or shorten this one",
                )
        parts = parts or [MixturePart(count=len(prompts))]
        self.identities = _identities(self._prompts, parts, self._given)
        """Identity of each part."""
        self._order = Mixture(parts, seed=seed, shuffle=shuffle, identities=self.identities)
        self._consumed = 0

    def next_batch(self, version: int) -> TrainBatch:
        samples = []
        for _ in range(self._prompts_per_step):
            # A group of one: given responses have no siblings to compare with.
            samples.append([self._sample(f"{self._consumed}-0", self._order.next(), version)])
            self._consumed += 1
        return TrainBatch.of(version, samples)

    def once(self, version: int) -> Iterator[TrainBatch]:
        """Yield every response once, in the order of the data, without moving the position."""
        places = range(len(self._prompts))
        for start in places[:: self._prompts_per_step]:
            # The last batch may be short: every row counts once in the held-out loss.
            chosen = places[start : start + self._prompts_per_step]
            yield TrainBatch.of(
                version, [[self._sample(f"{place}-0", place, version)] for place in chosen]
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def _sample(self, name: str, position: int, version: int) -> Sample:
        prompt, given = self._prompts[position], self._given[position]
        length = len(given.ids)
        return Sample(
            id=name,
            prompt=prompt,
            response_ids=given.ids,
            # Never read: the `sft` loss has no ratio. The columns exist because a batch has one
            # layout.
            behavior_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.full(length, version, dtype=np.int32),
            loss_mask=given.mask,
            text=given.text,
            finish_reason="given",
            reward=0.0,
            weight=self._weights[position],
        )

    def state(self) -> dict[str, Any]:
        return {"order": self._order.state(), "consumed": self._consumed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._order.load_state(state["order"])
        self._consumed = int(state["consumed"])


def _given(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[TrainingConversation]:
    """Return the conversation of each prompt; all tokens of a plain response are trained on."""
    found = [prompt.fields.get("response") for prompt in prompts]
    plain = [
        prompt
        for prompt, one in zip(prompts, found, strict=True)
        if not isinstance(one, TrainingConversation)
    ]
    texts = [response_text(prompt.id, None, prompt.fields.get("response")) for prompt in plain]
    ids = encode_rows(tokenizer, texts, lambda index: (plain[index].id, None), special_tokens=False)
    # An iterator: plain responses are taken in the order in which `plain` lists them.
    encoded = zip(texts, ids, strict=True)
    return [
        one if isinstance(one, TrainingConversation) else _alone(prompt, *next(encoded), tokenizer)
        for prompt, one in zip(prompts, found, strict=True)
    ]


def _alone(
    prompt: Prompt, text: str, ids: Sequence[int], tokenizer: Tokenizer
) -> TrainingConversation:
    tokens = np.asarray([*ids, tokenizer.eos_ids[0]], dtype=np.int32)
    return TrainingConversation(
        prompt=prompt.text,
        prompt_ids=prompt.token_ids,
        ids=tokens,
        mask=np.ones(len(tokens), dtype=np.uint8),
        text=text,
    )
