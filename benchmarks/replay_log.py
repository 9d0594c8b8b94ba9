"""Time until the batch of one step is read from a long sample log, as at the start of a replay.

The run's own writer writes the log: steps of 64 groups of 8 samples, of 8 prompt and 8 response
tokens each. Every reading is a process of its own; `read_s` is its processor time from opening the
log to the batch, without the imports, and `next_s` that of the batch after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

GROUPS, GROUP_SIZE, TOKENS = 64, 8, 8
TEMPLATES = 16
QUEUED = 20_000
"""Number of rows in the writer's queue above which this program waits for it."""


def write(run_dir: Path, lengths: list[int]) -> None:
    """Write logs with these numbers of samples, each a continuation of the one before; read
    batches of each."""
    import pyarrow as pa

    from megatron_async_rl.config.schema import SamplesConfig
    from megatron_async_rl.flow.sample_log import SampleLogWriter
    from megatron_async_rl.samples.columns import batch_of
    from megatron_async_rl.samples.frames import FOLDER
    from megatron_async_rl.samples.rows import rows_of

    templates = [batch_of(*_samples(seed)) for seed in range(TEMPLATES)]
    log = SampleLogWriter(run_dir, SamplesConfig(keep_mib=2**20))
    log.begin(0)
    began, step = time.monotonic(), 0
    for samples in lengths:
        while step * GROUPS * GROUP_SIZE < samples:
            batch = templates[step % TEMPLATES]
            first = step * GROUPS
            names = [f"{first + n // GROUP_SIZE}-{n % GROUP_SIZE}" for n in range(len(batch))]
            finished = step + np.arange(len(batch)) / len(batch)
            for column, values in (("id", pa.array(names)), ("finished_at", pa.array(finished))):
                at = batch.schema.get_field_index(column)
                batch = batch.set_column(at, batch.schema.field(at), values)
            rows = rows_of(batch)
            groups = range(first, first + GROUPS)
            for group in groups:
                log.admitted(group, step + 1)
            for row in rows:
                log.finished(row)
            batches = [rows[n * GROUP_SIZE : (n + 1) * GROUP_SIZE] for n in range(GROUPS)]
            log.trained(list(groups), batches, step + 1)
            step += 1
            while len(log._queue) > QUEUED:
                time.sleep(0.001)
        log.flush()
        files = list((run_dir / FOLDER).iterdir())
        written = {
            "samples": step * GROUPS * GROUP_SIZE,
            "mib": round(sum(file.stat().st_size for file in files) / 2**20),
            "segments": len(files) // 2,
            "write_s": round(time.monotonic() - began, 1),
        }
        places = {"first": 1, "middle": step // 2, "last": step - 1}
        times = {name: _read(run_dir, place) for name, place in places.items()}
        print(json.dumps({**written, "read_s, next_s": times}), flush=True)
    log.close()
    assert not (run_dir / "events.jsonl").exists(), (run_dir / "events.jsonl").read_text()


def _samples(seed: int) -> tuple[list[Any], list[int]]:
    from megatron_async_rl.samples.types import Prompt, Sample

    draw = np.random.default_rng(seed)
    samples: list[Any] = []
    groups = []
    for group in range(GROUPS):
        ids = tuple(draw.integers(1, 30_000, TOKENS).tolist())
        prompt = Prompt(id=f"{seed}-{group}", text=" ".join(map(str, ids)), token_ids=ids)
        for k in range(GROUP_SIZE):
            response = draw.integers(1, 30_000, TOKENS).astype(np.int32)
            samples.append(
                Sample(
                    id=f"{group}-{k}",
                    prompt=prompt,
                    response_ids=response,
                    behavior_logprobs=draw.uniform(-3, 0, TOKENS).astype(np.float32),
                    versions=np.zeros(TOKENS, dtype=np.int32),
                    loss_mask=np.ones(TOKENS, dtype=np.uint8),
                    text=" ".join(map(str, response)),
                    finish_reason="stop",
                    reward=float(draw.integers(2)),
                )
            )
            groups.append(group)
    return samples, groups


def _read(run_dir: Path, step: int) -> list[float]:
    command = [sys.executable, __file__, "--read", str(run_dir), str(step)]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    return [round(statistics.median(times), 3) for times in zip(*found, strict=True)]


def read(run_dir: Path, step: int) -> None:
    from megatron_async_rl.samples.recorded import RecordedBatches

    began = time.process_time()
    recorded = RecordedBatches(run_dir)
    times = []
    for number in (step, step + 1):
        batch = recorded.batch(number)
        assert len(batch.samples) == GROUPS * GROUP_SIZE
        times.append(time.process_time() - began)
        began = time.process_time()
    print(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--folder", type=Path, help="with space for 150 bytes a sample")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(Path(args.read[0]), int(args.read[1]))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write(Path(folder), args.samples)


if __name__ == "__main__":
    main()
