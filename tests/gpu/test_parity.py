"""The same policy code on one CUDA device, against transformers on the CPU in float32."""

import os
import subprocess
import sys

import pytest
import torch

from tests.parallel import models, test_model_families
from tests.parallel.test_export import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason=f"needs a CUDA device; torch {torch.__version__} sees none",
    ),
]

PROGRAM = """
import sys
from pathlib import Path
import torch
from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise
from tests.parallel.model_program import checkpoints, exported, load_model, logprobs
from tests.parallel.models import CHECKPOINTED

torch.backends.cuda.matmul.allow_tf32 = False
material, families, output = (Path(argument) for argument in sys.argv[1:])
layout = initialise(ParallelConfig(), device.install("cuda"), timeout_s=60)
samples = torch.load(material / "samples.pt", weights_only=False)
found = {}
for path in sorted(p for p in material.iterdir() if p.is_dir()):
    dtype = "bfloat16" if path.name.endswith("bfloat16") else "float32"
    model = load_model(path, ParallelConfig(), layout, dtype)
    assert all(parameter.is_cuda for parameter in model.chunks[0].parameters())
    found[path.name] = {
        "logprobs": [logp.cpu() for logp in logprobs(model, samples, layout)],
        "exported": {name: tensor.cpu() for name, tensor in exported(model, 1 << 30).items()},
    }
samples = torch.load(families / "samples.pt", weights_only=False)
for path in sorted(p for p in families.iterdir() if p.is_dir()):
    model = load_model(path, ParallelConfig(), layout, "float32")
    found[path.name] = {
        sequence: [logp.cpu() for logp in logprobs(model, samples, layout, sequence)]
        for sequence in ("padded", "packed")
    }
source = material / CHECKPOINTED["dense"]
found["checkpoint"] = checkpoints(source, ParallelConfig(), layout, output, "")
torch.save(found, output / "results.pt")
layout.shutdown()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("gpu")
    # Without torchrun's variables: a world of one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            models.material("dense"),
            test_model_families.material(),
            output,
        ],
        check=True,
        timeout=300,
        env=environment,
    )
    return torch.load(output / "results.pt", weights_only=False, map_location="cpu")


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        ("llama-untied", 1e-5),
        ("qwen2-tied", 1e-5),
        ("qwen3-tied-odd", 1e-5),
        ("qwen3-bfloat16", 0.08),
    ],
)
def test_log_probs_agree_with_transformers(found, model, tolerance):
    for ours, reference in zip(
        found[model]["logprobs"], models.reference_logprobs(model), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sequence", ["padded", "packed"])
@pytest.mark.parametrize("model", test_model_families.MODELS)
def test_log_probs_of_every_family_agree_with_transformers(found, model, sequence):
    expected, _ = test_model_families.reference(model)
    for ours, theirs in zip(found[model][sequence], expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["llama-untied", "qwen3-tied-odd", "qwen3-bfloat16"])
def test_exported_tensors_are_the_checkpoints_bit_for_bit(found, model):
    assert_same(found[model]["exported"], models.tensors_of(models.source_of(model)))


def test_a_resumed_model_has_the_saved_weights_and_takes_the_same_next_step(found):
    result = found["checkpoint"]
    assert_same(result["resumed"], result["at_save"])
    assert_same(result["resumed_after"], result["after"])
