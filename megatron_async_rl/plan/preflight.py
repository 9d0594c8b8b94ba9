"""Checks before any process of a run starts: config, model, data, reward, and the checkpoint from
which the run would resume.

`mar plan` reads the first PROMPTS_IN_A_PLAN rows of each data file; `mar train` reads all rows.
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
from megatron_async_rl.data.tokenizer import unwritten_token
from megatron_async_rl.metrics.trackers import identity_problems, lacking
from megatron_async_rl.plan.layout import device_of
from megatron_async_rl.plan.machine import Machine, this_machine
from megatron_async_rl.plan.model_files import ModelShape, published_shape, read_model
from megatron_async_rl.plan.plan import RunPlan, make_plan
from megatron_async_rl.plan.reference_model import reference_problems
from megatron_async_rl.plan.resume import checkpoint_notes, checkpoint_problems, data_problems
from megatron_async_rl.plan.totals import PromptLengths, TrainingSource, context_limit
from megatron_async_rl.plan.trials import (
    environment_problems,
    grammar_problems,
    try_reward,
)
from megatron_async_rl.policy.digested_folder import require_export
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.rollout.environments import EnvironmentRefused
from megatron_async_rl.rollout.environments.built_in.tools import prompt_tokenizer
from megatron_async_rl.rollout.scoring import reward_fields

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
    """Return the plan of `config` on `machine` (default: this one) with all problems.

    `all_data`: read every row, as before a run. `without_model`: accept a published model whose
    files are missing, and leave out the checks that require them.
    """
    # Read once, so that all checks see the same machine.
    machine = machine or this_machine()
    # `mar plan` does not download weights, so those of a model on a hub may be missing.
    weights = all_data or name_of(config.model.path) is None
    shape, problems = read_model(config.model.path, weights=weights)
    # The files of a described machine may be there only: missing ones are noted, not refused.
    elsewhere: list[Problem] = []
    published = published_shape(config.model.path) if without_model and shape is None else None
    if published is not None:
        shape, source = published
        what = f"{parse(config.model.path) or config.model.path}; its sizes come from {source}"
        elsewhere, problems = [replace(problems[0], what=what)], []
    elif machine.described and shape is not None:
        elsewhere, problems = problems, []
    files_elsewhere = machine.described or published is not None
    tokenizer: Tokenizer | None = None
    lengths: PromptLengths | None = None
    held_out = 0
    if shape is not None and published is None and not problems:
        try:
            tokenizer = prompt_tokenizer(config.model.path, config)
        # environment_problems reports the error below, with its own key.
        except EnvironmentRefused:
            tokenizer = tokenizer_of(config.model.path, config.data)
        except DataError as error:
            (elsewhere if files_elsewhere else problems).append(error.problem("model.path"))
    reference, absent = reference_problems(config, shape, weights=weights)
    (elsewhere if files_elsewhere and absent else problems).extend(reference)
    if shape is not None:
        problems += _no_room(config, shape)
    if shape is not None and tokenizer is not None:
        problems += _stops(config, shape, tokenizer)
    # A plan must take seconds; `mar train` must not start with a row that it would refuse later.
    limit = None if all_data else PROMPTS_IN_A_PLAN
    read: dict[str, PromptSet] = {}
    identities: dict[str, DataIdentity] = {}
    if tokenizer is None or shape is None:
        (elsewhere if files_elsewhere else problems).extend(
            absence.problem(one.key) for one in _files(config, None) if (absence := one.missing())
        )
    else:
        for one in _files(config, shape):
            try:
                found, identity, counts = _read(config, one, shape, tokenizer, limit)
            except DataError as error:
                # Files that exist here are checked, even if the plan is for a described machine.
                missing = files_elsewhere and one.missing() is not None
                (elsewhere if missing else problems).append(error.problem(one.key))
            else:
                # The policy does not train on held-out samples, so they do not set its memory.
                if one.key.startswith(TRAINING):
                    lengths = _longer(lengths, counts)
                else:
                    held_out = max(held_out, max(counts) + one.response)
                read[one.key] = found
                # Only the digest of a whole file can be compared with the checkpoint's.
                if limit is None or found.too_long + len(found.prompts) < limit:
                    identities[one.key] = identity
    # Before the trial of the reward, which would fail without its server.
    silent = _silent_servers(config)
    refused, copied = try_reward(config, {} if silent else read)
    problems += refused + environment_problems(config, read, tokenizer)
    problems += _engine_options(config, machine)
    if tokenizer is not None:
        problems += grammar_problems(config)
    # Run directory and checkpoints are on this machine, so they are unknown for a described one.
    if not machine.described:
        problems += _run_directory(config) + checkpoint_problems(config, shape)
        problems += data_problems(config, identities)
        # Last, and only if the run could start: digests of large files take minutes.
        if all_data and not problems:
            problems += _damaged_model(config)
        problems += _other_run_problems(config) + lacking(config.observe.trackers)
        problems += identity_problems(config.run.dir, config.observe.trackers)
    plan = make_plan(
        config,
        machine,
        shape,
        lengths=lengths,
        held_out=held_out,
        problems=problems,
        sources=_training_sources(config, read, limit),
    )
    return replace(
        plan,
        # Unique keys, in the order of the checks.
        absent=tuple(dict.fromkeys(one.key for one in elsewhere)),
        warnings=(
            *plan.warnings,
            *(f"not checked, because it is not here: {one.what} ({one.key})" for one in elsewhere),
            *_more_entries(tokenizer, shape),
            *_not_held_out(read),
            *_rendered_for_an_agent(config),
            *_too_long(config, read),
            *copied,
            *([] if files_elsewhere or problems else silent),
            *([] if machine.described else checkpoint_notes(config)),
        ),
    )


def longest_samples(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Return the tokens of the longest training sample and of the longest held-out one, prompt and
    response together, among the rows that a plan reads; 0 for data that cannot be read."""
    longest = [0, 0]
    try:
        tokenizer = prompt_tokenizer(config.model.path, config)
    # The plan reports these errors.
    except (DataError, EnvironmentRefused):
        return 0, 0
    for one in _files(config, shape):
        try:
            _, _, counts = _read(config, one, shape, tokenizer, PROMPTS_IN_A_PLAN)
        except DataError:
            continue
        held_out = not one.key.startswith(TRAINING)
        longest[held_out] = max(longest[held_out], max(counts) + one.response)
    return longest[0], longest[1]


def _training_sources(
    config: Config, read: Mapping[str, PromptSet], limit: int | None
) -> list[TrainingSource]:
    """Return each source of the training data with its number of rows. Empty if a source is missing
    or unreadable, because an epoch covers all of them."""
    found = []
    for index, source in enumerate(config.data.training):
        prompts = read.get("data.train" if config.data.train else f"data.sources.{index}.path")
        rows = len(prompts.prompts) if prompts is not None else 0
        # The file was not read, or only up to the limit: count its rows without tokenising them.
        if prompts is None or (limit is not None and rows + prompts.too_long >= limit):
            try:
                rows = count_rows(source.path)
            except DataError:
                return []  # a problem or a note already reports it
        found.append(TrainingSource(label=source.label, rows=rows, weight=source.weight))
    return found


@dataclass(frozen=True)
class _File:
    """A data file of the config. `room`: largest number of tokens of a prompt; null if it is not
    limited, or not positive, which the plan reports. `response`: largest number of tokens that are
    sampled for a prompt; 0 for given responses."""

    key: str
    file: FileConfig
    room: int | None
    response: int = 0

    def missing(self) -> DataError | None:
        """Return the error if the file does not exist."""
        try:
            data_files(self.file.path)
        except DataError as error:
            return error
        return None


def _files(config: Config, shape: ModelShape | None) -> list[_File]:
    """Return all data files of the config: training data first, then held-out sets."""

    def room(max_tokens: int) -> int | None:
        # The longest response leaves this part of the context to the prompt.
        left = 0 if shape is None else context_limit(config, shape) - max_tokens
        return left if left > 0 else None

    rollout, data = config.rollout, config.data
    response = 0 if rollout is None else rollout.sampling.max_tokens
    maximum = room(response) if rollout is not None else None
    if data.train is not None:
        files = [_File("data.train", data.training[0], maximum, response)]
    else:
        places = enumerate(data.sources)
        files = [
            _File(f"data.sources.{index}.path", one, maximum, response) for index, one in places
        ]
    evaluation = config.eval or EvalConfig()
    if config.supervised:
        sets = held_out_files(data, evaluation)
        return files + [_File(one.path_key, one.file, None) for one in sets]
    training = None if rollout is None else rollout.sampling
    return files + [
        _File(
            one.path_key, one.file, room(one.sampling.max_tokens), response=one.sampling.max_tokens
        )
        for one in eval_sets(data, training, evaluation)
    ]


def _read(
    config: Config, one: _File, shape: ModelShape, tokenizer: Tokenizer, limit: int | None
) -> tuple[PromptSet, DataIdentity, Sequence[int]]:
    """Read up to `limit` rows of a file. Return them, their identity, and the tokens of each row:
    prompt and, if it is given, response. Raises DataError at the first unusable row."""
    data = config.data
    if config.rollout is not None:
        required = reward_fields(config.rollout.reward)
        found = read_set(data, one.file, tokenizer, required=required, room=one.room, limit=limit)
        # A digest of token ids and fields, so a renamed or reformatted file is the same data.
        # Lengths of the engine's input, chat template included.
        counts = [len(prompt.token_ids) for prompt in found.prompts]
        return found, DataIdentity.of(found.prompts), counts
    read = read_set(data, one.file, tokenizer, limit=limit, supervised=True)
    found = fitting(read, tokenizer, data.max_tokens)
    budget, multiple = config.policy.tokens_per_micro_batch, config.policy.row_multiple
    # The last token is a target only, and rows are padded to a multiple.
    maximum = min(shape.context, budget, budget // multiple * multiple + 1)
    source = SupervisedSource(
        found.prompts, tokenizer, prompts_per_step=1, seed=0, shuffle=False, max_context=maximum
    )
    return found, source.identities[0], source.lengths


def _no_room(config: Config, shape: ModelShape) -> list[Problem]:
    """Return problems of held-out sets whose responses leave no room for a prompt. `make_plan`
    checks the training data."""
    limit = context_limit(config, shape)
    too_many = {
        one.max_tokens_key: one.sampling.max_tokens
        for one in config.eval_sets
        # Several sets may inherit a key, which is reported once.
        if one.sampling.max_tokens >= limit and not one.max_tokens_key.startswith("rollout")
    }
    return [
        Problem(
            key=key,
            what=f"{tokens} response tokens leave no room for a prompt in a context of {limit}",
            fix=f"set it below {limit} minus the length of the longest prompt",
        )
        for key, tokens in too_many.items()
    ]


def _too_long(config: Config, read: Mapping[str, PromptSet]) -> list[str]:
    """Return notes on rows that are left out because of their length."""
    limits = {
        f"data.{name}: {maximum}"
        for name in ("max_prompt_tokens", "max_tokens")
        if (maximum := getattr(config.data, name)) is not None
    }
    return [
        f"{found.too_long} of the first {found.too_long + len(found.prompts)} rows of {key} exceed"
        f" {' or '.join(sorted(limits, reverse=True))} and are left out"
        for key, found in read.items()
        if found.too_long
    ]


def _not_held_out(read: Mapping[str, PromptSet]) -> list[str]:
    """Return notes on held-out prompts that are also training prompts."""
    trained = {
        # By token ids, which are what the policy trains on.
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
                f"{len(both)} of {len(found.prompts)} prompts of {key} are also in"
                f" {trained[both[0].token_ids]}, such as {both[0].text[:60]!r}"
            )
    return notes


def _rendered_for_an_agent(config: Config) -> list[str]:
    environment = config.rollout.environment if config.rollout is not None else None
    if environment is None or environment.name != "agent" or not config.data.as_chat:
        return []
    return [
        "data.as_chat: true applies the chat template to the prompt.text that the agent receives,"
        " and the endpoint applies it again to the agent's messages; remove as_chat"
    ]


def _longer(known: PromptLengths | None, counts: Sequence[int]) -> PromptLengths:
    """Return `known` with the longest of `counts` included. The mean and the number remain those
    of the first file."""
    if known is not None:
        return replace(known, longest=max(known.longest, *counts))
    return PromptLengths(longest=max(counts), mean=sum(counts) / len(counts), prompts=len(counts))


def _more_entries(tokenizer: Tokenizer | None, shape: ModelShape | None) -> list[str]:
    """Return the note on tokenizer entries without a row in the model's embedding, or none."""
    if tokenizer is None or shape is None or tokenizer.vocab_size <= shape.vocabulary:
        return []
    return [
        f"the tokenizer has {tokenizer.vocab_size} entries and the model {shape.vocabulary} rows:"
        " data with a token beyond them is refused"
    ]


def _stops(config: Config, shape: ModelShape, tokenizer: Tokenizer) -> list[Problem]:
    """Return problems of stop tokens and stop strings that could never end a response."""
    if config.rollout is None:
        return []

    def fault(key: str, stop: int | str) -> tuple[str, str] | None:
        """Return what is wrong with a token or a string, and its fix."""
        if isinstance(stop, int):
            what = f"{stop} is not a token of the model, which has {shape.vocabulary}"
            fix = f"use ids below {shape.vocabulary}, or text in {key}.stop"
            return (what, fix) if stop >= shape.vocabulary else None
        if (token := unwritten_token(tokenizer, stop)) is None:
            return None
        what = f"{stop!r} contains the special token {token}, which decoded text omits"
        return what, f"set {key}.stop_token_ids: [{token}]"

    own = config.rollout.sampling
    by_key = {"rollout.sampling": own} | {
        f"{one.key}.sampling": one.sampling for one in config.eval_sets
    }
    return [
        Problem(key=f"{key}.{name}", what=found[0], fix=found[1])
        for key, sampling in by_key.items()
        for name in ("stop_token_ids", "stop")
        # Reported under `rollout.sampling`, from which a set has it.
        if sampling is own or getattr(sampling, name) != getattr(own, name)
        for stop in getattr(sampling, name)
        if (found := fault(key, stop)) is not None
    ]


def _silent_servers(config: Config) -> list[str]:
    """Return notes on reward servers that do not accept connections from this machine."""
    notes = []
    for part in config.rollout.reward.rewards.values() if config.rollout else ():
        if part.name not in SERVERS:
            continue
        address = urlsplit(str(part.settings.get("url", "")))
        if not address.hostname:
            continue
        # No request, which might start work on the server.
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname, port), CONNECT_S).close()
        except OSError as error:
            notes.append(
                f"rollout.reward: no server accepts connections at {address.hostname}:{port}"
                f" ({error.strerror or error}): start the {part.name} server before the run"
            )
    return notes


def _engine_options(config: Config, machine: Machine) -> list[Problem]:
    if config.rollout is None or not config.rollout.vllm:
        return []
    options = config.rollout.vllm
    # Empty if vLLM is not installed; then only this package's own rules apply.
    known = vllm_arguments()
    refused = dict(refused_options(options, device_of(config, machine)))
    problems = [unknown_option(name, known) for name in options if known and name not in known]
    problems += [
        Problem(key=f"rollout.vllm.{name}", what=f"may not be set: {why}", fix="remove it")
        for name, why in refused.items()
    ]
    accepted = options.keys() & known.keys() - refused.keys()
    wrong = (wrong_value(name, options[name], known[name]) for name in sorted(accepted))
    return problems + [problem for problem in wrong if problem is not None]


def _damaged_model(config: Config) -> list[Problem]:
    """Return problems of a damaged model. Only models that this package exported have digests."""
    try:
        require_export(config.model.path, "model.path")
    except UserError as error:
        return list(error.problems)
    return []


def _run_directory(config: Config) -> list[Problem]:
    existing = config.run.dir
    # The nearest existing folder decides whether the folders below it can be created.
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [
            Problem(
                key="run.dir",
                what=f"{existing} is a file",
                fix="name a folder: a new one, or that of an earlier start of this run",
            )
        ]
    if not os.access(existing, os.W_OK):
        return [
            Problem(
                key="run.dir",
                what=f"{existing} cannot be written to",
                fix="choose a folder that you can write to",
            )
        ]
    return []


def _other_run_problems(config: Config) -> list[Problem]:
    """Return problems of the run that observe.beside names."""
    other = config.observe.beside
    if other is None:
        return []
    if other == config.run.dir:
        what = "is this run's own directory"
        return [Problem(key="observe.beside", what=what, fix="name another run, or remove it")]
    try:
        read_run(other)
    except UserError as error:
        return [
            Problem(
                key="observe.beside",
                what=problem.what if problem.key == "RUN" else f"{problem.key}: {problem.what}",
                fix="name the directory of a run that has made steps, or remove it"
                if problem.key == "RUN"
                else f"{problem.fix}, or remove observe.beside",
            )
            for problem in error.problems
        ]
    return []
