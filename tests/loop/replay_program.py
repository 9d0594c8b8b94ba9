"""A rank of a run without Ray and vLLM, or of its replay.

replay_program CONFIG [METHOD CALL]     with a crash of all ranks in a method of the rank
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from megatron_async_rl.config.load import load
from tests.loop.one_process import Crash, Engines, OneProcess
from tests.loop.routed import with_experts


def main(file: str, *crash: str) -> None:
    config = load(Path(file))
    crashes_at = (crash[0], int(crash[1])) if crash else None
    mixture = config.policy.routing_replay == "rollout"
    engines = Engines(prepare=with_experts) if mixture else Engines()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
        OneProcess.rank(patch).run(config, engines, crashes_at)


if __name__ == "__main__":
    main(*sys.argv[1:])
