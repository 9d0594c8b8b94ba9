"""An independent trainer: transformers in float64, one sample at a time, plain loops, and the
formulas of docs/objectives.md. Nothing here is imported from the package.

It is slow and obvious on purpose. tests/parallel/test_differential.py compares its gradients and
weights with the real policy's.

Notation as on that page: per response token, `pi` (with gradient), `prox`, `mu` (what the engine
reported) and `ref` are log-probs, float64, shape [T]; `mask` [T] marks trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

BOUND = 20.0
"""Clamp of log-ratios inside a loss."""
Tensors = dict[str, Tensor]


@dataclass(eq=False)
class Response:
    """One sampled response. `group`: the prompt's position in the batch."""

    id: str
    group: int
    prompt: list[int]
    tokens: list[int]
    mu: Tensor
    mask: Tensor
    versions: list[int]
    reward: float
    advantage: Tensor = field(default_factory=lambda: torch.zeros(0))
    prox: Tensor = field(default_factory=lambda: torch.zeros(0))
    penalty: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[T]: subtracted from the reward of each token; `reward` is reduced by their sum."""
    ref: Tensor = field(default_factory=lambda: torch.zeros(0))
    factor: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def trained(self) -> int:
        return int(self.mask.sum())


class Model:
    """A transformers model with any weights. Names are those of Hugging Face's files."""

    def __init__(self, module: torch.nn.Module, temperature: float) -> None:
        self.module = module.double()
        self.temperature = temperature

    def weights(self) -> Tensors:
        found: Tensors = {}
        for name, parameter in self.module.named_parameters():
            for file_name, tensor in _in_files(name, parameter.detach()):
                found[file_name] = tensor.clone()
        return found

    def log_probs(self, weights: Tensors, one: Response) -> tuple[Tensor, Tensor]:
        """Return ([T] log-probs, [T] entropies) of a response, at the sampling temperature."""
        given = {name: _as_parameter(name, weights) for name, _ in self.module.named_parameters()}
        ids = torch.tensor([[*one.prompt, *one.tokens]])
        logits = torch.func.functional_call(self.module, given, (ids,)).logits[0]
        logits = logits[len(one.prompt) - 1 : -1].double() / self.temperature
        distribution = torch.log_softmax(logits, dim=-1)
        picked = distribution[torch.arange(len(one.tokens)), torch.tensor(one.tokens)]
        return picked, -(distribution.exp() * distribution).sum(-1)


def _in_files(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Return tensors as in files: transformers stacks a layer's experts, files have one matrix per
    expert."""
    if name.endswith("experts.gate_up_proj"):
        stem, half = name.removesuffix("gate_up_proj"), value.shape[1] // 2
        return [
            (f"{stem}{expert}.{kind}_proj.weight", part)
            for expert in range(len(value))
            for kind, part in (("gate", value[expert, :half]), ("up", value[expert, half:]))
        ]
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{expert}.down_proj.weight", one) for expert, one in enumerate(value)]
    return [(name, value)]


def _as_parameter(name: str, weights: Tensors) -> Tensor:
    stem = name.rpartition(".")[0]
    if name.endswith("experts.gate_up_proj"):
        count = sum(
            one.startswith(f"{stem}.") and one.endswith("gate_proj.weight") for one in weights
        )
        return torch.stack(
            [
                torch.cat([weights[f"{stem}.{e}.{kind}_proj.weight"] for kind in ("gate", "up")])
                for e in range(count)
            ]
        )
    if name.endswith("experts.down_proj"):
        count = sum(
            one.startswith(f"{stem}.") and one.endswith("down_proj.weight") for one in weights
        )
        return torch.stack([weights[f"{stem}.{e}.down_proj.weight"] for e in range(count)])
    return weights[name]


class Adapted(Model):
    """A model whose trained weights are adapters: W + alpha / rank B A."""

    def __init__(
        self, module: torch.nn.Module, temperature: float, adapters: Tensors, factor: float
    ) -> None:
        super().__init__(module, temperature)
        self.base = super().weights()
        self.adapters = {name: tensor.double() for name, tensor in adapters.items()}
        self.factor = factor

    def weights(self) -> Tensors:
        return dict(self.adapters)

    def log_probs(self, weights: Tensors, one: Response) -> tuple[Tensor, Tensor]:
        merged = dict(self.base)
        for name in weights:
            if ".lora_A." in name:
                target = name.removeprefix("base_model.model.").replace(".lora_A", "")
                product = weights[name.replace(".lora_A.", ".lora_B.")] @ weights[name]
                merged[target] = self.base[target] + self.factor * product
        return super().log_probs(merged, one)


# ---------------------------------------------------------------------------------------------
# Advantages: once per batch.


def group_advantages(name: str, settings: Mapping[str, Any], batch: Sequence[Response]) -> None:
    """Set `advantage` of every response, [T]."""
    groups: dict[int, list[Response]] = {}
    for one in batch:
        groups.setdefault(one.group, []).append(one)
    for members in groups.values():
        rewards = [one.reward for one in members]
        mean = sum(rewards) / len(rewards)
        alike = max(rewards) == min(rewards)
        for one in members:
            if name in ("none", "reinforce_pp"):
                value = one.reward
            elif len(members) == 1 or alike:
                value = 0.0
            elif name == "grpo":
                variance = sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
                divisor = math.sqrt(variance) + 1e-6 if settings.get("normalize_std", True) else 1.0
                value = (one.reward - mean) / divisor
            elif name == "rloo":
                value = one.reward - (sum(rewards) - one.reward) / (len(rewards) - 1)
            elif name == "opo":
                lengths = [each.trained for each in members]
                value = one.reward - (
                    sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
                )
            elif name == "reinforce_pp_baseline":
                value = one.reward - mean
            else:
                raise NotImplementedError(name)
            one.advantage = value * one.mask
            if name == "reinforce_pp":  # rewards to go, without penalties of earlier tokens
                one.advantage = (value + one.penalty.cumsum(0) - one.penalty) * one.mask
    if name.startswith("reinforce_pp"):
        every = torch.cat([one.advantage[one.mask > 0] for one in batch])
        for one in batch:
            one.advantage = one.mask * (
                (one.advantage - every.mean()) / torch.sqrt(every.var() + 1e-8)
            )


# ---------------------------------------------------------------------------------------------
# Corrections: once per optimizer step, in their order; each gets the tokens that earlier ones kept.


def set_factors(
    corrections: Sequence[Mapping[str, Any]],
    batch: Sequence[Response],
    current: Mapping[str, Tensor],
) -> None:
    """Set `factor` of every response, [T]. `current`: log pi by id."""
    for one in batch:
        one.factor = torch.ones_like(one.mask)
    for each in corrections:
        name, made = each["name"], {}
        seen = {one.id: one.mask * (one.factor != 0) for one in batch}
        for one in batch:
            mask = seen[one.id]
            log = (one.prox - one.mu).clamp(-BOUND, BOUND)
            total = ((one.prox - one.mu) * mask).sum().clamp(-BOUND, BOUND)
            ones = torch.ones_like(one.mask)
            if name in ("tis", "icepop"):
                ratio = log.exp() if each.get("level", "token") == "token" else total.exp() * ones
                if name == "tis":
                    made[one.id] = ratio.clamp(max=each.get("cap", 2.0))
                else:
                    kept = (ratio >= each.get("low", 0.5)) & (ratio <= each.get("high", 5.0))
                    made[one.id] = ratio * kept
            elif name == "reject":
                made[one.id] = _kept(each, log, mask) * ones
            elif name == "token_veto":
                low = (log.exp() < each.get("threshold", 1e-4)) & (mask > 0)
                made[one.id] = 0.0 * ones if low.any() else ones
            elif name == "opsm":
                away = ((one.prox - current[one.id]) * mask).sum() / max(float(mask.sum()), 1)
                bad = (one.advantage < 0) & (away > each.get("delta", 1e-4))
                made[one.id] = torch.where(bad, 0.0, 1.0)
            else:
                raise NotImplementedError(name)
        if each.get("normalize"):
            if each.get("level", "token") == "token":
                kept_so_far = [(made[o.id] * seen[o.id], seen[o.id]) for o in batch]
                mean = sum(w.sum() for w, _ in kept_so_far) / sum(m.sum() for _, m in kept_so_far)
            else:  # all tokens of a sequence have one weight
                whole = [made[o.id][0] for o in batch if seen[o.id].any()]
                mean = sum(whole) / len(whole)
            made = {name_: weight / mean for name_, weight in made.items()}
        for one in batch:
            one.factor = one.factor * made[one.id]


def _kept(each: Mapping[str, Any], log: Tensor, mask: Tensor) -> Tensor:
    statistic, level = each.get("statistic", "k3"), each.get("level", "sequence_mean")
    tokens = {
        "ratio": log.exp(),
        "k1": -log,
        "k2": log.square() / 2,
        "k3": log.exp() - 1 - log,
    }[statistic]
    total, count = (tokens * mask).sum(), mask.sum().clamp(min=1)
    value = {
        "token": tokens,
        "sequence_sum": total,
        "sequence_mean": total / count,
        "sequence_product": (log * mask).sum().clamp(-BOUND, BOUND).exp(),
        "sequence_geometric": ((log * mask).sum() / count).exp(),
    }[level]
    kept = torch.ones_like(value)
    if each.get("low") is not None:
        kept = kept * (value >= each["low"])
    if each.get("high") is not None:
        kept = kept * (value <= each["high"])
    return kept


# ---------------------------------------------------------------------------------------------
# Losses: [T] per token, or a number per sequence.


def decisions(
    loss: Mapping[str, Any], batch: Sequence[Response], current: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Decisions of a loss over the whole batch of an optimizer step. `current`: log pi by id."""
    name = loss["name"]
    if name == "m2po":
        return _second_moment(loss, batch, current)
    if name == "bapo":
        return _searched_bounds(loss, batch, current)
    if name in ("trajectory_balance", "kimi", "oapl"):
        found: dict[str, Any] = {}
        for group in {one.group for one in batch}:
            members = [one for one in batch if one.group == group]
            rewards = [one.reward for one in members]
            if name == "kimi":
                value = sum(rewards) / len(rewards)
            elif name == "oapl":
                beta = loss.get("beta_value", 1.0)
                value = beta * math.log(sum(math.exp(r / beta) for r in rewards) / len(rewards))
            else:
                beta = loss.get("beta", 0.05)
                value = sum(
                    one.reward / beta - float(((current[one.id] - one.ref) * one.mask).sum())
                    for one in members
                ) / len(members)
            found |= {one.id: value for one in members}
        return found
    return {}


def _second_moment(
    loss: Mapping[str, Any], batch: Sequence[Response], current: Mapping[str, Tensor]
) -> dict[str, Any]:
    bound = loss.get("second_moment", 0.04)
    places = []
    for one in batch:
        log = current[one.id] - one.mu
        for t in range(len(one.tokens)):
            harmful = float(one.advantage[t]) * float(log[t]) > 0
            trained = one.mask[t] and one.factor[t] != 0
            if trained and (loss.get("candidates", "harmful") == "all" or harmful):
                places.append((float(log[t]) ** 2, one.id, t))
    places.sort(reverse=True)
    if loss.get("mode", "mask") == "mask":
        dropped = 0
        while dropped < len(places):
            rest = [moment for moment, _, _ in places[dropped:]]
            if sum(rest) / len(rest) <= bound:
                break
            dropped += 1
        return {"dropped": {(name, t) for _, name, t in places[:dropped]}}
    moments = [moment for moment, _, _ in places]
    if not moments or sum(moments) / len(moments) <= bound:
        return {"level": math.inf}
    low, high = 0.0, max(moments)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(moment, middle) for moment in moments) / len(moments) > bound:
            high = middle
        else:
            low = middle
    return {"level": math.sqrt(low)}


def _searched_bounds(
    loss: Mapping[str, Any], batch: Sequence[Response], current: Mapping[str, Tensor]
) -> dict[str, Any]:
    low, low_end, low_step = loss.get("low", (0.6, 0.9, 0.02))
    high, high_end, high_step = loss.get("high", (1.2, 3.0, 0.05))

    def share() -> float:
        positive = total = 0.0
        for one in batch:
            w = (current[one.id] - one.mu).clamp(-BOUND, BOUND).exp()
            a = one.advantage
            magnitude = torch.minimum(w * a, w.clamp(low, high) * a).abs() * one.mask
            magnitude = magnitude * (one.factor != 0)
            positive += float(magnitude[a > 0].sum())
            total += float(magnitude.sum())
        return positive / total if total else 1.0

    while share() < loss.get("target_share", 0.4):
        if high < high_end - 1e-12:
            high = min(high + high_step, high_end)
        elif low < low_end - 1e-12:
            low = min(low + low_step, low_end)
        else:
            break
    return {"low": low, "high": high}


def loss_of(
    loss: Mapping[str, Any], one: Response, pi: Tensor, decided: Mapping[str, Any]
) -> Tensor:
    """Return [T], or a number for losses that are defined per sequence."""
    name, a, mask = loss["name"], one.advantage, one.mask
    log_r, log_w = (pi - one.prox).clamp(-BOUND, BOUND), (pi - one.mu).clamp(-BOUND, BOUND)
    r, w, rho = log_r.exp(), log_w.exp(), (one.prox - one.mu).clamp(-BOUND, BOUND).exp()
    count = one.trained

    def get(key: str, default: float) -> float:
        return float(loss.get(key, default))

    def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
        return torch.maximum(-a * ratio, -a * ratio.clamp(low, high))

    if name == "reinforce":
        return -a * pi
    if name in ("ppo_clip", "decoupled_ppo"):
        value = clipped(r, 1 - get("clip_low", 0.2), 1 + get("clip_high", 0.2))
        if loss.get("dual_clip") is not None:
            value = torch.where(a < 0, torch.minimum(value, -a * loss["dual_clip"]), value)
        return rho.detach() * value if name == "decoupled_ppo" else value
    if name == "cispo":
        return -r.detach().clamp(1 - get("clip_low", 0.5), 1 + get("clip_high", 0.2)) * a * pi
    if name == "gspo":
        s = ((log_r * mask).sum() / count).clamp(max=10.0).exp().detach()
        return clipped(
            s * (pi - pi.detach()).exp(), 1 - get("clip_low", 0.03), 1 + get("clip_high", 0.04)
        )
    if name == "gmpo":
        # Penalties in the reward may give the tokens of a response advantages of both signs.
        above = torch.clamp(log_r, max=get("clip_high", 0.4))
        below = torch.clamp(log_r, min=-get("clip_low", 0.4))
        cut = torch.where(a > 0, above, torch.where(a < 0, below, 0.0))
        return -((a * mask).sum() / count) * ((cut * mask).sum() / count).exp()
    if name == "sapo":
        tau = torch.where(a > 0, get("tau_pos", 1.0), get("tau_neg", 1.05))
        return -a * (4 / tau) * torch.sigmoid(tau * (r - 1))
    if name in ("dppo_tv", "dppo_kl"):
        p, q = pi.detach().exp(), one.mu.exp()
        if name == "dppo_tv":
            moved = (p - q).abs()
        else:
            moved = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        away = torch.where(a > 0, p > q, p < q) & (
            moved > get("threshold", 0.15 if name == "dppo_tv" else 0.05)
        )
        return -a * w.detach().clamp(max=get("cap", 20.0)) * pi * ~away
    if name == "topr":
        total = (log_w * mask).sum().clamp(-BOUND, BOUND).exp().detach()
        c = 1.0 if one.reward >= 0 else min(1.0, float(total))
        return -c * one.reward * pi
    if name == "trajectory_balance":
        difference = ((pi - one.ref) * mask).sum()
        return (decided[one.id] + difference - one.reward / get("beta", 0.05)) ** 2
    if name == "oapl":
        total = ((pi - one.mu) * mask).sum()
        return (get("beta_policy", 0.001) * total - (one.reward - decided[one.id])) ** 2
    if name == "kimi":
        total = ((pi - one.prox) * mask).sum()
        return (one.reward - decided[one.id] - get("tau", 0.1) * total) ** 2
    if name == "vespo":
        log = (log_r * mask).sum().clamp(-BOUND, BOUND).detach()
        k = torch.where(a > 0, get("k_pos", 2.0), get("k_neg", 3.0))
        lam = torch.where(a > 0, get("lambda_pos", 3.0), get("lambda_neg", 2.0))
        return -(lam + k * log - lam * log.exp()).exp() * a * pi
    if name == "gipo":
        return -((-0.5 * (log_w / get("sigma", 1.0)) ** 2).exp().detach()) * w * a
    if name == "aspo":
        g = torch.where(
            a > 0,
            (1 / r) * (r <= 1 + get("clip_high", 0.2)),
            r * (r >= 1 - get("clip_low", 0.2)),
        )
        return -a * g.detach().clamp(max=get("dual_clip", 3.0)) * pi
    if name == "minirl":
        kept = torch.where(a > 0, r <= 1 + get("clip_high", 0.27), r >= 1 - get("clip_low", 0.2))
        return -kept.double() * w.detach().clamp(max=get("cap", 5.0)) * a * pi
    if name == "m2po":
        if "level" in decided:
            c = decided["level"]
            return -a * w if math.isinf(c) else clipped(w, math.exp(-c), math.exp(c))
        kept = [(one.id, t) not in decided["dropped"] for t in range(len(one.tokens))]
        return -a * w * torch.tensor(kept)
    if name == "bapo":
        return clipped(w, decided["low"], decided["high"])
    raise NotImplementedError(name)


def kl_of(estimator: str, log: Tensor) -> Tensor:
    return {
        "k1": log,
        "k2": log.square() / 2,
        "k3": (-log).exp() - 1 + log,
    }[estimator]


# ---------------------------------------------------------------------------------------------
# The trainer.


@dataclass
class ReferenceStep:
    """One optimizer step: its loss, gradient by name, and control metrics."""

    loss: float
    gradient: Tensors
    regime: str = "keep"


class Trainer:
    """Train `model` with the settings of a config file: `objective`, `controls` and `optimizer` are
    mappings of that file's keys."""

    def __init__(
        self,
        model: Model,
        objective: Mapping[str, Any],
        controls: Sequence[Mapping[str, Any]],
        optimizer: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.weights = model.weights()
        self.objective = objective
        self.controls = controls
        self.optimizer = optimizer
        self.first = self._copy()
        self.average = self._copy()
        self.past: dict[int, Tensors] = {}
        self.moments = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.squares = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.updates = 0
        self.beta1_product = 1.0
        self.previous: Tensors | None = None

    def train(
        self, version: int, batch: Sequence[Response], parts: Sequence[Sequence[str]]
    ) -> list[ReferenceStep]:
        """Return the optimizer steps on a batch of `version`. `parts`: ids of each minibatch."""
        self.past[version] = self._copy()
        self._precompute(version, batch)
        by_id = {one.id: one for one in batch}
        steps = []
        for epoch in range(self.objective.get("epochs", 1)):
            for index, part in enumerate(parts):
                moved = epoch > 0 or index > 0
                steps.append(self._step(version, [by_id[name] for name in part], moved))
        return steps

    @torch.no_grad()
    def _precompute(self, version: int, batch: Sequence[Response]) -> None:
        """Compute rewards, advantages and log-probs under other policies, under the weights with
        which the batch begins."""
        kl = self.objective.get("kl")
        proximal = self.objective.get("proximal", "behavior")
        for one in batch:
            start, _ = self.model.log_probs(self.weights, one)
            one.ref, _ = self.model.log_probs(self.first, one)
            lag = torch.tensor([float(version - v) for v in one.versions])
            if proximal == "behavior":
                one.prox = one.mu
            elif proximal == "recompute":
                one.prox = start
            elif proximal == "loglinear":
                # At lag 0 and 1 it equals mu.
                share = torch.where(lag > 1, 1 - 1 / lag.clamp(min=1), torch.zeros_like(lag))
                one.prox = one.mu + share * (start - one.mu)
            elif proximal == "ewma":
                one.prox, _ = self.model.log_probs(self.average, one)
            elif proximal == "snapshot":
                under = {v: self.model.log_probs(self.past[v], one)[0] for v in set(one.versions)}
                one.prox = torch.stack([under[v][t] for t, v in enumerate(one.versions)])
            one.penalty = torch.zeros_like(start)
            if kl is not None and kl.get("where", "loss") == "reward":
                one.penalty = kl["coef"] * kl_of(kl.get("estimator", "k3"), start - one.ref)
                one.penalty = one.penalty * one.mask
                one.reward -= float(one.penalty.sum())
        advantage = self.objective.get("advantage", {"name": "grpo"})
        group_advantages(advantage["name"], advantage, batch)

    def _step(self, version: int, batch: Sequence[Response], moved: bool) -> ReferenceStep:
        leaves = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        outputs = {one.id: self.model.log_probs(leaves, one) for one in batch}
        current = {name: pi.detach() for name, (pi, _) in outputs.items()}
        loss = self.objective["loss"]
        set_factors(self.objective.get("corrections", ()), batch, current)
        decided = decisions(loss, batch, current)
        total = torch.zeros((), dtype=torch.float64)
        for one in batch:
            pi, entropy = outputs[one.id]
            total = total + self._sample_loss(one, pi, entropy, decided, batch)
        gradient = dict(
            zip(
                leaves,
                torch.autograd.grad(total, list(leaves.values()), allow_unused=True),
                strict=True,
            )
        )
        gradient = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in gradient.items()}
        regime = self._apply(
            {n: g.clone() for n, g in gradient.items()}, version, batch, current, moved
        )
        return ReferenceStep(loss=float(total), gradient=gradient, regime=regime)

    def _sample_loss(
        self,
        one: Response,
        pi: Tensor,
        entropy: Tensor,
        decided: Mapping[str, Any],
        batch: Sequence[Response],
    ) -> Tensor:
        """Return this sample's part of the batch's loss: divided by counts of the whole batch."""
        aggregation = self.objective["aggregation"]
        tokens, sequences = sum(o.trained for o in batch), len(batch)
        value = loss_of(self.objective["loss"], one, pi, decided)
        if aggregation == "seq-mean":
            mine = value * one.factor[one.mask > 0][0] / sequences
        else:
            mine = self._aggregate(value * one.factor, one, tokens, sequences)
        added = torch.zeros_like(pi)
        kl = self.objective.get("kl")
        if kl is not None and kl.get("where", "loss") == "loss":
            penalty = kl["coef"] * kl_of(kl.get("estimator", "k3"), pi - one.ref)
            if kl.get("weight", "none") == "truncated":
                w = (pi - one.mu).clamp(-BOUND, BOUND).exp().detach()
                penalty = penalty * w.clamp(max=kl.get("cap", 2.0))
            added = added + penalty
        if self.objective.get("entropy_bonus"):
            added = added - self.objective["entropy_bonus"] * entropy
        # A loss per sequence has no token aggregation, so the added terms are means over tokens.
        return mine + self._aggregate(added, one, tokens, sequences)

    def _aggregate(self, value: Tensor, one: Response, tokens: int, sequences: int) -> Tensor:
        summed = (value * one.mask).sum()
        aggregation = self.objective["aggregation"]
        if aggregation == "seq-mean-token-sum":
            return summed / sequences
        if aggregation == "seq-mean-token-mean":
            return summed / one.trained / sequences
        if aggregation == "seq-mean-token-sum-norm":
            return summed / (sequences * self.objective["norm_length"])
        return summed / tokens

    def _apply(
        self,
        gradient: Tensors,
        version: int,
        batch: Sequence[Response],
        current: Mapping[str, Tensor],
        moved: bool,
    ) -> str:
        """Controls, clipping, AdamW. Returns what GAC did."""
        regime, scale = "keep", 1.0
        beta1, beta2 = self.optimizer.get("betas", (0.9, 0.999))
        displacement = None
        for control in self.controls:
            name = control["name"]
            if name == "gac":
                regime = self._align(gradient, control)
            elif name == "ess_lr":
                scale *= _ess_scale(control, batch, current)
            elif name == "beta1":
                beta1 = control.get("beta1", 0.5)
            elif name == "momentum_by_alignment":
                beta1 = self._beta1(gradient, control, beta1)
            elif name == "displacement":
                displacement = control
            else:
                raise NotImplementedError(name)
        limit, norm = self.optimizer.get("clip_grad"), _norm(gradient)
        if limit is not None and norm > limit:
            for tensor in gradient.values():
                tensor.mul_(limit / (norm + 1e-6))

        self.updates += 1
        self.beta1_product *= beta1
        lr, eps = self.optimizer["lr"] * scale, self.optimizer.get("eps", 1e-8)
        update = {}
        for name, g in gradient.items():
            self.moments[name] = beta1 * self.moments[name] + (1 - beta1) * g
            self.squares[name] = beta2 * self.squares[name] + (1 - beta2) * g * g
            first = self.moments[name] / (1 - self.beta1_product)
            second = self.squares[name] / (1 - beta2**self.updates)
            update[name] = -lr * first / (second.sqrt() + eps)
        if displacement is not None:
            self._remove_displacement(update, displacement, version, batch, moved)
        for name, weight in self.weights.items():
            # Norms and biases, which have one dimension, do not decay.
            decay = self.optimizer.get("weight_decay", 0.0) if weight.dim() > 1 else 0.0
            self.weights[name] = weight * (1 - lr * decay) + update[name]
        kept = self.objective.get("ewma_decay", 0.9)
        for name, weight in self.weights.items():
            self.average[name] = kept * self.average[name] + (1 - kept) * weight
        return regime

    def _beta1(self, gradient: Tensors, control: Mapping[str, Any], longest: float) -> float:
        """Return beta1 by the cosine of the gradient with Adam's momentum."""
        norms = _norm(gradient) * _norm(self.moments)
        if norms == 0.0:
            return longest
        low, high = control.get("c_low", 0.1), control.get("c_high", 0.6)
        share = (_dot(gradient, self.moments) / norms - low) / (high - low)
        shortest = control.get("beta1_min", 0.0)
        return longest + min(max(share, 0.0), 1.0) * (shortest - longest)

    def _align(self, gradient: Tensors, control: Mapping[str, Any]) -> str:
        """Apply GAC: compare with the raw gradient of the step before; project above c_low."""
        norm = _norm(gradient)
        if norm == 0.0:  # no direction: the next gradient is compared with the previous one
            return "keep"
        raw = {name: g.clone() for name, g in gradient.items()}
        previous, self.previous = self.previous, raw
        if previous is None:
            return "keep"
        before = _norm(previous)
        product = _dot(gradient, previous)
        cosine, c_low = product / (norm * before), control.get("c_low", 0.15)
        if cosine <= c_low:
            return "keep"
        k = 0.0
        if control.get("target", "threshold") == "threshold":
            k = (c_low / cosine) * math.sqrt((1 - cosine**2) / (1 - c_low**2))
        along = product / before**2
        for name, g in gradient.items():
            g.add_((k - 1) * along * previous[name])
        return "project"

    def _remove_displacement(
        self,
        update: Tensors,
        control: Mapping[str, Any],
        version: int,
        batch: Sequence[Response],
        moved: bool,
    ) -> None:
        """Remove the component along D = theta_now - theta_v from the update."""
        tokens = sum(one.trained for one in batch)
        way = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for one in batch:
            start = one.versions[0]
            if start == version and not moved:
                continue
            for name, weight in self.weights.items():
                way[name] += one.trained / tokens * (weight - self.past[start][name])
        length = _norm(way)
        if length == 0.0:
            return
        cosine = _dot(update, way) / (_norm(update) * length)
        c_low = control.get("c_low", 0.0)
        if cosine <= c_low:
            return
        k = 0.0
        if control.get("target", "zero") == "threshold":
            k = (c_low / cosine) * math.sqrt((1 - cosine**2) / (1 - c_low**2))
        along = _dot(update, way) / length**2
        for name, tensor in update.items():
            tensor.add_((k - 1) * along * way[name])

    def _copy(self) -> Tensors:
        return {name: weight.clone() for name, weight in self.weights.items()}


def _ess_scale(
    control: Mapping[str, Any], batch: Sequence[Response], current: Mapping[str, Tensor]
) -> float:
    logs = np.array([float(((current[o.id] - o.mu) * o.mask).sum()) for o in batch])
    if control.get("use_truncated"):
        logs = np.minimum(logs, math.log(control.get("cap", 8.0)))
    weights = np.exp(logs - logs.max())
    share = weights.sum() ** 2 / (weights**2).sum() / len(batch)
    relative = min(1.0, share / control.get("reference_ratio", 1.0))
    scale = math.sqrt(relative) if control.get("rule", "sqrt") == "sqrt" else relative
    return max(scale, control.get("floor", 0.0))


def _dot(one: Tensors, other: Tensors) -> float:
    return float(sum((one[name] * other[name]).sum() for name in one))


def _norm(tensors: Tensors) -> float:
    return math.sqrt(_dot(tensors, tensors))
