"""The engine starts from the files that the policy starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_async_rl.config.schema import RolloutConfig
from megatron_async_rl.policy.parameters import safetensor_files
from megatron_async_rl.rollout.engine_arguments import engine_arguments
from megatron_async_rl.rollout.spec import EngineSpec
from tests.tiny_models import save_tiny_model

SHAPE = {"hidden_size": 64, "heads": 2, "kv_heads": 1}


def test_mistrals_own_files_beside_them_are_read_by_neither(tmp_path: Path) -> None:
    own = save_tiny_model(tmp_path / "own", "mistral", sliding_window=7, **SHAPE)
    other = save_tiny_model(tmp_path / "other", "mistral", sliding_window=9, seed=1, **SHAPE)
    shutil.copy(other / "model.safetensors", own / "consolidated.safetensors")
    theirs = {"dim": 64, "n_layers": 2, "n_heads": 2, "norm_eps": 0.5, "vocab_size": 9}
    (own / "params.json").write_text(json.dumps(theirs))
    spec = EngineSpec(
        index=0,
        model_path=own,
        dtype="float32",
        rollout=RolloutConfig.model_validate(
            {"reward": {"name": "arithmetic"}, "sampling": {"max_tokens": 8}}
        ),
        seed=1,
        device="cpu",
        log_dir=tmp_path,
    )
    arguments = engine_arguments(spec)
    found = arguments.create_model_config().hf_config
    expected = json.loads((own / "config.json").read_text())
    assert found.rms_norm_eps == expected["rms_norm_eps"]
    assert found.vocab_size == expected["vocab_size"]
    assert (arguments.load_format, arguments.tokenizer_mode) == ("hf", "hf")
    assert [file.name for file in safetensor_files(own)] == ["model.safetensors"]
