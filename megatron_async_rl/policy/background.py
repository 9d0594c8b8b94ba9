"""Work that a thread of this process does concurrently with the steps: writing a checkpoint.

Invariants:
- at most one piece of work is under way;
- a failure is raised once, by the next `start`, `finish` or `check`, in the thread that calls it;
- work under way at the end is waited for, whether the run ended well or not: ranks write together,
  so what one leaves undone the others lose;
- it keeps no process alive: a rank that is ended at once leaves the work as a kill does.
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
    """Used as a context: at its end the work is done, or its error is raised."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the work before. Raises what that raised."""
        self.finish()
        self._work = future = Future[None]()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                future.set_exception(error)
            else:
                future.set_result(None)

        # A daemon: a process that ends after a failure does not wait for the disk.
        threading.Thread(target=run, name=self._name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def finish(self) -> None:
        """Wait for the work under way. Raises what it raised."""
        # Taken first, so that an error is raised once.
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def check(self) -> None:
        """Raise what work that has ended raised; does not wait."""
        if not self.busy:
            self.finish()

    def settle(self, timeout_s: float) -> None:
        """Wait for the work in progress, for at most this long; raises nothing."""
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
            # The run has a failure of its own to end with.
            log.exception("%s failed", self._name)
