"""Stand-in for an engine that samples for real: transformers computes the published weights, read
from the carrier's memory, with a cache of keys and values. Each fault breaks one property."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.rollout.continuation import sample_seed
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.types import Request, Sample
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.manifest import Manifest
from megatron_async_rl.weights.shared_memory import BucketReader
from tests.unit.fake_engine import FakeEngine

BLOCK = 32
"""Length from which a prompt's keys and values are kept for later requests."""
SWAPPED = "model.layers.0.mlp.down_proj.weight"


class CanaryEngine(FakeEngine):
    """fault: property that is broken; empty for none."""

    def __init__(self, spec: EngineSpec, fault: str = "") -> None:
        super().__init__()
        self.spec = spec
        self.fault = fault
        self._temperature = spec.rollout.sampling.temperature
        self._ends = load_tokenizer(spec.model_path).eos_ids
        self._reader = BucketReader()
        self._prefixes: dict[tuple[Any, ...], Any] = {}
        config = transformers.AutoConfig.from_pretrained(spec.model_path)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self._model = model.to(getattr(torch, spec.dtype))

    async def update(
        self, version: int, manifest: Manifest, first: bool = True, last: bool = True
    ) -> dict[str, str]:
        await super().update(version, manifest, first, last)
        loaded = {
            name: tensor.clone()
            for bucket in manifest.buckets
            for name, tensor in self._reader.read(bucket)
        }
        if self.fault == "damaged by the carrier":
            loaded[SWAPPED] = swapped(loaded[SWAPPED])
        if self.fault != "stale weights" or version == 0:
            self._model.load_state_dict(loaded)
        return {name: tensor_digest(tensor) for name, tensor in loaded.items()}

    async def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        by_prompt: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            by_prompt.setdefault(request.prompt.token_ids, []).append(request)
        for prompt, members in by_prompt.items():
            for sample in self._sampled(prompt, members):
                self.say(sample)

    @torch.no_grad()
    def _sampled(self, prompt: tuple[int, ...], requests: list[Request]) -> list[Sample]:
        maximum, count = self.spec.rollout.sampling.max_tokens, len(requests)
        cache = self._prefix(prompt)
        cache.batch_repeat_interleave(count)
        generators = [torch.Generator().manual_seed(self._seed(one)) for one in requests]
        inputs = torch.full((count, 1), prompt[-1])
        ids, logp = np.zeros((count, maximum), np.int32), np.zeros((count, maximum), np.float32)
        sharper = 1.5 if self.fault in ("temperature", "unreported temperature") else 1.0
        for place in range(maximum):
            hidden = self._model.model(
                input_ids=inputs, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            # Logits in float32 in every precision, as engines compute them.
            logits = hidden.float() @ self._model.lm_head.weight.float().t() / self._temperature
            drawn = torch.softmax(logits * sharper, -1)
            chosen = [
                torch.multinomial(row, 1, generator=generator)
                for row, generator in zip(drawn, generators, strict=True)
            ]
            inputs = torch.stack(chosen)
            reported = logits * sharper if self.fault == "temperature" else logits
            ids[:, place] = inputs[:, 0]
            logp[:, place] = torch.log_softmax(reported, -1).gather(1, inputs)[:, 0]
        return [self._sample(one, ids[row], logp[row]) for row, one in enumerate(requests)]

    def _seed(self, request: Request) -> int:
        k = request.k // 2 if self.fault == "shared seed" else request.k
        return sample_seed(self.spec.seed, request.group, k)

    def _prefix(self, prompt: tuple[int, ...]) -> Any:
        """Return keys and values of all tokens of the prompt but the last."""
        salt = () if self.fault == "stale prefix cache" else (self.version,)
        key = (*salt, *prompt)
        if len(prompt) < BLOCK or key not in self._prefixes:
            ids = torch.tensor([prompt[:-1]])
            self._prefixes[key] = self._model(input_ids=ids, use_cache=True).past_key_values
        return copy.deepcopy(self._prefixes[key])

    def _sample(self, request: Request, ids: np.ndarray, logp: np.ndarray) -> Sample:
        ends = np.flatnonzero(np.isin(ids, self._ends))
        cut = len(ends) > 0 and self.fault != "after the end"
        length = int(ends[0]) + 1 if cut else len(ids)
        self._start[request.id] = self.version
        plain = self.sample(request)
        return replace(
            plain,
            response_ids=ids[:length],
            behavior_logprobs=logp[:length],
            versions=np.full(length, self.version, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.uint8),
            finish_reason="stop" if cut else "length",
            engine=self.spec.index,
        )


def swapped(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with its two tensor-parallel shards, halves of its columns, exchanged."""
    half = weight.shape[1] // 2
    return torch.cat([weight[:, half:], weight[:, :half]], dim=1)


class CanaryEngines:
    """Launch of stand-ins; those in `faulty` have the fault."""

    def __init__(self, fault: str = "", faulty: Sequence[int] = (0, 1)) -> None:
        self.fault = fault
        self.faulty = faulty

    async def __call__(self, spec: EngineSpec, *, again: bool) -> CanaryEngine:
        return CanaryEngine(spec, self.fault if spec.index in self.faulty else "")
