"""Controller actor with vLLM engines that serve the Countdown example."""

import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.data import PromptSource, load_tokenizer, read_prompts
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import ControllerSpec
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.flow.evaluation import HeldOut
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.rollout.engine_process import Engine, RemoteEngine, start_engine
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.segments import load, read_entries
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog.watch import ray_get
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import Staging
from tests.engine.asking import sampled
from tests.engine.running import buckets, started, stop
from tests.staged import stage
from tests.thorough import thorough
from tests.vllm_process import core_of

pytestmark = [pytest.mark.engine, thorough]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "countdown"


def prompts(folder: Path, name: str) -> list[Prompt]:
    return read_prompts(folder / name, load_tokenizer(folder / "model"), limit=12)


@pytest.fixture(scope="module")
def served(
    in_ray: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, list[Any], list[EngineSpec]]]:
    """Folder of the example, handles of its engines, and their settings."""
    root = tmp_path_factory.mktemp("served")
    runpy.run_path(str(ROOT / "examples" / EXAMPLE / "prepare.py"))["write"](root, seed=1)
    rollout = {
        "sampling": {"max_tokens": 8},
        "reward": {"name": EXAMPLE},
        "kv_cache_gib": 0.25,
        "max_concurrent": 256,
    }
    specs = [
        EngineSpec(
            index=0,
            model_path=root / "model",
            dtype="float32",
            rollout=RolloutConfig.model_validate({**rollout, "start_timeout_s": 900}),
            seed=3,
            device="cpu",
            log_dir=root / "logs",
            transport="shared_memory",
            evaluations={"": SamplingConfig(max_tokens=8)},
        )
    ]
    engines = started(specs)
    yield root, engines, specs
    stop(engines)


def test_an_engine_serves_the_model_of_an_example_and_scores_responses(
    served: tuple[Path, list[Any], list[EngineSpec]],
) -> None:
    root, engines, _ = served
    tokenizer = load_tokenizer(root / "model")
    prompt = prompts(root, "train.jsonl")[0]
    for sample in sampled(engines[0], [Request(group=0, k=k, prompt=prompt) for k in range(16)]):
        assert sample.reward_error is None
        assert sample.reward in (0.0, 1.0)
        assert sample.text == tokenizer.decode(sample.response_ids.tolist())
        assert (sample.response_ids[-1] == tokenizer.eos_ids[0]) == (sample.finish_reason == "stop")


def test_prompts_that_exceed_the_token_budget_of_a_step_all_get_responses(
    served: tuple[Path, list[Any], list[EngineSpec]],
) -> None:
    """If vLLM split the prompt at the end of its token budget, its seeded sampler on the CPU would
    raise."""
    root, engines, _ = served
    examples = prompts(root, "train.jsonl")
    assert sum(len(prompt.token_ids) for prompt in examples) * 30 > 2 * 2048
    requests = [
        Request(group=index, k=k, prompt=prompt)
        for index, prompt in enumerate(examples)
        for k in range(30)
    ]
    assert len(sampled(engines[0], requests)) == 30 * len(examples)


def take_all(request: Callable[..., Any]) -> None:
    """Request three batches, which is more than the controller has."""
    for version in (5, 6, 7):
        request("next_batch", version)


class Launch:
    """Launch that returns the engine `running` as engine 0, and starts other engines."""

    def __init__(self, running: Any) -> None:
        self.running = running

    async def __call__(self, spec: EngineSpec, *, again: bool) -> Engine:
        if spec.index == 0:
            return RemoteEngine(self.running)  # type: ignore[return-value]
        return await start_engine(spec, again=again)


def test_the_controller_feeds_batches_while_engines_join_leave_and_die(
    served: tuple[Path, list[Any], list[EngineSpec]],
) -> None:
    import ray

    root, engines, specs = served
    run_dir = root / "run"
    train, held_out = (prompts(root, f"{part}.jsonl") for part in ("train", "eval"))
    spec = ControllerSpec(
        flow=FlowConfig(prompts_per_step=3, group_size=4, async_ratio=1.0),
        engines=[replace(specs[0], log_dir=run_dir / "logs")],
        fleet=FleetSettings(restarts_per_hour=0, unresponsive_s=300.0),
        timeout_s=600.0,
        reward=RewardConfig(name="arithmetic", on_error="stop"),
        held_out=[HeldOut(prompts=held_out, n=4)],
        steps=None,
        fresh_steps=0,
        seed=0,
        run_dir=run_dir,
    )
    actor = ray.remote(num_cpus=0, max_concurrency=100)(Controller)
    source = PromptSource(train, seed=1, shuffle=False)
    controller = actor.remote(source, spec, Launch(engines[0]))

    def request(method: str, *arguments: Any) -> Any:
        return ray_get(getattr(controller, method).remote(*arguments), f"it to {method}", 900)

    staging = Staging(SharedMemory())
    request("start", None)
    result = request("evaluate", 0)
    assert (result.samples, len(result.per_prompt), result.reward_errors) == (48, 12, 0)
    for version in range(2):
        batch = request("next_batch", version).batch
        first = 3 * version
        columns = {name: batch.samples.column(name).to_pylist() for name in ("id", "prompt_ids")}
        assert [
            (name.partition("-")[0], tuple(ids))
            for name, ids in zip(*columns.values(), strict=True)
        ] == [
            (str(first + place), train[first + place].token_ids)
            for place in range(3)
            for _ in range(len(columns["id"]) // 3)
        ]
        starts = [versions[0] for versions in batch.samples.column("versions").to_pylist()]
        assert min(starts) == max(0, version - 1)
        weights = buckets(root / "model")
        request("staged", version + 1, stage(staging, version + 1, weights))
        assert request("state").state["consumed"] == first + 3

    assert request("add_engine") == 1
    deadline = time.monotonic() + 900
    while [engine.version for engine in request("stats")["engines"]] != [2, 2]:
        assert time.monotonic() < deadline, "the engine that joined did not load version 2"
        time.sleep(0.2)
    request("remove_engine", 0)
    for version in (2, 3, 4):  # groups of the last batch were admitted after the removal
        batch = request("next_batch", version).batch
        request("staged", version + 1, stage(staging, version + 1, buckets(specs[0].model_path)))
    request("state")  # writes the sample log
    last = [entry for entry in read_entries(run_dir) if entry.steps == (5,)]
    assert {sample.engine for _, sample in load(run_dir, last)} == {1}

    core_of(run_dir / "logs" / "engine-1.log").kill()
    with pytest.raises(EngineFailed, match=r"no training engine is left: .*engine 1: .*died"):
        take_all(request)
    assert "engine-1 is lost" in (run_dir / "logs" / "controller.log").read_text()
    staging.close()
    request("close")
    ray.kill(controller)
