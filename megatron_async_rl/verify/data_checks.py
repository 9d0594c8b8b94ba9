"""Data: the same prompts at every start and now, and each row once per epoch.

Digests cover text, columns, tokens and order of the rows, so the bound is equality. A source yields
each of its prompts exactly once per epoch, and groups are numbered in the order in which the source
yielded them: in an epoch of N rows, groups e N to (e + 1) N - 1 have N different prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_async_rl.config.problem import DataError, UserError, number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data import PromptSet, read_set, read_training
from megatron_async_rl.data.source import DataIdentity, PromptSource, fitting, supervised_source
from megatron_async_rl.data.tokenizer import Tokenizer, tokenizer_of
from megatron_async_rl.flow.starts import Start
from megatron_async_rl.rollout.environments.built_in.tools import prompt_tokenizer
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import SampleBlock
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, one_line, row

UNCHANGED, USED = "data unchanged", "rows per epoch"
UNCHANGED_BOUND = "equal digests at every start, and of the files now"
USED_BOUND = "each row at most once per epoch"
UNCHANGED_REMEDY = (
    "restore the data of the first start, or continue in a new run.dir: steps before and after the"
    " change trained on different tasks"
)
HELD_OUT_REMEDY = (
    "restore the held-out file, or give the changed set another name or path: its results before"
    " and after the change are not comparable"
)
USED_REMEDY = (
    "the source repeated prompts: check that a resume restored its position, and that ids of rows"
    " are unique"
)
KNOWN_GROUPS = 100_000
HUB = "hf:"


class DataUnchanged(RunCheck):
    """Compares the digests of the starts with each other and with the files."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._training, self._held_out = Places(), Places()

    def result(self) -> Iterable[ScorecardRow]:
        starts = [start for start in self._records.starts if start.data.get("training")]
        if not starts:
            why = "starts.jsonl has no digests of data: an earlier version made the run"
            yield absent(UNCHANGED, why, UNCHANGED_BOUND, UNCHANGED_REMEDY)
            return
        self._compare_starts(starts)
        count = sum(int(one["count"]) for one in starts[-1].data["training"])
        value, unread = f"{count:,} rows, {number_of('start', len(starts))}", ""
        try:
            if not self._compare_files(starts[-1]):
                unread = "data of the Hub is not downloaded again"
        except (DataError, UserError, OSError) as error:
            unread = f"the files cannot be read now ({one_line(error)})"
        value += f"; {unread}" * bool(unread)
        training, held_out = self._training, self._held_out
        different = training.count + held_out.count
        if different:
            value = f"{number_of('difference', different)}; {value}"
        elif unread:
            # Starts with equal digests do not show that the files are still the same.
            yield absent(UNCHANGED, value, UNCHANGED_BOUND, UNCHANGED_REMEDY)
            return
        remedies = [UNCHANGED_REMEDY] * (not held_out or bool(training))
        remedy = "; ".join(remedies + [HELD_OUT_REMEDY] * bool(held_out))
        details = [*training.first, *held_out.first]
        yield row(UNCHANGED, value, UNCHANGED_BOUND, not different, remedy, details)

    def _compare_starts(self, starts: Sequence[Start]) -> None:
        first, known = starts[0], _sets(starts[0])
        for start in starts[1:]:
            if _digests(start.data["training"]) != _digests(first.data["training"]):
                self._training.add(f"the start at step {start.step} had other training prompts")
            for key, digests in _sets(start).items():
                if known.setdefault(key, digests) != digests:
                    self._held_out.add(
                        f"the start at step {start.step} had other held-out prompts in {key[1]}"
                    )

    def _compare_files(self, last: Start) -> bool:
        """Compare the files with the digests of the last start. Return False if files are on the
        Hub, from which a check downloads nothing. Raises DataError, UserError, OSError."""
        config = self._records.config
        paths = [config.data.train, *(one.path for one in config.data.sources)]
        local = not any(path is not None and HUB in str(path) for path in paths)
        tokenizer = (
            tokenizer_of(config.model.path, config.data)
            if config.supervised
            else prompt_tokenizer(config.model.path, config)
        )
        if local:
            read = read_training(config.data, tokenizer, supervised=config.supervised)
            now = [one.as_json() for one in _identities(config, read, tokenizer)]
            if now != _digests(last.data["training"]):
                self._training.add("the training files differ from those of the last start")
        saved = _sets(last)
        for one in config.held_out_files:
            expected = saved.get((one.name, str(one.file.path)))
            # The config may name another set than the last start, which a resume permits.
            if expected is None:
                continue
            if HUB in str(one.file.path):
                local = False
                continue
            read = read_set(config.data, one.file, tokenizer, supervised=config.supervised)
            (identity,) = _identities(config, read, tokenizer)
            if identity.as_json() != expected:
                self._held_out.add(f"{one.file.path} differs from that of the last start")
        return local


def _identities(config: Config, read: PromptSet, tokenizer: Tokenizer) -> Sequence[DataIdentity]:
    """Return the identity of each part of a set, as a start records it."""
    if not config.supervised:
        return PromptSource(
            read.prompts, seed=config.run.seed, shuffle=config.data.shuffle, parts=read.parts
        ).identities
    given = fitting(read, tokenizer, config.data.max_tokens)
    return supervised_source(given, tokenizer, config).identities


def _sets(start: Start) -> dict[tuple[str, str], Any]:
    """Return the digests of the held-out sets of a start by name and path. A set of another name or
    path is another set, as for a resume (plan/resume.py)."""
    sets: Mapping[str, Any] = start.data.get("held_out") or {}
    return {(name, str(one.get("path"))): _digests(one) for name, one in sets.items()}


def _digests(data: Any) -> Any:
    """Return the digests without the paths of the files, which may move."""
    if isinstance(data, Mapping):
        return {key: _digests(value) for key, value in data.items() if key != "path"}
    return [_digests(one) for one in data] if isinstance(data, list | tuple) else data


class EpochUse(RunCheck):
    """Checks that no prompt occurs twice in an epoch."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        training = records.starts[-1].data.get("training", []) if records.starts else []
        self._count = int(training[0]["count"]) if len(training) == 1 else 0
        self._parts = len(training)
        self._groups: dict[int, int] = {}
        """Digest of the prompt of each of the newest groups."""
        self._epochs: dict[int, set[int]] = {}
        self._seen = 0
        self._newest = -1
        self._wrong = Places()

    def block(self, block: SampleBlock) -> None:
        if not self._count:
            return
        groups, prompts = block.numbers("group").tolist(), block.text_column("prompt_id")
        for group, prompt in zip(groups, prompts, strict=True):
            digest = hash(prompt)
            known = self._groups.get(group)
            if known is not None:
                if known != digest:
                    self._wrong.add(f"group {group} has samples of two prompts, such as {prompt}")
                continue
            self._groups[group] = digest
            if len(self._groups) > KNOWN_GROUPS:
                del self._groups[next(iter(self._groups))]
            self._seen += 1
            self._newest = max(self._newest, group)
            epoch = group // self._count
            used = self._epochs.setdefault(epoch, set())
            if digest in used:
                what = f"row {prompt} occurs twice in epoch {epoch}, the second time in"
                self._wrong.add(f"{what} group {group}")
            used.add(digest)
            # Groups in flight belong to two epochs at most.
            for old in [one for one in self._epochs if one < epoch - 1]:
                del self._epochs[old]

    def result(self) -> Iterable[ScorecardRow]:
        if not self._seen:
            why = "no samples were read"
            if not self._records.config.has_engines:
                why = "a supervised run logs no samples"
            elif self._parts > 1:
                why = f"the data is a mixture of {self._parts} sources, whose epochs differ"
            elif not self._count:
                why = "starts.jsonl has no number of rows"
            yield absent(USED, why, USED_BOUND, USED_REMEDY)
            return
        epochs = (self._newest + 1) / self._count
        value = f"{self._seen:,} groups of {self._count:,} rows, {epochs:.2g} epochs"
        if self._wrong:
            value = f"{self._wrong.count} repeated; {value}"
        yield row(USED, value, USED_BOUND, not self._wrong, USED_REMEDY, self._wrong.first)
