"""A gradient far outside the run's history: when it counts as one, and what the step does then."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.controls.gac import Gac
from megatron_async_rl.policy import step as step_module
from megatron_async_rl.policy.anomaly import (
    ENOUGH,
    WINDOW,
    AnomalyReport,
    NormHistory,
    NotFinite,
    Spike,
    named_ids,
)
from megatron_async_rl.policy.step import OptimizerStep, StepFacts
from tests.gradients import OneRank, Shard
from tests.train_batches import columns, ragged_batch

FACTS = StepFacts(loss=1.0, log_weights=np.zeros(3), lag_max=0)
USUAL = [3.0, 4.0]
HUGE = [300.0, -400.0]


class Megatron:
    """The part of Megatron's optimizer that a step uses, over plain descent; its gradients are
    given."""

    def __init__(self, gradients):
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.gradients = list(gradients)
        self.param_groups = self.optimizer.param_groups

    def prepare_grads(self):
        self.parameter.grad = torch.tensor(self.gradients.pop(0))
        return False

    def step_with_ready_grads(self):
        self.optimizer.step()


@pytest.fixture(autouse=True)
def gradients_of_one_rank(monkeypatch):
    monkeypatch.setattr(
        step_module, "gradients_of", lambda optimizer, _: OneRank([Shard(optimizer.parameter.grad)])
    )


def step_of(gradients, *, controls=None, **settings):
    optimizer = OptimizerConfig(lr=1.0, clip_grad=1.0)
    return OptimizerStep(
        Megatron(gradients),
        optimizer,
        controls or {},
        SimpleNamespace(),
        100,
        **{"on_anomaly": "report", **settings},
    )


def test_a_norm_over_twenty_times_the_median_is_one_once_there_are_enough_to_compare_with():
    history = NormHistory()
    for norm in (1.0, 9.0, 2.0, 1.0):
        history.add(norm)
        assert history.spike(1e9) is None
    history.add(2.0)
    assert len(history.values) == ENOUGH
    assert history.spike(40.0) is None
    assert history.spike(40.1) == Spike(norm=40.1, median=2.0)


def test_the_median_is_of_the_newest_norms_and_gradients_of_nothing_are_not_among_them():
    history = NormHistory()
    for norm in [100.0] * WINDOW + [0.0] * WINDOW:
        history.add(norm)
    assert history.spike(1000.0) is None
    for _ in range(50):
        history.add(1.0)
    assert history.values == [1.0] * 50, "no older norm is left"
    assert history.spike(1000.0) == Spike(norm=1000.0, median=1.0)
    resumed = NormHistory()
    resumed.load_state_dict({"values": [2.0] * 60, "largest_median": 2.0})
    assert len(resumed.values) == 50


@pytest.mark.parametrize("on_anomaly", ["report", "skip"])
def test_an_anomaly_is_reported_before_it_is_applied_clipped_or_skipped(on_anomaly):
    step = step_of([USUAL] * 5 + [HUGE], on_anomaly=on_anomaly)
    reported = []

    def report(spike, gradients):
        reported.append((spike, step.optimizer.parameter.detach().clone(), gradients))

    for _ in range(5):
        assert "policy/grad_anomaly" not in step.take(FACTS, None, report)
    assert not reported
    before = step.optimizer.parameter.detach().clone()
    metrics = step.take(FACTS, None, report)
    ((spike, weights, gradients),) = reported
    assert spike == Spike(norm=500.0, median=5.0)
    assert metrics["policy/grad_anomaly"] == 100.0
    assert torch.equal(weights, before)
    assert gradients.shards[0].grad is step.optimizer.parameter.grad
    assert metrics["policy/skipped"] == float(on_anomaly == "skip")
    moved = (step.optimizer.parameter.detach() - before).norm()
    assert float(moved) == pytest.approx(0.0 if on_anomaly == "skip" else 1.0, rel=1e-4)
    assert metrics["policy/nonfinite"] == 0.0


def test_with_gac_it_is_the_norm_as_it_came_that_counts_and_the_reference_stays():
    control = Gac(GacControl(c_low=0.0))
    step = step_of([USUAL] * 6 + [HUGE, USUAL], controls={"gac": control})
    for _ in range(6):
        metrics = step.take(FACTS)
    # Aligned gradients are projected away, and their own length is what the history has.
    assert metrics["policy/grad_norm"] < 1e-2
    assert step.norms.values == pytest.approx([5.0] * 6)
    before = [part.clone() for part in control.reference]
    assert step.take(FACTS)["policy/grad_anomaly"] == pytest.approx(100.0)
    assert all(torch.equal(a, b) for a, b in zip(before, control.reference, strict=True))
    assert step.take(FACTS)["gac/cosine"] == pytest.approx(1.0)


def test_a_resumed_run_has_the_history_it_was_saved_with():
    step = step_of([USUAL] * 5)
    for _ in range(5):
        step.take(FACTS)
    resumed = step_of([HUGE])
    state = step.state_dict()
    resumed.load_state_dict(state)
    assert resumed.take(FACTS)["policy/grad_anomaly"] == 100.0
    # A checkpoint of an earlier version has no history.
    del state["norms"]
    older = step_of([HUGE])
    older.load_state_dict(state)
    assert "policy/grad_anomaly" not in older.take(FACTS)


def test_a_gradient_that_is_not_finite_is_no_part_of_the_history():
    step = step_of([USUAL, [float("nan"), 1.0], USUAL])
    for _ in range(3):
        metrics = step.take(FACTS)
    assert metrics["policy/nonfinite"] == 1.0
    assert step.norms.values == [5.0, 5.0]


class OneRankReport(AnomalyReport):
    """Traces to `found`, and remembers what was sent to the other ranks."""

    def __init__(self, file, found):
        super().__init__(None, None, None, SimpleNamespace(rank=0), file)
        self.found, self.sent = found, []

    def _squares_of_parameters(self, gradients):
        return {"weight": 1.0}

    def _culprits(self, *_):
        return self.found

    def _of_all_ranks(self, own):
        self.sent.append(own)
        return [own]


@pytest.mark.parametrize("count", [1, 16, 17])
def test_named_samples_alone_are_sent_and_many_go_without_their_tokens(tmp_path, count):
    samples = columns(ragged_batch(groups=8))
    assert len(samples) > 18
    report = OneRankReport(tmp_path / "anomalies.jsonl", range(1, 1 + count))
    report.write(
        Spike(100.0, 1.0),
        None,
        step=7,
        samples=samples,
        rows=[tuple(range(len(samples)))],
        build=None,
        consume=None,
    )
    (sent,) = report.sent
    assert sorted(sent) == list(report.found)
    (line,) = (tmp_path / "anomalies.jsonl").read_text().splitlines()
    named = json.loads(line)["samples"]
    assert [each["id"] for each in named] == samples.ids.to_pylist()[1 : 1 + count]
    assert {"response_ids" in each for each in named} == {count <= 16}


def test_noise_below_the_norm_that_is_clipped_to_is_no_anomaly():
    """A supervised run that has learned its data: the median is near 0, and noise many times it."""
    history = NormHistory(clip=1.0)
    for _ in range(WINDOW):
        history.add(1e-6)
    assert history.spike(1.0) is None
    assert history.spike(1.01) == Spike(norm=1.01, median=1e-6)


def test_without_clipping_a_norm_must_exceed_the_largest_median_of_the_run():
    history = NormHistory()
    for norm in [3.0] * ENOUGH + [1e-6] * WINDOW:
        history.add(norm)
    assert history.spike(3.0) is None
    assert history.spike(3.1) == Spike(norm=3.1, median=1e-6)
    resumed = NormHistory()
    resumed.load_state_dict(history.state_dict())
    assert resumed.spike(3.0) is None


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1.0])
def test_a_step_that_is_not_finite_is_reported_and_counted_until_the_next_that_is(loss):
    bad = [float("nan"), 1.0] if loss == 1.0 else USUAL
    step = step_of([USUAL, bad, bad, USUAL])
    reported = []
    in_a_row = []
    for given in (1.0, loss, loss, 1.0):
        facts = StepFacts(loss=given, log_weights=np.zeros(3), lag_max=0)
        step.take(facts, None, lambda found, _: reported.append(found) or [f"p-{len(reported)}"])
        in_a_row.append((step.nonfinite_in_a_row, list(step.nonfinite_ids)))
    assert in_a_row == [(0, []), (1, ["p-1"]), (2, ["p-1", "p-2"]), (0, [])]
    assert [type(found) for found in reported] == [NotFinite] * 2


def test_a_batch_without_anything_to_learn_is_neither_finite_nor_not():
    step = step_of([[float("nan"), 1.0]])
    step.take(FACTS)
    step.skip()
    assert step.nonfinite_in_a_row == 1


class Halved(AnomalyReport):
    """Norms of parts of a batch are those of `culprits`: not a number where a part holds one."""

    def __init__(self, file, culprits):
        super().__init__(None, None, None, SimpleNamespace(rank=0, device_type="cpu"), file)
        self.culprits = culprits

    def _squares_of_parameters(self, gradients):
        return {"fine": 1.0, "spoiled": float("nan")}

    def _of_all_ranks(self, own):
        return [own]

    def _norm_of(self, part, rows, build, consume):
        return float("inf") if self.culprits & set(part) else 1.0

    def _buffers(self):
        return []

    def _restored(self, saved):
        pass


@pytest.mark.parametrize(("culprits", "named"), [({5}, 1), ({0, 1}, 3), ({0, 23}, 24)])
def test_a_gradient_that_is_not_finite_is_traced_to_the_smallest_part_that_is_not(
    tmp_path, culprits, named
):
    samples = columns(ragged_batch(groups=8)).select(np.arange(24))
    ids = Halved(tmp_path / "anomalies.jsonl", culprits).write(
        NotFinite(1.0, float("nan")),
        None,
        step=7,
        samples=samples,
        rows=[tuple(range(24))],
        build=None,
        consume=None,
        losses=[0.0] * 24,
    )
    assert len(ids) == named
    record = json.loads((tmp_path / "anomalies.jsonl").read_text())
    assert (record["norm"], record["parameter"], record["parameters"]) == ("nan", "spoiled", 1)
    assert [each["id"] for each in record["samples"]] == ids


def test_samples_whose_own_loss_is_not_finite_are_named_without_a_search(tmp_path):
    samples = columns(ragged_batch(groups=8))
    losses = [0.0] * len(samples)
    losses[3] = float("nan")
    report = OneRankReport(tmp_path / "anomalies.jsonl", found=None)
    ids = report.write(
        NotFinite(float("nan"), 0.0),
        None,
        step=7,
        samples=samples,
        rows=[tuple(range(len(samples)))],
        build=None,
        consume=None,
        losses=losses,
    )
    assert ids == [samples.ids[3].as_py()]


def test_a_message_names_four_samples_and_counts_the_others():
    assert named_ids("abcd") == "a, b, c, d"
    assert named_ids("abcde") == "a, b, c, d and 1 others together"
