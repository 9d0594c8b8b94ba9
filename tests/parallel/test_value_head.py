"""A policy with a value head: one training on every layout, in the checkpoint, and in no exported
model."""

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.train_batches import samples_in

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["value_head_program"]
OTHERS = [name for name in LAYOUTS if name != "single"]


def results(layout):
    return layouts.results(layout, "value_head_program")


def heads(found):
    return [head for head in found["head"] if head]


@pytest.mark.parametrize("run", ["tied", "untied", "started", "detached"])
@pytest.mark.parametrize("layout", OTHERS)
def test_steps_and_weights_of_actor_and_critic_are_those_of_one_rank(layout, run):
    found, expected = results(layout)[run], results("single")[run]
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["weights"], expected["weights"])
    (one,) = heads(expected)
    for head in heads(found):
        for name in ("weight", "bias"):
            torch.testing.assert_close(head[name], one[name], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_is_on_the_last_stage_and_equal_on_all_its_ranks(layout):
    settings = LAYOUTS[layout]
    found = results(layout)["tied"]["head"]
    held = [rank for rank, head in enumerate(found) if head]
    assert (
        held
        == list(range(settings["ranks"]))[-(settings["ranks"] // settings.get("pipeline", 1)) :]
    )
    for rank in held:
        for name in ("weight", "bias"):
            assert found[rank][name].dtype == torch.float32
            assert torch.equal(found[rank][name], found[held[0]][name])
        if "data" not in layout:
            assert torch.equal(found[rank]["weight.gradient"], found[held[0]]["weight.gradient"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_step_has_the_value_loss_of_zero_estimates(layout):
    """V is 0 before the first step, so its loss is half the mean squared return, times the
    factor."""
    first = results(layout)["tied"]["steps"][0]
    targets = [s for s in samples_in(layouts.batch("a")) if s.valid]
    squares = sum(s.reward**2 * int(s.loss_mask.sum()) for s in targets)
    tokens = sum(int(s.loss_mask.sum()) for s in targets)
    assert first["loss/value"] == pytest.approx(0.5 * 0.5 * squares / tokens, rel=1e-5)


def test_on_one_batch_the_head_learns_the_returns():
    steps = results("single")["long"]["steps"]
    losses = [step["loss/value"] for step in steps]
    assert losses[-1] < 0.6 * losses[0]
    assert steps[0]["value/explained_variance"] == 0.0
    assert steps[-1]["value/explained_variance"] > 0.3


def test_a_detached_head_learns_without_touching_the_policys_gradient():
    strong, weak = results("single")["detached"], results("single")["barely"]
    compare_weights(strong["weights"], weak["weights"], atol=0.0)
    (strong,), (weak,) = heads(strong), heads(weak)
    torch.testing.assert_close(
        strong["weight.gradient"], 100 * weak["weight.gradient"], rtol=1e-4, atol=1e-6
    )
    assert weak["weight.gradient"].abs().max() > 0


def test_a_head_that_is_not_detached_shapes_the_hidden_states():
    """The same first step except for detach."""
    attached, detached = (
        results("single")["started"]["steps"][0],
        results("single")["detached"]["steps"][0],
    )
    assert attached["loss/value"] == detached["loss/value"]
    assert attached["policy/grad_norm"] > 1.01 * detached["policy/grad_norm"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_are_sent_what_they_are_sent_without_a_value_head(layout):
    assert results(layout)["tied"]["exported"] == sorted(results("single")["plain"]["weights"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_and_its_optimizer_state_are_in_the_checkpoint(layout, dtype):
    found = results(layout)["resumed"][dtype]
    for saved, loaded in zip(found["saved"], found["loaded"], strict=True):
        for name in ("weight", "bias"):
            if saved:
                assert saved[name].abs().max() > 0
                assert torch.equal(saved[name], loaded[name])
    through, resumed = found["steps"]
    assert {k: v for k, v in through.items() if not k.startswith("time/")} == {
        k: v for k, v in resumed.items() if not k.startswith("time/")
    }
