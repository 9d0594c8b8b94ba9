"""Outcomes of an engine's responses. The tests create vLLM's outputs."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.rollout.engine import RolloutEngine
from megatron_async_rl.rollout.engine_state import BusyClock
from megatron_async_rl.rollout.environments.transcript import Transcript, TranscriptSegment
from megatron_async_rl.rollout.responses import Responses
from megatron_async_rl.rollout.rewards.worker import Scored
from megatron_async_rl.rollout.scoring import Scorer
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.client import EngineDied
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.columns import samples_of
from megatron_async_rl.samples.types import PartialResponse, Request

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector


class FakeLLM:
    """Stand-in for AsyncLLM: accepts requests, whose outputs the test puts into `collectors`."""

    def __init__(self) -> None:
        self.collectors: list[RequestOutputCollector] = []
        self.parameters: list[SamplingParams] = []
        self.aborted: list[str] = []

    async def add_request(
        self, name: str, prompt: Any, parameters: SamplingParams
    ) -> RequestOutputCollector:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self.collectors.append(RequestOutputCollector(RequestOutputKind.FINAL_ONLY, f"{name}-x"))
        self.parameters.append(parameters)
        return self.collectors[-1]

    async def abort(self, names: Any, internal: bool) -> None:
        self.aborted += [names] if isinstance(names, str) else names
        for collector in self.collectors:
            if collector.request_id in names:
                collector.put(output([5], reason="abort"))


def output(ids: list[int], reason: str = "stop", experts: Any = None) -> RequestOutput:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    logprobs = FlatLogprobs()
    for token in ids:
        logprobs.append_fast([token], [-0.5], iter([1]), [None])
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=reason,
        routed_experts=experts,
    )
    completion.weight_versions = [SimpleNamespace(version="3", start=0, end=len(ids))]
    return RequestOutput("r", None, [1], None, [completion], True)


PROMPT = Prompt(id="p", text="?", token_ids=(1,))


def dead_engine() -> Exception:
    """Return vLLM's error for a request to an engine whose core has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError()


def request(k: int, **fields: Any) -> Request:
    return Request(group=4, k=k, prompt=replace(PROMPT, fields=fields))


def working(
    logs: Path,
    work: Callable[[Responses, FakeLLM], Awaitable[None]],
    max_tokens: int = 8,
    records_experts: bool = False,
    stop: Sequence[str] = (),
) -> None:
    from vllm import SamplingParams

    logs.mkdir(exist_ok=True)
    spec = EngineSpec(
        index=0,
        model_path=logs,
        dtype="float32",
        rollout=RolloutConfig.model_validate(
            {
                "reward": {"name": "arithmetic"},
                "sampling": {"max_tokens": max_tokens, "stop": list(stop)},
            }
        ),
        seed=1,
        device="cpu",
        log_dir=logs,
        transport="shared_memory",
        records_experts=records_experts,
        evaluations={"held": SamplingConfig(max_tokens=max_tokens)},
    )
    tokenizer: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    async def run() -> None:
        llm: Any = FakeLLM()
        scorer = Scorer(spec.rollout.reward)
        one = SamplingParams(max_tokens=max_tokens, detokenize=False, skip_clone=True)
        sampling = {None: one, "held": one}
        responses = Responses(llm, spec, sampling, tokenizer, scorer, BusyClock())
        await work(responses, llm)
        responses.close()

    asyncio.run(run())


def test_responses_that_end_together_are_reported_together(tmp_path: Path) -> None:
    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(k, answer="7 0") for k in range(3)])
        assert len({parameters.seed for parameters in llm.parameters}) == 3
        assert responses.running == 3
        llm.collectors[2].put(output([7, 0]))
        llm.collectors[0].put(output([8, 0], "length"))
        finished, aborted = await responses.reports.take(60)
        assert [(one.id, one.reward, one.finish_reason) for one in samples_of(finished)] == [
            ("4-2", 1.0, "stop"),
            ("4-0", 0.0, "length"),
        ]
        assert finished.column("versions")[0].as_py() == [3, 3]
        assert finished.column("behavior_logprobs")[0].as_py() == [-0.5, -0.5]
        assert finished.column("group").to_pylist() == [4, 4]
        assert (aborted, responses.running, responses.tokens) == ((), 1, 4)

    working(tmp_path, work)


def test_every_sampled_token_is_counted_once(tmp_path: Path) -> None:
    """This includes tokens of aborted responses. `generated` excludes held-out responses."""

    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(0, answer="7"), request(1, answer="7")])
        held_out = replace(request(2, answer="7"), group=-1)
        prefix = PartialResponse(
            response_ids=np.array([5, 6], np.int32),
            behavior_logprobs=np.zeros(2, np.float32),
            versions=np.zeros(2, np.int32),
        )
        await responses.submit([held_out, replace(request(3, answer="7"), prefix=prefix)])
        await responses.abort(["4-0"])  # with one token
        for place, ids in ((1, [7, 0]), (2, [7, 7, 0]), (3, [7, 0])):
            llm.collectors[place].put(output(ids))
        while responses.running:
            await responses.reports.take(60)
        assert (responses.tokens, responses.generated) == (1 + 2 + 3 + 2, 1 + 2 + 2)

    working(tmp_path, work)


def test_only_training_responses_have_experts_and_a_missing_row_is_an_error(
    tmp_path: Path,
) -> None:
    async def work(responses: Responses, llm: FakeLLM) -> None:
        held_out = replace(request(3, answer="7"), group=-1, sampling="held")
        prefix = PartialResponse(
            response_ids=np.array([8, 9], np.int32),
            behavior_logprobs=np.zeros(2, np.float32),
            versions=np.zeros(2, np.int32),
            routed_experts=b"ab" * 2,
        )
        continued = replace(request(1, answer="7"), prefix=prefix)
        await responses.submit([request(0, answer="7"), continued, held_out, request(2)])
        starts = [parameters.routed_experts_prompt_start for parameters in llm.parameters]
        # The prompt has one token; a start after it requests no experts.
        assert starts == [0, 2, 1, 0]
        rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
        llm.collectors[0].put(output([7, 0], experts=rows[:2]))
        llm.collectors[1].put(output([7], experts=rows[:1, :1]))
        llm.collectors[2].put(output([7], experts=rows[:0]))
        finished, _ = await responses.reports.take(60)
        found = {one.id: one.routed_experts for one in samples_of(finished)}
        assert found == {
            "4-0": bytes(range(8)),
            "4-1": b"abab" + bytes([0, 1]),
            held_out.id: None,
        }
        llm.collectors[3].put(output([7, 0], experts=rows[:1]))
        with pytest.raises(RuntimeError, match="the experts of 1 tokens, not of 2"):
            await responses.reports.take(60)

    working(tmp_path, work, records_experts=True)


def test_a_request_may_run_only_once_at_a_time(tmp_path: Path) -> None:
    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(0)])
        for again in ([request(1), request(0)], [request(1), request(1)]):
            twice = rf"engine-0 received requests twice: {again[1].id}$"
            with pytest.raises(ValueError, match=twice):
                await responses.submit(again)
        assert (responses.running, len(llm.collectors)) == (1, 1), "no request was accepted"

    working(tmp_path, work)


def test_a_response_is_cut_after_a_stop_string(tmp_path: Path) -> None:
    """vLLM detects a stop string only after the token that completes it, and not with ids alone."""

    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(0, answer="7 5")])
        llm.collectors[0].put(output([7, 5, 9, 9], "length"))
        (sample,) = samples_of((await responses.reports.take(60))[0])
        assert (sample.response_ids.tolist(), sample.finish_reason) == ([7, 5], "stop")
        assert sample.reward == 1.0
        assert responses.tokens == 4

    working(tmp_path, work, stop=["5"])


def test_the_age_of_the_oldest_response_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(responses: Responses, llm: FakeLLM) -> None:
        assert responses.oldest_s == 0.0
        await responses.submit([request(0), request(1)])
        now = time.time()
        for entry, age_s in zip(responses._running.values(), (20.0, 30.0), strict=True):
            entry.started_at = now - age_s
        monkeypatch.setattr(time, "time", lambda: now)
        assert responses.oldest_s == 30.0

    working(tmp_path, work)


def test_a_request_aborted_while_it_is_submitted_is_sampled_no_further(tmp_path: Path) -> None:
    """The abort arrives while vLLM accepts the first of two requests."""

    async def work(responses: Responses, llm: FakeLLM) -> None:
        add_request = llm.add_request

        async def aborted_before(*arguments: Any) -> RequestOutputCollector:
            await responses.abort(["4-0", "4-1"])
            return await add_request(*arguments)

        llm.add_request = aborted_before  # type: ignore[method-assign]
        prefix = PartialResponse(
            response_ids=np.array([6], np.int32),
            behavior_logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
        )
        await responses.submit([request(0), replace(request(1), prefix=prefix)])
        aborted: dict[str, Any] = {}
        while responses.running:
            aborted |= {one.id: one.partial for one in (await responses.reports.take(60))[1]}
        assert llm.aborted == [llm.collectors[0].request_id]
        assert len(llm.collectors) == 1, "vLLM never received the second request"
        assert aborted["4-0"].response_ids.tolist() == [5]
        assert aborted["4-1"] is prefix

    working(tmp_path, work)


def test_an_error_after_a_response_is_the_next_report(tmp_path: Path) -> None:
    """Errors of the package itself, in the tasks of an episode and of a score."""

    class Silent:
        async def play(self, transcript: Transcript, sample: Any, maximum: int) -> str:
            return "no turn"

    async def fail(*_: Any) -> None:
        raise KeyError("scorer")

    async def episode(responses: Responses, llm: FakeLLM) -> None:
        silent: Any = Silent()
        responses._conversations = silent  # the stand-in has no `eos_ids`
        await responses.submit([request(0)])
        with pytest.raises(AttributeError, match="eos_ids"):
            await responses.reports.take(60)

    async def score(responses: Responses, llm: FakeLLM) -> None:
        responses._scorer = SimpleNamespace(inline=False, score=fail)  # type: ignore[assignment]
        await responses.submit([request(0)])
        llm.collectors[0].put(output([7]))
        with pytest.raises(KeyError, match="scorer"):
            await responses.reports.take(60)

    working(tmp_path, episode)
    working(tmp_path, score)


def test_a_response_that_is_scored_in_another_process_is_reported(tmp_path: Path) -> None:
    async def half(prompt: Prompt, text: str, context: Any) -> Scored:
        await asyncio.sleep(0)
        return Scored(reward=len(text) / 2)

    async def work(responses: Responses, llm: FakeLLM) -> None:
        responses._scorer = SimpleNamespace(inline=False, score=half)  # type: ignore[assignment]
        await responses.submit([request(0)])
        llm.collectors[0].put(output([7]))
        (sample,) = samples_of((await responses.reports.take(60))[0])
        assert (sample.reward, responses.running) == (0.5, 0)

    working(tmp_path, work)


def test_a_measured_number_with_the_name_of_a_part_fails_the_sample(tmp_path: Path) -> None:
    class Talk:
        async def play(self, transcript: Transcript, sample: Any, maximum: int) -> None:
            segment = TranscriptSegment(transcript.requested)
            await transcript.extend(segment, [], sample, maximum, ["5", "6"])
            transcript.measured.update({"b": 1.0, "a": 2.0, "c": 3.0})

    async def work(responses: Responses, llm: FakeLLM) -> None:
        talk: Any = Talk()
        responses._conversations = talk
        reward = RewardConfig(parts={one: {"name": "arithmetic"} for one in "ab"})
        responses._spec = replace(
            responses._spec, rollout=responses._spec.rollout.model_copy(update={"reward": reward})
        )
        await responses.submit([request(0)])
        while not llm.collectors:
            await asyncio.sleep(0)
        # The stop strings of the turn follow those of the run.
        assert llm.parameters[0].stop == ["5", "6"]
        assert llm.parameters[0].detokenize is True
        llm.collectors[0].put(output([7, 6, 8]))
        (sample,) = samples_of((await responses.reports.take(60))[0])
        assert sample.response_ids.tolist() == [7, 6]
        assert sample.reward_error == (
            "the environment measured 'a', and rollout.reward has a part with the same name;"
            " rename one of the two"
        )

    working(tmp_path, work)


def test_an_aborted_response_keeps_its_sampled_tokens(tmp_path: Path) -> None:
    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(0, answer="7")])
        await responses.abort(["4-0", "9-9"])
        finished, (aborted,) = await responses.reports.take(60)
        assert finished.num_rows == 0
        assert aborted.partial is not None
        assert aborted.partial.response_ids.tolist() == [5]

    working(tmp_path, work)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (dead_engine, EngineDied, "engine-0 died while it worked on 2 responses"),
        (lambda: ValueError("out of order"), ValueError, "out of order"),
        (
            lambda: output([5], "abort"),
            RuntimeError,
            "ended its response to prompt 'p' with .* 'abort'",
        ),
        (lambda: output([]), RuntimeError, "ended its response to prompt 'p'"),
    ],
)
def test_vllms_error_instead_of_a_response_is_the_next_report(
    tmp_path: Path, result: Callable[[], Any], error: type[Exception], message: str
) -> None:
    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(k, answer="7") for k in range(2)])
        llm.collectors[0].put(result())
        with pytest.raises(error, match=message):
            await responses.reports.take(60)

    working(tmp_path, work)


@pytest.mark.parametrize("survived", [False, True])
def test_a_death_of_vllm_is_reported_with_the_last_error_of_the_engines_log(
    tmp_path: Path, survived: bool
) -> None:
    """An error after which the process continued is not reported."""
    message = "2 responses; see" if survived else "the last error in its log: RuntimeError: head"

    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(k, answer="7") for k in range(2)])
        llm.collectors[0].put(dead_engine())
        with pytest.raises(EngineDied, match=message) as caught:
            await responses.reports.take(60)
        log.unlink()  # the process that unpickles the error may be on another machine
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    log = tmp_path / "engine-0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-25 15:04:29 [core.py:1512] Traceback (most recent call"
        " last):\n"
        "(EngineCore pid=7) ERROR 11-25 15:04:29 [core.py:1512]"
        '   File "core.py", line 1606, in run\n'
        "(EngineCore pid=7) ERROR 11-25 15:04:29 [core.py:1512] RuntimeError: head_dim=16\n"
        "(MainProcess pid=6) INFO 11-25 15:04:29 [utils.py:628] core exited\n"
        "(EngineCore pid=7) INFO 11-25 15:04:29 [core.py:770] [shutdown] complete\n"
        + "(EngineCore pid=7) INFO 11-25 15:04:30 [scheduler.py:1] UNPAUSED\n"
        * survived
    )
    working(tmp_path, work)


def test_every_call_to_a_dead_vllm_names_the_engine_and_its_log(tmp_path: Path) -> None:
    """vLLM's own error names neither of them."""

    async def dead(*_: Any, **__: Any) -> None:
        raise dead_engine()

    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(0, answer="7")])
        llm.abort = llm.add_request = dead  # type: ignore[method-assign]
        engine: Any = SimpleNamespace(
            spec=responses._spec, _vllm=lambda: SimpleNamespace(errored=False)
        )
        for call in (
            responses.abort([request(0).id]),
            responses.submit([request(1, answer="7")]),
            RolloutEngine._while_alive(engine, "sleep", dead()),
        ):
            with pytest.raises(EngineDied, match=r"engine-0 died while .*; see .*engine-0\.log"):
                await call
        with pytest.raises(EngineDied):
            await responses.reports.take(60)

    working(tmp_path, work)


def test_failed_rewards_are_logged_and_a_full_disk_loses_only_the_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second file is a device that behaves like a full disk at every write."""

    async def work(responses: Responses, llm: FakeLLM) -> None:
        await responses.submit([request(k) for k in range(2)])
        for collector in llm.collectors:
            collector.put(output([7]))
        finished, _ = await responses.reports.take(60)
        errors = finished.column("reward_error").to_pylist()
        assert ["`answer` is None" in error for error in errors] == [True] * 2

    log = "engine-0.reward_errors.jsonl"
    working(tmp_path / "disk", work)
    lines = [json.loads(line) for line in (tmp_path / "disk" / log).read_text().splitlines()]
    assert [(line["sample"], line["response"]) for line in lines] == [("4-0", "7"), ("4-1", "7")]
    assert caplog.records == []

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / log).symlink_to("/dev/full")
    working(tmp_path / "full", work)
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def test_an_episode_that_is_aborted_while_it_samples_is_reported_once(tmp_path: Path) -> None:
    class Talk:
        async def play(self, transcript: Transcript, sample: Any, maximum: int) -> None:
            segment = TranscriptSegment(transcript.requested)
            await transcript.extend(segment, [], sample, maximum)
            await transcript.extend(segment, [], sample, maximum - 2)

    async def work(responses: Responses, llm: FakeLLM) -> None:
        talk: Any = Talk()
        responses._conversations = talk
        await responses.submit([request(0, answer="7"), request(1, answer="7")])
        while len(llm.collectors) < 2:
            await asyncio.sleep(0)
        await responses.abort(["4-0"])
        _, aborted = await responses.reports.take(60)
        await responses.submit([request(2, answer="7")])
        await responses.abort(["4-2"])  # before its episode has begun
        _, before_begin = await responses.reports.take(60)
        assert [one.id for one in before_begin] == ["4-2"]
        llm.collectors[1].put(output([7, 0]))
        while len(llm.collectors) < 3:
            await asyncio.sleep(0)
        assert llm.parameters[2].max_tokens == 6
        llm.collectors[2].put(output([7]))
        finished, more = await responses.reports.take(60)
        assert [(one.id, one.partial) for one in (*aborted, *more)] == [("4-0", None)]
        (sample,) = samples_of(finished)
        assert (sample.id, sample.reward, sample.response_ids.tolist()) == ("4-1", 1.0, [7, 0, 7])
        assert responses.generated == 1 + 2 + 1, "includes the token of the aborted episode"
        assert responses.running == 0

    working(tmp_path, work)


def test_a_turn_of_an_agent_that_has_ended_is_aborted_and_fails_only_its_sample(
    tmp_path: Path,
) -> None:
    class EndedAgent:
        async def play(self, transcript: Transcript, sample: Any, maximum: int) -> str:
            self.call = asyncio.create_task(
                transcript.extend(TranscriptSegment(transcript.requested), [], sample, maximum)
            )
            while not llms[0].collectors:
                await asyncio.sleep(0)
            return "the agent raised"

    llms: list[FakeLLM] = []

    async def work(responses: Responses, llm: FakeLLM) -> None:
        llms.append(llm)
        agent: Any = EndedAgent()
        responses._conversations = agent
        responses._tokenizer.eos_ids = (9,)  # type: ignore[misc]
        await responses.submit([request(0)])
        (sample,) = samples_of((await responses.reports.take(60))[0])
        assert (sample.reward_error, sample.response_ids.tolist()) == ("the agent raised", [9])
        await asyncio.wait([agent.call])
        assert agent.call.cancelled()
        assert llm.aborted == [llm.collectors[0].request_id]
        assert (await responses.reports.take(0.01))[0].num_rows == 0

    working(tmp_path, work)


def test_an_abort_while_an_episode_is_scored_has_no_effect(tmp_path: Path) -> None:
    class Silent:
        async def play(self, transcript: Transcript, sample: Any, maximum: int) -> str:
            return "no turn"

    async def work(responses: Responses, llm: FakeLLM) -> None:
        silent: Any = Silent()
        responses._conversations = silent
        responses._tokenizer.eos_ids = (9,)  # type: ignore[misc]
        finish = responses._finish

        def aborted_before(entry: Any, *arguments: Any, **named: Any) -> None:
            entry.aborted = True
            finish(entry, *arguments, **named)

        responses._finish = aborted_before  # type: ignore[method-assign]
        await responses.submit([request(0)])
        finished, aborted = await responses.reports.take(60)
        assert ([one.id for one in samples_of(finished)], aborted) == (["4-0"], ())
        assert await responses.reports.take(0.01) == (finished.slice(0, 0), ())

    working(tmp_path, work)


def test_experts_of_several_turns_and_segments_have_one_row_per_token_that_was_read(
    tmp_path: Path,
) -> None:
    class Talk:
        async def play(self, transcript: Transcript, sample: Any, maximum: int) -> None:
            first, other = (
                TranscriptSegment(transcript.requested),
                TranscriptSegment(replace(PROMPT, token_ids=(2, 3))),
            )
            await transcript.extend(first, [], sample, maximum)
            await transcript.extend(first, [6], sample, maximum)
            await transcript.extend(other, [], sample, maximum)
            transcript.measured.update({"tool_errors": 2.0})

    async def work(responses: Responses, llm: FakeLLM) -> None:
        talk: Any = Talk()
        responses._conversations = talk
        await responses.submit([request(0, answer="8")])
        row = iter(range(100))
        # The model reads the prompt and a sampled token; then the other sampled token and the
        # content; then the two tokens of another prompt.
        for turn, (sampled, rows) in enumerate((([7, 7], 2), ([8], 2), ([8], 2))):
            while len(llm.collectors) == turn:
                await asyncio.sleep(0)
            experts = np.array([next(row) for _ in range(rows)], np.uint8).reshape(rows, 1, 1)
            llm.collectors[turn].put(output(sampled, experts=experts))
        (sample,) = samples_of((await responses.reports.take(60))[0])
        assert [one.routed_experts_prompt_start for one in llm.parameters] == [0, 2, 0]
        assert sample.response_ids.tolist() == [7, 7, 6, 8, 2, 3, 8]
        assert sample.segment_starts is not None
        assert sample.segment_starts.tolist() == [4]
        assert sample.routed_experts == bytes(range(6))
        assert sample.reward_parts == {"tool_errors": 2.0}
        assert len({one.seed for one in llm.parameters}) == 3

    working(tmp_path, work, records_experts=True)
