"""Whole answers about the samples of a log in which every state occurs: on a terminal, as JSON, in
the report and in the dashboard's form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.report import sample_browser, samples
from megatron_async_rl.report.sample_browser import SampleBrowser, form
from megatron_async_rl.report.samples import (
    SampleQuery,
    choose,
    newest_trained,
    print_samples,
    samples_section,
    visible,
)
from megatron_async_rl.samples.types import Sample
from tests.logged_samples import logged_run, row, sample
from tests.stored_pages import RecordedConsole, listed, require_page


def changed(one: Sample) -> Sample:
    """Give the samples of each group different settings."""
    group = int(one.id.partition("-")[0])
    if one.id.endswith("-1"):
        one = replace(one, reward_parts={"right": 0.5, "short": -1.25})
    if one.id == "2-2":
        one = replace(one, reward=float("nan"), reward_error="it \x1b[31m failed")
    if group == 3:
        steps = np.array([0.5, 2.5], dtype=np.float32)
        one = replace(one, reward=3.0, step_rewards=steps, engine=7)
    if group == 4:
        fields = {"answer": "7", "odd": float("inf"), "list": [1.0, float("nan")]}
        one = replace(one, prompt=replace(one.prompt, fields=fields, id="\u202eid"))
    return one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with samples that were trained on, dropped, repeated, evaluated, and that wait."""
    run = logged_run(tmp_path_factory.mktemp("samples") / "run", changed)
    log = SampleLogWriter(run, SamplesConfig())
    log.begin(33)
    for group in (6, 7):
        log.admitted(group, 6)
        for k in range(3):
            one = replace(sample(group, k), finished_at=9000.0 + group + k)
            log.finished(row(one, group))
            if group == 6 and k < 2:
                log.dropped(row(one, group), 7, "late")
        log.group_dropped(group, 7, "equal rewards")
    repeated = replace(sample(5, 0), finished_at=9500.0)
    log.finished(row(repeated, 5))
    log.close()
    return run


QUERIES: tuple[dict[str, Any], ...] = (
    *({}, {"step": 3}, {"best": 3}, {"worst": 3}, {"random": 2}, {"random": 2, "seed": 1}),
    *({"step": 3, "best": 1}, {"step": 3, "worst": 9}, {"held_out": True}, {"random": 999}),
    *({"step": 0, "held_out": True}, {"step": 9}, {"step": 1, "held_out": True}),
    *({"best": 1, "worst": 1}, {"best": 0}, {"worst": 1, "random": 1, "best": 1}),
)


def test_every_selection_is_the_one_on_its_page(run: Path) -> None:
    text = ""
    for query in QUERIES:
        console = RecordedConsole()
        try:
            print_samples(choose(run, SampleQuery(**query)), console, as_json=False)
        except UserError as error:
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        text += f"$ {query}\n{console.text}"
    require_page("samples/selections", text.replace(str(run), "RUN"))
    newest = newest_trained(run)
    assert newest is not None
    assert newest.id == "4-3"


def test_every_sample_as_json_is_the_one_on_its_page(run: Path) -> None:
    console = RecordedConsole()
    print_samples(choose(run, SampleQuery(random=999)), console, as_json=True)
    lines = sorted(console.text.splitlines())
    assert all(json.loads(line) for line in lines)
    require_page("samples/json", "\n".join(lines) + "\n")


def test_lost_samples_are_counted_and_a_lost_end_is_noted(run: Path) -> None:
    selection = replace(choose(run, SampleQuery(step=2)), missing=1234, lost="[the end] is lost")
    text, as_json = RecordedConsole(), RecordedConsole()
    print_samples(selection, text, as_json=False)
    assert text.text.endswith("1,234 more are no longer in the log\nnote: [the end] is lost\n")
    print_samples(selection, as_json, as_json=True)
    assert len(as_json.text.splitlines()) == 4


def test_the_whole_section_of_samples_is_the_one_stored(run: Path) -> None:
    require_page("samples/section", samples_section(run).replace(str(run), "RUN"))


FORMS: tuple[dict[str, str], ...] = (
    *({}, {"kind": "all"}, {"kind": "dropped"}, {"kind": "evaluated"}, {"order": "best"}),
    *({"order": "worst"}, {"order": "random"}, {"order": "random", "start": "3"}, {"step": "3"}),
    *({"step": "99"}, {"kind": "dropped", "step": "7"}, {"kind": "dropped", "step": "1"}),
    *({"kind": "all", "step": "2"}, {"minimum": "2"}, {"maximum": "0.2"}, {"minimum": "99"}),
    *({"kind": "all", "minimum": "2", "maximum": "2.1", "order": "worst"}, {"start": "99"}),
    *({"kind": "all", "start": "5"}, {"kind": "evaluated", "step": "3"}),
    *({"kind": "other"}, {"step": "-1"}, {"minimum": "inf"}, {"more": "1"}, {"start": "x"}),
)


def test_every_answer_of_the_form_is_the_one_on_its_page(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_browser, "AT_ONCE", 5)
    browser = SampleBrowser(run)
    text = ""
    for fields in FORMS:
        try:
            answer = browser.answer(fields)
        except UserError as error:
            answer = {"refused": str(error)}
        if "html" in answer:
            answer["html"] = re.findall(r"<p>(.*?)</p>", answer["html"])
        text += f"$ {fields}\n{listed(answer)}"
    require_page("samples/form", text.replace(str(run), "RUN") + form())


def test_text_is_cut_and_escaped_and_ranges_are_short() -> None:
    limit = samples.LONGEST
    assert visible("a\tb\n\x00\x7f\u202e\u2066\u202f") == "a\tb\n\\x00\\x7f\\u202e\\u2066\u202f"
    assert visible("x" * limit) == "x" * limit
    more = " ... 1 more characters (use --json to print all)"
    assert visible("\x00" * (limit + 1)) == "\\x00" * limit + more
    ranges = samples._ranges
    assert ranges([]) == ""
    assert ranges([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"
    assert ranges(range(0, 12, 2)) == "0, 2, 4, 6, 8, 10"
    assert ranges(range(0, 14, 2)) == "0, 2, 4, ..., 10, 12"
    for length, parts in ((400, 1), (401, 2), (5000, 2), (5001, 2)):
        folded = samples._folded("response", "<" * length)
        assert folded.count("<pre") == parts
        assert ("more characters" in folded) == (length > 5000)
        assert (f"<summary>{length:,} characters</summary>" in folded) == (length > 400)
        assert folded.count("&lt;") == (length if parts == 1 else 400 + min(length, 5000))
