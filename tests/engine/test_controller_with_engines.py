"""The controller actor over real vLLM engines: one serves the arithmetic example, one the Countdown example."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.schema import FlowConfig, RolloutConfig
from megatron_async_rl.data import PromptSource, load_tokenizer, read_prompts
from megatron_async_rl.flow.actor import ControllerSpec, start_controller
from megatron_async_rl.rollout.actor import start_engines, stop_engines
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.requests import Request
from tests.engine.asking import sampled

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("arithmetic", "countdown")


def prompts(folder: Path, name: str) -> list[Prompt]:
    return read_prompts(folder / name, load_tokenizer(folder / "model"), limit=12)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any]]]:
    """The folder that holds both examples, and their engines."""
    import ray

    root = tmp_path_factory.mktemp("served")
    specs = []
    for index, name in enumerate(EXAMPLES):
        runpy.run_path(str(ROOT / "examples" / name / "prepare.py"))["write"](root / name, seed=1)
        rollout = {"sampling": {"max_tokens": 8}, "reward": {"name": name}, "kv_cache_gib": 0.25, "max_concurrent": 256}
        specs.append(
            EngineSpec(
                index=index,
                model_path=root / name / "model",
                dtype="float32",
                rollout=RolloutConfig.model_validate({**rollout, "start_timeout_s": 240}),
                seed=3,
                device="cpu",
                log_dir=root / "logs",
            )
        )
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    engines: list[Any] = []
    try:
        engines = start_engines(specs)
        yield root, engines
    finally:
        stop_engines(engines, timeout_s=20)
        ray.shutdown()


@pytest.mark.parametrize("name", EXAMPLES)
def test_vllm_serves_an_example_model_and_its_responses_are_scored(served: tuple[Path, list[Any]], name: str) -> None:
    root, engines = served
    tokenizer = load_tokenizer(root / name / "model")
    prompt = prompts(root / name, "train.jsonl")[0]
    for sample in sampled(engines[EXAMPLES.index(name)], [Request(group=0, k=k, prompt=prompt) for k in range(16)]):
        assert sample.reward_error is None
        assert sample.reward in (0.0, 1.0)
        assert sample.text == tokenizer.decode(sample.response_ids.tolist())
        assert (sample.response_ids[-1] == tokenizer.eos_ids[0]) == (sample.finish_reason == "stop")


def test_prompts_that_overflow_one_scheduling_step_are_all_answered(served: tuple[Path, list[Any]]) -> None:
    """vLLM would cut the prompt at the edge of its token budget in two, and its seeded sampler on the CPU dies of that."""
    root, engines = served
    asked = prompts(root / "countdown", "train.jsonl")
    assert sum(len(prompt.token_ids) for prompt in asked) * 30 > 2 * 2048
    requests = [Request(group=index, k=k, prompt=prompt) for index, prompt in enumerate(asked) for k in range(30)]
    assert len(sampled(engines[1], requests)) == 30 * len(asked)


def test_the_controller_feeds_batches_in_order_evaluates_and_reports_a_dead_engine(served: tuple[Path, list[Any]]) -> None:
    import ray

    root, engines = served
    train, held_out = (prompts(root / "arithmetic", f"{part}.jsonl") for part in ("train", "eval"))
    flow = FlowConfig(prompts_per_step=3, group_size=4, async_ratio=1.0)
    spec = ControllerSpec(flow=flow, on_reward_error="stop", log_path=root / "logs" / "controller.log")
    controller = start_controller(PromptSource(train, seed=1, shuffle=False), engines[:1], spec)
    result = ray.get(controller.evaluate.remote(held_out, 4, 0, 60.0, (1,), 1.0), timeout=90)
    assert (result.samples, len(result.per_prompt), result.reward_errors) == (48, 12, 0)
    ray.get(controller.start.remote(0), timeout=60)
    for version in range(2):
        batch = ray.get(controller.next_batch.remote(version, 60.0), timeout=90)
        assert [group.index for group in batch.groups] == [3 * version, 3 * version + 1, 3 * version + 2]
        assert [group.prompt.id for group in batch.groups] == [prompt.id for prompt in train[3 * version : 3 * version + 3]]
        assert {sample.start_version for sample in batch.samples()} == {0}
        turned, position = controller.advance.remote(version + 1), controller.position.remote()
        ray.get(turned, timeout=60)
        state, _ = ray.get(position, timeout=60)
        assert state["consumed"] == 3 * version + 3
    ray.kill(engines[0])
    index, reason = ray.get(controller.lost.remote(), timeout=50)
    assert index == 0
    ray.get(controller.give_up.remote(0), timeout=30)
    with pytest.raises(ray.exceptions.RayTaskError, match="EngineFailed: no training engine is left: ") as failure:
        ray.get(controller.next_batch.remote(5, 60.0), timeout=50)
    assert reason in str(failure.value)
    assert "engine 0 is lost" in (root / "logs" / "controller.log").read_text()
    ray.kill(controller)
