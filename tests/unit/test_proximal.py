import pytest
import torch

from megatron_async_rl.objectives.off_policy import columns_for_proximal, proximal_logp
from tests.token_batches import detached, tokens

EXACT = torch.float64


def batch():
    return detached(
        tokens([-1.0, -2.0, -3.0], behavior=[-1.5, -1.0, -3.5], lag=torch.tensor([0, 1, 4]))
    )


def test_bypassed_the_proximal_policy_is_the_one_that_sampled():
    assert torch.equal(proximal_logp(batch(), "behavior", None), batch().logp_behavior)


def test_recomputed_it_is_the_policy_at_the_start_of_the_step():
    assert torch.equal(proximal_logp(batch(), "recompute", None), batch().logp)


def test_loglinear_lies_between_the_two_by_the_token_s_lag():
    found = proximal_logp(batch(), "loglinear", None)
    torch.testing.assert_close(found, torch.tensor([-1.5, -1.0, -3.5 + 0.75 * 0.5], dtype=EXACT))


@pytest.mark.parametrize("proximal", ["ewma", "snapshot"])
def test_past_weights_are_precomputed_and_kept_by_micro_batches(proximal):
    precomputed = torch.tensor([-1.0, -1.0, -1.0])
    assert torch.equal(proximal_logp(batch(), proximal, precomputed), precomputed.double())
    assert torch.equal(proximal_logp(batch(), proximal, None), batch().logp_prox)
    assert columns_for_proximal(proximal) == {"logp_prox"}


def test_only_what_depends_on_weights_is_precomputed():
    assert columns_for_proximal("behavior") == set()
    assert columns_for_proximal("recompute") == columns_for_proximal("loglinear") == {"logp"}
