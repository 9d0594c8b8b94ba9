"""Whole answers of the checks before a run: for every kind of wrong file and setting, each problem
and note, on this machine and for a described one; and the shapes of models."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.plan import model_files, preflight
from megatron_async_rl.plan.machine import GIB, Machine, described_machine
from megatron_async_rl.plan.model_files import PUBLISHED, published_shape, read_model
from megatron_async_rl.plan.preflight import PROMPTS_IN_A_PLAN
from megatron_async_rl.watchdog.events import Status, write_status
from tests.full_run import written
from tests.stored_pages import cases_of, listed, require_page
from tests.written_run import config_tree, write_model, write_prompts, write_run

LAPTOP = Machine(cores=4, memory=16 * GIB, shared_memory=2 * GIB, gpus=())
DESCRIBED = described_machine(gpus=2, gpu_memory_gib=80, nodes=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config next to good and bad data, models and run directories."""
    folder = tmp_path_factory.mktemp("preflight")
    write_run(folder)
    write_prompts(folder / "held.jsonl", 3)
    write_prompts(folder / "many.jsonl", 12)
    long = [
        {"prompt": "1" * count, "answer": "1", "response": "2" * count} for count in (2, 30, 50)
    ]
    for name, rows in {
        "long.jsonl": long,
        "unknown.jsonl": [{"prompt": "letters", "answer": "1"}],
        "unanswered.jsonl": [{"prompt": "1+1="}],
        "empty.jsonl": [],
        "other.jsonl": [{"question": "1+1=", "answer": "2"}],
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n')
    for name in ("no_weights", "no_tokenizer", "no_config", "bad_config", "bad_tokenizer"):
        write_model(folder / name)
    (folder / "no_weights" / "model.safetensors").unlink()
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    (folder / "no_config" / "config.json").unlink()
    (folder / "bad_config" / "config.json").write_text("{")
    (folder / "bad_tokenizer" / "tokenizer.json").write_text("{")
    write_model(folder / "few_rows", vocab_size=5)
    written(folder / "a run", 3)
    (folder / "empty run").mkdir()
    (folder / "a file").touch()
    for name, phase in (("stopped", "stopped"), ("finished", "finished"), ("at zero", "training")):
        step = 0 if name == "at zero" else 2
        write_status(folder / name, Status(phase=phase, step=step, steps=4, time=0.0))
    return file_in(folder)


def file_in(folder: Path) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config_tree()))
    return file


def checked(file: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the checks report. `given`: overrides, behind options in brackets: `[all]` reads
    all data, `[described]` is for another machine, `[absent]` accepts a model that is not here,
    `[3]` reads three rows."""
    options = re.match(r"(?:\[\w+\] )*", given)
    assert options is not None
    names = set(re.findall(r"\w+", options[0]))
    overrides = re.split(r" (?=[a-z_.]+=)", given[options.end() :])
    limit = next((int(one) for one in names if one.isdecimal()), PROMPTS_IN_A_PLAN)
    monkeypatch.setattr(preflight, "PROMPTS_IN_A_PLAN", limit)
    try:
        config = load(file, [one for one in overrides if one])
    except ConfigError as error:
        return f"{error}\n"
    plan = preflight.preflight(
        config,
        all_data="all" in names,
        machine=DESCRIBED if "described" in names else LAPTOP,
        without_model="absent" in names,
    )
    lines = [str(one) for one in plan.problems] + [f"note: {one}" for one in plan.warnings]
    lines += [f"absent: {plan.absent}"] if plan.absent else []
    if plan.totals is not None:
        lines.append(f"sources: {[vars(one) for one in plan.totals.sources]}")
    if plan.batch is not None:
        lines.append(f"longest {plan.batch.longest}, prompt {plan.batch.prompt}")
    return "\n".join(lines) + "\n"


def test_every_check_is_the_one_on_its_page(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = ""
    for given in cases_of("preflight/checks"):
        text += f"$ {given}\n{checked(file, given, monkeypatch)}\n"
    require_page("preflight/checks", text.replace(str(file.parent), "FOLDER"))


def test_a_folder_that_cannot_be_written_is_a_problem(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    config = load(file, ["run.dir=new/er"])
    (problem,) = preflight._run_directory(config)
    assert (problem.key, "cannot be written to" in problem.what) == ("run.dir", True)


def test_a_server_is_looked_for_at_its_port(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    class Connection:
        def close(self) -> None:
            looked.append("closed")

    def connect(address: tuple[str, int], timeout: float) -> Connection:
        looked.append((*address, timeout))
        if address[0] == "silent":
            raise OSError(111, "Connection refused")
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)
    for url, port in (("http://a:5/x", 5), ("http://a", 80), ("https://a/v1", 443)):
        looked.clear()
        parts = f"rollout.reward={{name: judge, settings: {{url: '{url}', model: m}}}}"
        assert preflight._silent_servers(load(file, [parts])) == []
        assert looked == [("a", port, 2.0), "closed"]
    parts = "rollout.reward={name: http, settings: {url: 'http://silent:7'}}"
    assert preflight._silent_servers(load(file, [parts])) == [
        "rollout.reward: no server accepts connections at silent:7 (Connection refused): start the"
        " http server before the run"
    ]
    for parts in ("rollout.reward.name=math", "rollout.reward={name: http, settings: {url: x}}"):
        assert preflight._silent_servers(load(file, [parts])) == []


def test_a_prompt_in_a_chat_template_is_noted_for_an_agent_only(file: Path) -> None:
    for name, as_chat, noted in (("agent", True, 1), ("agent", False, 0), ("tools", True, 0)):
        environment = f"rollout.environment={{name: {name}, settings: {{run: m:f}}}}"
        config = load(file, [environment, f"data.as_chat={as_chat}".lower()])
        assert len(preflight._rendered_for_an_agent(config)) == noted, name
    assert preflight._rendered_for_an_agent(load(file, [])) == []


EDITS: tuple[dict[str, Any], ...] = (
    *({}, {"num_key_value_heads": None}, {"head_dim": None}, {"hidden_size": "16"}),
    *({"tie_word_embeddings": True}, {"attention_bias": True}, {"vocab_size": "many"}),
    *({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, {"model_type": "unknown"}),
    *(
        {"num_hidden_layers": "absent"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"hidden_size": []},
    ),
    {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 24,
        "num_local_experts": 257,
        "num_experts_per_tok": 2,
    },
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
)


def test_every_model_is_read_as_on_its_page(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}
    for number, edit in enumerate(EDITS):
        folder = write_model(tmp_path / str(number), **edit)
        content = json.loads((folder / "config.json").read_text())
        kept = {key: value for key, value in content.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))
        shape, problems = read_model(folder)
        found: dict[str, Any] = {"problems": [str(one) for one in problems]}
        if shape is not None:
            found |= asdict(replace(shape)) | {"family": shape.family.model_type}
            for name in dir(type(shape)):
                if isinstance(getattr(type(shape), name), property):
                    found[name] = getattr(shape, name)
        shown[str(edit)] = found
    index = tmp_path / "0" / "model.safetensors.index.json"
    for content in (
        '{"weight_map": {"a": "b", "c": "d", "e": "model.safetensors"}}',
        "{}",
        "[]",
        "{",
    ):
        index.write_text(content)
        shown[content] = [str(one) for one in read_model(tmp_path / "0")[1]]
        assert read_model(tmp_path / "0", weights=False)[1] == []
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert read_model(tmp_path / "0")[1] == []
    for path in (tmp_path / "0" / "config.json", tmp_path / "none", Path("hf:/x")):
        shown[path.name] = [str(one) for one in read_model(path)[1]]
    for name in (*PUBLISHED, "models/Qwen3-8B", "models/other"):
        known = published_shape(Path(name))
        shown[name] = None if known is None else [known[0].parameters, known[1]]
    shown["all"] = model_files.PUBLISHED
    require_page("preflight/models", listed(shown).replace(str(tmp_path), "FOLDER"))
