"""Runs in one process or on several ranks of this machine, without Ray and vLLM, and their
replays."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.launcher import _prepare_directory
from megatron_async_rl.replay import repetition
from megatron_async_rl.replay.replay_plan import plan_replay
from tests.loop.one_process import Crash, Engines, OneProcess
from tests.parallel.ranks import run_ranks

KEPT = ("checkpoint.every=2", "checkpoint.keep=9")
ASYNCHRONOUS = ("flow.async_ratio=2", "run.steps=6", *KEPT)


@contextmanager
def replaying(root: Path) -> Iterator[OneProcess]:
    """Yield a loop whose runs `mar replay` repeats in this process."""
    with pytest.MonkeyPatch.context() as patch:
        process = OneProcess(root, patch)

        def launch(config: Config, *_: object) -> int:
            if config.policy.parallel.ranks > 1:
                run_on_ranks(config)
            else:
                run(process, config)
            return 0

        patch.setattr(repetition, "launch", launch)
        yield process


def run(
    loop: OneProcess,
    config: Config,
    crashes_at: tuple[str, int] | None = None,
    engines: Engines | None = None,
) -> Path:
    _prepare_directory(config)
    return loop.run(config, engines or Engines(), crashes_at)


def killed_and_resumed(loop: OneProcess) -> Path:
    """Make a run that is killed in step 4 and resumed with another learning rate from step 2."""
    config = loop.config("resumed", *ASYNCHRONOUS)
    with pytest.raises(Crash):
        run(loop, config, crashes_at=("after await_batch", 4))
    changed = config.policy.optimizer.model_copy(update={"lr": 0.02})
    policy = config.policy.model_copy(update={"optimizer": changed})
    return run(loop, config.model_copy(update={"policy": policy}))


def run_on_ranks(config: Config, crashes_at: tuple[str, int] | None = None) -> Path:
    """Run or replay on the ranks of `config`. A simulated crash is not an error."""
    _prepare_directory(config)
    crash = [] if crashes_at is None else [crashes_at[0], str(crashes_at[1])]
    file = config.run.dir / "config.yaml"
    run_ranks(config.policy.parallel.ranks, "tests.loop.replay_program", [file, *crash])
    return config.run.dir


def repeated(
    run_dir: Path,
    *changes: str,
    first: int | None = None,
    out: Path | None = None,
    explained: int | None = None,
) -> tuple[int, str]:
    """Return exit code and output of `mar replay`."""
    written = io.StringIO()
    plan = plan_replay(run_dir, first, None, changes, explained)
    code = repetition.replay(plan, out, Console(file=written, width=1000))
    return code, written.getvalue()
