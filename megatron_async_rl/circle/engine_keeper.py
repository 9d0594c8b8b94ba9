"""Starts engines again that died or stopped answering, in threads of rank 0.

    engine i is lost --> kill what is left of it --> start another --> feed it the staged weights --> replace i

Invariants:
- a lost engine is killed and gets no more weights at once, whatever else is being started: nobody waits for its answers;
- engines that are lost together are started together, each in a thread of its own;
- a new engine samples only after it has proved the weights it was fed (weights/publish.py), and takes part only if it has not
  failed at later ones meanwhile;
- each place in the fleet gets `rollout.restarts` new engines, then it is given up: the run goes on with the others, and says so;
- training never waits for it: while an engine starts, the others answer. Only where the policy trains on the same devices does
  it, as they have no room for both.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_async_rl.observe import watch
from megatron_async_rl.observe.deadline import ray_get
from megatron_async_rl.observe.events import note
from megatron_async_rl.rollout.actor import kill_engine, start_engine
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.weights.publish import Publisher, RayEngine, WeightMismatch

log = logging.getLogger(__name__)

POLL_S = 0.5


class EngineKeeper:
    """`handles`: of the running engines, in the order of `specs`; a restarted engine's takes the place of the old one.

    `evaluators`: how many, at the end of `specs`, only evaluate: those are not restarted. `turn`: entered for as
    long as an engine starts and comes up. `on_up`: called once a new engine takes part.
    """

    def __init__(
        self,
        controller: Any,
        publisher: Publisher,
        specs: Sequence[EngineSpec],
        handles: list[Any],
        *,
        evaluators: int,
        run_dir: Path,
        timeout_s: float,
        turn: AbstractContextManager[Any],
        on_up: Callable[[], None],
    ) -> None:
        self._controller = controller
        self._publisher = publisher
        self._specs = specs
        self._handles = handles
        self._last_training = len(specs) - evaluators
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._turn = turn
        self._on_up = on_up
        self._restarts: Counter[int] = Counter()
        self._given_up: set[int] = set()
        self._giving_up = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._begin("engine keeper", self._run)

    def check(self) -> None:
        """Raises what ended the keeper, if something did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Returns at once; an engine that is being started is stopped with the others."""
        self._stop.set()

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        """A thread for `work`, whose failure `check` raises."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                if not self._stop.is_set():
                    log.exception("the engine keeper failed")
                    self._failure = error

        threading.Thread(target=run, name=name, daemon=True).start()

    def _run(self) -> None:
        import ray

        pending = self._controller.lost.remote()
        while not self._stop.is_set():
            done, _ = ray.wait([pending], timeout=POLL_S)
            if done and not self._stop.is_set():
                index, reason = ray_get(pending, "the controller to say which engine is lost", self._timeout_s)
                pending = self._controller.lost.remote()
                self._publisher.remove(self._specs[index].name)
                kill_engine(self._handles[index])
                self._begin(f"restart of {self._specs[index].name}", partial(self._replace, index, reason))

    def _replace(self, index: int, reason: str) -> None:
        spec = self._specs[index]
        while index < self._last_training and self._restarts[index] < spec.rollout.restarts and not self._stop.is_set():
            self._restarts[index] += 1
            which = f"restart {self._restarts[index]} of {spec.rollout.restarts}"
            note(self._run_dir, f"{spec.name} is lost and its prompts are asked again; {which}. Why: {reason}")
            with watch.doing("wait", f"{spec.name} to start and take part"), self._turn:
                handle = None
                try:
                    handle = self._handles[index] = start_engine(spec)
                    version = self._publisher.bring_up(RayEngine(spec.name, handle))
                except WeightMismatch:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, another may do better
                    reason = str(error)
                    if handle is not None:
                        kill_engine(handle)
                    continue
                ray_get(self._controller.replace.remote(index, handle), "the controller to take a new engine", self._timeout_s)
                if spec.name not in self._publisher.versions:  # lost at an update while its place in the fleet was still empty
                    reason = f"{spec.name} failed at the next weights before it took part"
                    ray_get(self._controller.lose.remote(index, reason), "the controller to lose an engine", self._timeout_s)
                    return
                self._on_up()
            note(self._run_dir, f"{spec.name} is back, with the weights of version {version}, proven")
            return
        if self._stop.is_set():
            return
        with self._giving_up:
            self._given_up.add(index)
            left = sum(1 for other in range(self._last_training) if other not in self._given_up)
        note(self._run_dir, f"{spec.name} is lost for good; {left} of {self._last_training} engines are left. Why: {reason}")
        ray_get(self._controller.give_up.remote(index), "the controller to give an engine up", self._timeout_s)
