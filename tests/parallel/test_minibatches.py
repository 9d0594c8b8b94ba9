"""Several optimizer steps per batch are those of a plain autograd loop with Adam, on every
layout."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from tests.parallel import layouts
from tests.parallel.layout_program import TEMPERATURE
from tests.parallel.minibatch_program import CLIP, EVERYWHERE, LEARNING, OBJECTIVES
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.train_batches import groups_of

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["minibatch_program"]
BETAS, EPS, CLIP_GRAD, STEPS_OF_RUN = (0.9, 0.95), 0.01, 0.5, 10
"""The optimizer of `Rank.policy`."""


def results(layout):
    return layouts.results(layout, "minibatch_program")


class PlainLoop:
    """A float64 model under transformers, Adam by its formula, PPO's clip against the log-probs at
    the batch's start. Keeps each step's loss, gradient and clipped shares."""

    def __init__(self) -> None:
        self.model = layouts.loaded(layouts.material() / "tied")
        self.first = [torch.zeros_like(p) for p in self.model.parameters()]
        self.second = [torch.zeros_like(p) for p in self.model.parameters()]
        self.steps: list[dict] = []

    def train(self, batch, minibatches: int, epochs: int) -> None:
        groups = [[s for s in group if s.valid] for group in groups_of(batch)]
        advantages = {}
        for group in groups:
            rewards = torch.tensor([sample.reward for sample in group], dtype=torch.float64)
            for sample, reward in zip(group, rewards, strict=True):
                advantages[sample.id] = (reward - rewards.mean()) / (rewards.std() + 1e-6)
        with torch.no_grad():
            prox = {s.id: self.logp(s) for group in groups for s in group}
        drawn = np.random.default_rng(batch.version).permutation(len(groups))
        for _ in range(epochs):
            for part in np.array_split(drawn, minibatches):
                self.step([s for number in part for s in groups[number]], prox, advantages)

    def logp(self, sample):
        return layouts.reference_logprobs(self.model, sample)[0]

    def step(self, samples, prox, advantages) -> None:
        losses, clipped, signs = [], [], []
        for sample in samples:
            kept = torch.from_numpy(sample.loss_mask.astype(bool))
            ratio = (self.logp(sample) - prox[sample.id])[kept].exp()
            advantage = advantages[sample.id].expand(len(ratio))
            plain, cut = -advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
            losses.append(torch.maximum(plain, cut))
            clipped.append((cut > plain).detach())
            signs.append(advantage)
        loss, clipped, signs = torch.cat(losses).mean(), torch.cat(clipped), torch.cat(signs)
        self.model.zero_grad()
        loss.backward()
        gradient = [p.grad.clone() for p in self.model.parameters()]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        number = len(self.steps)
        lr = LEARNING["lr"] * max(0.0, 1 - number / STEPS_OF_RUN)
        self.steps.append(
            {
                "loss": float(loss.detach()),
                "gradient": torch.cat([g.flatten() for g in gradient]),
                "clip/positive": float((clipped & (signs > 0)).sum() / (signs > 0).sum()),
                "clip/negative": float((clipped & (signs < 0)).sum() / (signs < 0).sum()),
                "lr": lr,
            }
        )
        scale = min(1.0, CLIP_GRAD / (norm + 1e-6))
        with torch.no_grad():
            for p, g, m, v in zip(
                self.model.parameters(), gradient, self.first, self.second, strict=True
            ):
                g = g * scale
                m.lerp_(g, 1 - BETAS[0])
                v.lerp_(g.square(), 1 - BETAS[1])
                correction = [1 - beta ** (number + 1) for beta in BETAS]
                p -= lr / correction[0] * m / ((v / correction[1]).sqrt() + EPS)


@functools.cache
def by_hand(epochs: int) -> PlainLoop:
    loop = PlainLoop()
    for name in ("a", "b"):
        loop.train(layouts.batch(name), 3, epochs)
    return loop


RUNS = {"ppo": 2, "one_epoch": 1}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_minibatches_and_epochs_are_those_of_a_plain_loop(layout, run):
    found, loop = results(layout)[run], by_hand(RUNS[run])
    assert len(found["steps"]) == len(loop.steps) == 2 * 3 * RUNS[run]
    for step, expected in zip(found["steps"], loop.steps, strict=True):
        assert step["policy/loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert step["policy/grad_norm"] == pytest.approx(
            float(expected["gradient"].norm()), rel=1e-4
        )
        assert step["policy/lr"] == pytest.approx(expected["lr"], rel=1e-9, abs=1e-15)
        for share in ("clip/positive", "clip/negative"):
            assert step[share] == pytest.approx(expected[share], abs=1e-6)
    hand = dict(loop.model.named_parameters())
    for name, weight in found["weights"].items():
        torch.testing.assert_close(
            weight.double(), hand[name].detach(), atol=2e-5, rtol=0.0, msg=lambda t, n=name: n + t
        )


def test_the_loop_by_hand_clips_in_the_second_epoch_what_it_did_not_in_the_first():
    steps = by_hand(2).steps
    first, second = (
        sum(step["clip/positive"] + step["clip/negative"] for step in steps[start : start + 3])
        for start in (0, 3)
    )
    assert steps[0]["clip/positive"] == steps[0]["clip/negative"] == 0.0
    assert second > first > 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gac_compares_consecutive_optimizer_steps_within_a_batch_and_across(layout):
    found, expected = results(layout)["ppo"]["steps"], by_hand(2).steps
    assert "gac/cosine" not in found[0]
    for step, before, now in zip(found[1:], expected, expected[1:], strict=False):
        cosine = torch.nn.functional.cosine_similarity(before["gradient"], now["gradient"], dim=0)
        assert step["gac/cosine"] == pytest.approx(float(cosine), abs=1e-4)


def test_m2po_bounds_the_moment_of_the_minibatch_under_the_steps_own_weights():
    """After a step the log-ratios to the sampling policy are others; a decision made at the batch's
    start would repeat its number in the second epoch."""
    steps = results("single")["m2po"]["steps"]
    moments = [step["objective/second_moment"] for step in steps[:4]]
    for earlier, later in ((0, 2), (1, 3)):
        assert moments[earlier] != pytest.approx(moments[later], rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (layout, run)
        for layout in LAYOUTS
        if layout != "single"
        for run in ((*OBJECTIVES, "controlled") if layout in layouts.FEW else EVERYWHERE)
    ],
)
def test_every_step_is_that_of_one_process(layout, run):
    found, expected = results(layout)[run], results("single")[run]
    # A step's rounding is in the next one's log-probs.
    compare_steps(found["steps"], expected["steps"], rel=1e-4)
    compare_weights(found["weights"], expected["weights"], atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_agree_and_a_resumed_run_continues_bit_for_bit(layout):
    assert results(layout)["ranks_agree"]
    assert results(layout)["resumes"]


def test_a_minibatch_without_a_group_makes_no_step_and_the_schedule_continues():
    steps = results("single")["more_minibatches_than_groups"]["steps"][:7]
    assert [step["policy/skipped"] for step in steps] == [0.0] * 5 + [1.0] * 2
    batch = results("single")["more_minibatches_than_groups"]["batches"][0]
    assert batch["policy/skipped"] == pytest.approx(2 / 7)


def test_the_line_of_a_batch_has_means_sums_and_the_largest_of_its_steps():
    run = results("single")["ppo"]
    steps, batch = run["steps"][:6], run["batches"][0]
    for key in ("policy/loss", "policy/grad_norm", "policy/lr", "ratio/ess_ratio", "clip/negative"):
        assert batch[key] == pytest.approx(np.mean([step[key] for step in steps]))
    assert batch["policy/micro_batches"] == sum(step["policy/micro_batches"] for step in steps)
    assert batch["ratio/logp_diff_max"] == max(step["ratio/logp_diff_max"] for step in steps)
    assert batch.get("ratio/logp_diff_lag0_max") == steps[0].get("ratio/logp_diff_lag0_max")
    assert not any("ratio/logp_diff_lag0_max" in step for step in steps[1:]), "weights have moved"
    assert batch["gac/kept"] == steps[-1]["gac/kept"] == 6


def test_displacement_sees_the_way_gone_within_a_fresh_batch():
    steps = results("single")["controlled"]["steps"]
    assert "displacement/cosine" not in steps[0]
    assert all("displacement/cosine" in step for step in steps[1:])


def test_only_the_first_step_of_a_fresh_batch_is_on_policy_for_the_learning_rate_by_ess():
    steps = results("single")["controlled"]["steps"]
    references = {step["ess_lr/reference_ratio"] for step in steps}
    assert references == {steps[0]["ess_lr/ess_ratio"]}
    assert len({step["ess_lr/ess_ratio"] for step in steps}) == len(steps)


assert TEMPERATURE != 1.0, "the ratios of the loop by hand are at the sampling temperature"
