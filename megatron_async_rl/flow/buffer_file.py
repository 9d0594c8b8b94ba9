"""A buffer as bytes, to be a file of a checkpoint: NumPy's npz, read back without running code.

    about                       UTF-8 JSON: each prompt once, the groups, and all of a sample that
                                is not an array
    response_ids, versions ...  one array per column, of all samples and partial responses, one
                                after the other in the order of `about`

Invariant: what `read` returns of what `written` made is the same, arrays to dtype and value,
numbers to the last bit.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.buffer import Buffer, GroupState
from megatron_async_rl.samples.types import PartialResponse, Prompt, Request, Sample

NAME = "buffer.npz"

COLUMNS = {
    "response_ids": np.int32,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "loss_mask": np.uint8,
    "step_rewards": np.float32,
}
OF_A_PARTIAL = tuple(field.name for field in fields(PartialResponse))
PLAIN = tuple(
    field.name for field in fields(Sample) if field.name not in COLUMNS and field.name != "prompt"
)


class BufferBroken(UserError):
    """The file is damaged, or not a buffer."""


def written(buffer: Buffer) -> bytes:
    """Raises TypeError for a sample whose arrays have other dtypes than samples/types.py says."""
    writer = _Writer()
    about = {
        "groups": [writer.group(group) for group in buffer.groups],
        "stored": [
            {
                "prompt": writer.prompt(prompt),
                "samples": [writer.sample(sample) for sample in samples],
            }
            for prompt, samples in buffer.stored
        ],
        "equal": buffer.equal,
        "first_versions": buffer.first_versions,
        "prompts": [prompt_fields(prompt) for prompt in writer.prompts],
    }
    return writer.file(about)


def read(content: bytes) -> Buffer:
    """Raises BufferBroken."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            reader = _Reader(
                {name: file[name] for name in COLUMNS}, json.loads(file["about"].tobytes())
            )
        about = reader.about
        return Buffer(
            groups=tuple(map(reader.group, about["groups"])),
            stored=tuple(
                (reader.prompts[one["prompt"]], tuple(map(reader.sample, one["samples"])))
                for one in about["stored"]
            ),
            equal=tuple(about["equal"]),
            first_versions=tuple(about["first_versions"]),
        )
    except (
        ValueError,
        LookupError,
        TypeError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
    ) as error:
        raise BufferBroken.of(
            "run.dir",
            f"{NAME} of the checkpoint cannot be read ({type(error).__name__}: {error})",
            "remove the file, and what it held is sampled again",
        ) from error


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Plain JSON."""
    return {
        "id": prompt.id,
        "text": prompt.text,
        "token_ids": list(prompt.token_ids),
        "fields": dict(prompt.fields),
    }


def prompt_of(given: Mapping[str, Any]) -> Prompt:
    """The prompt that `prompt_fields` was given."""
    return Prompt(
        id=given["id"],
        text=given["text"],
        token_ids=tuple(given["token_ids"]),
        fields=given["fields"],
    )


class _Writer:
    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self._places: dict[str, list[int]] = {}
        self._columns: dict[str, list[NDArray[Any]]] = {
            name: [np.empty(0, dtype)] for name, dtype in COLUMNS.items()
        }

    def prompt(self, prompt: Prompt) -> int:
        """Its place in `prompts`. Prompts of one id may differ, where the data changed before a
        resume."""
        places = self._places.setdefault(prompt.id, [])
        for place in places:
            if self.prompts[place] == prompt:
                return place
        places.append(len(self.prompts))
        self.prompts.append(prompt)
        return places[-1]

    def group(self, group: GroupState) -> dict[str, Any]:
        return {
            "index": group.index,
            "prompt": self.prompt(group.prompt),
            "version": group.version,
            "deadline": group.deadline,
            "finished": group.finished,
            "samples": [self.sample(sample) for sample in group.samples],
            "open": [
                {"k": one.k, "prefix": self.prefix(one.prefix)} for one in group.open.values()
            ],
        }

    def sample(self, sample: Sample) -> dict[str, Any]:
        own = [name for name in COLUMNS if getattr(sample, name) is not None]
        for name in own:
            self._columns[name].append(getattr(sample, name))
        plain = {name: getattr(sample, name) for name in PLAIN}
        return {
            **plain,
            "prompt": self.prompt(sample.prompt),
            "length": sample.length,
            "columns": own,
        }

    def prefix(self, prefix: PartialResponse | None) -> int:
        """Its length; 0: none."""
        if prefix is None:
            return 0
        for name in OF_A_PARTIAL:
            self._columns[name].append(getattr(prefix, name))
        return len(prefix.response_ids)

    def file(self, about: Mapping[str, Any]) -> bytes:
        text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        columns: dict[str, Any] = {
            name: np.concatenate(parts, dtype=COLUMNS[name], casting="no")
            for name, parts in self._columns.items()
        }
        file = io.BytesIO()
        np.savez(file, about=text, **columns)
        return file.getvalue()


class _Reader:
    """Reads in the order in which `_Writer` wrote: each array goes on where the one before it in
    its column ended."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
        self.about = about
        self.prompts = [prompt_of(one) for one in about["prompts"]]
        self._columns = columns
        self._read = dict.fromkeys(columns, 0)

    def group(self, one: Mapping[str, Any]) -> GroupState:
        prompt = self.prompts[one["prompt"]]
        samples = [self.sample(sample) for sample in one["samples"]]
        asked = [
            Request(group=one["index"], k=r["k"], prompt=prompt, prefix=self.prefix(r["prefix"]))
            for r in one["open"]
        ]
        return GroupState(
            index=one["index"],
            prompt=prompt,
            version=one["version"],
            deadline=one["deadline"],
            finished=one["finished"],
            samples=samples,
            open={request.id: request for request in asked},
        )

    def sample(self, one: Mapping[str, Any]) -> Sample:
        given: dict[str, Any] = {name: one[name] for name in PLAIN}
        given |= {name: self._next(name, one["length"]) for name in one["columns"]}
        return Sample(prompt=self.prompts[one["prompt"]], **given)

    def prefix(self, length: int) -> PartialResponse | None:
        return (
            PartialResponse(**{name: self._next(name, length) for name in OF_A_PARTIAL})
            if length
            else None
        )

    def _next(self, name: str, length: int) -> NDArray[Any]:
        """A copy, so that what waits longer than the rest does not keep all of it in memory."""
        start = self._read[name]
        self._read[name] = end = start + length
        return self._columns[name][start:end].copy()
