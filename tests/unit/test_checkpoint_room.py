"""A checkpoint that cannot be written leaves the room it took, so that there is room to say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.policy.checkpoint import _cleared_on_failure


def test_what_was_written_of_a_checkpoint_that_failed_is_removed_and_the_error_stays(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished_step_00000004"
    (unfinished / "sharded").mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"), _cleared_on_failure(unfinished):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
