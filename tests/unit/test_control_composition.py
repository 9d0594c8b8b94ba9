"""Refused combinations of gradient controls; the error names both controls and the fix."""

import pytest
from pydantic import ValidationError

from megatron_async_rl.config.rules import validated
from tests.cases import looped
from tests.written_run import config_tree

ESS = {"name": "ess_lr"}
LR = {"name": "matched_lr", "target_update_norm": 0.1}
BETA = {"name": "beta1", "beta1": 0.5}
ALIGNED = {"name": "momentum_by_alignment"}


def build(*controls, **changes):
    return validated({**config_tree(), "controls": list(controls), **changes})


@looped(
    ("controls", "reason"),
    [
        (("gac", "gac"), "each at most once"),
        (("gac", "matched_norm"), "gac and matched_norm both act on the cosine"),
        (("gac", LR), "matched_lr is the null baseline of gac"),
        ((BETA, ALIGNED), "beta1 and momentum_by_alignment both set beta1"),
        ((ESS, LR), "ess_lr and matched_lr both scale the learning rate"),
        (({"name": "beta1", "beta1": 0.9},), "have no effect"),
        (
            ({"name": "momentum_by_alignment", "beta1_min": 0.9},),
            "lowers beta1 from policy.optimizer.betas",
        ),
        (({"name": "momentum_by_alignment", "beta1_min": 0.5, "beta1_max": 0.4},), "beta1_max"),
        (({"name": "momentum_by_alignment", "c_low": 0.5, "c_high": 0.4},), "c_high"),
        (({"name": "gac", "c_low": 0.5, "c_high": 0.4},), "c_high"),
        (
            ({"name": "gac", "calibrate": {"steps": 10_000}},),
            "would calibrate over the first 10001 optimizer steps",
        ),
    ],
)
def test_controls_that_do_not_compose_are_refused_with_the_reason(controls, reason):
    with pytest.raises(ValidationError, match=reason):
        build(*controls)


@pytest.mark.parametrize(
    "controls",
    [("gac", ESS), ("gac", BETA), ("gac", ESS, ALIGNED), ("matched_norm", ESS), (LR, BETA)],
)
def test_the_others_compose(controls):
    assert len(build(*controls).controls) == len(controls)


def test_a_supervised_run_has_no_weights_for_the_ess_learning_rate_and_may_have_gac():
    tree = config_tree()
    supervised = {
        "objective": {"loss": "sft", "advantage": "none"},
        "rollout": None,
        "flow": {**tree["flow"], "group_size": 1, "async_ratio": 0},
    }
    assert build("gac", **supervised).supervised
    with pytest.raises(ValidationError, match="ess_lr reads pi / pi_behavior"):
        build(ESS, **supervised)


def test_a_calibrating_control_makes_the_run_begin_with_fresh_steps():
    tree = {"run": {**config_tree()["run"], "steps": 50}}
    assert build("gac", **tree).fresh_steps == 0
    assert build({"name": "gac", "calibrate": {"steps": 7}}, ESS, **tree).fresh_steps == 8
