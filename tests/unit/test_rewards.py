"""Rewards: right answers score 1, cleverly wrong answers score 0, and an invalid reward is refused
before any engine starts."""

import asyncio
import json
import logging
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.rollout import RewardConfig
from megatron_async_rl.data import DataError, read_training
from megatron_async_rl.data.row_columns import Required
from megatron_async_rl.rollout import rewards
from megatron_async_rl.rollout.rewards import registry
from megatron_async_rl.rollout.rewards.answers import evaluate
from megatron_async_rl.rollout.rewards.registry import (
    ColumnError,
    RewardContext,
    RewardError,
    RewardItem,
    load_reward,
    required_fields,
    validate_row,
)
from megatron_async_rl.rollout.rewards.servers import TEMPLATE, _within
from megatron_async_rl.rollout.rewards.worker import call, call_async
from megatron_async_rl.rollout.scoring import reward_fields
from megatron_async_rl.samples import Prompt
from tests.cases import looped
from tests.thorough import examples
from tests.unit.test_prompts import Bytes


def prompt(**fields: Any) -> Prompt:
    return Prompt(id="p7", text="?", token_ids=(1,), fields=fields)


def test_math_does_not_warn_about_limits_that_its_process_sets(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("grader", "parser"):
        monkeypatch.setattr(f"math_verify.{part}.TIMEOUT_WARNING_SHOWN", False)
    monkeypatch.setattr(logging.getLogger("math_verify"), "level", logging.NOTSET)
    assert load_reward("math").function(prompt(answer="4"), "$4$") == 1.0
    assert caplog.messages == []


@pytest.mark.parametrize("response", ["46", " 46", "46\n"])
def test_arithmetic_accepts_the_exact_answer(response: str) -> None:
    assert load_reward("arithmetic").function(prompt(answer="46"), response) == 1.0
    assert load_reward("arithmetic").function(prompt(answer=46), response) == 1.0


@looped(
    "response",
    ["", "4", "465", "046", "46 46", "46.0", "4 6", "= 46", "answer: 46", "４６", "+46", "46\x00"],
)
def test_arithmetic_accepts_only_the_exact_answer(response: str) -> None:
    assert load_reward("arithmetic").function(prompt(answer="46"), response) == 0.0


@looped(
    "fields",
    [{}, {"answer": None}, {"answer": ""}, {"answer": " "}, {"answer": True}, {"answer": [46]}],
)
def test_arithmetic_names_a_prompt_without_an_answer(fields: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"prompt p7: `answer`"):
        load_reward("arithmetic").function(prompt(**fields), "46")


@pytest.mark.parametrize(
    "response", ["3*5+7", "7+5*3", " ( 3 * 5 ) + 7 ", "((7)+(3*5))", "7+3*5\n"]
)
def test_countdown_accepts_every_expression_equal_to_the_target(response: str) -> None:
    assert load_reward("countdown").function(prompt(numbers=[3, 5, 7], target=22), response) == 1.0


@looped(
    "response",
    [
        "",
        "22",
        "3*5+7+0",
        "3*5+7*1",
        "3+5+7+7",
        "7+5*3=22",
        "3*5+",
        "(3*5+7",
        "3*5+7)",
        "()3*5+7",
        "3*5 7",
        "35-7-6",
        "3 5-13",
        "-7+29",
        "+3*5+7",
        "3**5+7",
        "3//5+7",
        "3*5+7.",
        "3*5+7e0",
        "3*5+7_",
        "３*5+7",
        "3*5+٧",
        "3·5+7",
        "3*5+7\n3*5+7",
        "__import__('os').system('true')",
        "3*5+7 # 22",
        "(" * 5000 + "3*5+7" + ")" * 5000,
        "3/(5-5)+7",
        "(3/(5-5))+7",
        "9" * 100_000,
    ],
)
def test_countdown_accepts_nothing_else(response: str) -> None:
    assert load_reward("countdown").function(prompt(numbers=[3, 5, 7], target=22), response) == 0.0


def test_simple_rewards_accept_no_copied_question_and_no_list() -> None:
    """See "What each built-in reward accepts" in docs/rewards.md. `math` and `code` have test files
    of their own."""
    tasks = {
        "arithmetic": prompt(answer="46"),
        "countdown": prompt(numbers=[3, 5, 7], target=22),
    }
    responses = {
        "arithmetic": ["12+34=", "12+34", "12", "12 34 46", "46, 47", "The answer is 46."],
        "countdown": ["Make 22 of 3, 5, 7.", "22", "3 5 7", "3*5+7=22", "3*5+7, 3+5*7", "3"],
    }
    nothing = [
        "",
        " ",
        "\n",
        ".",
        "?!",
        "()",
        "=",
        "-",
        "46 " * 10**5,
        "3*5+7" + " " * 10**5 + "+0",
    ]
    for name, task in tasks.items():
        reward = load_reward(name).function
        assert [one for one in (*responses[name], *nothing) if reward(task, one)] == [], name


NUMERALS = [
    *("٤٦", "४६", "４６", "4_6", "0x2e", "4.6e1", "46e0", "+46", "-46", "--46", "046", "0046"),
    *(
        "46.",
        "46.0",
        "46,",
        "$46$",
        "**46**",
        "4\u200b6",
        "46\u200b",
        "\ufeff46",
        "46\u0301",
        "46\x00",
    ),
    *("0b101110", "0o56", "1_000", "-0", "23*2", "46/1", "forty-six", "XLVI", "46; 47", "46\n47"),
]


def test_simple_rewards_accept_no_other_notation_of_a_number() -> None:
    numbers = {"numbers": [46], "target": 46}
    for name, fields in {"arithmetic": {"answer": "46"}, "countdown": numbers}.items():
        reward = load_reward(name).function
        assert reward(prompt(**fields), "46") == 1.0
        assert [one for one in NUMERALS if reward(prompt(**fields), one)] == [], name


COUNTDOWNS: list[tuple[Any, Any, str]] = [
    ("[3, 5, 7]", "22", ""),
    ([3.0, 5], 8.0, ""),
    ([3, 5], -2, ""),
    ([8, 3, 8, 3], 24, ""),
    ([1] * 128, 128, ""),
    ([0, 0, 0], 0, ""),
    ([999_999_999, 1], 10**9, ""),
    ([-3, 5], 2, "`numbers` has -3"),
    ([10**9, 1], 10**9, "`numbers` has a number of more than 9 digits"),
    ([1] * 129, 129, "`numbers` has 129 numbers"),
    ([10**8] * 30, 1, "`numbers` has 30 numbers"),
    ([5], 6, "`target` is 6, which no expression of [5] equals"),
    ([5], -5, "`target` is -5"),
    ([2, 3], 7, "`target` is 7"),
    ([0, 0], 1, "`target` is 1"),
    ([2, 3, 4], 60, "`target` is 60"),
    ([2, 3, 4], -60, "`target` is -60"),
    ("3 5 7", 22, "`numbers` is '3 5 7'"),
    ('["3", "5"]', 8, "`numbers` is"),
    ("[3, 5.5]", 8, "`numbers` is"),
    ("[]", 0, "`numbers` is"),
    ([3, 5], "eight", "`target` is 'eight'"),
    ([3, 5], True, "`target` is True"),
]


def test_countdown_reads_json_and_refuses_impossible_rows() -> None:
    def refusal(numbers: Any, target: Any) -> str:
        try:
            validate_row("countdown", {}, {"numbers": numbers, "target": target})
        except RewardError as error:
            return str(error) if error.fix else "no fix"
        return ""

    for numbers, target, message in COUNTDOWNS:
        error = refusal(numbers, target)
        assert bool(message) == bool(error), (numbers, target, error)
        assert message in error
    as_text = prompt(numbers="[3, 5, 7]", target="22")
    assert load_reward("countdown").function(as_text, "3*5+7") == 1.0


@settings(deadline=None, max_examples=examples(50, 20))
@given(st.data())
def test_no_possible_row_of_countdown_is_refused(data: st.DataObject) -> None:
    """The target is the value of an expression of the numbers, drawn from `data`."""
    numbers = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        right = values.pop(data.draw(st.integers(0, len(values) - 1)))
        left = values.pop(data.draw(st.integers(0, len(values) - 1)))
        results = [left + right, left - right, left * right, *([left / right] if right else [])]
        values.append(data.draw(st.sampled_from(results)))
    if values[0].denominator == 1:
        validate_row("countdown", {}, {"numbers": numbers, "target": int(values[0])})


INVISIBLE = [
    *("", " ", "\n\t", "\u00a0", "\u3000", "\u200b", "\ufeff", "\u00ad", "\u2060", "\u200e"),
    *("\u202e", "\x00", "\x1b", "\x7f", "\u0301", "\u0301\u0300", "\ufe0f", "\u3164", "\u115f"),
    *("\u2800", "\u2028", "\U000e0001", "\U000e0100", "\ue000", " \u200b\u0301\n"),
]


def test_invisible_text_is_an_empty_value_for_every_reward() -> None:
    judge = {"template": "{prompt} {rubric} {response}"}
    for text in INVISIBLE:
        rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("arithmetic", {}, {"answer": text}),
            ("math", {}, {"answer": text}),
            ("countdown", {}, {"numbers": text, "target": 1}),
            ("countdown", {}, {"numbers": [1], "target": text}),
            ("code", {}, {"tests": text}),
            ("code", {}, {"tests": [text]}),
            ("code", {}, {"tests": [{"input": "1", "output": text}]}),
            ("code", {}, {"tests": "assert f(1) == 2", "entry_point": text}),
            ("judge", judge, {"rubric": text}),
        ]
        for name, settings_, fields in rows:
            with pytest.raises(RewardError) as caught:
                validate_row(name, settings_, fields)
            column = re.findall("^`([a-z_]+)` ", caught.value.what)
            assert fields.keys() >= {*column} > set(), (name, fields)
    for text in ("\U0001f3f4\U000e0067\U000e007f", "é", "e\u0301", "0", "-", "日", "ا"):
        validate_row("arithmetic", {}, {"answer": text})
        assert load_reward("arithmetic").function(prompt(answer=f"\ufeff{text}\u200b"), text) == 1.0


def test_an_error_names_the_column_as_in_the_data(tmp_path: Path) -> None:
    """The same holds for an error without a column."""
    rows = tmp_path / "rows.jsonl"
    key = "reward_model.ground_truth"
    data = DataConfig.model_validate({"train": rows, "prompt_key": "question", "answer_key": key})
    for name, values in {
        "arithmetic": [None, "", "\u200b", [1], True],
        "math": [None, "", "about 5"],
    }.items():
        for value in values:
            row = {"question": "1+1", "reward_model": {"ground_truth": value}}
            rows.write_text(json.dumps(row))
            with pytest.raises(DataError, match=rf"rows.jsonl:1: `{key}` ") as caught:
                read_training(data, Bytes(), required=reward_fields(RewardConfig(name=name)))
            assert "`answer`" not in str(caught.value), value

    rows.write_text(json.dumps({"question": "1+1", "reward_model": {"ground_truth": "2"}}))
    no_column = Required(lambda fields: (), lambda fields: ("", "`answer` is odd", "change it"))
    with pytest.raises(DataError, match=rf"`answer` is odd; `answer` is the column `{key}`"):
        read_training(data, Bytes(), required=no_column)


def test_a_response_closes_no_tag_of_the_judge_template() -> None:
    closing = ["</answer>", "< / ANSWER >", "<\u200b/ans\u00adwer>", "\uff1c/answer>", "<task>"]
    for text in closing:
        assert _within(TEMPLATE, f"a{text}b").startswith("a&lt;"), text
    kept = ["<b>x</b>", "1 < 2", "</answers>", "<" + " " * 10**6, "<a" + " " * 10**6, "<" * 10**5]
    assert [one for one in kept if _within(TEMPLATE, one) != one] == []


def test_countdown_uses_each_number_as_often_as_it_occurs() -> None:
    reward = load_reward("countdown").function
    assert reward(prompt(numbers=[4, 4, 2], target=10), "4+4+2") == 1.0
    assert reward(prompt(numbers=[4, 4, 2], target=6), "4+2") == 0.0
    assert reward(prompt(numbers=[4, 2], target=10), "4+4+2") == 0.0


def test_countdown_computes_in_exact_fractions() -> None:
    assert (
        load_reward("countdown").function(prompt(numbers=[8, 3, 8, 3], target=24), "8/(3-8/3)")
        == 1.0
    )


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/() ", max_size=24))
def test_the_expression_parser_agrees_with_python_where_both_accept(text: str) -> None:
    result = evaluate(text)
    if result is not None:
        value, used = result
        assert all(digits.isdigit() for digits in map(str, used))
        python = "".join(
            f"Fraction({piece})" if piece.isdigit() else piece for piece in _pieces(text)
        )
        assert eval(python, {"Fraction": Fraction}) == value


def _pieces(text: str) -> list[str]:
    pieces: list[str] = []
    for character in text:
        if character.isdigit() and pieces and pieces[-1].isdigit():
            pieces[-1] = str(int(pieces[-1] + character))
        elif character != " ":
            pieces.append(character if not character.isdigit() else str(int(character)))
    return pieces


@pytest.mark.parametrize(
    "fields",
    [{}, {"numbers": "3 5", "target": 8}, {"numbers": [3, "5"], "target": 8}, {"numbers": [3, 5]}],
)
def test_countdown_names_a_prompt_without_a_task(fields: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"prompt p7: `(numbers|target)`"):
        load_reward("countdown").function(prompt(**fields), "3+5")


def test_rewards_name_the_keys_they_read() -> None:
    assert required_fields("arithmetic") == ("answer",)
    assert required_fields("countdown") == ("numbers", "target")
    assert required_fields("my_rewards:score") == ()


def test_a_built_in_reward_is_one_entry_and_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "palindrome.py").write_text(
        "from megatron_async_rl.rollout.rewards.registry import BuiltInReward\n"
        "def palindrome(prompt, response): return float(response == response[::-1])\n"
        "REWARDS = {'palindrome': BuiltInReward(function=palindrome, required_fields=('word',))}\n"
    )
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "BUILT_IN", registry.BUILT_IN | {"palindrome": "palindrome"})
    assert load_reward("palindrome").function(prompt(), "abba") == 1.0
    assert required_fields("palindrome") == ("word",)
    with pytest.raises(RewardError, match="did you mean 'palindrome'"):
        load_reward("palindromes")


@pytest.fixture
def rewards_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """Name of a module in the working directory. Each test has a module of its own."""
    name = f"rewards_of_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(
        "import functools\n"
        "def score(prompt, response): return float(len(response))\n"
        "def one(response): return 1.0\n"
        "def three(prompt, response, mood): return 1.0\n"
        "def keyword(prompt, *, response): return 1.0\n"
        "def optional(prompt, response, scale=2.0): return scale\n"
        "async def later(prompt, response): return 1.0\n"
        "def tagged(prompt, response, *, tag: str, most: int = 3, tokens): return 1.0\n"
        "class Judge:\n    def __call__(self, prompt, response): return 5.0\n"
        "judge = Judge()\npartial = functools.partial(three, mood=1)\nnumber = 3\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("1/0\n")
    (tmp_path / f"{name}_needy.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize(
    ("function", "reward"), [("score", 2.0), ("optional", 2.0), ("judge", 5.0), ("partial", 1.0)]
)
def test_a_function_in_the_working_directory_is_a_reward(
    rewards_file: str, function: str, reward: float
) -> None:
    assert load_reward(f"{rewards_file}:{function}").function(prompt(), "ab") == reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetics", "did you mean 'arithmetic'"),
        (
            "zzz",
            "use one of arithmetic, countdown, math, code, http, judge, environment,"
            " reasoning_gym, or module:function",
        ),
        (":score", "is not of the form module:function"),
        ("FILE:", "is not of the form module:function"),
        ("nowhere_at_all:score", "no module 'nowhere_at_all' in "),
        ("nowhere_at_all.deeper:score", "no module 'nowhere_at_all' in "),
        (
            "FILE_broken:score",
            "importing 'FILE_broken' failed: ZeroDivisionError: division by zero",
        ),
        ("FILE_needy:score", "install or fix a_package_nobody_has"),
        ("FILE:scores", "has no 'scores'; did you mean 'score'"),
        ("FILE:number", "is a int, not a function"),
        ("FILE:one", r"takes \(response\), but is called with \(prompt, response\)"),
        ("FILE:three", "'FILE:three' needs mood, and 'mood' is missing"),
        ("FILE:keyword", r"takes \(prompt, \*, response\)"),
    ],
)
def test_an_invalid_reward_is_refused_with_a_fix(
    rewards_file: str, name: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message.replace("FILE", rewards_file)):
        load_reward(name.replace("FILE", rewards_file))


def test_a_module_that_exits_when_imported_does_not_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match="importing 'exits_at_once' failed: SystemExit: 0"):
        load_reward("exits_at_once:score")


def test_a_relative_module_is_refused() -> None:
    with pytest.raises(RewardError, match=r"'\.here:score' is not of the form module:function"):
        load_reward(".here:score")


def test_the_signature_selects_how_a_reward_is_called(
    rewards_file: str,
) -> None:
    assert load_reward(f"{rewards_file}:later").asynchronous
    bound = load_reward(f"{rewards_file}:tagged", {"tag": "think"})
    assert (bound.batched, bound.asynchronous) == (False, False)
    assert (bound.settings, bound.context) == ({"tag": "think"}, ("tokens",))


@pytest.mark.parametrize(
    ("name", "settings", "key", "message"),
    [
        ("FILE:tagged", {"tags": "x"}, ".settings", "has no setting 'tags'; did you mean 'tag'"),
        ("FILE:tagged", {}, ".settings", "needs tag, and 'tag' is missing; write rollout.reward"),
        ("FILE:tagged", {"tag": "x", "most": "y"}, ".settings.most", "got 'y': it should be a"),
        ("FILE:score", {"tag": 1}, ".settings", "has no setting 'tag'; it takes none"),
        ("arithmetic", {"tag": 1}, ".settings", "arithmetic has no setting 'tag'"),
        ("http", {}, ".settings", "'url' is missing"),
        ("http", {"url": "localhost:1"}, ".settings.url", "is not the URL of a server"),
        ("http", {"url": "http://h:99999"}, ".settings.url", "is not the URL of a server"),
        ("http", {"url": "http://h", "api_key_env": "NOT_SET"}, ".settings.api_key_env", "not set"),
        ("judge", {}, ".settings", "url and model, and 'url' is missing; write"),
        ("judge", {"url": "http://h"}, ".settings", "'model' is missing"),
        ("my_rewards.score", {}, ".name", "did you mean 'my_rewards:score'?"),
        ("judge", {"url": "http://h", "modle": "m"}, ".settings", "did you mean 'model'"),
        ("judge", {"url": "http://h", "model": "m", "template": "x"}, ".settings.template", "resp"),
        (
            "judge",
            {"url": "http://h", "model": "m", "pattern": "x"},
            ".settings.pattern",
            "0 groups",
        ),
        (
            "judge",
            {"url": "http://h", "model": "m", "pattern": "("},
            ".settings.pattern",
            "'(' is not a regular expression: missing )",
        ),
        (
            "judge",
            {"url": "http://h", "model": "m", "lowest": 10},
            ".settings.lowest",
            "the lowest score, 10, is not below the highest score, 10",
        ),
        ("judge", {"url": "h", "model": "m"}, ".settings.url", "'h' is not the URL of a server"),
        ("http", {"url": "http://h:0"}, ".settings.url", "is not the URL of a server"),
        ("http", {"url": "http:///x"}, ".settings.url", "is not the URL of a server"),
        ("code", {"isolation": "none"}, ".settings.isolation", "got 'none'"),
        ("code", {"isolation": "limits"}, ".settings.isolation", "isolation: rlimits"),
    ],
)
def test_invalid_settings_are_refused_with_their_key(
    rewards_file: str, name: str, settings: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        load_reward(name.replace("FILE", rewards_file), settings, "rollout.reward.parts.mine")
    assert caught.value.where == f"rollout.reward.parts.mine{key}"
    assert message in str(caught.value)


def test_a_judge_reads_the_fields_that_its_template_names() -> None:
    settings = {"template": "{prompt} {rubric} {response} {{x}} {rubric}"}
    assert required_fields("judge", settings) == ("rubric", "x")


@looped(
    ("settings", "message"),
    [
        ({}, "needs either `name`"),
        ({"name": "math", "parts": {"a": {"name": "math"}}}, "needs either `name`"),
        ({"parts": {"a/b": {"name": "math"}}}, "'a/b' cannot be the name of a part"),
        ({"parts": {"a": {"name": "math"}}, "settings": {"x": 1}}, "of each part instead"),
        ({"parts": {"a": {"name": "math"}}, "per": "group"}, "of each part instead"),
        ({"parts": {"a": {"name": "math", "gate": True}}}, "there is no part that it could"),
        (
            {"parts": {"a": {"name": "math", "gate": True, "weight": 2}, "b": {"name": "math"}}},
            "'a' is a gate, which has no weight",
        ),
    ],
)
def test_parts_with_missing_or_extra_settings_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


def test_the_examples_in_the_documentation_are_valid_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    for name, source in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.S):
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    item = RewardItem(prompt(word="cat"), "a cat", RewardContext(tokens=4))
    scored = [
        call(load_reward(f"{name}"), [item], 1.0)[0].reward
        for name in ("my_rewards:score", "more_rewards:batched", "more_rewards:complete")
    ]
    assert scored == [0.98, 1.0, 0.25]
    patient = call_async(load_reward("more_rewards:patient"), [item], 1.0)
    assert asyncio.run(patient)[0].reward == 1.0
    group = [replace(item, response=one) for one in ("a cat", "a dog", "a cat")]
    unlike = call(load_reward("group_rewards:unlike"), group, 1.0)
    assert [one.reward for one in unlike] == [0.5, 1.0, 0.5]


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "math"])
def test_a_null_in_a_row_is_named_before_its_value_is_checked(name: str) -> None:
    needed = required_fields(name, {})
    assert needed
    for column in needed:
        with pytest.raises(ColumnError, match="is null") as error:
            validate_row(name, {}, dict.fromkeys(needed, "1") | {column: None})
        assert error.value.column == column
