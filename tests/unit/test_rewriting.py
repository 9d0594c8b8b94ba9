"""The rewriting example: what a rewrite is worth in numbers computed by hand, which rewrite is
kept, and that every one of its configs can run."""

from __future__ import annotations

import asyncio
import math
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.rewriting.alignment import alignment, mean_logprobs
from examples.rewriting.rewards import consistent, correct, distance, diversity
from examples.rewriting.run import ARMS, skills, table, verified
from megatron_async_rl.config.load import load
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.rollout.scoring import GroupRewards
from megatron_async_rl.samples import Prompt
from tests.train_batches import make_sample, row

EXAMPLES = Path(__file__).parents[2] / "examples"
PREPARE = runpy.run_path(str(EXAMPLES / "rewriting" / "prepare.py"))
CONFIGS = ("base", "finetune", "rewriter", "evaluate")


def prompt(name: str = "p", **fields: Any) -> Prompt:
    return Prompt(id=name, text="?", token_ids=(1,), fields=fields)


def test_an_answer_is_its_last_number_in_digits_or_in_letters() -> None:
    said = {"3,8,1,9": 1.0, "d:i:b:j.": 1.0, "9": 1.0, "3,8,9,1": 0.0, ",": 0.0, "": 0.0}
    assert {text: correct(prompt(answer="9"), text) for text in said} == said


def test_a_rewrite_is_consistent_where_it_states_all_numbers_of_the_demonstration() -> None:
    said = {"3;8;1;9": 1.0, "3819": 1.0, "d:i:b:j.": 1.0, "3;8;2;9": 0.0, "9": 0.0, "": 0.0}
    row = prompt(demonstration="d:i:b:j.")
    assert {text: consistent(row, text) for text in said} == said


def test_the_distance_of_two_texts_is_the_share_of_pairs_that_they_do_not_share() -> None:
    assert distance("3,8", "3,8") == 0.0
    assert distance("3,8", "3;8") == 1.0
    # {3, ,8 8, ,5} and {3, ,8 8, ,9}: three of five.
    assert distance("3,8,5", "3,8,9") == pytest.approx(0.4)
    assert distance("3", "8") == 1.0


def test_a_rewrite_is_as_diverse_as_it_is_far_from_the_others_of_its_group() -> None:
    assert diversity(prompt(), ["3,8", "3,8", "3;8"]) == [0.5, 0.5, 1.0]
    assert diversity(prompt(), ["3,8"]) == [0.0]


def test_a_group_s_diversity_adds_to_alignment_where_a_rewrite_is_consistent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    said = {"3,8": 1.0, "3;8": 1.0, "3;9": 0.0}
    rows = [
        row(
            replace(
                make_sample(prompt(), f"0-{k}", [1], reward=0.6 * consistent),
                text=text,
                reward_parts={"consistent": consistent, "alignment": 0.6},
            )
        )
        for k, (text, consistent) in enumerate(said.items())
    ]

    async def scored() -> list[float]:
        reward = load(EXAMPLES / "rewriting" / "rewriter.yaml").rollout.reward
        rewards = GroupRewards(reward, None)
        try:
            await rewards.start()
            return [one.reward for one in await rewards.of(prompt(), rows)]
        finally:
            rewards.close()

    # `3;8` shares `3;` of three pairs with `3;9`, and nothing with `3,8`.
    expected = [0.6 + 0.25 * 1.0, 0.6 + 0.25 * (1 + 2 / 3) / 2, 0.0]
    assert asyncio.run(scored()) == pytest.approx(expected)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose next token depends on the last one alone: after `,` and after `=` comes `3`
    with probability 1/2, after `3` the end with 1/4, and `8` in all cases else with 1/8."""
    folder = tmp_path_factory.mktemp("learner")
    PREPARE["write_model"](folder, 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    characters = ["<pad>", "<bos>", "<eos>", "<unk>", *PREPARE["CHARACTERS"]]
    width = model.config.hidden_size
    probabilities = torch.full((len(characters), len(characters)), math.nan)
    for last, shares in zip(characters, probabilities, strict=True):
        known = {"8": 1 / 8} | {",": {"3": 1 / 2}, "=": {"3": 1 / 2}, "3": {"<eos>": 1 / 4}}.get(
            last, {}
        )
        shares.fill_((1 - sum(known.values())) / (len(characters) - len(known)))
        for name, share in known.items():
            shares[characters.index(name)] = share
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(len(characters), width))
        # The norm makes the only one of a row sqrt(width).
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : len(characters)] = probabilities.log().T / math.sqrt(width)
    model.save_pretrained(folder)
    return str(folder)


def test_a_rewrite_is_scored_by_what_the_learner_would_have_written(learner: str) -> None:
    ln2 = math.log(2)
    found = mean_logprobs(learner, ["D3=", "D3572="], ["3", "8"], [True, False])
    # The norm's epsilon costs 1e-4. `=` to `3` 1/2, `3` to the end 1/4; `=` to `8` 1/8.
    assert found == pytest.approx([-(ln2 + 2 * ln2) / 2, -3 * ln2], abs=1e-3)


def test_alignment_falls_from_one_to_nothing_with_the_nats_per_token(learner: str) -> None:
    row = prompt(question="D3=")
    found = alignment(
        [row] * 4,
        ["3", "3", "8", ""],
        finish_reason=["stop", "length", "length", "length"],
        learner=learner,
        floor=2.0,
    )
    ln2 = math.log(2)
    expected = [1 - 1.5 * ln2 / 2, 1 - ln2 / 2, 0.0, 0.0]
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_learner_that_is_not_there_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere holds no model; train base\.yaml first"):
        alignment(
            [prompt(question="D3=")],
            ["3"],
            finish_reason=["stop"],
            learner=str(tmp_path / "nowhere"),
        )


def test_the_first_consistent_rewrite_is_kept_and_else_the_demonstration() -> None:
    def response(question: str, text: str, consistent: float | None) -> dict[str, Any]:
        scored = (
            {"reward": None}
            if consistent is None
            else {"reward": 0.7 * consistent, "reward_parts": {"consistent": consistent}}
        )
        return {"question": question, "demonstration": f"of {question}", "response": text} | scored

    kept = verified(
        [
            response("a", "wrong", 0.0),
            response("a", "right", 1.0),
            response("a", "late", 1.0),
            response("b", "wrong", 0.0),
            response("b", "failed", None),
        ]
    )
    assert kept == [
        {"prompt": "a", "response": "right", "rewritten": True},
        {"prompt": "b", "response": "of b", "rewritten": False},
    ]


def test_skills_are_shares_of_right_results_and_of_right_workings() -> None:
    def answer(prompt: str, response: str, reward: float | None) -> dict[str, Any]:
        return {"prompt": prompt, "response": response, "reward": reward}

    found = skills(
        [
            answer("D3572=", "j", 1.0),
            answer("D3572=", "8", 0.0),
            answer("S3572=", "3,8,5,7", 1.0),
            answer("S3572=", "3,7,5,7", 1.0),
            answer("M3572=", "3,5,7,6", 0.0),
            answer("N3572=", "3;3;3;2", 1.0),
            answer("N3572=", "3", None),
        ]
    )
    assert found == {"new": 0.5, "D": 0.5, "known": 0.75, "S": 1.0, "M": 0.0, "N": 1.0} | {
        "working": 0.5
    }


def test_the_table_shows_means_and_ranges_over_seeds() -> None:
    seeds = [
        {arm: {"known": known, "new": 0.5} for arm in ("base", "demonstrations", "asked")}
        | {"rewriter": {"known": known, "new": 0.5, "nats": -1.0}}
        for known in (0.25, 0.75)
    ]
    columns = {"new": "new operation", "known": "known operations"}
    several = table(seeds, columns).splitlines()
    assert len(several) == 2 + len(ARMS)
    assert several[-1] == (
        "| rewrites of the trained rewriter | 0.50 (0.50 to 0.50) | 0.50 (0.25 to 0.75) |"
    )
    assert "| 0.50 | 0.25 |" in table(seeds[:1], columns)
    described = table(seeds, {"nats": "log-prob per token"}).splitlines()
    assert described[2:] == ["| rewrites of the trained rewriter | -1.00 (-1.00 to -1.00) |"]


def test_every_config_of_the_example_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(
        EXAMPLES / "rewriting",
        tmp_path / "examples" / "rewriting",
        ignore=shutil.ignore_patterns("generated"),
    )
    folder = tmp_path / "examples" / "rewriting"
    PREPARE["write"](folder / "generated", 1)
    shutil.copytree(folder / "generated" / "model", tmp_path / "runs" / "rewriting" / "base" / "hf")
    monkeypatch.chdir(tmp_path)
    for name in CONFIGS:
        assert not preflight(load(folder / f"{name}.yaml"), all_data=True).problems
