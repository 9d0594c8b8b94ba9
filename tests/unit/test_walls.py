"""Who may import whom, and what importing loads."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "import sys, importlinter.cli as linter; sys.exit(linter.lint_imports(no_cache=True))"
HEAVY = ("torch", "megatron", "mbridge", "vllm", "ray", "transformers")


def test_every_import_respects_the_walls_of_the_house():
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "megatron_async_rl",
        "megatron_async_rl.config.load, megatron_async_rl.config.plan, megatron_async_rl.config.document",
        "megatron_async_rl.samples",
        "megatron_async_rl.data",
        "megatron_async_rl.flow, megatron_async_rl.flow.controller, megatron_async_rl.flow.actor",
        "megatron_async_rl.observe.metrics, megatron_async_rl.observe.progress",
        "megatron_async_rl.rollout, megatron_async_rl.rollout.spec, megatron_async_rl.rollout.rewards",
        "megatron_async_rl.cli, megatron_async_rl.check, megatron_async_rl.plan_screen, megatron_async_rl.doctor",
        "megatron_async_rl.launch",
    ],
)
def test_importing_it_loads_no_heavy_library(modules):
    question = f"import sys, {modules}; print(*sorted(set({HEAVY}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", question], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
