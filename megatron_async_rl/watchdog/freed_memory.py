"""Return of freed memory from the C library to the system.

Steps and updates allocate blocks of other sizes each time, so their freed memory has gaps that no
later block fills, and a process grows. Invariant: after each step of a trainer rank and each update
of an engine on a CPU, the C library keeps at most KEPT_BYTES of freed memory.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 2**30
"""Number of freed bytes above which a process returns them to the system."""


class _Mallinfo(ctypes.Structure):
    """Result of the C library's mallinfo2. fordblks: freed bytes that it keeps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def return_freed_memory() -> None:
    """Return freed memory to the system if the C library keeps more than KEPT_BYTES. Does nothing
    without glibc 2.33."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return
    library.mallinfo2.restype = _Mallinfo
    if library.mallinfo2().fordblks > KEPT_BYTES:
        library.malloc_trim(0)
