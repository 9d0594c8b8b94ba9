"""Attention over rows that two ranks share is attention over the whole rows: ours on any device,
and Transformer Engine's on two GPUs."""

import subprocess
import sys

import pytest
import torch

from tests.gpu.hardware import DEVICE, ON_DEVICE_WITH_TE, PROGRAM_S
from tests.parallel.ranks import run_ranks

PROGRAM = "tests.gpu.context_program"


@pytest.mark.parallel
def test_outputs_and_gradients_are_those_of_whole_rows():
    run_ranks(2, PROGRAM, ["cpu"])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=ON_DEVICE_WITH_TE)])
def test_transformer_engines_outputs_and_gradients_are_those_of_whole_rows(ranks):
    if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    subprocess.run([*launch, "-m", PROGRAM, DEVICE], check=True, timeout=PROGRAM_S)
