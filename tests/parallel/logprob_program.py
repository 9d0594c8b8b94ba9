"""One rank of the log-prob tests: the whole vocabulary, its halves on pairs of ranks, and its
quarters, against float64 and one undivided softmax."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs

TOKENS, HIDDEN, ROWS, TEMPERATURE = 48, 24, 40, 0.8
ERRORS = {torch.float32: (4e-6, 3e-6), torch.bfloat16: (1e-5, 2.0**-7)}
"""Tolerances of values in nats, and of gradients relative to their norm. The hidden states'
gradient is a sum over ranks of numbers of the model's type."""


def check(group: dist.ProcessGroup, dtype: torch.dtype, vocab: int, chunk: int) -> None:
    ranks, rank = group.size(), group.rank()
    draw = torch.Generator().manual_seed(vocab)
    whole_h = torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype)
    whole_w = (torch.randn(ROWS, HIDDEN, generator=draw) / 2).to(dtype)
    targets = torch.randint(0, vocab, (TOKENS,), generator=draw)
    upstream = torch.randn(2, TOKENS, generator=draw)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)

    exact = [whole_h.double().requires_grad_(), whole_w.double().requires_grad_()]
    log_p = torch.log_softmax(exact[0] @ exact[1][:vocab].t() / TEMPERATURE, dim=1)
    values = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    nats, relative = ERRORS[dtype]
    for with_entropy in (False, True):
        h = whole_h.clone().requires_grad_()
        w = whole_w[rows].clone().requires_grad_()
        logp, entropy, squares = vocab_parallel_logprobs(
            h, w, targets, TEMPERATURE, chunk, group, vocab_size=vocab
        )
        loss = logp @ upstream[0] + (entropy @ upstream[1] if with_entropy else 0.0)
        loss.backward()
        wanted = values[0] @ upstream[0].double()
        if with_entropy:
            wanted = wanted + values[1] @ upstream[1].double()
        grad_h, grad_w = torch.autograd.grad(wanted, exact, retain_graph=True)

        case = f"TP {ranks}, rank {rank}, {dtype}, vocabulary {vocab}, chunk {chunk}"
        assert (logp - values[0]).abs().max() < nats, case
        assert (entropy - values[1]).abs().max() < nats, case
        assert (squares - log_p.exp().square().sum(1)).abs().max() < nats, case
        assert (h.grad - grad_h).norm() < relative * grad_h.norm(), case
        assert (w.grad - grad_w[rows]).norm() <= relative * grad_w[rows].norm(), case


dist.init_process_group("gloo")
alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
for group in (alone, pair, dist.group.WORLD):
    for dtype in ERRORS:
        # 29 leaves the last of four ranks with padding rows alone.
        for vocab in (37, 29):
            for chunk in (7, 64):
                check(group, dtype, vocab, chunk)
print(f"rank {dist.get_rank()}: all agree")
dist.destroy_process_group()
