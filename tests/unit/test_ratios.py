"""Ratios of policies that every method declares are those that it reads."""

import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.losses import LONG_RESPONSE, engine_ratios
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.rollout_rules import length_warnings
from megatron_async_rl.controls.decision import UpdateView, build_controls
from tests.cases import looped
from tests.gradients import Optimizer, aligned, step
from tests.method_settings import ADVANTAGES, CORRECTIONS, LOSSES, every, label
from tests.token_batches import detached, random_tokens
from tests.written_run import write_run


def a_batch():
    batch = random_tokens(seed=7)
    logp = batch.logp.detach() - 2.0
    spread = 1e-3 * torch.arange(len(logp))
    return batch.replace(
        logp=logp.requires_grad_(),
        # Near mu, so that corrections of whole sequences keep some.
        logp_behavior=logp.detach() + spread,
        logp_prox=logp.detach() - 2.0 * spread,
        rewards=-batch.rewards.abs(),  # where TOPR has a weight
        token_rewards=batch.mask * torch.linspace(-1.0, 1.0, len(logp), dtype=torch.float64),
        sum_p_squared=torch.full_like(spread, 0.3, dtype=torch.float64),
        values=torch.zeros_like(spread, dtype=torch.float64),
        advantages=-batch.advantages.abs(),  # where OPSM has a mask
    )


def result(section, settings, batch):
    if section == "advantage":
        return ADVANTAGES[settings.name].function(detached(batch), settings).tokens
    if section == "corrections":
        return CORRECTIONS[settings.name].function(detached(batch), settings)
    method = LOSSES[settings.name]
    if method.decide:
        batch = batch.replace(decided=method.decide(detached(batch), settings))
    return torch.autograd.grad(method.function(batch, settings).loss.sum(), batch.logp)[0]


def depends_on(column, section, settings):
    """True where another value of the column changes what the method makes of the batch."""
    batch = a_batch()
    usual, value = result(section, settings, batch), getattr(batch, column)
    factor = torch.linspace(-1.0, 1.0, len(value), dtype=torch.float64)
    return any(
        not torch.equal(usual, result(section, settings, batch.replace(**{column: moved})))
        for moved in (value + factor, value + 15.0 * factor, value + 15.0, value - 15.0)
    )


@looped(
    ("section", "settings"),
    [
        pytest.param(section, settings, id=f"{section}-{label(settings)}")
        for section in ("advantage", "loss", "corrections")
        for settings in every(section)
    ],
)
def test_a_method_declares_exactly_the_ratios_that_it_reads(section, settings):
    against_behavior = {each for each in settings.ratios if each.endswith("/mu")}
    assert depends_on("logp_behavior", section, settings) == bool(against_behavior)
    if section != "advantage":  # where prox is also read for its own probability
        to_prox = {"prox/mu", "pi/prox"} & settings.ratios
        assert depends_on("logp_prox", section, settings) == bool(to_prox)


class Recorded:
    """Remembers what is read of what stands behind it."""

    def __init__(self, given):
        self.given, self.read = given, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.given, name)


@looped("settings", every("controls"), ids=label)
def test_a_control_declares_exactly_the_ratios_that_it_reads(settings):
    control = build_controls([settings])[settings.name]
    _, gradients = aligned(0.9)
    going = [shard.grad.clone() for shard in gradients.shards]
    optimizer = Optimizer(updates=1, first_moment=going, update=going, last_update_norm=1.0)
    seen = Recorded(step(gradients, optimizer=optimizer, log_weights=[0.1, -0.2]))
    update = Recorded(UpdateView(gradients=gradients, update=going, displacement=going, kl=0.01))
    control.apply(seen)
    control.before_update(update)
    # ESS is of every run's log; a control's part of it is what it reads.
    assert bool({"log_weights", "kl"} & (seen.read | update.read)) == bool(settings.ratios)


@pytest.mark.parametrize(
    ("objective", "proximal", "compares"),
    [
        ({"corrections": [{"name": "opsm"}]}, "recompute", False),
        ({"corrections": [{"name": "opsm"}]}, "snapshot", False),
        ({"corrections": [{"name": "opsm"}]}, "behavior", True),
        ({"corrections": [{"name": "opsm"}]}, "loglinear", True),
        ({"corrections": [{"name": "tis"}]}, "recompute", True),
    ],
)
def test_a_correction_compares_with_the_engine_where_its_ratio_holds_its_log_probs(
    objective, proximal, compares
):
    config = ObjectiveConfig(loss="reinforce", proximal=proximal, minibatches=2, **objective)
    assert bool(engine_ratios(config.corrections[0], proximal)) == compares


RECOMPUTE = "objective.proximal=recompute"
LONG = f"rollout.sampling.max_tokens={LONG_RESPONSE + 1}"


@looped(
    ("overrides", "named"),
    [
        (["objective.corrections=[{name: tis, level: sequence}]", RECOMPUTE], "correction tis"),
        (["objective.corrections=[{name: icepop, level: sequence}]", RECOMPUTE], "icepop"),
        (
            [
                "objective.corrections=[{name: reject, statistic: ratio, level: sequence_product,"
                " high: 2.0}]",
                RECOMPUTE,
            ],
            "correction reject",
        ),
        (["objective.loss=topr"], "objective.loss: topr"),
        (["objective.loss=vespo"], "objective.loss: vespo"),
        (["controls=[ess_lr]"], "controls: ess_lr"),
        (
            ["objective={loss: reinforce, advantage: opob, aggregation: seq-mean-token-mean}"],
            "objective.advantage: opob",
        ),
    ],
)
def test_ratios_multiplied_over_long_responses_are_warned_of(tmp_path, overrides, named):
    file = write_run(tmp_path)
    (told,) = length_warnings(load(file, [LONG, *overrides]))
    assert named in told
    assert "513 rounding alone changes their logarithm by about 0.7 nats" in told
    assert "docs/choosing_a_method.md" in told
    short = f"rollout.sampling.max_tokens={LONG_RESPONSE}"
    assert length_warnings(load(file, [short, *overrides])) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.corrections=[tis]", RECOMPUTE],
        [
            "objective.corrections=[{name: reject, statistic: ratio, level: sequence_geometric,"
            " high: 2.0}]",
            RECOMPUTE,
        ],
        ["objective.loss=gspo"],
        ["objective.loss=vespo", RECOMPUTE],
        [],
    ],
)
def test_ratios_of_tokens_and_their_means_are_not(tmp_path, overrides):
    assert length_warnings(load(write_run(tmp_path), [LONG, *overrides])) == []
