"""Log-probs, exported tensors and a resumed model of tiny models on one device.

Arguments: cpu or cuda, the directory of the test data of tests/parallel/models.py and
test_model_families.py, and the directory for the output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise
from tests.parallel.model_program import checkpoints, exported, load_model, logprobs
from tests.parallel.models import CHECKPOINTED

ALONE = ParallelConfig()


def main() -> None:
    kind = sys.argv[1]
    material, families, output = (Path(argument) for argument in sys.argv[2:])
    torch.backends.cuda.matmul.allow_tf32 = False
    layout = initialise(ALONE, device.install(kind), timeout_s=60)
    samples = torch.load(material / "samples.pt", weights_only=False)
    found = {}
    for path in sorted(p for p in material.iterdir() if p.is_dir()):
        dtype = "bfloat16" if path.name.endswith("bfloat16") else "float32"
        model = load_model(path, ALONE, layout, dtype)
        assert {parameter.device.type for parameter in model.chunks[0].parameters()} == {kind}
        found[path.name] = {
            "logprobs": [logp.cpu() for logp in logprobs(model, samples, layout, ALONE)],
            "exported": {name: tensor.cpu() for name, tensor in exported(model, 1 << 30).items()},
        }
    of_families = torch.load(families / "samples.pt", weights_only=False)
    for path in sorted(p for p in families.iterdir() if p.is_dir()):
        model = load_model(path, ALONE, layout, "float32")
        found[path.name] = {
            sequence: [logp.cpu() for logp in logprobs(model, of_families, layout, ALONE, sequence)]
            for sequence in ("padded", "packed")
        }
    source = material / CHECKPOINTED["dense"]
    found["checkpoint"] = checkpoints(source, ALONE, layout, output, "", samples)
    torch.save(found, output / "results.pt")
    layout.shutdown()


if __name__ == "__main__":
    main()
