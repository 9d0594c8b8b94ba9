"""Sources of prompts and of batches of given responses, from one file or a mixture of several.

Invariants:
- a source yields each of its prompts exactly once per epoch;
- digests identify the data of a resume. They cover everything that training reads (text, columns,
  tokens, and the order of the rows), but neither ids nor file names;
- the order of an epoch depends only on (seed, epoch), and the choice of the next source only on the
  number of prompts that each source has yielded, so a saved position continues the same sequence.
  The position contains the digests of its prompts, and a source with other prompts refuses it;
- no source of a mixture is ever a whole prompt ahead of its share;
- a given response (`loss: sft`) is tokenized once, at the start, and ends with an end-of-sequence
  token. The loss of a conversation covers the assistant's messages. The log-probs of given
  responses are zeros, which the `sft` loss never reads.
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
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.messages import TrainingConversation, loss_weight, response_text
from megatron_async_rl.data.prompts import MixturePart, PromptSet
from megatron_async_rl.data.tokenizer import Tokenizer, encode_rows
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identity of the prompts of one file. `rows`: digest of text and columns. `tokens`: digest of
    token ids, and of the tokens and masks of given responses."""

    count: int
    rows: str
    tokens: str

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], given: Sequence[TrainingConversation] = ()
    ) -> DataIdentity:
        """Return the identity of `prompts`. `given`: their given responses; empty if there are
        none."""
        rows, tokens = Digest(), Digest()
        for index, prompt in enumerate(prompts):
            # One line per row, so that text which moves to the next row changes the digest.
            row = json.dumps([prompt.text, prompt.fields], sort_keys=True, default=_plain)
            rows.add(f"{row}\n".encode())
            parts = [array("i", prompt.token_ids).tobytes()]
            if given:
                parts += [given[index].ids.tobytes(), given[index].mask.tobytes()]
            for part in parts:
                # The length comes first, so that the digest depends on the bounds of each part.
                tokens.add(len(part).to_bytes(8))
                tokens.add(part)
        return cls(count=len(prompts), rows=rows.text, tokens=tokens.text)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> DataIdentity | None:
        """Return the identity that `as_json` wrote; None if an earlier release wrote none."""
        # Positions of earlier releases load without a comparison of the data.
        if not {"count", "rows", "tokens"} <= saved.keys():
            return None
        return cls(count=saved["count"], rows=saved["rows"], tokens=saved["tokens"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, now: DataIdentity) -> str | None:
        """Return a description of the difference to the data `now`; None if they are equal."""
        # Report the simplest difference: each difference implies the later ones.
        if self.count != now.count:
            return f"{self.count} prompts there, {now.count} here"
        if self.rows != now.rows:
            return f"{self.count} prompts there and here, with other text, columns or order"
        if self.tokens != now.tokens:
            return (
                "the same rows there and here, with other tokens: the tokenizer in model.path has"
                " changed"
            )
        return None


def _plain(value: object) -> str:
    """Return text for a value that JSON cannot encode, such as a TrainingConversation."""
    return value.text if isinstance(value, TrainingConversation) else repr(value)


class Order:
    """Endless positions of `count` items, in one permutation per epoch, or in file order without
    `shuffle`."""

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
        # Seed a new generator per epoch, so that a resume draws an epoch without earlier ones.
        permutation: list[int] = (
            np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()
        )
        return permutation

    def next(self) -> int:
        # Draw the new permutation on demand, so that a position saved at the end of an epoch stays
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
        """Continue at a saved position. Raises DataError if the position belongs to another
        order."""
        # Each of the three changes the order, so items would be repeated or skipped.
        for key, own in (("count", self._count), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != own:
                raise _other_data(
                    "",
                    f"the saved data position has {key}={state[key]}, and this run has {key}={own}",
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._permutation = self._permute()

    @property
    def given(self) -> int:
        """Number of items that have been returned."""
        return self._epoch * self._count + self._position


class Mixture:
    """Endless positions in the concatenated parts. The next position comes from the part that is
    furthest behind its share, the first of several equal ones. `identities`: one per part, for the
    saved state; empty if the state has none."""

    def __init__(
        self,
        parts: Sequence[MixturePart],
        *,
        seed: int,
        shuffle: bool,
        identities: Sequence[DataIdentity] = (),
    ) -> None:
        self._parts = tuple(parts)
        if len({part.label for part in parts}) < len(self._parts):
            # The saved position has one entry per label.
            raise ValueError(f"labels of a mixture differ, not {[part.label for part in parts]}")
        self._identities = tuple(identities) or (None,) * len(self._parts)
        self._orders = [Order(part.count, seed=seed, shuffle=shuffle) for part in parts]
        # Exact fractions, so that rounding does not affect the choice of the next part.
        total = sum(Fraction(part.weight) for part in parts)
        self._shares = [Fraction(part.weight) / total for part in parts]
        self._offsets = [sum(part.count for part in parts[:index]) for index in range(len(parts))]

    def next(self) -> int:
        given = [order.given for order in self._orders]
        # Compare the shares after this prompt, so that no part is ever a whole prompt ahead of its
        # share.
        after = sum(given) + 1
        behind = [share * after - own for share, own in zip(self._shares, given, strict=True)]
        chosen = behind.index(max(behind))
        return self._offsets[chosen] + self._orders[chosen].next()

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON: order and digests of a single source, or of each
        source by its label."""
        states = [
            order.state() | (identity.as_json() if identity is not None else {})
            for order, identity in zip(self._orders, self._identities, strict=True)
        ]
        # Earlier releases saved the flat form of a single source, which stays the format.
        if len(states) == 1:
            return states[0]
        labels = [part.label for part in self._parts]
        return {"sources": dict(zip(labels, states, strict=True))}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises DataError if the position belongs to other data."""
        # The position of a single source is flat; that of a mixture is by label.
        saved = state.get("sources", {self._parts[0].label: state})
        labels = [part.label for part in self._parts]
        known = [DataIdentity.read(each) for each in saved.values()]
        # A label may be the name of a file, which may have been renamed, so compare digests if
        # there are any.
        if len(saved) != len(labels) or (None in known and list(saved) != labels):
            raise _other_data(
                "",
                f"the saved data position has the sources {', '.join(saved)}, and this run has"
                f" {', '.join(labels)}",
            )
        # Compare all sources before any position changes.
        for label, before, now in zip(labels, known, self._identities, strict=True):
            if before is not None and now is not None and (what := before.difference(now)):
                raise _other_data(
                    label, f"the saved data position belongs to other prompts: {what}"
                )
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
    """Return the identity of each part."""
    ends = list(accumulate(part.count for part in parts))
    return [
        DataIdentity.of(prompts[start:end], given[start:end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]


class PromptSource:
    """Endless prompts with a position that can be saved and restored. `parts`: parts of the mixture
    in the order of `prompts`; None if the prompts are a single part."""

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
    """Return the rows of at most `longest` tokens, with tokenized responses. Longer rows are
    counted in `too_long`; with None all rows are returned unchanged. Raises DataError if no row of
    a part remains, and for a response that cannot be tokenized."""
    if longest is None:
        return rows
    # Store the tokens in the field, so that SupervisedSource does not tokenize again.
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
        # Count per part, so that the mixture's offsets match the shortened list.
        remaining = sum(fits[start : start + part.count])
        if not remaining:
            what = f"has no row of at most {longest} tokens: all {part.count} are longer"
            raise DataError(
                part.label or "the data", None, what, "raise data.max_tokens, or remove it"
            )
        left_out = part.too_long + part.count - remaining
        parts.append(replace(part, count=remaining, too_long=left_out))
        start += part.count
    return PromptSet(prompts=kept, parts=tuple(parts))


class SupervisedSource:
    """Endless batches of `prompts_per_step` given responses, with a position that can be saved and
    restored.

    `prompts`: each with `fields["response"]` (text, or a TrainingConversation) and optionally
    `fields["weight"]` (>= 0, the sample's loss weight). `parts`: as for PromptSource. Raises
    DataError with the prompt's id for a response that is missing, not text, or longer than
    `max_context` tokens (prompt, response and end-of-sequence together).
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
        # If every weight is 0, no step changes the policy.
        if not any(self._weights):
            fix = "set the `weight` of rows to learn from above 0, or remove `weight`"
            raise DataError(self._prompts[0].id, None, "every `weight` is 0, here and below", fix)
        self._given = _given(self._prompts, tokenizer)
        # Fields of a sample must be JSON, so replace a TrainingConversation by its text.
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
                    f"prompt and response have {total} tokens together, and only {max_context} fit"
                    " the model and a micro-batch",
                    f"leave such rows out (data.max_tokens={max_context}), or shorten this one",
                )
        parts = parts or [MixturePart(count=len(prompts))]
        self.identities = _identities(self._prompts, parts, self._given)
        """Identity of each part."""
        self._order = Mixture(parts, seed=seed, shuffle=shuffle, identities=self.identities)
        self._consumed = 0

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row: prompt, response and end-of-sequence."""
        return [
            len(prompt.token_ids) + len(given.ids)
            for prompt, given in zip(self._prompts, self._given, strict=True)
        ]

    def next_batch(self, version: int) -> TrainBatch:
        samples = []
        for _ in range(self._prompts_per_step):
            # Each response is a group of its own: given responses are not compared.
            samples.append([self._sample(f"{self._consumed}-0", self._order.next(), version)])
            self._consumed += 1
        return TrainBatch.of(version, samples)

    def once(self, version: int) -> Iterator[TrainBatch]:
        """Yield every response once, in the order of the data, without a change of the position."""
        places = range(len(self._prompts))
        for start in places[:: self._prompts_per_step]:
            # The last batch may be short, because every row counts once in the held-out loss.
            chosen = places[start : start + self._prompts_per_step]
            yield TrainBatch.of(
                version, [[self._sample(f"{place}-0", place, version)] for place in chosen]
            )

    def _sample(self, name: str, position: int, version: int) -> Sample:
        prompt, given = self._prompts[position], self._given[position]
        length = len(given.ids)
        return Sample(
            id=name,
            prompt=prompt,
            response_ids=given.ids,
            # The `sft` loss has no ratio, so it never reads these; every batch has the columns.
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


def supervised_source(given: PromptSet, tokenizer: Tokenizer, config: Config) -> SupervisedSource:
    """Return the source of a supervised run for rows that `fitting` returned."""
    return SupervisedSource(
        given.prompts,
        tokenizer,
        prompts_per_step=config.flow.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        max_context=None,
        parts=given.parts,
    )


def _given(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[TrainingConversation]:
    """Return the conversation of each prompt; all tokens of a plain response are trained on."""
    responses = [prompt.fields.get("response") for prompt in prompts]
    plain = [
        prompt
        for prompt, one in zip(prompts, responses, strict=True)
        if not isinstance(one, TrainingConversation)
    ]
    texts = [response_text(prompt.id, None, prompt.fields.get("response")) for prompt in plain]
    ids = encode_rows(tokenizer, texts, lambda index: (plain[index].id, None), special_tokens=False)
    # An iterator, which yields plain responses in the order of `plain`.
    encoded = zip(texts, ids, strict=True)
    return [
        one
        if isinstance(one, TrainingConversation)
        else _of_text(prompt, *next(encoded), tokenizer)
        for prompt, one in zip(prompts, responses, strict=True)
    ]


def _of_text(
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
