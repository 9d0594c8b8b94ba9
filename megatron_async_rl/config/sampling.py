"""Settings of sampling, for training and for held-out prompts.

An engine reports log-probs of the distribution that it samples from; the trainer computes log
softmax(logits / temperature) over the whole vocabulary. `RENORMALISING` lists the settings with
which the two differ at equal weights.
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
"""Lowest temperature above 0. vLLM would silently raise a lower one to this value."""


def _require_supported(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(
            f"{temperature:g} is below {COLDEST}, vLLM's lowest temperature; set {COLDEST}, or 0"
            " for the likeliest token (held-out prompts only)"
        )
    return temperature


Temperature = Annotated[float, Field(ge=0.0, le=2.0), AfterValidator(_require_supported)]
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
    """Largest number of response tokens; a response that would be longer ends with finish reason
    `length`."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response; the end-of-sequence tokens of the model always do."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Further tokens that end a response, such as special tokens, which no string in `stop` can
    name."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of likeliest tokens with at least this total probability; 1
    samples from all tokens."""
    top_k: NonNegativeInt = 0
    """Sample from this number of likeliest tokens; 0 samples from all tokens."""
    min_p: MinShare = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability; 0 samples
    from all tokens."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of the positive logits, and factor of the negative logits, of tokens in the prompt
    and in the response so far; 1 has no effect."""
    presence_penalty: Penalty = 0.0
    """Amount that is subtracted from the logits of tokens in the response so far."""
    frequency_penalty: Penalty = 0.0
    """Amount that is subtracted from the logits of tokens in the response so far, per
    occurrence."""
    bad_words: tuple[Text, ...] = ()
    """Strings whose last token is never sampled after their other tokens."""

    @property
    def needs_tokenizer(self) -> bool:
        """True if the engine needs the tokenizer to read text."""
        return bool(self.stop or self.bad_words)

    @property
    def renormalised(self) -> list[str]:
        """Settings with which an engine's log-probs differ from the trainer's: `top_p: 0.9`."""
        return [
            f"{name}: {shown(getattr(self, name))}"
            for name in RENORMALISING
            if getattr(self, name) != type(self).model_fields[name].default
        ]


# Stop conditions are absent: they end a response and do not change probabilities.
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
    """Sampling for held-out prompts: that of training, overridden by `EvalSamplingConfig`. The
    samples are not trained on, so they need not follow the trainer's distribution."""

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None

    @property
    def needs_tokenizer(self) -> bool:
        return super().needs_tokenizer or self.json_schema is not None or self.regex is not None


class EvalSamplingConfig(Strict):
    """Sampling of responses to held-out prompts. A key that is null uses rollout.sampling."""

    temperature: Temperature | None = None
    """Temperature, from 0.01 to 2. 0 selects the likeliest token (greedy) and needs one response
    per prompt."""
    max_tokens: PositiveInt | None = None
    """Largest number of response tokens."""
    stop: tuple[Text, ...] | None = None
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Further tokens that end a response."""
    top_p: PositiveShare | None = None
    """Total probability of the likeliest tokens to sample from; 1 samples from all tokens."""
    top_k: NonNegativeInt | None = None
    """Number of likeliest tokens to sample from; 0 samples from all tokens."""
    min_p: MinShare | None = None
    """Smallest share of the likeliest token's probability; 0 samples from all tokens."""
    repetition_penalty: PositiveFloat | None = None
    """Penalty on tokens in the prompt and in the response; 1 has no effect."""
    presence_penalty: Penalty | None = None
    """Penalty on tokens in the response; 0 has no effect."""
    frequency_penalty: Penalty | None = None
    """Penalty per occurrence of a token in the response; 0 has no effect."""
    bad_words: tuple[Text, ...] | None = None
    """Strings whose last token is never sampled after their other tokens."""
    json_schema: Mapping[str, Any] | None = None
    """JSON Schema that every response follows."""
    regex: str | None = None
    """Regular expression that every response matches as a whole."""

    @model_validator(mode="after")
    def _one_grammar(self) -> EvalSamplingConfig:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex both constrain a response; keep one")
        if self.json_schema is not None:
            # Imported here, because the import is slow and few runs have a schema.
            from jsonschema import SchemaError, validators

            schema = dict(self.json_schema)
            try:
                validators.validator_for(schema).check_schema(schema)
            except SchemaError as error:
                what = f"json_schema: {error.json_path}: {error.message}"
                raise ValueError(f"{what.splitlines()[0]}; write a valid JSON Schema") from error
        if self.regex is not None:
            try:
                # First check by Python's syntax; preflight calls vLLM's own grammar compiler.
                re.compile(self.regex)
            except re.error as error:
                raise ValueError(
                    f"regex: {self.regex!r} is not a regular expression: {error}"
                ) from error
        return self

    def over(self, training: SamplingConfig) -> EvalSampling:
        """Return the sampling of training, overridden by the keys that are set here."""
        # Null inherits; a value overrides training's even if it equals the default.
        own = {name: value for name, value in dict(self).items() if value is not None}
        return EvalSampling.model_construct(**{**dict(training), **own})


class EvalSetConfig(FileConfig):
    """One set of held-out prompts. A key that is null uses the key of `eval`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Name of the set in its metrics, such as `eval/NAME/mean`."""
    samples_per_prompt: PositiveInt | None = None
    """Number of responses to each prompt; null uses eval.samples_per_prompt."""
    pass_at: tuple[PositiveInt, ...] | None = None
    """Values of k of pass@k; null uses eval.pass_at."""
    pass_reward: float | None = None
    """Reward from which a response counts as passed; null uses eval.pass_reward."""
    sampling: EvalSamplingConfig | None = None
    """Sampling of the set, whose null keys use rollout.sampling; null uses eval.sampling."""


class EvalConfig(Strict):
    """Held-out evaluation before, during and after training; a run without this section does not
    evaluate. With objective.loss: sft it measures the loss of held-out responses, and only `sets`
    and `every` apply."""

    sets: tuple[EvalSetConfig, ...] = ()
    """Several sets of held-out prompts, each with its own sampling, instead of data.eval. The
    report and the live display show the first."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of the sets that have no sampling of their own."""
    samples_per_prompt: PositiveInt = 4
    """Number of responses to each prompt."""
    every: NonNegativeInt = 0
    """Number of weight versions between evaluations during training; 0 evaluates only before the
    first and after the last step."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """Values of k of the reported pass@k: a prompt passes if at least one of k responses has a
    reward of at least `pass_reward`."""
    pass_reward: float = 1.0
    """Reward from which a response counts as passed."""
    engines: NonNegativeInt = 0
    """Number of engines that only evaluate, while training continues. With 0 the training engines
    evaluate, and training waits."""

    @model_validator(mode="after")
    def _one_name_each(self) -> EvalConfig:
        names = [one.name for one in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"eval.sets: two sets are called {twice[0]}; give each its own name")
        # `eval/part/NAME` is already the metric of a part of the reward.
        if "part" in names:
            raise ValueError(
                "eval.sets: a set cannot be called `part`, because `eval/part/NAME` is the mean of"
                " a part of the reward; rename it"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class HeldOutFile:
    """File of one held-out set. `key`: the set's dotted key in the configuration. `name`: empty for
    data.eval."""

    key: str
    name: str
    file: FileConfig

    @property
    def path_key(self) -> str:
        return f"{self.key}.path" if self.name else "data.eval"


@dataclass(frozen=True, kw_only=True)
class EvalSet(HeldOutFile):
    """One set of held-out prompts with all defaults filled in."""

    samples_per_prompt: int
    pass_at: tuple[int, ...]
    pass_reward: float
    sampling: EvalSampling
    max_tokens_key: str
    """Config key that set sampling.max_tokens."""


def _named_sets(data: DataConfig, evaluation: EvalConfig) -> list[tuple[str, EvalSetConfig]]:
    """Return (dotted key, set) of the sets in order; data.eval is a single set."""
    named = [(f"eval.sets.{index}", one) for index, one in enumerate(evaluation.sets)]
    if not named and data.eval is not None:
        # model_construct, because validation would refuse the empty name.
        named = [("eval", EvalSetConfig.model_construct(name="", path=data.eval))]
    return named


def held_out_files(data: DataConfig, evaluation: EvalConfig) -> list[HeldOutFile]:
    """Return the files of the held-out sets, in order, for sampled and for given responses."""
    return [
        HeldOutFile(key=key, name=one.name, file=one) for key, one in _named_sets(data, evaluation)
    ]


def eval_sets(
    data: DataConfig, training: SamplingConfig | None, evaluation: EvalConfig
) -> list[EvalSet]:
    """Return the sets to sample. `training`: rollout.sampling; None without engines, and the result
    is then empty."""
    if training is None:
        return []
    sets = []
    for key, one in _named_sets(data, evaluation):
        sampling = one.sampling or evaluation.sampling
        # Errors about lengths must name the key that sets the limit.
        section = "rollout" if sampling.max_tokens is None else key if one.sampling else "eval"
        sets.append(
            EvalSet(
                key=key,
                name=one.name,
                file=one,
                samples_per_prompt=one.samples_per_prompt or evaluation.samples_per_prompt,
                # Not `or`: an empty list reports no pass@k and must not be replaced.
                pass_at=evaluation.pass_at if one.pass_at is None else one.pass_at,
                pass_reward=evaluation.pass_reward if one.pass_reward is None else one.pass_reward,
                sampling=sampling.over(training),
                max_tokens_key=f"{section}.sampling.max_tokens",
            )
        )
    return sets


def shown(value: Any) -> str:
    """Return the text of a sampling setting's value, for messages."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(list(value))
