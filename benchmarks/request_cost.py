"""Cost of the engine per request on top of vLLM: submit, collect, score and report, with a vLLM
that answers at once.

CPU time of this process, the median over rounds of 512 requests for four tokens each. Not in it:
what vLLM does, and the way through Ray to the controller (`controller_through_ray.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GENERATED = Path(__file__).resolve().parents[1] / "examples" / "arithmetic" / "generated"
REQUESTS, GROUP = 512, 8
TOKENS = [5, 6, 7, 8]


class AnswersAtOnce:
    """Stand-in for vLLM that keeps the collector of each request for the benchmark to fill."""

    def __init__(self) -> None:
        self.collectors: list[Any] = []

    async def add_request(self, name: str, prompt: Any, parameters: Any) -> Any:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        parameters.clone()  # as vLLM does
        self.collectors.append(RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name))
        return self.collectors[-1]


def output() -> Any:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    logprobs = FlatLogprobs()
    for token in TOKENS:
        logprobs.append_fast([token], [-0.5], iter([1]), [None])
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=list(TOKENS),
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason="stop",
    )
    span: Any = SimpleNamespace(version="3", start=0, end=len(TOKENS))
    completion.weight_versions = [span]
    return RequestOutput("request", None, [1], None, [completion], True)


async def measure(args: argparse.Namespace, logs: Path) -> dict[str, float]:
    from megatron_async_rl.config.rollout import RolloutConfig
    from megatron_async_rl.data.tokenizer import load_tokenizer
    from megatron_async_rl.rollout.engine_state import BusyClock
    from megatron_async_rl.rollout.responses import Responses
    from megatron_async_rl.rollout.scoring import Scorer
    from megatron_async_rl.rollout.spec import EngineSpec
    from megatron_async_rl.rollout.vllm.engine_arguments import sampling_parameters
    from megatron_async_rl.samples import Prompt
    from megatron_async_rl.samples.types import Request

    rollout = {"reward": {"name": "arithmetic"}, "sampling": {"max_tokens": 8}}
    spec = EngineSpec(
        index=0,
        model_path=args.model,
        dtype="float32",
        rollout=RolloutConfig.model_validate(rollout),
        seed=1,
        device="cpu",
        log_dir=logs,
        transport="shared_memory",
    )
    tokenizer = load_tokenizer(args.model)
    sampling: dict[str | None, Any] = {
        None: sampling_parameters(spec.rollout.sampling, tokenizer.eos_ids)
    }
    vllm: Any = AnswersAtOnce()
    responses = Responses(vllm, spec, sampling, tokenizer, Scorer(spec.rollout.reward), BusyClock())
    prompt = Prompt(id="p", text="", token_ids=tuple(range(1, 12)), fields={"answer": "46"})

    async def one_round(number: int) -> tuple[float, float]:
        outputs = [output() for _ in range(REQUESTS)]
        first = number * REQUESTS // GROUP
        requests = [
            Request(group=first + index // GROUP, k=index % GROUP, prompt=prompt)
            for index in range(REQUESTS)
        ]

        began = time.process_time()
        await responses.submit(requests)
        submitted = time.process_time()
        for collector, said in zip(vllm.collectors, outputs, strict=True):
            collector.put(said)
        finished = 0
        while finished < REQUESTS:
            finished += len((await responses.reports.take(10.0))[0])
        ended = time.process_time()

        vllm.collectors.clear()
        return submitted - began, ended - submitted

    rounds = [await one_round(number) for number in range(args.rounds + 3)][3:]
    responses.close()
    submit, conclude = (
        statistics.median(times) / REQUESTS * 1e6 for times in zip(*rounds, strict=True)
    )
    return {"submit_us": submit, "conclude_us": conclude, "sum_us": submit + conclude}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=GENERATED / "model")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        print(json.dumps(asyncio.run(measure(args, Path(logs))), indent=2))


if __name__ == "__main__":
    main()
