"""`mar verify RUN`: a healthy run passes, and each fault fails exactly its rows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.data.prompt_texts import questions
from megatron_async_rl.launch.run_lock import lock_run_dir
from megatron_async_rl.metrics.load_log import LoadLog
from megatron_async_rl.policy.digested_folder import DIGESTS, StoredFile, described, files_of
from megatron_async_rl.report.scorecard_section import scorecard_section
from megatron_async_rl.samples.types import Sample
from megatron_async_rl.verify.duplicate_responses import poisson_tail
from megatron_async_rl.verify.group_checks import DroppedGroups
from megatron_async_rl.verify.reward_hacks import is_part_of
from megatron_async_rl.verify.sample_block import EndedSample, SampleFacts
from megatron_async_rl.verify.scorecard import RowVerdict, Scorecard, absent, row
from megatron_async_rl.verify.verified_run import read_records, verify_run
from tests.healthy_run import (
    BLOCKS,
    DIGITS,
    PROBABILITIES,
    STEPS,
    TENSORS,
    Alterations,
    copied_to,
    scheduled,
    write_healthy_run,
)
from tests.json_lines import read_objects, write_lines
from tests.mar_command import mar
from tests.stored_pages import RecordedConsole, require_page


def verified(run_dir: Path) -> Scorecard:
    return verify_run(run_dir, Console(file=open("/dev/null", "w")))


def failing(run_dir: Path) -> set[str]:
    return {one.name for one in verified(run_dir).failed}


def verdict_of(card: Scorecard, name: str) -> RowVerdict:
    return next(one.verdict for one in card.rows if one.name == name)


def altered(**changes: Any) -> Alterations:
    return Alterations(**{"metrics": scheduled, **changes})


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_healthy_run(tmp_path_factory.mktemp("healthy"), altered())


@pytest.fixture(scope="module")
def sound(healthy: Path) -> Scorecard:
    """Scorecard of the healthy run."""
    return verified(healthy)


def require_changes(page: str, card: Scorecard, sound: Scorecard) -> None:
    """Fail unless the rows that differ from those of the healthy run are those of the page."""
    same = {one.name: one for one in sound.rows}
    lines: list[str] = []
    for one in card.rows:
        if one == same[one.name]:
            continue
        lines += [f"{one.name}: {one.verdict}", f"  value: {one.value}"]
        if one.bound != same[one.name].bound:
            lines.append(f"  bound: {one.bound}")
        few = one.details if len(one.details) < 4 else (*one.details[:2], "...", one.details[-1])
        lines += [f"  - {text}" for text in few]
    lines += [f"note: {note}" for note in card.notes]
    text = "".join(f"{line}\n" for line in lines)
    require_page(f"verify/{page.replace(' ', '_')}", text.replace(card.subject, "RUN"))


@pytest.fixture
def copied(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy run, whose files a test may change."""
    shutil.copytree(healthy, tmp_path / "run")
    return tmp_path / "run"


def test_every_row_of_a_healthy_run_passes(healthy: Path, sound: Scorecard) -> None:
    assert [(one.name, one.value) for one in sound.rows if one.verdict != RowVerdict.PASSED] == []
    text = (healthy / "verify.json").read_text()
    assert json.loads(text) == sound.as_json()
    require_page("verify/healthy", text.replace(str(healthy), "RUN"))


# Faults


def _colder(sample: Sample, step: int) -> Sample:
    """Return the sample as drawn at temperature 0.7, with the engine's log-probs."""
    cold = PROBABILITIES ** (1 / 0.7)
    cold = cold / cold.sum()
    draw = np.random.default_rng([step, int(sample.id.replace("-", ""))])
    digits = draw.choice(len(cold), sample.length - 1, p=cold)
    logprobs = np.append(np.log(cold[digits]), 0.0).astype(np.float32)
    ids = np.array([DIGITS[digit] for digit in digits] + [0], dtype=np.int32)
    text = "".join(str(digit) for digit in digits)
    return replace(sample, response_ids=ids, behavior_logprobs=logprobs, text=text)


def _after_end(sample: Sample, step: int) -> Sample:
    """Return the sample with a trained token after its end of sequence."""
    if step != 4:
        return sample

    def more(values: np.ndarray, value: float) -> np.ndarray:
        return np.append(values, value).astype(values.dtype)

    return replace(
        sample,
        response_ids=more(sample.response_ids, DIGITS[3]),
        behavior_logprobs=more(sample.behavior_logprobs, 0.0),
        versions=more(sample.versions, sample.versions[0]),
        loss_mask=more(sample.loss_mask, 1),
        text=sample.text + "3",
    )


def _shifted(sample: Sample, step: int) -> Sample:
    return replace(sample, behavior_logprobs=np.roll(sample.behavior_logprobs, 1))


def _hacked(sample: Sample, step: int) -> Sample:
    """Return a response that copies the question, from the middle of the run on."""
    if step <= STEPS // 2:
        return sample
    ids = [*sample.prompt.token_ids, 0]
    return copied_to(sample, ids, sample.prompt.text, reward=1.0)


def _seed_shared(samples: list[Sample], step: int) -> list[Sample]:
    """Return a group in which engine 1 draws what engine 0 drew."""
    return _duplicated(samples, pairs=((1, 0), (3, 2))) if step == 6 else samples


def _repeated(samples: list[Sample], step: int) -> list[Sample]:
    """Return a group in which each engine answers twice in the same way."""
    return _duplicated(samples, pairs=((2, 0), (3, 1))) if step == 6 else samples


def _duplicated(samples: list[Sample], pairs: tuple[tuple[int, int], ...]) -> list[Sample]:
    found = list(samples)
    for to, of in pairs:
        one = samples[of]
        found[to] = replace(
            samples[to],
            response_ids=one.response_ids,
            behavior_logprobs=one.behavior_logprobs,
            text=one.text,
            reward=one.reward,
        )
    return found


def _line(step: int, **values: Any) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """Return a change of the metrics of one step: numbers are added."""

    def change(line: dict[str, Any], at: int) -> dict[str, Any]:
        line = scheduled(line, at)
        if at == step:
            line |= {name: line[name] + value for name, value in _keys(values).items()}
        return line

    return change


def _keys(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "/"): value for name, value in values.items()}


def _one(change: Callable[[Sample], Sample]) -> Callable[[Sample, int], Sample]:
    """Return a change of a single sample, of step 5."""
    return lambda sample, step: change(sample) if sample.id == "17-2" else sample


def _token(name: str, at: int, value: float) -> Callable[[Sample], Sample]:
    def change(sample: Sample) -> Sample:
        values = getattr(sample, name).copy()
        values[at] = value
        return replace(sample, **{name: values})

    return change


def _nonfinite(line: dict[str, Any], step: int) -> dict[str, Any]:
    return scheduled(line, step) | {"policy/nonfinite": float(min(max(step - 4, 0), 3))}


FAULTS: dict[str, tuple[Alterations, set[str]]] = {
    "a swapped shard in one engine": (
        altered(load=lambda own, version, engine: "f" * 16 if (version, engine) == (5, 1) else own),
        {"weights in engines"},
    ),
    "a stale prefix cache": (
        altered(differences=lambda mean, step, _: mean * (9 if step > 9 else 1)),
        {"log-probs by version", "log-probs over versions"},
    ),
    "stale key-values of long contexts": (
        altered(depth=lambda total, bucket: total * (8 if bucket == 4 else 1)),
        {"log-probs by depth"},
    ),
    "two samples with large rounding": (
        altered(
            differences=lambda mean, _, sample: mean * (8 if sample.id in ("0-1", "9-1") else 1)
        ),
        set(),
    ),
    "temperature on one side": (
        altered(sample=_colder, differences=lambda *_: 0.2),
        {"sampling distribution", "log-probs at lag 0"},
    ),
    "a seed that two engines share": (altered(group=_seed_shared), {"seeds of engines"}),
    "duplicate responses of an engine": (altered(group=_repeated), {"duplicate responses"}),
    "trained tokens after EOS": (altered(sample=_after_end), {"tokens after EOS"}),
    "shifted log-probs": (
        altered(sample=_shifted, differences=lambda *_: 0.7),
        {"log-probs at lag 0"},
    ),
    "a token without a log-prob": (
        altered(
            sample=_one(_token("behavior_logprobs", 3, float("nan"))),
        ),
        {"behaviour log-probs"},
    ),
    "a mask on a sampled token": (
        altered(
            sample=_one(_token("loss_mask", 3, 0)),
        ),
        {"tokens not sampled"},
    ),
    "text of other rows": (
        altered(sample=lambda sample, step: replace(sample, text=sample.text[::-1] + "7")),
        {"text and tokens"},
    ),
    "a sample that is too old": (
        altered(sample=_one(lambda sample: replace(sample, versions=sample.versions - 1))),
        {"in-flight updates"},
    ),
    "a hacked reward": (
        altered(sample=_hacked, entropy=lambda one: 0.0 if one.text == one.prompt.text else None),
        {"rewarded responses", "reward jumps"},
    ),
    "one text for every question": (
        altered(
            sample=lambda sample, _: copied_to(sample, [5, 6, 7, 0], "345", reward=1.0),
            entropy=lambda _: 0.0,
        ),
        {"rewarded responses"},
    ),
    "a lost sample of a group": (
        altered(group=lambda samples, step: samples[:3] if step == 3 else samples),
        {"groups"},
    ),
    "failed rewards": (
        altered(
            sample=lambda sample, step: (
                replace(sample, reward_error="no number") if sample.id.endswith("-3") else sample
            )
        ),
        {"groups"},
    ),
    "a row that is used twice": (
        altered(prompt=lambda group: 3 if group == 20 else group),
        {"rows per epoch"},
    ),
    "a parameter without gradient": (
        altered(tensors=lambda own, step: own | {TENSORS[2]: "the same"}),
        {"parameters that move"},
    ),
    "steps that are not finite": (altered(metrics=_nonfinite), {"finite gradients"}),
    "miscounted tokens": (altered(metrics=_line(3, tokens__trained=1)), {"denominators"}),
    "a wrong mean reward": (altered(metrics=_line(3, reward__mean=0.1)), {"denominators"}),
    "tokens that no engine reported": (
        altered(metrics=_line(3, tokens__generated=-60)),
        {"generated tokens"},
    ),
    "reported tokens that vanished": (
        altered(metrics=_line(3, tokens__generated=60)),
        {"generated tokens"},
    ),
    "another learning rate": (altered(metrics=_line(7, policy__lr=1e-5)), {"learning rate"}),
    "weights that a skipped step changed": (
        altered(metrics=_line(7, policy__skipped=1.0)),
        {"chain of weights"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_exactly_its_rows(fault: str, sound: Scorecard, tmp_path: Path) -> None:
    alterations, rows = FAULTS[fault]
    card = verified(write_healthy_run(tmp_path, alterations))
    assert {one.name for one in card.failed} == rows
    require_changes(f"faults/{fault}", card, sound)


def test_a_fault_of_one_engine_shows_by_engine(sound: Scorecard, tmp_path: Path) -> None:
    def worse(mean: float, step: int, sample: Sample) -> float:
        return mean * (7 if sample.engine == 2 else 1)

    def three_engines(sample: Sample, step: int) -> Sample:
        return replace(sample, engine=int(sample.id.rpartition("-")[2]) % 3)

    run = write_healthy_run(tmp_path, altered(sample=three_engines, differences=worse))
    card = verified(run)
    assert {one.name for one in card.failed} == {"log-probs by engine"}
    require_changes("faults/one_engine", card, sound)


@pytest.mark.parametrize(
    ("dropped", "length", "reason", "fails"),
    [
        (40, 30, "late", True),
        (40, 12, "late", False),
        (40, 30, "equal", False),
        (4, 30, "late", False),
    ],
)
def test_dropping_long_responses_fails(
    healthy: Path, dropped: int, length: int, reason: str, fails: bool
) -> None:
    check = DroppedGroups(read_records(healthy))
    numbers: dict[str, Any] = {
        "id": "0-0",
        "group": 0,
        "engine": 0,
        "finished_at": 0.0,
        "reward": 1.0,
        "valid": True,
        "trained": 1,
        "log_prob": -1.0,
        "squares": 1.0,
        "start": 0,
        "last": 0,
        "digest": 0,
        "prompt_id": "p",
    }
    for _ in range(200):
        check.ended(EndedSample(SampleFacts(tokens=10, **numbers), "trained", 1, None, 0))
    for _ in range(dropped):
        facts = SampleFacts(tokens=length, **numbers)
        check.ended(EndedSample(facts, "dropped", 1, reason, None))
    assert [one.failed for one in check.result()] == [fails]


def test_a_flipped_bit_of_a_checkpoint_is_found(copied: Path, sound: Scorecard) -> None:
    file = copied / "checkpoint" / f"step_{STEPS:08d}" / BLOCKS
    content = bytearray(file.read_bytes())
    content[150] ^= 1
    file.write_bytes(content)
    card = verified(copied)
    assert {one.name for one in card.failed} == {"weights on disk"}
    assert TENSORS[0] in card.failed[0].details[0]
    require_changes("faults/a_flipped_bit_of_a_checkpoint", card, sound)


def test_a_changed_data_set_is_found(sound: Scorecard, tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path, altered())
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text().replace('"10+1="', '"10+2="'))
    card = verified(run)
    assert {one.name for one in card.failed} == {"data unchanged"}
    require_changes("faults/a_changed_data_set", card, sound)


def test_an_edited_line_of_metrics_breaks_the_chain(copied: Path, sound: Scorecard) -> None:
    file = copied / "metrics.jsonl"
    rows = read_objects(file)
    write_lines(file, [*rows[:-1], rows[-1] | {"policy/grad_norm": 2.0}])
    card = verified(copied)
    assert {one.name for one in card.failed} == {"chain of weights"}
    require_changes("faults/an_edited_line_of_metrics", card, sound)


def test_a_resume_from_other_weights_breaks_the_chain(copied: Path, sound: Scorecard) -> None:
    file = copied / "starts.jsonl"
    (first,) = read_objects(file)
    again = first | {"step": 8, "weights": "e" * 16}
    write_lines(file, [first, again])
    card = verified(copied)
    assert {one.name for one in card.failed} == {"chain of weights"}
    require_changes("faults/a_resume_from_other_weights", card, sound)


def test_the_question_of_a_prompt_is_free_of_markup() -> None:
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n9 - 7 =<|im_end|>\n"
    assert questions(chat + "<|im_start|>assistant\n") == ["9 - 7 =", "Be brief."]
    assert questions("1+") == []
    assert is_part_of(chat, " 9 - 7 ")
    assert not is_part_of(chat, "9 -")


@pytest.mark.parametrize(
    ("prompt", "gold", "text", "suspicious"),
    [
        ("Compute 9 - 7 =", "2", "9 - 7 =", True),
        ("Compute 9 - 7 =", "2", "Compute 9 - 7 = 2", False),
        ("Compute 9 - 7 =", "2", "The result is two.", False),
        ("Which of A, B?", "B", "Which of A, B?", True),
        ("Which of A, B?", "B", "B", False),
    ],
)
def test_a_rewarded_copy_of_the_question_is_suspicious(
    tmp_path: Path, prompt: str, gold: str, text: str, suspicious: bool
) -> None:
    def change(sample: Sample, step: int) -> Sample:
        question = replace(sample.prompt, text=prompt, fields={"answer": gold})
        return copied_to(replace(sample, prompt=question), [5, 6, 0], text, reward=1.0)

    run = write_healthy_run(tmp_path, altered(sample=change, entropy=lambda _: 0.0))
    assert ("rewarded responses" in failing(run)) is suspicious


# Bad input


def test_a_damaged_log_is_named_and_the_rest_is_checked(copied: Path, sound: Scorecard) -> None:
    file = copied / "samples" / "samples-000001.segment"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    card = verified(copied)
    assert {one.name for one in card.failed} == {"sample log"}
    assert file.name in card.failed[0].details[0]
    require_changes("records/a_damaged_log", card, sound)


def remove_segment(run_dir: Path, number: int) -> None:
    for file in (run_dir / "samples").glob(f"*-{number:06d}.*"):
        file.unlink()


def test_oldest_segments_may_be_deleted_and_the_others_are_checked(
    copied: Path, sound: Scorecard
) -> None:
    remove_segment(copied, 0)
    card = verified(copied)
    assert card.failed == ()
    require_changes("records/a_deleted_oldest_segment", card, sound)


def test_a_segment_that_was_deleted_between_others_is_a_gap(copied: Path, sound: Scorecard) -> None:
    remove_segment(copied, 1)
    card = verified(copied)
    assert {one.name for one in card.failed} == {"sample log"}
    require_changes("records/a_deleted_segment_between_others", card, sound)


def test_a_gap_is_named_beside_a_damaged_segment(copied: Path) -> None:
    (file,) = (copied / "samples").glob("outcomes-000001*")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    (details,) = (one.details for one in verified(copied).failed if one.name == "sample log")
    assert any(text.startswith(file.name) for text in details)
    assert any(re.fullmatch(r"outcomes \d+ to \d+ are missing", text) for text in details)


def test_a_newest_segment_that_was_deleted_is_missed(copied: Path, sound: Scorecard) -> None:
    remove_segment(copied, 2)
    card = verified(copied)
    assert {one.name for one in card.failed} == {"sample log"}
    require_changes("records/a_deleted_newest_segment", card, sound)


def test_a_run_that_is_running_is_noted(copied: Path, sound: Scorecard) -> None:
    with lock_run_dir(copied):
        require_changes("records/a_running_run", verified(copied), sound)


def test_a_deleted_log_fails_and_absent_rows_have_a_reason(copied: Path, sound: Scorecard) -> None:
    shutil.rmtree(copied / "samples")
    card = verified(copied)
    assert {one.name for one in card.failed} == {"sample log"}
    require_changes("records/a_deleted_log", card, sound)


def test_a_run_of_an_earlier_version_has_absent_rows(copied: Path, sound: Scorecard) -> None:
    for name in ("loads.jsonl", "lag0.jsonl", "starts.jsonl", "weights.jsonl"):
        (copied / name).unlink()
    metrics = copied / "metrics.jsonl"
    lines = read_objects(metrics)
    dropped = ("weights", "policy/nonfinite", "policy/lr", "policy/entropy")
    write_lines(
        metrics,
        [{key: value for key, value in line.items() if key not in dropped} for line in lines],
    )
    shutil.rmtree(copied / "checkpoint")
    card = verified(copied)
    assert card.failed == ()
    require_changes("records/an_earlier_version", card, sound)


def test_damaged_records_fail_their_rows_and_are_named(copied: Path, sound: Scorecard) -> None:
    for name in ("loads.jsonl", "lag0.jsonl", "weights.jsonl"):
        with open(copied / name, "a") as file:
            file.write("{}\n")
    (copied / "without_gradient.json").write_text("{}")
    require_changes("records/damaged_records", verified(copied), sound)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_directory_that_is_not_a_run_is_refused(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(UserError):
        verified(copied)


# Report, command and scorecard


def test_the_report_shows_the_scorecard_with_failed_rows_first(copied: Path) -> None:
    assert scorecard_section(copied / "samples") == ""
    loads = copied / "loads.jsonl"
    rows = read_objects(loads)
    write_lines(loads, [rows[0] | {"digest": "<f00000000000005"}, *rows[1:]])
    verified(copied)
    section = scorecard_section(copied)
    assert " 1 failed, " in section
    # Text of a run never becomes HTML.
    assert "digest &lt;f00000000000005" in section
    rows = section.split("<tr>")[2:]
    assert "weights in engines" in rows[0]
    assert "FAILED" in rows[0]
    assert "FAILED" not in "".join(rows[1:])
    (copied / "verify.json").write_text("{}")
    assert "is not a scorecard" in scorecard_section(copied)


def test_the_command_prints_the_scorecard_and_its_json(copied: Path) -> None:
    shown = mar("verify", copied, folder=copied)
    assert shown.returncode == 0, shown.stderr
    assert "30 checks: 30 passed, 0 failed, 0 absent" in shown.stdout
    loads = copied / "loads.jsonl"
    rows = read_objects(loads)
    write_lines(loads, [rows[0] | {"digest": "f" * 16}, *rows[1:]])
    failed = mar("verify", copied, "--json", "-", folder=copied)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["verdict"] == "failed"
    assert mar("verify", copied / "samples", folder=copied).returncode == 2


def test_an_absent_row_neither_passes_nor_fails() -> None:
    card = Scorecard(subject="run", rows=(absent("a", "no data", "0", "fix"),))
    assert card.exit_code == 0
    assert card.count(RowVerdict.PASSED) == 0
    failed = Scorecard(subject="run", rows=(*card.rows, row("b", "1", "0", False, "fix", ["x"])))
    assert failed.exit_code == 1
    assert failed.as_json()["rows"][1]["details"] == ["x"]


def test_a_scorecard_on_a_terminal_is_the_one_on_its_page() -> None:
    places = [f"place {number}" for number in range(25)]
    rows = (
        row("first", "1", "at most 2", True, "nothing to do"),
        row("second", "[3]", "at most 2 " * 20, False, "do this", places),
        absent("third", "no data", "", "record it"),
        row("fourth", "4", "3", False, "do that", places[:5]),
    )
    text = ""
    for card in (
        Scorecard(subject="a run", rows=rows, notes=("the run is running", "[more]")),
        Scorecard(subject="a run", rows=rows[:1]),
        Scorecard(subject="a run", rows=()),
    ):
        console = RecordedConsole()
        card.show(console)
        text += f"{console.text}exit code {card.exit_code}\n{card.text()}"
    require_page("verify/scorecards", text)


def test_records_that_are_gone_leave_the_others_of_use(copied: Path, sound: Scorecard) -> None:
    # A start whose settings are gone, loads of a version without a digest, and no tokenizer.
    file = copied / "starts.jsonl"
    (first,) = read_objects(file)
    again = first | {"step": 8, "weights": f"{8:016x}", "config": "gone"}
    write_lines(file, [first, again])
    loads = LoadLog(copied)
    for version in (STEPS + 1, STEPS, STEPS + 2):
        loads.record(version, 7, f"{version:016x}", 5)
    config = copied / "config.yaml"
    text = config.read_text()
    model = load(config).model.path
    assert text.count(str(model)) == 1
    config.write_text(text.replace(str(model), str(copied / "no_model")))
    require_changes("records/gone", verified(copied), sound)


def test_checkpoints_behind_a_damaged_one_are_checked(copied: Path, sound: Scorecard) -> None:
    newest = copied / "checkpoint" / f"step_{STEPS:08d}"
    for step, record in ((2, '{"metrics": null}'), (3, "{}"), (4, "no JSON")):
        folder = newest.with_name(f"step_{step:08d}")
        shutil.copytree(newest, folder)
        content = record.encode()
        (folder / "record.json").write_bytes(content)
        files = files_of(json.loads((folder / "about.json").read_text()))
        assert files is not None
        files["record.json"] = StoredFile.of(content)
        (folder / "about.json").write_text(described({"step": step}, files))
    export = copied / "hf"
    export.mkdir()
    require_changes("records/other_checkpoints", verified(copied), sound)
    (newest / "record.json").unlink()
    (export / DIGESTS).write_text("{}")
    require_changes("records/damaged_checkpoints", verified(copied), sound)


def test_the_tail_of_a_poisson_variable_is_exact() -> None:
    assert poisson_tail(0, 2.0) == 1.0
    # The rest of the probabilities of 0, 1 and 2.
    assert poisson_tail(3, 1.0) == pytest.approx(0.0803014, rel=1e-5)
    assert poisson_tail(3, 0.01) == pytest.approx(1.654e-7, rel=1e-3)
