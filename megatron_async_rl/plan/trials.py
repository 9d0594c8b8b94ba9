"""Trials before a run: the reward and the environment process made-up responses, and vLLM compiles
the grammars of held-out sets."""

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
from megatron_async_rl.data.prompt_texts import gold_answer, questions
from megatron_async_rl.rollout.environments import EnvironmentRefused, load_factory
from megatron_async_rl.rollout.environments.episode import failures
from megatron_async_rl.rollout.environments.transcript import follow_ups
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError
from megatron_async_rl.rollout.rewards.registry import RewardError, RewardItem
from megatron_async_rl.rollout.scoring import Scorer, require_rewards
from megatron_async_rl.samples import Prompt

REWARD_TRIAL_TIMEOUT_S = 20.0
"""Time limit for one made-up response, so a slow reward does not delay a plan."""
MADE_UP_RESPONSE = "0"
TRIED_PROMPTS = 3
GRAMMAR_MESSAGE_CHARACTERS = 240
"""Largest length of a library's message on a grammar, which may repeat the whole grammar."""
GRAMMAR_FIX = {
    "regex": (
        "remove what such grammars do not support: look-around, back-references, conditions, word"
        " boundaries (the expression always matches the whole response)"
    ),
    "json_schema": "remove the keywords that the message names, and check these in the reward",
}
"""Advice on a grammar that vLLM rejects, by its kind."""


def try_reward(config: Config, read: Mapping[str, PromptSet]) -> tuple[list[Problem], list[str]]:
    """Load the reward and score a made-up response and a copy of the question for the first prompts
    of each file. Return problems, and notes on copies that are rewarded."""
    if config.rollout is None:
        return [], []
    settings = config.rollout.reward
    try:
        # Before the trial, to distinguish a wrong name from a failing call.
        require_rewards(settings)
    except RewardError as error:
        return [Problem(key=error.where, what=error.what, fix=error.fix)], []
    return asyncio.run(_score_made_up(settings, read))


async def _score_made_up(
    settings: RewardConfig, read: Mapping[str, PromptSet]
) -> tuple[list[Problem], list[str]]:
    """Score made-up responses to each kind of prompt, in child processes like those of a run.
    Return the failures as problems, and notes."""
    found: list[Problem] = []
    notes: list[str] = []
    # The run's own scorers: a trial in this process would miss failures that only a child has.
    scorer, of_groups = Scorer(settings), Scorer(settings, "group")
    scorer.start()
    of_groups.start()
    try:
        # Both were started above, so they start in parallel.
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
            # The other kinds of prompts are tried nevertheless: each may have its own problem.
            if error is not None:
                name = "a part" if settings.name is None else settings.name
                what = f"{name} failed on a made-up response, {MADE_UP_RESPONSE!r}, to"
                fix = f"correct the reward, or give every line of {key} the fields that it reads"
                found.append(
                    Problem(
                        key=_key_of(settings),
                        what=f"{what} the first prompts of {key}: {error}",
                        fix=fix,
                    )
                )
            elif one is scorer and not _is_remote(settings):
                notes += await _rewarded_copies(key, one, prompts)
    except UserCodeStartError as error:
        # A module that cannot be imported in the child, or too little memory for it.
        fix = "correct the module, or raise rollout.reward.memory_mib"
        found.append(Problem(key=_key_of(settings), what=str(error), fix=fix))
    finally:
        # Also after an error, because their processes would outlive the command.
        scorer.close()
        of_groups.close()
    return found, notes


def _is_remote(settings: RewardConfig) -> bool:
    """Return True if a server or a model scores: each call may take long, or cost money."""
    return any("url" in part.settings for part in settings.rewards.values())


async def _rewarded_copies(key: str, scorer: Scorer, prompts: Sequence[Prompt]) -> list[str]:
    """Return a note if a copy of the question earns at least the reward of the answer of its row,
    for all of these prompts; none if a row has no question or answer in text, or if the reward is
    slow."""
    pairs = [(questions(one.text), gold_answer(one.fields)) for one in prompts]
    if not all(
        lines and right and scorer.scores(one)
        for one, (lines, right) in zip(prompts, pairs, strict=True)
    ):
        return []
    calls = (
        scorer.score_all([RewardItem(one, text)])
        for one, (lines, right) in zip(prompts, pairs, strict=True)
        for text in (lines[0], right)
    )
    try:
        scored = await asyncio.wait_for(asyncio.gather(*calls), REWARD_TRIAL_TIMEOUT_S)
    except TimeoutError:
        return []
    rewards = [0.0 if one.error is not None else one.reward for (one,) in scored]
    # A reward that gives nothing for the bare answer expects another form: no conclusion.
    if not all(
        0.0 < right <= copy for copy, right in zip(rewards[::2], rewards[1::2], strict=True)
    ):
        return []
    (copied, *_), answer = pairs[-1]
    return [
        f"the reward gives a copy of the question ({copied[:40]!r}) as much as the answer"
        f" ({answer[:20]!r}), for the first prompts of {key}: a policy can learn to copy"
    ]


def _of_each_reward(settings: RewardConfig, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Return the first prompts of each kind. Prompts of one kind use the same parts of the
    reward."""
    first: dict[tuple[str | None, ...], list[Prompt]] = {}
    for prompt in prompts:
        parts = tuple(n for n, part in settings.rewards.items() if part.applies(prompt.fields))
        chosen = first.setdefault(parts, [])
        if len(chosen) < TRIED_PROMPTS:
            chosen.append(prompt)
    return list(first.values())


def _key_of(settings: RewardConfig) -> str:
    """Return the config key of the reward, or of its parts."""
    return "rollout.reward.parts" if settings.name is None else "rollout.reward.name"


async def _first_error(scorer: Scorer, prompts: Sequence[Prompt]) -> str | None:
    """Return the error on the first prompt, or None if any prompt is scored: a reward may fail on
    some prompts, and rollout.reward.on_error decides what happens then."""
    first = None
    for prompt in prompts:
        # No part of the reward applies to this kind of prompt.
        if not scorer.scores(prompt):
            return None
        items = [RewardItem(prompt, MADE_UP_RESPONSE)] * (2 if scorer.per == "group" else 1)
        try:
            scored, *_ = await asyncio.wait_for(scorer.score_all(items), REWARD_TRIAL_TIMEOUT_S)
        except TimeoutError:
            return None  # slow, which rollout.reward.timeout_s may permit: no result
        if scored.error is None:
            return None
        first = first or scored.error
        # The next prompt would probably take as long.
        if scored.timed_out:
            break
    return first


def environment_problems(
    config: Config, read: Mapping[str, PromptSet], tokenizer: Tokenizer | None
) -> list[Problem]:
    """Load the environment and let it process a made-up turn for the first prompts of each file.
    Return its problems."""
    settings = None if config.rollout is None else config.rollout.environment
    if settings is None:
        return []
    follow = None
    try:
        load_factory(settings)
        if tokenizer is not None:
            follow = follow_ups(settings, tokenizer)
            if settings.name == TOOLS:
                # The template must accept a tool's output after a chat. One prompt of each file is
                # enough, because the template is the same for all.
                for found in read.values():
                    follow.opened(found.prompts[0], "0")
    except EnvironmentRefused as error:
        return [Problem(key=error.where, what=error.what, fix=error.fix)]
    except DataError as error:
        problem = error.problem("rollout.environment.format")
        if settings.name in AGENTS or "format: text" in problem.fix:
            return [problem]
        return [replace(problem, fix=f"{problem.fix}, or set rollout.environment.format: text")]
    except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
        what = f"the chat template does not accept a second turn: {error}"
        fix = "set another data.chat_template, or set rollout.environment.format: text"
        return [Problem(key="rollout.environment.format", what=what, fix=fix)]
    # Tools and agents act on a model's response, so a made-up one proves nothing.
    if settings.name in (TOOLS, *AGENTS):
        return _missing_tasks(settings, read)
    tried = {key: found.prompts[:TRIED_PROMPTS] for key, found in read.items()}
    trials = failures(settings, tried, MADE_UP_RESPONSE, REWARD_TRIAL_TIMEOUT_S, follow)
    return [
        Problem(
            key="rollout.environment.name",
            what=f"{settings.name} failed on {error}",
            fix="correct the environment, or give every prompt the fields that it reads",
        )
        for error in asyncio.run(trials).values()
    ]


def _missing_tasks(settings: EnvironmentConfig, read: Mapping[str, PromptSet]) -> list[Problem]:
    """Return a problem for the first prompt of each file that has no task in the environment
    `verifiers`; no other environment has tasks."""
    environment: Any = load_factory(settings)()
    problems = []
    for key, found in read.items() if hasattr(environment, "task") else ():
        try:
            for prompt in found.prompts:
                environment.task(prompt)
        except ValueError as error:
            fix = f"set rollout.environment.settings.task to the column of {key} with the task"
            problems.append(Problem(key="rollout.environment.settings", what=str(error), fix=fix))
    return problems


def grammar_problems(config: Config) -> list[Problem]:
    """Return problems of held-out sets whose regex or JSON schema vLLM rejects; empty if vLLM is
    not installed. Without this check, engines would refuse the first request with it."""
    found: list[Problem] = []
    if config.rollout is None or find_spec("vllm") is None:
        return found
    faults: dict[str, str | None] = {}
    for one in config.eval_sets:
        name = "regex" if one.sampling.regex is not None else "json_schema"
        value = getattr(one.sampling, name)
        if value is None:
            continue
        # Each grammar is compiled once, which takes a second; sets often share one.
        if repr(value) not in faults:
            faults[repr(value)] = _grammar_fault(config, one.sampling)
        fault = faults[repr(value)]
        if fault is not None:
            # The key of the section in which the user wrote it.
            own = isinstance(one.file, EvalSetConfig) and one.file.sampling is not None
            at = one.key if own else "eval"
            found.append(
                Problem(
                    key=f"{at}.sampling.{name}",
                    what=f"vLLM cannot compile it: {fault}",
                    fix=GRAMMAR_FIX[name],
                )
            )
    return found


def _grammar_fault(config: Config, sampling: EvalSampling) -> str | None:
    """Return vLLM's message on a grammar that it rejects, or None."""
    # Imported here, because importing vLLM takes seconds and few configs have a grammar.
    from megatron_async_rl.rollout.vllm.engine_arguments import require_grammar

    options = config.rollout.vllm.get("structured_outputs_config") if config.rollout else None
    try:
        require_grammar(str(config.model.path), sampling, options)
    except Exception as error:  # noqa: BLE001 - several libraries, each with its own errors
        return " ".join(str(error).split())[:GRAMMAR_MESSAGE_CHARACTERS] or type(error).__name__
    return None
