"""Attention over rows that two ranks share is attention over the whole rows: ours on any device, and
Transformer Engine's on two GPUs."""

import subprocess
import sys

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from tests.parallel.ranks import run_ranks

PROGRAM = "tests.gpu.context_program"


@pytest.mark.parallel
def test_outputs_and_gradients_are_those_of_whole_rows():
    run_ranks(2, PROGRAM, ["cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.device_count() > 1 and HAVE_TE),
    reason="needs two CUDA devices and Transformer Engine",
)
def test_transformer_engines_outputs_and_gradients_are_those_of_whole_rows():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launch, "-m", PROGRAM, "cuda"], check=True, timeout=300)
