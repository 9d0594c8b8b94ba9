"""Everything that can be known to be wrong before a process starts: config, model, data, reward,
the checkpoint to go on from.

`mar plan` reads the first prompts of each file, `mar train` all of them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from megatron_async_rl.config.data import FileConfig
from megatron_async_rl.config.engine_options import (
    refused_options,
    unknown_option,
    vllm_arguments,
    wrong_value,
)
from megatron_async_rl.config.environment import AGENTS, TOOLS, EnvironmentConfig
from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.config.sampling import (
    EvalConfig,
    EvalSampling,
    EvalSetConfig,
    eval_sets,
    held_out_files,
)
from megatron_async_rl.config.schema import Config, RewardConfig
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
from megatron_async_rl.data.files import count_rows, data_files
from megatron_async_rl.data.hub import name_of, parse
from megatron_async_rl.metrics.trackers import identity_problems, lacking
from megatron_async_rl.plan.batch import PromptLengths, context_limit
from megatron_async_rl.plan.layout import device_of
from megatron_async_rl.plan.machine import Machine, this_machine
from megatron_async_rl.plan.model_files import ModelShape, published_shape, read_model
from megatron_async_rl.plan.plan import RunPlan, make_plan
from megatron_async_rl.plan.resume import checkpoint_notes, checkpoint_problems, data_problems
from megatron_async_rl.plan.totals import TrainingSource
from megatron_async_rl.policy.digested_folder import require_export
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.rollout.environments import EnvironmentRefused, load_factory
from megatron_async_rl.rollout.environments.built_in.tools import prompt_tokenizer
from megatron_async_rl.rollout.environments.chat import follow_ups
from megatron_async_rl.rollout.environments.episode import failures
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError
from megatron_async_rl.rollout.rewards.registry import RewardError, RewardItem
from megatron_async_rl.rollout.scoring import Scorer, require_rewards, reward_fields
from megatron_async_rl.samples import Prompt

PROMPTS_IN_A_PLAN = 2000
REWARD_TRIAL_TIMEOUT_S = 20.0
"""Longest wait for one made-up response: a plan is not kept waiting by a slow reward."""
SERVERS, CONNECT_S = ("http", "judge"), 2.0
MADE_UP_RESPONSE = "0"
TRIED_PROMPTS = 3
TRAINING = ("data.train", "data.sources")
FAULT = 240
"""Limit of a library's message on a grammar, in characters; it may repeat the whole grammar."""
GRAMMAR_FIX = {
    "regex": (
        "write it without what such grammars do not have: look-around, back-references, conditions,"
        " word boundaries (it is matched from the first to the last character as it is)"
    ),
    "json_schema": "leave out the keywords that it names, and judge the rest in the reward",
}
"""Advice by the kind of grammar that vLLM rejects: how to rewrite a regex or a schema."""


def preflight(
    config: Config,
    *,
    all_data: bool,
    machine: Machine | None = None,
    without_model: bool = False,
) -> RunPlan:
    """The plan of `config` on `machine` (default: this one), with every problem that was found, all
    at once. `without_model`: a published model need not be here, as its sizes are known; what it
    alone could tell is then not checked."""
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
        except EnvironmentRefused:
            tokenizer = tokenizer_of(config.model.path, config.data)  # below it is named
        except DataError as error:
            (elsewhere if files_elsewhere else problems).append(_of_data("model.path", error))
    if shape is not None:
        problems += _no_room(config, shape)
    if shape is not None and tokenizer is not None:
        problems += _stop_tokens(config, shape)
    limit = None if all_data else PROMPTS_IN_A_PLAN
    read: dict[str, PromptSet] = {}
    identities: dict[str, DataIdentity] = {}
    if tokenizer is None or shape is None:
        (elsewhere if files_elsewhere else problems).extend(
            _of_data(one.key, gone) for one in _files(config, None) if (gone := one.missing())
        )
    else:
        for one in _files(config, shape):
            try:
                found, identity = _read(config, one, shape, tokenizer, limit)
            except DataError as error:
                missing = files_elsewhere and one.missing() is not None
                (elsewhere if missing else problems).append(_of_data(one.key, error))
            else:
                lengths = _longer(lengths, found.prompts)
                read[one.key] = found
                if limit is None or found.too_long + len(found.prompts) < limit:
                    identities[one.key] = identity
    silent = _silent_servers(config)
    problems += _reward(config, {} if silent else read) + _environment(config, read, tokenizer)
    problems += _engine_options(config, machine)
    if tokenizer is not None:
        problems += _grammars(config)
    if not machine.described:
        problems += _run_directory(config) + checkpoint_problems(config, shape)
        problems += data_problems(config, identities)
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
        "data.as_chat: true gives the agent a prompt.text that has the chat template's marks"
        " already, and its own messages get them once more; leave as_chat out"
    ]


def _longer(known: PromptLengths | None, prompts: Sequence[Prompt]) -> PromptLengths:
    """Lengths of both files together; the mean is the first file's, which is the one trained on."""
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
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname, port), CONNECT_S).close()
        except OSError as error:
            notes.append(
                f"rollout.reward: no server answers at {address.hostname}:{port}"
                f" ({error.strerror or error}): start the {part.name} server before the run"
            )
    return notes


def _reward(config: Config, read: Mapping[str, PromptSet]) -> list[Problem]:
    """Loads the reward and scores a made-up response to a prompt of each file."""
    if config.rollout is None:
        return []
    settings = config.rollout.reward
    try:
        require_rewards(settings)
    except RewardError as error:
        return [Problem(key=error.where, what=error.what, fix=error.fix)]
    return asyncio.run(_score_made_up(settings, read))


async def _score_made_up(settings: RewardConfig, read: Mapping[str, PromptSet]) -> list[Problem]:
    """Score a made-up response to each kind of prompt, in the same kind of process as the run
    does; returns the failures."""
    found = []
    scorer, of_groups = Scorer(settings), Scorer(settings, "group")
    scorer.start()
    of_groups.start()
    try:
        await scorer.ready()
        await of_groups.ready()
        tried = [
            (key, one, prompts)
            for key, found_in in read.items()
            for prompts in _of_each_reward(settings, found_in.prompts)
            for one in (scorer, of_groups)
        ]
        for key, one, prompts in tried:
            error = await _first_error(one, prompts)
            if error is not None:
                name = "a part" if settings.name is None else settings.name
                what = f"{name} failed on a made-up response, {MADE_UP_RESPONSE!r}, to"
                fix = f"correct the reward, or give every line of {key} the fields that it reads"
                found.append(
                    Problem(
                        key=_named(settings),
                        what=f"{what} the first prompts of {key}: {error}",
                        fix=fix,
                    )
                )
    except UserCodeStartError as error:
        fix = "correct the module, or raise rollout.reward.memory_mib"
        found.append(Problem(key=_named(settings), what=str(error), fix=fix))
    finally:
        scorer.close()
        of_groups.close()
    return found


def _of_each_reward(settings: RewardConfig, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """The first few prompts of those that have the same parts of the reward, for each such set."""
    first: dict[tuple[str | None, ...], list[Prompt]] = {}
    for prompt in prompts:
        parts = tuple(n for n, part in settings.rewards.items() if part.applies(prompt.fields))
        of_these = first.setdefault(parts, [])
        if len(of_these) < TRIED_PROMPTS:
            of_these.append(prompt)
    return list(first.values())


def _named(settings: RewardConfig) -> str:
    """The key that names the reward, or its parts."""
    return "rollout.reward.parts" if settings.name is None else "rollout.reward.name"


async def _first_error(scorer: Scorer, prompts: Sequence[Prompt]) -> str | None:
    """Null as soon as one prompt is scored: a reward may fail on some, and on_error decides the
    consequence."""
    first = None
    for prompt in prompts:
        if not scorer.scores(prompt):
            return None
        items = [RewardItem(prompt, MADE_UP_RESPONSE)] * (2 if scorer.per == "group" else 1)
        try:
            scored, *_ = await asyncio.wait_for(scorer.score_all(items), REWARD_TRIAL_TIMEOUT_S)
        except TimeoutError:
            return None  # slow, which rollout.reward.timeout_s allows: nothing is known of it
        if scored.error is None:
            return None
        first = first or scored.error
        if scored.timed_out:
            break
    return first


def _environment(
    config: Config, read: Mapping[str, PromptSet], tokenizer: Tokenizer | None
) -> list[Problem]:
    """Loads the environment, and has it answer a made-up turn to a prompt of each file."""
    settings = None if config.rollout is None else config.rollout.environment
    if settings is None:
        return []
    follow = None
    try:
        load_factory(settings)
        if tokenizer is not None:
            follow = follow_ups(settings, tokenizer)
            if settings.name == TOOLS:
                for found in read.values():  # what a tool answers is put behind a chat
                    follow.opened(found.prompts[0], "0")
    except EnvironmentRefused as error:
        return [Problem(key=error.where, what=error.what, fix=error.fix)]
    except DataError as error:
        problem = _of_data("rollout.environment.format", error)
        if settings.name in AGENTS or "format: text" in problem.fix:
            return [problem]
        return [replace(problem, fix=f"{problem.fix}, or set rollout.environment.format: text")]
    except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
        what = f"the chat template refuses a second turn: {error}"
        fix = "give data.chat_template another, or set rollout.environment.format: text"
        return [Problem(key="rollout.environment.format", what=what, fix=fix)]
    if settings.name in (TOOLS, *AGENTS):
        return _tasks(settings, read)  # nothing is asked without a model
    tried = {key: found.prompts[:TRIED_PROMPTS] for key, found in read.items()}
    answers = failures(settings, tried, MADE_UP_RESPONSE, REWARD_TRIAL_TIMEOUT_S, follow)
    return [
        Problem(
            key="rollout.environment.name",
            what=f"{settings.name} failed on {error}",
            fix="correct the environment, or give every prompt the fields that it reads",
        )
        for error in asyncio.run(answers).values()
    ]


def _tasks(settings: EnvironmentConfig, read: Mapping[str, PromptSet]) -> list[Problem]:
    """Prompts without a task in the environment `verifiers`: the first of each file."""
    made: Any = load_factory(settings)()
    problems = []
    for key, found in read.items() if hasattr(made, "task") else ():
        try:
            for prompt in found.prompts:
                made.task(prompt)
        except ValueError as error:
            fix = f"name the column of {key} that has it as rollout.environment.settings.task"
            problems.append(Problem(key="rollout.environment.settings", what=str(error), fix=fix))
    return problems


def _engine_options(config: Config, machine: Machine) -> list[Problem]:
    if config.rollout is None or not config.rollout.vllm:
        return []
    options = config.rollout.vllm
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


def _grammars(config: Config) -> list[Problem]:
    """Held-out sets whose regex or JSON schema this machine's vLLM cannot read, as its engines
    would say of the first response. vLLM is imported, which takes seconds, where there is one
    alone."""
    found: list[Problem] = []
    if config.rollout is None or find_spec("vllm") is None:
        return found
    faults: dict[str, str | None] = {}
    for one in config.eval_sets:
        name = "regex" if one.sampling.regex is not None else "json_schema"
        value = getattr(one.sampling, name)
        if value is None:
            continue
        if repr(value) not in faults:
            faults[repr(value)] = _grammar_fault(config, one.sampling)
        fault = faults[repr(value)]
        if fault is not None:
            own = isinstance(one.file, EvalSetConfig) and one.file.sampling is not None
            at = one.key if own else "eval"
            found.append(
                Problem(
                    key=f"{at}.sampling.{name}",
                    what=f"vLLM cannot hold responses to it: {fault}",
                    fix=GRAMMAR_FIX[name],
                )
            )
    return found


def _grammar_fault(config: Config, sampling: EvalSampling) -> str | None:
    from megatron_async_rl.rollout.engine_arguments import structured
    from megatron_async_rl.weights.vllm_private import require_grammar

    given = config.rollout.vllm.get("structured_outputs_config") if config.rollout else None
    try:
        require_grammar(str(config.model.path), structured(sampling), given)
    except Exception as error:  # noqa: BLE001 - of one of several libraries, each with its own
        return " ".join(str(error).split())[:FAULT] or type(error).__name__
    return None


def _damaged_model(config: Config) -> list[Problem]:
    """Damage to a model that this package exported: its files have digests."""
    try:
        require_export(config.model.path, "model.path")
    except UserError as error:
        return list(error.problems)
    return []


def _run_directory(config: Config) -> list[Problem]:
    existing = config.run.dir
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


def _of_data(key: str, error: DataError) -> Problem:
    where = str(error.path) if error.line is None else f"{error.path}:{error.line}"
    return Problem(key=key, what=f"{where}: {error.what}", fix=error.fix)
