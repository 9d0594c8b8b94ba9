"""vLLM engines as Ray actors that load staged weights, and their comparison with transformers on
the same checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import batched, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_async_rl.config.rollout import EnvironmentConfig, RolloutConfig
from megatron_async_rl.config.sampling import EvalSamplingConfig, SamplingConfig
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.rollout.engine_process import start_engine
from megatron_async_rl.rollout.environments.pool import Environments
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog.watch import ray_get
from megatron_async_rl.weights.manifest import Manifest, require_equal
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import Staging
from tests.engine.asking import sampled
from tests.engine.reference import VOCABULARY, Reference, checkpoint_weights
from tests.staged import stage

TOLERANCE = 1e-5
REWARD = "tests.engine.rewards_that_fail:misbehave"
REWARD_S = 15.0
"""Value of rollout.reward.timeout_s, which a reward that returns does not exceed even on a busy
machine."""
KEEP, RECOMPUTE = 0, 1
"""Indices of the engines of conftest.py."""
CHECKPOINTS = 4
TEMPERATURE, MAX_TOKENS, FEWER_TOKENS, SHORT_TOKENS = 1.0, 400, 160, 24
SAMPLING = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
"""Sampling settings of training. EVALUATIONS has those of the held-out sets."""
SHORT, FEWER, DOUBLE, FOURFOLD = "short", "fewer", "double", "fourfold"
EVALUATIONS = {
    name: EvalSamplingConfig.model_validate(own).over(
        SamplingConfig(max_tokens=12, temperature=1.5)
    )
    for name, own in {
        # The second stop string: a token whose number ends in 19, followed by another token.
        SHORT: {"temperature": 0.7, "max_tokens": SHORT_TOKENS, "stop": ["never", "19 w"]},
        FEWER: {"temperature": TEMPERATURE, "max_tokens": FEWER_TOKENS},
        DOUBLE: {"temperature": TEMPERATURE, "max_tokens": 2 * FEWER_TOKENS},
        FOURFOLD: {"temperature": TEMPERATURE, "max_tokens": 4 * FEWER_TOKENS},
        "cut": {"top_k": 40, "top_p": 0.7, "min_p": 0.002},
        "penalised": {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.8,
            "frequency_penalty": -0.6,
            "bad_words": ["w19", "w400"],
        },
        "greedy": {"temperature": 0},
        "grammar": {"regex": "(w[2-9]){3}"},
    }.items()
}


class Engines:
    """One engine for each of `settings` (of `rollout`), all with the sampling settings of
    `evaluations`. `of_version`: version -> index of the checkpoint that was loaded."""

    def __init__(
        self,
        root: Path,
        settings: Sequence[Mapping[str, Any]],
        checkpoints: Sequence[Path],
        evaluations: Mapping[str, SamplingConfig] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        records_experts: bool = False,
    ) -> None:
        self.checkpoints = list(checkpoints)
        self.references = [Reference(path) for path in checkpoints]
        self.version = 0
        self.of_version = {0: 0}
        self.specs = [
            EngineSpec(
                index=index,
                model_path=self.checkpoints[0],
                dtype=dtype,
                records_experts=records_experts,
                rollout=RolloutConfig.model_validate(
                    {
                        "reward": {"name": REWARD, "timeout_s": 300.0},
                        "kv_cache_gib": 0.25,
                        "max_concurrent": 64,
                        "start_timeout_s": 900,
                        **of_engine,
                    }
                ),
                evaluations=evaluations or {},
                seed=11,
                device="cpu",
                log_dir=root / "logs",
                transport="collective",  # reads the memory of this machine, too
            )
            for index, of_engine in enumerate(settings)
        ]
        self.handles = started(self.specs)
        self.staging = Staging(SharedMemory())
        self._groups = 0

    def requests(
        self,
        prompts: Sequence[Prompt],
        n: int,
        index: int | None = None,
        sampling: str | None = None,
    ) -> list[Request]:
        """Return requests for `n` responses to each prompt. `index`: group of all requests; None: a
        new group for each prompt. `sampling`: held-out set whose sampling settings apply; None:
        those of training."""
        numbers = [self._groups + i if index is None else index for i in range(len(prompts))]
        self._groups += len(prompts)
        return [
            Request(group=g, k=k, prompt=prompt, sampling=sampling)
            for g, prompt in zip(numbers, prompts, strict=True)
            for k in range(n)
        ]

    def groups(
        self,
        engine: int,
        prompts: Sequence[Prompt],
        n: int,
        index: int | None = None,
        sampling: str | None = None,
    ) -> list[list[Sample]]:
        """Return the samples of `requests` with the same arguments, as one list per prompt."""
        samples = sampled(self.handles[engine], self.requests(prompts, n, index, sampling))
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def publish(self, checkpoint: int, *, per_bucket: int = 1000) -> Manifest:
        """Stage a checkpoint as the next version, and load it into every engine."""
        manifest = self.stage(checkpoint, per_bucket=per_bucket)
        self.feed(manifest)
        return manifest

    def stage(self, checkpoint: int, *, per_bucket: int = 1000) -> Manifest:
        self.version += 1
        self.of_version[self.version] = checkpoint
        return stage(self.staging, self.version, buckets(self.checkpoints[checkpoint], per_bucket))

    def feed(self, manifest: Manifest, only: Sequence[int] | None = None) -> None:
        """Load the staged weights into all engines, or into the engines `only`, at the same time,
        and verify the digests. Once all updates have ended, raises the error of the first engine
        that failed."""
        indices = range(len(self.handles)) if only is None else only
        calls = [self.handles[index].update.remote(self.version, manifest) for index in indices]
        failures = []
        for index, update in zip(indices, calls, strict=True):
            try:
                loaded = ray_get(update, "an engine to load weights", 400)
                require_equal(self.specs[index].name, manifest.digests, loaded)
            except Exception as failure:  # noqa: BLE001 - raised below, after the other updates
                failures.append(failure)
        if failures:
            raise failures[0]

    def reference(self, version: int) -> Reference:
        return self.references[self.of_version[version]]

    def difference(
        self,
        engine: int,
        sample: Sample,
        version: int,
        since: int = 0,
        limit: int | None = None,
        sampling: str | None = None,
    ) -> float:
        """Return the largest |log-prob of the engine - log-prob of transformers| of the sample's
        tokens `since` to `limit` under the weights of `version`."""
        ids = sample.response_ids.tolist()[:limit]
        temperature = self.specs[engine].sampling(sampling).temperature
        reference = self.reference(version).logprobs(sample.prompt.token_ids, ids, temperature)
        return float(
            (torch.from_numpy(sample.behavior_logprobs[since:limit].copy()) - reference[since:])
            .abs()
            .max()
        )

    def over_kept_caches(self, engine: int, sample: Sample) -> torch.Tensor:
        """Return the log-probs of transformers for the sample's tokens, [T]. Each token has the
        weights of its version, and attends to the keys and values that the weights of earlier
        tokens computed."""
        from transformers import DynamicCache

        temperature = self.specs[engine].rollout.sampling.temperature
        prompt, ids = list(sample.prompt.token_ids), sample.response_ids.tolist()
        cache, logprobs = DynamicCache(), []
        for version, start, end in spans(sample):
            # The step that samples a token reads the token before it, so the same weights compute
            # the keys and values of the token before it.
            first = 0 if start == 0 else len(prompt) + start - 1
            inputs = [*prompt, *ids][first : len(prompt) + end - 1]
            reference = self.reference(version)
            logprobs.append(reference.logprobs_over(cache, inputs, ids[start:end], temperature))
        return torch.cat(logprobs)


def spans(sample: Sample) -> list[tuple[int, int, int]]:
    """Return (version, first token, end) of each run of tokens that one version sampled."""
    edges = [0, *(np.flatnonzero(np.diff(sample.versions)) + 1).tolist(), sample.length]
    return [(int(sample.versions[start]), start, end) for start, end in pairwise(edges)]


@contextmanager
def running(start: Callable[[], Engines]) -> Iterator[Engines]:
    engines = start()
    try:
        yield engines
    finally:
        engines.staging.close()
        stop(engines.handles)


def started(specs: Sequence[EngineSpec], *, again: bool = False) -> list[Any]:
    """Start engines, and return the handles of their actors."""

    async def start() -> list[Any]:
        return await asyncio.gather(*(start_engine(spec, again=again) for spec in specs))

    return [engine.actor for engine in asyncio.run(start())]


def stop(handles: Sequence[Any]) -> None:
    import ray

    ray.wait([handle.stop.remote() for handle in handles], num_returns=len(handles), timeout=60)
    for handle in handles:
        ray.kill(handle)


def give_environment(handle: Any, settings: Mapping[str, Any], template: str | None = None) -> None:
    """Make a running engine use this environment from here on. Another engine with the environment
    would take as long to start as all its tests take."""
    what = "an engine to start an environment"
    ray_get(handle.__ray_call__.remote(_begin, settings, template), what, 400)


def take_environment(handle: Any) -> None:
    """Make the engine's responses single turns without an environment again."""
    ray_get(handle.__ray_call__.remote(_end), "an engine to drop its environment", 400)


def _end(engine: Any) -> None:
    engine._responses._conversations = None


def _begin(engine: Any, settings: Mapping[str, Any], template: str | None) -> None:
    """Start the environment. Ray calls this in a thread of the engine's process, so the event loop
    of the engine runs the start."""

    async def begin() -> None:
        environments = Environments(EnvironmentConfig.model_validate(settings))
        environments.start()
        await environments.ready()
        tokenizer = load_tokenizer(engine.spec.model_path, template)
        engine._responses._conversations = await engine._converse(environments, tokenizer)
        engine._environments = environments

    asyncio.run_coroutine_threadsafe(begin(), engine._watch.get_loop()).result(400)


def call(handle: Any, method: str, *arguments: Any) -> Any:
    return ray_get(getattr(handle, method).remote(*arguments), f"an engine to {method}", 400)


def buckets(checkpoint: Path, per_bucket: int = 1000) -> list[dict[str, torch.Tensor]]:
    weights = iter(checkpoint_weights(checkpoint).items())
    return [dict(bucket) for bucket in batched(weights, per_bucket)]


def prompt_of(length: int, seed: int = 0, **fields: Any) -> Prompt:
    ids = np.random.default_rng([seed, length]).integers(1, VOCABULARY, length)
    return Prompt(
        id=f"p{seed}-{length}", text="", token_ids=tuple(int(i) for i in ids), fields=fields
    )
