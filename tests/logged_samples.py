"""A run directory with the sample log of a run of five steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.rows import SampleRow, rows_of
from megatron_async_rl.samples.types import Prompt, Sample

STEPS, GROUP = 5, 4
Change = Callable[[Sample], Sample]


def rows(samples: Sequence[Sample], group: int) -> list[SampleRow]:
    """Return the samples as rows of one batch, which takes as long as a batch of one."""
    return rows_of(batch_of(samples, [group] * len(samples)))


def row(sample: Sample, group: int = 0) -> SampleRow:
    return rows([sample], group)[0]


def sample(group: int, k: int, change: Change = lambda one: one) -> Sample:
    """Return a sample trained at step group + 1; the reward of sample k of group g is g + k /
    10."""
    made = Sample(
        id=f"{group}-{k}",
        prompt=Prompt(id=f"sum-{group}", text=f"{group}+{k}=", token_ids=(5, 6)),
        response_ids=np.array([7, 8], dtype=np.int32),
        behavior_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        versions=np.array([max(0, group - 1), group], dtype=np.int32),
        loss_mask=np.ones(2, dtype=np.uint8),
        text=f"answer {group + k}",
        finish_reason="stop",
        reward=group + k / 10,
        finished_at=1000.0 * group + k,
    )
    return change(made)


def logged_run(run_dir: Path, change: Change = lambda one: one) -> Path:
    """Write STEPS steps of one group each, a waiting group, and an evaluation of version 0."""
    log = SampleLogWriter(run_dir, SamplesConfig())
    log.begin(0)
    prompt = sample(0, 0).prompt
    held_out = [row(replace(sample(0, k), id=f"-1-{k}", text="held out"), -1) for k in range(2)]
    log.evaluated([(prompt, held_out)], 0)
    for group in range(STEPS + 1):
        samples = tuple(sample(group, k, change) for k in range(GROUP))
        samples = tuple(replace(one, prompt=samples[0].prompt) for one in samples)
        log.admitted(group, group + 1)
        made = rows(samples, group)
        for one in made:
            log.finished(one)
        if group < STEPS:
            log.trained([group], [made], group + 1)
    log.close()
    return run_dir
