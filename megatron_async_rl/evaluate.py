"""Evaluation of a checkpoint, or of any Hugging Face model, on held-out prompts (`mar eval`). It
starts engines only, and needs no trainer and no training data.

Invariants:
- every error that can be detected early is reported before anything is converted or started;
- a run's own checkpoint with the run's own config reproduces the result that the run measured at
  that version, because prompts, seeds and weights are the same;
- no file of the run changes: the result and the engines' logs are written to separate files.
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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.durable import write_file
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, Problem, number_of
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.sampling import EvalConfig, EvalSet, eval_sets
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import DEFAULT_CARRIER
from megatron_async_rl.data import DataError
from megatron_async_rl.data.hub import fetch, located, name_of, parse
from megatron_async_rl.flow.evaluation import (
    EvalResponses,
    EvalResult,
    HeldOut,
    evaluate,
    read_held_out,
)
from megatron_async_rl.flow.fleet import Fleet, FleetSettings
from megatron_async_rl.flow.router import Listener
from megatron_async_rl.plan.layout import Device, device_of, engine_size_problems, engines_here
from megatron_async_rl.plan.layout_problems import head_size_problems
from megatron_async_rl.plan.machine import this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.totals import context_limit
from megatron_async_rl.policy.checkpoint_folder import (
    CONFIG_FILE,
    about,
    is_step,
    newest,
    require_whole,
    steps,
)
from megatron_async_rl.policy.digested_folder import files_of, require_export
from megatron_async_rl.report.progress import sampling_progress, show_evaluation
from megatron_async_rl.report.responses_file import write_responses
from megatron_async_rl.rollout.environments import EnvironmentRefused, load_factory
from megatron_async_rl.rollout.environments.built_in.tools import prompt_tokenizer, tool_schemas
from megatron_async_rl.rollout.environments.transcript import follow_ups
from megatron_async_rl.rollout.rewards.registry import RewardError
from megatron_async_rl.rollout.scoring import GroupRewards, require_rewards, reward_fields
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.plugin import serving_engines
from megatron_async_rl.watchdog.run_folder import use_run_folder

STOP_ENGINES_S = 15.0
"""Seconds that the engines get to stop after the evaluation."""


class EvaluationFailed(Exception):
    """Failure of a valid evaluation. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class EvalTarget:
    """The weights to evaluate."""

    named: Path
    """Path on the command line."""
    checkpoint: Path | None
    """Folder of one step, which is converted before the evaluation; None for a Hugging Face
    directory."""
    version: int
    """Number of optimizer steps that produced the weights; 0 for a Hugging Face directory."""
    result: Path
    """File to write the result to."""


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """A checked evaluation that is ready to run."""

    target: EvalTarget
    model: Path
    """Directory of the tokenizer and, if no checkpoint is converted, of the weights."""
    dtype: Any
    data: DataConfig
    rollout: RolloutConfig
    sets: Sequence[EvalSet]
    held_out: Sequence[HeldOut]
    """The same sets with their prompts, in the same order."""
    seed: int
    device: Device
    timeout_s: float
    """Limit in seconds of the conversion, and of a period in which no response grows."""
    responses: Path | None = None
    """File to write all responses to; None writes no such file."""


def resolve(
    named: Path,
    config_file: Path | None,
    overrides: Sequence[str],
    out: Path | None,
    responses: Path | None = None,
) -> EvalJob:
    """Return the evaluation of the weights at `named`, after checking the weights, the config and
    the output files. `config_file` replaces the config that is stored with the checkpoint.

    Raises ConfigError.
    """
    name = parse(named)
    if name is not None:
        named = fetch("CHECKPOINT", name)
    # Errors name the target, so find it first.
    target = find_target(named, out)
    if responses is not None:
        responses = responses.absolute()
        # Check now: after hours of sampling, an unwritable file would lose the responses.
        _require_writable(target, "--responses", responses)
    config = _config(target, config_file, overrides)
    rollout = config.rollout
    if rollout is None:
        fix = "name a config with a `rollout` section (sampling, reward): --config CONFIG"
        raise _refused(
            target,
            "rollout",
            "the config has no `rollout` section: the config of a supervised run has no sampling"
            " settings",
            fix,
        )
    sets = eval_sets(config.data, rollout.sampling, config.eval or EvalConfig())
    if not sets:
        raise _refused(
            target,
            "data.eval",
            "the config names no held-out prompts",
            "add data.eval=FILE.jsonl to the command",
        )
    # A checkpoint has no tokenizer, so use that of the model from which the run started.
    model = named if target.checkpoint is None else config.model.path
    machine = this_machine()
    device = device_of(config, machine)
    # A run may have engines on several machines; those of an evaluation are all on this one.
    engines = engines_here(rollout, device, machine)
    return EvalJob(
        target=target,
        model=model,
        dtype=config.engine_dtype,
        data=config.data,
        rollout=rollout.model_copy(update={"engines": engines}),
        sets=sets,
        held_out=_held_out(target, config, rollout, model, sets),
        seed=config.run.seed,
        device=device,
        timeout_s=config.watchdog.timeout_s,
        responses=responses,
    )


def find_target(named: Path, out: Path | None) -> EvalTarget:
    """Return the weights at `named`. Raises UserError if it is neither a checkpoint nor a model, or
    is damaged."""
    named = named.absolute()

    def target(checkpoint: Path | None, version: int, result: Path) -> EvalTarget:
        file = (out or result).absolute()
        weights = EvalTarget(named=named, checkpoint=checkpoint, version=version, result=file)
        _require_writable(weights, "--out", file)
        return weights

    # The user may name the folder of any step, not only the newest.
    if is_step(named):
        version = _step(named)
        return target(named, version, named.parent.parent / f"eval_{version}.json")
    # A folder of a model may contain a file `latest` of another trainer.
    is_model = (named / "config.json").is_file() and not steps(named)
    step = None if is_model else newest(named)
    if step is not None:
        version = _step(step)
        return target(step, version, named.parent / f"eval_{version}.json")
    if is_model:
        # An export of this package stores digests of its files; check them.
        require_export(named, "CHECKPOINT")
        # The result must not be written to the hub's cache.
        on_hub = name_of(named)
        folder = Path.cwd() if on_hub else named.parent
        name = on_hub.removeprefix("hf://").replace("/", "--") if on_hub else named.name
        return target(None, 0, folder / f"eval_{name}.json")
    what = (
        "is not a directory"
        if not named.is_dir()
        else "contains neither a checkpoint nor a Hugging Face model"
    )
    # The user may have named the run directory instead of its folder of checkpoints.
    is_run = (named / "checkpoint" / "latest").is_file()
    fix = (
        f"name {named / 'checkpoint'}"
        if is_run
        else "name RUN/checkpoint, a step_* folder in it, or a Hugging Face directory"
    )
    raise ConfigError(str(named), [Problem(key="CHECKPOINT", what=f"{named} {what}", fix=fix)])


def _require_writable(target: EvalTarget, option: str, file: Path) -> None:
    """Raise ConfigError if `file`, which `option` sets, cannot be written."""
    folder = file.parent
    # The evaluation replaces an existing file, but never a folder.
    if file.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = f"{file.name} cannot be written to {folder}"
        raise _refused(target, option, what, f"name a file with {option} FILE")


def _step(checkpoint: Path) -> int:
    """Return the step of a checkpoint, after checking the digests of its files (if it has any).
    The conversion also checks the blocks of tensors. Raises CheckpointBroken."""
    content = about(checkpoint)
    if files_of(content) is not None:
        require_whole(checkpoint)
    return int(content["step"])


def _config(target: EvalTarget, file: Path | None, overrides: Sequence[str]) -> Config:
    """Return the config in `file`, else the config in the checkpoint (whose digest has been
    checked), else the config in the run's directory."""
    if file is None and target.checkpoint is not None:
        # Prefer the checkpoint's copy: the run's config may have changed since this step.
        saved = target.checkpoint / CONFIG_FILE
        file = saved if saved.is_file() else None
    if file is None:
        run_dir = (
            target.named.parent if target.checkpoint is None else target.checkpoint.parent.parent
        )
        file = run_dir / "config.yaml"
        if not file.is_file() or not (run_dir / "metrics.jsonl").is_file():
            what = f"{run_dir} is not a run's directory: config.yaml or metrics.jsonl is missing"
            raise _refused(
                target,
                "--config",
                what,
                "name the config with the sampling settings: --config CONFIG",
            )
    return located(load(file, overrides))[0]


def _held_out(
    target: EvalTarget,
    config: Config,
    rollout: RolloutConfig,
    model: Path,
    sets: Sequence[EvalSet],
) -> list[HeldOut]:
    """Return the sets with their prompts, after checking the model, the rewards and the
    environment. Raises ConfigError."""
    shape, problems = read_model(model)
    if shape is not None:
        # vLLM would detect this problem only at the first request.
        machine = this_machine()
        device = device_of(config, machine)
        problems += head_size_problems(shape, device, rollout.vllm)
        problems += engine_size_problems(rollout, device, machine)
    if shape is None or problems:
        raise ConfigError(str(target.named), problems)
    limit = context_limit(config, shape)
    for one in sets:
        if one.sampling.max_tokens >= limit:
            what = f"{one.sampling.max_tokens} response tokens leave no room for a prompt"
            raise _refused(target, one.max_tokens_key, what, f"set it below {limit}")
    try:
        # Check before the conversion, which takes minutes.
        require_rewards(rollout.reward)
        required = reward_fields(rollout.reward)
        tokenizer = prompt_tokenizer(model, config)
        if rollout.environment is not None:
            load_factory(rollout.environment)
            follow_ups(rollout.environment, tokenizer)
    except (RewardError, EnvironmentRefused) as error:
        raise _refused(target, error.where, error.what, error.fix) from error
    except DataError as error:
        raise ConfigError(str(target.named), [error.problem("model.path")]) from error
    held_out = []
    for one in sets:
        room = limit - one.sampling.max_tokens
        try:
            prompts = read_held_out(config.data, one, tokenizer, required=required, room=room)
        except DataError as error:
            raise ConfigError(str(target.named), [error.problem(one.path_key)]) from error
        held_out.append(prompts)
    return held_out


def _refused(target: EvalTarget, key: str, what: str, fix: str) -> ConfigError:
    return ConfigError(str(target.named), [Problem(key=key, what=what, fix=fix)])


def run(job: EvalJob, console: Console) -> None:
    """Convert the checkpoint, sample responses, and write and show the result. Ctrl-C and SIGTERM
    stop all processes that the evaluation started.

    Raises EvaluationFailed.
    """
    # SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so `finally` blocks close the engines.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target = job.target
    with tempfile.TemporaryDirectory(prefix="mar-eval-") as folder:
        model = job.model if target.checkpoint is None else Path(folder) / "hf"
        specs = _engines(job, model)
        # Before the conversion: the server imports while the checkpoint is converted.
        with _imports_of_engines(specs[0]):
            if target.checkpoint is not None:
                _report(console, f"converting {target.checkpoint}")
                _convert(target.checkpoint, model, job.timeout_s, job.dtype)
            answers: list[EvalResponses] = []
            result = _sample(job, specs, console, answers.append)
    content = _content(job, result)
    # Write before showing: if the terminal is closed, the result must not be lost. The larger file
    # comes last, because its disk may be full.
    write_file(job.target.result, json.dumps(content, indent=1, allow_nan=False) + "\n")
    show_evaluation(content, str(job.target.result), console)
    if job.responses is not None:
        sets = [one.name for one in job.held_out for _ in one.prompts]
        write_responses(job.responses, sets, *answers)


def _convert(checkpoint: Path, out: Path, timeout_s: float, dtype: str) -> None:
    """Convert a checkpoint to the Hugging Face format in `out`, in `dtype`. A child process does
    the work, so its memory is free before the engines start."""
    command = [sys.executable, "-m", "megatron_async_rl", "convert", str(checkpoint), str(out)]
    # Engines of a run may load merged adapters in another precision than that of the model.
    command += ("--dtype", dtype)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise EvaluationFailed(
            f"converting {checkpoint} took more than {timeout_s:g} s\n  fix: raise"
            " watchdog.timeout_s, or convert the checkpoint with `mar convert` first"
        ) from None
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise EvaluationFailed(f"{checkpoint} cannot be converted: " + "\n".join(output[-6:]))


def _engines(job: EvalJob, model: Path) -> list[EngineSpec]:
    """Return the specifications of the engines that serve the weights in `model`."""
    return [
        EngineSpec(
            index=index,
            model_path=model,
            dtype=job.dtype,
            rollout=job.rollout,
            seed=job.seed,
            device=job.device,
            # Next to the result, where the user finds the cause of an engine failure.
            log_dir=job.target.result.with_suffix(".logs"),
            evaluations={one.name: one.sampling for one in job.sets},
            chat_template=job.data.chat_template,
            chat_template_options=job.data.chat_template_options,
            tools=tool_schemas(job.rollout.environment),
            first_version=job.target.version,
            # Unused, because no new weights arrive. The default carrier keeps the engines on this
            # machine.
            transport=DEFAULT_CARRIER,
        )
        for index in range(job.rollout.engines)
    ]


def _imports_of_engines(spec: EngineSpec) -> AbstractContextManager[object]:
    """Return a context in which engines on CPUs are forked from a server that imports what they
    need. `spec`: settings of one of them."""
    # CUDA does not survive a fork, and engines of a Ray that already runs inherit nothing.
    if spec.device == "cuda" or os.environ.get("RAY_ADDRESS"):
        return nullcontext()
    # TMPDIR may be too long for the path of a socket; that of the run folder is not.
    use_run_folder()
    folder = Path(tempfile.mkdtemp(prefix="engines-"))
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    return serving_engines(spec, os.environ, folder, spec.log_dir / "preloaded_engines.log")


def _sample(
    job: EvalJob,
    specs: Sequence[EngineSpec],
    console: Console,
    on_answers: Callable[[EvalResponses], None],
) -> EvalResult:
    from megatron_async_rl.rollout.cluster import join_ray, prepare_environment

    # Call before the import: Ray reads its environment variables when it is imported.
    prepare_environment(os.environ)
    import ray

    count = number_of("engine", len(specs))
    _report(console, f"starting {count} on the {'GPU' if job.device == 'cuda' else 'CPU'}")
    try:
        join_ray(quiet=True)
        with sampling_progress(
            console, sum(len(one.prompts) for one in job.held_out)
        ) as on_progress:
            return asyncio.run(_evaluate(job, specs, on_progress, on_answers))
    except RuntimeError as error:
        raise EvaluationFailed(str(error)) from error
    finally:
        ray.shutdown()


async def _evaluate(
    job: EvalJob,
    specs: Sequence[EngineSpec],
    on_progress: Callable[[int, int], None],
    on_answers: Callable[[EvalResponses], None],
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
            # Do not restart engines: without all responses, the evaluation has no valid result.
            restarts_per_hour=0,
        ),
    )
    rewards = GroupRewards(rollout.reward, specs[0].log_dir)
    try:
        # Start both in parallel, because each takes seconds.
        await asyncio.gather(fleet.started(), rewards.start())
        return await evaluate(
            fleet.requests,
            job.held_out,
            job.target.version,
            job.timeout_s,
            on_reward_error=rollout.reward.on_error,
            rewards=rewards,
            on_progress=on_progress,
            on_answers=on_answers,
        )
    finally:
        rewards.close()
        # Close the engines after an error or Ctrl-C, too; otherwise vLLM's processes would remain.
        await fleet.close(STOP_ENGINES_S)


def _content(job: EvalJob, result: EvalResult) -> dict[str, Any]:
    """Return the result with its settings, as plain JSON values."""
    target = job.target
    # Keep the first set at the top level, where programs that read a single set expect it.
    first, *others = (_settings(one) for one in job.sets)
    numbers = result.as_json()
    if others:
        further = zip(others, numbers.pop("others"), strict=True)
        numbers["others"] = [settings | one for settings, one in further]
    return {
        "checkpoint": str(target.checkpoint or target.named),
        "seed": job.seed,
        **first,
        **numbers,
    }


def _settings(one: EvalSet) -> dict[str, Any]:
    return {
        "data": str(one.file.path),
        "samples_per_prompt": one.samples_per_prompt,
        "pass_reward": one.pass_reward,
        "temperature": one.sampling.temperature,
        "max_tokens": one.sampling.max_tokens,
    }


def _report(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
