"""Sampling settings in vLLM, their conflicts with objectives, and those of held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.config.rollout_rules import sampling_warnings
from megatron_async_rl.config.sampling import EvalConfig, EvalSampling
from megatron_async_rl.config.schema import Config
from tests.unit.test_engine_arguments import spec_with
from tests.written_run import write_prompts, write_run

RENORMALISING = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "bad_words": "[foo]",
}
RECOMPUTE = ("objective.proximal=recompute",)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def loaded(file: Path, *overrides: str) -> Config:
    return load(file, overrides)


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return str(caught.value)


def test_every_setting_reaches_vllm_as_it_is_written(file: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import sampling_parameters

    knobs = [f"rollout.sampling.{name}={value}" for name, value in RENORMALISING.items()]
    knobs += ["rollout.sampling.stop_token_ids=[7, 0]", "rollout.sampling.temperature=0.7"]
    rollout = loaded(file, *knobs, *RECOMPUTE).rollout
    assert rollout is not None
    found = sampling_parameters(rollout.sampling, [0, 3])
    for name, value in RENORMALISING.items():
        assert getattr(found, name) == (["foo"] if name == "bad_words" else value)
    assert (found.stop_token_ids, found.temperature, found.max_tokens) == ([0, 3, 7], 0.7, 8)
    assert found.structured_outputs is None


@pytest.mark.parametrize("value", [0.01, 0.3, 2])
def test_a_temperature_that_is_taken_is_the_one_that_vllm_draws_at(
    file: Path, value: float
) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import sampling_parameters

    rollout = loaded(file, f"rollout.sampling.temperature={value}").rollout
    assert rollout is not None
    assert sampling_parameters(rollout.sampling, [0]).temperature == value


@pytest.mark.parametrize("key", ["rollout.sampling", "eval.sampling"])
@pytest.mark.parametrize(
    ("value", "what"),
    [("0.009", "0.009 is below 0.01, vLLM's lowest temperature"), ("2.1", "equal to 2")],
)
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(
    file: Path, key: str, value: str, what: str
) -> None:
    message = refusal(file, f"data.eval={file}", f"{key}.temperature={value}")
    assert f"{key}.temperature" in message
    assert what in message


def test_an_engine_reads_text_only_where_a_setting_needs_it(tmp_path: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    spec = spec_with(tmp_path)
    assert engine_arguments(spec).skip_tokenizer_init
    held_out = EvalSampling.model_construct(**dict(spec.rollout.sampling), regex="[0-9]+")
    with_regex = type(spec)(**{**vars(spec), "evaluations": {"digits": held_out}})
    assert not engine_arguments(with_regex).skip_tokenizer_init
    assert with_regex.sampling("digits") is held_out
    assert with_regex.sampling(None) is spec.rollout.sampling


OPOB = "objective={loss: reinforce, advantage: opob, aggregation: seq-mean-token-mean}"


@pytest.mark.parametrize(("name", "value"), RENORMALISING.items())
def test_what_renormalises_does_not_go_with_log_probs_taken_for_the_trainers(
    file: Path, name: str, value: Any
) -> None:
    knob = f"rollout.sampling.{name}={value}"
    message = refusal(file, knob)
    assert f"rollout.sampling.{name}" in message
    assert "objective.proximal: behavior uses the engines' log-probs as the trainer's" in message
    config = loaded(file, knob, *RECOMPUTE)
    (warning,) = sampling_warnings(config)
    assert name in warning
    assert "docs/sampling.md" in warning
    assert sampling_warnings(loaded(file)) == []


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("objective.proximal=loglinear",), "objective.proximal: loglinear"),
        (
            ("objective.loss=decoupled_ppo", *RECOMPUTE),
            "objective.loss: decoupled_ppo contains pi /",
        ),
        (
            ("objective.corrections=[{name: tis, level: sequence}]", *RECOMPUTE),
            "correction tis multiplies or averages the difference over a whole response",
        ),
        (
            ("controls=[ess_lr]", *RECOMPUTE),
            "controls: ess_lr measures staleness by pi / pi_behavior",
        ),
        (
            (
                "controls=[{name: displacement, tolerated_kl: 0.02}]",
                "objective.snapshots=9",
                *RECOMPUTE,
            ),
            "controls: displacement measures staleness by pi",
        ),
        ((OPOB,), "objective.advantage: opob weights responses by the engines' log-probs"),
        (
            ("objective.advantage={name: otb, importance: token}", *RECOMPUTE),
            "objective.advantage: otb weights responses",
        ),
        (
            ("objective.advantage={name: otb, importance: sequence}", *RECOMPUTE),
            "objective.advantage: otb weights responses",
        ),
        (("objective.corrections=[opsm]", "objective.loss=reinforce"), "correction opsm compares"),
        (
            (
                "objective.corrections=[opsm]",
                "objective.loss=reinforce",
                "objective.proximal=loglinear",
            ),
            "correction opsm compares with objective.proximal: loglinear",
        ),
        (
            ("objective.corrections=[token_veto]", *RECOMPUTE),
            "correction token_veto multiplies or averages",
        ),
    ],
)
def test_settings_with_wrong_results_are_reported(
    file: Path, overrides: tuple[str, ...], what: str
) -> None:
    assert what in refusal(file, "rollout.sampling.top_p=0.9", *overrides)
    loaded(file, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("objective.loss=reinforce",),
        ("objective.corrections=[tis]", *RECOMPUTE),
        ("objective.proximal=ewma",),
        ("objective.corrections=[opsm]", "objective.minibatches=2", *RECOMPUTE),
        ("objective.corrections=[opsm]", "objective.proximal=snapshot"),
        ("objective.advantage=otb", *RECOMPUTE),
        ("objective.loss=reinforce", "objective.advantage={name: opob, mode: exact}"),
        ("controls=[displacement]", "objective.snapshots=9", *RECOMPUTE),
        ("objective.kl={coef: 0.1, weight: truncated}", "objective.reference={}", *RECOMPUTE),
    ],
)
def test_objectives_that_hold_no_such_ratio_take_any_sampling(
    file: Path, overrides: tuple[str, ...]
) -> None:
    assert len(sampling_warnings(loaded(file, "rollout.sampling.top_k=4", *overrides))) == 1


def test_what_ends_a_response_changes_no_log_prob(file: Path) -> None:
    config = loaded(file, "rollout.sampling.stop=[x]", "rollout.sampling.stop_token_ids=[3]")
    assert sampling_warnings(config) == []


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("rollout.sampling.temperature=0", "the responses of a group are equal"),
        ("rollout.sampling.regex='[0-9]+'", "in training a grammar would exclude tokens"),
        ("rollout.sampling.guided_json={}", "eval.sampling.json_schema"),
        ("rollout.sampling.structured_outputs={}", "eval.sampling.json_schema"),
    ],
)
def test_what_is_for_held_out_prompts_alone_is_refused_in_training(
    file: Path, override: str, what: str
) -> None:
    assert what in refusal(file, override)


def with_sets(file: Path, *more: str) -> tuple[str, ...]:
    data = write_prompts(file.parent / "held_out.jsonl", prompts=3)
    greedy = f"{{name: greedy, path: {data}, samples_per_prompt: 1, sampling: {{temperature: 0}}}}"
    drawn = f"{{name: drawn, path: {data}, pass_at: [1, 4]}}"
    return (f"eval.sets=[{greedy}, {drawn}]", "eval.sampling.top_p=0.8", *more)


def test_each_set_has_its_own_sampling_over_that_of_training(file: Path) -> None:
    config = loaded(file, *with_sets(file, "rollout.sampling.temperature=0.6"))
    greedy, drawn = config.eval_sets
    assert (greedy.sampling.temperature, greedy.sampling.top_p) == (0, 1.0)
    assert (drawn.sampling.temperature, drawn.sampling.top_p) == (0.6, 0.8)
    assert (greedy.samples_per_prompt, drawn.samples_per_prompt) == (1, 4)
    assert (greedy.pass_at, drawn.pass_at) == ((1,), (1, 4))
    assert drawn.sampling.max_tokens == 8
    assert sampling_warnings(config) == [], "nobody trains on what they draw"


def test_one_file_of_held_out_prompts_is_a_list_of_one(file: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import sampling_parameters

    config = loaded(file, f"data.eval={file}", "eval.sampling={temperature: 0.2, regex: 'a+'}")
    (one,) = config.eval_sets
    assert (one.name, one.path_key, one.sampling.temperature) == ("", "data.eval", 0.2)
    structured = sampling_parameters(one.sampling, [0]).structured_outputs
    assert structured is not None
    assert structured.regex == "a+"


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("data.eval=x.jsonl",), "data.eval and eval.sets both name held-out prompts"),
        (("eval.sets.0.samples_per_prompt=2",), "eval.sets.0.sampling.temperature: 0 selects"),
        (("eval.sets.1.pass_at=[5]",), "eval.sets.1.pass_at: 5 needs at least 5 responses"),
        (("eval.sets.1.name=greedy",), "two sets are called greedy"),
        (("eval.sets.1.name=part",), "a set cannot be called `part`"),
        (("eval.sampling={regex: '('}",), "is not a regular expression"),
        (("eval.sampling={json_schema: {type: objectt}}",), "json_schema: $.type: 'objectt'"),
        (("eval.sampling={regex: 'a', json_schema: {}}",), "keep one"),
        (("eval.sets=[]",), "`eval` needs held-out prompts"),
    ],
)
def test_sets_that_cannot_be_sampled_are_refused(
    file: Path, overrides: tuple[str, ...], what: str
) -> None:
    assert what in refusal(file, *with_sets(file), *overrides)


def test_an_evaluation_without_settings_samples_as_training_does(file: Path) -> None:
    config = loaded(file, f"data.eval={file}", "eval={}")
    assert config.eval == EvalConfig()
    assert config.rollout is not None
    (one,) = config.eval_sets
    grammar = {"json_schema": None, "regex": None}
    assert dict(one.sampling) == dict(config.rollout.sampling) | grammar
