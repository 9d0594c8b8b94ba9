"""Calls into vLLM and hooks in its processes, with stand-ins for vLLM's modules. The names of the
real ones are checked in test_vllm_private.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.rollout.vllm import (
    client,
    cpu_sampling,
    cpu_worker,
    engine_core,
    plugin,
)
from megatron_async_rl.rollout.vllm.client import sampled_logprobs, token_versions
from tests.cases import looped


def stub(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))


def spans(*parts: tuple[str, int, int], tokens: int = 4) -> Any:
    versions = [SimpleNamespace(version=one, start=start, end=end) for one, start, end in parts]
    return SimpleNamespace(token_ids=range(tokens), weight_versions=versions or None)


@looped(
    ("completion", "versions"),
    [
        (spans(("3", 0, 4)), [3, 3, 3, 3]),
        (spans(("3", 0, 1), ("4", 1, 4)), [3, 4, 4, 4]),
        (spans(("4", 1, 4), ("3", 0, 1)), [3, 4, 4, 4]),
        (spans(tokens=0), []),
        (spans(("0", 0, 4)), [0, 0, 0, 0]),
        (spans(("3", 0, 3)), "no weight version for tokens [3] of 4: "),
        (spans(("3", 1, 2), ("4", 3, 4)), "no weight version for tokens [0, 2] of 4: "),
        (spans(), "no weight version for tokens [0, 1, 2, 3] of 4: "),
        (spans(("3", 0, 2), ("x", 2, 4)), "weight version 'x' for tokens 2 to 4; versions must"),
        (spans(("-1", 0, 4)), "weight version '-1' for tokens 0 to 4; versions must be numbers"),
    ],
)
def test_every_token_has_the_version_of_its_span(completion: Any, versions: Any) -> None:
    if isinstance(versions, str):
        with pytest.raises(RuntimeError) as refused:
            token_versions(completion)
        assert f"vLLM reported {versions}" in str(refused.value)
        return
    found = token_versions(completion)
    assert (found.dtype, found.tolist()) == (np.int32, versions)


@looped(
    ("ids", "logprobs", "message"),
    [
        ([7, 8], [-0.5, -1.0], None),
        (None, None, "log-probs of the 2 tokens that it sampled, but none"),
        ([7, 9], [-0.5, -1.0], "the 2 tokens that it sampled, but those of tokens [7, 9]"),
        ([7, 8], [-0.5, float("inf")], "log-probs that are not finite: [-0.5, inf]"),
        ([7, 8], [float("nan"), 0.0], "log-probs that are not finite: [nan, 0.0]"),
    ],
)
def test_every_token_has_one_finite_logprob(
    ids: list[int] | None, logprobs: list[float] | None, message: str | None
) -> None:
    flat = None if ids is None else SimpleNamespace(token_ids=ids, logprobs=logprobs)
    completion = SimpleNamespace(token_ids=(7, 8), logprobs=flat)
    if message is None:
        found = sampled_logprobs(completion)
        assert (found.dtype, found.tolist()) == (np.float32, logprobs)
        return
    with pytest.raises(RuntimeError) as refused:
        sampled_logprobs(completion)
    assert message in str(refused.value)


class Calls:
    """An object whose methods record their calls; they may be awaited."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, *given, *named.items()))
            return f"result of {name}"

        return call

    @property
    def engine_core(self) -> Calls:
        return self


def test_workers_are_prepared_for_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    request = lambda init_info: ("init", init_info)  # noqa: E731
    base = "vllm.distributed.weight_transfer.base"
    stub(monkeypatch, base, WeightTransferInitRequest=request)
    for device, workers, completes in (("cpu", 2, True), ("cpu", 1, False), ("cuda", 2, False)):
        llm = Calls()
        spec: Any = SimpleNamespace(
            device=device,
            rollout=SimpleNamespace(workers=workers),
            first_version=5,
            transport="relay",
        )
        asyncio.run(client.prepare_updates(llm, spec))
        assert llm.calls == [
            *([("collective_rpc", "complete_on_cpu")] if completes else []),
            ("init_weight_transfer_engine", ("init", {"version": 5, "transport": "relay"})),
            ("update_weight_version", "5"),
        ]


def test_requests_pauses_and_loads_reach_the_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "vllm.inputs.engine", tokens_input=lambda ids: ("tokens", ids))

    async def run(llm: Calls) -> None:
        assert await client.add_request(llm, "0-1", (1, 2), "p") == "result of add_request"
        await client.pause_scheduler(llm, clear_cache=True)
        loaded = await engine_core.load_between_steps(
            llm, {"b": 1}, 7, first=True, last=False, clear_cache=True, resume_if={"w": "d"}
        )
        assert loaded == "result of call_utility_async"  # type: ignore[comparison-overlap]

    llm = Calls()
    asyncio.run(run(llm))
    load = (engine_core.LOAD, {"b": 1}, 7, True, False, True, {"w": "d"})
    assert llm.calls == [
        ("add_request", "0-1", ("tokens", [1, 2]), "p"),
        ("pause_scheduler_async", ("mode", "keep"), ("clear_cache", True)),
        ("call_utility_async", *load),
    ]
    states = {
        n: SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda n=n: n))
        for n in (3, 4)
    }
    running: Any = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    assert client.tokens_so_far(running) == 7


def test_only_vllms_processes_are_looked_up_in_the_kernels_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = iter([{1, 2}, {1, 2, 3, 4, 5}])

    def descendants(of: set[int] | None = None) -> set[int]:
        # Meanwhile a server of rewards, 2, starts process 5.
        return next(listed) if of is None else {5} & {one + 3 for one in of}

    monkeypatch.setattr(client, "descendants", descendants)
    monkeypatch.setattr(client, "_vllm_processes", frozenset())
    started = SimpleNamespace(from_engine_args=lambda arguments: ("llm", arguments))
    stub(monkeypatch, "vllm.v1.engine.async_llm", AsyncLLM=started)
    arguments = "megatron_async_rl.rollout.vllm.engine_arguments"
    stub(monkeypatch, arguments, engine_arguments=lambda spec: ("arguments", spec))
    assert client.launch("spec") == ("llm", ("arguments", "spec"))  # type: ignore[arg-type]
    assert client._vllm_processes == {3, 4}


class Request:
    """A request of the engine core, whose hashes depend on its salt."""

    def __init__(self, computed: int = 0, preempted: int = 0) -> None:
        self.num_computed_tokens, self.num_preemptions = computed, preempted
        self.cache_salt: str | None = None
        self.block_hashes: list[str] = ["old"]

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"hash {self.cache_salt}")


def test_a_new_request_is_salted_with_the_version_of_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Core:
        version = "6"

        def get_weight_version(self) -> str:
            return self.version

        def preprocess_add_request(self, request: Request) -> Any:
            return ("preprocessed", request.cache_salt)

        def add_request(self, request: Request, wave: int, *, more: int) -> Any:
            return ("added", list(request.block_hashes), wave, more)

    stub(monkeypatch, "vllm.v1.engine.core", EngineCore=Core)
    engine_core.cache_by_version()
    hooks = (Core.preprocess_add_request, Core.add_request)
    engine_core.cache_by_version()
    assert hooks == (Core.preprocess_add_request, Core.add_request), "installed once"
    engine_core.take_loads_between_steps()
    assert getattr(Core, engine_core.LOAD) is engine_core._load_bucket
    core, request = Core(), Request()
    assert core.preprocess_add_request(request) == ("preprocessed", "6")
    assert core.add_request(request, 1, more=2) == ("added", ["old"], 1, 2)
    core.version = "7"  # an update ended meanwhile
    assert core.add_request(request, 1, more=2) == ("added", ["hash 7"], 1, 2)
    for started in (Request(computed=1), Request(preempted=1)):
        assert core.add_request(started, 1, more=2) == ("added", ["old"], 1, 2)


def test_tokens_of_each_step_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        _pause_state = SimpleNamespace(name="PAUSED_ALL")

        def get_request_counts(self) -> tuple[int, int]:
            return 3, 2

        def update_from_output(self, scheduler_output: Any, more: str) -> str:
            return f"outputs {more}"

    events: list[Any] = []
    watched = SimpleNamespace(
        progress=lambda *given: events.append(given), fact=lambda *given: events.append(given)
    )
    monkeypatch.setattr(engine_core, "watch", watched)
    stub(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=Scheduler)
    engine_core.show_progress()
    hook = Scheduler.update_from_output
    engine_core.show_progress()
    assert Scheduler.update_from_output is hook, "installed once"
    scheduler = Scheduler()
    for tokens in (0, 9):
        output = SimpleNamespace(total_num_scheduled_tokens=tokens)
        assert scheduler.update_from_output(output, more="m") == "outputs m"
    (progress, (name, described)) = events
    assert (progress, name) == (("tokens", 9), "scheduler")
    assert described() == "3 running, 2 waiting, paused_all"


@pytest.mark.parametrize("records", [True, False])
def test_a_process_of_vllm_is_bound_to_its_engine_first(
    monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    events: list[str] = []
    for owner, names in (
        (plugin, ("die_with_parent", "spawn_by_fork", "name_shared_memory")),
        (engine_core, ("show_progress", "take_loads_between_steps", "cache_by_version")),
        (cpu_sampling, ("speed_up_sampling", "register_norms")),
        (cpu_worker, ("record_on_cpu",)),
        (plugin.watch, ("join",)),
        (plugin.gc, ("freeze",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, lambda *_, name=name: events.append(name))
    monkeypatch.setattr(plugin.atexit, "register", lambda call: events.append("at exit"))
    registered: dict[str, Any] = {}

    class Factory:
        _registry = registered

        @staticmethod
        def register_engine(name: str, module: str, owner: str) -> None:
            assert name not in registered
            registered[name] = (module, owner)

    stub(monkeypatch, "vllm.distributed.weight_transfer", WeightTransferEngineFactory=Factory)
    monkeypatch.delenv(plugin.RECORD_EXPERTS, raising=False)
    if records:
        monkeypatch.setenv(plugin.RECORD_EXPERTS, "1")
    for _ in range(2):
        events.clear()
        plugin.register()
        assert events == [
            *("die_with_parent", "spawn_by_fork", "join", "name_shared_memory"),
            *("freeze", "at exit", "show_progress", "take_loads_between_steps"),
            *("cache_by_version", "speed_up_sampling", "register_norms"),
            *["record_on_cpu"] * records,
        ]
    module = "megatron_async_rl.rollout.vllm.receive"
    assert registered == {plugin.BACKEND: (module, "WeightReceiver")}


def test_engines_of_several_workers_bind_no_threads_and_record_by_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "loopback_interface", lambda: "lo9")
    monkeypatch.setattr(plugin.sys, "prefix", "/nowhere")

    def variables(**more: Any) -> dict[str, str]:
        given: dict[str, Any] = {
            "rollout": SimpleNamespace(start_timeout_s=0.5, workers=1),
            "carrier": SimpleNamespace(per_engine=False),
            "records_experts": False,
            "device": "cpu",
            "threads": 3,
        }
        return plugin.environment(SimpleNamespace(**given | more))  # type: ignore[arg-type]

    common = {
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo9",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1",
        "VLLM_PLUGINS": plugin.ENTRY_POINT,
        plugin.PARENT: str(os.getpid()),
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_SOCKET_IFNAME": "lo9",
    }
    on_cpu = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "3",
        "TORCHDYNAMO_DISABLE": "1",
        "KMP_BLOCKTIME": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_TRIM_THRESHOLD_": "2147483647",
    }
    assert variables() == common | on_cpu
    assert variables(device="cuda", records_experts=True) == common
    recorded = variables(
        records_experts=True,
        rollout=SimpleNamespace(start_timeout_s=9.5, workers=2),
        carrier=SimpleNamespace(per_engine=True),
    )
    expected = (
        common
        | on_cpu
        | {
            "VLLM_ENGINE_READY_TIMEOUT_S": "9",
            plugin.RECORD_EXPERTS: "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    )
    del expected["NCCL_SOCKET_IFNAME"]
    assert recorded == expected
    started: list[Any] = []
    monkeypatch.setattr(plugin, "serving", lambda *given: started.append(given))
    monkeypatch.setattr(plugin, "environment", lambda spec: {"a": "1", plugin.PARENT: "5"})
    plugin.serving_engines("spec", {"v": "2"}, Path("f"), Path("l"))  # type: ignore[arg-type]
    assert started == [("engines", plugin.IMPORTS, {"v": "2"}, {"a": "1"}, Path("f"), Path("l"))]


FREED = """
import numpy as np
from megatron_async_rl.watchdog import freed_memory

MIB = 2**20


def resident():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024 / MIB


blocks = [np.ones(MIB // 8) for _ in range(200)]
full = resident()
# The last block is at the end of the heap, which could otherwise shrink.
del blocks[:-1]
freed_memory.KEPT_BYTES = 400 * MIB
freed_memory.return_freed_memory()
assert resident() > full - 20, "less than KEPT_BYTES is kept"
freed_memory.KEPT_BYTES = 150 * MIB
freed_memory.return_freed_memory()
assert resident() < full - 180, (full, resident())
"""


def test_a_process_returns_freed_memory_above_a_bound() -> None:
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    # A fresh interpreter, because the C library reads these variables when it is loaded.
    environment = os.environ | kept | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", FREED], env=environment, check=True)
