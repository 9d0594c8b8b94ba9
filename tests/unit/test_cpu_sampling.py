"""Sampling, the output layer and norms of engines on a CPU (`rollout/vllm/cpu_sampling.py`)."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async_rl.rollout.vllm import cpu_sampling
from megatron_async_rl.rollout.vllm.cpu_sampling import draw_tokens
from tests.cases import looped


@pytest.fixture(autouse=True)
def vllm_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load vLLM's kernels, as its workers do, and restore later what `speed_up_sampling`
    replaces."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    current_platform.import_kernels()
    for owner, name in (
        (TopKTopPSampler, "forward_cpu"),
        (Sampler, "gather_logprobs"),
        (LogitsProcessor, "_apply_head"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(count: int) -> Tensor:
    """Return the centres of `count` equal parts of [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@looped("size", lambda: [1, 2, 255, 256, 257, 512, 1000])
def test_a_token_is_drawn_as_often_as_its_probability(size: int) -> None:
    draws = 4000
    probabilities = torch.randn(size, generator=generator(size)).mul(3).softmax(0)
    tokens = draw_tokens(probabilities.expand(draws, size).contiguous(), uniform(draws))
    counts = torch.zeros(size).scatter_add_(0, tokens, torch.ones(draws))
    assert (counts - draws * probabilities).abs().max() <= 1.001


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number() -> None:
    rows, size = 64, 5000
    probabilities = torch.randn(rows, size, generator=generator(1)).mul(8).softmax(-1)
    shares = torch.rand(rows, generator=generator(2), dtype=torch.float64)
    exact = probabilities.double()
    # Shares just below 1 draw the last tokens, which are improbable.
    shares[:8] = 1 - 1e-9
    cumulative = exact.cumsum(-1) / exact.sum(-1, keepdim=True)
    tokens = draw_tokens(probabilities, shares)
    for row, token in enumerate(tokens.tolist()):
        below = cumulative[row, token - 1] if token else torch.tensor(0.0)
        assert below - 1e-7 <= shares[row] <= cumulative[row, token] + 1e-7


@looped("share", lambda: [0.0, 2.0**-60, 0.5, 1 - 2.0**-53])
def test_a_masked_token_is_never_drawn(share: float) -> None:
    size = 600
    for allowed in ([0], [599], [300], [3, 4], [255, 256], [100, 511, 512], range(256, 512)):
        probabilities = torch.zeros(1, size)
        probabilities[0, list(allowed)] = 1.0 / len(allowed)
        (token,) = draw_tokens(probabilities, torch.tensor([share], dtype=torch.float64)).tolist()
        assert token in allowed, (token, allowed)


def test_a_row_that_is_not_a_number_draws_some_token() -> None:
    """A model whose weights are not finite must not stop the engine: the run reports it."""
    (token,) = draw_tokens(torch.full((1, 300), torch.nan), torch.tensor([0.5]).double()).tolist()
    assert 0 <= token < 300


def test_draws_of_a_request_depend_only_on_its_seed() -> None:
    """Requests arrive, end and change positions between steps, as in vLLM's batch, and some have no
    seed."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    cpu_sampling.speed_up_sampling()
    sampler: Any = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="processed_logprobs")
    row = torch.randn(1, 50, generator=generator(0))

    def step(rows: list[torch.Generator | None]) -> list[int]:
        logits = row.repeat(len(rows), 1)
        seeded = {place: own for place, own in enumerate(rows) if own is not None}
        tokens, logprobs = TopKTopPSampler.forward_cpu(sampler, logits, seeded, None, None)
        torch.testing.assert_close(logprobs, row.log_softmax(-1).repeat(len(rows), 1))
        return list(tokens.tolist())

    steps = 3 * cpu_sampling.DRAWS
    single = generator(7)
    alone = [step([single])[0] for _ in range(steps)]
    requests, among = {seed: generator(seed) for seed in range(8)}, []
    for number in range(steps):
        if number % 7 == 6:
            requests.pop(min(set(requests) - {7}))
            requests[100 + number] = generator(100 + number)
        order = sorted(requests, reverse=number % 2 == 0)
        rows: list[torch.Generator | None] = [requests[seed] for seed in order]
        among.append(step([*rows, None] if number % 5 == 0 else rows)[order.index(7)])
    assert among == alone
    assert len(Counter(alone)) > 10


def test_other_batches_are_drawn_by_vllm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler may need float64 or other log-probs."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", lambda *given: given)
    cpu_sampling.speed_up_sampling()
    forward = TopKTopPSampler.forward_cpu
    cpu_sampling.speed_up_sampling()
    assert TopKTopPSampler.forward_cpu is forward, "it is replaced only once"
    logits, seeded = torch.zeros(2, 5), {0: generator(0), 1: generator(1)}
    for fp64, mode in ((True, "processed_logprobs"), (False, "raw_logprobs")):
        sampler: Any = SimpleNamespace(use_fp64_gumbel=fp64, logprobs_mode=mode)
        given = (sampler, logits, seeded, 3, 0.5)
        assert forward(*given) == given


def test_draws_are_the_numbers_of_the_generator_in_its_order() -> None:
    draws, count = cpu_sampling.SeededDraws(), 2 * cpu_sampling.DRAWS
    first, second = generator(1), generator(2)
    drawn = [draws.next({1: first, 0: second}) for _ in range(count)]
    for place, seed in ((1, 1), (0, 2)):
        own = torch.rand(count, generator=generator(seed), dtype=torch.float64)
        assert [numbers[place] for numbers in drawn] == own.tolist()


def test_draws_of_a_request_are_freed_with_its_generator() -> None:
    draws = cpu_sampling.SeededDraws()
    lasting, freed = generator(1), generator(2)
    draws.next({0: lasting, 1: freed})
    assert len(draws._kept) == 2
    del freed
    assert len(draws._kept) == 1


def test_the_log_prob_of_the_sampled_token_is_gathered_without_ranks() -> None:
    from vllm.v1.sample.sampler import Sampler

    cpu_sampling.speed_up_sampling()
    logprobs = torch.randn(3, 20, generator=generator(0)).log_softmax(-1)
    tokens = torch.tensor([4, 0, 19])
    found = Sampler.gather_logprobs(logprobs, 0, tokens)
    assert found.logprob_token_ids.tolist() == [[4], [0], [19]]
    assert found.logprob_token_ids.dtype == torch.int32
    assert torch.equal(found.logprobs, logprobs.gather(1, tokens[:, None]))
    assert found.selected_token_ranks.tolist() == [0, 0, 0]


@looped("dtype, head", lambda: [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16",) * 2])
def test_logits_of_a_bfloat16_model_are_sums_of_exact_products(dtype: str, head: str) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    cpu_sampling.speed_up_sampling()
    own = getattr(torch, dtype)
    states = torch.randn(2, 3, 64, generator=generator(0)).to(own)
    weight = torch.randn(500, 64, generator=generator(1)).to(own)
    bias = torch.randn(500, generator=generator(2)).to(own)
    applied = SimpleNamespace(
        weight=weight,
        quant_method=SimpleNamespace(
            apply=lambda layer, x, bias: torch.nn.functional.linear(x, layer.weight, bias)
        ),
    )
    processor: Any = SimpleNamespace(head_dtype=getattr(torch, head))
    logits = LogitsProcessor._apply_head(processor, applied, states, bias)
    exact = states.double() @ weight.double().t() + bias.double()
    assert logits.dtype == getattr(torch, head)
    assert logits.shape == (2, 3, 500)
    error = (logits - exact).abs().max()
    assert (error < 1e-4) == (head == "float32"), error


@looped("dtype, tolerance", lambda: [("float32", 1e-6), ("bfloat16", 2.0**-7)])
def test_norms_are_those_of_vllm(dtype: str, tolerance: float) -> None:
    from vllm.ir import ops

    cpu_sampling.register_norms()
    cpu_sampling.register_norms()
    own = getattr(torch, dtype)
    name = cpu_sampling.NORMS
    x, residual = (torch.randn(5, 64, generator=generator(seed)).to(own) for seed in (0, 1))
    weight = torch.randn(64, generator=generator(2)).to(own)
    one, added = ops.rms_norm.impls, ops.fused_add_rms_norm.impls
    expected = one["native"].impl_fn(x, weight, 1e-5)
    torch.testing.assert_close(
        one[name].impl_fn(x, weight, 1e-5), expected, rtol=tolerance, atol=tolerance
    )
    before = added["native"].impl_fn(x, residual, weight, 1e-5)
    inputs = x.clone(), residual.clone()
    after = added[name].impl_fn(*inputs, weight, 1e-5)
    assert after[0] is inputs[0]
    assert after[1] is inputs[1], "the results replace the inputs"
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)
    for fits, given in (
        (True, (x, weight)),
        (False, (x[:, :40], weight[:40])),
        (True, (x[:, :40].contiguous(), weight[:40])),
        (False, (x[:, :12].contiguous(), weight[:12])),
        (False, (x, weight[:1])),
        (False, (x, torch.stack((weight, weight), dim=1)[:, 0])),
        (False, (x, weight.double())),
        (False, (x, None)),
        (False, (x, weight, 1e-5, 32)),
    ):
        values = (*given, 1e-5)[: max(3, len(given))]
        assert one[name].supports_args(*values) == fits
    assert added[name].supports_args(x, residual, weight, 1e-5)
    for other in (residual.t().contiguous().t(), residual[:1], residual.double(), x):
        assert not added[name].supports_args(x, other, weight, 1e-5)
