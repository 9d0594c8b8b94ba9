"""How the previous gradient is kept: in which numbers, with which error, and in whose memory."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_async_rl import controls, gradients
from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.controls import alignment, reference
from megatron_async_rl.controls.decision import Decision, combined
from megatron_async_rl.controls.gac import Gac
from megatron_async_rl.controls.quantize import BLOCK, dequantize, room_for
from megatron_async_rl.controls.reference import GradientReference, copies_for, kernels_for
from tests.cases import looped
from tests.gradients import OneRank, Shard, aligned, flat, step
from tests.quantized import quantize

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4.0 / BLOCK}
RELATIVE = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4}


def wild(size, seed=0):
    """Numbers over twelve orders of magnitude, some blocks all zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=draw) * 10.0 ** torch.randint(
        -9, 3, (size,), generator=draw
    )
    values[BLOCK : 2 * BLOCK] = 0.0
    return values


@looped("number_format", ["fp32", "bf16", "fp8"])
@looped("shape", [(1,), (7, 33), (BLOCK,), (5, BLOCK + 1)])
def test_what_is_read_back_is_within_the_stated_error(number_format, shape):
    values = wild(torch.Size(shape).numel()).view(shape)
    read = dequantize(quantize(values, number_format), values.shape)
    assert read.shape == values.shape
    assert read.dtype == torch.float32
    flat_values = values.flatten()
    blocks = torch.nn.functional.pad(flat_values, (0, -flat_values.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1).repeat_interleave(BLOCK)[: flat_values.numel()].view(shape)
    allowed = values.abs() * RELATIVE[number_format] + (
        largest * 2.0**-18 if number_format == "fp8" else 0.0
    )
    assert ((read - values).abs() <= allowed).all()


@pytest.mark.parametrize("number_format", ["fp32", "bf16", "fp8"])
def test_writing_again_what_was_read_gives_the_same_bits(number_format):
    values = wild(10 * BLOCK + 3)
    read = dequantize(quantize(values, number_format), values.shape)
    assert torch.equal(dequantize(quantize(read, number_format), values.shape), read)


@pytest.mark.parametrize("extreme", [1e-42, 1e-30, 3e38])
def test_a_block_of_the_smallest_or_largest_floats_is_finite_and_in_proportion(extreme):
    values = torch.full((BLOCK,), extreme)
    written = quantize(values, "fp8")
    assert written[1].min() >= torch.finfo(torch.float32).tiny, (
        "a device that flushes small numbers would divide by 0"
    )
    read = dequantize(written, values.shape)
    assert torch.isfinite(read).all()
    assert (read - values).abs().max() <= max(extreme * 2.0**-4, 2.0**-126)


@pytest.mark.parametrize("number_format", ["fp32", "bf16", "fp8"])
def test_a_reference_takes_the_bytes_that_its_numbers_need(number_format):
    size = 100 * BLOCK
    assert (
        sum(part.nbytes for part in quantize(wild(size), number_format))
        == size * BYTES[number_format]
    )


@looped(("number_format", "error"), [("fp32", 1e-6), ("bf16", 2e-4), ("fp8", 3e-3)])
@looped("c", [-0.5, 0.05, 0.3, 0.9])
def test_the_cosine_with_a_compressed_reference_is_close_to_the_exact_one(number_format, error, c):
    control = Gac(GacControl(reference_dtype=number_format))
    first, second = aligned(c, size=30_000)
    control.apply(step(first))
    assert control.apply(step(second)).metrics["gac/cosine"] == pytest.approx(c, abs=error)


@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
def test_projection_reaches_the_threshold_against_the_reference_that_was_kept(number_format):
    control = Gac(GacControl(c_low=0.15, reference_dtype=number_format))
    first, second = aligned(0.9)
    control.apply(step(first))
    kept = torch.cat([shard.flatten() for shard in control.shard_state()["reference"]]).double()
    control.apply(step(second))
    after = flat(second)
    assert float(after @ kept / (after.norm() * kept.norm())) == pytest.approx(0.15, abs=2e-6)


def test_every_8_bit_number_is_read_as_torch_reads_it():
    numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(2, BLOCK)
    finite = ~numbers.float().isnan()
    for scale in (2.0**-126, 1.0, 2.0**119):
        scales = torch.full((2, 1), scale)
        read = dequantize((numbers, scales), numbers.shape)
        assert torch.equal(read[finite], (numbers.float() * scales)[finite])


class LateCopies:
    """A side stream at its slowest: nothing is copied before something waits for it, then
    everything up to it is."""

    def __init__(self):
        self.pending = []
        self.waits = 0

    def start(self, source, target):
        if target.dtype.is_floating_point and target.dtype.itemsize > 1:
            target.fill_(float("nan"))
        self.pending.append((source, target))
        mine = len(self.pending)
        return lambda: self._through(mine)

    def finish(self):
        self._through(len(self.pending))

    def host_room(self, elements, dtype):
        return room_for(elements, dtype, torch.device("cpu"))

    def _through(self, last):
        self.waits += 1
        for index in range(last):
            if self.pending[index] is not None:
                source, target = self.pending[index]
                target.copy_(source)
                self.pending[index] = None


def run(control):
    metrics, after = [], []
    for seed, c in enumerate((0.9, 0.5, 0.05, 0.95, 0.3)):
        first, second = aligned(c, size=1000, seed=seed)
        for each in (first, second):
            metrics.append(dict(control.apply(step(each)).metrics))
            after.append(flat(each))
            for shard in each.shards:
                # The optimizer and the next backward write over the gradient as soon as the control
                # is done with it.
                shard.grad.fill_(1e9)
    return metrics, after


@looped("reference", ["raw", "applied"])
@looped("number_format", ["fp32", "bf16", "fp8"])
def test_an_offloaded_reference_gives_the_same_bits_however_late_its_copies_are(
    monkeypatch, number_format, reference
):
    monkeypatch.setattr(gradients, "CPU_BLOCK", BLOCK)
    settings = {"c_low": 0.15, "reference_dtype": number_format, "reference": reference}
    metrics, after = run(Gac(GacControl(**settings)))
    late = LateCopies()
    plain, plain_after = run(Gac(GacControl(**settings, reference_offload="cpu")))
    monkeypatch.setattr(alignment, "copies_for", lambda device: late)
    offloaded = Gac(GacControl(**settings, reference_offload="cpu"))
    offloaded_metrics, offloaded_after = run(offloaded)
    assert late.waits > 0
    assert metrics == plain == offloaded_metrics
    for one, two, three in zip(after, plain_after, offloaded_after, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    # What a checkpoint reads has arrived too.
    assert all(torch.isfinite(shard).all() for shard in offloaded.shard_state()["reference"])


@looped("offload", ["none", "cpu"])
@looped("number_format", ["fp32", "bf16", "fp8"])
def test_a_reference_survives_a_save_and_load_to_the_bit(number_format, offload):
    settings = GacControl(reference_dtype=number_format, reference_offload=offload)
    through, resumed = Gac(settings), Gac(settings)
    first, second = aligned(0.7)
    through.apply(step(first))
    resumed.load_state_dict(through.state_dict())
    resumed.load_shard_state(through.shard_state())
    again = OneRank([Shard(shard.grad.clone()) for shard in second.shards])
    assert resumed.apply(step(again)).metrics == through.apply(step(second)).metrics
    assert torch.equal(flat(again), flat(second))


def test_a_gradient_in_bfloat16_is_projected_like_one_in_float32():
    first, second = aligned(0.8)
    control = Gac(GacControl(c_low=0.15))
    for each in (first, second):
        halved = OneRank([Shard(shard.grad.bfloat16()) for shard in each.shards])
        metrics = control.apply(step(halved)).metrics
    assert metrics["gac/cosine"] == pytest.approx(0.8, abs=2e-3)
    assert float(
        flat(halved) @ flat(first) / (flat(halved).norm() * flat(first).norm())
    ) == pytest.approx(0.15, abs=1e-2)


def test_copies_to_host_memory_are_ordered_on_a_stream_of_their_own(monkeypatch):
    log = []

    def noted(name):
        return lambda *given, **named: log.append((name, *given, *named.items()))

    stream = SimpleNamespace(
        wait_stream=noted("wait_stream"), synchronize=lambda: log.append("synchronize")
    )
    current = SimpleNamespace(wait_event=noted("wait_event"))
    event = SimpleNamespace(record=noted("record"))

    @contextmanager
    def entered(one):
        assert one is stream
        log.append("enter")
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: log.append(str(device)) or stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: log.append("pin") or self)
    source = SimpleNamespace(is_cuda=True, record_stream=noted("source"))
    target = SimpleNamespace(is_cuda=False, copy_=noted("copy"), record_stream=noted("target"))
    copies = copies_for(torch.device("cuda", 1))
    wait = copies.start(source, target)
    begun = [("wait_stream", current), "enter", ("copy", source, ("non_blocking", True))]
    begun += [("record", stream), "leave", ("source", stream)]
    assert log == ["cuda:1", *begun]
    log.clear()
    wait()
    copies.finish()
    assert log == [("wait_event", event), "synchronize"]
    log.clear()
    parts = copies.host_room(300, "fp8")
    assert [part.shape for part in parts] == [
        part.shape for part in room_for(300, "fp8", torch.device("cpu"))
    ]
    assert log == ["pin", "pin"]
    assert copies_for(torch.device("cpu")) is None


def test_kernels_need_cuda_triton_and_for_fp8_a_new_device(monkeypatch):
    module = SimpleNamespace()
    monkeypatch.setattr(controls, "gac_kernels", module, raising=False)
    monkeypatch.setitem(sys.modules, "megatron_async_rl.controls.gac_kernels", module)
    capability, triton = (8, 9), object()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(reference, "find_spec", lambda name: triton)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    device = torch.device("cuda", 0)
    for number_format in ("fp32", "bf16", "fp8"):
        assert kernels_for(device, number_format) is module
    assert kernels_for(torch.device("cpu"), "fp32") is None
    capability = (8, 8)
    assert kernels_for(device, "fp8") is None
    assert kernels_for(device, "bf16") is module
    triton = None
    assert kernels_for(device, "bf16") is None
    triton = object()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert kernels_for(device, "bf16") is None


def test_kernels_add_up_the_products_of_all_shards(monkeypatch):
    calls = []

    def three_products(gradient, written, known):
        calls.append((gradient, written, known))
        return torch.tensor([gradient, 2.0, 3.0], dtype=torch.float64)

    kernels = SimpleNamespace(three_products=three_products)
    monkeypatch.setattr(reference, "kernels_for", lambda *_: kernels)
    one = GradientReference("fp32", torch.device("cpu"), None, [torch.Size([4])])
    pairs = [(1.0, ("a",)), (5.0, ("b",))]
    found = one.products(pairs, True, torch.device("cpu"))
    assert found.tolist() == [6.0, 4.0, 6.0]
    assert found.dtype == torch.float64
    assert calls == [(1.0, ("a",), True), (5.0, ("b",), True)]


def test_decisions_multiply_and_the_last_of_a_kind_applies():
    decisions = [
        Decision(lr_scale=0.5, gradient_scale=4.0, beta1=0.9, norm_before=3.0, metrics={"a": 1.0}),
        Decision(lr_scale=3.0, gradient_scale=0.5, norm_before=5.0, norm_after=2.0),
        Decision(beta1=0.8, norm_after=1.0, metrics={"a": 2.0, "b": 3.0}),
    ]
    whole = Decision(
        lr_scale=1.5,
        gradient_scale=2.0,
        beta1=0.8,
        norm_before=3.0,
        norm_after=1.0,
        metrics={"a": 2.0, "b": 3.0},
    )
    assert combined(decisions) == whole
    assert combined([]) == Decision()
    for place in range(3):
        skipping = [replace(one, skip=at == place) for at, one in enumerate(decisions)]
        assert combined(skipping) == replace(whole, skip=True)


def test_the_state_of_gradient_alignment_is_restored_whole():
    control = GacControl(calibrate={"steps": 4})
    one, other = Gac(control), Gac(control)
    one.counts, one.cosines = [3, 2, 1], [4, 5, 6]
    one.cosine_sums, one.consecutive_skips = [0.5, -0.25, 0.125], 7
    one.reference_fresh, one.reference_square = True, 2.5
    state = one.state_dict()
    assert set(state) == {
        *("counts", "cosines", "cosine_sums", "consecutive_skips", "reference_fresh"),
        *("reference_square", "calibration"),
    }
    other.load_state_dict(state)
    assert other.state_dict() == state
    one.counts[0] = 9
    assert other.counts == [3, 2, 1], "a copy"
    del state["reference_square"]
    other.load_state_dict({**state, "calibration": None})
    assert other.reference_square is None
    assert one.device_state() == []
