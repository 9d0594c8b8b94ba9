"""A plan uses the lengths of the training data: of prompts, and of given responses."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.plan import RunPlan
from megatron_async_rl.plan.preflight import preflight
from tests.written_run import config_tree, write_run

LAPTOP = Machine(cores=2, memory=16 * GIB, shared_memory=2 * GIB, gpus=())


def plan(file: Path, *overrides: str) -> RunPlan:
    return preflight(load(file, overrides), all_data=True, machine=LAPTOP)


def supervised_run(folder: Path, rows: list[dict[str, str]]) -> Path:
    file = write_run(folder, max_position_embeddings=4000)
    tree = config_tree() | {"objective": {"loss": "sft"}}
    del tree["rollout"]
    tree["flow"] = {"prompts_per_step": 4, "group_size": 1, "async_ratio": 0}
    file.write_text(yaml.safe_dump(tree))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_supervised_plan_uses_the_lengths_of_its_rows(tmp_path):
    rows = [{"prompt": "1+1=", "response": "2"}] * 3 + [{"prompt": "10+10=", "response": "20"}]
    planned = plan(supervised_run(tmp_path, rows))
    assert planned.problems == ()
    # Each row ends with one more token.
    assert planned.batch.longest == 6 + 2 + 1
    assert planned.batch.prompt + planned.batch.response == 7, "the mean of 6, 6, 6 and 9, up"
    assert planned.totals.trained == 4 * 4 * 7
    short = plan(supervised_run(tmp_path / "short", rows[:3] + rows[:1]))
    assert short.ranks[0].activations < planned.ranks[0].activations


def test_long_held_out_prompts_do_not_change_the_training_plan(tmp_path):
    file = write_run(tmp_path, max_position_embeddings=4000)
    (tmp_path / "held_out.jsonl").write_text(
        json.dumps({"prompt": "1+" * 500 + "1=", "answer": "501"}) + "\n"
    )
    budget = "policy.tokens_per_micro_batch=64"
    without = plan(file, budget)
    held_out = f"data.eval={tmp_path}/held_out.jsonl"
    planned = plan(file, budget, held_out, "eval={samples_per_prompt: 1}")
    assert planned.problems == ()
    assert planned.batch == without.batch
    assert planned.ranks == without.ranks
