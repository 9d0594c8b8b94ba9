"""One optimizer step is the same step on every parallel layout, and is the step that transformers'
autograd would take."""

import numpy as np
import pytest
import torch

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.objective import Objective
from tests.parallel import layouts
from tests.token_batches import decided
from tests.train_batches import columns, samples_in

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["layout_program"]
OTHERS = [name for name in LAYOUTS if name != "single"]
PER_LAYOUT = (
    "time/",
    "policy/computed_tokens",
    "policy/micro_batches",
    "policy/padding_share",
    "policy/shared_share",
)


def compare_steps(found, expected, rel=1e-6):
    assert len(found) == len(expected)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        mine, theirs = (
            {k: v for k, v in s.items() if not k.startswith(PER_LAYOUT)} for s in (mine, theirs)
        )
        assert mine.keys() == theirs.keys()
        for key in theirs:
            # The effective sample size has exponentials of sums over sequences; the others are
            # means of terms of order 1 that cancel, whose rounding is relative to the terms.
            allowed = 1e-5 if key.startswith("ratio/ess") else rel
            # The largest difference is one token's: of float32 log-probs, whose own last digit is
            # 1e-6 from -8 on.
            within = 4e-6 if key.endswith("_max") else 5e-7
            assert mine[key] == pytest.approx(theirs[key], rel=allowed, abs=within), (step, key)


def compare_weights(found, expected, atol=2e-6):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name],
            expected[name],
            atol=atol,
            rtol=0.0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("layout", OTHERS)
def test_loss_gradient_norm_cosine_and_weights_are_those_of_one_rank(layout, model):
    found, expected = layouts.results(layout)[model], layouts.results("single")[model]
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["weights"], expected["weights"])
    assert expected["steps"][1]["gac/regime"] == 1, (
        "the steps were meant to exercise the projection"
    )


@pytest.mark.parametrize("layout", OTHERS)
def test_sequence_aggregation_against_the_own_start_weights_is_layout_invariant(layout):
    found, expected = layouts.results(layout)["recompute"], layouts.results("single")["recompute"]
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_layout_receive_the_same_numbers(layout):
    assert layouts.results(layout)["ranks_agree"]


@pytest.mark.parametrize("variant", ["one_by_one", "smaller", "permuted"])
def test_token_budget_and_sample_order_do_not_matter(variant):
    found, expected = layouts.results("single")[variant], layouts.results("single")["tied"]
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["weights"], expected["weights"])


def test_the_budgets_compared_were_really_different():
    single = layouts.results("single")
    counts = [
        single[name]["steps"][0]["policy/micro_batches"]
        for name in ("tied", "smaller", "one_by_one")
    ]
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_transformers_log_probs_at_the_sampling_temperature(layout, model):
    reference = layouts.reference_model(model)
    samples = list(samples_in(layouts.batch("a")))
    scores = layouts.results(layout)[model]["scores"]
    assert len(scores) == len(samples)
    for sample, score in zip(samples, scores, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(
                score, layouts.reference_logprobs(reference, sample)[0].numpy(), atol=1e-5
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_go_to_the_data_parallel_rank_that_trains_them_alone(layout):
    by_rank = layouts.results(layout)["tokens_of"]
    of_each = dict(by_rank)
    assert all(own == of_each[data_rank] for data_rank, own in by_rank)
    trained = sorted(sample.id for sample in samples_in(layouts.batch("a")) if sample.valid)
    assert sorted(name for own in of_each.values() for name in own) == trained
    assert all(own for own in of_each.values())


def first_step_by_hand():
    """Loss, gradient norm and entropy of the whole objective in float64: group advantages, PPO
    clip, token mean, failed reward left out."""
    model = layouts.reference_model("tied")
    targets = decided(Objective(ObjectiveConfig()), columns(layouts.batch("a")), {})
    samples = [sample for sample in samples_in(layouts.batch("a")) if sample.valid]
    advantages = torch.split(targets.whole.advantages, targets.samples.lengths.tolist())
    total, entropies = torch.zeros((), dtype=torch.float64), []
    for sample, per_token in zip(samples, advantages, strict=True):
        kept = torch.from_numpy(sample.loss_mask.astype(bool))
        advantage = per_token[kept]
        logp, entropy = layouts.reference_logprobs(model, sample)
        ratio = (logp - torch.from_numpy(sample.behavior_logprobs).double())[kept].exp()
        total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum()
        entropies.append(entropy[kept].detach())
    loss = total / sum(int(sample.loss_mask.sum()) for sample in samples)
    loss.backward()
    norm = float(sum(p.grad.square().sum() for p in model.parameters()) ** 0.5)
    return float(loss), norm, float(torch.cat(entropies).mean())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_step_has_the_loss_and_gradient_of_a_plain_autograd_loop(layout):
    loss, norm, entropy = first_step_by_hand()
    first = layouts.results(layout)["tied"]["steps"][0]
    assert first["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert first["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["policy/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert norm > 0.5, "clipping at 0.5 was meant to act"


def test_clipping_scales_to_the_limit_and_null_does_not_clip():
    unclipped = layouts.results("single")["unclipped"]
    assert unclipped["gradient"] == pytest.approx(
        unclipped["steps"][0]["policy/grad_norm"], rel=1e-6
    )
    assert layouts.results("single")["tied"]["norms"]["megatron"] <= 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_decay_shrinks_matrices_and_leaves_norms_alone(layout):
    """Equal rewards: the gradient is exactly zero, so what moves is the decay, 1 - lr x
    weight_decay = 0.999."""
    result = layouts.results(layout)["decay"]
    assert result["steps"][0]["policy/grad_norm"] == 0.0
    for name, before in result["before"].items():
        torch.testing.assert_close(
            result["weights"][name],
            before * 0.999 if before.dim() > 1 else before,
            atol=1e-7,
            rtol=1e-6,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_whose_rewards_all_failed_changes_nothing(layout):
    result = layouts.results(layout)["empty"]
    assert result["steps"][0]["policy/skipped"] == 1
    compare_weights(result["weights"], result["before"], atol=0.0)


def test_given_responses_are_trained_on_by_weighted_log_likelihood():
    model = layouts.reference_model("tied")
    total, tokens = 0.0, 0
    for sample in samples_in(layouts.batch("given")):
        with torch.no_grad():
            kept = sample.loss_mask.astype(bool)
            total -= sample.weight * float(
                layouts.reference_logprobs(model, sample)[0].numpy()[kept].sum()
            )
        tokens += int(kept.sum())
    (step,) = layouts.results("single")["given"]["steps"]
    assert step["policy/loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert not [key for key in step if key.startswith(("ratio/", "clip/"))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_given_responses_is_measured_over_all_tokens_and_nothing_moves(layout):
    """The loss equals that of a supervised step on all of them. Other tests compare the
    following training with one rank, and the resume test compares it bit for bit."""
    loss, tokens = layouts.results(layout)["tied"]["held_out"]
    (step,) = layouts.results("single")["given"]["steps"]
    assert loss == pytest.approx(step["policy/loss"], rel=1e-6)
    assert tokens == sum(int(s.loss_mask.sum()) for s in samples_in(layouts.batch("given")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_policy_continues_as_if_it_had_not_stopped(layout):
    """Weights, Adam's moments, GAC's reference and the schedule's clock: to the bit."""
    through, resumed = layouts.results(layout)["uninterrupted"], layouts.results(layout)["resumed"]
    assert resumed["state"] == {"version": 2, "note": "kept"}
    compare_weights(resumed["loaded"], through["before"], atol=0.0)
    for mine, theirs in zip(resumed["steps"], through["steps"], strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith("time/")} == {
            k: v for k, v in theirs.items() if not k.startswith("time/")
        }
    assert "gac/cosine" in resumed["steps"][0]
    assert resumed["steps"][0]["policy/lr"] == pytest.approx(0.8e-3)
    compare_weights(resumed["weights"], through["weights"], atol=0.0)
    assert layouts.results(layout)["nothing_saved"]["state"] is None
