"""What we use of vLLM beyond its interface is there, and does what it is used for."""

import ast
import importlib
import inspect
import queue
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_async_rl
from megatron_async_rl.weights import vllm_private

PACKAGE = Path(megatron_async_rl.__file__).parent


def imported() -> set[str]:
    """Every name that our code imports from vLLM, wherever in a file."""
    return {
        f"{node.module}.{name.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for name in node.names
    }


def found(name: str) -> bool:
    """Whether a module has the class or function, or a class the method, or sets the attribute in
    its `__init__`."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part, None)
        constructor = inspect.unwrap(getattr(owner, "__init__", found))
        code = getattr(constructor, "__code__", None)
        return hasattr(owner, parts[-1]) or (code is not None and parts[-1] in code.co_names)
    return False


@pytest.mark.parametrize("name", sorted({*vllm_private.NAMES, *imported()}))
def test_the_installed_vllm_has_every_name_we_use(name: str) -> None:
    assert found(name), f"vLLM has no {name}"


def test_a_name_that_is_gone_is_found_out() -> None:
    collector = "vllm.v1.engine.output_processor.RequestOutputCollector"
    assert not found(f"{collector}.put_all")
    assert not found(f"{collector}s.put")
    assert not found("vllm.v1.engine.output_processors.RequestOutputCollector.put")


class Core:
    """vLLM's engine process, as far as an update asks it: what it was told, in order. `idle`: it
    stops at once, else when `stops` is answered."""

    def __init__(self, *, idle: bool, answers: list[dict[str, str]]) -> None:
        self.told: list[Any] = []
        self.stops: Future[None] | None = None if idle else Future()
        self.answers = answers
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.told.append(("pause", mode, clear_cache))
        return self.stops

    def collective_rpc(self, method: str, timeout: None, args: tuple[Any, ...]) -> Any:
        self.told.append((method, *args[1:]))
        return self.answers

    def set_weight_version(self, version: str) -> None:
        self.told.append(("version", version))

    def resume_scheduler(self) -> None:
        self.told.append("resume")

    def load(self, first: bool, last: bool, resume_if: dict[str, str] | None) -> Any:
        return vllm_private._load_bucket(self, {}, 7, first, last, False, resume_if)


def test_an_engine_samples_on_only_with_the_digests_it_was_to_load() -> None:
    for resume_if, goes_on in (({"w": "a"}, True), ({"w": "b"}, False), (None, False)):
        core = Core(idle=True, answers=[{"w": "a"}, {"w": "a"}])
        core.load(True, False, resume_if)
        assert core.told == [("pause", "keep", False), ("load_weight_bucket", 7, True, False)]
        assert core.load(False, True, resume_if) == {"w": "a"}
        assert core.told[2:4] == [("load_weight_bucket", 7, False, True), ("version", "7")]
        assert core.told[4:] == ["resume"] * goes_on


def test_weights_are_not_touched_before_the_step_that_runs_has_ended() -> None:
    core = Core(idle=False, answers=[{"w": "a"}])
    loaded = core.load(True, True, {"w": "a"})
    assert core.told == [("pause", "keep", False)]
    assert not loaded.done()
    assert core.stops is not None
    core.stops.set_result(None)
    assert loaded.result(timeout=0) == {"w": "a"}
    assert core.told[-1] == "resume"
    assert core.input_queue.qsize() == 1, "it looks for work before it waits for a request"


def test_what_goes_wrong_after_a_pause_is_the_answer() -> None:
    core = Core(idle=False, answers=[{"w": "a"}, {"w": "b"}])
    loaded = core.load(True, True, {"w": "a"})
    assert core.stops is not None
    core.stops.set_result(None)
    with pytest.raises(RuntimeError, match="workers 0 and 1 loaded different weights: w"):
        loaded.result(timeout=0)
    assert core.told[-1] == ("load_weight_bucket", 7, True, True), "neither numbered nor resumed"


def generator(seed: int) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


def test_seeded_requests_draw_the_same_tokens_as_one_by_one() -> None:
    """Requests come, go and change places between steps, as in vLLM's batch."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    vllm_private.draw_in_batches()
    ours, one_by_one = TopKTopPSampler.forward_cpu, TopKTopPSampler.forward_cpu.__wrapped__
    sampler = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="processed_logprobs")
    logits = torch.randn(8, 50, generator=generator(0))

    sampled: list[list[tuple[int, ...]]] = []
    for forward in (one_by_one, ours):
        requests = {seed: generator(seed) for seed in range(8)}
        sampled.append([])
        for step in range(3 * vllm_private.DRAWS):
            if step % 7 == 6:
                requests.pop(min(requests))
                requests[100 + step] = generator(100 + step)
            rows = list(requests.values())[step % 3 :]
            batch = dict(enumerate(rows))
            tokens, logprobs = forward(sampler, logits[: len(rows)].clone(), batch, None, None)
            assert torch.equal(logprobs, logits[: len(rows)].log_softmax(-1))
            sampled[-1].append(tuple(tokens.tolist()))
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) > vllm_private.DRAWS


def test_draws_of_a_request_are_forgotten_with_its_generator() -> None:
    draws = vllm_private.SeededDraws()
    kept, gone = generator(1), generator(2)
    draws.next({0: kept, 1: gone})
    assert len(draws._kept) == 2
    del gone
    assert len(draws._kept) == 1


@pytest.mark.parametrize("early", [True, False])
def test_an_output_is_handed_over_whether_it_came_before_or_after(early: bool) -> None:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r")
    output, came = ValueError("vLLM died"), []
    if early:
        collector.put(output)
    vllm_private.on_output(collector, came.append)
    if not early:
        assert came == []
        collector.put(output)
    assert came == [output]
    assert collector.get_nowait() is None
