"""Operations of a model for a sample.

A token needs 2 operations (multiply, add) for each weight that it uses (of experts, those that it
visits) and 4 for each number of a query and each token to which it attends. The backward pass costs
twice the forward pass. Only the tokens of a response have logits in training, and only sampled
tokens have them in an engine.
"""

from __future__ import annotations

from megatron_async_rl.config.advantages import OpobAdvantage, OtbAdvantage
from megatron_async_rl.config.corrections import IcepopCorrection, OpsmCorrection, TisCorrection
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layer_memory import fp8_layers
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.sharing import GroupTokens


def token_operations(shape: ModelShape, context: float) -> float:
    """Return the operations of sampling one token that attends to `context` tokens."""
    return _layers(shape) + _attention(shape, context) + _logits(shape)


def prompt_operations(shape: ModelShape, prompt: float) -> float:
    """Return the operations of reading a prompt of this number of tokens in an engine."""
    # Under the causal mask a token attends to half of the prompt on average.
    return prompt * _layers(shape) + _attention(shape, prompt**2 / 2)


def training_operations(
    config: Config, shape: ModelShape, group: GroupTokens, *, fp8_speed: float = 1.0
) -> float:
    """Return the operations at bfloat16's speed for one response of a group in a whole batch: the
    training passes, and the forward passes besides. fp8_speed: peak of FP8, relative to bfloat16's.
    """
    policy, objective, fp8 = config.policy, config.objective, config.policy.fp8
    share = 0.0
    if fp8 is not None:
        share = fp8_layers(fp8, shape.layers, stage=0, pipeline=1) / shape.layers
    # Only the layers compute in FP8; attention and the output layer stay in bfloat16.
    layers = group.computed * _layers(shape) * (1 - share + share / fp8_speed)
    attention = _attention(shape, group.pairs)
    head = group.response * _logits(shape)
    forward = layers + attention + head
    # Weights that are not trained have no gradient.
    backward = (1 if policy.lora is not None else 2) * (layers + head) + 2 * attention
    again = {"none": 0.0, "selective": attention, "full": layers + attention}[policy.recompute]
    # Passes for log-probs run once per batch, training passes once per epoch.
    return objective.epochs * (forward + backward + again) + forward_passes(config) * forward


def forward_passes(config: Config) -> float:
    """Return the number of forward passes over the whole batch besides training, which
    objectives/objective.py requests: before training, with the reference, the proximal policy and
    the trained weights; and before each later optimizer step, with its weights, over its part of
    the batch."""
    objective = config.objective
    corrections, advantage = objective.corrections, objective.advantage
    compares = objective.loss.uses_proximal or bool(corrections)
    # These policies have separate weights, so they need a separate pass.
    kept = objective.proximal in ("ewma", "snapshot")
    whole = objective.renormalize or any(
        isinstance(one, TisCorrection | IcepopCorrection) and one.normalize for one in corrections
    )
    decides = objective.loss.decides_by_logp or (
        whole and any(isinstance(one, OpsmCorrection) for one in corrections)
    )
    proximal = whole or isinstance(advantage, OtbAdvantage)
    proximal = proximal or (compares and (kept or objective.steps_per_batch > 1))
    cheap = isinstance(advantage, OpobAdvantage) and advantage.mode == "cheap"
    current = (
        decides
        or (proximal and objective.proximal in ("recompute", "loglinear"))
        or cheap
        or isinstance(advantage, OtbAdvantage)
        or objective.value is not None
        or (objective.kl is not None and objective.kl.where == "reward")
    )
    again = (objective.steps_per_batch - 1) / objective.minibatches if decides else 0.0
    return objective.needs_reference + (proximal and kept) + current + again


def _layers(shape: ModelShape) -> float:
    """Return the operations of one token in the layers' weights."""
    experts = shape.experts_per_token * 3 * shape.hidden * shape.intermediate
    return 2.0 * shape.layers * (shape.layer_sharded + shape.layer_replicated + experts)


def _attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of attention for this number of pairs (query, key)."""
    return 4.0 * shape.layers * shape.heads * shape.head_dim * pairs


def _logits(shape: ModelShape) -> float:
    """Return the operations of one token in the output layer."""
    return 2.0 * shape.vocabulary * shape.hidden
