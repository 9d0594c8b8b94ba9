"""Private parts of vLLM that we use exist, and do what they are used for."""

import ast
import importlib
import inspect
import queue
import re
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

import megatron_async_rl
from megatron_async_rl.rollout.vllm import PRIVATE_NAMES, client, cpu_worker, engine_core
from megatron_async_rl.rollout.vllm.loaded import Loaded
from megatron_async_rl.weights.digest import partial_digest, tensor_digest
from tests.cases import looped

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
    """True if a module has the class or function, or a class has the method, or sets the
    attribute in its `__init__`."""
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


def test_every_private_name_is_used_in_the_file_it_is_listed_for() -> None:
    for file, names in PRIVATE_NAMES.items():
        source = (PACKAGE / "rollout" / "vllm" / f"{file}.py").read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), f"{file} has no {name}"


@looped("name", lambda: sorted({*chain(*PRIVATE_NAMES.values()), *imported()}))
def test_the_installed_vllm_has_every_name_we_use(name: str) -> None:
    assert found(name), f"vLLM has no {name}"


def test_two_workers_with_half_of_the_experts_add_up_to_one_with_all() -> None:
    kernel = CPUUnquantizedExperts
    cpu_worker.compute_own_experts()
    draw = torch.Generator().manual_seed(1)
    experts, hidden, inner, tokens = 4, 64, 32, 5
    w13 = torch.randn(experts, 2 * inner, hidden, generator=draw)
    w2 = torch.randn(experts, hidden, inner, generator=draw)
    states = torch.randn(tokens, hidden, generator=draw)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(tokens)]).int()

    def output(own: slice, places: list[int] | None) -> torch.Tensor:
        found = torch.empty(tokens, hidden)
        kernel.apply(
            SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa=kernel.isa),
            output=found,
            hidden_states=states,
            w1=cpu_prepack_moe_weight(w13[own].contiguous(), kernel.isa),
            w2=cpu_prepack_moe_weight(w2[own].contiguous(), kernel.isa),
            topk_weights=torch.full(ids.shape, 0.5),
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=experts,
            expert_map=None if places is None else torch.tensor(places, dtype=torch.int32),
            apply_router_weight_on_input=False,
            **dict.fromkeys(
                ("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
            ),
        )
        return found

    whole = output(slice(None), None)
    halves = output(slice(0, 2), [0, 1, -1, -1]) + output(slice(2, 4), [-1, -1, 0, 1])
    torch.testing.assert_close(halves, whole)


def test_experts_that_weigh_their_inputs_are_not_divided_on_a_cpu() -> None:
    cpu_worker.compute_own_experts()
    with pytest.raises(ValueError, match="weights the inputs of experts"):
        CPUUnquantizedExperts.apply(
            SimpleNamespace(),
            expert_map=torch.tensor([0, -1], dtype=torch.int32),
            apply_router_weight_on_input=True,
        )


def test_a_name_that_is_gone_is_found_out() -> None:
    collector = "vllm.v1.engine.output_processor.RequestOutputCollector"
    assert not found(f"{collector}.put_all")
    assert not found(f"{collector}s.put")
    assert not found("vllm.v1.engine.output_processors.RequestOutputCollector.put")


class Core:
    """vLLM's engine process, as far as an update calls it: its calls, in order. `idle`: it stops at
    once, else when `stops` is answered."""

    def __init__(self, *, idle: bool, answers: list[dict[str, Loaded]]) -> None:
        self.told: list[Any] = []
        self.stops: Future[None] | None = None if idle else Future()
        self.answers = answers
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.scheduler = SimpleNamespace(requests={})

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
        return engine_core._load_bucket(self, {}, 7, first, last, False, resume_if)


def part(value: float, row: int = 0, rows: int = 2, total: int = 2) -> dict[str, Loaded]:
    """The answer of a worker that holds `rows` of the `total` rows of w."""
    d1, d2, _ = partial_digest(torch.full((rows, 3), value), row).tolist()
    return {"w": Loaded(torch.float32, (total, 3), {(row, 0, rows, 3, d1, d2)})}


A = tensor_digest(torch.full((2, 3), 1.0))
B = tensor_digest(torch.full((2, 3), 2.0))


def test_an_engine_samples_on_only_with_the_digests_it_was_to_load() -> None:
    for resume_if, goes_on in (({"w": A}, True), ({"w": B}, False), (None, False)):
        core = Core(idle=True, answers=[part(1.0), part(1.0)])
        core.load(True, False, resume_if)
        assert core.told == [("pause", "keep", False), ("load_weight_bucket", 7, True, False)]
        assert core.load(False, True, resume_if) == {"w": A}
        assert core.told[2:4] == [("load_weight_bucket", 7, False, True), ("version", "7")]
        assert core.told[4:] == ["resume"] * goes_on


def test_weights_are_not_touched_before_the_step_that_runs_has_ended() -> None:
    core = Core(idle=False, answers=[part(1.0)])
    loaded = core.load(True, True, {"w": A})
    assert core.told == [("pause", "keep", False)]
    assert not loaded.done()
    assert core.stops is not None
    core.stops.set_result(None)
    assert loaded.result(timeout=0) == {"w": A}
    assert core.told[-1] == "resume"
    assert core.input_queue.qsize() == 1, "it looks for work before it waits for a request"


def test_workers_that_hold_other_weights_do_not_sample_on() -> None:
    """Workers that hold the same part, and workers that hold one each."""
    wrong = [(part(1.0), part(2.0)), (part(1.0, 0, 1), part(2.0, 1, 1)), (part(1.0, 0, 1),)]
    for answers in wrong:
        core = Core(idle=True, answers=list(answers))
        assert core.load(True, True, {"w": A})["w"] != A
        assert core.told[-1] == ("version", "7"), "not resumed"
    halves = Core(idle=True, answers=[part(1.0, 0, 1), part(1.0, 1, 1)])
    assert halves.load(True, True, {"w": A}) == {"w": A}
    assert halves.told[-1] == "resume"


def test_what_goes_wrong_after_a_pause_is_the_answer() -> None:
    core = Core(idle=False, answers=[])
    core.collective_rpc = lambda *args: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    loaded = core.load(True, True, {"w": A})
    assert core.stops is not None
    core.stops.set_result(None)
    with pytest.raises(ZeroDivisionError):
        loaded.result(timeout=0)
    assert core.told == [("pause", "keep", False)], "neither numbered nor resumed"


def asked(salt: str | None = None, **begun: int) -> Any:
    """A request in vLLM's engine process, whose prompt is three blocks."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher, sampling = get_request_block_hasher(16, sha256), SamplingParams(max_tokens=1)
    request = Request("r", list(range(48)), sampling, None, cache_salt=salt, block_hasher=hasher)
    vars(request).update(begun)
    return request


def test_what_waits_through_an_update_shares_prefixes_with_what_the_new_weights_begin() -> None:
    waits, runs, was_cut = (
        asked("6"),
        asked("6", num_computed_tokens=3),
        asked("6", num_preemptions=1),
    )
    core = Core(idle=True, answers=[part(1.0)])
    core.scheduler.requests = {"w": waits, "r": runs, "c": was_cut}
    core.load(True, True, {"w": A})
    assert waits.block_hashes == asked("7").block_hashes
    assert len(waits.block_hashes) == 3
    assert runs.block_hashes == was_cut.block_hashes == asked("6").block_hashes
    assert set(runs.block_hashes).isdisjoint(waits.block_hashes)


def generator(seed: int) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


def test_seeded_requests_draw_the_same_tokens_as_one_by_one() -> None:
    """Requests come, go and change places between steps, as in vLLM's batch."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    cpu_worker.draw_in_batches()
    ours, one_by_one = TopKTopPSampler.forward_cpu, TopKTopPSampler.forward_cpu.__wrapped__
    sampler = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="processed_logprobs")
    logits = torch.randn(8, 50, generator=generator(0))

    sampled: list[list[tuple[int, ...]]] = []
    for forward in (one_by_one, ours):
        requests = {seed: generator(seed) for seed in range(8)}
        sampled.append([])
        for step in range(3 * cpu_worker.DRAWS):
            if step % 7 == 6:
                requests.pop(min(requests))
                requests[100 + step] = generator(100 + step)
            rows = list(requests.values())[step % 3 :]
            batch = dict(enumerate(rows))
            tokens, logprobs = forward(sampler, logits[: len(rows)].clone(), batch, None, None)
            assert torch.equal(logprobs, logits[: len(rows)].log_softmax(-1))
            sampled[-1].append(tuple(tokens.tolist()))
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) > cpu_worker.DRAWS


def test_draws_of_a_request_are_forgotten_with_its_generator() -> None:
    draws = cpu_worker.SeededDraws()
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
    client.on_output(collector, came.append)
    if not early:
        assert came == []
        collector.put(output)
    assert came == [output]
    assert collector.get_nowait() is None
