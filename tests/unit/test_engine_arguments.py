"""Arguments of vLLM's engine: files of the model, options of the user, and options that only this
package sets."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.engine_options import (
    BREAKS,
    BREAKS_ON_CPU,
    OWNED,
    QUANTISED_AS_LOADED,
    refused_options,
    vllm_arguments,
    wrong_value,
)
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.policy.parameters import safetensor_files
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.plugin import environment
from tests.tiny_models import save_tiny_model
from tests.written_run import write_run


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
        transport="shared_memory",
    )


def test_mistrals_own_files_are_read_by_neither_policy_nor_engine(tmp_path: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    own = save_tiny_model(tmp_path / "own", "mistral", sliding_window=7)
    shutil.copy(own / "model.safetensors", own / "consolidated.safetensors")
    assert [file.name for file in safetensor_files(own)] == ["model.safetensors"]
    found = engine_arguments(spec_with(own))
    # "auto" would read params.json and consolidated.safetensors if the folder has them.
    assert (found.config_format, found.load_format, found.tokenizer_mode) == ("hf", "hf", "hf")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_argument_that_the_package_sets_is_refused_in_the_config(tmp_path, monkeypatch, device):
    from megatron_async_rl.rollout.vllm import engine_arguments as arguments
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    own: dict[str, Any] = {}

    @dataclasses.dataclass  # `engine_arguments` reads its fields
    class Recorder:
        def __new__(cls, **arguments: Any) -> Any:
            own.update(arguments)

    monkeypatch.setattr(arguments, "AsyncEngineArgs", Recorder)
    engine_arguments(spec_with(tmp_path, device))
    assert len(own) > 15
    assert own.pop("block_size", None) == {"cpu": 32, "cuda": None}[device]  # only a default
    assert set(own) == {name for name, _ in refused_options(own, device)}


def test_every_refused_name_is_an_option_of_vllm():
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    patterns = [*OWNED, *BREAKS, *BREAKS_ON_CPU]
    assert [one for one in patterns if not fnmatch.filter(known, one)] == []


def test_the_preflight_reads_vllms_options_without_importing_vllm():
    from vllm import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    assert vllm_arguments().keys() == {field.name for field in fields}
    assert vllm_arguments()["max_num_batched_tokens"] == "int | None"


def test_no_default_of_vllm_counts_as_a_wrong_value():
    from vllm import AsyncEngineArgs

    known = vllm_arguments()
    defaults = AsyncEngineArgs()
    wrong = [n for n in known if wrong_value(n, getattr(defaults, n), known[n]) is not None]
    assert wrong == []


def test_an_option_of_the_config_reaches_vllm(tmp_path: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    found = engine_arguments(spec_with(tmp_path, max_num_batched_tokens=4096, block_size="64"))
    assert (found.max_num_batched_tokens, found.block_size) == (4096, 64)


def test_only_quantization_during_the_load_is_permitted(tmp_path: Path) -> None:
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    values = {*QUANTIZATION_METHODS, *_ONLINE_SHORTHANDS}
    for device, known in (("cpu", QUANTISED_AS_LOADED[:1]), ("cuda", QUANTISED_AS_LOADED)):
        refused = {name for name in values if dict(refused_options({"quantization": name}, device))}
        assert values - refused == set(known)
    assert set(QUANTISED_AS_LOADED) < set(_ONLINE_SHORTHANDS)
    found = engine_arguments(spec_with(tmp_path, quantization="fp8_per_channel"))
    assert found.quantization == "fp8_per_channel"
    with pytest.raises(ValidationError, match="gptq is for weights that are already quantised"):
        spec_with(tmp_path, quantization="gptq")


def test_an_engine_has_a_worker_per_pipeline_stage_and_tensor_shard(tmp_path: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    spec = spec_with(tmp_path, enable_expert_parallel=True)
    rollout = spec.rollout.model_copy(update={"tensor": 2, "pipeline": 3})
    found = engine_arguments(replace(spec, rollout=rollout))
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (2, 3)
    assert found.enable_expert_parallel
    assert found.kv_cache_memory_bytes == int(rollout.kv_cache_gib * 2**30) // 6
    assert found.distributed_executor_backend == "mp"


def test_an_engine_refuses_an_option_that_its_vllm_lacks(tmp_path: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    with pytest.raises(UserError, match="max_num_batched_tokens") as refused:
        engine_arguments(spec_with(tmp_path, max_batched_tokens=4096))
    assert refused.value.problems[0].key == "rollout.vllm.max_batched_tokens"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
def test_logits_of_a_bfloat16_model_are_computed_in_float32(
    tmp_path: Path, tied: bool, quantization: str | None
) -> None:
    """Neighbouring bfloat16 numbers between 16 and 32 differ by 0.125."""
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    path = save_tiny_model(tmp_path / "model", tied=tied, dtype="bfloat16")
    spec = replace(spec_with(path, quantization=quantization), dtype="bfloat16")
    found = engine_arguments(spec).create_model_config()
    assert (found.dtype, found.head_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", QUANTISED_AS_LOADED)
def test_a_quantized_engine_does_not_quantize_its_output_layer(name: str) -> None:
    """vLLM cannot compute float32 logits with a quantized output layer."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    config = OnlineQuantizationConfig(_ONLINE_SHORTHANDS[name])
    assert config.resolve_quant_method_cls(ParallelLMHead, "lm_head") is None
    assert config.resolve_quant_method_cls(ColumnParallelLinear, "layer") is not None


def test_a_float32_engine_has_no_override_for_its_logits(tmp_path: Path) -> None:
    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    path = save_tiny_model(tmp_path / "model")
    found = engine_arguments(spec_with(path)).create_model_config()
    assert found.head_dtype == found.dtype == torch.float32
    assert found.hf_overrides == {}


def test_float32_logits_of_a_bfloat16_model_are_precise() -> None:
    """The test calls vLLM's own layer with the engine's setting."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with set_current_vllm_config(VllmConfig()):
        layer = LogitsProcessor(32)
    weight = (8 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))).bfloat16()
    method = UnquantizedEmbeddingMethod()
    head = SimpleNamespace(weight=weight, quant_method=method, tp_size=1)
    layer.head_dtype = torch.float32
    found = layer._get_logits(hidden, head, None)
    assert found.dtype == torch.float32
    exact = hidden.double() @ weight.double().t()
    assert (found - exact).abs().max() < 1e-3 < (exact.bfloat16() - exact).abs().max()


@pytest.mark.parametrize(
    ("inherited", "kept"),
    [
        ("", []),
        ("/a/libtcmalloc.so:/b/libgomp-24e2.so.1.0.0", ["/a/libtcmalloc.so"]),
        ("/b/libiomp5.so /a/libtcmalloc.so", ["/a/libtcmalloc.so"]),
        ("/b/libomp.so:/c/libomptarget.so", ["/c/libomptarget.so"]),
    ],
)
def test_an_engine_preloads_one_openmp_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherited: str, kept: list[str]
) -> None:
    """vLLM does not start if the environment also preloads another one, such as GNU's."""
    own = tmp_path / "lib" / "libiomp5.so"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", inherited)
    assert environment(spec_with(tmp_path))["LD_PRELOAD"].split(":") == [str(own), *kept]


def test_the_user_cannot_set_the_dtype_of_logits(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="policy and engines must have the same model"):
        spec_with(tmp_path, hf_overrides={"head_dtype": "model"})


def test_the_preflight_reports_a_grammar_that_vllm_cannot_read(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path)
    look, good = "(?=1)[0-9]+", "[0-9]+"
    schema = {"type": "array", "uniqueItems": True}

    def problems(evaluation: dict[str, Any], *overrides: str) -> list[Problem]:
        override = f"eval={json.dumps(evaluation)}"
        return list(preflight(load(file, [override, *overrides]), all_data=False).problems)

    def one_set(name: str, **sampling: Any) -> dict[str, Any]:
        return {
            "name": name,
            "path": str(tmp_path / "train.jsonl"),
            **({"sampling": sampling} if sampling else {}),
        }

    found = problems(
        {
            "sampling": {"regex": look},
            "sets": [one_set("a"), one_set("b", regex=good), one_set("c", json_schema=schema)],
        }
    )
    assert [one.key for one in found] == ["eval.sampling.regex", "eval.sets.2.sampling.json_schema"]
    assert "look-around" in found[0].what
    assert "look-around" in found[0].fix
    assert 'Unimplemented keys: ["uniqueItems"]' in found[1].what
    assert problems({"sampling": {"regex": good}, "sets": [one_set("a")]}) == []
    chosen = "rollout.vllm={structured_outputs_config: {backend: xgrammar}}"
    alone = {"sets": [one_set("c", json_schema={"type": "integer", "multipleOf": 3})]}
    assert problems(alone) == []
    assert [one.key for one in problems(alone, chosen)] == ["eval.sets.0.sampling.json_schema"]
