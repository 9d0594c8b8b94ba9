"""A run directory as a healthy run leaves it, written by the package's own writers without torch,
and hooks that alter its records as a fault would.

Responses are drawn from one distribution over digits, and end with the end-of-sequence token, which
is certain; so the entropy of the policy is known exactly. Every sample trains at lag 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_async_rl.config.durable import digest, file_digest
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.data import read_training
from megatron_async_rl.data.source import PromptSource
from megatron_async_rl.data.tokenizer import tokenizer_of
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.flow.starts import Start, record_start
from megatron_async_rl.metrics.coverage_record import CoverageRecord, write_coverage
from megatron_async_rl.metrics.lag0_log import Lag0Log
from megatron_async_rl.metrics.load_log import LoadLog
from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.metrics.weight_log import WeightLog
from megatron_async_rl.policy.digested_folder import StoredBlock, StoredFile, described
from megatron_async_rl.samples.types import Prompt, Sample
from tests.logged_samples import rows
from tests.written_run import config_tree, write_model

STEPS, GROUPS, SIZE, LENGTH = 12, 4, 4, 12
DIGITS = range(2, 12)
"""Ids of the digits in the tokenizer of `write_model`; 0 is the end of sequence."""
PROBABILITIES = np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]) / 20
TENSORS = [f"layers.{number}.weight" for number in range(5)]
SEGMENTS = (5, 9)
"""Steps with which the second and the third segment of the log begin."""
BLOCKS = "sharded/__0_0.distcp"

Lag0 = dict[str, Any]


@dataclass(kw_only=True)
class Alterations:
    """Changes of the records; each default keeps them. sample: changes a sample before it is
    logged; entropy: sum over its tokens, or None for the exact one. Others change what a step
    records."""

    sample: Callable[[Sample, int], Sample] = lambda sample, step: sample
    entropy: Callable[[Sample], float | None] = lambda sample: None
    metrics: Callable[[dict[str, Any], int], dict[str, Any]] = lambda line, step: line
    load: Callable[[str, int, int], str] = lambda digest, version, engine: digest
    differences: Callable[[float, int, Sample], float] = lambda mean, step, sample: mean
    depth: Callable[[float, int], float] = lambda total, bucket: total
    tensors: Callable[[dict[str, str], int], dict[str, str]] = lambda digests, step: digests
    weights: Callable[[str, int], str] = lambda digest, step: digest
    group: Callable[[list[Sample], int], list[Sample]] = lambda samples, step: samples
    prompt: Callable[[int], int] = lambda group: group
    config: tuple[str, ...] = field(default=())


def entropy_of(probabilities: np.ndarray) -> float:
    return float(-(probabilities * np.log(probabilities)).sum())


def write_healthy_run(folder: Path, altered: Alterations | None = None) -> Path:
    """Write a run of STEPS steps in `folder`; return its directory."""
    altered = altered or Alterations()
    run_dir = _write_config(folder, altered)
    config = load(run_dir / "config.yaml")
    prompts = read_training(config.data, tokenizer_of(config.model.path, config.data)).prompts
    identities = PromptSource(prompts, seed=1, shuffle=True).identities
    draw = np.random.default_rng(7)
    digests = {step: altered.weights(f"{step:016x}", step) for step in range(STEPS + 1)}
    _write_start(run_dir, f"{0:016x}", [one.as_json() for one in identities])
    write_coverage(run_dir, CoverageRecord(step=5, trainable=len(TENSORS), parameters=()))
    metrics = MetricsLog(run_dir, tensorboard=False, first_step=1)
    lag0, loads, weights = Lag0Log(run_dir, 1), LoadLog(run_dir), WeightLog(run_dir, 1)
    log = SampleLogWriter(run_dir, config.samples)
    log.begin(0)
    for version in range(STEPS + 1):
        for engine in range(2):
            load_digest = altered.load(f"{version:016x}", version, engine)
            loads.record(version, engine, load_digest, len(TENSORS))
        own = {name: f"{name} {version}" for name in TENSORS}
        weights.log(version, altered.tensors(own, version))
    for step in range(1, STEPS + 1):
        if step in SEGMENTS:
            # A start continues in a new segment.
            log.close()
            position = log.position
            log = SampleLogWriter(run_dir, config.samples)
            log.begin(position)
        groups = range((step - 1) * GROUPS, step * GROUPS)
        samples: list[Sample] = []
        batch = []
        for group in groups:
            log.admitted(group, step)
            members = [
                altered.sample(_sample(draw, prompts[altered.prompt(group)], group, k, step), step)
                for k in range(SIZE)
            ]
            members = altered.group(members, step)
            made = rows(members, group)
            for one in made:
                log.finished(one)
            batch.append(made)
            samples += members
        log.trained(list(groups), batch, step)
        lag0.log(step, **_differences(samples, step, altered))
        line = altered.metrics(_metrics(samples, altered), step)
        metrics.log(step, line, digests[step])
    log.close()
    for one in (metrics, lag0, weights):
        one.close()
    _write_checkpoint(run_dir)
    return run_dir


def _write_config(folder: Path, altered: Alterations) -> Path:
    write_model(folder / "model")
    rows = [
        {"prompt": f"{10 + number}+1=", "answer": str(number % 10)}
        for number in range(STEPS * GROUPS)
    ]
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (folder / "train.jsonl").write_text(text)
    tree = config_tree()
    tree["run"]["steps"] = STEPS
    tree["rollout"]["engines"] = 2
    tree["rollout"]["sampling"]["max_tokens"] = LENGTH + 2
    tree["flow"] = {"prompts_per_step": GROUPS, "group_size": SIZE, "async_ratio": 0}
    tree["policy"]["optimizer"] = {"lr": 0.001, "schedule": "linear", "warmup_steps": 3}
    (folder / "written.yaml").write_text(yaml.safe_dump(tree))
    run_dir = folder / "out"
    run_dir.mkdir()
    config = load(folder / "written.yaml", altered.config)
    (run_dir / "config.yaml").write_text(dump(config))
    return run_dir


def _write_start(run_dir: Path, weights: str, training: list[dict[str, Any]]) -> None:
    record_start(
        run_dir,
        Start(
            step=0,
            time=0.0,
            config=file_digest(run_dir / "config.yaml"),
            device="cpu",
            ranks=1,
            layout={},
            threads=1,
            software={},
            weights=weights,
            data={"training": training, "held_out": {}},
            code={},
        ),
    )


def _sample(draw: np.random.Generator, prompt: Prompt, group: int, k: int, step: int) -> Sample:
    digits = draw.choice(len(PROBABILITIES), LENGTH, p=PROBABILITIES)
    text = "".join(str(digit) for digit in digits)
    ids = np.array([DIGITS[digit] for digit in digits] + [0], dtype=np.int32)
    return Sample(
        id=f"{group}-{k}",
        prompt=prompt,
        response_ids=ids,
        behavior_logprobs=np.append(np.log(PROBABILITIES[digits]), 0.0).astype(np.float32),
        versions=np.full(len(ids), step - 1, dtype=np.int32),
        loss_mask=np.ones(len(ids), dtype=np.uint8),
        text=text,
        finish_reason="stop",
        reward=float(str(prompt.fields["answer"]) in text),
        engine=k % 2,
        finished_at=1000.0 * group + k,
    )


def _differences(samples: list[Sample], step: int, altered: Alterations) -> Lag0:
    lengths = [int(one.loss_mask.sum()) for one in samples]
    means = [
        altered.differences(5e-7 * (1 + 0.1 * (place % 3)), step, one)
        for place, one in enumerate(samples)
    ]
    total = sum(mean * count for mean, count in zip(means, lengths, strict=True))
    # Prompts have five tokens: the depth is 5 to 17, in buckets 2 to 4.
    tokens = [0, 0, sum(lengths) // 4, sum(lengths) // 2, sum(lengths) // 4]
    each = total / sum(tokens)
    return {
        "tokens": tokens,
        "sums": [altered.depth(each * count, bucket) for bucket, count in enumerate(tokens)],
        "ids": [one.id for one in samples],
        "means": means,
    }


def _metrics(samples: list[Sample], altered: Alterations) -> dict[str, Any]:
    valid = [one for one in samples if one.valid]
    trained = [int(one.loss_mask.sum()) for one in valid]
    exact = LENGTH * entropy_of(PROBABILITIES)
    entropies = [altered.entropy(one) for one in valid]
    total = sum(exact if entropy is None else entropy for entropy in entropies)
    return {
        "policy/entropy": total / max(sum(trained), 1),
        "policy/lr": 0.0,
        "policy/grad_norm": 1.0,
        "policy/skipped": 0.0,
        "policy/nonfinite": 0.0,
        "lag/max": 0,
        "tokens/trained": sum(trained),
        "tokens/generated": sum(int(one.loss_mask.sum()) for one in samples),
        "reward/mean": float(np.mean([one.reward for one in valid])),
        "reward/errors": len(samples) - len(valid),
        "response/length_mean": float(np.mean([one.length for one in valid])),
        "reward/equal_groups": 0.1,
        "flow/in_flight": 0,
    }


def _write_checkpoint(run_dir: Path) -> None:
    folder = run_dir / "checkpoint" / f"step_{STEPS:08d}"
    (folder / "sharded").mkdir(parents=True)
    blocks, offset, content = [], 0, b""
    for name in TENSORS:
        part = name.encode() * 20
        blocks.append(StoredBlock(offset, len(part), digest(part), name))
        content, offset = content + part, offset + len(part)
    (folder / BLOCKS).write_bytes(content)
    line = (run_dir / "metrics.jsonl").read_bytes().splitlines()[-1]
    record = json.dumps({"metrics": {"step": STEPS, "digest": digest(line)}}).encode()
    (folder / "record.json").write_bytes(record)
    files = {BLOCKS: StoredFile.of_blocks(blocks), "record.json": StoredFile.of(record)}
    (folder / "about.json").write_text(described({"step": STEPS}, files))
    (run_dir / "checkpoint" / "latest").write_text(folder.name)


def scheduled(line: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the line with the learning rate of the schedule in the config."""
    warm, last, lr = 3, STEPS, 0.001
    done = step - 1
    rate = lr * step / warm if done < warm else lr * (1 - (done - warm) / (last - warm))
    return {**line, "policy/lr": rate}


def copied_to(sample: Sample, ids: Iterator[int] | list[int], text: str, **changes: Any) -> Sample:
    """Return a sample with other tokens, which are certain."""
    tokens = np.array(list(ids), dtype=np.int32)
    return replace(
        sample,
        response_ids=tokens,
        behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=np.full(len(tokens), sample.versions[0], dtype=np.int32),
        loss_mask=np.ones(len(tokens), dtype=np.uint8),
        text=text,
        **changes,
    )
