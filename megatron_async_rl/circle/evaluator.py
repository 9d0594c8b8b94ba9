"""Held-out evaluation during a run, as rank 0 asks for it: on the training engines, or on engines of its own beside training.

Invariants:
- the weights that are evaluated stay in their engines until the evaluation is over: training engines get no others before
  the loop goes on, evaluation engines are given weights only here;
- one evaluation at a time; results come in the order of versions;
- an evaluation engine that fails to take a version is lost, and the others evaluate; where none is left that is noted, and
  training goes on without.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.flow.evaluation import EvalResult
from megatron_async_rl.observe.deadline import ray_get, waiting
from megatron_async_rl.observe.events import note
from megatron_async_rl.samples import Prompt
from megatron_async_rl.weights.publish import Publisher, PublishFailed, RayEngine

DAY_S = 86400.0
"""Longest evaluation. Whether it moves is the controller's to watch: it ends an evaluation of which nothing comes."""


class Evaluator:
    """`engines`: that only evaluate; none: the controller's training engines do."""

    def __init__(
        self, config: Config, controller: Any, publisher: Publisher, engines: Sequence[RayEngine], prompts: Sequence[Prompt]
    ) -> None:
        self._config = config
        self._controller = controller
        self._publisher = publisher
        assert config.rollout is not None
        self.separate = bool(engines)
        """Whether engines of their own evaluate."""
        self._engines = dict(enumerate(engines, start=config.rollout.engines))
        self._prompts = list(prompts)
        self._results: list[EvalResult] = []
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, version: int) -> None:
        """`version` is staged and, where the training engines evaluate, delivered. Blocks until the result is there, or until the
        evaluation engines hold the version: the next one may then be staged."""
        self._finish()
        if not self.separate:
            self._results.append(self._evaluate(version))
            return
        for index, engine in list(self._engines.items()):
            try:
                if self._publisher.bring_up(engine) != version:
                    raise RuntimeError(f"{engine.name} was to evaluate version {version}, and other weights are staged")
                self._publisher.remove(engine.name)
            except PublishFailed as error:
                self._lose(index, error)
        if not self._engines:
            self._note_missed(version, EngineFailed("no evaluation engine is left"))
            return
        self._thread = threading.Thread(
            target=self._beside_training, args=(version,), name=f"evaluation of {version}", daemon=True
        )
        self._thread.start()

    def results(self, *, wait: bool) -> list[EvalResult]:
        """Since the last call; with `wait`, also that of the evaluation that is going on. Raises what ended it."""
        if wait:
            self._finish()
        if self._failure is not None:
            raise self._failure
        results, self._results = self._results, []
        return results

    def _finish(self) -> None:
        if self._thread is not None:
            with waiting("the evaluation before", DAY_S):
                self._thread.join(DAY_S)
                if self._thread.is_alive():
                    raise TimeoutError
            self._thread = None

    def _beside_training(self, version: int) -> None:
        try:
            # A result first, then the list: `results` may have taken the list away meanwhile.
            result = self._evaluate(version)
            self._results.append(result)
        except EngineFailed as error:
            self._note_missed(version, error)
        except BaseException as error:  # noqa: BLE001 - raised in the loop's thread
            self._failure = error

    def _lose(self, index: int, error: PublishFailed) -> None:
        """The controller asks the engine, which holds older weights, for nothing any more."""
        del self._engines[index]
        timeout_s = self._config.watchdog.timeout_s
        ray_get(self._controller.lose.remote(index, str(error)), "the controller to lose an evaluation engine", timeout_s)

    def _note_missed(self, version: int, error: Exception) -> None:
        note(self._config.run.dir, f"version {version} is not evaluated: {error}")

    def _evaluate(self, version: int) -> EvalResult:
        evaluation = self._config.eval
        assert evaluation is not None
        call = self._controller.evaluate.remote(
            self._prompts,
            evaluation.samples_per_prompt,
            version,
            self._config.watchdog.timeout_s,
            evaluation.pass_at,
            evaluation.pass_reward,
        )
        result: EvalResult = ray_get(call, f"the evaluation of version {version}", DAY_S)
        return result
