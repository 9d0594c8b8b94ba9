"""CUDA libraries in a process that imports torch and Transformer Engine as a rank does.

    python -m megatron_async_rl.plan.libraries        the last step of the GPU image's build

torch loads the libraries of the wheels that it was compiled against. Transformer Engine's loader prefers
those of the system. Two copies of one library in a process fail at the import, in
`torch.backends.cudnn.version()`, or in the middle of a step. Needs no GPU and no driver.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

ONE_OF_EACH = ("libcudnn", "libcublas", "libcublasLt", "libcudart", "libnccl")
"""Libraries that exchange handles between torch, Transformer Engine and vLLM: a process may have one
file of each. libnvrtc and libcurand pass none on."""
MAPS = Path("/proc/self/maps")


class LibraryConflict(RuntimeError):
    """A process has two files of one CUDA library, or not the one that torch was compiled against."""


def loaded(maps: str) -> dict[str, set[str]]:
    """Files of each library in ONE_OF_EACH. maps: the text of /proc/PID/maps."""
    files = set(re.findall(r"(/\S*/lib[^/\s]*\.so[.\d]*)(?: \(deleted\))?$", maps, re.MULTILINE))
    found: dict[str, set[str]] = {name: set() for name in ONE_OF_EACH}
    for file in files:
        name = Path(file).name.partition(".so")[0]
        if name in found:
            found[name].add(file)
    return found


def require_one_of_each() -> None:
    """Import what a rank imports, in its order, and raise LibraryConflict or what an import raised."""
    torch = importlib.import_module("torch")
    if find_spec("transformer_engine") is not None:
        importlib.import_module("transformer_engine.pytorch")
    torch.backends.cudnn.version()  # compares the loaded cuDNN with the one of the build
    for name, files in loaded(MAPS.read_text(encoding="utf-8")).items():
        if len(files) > 1:
            raise LibraryConflict(
                f"two files of {name} are loaded: {', '.join(sorted(files))}. Remove the one that is"
                " not in nvidia/ beside torch: a base image without cuDNN has none"
            )


if __name__ == "__main__":
    try:
        require_one_of_each()
    except LibraryConflict as error:
        sys.exit(str(error))
