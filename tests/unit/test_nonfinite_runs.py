"""A run whose steps are not finite: when it fails, and which checkpoints stay."""

from types import SimpleNamespace

import pytest
import torch

from megatron_async_rl import train as train_module
from megatron_async_rl.config.load import load
from megatron_async_rl.policy import checkpoint_folder
from megatron_async_rl.policy.anomaly import NonFiniteError, refuse_nonfinite_steps, require_finite
from tests.cases import looped
from tests.written_run import write_run


class FakePolicy:
    """A policy whose step of each version is finite or not, as given; it remembers checkpoints."""

    def __init__(self, finite, limit):
        self.finite, self.limit = list(finite), limit
        self.step = SimpleNamespace(
            steps=0, updates=0, nonfinite=0, nonfinite_in_a_row=0, nonfinite_ids=["p-1"]
        )
        self.saved, self.proven = [], []
        self.memory = self.mean_loss = self.lag0 = None
        self.references = SimpleNamespace(oldest=lambda version: version)
        self.model = SimpleNamespace(bridge=None, chunks=None)

    def load(self, directory):
        return None

    def receive(self, take):
        return take()

    def train_step(self, batch):
        finite = self.finite.pop(0)
        self.step.steps += 1
        self.step.updates += finite
        self.step.nonfinite += not finite
        self.step.nonfinite_in_a_row = 0 if finite else self.step.nonfinite_in_a_row + 1
        return {}

    @property
    def untried(self):
        return self.step.nonfinite_in_a_row > 0

    def require_finite_steps(self, *, ended=False):
        refuse_nonfinite_steps(self.step, self.limit, ended=ended)

    def save(self, directory, version, state, *, keep, proven, files, background):
        self.saved.append((version, keep))
        self.proven.append(proven)


class FakeRank0:
    def __init__(self, batches):
        self.batches, self.logged, self.said = batches, [], []

    @property
    def rank0(self):
        return self

    def next_batch(self):
        self.batches -= 1
        return SimpleNamespace(complete=True) if self.batches >= 0 else None

    def state(self):
        return {}, {}

    def log(self, batch, metrics, lag0):
        self.logged.append(metrics)

    def set_status(self, *words):
        self.said.append(words)

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "WeightExporter", lambda *_, **__: None)
    monkeypatch.setattr(train_module, "collect_rarely", lambda: None)
    for name in ("export_hf", "export_adapter"):
        monkeypatch.setattr(train_module, name, lambda *_: None)

    def start(finite, *overrides, batches=None):
        config = load(write_run(tmp_path), [f"run.steps={len(finite)}", *overrides])
        policy = FakePolicy(finite, config.policy.max_nonfinite_steps)
        monkeypatch.setattr(train_module, "Policy", SimpleNamespace(build=lambda *_, **__: policy))
        rank0 = FakeRank0(len(finite) if batches is None else batches)
        writing = SimpleNamespace(check=lambda: None, finish=lambda: None)
        error = None
        try:
            train_module.train(config, None, rank0, writing)
        except NonFiniteError as raised:
            error = raised
        return policy, rank0, error

    return start


EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep=2")


def test_five_steps_in_a_row_that_are_not_finite_end_the_run(run):
    policy, rank0, error = run([True, True, *[False] * 8], *EVERY_STEP)
    assert "5 optimizer steps in a row, up to step 7" in str(error)
    assert "made by p-1" in str(error)
    assert "anomalies.jsonl" in error.fix
    assert len(rank0.logged) == 7, "the step that ends the run is in the log"
    assert policy.saved == [(1, 2), (2, 2)], "good checkpoints stay"
    assert ("finished",) not in [words[:1] for words in rank0.said]


def test_steps_that_are_not_in_a_row_do_not(run):
    finite = [True, *[False] * 4, True, *[False] * 4, True]
    policy, rank0, error = run(finite, *EVERY_STEP)
    assert error is None
    assert policy.saved == [(1, 2), (6, 2), (11, 2)]
    assert rank0.said[-1] == ("finished", "8 optimizer steps were not finite")


def test_a_rank_returns_freed_memory_after_each_step(run, monkeypatch):
    logged = []
    monkeypatch.setattr(train_module, "return_freed_memory", lambda: logged.append("freed"))
    monkeypatch.setattr(FakeRank0, "log", lambda *_: logged.append("step"))
    run([True] * 3)
    assert logged == ["freed", "step"] * 3


def test_the_limit_is_a_key(run):
    assert "2 optimizer steps in a row" in str(run([False] * 3, "policy.max_nonfinite_steps=2")[2])
    assert run([True, *[False] * 8, True], "policy.max_nonfinite_steps=9")[2] is None


def test_a_checkpoint_that_is_due_waits_for_a_finite_step(run):
    policy, _, _ = run([True, False, False, True, True], "checkpoint.every=2")
    assert policy.saved == [(4, 2), (5, 2)]


def test_a_run_that_is_stopped_or_ends_after_such_a_step_deletes_no_older_checkpoint(run):
    policy, rank0, error = run([True, True, False, True], *EVERY_STEP, batches=3)
    assert (error, policy.saved) == (None, [(1, 2), (2, 2), (3, None)])
    assert rank0.said[-1] == ("stopped",)
    policy, rank0, _ = run([True, True, False], *EVERY_STEP)
    assert policy.saved[-1] == (3, None)


def test_a_short_run_without_one_finite_step_fails_too(run):
    policy, _, error = run([False] * 3)
    assert "none of the run's 3 optimizer steps had a finite loss and gradient" in str(error)
    assert policy.saved == []


def test_the_checkpoint_before_the_newest_stays_until_a_step_has_proven_the_newest(
    run, tmp_path, monkeypatch
):
    policy, _, _ = run([True] * 3, "checkpoint.every=1", "checkpoint.keep=1")
    assert policy.proven == [None, 1, 2]
    steps = [tmp_path / f"step_{step:08d}" for step in range(1, 5)]
    for path in steps:
        path.mkdir()
    monkeypatch.setattr(checkpoint_folder, "looks_whole", lambda path: True)
    removed = checkpoint_folder.outdated(steps[3], 1, set(steps), steps[2].name)
    assert removed == [steps[1], steps[0]]
    assert checkpoint_folder.outdated(steps[3], None, set(steps)) == []
    assert checkpoint_folder.outdated(steps[3], 3, set(steps)) == [steps[0]]
    # Checkpoints of an earlier process count once they were read and found intact.
    read = []
    monkeypatch.setattr(checkpoint_folder, "_is_intact", lambda path: not read.append(path))
    checked: set = set()
    for _ in range(2):
        assert checkpoint_folder.outdated(steps[3], 3, checked) == [steps[0]]
    assert read == [steps[2], steps[1]], "each is read once"


@looped("bad", [float("nan"), float("inf"), float("-inf")])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_are_refused_by_what_they_are(bad, dtype, monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    layout = SimpleNamespace(device=torch.device("cpu"), world_group=None)
    spoiled = torch.ones(5, 7, dtype=dtype)
    spoiled[3, 4] = bad
    fine = [torch.ones(3, dtype=dtype), torch.ones(0, dtype=dtype)]
    require_finite({"weights": fine, "adam.exp_avg": []}, 3, layout)
    with pytest.raises(NonFiniteError, match=r"after optimizer step 3 not finite: adam.exp_avg;"):
        require_finite({"weights": fine, "adam.exp_avg": [*fine, spoiled]}, 3, layout)
