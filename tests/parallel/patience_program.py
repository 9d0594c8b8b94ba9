"""Rank 0 takes longer over something than any other collective may."""

import sys
import time

from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise

DEADLINE_S = 2.0

device.install("cpu")
layout = initialise(ParallelConfig(ranks=2, tensor=2), "cpu", timeout_s=DEADLINE_S)


def slowly() -> str:
    time.sleep(2 * DEADLINE_S)
    return "the batch"


assert layout.from_rank_zero(slowly) == "the batch"
sys.stdout.write(f"rank {layout.rank} has it\n")
layout.shutdown()
