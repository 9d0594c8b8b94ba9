"""`mar replay` of whole runs: every step is repeated with its own settings, to the last bit, and a
difference is named."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl import replay as replays
from megatron_async_rl.config.load import dump
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.launcher import _prepare_directory
from megatron_async_rl.metrics.log import digests_of_steps
from megatron_async_rl.metrics.weight_log import tensors_of_step
from tests.loop.one_process import Crash, Engines, OneProcess

ASYNCHRONOUS = ("flow.async_ratio=2", "run.steps=6", "checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with pytest.MonkeyPatch.context() as patch:
        process = OneProcess(tmp_path_factory.mktemp("replays"), patch)

        def launch(config: Config, *_: object) -> int:
            run(process, config)
            return 0

        patch.setattr(replays, "launch", launch)
        yield process


def run(loop: OneProcess, config: Config, crashes_at: tuple[str, int] | None = None) -> Path:
    _prepare_directory(config)
    return loop.run(config, Engines(), crashes_at)


def repeated(run_dir: Path, *changes: str, first: int | None = None) -> tuple[int, str]:
    """Return exit code and output of `mar replay`."""
    written = io.StringIO()
    plan = replays.plan_replay(run_dir, first, None, changes)
    code = replays.replay(plan, None, Console(file=written, width=1000))
    return code, written.getvalue()


@pytest.fixture(scope="module")
def resumed(loop: OneProcess) -> Path:
    """A run that was killed in step 4 and resumed with another learning rate from step 2."""
    config = loop.config("resumed", *ASYNCHRONOUS)
    with pytest.raises(Crash):
        run(loop, config, crashes_at=("after await_batch", 4))
    changed = config.policy.optimizer.model_copy(update={"lr": 0.02})
    policy = config.policy.model_copy(update={"optimizer": changed})
    return run(loop, config.model_copy(update={"policy": policy}))


def test_each_step_is_repeated_with_the_settings_of_its_start(resumed: Path) -> None:
    assert (resumed / "config.0.yaml").exists(), "the resume changed a setting"
    code, shown = repeated(resumed)
    assert code == 0
    assert shown.endswith("6 steps, identical bits\n")
    parts = [digests_of_steps(resumed / "replays" / "1" / f"part_{n}") for n in (1, 2)]
    assert [list(part) for part in parts] == [[1, 2], [3, 4, 5, 6]]


def test_a_replay_starts_from_the_checkpoint_before_its_first_step(resumed: Path) -> None:
    code, shown = repeated(resumed, first=5)
    assert code == 0
    assert f"from {resumed}/checkpoint/step_00000004" in shown
    assert shown.endswith("2 steps, identical bits\n")
    code, shown = repeated(resumed, first=6)
    assert "note: no checkpoint of step 5 was kept" in shown
    assert shown.endswith("2 steps, identical bits\n")


def test_a_step_with_other_weights_is_named(resumed: Path) -> None:
    file = resumed / "metrics.jsonl"
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[3]["weights"] = "0" * 16
    try:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, shown = repeated(resumed)
        assert code == 1
        assert shown.endswith("step 4 is the first whose weights differ from the run's\n")
        # The bits of one tensor of the same step.
        weights = resumed / "weights.jsonl"
        bits = weights.read_text()
        weights.write_text(_with_other_tensor(bits, step=4, number=2))
        try:
            code, shown = repeated(resumed)
        finally:
            weights.write_text(bits)
        name = list(tensors_of_step(resumed, 4))[2]
        assert f"step 4 is the first whose weights differ from the run's: tensor {name} of" in shown
        for line in lines:
            line.pop("weights", None)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, shown = repeated(resumed)
        assert code == 1
        assert "6 steps of the run, the first 1, have no digest" in shown
        assert "identical" not in shown
    finally:
        file.write_text(text)


def _with_other_tensor(text: str, *, step: int, number: int) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    (line,) = (one for one in lines if one.get("step") == step)
    bits = bytearray(base64.b64decode(line["tensors"]))
    bits[number] ^= 1
    line["tensors"] = base64.b64encode(bits).decode()
    return "".join(json.dumps(one) + "\n" for one in lines)


def test_a_changed_setting_is_a_what_if_analysis(resumed: Path) -> None:
    code, shown = repeated(resumed, "policy.optimizer.lr=0.05", first=3)
    assert code == 0
    assert "step 3 is the first whose weights differ from the run's" in shown
    assert "ESS of the recorded samples, from then on" in shown
    assert "KL of the recorded samples, from then on" in shown


@pytest.mark.parametrize(
    ("changes", "first", "message"),
    [
        (("rollout.engines=3",), None, r"rollout\.engines\n.*no effect on a replay"),
        ((), 9, r"--from\n.*last recorded step is 6"),
        (("policy.optimiser.lr=1",), None, r"policy\.optimiser"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    resumed: Path, changes: tuple[str, ...], first: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        repeated(resumed, *changes, first=first)


def test_a_folder_without_a_run_or_without_a_log_is_refused(
    loop: OneProcess, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is not a run"):
        repeated(tmp_path)
    (tmp_path / "config.yaml").write_text(dump(loop.config("not started")))
    with pytest.raises(UserError, match="no log of its samples"):
        repeated(tmp_path)
