"""How responses are drawn, in training and of held-out prompts, and what that means for log-probs.

An engine reports the log-prob of the distribution that it drew from; the trainer's is log
softmax(logits / temperature), over the whole vocabulary. `RENORMALISING` lists the settings that
make them differ at equal weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_async_rl.config.data import DataConfig, FileConfig
from megatron_async_rl.config.settings_model import Strict

COLDEST = 0.01
"""Lowest temperature above 0: vLLM would draw from this one for those below it, and not say so."""


def _drawn(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(
            f"{temperature:g} is below {COLDEST}, the lowest that vLLM draws at; set {COLDEST}, or"
            " 0 for the likeliest token (held-out prompts only)"
        )
    return temperature


Temperature = Annotated[float, Field(ge=0.0, le=2.0), AfterValidator(_drawn)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
MinShare = Annotated[float, Field(ge=0.0, lt=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Text = Annotated[str, Field(min_length=1)]


class SamplingConfig(Strict):
    """Sampling of responses."""

    temperature: Temperature = 1.0
    """Divisor of the logits in sampling and in the trainer's log-probs, from 0.01 to 2. The value
    0, which selects the likeliest token, is for held-out prompts only."""
    max_tokens: PositiveInt
    """Largest number of response tokens; longer responses end with finish reason `length`."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response; the end-of-sequence tokens of the model always do."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Further tokens that end a response."""
    top_p: PositiveShare = 1.0
    """Draw from the smallest set of likeliest tokens with at least this total probability; 1:
    from all."""
    top_k: NonNegativeInt = 0
    """Draw from this number of likeliest tokens; 0: from all."""
    min_p: MinShare = 0.0
    """Draw from tokens with at least this share of the likeliest token's probability; 0: from
    all."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of the positive logits, and factor of the negative ones, of tokens in the prompt
    and in the response so far; 1 has no effect."""
    presence_penalty: Penalty = 0.0
    """Amount subtracted from the logits of tokens in the response so far."""
    frequency_penalty: Penalty = 0.0
    """Amount subtracted from the logits of tokens in the response so far, times their number of
    occurrences."""
    bad_words: tuple[Text, ...] = ()
    """Strings whose last token is never drawn after the others."""

    @property
    def needs_tokenizer(self) -> bool:
        """The engine reads text."""
        return bool(self.stop or self.bad_words)

    @property
    def renormalised(self) -> list[str]:
        """Settings that make an engine's log-probs differ from the trainer's, as `top_p: 0.9`."""
        return [
            f"{name}: {shown(getattr(self, name))}"
            for name in RENORMALISING
            if getattr(self, name) != type(self).model_fields[name].default
        ]


# Stop conditions are missing: they end a response and change no probability.
RENORMALISING = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
)


class EvalSampling(SamplingConfig):
    """Sampling for held-out prompts, after `EvalSamplingConfig` went over training's. The samples
    are not trained on, so they need not follow the trainer's distribution."""

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None

    @property
    def needs_tokenizer(self) -> bool:
        return super().needs_tokenizer or self.json_schema is not None or self.regex is not None


class EvalSamplingConfig(Strict):
    """How responses to held-out prompts are drawn; null: as in training (rollout.sampling)."""

    temperature: Temperature | None = None
    """0 selects the likeliest token (greedy), with one response per prompt; else from 0.01 to 2."""
    max_tokens: PositiveInt | None = None
    """Response tokens."""
    stop: tuple[Text, ...] | None = None
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Tokens that end a response, besides the model's own."""
    top_p: PositiveShare | None = None
    """1: from all tokens."""
    top_k: NonNegativeInt | None = None
    """0: from all tokens."""
    min_p: MinShare | None = None
    """0: from all tokens."""
    repetition_penalty: PositiveFloat | None = None
    """1: none."""
    presence_penalty: Penalty | None = None
    """0: none."""
    frequency_penalty: Penalty | None = None
    """0: none."""
    bad_words: tuple[Text, ...] | None = None
    """Strings whose last token is never drawn after the others."""
    json_schema: Mapping[str, Any] | None = None
    """A response is JSON that fits this schema."""
    regex: str | None = None
    """A response matches this expression from its first to its last character."""

    @model_validator(mode="after")
    def _one_grammar(self) -> EvalSamplingConfig:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex both constrain a response; keep one")
        if self.json_schema is not None:
            # Only runs with a schema pay for the import.
            from jsonschema import SchemaError, validators  # slow to import

            schema = dict(self.json_schema)
            try:
                validators.validator_for(schema).check_schema(schema)
            except SchemaError as error:
                what = f"json_schema: {error.json_path}: {error.message}"
                raise ValueError(f"{what.splitlines()[0]}; write a valid JSON Schema") from error
        if self.regex is not None:
            try:
                # Python's syntax is a first check; preflight calls vLLM's own grammar compiler.
                re.compile(self.regex)
            except re.error as error:
                raise ValueError(
                    f"regex: {self.regex!r} is not a regular expression: {error}"
                ) from error
        return self

    def over(self, training: SamplingConfig) -> EvalSampling:
        """Training's, changed by what is set here."""
        # Null inherits, so a value equal to the default still overrides training's.
        own = {name: value for name, value in dict(self).items() if value is not None}
        return EvalSampling.model_construct(**{**dict(training), **own})


class EvalSetConfig(FileConfig):
    """One set of held-out prompts. What is null is as in `eval`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Name of the set in its metrics, such as `eval/NAME/mean`."""
    samples_per_prompt: PositiveInt | None = None
    """Null: eval.samples_per_prompt."""
    pass_at: tuple[PositiveInt, ...] | None = None
    """Null: eval.pass_at."""
    pass_reward: float | None = None
    """Null: eval.pass_reward."""
    sampling: EvalSamplingConfig | None = None
    """Null: eval.sampling; what is null in it is as in training."""


class EvalConfig(Strict):
    """Held-out evaluation before, during and after training; without this section there is none.
    With objective.loss: sft it measures the loss of held-out responses, and only `sets` and `every`
    apply."""

    sets: tuple[EvalSetConfig, ...] = ()
    """Several sets of held-out prompts, each with its own sampling, instead of data.eval. The
    report and the live display show the first."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of every set without its own."""
    samples_per_prompt: PositiveInt = 4
    """Responses to each prompt."""
    every: NonNegativeInt = 0
    """Versions between evaluations during training; 0: before the first and after the last step
    only."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """k of the pass@k to report: a prompt counts when one of k responses has a reward of at least
    `pass_reward`."""
    pass_reward: float = 1.0
    """Reward from which a response counts as passed."""
    engines: NonNegativeInt = 0
    """Engines that only evaluate, while training continues; 0: the training engines, and training
    waits."""

    @model_validator(mode="after")
    def _one_name_each(self) -> EvalConfig:
        names = [one.name for one in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"eval.sets: two are called {twice[0]}; give each a name of its own")
        # Metric names must stay unambiguous: `eval/part/NAME` has a meaning already.
        if "part" in names:
            raise ValueError(
                "eval.sets: none can be called `part`: `eval/part/NAME` is the mean of a part of"
                " the reward"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class HeldOutFile:
    """The rows of one held-out set. `key`: its place in the configuration. `name`: empty for
    data.eval."""

    key: str
    name: str
    file: FileConfig

    @property
    def path_key(self) -> str:
        return f"{self.key}.path" if self.name else "data.eval"


@dataclass(frozen=True, kw_only=True)
class EvalSet(HeldOutFile):
    """One set of held-out prompts with everything filled in."""

    samples_per_prompt: int
    pass_at: tuple[int, ...]
    pass_reward: float
    sampling: EvalSampling
    max_tokens_key: str
    """Config key that set sampling.max_tokens."""


def _named_sets(data: DataConfig, evaluation: EvalConfig) -> list[tuple[str, EvalSetConfig]]:
    """The sets in order, with their keys; data.eval alone is a list of one."""
    named = [(f"eval.sets.{index}", one) for index, one in enumerate(evaluation.sets)]
    if not named and data.eval is not None:
        # model_construct: validation would refuse an empty name.
        named = [("eval", EvalSetConfig.model_construct(name="", path=data.eval))]
    return named


def held_out_files(data: DataConfig, evaluation: EvalConfig) -> list[HeldOutFile]:
    """Files of the held-out sets, in order, for sampled and given responses alike."""
    return [
        HeldOutFile(key=key, name=one.name, file=one) for key, one in _named_sets(data, evaluation)
    ]


def eval_sets(
    data: DataConfig, training: SamplingConfig | None, evaluation: EvalConfig
) -> list[EvalSet]:
    """The sets to sample; none where there are no engines. `training`: of rollout.sampling, null
    without engines."""
    if training is None:
        return []
    found = []
    for key, one in _named_sets(data, evaluation):
        sampling = one.sampling or evaluation.sampling
        # Errors about lengths must name the key that a user can change.
        section = "rollout" if sampling.max_tokens is None else key if one.sampling else "eval"
        found.append(
            EvalSet(
                key=key,
                name=one.name,
                file=one,
                samples_per_prompt=one.samples_per_prompt or evaluation.samples_per_prompt,
                # `or` would replace an empty list, which means that no pass@k is reported.
                pass_at=evaluation.pass_at if one.pass_at is None else one.pass_at,
                pass_reward=evaluation.pass_reward if one.pass_reward is None else one.pass_reward,
                sampling=sampling.over(training),
                max_tokens_key=f"{section}.sampling.max_tokens",
            )
        )
    return found


def shown(value: Any) -> str:
    """Text of a setting of sampling in messages."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(list(value))
