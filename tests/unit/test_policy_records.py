"""Records that the policy makes for `mar verify`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megatron_async_rl.policy import policy as policy_module
from megatron_async_rl.policy.gradient_coverage import REPORT_AFTER, CoverageReport
from megatron_async_rl.policy.policy import Policy


def test_a_batch_without_trainable_tokens_has_no_differences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = SimpleNamespace(version=3, loss_mask=np.zeros(4, dtype=np.uint8))
    monkeypatch.setattr(policy_module, "valid_samples", lambda batch: batch)
    one: Any = object.__new__(Policy)
    one.memory = SimpleNamespace(require=lambda: None)
    one.objective = SimpleNamespace(config=SimpleNamespace(steps_per_batch=1))
    one.schedule = SimpleNamespace(routing=None)
    one.references = SimpleNamespace(begin=lambda version: None)
    one.step = SimpleNamespace(skip=lambda: {"policy/skipped": 1.0})
    one.streamed = SimpleNamespace(discard=lambda: None)
    one.lag0 = "differences of the batch before"
    one.train_step(empty)
    assert one.lag0 is None


def test_a_record_that_cannot_be_written_does_not_end_training(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    coverage = cast(Any, SimpleNamespace(add=lambda: None, missing=lambda: ([], 7)))
    layout = cast(Any, SimpleNamespace(rank=0))
    report = CoverageReport(coverage, layout, tmp_path / "missing")
    with caplog.at_level(logging.WARNING):
        for step in range(REPORT_AFTER):
            report.stepped(1.0, step)
    assert "without a gradient" in caplog.text
