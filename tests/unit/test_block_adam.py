"""Adam with moments in bfloat16 or elsewhere, against torch's; the settings that choose it, and
what the plan counts for them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.gradients import CPU_BLOCK
from megatron_async_rl.plan.memory import rank_memory
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.resume import checkpoint_problems
from megatron_async_rl.policy.adam_view import AdamView, StateMissing, TakenStep
from megatron_async_rl.policy.optimizer import BlockAdam
from tests.written_run import write_run

SHAPES = ((3, 5), (CPU_BLOCK + 17,), (257, 2 * CPU_BLOCK // 257), (1,))
"""Shapes of one block, and of several whose last is short."""
BETAS = (0.9, 0.95)
LAST = TakenStep(1e-2, BETAS[0])
ROUNDING = 2.0**-8
"""Rounding of bfloat16, relative."""


class Run:
    """Parameters that one optimizer steps, on gradients that are the same in every run; as the part
    of Megatron's optimizer that the view of Adam reads."""

    def __init__(self, build, decay=0.3):
        self.draw = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=self.draw)) for shape in SHAPES
        ]
        groups = [
            {"params": self.parameters[:2], "weight_decay": decay},
            {"params": self.parameters[2:], "weight_decay": 0.0},
        ]
        plain = torch.optim.AdamW(groups, lr=LAST.lr, betas=BETAS, eps=1e-8, foreach=False)
        self.optimizer = build(plain)
        self.param_groups = self.optimizer.param_groups

    def next_gradients(self):
        for parameter in self.parameters:
            size = 10.0 ** float(torch.randn((), generator=self.draw))
            parameter.grad = size * torch.randn(parameter.shape, generator=self.draw)

    def steps(self, count):
        for _ in range(count):
            self.next_gradients()
            self.optimizer.step()
        return self

    def of(self, name):
        return [self.optimizer.state[parameter][name] for parameter in self.parameters]


def plain(optimizer):
    return optimizer


def rounding(optimizer):
    return BlockAdam(optimizer, dtype=torch.bfloat16)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_with_moments_in_float32_a_step_is_torchs_bit_for_bit():
    ours, torchs = Run(BlockAdam).steps(12), Run(plain).steps(12)
    assert same(ours.parameters, torchs.parameters)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert same(ours.of(name), torchs.of(name)), name
    assert ours.of("exp_avg")[0].dtype == torch.float32


class OnHost(torch.Tensor):
    """Stand-in for page-locked memory: reading it makes a copy, and written data arrives once
    the writer has waited."""

    waiting: ClassVar[list] = []

    def to(self, *_, **__):
        return self.as_subclass(torch.Tensor).clone()

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        self.waiting.append((self.as_subclass(torch.Tensor), source.clone()))
        return self

    @classmethod
    def arrive(cls):
        while cls.waiting:
            place, source = cls.waiting.pop()
            place.copy_(source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_on_the_host_give_the_steps_of_moments_on_the_device_bit_for_bit(
    dtype, monkeypatch
):
    zeros = torch.zeros

    def allocate(*shape, pin_memory=False, device=None, **options):
        assert (device == "cpu") == pin_memory
        found = zeros(*shape, **options)
        return found.as_subclass(OnHost) if pin_memory else found

    here = Run(lambda adam: BlockAdam(adam, dtype=dtype)).steps(6)
    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(BlockAdam, "_offloads", lambda adam, _: adam.offload)
    stream = SimpleNamespace(synchronize=OnHost.arrive)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    there = Run(lambda adam: BlockAdam(adam, dtype=dtype, offload=True)).steps(6)
    assert same(there.parameters, here.parameters)
    for name in ("exp_avg", "exp_avg_sq"):
        assert {type(each) for each in there.of(name)} == {OnHost}
        assert {each.dtype for each in there.of(name)} == {dtype}
        assert same(map(host_values, there.of(name)), here.of(name)), name
    assert same(there.of("step"), here.of("step"))


def host_values(tensor):
    return tensor.as_subclass(torch.Tensor)


def test_a_step_rounds_float32s_moments_to_bfloat16_and_applies_them_before():
    """From the same moments: the weights are to the bit those of float32, the moments its
    rounding."""
    ours, torchs = Run(rounding).steps(5), Run(plain).steps(5)
    for mine, theirs in zip(ours.parameters, torchs.parameters, strict=True):
        theirs.data.copy_(mine.data)
    for name in ("exp_avg", "exp_avg_sq"):
        for mine, theirs in zip(ours.of(name), torchs.of(name), strict=True):
            theirs.copy_(mine)
    ours.steps(1), torchs.steps(1)
    assert same(ours.parameters, torchs.parameters)
    for name in ("exp_avg", "exp_avg_sq"):
        assert {each.dtype for each in ours.of(name)} == {torch.bfloat16}
        assert same(ours.of(name), [each.bfloat16() for each in torchs.of(name)])


def test_moments_in_bfloat16_follow_float32s_within_the_bound_of_their_rounding():
    """Each step rounds by up to 2^-8, and what it has rounded decays with the moment: 2^-8 times
    the sum of beta^k |moment k steps ago|."""
    ours, torchs = Run(rounding), Run(plain)
    sums = {name: [torch.zeros(s) for s in SHAPES] for name in ("exp_avg", "exp_avg_sq")}
    for _ in range(100):
        ours.steps(1), torchs.steps(1)
        for (name, held), beta in zip(sums.items(), BETAS, strict=True):
            for total, mine, theirs in zip(held, ours.of(name), torchs.of(name), strict=True):
                error = (mine.float() - theirs).abs()
                total.mul_(beta).add_(torch.maximum(theirs.abs(), mine.float().abs()))
                assert bool((error <= 1.01 * ROUNDING * total).all()), name
    assert not same([each.float() for each in ours.of("exp_avg")], torchs.of("exp_avg"))


def test_the_view_gives_float32_of_moments_in_bfloat16():
    """The update to come is to the bit what the step then adds; momentum and last update are of the
    moments as they are kept."""
    run = Run(rounding, decay=0.0).steps(3)
    view = AdamView(run, OptimizerConfig(betas=BETAS), 3, LAST)
    run.next_gradients()
    before = [parameter.detach().clone() for parameter in run.parameters]
    kept = [each.clone() for each in run.of("exp_avg")]
    coming = [each.clone() for each in view.next_update()]
    assert same(run.of("exp_avg"), kept)
    run.optimizer.step()
    for update, old, new in zip(coming, before, run.parameters, strict=True):
        torch.testing.assert_close(old + update, new.detach(), rtol=1e-6, atol=1e-7)

    momentum, made = view.momentum(), view.last_update()
    assert {each.dtype for each in (*momentum, *made)} == {torch.float32}
    assert same(momentum[1:], [each.float() for each in run.of("exp_avg")[1:]])
    for told, real in zip(made, coming, strict=True):
        assert float((told - real).abs().max()) <= 1.6 * ROUNDING * float(real.abs().max())


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq"])
def test_a_moment_that_is_missing_or_needs_a_scale_is_refused(lost):
    run = Run(rounding).steps(1)
    view = AdamView(run, OptimizerConfig(betas=BETAS), 1, LAST)
    run.next_gradients()
    state = run.optimizer.state[run.parameters[1]]
    for found, said in ((state[lost].half(), "torch.float16"), (None, "has \\['exp_avg'")):
        state[lost] = found
        with pytest.raises(StateMissing, match=said):
            list(view.next_update())
        with pytest.raises(StateMissing, match=said):
            list(view.last_update())


def test_a_parameter_without_a_gradient_is_not_passed_over():
    run = Run(rounding).steps(1)
    run.next_gradients()
    run.parameters[-1].grad = None
    with pytest.raises(StateMissing, match="no gradient"):
        run.optimizer.step()


def test_state_that_is_made_before_the_first_step_is_the_one_it_starts_from():
    early = Run(rounding)
    early.optimizer.materialise()
    assert {each.dtype for each in early.of("exp_avg")} == {torch.bfloat16}
    assert same(early.steps(2).parameters, Run(rounding).steps(2).parameters)


@pytest.fixture
def file(tmp_path):
    return write_run(tmp_path)


LEAN = ["model.dtype=bfloat16", "policy.optimizer.moment_dtype=bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy.optimizer.betas=[0.9, 0.999]"], "policy.optimizer.betas.1: 0.999"),
        (["policy.optimizer.betas=[0.997, 0.95]"], "policy.optimizer.betas.0: 0.997"),
        (["controls=[{name: beta1, beta1: 0.998}]"], "controls.0.beta1: 0.998"),
        (
            ["controls=[gac, {name: momentum_by_alignment, beta1_max: 0.999}]"],
            "controls.1.beta1_max: 0.999",
        ),
    ],
)
def test_a_beta_that_bfloat16_cannot_follow_is_refused_with_those_it_can(file, overrides, key):
    with pytest.raises(ConfigError, match=key) as refused:
        load(file, [*LEAN, *overrides])
    assert "at most 0.996" in str(refused.value)
    load(file, ["model.dtype=bfloat16", *overrides])


def test_the_largest_beta_that_is_taken_still_decays_in_bfloat16():
    numbers = torch.arange(128, 256).bfloat16()
    for beta, decays in ((0.996, True), (0.999, False)):
        assert bool((numbers.float().mul(beta).bfloat16() < numbers).all()) == decays


def test_gradients_in_bfloat16_are_refused_for_a_model_in_float32(file):
    asked = "policy.optimizer.gradient_dtype=bfloat16"
    with pytest.raises(ConfigError, match="is float32, so it would have no effect"):
        load(file, ["model.dtype=float32", asked])
    load(file, ["model.dtype=bfloat16", asked])


@pytest.mark.parametrize(
    ("settings", "on_gpu", "device", "host", "staged"),
    [
        ((), True, 2 + 4 + 6, 0, 2 + 12),
        (("moment_dtype=bfloat16",), True, 2 + 4 + 4, 0, 2 + 8),
        (("moment_offload=cpu",), True, 2 + 4 + 2, 4, 2 + 12),
        (("moment_offload=cpu",), False, 2 + 4 + 6, 0, 2 + 12),
        (("moment_offload=cpu", "moment_dtype=bfloat16"), True, 2 + 4 + 2, 2, 2 + 8),
        (("gradient_dtype=bfloat16",), True, 2 + 2 + 2 + 6, 0, 2 + 12),
    ],
)
def test_bytes_per_parameter_follow_the_numbers_and_the_place_of_gradients_and_moments(
    file, settings, on_gpu, device, host, staged
):
    """The memory of a bfloat16 model whose optimizer two ranks share."""
    overrides = ["model.dtype=bfloat16", "policy.parallel.ranks=2"]
    overrides += [f"policy.optimizer.{each}" for each in settings]
    config = load(file, overrides)
    shape, _ = read_model(config.model.path)
    memory = rank_memory(config, shape, stage=0, data_parallel=2, longest=16, on_gpu=on_gpu)
    count = shape.parameters
    assert memory.parameters + memory.gradients + memory.optimizer == device * count
    assert memory.offloaded == host * count
    assert memory.staged == staged * count // 2
    assert memory.host == memory.offloaded + memory.staged + memory.held


def test_gradients_in_bfloat16_need_one_of_the_output_layer_in_float32_besides(file):
    def logprobs(*settings):
        config = load(file, ["model.dtype=bfloat16", *settings])
        shape, _ = read_model(config.model.path)
        memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16)
        return memory.logprobs, shape.vocabulary * shape.hidden

    narrow, head = logprobs("policy.optimizer.gradient_dtype=bfloat16")
    assert narrow - logprobs()[0] == head * 4
    both = ("policy.optimizer.gradient_dtype=bfloat16", "policy.parallel.overlap_grad_reduce=true")
    assert logprobs(*both)[0] - logprobs()[0] == head * (4 + 2), "autograd has a copy"
    adapters = ("policy.lora={rank: 4}", "policy.optimizer.gradient_dtype=bfloat16")
    assert logprobs(*adapters)[0] == logprobs(adapters[0])[0]


@pytest.mark.parametrize(
    ("held", "wanted", "refused"),
    [
        ({}, "float32", False),
        ({}, "bfloat16", True),
        ({"moments": "bfloat16"}, "bfloat16", False),
        ({"moments": "bfloat16"}, "float32", True),
    ],
)
def test_a_checkpoint_with_moments_in_other_numbers_is_refused_before_the_run(
    file, held, wanted, refused
):
    config = load(file, [f"policy.optimizer.moment_dtype={wanted}"])
    folder = config.run.dir / "checkpoint" / "step_00000002"
    (folder / "sharded").mkdir(parents=True)
    (folder / "sharded" / ".metadata").touch()
    torch.save({}, folder / "state.pt")
    (folder.parent / "latest").write_text(folder.name)
    (folder / "about.json").write_text(
        json.dumps({"step": 2, "parameter_state": ["adam.exp_avg"], **held})
    )
    keys = [one.key for one in checkpoint_problems(config, None)]
    assert keys == (["policy.optimizer.moment_dtype"] if refused else [])
