"""What is wrong with `rollout.vllm` on the machine of a plan. vLLM is not imported, which takes
seconds: the names of its engine's arguments are read from its source."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from megatron_async_rl.config.engine_options import refused_options, unknown_option
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layout import device_of
from megatron_async_rl.plan.machine import Machine


def option_problems(config: Config, machine: Machine) -> list[Problem]:
    if config.rollout is None or not config.rollout.vllm:
        return []
    options = config.rollout.vllm
    known = vllm_arguments()
    problems = [unknown_option(name, known) for name in options if known and name not in known]
    return problems + [
        Problem(key=f"rollout.vllm.{name}", what=f"may not be set: {why}", fix="remove it")
        for name, why in refused_options(options, device_of(config, machine))
    ]


def vllm_arguments() -> frozenset[str]:
    """Names of vLLM's `AsyncEngineArgs`; none where vLLM is not installed, or keeps them elsewhere:
    an engine asks vLLM itself as it starts."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        source = Path(folder) / "engine" / "arg_utils.py"
        if source.is_file():
            return frozenset(
                field.target.id
                for node in ast.parse(source.read_text(encoding="utf-8")).body
                if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    return frozenset()
