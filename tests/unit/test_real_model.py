"""The example that trains a real model: what it measures, and the page that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from examples.smollm2 import answer_share

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "smollm2" / "real.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("smollm2_real", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def row(which, question, answer, response, reward):
    prompt = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    shared = {"set": which, "prompt": prompt + "<|im_start|>assistant\n"}
    return shared | {"answer": answer, "response": response, "reward": reward}


@pytest.fixture
def folder(example, monkeypatch, tmp_path):
    """A finished run, on whose model `mar eval` writes the given responses."""
    responses = {
        "generated": [
            row("chain_sum", "3 + 4 =", "7", "It is 8 | so.", 0.0),
            row("chain_sum", "5 - 9 =", "-4", "The answer is -4", 1.0),
            row("untrained", 'How many "a" in banana?', "3", "`2`", 0.0),
        ],
        "hf": [
            row("chain_sum", "3 + 4 =", "7", " 7\n", 1.0),
            row("chain_sum", "5 - 9 =", "-4", "-4", 1.0),
            row("untrained", 'How many "a" in banana?', "3", "", 0.0),
        ],
    }

    def command(*words):
        which = "hf" if Path(words[1]).name == "hf" else "generated"
        lines = [json.dumps(one) for one in responses[which]]
        Path(words[words.index("--responses") + 1]).write_text("\n".join(lines))

    monkeypatch.setattr(example, "command", command)
    run = tmp_path / "chain_sum"
    run.mkdir()
    rows = [
        {"step": step, "time": 1e9 + 3600 * step, "time/step_s": 60.0, "lag/mean": 1.0}
        for step in (1, 2, 3)
    ]
    (run / "config.yaml").write_text("model: {dtype: bfloat16}\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    evaluations = [
        {"version": version, "time": 1e9, "set": name, "pass_at": {"1": share}}
        for version, name, share in ((0, "chain_sum", 0.25), (0, "x", 0.0), (3, "chain_sum", 0.75))
    ]
    (run / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    return run


def test_a_result_has_the_curve_of_the_task_and_shares_before_and_after(example, folder):
    result = example.result_of("chain_sum", folder)
    assert result["curve"] == [[0.0, 0.25], [3.0, 0.75]]
    assert (result["steps"], result["minutes"], result["lag"]) == (3, 3.0, 1.0)
    assert (result["date"], result["dtype"]) == ("2001-09-09", "bfloat16")
    before, after = result["before"]["chain_sum"], result["after"]["chain_sum"]
    assert (before["right"], before["alone"]) == (0.5, 0.0)
    assert (after["right"], after["alone"], after["length"]) == (1.0, 1.0, 2.5)
    assert before["first"][0] == {
        "question": "3 + 4 =",
        "answer": "7",
        "response": "It is 8 | so.",
    }


def test_the_page_shows_changes_and_responses_as_cells(example, folder):
    result = example.result_of("chain_sum", folder)
    result["machine"] = "an abacus"
    lines = list(example.page_lines({"runs": {"chain_sum": result}}))
    assert "| `chain_sum` | 2001-09-09, an abacus, `bfloat16` |" in lines
    assert "| `chain_sum` | 3 | 3.0 | 1.0 | 50% → 100% | 0% → 100% | 50% → 100% | 14 → 2 |" in lines
    assert "| `chain_sum` | 0% → 0% | 0% → 0% | 3 → 0 |" in lines
    assert "| `3 + 4 =` | `7` | `It is 8 / so.` | `7` |" in lines


def test_a_run_that_has_finished_is_not_trained_again(example, monkeypatch, tmp_path):
    monkeypatch.setattr(example, "FOLDER", tmp_path)
    asked = []
    monkeypatch.setattr(example, "command", lambda *words: asked.append(words))
    example.train("needle_haystack_lora", "bfloat16")
    ((verb, config, *overrides),) = asked
    assert (verb, Path(config).name) == ("train", "smollm2_needle_haystack_cpu.yaml")
    assert overrides[:2] == [f"run.dir={tmp_path / 'needle_haystack_lora'}", "model.dtype=bfloat16"]
    assert "policy.lora={rank: 16}" in overrides
    (tmp_path / "needle_haystack_lora" / "hf").mkdir(parents=True)
    (tmp_path / "needle_haystack_lora" / "hf" / "config.json").write_text("{}")
    example.train("needle_haystack_lora", "bfloat16")
    assert len(asked) == 1


def test_the_page_is_made_from_the_stored_record(example):
    text = example.PAGE.read_text()
    record = json.loads(example.RECORD.read_text()) if example.RECORD.is_file() else {"runs": {}}
    within = text.partition(example.BEGIN)[2].partition(example.END)[0]
    assert within == "\n".join(example.page_lines(record)) + "\n"


def test_both_configs_differ_only_in_their_task_and_pace(example):
    first, second = (
        yaml.safe_load((ROOT / "examples" / f"smollm2_{task}_cpu.yaml").read_text())
        for task in ("chain_sum", "needle_haystack")
    )
    text = json.dumps(first).replace("chain_sum", "needle_haystack")
    other = json.loads(text)
    other["data"]["generate"]["options"] = second["data"]["generate"]["options"]
    other["data"]["system_prompt"] = second["data"]["system_prompt"]
    for key in ("reward", "sampling"):
        other["rollout"][key] = second["rollout"][key]
    other["eval"]["sets"][1]["system_prompt"] = first["data"]["system_prompt"]
    other["run"]["steps"] = second["run"]["steps"]
    for key in ("group_size", "async_ratio"):
        other["flow"][key] = second["flow"][key]
    other["policy"]["optimizer"] |= {"lr": 5e-5, "warmup_steps": 4}
    assert other == second


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (" Chad\n", 1.0),
        ("**Chad**", 0.5),
        ("Bret, Chad, Boyd", 0.25),
        ("Chadwick", 0.0),
        ("Bret", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_share_of_the_response_that_is_the_name(response, reward):
    prompt = SimpleNamespace(fields={"answer": "Chad"})
    assert answer_share.score(prompt, response) == reward


@pytest.mark.parametrize(
    ("answer", "response", "contained"),
    [
        ("7", "It is 7.", True),
        ("7", "-7", False),
        ("7", "17", False),
        ("7", "It is 7.5", False),
        ("7", "1,7", False),
        ("7", "4, 7, 9", True),
        ("-4", "5 - 9 = -4", True),
        ("Chad", "Chad is committed to pigs.", True),
        ("Chad", "Chadwick", False),
    ],
)
def test_a_response_contains_an_answer_that_is_a_word_of_it(example, answer, response, contained):
    assert example.contains_answer({"answer": answer, "response": response}) is contained


def test_the_page_is_not_written_without_results(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "RECORD", tmp_path / "real.json")
    monkeypatch.setattr(example, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["real.py", "--page"])
    with pytest.raises(SystemExit):
        example.main()
    assert "real.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
