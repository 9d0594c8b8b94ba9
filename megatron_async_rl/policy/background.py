"""Work that a thread of this process does concurrently with the steps, such as writing a
checkpoint.

Invariants:
- at most one piece of work is in progress;
- a failure is raised once, by the next `start`, `finish` or `check`, in the thread that calls it;
- at the end, work in progress is awaited, whether or not the run ended well: ranks write together,
  so if one does not finish, the work of the others is lost;
- the work keeps no process alive: if a rank is ended at once, the work ends as in a kill.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)


class Background:
    """Context manager: at its end the work is done, or its error is raised."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start `work` after the previous work has ended. Raises the error of the previous work."""
        self.finish()
        self._work = future = Future[None]()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                future.set_exception(error)
            else:
                future.set_result(None)

        # A daemon, so that a process that ends after a failure does not wait for the disk.
        threading.Thread(target=run, name=self._name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def finish(self) -> None:
        """Wait for the work in progress. Raises its error."""
        # Taken first, so that an error is raised once.
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def check(self) -> None:
        """Raise the error of work that has ended; do not wait."""
        if not self.busy:
            self.finish()

    def settle(self, timeout_s: float) -> None:
        """Wait for the work in progress, at most `timeout_s`; raise nothing."""
        if self._work is not None:
            wait([self._work], timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.finish()
        except Exception:
            if error is None:
                raise
            # The run ends with its own error instead.
            log.exception("%s failed", self._name)
