"""Stacks as faulthandler writes them, and the few frames of them that say where a process is."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

OURS = "/megatron_async_rl/"
FRAMES_OF_OURS = 2
THREADS = 4
_FRAME = re.compile(r'^ +File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def ours(self) -> bool:
        return OURS in self.file

    def __str__(self) -> str:
        place = self.file.rpartition(OURS)[2] if self.ours else "/".join(self.file.split("/")[-2:])
        return f"{place}:{self.line} {self.function}"


def read_threads(dump: str) -> list[tuple[Frame, ...]]:
    """The frames of each thread, innermost first. The main thread is the last one, as faulthandler has it."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return [tuple(frames) for frames in threads if frames]


def places(dump: str) -> list[str]:
    """Where the threads with code of ours are, and the main thread: `innermost < ours < the caller of ours`, equal ones once."""
    threads = read_threads(dump)
    shown = [_place(frames) for frames in threads[-1:] if not _watches(frames)]
    shown += [_place(frames) for frames in threads[:-1] if any(frame.ours for frame in frames) and not _watches(frames)]
    counted = Counter(shown)
    return [text if count == 1 else f"{text} ({count} threads)" for text, count in counted.items()][:THREADS]


def _place(frames: tuple[Frame, ...]) -> str:
    ours = [frame for frame in frames if frame.ours][:FRAMES_OF_OURS]
    chosen = ours if frames[0] in ours else [frames[0], *ours]
    return " < ".join(map(str, chosen))


def _watches(frames: tuple[Frame, ...]) -> bool:
    """The heartbeat's own thread, and one that is taking the picture."""
    watching = (("observe/watch.py", "run"), ("observe/stall.py", "gather"))
    return any(frame.ours and (frame.file.rpartition(OURS)[2], frame.function) in watching for frame in frames)
