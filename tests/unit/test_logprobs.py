import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_async_rl import products
from megatron_async_rl.plan import memory
from megatron_async_rl.policy import logprobs as chunked
from megatron_async_rl.policy import logprobs as logprobs_module
from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs
from tests.cases import looped


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


@looped("chunk", [1, 4, 13, 100])
@looped("temperature", [1.0, 0.6])
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


class NewMemory(TorchDispatchMode):
    """largest, peak: bytes of one tensor, and of all together, that operations made and that were
    still held; `known` apart. names: of the operations."""

    def __init__(self, *known):
        super().__init__()
        self.sizes = {}
        self.known = {leaf.untyped_storage().data_ptr() for leaf in known}
        self.held = self.peak = self.largest = 0
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.add(function._schema.name)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage):
        key = storage.data_ptr()
        if storage.nbytes() == 0 or key in self.known or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        self.largest = max(self.largest, storage.nbytes())

    def _forget(self, key):
        self.held -= self.sizes.pop(key)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a small case has as many as a large one."""
    monkeypatch.setitem(chunked.LOGIT_BLOCK, "cpu", 2 * 3000)
    monkeypatch.setitem(products.WEIGHT_BLOCK, "cpu", 64)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_take_the_memory_of_three_chunks_forward_and_backward(
    dtype, with_entropy, small_blocks
):
    h, w, targets = case(tokens=256, hidden=4, vocab=3000, dtype=dtype)
    total = torch.zeros(3000, 4)
    with NewMemory(h, w, targets, total) as memory_used:
        logp, entropy, _ = vocab_parallel_logprobs(
            h, w, targets, 1.0, 16, vocab_size=3000, weight_gradient=total
        )
        (logp.sum() + entropy.sum() if with_entropy else logp.sum()).backward()
    chunk = 16 * 3000 * 4
    assert 2 * chunk < memory_used.peak < 3.5 * chunk
    assert logprobs_module.LOGIT_COPIES == memory.LOGIT_COPIES == 3
    with NewMemory(h, w, targets) as memory_used:
        dense(h, w, targets, 1.0)[0].sum().backward()
    assert memory_used.peak > 16 * chunk * dtype.itemsize / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_the_weights_size_is_made_beside_its_gradient(dtype, small_blocks):
    h, w, targets = case(tokens=24, hidden=256, vocab=600, dtype=dtype)
    total = torch.zeros(600, 256)
    with NewMemory(h, w, targets, total) as memory_used:
        vocab_parallel_logprobs(h, w, targets, 1.0, 8, vocab_size=600, weight_gradient=total)[
            0
        ].sum().backward()
    assert w.grad is None
    assert memory_used.largest < 600 * 256 * dtype.itemsize / 2
    assert total.abs().max() > 0


def test_nothing_waits_for_a_device():
    """These operations bring numbers to the host, or need them there for a shape."""
    h, w, targets = case(dtype=torch.float32)
    with NewMemory() as seen:
        logp, entropy, _ = vocab_parallel_logprobs(h, w, targets, 0.7, 4, vocab_size=11)
        (logp.sum() + entropy.sum()).backward()
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal"}
    assert seen.names >= {"aten::mm", "aten::exp"}, "the operations were not seen"
    assert not {name.removeprefix("aten::") for name in seen.names} & waiting


@looped("padding", [0, 12])
@looped("chunk", [5, 16, 64])
@looped("with_entropy", [False, True])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_float64(dtype, with_entropy, chunk, padding):
    """The stated errors: of log-probs and entropy in nats, of gradients relative to their norm.
    Numbers of bfloat16 have a rounding error of 2^-9; the matrix that is kept, the scaled hidden
    states and the results are rounded to it, the logits are not."""
    nats, relative = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (1e-5, 2.0**-8)}[dtype]
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(64, 96, generator=draw).to(dtype).requires_grad_()
    w = (torch.randn(700 + padding, 96, generator=draw) / 3).to(dtype).requires_grad_()
    targets = torch.randint(0, 700, (64,), generator=draw)
    upstream = torch.randn(2, 64, generator=draw)
    if not with_entropy:
        upstream[1] = 0.0

    logp, entropy, _ = vocab_parallel_logprobs(h, w, targets, 0.8, chunk, vocab_size=700)
    loss = logp @ upstream[0] + (entropy @ upstream[1] if with_entropy else 0.0)
    found = torch.autograd.grad(loss, (h, w))

    exact = [tensor.detach().double().requires_grad_() for tensor in (h, w)]
    exact_logp, exact_entropy = dense(exact[0], exact[1][:700], targets, 0.8)
    expected = torch.autograd.grad(
        exact_logp @ upstream[0].double() + exact_entropy @ upstream[1].double(), exact
    )
    assert (logp - exact_logp).abs().max() < nats
    assert (entropy - exact_entropy).abs().max() < nats
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - reference).norm() < relative * reference.norm()
    assert torch.count_nonzero(found[1][700:]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [5, 16])
def test_a_tied_weights_gradient_is_the_sum_of_buffer_and_autograds(chunk, dtype):
    """The embedding's part comes from autograd, the output layer's goes to the buffer."""
    _, w, targets = case(tokens=40, hidden=8, vocab=50, dtype=dtype)
    tokens = targets.roll(1)
    buffer = torch.full((50, 8), 3.0)
    logp, _, _ = vocab_parallel_logprobs(
        w[tokens], w, targets, 1.0, chunk, vocab_size=50, weight_gradient=buffer
    )
    logp.sum().backward()
    exact = w.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(dense(exact[tokens], exact, targets, 1.0)[0].sum(), exact)
    error = (buffer - 3.0 + w.grad - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]


def test_the_processs_float32_products_are_exact_again_after_one_of_bfloat16():
    h, w, targets = case(dtype=torch.bfloat16)
    before = torch.backends.mkldnn.matmul.fp32_precision
    logprobs(h, w, targets, 1.0, 4)[0].sum().backward()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


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
