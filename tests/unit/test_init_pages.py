"""Whole interviews of `mar init`: every message, question, default and answer, and all config files
that it would try, in their order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from megatron_async_rl.config.problem import DataError, UserError
from megatron_async_rl.plan import interview, new_config
from megatron_async_rl.plan.held_out import split_off
from megatron_async_rl.plan.init_layouts import InitLayout, InitSizes, init_layouts
from megatron_async_rl.plan.interview import Interview
from megatron_async_rl.plan.machine import GIB, Gpu, Machine
from megatron_async_rl.plan.model_files import PUBLISHED, _shape_of
from megatron_async_rl.plan.new_config import InitAnswers, InitColumns, thinks
from megatron_async_rl.plan.reward_choice import RewardChoice, names_of
from tests.stored_pages import listed, require_page

PAIR = Machine(
    cores=2,
    memory=16 * GIB,
    shared_memory=2 * GIB,
    gpus=(Gpu("A", 80 * GIB), Gpu("B", 40 * GIB)),
)
FILES = {
    "plain.jsonl": [{"prompt": "a", "answer": "b"}],
    "other.jsonl": [{"question": "a", "solution": "b", "extra": 1}, {"late": 2}],
    "strange.jsonl": [{"x": "a", "y": "b"}],
    "bare.jsonl": [{"prompt": "a"}],
    "empty.jsonl": [],
    "held.jsonl": [{"prompt": "a", "answer": "b"}],
}
GIVEN = {"model": "model", "data": "plain.jsonl"}
SCRIPTS: dict[str, tuple[dict[str, str], list[str] | None, dict[str, Any]]] = {
    "no terminal": (GIVEN, None, {}),
    "nothing given": ({}, None, {}),
    "only data": ({"data": "plain.jsonl"}, None, {}),
    "defaults at a terminal": ({}, ["model", "plain.jsonl", "", "", "", ""], {}),
    "other columns": (GIVEN | {"data": "other.jsonl"}, None, {}),
    "strange columns": (GIVEN | {"data": "strange.jsonl"}, None, {}),
    "named columns": (GIVEN | {"data": "strange.jsonl", "prompt_key": "x"}, None, {}),
    "both named": (
        GIVEN | {"data": "strange.jsonl", "prompt_key": "x", "answer_key": "y"},
        None,
        {"as_chat": True, "gpu_memory_gib": 141.0},
    ),
    "wrong column": (GIVEN | {"prompt_key": "promt"}, None, {}),
    "wrong answer column": (GIVEN | {"answer_key": "solution"}, None, {}),
    "no answers": (GIVEN | {"data": "bare.jsonl"}, None, {}),
    "no answers needed": (GIVEN | {"data": "bare.jsonl", "reward": "judge"}, None, {}),
    "no rows": (GIVEN | {"data": "empty.jsonl"}, None, {}),
    "no file": (GIVEN | {"data": "nowhere.jsonl"}, None, {}),
    "no model": (GIVEN | {"model": "nowhere"}, None, {}),
    "a name on a hub": (GIVEN | {"model": "owner/name"}, None, {}),
    "on a hub": (GIVEN | {"model": "hf://owner/name", "gpus": "2", "style": "CLIPPED"}, None, {}),
    "three GPUs": (GIVEN | {"gpus": "3", "eval": "12.5 %"}, None, {}),
    "one GPU": (GIVEN | {"gpus": "1", "eval": "held.jsonl"}, None, {}),
    "no GPU": (GIVEN | {"gpus": "0", "eval": "none"}, None, {}),
    "minus one": (GIVEN | {"gpus": "-1"}, None, {}),
    "all held out": (GIVEN | {"eval": "100%"}, None, {}),
    "nothing held out": (GIVEN | {"eval": "0%"}, None, {}),
    "another held-out column": (GIVEN | {"eval": "other.jsonl"}, None, {}),
    "a style": (GIVEN | {"style": "fast"}, None, {}),
    "a reward": (GIVEN | {"reward": "maths"}, None, {}),
    "countdown": (GIVEN | {"reward": "countdown"}, None, {}),
    "a setting": (GIVEN | {"reward": "judge"}, None, {"settings": ["url"]}),
    "refused and repeated": (
        {"model": "nowhere", "gpus": "x"},
        ["none", "model", "other.jsonl", "", "7%", "math", "extra", "2", "slow", "clipped"],
        {"settings": ["judge.url=x"]},
    ),
    "other names": (
        {"eval": "none"},
        ["model", "other.jsonl", "question", "maths", "math", "solution", "4", ""],
        {},
    ),
    "interrupted": (GIVEN, ["7%", "math"], {"as_chat": True, "gpu_memory_gib": 24.0}),
    "interrupted at once": ({}, [], {}),
    "interrupted with a setting": (GIVEN, ["none"], {"settings": ["cpu_s=3"]}),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data files in the current folder, and a machine with two GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(interview, "this_machine", lambda: PAIR)
    return tmp_path


def interviewed(
    patch: pytest.MonkeyPatch,
    given: dict[str, str],
    answers: list[str] | None,
    options: dict[str, Any],
    shown: list[str],
) -> Interview:
    """Return an interview whose terminal gives `answers` in order; an empty one is the default."""
    left = list(answers or ())

    def prompt(question: str, default: str | None, err: bool, value_proc: Callable) -> None:
        while True:
            if not left:
                raise typer.Abort
            answer = left.pop(0) or (default or "")
            shown.append(f"? {question} [{default}] {answer}")
            assert err
            try:
                value_proc(answer)
                return
            except typer.BadParameter as error:
                shown.append(f"  refused: {error}")

    patch.setattr(typer, "prompt", prompt)
    return Interview(
        given,
        out=Path("out.yaml"),
        terminal=answers is not None,
        report=lambda text: shown.append(f"! {text}"),
        **options,
    )


def test_every_interview_is_the_one_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ""
    for name, (given, answers, options) in SCRIPTS.items():
        shown: list[str] = []
        try:
            shown.append(str(interviewed(monkeypatch, given, answers, options, shown).run()))
        except (UserError, typer.Abort) as error:
            shown.append(f"{type(error).__name__}: {error}")
        text += f"$ {name}\n" + "\n".join(shown) + "\n"
    require_page("init/interviews", text)


def test_every_repeated_question_is_the_one_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ""
    answers = {
        "model.path": ["model"],
        "data.train": ["other.jsonl", "question", "solution"],
        "data.prompt_key": ["prompt"],
        "data.eval": ["none"],
        "eval.every": ["none"],
        "rollout.reward.name": ["math"],
        "rollout.environment": ["math"],
        "policy.parallel": ["0"],
        "weights": ["0"],
        "host memory": ["0"],
        "--style": ["clipped"],
        "flow.window": ["x"],
        "rollout.engines": [],
    }
    for key, given in answers.items():
        for terminal in (True, False):
            shown: list[str] = []
            asked = interviewed(monkeypatch, GIVEN, None, {}, shown)
            asked.run()
            again = interviewed(monkeypatch, {}, given if terminal else None, {}, shown)
            again.__dict__.update({k: asked.__dict__[k] for k in ("_values", "_texts", "_columns")})
            shown.clear()
            try:
                shown.append(str(again.repeat(UserError.of(key, "is wrong", "change it"))))
            except (UserError, typer.Abort) as error:
                shown.append(f"{type(error).__name__}: {error}")
            text += f"$ {key} {terminal}\n" + "\n".join(shown) + "\n"
    require_page("init/repeated", text)


SHAPE, _ = _shape_of(PUBLISHED["Qwen/Qwen3-0.6B"], Path("config.json"))
ANSWERS = InitAnswers(
    model="model",
    data="plain.jsonl",
    held_out="held.jsonl",
    columns=InitColumns(),
    reward=RewardChoice.of("arithmetic", ()),
    gpus=0,
    gpu_memory_gib=80.0,
    style="asynchronous",
)


def candidates(
    answers: InitAnswers, out: Path, tokens: int, *, chat: bool = False
) -> Iterator[tuple[InitLayout, str]]:
    """Yield each layout and the text of its config, for long samples if `tokens` is above 512."""
    for layout in init_layouts(answers.gpus, answers.style, longest=20_000 if tokens > 512 else 0):
        sizes = InitSizes.of(SHAPE, layout, tokens, 600, on_gpu=answers.gpus > 0)
        yield layout, new_config._text(answers, out, layout, sizes, chat=chat)


def test_every_config_is_the_one_on_its_page(folder: Path) -> None:
    text = ""
    every = [
        replace(ANSWERS, gpus=gpus, style=style)
        for gpus in (0, 1, 3)
        for style in new_config.STYLES
    ]
    every += [replace(ANSWERS, gpus=12, gpu_memory_gib=141.5)]
    for answers in every:
        for layout, content in candidates(answers, folder / "a.yaml", 512):
            text += f"$ {answers.gpus} {answers.style} {layout.replicas} {layout.colocated}\n"
            text += f"{content}{new_config._style_notes(answers, layout)}\n"
    columns = InitColumns(prompt_key="on", answer_key="a: b", as_chat=True)
    others = (
        replace(ANSWERS, held_out=None, columns=columns, model="hf://owner/name"),
        replace(ANSWERS, held_out=0.5, data="/other/place, 1.jsonl", model=str(folder)),
    )
    rewards = ("math+code", "judge", "http+arithmetic", "tools", "tools+code", "agent", "verifiers")
    for reward in (*rewards, "openenv", "module:function", "a:b+c:b"):
        for tokens, chat in ((512, True), (513, False)):
            given = replace(ANSWERS, reward=RewardChoice.of(reward, ()))
            _, content = next(candidates(given, folder / "a.yaml", tokens, chat=chat))
            text += f"$ {reward} {tokens} {chat}\n{content}"
            text += f"{sorted(path.name for path in given.reward.starters())}\n"
    for given in others:
        text += next(candidates(given, folder / "b.yaml", 9, chat=True))[1]
    require_page("init/configs", text.replace(str(folder), "FOLDER"))


def test_every_choice_of_rewards_is_the_one_on_its_page() -> None:
    shown: dict[str, Any] = {}
    for answer in (
        "math",
        "math + code",
        "math+math",
        "tools+agent",
        "x",
        "a:b",
        "maht",
        "",
        "a:b+c",
    ):
        try:
            shown[answer] = names_of(answer)
        except ValueError as error:
            shown[answer] = str(error)
    given = (
        "cpu_s=3",
        "code.cpu_s=[1]",
        "codes.cpu_s=3",
        "cpu_s",
        "=3",
        "a-b=1",
        "x.y.z=1",
        "x=#",
        "x=",
    )
    for setting in given:
        for answer in ("code", "math+code", "m:code+code"):
            try:
                shown[f"{answer} {setting}"] = RewardChoice.of(answer, [setting]).settings
            except UserError as error:
                shown[f"{answer} {setting}"] = str(error)
    require_page("init/rewards", listed(shown))


def test_prompts_are_split_by_their_digests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": str(index // 2), "row": index} for index in range(40)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown: dict[str, Any] = {}
    for share in (0.0, 0.074, 0.076, 0.5, 1.0):
        split = split_off(data, share, "prompt", folder / f"split {share}")
        assert split is not None
        held = [json.loads(line)["row"] for line in split.held_out.read_text().splitlines()]
        trained = [json.loads(line)["row"] for line in split.train.read_text().splitlines()]
        assert sorted(held + trained) == list(range(40))
        shown[str(share)] = [held, split.train_rows, split.held_out_rows, split.train.name]
        split.remove()
        assert not split.train.parent.exists()
    require_page("init/splits", listed(shown))

    monkeypatch.setattr(json, "dumps", lambda *_, **__: "same")
    assert split_off(data, 0.5, "prompt", folder / "new") is None
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    data.write_text(data.read_text() + "{broken\n")
    with pytest.raises(DataError):
        split_off(data, 0.5, "prompt", folder / "new")
    assert not (folder / "new").exists()


def test_models_that_think_are_recognised_by_template_or_name(folder: Path) -> None:
    for name, template, found in (
        ("Qwen3-8B", None, True),
        ("Qwen3-30B-A3B", None, True),
        ("Qwen3-8B-Base", None, False),
        ("Qwen3-8B-instruct", "<think>", False),
        ("Qwen2.5-7B", None, False),
        ("QwQ-32B", None, True),
        ("DeepSeek-R1", None, True),
        ("R10", None, False),
        ("plain", "a <think> b", True),
        ("plain", "enable_thinking", True),
        ("plain", "[THINK]", True),
        ("Qwen3-8B", "nothing", False),
    ):
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            path = folder / file / name
            path.mkdir(parents=True, exist_ok=True)
            if template is not None:
                text = template if "jinja" in file else json.dumps({"chat_template": template})
                (path / file).write_text(text)
            assert thinks(path) == found, (name, template, file)
            (path / file).unlink(missing_ok=True)
    (folder / "odd").mkdir()
    (folder / "odd" / "tokenizer_config.json").write_text("[]")
    assert not thinks(folder / "odd")
