"""Tokens of a mixture go to the experts that were chosen for them before: in log-probs, gradients
and several optimizer steps, on every layout."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_async_rl.policy.routing_replay import RoutingReplay
from tests.parallel import layouts
from tests.parallel.objective_program import REPLAYS
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.thorough import thorough
from tests.train_batches import samples_in

pytestmark = pytest.mark.parallel

LAYOUTS = [
    name for name in layouts.OFFERED["objective_program"] if name.startswith(("mixture", "expert"))
]
OTHERS = [layout for layout in LAYOUTS if layout != "mixture_single"]


def found(layout, what):
    return layouts.results(layout, "objective_program")["routing"][what]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, ""),
        (np.full((3, 2 * 2), 3, np.uint8), ""),
        (np.full((3, 2 * 2), 4, np.uint8), "has the number 4, and the model has 4"),
        (np.zeros((3, 5), np.uint8), "take 5 bytes a token, and this model's 2 layers need 4"),
    ],
)
def test_choices_that_are_not_of_this_model_are_refused_before_a_batch_is_trained(rows, says):
    config = SimpleNamespace(
        num_moe_experts=4, num_layers=2, moe_router_topk=2, recompute_granularity=None
    )
    replay = RoutingReplay([], config, SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        replay.check(rows)


@pytest.fixture(scope="module")
def expected():
    """transformers in float64 with the same experts: log-probs of the samples, and the gradient of
    the loss."""
    model = layouts.reference_model("mixture")
    gates = [layer.mlp.gate for layer in model.model.layers]
    experts: list[torch.Tensor] = []

    def choose(gate, hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        chosen = experts[gates.index(gate)]
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    scores, loss, trained = [], 0.0, 0
    with mock.patch.object(type(gates[0]), "forward", choose):
        for sample in samples_in(layouts.batch("mixture_routed")):
            # The last token predicts nothing: where it goes does not matter.
            read = layouts.experts_of(sample, len(gates))
            experts[:] = [torch.cat((each, each[-1:])) for each in read]
            logp, _ = layouts.reference_logprobs(model, sample)
            scores.append(logp.detach())
            if sample.valid:
                mask = torch.from_numpy(sample.loss_mask.astype(bool))
                loss -= sample.reward * logp[mask].sum()
                trained += int(mask.sum())
    (loss / trained).backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"scores": scores, "gradient": gradient}


@pytest.mark.parametrize("replay", REPLAYS)
def test_log_probs_and_gradient_are_those_of_the_given_experts(expected, replay):
    given = found("mixture_single", replay)
    for one, other in zip(given["scores"], expected["scores"], strict=True):
        torch.testing.assert_close(torch.from_numpy(one).double(), other, rtol=0, atol=2e-5)
    gates = [name for name in given["gradient"] if name.endswith("gate.weight")]
    assert len(gates) == 2
    for name in (*gates, "model.embed_tokens.weight"):
        other = expected["gradient"][name]
        assert float(other.abs().max()) > 1e-4
        torch.testing.assert_close(
            given["gradient"][name].double(), other, rtol=1e-3, atol=1e-4 * float(other.abs().max())
        )


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("layout", OTHERS)
def test_replayed_steps_are_those_of_one_process(layout, replay):
    given, alone = found(layout, replay), found("mixture_single", "padded")
    for one, other in zip(given["scores"], alone["scores"], strict=True):
        torch.testing.assert_close(
            torch.from_numpy(one), torch.from_numpy(other), rtol=0, atol=2e-5
        )
    compare_weights(given["gradient"], alone["gradient"])
    assert given["rerouted"] == pytest.approx(alone["rerouted"], abs=0.002)
    # Of six pairs of four experts five are others.
    assert given["rerouted"] == pytest.approx(5 / 6, abs=0.1)


@pytest.mark.parametrize("layout", OTHERS)
def test_several_steps_on_the_first_choice_are_those_of_one_process(layout):
    given, alone = (found(each, "proximal") for each in (layout, "mixture_single"))
    compare_steps(given["steps"], alone["steps"], rel=1e-5)
    compare_weights(given["weights"], alone["weights"])


def test_steps_on_the_first_choice_are_those_with_the_same_choice_given():
    """Both replay what the model chose as the batch began."""
    proximal, rollout, none = (
        found("mixture_single", replay) for replay in ("proximal", "rollout", "none")
    )
    assert 0.0 < proximal["steps"][0]["policy/rerouted"] < 1.0
    for name, tensor in proximal["weights"].items():
        assert torch.equal(rollout["weights"][name], tensor), name
    assert rollout["steps"][0]["policy/rerouted"] == proximal["steps"][0]["policy/rerouted"]
    assert any(not torch.equal(none["weights"][n], t) for n, t in proximal["weights"].items())


def test_a_step_on_the_routers_own_choice_is_the_step_without_replay():
    given, own = (found("mixture_single", f"one_step_{replay}") for replay in ("rollout", "none"))
    assert given["steps"][0]["policy/rerouted"] == 0.0
    for name, tensor in own["weights"].items():
        assert torch.equal(given["weights"][name], tensor), name


@pytest.mark.parametrize(
    "layout",
    [
        "mixture_single",
        pytest.param("expert_tensor", marks=thorough),
        "expert_tensor_pipeline",
    ],
)
def test_padding_counts_in_no_loss_on_the_use_of_experts(layout):
    """Packed rows have none but what fills the row up; without these losses the gradient is
    another."""
    padded, packed = (found(layout, "counted")[kind] for kind in ("padded", "packed"))
    compare_weights(padded, packed)
    gate = "model.layers.0.mlp.gate.weight"
    plain = layouts.results("mixture_single", "objective_program")["gradients"]["mixture"]["whole"]
    assert float((padded[gate] - plain[gate]).abs().max()) > 1e-3
