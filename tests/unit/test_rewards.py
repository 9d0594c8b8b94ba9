"""Rewards: right answers get 1, clever wrong ones get 0, and what cannot work is refused before any
engine starts."""

import asyncio
import logging
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.config.schema import RewardConfig
from megatron_async_rl.rollout import rewards
from megatron_async_rl.rollout.rewards import registry
from megatron_async_rl.rollout.rewards.answers import evaluate
from megatron_async_rl.rollout.rewards.registry import (
    Context,
    Item,
    RewardError,
    load_reward,
    required_fields,
)
from megatron_async_rl.rollout.rewards.worker import call, call_async
from megatron_async_rl.samples import Prompt


def prompt(**fields: Any) -> Prompt:
    return Prompt(id="p7", text="?", token_ids=(1,), fields=fields)


def test_math_says_nothing_of_limits_that_its_process_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("grader", "parser"):
        monkeypatch.setattr(f"math_verify.{part}.TIMEOUT_WARNING_SHOWN", False)
    monkeypatch.setattr(logging.getLogger("math_verify"), "level", logging.NOTSET)
    assert load_reward("math").function(prompt(answer="4"), "$4$") == 1.0
    assert caplog.messages == []


@pytest.mark.parametrize("response", ["46", " 46", "46\n"])
def test_arithmetic_takes_the_exact_answer(response: str) -> None:
    assert load_reward("arithmetic").function(prompt(answer="46"), response) == 1.0
    assert load_reward("arithmetic").function(prompt(answer=46), response) == 1.0


@pytest.mark.parametrize(
    "response",
    ["", "4", "465", "046", "46 46", "46.0", "4 6", "= 46", "answer: 46", "４６", "+46", "46\x00"],
)
def test_arithmetic_takes_nothing_but_the_exact_answer(response: str) -> None:
    assert load_reward("arithmetic").function(prompt(answer="46"), response) == 0.0


@pytest.mark.parametrize(
    "fields",
    [{}, {"answer": None}, {"answer": ""}, {"answer": " "}, {"answer": True}, {"answer": [46]}],
)
def test_arithmetic_names_the_prompt_without_an_answer(fields: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"prompt p7: `answer`"):
        load_reward("arithmetic").function(prompt(**fields), "46")


@pytest.mark.parametrize(
    "response", ["3*5+7", "7+5*3", " ( 3 * 5 ) + 7 ", "((7)+(3*5))", "7+3*5\n"]
)
def test_countdown_takes_any_expression_of_all_numbers_that_hits_the_target(response: str) -> None:
    assert load_reward("countdown").function(prompt(numbers=[3, 5, 7], target=22), response) == 1.0


@pytest.mark.parametrize(
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
        "9" * 100_000,
    ],
)
def test_countdown_takes_nothing_else(response: str) -> None:
    assert load_reward("countdown").function(prompt(numbers=[3, 5, 7], target=22), response) == 0.0


def test_simple_rewards_accept_no_copy_of_the_question_and_no_list_of_numbers() -> None:
    """docs/rewards.md, "What each built-in reward accepts"; `math` and `code` have files of their own."""
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


def test_countdown_uses_each_number_as_often_as_it_is_given() -> None:
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
def test_countdown_names_the_prompt_without_a_task(fields: dict[str, Any]) -> None:
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
    """A module in the working directory; returns its name, new for every test."""
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
            "use one of arithmetic, countdown, math, code, http, judge, environment, or"
            " module:function",
        ),
        (":score", "is not module:function"),
        ("FILE:", "is not module:function"),
        ("nowhere_at_all:score", "no module 'nowhere_at_all' in "),
        ("nowhere_at_all.deeper:score", "no module 'nowhere_at_all' in "),
        (
            "FILE_broken:score",
            "importing 'FILE_broken' failed: ZeroDivisionError: division by zero",
        ),
        ("FILE_needy:score", "install or fix a_package_nobody_has"),
        ("FILE:scores", "has no 'scores'; did you mean 'FILE:score'"),
        ("FILE:number", "is a int, not a function"),
        ("FILE:one", r"takes \(response\), but is called with \(prompt, response\)"),
        ("FILE:three", "'FILE:three' needs mood, and 'mood' is missing"),
        ("FILE:keyword", r"takes \(prompt, \*, response\)"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_with_the_fix(
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


def test_a_relative_module_is_not_module_function() -> None:
    with pytest.raises(RewardError, match=r"'\.here:score' is not module:function"):
        load_reward(".here:score")


def test_an_async_function_and_one_of_lists_are_known_by_how_they_are_written(
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
        ("http", {"url": "localhost:1"}, ".settings.url", "is no address of a server"),
        ("http", {"url": "http://h:99999"}, ".settings.url", "is no address of a server"),
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
        ("code", {"isolation": "none"}, ".settings.isolation", "got 'none'"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_key(
    rewards_file: str, name: str, settings: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        load_reward(name.replace("FILE", rewards_file), settings, "rollout.reward.parts.mine")
    assert caught.value.where == f"rollout.reward.parts.mine{key}"
    assert message in str(caught.value)


def test_a_judge_reads_the_fields_that_its_template_names() -> None:
    settings = {"template": "{prompt} {rubric} {response} {{x}} {rubric}"}
    assert required_fields("judge", settings) == ("rubric", "x")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either `name`"),
        ({"name": "math", "parts": {"a": {"name": "math"}}}, "needs either `name`"),
        ({"parts": {"a/b": {"name": "math"}}}, "'a/b' cannot be the name of a part"),
        ({"parts": {"a": {"name": "math"}}, "settings": {"x": 1}}, "each of `parts` has its own"),
        ({"parts": {"a": {"name": "math"}}, "per": "group"}, "each of `parts` has its own"),
        ({"parts": {"a": {"name": "math", "gate": True}}}, "no part is left that it could"),
        (
            {"parts": {"a": {"name": "math", "gate": True, "weight": 2}, "b": {"name": "math"}}},
            "'a' is a gate, which has no weight",
        ),
    ],
)
def test_parts_that_say_too_much_or_too_little_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


def test_the_examples_of_the_page_are_rewards_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    for name, source in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.S):
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    item = Item(prompt(word="cat"), "a cat", Context(tokens=4))
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
