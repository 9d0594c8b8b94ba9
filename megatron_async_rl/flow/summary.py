"""What a batch of samples looks like, as metrics: rewards, lengths, lags; and what was dropped beside it. No history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_async_rl.samples import Sample, TrainBatch

MetricValue = float | int | str | list[int] | list[float]


def summarise(batch: TrainBatch, max_lag: int, update_norm: float | None = None) -> dict[str, MetricValue]:
    """Metrics of what this step trains on. Keys are documented in docs/metrics.md.

    `lag/histogram` has one count of response tokens per lag, from 0 to at least `max_lag`. Rewards are over the
    samples whose reward did not fail. `update_norm`: how far the step moved the weights, where a control measured it.
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
        "trained/length_histogram": length_histogram([sample.length for sample in samples]),
        "tokens/trained": int(sum(int(sample.loss_mask.sum()) for sample in samples if sample.valid)),
        "tokens/prompt": int(sum(len(sample.prompt.token_ids) for sample in samples)),
    }
    if update_norm is not None:
        metrics["staleness/drift"] = int(starts.max()) * update_norm
    sampled = any(sample.finish_reason != "given" for sample in samples)
    if sampled and len(rewards):
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std())
        groups = [[sample.reward for sample in group.samples if sample.valid] for group in batch.groups]
        metrics["reward/equal_groups"] = float(np.mean([len(set(group)) <= 1 for group in groups]))
    return metrics


def summarise_dropped(samples: Sequence[Sample]) -> dict[str, MetricValue]:
    """Metrics of the responses that were sampled to their end and dropped since the last step; none where there were none."""
    if not samples:
        return {}
    lengths = [sample.length for sample in samples]
    metrics: dict[str, MetricValue] = {
        "dropped/responses": len(samples),
        "dropped/length_mean": float(np.mean(lengths)),
        "dropped/length_histogram": length_histogram(lengths),
    }
    rewards = [sample.reward for sample in samples if sample.valid]
    if rewards:
        metrics["dropped/reward_mean"] = float(np.mean(rewards))
    return metrics


def length_histogram(lengths: Sequence[int]) -> list[int]:
    """Bin i counts the lengths from 2^i up to, and not including, 2^(i + 1); lengths are at least 1."""
    bins: list[int] = np.bincount([length.bit_length() - 1 for length in lengths]).tolist()
    return bins
