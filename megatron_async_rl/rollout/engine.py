"""One vLLM engine: prompts in, scored groups of samples out, new weights in between, in flight.

Invariants:
- requests are submitted as they come and finish in any order; nothing waits for a batch, a group apart from its own samples;
- a sample's `behavior_logprobs` are those of the distribution it was drawn from: after temperature, by the engine itself;
- every token carries the number of the weights that sampled it, from vLLM's own spans; a gap in them is an error;
- the token that ended a response (end of sequence) is part of it: it was sampled, so it is trained on;
- the prefix cache is off. Its entries outlive an update, and vLLM can clear it only by recomputing every running request,
  so with it a prompt could be continued from keys and values of old weights and be stamped with the new number.
  What does outlive an update, on purpose, is the key-value cache of the requests that were running during it
  (`mode="keep"`): tokens after the switch attend to keys and values of the weights before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.rollout.rewards import load_reward
from megatron_async_rl.rollout.scoring import Scorer
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import Group, Prompt, Sample
from megatron_async_rl.weights.plugin import TRANSPORTS, WORKER_EXTENSION
from megatron_async_rl.weights.receive import plain
from megatron_async_rl.weights.shared_memory import BucketRef

STOP_S = 10.0
"""Grace before vLLM kills its engine process. A killed one leaves small files in /dev/shm."""

Result = TypeVar("Result")

ALIVE_POLL_S = 1.0
"""How often a wait for vLLM looks whether its process still lives; seconds."""


class EngineDied(RuntimeError):
    """vLLM's own process ended while the engine was in use."""


def sample_seed(run_seed: int, group: int, sample: int) -> int:
    """Seed of one response, 63 bits: a function of the run's seed and the response's place in it, of nothing else."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def token_versions(completion: CompletionOutput) -> NDArray[np.int32]:
    """Weight version of each response token. Raises RuntimeError when vLLM's spans leave a token without a numbered version."""
    length = len(completion.token_ids)
    versions = np.full(length, -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        if not span.version.isdecimal():
            raise RuntimeError(f"tokens {span.start} to {span.end} carry weight version {span.version!r}, which is not a number")
        versions[span.start : span.end] = int(span.version)
    if np.any(versions < 0):
        without = np.flatnonzero(versions < 0).tolist()
        raise RuntimeError(f"tokens {without} of {length} carry no weight version: {completion.weight_versions}")
    return versions


def sampled_logprobs(completion: CompletionOutput) -> NDArray[np.float32]:
    """Log-prob of each response token, in nats. Raises RuntimeError when the engine did not report exactly one for each."""
    flat: Any = completion.logprobs
    if flat is None or flat.token_ids != list(completion.token_ids):
        raise RuntimeError(f"the engine reported no log-probs of the {len(completion.token_ids)} tokens it sampled")
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not np.all(np.isfinite(logprobs)):
        raise RuntimeError(f"the engine reported log-probs that are not finite: {logprobs.tolist()}")
    return logprobs


class RolloutEngine:
    """Used by one event loop. Call `start` first; a group may be generated while weights are loaded."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        rollout = spec.rollout
        self._tokenizer = load_tokenizer(spec.model_path)
        self._scorer = Scorer(load_reward(rollout.reward.name), timeout_s=rollout.reward.timeout_s)
        self._sampling = SamplingParams(
            temperature=rollout.sampling.temperature,
            max_tokens=rollout.sampling.max_tokens,
            stop=list(rollout.sampling.stop),
            stop_token_ids=list(self._tokenizer.eos_ids),
            detokenize=bool(rollout.sampling.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._llm: AsyncLLM | None = None
        self._requests = 0
        self._counts = {"responses": 0, "tokens": 0, "reward_errors": 0, "running": 0}

    async def start(self) -> None:
        """Starts vLLM and stamps the weights it loaded with `spec.first_version`. Raises what vLLM raises."""
        self._llm = AsyncLLM.from_engine_args(self._arguments())
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"version": self.spec.first_version}))
        await self._llm.update_weight_version(str(self.spec.first_version))

    async def generate_group(self, index: int, prompt: Prompt, n: int, admitted_version: int) -> Group:
        """`n` independent responses to `prompt`, each scored as soon as it ends.

        Raises RuntimeError when vLLM aborts or fails a request. A reward that fails is in its sample's `reward_error`.
        """
        tasks = [asyncio.create_task(self._sample(index, k, prompt)) for k in range(n)]
        try:
            samples = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return Group(index=index, prompt=prompt, samples=tuple(samples), admitted_version=admitted_version)

    async def pause(self) -> None:
        """Returns when no forward pass is running. Requests in flight keep their place and their key-value cache."""
        # AsyncLLM.pause_generation does just this and then sleeps 20 ms to order outputs for its callers; we need no order.
        await self._while_alive("pause", self._engine().engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> dict[str, str]:
        """Loads one bucket of the update to `version`; `first` opens the update, `last` closes it and numbers the weights.

        Returns, with the last bucket, name -> digest of every tensor of the update as loaded. Call it while paused.
        Raises ValueError for a version that is not newer, RuntimeError for an update that left out a parameter.
        """
        engine = self._engine()
        load = engine.collective_rpc("load_weight_bucket", args=(plain(bucket), version, first, last))
        answers = await self._while_alive(f"load weights of version {version}", load)
        digests: dict[str, str] = answers[0]
        for rank, other in enumerate(answers):
            if other != digests:
                differ = sorted(name for name in digests.keys() | other.keys() if digests.get(name) != other.get(name))
                raise RuntimeError(f"{self.spec.name}: workers 0 and {rank} loaded different weights: {', '.join(differ[:8])}")
        if last:
            await self._while_alive(f"number its weights {version}", engine.update_weight_version(str(version)))
        return digests

    async def resume(self) -> None:
        await self._while_alive("resume", self._engine().resume_generation())

    async def version(self) -> int:
        """Number of the weights that sample the next token."""
        return int(await self._while_alive("tell its version", self._engine().get_weight_version()))

    async def stats(self) -> dict[str, int]:
        """Since start: responses, tokens, reward_errors; now: running (responses submitted and not yet scored)."""
        return dict(self._counts)

    async def stop(self) -> None:
        self._scorer.close()
        if self._llm is not None:
            self._llm.shutdown(timeout=STOP_S)
            self._llm = None

    async def _sample(self, group: int, k: int, prompt: Prompt) -> Sample:
        started_at = time.time()
        self._counts["running"] += 1
        try:
            completion = await self._complete(prompt, sample_seed(self.spec.seed, group, k))
            text = self._tokenizer.decode(completion.token_ids)
            scored = await self._scorer.score(prompt, text)
        finally:
            self._counts["running"] -= 1
        ids = np.asarray(completion.token_ids, dtype=np.int32)
        sample = Sample(
            id=f"{group}-{k}",
            prompt=prompt,
            response_ids=ids,
            behavior_logprobs=sampled_logprobs(completion),
            versions=token_versions(completion),
            loss_mask=np.ones(len(ids), dtype=np.uint8),
            text=text,
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            reward=scored.reward,
            reward_error=scored.error,
            engine=self.spec.index,
            started_at=started_at,
            finished_at=time.time(),
        )
        self._counts["responses"] += 1
        self._counts["tokens"] += len(ids)
        if scored.error is not None:
            self._record_failure(sample)
        return sample

    async def _complete(self, prompt: Prompt, seed: int) -> CompletionOutput:
        parameters = self._sampling.clone()
        parameters.seed = seed
        self._requests += 1
        request = f"{self.spec.index}-{self._requests}"
        completion = None
        async for output in self._engine().generate(tokens_input(list(prompt.token_ids)), parameters, request):
            completion = output.outputs[0]  # FINAL_ONLY: there is one
        if completion is None or completion.finish_reason not in ("stop", "length"):
            reason = "no output" if completion is None else f"finish reason {completion.finish_reason!r}"
            raise RuntimeError(f"{self.spec.name} ended its response to prompt {prompt.id!r} with {reason}; see {self.spec.log}")
        return completion

    def _record_failure(self, sample: Sample) -> None:
        self._counts["reward_errors"] += 1
        line = {
            "sample": sample.id,
            "prompt": sample.prompt.id,
            "text": sample.prompt.text,
            "response": sample.text,
            "error": sample.reward_error,
        }
        with open(self.spec.reward_log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    async def _while_alive(self, what: str, call: Awaitable[Result]) -> Result:
        """Awaits `call`, which vLLM leaves unanswered for ever when its process ends. Raises EngineDied then."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait((task,), timeout=ALIVE_POLL_S))[0]:
            if self._engine().errored:
                task.cancel()
                raise EngineDied(f"the vLLM process of {self.spec.name} died while it was to {what}; see {self.spec.log}")
        return task.result()

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError(f"{self.spec.name} is not running")
        return self._llm

    def _arguments(self) -> AsyncEngineArgs:
        spec, rollout = self.spec, self.spec.rollout
        return AsyncEngineArgs(
            model=str(spec.model_path),
            dtype=spec.dtype,
            seed=spec.seed,
            max_model_len=rollout.max_context,
            max_num_seqs=rollout.max_concurrent,
            skip_tokenizer_init=not rollout.sampling.stop,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=TRANSPORTS[spec.transport].backend),
            worker_extension_cls=WORKER_EXTENSION,
            **(_cpu_arguments(spec) if spec.device == "cpu" else {"gpu_memory_utilization": rollout.gpu_memory_utilization}),
        )


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": int(spec.rollout.kv_cache_gib * 2**30),
        # Compiling takes up to 40 s of the first start and was not measurably faster in steady state.
        "enforce_eager": True,
        # A prompt cut in two draws a token that vLLM takes back, and a seeded CPU generator cannot be wound back: it raises.
        "enable_chunked_prefill": False,
        # The model runs in the engine's own process: vLLM's default on a CPU, a second one behind a queue, starts
        # later and pays for the queue at every step.
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    }
