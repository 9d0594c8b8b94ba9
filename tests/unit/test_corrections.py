import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.corrections import (
    IcepopCorrection,
    OpsmCorrection,
    RejectCorrection,
    TisCorrection,
    TokenVetoCorrection,
)
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.objectives.off_policy import icepop, opsm, reject, tis, token_veto
from tests.cases import looped
from tests.method_settings import CORRECTIONS
from tests.token_batches import decided, detached, tokens
from tests.train_batches import columns, ragged_batch, samples_in

SETTINGS = {
    "tis": TisCorrection,
    "icepop": IcepopCorrection,
    "reject": RejectCorrection,
    "token_veto": TokenVetoCorrection,
    "opsm": OpsmCorrection,
}


def with_log_ratios(log_rho, **more):
    """Return a batch with these values of log(pi_prox / pi_behavior)."""
    return detached(tokens([0.0] * len(log_rho), prox=log_rho, **more))


# Importance weights.


def test_truncation_caps_each_token_or_the_product_of_its_sequence():
    batch = with_log_ratios([math.log(3.0), math.log(0.5), math.log(0.5)], sequence=[0, 0, 1])
    torch.testing.assert_close(
        tis(batch, TisCorrection(cap=2.0)), torch.tensor([2.0, 0.5, 0.5]).double()
    )
    torch.testing.assert_close(
        tis(batch, TisCorrection(level="sequence", cap=2.0)), torch.tensor([1.5, 1.5, 0.5]).double()
    )


def test_a_ratio_out_of_bounds_is_rejected_and_one_on_the_bound_is_not():
    batch = with_log_ratios([math.log(0.25), 0.0, math.log(4.0)], sequence=[0, 1, 2])
    assert icepop(batch, IcepopCorrection(low=0.5, high=1.0)).tolist() == [0.0, 1.0, 0.0]
    assert icepop(batch, IcepopCorrection(level="sequence", low=0.5, high=1.0)).tolist() == [
        0.0,
        1.0,
        0.0,
    ]
    assert icepop(batch, IcepopCorrection(low=1.0, high=2.0)).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncation_rejects_nothing_however_small_the_ratio(level):
    assert torch.all(tis(with_log_ratios([-700.0, -700.0]), TisCorrection(level=level)) > 0.0)


@pytest.mark.parametrize(
    "settings", [TisCorrection(normalize=True), IcepopCorrection(normalize=True)]
)
def test_normalised_token_weights_have_mean_1_over_kept_tokens(settings):
    batch = with_log_ratios([0.5, -0.5, 0.1, 9.0], mask=[1, 1, 1, 0], weights=[1, 1, 0, 1])
    factor = CORRECTIONS[settings.name].function(batch, settings)
    assert float(factor[:2].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_normalised_sequence_weights_have_mean_1_over_sequences_of_any_length(name):
    batch = with_log_ratios(
        [0.1, 0.2, 0.3, -0.4, 7.0], sequence=[0, 0, 0, 1, 2], mask=[1, 1, 1, 1, 0]
    )
    factor = CORRECTIONS[name].function(batch, SETTINGS[name](level="sequence", normalize=True))
    assert float(factor[0] + factor[3]) / 2 == pytest.approx(1.0)


def test_a_batch_without_kept_tokens_is_not_divided_by_0():
    batch = with_log_ratios([0.1, 0.2], weights=[0, 0])
    for name in ("tis", "icepop"):
        for level in ("token", "sequence"):
            factor = CORRECTIONS[name].function(batch, SETTINGS[name](level=level, normalize=True))
            assert torch.isfinite(factor).all()
    far = with_log_ratios([-50.0, -50.0])
    assert icepop(far, IcepopCorrection(normalize=True)).tolist() == [0.0, 0.0]


# Rejection.

STATISTICS = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


@looped("statistic", ["k1", "k2", "k3"])
@looped("level", ["token", "sequence_sum", "sequence_mean"])
def test_the_interval_is_on_the_statistic_of_the_token_or_its_sequence(statistic, level):
    log_rho = [0.6, -0.1, 0.3, -0.2]
    batch = with_log_ratios(log_rho, sequence=[0, 0, 1, 1])
    each = [STATISTICS[statistic](value) for value in log_rho]
    if level != "token":
        sums = [each[0] + each[1], each[2] + each[3]]
        each = [
            value / (2 if level == "sequence_mean" else 1)
            for value in (sums[0], sums[0], sums[1], sums[1])
        ]
    for bound in sorted({value + shift for value in each for shift in (-1e-6, 1e-6)}):
        if bound <= 0 and statistic != "k1":
            continue
        kept = reject(
            batch, RejectCorrection(statistic=statistic, level=level, high=bound)
        ).tolist()
        assert kept == [float(value <= bound) for value in each]
    if statistic == "k1":
        kept = reject(
            batch, RejectCorrection(statistic=statistic, level=level, low=0.0, high=None)
        ).tolist()
        assert kept == [float(value >= 0.0) for value in each]


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("token", [0, 1, 1, 1]),
        ("sequence_product", [1, 1, 0, 0]),
        ("sequence_geometric", [1, 1, 1, 1]),
    ],
)
def test_ratios_multiply_along_a_sequence(level, kept):
    batch = with_log_ratios([math.log(r) for r in (3.0, 0.5, 1.6, 1.6)], sequence=[0, 0, 1, 1])
    assert (
        reject(batch, RejectCorrection(statistic="ratio", level=level, low=0.5, high=2.0)).tolist()
        == kept
    )


def test_the_k_statistics_estimate_the_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    behavior, prox = torch.log_softmax(
        torch.randn(2, 5, generator=generator, dtype=torch.float64), 1
    )
    divergence = float((behavior.exp() * (behavior - prox)).sum())
    for statistic in ("k1", "k3"):
        mean = sum(
            math.exp(mu) * STATISTICS[statistic](float(p - mu))
            for mu, p in zip(behavior.tolist(), prox, strict=True)
        )
        assert mean == pytest.approx(divergence)


@looped(
    ("settings", "reason"),
    [
        (
            {"statistic": "ratio", "level": "sequence_sum", "high": 2.0},
            "ratios multiply along a sequence",
        ),
        (
            {"statistic": "ratio", "level": "sequence_mean", "high": 2.0},
            "sequence_product, sequence_geometric",
        ),
        (
            {"statistic": "k3", "level": "sequence_product", "high": 1.0},
            "k3 adds up along a sequence",
        ),
        ({"statistic": "k1", "level": "token", "high": None}, "nothing would be rejected"),
        ({"statistic": "k2", "level": "token", "low": 0.1, "high": 1.0}, "remove low"),
        ({"statistic": "k3", "level": "token", "high": 0.0}, "high > 0"),
        ({"statistic": "ratio", "level": "token", "low": 0.0, "high": 2.0}, "bound a ratio"),
        ({"statistic": "ratio", "level": "token", "low": 2.0, "high": 1.0}, "must be below high"),
    ],
)
def test_a_rejection_without_a_meaning_is_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        RejectCorrection(**settings)


def test_one_excluded_token_drops_its_sequence_and_no_other():
    batch = with_log_ratios([-9.3, 0.0, -9.1, 0.0], sequence=[0, 0, 1, 1])
    assert token_veto(batch, TokenVetoCorrection(threshold=1e-4)).tolist() == [0, 0, 1, 1]


def test_a_masked_token_vetoes_nothing():
    batch = with_log_ratios([-50.0, 0.0], mask=[0, 1])
    assert token_veto(batch, TokenVetoCorrection()).tolist() == [1, 1]


# Off-policy sequence masking.


def test_only_bad_responses_far_from_the_policy_are_dropped():
    batch = detached(
        tokens(
            [-2.0, -2.0, -2.0, -2.0, -1.0, -1.0],
            prox=[-1.0, -2.5, -1.0, -2.5, -1.0, -1.1],
            sequence=[0, 0, 1, 1, 2, 2],
            advantages=[-1, -1, 1, 1, -1, -1],
        )
    )
    assert opsm(batch, OpsmCorrection(delta=0.2)).tolist() == [0, 0, 1, 1, 1, 1]
    assert opsm(batch, OpsmCorrection(delta=0.3)).tolist() == [1] * 6


def test_sequence_masking_may_compare_with_the_sampling_policy():
    settings = OpsmCorrection(delta=0.01)
    objective = Objective(
        ObjectiveConfig(
            advantage="grpo", proximal="behavior", corrections=(settings,), renormalize=True
        )
    )
    assert objective.needs == {"logp"}
    batch = ragged_batch()
    samples = [s for s in samples_in(batch) if s.valid]
    behavior = torch.from_numpy(np.concatenate([s.behavior_logprobs for s in samples])).double()
    whole = decided(objective, columns(batch), {"logp": behavior - 0.02}).whole
    trained = whole.mask > 0
    assert torch.equal((whole.weights == 0)[trained], (whole.advantages < 0)[trained])
    unmoved = decided(objective, columns(batch), {"logp": behavior}).whole
    assert torch.all(unmoved.weights[trained] == 1)


# Order of corrections, and tokens that are not trained on.


def corrected(batch, *corrections):
    for settings in corrections:
        batch = batch.replace(
            weights=batch.weights * CORRECTIONS[settings.name].function(batch, settings)
        )
    return batch.weights.tolist()


def test_each_correction_gets_the_tokens_that_earlier_ones_kept():
    batch = with_log_ratios([5.0, 0.0, 0.0])
    outlier = RejectCorrection(statistic="k1", level="token", low=-1.0, high=1.0)
    sequence = RejectCorrection(statistic="k2", level="sequence_mean", high=0.5)
    assert corrected(batch, outlier, sequence) == [0.0, 1.0, 1.0]
    assert corrected(batch, sequence, outlier) == [0.0, 0.0, 0.0]


@looped(
    "settings",
    [
        TisCorrection(level="sequence", cap=1e6),
        IcepopCorrection(level="sequence", low=1e-6, high=1e6),
        TokenVetoCorrection(),
        OpsmCorrection(),
        RejectCorrection(statistic="k3", level="sequence_sum", high=1.0),
        RejectCorrection(statistic="ratio", level="sequence_geometric", low=0.5, high=2.0),
    ],
    ids=lambda s: s.name,
)
def test_a_rejected_token_has_no_effect_on_its_sequence(settings):
    function = CORRECTIONS[settings.name].function
    clean = with_log_ratios([0.1, 0.1, 0.1], weights=[0, 1, 1], advantages=[-1, -1, -1])
    for far in (-15.0, 15.0):
        rejected = with_log_ratios(
            [far, 0.1, 0.1], weights=[0, 1, 1], advantages=[-1, -1, -1]
        ).replace(logp=clean.logp)
        torch.testing.assert_close(function(rejected, settings)[1:], function(clean, settings)[1:])


@looped("dtype", [torch.float32, torch.float64])
@looped("mask", [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
@looped(
    "settings",
    [
        *(
            kind(level=level, normalize=n)
            for kind in (TisCorrection, IcepopCorrection)
            for level in ("token", "sequence")
            for n in (0, 1)
        ),
        TokenVetoCorrection(),
        OpsmCorrection(),
        *(
            RejectCorrection(statistic=k, level=v, high=1.0)
            for k in ("k1", "k2", "k3")
            for v in ("token", "sequence_sum")
        ),
        *(
            RejectCorrection(statistic="ratio", level=v, high=1.0)
            for v in ("token", "sequence_product", "sequence_geometric")
        ),
    ],
    ids=lambda s: s.name if hasattr(s, "name") else None,
)
def test_log_ratios_of_700_stay_finite(settings, mask, dtype):
    batch = tokens(
        [0.0] * 4, prox=[700.0, -700.0, 700.0, 700.0], mask=mask, sequence=[0, 0, 1, 1], dtype=dtype
    )
    factor = CORRECTIONS[settings.name].function(detached(batch), settings)
    assert torch.isfinite(factor).all()
    assert factor.dtype == dtype
    assert torch.all(factor >= 0)
