"""What a batch of samples looks like, as metrics: rewards, lengths, lags. Numbers of one batch only, no history."""

from __future__ import annotations

import numpy as np

from megatron_async_rl.samples import TrainBatch

MetricValue = float | int | str | list[int]


def summarise(batch: TrainBatch, max_lag: int) -> dict[str, MetricValue]:
    """Metrics of what this step trains on. Keys are documented in docs/metrics.md.

    `lag/histogram` has one count of response tokens per lag, from 0 to at least `max_lag`. Rewards are over the
    samples whose reward did not fail.
    """
    samples = list(batch.samples())
    rewards = np.array([sample.reward for sample in samples if sample.valid], dtype=np.float64)
    lengths = np.array([sample.length for sample in samples], dtype=np.float64)
    starts = np.array([batch.version - sample.start_version for sample in samples], dtype=np.int64)
    lags = batch.lags()
    mixed = sum(1 for sample in samples if sample.versions[0] != sample.versions[-1])
    metrics: dict[str, MetricValue] = {
        "reward/errors": int(sum(1 for sample in samples if not sample.valid)),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": int(lengths.max()),
        "response/truncated": float(np.mean([sample.truncated for sample in samples])),
        "response/mixed_versions": mixed / len(samples),
        "lag/start_mean": float(starts.mean()),
        "lag/start_max": int(starts.max()),
        "lag/mean": float(lags.mean()),
        "lag/max": int(lags.max()),
        "lag/histogram": np.bincount(lags, minlength=max_lag + 1).tolist(),
        "tokens/trained": int(sum(int(sample.loss_mask.sum()) for sample in samples if sample.valid)),
        "tokens/prompt": int(sum(len(sample.prompt.token_ids) for sample in samples)),
    }
    sampled = any(sample.finish_reason != "given" for sample in samples)
    if sampled and len(rewards):
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std())
        groups = [[sample.reward for sample in group.samples if sample.valid] for group in batch.groups]
        metrics["reward/equal_groups"] = float(np.mean([len(set(group)) <= 1 for group in groups]))
    return metrics
