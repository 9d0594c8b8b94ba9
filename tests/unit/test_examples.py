"""The models that the examples prepare."""

import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", ["arithmetic", "countdown"])
def test_every_token_an_engine_may_sample_has_an_embedding(example, tmp_path):
    """Transformers leaves that of padding at zeros, and a step back through it multiplies the
    gradient by 1/sqrt(norm_eps)."""
    runpy.run_path(str(EXAMPLES / example / "prepare.py"))["write_model"](tmp_path, 1)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    lengths = embeddings.norm(dim=1)
    assert float(lengths.min()) > 0.5 * float(lengths.median())
