"""A file and overrides become one config; faults are explained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_async_rl.config import docs as document
from megatron_async_rl.config.keys import leaf_types, path_keys, walk
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import SCREEN_PROBLEMS, ConfigError, Problem
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.yaml_tree import read_document, write
from tests.method_settings import models
from tests.written_run import config_tree

ROOT = Path(__file__).parents[2]
AMBIGUOUS = (
    "2024-01-01",
    "010",
    "1:30",
    "1_000",
    "0x10",
    "0b11",
    "0o17",
    "1e-4",
    "1.10",
    ".5",
    "on",
    "OFF",
    "yes",
    "no",
    "true",
    ".nan",
    ".inf",
    "2024",
)
"""Text that some version of YAML reads as another value."""
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_tree(), sort_keys=False))
    return path


def problem(file: Path, *overrides: str) -> Problem:
    """Return the first problem of a load that must fail."""
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return caught.value.problems[0]


def test_a_path_that_is_not_a_config_is_refused_with_a_fix(file):
    for path, reason, fix in (
        (file.parent, "Is a directory", "name a YAML file, not a folder"),
        (file.with_name("conf.yaml"), "No such file", f"one of the configs in that folder: {file}"),
        (file.parent / "no" / "conf.yaml", "No such file", "check the path; `mar init` writes"),
    ):
        found = problem(path)
        assert (found.key, reason in found.what, fix in found.fix) == (str(path), True, True)


def test_an_override_wins_over_the_file(file):
    assert load(file, ["run.steps=7"]).run.steps == 7


def test_the_last_of_two_overrides_wins(file):
    assert load(file, ["run.steps=7", "run.steps=9"]).run.steps == 9


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "+1e-4", "0.0001", ".0001", "1.e-4"])
def test_every_way_to_write_a_float_is_a_number(file, text):
    assert load(file, [f"policy.optimizer.lr={text}"]).policy.optimizer.lr == 1e-4
    file.write_text(
        file.read_text() + f"objective: {{loss: {{name: ppo_clip, clip_low: {text}}}}}\n"
    )
    assert load(file).objective.loss.clip_low == 1e-4


def test_text_that_only_looks_like_a_float_stays_text(file):
    assert load(file, ["rollout.sampling.stop=[e4, 1e, '1e4']"]).rollout.sampling.stop == (
        "e4",
        "1e",
        "1e4",
    )


def test_an_override_reaches_into_a_list(file):
    changed = load(file, ["controls=[{name: gac, c_low: 0.1}]", "controls.0.c_low=0.2"])
    assert [control.c_low for control in changed.controls] == [0.2]


def test_an_override_reaches_into_a_method_written_as_its_bare_name(file):
    changed = load(
        file,
        [
            "controls=[gac]",
            "controls.0.c_low=0.2",
            "objective.loss=ppo_clip",
            "objective.loss.clip_low=0.3",
        ],
    )
    assert (changed.controls[0].c_low, changed.objective.loss.clip_low) == (0.2, 0.3)


def test_an_override_makes_an_absent_section(file):
    assert (
        load(file, ["data.eval=train.jsonl", "eval.samples_per_prompt=2"]).eval.samples_per_prompt
        == 2
    )


def test_null_removes_a_section(file):
    file.write_text(file.read_text() + "eval: {samples_per_prompt: 2}\n")
    assert load(file, ["eval=null"]).eval is None


def test_relative_paths_start_at_the_file_or_the_current_folder(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = load(Path("../config.yaml"), ["data.eval=held_out.jsonl"])
    assert loaded.run.dir == tmp_path / "out"
    assert loaded.model.path == tmp_path / "model"
    assert loaded.data.train == tmp_path / "train.jsonl"
    assert loaded.data.eval == elsewhere / "held_out.jsonl"


def test_a_whole_section_as_an_override_takes_its_paths_from_the_current_folder(
    file, tmp_path, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(file, ["data={train: mine.jsonl}"]).data.train == elsewhere / "mine.jsonl"


def test_a_dumped_config_loads_back_equal_from_anywhere(file, tmp_path):
    overrides = [
        "controls=[gac]",
        "data.eval=e.jsonl",
        "eval={}",
        "policy.optimizer.lr=1e-7",
        "rollout.sampling.stop=['\\n', 'é', '1e4']",
    ]
    loaded = load(file, overrides)
    copy = tmp_path / "deep" / "copy.yaml"
    copy.parent.mkdir()
    copy.write_text(dump(loaded))
    assert load(copy) == loaded


@pytest.mark.parametrize("loss", [model.model_fields["name"].default for model in models("loss")])
def test_every_loss_with_its_defaults_survives_dump_and_load(file, tmp_path, loss):
    tree = yaml.safe_load(file.read_text())
    tree["objective"] = {"loss": loss}
    uses = next(model for model in models("loss") if model.model_fields["name"].default == loss)
    if not uses.uses_advantage:
        tree["objective"]["advantage"] = "none"
    if uses.uses_reference:
        tree["objective"]["reference"] = {}
    if loss == "decoupled_ppo":
        tree["objective"]["proximal"] = "recompute"
    if uses.whole_group_of_one_version:
        tree["flow"]["async_ratio"] = 0
    if loss == "sft":
        tree |= {"rollout": None}
        tree["flow"] |= {"group_size": 1, "async_ratio": 0}
        tree["objective"]["advantage"] = "none"
    file.write_text(yaml.safe_dump(tree))
    loaded = load(file)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(loaded))
    assert load(copy) == loaded


def test_the_bounds_of_bapo_are_lists_of_numbers(file):
    loaded = load(file, ["objective.loss={name: bapo, low: [0.5, 0.75, 0.25]}"])
    assert loaded.objective.loss.low == (0.5, 0.75, 0.25)
    for wrong in ("[0.5, 0.75]", "['0.5', 0.75, 0.25]", "0.5", "[0.9, 0.5, 0.1]"):
        with pytest.raises(ConfigError, match=r"objective\.loss\.low"):
            load(file, [f"objective.loss={{name: bapo, low: {wrong}}}"])


@given(
    lr=st.floats(1e-30, 1e30),
    ratio=st.floats(0, 1e6),
    stop=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), max_size=3
    ),
)
def test_numbers_and_texts_survive_dump_and_load(tmp_path_factory, lr, ratio, stop):
    tree = config_tree()
    tree["policy"]["optimizer"] = {"lr": lr}
    tree["flow"]["async_ratio"] = ratio
    tree["rollout"]["sampling"]["stop"] = stop
    tree["run"]["dir"], tree["model"]["path"], tree["data"]["train"] = "/r", "/m", "/d"
    made = validated(tree)
    copy = tmp_path_factory.mktemp("dump") / "config.yaml"
    copy.write_text(dump(made))
    assert load(copy) == made


def test_a_config_cannot_be_changed_after_loading(file):
    with pytest.raises(ValidationError):
        load(file).run.steps = 3


def test_a_digit_that_is_not_a_number_is_no_entry_of_a_list(file):
    with pytest.raises(ConfigError, match=r"'²' is not an entry of a list of 1"):
        load(file, ["controls=[gac]", "controls.²=gac"])


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("policy.optimiser.lr=1", "policy.optimiser", "`policy.optimizer`"),
        ("polic.x=1", "polic", "`policy`"),
        ("lr=1", "lr", "`policy.optimizer.lr`"),
        ("flow.temperature=1", "flow.temperature", "`rollout.sampling.temperature`"),
        ("controls=[{name: gac, c_lo: 1}]", "controls.0.c_lo", "`controls.0.c_low`"),
        (
            "objective.loss={name: reinforce, clip_low: 1}",
            "objective.loss.clip_low",
            "belongs to ppo_clip",
        ),
        ("flow.zzzzqq=1", "flow.zzzzqq", "async_ratio, dynamic_sampling, group_size"),
    ],
)
def test_an_unknown_key_points_to_the_right_one(file, override, key, fix):
    found = problem(file, override)
    assert found.key == key
    assert fix in found.fix
    assert found.where == f"command line: {override}"


@pytest.mark.parametrize(
    ("override", "successor"),
    [
        ("flow.extra_responses=2", "flow.oversample"),
        ("flow.requeue_cut=true", "flow.oversample"),
        ("flow.filter_equal_groups=true", "flow.dynamic_sampling"),
        ("rollout.restarts=1", "rollout.restarts_per_hour"),
        ("weights.update=together", "weights.max_paused: 1.0"),
    ],
)
def test_a_removed_key_is_refused_with_its_successor(file, override, successor):
    found = problem(file, override)
    assert found.key == override.partition("=")[0]
    assert found.what == "is no longer a key"
    assert successor in found.fix


@pytest.mark.parametrize(
    ("override", "key", "what", "fix"),
    [
        ("run.steps=ten", "run.steps", '"ten"', "whole number, above 0"),
        ("run.steps='10'", "run.steps", '"10"', "whole number"),
        ("run.steps=true", "run.steps", "true", "whole number"),
        ("run.steps=0", "run.steps", "0", "above 0"),
        ("data.shuffle=1", "data.shuffle", "1", "true or false"),
        ("policy.optimizer.lr=.inf", "policy.optimizer.lr", "Infinity", "number, above 0"),
        ("flow.async_ratio=.nan", "flow.async_ratio", "NaN", "number, at least 0"),
        ("model.dtype=float61", "model.dtype", "float61", "float32, bfloat16"),
        ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas.1", "missing", "list of 2"),
        ("rollout=3", "rollout", "3", "engines"),
        ("objective.loss=ppo_clop", "objective.loss", "'ppo_clop'", "reinforce, ppo_clip,"),
        ("objective.loss={clip_low: 1}", "objective.loss", "no `name`", "reinforce, ppo_clip,"),
        ("controls=[gak]", "controls.0", "gak", "gac"),
        ("controls=gac", "controls", '"gac"', "a list of: gac"),
        ("controls=[3]", "controls.0", "got 3, which is not a section", "expected one of: gac"),
        ("data.sources={a: 3}", "data.sources", "array", "a list of sections with the keys answer"),
        ("data.sources=[3]", "data.sources.0", "3", "expected a section with the keys answer_key"),
        ("rollout.reward.parts=3", "rollout.reward.parts", "3", "a mapping of names to sections"),
        (
            "rollout.reward.parts={a: 3}",
            "rollout.reward.parts.a",
            "got 3, which is not a section",
            "expected a section with the keys gate, name, per",
        ),
        ("rollout.reward={}", "rollout.reward", "either `name`", "change one"),
        ("model=null", "model", "null", "path"),
        ("run.dir.x=1", "run.dir", "not a section", "set this key itself"),
        ("rollout.vllm=3", "rollout.vllm", "3", "mapping of names to values"),
        ("rollout.vllm={dtype: auto}", "rollout.vllm", "sets it: model.dtype", "change one"),
        ("rollout.vllm.max-num-seqs=8", "rollout.vllm", "rollout.max_concurrent", "change one"),
        ("rollout.vllm.pipeline_parallel_size=2", "rollout.vllm", "rollout.pipeline", "change one"),
        ("rollout.vllm.quantization=fp8", "rollout.vllm", "fp8_per_channel", "change one"),
        ("rollout.vllm.data_parallel_size=2", "rollout.vllm", "set rollout.engines", "change one"),
        (
            "rollout.vllm.nnodes=2",
            "rollout.vllm",
            "rollout.pipeline set their number",
            "change one",
        ),
        ("rollout.vllm.enable_eplb=true", "rollout.vllm", "must not move", "change one"),
        ("controls=[gac, gac]", "config", "each at most once", "change one"),
        ("objective={loss: sft, advantage: rloo}", "objective", "set advantage: none", "change"),
        ("objective.loss=sft", "config", "remove `rollout`", "change one"),
        ("eval={every: 2}", "config", "needs held-out prompts; name a file as data.eval", "change"),
        ("data.max_tokens=9", "config", "is for given responses", "change one"),
        (
            "rollout.reward={name: 'm:f', per: group, timeout_s: 600}",
            "config",
            "must be below watchdog.timeout_s: 600",
            "change one",
        ),
    ],
)
def test_a_wrong_value_is_reported_with_what_is_expected(file, override, key, what, fix):
    found = problem(file, override)
    assert found.key == key
    assert what in found.what
    assert fix in found.fix


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("run.steps", "not an override"),
        ("=3", "not an override"),
        ("run..steps=3", "not an override"),
        ("controls=[gac", "not YAML"),
        ("controls.0.c_low=1", "not an entry of a list of 0"),
        ("controls.x=1", "not an entry of a list of 0"),
    ],
)
def test_an_invalid_override_is_refused(file, override, what):
    if override.startswith("controls."):
        file.write_text(file.read_text() + "controls: []\n")
    assert what in problem(file, override).what


SUPERVISED = (
    "rollout=null",
    "objective={loss: sft, advantage: none}",
    "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}",
)


def test_a_supervised_run_measures_given_responses_and_samples_none(file, tmp_path):
    sets = "eval.sets=[{name: a, path: a.jsonl}, {name: b, path: b.jsonl}]"
    one = load(file, [*SUPERVISED, "data.eval=held_out.jsonl", "eval.every=2"])
    assert [(held.path_key, held.name) for held in one.held_out_files] == [("data.eval", "")]
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(one))
    assert load(copy) == one
    several = load(file, [*SUPERVISED, sets])
    assert [held.path_key for held in several.held_out_files] == [
        "eval.sets.0.path",
        "eval.sets.1.path",
    ]
    assert load(file, [*SUPERVISED, "data.eval=held_out.jsonl"]).held_out_files == []
    for wrong in ("eval.samples_per_prompt=2", "eval.sampling={temperature: 0}", "eval.engines=1"):
        found = problem(file, *SUPERVISED, "data.eval=held_out.jsonl", wrong)
        assert f"{wrong.partition('=')[0]} applies to sampled responses" in found.what
    found = problem(file, *SUPERVISED, sets.replace("path: b.jsonl", "path: b.jsonl, pass_at: [1]"))
    assert "remove eval.sets.1.pass_at" in found.what


REPLAY = ["policy.routing_replay=proximal", "objective.minibatches=2"]
REPLAYED = ["objective.proximal=recompute", "objective.loss=ppo_clip"]


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["policy.routing_replay=rollout"], ""),
        ([*REPLAY, *REPLAYED], ""),
        ([*REPLAY, "objective.proximal=behavior"], "pass that computes pi_prox at the start"),
        ([REPLAY[0], *REPLAYED], "several optimizer steps; set objective.proximal: recompute"),
        ([*REPLAY, REPLAYED[0], "objective.loss=reinforce"], "reinforce without corrections needs"),
        (
            [
                *REPLAY,
                REPLAYED[0],
                "objective.loss=reinforce",
                "objective.corrections=[tis]",
                "objective.advantage={name: opob, mode: exact}",
            ],
            "trains one sequence at a time",
        ),
        (
            ["policy.routing_replay=rollout", "objective={loss: sft, advantage: none}"],
            "sft learns from given responses",
        ),
        (["rollout.vllm.enable_return_routed_experts=true"], "sets it: policy.routing_replay"),
        (["samples.experts=true"], "engines record with policy.routing_replay: rollout"),
        (["samples.experts=true", "policy.routing_replay=rollout"], ""),
    ],
)
def test_replay_of_experts_needs_a_pass_that_chose_them(file, overrides, what):
    if not what:
        load(file, overrides)
        return
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    assert any(what in one.what for one in caught.value.problems)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (
            ["rollout.pipeline=2", "policy.routing_replay=rollout"],
            "only if one stage has all layers",
        ),
        (["rollout.vllm.enable_expert_parallel=true"], "which is 1"),
        (["rollout.vllm.quantization=fp8_per_channel"], "set model.dtype: bfloat16"),
    ],
)
def test_settings_that_vllm_cannot_start_with_are_refused(file, overrides, what):
    assert what in problem(file, *overrides).what
    load(file, ["model.dtype=bfloat16", "rollout.tensor=2", overrides[-1]])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ([], ""),
        (["policy.parallel.distributed_optimizer=false"], "nothing to gather"),
        (["policy.parallel.overlap_grad_reduce=false"], "in buckets"),
        (["objective.minibatches=1"], "published at once"),
        (["policy.lora={}"], "adapters"),
    ],
)
def test_an_overlapped_gather_needs_a_forward_pass_and_buckets(file, changed, why):
    ranks = ["policy.parallel.ranks=2", "objective.minibatches=2"]
    overlaps = [f"policy.parallel.overlap_{each}=true" for each in ("grad_reduce", "param_gather")]
    if not why:
        load(file, [*ranks, *overlaps])
        return
    with pytest.raises(ConfigError) as caught:
        load(file, [*ranks, *overlaps, *changed])
    (problem,) = caught.value.problems
    assert "policy.parallel.overlap_param_gather" in problem.what
    assert why in problem.what


@pytest.mark.parametrize("how", ["virtual_pipeline=2", "expert=2", "overlap_grad_reduce=true"])
def test_a_baseline_per_sequence_needs_separate_gradients(file, how):
    exact = ["objective.advantage={name: opob, mode: exact}", "objective.loss=reinforce"]
    load(file, [*exact, "policy.parallel.pipeline=2", "policy.parallel.ranks=4"])
    with pytest.raises(ConfigError) as caught:
        load(
            file,
            [
                *exact,
                "policy.parallel.pipeline=2",
                "policy.parallel.ranks=4",
                f"policy.parallel.{how}",
            ],
        )
    key = how.partition("=")[0]
    assert any(f"policy.parallel.{key}" in one.what for one in caught.value.problems)


def test_a_wrong_value_in_the_file_names_its_line(file):
    lines = file.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "max_tokens" in text)
    file.write_text(file.read_text().replace("max_tokens: 8", "max_tokens: -8"))
    assert problem(file).where == f"{file}:{line}"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("run: [1\n", 2, "not YAML"),
        ("a: 1\nb: c: d\n", 2, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "not YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, "set twice, on lines 1 and 3"),
        ("run:\n  dir: x\n  dir: y\n", 3, "set twice, on lines 2 and 3"),
        ("- 1\n", 1, "list, not a mapping"),
    ],
)
def test_yaml_that_cannot_be_read_names_its_line(file, text, line, what):
    file.write_text(text)
    found = problem(file)
    assert what in found.what
    assert found.where == f"{file}:{line}"


def test_an_anchor_may_be_merged_without_counting_as_a_repeated_key(file):
    tree = config_tree()
    del tree["rollout"]["sampling"]
    text = yaml.safe_dump(tree, sort_keys=False).replace(
        "rollout:\n", "rollout:\n  sampling: {<<: {max_tokens: 4}, max_tokens: 5}\n"
    )
    file.write_text(text)
    assert load(file).rollout.sampling.max_tokens == 5


def test_a_path_is_the_text_as_written(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in AMBIGUOUS:
        assert load(file, [f"run.dir={text}"]).run.dir == tmp_path / text
        assert load(file, [f"data={{train: {text}}}"]).data.train == tmp_path / text
    for text in (*AMBIGUOUS, "exp #3", "a: b", "[x]", "{x}", "*x", "&x", "!x", "'x", "- x", "?"):
        assert load(file, [f"model.path={text}"]).model.path == tmp_path / text


def test_the_type_of_every_key_that_takes_a_path_is_found():
    for key in path_keys():
        method = re.search(r"\((\w+)\)\.\w+$", key)
        *section, last = re.sub(r"\(\w+\)", "", key.replace("[]", ".0")).split(".")
        tree: Any = {"name": method[1]} if method else {}
        for part in reversed(section):
            tree = [tree] if part == "0" else {part: tree}
        assert Path in leaf_types([*section, last], tree), key


@pytest.mark.parametrize(
    "text",
    [
        "End with #### and the number",
        "# a title",
        "Answer: 5",
        "{question}",
        "a\nb\tc\n",
        " x ",
        '"a" and "b"',
        "*bold*",
        "%1",
        "@x",
        "- one",
        "on",
        "0x10",
        "...",
        "---",
    ],
)
def test_text_of_an_override_is_not_yaml(file, text):
    assert load(file, [f"data.system_prompt={text}"]).data.system_prompt == text
    quoted = json.dumps(text)
    assert load(file, [f"data.system_prompt={quoted}"]).data.system_prompt == text


def test_null_and_quotes_are_the_only_yaml_in_text(file):
    assert load(file, ["data.system_prompt=null"]).data.system_prompt is None
    assert load(file, ["data.system_prompt='null'"]).data.system_prompt == "null"
    assert load(file, ["data.system_prompt=''"]).data.system_prompt == ""
    assert "has no value" in problem(file, "data.system_prompt=").what
    assert "has no value" in problem(file, "eval= ").what
    assert problem(file, "run.dir=~").key == "run.dir"
    assert problem(file, "run.dir=~nobody-of-that-name/x").key == "run.dir"


def test_text_in_the_file_that_looks_cut_is_refused(file):
    text = file.read_text()
    for dir, cut in (("out #3", "#3"), ("End with #### and the number", "#### and the number")):
        file.write_text(text.replace("dir: out", f"dir: {dir}"))
        found = problem(file)
        assert (found.key, repr(cut) in found.what) == ("run.dir", True)
        file.write_text(text.replace("dir: out", f"dir: '{dir}'"))
        assert load(file).run.dir.name == dir
    for allowed in ("dir: out # my run", "dir: out  #", "dir: out\n  #x"):
        file.write_text(text.replace("dir: out", allowed).replace("steps: 4", "steps: 4 #x"))
        assert load(file).run.dir.name == "out"


def test_text_in_the_file_is_kept_as_written(file, tmp_path):
    for text in AMBIGUOUS:
        tree = file.read_text()
        file.write_text(tree.replace("dir: out", f"dir: {text}"))
        with_stops = f"rollout.sampling.stop=[{text}, 'x']"
        loaded = load(file, [with_stops])
        assert loaded.run.dir == tmp_path / text
        assert loaded.rollout.sampling.stop == (text, "x")
        file.write_text(tree)


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=010",
        "run.seed=1:30",
        "run.seed=1_000",
        "run.seed=0b11",
        "run.seed=0o17",
        "run.seed=-01",
        "policy.optimizer.lr=1_0.5",
        "policy.optimizer.lr=01e-4",
        "data.shuffle=off",
        "data.shuffle=Yes",
        "controls=[{name: gac, c_low: 00.1}]",
        "rollout.reward.settings={strict: on}",
        "rollout.reward.settings.code=010",
        "rollout.vllm={max_num_batched_tokens: 16_384}",
        "data.chat_template_options={enable_thinking: off}",
        "policy.optimizer={lr: 1e-4} # my comment",
        "run.steps=5 #7",
        "rollout.sampling.stop=[a #b\n]",
        "run.steps=#7",
        "rollout.reward.settings={day: !!timestamp 2024-01-01}",
        "rollout.reward.settings={key: !!binary aGk=}",
        "rollout.sampling.stop=!!set {a, b}",
        "data.system_prompt=\udcff",
        "run.dir=/x/\udcff",
        "rollout.reward.settings.\udcff=1",
    ],
)
def test_a_value_that_yaml_would_change_is_refused(file, override):
    found = problem(file, override)
    assert found.where.startswith("command line: ")
    str(found).encode("utf-8")


def test_yaml_that_both_versions_read_alike_is_accepted(file):
    settings = (
        "rollout.reward.settings={a: 1e-4, b: 0x10, c: .5, d: 2024-01-01, e: true, f: ~, g: .inf}"
    )
    read = load(file, [settings]).rollout.reward.settings
    assert {**read, "g": None} == {
        "a": 1e-4,
        "b": 16,
        "c": 0.5,
        "d": "2024-01-01",
        "e": True,
        "f": None,
        "g": None,
    }
    assert load(file, ["run.seed=0"]).run.seed == 0


def test_a_problem_in_the_file_names_its_line(file):
    file.write_text(file.read_text() + "controls: [{name: gac,\n    c_low: 01e-4}]\n")
    found = problem(file)
    line = len(file.read_text().splitlines())
    assert (found.key, found.where) == ("controls.0.c_low", f"{file}:{line}")


def test_keys_are_always_text(file):
    parts = "{010: {name: arithmetic}, on: {name: arithmetic}}"
    with pytest.raises(ConfigError, match="'010' cannot be the name"):
        load(file, [f"rollout.reward={{parts: {parts}}}"])
    read = load(file, ["rollout.reward.settings={on: 1, 1.0: 2, null: 3}"])
    assert read.rollout.reward.settings == {"on": 1, "1.0": 2, "null": 3}


def test_an_override_changes_one_of_two_aliased_sections(file):
    tree = config_tree()
    sampling = tree["rollout"].pop("sampling")
    text = yaml.safe_dump(tree, sort_keys=False)
    anchor = f"rollout:\n  sampling: &s {json.dumps(sampling | {'temperature': 1.0})}\n"
    held_out = "eval:\n  sampling: *s\n"
    file.write_text(text.replace("rollout:\n", anchor) + held_out)
    loaded = load(file, ["data.eval=e.jsonl", "rollout.sampling.temperature=0.5"])
    assert (loaded.rollout.sampling.temperature, loaded.eval.sampling.temperature) == (0.5, 1.0)


@given(
    st.recursive(SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(), one))
)
def test_every_tree_reads_back_as_it_was_written(value):
    for one_line in (False, True):
        assert read_document(write(value, one_line=one_line)).value == value


@given(st.text("0123456789._:xob+-eEaf~ynofNOYTrul'#", max_size=6))
def test_pyyaml_reads_the_written_text_too(text):
    assert yaml.safe_load(write([text])) == [text]


def test_a_file_that_is_not_utf8_and_an_unknown_tag_are_refused(file):
    text = file.read_text()
    file.write_text(text + "objective: !!python/object:os.system {}\n")
    assert "tag" in problem(file).what
    file.write_bytes(text.encode() + "# é\n".encode("latin-1"))
    assert "not UTF-8" in problem(file).what


def test_an_empty_file_lists_what_is_missing(file):
    file.write_text("# nothing yet\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [one.key for one in caught.value.problems] == ["run", "model", "data", "flow"]


def test_many_problems_still_fit_on_a_screen(file):
    overrides = [f"unknown_{number}=1" for number in range(20)]
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    assert len(caught.value.problems) == 20
    assert len(str(caught.value).splitlines()) <= 3 * SCREEN_PROBLEMS + 2 <= 30


def test_every_key_has_a_meaning():
    silent = [
        leaf.key
        for section, model, leaves in walk()
        for leaf in leaves
        if not leaf.field.description and not (leaf.key.endswith(".name") and "(" in section)
    ]
    assert silent == []
    assert [section for section, model, _ in walk() if not model.__doc__] == []


def test_the_page_of_keys_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text() == document.document(), (
        "run: python -m megatron_async_rl.config.docs > docs/config.md"
    )


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_follows_the_schema(example):
    load(example)


def test_a_path_that_libraries_would_open_elsewhere_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "latin-1")
    assert load(file, ["run.dir=/runs/a"]).run.dir == Path("/runs/a")
    with pytest.raises(ConfigError) as refused:
        load(file, ["run.dir=/runs/é"])
    (problem,) = refused.value.problems
    assert problem.key == "run.dir"
    assert "/runs/é is a path that some libraries cannot open in this locale" in problem.what
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "utf-8")
    assert load(file, ["run.dir=/runs/é"]).run.dir == Path("/runs/é")


def test_only_controls_that_calibrate_make_a_run_begin_synchronously(file: Path) -> None:
    calibrated = "controls=[{name: gac, calibrate: {steps: 2}}, ess_lr]"
    assert load(file).fresh_steps == 0
    assert load(file, ["controls=[gac]"]).fresh_steps == 0
    assert load(file, [calibrated]).fresh_steps == 3
    assert load(file, [calibrated, "objective.minibatches=2"]).fresh_steps == 2
