"""Everything that can be known to be wrong before a process starts: config, model, data, reward, the checkpoint to go on from.

`mar plan` reads the first prompts of each file, `mar train` all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from megatron_async_rl.config.machine import Machine, this_machine
from megatron_async_rl.config.model_files import ModelShape, read_model
from megatron_async_rl.config.plan import Lengths, Plan, context_limit, make_plan
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data import DataError, SupervisedSource, Tokenizer, load_tokenizer, read_prompts
from megatron_async_rl.flow import buffer_file
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken, about, newest, read_file, require_whole
from megatron_async_rl.rollout.rewards import RewardError, load_reward, required_fields
from megatron_async_rl.samples import Prompt

PROMPTS_IN_A_PLAN = 2000


def check(config: Config, *, all_data: bool, machine: Machine | None = None) -> Plan:
    """The plan of `config` on `machine` (default: this one), with every problem that was found, all at once."""
    shape, problems = read_model(config.model.path)
    tokenizer: Tokenizer | None = None
    lengths: Lengths | None = None
    if shape is not None and not problems:
        try:
            tokenizer = load_tokenizer(config.model.path)
        except DataError as error:
            problems.append(_of_data("model.path", error))
    if shape is not None and tokenizer is not None:
        problems += _vocabulary(tokenizer, shape)
    limit = None if all_data else PROMPTS_IN_A_PLAN
    read: dict[str, Sequence[Prompt]] = {}
    if tokenizer is None or shape is None:
        problems += [
            Problem(key=key, what=f"{path} does not exist", fix="check the path; relative ones start at the config file's folder")
            for key, path in _files(config)
            if not path.is_file()
        ]
    else:
        for key, path in _files(config):
            try:
                prompts = _read(config, shape, tokenizer, path, limit)
            except DataError as error:
                problems.append(_of_data(key, error))
            else:
                lengths = _longer(lengths, prompts)
                read[key] = prompts
    problems += _reward(config) + _run_directory(config) + _checkpoint(config, shape)
    plan = make_plan(config, machine or this_machine(), shape, lengths=lengths, problems=problems)
    return replace(plan, warnings=(*plan.warnings, *_not_held_out(read.get("data.train", ()), read.get("data.eval", ()))))


def _files(config: Config) -> list[tuple[str, Path]]:
    files = [("data.train", config.data.train)]
    if config.data.eval is not None:
        files.append(("data.eval", config.data.eval))
    return files


def _read(config: Config, shape: ModelShape, tokenizer: Tokenizer, path: Path, limit: int | None) -> Sequence[Prompt]:
    """Raises DataError at the first line that cannot be used."""
    if config.rollout is None:
        prompts = read_prompts(path, tokenizer, limit=limit, required=("prompt", "response"))
        most = min(shape.context, config.policy.tokens_per_micro_batch)
        SupervisedSource(prompts, tokenizer, prompts_per_step=1, seed=0, shuffle=False, max_context=most)
        return prompts
    room = context_limit(config, shape) - config.rollout.sampling.max_tokens
    required = ("prompt", *required_fields(config.rollout.reward.name))
    return read_prompts(path, tokenizer, max_prompt_tokens=room if room > 0 else None, limit=limit, required=required)


def _not_held_out(trained: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[str]:
    known = {prompt.token_ids for prompt in trained}
    both = [prompt for prompt in held_out if prompt.token_ids in known]
    if not both:
        return []
    return [f"{len(both)} of {len(held_out)} prompts of data.eval are in data.train too, such as {both[0].text[:60]!r}"]


def _longer(known: Lengths | None, prompts: Sequence[Prompt]) -> Lengths:
    """Of both files together; the mean is the first file's, which is the one trained on."""
    counts = [len(prompt.token_ids) for prompt in prompts]
    if known is not None:
        return replace(known, longest=max(known.longest, *counts))
    return Lengths(longest=max(counts), mean=sum(counts) / len(counts), prompts=len(counts))


def _vocabulary(tokenizer: Tokenizer, shape: ModelShape) -> list[Problem]:
    if tokenizer.vocab_size <= shape.vocabulary:
        return []
    what = f"the tokenizer has {tokenizer.vocab_size} entries, the model's vocab_size is {shape.vocabulary}"
    return [Problem(key="model.path", what=what, fix="use the tokenizer that belongs to this model")]


def _reward(config: Config) -> list[Problem]:
    if config.rollout is None:
        return []
    try:
        load_reward(config.rollout.reward.name)
    except RewardError as error:
        what, _, fix = str(error).removeprefix("rollout.reward.name: ").rpartition("; ")
        return [Problem(key="rollout.reward.name", what=what, fix=fix)]
    return []


def _run_directory(config: Config) -> list[Problem]:
    existing = config.run.dir
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [Problem(key="run.dir", what=f"{existing} is a file", fix="name a folder, new or of an earlier start of this run")]
    if not os.access(existing, os.W_OK):
        return [Problem(key="run.dir", what=f"{existing} cannot be written to", fix="choose a folder of your own")]
    return []


def _checkpoint(config: Config, shape: ModelShape | None) -> list[Problem]:
    """What a resume would find only once its ranks or engines have started."""
    try:
        path = newest(config.run.dir / "checkpoint")
        if path is None:
            return []
        require_whole(path)
        source = about(path).get("model_path")
    except CheckpointBroken as error:
        return [_to_go_on(str(error))]
    try:
        buffer = read_file(path.parent, buffer_file.NAME)
        if buffer is not None:
            buffer_file.read(buffer)
    except buffer_file.BufferBroken as error:
        return [_to_go_on(f"{path}: {error}")]
    held = read_model(Path(source))[0] if source is not None else None
    return _another_model(path, held, shape) if held is not None and shape is not None else []


def _another_model(checkpoint: Path, held: ModelShape, shape: ModelShape) -> list[Problem]:
    names = (field.name for field in fields(ModelShape) if field.name != "context")
    pairs = [
        f"{name} {there} there, {here} here" for name in names if (there := getattr(held, name)) != (here := getattr(shape, name))
    ]
    what = f"{checkpoint} is of another model: {'; '.join(pairs)}"
    fix = "go on with the model that the run began with, or choose another run.dir"
    return [Problem(key="model.path", what=what, fix=fix)] if pairs else []


def _to_go_on(broken: str) -> Problem:
    what, _, fix = broken.rpartition("; ")
    return Problem(key="run.dir", what=what, fix=fix)


def _of_data(key: str, error: DataError) -> Problem:
    where = str(error.path) if error.line is None else f"{error.path}:{error.line}"
    return Problem(key=key, what=f"{where}: {error.what}", fix=error.fix)
