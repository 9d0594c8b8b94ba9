"""`mar verify` of a whole run that crashed and was resumed, with fake engines."""

from __future__ import annotations

import pytest
from rich.console import Console

from megatron_async_rl.config.load import dump
from megatron_async_rl.metrics.lag0_log import read_lag0
from megatron_async_rl.metrics.load_log import CUT_FILE, read_loads
from megatron_async_rl.verify.scorecard import RowVerdict
from megatron_async_rl.verify.verified_run import verify_run
from tests.loop.one_process import Crash, Engines, OneProcess

STEPS = 6
NOT_OF_ENGINES = {"log-probs at lag 0", "generated tokens", "text and tokens"}
"""Rows that fake engines fail: they draw log-probs, report no tokens, and invent text."""


@pytest.fixture
def loop(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> OneProcess:
    return OneProcess(tmp_path_factory.mktemp("loop"), monkeypatch)


def test_a_run_that_crashed_and_was_resumed_has_all_records(loop: OneProcess) -> None:
    config = loop.config("crashed", f"run.steps={STEPS}", "checkpoint.every=2")
    config.run.dir.mkdir()
    (config.run.dir / "config.yaml").write_text(dump(config))
    with pytest.raises(Crash):
        loop.run(config, Engines(), crashes_at=("log", 4))
    run_dir = loop.run(config, Engines())

    card = verify_run(run_dir, Console(quiet=True))
    rows = {one.name: one for one in card.rows}
    assert {one.name for one in card.failed} <= NOT_OF_ENGINES
    passed = {name for name, one in rows.items() if one.verdict is RowVerdict.PASSED}
    assert passed >= {
        "sample log",
        "weights in engines",
        "weights on disk",
        "chain of weights",
        "behaviour log-probs",
        "in-flight updates",
        "groups",
        "data unchanged",
        "rows per epoch",
        "parameters that move",
        "denominators",
        "learning rate",
    }
    assert "1 resume" in rows["chain of weights"].value
    # The resumed run replaced the lines of the steps that it repeated.
    assert (run_dir / CUT_FILE).exists()
    versions = [load.version for load in read_loads(run_dir)]
    assert sorted(versions) == versions
    steps = [line.step for line in read_lag0(run_dir)]
    assert steps
    assert sorted(set(steps)) == steps
