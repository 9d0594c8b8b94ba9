import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs


def case(tokens=13, hidden=6, vocab=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, dtype=dtype, generator=generator, requires_grad=True)
    w = torch.randn(vocab, hidden, dtype=dtype, generator=generator, requires_grad=True)
    return h, w, torch.randint(0, vocab, (tokens,), generator=generator)


def logprobs(h, w, targets, temperature, chunk, group=None):
    return vocab_parallel_logprobs(h, w, targets, temperature, chunk, group, vocab_size=len(w))[:2]


def dense(h, w, targets, temperature):
    logp = torch.log_softmax(h @ w.t() / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_are_those_of_the_dense_softmax(chunk, temperature):
    h, w, targets = case()
    logp, entropy = logprobs(h, w, targets, temperature, chunk)
    expected_logp, expected_entropy = dense(h, w, targets, temperature)
    torch.testing.assert_close(logp, expected_logp)
    torch.testing.assert_close(entropy, expected_entropy)


def test_logits_of_bfloat16_weights_are_not_rounded_to_bfloat16():
    """Rounded before the softmax they would be off by up to 0.05 nats."""
    h, w, targets = case(tokens=64, hidden=64, vocab=500)
    h, w = h.bfloat16(), w.bfloat16()
    logp, entropy = logprobs(h, w, targets, 1.0, 16)
    expected_logp, expected_entropy = dense(h.double(), w.double(), targets, 1.0)
    torch.testing.assert_close(logp.double(), expected_logp, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("chunk", [3, 13])
def test_gradients_are_those_of_the_dense_softmax(chunk):
    h, w, targets = case()
    upstream = torch.randn(13, dtype=torch.float64)
    ours = torch.autograd.grad(logprobs(h, w, targets, 0.7, chunk)[0] @ upstream, (h, w))
    torch.testing.assert_close(
        ours, torch.autograd.grad(dense(h, w, targets, 0.7)[0] @ upstream, (h, w))
    )
    torch.autograd.gradcheck(lambda a, b: logprobs(a, b, targets, 0.7, chunk)[0], (h, w))


def test_padding_rows_of_the_vocabulary_change_nothing_and_get_no_gradient():
    h, w, targets = case()
    padded = torch.cat([w.detach(), torch.full((3, 6), 5.0, dtype=w.dtype)]).requires_grad_()
    logp, entropy, _ = vocab_parallel_logprobs(h, padded, targets, 1.0, 4, vocab_size=11)
    expected_logp, expected_entropy = dense(h, w, targets, 1.0)
    torch.testing.assert_close(logp, expected_logp)
    torch.testing.assert_close(entropy, expected_entropy)
    (gradient,) = torch.autograd.grad(logp.sum(), padded)
    assert torch.count_nonzero(gradient[11:]) == 0
    torch.testing.assert_close(gradient[:11], torch.autograd.grad(expected_logp.sum(), w)[0])


@pytest.mark.parametrize("chunk", [3, 13])
def test_the_entropys_gradient_is_that_of_the_dense_softmax_alone_and_beside_the_log_probs(chunk):
    h, w, targets = case()
    upstream = torch.randn(2, 13, dtype=torch.float64)
    for scale in (torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [1.0]])):
        weights = (upstream * scale).double()
        ours = torch.autograd.grad(
            (torch.stack(logprobs(h, w, targets, 0.7, chunk)) * weights).sum(), (h, w)
        )
        expected = torch.autograd.grad(
            (torch.stack(dense(h, w, targets, 0.7)) * weights).sum(), (h, w)
        )
        torch.testing.assert_close(ours, expected)
    torch.autograd.gradcheck(lambda a, b: logprobs(a, b, targets, 0.7, chunk)[1], (h, w))


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_the_sum_of_squared_probabilities_is_that_of_the_dense_softmax(scale):
    h, w, targets = case()
    found = vocab_parallel_logprobs(h * scale, w, targets, 0.7, 4, vocab_size=11)[2]
    torch.testing.assert_close(
        found, torch.softmax(h * scale @ w.t() / 0.7, -1).square().sum(-1).detach()
    )
    assert not found.requires_grad


def test_bfloat16_inputs_give_float32_log_probs_and_bfloat16_gradients_close_to_float32():
    h, w, targets = case(tokens=64, hidden=32, vocab=50, dtype=torch.float32)
    low = [t.detach().bfloat16().requires_grad_() for t in (h, w)]
    logp, _ = logprobs(*low, targets, 1.0, 8)
    assert logp.dtype == torch.float32
    expected = torch.autograd.grad(
        dense(low[0].float(), low[1].float(), targets, 1.0)[0].sum(), low
    )
    for ours, reference in zip(torch.autograd.grad(logp.sum(), low), expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, reference, rtol=0.05, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_forward_or_backward():
    h, w, targets = case(tokens=512, hidden=4, vocab=300, dtype=torch.float32)
    with LargestTensor() as largest:
        logprobs(h, w, targets, 1.0, 16)[0].sum().backward()
    assert largest.elements == 16 * 300
    with LargestTensor() as largest:
        dense(h, w, targets, 1.0)[0].sum().backward()
    assert largest.elements == 512 * 300


def test_a_world_of_one_rank_agrees_with_no_group(tmp_path):
    h, w, targets = case()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        grouped = logprobs(h, w, targets, 1.0, 4, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(grouped, logprobs(h, w, targets, 1.0, 4))
