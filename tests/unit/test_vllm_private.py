"""Private names of vLLM that this package uses: they exist, and behave as the package expects."""

import ast
import importlib
import inspect
import pickle
import queue
import re
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_async_rl
from megatron_async_rl.rollout.vllm import PRIVATE_NAMES, client, cpu_worker, engine_core
from megatron_async_rl.rollout.vllm.loaded import Loaded
from megatron_async_rl.weights.digest import partial_digest, tensor_digest
from tests.cases import looped

PACKAGE = Path(megatron_async_rl.__file__).parent


def imported() -> set[str]:
    """Return all names that the package imports from vLLM, inside functions, too."""
    return {
        f"{node.module}.{name.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for name in node.names
    }


def exists(name: str) -> bool:
    """Return True if vLLM has the class, function or method, or if a class sets the attribute in
    its `__init__`."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part, None)
        constructor = inspect.unwrap(getattr(owner, "__init__", exists))
        code = getattr(constructor, "__code__", None)
        return hasattr(owner, parts[-1]) or (code is not None and parts[-1] in code.co_names)
    return False


def test_every_private_name_is_used_in_the_file_that_lists_it() -> None:
    for file, names in PRIVATE_NAMES.items():
        source = (PACKAGE / "rollout" / "vllm" / f"{file}.py").read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), f"{file} has no {name}"


@looped("name", lambda: sorted({*chain(*PRIVATE_NAMES.values()), *imported()}))
def test_the_installed_vllm_has_every_name_that_the_package_uses(name: str) -> None:
    from vllm.platforms import current_platform

    # vLLM's workers do the same. Without it, `torch.ops._C` is empty.
    current_platform.import_kernels()
    assert exists(name), f"vLLM has no {name}"


def test_outputs_of_two_workers_with_half_of_the_experts_add_up() -> None:
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = CPUUnquantizedExperts
    cpu_worker.compute_own_experts()
    draw = torch.Generator().manual_seed(1)
    experts, hidden, inner, tokens = 4, 64, 32, 5
    w13 = torch.randn(experts, 2 * inner, hidden, generator=draw)
    w2 = torch.randn(experts, hidden, inner, generator=draw)
    states = torch.randn(tokens, hidden, generator=draw)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(tokens)]).int()

    def output(own: slice, positions: list[int] | None) -> torch.Tensor:
        result = torch.empty(tokens, hidden)
        kernel.apply(
            SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa=kernel.isa),
            output=result,
            hidden_states=states,
            w1=cpu_prepack_moe_weight(w13[own].contiguous(), kernel.isa),
            w2=cpu_prepack_moe_weight(w2[own].contiguous(), kernel.isa),
            topk_weights=torch.full(ids.shape, 0.5),
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=experts,
            expert_map=None if positions is None else torch.tensor(positions, dtype=torch.int32),
            apply_router_weight_on_input=False,
            **dict.fromkeys(
                ("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
            ),
        )
        return result

    complete = output(slice(None), None)
    halves = output(slice(0, 2), [0, 1, -1, -1]) + output(slice(2, 4), [-1, -1, 0, 1])
    torch.testing.assert_close(halves, complete)


def test_experts_with_weighted_inputs_cannot_be_divided_on_a_cpu() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    cpu_worker.compute_own_experts()
    with pytest.raises(ValueError, match="weights the inputs of experts"):
        CPUUnquantizedExperts.apply(
            SimpleNamespace(),
            expert_map=torch.tensor([0, -1], dtype=torch.int32),
            apply_router_weight_on_input=True,
        )


def test_a_missing_name_is_detected() -> None:
    collector = "vllm.v1.engine.output_processor.RequestOutputCollector"
    assert not exists(f"{collector}.put_all")
    assert not exists(f"{collector}s.put")
    assert not exists("vllm.v1.engine.output_processors.RequestOutputCollector.put")


class Core:
    """Stand-in for vLLM's engine core that records the `calls` of an update. `idle`: it pauses at
    once; otherwise once the future `paused` has a result. `loaded`: what its workers return."""

    def __init__(self, *, idle: bool, loaded: list[dict[str, Loaded]]) -> None:
        self.calls: list[Any] = []
        self.paused: Future[None] | None = None if idle else Future()
        self.loaded = loaded
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.scheduler = SimpleNamespace(requests={})

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.calls.append(("pause", mode, clear_cache))
        return self.paused

    def collective_rpc(self, method: str, timeout: None, args: tuple[Any, ...]) -> Any:
        self.calls.append((method, *args[1:]))
        return self.loaded

    def set_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))

    def resume_scheduler(self) -> None:
        self.calls.append("resume")

    def load(self, first: bool, last: bool, resume_if: dict[str, str] | None) -> Any:
        return engine_core._load_bucket(self, {}, 7, first, last, False, resume_if)


def part(value: float, row: int = 0, rows: int = 2, total: int = 2) -> dict[str, Loaded]:
    """Return what a worker reports that holds `rows` of the `total` rows of the tensor w."""
    d1, d2, _ = partial_digest(torch.full((rows, 3), value), row).tolist()
    return {"w": Loaded(torch.float32, (total, 3), {(row, 0, rows, 3, d1, d2)})}


A = tensor_digest(torch.full((2, 3), 1.0))
B = tensor_digest(torch.full((2, 3), 2.0))


def test_sampling_resumes_only_with_the_expected_digests() -> None:
    for resume_if, resumes in (({"w": A}, True), ({"w": B}, False), (None, False)):
        core = Core(idle=True, loaded=[part(1.0), part(1.0)])
        core.load(True, False, resume_if)
        assert core.calls == [("pause", "keep", False), ("load_weight_bucket", 7, True, False)]
        assert core.load(False, True, resume_if) == {"w": A}
        assert core.calls[2:4] == [("load_weight_bucket", 7, False, True), ("version", "7")]
        assert core.calls[4:] == ["resume"] * resumes


def test_weights_do_not_change_before_the_running_step_has_ended() -> None:
    core = Core(idle=False, loaded=[part(1.0)])
    digests = core.load(True, True, {"w": A})
    assert core.calls == [("pause", "keep", False)]
    assert not digests.done()
    assert core.paused is not None
    core.paused.set_result(None)
    assert digests.result(timeout=0) == {"w": A}
    assert core.calls[-1] == "resume"
    assert core.input_queue.qsize() == 1, "the engine core is woken to continue running requests"


def test_sampling_does_not_resume_if_workers_hold_other_weights() -> None:
    """This holds for workers that hold the same part, and for workers that hold one part each."""
    wrong = [(part(1.0), part(2.0)), (part(1.0, 0, 1), part(2.0, 1, 1)), (part(1.0, 0, 1),)]
    for loaded in wrong:
        core = Core(idle=True, loaded=list(loaded))
        assert core.load(True, True, {"w": A})["w"] != A
        assert core.calls[-1] == ("version", "7"), "not resumed"
    halves = Core(idle=True, loaded=[part(1.0, 0, 1), part(1.0, 1, 1)])
    assert halves.load(True, True, {"w": A}) == {"w": A}
    assert halves.calls[-1] == "resume"


def test_an_error_after_a_pause_is_raised_to_the_caller() -> None:
    core = Core(idle=False, loaded=[])
    core.collective_rpc = lambda *args: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    digests = core.load(True, True, {"w": A})
    assert core.paused is not None
    core.paused.set_result(None)
    with pytest.raises(ZeroDivisionError):
        digests.result(timeout=0)
    assert core.calls == [("pause", "keep", False)], "neither a new version nor a resume"


def salted_request(salt: str | None = None, **state: int) -> Any:
    """Return a request in vLLM's engine core whose prompt has three blocks."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher, sampling = get_request_block_hasher(16, sha256), SamplingParams(max_tokens=1)
    request = Request("r", list(range(48)), sampling, None, cache_salt=salt, block_hasher=hasher)
    vars(request).update(state)
    return request


def test_a_request_that_has_not_started_shares_prefixes_of_the_new_weights() -> None:
    waiting, running, preempted = (
        salted_request("6"),
        salted_request("6", num_computed_tokens=3),
        salted_request("6", num_preemptions=1),
    )
    core = Core(idle=True, loaded=[part(1.0)])
    core.scheduler.requests = {"w": waiting, "r": running, "p": preempted}
    core.load(True, True, {"w": A})
    assert waiting.block_hashes == salted_request("7").block_hashes
    assert len(waiting.block_hashes) == 3
    earlier = salted_request("6").block_hashes
    assert running.block_hashes == preempted.block_hashes == earlier
    assert set(running.block_hashes).isdisjoint(waiting.block_hashes)


@pytest.mark.parametrize("early", [True, False])
def test_an_output_before_and_after_on_output_is_passed_on(early: bool) -> None:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r")
    output, received = ValueError("vLLM died"), []
    if early:
        collector.put(output)
    client.on_output(collector, received.append)
    if not early:
        assert received == []
        collector.put(output)
    assert received == [output]
    assert collector.get_nowait() is None


class Steps:
    """Stand-in for a reload, a watch or a reader that records its calls in one list."""

    def __init__(self, calls: list[Any], name: str, **attributes: Any) -> None:
        self._calls, self._name = calls, name
        vars(self).update(attributes)

    def __enter__(self) -> None:
        self._calls.append(f"{self._name} on")

    def __exit__(self, *_: object) -> None:
        self._calls.append(f"{self._name} off")

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._calls.append((f"{self._name}.{method}", *arguments))

        return call


def receiver(*, lasting: bool, keeps: bool = False, **more: Any) -> tuple[Any, list[Any]]:
    """Return a WeightReceiver at version 3 with recorded parts, and the record."""
    from megatron_async_rl.rollout.vllm import receive

    calls: list[Any] = []
    one: Any = receive.WeightReceiver.__new__(receive.WeightReceiver)
    watch = Steps(calls, "watch", names=set(), offer=lambda name, _: watch.names.add(name))
    vars(one).update(
        _watch=watch,
        _reload=Steps(calls, "reload", keeps=keeps),
        _reader=Steps(calls, "reader", lasting=lasting),
        _parameters=frozenset({"a", "b"}),
        _loaded={"old"},
        _incomplete=[],
        _version=3,
        _paths={"p2"},
        _paths_before={"p1"},
        receiver=None,
        device=torch.device("cpu"),
        model=SimpleNamespace(parameters=lambda: "parameters"),
    )
    vars(one).update(more)
    return one, calls


def bucket(path: str, *names: str) -> Any:
    from megatron_async_rl.rollout.vllm import receive

    entries = [
        {"name": name, "dtype": "float32", "shape": [2, 3], "offset": 0, "nbytes": 24}
        for name in names
    ]
    return receive.BucketInfo(path=path, size=64, nbytes=24, entries=entries)


@pytest.mark.parametrize("lasting", [True, False])
def test_an_update_reads_its_buckets_and_keeps_those_of_two_versions(lasting: bool) -> None:
    one, calls = receiver(lasting=lasting)
    memory = torch.zeros(2, 3)
    one._reader.read = lambda ref: ((entry.name, memory) for entry in ref.entries)

    def load(offered: Any) -> set[str]:
        tensors = dict(offered)
        assert all(tensor is memory for tensor in tensors.values())
        calls.append(("load", *tensors))
        return set(tensors)

    one._reload.load, one._reload.end = load, lambda: ["half"]
    one.start_weight_update()
    one.receive_weights(bucket("p3", "a", "b"))
    one.receive_weights(bucket("p4", "c"))
    one.finish_weight_update()
    assert calls == [
        *(("reload.begin",), ("watch.begin", "parameters")),
        *("watch on", ("load", "a", "b"), "watch off"),
        *("watch on", ("load", "c"), "watch off"),
        *("watch on", "watch off"),
        ("reader.keep", {"p2", "p3", "p4"} if lasting else ()),
    ]
    assert (one._loaded, one._incomplete) == ({"a", "b", "c"}, ["half"])
    with pytest.raises(ValueError, match="update to version 3 has tensor a more than once"):
        one.receive_weights(bucket("p5", "a"))


@looped(
    ("keeps", "lasting", "copied"),
    [(True, True, False), (True, False, True), (False, False, False), (False, True, False)],
)
def test_a_tensor_is_copied_if_the_reload_outlives_its_bucket(
    keeps: bool, lasting: bool, copied: bool
) -> None:
    one, _ = receiver(lasting=lasting, keeps=keeps)
    memory = torch.ones(2, 3)
    one._reader.read = lambda ref: [("a", memory)]
    ((name, tensor),) = one._offered(bucket("p", "a").ref())
    assert (name, tensor is not memory, torch.equal(tensor, memory)) == ("a", copied, True)


def test_a_version_must_be_newer_than_the_engines() -> None:
    one, calls = receiver(lasting=True)
    for old in (2, 3):
        with pytest.raises(ValueError, match=f"version {old} was refused: .*engine's version, 3$"):
            one.accept(old)
    one.accept(4)
    assert one._version == 4
    one.shutdown()
    assert calls == [("reader.keep", ())]
    one.receiver, one._reader = Steps(calls, "receiver"), None
    one.shutdown()
    assert calls[1:] == [("receiver.close",)]


def test_a_bucket_has_its_entries_with_shapes() -> None:
    reference = bucket("p", "a").ref()
    assert (reference.path, reference.size, reference.nbytes) == ("p", 64, 24)
    (entry,) = reference.entries
    assert (entry.name, entry.shape, entry.nbytes) == ("a", (2, 3), 24)


def test_an_update_that_left_out_a_part_of_a_fused_parameter_names_it() -> None:
    from megatron_async_rl.rollout.vllm import receive

    parameters = ("l.0.qkv_proj.weight", "l.0.qkv_proj.bias", "l.0.o.weight", "norm", "qkv_proj.b")
    fused = {"qkv_proj": ["q", "k"]}
    received = {"l.0.q.weight", "l.0.k.weight", "l.0.k.bias", "q.b"}
    missing = receive.missing_parameters(parameters, {"norm"}, received, fused)
    assert missing == ["k.b", "l.0.o.weight", "l.0.q.bias"]

    one, _ = receiver(lasting=True, _parameters=frozenset(f"w{n}" for n in range(10)))
    one._loaded = {"w0"}
    one._watch.names.update(("x", "y"))
    expected = ", ".join(f"w{n}" for n in range(1, 9))
    text = f"the update to version 3 had 2 tensors and left out 9: {expected}, ..."
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        one.require_complete()
    one._loaded = {"w0", "w9"}
    with pytest.raises(RuntimeError, match=r"left out 8: w1, w2, w3, w4, w5, w6, w7, w8$"):
        one.require_complete()
    one._loaded, one._incomplete = one._parameters, ["half"]
    with pytest.raises(RuntimeError, match=r"left out 1: half$"):
        one.require_complete()
    one._incomplete = []
    one.model.packed_modules_mapping = {"w1": ["part"]}
    one._parameters = frozenset({"w1.weight"})
    with pytest.raises(RuntimeError, match=r"left out 1: part\.weight$"):
        one.require_complete()
    one._watch.names.add("part.weight")
    one.require_complete()


def test_a_worker_accepts_a_version_before_it_changes_a_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_async_rl.rollout.vllm import receive

    calls: list[Any] = []
    monkeypatch.setattr(receive, "return_freed_memory", lambda: calls.append("freed"))
    worker: Any = Steps(calls, "worker", rank=1, device=torch.device("cpu"))
    worker.weight_transfer_engine = Steps(calls, "engine", receiver=None, loaded=lambda: "parts")
    load = receive.WeightLoadingWorker.load_weight_bucket
    assert load(worker, {"b": 1}, 7, True, False) == {}
    assert load(worker, {"b": 2}, 7, False, True) == "parts"
    assert calls == [
        ("engine.accept", 7),
        ("worker.start_weight_update",),
        ("worker.update_weights", {"b": 1}),
        ("worker.update_weights", {"b": 2}),
        ("worker.finish_weight_update",),
        ("engine.require_complete",),
        "freed",
    ]
    calls.clear()
    on_gpu: Any = Steps(calls, "worker", rank=1, device=torch.device("cuda"))
    on_gpu.weight_transfer_engine = worker.weight_transfer_engine
    assert load(on_gpu, {"b": 2}, 7, False, True) == "parts"
    assert "freed" not in calls
    calls.clear()

    def made(rank: int, device: torch.device) -> Steps:
        calls.append((rank, device))
        return Steps(calls, "receiver")

    worker.weight_transfer_engine.new_receiver = made
    for version in (1, 2):
        receive.WeightLoadingWorker.receive_version(worker, pickle.dumps(version))
    device = torch.device("cpu")
    assert calls == [(1, device), ("receiver.receive", 1), ("receiver.receive", 2)]
    monkeypatch.setattr(receive, "complete_cpu_worker", calls.append)
    receive.WeightLoadingWorker.complete_on_cpu(worker)
    assert calls[-1] is worker


def test_a_receiver_starts_at_the_version_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async_rl.rollout.vllm import receive

    one, calls = receiver(lasting=True)
    monkeypatch.setattr(receive, "remove_stale", lambda folder: calls.append(folder))
    chosen = SimpleNamespace(reader=lambda: "reader")
    monkeypatch.setattr(receive, "carrier", lambda name: calls.append(name) or chosen)
    one.init_transfer_engine(receive.FirstVersion(version=9, transport="shared_memory"))
    assert calls == [receive.SHARED_MEMORY, "shared_memory"]
    assert (one._version, one._reader) == (9, "reader")
    module = SimpleNamespace(Receiver=lambda *given: given)
    monkeypatch.setattr(receive, "carrier_module", {"shared_memory": module}.get)
    assert one.new_receiver(1, torch.device("cpu")) == (1, torch.device("cpu"))


class FakeLayer(torch.nn.Module):
    """Linear layer or experts whose weights were packed. `packs`: states of the weights when the
    layer was packed."""

    def __init__(self, *attributes: str) -> None:
        super().__init__()
        self.attributes = attributes
        self.packs: list[dict[str, list[float]]] = []
        self.cpu_linear: Any = "old"
        self.quant_method = SimpleNamespace(
            process_weights_after_loading=self._pack,
            moe_kernel=SimpleNamespace(
                fused_experts=SimpleNamespace(
                    process_weights_after_loading=lambda layer: self.packs.append({})
                )
            ),
        )

    def _pack(self, layer: Any) -> None:
        assert layer is self
        weights = {name: getattr(self, name) for name in self.attributes}
        self.packs.append({name: one.flatten().tolist() for name, one in weights.items()})
        self.cpu_linear = lambda inputs, weight, bias: (inputs, weight, bias)


def load_rows(parameter: Any, piece: torch.Tensor, row: int | None = None) -> str:
    """Load rows of a weight, as vLLM's loaders do."""
    rows = slice(None) if row is None else slice(row, row + len(piece))
    parameter.data[rows].copy_(piece)
    return "loaded"


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace vLLM's records of original weights by [2, 3] float32. Return the sizes of the pieces
    that were measured."""
    from megatron_async_rl.rollout.vllm import reload

    measured: list[int] = []

    def original(layer: FakeLayer) -> Any:
        weights = {}
        for name in layer.attributes:
            weights[name] = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
            weights[name].weight_loader = load_rows
        return SimpleNamespace(restore_metadata=[weights])

    def numel(loader: Any, bound: inspect.BoundArguments) -> tuple[int, Any]:
        measured.append(bound.arguments["piece"].numel())
        return measured[-1], loader(*bound.args, **bound.kwargs)

    monkeypatch.setattr(reload, "get_layerwise_info", original)
    monkeypatch.setattr(reload, "restore_layer_refs", lambda parameter, layer: parameter)
    monkeypatch.setattr(reload, "get_numel_loaded", numel)
    return measured


ROWS = torch.arange(6.0).view(2, 3)


def test_a_linear_layer_is_packed_once_its_last_piece_has_arrived(layers: list[int]) -> None:
    from megatron_async_rl.rollout.vllm import reload

    layer, scratch, taken = FakeLayer("weight"), reload.Scratch(), list[Any]()
    packed = reload.PackedLinear("l.0", layer, scratch, taken.append)
    (weight,) = packed.weights
    assert (weight.name, weight.full) == ("l.0.weight", True)
    for update in (1, 2):
        packed.await_pieces()
        assert (layer.cpu_linear, weight.full, layer.weight.numel()) == (None, False, 0)
        load = layer.weight.weight_loader
        assert load(layer.weight, update * ROWS[:1], 0) == "loaded"
        assert len(layer.packs) == update - 1
        assert load(layer.weight, piece=update * ROWS[1:], row=1) == "loaded"
        assert layer.packs[-1] == {"weight": (update * ROWS).flatten().tolist()}
        assert (weight.full, layer.weight.numel(), callable(layer.cpu_linear)) == (True, 0, True)
        with pytest.raises(RuntimeError, match=r"has more than the 6 elements of l\.0\.weight;"):
            load(layer.weight, ROWS[:1], 0)
    # A size is measured at the first load of a piece. The memory of the first update was reused.
    assert (layers, taken) == ([3, 3], [])
    assert [len(free) for free in scratch._free.values()] == [1]


def test_a_whole_weight_is_used_without_a_copy(layers: list[int]) -> None:
    from megatron_async_rl.rollout.vllm import reload

    layer, scratch, taken = FakeLayer("weight"), reload.Scratch(), list[Any]()
    packed = reload.PackedLinear("l", layer, scratch, taken.append)
    packed.await_pieces()
    assert layer.weight.weight_loader(layer.weight, ROWS) is None
    assert (len(taken), taken[0] is ROWS, layers, scratch._free) == (1, True, [], {})
    assert layer.packs == [{"weight": ROWS.flatten().tolist()}]
    # A tensor of another dtype or shape, and a part with the shape of the whole, are copied.
    for piece, part in ((ROWS.half(), None), (ROWS, 0)):
        packed.await_pieces()
        assert layer.weight.weight_loader(layer.weight, piece, part) == "loaded"
        assert layer.packs[-1] == {"weight": ROWS.flatten().tolist()}
    assert (len(taken), layers) == (1, [6, 6])


def test_experts_are_packed_once_both_weights_are_complete(layers: list[int]) -> None:
    from megatron_async_rl.rollout.vllm import reload

    layer = FakeLayer("w13_weight", "w2_weight")
    packed = reload.PackedExperts("e", layer, lambda tensor: None)
    packed.await_pieces()
    layer.w13_weight.weight_loader(layer.w13_weight, ROWS)
    assert layer.packs == []
    layer.w2_weight.weight_loader(layer.w2_weight, 2 * ROWS)
    both = {"w13_weight": ROWS.flatten().tolist(), "w2_weight": (2 * ROWS).flatten().tolist()}
    assert layer.packs == [both, {}]
    assert [one.parameter.numel() for one in packed.weights] == [0, 0]


def test_an_expert_of_another_worker_is_not_a_piece_of_the_weight(
    layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This worker has expert 1, in row 0."""
    from megatron_async_rl.rollout.vllm import reload

    def load_expert(parameter: Any, piece: torch.Tensor, expert_id: int) -> bool:
        if expert_id == 1:
            parameter.data[:1].copy_(piece)
        return expert_id == 1

    layer = FakeLayer("weight")
    local = {0: -1, 1: 0}
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=local.__getitem__)
    packed = reload.PackedLinear("l", layer, reload.Scratch(), lambda tensor: None)
    packed.await_pieces()
    (weight,) = packed.weights
    monkeypatch.setattr(weight, "_loader", load_expert)
    monkeypatch.setattr(weight, "_signature", inspect.signature(load_expert))
    load = layer.weight.weight_loader
    assert load(layer.weight, ROWS[:1], expert_id=0) is False
    assert load(layer.weight, ROWS[:1], 1) is True
    assert (layers, weight._received, layer.packs) == ([3], 3, [])


def test_an_in_place_reload_packs_heads_and_names_incomplete_weights(layers: list[int]) -> None:
    from megatron_async_rl.rollout.vllm import reload

    linear, head, lookup = FakeLayer("weight"), FakeLayer(), FakeLayer()
    one: Any = reload.InPlaceReload.__new__(reload.InPlaceReload)
    vars(one).update(
        _model=SimpleNamespace(load_weights=lambda tensors: {name for name, _ in tensors}),
        _packed=[reload.PackedLinear("l", linear, reload.Scratch(), lambda tensor: None)],
        _heads=[head],
        _lookups=[lookup],
    )
    one.begin()
    assert one.load([("a", ROWS)]) == {"a"}
    assert one.end() == ["l.weight"]
    assert (head.packs, lookup.packs, linear.packs) == ([{}], [], [])
    # An embedding is packed at its first use as a linear layer.
    assert lookup.cpu_linear("x", "w", None) == ("x", "w", None)
    assert lookup.cpu_linear("y", "w", None) == ("y", "w", None)
    assert lookup.packs == [{}]
    linear.weight.weight_loader(linear.weight, ROWS)
    assert one.end() == []


def test_tied_layers_are_those_with_an_earlier_layers_weight() -> None:
    from megatron_async_rl.rollout.vllm import reload

    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)), torch.nn.ReLU())
    assert reload.tied_layers(model) == []
    model[2].weight = model[0].weight
    assert reload.tied_layers(model) == [model[2]]
    model[0].weight.data = torch.empty(0)
    assert reload.tied_layers(model) == []


def test_a_layerwise_reload_packs_tied_layers_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async_rl.rollout.vllm import reload

    calls: list[Any] = []
    tied = FakeLayer()
    monkeypatch.setattr(reload, "tied_layers", lambda model: [tied])
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(reload, name, lambda *given, name=name: calls.append((name, *given)))
    model: Any = SimpleNamespace(load_weights=lambda tensors: {name for name, _ in tensors})
    one = reload.LayerwiseReload(model, "config")  # type: ignore[arg-type]
    one.begin()
    assert one.load([("a", ROWS)]) == {"a"}
    assert tied.packs == []
    assert one.end() == []
    assert tied.packs == [{}]
    assert calls == [
        ("initialize_layerwise_reload", model),
        ("finalize_layerwise_reload", model, "config"),
    ]
    assert (one.keeps, reload.InPlaceReload.keeps) == (True, False)


def test_derived_parameters_receive_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async_rl.rollout.vllm import reload

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    known = {id(model[0]): {"weight": None}, id(model[1]): {}}
    monkeypatch.setattr(
        reload,
        "get_layerwise_info",
        lambda layer: SimpleNamespace(restore_metadata=[known[id(layer)]]),
    )
    assert reload.loaded_parameters(model) == {"0.weight", "1.weight", "1.bias"}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_in_place_reload_packs_only_layers_with_packed_weights(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    from megatron_async_rl.rollout.vllm import reload

    kinds = {"head": reload.ParallelLMHead, "lookup": reload.VocabParallelEmbedding}
    layers: dict[str, Any] = {name: kind.__new__(kind) for name, kind in kinds.items()}
    layers |= {name: object() for name in ("experts", "linear", "norm")}
    monkeypatch.setattr(reload.current_platform, "is_cpu", lambda: on_cpu)
    monkeypatch.setattr(reload, "are_packed_experts", lambda one: one is layers["experts"])
    monkeypatch.setattr(reload, "keeps_only_packed", lambda one: one is layers["linear"])
    for kind in ("PackedExperts", "PackedLinear"):
        monkeypatch.setattr(
            reload, kind, lambda name, layer, *more, kind=kind: (kind, name, layer, more[-1])
        )
    model: Any = SimpleNamespace(named_modules=layers.items)
    one: Any = reload.InPlaceReload(model, "take")  # type: ignore[arg-type]
    assert (one._model, one._heads, one._lookups) == (
        model,
        [layers["head"]] * on_cpu,
        [layers["lookup"]] * on_cpu,
    )
    assert one._packed == on_cpu * [
        ("PackedExperts", "experts", layers["experts"], "take"),
        ("PackedLinear", "linear", layers["linear"], "take"),
    ]


class Packing:
    """A layer that processes its weights in an unknown way."""

    def process_weights_after_loading(self) -> None: ...


def test_a_layer_that_may_hold_copies_prevents_a_reload_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_async_rl.rollout.vllm import reload

    known = reload.UnquantizedLinearMethod.__new__(reload.UnquantizedLinearMethod)
    other = type("Other", (reload.UnquantizedLinearMethod,), {})
    unknown = other.__new__(other)
    layer = SimpleNamespace
    deferred = layer(quant_method=None, deferred=True)
    monkeypatch.setattr(
        reload, "is_deferred_attention_layer", lambda one: getattr(one, "deferred", False)
    )
    monkeypatch.setattr(reload, "are_packed_experts", lambda one: getattr(one, "experts", False))
    platform = layer(device_name="XPU")
    monkeypatch.setattr(reload, "current_platform", platform)

    def obstacle(*, zen: bool = False, cpu: bool = True, cuda: bool = False, **layers: Any) -> Any:
        vars(platform).update(is_zen_cpu=lambda: zen, is_cpu=lambda: cpu, is_cuda=lambda: cuda)
        return reload._obstacle(layer(named_modules=lambda: layers.items()))  # type: ignore[arg-type]

    everything = {
        "linear": layer(quant_method=known),
        "experts": layer(quant_method=unknown, experts=True),
        "plain": layer(),
    }
    assert obstacle(**everything) is None
    assert obstacle(cpu=False, cuda=True, **everything) is None
    for given in ({"zen": True}, {"cpu": False}):
        assert obstacle(**given) == "its kernels on XPU may hold copies of a weight"
    names = ("is of type SimpleNamespace with Other", "is of type Packing")
    for one, what in zip((layer(quant_method=unknown), Packing()), names, strict=True):
        assert obstacle(x=one) == f"layer x {what}"
    assert obstacle(**{"a.quant_method.b": Packing()}) is None
    assert obstacle(attention=deferred) == "layer attention is of type SimpleNamespace"
    monkeypatch.setattr(reload, "Attention", SimpleNamespace)
    assert obstacle(attention=deferred) is None
    assert obstacle(attention=layer(quant_method=known, deferred=True)) is not None


def test_the_reload_of_a_model_is_in_place_if_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async_rl.rollout.vllm import reload

    monkeypatch.setattr(reload, "InPlaceReload", lambda *given: ("in place", *given))
    monkeypatch.setattr(reload, "LayerwiseReload", lambda *given: ("layer-wise", *given))
    cpu = [True]
    platform = SimpleNamespace(is_cpu=lambda: cpu[0])
    monkeypatch.setattr(reload, "current_platform", platform)
    experts = reload.UnquantizedFusedMoEMethod.__new__(reload.UnquantizedFusedMoEMethod)
    plain: Any = SimpleNamespace(modules=lambda: [SimpleNamespace()])
    mixture: Any = SimpleNamespace(modules=lambda: [SimpleNamespace(quant_method=experts)])

    def chosen(model: Any) -> Any:
        return reload.reload_of(model, "config", "take")  # type: ignore[arg-type]

    monkeypatch.setattr(reload, "_obstacle", lambda model: None)
    assert chosen(mixture) == ("in place", mixture, "take")
    monkeypatch.setattr(reload, "_obstacle", lambda model: "a reason")
    assert chosen(plain) == ("layer-wise", plain, "config")
    with pytest.raises(RuntimeError, match="mixture of experts on a CPU, because a reason: run"):
        chosen(mixture)
    cpu[0] = False
    assert chosen(mixture) == ("layer-wise", mixture, "config")
