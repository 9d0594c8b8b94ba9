"""Compute the trainer's log-probs of sampled responses, with its own experts and with the engine's,
in one rank.

Arguments: a pickle of samples, the checkpoint, and the file for the results: {routing_replay:
[log-probs of each sample]} and, as `rerouted`, the share of the engine's experts that differ from
the trainer's.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.policy.policy import Policy
from tests.train_batches import columns_of


def main() -> None:
    samples = columns_of(pickle.loads(Path(sys.argv[1]).read_bytes()))
    device.install("cpu")
    layout = initialise(ParallelConfig(), "cpu", timeout_s=600)
    found: dict[str, Any] = {}
    for replay in ("none", "rollout"):
        policy = Policy.build(
            ModelConfig(path=Path(sys.argv[2]), dtype="bfloat16"),
            PolicyConfig(routing_replay=replay, sequence="packed"),
            ObjectiveConfig(loss="reinforce", advantage="none"),
            (),
            layout=layout,
            temperature=1.0,
            total_steps=1,
        )
        found[replay] = policy.score(samples)
    found["rerouted"] = policy.train_step(samples)["policy/rerouted"]
    Path(sys.argv[3]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
