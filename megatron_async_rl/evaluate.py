"""`mar eval`: a checkpoint, or any Hugging Face model, on held-out prompts. Engines alone: no
trainer, no training data.

Invariants:
- what can be known to be wrong is refused before anything is converted or started;
- a run's own checkpoint with the run's own config gives what the run itself measured at that
  version: the same prompts, seeds and weights;
- nothing of the run is touched: the result and the engines' logs go into files of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, Problem
from megatron_async_rl.config.schema import Config, EvalConfig, RolloutConfig
from megatron_async_rl.data import DataError, load_tokenizer, read_prompts
from megatron_async_rl.flow.evaluation import EvalResult, evaluate
from megatron_async_rl.flow.fleet import Fleet, FleetSettings
from megatron_async_rl.flow.requests import Listener
from megatron_async_rl.plan.batch import context_limit
from megatron_async_rl.plan.layout import Device, device_of
from megatron_async_rl.plan.machine import this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.report.progress import sampling_progress, show_evaluation
from megatron_async_rl.rollout.rewards.registry import RewardError, load_reward, required_fields
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import Prompt

STOP_ENGINES_S = 15.0


class EvaluationFailed(Exception):
    """The request was valid and the evaluation failed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class EvalTarget:
    """The weights to evaluate. `checkpoint`: one step's folder, which is converted first; null for
    a Hugging Face directory."""

    named: Path
    checkpoint: Path | None
    version: int
    """Optimizer steps behind it; 0 for a Hugging Face directory."""
    result: Path
    """Where the result goes."""


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """One evaluation, checked and ready to run."""

    target: EvalTarget
    model: Path
    """Directory with the tokenizer, and the weights where nothing is converted."""
    dtype: Any
    rollout: RolloutConfig
    eval: EvalConfig
    data: Path
    prompts: Sequence[Prompt]
    seed: int
    device: Device
    timeout_s: float


def resolve(
    named: Path, config_file: Path | None, overrides: Sequence[str], out: Path | None
) -> EvalJob:
    """Finds the checkpoint and its config and checks what they say. Raises ConfigError."""
    target = find_target(named, out)
    config = _config(target, config_file, overrides)
    rollout, evaluation, data = config.rollout, config.eval or EvalConfig(), config.data.eval
    if rollout is None:
        fix = "name a config with a `rollout` section (sampling, reward): --config CONFIG"
        raise _refused(
            target,
            "rollout",
            "the config has none: a supervised run's config does not say how to sample",
            fix,
        )
    if data is None:
        raise _refused(
            target,
            "data.eval",
            "the config names no held-out prompts",
            "add data.eval=FILE.jsonl to the command",
        )
    model = named if target.checkpoint is None else config.model.path
    return EvalJob(
        target=target,
        model=model,
        dtype=config.model.dtype,
        rollout=rollout,
        eval=evaluation,
        data=data,
        prompts=_prompts(target, config, rollout, model, data),
        seed=config.run.seed,
        device=device_of(config, this_machine()),
        timeout_s=config.watchdog.timeout_s,
    )


def find_target(named: Path, out: Path | None) -> EvalTarget:
    """Raises ConfigError for what is neither a checkpoint nor a model."""
    named = named.absolute()

    def target(checkpoint: Path | None, version: int, result: Path) -> EvalTarget:
        found = EvalTarget(
            named=named, checkpoint=checkpoint, version=version, result=(out or result).absolute()
        )
        folder = found.result.parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise _refused(
                found,
                "--out",
                f"the result cannot be written to {folder}",
                "name a file with --out FILE",
            )
        return found

    if (named / "about.json").is_file():
        version = _step(named)
        return target(named, version, named.parent.parent / f"eval_{version}.json")
    if (named / "latest").is_file():
        step = (named / "latest").read_text().strip()
        if not (named / step / "about.json").is_file():
            what = f"{named / 'latest'} names {step}, which is not there"
            raise ConfigError(
                str(named),
                [Problem(key="CHECKPOINT", what=what, fix="name one of its step_* folders")],
            )
        version = _step(named / step)
        return target(named / step, version, named.parent / f"eval_{version}.json")
    if (named / "config.json").is_file():
        return target(None, 0, named.parent / f"eval_{named.name}.json")
    what = (
        "is not a directory"
        if not named.is_dir()
        else "holds neither a checkpoint nor a Hugging Face model"
    )
    near = "checkpoint" if (named / "checkpoint" / "latest").is_file() else ""
    fix = (
        f"name {named / near}"
        if near
        else "name RUN/checkpoint, a step_* folder in it, or a Hugging Face directory"
    )
    raise ConfigError(str(named), [Problem(key="CHECKPOINT", what=f"{named} {what}", fix=fix)])


def _step(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "about.json").read_text())["step"])


def _config(target: EvalTarget, file: Path | None, overrides: Sequence[str]) -> Config:
    """The named config, or the one of the run that the checkpoint is in."""
    if file is None:
        run_dir = (
            target.named.parent if target.checkpoint is None else target.checkpoint.parent.parent
        )
        file = run_dir / "config.yaml"
        if not file.is_file() or not (run_dir / "metrics.jsonl").is_file():
            what = f"{run_dir} is not a run's folder: no config.yaml of a run is beside the model"
            raise _refused(
                target,
                "--config",
                what,
                "name the config that says how to sample: --config CONFIG",
            )
    return load(file, overrides)


def _prompts(
    target: EvalTarget, config: Config, rollout: RolloutConfig, model: Path, data: Path
) -> list[Prompt]:
    shape, problems = read_model(model)
    if shape is None or problems:
        raise ConfigError(str(target.named), problems)
    room = context_limit(config, shape) - rollout.sampling.max_tokens
    if room <= 0:
        what = f"{rollout.sampling.max_tokens} response tokens leave no room for a prompt"
        raise _refused(
            target,
            "rollout.sampling.max_tokens",
            what,
            f"set it below {context_limit(config, shape)}",
        )
    try:
        load_reward(rollout.reward.name)
        required = ("prompt", *required_fields(rollout.reward.name))
        return read_prompts(data, load_tokenizer(model), max_prompt_tokens=room, required=required)
    except RewardError as error:
        raise _refused(target, error.where, error.what, error.fix) from error
    except DataError as error:
        where = str(error.path) if error.line is None else f"{error.path}:{error.line}"
        raise _refused(target, "data.eval", f"{where}: {error.what}", error.fix) from error


def _refused(target: EvalTarget, key: str, what: str, fix: str) -> ConfigError:
    return ConfigError(str(target.named), [Problem(key=key, what=what, fix=fix)])


def run(job: EvalJob, console: Console) -> None:
    """Converts, samples, shows and writes the result. Raises EvaluationFailed; Ctrl-C leaves
    nothing running."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target = job.target
    with tempfile.TemporaryDirectory(prefix="mar-eval-") as folder:
        model = job.model
        if target.checkpoint is not None:
            _say(console, f"converting {target.checkpoint}")
            model = Path(folder) / "hf"
            _convert(target.checkpoint, model, job.timeout_s)
        result = _sample(job, model, console)
    content = _content(job, result)
    file = job.target.result
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(partial, file)
    show_evaluation(content, str(file), console)


def _convert(checkpoint: Path, out: Path, timeout_s: float) -> None:
    """In a process of its own, whose memory is free again before the engines start."""
    command = [sys.executable, "-m", "megatron_async_rl", "convert", str(checkpoint), str(out)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise EvaluationFailed(
            f"converting {checkpoint} took over {timeout_s:g} s\n  fix: raise watchdog.timeout_s,"
            " or `mar convert` it yourself"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise EvaluationFailed(f"{checkpoint} cannot be converted: " + "\n".join(said[-6:]))


def _sample(job: EvalJob, model: Path, console: Console) -> EvalResult:
    from megatron_async_rl.rollout.cluster import join_ray, prepare_environment

    prepare_environment(os.environ)
    import ray

    rollout = job.rollout
    count = "1 engine" if rollout.engines == 1 else f"{rollout.engines} engines"
    _say(console, f"starting {count} on the {'GPU' if job.device == 'cuda' else 'CPU'}")
    specs = [
        EngineSpec(
            index=index,
            model_path=model,
            dtype=job.dtype,
            rollout=rollout,
            seed=job.seed,
            device=job.device,
            log_dir=job.target.result.with_suffix(".logs"),
            first_version=job.target.version,
        )
        for index in range(rollout.engines)
    ]
    try:
        join_ray(quiet=True)
        with sampling_progress(console, len(job.prompts)) as on_progress:
            return asyncio.run(_evaluate(job, specs, on_progress))
    except RuntimeError as error:
        raise EvaluationFailed(str(error)) from error
    finally:
        ray.shutdown()


async def _evaluate(
    job: EvalJob, specs: Sequence[EngineSpec], on_progress: Callable[[int, int], None]
) -> EvalResult:
    from megatron_async_rl.rollout.engine_process import start_engine

    rollout = job.rollout
    fleet = Fleet(
        specs,
        start_engine,
        Listener(),
        FleetSettings(
            capacity=rollout.max_concurrent,
            unresponsive_s=rollout.unresponsive_s,
            restarts_per_hour=0,
        ),
    )
    try:
        await fleet.started()
        return await evaluate(
            fleet.requests,
            job.prompts,
            job.eval.samples_per_prompt,
            job.target.version,
            job.timeout_s,
            on_reward_error=rollout.reward.on_error,
            pass_at=job.eval.pass_at,
            pass_reward=job.eval.pass_reward,
            on_progress=on_progress,
        )
    finally:
        await fleet.close(STOP_ENGINES_S)


def _content(job: EvalJob, result: EvalResult) -> dict[str, Any]:
    target, sampling = job.target, job.rollout.sampling
    return {
        "checkpoint": str(target.checkpoint or target.named),
        "data": str(job.data),
        "samples_per_prompt": job.eval.samples_per_prompt,
        "pass_reward": job.eval.pass_reward,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": job.seed,
        **result.as_json(),
    }


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
