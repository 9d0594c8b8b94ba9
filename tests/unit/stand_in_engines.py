"""Engines that answer from this process, for tests of who is asked for what and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.shared_memory import BucketReader, BucketRef


@dataclass
class Bucket:
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor | None, ...]


def buckets(count: int, value: float = 0.0) -> Iterator[Bucket]:
    for i in range(count):
        yield Bucket((f"w{i}", f"v{i}"), (torch.full((4,), i + value), torch.arange(3 + i)))


class Diary:
    """What all engines were asked for, in order, as `engine-0 pause`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def note(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait_for(self, line: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: line in self.lines, timeout=10), self.lines

    def of(self, engine: str) -> list[str]:
        return [line.removeprefix(f"{engine} ") for line in self.lines if line.startswith(f"{engine} ")]


class LoopEngine:
    """Answers at once. `hang` names a call that is not answered until `answer()`, `fail` one that fails; `spoil` changes the
    digests it reports, `meddle` the bucket's file before it is loaded."""

    def __init__(
        self,
        name: str,
        diary: Diary,
        *,
        hang: str = "",
        fail: str = "",
        spoil: Callable[[dict[str, str]], Any] | None = None,
        meddle: Callable[[BucketRef], Any] | None = None,
    ) -> None:
        self.name = name
        self.loaded: dict[str, torch.Tensor] = {}
        self.files: list[str] = []
        self._diary = diary
        self._hang = hang
        self._fail = fail
        self._spoil = spoil
        self._meddle = meddle
        self._reader = BucketReader()
        self._digests: dict[str, str] = {}
        self._held: list[tuple[Future[Any], Any]] = []

    def update(self, buckets: Sequence[BucketRef], version: int, digests: Mapping[str, str]) -> Future[dict[str, str]]:
        """Stands still at the first part that hangs or fails."""
        answer: Future[Any] = self.pause()
        for index, bucket in enumerate(buckets):
            if not answer.done() or answer.exception():
                return answer
            answer = self.load_bucket(bucket, version, index == 0, index == len(buckets) - 1)
        if not answer.done() or answer.exception() or answer.result() != digests:
            return answer
        return self._answer("resume", answer.result())

    def pause(self) -> Future[None]:
        return self._answer("pause", None)

    def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]:
        if self._meddle is not None:
            self._meddle(bucket)
        if first:
            self._digests, self.files = {}, []
        self.files.append(bucket.path)
        for name, tensor in self._reader.read(bucket):
            self.loaded[name] = tensor.clone()
            self._digests[name] = tensor_digest(tensor)
        if last and self._spoil is not None:
            self._spoil(self._digests)
        return self._answer(f"load {version}{' first' if first else ''}{' last' if last else ''}", dict(self._digests))

    def resume(self) -> Future[None]:
        return self._answer("resume", None)

    def sleep(self) -> Future[None]:
        return self._answer("sleep", None)

    def wake(self, tags: Sequence[str] | None) -> Future[None]:
        return self._answer(f"wake {'all' if tags is None else ' '.join(tags)}", None)

    def answer(self) -> None:
        self._hang = ""
        for future, value in self._held:
            future.set_result(value)

    def _answer(self, call: str, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        kind = call.split()[0]
        if kind == self._fail:
            future.set_exception(RuntimeError("out of memory"))
        elif kind == self._hang:
            self._held.append((future, value))
        else:
            future.set_result(value)
        self._diary.note(f"{self.name} {call}")
        return future
