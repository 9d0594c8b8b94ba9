"""Recorder of the package's function calls, loaded by every Python process of a traced run.

Python imports a module named `sitecustomize` at its start, so a run with this folder on PYTHONPATH
and MAR_CALLS set to a folder is traced in all processes: the command, torchrun, ranks, Ray's actors
and vLLM's engine cores. Each process appends lines `[monotonic_ns, file, qualified name]` to
MAR_CALLS/<pid>.jsonl. The clock is that of the machine, so the files can be merged.

Invariants:
- a function is recorded at most once per `REARM_S` and process, so a traced run is barely slower;
  with MAR_CALLS_ONCE set, at most once per process;
- the marker functions, which begin and end the windows, are recorded at every call.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from types import CodeType

REARM_S = 0.02
_FOLDER = os.environ.get("MAR_CALLS", "")
_MARKERS = frozenset(os.environ.get("MAR_MARKERS", "").split(","))
"""Files and qualified names, as `gpt_model.py:GPTModel.forward`; of any package."""
_PACKAGE = f"{os.sep}megatron_async_rl{os.sep}"
_OPTIMIZED = 0x1
"""Flag of a function's code. The bodies of modules and classes lack it: an import is not a call."""


def _write(line: str) -> None:
    # Opened each time: forks share descriptors, and a sandbox closes them.
    with contextlib.suppress(OSError):  # a sandbox may hide the folder
        output = os.open(f"{_FOLDER}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(output, line.encode())
        finally:
            os.close(output)


def _called(code: CodeType, _offset: int) -> object:
    name = f"{os.path.basename(code.co_filename)}:{code.co_qualname}"
    marker = name in _MARKERS
    if marker or (_PACKAGE in code.co_filename and code.co_flags & _OPTIMIZED):
        _write(json.dumps([time.monotonic_ns(), code.co_filename, code.co_qualname]) + "\n")
    return None if marker else sys.monitoring.DISABLE


def _rearm() -> None:
    while True:
        time.sleep(REARM_S)
        sys.monitoring.restart_events()


def _start_thread() -> None:
    threading.Thread(target=_rearm, name="call recorder", daemon=True).start()


if _FOLDER:
    _TOOL = sys.monitoring.PROFILER_ID
    _EVENTS = sys.monitoring.events
    sys.monitoring.use_tool_id(_TOOL, "call recorder")
    # Resumes count as calls: the tasks of an asyncio program are started once and resumed often.
    for _event in (_EVENTS.PY_START, _EVENTS.PY_RESUME):
        sys.monitoring.register_callback(_TOOL, _event, _called)
    sys.monitoring.set_events(_TOOL, _EVENTS.PY_START | _EVENTS.PY_RESUME)
    if not os.environ.get("MAR_CALLS_ONCE"):
        os.register_at_fork(after_in_child=_start_thread)
        _start_thread()
