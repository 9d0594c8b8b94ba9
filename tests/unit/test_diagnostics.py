import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.objective import Denominators, Objective
from megatron_async_rl.objectives.off_policy import effective_sample_size
from megatron_async_rl.policy.batching import build_micro_batch
from megatron_async_rl.policy.lag0 import Lag0Table
from megatron_async_rl.policy.step import StepTable, step_metrics
from tests.gpu.host_syncs import unordered_sums
from tests.train_batches import columns_of, ragged_batch, samples_in

CPU = torch.device("cpu")
BATCH = ragged_batch()
SAMPLES = [sample for sample in samples_in(BATCH) if sample.valid]
ADVANTAGES = np.linspace(-1, 1, len(SAMPLES))
SHIFTS = torch.randn(len(SAMPLES), generator=torch.Generator().manual_seed(3)) * 0.4
CURRENT = int(SHIFTS.abs().argmin())
"""The one sample that the batch's own version sampled from its first token to its last."""
SAMPLES[CURRENT] = replace(
    SAMPLES[CURRENT], versions=np.full_like(SAMPLES[CURRENT].versions, BATCH.version)
)
COLUMNS = columns_of(SAMPLES, BATCH.version)

COUNTS = [int(sample.loss_mask.sum()) for sample in SAMPLES]


def table_of(cuts, table=None):
    """The table after these micro-batches, with log-probs the behaviour's plus a shift per
    sample."""
    table = table or StepTable(len(SAMPLES), CPU)
    objective, denominators = Objective(ObjectiveConfig()), Denominators(sum(COUNTS), len(SAMPLES))
    for rows in cuts:
        micro = build_micro_batch(COLUMNS, rows, CPU)
        behavior = torch.from_numpy(np.concatenate([SAMPLES[i].behavior_logprobs for i in rows]))
        mask = torch.from_numpy(np.concatenate([SAMPLES[i].loss_mask for i in rows])).float()
        logp = behavior + SHIFTS[list(rows)][micro.sequence]
        tokens = TokenBatch(
            logp=logp,
            logp_prox=behavior,
            logp_behavior=behavior,
            advantages=torch.tensor(ADVANTAGES)[list(rows)][micro.sequence],
            mask=mask,
            weights=torch.ones_like(mask),
            sequence=micro.sequence,
            sequences=len(rows),
            entropy=torch.full_like(logp, 0.7),
        )
        table.record(micro, tokens, objective.loss(tokens, denominators), BATCH.version)
    return table.values.numpy()


WHOLE = step_metrics(table_of([tuple(range(len(SAMPLES)))]), COLUMNS)


def test_metrics_equal_their_definitions_over_trained_tokens():
    shift = np.repeat(SHIFTS.double().numpy(), COUNTS)
    advantage = np.repeat(ADVANTAGES, COUNTS)
    w = np.exp(shift)
    sequence_weights = np.exp(SHIFTS.double().numpy() * COUNTS)
    clipped = ((advantage > 0) & (w > 1.2)) | ((advantage < 0) & (w < 0.8))
    lag0 = np.repeat([bool(np.all(s.versions == BATCH.version)) for s in SAMPLES], COUNTS)
    begun_earlier = (
        np.concatenate([(s.versions == BATCH.version)[s.loss_mask == 1] for s in SAMPLES]) & ~lag0
    )
    assert (
        np.abs(shift[begun_earlier]).max() > np.abs(shift[lag0]).max()
    )  # or the next lines could not distinguish them
    expected = {
        "policy/loss": np.mean(np.maximum(-advantage * w, -advantage * np.clip(w, 0.8, 1.2))),
        "policy/entropy": 0.7,
        "ratio/ess": sequence_weights.sum() ** 2 / (sequence_weights**2).sum(),
        "ratio/ess_ratio": sequence_weights.sum() ** 2 / (sequence_weights**2).sum() / len(SAMPLES),
        "ratio/kl_k1": -shift.mean(),
        "ratio/kl_k2": (shift**2 / 2).mean(),
        "ratio/kl_k3": (w - 1 - shift).mean(),
        "ratio/chi2": (w**2 - 1).mean(),
        "ratio/logp_diff_mean": np.abs(shift).mean(),
        "ratio/logp_diff_max": np.abs(shift).max(),
        "ratio/logp_diff_lag0_max": np.abs(shift[lag0]).max(),
        "clip/positive": clipped[advantage > 0].mean(),
        "clip/negative": clipped[advantage < 0].mean(),
        "clip/rejected": 0.0,
        "clip/weight_mean": 1.0,
    }
    assert pytest.approx(expected, rel=1e-5) == WHOLE
    assert 0 < WHOLE["clip/positive"] < 1
    assert 0 < WHOLE["clip/negative"] < 1


def test_metrics_do_not_depend_on_how_the_batch_is_cut():
    cut = [(3, 1), (0,), tuple(range(4, len(SAMPLES))), (2,)]
    assert step_metrics(table_of(cut), COLUMNS) == pytest.approx(WHOLE, rel=1e-6)


def test_a_table_leaves_the_order_of_no_sum_to_the_device():
    with unordered_sums() as found:
        table_of([(3, 1), (0,)])
        table_of([(3, 1), (0,)], Lag0Table(COLUMNS, CPU))
    assert found == []


def test_tables_of_ranks_add_up():
    halves = [tuple(range(5)), tuple(range(5, len(SAMPLES)))]
    added = table_of(halves[:1]) + table_of(halves[1:])
    assert step_metrics(added, COLUMNS) == pytest.approx(WHOLE, rel=1e-6)


def differences(table):
    """Complete the table of a single rank."""
    with mock.patch.object(torch.distributed, "all_reduce"):
        table.complete(None)
    return table.differences()


@pytest.mark.parametrize("size", [1, 5, len(SAMPLES)])
def test_differences_at_lag_0_are_those_of_fresh_samples_by_depth(size):
    table = Lag0Table(COLUMNS, CPU)
    rows = range(len(SAMPLES))
    table_of([tuple(rows[at : at + size]) for at in range(0, len(rows), size)], table)
    found = differences(table)
    sample, shift = SAMPLES[CURRENT], abs(float(SHIFTS[CURRENT]))
    # The first response token has the whole prompt before it.
    depths = len(sample.prompt.token_ids) + np.flatnonzero(sample.loss_mask)
    counts = np.bincount(np.log2(depths).astype(int))
    assert found.ids == (sample.id,)
    assert found.tokens == tuple(counts)
    assert found.means == pytest.approx([shift], rel=1e-4)
    assert found.sums == pytest.approx(counts * shift, rel=1e-4)


def test_a_part_with_shorter_samples_has_its_rows_in_the_whole_table():
    whole = Lag0Table(COLUMNS, CPU)
    table_of([tuple(range(len(SAMPLES)))], whole)
    # A part has depth buckets for its own samples only: that of the longest response has most.
    lengths = [len(one.prompt.token_ids) + one.length for one in SAMPLES]
    order = np.argsort(lengths)
    joined = Lag0Table(COLUMNS, CPU)
    for rows in (order[:1], order[1:]):
        own = columns_of([SAMPLES[row] for row in rows], BATCH.version)
        part = Lag0Table(own, CPU)
        part.values[:] = whole.values[rows]
        part._by_depth[:] = whole._by_depth[rows, :, : part._by_depth.shape[2]]
        joined.insert(rows, part, 1)
    assert part._by_depth.shape[2] > int(lengths[order[0]]).bit_length()
    assert torch.equal(joined._by_depth, whole._by_depth)
    assert whole._by_depth.abs().sum() > 0


def test_given_and_older_responses_have_no_differences_at_lag_0():
    older = [replace(s, versions=np.full_like(s.versions, BATCH.version - 1)) for s in SAMPLES]
    given = [replace(sample, finish_reason="given") for sample in SAMPLES]
    for samples in (older, given):
        columns = columns_of(samples, BATCH.version)
        table = Lag0Table(columns, CPU)
        rows = tuple(range(len(SAMPLES)))
        micro = build_micro_batch(columns, rows, CPU)
        tokens = TokenBatch(
            logp=torch.zeros(len(micro.sequence)),
            logp_prox=torch.zeros(len(micro.sequence)),
            logp_behavior=torch.ones(len(micro.sequence)),
            advantages=torch.ones(len(micro.sequence)),
            mask=torch.ones(len(micro.sequence)),
            weights=torch.ones(len(micro.sequence)),
            sequence=micro.sequence,
            sequences=len(rows),
            entropy=torch.zeros(len(micro.sequence)),
        )
        denominators = Denominators(sum(COUNTS), len(SAMPLES))
        loss = Objective(ObjectiveConfig()).loss(tokens, denominators)
        table.record(micro, tokens, loss, BATCH.version)
        assert differences(table) is None


def test_given_responses_have_no_ratios():
    given = [replace(sample, finish_reason="given") for sample in SAMPLES]
    assert set(step_metrics(table_of([]), columns_of(given, BATCH.version))) == {
        "policy/loss",
        "policy/entropy",
    }


def test_a_metric_without_a_token_to_speak_of_is_absent():
    """No constant stands for one: 0 would read as a perfect agreement."""
    older = [replace(s, versions=np.full_like(s.versions, BATCH.version - 1)) for s in SAMPLES]
    table = StepTable(len(older), CPU)
    stale = columns_of(older, BATCH.version)
    objective, denominators = Objective(ObjectiveConfig()), Denominators(sum(COUNTS), len(older))
    rows = tuple(range(len(older)))
    micro = build_micro_batch(stale, rows, CPU)
    behavior = torch.from_numpy(np.concatenate([s.behavior_logprobs for s in older]))
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in older])).float()
    tokens = TokenBatch(
        logp=behavior + 0.1,
        logp_prox=behavior,
        logp_behavior=behavior,
        advantages=torch.ones(len(behavior)),
        mask=mask,
        weights=torch.ones_like(mask),
        sequence=micro.sequence,
        sequences=len(older),
        entropy=torch.zeros_like(behavior),
    )
    table.record(micro, tokens, objective.loss(tokens, denominators), BATCH.version)
    absent = {"ratio/logp_diff_lag0_max", "clip/negative"}
    assert set(WHOLE) - set(step_metrics(table.values.numpy(), stale)) == absent
    masked = columns_of(
        [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in SAMPLES], BATCH.version
    )
    assert set(step_metrics(table_of([]), masked)) == {"policy/loss"}


def test_an_all_masked_micro_batch_records_nothing():
    table = StepTable(2, CPU)
    table.record(build_micro_batch(COLUMNS, (), CPU), None, None, 0)
    assert not table.values.any()


@pytest.mark.parametrize("shift", [-5000.0, 0.0, 5000.0])
def test_effective_sample_size_survives_weights_that_overflow(shift):
    log_weights = np.array([0.0, math.log(2.0), math.log(3.0)]) + shift
    assert effective_sample_size(log_weights) == pytest.approx(36 / 14)


def test_equal_weights_however_tiny_count_fully_and_a_dominating_one_counts_once():
    assert effective_sample_size(np.full(64, -900.0)) == pytest.approx(64)
    assert effective_sample_size(np.array([0.0] * 63 + [800.0])) == pytest.approx(1)
    assert effective_sample_size(np.zeros(0)) == 0.0
