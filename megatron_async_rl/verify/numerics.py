"""`mar verify CONFIG --numerics`: compares the config's trainer and engines before a run.

    config --> the same config with few canary prompts and no training --> launched as a run
           --> measurements of two versions (canary_loop.py) --> scorecard (canary_checks.py)

Invariants:
- layout, engines, carrier, sampling settings and seed are the config's own;
- nothing of the run that the config describes changes: the check has a directory of its own;
- a row without data is absent with the reason, also after an error that ended the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import NUMERICS_VERSIONS, Config, NumericsConfig
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.metrics.load_log import read_loads
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.totals import context_limit
from megatron_async_rl.verify import canary_checks as checks
from megatron_async_rl.verify.canary_samples import CanarySamples, measurement_file, read_canaries
from megatron_async_rl.verify.scorecard import Scorecard, ScorecardRow, absent
from megatron_async_rl.watchdog.events import read_status
from megatron_async_rl.weights.manifest import WeightMismatch

FOLDER = "numerics"
RESPONSES = 64
"""Number of responses to each canary prompt: enough for the distribution of first tokens."""
MAX_TOKENS = 64
"""Longest canary response; a shorter limit of the config applies."""
WITHOUT_TRAINING = (
    "checkpoint.every=0",
    "eval=null",
    "observe.tensorboard=false",
    "observe.trackers=[]",
    "observe.prometheus_port=null",
    "run.resume=never",
)
"""Overrides that turn off the parts of a run that the check does not need."""


def numerics_overrides(config: Config) -> list[str]:
    """Return the overrides that turn a config into its check. Raises UserError for a config without
    engines."""
    if config.rollout is None:
        raise UserError.of(
            "objective.loss",
            f"{config.objective.loss.name} has no engines with which the trainer could be compared",
            "name a config with `rollout`, or verify a finished run: mar verify RUN",
        )
    maximum = min(config.rollout.sampling.max_tokens, MAX_TOKENS)
    # A group stays whole in a minibatch, so there are at least as many groups.
    prompts = max(NumericsConfig.default_of("prompts"), config.objective.minibatches)
    settings = NumericsConfig(prompts=prompts, long_prompt=_long_prompt(config, maximum))
    flow = {
        "prompts_per_step": prompts,
        "group_size": RESPONSES,
        "async_ratio": 0.0,
        "stream": "none",
    }
    samples = {"experts": config.samples.experts}
    return [
        *WITHOUT_TRAINING,
        f"samples={json.dumps(samples)}",
        f"flow={json.dumps(flow)}",
        f"rollout.sampling.max_tokens={maximum}",
        f"run.numerics={settings.model_dump_json()}",
        f"run.dir={json.dumps(str(_new_folder(config.run.dir)))}",
    ]


def _long_prompt(config: Config, maximum: int) -> int:
    """Return the length of lengthened prompts; 0 if there is no room for one."""
    assert config.rollout is not None
    # An environment renders its own prompts.
    if config.rollout.environment is not None:
        return 0
    shape, _ = read_model(config.model.path)
    limit = config.policy.tokens_per_micro_batch
    if shape is not None:
        limit = min(limit, context_limit(config, shape))
    wanted: int = min(NumericsConfig.default_of("long_prompt"), limit - maximum)
    # vLLM's blocks on a GPU have 16 tokens for most models.
    return wanted if wanted > config.rollout.cache_block else 0


def _new_folder(run_dir: Path) -> Path:
    numbers = [int(path.name) for path in (run_dir / FOLDER).glob("*") if path.name.isdigit()]
    return run_dir / FOLDER / str(max(numbers, default=0) + 1)


def numerics_config(path: Path, overrides: Sequence[str]) -> Config:
    """Return the config of the check of the config at `path`. Raises UserError."""
    given = load(path, overrides)
    return load(path, [*overrides, *numerics_overrides(given)])


def numerics_scorecard(subject: str, config: Config) -> Scorecard:
    """Return the scorecard of a check that has run in `config.run.dir`, to its end or not."""
    assert config.rollout is not None
    assert config.run.numerics is not None
    run_dir = config.run.dir
    engines = tuple(range(config.rollout.engines))
    versions = [
        samples
        for version in range(NUMERICS_VERSIONS)
        if (samples := read_canaries(measurement_file(run_dir, version), run_dir, version, engines))
    ]
    status = read_status(run_dir)
    error = status.error if status is not None and status.error else ""
    mismatch = error.splitlines()[0] if error.startswith(WeightMismatch.__name__) else ""
    rows = (
        checks.weights_row(list(read_loads(run_dir)), versions, mismatch, config.weights.transport),
        *_rows(config, versions),
    )
    return Scorecard(subject=subject, rows=rows, notes=tuple(_notes(run_dir, versions, error)))


def _notes(run_dir: Path, versions: Sequence[CanarySamples], error: str) -> Iterator[str]:
    """Yield why versions are missing. error: of the run; empty for none."""
    if len(versions) == NUMERICS_VERSIONS:
        return
    read = {one.version for one in versions}
    files = [measurement_file(run_dir, one) for one in range(NUMERICS_VERSIONS) if one not in read]
    damaged = [file.name for file in files if file.exists()]
    for name in damaged:
        yield f"{name} is damaged: its version counts as not measured"
    if len(damaged) < len(files):
        # The launcher has shown the whole error.
        yield f"the check ended early: {error.partition('\n')[0] or 'it was stopped'}"


def _rows(config: Config, versions: Sequence[CanarySamples]) -> Iterator[ScorecardRow]:
    """Yield all rows except that of the digests."""
    assert config.rollout is not None
    assert config.run.numerics is not None
    settings, sampling = config.run.numerics, config.rollout.sampling
    remedy = f"read the reason in {config.run.dir / 'logs'}, and run the check again"
    names = ("log-probs", "sampling distribution", "seeds", "tokens", "gradients")
    if not versions:
        for name in names:
            yield absent(name, "no canary was sampled", "", remedy)
    else:
        first = versions[0]
        ends = {*load_tokenizer(config.model.path).eos_ids, *sampling.stop_token_ids}
        repeated = checks.repeated_responses(first)
        if sampling.renormalised:
            yield checks.of_another_distribution("log-probs", sampling.renormalised)
        else:
            yield checks.initial_row(first)
        yield checks.sampling_row(first, sampling.renormalised, repeated)
        yield checks.seeds_row(first, repeated)
        yield checks.tokens_row(versions, ends)
        yield checks.gradients_row(first)
    if len(versions) == NUMERICS_VERSIONS and not sampling.renormalised:
        yield from checks.updated_rows(
            versions[0], versions[1], settings.prompts, settings.long_prompt
        )
        return
    for name in checks.UPDATED:
        if sampling.renormalised:
            yield checks.of_another_distribution(name, sampling.renormalised)
        else:
            yield absent(name, "the second version was not sampled", "", remedy)
