"""Checks before any process starts: config, model, data, reward, and the checkpoint to resume from.

`mar plan` reads the first prompts of each file, `mar train` all of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from megatron_async_rl.config.data import FileConfig
from megatron_async_rl.config.engine_options import (
    refused_options,
    unknown_option,
    vllm_arguments,
    wrong_value,
)
from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.config.sampling import EvalConfig, eval_sets, held_out_files
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data import (
    DataError,
    DataIdentity,
    PromptSet,
    SupervisedSource,
    Tokenizer,
    fitting,
    read_set,
    tokenizer_of,
)
from megatron_async_rl.data.files import count_rows
from megatron_async_rl.data.hub import name_of, parse
from megatron_async_rl.data.locations import data_files
from megatron_async_rl.metrics.trackers import identity_problems, lacking
from megatron_async_rl.plan.layout import device_of
from megatron_async_rl.plan.machine import Machine, this_machine
from megatron_async_rl.plan.model_files import ModelShape, published_shape, read_model
from megatron_async_rl.plan.plan import RunPlan, make_plan
from megatron_async_rl.plan.resume import checkpoint_notes, checkpoint_problems, data_problems
from megatron_async_rl.plan.totals import PromptLengths, TrainingSource, context_limit
from megatron_async_rl.plan.trials import (
    environment_problems,
    grammar_problems,
    reward_problems,
)
from megatron_async_rl.policy.digested_folder import require_export
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.rollout.environments import EnvironmentRefused
from megatron_async_rl.rollout.environments.built_in.tools import prompt_tokenizer
from megatron_async_rl.rollout.scoring import reward_fields
from megatron_async_rl.samples import Prompt

PROMPTS_IN_A_PLAN = 2000
SERVERS, CONNECT_S = ("http", "judge"), 2.0
TRAINING = ("data.train", "data.sources")


def preflight(
    config: Config,
    *,
    all_data: bool,
    machine: Machine | None = None,
    without_model: bool = False,
) -> RunPlan:
    """Return the plan of `config` on `machine` (default: this one) with all its problems.
    `without_model`: a published model need not be here, since its sizes are known; checks that need
    its files are then left out."""
    # Read once, so that every check below sees the same machine.
    machine = machine or this_machine()
    # A plan is not kept waiting for the weights of a model that is on a hub.
    fetched = all_data or name_of(config.model.path) is None
    shape, problems = read_model(config.model.path, weights=fetched)
    # Of a machine that is only described, the files may lie elsewhere: its sizes are enough.
    elsewhere: list[Problem] = []
    published = published_shape(config.model.path) if without_model and shape is None else None
    if published is not None:
        shape, source = published
        what = f"{parse(config.model.path) or config.model.path}; its sizes are from {source}"
        elsewhere, problems = [replace(problems[0], what=what)], []
    elif machine.described and shape is not None:
        elsewhere, problems = problems, []
    files_elsewhere = machine.described or published is not None
    tokenizer: Tokenizer | None = None
    lengths: PromptLengths | None = None
    if shape is not None and published is None and not problems:
        try:
            tokenizer = prompt_tokenizer(config.model.path, config)
        # The environment is reported by environment_problems, with its own key.
        except EnvironmentRefused:
            tokenizer = tokenizer_of(config.model.path, config.data)  # below it is named
        except DataError as error:
            (elsewhere if files_elsewhere else problems).append(error.problem("model.path"))
    if shape is not None:
        problems += _no_room(config, shape)
    if shape is not None and tokenizer is not None:
        problems += _stop_tokens(config, shape)
    # A plan must answer in seconds; `mar train` may not start on a row that it refuses later.
    limit = None if all_data else PROMPTS_IN_A_PLAN
    read: dict[str, PromptSet] = {}
    identities: dict[str, DataIdentity] = {}
    if tokenizer is None or shape is None:
        (elsewhere if files_elsewhere else problems).extend(
            gone.problem(one.key) for one in _files(config, None) if (gone := one.missing())
        )
    else:
        for one in _files(config, shape):
            try:
                found, identity = _read(config, one, shape, tokenizer, limit)
            except DataError as error:
                # A file that is here is checked, also on a machine that is only described.
                missing = files_elsewhere and one.missing() is not None
                (elsewhere if missing else problems).append(error.problem(one.key))
            else:
                lengths = _longer(lengths, found.prompts)
                read[one.key] = found
                # Only a file that was read whole has a digest to compare with the checkpoint's.
                if limit is None or found.too_long + len(found.prompts) < limit:
                    identities[one.key] = identity
    # Before the trial: a reward without its server would fail for that reason alone.
    silent = _silent_servers(config)
    problems += reward_problems(config, {} if silent else read) + environment_problems(
        config, read, tokenizer
    )
    problems += _engine_options(config, machine)
    if tokenizer is not None:
        problems += grammar_problems(config)
    # The run directory and its checkpoints lie on this machine's disks.
    if not machine.described:
        problems += _run_directory(config) + checkpoint_problems(config, shape)
        problems += data_problems(config, identities)
        # Digests of large files take minutes; they are compared last, and only for a run that could
        # start.
        if all_data and not problems:
            problems += _damaged_model(config)
        problems += _beside(config) + lacking(config.observe.trackers)
        problems += identity_problems(config.run.dir, config.observe.trackers)
    plan = make_plan(
        config,
        machine,
        shape,
        lengths=lengths,
        problems=problems,
        sources=_training_sources(config, read, limit),
    )
    return replace(
        plan,
        # Each key once, in the order of the checks.
        absent=tuple(dict.fromkeys(one.key for one in elsewhere)),
        warnings=(
            *plan.warnings,
            *(f"not here, so not checked: {one.what} ({one.key})" for one in elsewhere),
            *_more_entries(tokenizer, shape),
            *_not_held_out(read),
            *_rendered_for_an_agent(config),
            *_too_long(config, read),
            *([] if files_elsewhere or problems else silent),
            *([] if machine.described else checkpoint_notes(config)),
        ),
    )


def _training_sources(
    config: Config, read: Mapping[str, PromptSet], limit: int | None
) -> list[TrainingSource]:
    """Rows of each source of the training data; those that were not read, beyond `limit` or without
    a tokenizer, are counted. Empty unless every source is here: an epoch is one of all of them."""
    found = []
    for index, source in enumerate(config.data.training):
        held = read.get("data.train" if config.data.train else f"data.sources.{index}.path")
        rows = len(held.prompts) if held is not None else 0
        # The file was cut at the limit: count its rows without tokenising them.
        if held is None or (limit is not None and rows + held.too_long >= limit):
            try:
                rows = count_rows(source.path)
            except DataError:
                return []  # it is noted, or `mar train` reads, and names, the row at fault
        found.append(TrainingSource(label=source.label, rows=rows, weight=source.weight))
    return found


@dataclass(frozen=True)
class _File:
    """A file of the configuration. `room`: tokens that a prompt may have; null if that does not
    matter, or there is none, which the plan reports."""

    key: str
    file: FileConfig
    room: int | None

    def missing(self) -> DataError | None:
        try:
            data_files(self.file.path)
        except DataError as error:
            return error
        return None


def _files(config: Config, shape: ModelShape | None) -> list[_File]:
    def room(max_tokens: int) -> int | None:
        # Room for a prompt is what the longest response leaves of the context.
        left = 0 if shape is None else context_limit(config, shape) - max_tokens
        return left if left > 0 else None

    rollout, data = config.rollout, config.data
    maximum = room(rollout.sampling.max_tokens) if rollout is not None else None
    if data.train is not None:
        files = [_File("data.train", data.training[0], maximum)]
    else:
        places = enumerate(data.sources)
        files = [_File(f"data.sources.{index}.path", one, maximum) for index, one in places]
    evaluation = config.eval or EvalConfig()
    if config.supervised:
        sets = held_out_files(data, evaluation)
        return files + [_File(one.path_key, one.file, None) for one in sets]
    training = None if rollout is None else rollout.sampling
    return files + [
        _File(one.path_key, one.file, room(one.sampling.max_tokens))
        for one in eval_sets(data, training, evaluation)
    ]


def _read(
    config: Config, one: _File, shape: ModelShape, tokenizer: Tokenizer, limit: int | None
) -> tuple[PromptSet, DataIdentity]:
    """Raises DataError at the first line that cannot be used."""
    data = config.data
    if config.rollout is not None:
        required = reward_fields(config.rollout.reward)
        found = read_set(data, one.file, tokenizer, required=required, room=one.room, limit=limit)
        # Of token ids and fields, so that a renamed or reformatted file is the same data.
        return found, DataIdentity.of(found.prompts)
    read = read_set(data, one.file, tokenizer, limit=limit, supervised=True)
    found = fitting(read, tokenizer, data.max_tokens)
    budget, multiple = config.policy.tokens_per_micro_batch, config.policy.row_multiple
    # The last token is not fed, and rows are rounded up.
    maximum = min(shape.context, budget, budget // multiple * multiple + 1)
    source = SupervisedSource(
        found.prompts, tokenizer, prompts_per_step=1, seed=0, shuffle=False, max_context=maximum
    )
    return found, source.identities[0]


def _no_room(config: Config, shape: ModelShape) -> list[Problem]:
    """Held-out sets whose responses leave no room for a prompt; training's the plan finds."""
    limit = context_limit(config, shape)
    too_many = {
        one.max_tokens_key: one.sampling.max_tokens
        for one in config.eval_sets
        # Several sets may inherit one key, which is reported once.
        if one.sampling.max_tokens >= limit and not one.max_tokens_key.startswith("rollout")
    }
    return [
        Problem(
            key=key,
            what=f"{tokens} response tokens leave no room for a prompt in a context of {limit}",
            fix=f"set it below {limit} minus the longest prompt",
        )
        for key, tokens in too_many.items()
    ]


def _too_long(config: Config, read: Mapping[str, PromptSet]) -> list[str]:
    """Notes on the rows that are left out for their length."""
    limits = {
        f"data.{name}: {maximum}"
        for name in ("max_prompt_tokens", "max_tokens")
        if (maximum := getattr(config.data, name)) is not None
    }
    return [
        f"{found.too_long} of {found.too_long + len(found.prompts)} rows read of {key} are above"
        f" {' or '.join(sorted(limits, reverse=True))} and left out"
        for key, found in read.items()
        if found.too_long
    ]


def _not_held_out(read: Mapping[str, PromptSet]) -> list[str]:
    trained = {
        # By token ids: two spellings of one prompt train the same tokens.
        prompt.token_ids: key
        for key, found in read.items()
        if key.startswith(TRAINING)
        for prompt in found.prompts
    }
    notes = []
    for key, found in read.items():
        both = [] if key.startswith(TRAINING) else found.prompts
        both = [prompt for prompt in both if prompt.token_ids in trained]
        if both:
            notes.append(
                f"{len(both)} of {len(found.prompts)} prompts of {key} are in"
                f" {trained[both[0].token_ids]} too, such as {both[0].text[:60]!r}"
            )
    return notes


def _rendered_for_an_agent(config: Config) -> list[str]:
    turns = config.rollout.environment if config.rollout is not None else None
    if turns is None or turns.name != "agent" or not config.data.as_chat:
        return []
    return [
        "data.as_chat: true gives the agent a prompt.text that already has the marks of the chat"
        " template, and its own messages get them again; remove as_chat"
    ]


def _longer(known: PromptLengths | None, prompts: Sequence[Prompt]) -> PromptLengths:
    """Lengths of both files together; the mean is the first file's, which is the one trained on."""
    # Tokens as the engine gets them, chat template included.
    counts = [len(prompt.token_ids) for prompt in prompts]
    if known is not None:
        return replace(known, longest=max(known.longest, *counts))
    return PromptLengths(longest=max(counts), mean=sum(counts) / len(counts), prompts=len(counts))


def _more_entries(tokenizer: Tokenizer | None, shape: ModelShape | None) -> list[str]:
    """A note on entries of the tokenizer that have no row in the model; text with one is
    refused."""
    if tokenizer is None or shape is None or tokenizer.vocab_size <= shape.vocabulary:
        return []
    return [
        f"the tokenizer has {tokenizer.vocab_size} entries and the model {shape.vocabulary} rows:"
        " data with one of the other tokens is refused"
    ]


def _stop_tokens(config: Config, shape: ModelShape) -> list[Problem]:
    """Problems with stop tokens that are not in the model's vocabulary and would end no
    response."""
    if config.rollout is None:
        return []
    own = config.rollout.sampling.stop_token_ids
    given = {"rollout.sampling": own} | {
        f"{one.key}.sampling": one.sampling.stop_token_ids
        for one in config.eval_sets
        if one.sampling.stop_token_ids != own
    }
    return [
        Problem(
            key=f"{key}.stop_token_ids",
            what=f"{token} is not a token of the model, which has {shape.vocabulary}",
            fix=f"take ids below {shape.vocabulary}, or text in {key}.stop",
        )
        for key, tokens in given.items()
        for token in tokens
        if token >= shape.vocabulary
    ]


def _silent_servers(config: Config) -> list[str]:
    """Notes on reward servers that do not accept connections from this machine."""
    notes = []
    for part in config.rollout.reward.rewards.values() if config.rollout else ():
        if part.name not in SERVERS:
            continue
        address = urlsplit(str(part.settings.get("url", "")))
        if not address.hostname:
            continue
        # Only a connection is made: a request might start work on the server.
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname, port), CONNECT_S).close()
        except OSError as error:
            notes.append(
                f"rollout.reward: no server answers at {address.hostname}:{port}"
                f" ({error.strerror or error}): start the {part.name} server before the run"
            )
    return notes


def _engine_options(config: Config, machine: Machine) -> list[Problem]:
    if config.rollout is None or not config.rollout.vllm:
        return []
    options = config.rollout.vllm
    # Empty without vLLM; then only this package's own refusals apply.
    known = vllm_arguments()
    refused = dict(refused_options(options, device_of(config, machine)))
    problems = [unknown_option(name, known) for name in options if known and name not in known]
    problems += [
        Problem(key=f"rollout.vllm.{name}", what=f"may not be set: {why}", fix="remove it")
        for name, why in refused.items()
    ]
    taken = options.keys() & known.keys() - refused.keys()
    wrong = (wrong_value(name, options[name], known[name]) for name in sorted(taken))
    return problems + [problem for problem in wrong if problem is not None]


def _damaged_model(config: Config) -> list[Problem]:
    """Damage to a model that this package exported: its files have digests."""
    try:
        require_export(config.model.path, "model.path")
    except UserError as error:
        return list(error.problems)
    return []


def _run_directory(config: Config) -> list[Problem]:
    existing = config.run.dir
    # The nearest folder that exists decides whether the others can be made.
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [
            Problem(
                key="run.dir",
                what=f"{existing} is a file",
                fix="name a folder, new or of an earlier start of this run",
            )
        ]
    if not os.access(existing, os.W_OK):
        return [
            Problem(
                key="run.dir",
                what=f"{existing} cannot be written to",
                fix="choose a folder of your own",
            )
        ]
    return []


def _beside(config: Config) -> list[Problem]:
    """A run that cannot be read has a file in fault; a directory that is not a run, or has no step
    yet, has none."""
    beside = config.observe.beside
    if beside is None:
        return []
    if beside == config.run.dir:
        what = "is this run's own directory"
        return [Problem(key="observe.beside", what=what, fix="name another run's, or leave it out")]
    try:
        read_run(beside)
    except UserError as error:
        return [
            Problem(
                key="observe.beside",
                what=problem.what if problem.key == "RUN" else f"{problem.key}: {problem.what}",
                fix="name the directory of a run that has made steps, or leave it out"
                if problem.key == "RUN"
                else f"{problem.fix}, or leave observe.beside out",
            )
            for problem in error.problems
        ]
    return []
