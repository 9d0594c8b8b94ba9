"""Held-out evaluation, on the engines of training but without its data, order or numbering. Each
set of prompts has its own sampling. For given responses (`loss: sft`) the ranks measure the loss
(`rank0.py`), and this file defines its result.

Invariants:
- requests have negative group numbers, so no scheduler mistakes them for training's: prompt i,
  counted over all sets, is group -1 - i;
- every token comes from the version that is evaluated, or there is no result;
- a prompt's seeds follow from the run's seed and its position among the prompts: equal weights give
  equal responses.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.sampling import EvalConfig, EvalSet
from megatron_async_rl.data import Tokenizer, log_too_long, read_set
from megatron_async_rl.data.row_columns import Required, nothing_more
from megatron_async_rl.flow.errors import BatchTimeout, FlowError, reward_failed
from megatron_async_rl.rollout.scoring import GroupRewards
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Prompt, Request

EvalResponses = Sequence[tuple[Prompt, Sequence[SampleRow]]]
"""The prompts, each with its samples."""


class Runner(Protocol):
    """Sampler of requests (flow.router.Requests)."""

    @property
    def moved_at(self) -> float:
        """Time when a response last ended or grew; monotonic seconds."""
        ...

    async def run(self, requests: Sequence[Request], version: int) -> list[SampleRow]:
        """Return the samples in the order of the requests, from engines that hold `version`. A
        cancelled call stops its running requests. Raises EngineFailed, RequestGivenUp."""
        ...


class WeightsMoved(FlowError):
    """An engine loaded new weights while it sampled an evaluation."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One set of prompts, with `n` responses to each. `name`: empty for the only set of a run."""

    prompts: Sequence[Prompt]
    n: int
    name: str = ""
    pass_at: tuple[int, ...] = EvalConfig.default_of("pass_at")
    pass_reward: float = EvalConfig.default_of("pass_reward")


def read_held_out(
    data: DataConfig,
    chosen: EvalSet,
    tokenizer: Tokenizer,
    *,
    required: Required = nothing_more,
    room: int | None = None,
) -> HeldOut:
    """Return a set with its prompts. Raises DataError."""
    read = read_set(data, chosen.file, tokenizer, required=required, room=room)
    log_too_long(read)
    return HeldOut(
        name=chosen.name,
        prompts=read.prompts,
        n=chosen.samples_per_prompt,
        pass_at=chosen.pass_at,
        pass_reward=chosen.pass_reward,
    )


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """Result of one prompt over the `samples` responses that have a reward. A response whose reward
    failed, for instance because the row's answer is unreadable, is not counted. `mean`: mean of the
    rewards; nan without any. `passed`: responses with a reward of at least `eval.pass_reward`."""

    id: str
    mean: float
    passed: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Result of one set of prompts."""

    version: int
    mean_reward: float
    """Mean over prompts of their means, without prompts that have no mean; nan if none has one."""
    pass_at: Mapping[int, float]
    """k -> estimate of the share of prompts with at least one passing response among k, over the
    prompts that have k responses with a reward; nan if there are none."""
    per_prompt: tuple[PromptResult, ...]
    """Results by prompt, in the order of the file."""
    truncated: float
    """Share of responses that the token limit cut."""
    samples: int
    tokens: int
    reward_errors: int
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of the reward (`rollout.reward.parts`) before weighting, averaged like
    `mean_reward`."""
    name: str = ""
    others: tuple[EvalResult, ...] = ()
    """Results of the other sets; this object holds the first set's."""

    @property
    def prompts(self) -> int:
        return len(self.per_prompt)

    def metrics(self) -> dict[str, float]:
        """Metrics of this result under the keys of an unnamed set."""
        return {
            # Absent if every reward failed, while the share of passed responses is still defined.
            **({"eval/mean": self.mean_reward} if math.isfinite(self.mean_reward) else {}),
            "eval/truncated": self.truncated,
            **_passed("eval/pass@k", self),
            **_parts("eval/part/NAME", self),
        }

    def metrics_of_set(self) -> dict[str, float]:
        """Metrics of this result under the keys of a named set; SET stands for its name."""
        return {
            "eval/SET/mean": self.mean_reward,
            "eval/SET/truncated": self.truncated,
            **_passed("eval/SET/pass@k", self),
            **_parts("eval/SET/part/NAME", self),
        }

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; a number that is not finite becomes null."""
        return {
            "version": self.version,
            **({"set": self.name} if self.name else {}),
            "mean_reward": _finite(self.mean_reward),
            **({"parts": dict(self.parts)} if self.parts else {}),
            "pass_at": {str(k): _finite(value) for k, value in self.pass_at.items()},
            "prompts": self.prompts,
            "samples": self.samples,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "reward_errors": self.reward_errors,
            "seconds": round(self.seconds, 3),
            "per_prompt": [
                {
                    "id": one.id,
                    "mean": _finite(one.mean),
                    "passed": one.passed,
                    "samples": one.samples,
                }
                for one in self.per_prompt
            ],
            **({"others": [one.as_json() for one in self.others]} if self.others else {}),
        }


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """Result of one set of given responses. `loss`: nats per trained token, as `Policy.mean_loss`;
    `seconds`: time of all sets together."""

    version: int
    loss: float
    tokens: int
    seconds: float
    name: str = ""
    others: tuple[LossResult, ...] = ()
    """Results of the other sets; this object holds the first set's."""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; a number that is not finite becomes null."""
        return {
            "version": self.version,
            **({"set": self.name} if self.name else {}),
            "loss": _finite(self.loss),
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            **({"others": [one.as_json() for one in self.others]} if self.others else {}),
        }

    def metrics(self) -> dict[str, float]:
        """See EvalResult."""
        return {"eval/loss": self.loss}

    def metrics_of_set(self) -> dict[str, float]:
        """See EvalResult."""
        return {"eval/SET/loss": self.loss}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k of the `samples` responses, drawn without replacement, is
    one of the `passed`: 1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k of Chen et al.
    2021 (arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} needs at least {max(k, 1)} responses per prompt, and k from 1; there are"
            f" {samples} responses"
        )
    # Integers until a single division, so exact for any number of samples.
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def summarise_evaluation(
    answers: EvalResponses,
    *,
    version: int,
    seconds: float,
    pass_at: Sequence[int],
    pass_reward: float,
    name: str = "",
) -> EvalResult:
    """Return the result of one set. `answers`: the prompts with their samples. Raises WeightsMoved,
    and ValueError for a k above a prompt's samples."""
    fewest = min((len(samples) for _, samples in answers), default=0)
    for k in pass_at:
        if not 1 <= k <= fewest:
            raise ValueError(
                f"pass@{k} needs at least {max(k, 1)} responses per prompt; there are {fewest}"
            )
    for _, samples in answers:
        for sample in samples:
            # These are the oldest and the newest token; all others lie between them.
            if not sample.start_version == sample.last_version == version:
                raise WeightsMoved(
                    f"evaluation of version {version}: response {sample.id} on engine"
                    f" {sample.sample().engine} has tokens of versions {sample.start_version} to"
                    f" {sample.last_version}; weights must not move while they are evaluated"
                )
    per_prompt = tuple(_prompt_result(prompt, samples, pass_reward) for prompt, samples in answers)
    scored = [one.mean for one in per_prompt if math.isfinite(one.mean)]
    every = [sample for _, samples in answers for sample in samples]
    return EvalResult(
        version=version,
        mean_reward=sum(scored) / len(scored) if scored else math.nan,
        pass_at={k: _mean_pass_at(k, per_prompt) for k in pass_at},
        per_prompt=per_prompt,
        truncated=sum(sample.truncated for sample in every) / len(every),
        samples=len(every),
        tokens=sum(sample.length for sample in every),
        reward_errors=sum(not sample.valid for sample in every),
        seconds=seconds,
        parts=_part_means(answers),
        name=name,
    )


def _mean_pass_at(k: int, per_prompt: Sequence[PromptResult]) -> float:
    """Return the mean over the prompts that have k responses with a reward. As in the mean reward,
    a response whose reward failed is left out, not counted as wrong."""
    every = [pass_at_k(one.samples, one.passed, k) for one in per_prompt if one.samples >= k]
    return sum(every) / len(every) if every else math.nan


def _part_means(answers: EvalResponses) -> dict[str, float]:
    """Return, by part, the mean over prompts of the means over their responses."""
    means: dict[str, list[float]] = {}
    for _, samples in answers:
        of_prompt: dict[str, list[float]] = {}
        for sample in samples:
            for name, value in (sample.reward_parts or {}).items() if sample.valid else ():
                of_prompt.setdefault(name, []).append(value)
        # As for the reward, a prompt counts once, however many of its responses have this part.
        for name, values in of_prompt.items():
            means.setdefault(name, []).append(sum(values) / len(values))
    return {name: sum(values) / len(values) for name, values in means.items()}


async def evaluate(
    fleet: Runner,
    sets: Sequence[HeldOut],
    version: int,
    timeout_s: float,
    *,
    on_reward_error: Literal["drop", "stop"],
    rewards: GroupRewards | None = None,
    on_progress: Callable[[int, int], None] = lambda prompts, tokens: None,
    on_answers: Callable[[EvalResponses], None] = lambda answers: None,
) -> EvalResult:
    """Return the result of the first of `sets`, which holds the results of the others. Engines that
    hold `version` sample the responses. `timeout_s`: longest time in which no response grows,
    however long the evaluation takes. `rewards`: rewards of whole groups. `on_progress`: called
    with the prompts answered and the tokens sampled so far. `on_answers`: called with all answers
    at the end.

    Raises EngineFailed, RequestGivenUp, RewardFailed (with `on_reward_error: stop`), BatchTimeout,
    WeightsMoved, and ValueError without prompts.
    """
    requested = [(one, prompt) for one in sets for prompt in one.prompts]
    if not requested:
        raise ValueError("evaluation needs at least one prompt")
    prompts = [prompt for _, prompt in requested]
    started = time.monotonic()
    finished: asyncio.Queue[int] = asyncio.Queue()
    tasks: list[asyncio.Task[list[SampleRow]]] = []
    for index, (one, prompt) in enumerate(requested):
        # Numbered over all sets, so that no two requests share an id.
        requests = [
            Request(group=-1 - index, k=k, prompt=prompt, sampling=one.name) for k in range(one.n)
        ]
        answer = _answer(fleet, prompt, requests, version, rewards)
        tasks.append(asyncio.create_task(answer, name=f"held-out prompt {prompt.id}"))
        # In the order in which they end, for the progress report.
        tasks[-1].add_done_callback(partial(_report_finished, finished, index))
    try:
        tokens = 0
        for answered in range(len(prompts)):
            try:
                index = await _next_answered(
                    finished,
                    lambda: max(fleet.moved_at, 0.0 if rewards is None else rewards.moved_at),
                    timeout_s,
                )
            except TimeoutError:
                raise BatchTimeout(_lateness(prompts, tasks, version, timeout_s)) from None
            samples = tasks[index].result()
            bad = [sample for sample in samples if not sample.valid]
            if bad and on_reward_error == "stop":
                raise reward_failed(bad)
            tokens += sum(sample.length for sample in samples)
            on_progress(answered + 1, tokens)
    finally:
        # After an error the other tasks must stop: `run` aborts their requests.
        for task in tasks:
            task.cancel()
    answers = [(prompt, task.result()) for prompt, task in zip(prompts, tasks, strict=True)]
    on_answers(answers)
    seconds = time.monotonic() - started
    left = iter(answers)
    # All sets were sampled at once, to keep engines busy; here they are separated again.
    first, *others = (
        summarise_evaluation(
            list(islice(left, len(one.prompts))),
            version=version,
            seconds=seconds,
            pass_at=one.pass_at,
            pass_reward=one.pass_reward,
            name=one.name,
        )
        for one in sets
    )
    return replace(first, others=tuple(others))


async def _answer(
    fleet: Runner,
    prompt: Prompt,
    requests: Sequence[Request],
    version: int,
    rewards: GroupRewards | None,
) -> list[SampleRow]:
    samples = await fleet.run(requests, version)
    return samples if rewards is None else await rewards.of(prompt, samples, held_out=True)


async def _next_answered(
    finished: asyncio.Queue[int], moved_at: Callable[[], float], timeout_s: float
) -> int:
    """Return the next finished prompt. Raises TimeoutError after `timeout_s` in which no response
    grew and no group got its reward."""
    waited_from = time.monotonic()
    while True:
        # Read again after each wait, because a response may have grown meanwhile.
        left = max(waited_from, moved_at()) + timeout_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            return await asyncio.wait_for(finished.get(), left)
        except TimeoutError:
            continue


def _report_finished(
    finished: asyncio.Queue[int], index: int, task: asyncio.Task[list[SampleRow]]
) -> None:
    if not task.cancelled():
        # Read the exception, or asyncio would report all but the first as never retrieved.
        task.exception()
    finished.put_nowait(index)


def _lateness(
    prompts: Sequence[Prompt],
    tasks: Sequence[asyncio.Task[list[SampleRow]]],
    version: int,
    timeout_s: float,
) -> str:
    missing = [prompt.id for prompt, task in zip(prompts, tasks, strict=True) if not task.done()]
    return (
        f"evaluation of version {version}: no response grew for {timeout_s:g} s; {len(missing)} of"
        f" {len(prompts)} are missing, among them {', '.join(missing[:5])}"
    )


def _prompt_result(
    prompt: Prompt, samples: Sequence[SampleRow], pass_reward: float
) -> PromptResult:
    rewards = [sample.reward for sample in samples if sample.valid]
    return PromptResult(
        id=prompt.id,
        mean=sum(rewards) / len(rewards) if rewards else math.nan,
        passed=sum(reward >= pass_reward for reward in rewards),
        samples=len(rewards),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _passed(name: str, result: EvalResult) -> dict[str, float]:
    return {
        name.replace("@k", f"@{k}"): value
        for k, value in result.pass_at.items()
        if math.isfinite(value)
    }


def _parts(name: str, result: EvalResult) -> dict[str, float]:
    return {name.replace("NAME", part): mean for part, mean in result.parts.items()}


class EvalSchedule:
    """Versions that a run evaluates, and the results that it keeps.

    Invariants:
    - a version is evaluated once, over stops and resumes: `means` goes into the checkpoint;
    - no version is left out, provided that a checkpoint waits for `unfinished` evaluations. The
      resume repeats an evaluation of the checkpoint's own version or of a later one. It could not
      repeat one of an older version, because those weights are gone;
    - version 0 and the last one are always evaluated, and between them every `every`-th.

    `every`: versions between evaluations, 0 for none; `steps`: the run's last version; `means`:
    results of an earlier start."""

    def __init__(self, *, every: int, steps: int, means: Mapping[int, float]) -> None:
        self._every = every
        self._steps = steps
        self.means = dict(means)
        """Version -> mean reward, or held-out loss; for the checkpoint."""
        self._begun: int | None = None

    def due(self, version: int) -> bool:
        """Return True if `version` must be evaluated once the engines hold it."""
        chosen = version in (0, self._steps) or (self._every > 0 and version % self._every == 0)
        # The checkpoint has `means`: a resume repeats no evaluation.
        return chosen and version not in self.means

    def begin(self, version: int) -> None:
        """Record that the evaluation of `version` is running, until its result is recorded."""
        self._begun = version

    def unfinished(self, version: int) -> bool:
        """Return True while an evaluation runs that a resume from `version` could not repeat."""
        # A resume evaluates its own version again; the weights of an older one are gone.
        return self._begun is not None and self._begun < version and self._begun not in self.means

    def record(self, result: EvalResult | LossResult) -> dict[str, float]:
        """Record a result; return its metrics, for the next line of the log."""
        self.means[result.version] = (
            result.mean_reward if isinstance(result, EvalResult) else result.loss
        )
        found: dict[str, float] = {
            "eval/version": result.version,
            "eval/seconds": result.seconds,
            **result.metrics(),
        }
        for one in (result, *result.others):
            if one.name:
                of_set = one.metrics_of_set()
                found |= {name.replace("SET", one.name, 1): of_set[name] for name in of_set}
        return found

    @property
    def before(self) -> float | None:
        """`means` before the first step; None while not measured."""
        return self.means.get(0)

    @property
    def after(self) -> float | None:
        """`means` after the last step; None while not measured."""
        return self.means.get(self._steps)
