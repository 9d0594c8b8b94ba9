"""A vLLM engine in a Ray actor: it accepts requests, returns scored samples and loads new weights.

Invariants:
- the log file and vLLM's environment variables are set before vLLM is imported, so this module
  imports nothing from vLLM before `start`;
- every token has the version of the weights that sampled it, from vLLM's own spans; a gap in the
  spans is an error;
- the prefix cache is on, so vLLM processes the prompt of a group once. A new request uses only keys
  and values that the current weights computed (`engine_core.cache_by_version`);
- `in_flight: keep`: running requests keep their key-value cache through an update, so later tokens
  attend to keys and values of older weights;
- `in_flight: recompute`: no key or value outlives a pause. Running requests keep their tokens and
  the state of their random generator; the new weights recompute keys and values of the prompt and
  of the tokens so far;
- a paused or sleeping engine samples nothing (`engine_state.py` defines the states). On a GPU,
  sleep frees the memory of weights and cache, so both modes recompute after a sleep. vLLM's CPU
  workers cannot sleep and are paused instead;
- a sleeping engine loads weights once their memory is awake, and samples once weights and cache are
  awake;
- `report` raises once vLLM's process has ended or a request has failed; the engine then samples
  nothing more.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable, Sequence
from typing import Any

from megatron_async_rl.config.rollout import AGENTS, TOOLS
from megatron_async_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_async_rl.rollout.allocator import drop_expandable_segments
from megatron_async_rl.rollout.cluster import require_gpus, require_software
from megatron_async_rl.rollout.engine_state import (
    BusyClock,
    EngineState,
    EngineTimeline,
    WrongState,
)
from megatron_async_rl.rollout.environments.endpoint import Agents
from megatron_async_rl.rollout.environments.episode import Episodes, Player
from megatron_async_rl.rollout.environments.pool import Environments
from megatron_async_rl.rollout.responses import Responses
from megatron_async_rl.rollout.scoring import Scorer
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.client import (
    EngineDied,
    HealthCheck,
    launch,
    named_death,
    pause_scheduler,
    prepare_updates,
)
from megatron_async_rl.rollout.vllm.plugin import environment
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.watchdog.processes import collect_rarely
from megatron_async_rl.watchdog.run_folder import name_shared_memory, use_run_folder
from megatron_async_rl.watchdog.watch import name_this_process
from megatron_async_rl.weights.manifest import Manifest, WeightUpdate

STOP_S = 10.0
"""Grace period before vLLM kills its engine process; a killed process leaves files in /dev/shm."""
SLEEP_LEVEL = 2
"""Sleep level of vLLM. Level 2 drops the weights, because newer weights follow; level 1 would copy
them to host memory and back."""
ALIVE_POLL_S = 1.0
"""Interval at which a pending call checks that vLLM's process is alive."""


class RolloutEngine:
    """A vLLM engine on one event loop. Call `start` first."""

    def __init__(self, spec: EngineSpec) -> None:
        # First, so that the log contains every later message, including those of native libraries.
        redirect_output(spec.log)
        name_this_process(spec.name)
        watch.join(spec.name)
        # Actors on another machine or on an existing cluster do not inherit the run's variables.
        use_run_folder()
        name_shared_memory()
        os.environ.update(environment(spec))
        # An existing cluster may set the option. torch reads it at the first CUDA tensor, which
        # this process has not created yet.
        drop_expandable_segments(os.environ)
        self.spec = spec
        self._state = EngineState(spec.name)
        self._timeline = EngineTimeline(spec.run_dir, spec.name, self._state)
        self._busy = BusyClock(self._timeline.changed)
        self._version = spec.first_version
        self._llm: Any = None
        """AsyncLLM of vLLM, once it has started."""
        self._responses: Responses | None = None
        self._scorer = Scorer(spec.rollout.reward)
        environments = spec.rollout.environment
        self._environments = None if environments is None else Environments(environments)
        self._agents: Agents | None = None
        self._sampled = 0
        self._health = HealthCheck(
            lambda: self._vllm().get_weight_version(), lambda: self._vllm().errored
        )
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start vLLM with the weights of version `spec.first_version`. Raises OtherSoftware and
        OtherDevices before vLLM starts; vLLM's exceptions propagate."""
        require_software(self.spec.software)
        require_gpus(self.spec.name, self.spec.gpus)
        with watch.phase("starting vLLM", self.spec.rollout.start_timeout_s):
            await self._start()
        watch.fact("engine", self.describe)

    async def _start(self) -> None:
        # Imported here: the module imports vLLM, which reads variables that __init__ sets.
        from megatron_async_rl.rollout.vllm.engine_arguments import sampling_parameters

        spec = self.spec
        tokenizer = load_tokenizer(spec.model_path, spec.chat_template, spec.chat_template_options)
        # Processes of rewards and environments import user code while vLLM starts.
        self._scorer.start()
        if self._environments is not None:
            self._environments.start()
        self._llm = launch(spec)
        # Before the first request: its tokens need a version.
        await prepare_updates(self._llm, spec)

        await self._scorer.ready()
        conversations: Player | None = None
        if self._environments is not None:
            await self._environments.ready()
            conversations = await self._converse(self._environments, tokenizer)
        sampling = {
            name: sampling_parameters(spec.sampling(name), tokenizer.eos_ids)
            for name in (None, *spec.evaluations)
        }
        self._responses = Responses(
            self._llm,
            spec,
            sampling,
            tokenizer,
            self._scorer,
            self._busy,
            conversations,
            lambda: self._version,
        )
        self._watch = asyncio.create_task(self._watch_vllm(self._responses))
        # vLLM creates a million lasting objects, which every full collection would traverse.
        collect_rarely()

    async def _converse(self, environments: Environments, tokenizer: Tokenizer) -> Player:
        spec, settings = self.spec, environments.settings
        if settings.name not in (TOOLS, *AGENTS):
            return Episodes(environments, tokenizer)
        parser = ToolParser(settings.tool_parser, spec.model_path, tokenizer.eos_ids, spec.tools)
        if settings.name == TOOLS:
            return Episodes(environments, tokenizer, parser)
        self._agents = Agents(environments, tokenizer, parser)
        await self._agents.start()
        return self._agents

    @property
    def _agents_at_work(self) -> bool:
        return self._environments is not None and self._environments.at_work > 0

    async def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests for one response each. Raises ValueError if a request is already running
        or its prefix has all tokens that the request permits."""
        await self._started().submit(requests)

    async def abort(self, ids: Sequence[str]) -> None:
        """Stop requests. A later report contains each request as `aborted`, or as `finished` if it
        ended before the abort. Unknown ids are ignored."""
        await self._started().abort(ids)

    async def report(self, timeout_s: float) -> EngineReport:
        """Return a report once a response has finished or was aborted, and after `timeout_s` at the
        latest. Raises the failure that ended the engine."""
        responses = self._started()
        finished, aborted = await responses.reports.take(timeout_s)
        # Between two empty reports the same responses are running, so growth of this count proves
        # that vLLM makes progress. A report with results restarts the count.
        before, self._sampled = (
            self._sampled,
            0 if finished.num_rows or aborted else responses.sampled,
        )
        return EngineReport(
            finished=finished,
            aborted=aborted,
            state=self._state.state,
            version=self._version,
            running=responses.running,
            tokens=responses.tokens,
            generated=responses.generated,
            busy_s=self._busy.seconds,
            silent_s=self._health.silent_s,
            sampling=self._sampled > before or self._agents_at_work,
        )

    async def receive(self, weight_update: WeightUpdate) -> None:
        """Make the workers receive a version in the background while the engine samples
        (weights/collective.py). Return once they have begun; they report the outcome to the
        sender."""
        await self._while_alive(
            f"begin to receive version {weight_update.version}",
            self._vllm().collective_rpc("receive_version", args=(pickle.dumps(weight_update),)),
        )

    async def update(
        self, version: int, manifest: Manifest, first: bool = True, last: bool = True
    ) -> dict[str, str]:
        """Load the buckets of `manifest` while sampling is stopped. An update may take several
        calls, each with some of the buckets: the `first` call stops sampling, and the manifest of
        the `last` call has the digests of all tensors. Sampling then continues if the digests of
        the loaded weights equal the manifest's and the cache is awake; otherwise the engine stays
        stopped.

        Returns name -> digest of every tensor as loaded, from the last call; other calls return an
        empty dict. vLLM raises an `Exception` with the reason if the version is not newer or a
        parameter is missing; the engine then stays stopped, too. Raises WrongState while the
        weights' memory sleeps.
        """
        from megatron_async_rl.rollout.vllm.engine_core import load_between_steps

        asleep = self._state.state == "asleep"
        if self._state.sleeps("weights"):
            raise WrongState(
                f"{self.spec.name} cannot load weights: their memory is asleep; wake it first"
            )
        if not asleep:
            # The state is `paused` from here on, although a step may still be running.
            self._state.pause()
        self._timeline.load()
        self._busy.pause(True)

        loaded: dict[str, str] = {}
        end = len(manifest.buckets) - 1
        for index, bucket in enumerate(manifest.buckets):
            load = load_between_steps(
                self._vllm(),
                bucket.as_plain(),
                version,
                first=first and index == 0,
                last=last and index == end,
                clear_cache=self._recomputes,
                # The engine core compares the digests and resumes: no step may run between the load
                # and the comparison.
                resume_if=None if asleep else manifest.digests,
            )
            loaded = await self._while_alive(f"load weights of version {version}", load)
        if not last:
            return {}
        # Only after the last bucket: before it, the weights are a mixture of two versions.
        self._version = version

        if loaded == manifest.digests and not asleep:
            self._on_resumed()
        return loaded

    async def pause(self) -> None:
        """Stop sampling, and return once no forward pass is running. Requests in flight continue
        after `resume`. Raises WrongState while asleep."""
        self._state.require_awake("pause")
        await self._stop_sampling("pause")
        self._state.pause()
        self._busy.pause(True)

    async def resume(self) -> None:
        """Continue sampling. Raises WrongState while asleep."""
        self._state.require_awake("resume")
        await self._while_alive("resume", self._vllm().resume_generation())
        self._on_resumed()

    async def sleep(self) -> None:
        """Stop sampling and, on a GPU, free the memory of weights and cache, whose content is lost.
        The engine keeps requests in flight. Raises WrongState while asleep."""
        self._state.require_awake("sleep")
        if self.spec.device == "cuda":
            await self._while_alive("sleep", self._vllm().sleep(level=SLEEP_LEVEL, mode="keep"))
        else:
            await self._stop_sampling("sleep")
        self._state.sleep()
        self._busy.pause(True)

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Wake the parts `tags` (`weights`, `kv_cache`), or all sleeping parts with None. Sampling
        continues once both parts are awake.

        Raises WrongState for a part that is awake, ValueError for an unknown part.
        """
        sleepers = self._state.sleepers(tags)
        if self.spec.device == "cuda":
            await self._while_alive("wake", self._vllm().wake_up(list(sleepers)))
        # Only after vLLM's success, so that a failed call does not change the state.
        self._state.wake(sleepers)
        if self._state.runs:
            await self.resume()

    async def version(self) -> int:
        """Return the version that vLLM reports for its weights, which sample the next token."""
        return int(await self._while_alive("report its version", self._vllm().get_weight_version()))

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._responses is not None:
            self._responses.close()
        try:
            self._scorer.close()
            if self._agents is not None:
                await self._agents.close()
            if self._environments is not None:
                self._environments.close()
        finally:
            # Even if closing user code failed, because vLLM's processes hold the devices.
            if self._llm is not None:
                self._llm.shutdown(timeout=STOP_S)
                self._llm = None
            self._timeline.close()

    @property
    def _recomputes(self) -> bool:
        return self.spec.rollout.in_flight == "recompute"

    def _on_resumed(self) -> None:
        self._state.resume()
        self._busy.pause(False)

    async def _stop_sampling(self, what: str) -> None:
        if self._state.runs:
            pause = pause_scheduler(self._vllm(), clear_cache=self._recomputes)
            await self._while_alive(what, pause)

    async def _watch_vllm(self, responses: Responses) -> None:
        try:
            await self._health.until_dead()
        except Exception as error:  # noqa: BLE001 - the reader of the reports raises it
            # If vLLM has died, the probe failed for that reason: report the death instead.
            if not self._vllm().errored:
                responses.reports.fail(error)
                return
        responses.reports.fail(EngineDied(self.spec, f"it worked on {responses.running} responses"))

    async def _while_alive[Result](self, what: str, call: Awaitable[Result]) -> Result:
        """Return the result of `call`. Raises EngineDied once vLLM's process has ended, because
        `call` might then never return. `what`: the call, as in "vLLM to <what>"."""
        task = asyncio.ensure_future(call)
        with watch.doing("wait", f"vLLM to {what}"):
            while not (await asyncio.wait((task,), timeout=ALIVE_POLL_S))[0]:
                if self._vllm().errored:
                    task.cancel()
                    raise EngineDied(self.spec, f"the run waited for it to {what}")
        with named_death(self.spec, f"the run waited for it to {what}"):
            return task.result()

    def describe(self) -> str:
        """Describe the state in one line, for the report of a stall. The watchdog's thread calls
        this method."""
        responses = self._started()
        return (
            f"{self._state.state}, version {self._version}, {responses.running} responses running,"
            f" the oldest for {responses.oldest_s:.0f} s, vLLM silent for"
            f" {self._health.silent_s:.0f} s"
        )

    def _vllm(self) -> Any:
        if self._llm is None:
            raise RuntimeError(f"{self.spec.name} is not running: call `start` first")
        return self._llm

    def _started(self) -> Responses:
        if self._responses is None or self._llm is None:
            raise RuntimeError(f"{self.spec.name} is not running: call `start` first")
        return self._responses
