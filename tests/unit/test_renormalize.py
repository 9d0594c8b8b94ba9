"""`renormalize: true`: what corrections reject leaves the denominators, at the level the
aggregation divides at."""

import numpy as np
import pytest
import torch

from megatron_async_rl.config.corrections import RejectCorrection
from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.objectives.batch import SequenceLoss, TokenLoss
from megatron_async_rl.objectives.objective import Denominators, Objective, aggregate, valid_samples
from tests.token_batches import decided, part_of, tokens
from tests.train_batches import columns, ragged_batch

# Three sequences: of 4 tokens one is rejected and one is not trained on; of 2 none; of 3 all.
SEQUENCE = [0, 0, 0, 0, 1, 1, 2, 2, 2]
MASK = [1, 1, 0, 1, 1, 1, 1, 1, 1]
WEIGHTS = [2, 0, 1, 1, 1, 1, 0, 0, 0]
LOSSES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
TOKEN_SUMS = [1.0 * 2 + 8.0, 16.0 + 32.0, 0.0]


def whole():
    return tokens(LOSSES, sequence=SEQUENCE, mask=MASK, weights=WEIGHTS)


def parts(aggregation, renormalize, losses=None):
    batch = whole()
    losses = losses or TokenLoss(batch.logp, torch.zeros(len(LOSSES), dtype=torch.bool))
    denominators = Denominators.of(batch, renormalize=renormalize)
    return aggregate(losses, batch, aggregation, denominators, norm_length=10).tolist()


@pytest.mark.parametrize(
    ("aggregation", "kept", "original"),
    [
        # Tokens of the batch: 4 are kept, 8 are trained.
        ("token-mean", [10 / 4, 48 / 4, 0], [10 / 8, 48 / 8, 0]),
        # Tokens of each sequence, then the sequences that keep any: two of three.
        ("seq-mean-token-mean", [10 / 2 / 2, 48 / 2 / 2, 0], [10 / 3 / 3, 48 / 2 / 3, 0]),
        # The sum over a sequence divides by nothing, nor does a constant change.
        ("seq-mean-token-sum", [10 / 2, 48 / 2, 0], [10 / 3, 48 / 3, 0]),
        ("seq-mean-token-sum-norm", [10 / 2 / 10, 48 / 2 / 10, 0], [10 / 3 / 10, 48 / 3 / 10, 0]),
    ],
)
def test_each_aggregation_divides_by_what_is_kept(aggregation, kept, original):
    assert parts(aggregation, True) == pytest.approx(kept)
    assert parts(aggregation, False) == pytest.approx(original)


def test_a_loss_per_sequence_weighs_by_the_mean_over_what_it_keeps():
    losses = SequenceLoss(
        torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64),
        torch.zeros(len(LOSSES), dtype=torch.bool),
    )
    assert parts("seq-mean", True, losses) == pytest.approx([10 * 1.5 / 2, 20 / 2, 0])
    assert parts("seq-mean", False, losses) == pytest.approx([10 * 3 / 3 / 3, 20 / 3, 0])


def objective(aggregation, **more):
    return Objective(
        ObjectiveConfig(
            advantage="grpo",
            loss="reinforce",
            proximal="recompute",
            corrections=(RejectCorrection(statistic="k2", level="token", high=0.02),),
            renormalize=True,
            aggregation=aggregation,
            norm_length=7 if aggregation == "seq-mean-token-sum-norm" else None,
            **more,
        )
    )


AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


def precomputed(batch, names, seed=0):
    behavior = valid_samples(batch).behavior_logprobs
    noise = 0.25 * np.random.default_rng(seed).normal(size=len(behavior))
    return {name: torch.from_numpy(behavior + noise).double() for name in names}


def loss_and_gradient(objective, batch, cut):
    """The batch's loss, and its gradient with respect to each sample's log-probs, in micro-batches
    of `cut` samples."""
    given = precomputed(batch, objective.needs)
    targets = decided(objective, batch, given)
    current, total = given["logp"].clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for first in range(0, len(targets.samples), cut):
        rows = list(range(first, min(first + cut, len(targets.samples))))
        part = part_of(targets, rows)
        logp = current[targets.samples.starts[rows[0]] : targets.samples.starts[rows[-1] + 1]]
        result = objective.loss(part.replace(logp=logp), targets.denominators, corrected=True)
        total = total + result.parts.sum()
    total.backward()
    return float(total.detach()), current.grad


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_cut_into_micro_batches_changes_the_loss_or_its_gradient(aggregation):
    batch, chosen = columns(ragged_batch()), objective(aggregation)
    whole_loss, whole_gradient = loss_and_gradient(chosen, batch, 1000)
    assert (whole_gradient == 0).any(), "nothing was rejected"
    for cut in (1, 2, 5):
        value, gradient = loss_and_gradient(chosen, batch, cut)
        assert value == pytest.approx(whole_loss, rel=1e-12)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_penalty_which_nothing_rejects_keeps_its_denominators(aggregation):
    """Its mean is over all trained tokens, also over those that the loss does without."""
    batch = columns(ragged_batch())
    more = {"kl": KlConfig(coef=1.0, estimator="k2"), "reference": ReferenceConfig()}
    terms = []
    for chosen in (
        objective(aggregation, **more),
        Objective(objective(aggregation, **more).config.model_copy(update={"renormalize": False})),
    ):
        names = chosen.needs | {"logp", "logp_ref"}
        given = precomputed(batch, names)
        given["logp_ref"] = given["logp_ref"] - 0.5
        targets = decided(chosen, batch, given)
        rows = range(len(targets.samples))
        part = part_of(targets, rows)
        part = part.replace(logp=given["logp"].requires_grad_())
        loss = chosen.loss(part, targets.denominators, corrected=targets.corrected)
        assert (loss.rejected).any()
        terms.append(loss.terms["kl"])
    torch.testing.assert_close(terms[0], terms[1], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("loss", ["m2po", "bapo"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_rejected_tokens_have_no_influence_on_thresholds(loss, renormalize):
    config = ObjectiveConfig.model_validate(
        {
            "loss": {"name": loss, "mode": "cap", "candidates": "all"} if loss == "m2po" else loss,
            "advantage": "grpo",
            "proximal": "recompute",
            "corrections": [{"name": "reject", "statistic": "k2", "level": "token", "high": 2.0}],
            "renormalize": renormalize,
        }
    )
    batch, chosen = columns(ragged_batch()), Objective(config)
    given = precomputed(batch, chosen.needs)
    before = decided(chosen, batch, given)
    # The mean of the group's rewards, and so the advantage, does not depend on log-probs.
    outlier = {name: values.clone() for name, values in given.items()}
    for values in outlier.values():
        values[0] += 5.0
    after = decided(chosen, batch, outlier)
    assert after.whole.mask[0]
    assert after.whole.kept()[0] == 0
    without = {name: values.clone() for name, values in given.items()}
    for values in without.values():
        values[0] += 10.0
    assert decided(chosen, batch, without).whole.decided.scalars == after.whole.decided.scalars
    assert after.whole.decided.scalars != before.whole.decided.scalars
