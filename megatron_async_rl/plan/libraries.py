"""Check for duplicate CUDA libraries in a process that imports torch and Transformer Engine like a
rank.

    python -m megatron_async_rl.plan.libraries        the last step of the GPU image's build

torch loads the libraries of the wheels that it was compiled against; Transformer Engine's loader
prefers the system's libraries. Two copies of one library make the import fail, or
`torch.backends.cudnn.version()`, or a later training step. The check needs no GPU and no driver.
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
"""Name prefixes of the libraries whose handles torch, Transformer Engine and vLLM exchange: a
process may load only one file of each, and of each of their parts. libnvrtc and libcurand are not
listed because their handles are not exchanged."""
MAPS = Path("/proc/self/maps")


class LibraryConflict(RuntimeError):
    """Error: a process loaded two files of a CUDA library, or not the file that torch was compiled
    against."""


def loaded(maps: str) -> dict[str, set[str]]:
    """Return the files of each SHARED library that a process has loaded. `maps`: text of
    /proc/PID/maps."""
    # The kernel appends (deleted) if the file was removed after it was loaded.
    files = re.findall(r"(/\S*/lib[^/\s]*\.so[.\d]*)(?: \(deleted\))?$", maps, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for file in files:
        name = Path(file).name.partition(".so")[0]
        if name.startswith(SHARED):
            found.setdefault(name, set()).add(file)
    return found


def require_one_of_each(found: Mapping[str, Collection[str]], wheels: Path) -> None:
    """Raise LibraryConflict unless each library in `found` (from `loaded`) is one file, and the
    wheels' own file if the wheels contain the library. `wheels`: the install folder of NVIDIA's
    wheels."""
    for name, files in sorted(found.items()):
        own = {str(file) for file in wheels.glob(f"*/lib/{name}.so*")}
        # A handle that one copy created is invalid in the other.
        if len(files) > 1:
            raise LibraryConflict(
                f"two files of {name} are loaded: {', '.join(sorted(files))}; fix: remove the file"
                f" outside {wheels}, for example with a base image that does not contain cuDNN"
            )
        if own and not own.issuperset(files):
            raise LibraryConflict(
                f"{name} is loaded from {', '.join(files)}, and torch was compiled against"
                f" {', '.join(sorted(own))}; fix: unset LD_PRELOAD and LD_LIBRARY_PATH"
            )


def check() -> None:
    """Import torch and Transformer Engine in a rank's order, and check the loaded libraries. Raises
    LibraryConflict, or the error of an import."""
    # torch first, like a rank: the libraries that it loads decide which others the loader finds.
    torch = importlib.import_module("torch")
    if find_spec("transformer_engine") is not None:
        importlib.import_module("transformer_engine.pytorch")
    torch.backends.cudnn.version()  # fails if the loaded cuDNN does not fit torch's build
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    require_one_of_each(loaded(MAPS.read_text(encoding="utf-8")), wheels)


if __name__ == "__main__":
    try:
        check()
    except LibraryConflict as error:
        sys.exit(str(error))
