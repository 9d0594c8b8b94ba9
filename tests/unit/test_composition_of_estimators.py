"""Combinations of advantages and corrections with other settings. The tests of losses and of
controls cover their rules."""

import pytest
from pydantic import ValidationError

from megatron_async_rl.config.objective import ObjectiveConfig
from tests.cases import looped

OPSM = {"name": "opsm"}
TIS = {"name": "tis"}


def objective(**settings):
    return ObjectiveConfig.model_validate(settings)


@looped(
    ("settings", "reason"),
    [
        ({"advantage": "gae"}, "gae reads the estimates of a value head; add value"),
        (
            {"advantage": "grpo", "value": {}},
            "grpo computes no returns for the value head; set advantage: gae",
        ),
        (
            {"advantage": "otb"},
            "these policies differ with proximal: behavior; set proximal: recompute",
        ),
        ({"advantage": "otb", "proximal": "loglinear"}, "set proximal: recompute"),
        (
            {"advantage": {"name": "opob", "mode": "exact"}, "loss": "ppo_clip"},
            "ppo_clip is not, because the loss clips or weights by the advantage",
        ),
        (
            {
                "advantage": {"name": "opob", "mode": "cheap"},
                "loss": "ppo_clip",
                "aggregation": "seq-mean-token-mean",
            },
            "opob minimises the variance",
        ),
        (
            {
                "advantage": {"name": "opob", "mode": "exact"},
                "loss": "reinforce",
                "corrections": [OPSM],
            },
            r"\['opsm'\] read the sign of the advantage",
        ),
        (
            {"advantage": {"name": "opob", "mode": "cheap"}, "loss": "reinforce"},
            (
                "aggregation: token-mean computes another mean; set aggregation:"
                " seq-mean-token-mean, or mode: exact"
            ),
        ),
        (
            {"corrections": [OPSM, TIS]},
            r"corrections \['tis'\] read pi_prox / pi_behavior, which is 1",
        ),
        (
            {"corrections": [OPSM, TIS], "proximal": "recompute"},
            r"corrections \['opsm'\] read pi / pi_prox, which is 1",
        ),
        (
            {"corrections": ["token_veto"]},
            r"corrections \['token_veto'\] read pi_prox / pi_behavior",
        ),
    ],
)
def test_parts_that_do_not_compose_are_refused_with_the_reason(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        objective(**settings)


@looped(
    "settings",
    [
        {"advantage": "gae", "value": {}},
        {"advantage": "otb", "proximal": "recompute"},
        {"advantage": {"name": "opob", "mode": "exact"}, "loss": "reinforce"},
        {
            "advantage": {"name": "opob", "mode": "cheap"},
            "loss": "reinforce",
            "aggregation": "seq-mean-token-mean",
        },
        {
            "advantage": {"name": "opob", "mode": "cheap"},
            "loss": "reinforce",
            "aggregation": "seq-mean-token-mean",
            "corrections": [OPSM],
        },
        {"corrections": [OPSM]},
        {"corrections": [OPSM, TIS], "proximal": "loglinear"},
        {
            "corrections": ["token_veto", {"name": "reject", "high": 0.1}, TIS],
            "proximal": "recompute",
        },
        {
            "advantage": {"name": "partial_return", "horizon": "greedy"},
            "kl": {"coef": 0.1, "where": "reward"},
        },
        {"advantage": "reinforce_pp", "overlong": {"max_length": 10, "buffer": 2}},
    ],
)
def test_what_goes_together_is_accepted(settings):
    objective(**settings)
