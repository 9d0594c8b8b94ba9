"""The engine starts from the files that the policy starts from, with what the user set of vLLM and
nothing that the system sets itself."""

from __future__ import annotations

import dataclasses
import fnmatch
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from vllm import AsyncEngineArgs

from megatron_async_rl.config.engine_options import (
    BREAKS,
    BREAKS_ON_CPU,
    OWNED,
    refused_options,
    vllm_arguments,
)
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import RolloutConfig
from megatron_async_rl.policy.parameters import safetensor_files
from megatron_async_rl.rollout import engine_arguments as arguments
from megatron_async_rl.rollout.engine_arguments import engine_arguments
from megatron_async_rl.rollout.spec import EngineSpec
from tests.tiny_models import save_tiny_model


def spec_with(tmp_path: Path, device: Literal["cpu", "cuda"] = "cpu", **vllm: Any) -> EngineSpec:
    rollout = RolloutConfig.model_validate(
        {"reward": {"name": "arithmetic"}, "sampling": {"max_tokens": 8}, "vllm": vllm}
    )
    return EngineSpec(
        index=0,
        model_path=tmp_path,
        dtype="float32",
        rollout=rollout,
        seed=1,
        device=device,
        log_dir=tmp_path,
    )


def test_mistrals_own_files_beside_them_are_read_by_neither(tmp_path: Path) -> None:
    own = save_tiny_model(tmp_path / "own", "mistral", sliding_window=7)
    shutil.copy(own / "model.safetensors", own / "consolidated.safetensors")
    assert [file.name for file in safetensor_files(own)] == ["model.safetensors"]
    found = engine_arguments(spec_with(own))
    # "auto" would read params.json and consolidated.safetensors where they lie there.
    assert (found.config_format, found.load_format, found.tokenizer_mode) == ("hf", "hf", "hf")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_argument_that_we_set_may_be_set_by_name(tmp_path, monkeypatch, device):
    ours: dict[str, Any] = {}

    @dataclasses.dataclass  # `engine_arguments` looks at its fields
    class Recorder:
        def __new__(cls, **given: Any) -> Any:
            ours.update(given)

    monkeypatch.setattr(arguments, "AsyncEngineArgs", Recorder)
    engine_arguments(spec_with(tmp_path, device))
    assert len(ours) > 15
    assert set(ours) == {name for name, _ in refused_options(ours, device)}


def test_every_refused_name_is_one_of_vllms():
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    patterns = [*OWNED, *BREAKS, *BREAKS_ON_CPU]
    assert [one for one in patterns if not fnmatch.filter(known, one)] == []


def test_the_preflight_knows_vllms_names_without_importing_it():
    assert vllm_arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_an_option_reaches_vllm_as_it_is_written(tmp_path: Path) -> None:
    found = engine_arguments(spec_with(tmp_path, max_num_batched_tokens=4096, block_size=32))
    assert (found.max_num_batched_tokens, found.block_size) == (4096, 32)


def test_an_engine_refuses_a_name_that_its_vllm_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_num_batched_tokens") as refused:
        engine_arguments(spec_with(tmp_path, max_batched_tokens=4096))
    assert refused.value.problems[0].key == "rollout.vllm.max_batched_tokens"
