"""CUDA libraries in a process that imports torch and Transformer Engine as a rank does.

    python -m megatron_async_rl.plan.libraries        the last step of the GPU image's build

torch loads the libraries of the wheels that it was compiled against. Transformer Engine's loader
prefers those of the system. Two copies of one library in a process fail at the import, in
`torch.backends.cudnn.version()`, or in the middle of a step. Needs no GPU and no driver.
"""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

SHARED = ("libcudnn", "libcublas", "libcudart", "libnccl")
"""Beginnings of the names of libraries that exchange handles between torch, Transformer Engine and
vLLM, and of their parts: a process may have one file of each. libnvrtc and libcurand pass none
on."""
MAPS = Path("/proc/self/maps")


class LibraryConflict(RuntimeError):
    """A process has two files of one CUDA library, or another than torch was compiled against."""


def loaded(maps: str) -> dict[str, set[str]]:
    """Files of each of the SHARED libraries in a process. maps: the text of /proc/PID/maps."""
    # The kernel marks libraries whose file was replaced since.
    files = re.findall(r"(/\S*/lib[^/\s]*\.so[.\d]*)(?: \(deleted\))?$", maps, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for file in files:
        name = Path(file).name.partition(".so")[0]
        if name.startswith(SHARED):
            found.setdefault(name, set()).add(file)
    return found


def require_one_of_each(found: Mapping[str, Collection[str]], wheels: Path) -> None:
    """Raise LibraryConflict unless each library is one file, and the wheels' where these have it.
    found: as `loaded`. wheels: the folder that NVIDIA's wheels install to."""
    for name, files in sorted(found.items()):
        own = {str(file) for file in wheels.glob(f"*/lib/{name}.so*")}
        # Handles of one copy are invalid in the other.
        if len(files) > 1:
            raise LibraryConflict(
                f"two files of {name} are loaded: {', '.join(sorted(files))}. Remove the file that"
                f" is not in {wheels}: a base image without cuDNN has none"
            )
        if own and not own.issuperset(files):
            raise LibraryConflict(
                f"{name} is loaded from {', '.join(files)}, and torch was compiled against"
                f" {', '.join(sorted(own))}: unset LD_PRELOAD and LD_LIBRARY_PATH"
            )


def check() -> None:
    """Import what a rank imports, in its order, and look at what is loaded. Raise LibraryConflict,
    or what an import raised."""
    # torch first, as a rank does: its libraries decide which others are found.
    torch = importlib.import_module("torch")
    if find_spec("transformer_engine") is not None:
        importlib.import_module("transformer_engine.pytorch")
    torch.backends.cudnn.version()  # compares the loaded cuDNN with the one of the build
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    require_one_of_each(loaded(MAPS.read_text(encoding="utf-8")), wheels)


if __name__ == "__main__":
    try:
        check()
    except LibraryConflict as error:
        sys.exit(str(error))
