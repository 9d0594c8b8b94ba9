"""The engine starts from the files that the policy starts from."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_async_rl.config.schema import RolloutConfig
from megatron_async_rl.policy.parameters import safetensor_files
from megatron_async_rl.rollout.engine_arguments import engine_arguments
from megatron_async_rl.rollout.spec import EngineSpec
from tests.tiny_models import save_tiny_model


def test_mistrals_own_files_beside_them_are_read_by_neither(tmp_path: Path) -> None:
    own = save_tiny_model(tmp_path / "own", "mistral", sliding_window=7)
    shutil.copy(own / "model.safetensors", own / "consolidated.safetensors")
    assert [file.name for file in safetensor_files(own)] == ["model.safetensors"]
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
    found = engine_arguments(spec)
    # "auto" would read params.json and consolidated.safetensors where they lie there.
    assert (found.config_format, found.load_format, found.tokenizer_mode) == ("hf", "hf", "hf")
