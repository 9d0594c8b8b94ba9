"""One rank that trains a tiny policy for two steps under each combination of tests/combinations.py.

Arguments: the model's directory, and the JSON file to write: one list per combination with the
metrics of its two steps, or the error that ended it.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.policy.policy import Policy
from tests.combinations import trained
from tests.train_batches import ragged_batch

VOCABULARY = 48


def two_steps(config, model, layout):
    policy = Policy.build(
        ModelConfig(path=model, dtype="float32"),
        config.policy,
        # The second batch has tokens of versions 0 and 1, whatever the ratio of the configuration.
        config.objective.model_copy(update={"snapshots": 2}),
        config.controls,
        layout=layout,
        temperature=0.7,
        total_steps=2,
    )
    size = {
        "groups": 2,
        "group_size": config.flow.group_size,
        "vocabulary": VOCABULARY,
        "max_prompt": 4,
        "max_response": 6,
    }
    batches = [ragged_batch(version=version, seed=version, **size) for version in (0, 1)]
    return [policy.train_step(policy.receive(lambda batch=batch: batch)) for batch in batches]


def main() -> None:
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    device.install("cpu")
    layout = initialise(ParallelConfig(), "cpu", timeout_s=600)
    found = []
    for config in trained():
        try:
            found.append(two_steps(config, model, layout))
        except Exception:  # noqa: BLE001
            # The test of this combination shows it; the others are still tried.
            found.append(traceback.format_exc(limit=-3))
    output.write_text(json.dumps(found))
    layout.shutdown()


if __name__ == "__main__":
    main()
