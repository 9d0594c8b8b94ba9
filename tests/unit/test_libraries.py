"""A process has one file of each CUDA library, and the image does not contain a second one.

`make loader-test` runs the test with the real wheels of Transformer Engine, which are too large for
the environment.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from megatron_async_rl.plan import libraries
from megatron_async_rl.plan.libraries import LibraryConflict, loaded, require_one_of_each

ROOT = Path(__file__).parents[2]
CUDNN = Path(sysconfig.get_path("purelib"), "nvidia", "cudnn", "lib", "libcudnn.so.9")
WHEELS = os.environ.get("MAR_TE_WHEELS", "")
ADDRESS = "7f00-7f01 r-xp 0000 08:01 "
WITH_CUDA = pytest.mark.skipif(
    not CUDNN.is_file(), reason="torch is built for CPUs here: it loads no library of CUDA"
)


def test_parts_of_a_library_count_as_separate_libraries():
    maps = "\n".join(
        ADDRESS + line
        for line in (
            "1  /a/nvidia/cudnn/lib/libcudnn.so.9",
            "1  /a/nvidia/cudnn/lib/libcudnn.so.9",
            "2  /a/nvidia/cudnn/lib/libcudnn_graph.so.9",
            "3  /usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0",
            "4  /a/nvidia/cu13/lib/libcublasLt.so.13",
            "5  /a/nvidia/nccl/lib/libnccl.so.2 (deleted)",
            "0  [heap]",
        )
    )
    found = loaded(maps)
    assert found["libcudnn"] == {
        "/a/nvidia/cudnn/lib/libcudnn.so.9",
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0",
    }
    assert found["libcudnn_graph"] == {"/a/nvidia/cudnn/lib/libcudnn_graph.so.9"}
    assert "libcublas" not in found
    assert found["libcublasLt"] == {"/a/nvidia/cu13/lib/libcublasLt.so.13"}
    assert found["libnccl"] == {"/a/nvidia/nccl/lib/libnccl.so.2"}


def test_each_library_must_be_one_file_of_the_wheels(tmp_path):
    own = tmp_path / "cu13" / "lib" / "libcublas.so.13"
    own.parent.mkdir(parents=True)
    own.touch()
    require_one_of_each({"libcublas": {str(own)}, "libnccl": {"/usr/lib/libnccl.so.2"}}, tmp_path)
    system = "/usr/local/cuda/lib64/libcublas.so.13"
    with pytest.raises(LibraryConflict, match=f"libcublas is loaded from {system}, and torch was"):
        require_one_of_each({"libcublas": {system}}, tmp_path)
    with pytest.raises(LibraryConflict, match="two files of libcublas are loaded"):
        require_one_of_each({"libcublas": {system, str(own)}}, tmp_path)


PROGRAM = f"""
import ctypes, torch
from {libraries.__name__} import MAPS, check, loaded
check()
print(loaded(MAPS.read_text()))
ctypes.CDLL({{second!r}}, mode=ctypes.RTLD_GLOBAL)
check()
"""


@WITH_CUDA
def test_torch_loads_one_file_of_each_library_and_a_second_is_reported(tmp_path):
    """Transformer Engine would load a second cuDNN if the base image had one."""
    second = shutil.copy(CUDNN, tmp_path / "libcudnn.so.9.14.0")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(second=str(second))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = ast.literal_eval(done.stdout)
    assert {"libcudnn", "libcublas", "libcublasLt", "libcudart", "libnccl"} <= found.keys()
    assert {len(files) for files in found.values()} == {1}
    assert found["libcudnn"] == {str(CUDNN)}
    assert f"{LibraryConflict.__name__}: two files of libcudnn are loaded: " in done.stderr
    assert str(second) in done.stderr


LOADER = """
set -e
ldconfig -C "$0/cache" -f "$0/ld.so.conf"
mount --bind "$0/cache" /etc/ld.so.cache
exec "$1" -c 'import torch, transformer_engine.common
from megatron_async_rl.plan.libraries import MAPS, LibraryConflict, loaded
torch.backends.cudnn.version()
two = {name: files for name, files in loaded(MAPS.read_text()).items() if len(files) > 1}
assert any("libtransformer_engine" in line for line in MAPS.read_text().splitlines())
raise SystemExit(f"two files: {two}" if two else 0)'
"""


@WITH_CUDA
@pytest.mark.skipif(not WHEELS, reason="needs Transformer Engine's wheels: make loader-test")
@pytest.mark.skipif(os.geteuid() != 0, reason="a private ld.so.cache needs root")
@pytest.mark.parametrize("image", ["with cuDNN", "without"])
def test_transformer_engine_uses_torchs_cudnn_unless_the_image_has_one(tmp_path, image):
    for wheel in Path(WHEELS).glob("transformer_engine*.whl"):
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    system = tmp_path / "system"
    system.mkdir()
    if image == "with cuDNN":
        shutil.copy(CUDNN, system / "libcudnn.so.9")
        (system / "libcudnn.so").symlink_to("libcudnn.so.9")  # of the -dev package
    configuration = Path("/etc/ld.so.conf").read_text()
    (tmp_path / "ld.so.conf").write_text(f"{system}\n{configuration}")
    command = ["unshare", "-m", "bash", "-c", LOADER, str(tmp_path), sys.executable]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if image == "without":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert str(system) in done.stderr
