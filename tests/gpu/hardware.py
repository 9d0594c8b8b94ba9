"""The device of the GPU tests, and separate processes on it.

MAR_GPU_TESTS=cpu runs every test body that a CPU can run on the CPU instead, to find mistakes
without a GPU: it proves nothing about one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from tests.parallel.ranks import run_alone

DEVICE: Literal["cuda", "cpu"] = "cpu" if os.environ.get("MAR_GPU_TESTS") == "cpu" else "cuda"
PROGRAM_S = 240.0

_NONE = f"needs a CUDA device; torch {torch.__version__} sees none"
ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason=_NONE),
]
"""Marks of test bodies that use `DEVICE`."""
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=_NONE)]
"""Marks of test bodies about CUDA itself: its memory, its kernels, its clock."""
ON_DEVICE_WITH_TE = [
    *ON_DEVICE,
    pytest.mark.skipif(DEVICE == "cuda" and not HAVE_TE, reason="needs Transformer Engine"),
]
"""Marks of test bodies that on a CPU replace Transformer Engine by another implementation."""


def run_program(
    program: str, arguments: list[str | Path], ranks: int = 1, device: str = DEVICE
) -> None:
    """Run a module's main in processes that have not used CUDA before: a world of one, or `ranks`
    ranks with a device each; skip if there are too few devices. For the device `cpu` they run as on
    a machine without a GPU, where Megatron compiles nothing. Raises subprocess.CalledProcessError
    and TimeoutExpired."""
    if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launch += ["-m", program, *map(str, arguments)]
    subprocess.run(launch, check=True, timeout=PROGRAM_S, env=environment)


def run_on_cpu(program: str, arguments: list[str | Path]) -> None:
    """Run a module's main on the CPU: forked if that is possible, which saves its imports. Raises
    the errors of `run_program`, or AssertionError."""
    if torch.cuda.is_available():  # A fork cannot initialise CUDA, which torch's optimizers query.
        run_program(program, arguments, device="cpu")
    else:
        run_alone(program, arguments)
