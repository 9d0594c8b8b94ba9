"""Tests of reference vectors and of the reports of `mar conform`."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.conform import judge as judging
from megatron_async_rl.conform.judge import judge, show
from megatron_async_rl.conform.methods import KINDS, CaseValues, read_cases, run_case
from tests.cases import looped
from tests.stored_pages import RecordedConsole, require_page

GOLDEN = sorted((Path(__file__).parents[1] / "data/golden").glob("*.json"))
SMALL = {
    "case": "one",
    "dtype": "float64",
    "kind": "policy_loss",
    "name": "ppo_clip",
    "params": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token-mean"},
    "inputs": {
        "logp": [[-1.0, -2.0], [-3.0, 0.0]],
        "logp_prox": [[-1.1, -2.5], [-3.0, 0.0]],
        "advantages": [[1.0, 1.0], [-2.0, 0.0]],
        "mask": [[1.0, 1.0], [1.0, 0.0]],
    },
    # exp(0.1), 1.2 (clipped), and 1 at A = -2; over three tokens.
    "expect": {
        "loss": (-np.exp(0.1) - 1.2 + 2.0) / 3,
        "grad_logp": [[-np.exp(0.1) / 3, 0.0], [2 / 3, 0.0]],
    },
}


@functools.cache
def cases():
    return [
        pytest.param(case, id=f"{file.stem}-{case.case}")
        for file in GOLDEN
        for case in read_cases(file)
    ]


def changed(path, value):
    """Return a copy of SMALL with `value` at `path` (dotted keys), or without that entry for
    `...`."""
    case = copy.deepcopy(SMALL)
    *parents, last = path.split(".")
    parent = case
    for key in parents:
        parent = parent[key]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return case


def conform(tmp_path, content):
    """Run `mar conform` on a file with `content`; return (exit code, output)."""
    file = tmp_path / "cases.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    done = CliRunner().invoke(app, ["conform", str(file)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_reference_vectors_cover_every_kind_and_both_files():
    found = {(case.kind, case.name) for (case,) in (one.values for one in cases())}
    assert {kind for kind, _ in found} == KINDS.keys()
    for name in ("gspo", "gmpo", "dppo_kl", "m2po", "trajectory_balance", "oapl", "topr"):
        assert ("policy_loss", name) in found


@looped("case", cases)
def test_a_reference_vector_passes(case):
    """float32 references must also be met as if they were float64."""
    outcome = judge(replace(case, dtype="float64"))
    assert outcome.passed, outcome.reason
    if "baselines" in case.expect:
        exact = run_case(case, torch.float64)
        assert exact is not None
        np.testing.assert_allclose(
            exact.values["baselines"], case.expect["baselines"], atol=1e-9, rtol=1e-7
        )


@looped("case", cases)
def test_a_method_in_float32_is_near_its_float64_run(case):
    """The reference is not needed here, because the float64 run equals it."""
    exact, single = run_case(case, torch.float64), run_case(case, torch.float32)
    if single is None:  # training runs the method in float64 only
        return
    for key in case.expect:
        np.testing.assert_allclose(
            single.values[key], exact.values[key], atol=1e-5, rtol=1e-4, err_msg=key
        )


@looped("case", cases)
def test_a_reference_vector_with_a_changed_number_fails(case):
    for key, values in case.expect.items():
        wrong = {**case.expect, key: values.copy()}
        first = np.unravel_index(int(np.argmax(np.abs(values))), values.shape)
        wrong[key][first] += 1e-3 * max(1.0, abs(values[first]))
        assert not judge(type(case)(**{**vars(case), "expect": wrong})).passed


def test_the_exit_code_is_0_if_all_cases_pass(tmp_path):
    code, output = conform(tmp_path, [SMALL])
    assert code == 0
    assert "pass" in output
    assert "largest error" in output
    assert "1 of 1 cases passed" in output


def test_the_exit_code_is_1_if_a_case_fails_and_its_largest_error_is_shown(tmp_path):
    code, output = conform(tmp_path, [SMALL, {**changed("expect.loss", 0.5), "case": "two"}])
    assert code == 1
    assert "loss is -0.10172" in output
    assert "expected 0.5" in output
    assert "1 of 2 cases failed" in output


@looped(
    ("path", "value", "reason"),
    [
        ("kind", "loss", "unknown kind 'loss'"),
        ("name", "ppo_clop", "nearest: ppo_clip"),
        ("params.clip_middle", 0.2, "params.clip_middle"),
        ("params.clip_low", -1.0, "params.clip_low"),
        ("params.clip_low", {"a": [1]}, "params.clip_low"),
        ("params.aggregation", "mean", "aggregation mean"),
        (
            "params",
            {"aggregation": "seq-mean-token-sum-norm", "norm_length": "ten"},
            "TypeError: unsupported",
        ),
        ("inputs.mask", ..., "inputs.mask is missing"),
        ("inputs.logp_old", [[0.0, 0.0], [0.0, 0.0]], "inputs.logp_old is not a column of a batch"),
        ("inputs.advantages", [1.0, 2.0], "inputs.advantages: expected one number per token"),
        ("expect.entropy", 1.0, "expect.entropy"),
        ("expect.loss", [[1.0, 1.0], [1.0, 1.0]], "has shape [2, 2]"),
    ],
)
def test_a_case_that_cannot_run_fails_with_its_reason_and_the_next_case_runs(
    tmp_path, path, value, reason
):
    code, output = conform(tmp_path, [changed(path, value), {**SMALL, "case": "next"}])
    assert code == 1
    assert reason in output
    assert "1 of 2 cases failed" in output


REFUSED = (
    *("", "{", "{}", "[]", [3], [SMALL, 3], [SMALL, SMALL]),
    *([changed("expect", ...)], [changed("case", ...)], [changed("params", [])]),
    *([changed("case", 3)], [changed("inputs", [])], [changed("expect", {})]),
    [changed("inputs.logp", [[1.0, 2.0], [3.0]])],
    [changed("inputs.logp", [[1.0, 2.0], 3.0])],
    [changed("inputs.logp", [[1.0], [2.0]])],
    [changed("inputs.rewards", [1.0])],
    [changed("inputs.logp", [["a", 2.0], [3.0, 4.0]])],
    [changed("inputs.logp", [[[1.0], 2.0], [3.0, 4.0]])],
    [changed("inputs.logp", None)],
    [changed("inputs.logp", [[float("nan"), 2.0], [3.0, 4.0]])],
    [changed("inputs.logp", [[10**400, 2.0], [3.0, 4.0]])],
    *([changed("inputs.mask", [[0.5, 1.0], [1.0, 0.0]])], [changed("inputs.mask", 1.0)]),
    *([changed("dtype", "half")], [changed("dtype", ["float32"])]),
)


def test_every_refusal_is_the_one_on_its_page(tmp_path):
    text = ""
    for content in REFUSED:
        file = tmp_path / "cases.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UserError) as caught:
            read_cases(file)
        text += f"{caught.value}\n"
    require_page("conform/refusals", text.replace(str(tmp_path), "DIR"))


def test_a_file_that_is_refused_ends_the_command(tmp_path):
    for content, what in (("{}", "a JSON list of at least one case"), ("[" * 10**5, "not JSON")):
        code, output = conform(tmp_path, content)
        assert code == 2
        assert "cases.json" in output
        assert what in output


def test_an_unreadable_file_is_refused_before_any_case_runs(tmp_path):
    good = tmp_path / "good.json"
    good.write_text(json.dumps([SMALL]))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for bad, what in (
        ("missing.json", "No such file"),
        (".", "directory"),
        ("binary.json", "is not JSON"),
    ):
        done = CliRunner().invoke(app, ["conform", str(good), str(tmp_path / bad)])
        assert done.exit_code == 2
        assert what in done.output
        assert "pass" not in done.output


def test_values_at_padding_have_no_effect():
    case = changed("inputs.logp_prox", [[-1.1, -2.5], [-3.0, -40.0]])
    case["inputs"]["advantages"][1][1] = 9.0
    outcome = judge_one(case)
    assert outcome.passed, outcome.reason


def judge_one(entry):
    """Return the result of a case in the format of a file."""
    from megatron_async_rl.conform.methods import Case

    arrays = {
        part: {key: np.array(value, dtype=float) for key, value in entry[part].items()}
        for part in ("inputs", "expect")
    }
    about = {key: entry[key] for key in ("case", "kind", "name", "params", "dtype")}
    return judge(Case(**about, **arrays))


def test_a_float32_reference_has_a_wider_tolerance_than_a_float64_one():
    exact = float(SMALL["expect"]["loss"])
    for value, passes in ((exact + 5e-7, True), (exact + 3e-6, False)):
        assert judge_one(changed("expect.loss", value)).passed is passes
    single = changed("dtype", "float32")
    for offset, passes in ((5e-6, True), (5e-5, False)):
        single["expect"]["loss"] = float(np.float32(exact + offset))
        assert judge_one(single).passed is passes


def test_the_tolerance_depends_on_the_dtype_of_the_case_not_on_its_numbers(tmp_path):
    """An error of 3e-6 passes with float32's tolerance and fails with float64's, although the
    expected number is exact in float32."""
    number = float(np.float32(SMALL["expect"]["loss"] + 3e-6))
    wrong = changed("expect.loss", number)
    wrong["expect"] = {"loss": number}
    for dtype, code in (("float64", 1), ("float32", 0), (None, 0)):
        case = (
            {**wrong, "dtype": dtype} if dtype else {k: v for k, v in wrong.items() if k != "dtype"}
        )
        assert conform(tmp_path, [case])[0] == code


def test_a_case_may_have_log_ratios_of_50_and_sequences_without_tokens():
    case = copy.deepcopy(SMALL)
    case["inputs"] = {
        "logp": [[-1.0, -51.0], [0.0, 0.0]],
        "logp_prox": [[-51.0, -1.0], [0.0, 0.0]],
        "advantages": [[-1.0, -1.0], [1.0, 1.0]],
        "mask": [[1.0, 1.0], [0.0, 0.0]],
    }
    # The first ratio is capped at exp(20), so its gradient is 0; the second is clipped at 0.8.
    case["expect"] = {"loss": (np.exp(20.0) + 0.8) / 2, "grad_logp": [[0.0, 0.0], [0.0, 0.0]]}
    outcome = judge_one(case)
    assert outcome.passed, outcome.reason


def test_a_reference_ratio_that_needs_a_run_is_refused(tmp_path):
    case = {
        "case": "one",
        "kind": "scalar",
        "name": "ess_log_weights",
        "dtype": "float64",
        "inputs": {"log_weights": [0.0, 0.1]},
        "expect": {"ess": 1.995},
        "params": {"shape": "small", "reference_ratio": "auto"},
    }
    code, output = conform(tmp_path, [case])
    assert code == 1
    assert "auto needs a run; set a number" in output


def test_a_loss_per_sequence_takes_only_its_own_aggregation():
    case = changed("name", "kimi")
    case["inputs"] |= {"rewards": [0.0, 0.0], "group": [0.0, 0.0]}
    case["inputs"]["logp_prox"] = case["inputs"]["logp"]
    case["expect"] = {"loss": 0.0}
    for aggregation, reason in (
        ("seq-mean", ""),
        ("token-mean", "params.aggregation is token-mean, but kimi has one loss per sequence"),
    ):
        outcome = judge_one({**case, "params": {"aggregation": aggregation}})
        assert outcome.reason.partition(":")[0] == reason


def test_log_weights_of_a_case_are_required():
    case = {**changed("kind", "scalar"), "name": "ess_log_weights", "params": {}}
    assert judge_one(case).reason == "inputs.log_weights is missing"


def test_a_reference_of_scalars_may_be_float32():
    case = {
        "case": "one",
        "kind": "scalar",
        "name": "ess_log_weights",
        "dtype": "float32",
        "inputs": {"log_weights": [0.0, 0.0]},
        "expect": {"ess": 2.0},
        "params": {"reference_ratio": 1.0},
    }
    for expected, passes in ((2.0, True), (2.1, False)):
        outcome = judge_one({**case, "expect": {"ess": expected}})
        assert (outcome.passed, bool(outcome.reason)) == (passes, not passes), outcome.reason


ADVANTAGE = {
    "case": "returns",
    "dtype": "float64",
    "kind": "advantage",
    "name": "grpo",
    "params": {},
    "inputs": {
        "mask": [[1.0, 1.0], [1.0, 0.0]],
        "rewards": [3.0, 1.0],
        "group": [0.0, 0.0],
    },
    "expect": {"advantages": [[1.0, 1.0], [-1.0, 0.0]]},
}
JUDGED = (
    {**changed("expect.loss", float(SMALL["expect"]["loss"]) + 2e-7), "case": "close"},
    {**changed("expect.loss", 0.5), "case": "far"},
    {**changed("expect.grad_logp", [[-0.3, 0.2], [2 / 3 + 2e-7, 0.0]]), "case": "two of four"},
    {**changed("expect.loss", 1e400), "case": "infinite"},
    {**changed("expect", {"loss": 0.1, "keep": [[0, 1], [1, 0]]}), "case": "first key"},
    {**changed("params.aggregation", "seq-mean"), "case": "of a sequence"},
    {**changed("name", "gspo"), "params": {"aggregation": "token-mean"}, "case": "of tokens"},
    {**changed("name", "gspo"), "params": {"clip_low": -1}, "case": "bad setting"},
    {**changed("name", "gspu"), "case": "unknown loss"},
    {**changed("kind", "policy"), "case": "unknown kind"},
    {**changed("inputs.mask", ...), "case": "no mask"},
    {**changed("inputs.logq", [[0.0, 0.0], [0.0, 0.0]]), "case": "unknown column"},
    {**changed("inputs.rewards", [[0.0, 0.0], [0.0, 0.0]]), "case": "wrong column"},
    {**changed("expect.entropy", 1.0), "case": "unknown number"},
    {**changed("expect.loss", [1.0, 2.0]), "case": "wrong shape"},
    {**ADVANTAGE, "params": {"normalize_std": False}},
    {**ADVANTAGE, "expect": {"advantages": [[2.0, 1.0], [-1.0, 0.0]]}, "case": "one of four"},
    {**ADVANTAGE, "expect": {"returns": [[1.0, 1.0], [1.0, 0.0]]}, "case": "no returns"},
)


def test_whole_results_are_those_on_the_page(tmp_path):
    console = RecordedConsole()
    files = {}
    for number, entries in enumerate((JUDGED, JUDGED[:1])):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(entries))
        files[file] = read_cases(file)
    codes = [show(files, console), show({file: files[file]}, console)]
    text = "\n".join(line.rstrip() for line in console.text.splitlines())
    require_page("conform/results", f"{text}\nexit codes: {codes}\n".replace(str(tmp_path), "DIR"))


def test_of_two_runs_of_a_float32_case_the_nearer_counts_if_it_passes(monkeypatch):
    computed = {torch.float64: 1.0, torch.float32: 1.5}
    monkeypatch.setattr(
        judging,
        "run_case",
        lambda case, dtype: CaseValues({"loss": np.array(computed[dtype])}),
    )
    single = {**changed("dtype", "float32"), "expect": {"loss": 1.0}}
    for expected, error, reason in (
        (1.0, 0.0, ""),
        (1.5, 0.0, ""),
        (1.2, 0.3, "loss is 1.5, expected 1.2"),
        (1.3, 0.3, "loss is 1, expected 1.3"),
    ):
        single["expect"]["loss"] = expected
        outcome = judge_one(single)
        assert outcome.error == pytest.approx(error)
        assert outcome.reason == reason
        # A float64 reference is compared with the float64 run alone.
        double = judge_one({**single, "dtype": "float64"})
        assert double.passed == (expected == 1.0)
