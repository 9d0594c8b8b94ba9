"""Trials before a run: the reward, the environment and grammars answer made-up responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.rollout import AGENTS, TOOLS, EnvironmentConfig, RewardConfig
from megatron_async_rl.config.sampling import EvalSampling, EvalSetConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data import DataError, PromptSet, Tokenizer
from megatron_async_rl.rollout.environments import EnvironmentRefused, load_factory
from megatron_async_rl.rollout.environments.episode import failures
from megatron_async_rl.rollout.environments.transcript import follow_ups
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError
from megatron_async_rl.rollout.rewards.registry import RewardError, RewardItem
from megatron_async_rl.rollout.scoring import Scorer, require_rewards
from megatron_async_rl.samples import Prompt

REWARD_TRIAL_TIMEOUT_S = 20.0
"""Longest wait for one made-up response, so that a slow reward does not delay a plan."""
MADE_UP_RESPONSE = "0"
TRIED_PROMPTS = 3
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


def reward_problems(config: Config, read: Mapping[str, PromptSet]) -> list[Problem]:
    """Load the reward and score a made-up response to a prompt of each file."""
    if config.rollout is None:
        return []
    settings = config.rollout.reward
    try:
        # Importing the function first separates a wrong name from a failing call.
        require_rewards(settings)
    except RewardError as error:
        return [Problem(key=error.where, what=error.what, fix=error.fix)]
    return asyncio.run(_score_made_up(settings, read))


async def _score_made_up(settings: RewardConfig, read: Mapping[str, PromptSet]) -> list[Problem]:
    """Score a made-up response to each kind of prompt, in the same kind of process as the run
    does; returns the failures."""
    found = []
    # The run's own scorers: a trial in this process would not find what a child lacks.
    scorer, of_groups = Scorer(settings), Scorer(settings, "group")
    scorer.start()
    of_groups.start()
    try:
        # Both start in parallel, and the slower one decides.
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
            # One failing kind of prompt is enough for a problem; the others are tried as well.
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
        # Also after an error: their processes would outlive the command.
        scorer.close()
        of_groups.close()
    return found


def _of_each_reward(settings: RewardConfig, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """The first few prompts of those that have the same parts of the reward, for each such set."""
    first: dict[tuple[str | None, ...], list[Prompt]] = {}
    for prompt in prompts:
        # Prompts that use the same parts exercise the same code.
        parts = tuple(n for n, part in settings.rewards.items() if part.applies(prompt.fields))
        of_these = first.setdefault(parts, [])
        if len(of_these) < TRIED_PROMPTS:
            of_these.append(prompt)
    return list(first.values())


def _named(settings: RewardConfig) -> str:
    """Key of the reward, or of its parts."""
    return "rollout.reward.parts" if settings.name is None else "rollout.reward.name"


async def _first_error(scorer: Scorer, prompts: Sequence[Prompt]) -> str | None:
    """Null as soon as one prompt is scored: a reward may fail on some, and on_error decides the
    consequence."""
    first = None
    for prompt in prompts:
        # Nothing of this reward applies to the prompt.
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
        # The next prompt would take as long.
        if scored.timed_out:
            break
    return first


def environment_problems(
    config: Config, read: Mapping[str, PromptSet], tokenizer: Tokenizer | None
) -> list[Problem]:
    """Load the environment, and let it answer a made-up turn to a prompt of each file."""
    settings = None if config.rollout is None else config.rollout.environment
    if settings is None:
        return []
    follow = None
    try:
        load_factory(settings)
        if tokenizer is not None:
            follow = follow_ups(settings, tokenizer)
            if settings.name == TOOLS:
                # Only the first prompt: the template is the same for all.
                for found in read.values():  # what a tool answers is put behind a chat
                    follow.opened(found.prompts[0], "0")
    except EnvironmentRefused as error:
        return [Problem(key=error.where, what=error.what, fix=error.fix)]
    except DataError as error:
        problem = error.problem("rollout.environment.format")
        if settings.name in AGENTS or "format: text" in problem.fix:
            return [problem]
        return [replace(problem, fix=f"{problem.fix}, or set rollout.environment.format: text")]
    except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
        what = f"the chat template refuses a second turn: {error}"
        fix = "set another data.chat_template, or set rollout.environment.format: text"
        return [Problem(key="rollout.environment.format", what=what, fix=fix)]
    # These need a model's answer, which no trial has.
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


def grammar_problems(config: Config) -> list[Problem]:
    """Held-out sets whose regex or JSON schema this machine's vLLM cannot read, as its engines
    would say of the first response. vLLM is imported only if there is such a set, because that
    takes seconds."""
    found: list[Problem] = []
    if config.rollout is None or find_spec("vllm") is None:
        return found
    faults: dict[str, str | None] = {}
    for one in config.eval_sets:
        name = "regex" if one.sampling.regex is not None else "json_schema"
        value = getattr(one.sampling, name)
        if value is None:
            continue
        # Sets often share a grammar, and compiling one takes a second.
        if repr(value) not in faults:
            faults[repr(value)] = _grammar_fault(config, one.sampling)
        fault = faults[repr(value)]
        if fault is not None:
            # The error must name the section that the user wrote it in.
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
    from megatron_async_rl.rollout.vllm.engine_arguments import require_grammar

    given = config.rollout.vllm.get("structured_outputs_config") if config.rollout else None
    try:
        require_grammar(str(config.model.path), sampling, given)
    except Exception as error:  # noqa: BLE001 - of one of several libraries, each with its own
        return " ".join(str(error).split())[:FAULT] or type(error).__name__
    return None
