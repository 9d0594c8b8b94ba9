"""The measured minimum-variance baseline: against per-sequence autograd gradients of transformers,
and on every layout."""

import functools

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.rules import validated
from megatron_async_rl.policy.batch_shares import assign_owners
from megatron_async_rl.policy.opob import own_groups
from tests.parallel import layouts
from tests.parallel.opob_program import CAP, ENTROPY_BONUS, many, one_group
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.thorough import thorough
from tests.train_batches import groups_of
from tests.written_run import config_tree

pytestmark = pytest.mark.parallel

LAYOUTS = [
    name
    for name, parallel in layouts.OFFERED["opob_program"].items()
    if "virtual_pipeline" not in parallel
]
OTHERS = [name for name in LAYOUTS if name != "single"]
RUNS = [
    f"{name}-{model}"
    for name in ("plain", "weighed", "with_entropy", "normalized")
    for model in ("tied", "untied")
]
ON_LAYOUTS = [run for run in RUNS if run.endswith("-tied") or run == "plain-untied"]
CORRELATION = 0.9
"""Correlation of the cheap proxy with the measured norms on the tests' model."""


def results(layout):
    return layouts.results(layout, "opob_program")


def valid(batch):
    return [
        (number, sample)
        for number, group in enumerate(groups_of(batch))
        for sample in group
        if sample.valid
    ]


@functools.cache
def by_hand(run):
    """(advantages, norms, baselines, gradient by name) in float64: one autograd gradient per
    sequence, then the formula."""
    name, model_name = run.split("-")
    model, samples = layouts.reference_model(model_name), valid(layouts.batch("a"))
    names, parameters = zip(*model.named_parameters(), strict=True)
    tokens = sum(int(sample.loss_mask.sum()) for _, sample in samples)
    scores, extra = [], [torch.zeros_like(p) for p in parameters]
    for _, sample in samples:
        kept = torch.from_numpy(sample.loss_mask.astype(bool))
        logp, entropy = (values[kept] for values in layouts.reference_logprobs(model, sample))
        behavior = torch.from_numpy(sample.behavior_logprobs).double()[kept]
        weight = (logp - behavior).sum().exp().clamp(max=CAP).detach() if name == "weighed" else 1.0
        divisor = len(logp) * len(samples) if name in ("plain", "weighed") else tokens
        scores.append(
            torch.autograd.grad(-weight * logp.sum() / divisor, parameters, retain_graph=True)
        )
        if name == "with_entropy":
            extra = [
                e + g
                for e, g in zip(
                    extra,
                    torch.autograd.grad(-ENTROPY_BONUS * entropy.sum() / tokens, parameters),
                    strict=True,
                )
            ]
    squares = np.array([sum(float(g.square().sum()) for g in score) for score in scores])
    rewards, groups = (
        np.array([s.reward for _, s in samples]),
        np.array([number for number, _ in samples]),
    )
    baselines, deviations = np.zeros(len(samples)), np.ones(len(samples))
    for number in set(groups):
        own = groups == number
        baselines[own] = (squares[own] * rewards[own]).sum() / squares[own].sum()
        deviations[own] = rewards[own].std(ddof=1) + 1e-6 if name == "normalized" else 1.0
    advantages = (rewards - baselines) / deviations
    gradient = [
        e + sum(a * score[k] for a, score in zip(advantages, scores, strict=True))
        for k, e in enumerate(extra)
    ]
    return advantages, np.sqrt(squares), baselines, dict(zip(names, gradient, strict=True))


@pytest.mark.parametrize("run", RUNS)
def test_the_gradient_is_that_of_the_formula_over_per_sequence_autograd_gradients(run):
    advantages, norms, baselines, expected = by_hand(run)
    found = results("single")[run]
    np.testing.assert_allclose(found["measured"]["norms"], norms, rtol=2e-6)
    np.testing.assert_allclose(found["measured"]["baselines"], baselines, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(found["measured"]["advantages"], advantages, rtol=5e-6, atol=2e-6)
    assert found["gradient"].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found["gradient"][name].double(),
            gradient,
            atol=1e-6,
            rtol=1e-5,
            msg=lambda t, n=name: f"{n}: {t}",
        )
    norm = float(sum(g.square().sum() for g in expected.values()) ** 0.5)
    assert found["step"]["policy/grad_norm"] == pytest.approx(norm, rel=2e-6)
    assert found["step"]["opob/baseline"] == pytest.approx(baselines.mean(), rel=1e-5)
    assert found["step"]["opob/shift"] > 0.01, (
        "a weighted baseline was meant to differ from the mean"
    )


@pytest.mark.parametrize("run", [*ON_LAYOUTS, "one_group"])
@pytest.mark.parametrize("layout", OTHERS)
def test_norms_baselines_gradient_and_step_are_those_of_one_rank(layout, run):
    found, expected = results(layout)[run], results("single")[run]
    for name in ("norms", "baselines", "advantages"):
        # Score norms of weighed sequences hold exp of a sum of float32 log-ratios; the baselines,
        # means of rewards, forgive it.
        within = (
            (1e-6 * np.abs(expected["measured"][name]).max(), 0.0)
            if name == "baselines"
            else (1e-6, 3e-6)
        )
        np.testing.assert_allclose(
            found["measured"][name], expected["measured"][name], atol=within[0], rtol=within[1]
        )
    assert found["ranks_agree"]
    compare_steps([found["step"]], [expected["step"]])
    compare_weights(found["weights"], expected["weights"])
    if (
        layout != "data_distributed_optimizer"
    ):  # there each rank holds its slice of the gradient alone
        compare_weights(found["gradient"], expected["gradient"], atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_rewards_give_a_gradient_of_exactly_zero(layout):
    found = results(layout)["equal"]
    assert found["measured"]["advantages"].abs().max() == 0.0
    assert found["measured"]["norms"].min() > 0.0
    assert found["step"]["policy/grad_norm"] == 0.0


@pytest.mark.parametrize("run", RUNS)
def test_loss_and_clip_metrics_are_those_of_the_advantages(run):
    """Recorded at advantage 1, and weighed afterwards."""
    advantages, *_ = by_hand(run)
    name, model_name = run.split("-")
    model, samples = layouts.reference_model(model_name), valid(layouts.batch("a"))
    tokens = sum(int(sample.loss_mask.sum()) for _, sample in samples)
    expected = 0.0
    for advantage, (_, sample) in zip(advantages, samples, strict=True):
        kept = torch.from_numpy(sample.loss_mask.astype(bool))
        with torch.no_grad():
            logp, entropy = (values[kept] for values in layouts.reference_logprobs(model, sample))
        behavior = torch.from_numpy(sample.behavior_logprobs).double()[kept]
        weight = float((logp - behavior).sum().exp().clamp(max=CAP)) if name == "weighed" else 1.0
        divisor = len(logp) * len(samples) if name in ("plain", "weighed") else tokens
        expected += -advantage * weight * float(logp.sum()) / divisor
        expected -= ENTROPY_BONUS * float(entropy.sum()) / tokens if name == "with_entropy" else 0.0
    step = results("single")[run]["step"]
    assert step["policy/loss"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert ("loss/entropy" in step) == (name == "with_entropy")


def test_no_other_baseline_gives_the_groups_a_smaller_second_moment():
    """sum_i (R_i - b)^2 |g_i|^2 is what the measured b makes least, below the mean's and that of no
    baseline."""
    found = results("single")["many"]["measured"]
    samples = valid(many(layouts.VOCABULARY))
    rewards, groups = (
        torch.tensor([s.reward for _, s in samples], dtype=torch.float64),
        torch.tensor([n for n, _ in samples]),
    )
    squares = found["norms"].square()

    def moment(baseline):
        return float(((rewards - baseline).square() * squares).sum())

    means = torch.stack([rewards[groups == n].mean() for n in groups])
    assert moment(found["baselines"]) < moment(means) < moment(torch.zeros_like(rewards)) * 1.5
    for nudge in (-0.01, 0.01):
        assert moment(found["baselines"]) < moment(found["baselines"] + nudge)


def test_the_cheap_proxy_of_the_score_norm_correlates_with_the_measured_one():
    """sqrt((1/L^2) sum_t (1 - 2 p + sum p^2)) against |g_i|, over 64 sequences of the tests'
    model."""
    model, proxies = layouts.reference_model("tied"), []
    for _, sample in valid(many(layouts.VOCABULARY)):
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids.tolist()]])
        kept = torch.from_numpy(sample.loss_mask.astype(bool))
        with torch.no_grad():
            logits = model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1] / 0.7
        p = logits.softmax(-1)
        energy = (
            1
            - 2 * p.gather(1, ids[0, len(sample.prompt.token_ids) :, None])[:, 0]
            + p.square().sum(-1)
        )[kept]
        proxies.append(float(energy.sum().sqrt() / len(energy)))
    norms = results("single")["many"]["measured"]["norms"].numpy()
    correlation = float(np.corrcoef(np.array(proxies), norms)[0, 1])
    print(f"correlation of the cheap proxy with the measured score norm: {correlation:.3f}")
    assert correlation > CORRELATION


@thorough
def test_virtual_pipeline_stages_are_refused_and_the_reason_named():
    found = results("virtual_pipeline")["refusal"]
    assert found.startswith("OpobUnsupported")
    assert "one sequence at a time" in found


def test_groups_stay_whole_and_ranks_get_about_the_same_tokens():
    rng = np.random.default_rng(0)
    lengths, group = rng.integers(1, 100, 60), np.arange(60) // 4
    owner = assign_owners(lengths, 4, group)
    plan = [own_groups(owner, group, rank) for rank in range(4)]
    assert sorted(index for rank in plan for members in rank for index in members) == list(
        range(60)
    )
    for rank in plan:
        for members in rank:
            assert {group[index] for index in members} == {group[members[0]]}
            assert len(members) == 4
    loads = [sum(lengths[index] for members in rank for index in members) for rank in plan]
    heaviest = max(sum(lengths[4 * g : 4 * g + 4]) for g in range(15))
    assert max(loads) - min(loads) <= heaviest


def test_more_ranks_than_groups_leaves_some_without():
    batch = one_group(layouts.batch("a"))
    lengths = np.array([sample.total_length for _, sample in valid(batch)])
    group = np.zeros(len(lengths), dtype=np.int64)
    owner = assign_owners(lengths, 3, group)
    assert [len(own_groups(owner, group, rank)) for rank in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("key", "parallel"),
    [
        ("virtual_pipeline", {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2}),
        ("expert", {"ranks": 2, "expert": 2}),
    ],
)
def test_layouts_on_which_a_sequences_gradient_is_not_measured_are_refused_before_a_run_starts(
    key, parallel
):
    objective = {
        "advantage": {"name": "opob", "mode": "exact"},
        "loss": "reinforce",
        "aggregation": "seq-mean-token-mean",
    }
    config = {**config_tree(), "policy": {"parallel": parallel}, "objective": objective}
    with pytest.raises(ValidationError, match=rf"mode: exact.*policy\.parallel\.{key} > 1"):
        validated(config)
    objective["advantage"]["mode"] = "cheap"
    validated(config)
