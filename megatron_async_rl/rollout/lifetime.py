"""No engine process outlives the actor that started it.

vLLM runs its scheduler in a child process, and with tensor parallelism the model in children of
that one; they do not notice when their parent is killed and would keep their cores, or their GPUs,
for ever. The actor names itself in the environment; each child asks the kernel to end it with its
parent and names itself for its own children. A child takes seconds to come to that: one whose
parent was killed meanwhile ends itself.
"""

from __future__ import annotations

import ctypes
import os
import signal

from megatron_async_rl.watchdog.processes import condition

PARENT = "MAR_ENGINE_PARENT"
"""Environment variable: process id of the engine actor, or of the process of vLLM that descends
from it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a child of the process named by `PARENT`: SIGKILL for this process when its parent ends.
    In one that descends from it otherwise, and in itself: nothing while it lives, SIGKILL at once
    when it has ended. Elsewhere, nothing.

    Linux only, where vLLM runs. The kernel watches the thread that started the child: the actor's
    event loop, or the main thread of vLLM's scheduler process.
    """
    named = os.environ.get(PARENT)
    if named is None:
        return
    parent = int(named)
    if os.getppid() == parent:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
        os.environ[PARENT] = str(os.getpid())
    if os.getppid() != parent and condition(parent) is None:
        os.kill(os.getpid(), signal.SIGKILL)
