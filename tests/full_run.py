"""Files of a run that logs every metric of the report, each with its own course, so that no two
metrics can be swapped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

CONFIG = {
    "model": {"path": "/models/tiny", "dtype": "float32"},
    "policy": {"parallel": {"ranks": 2}, "optimizer": {"lr": 3e-4}},
    "controls": [{"name": "gac", "c_low": 0.15, "c_high": 0.7}],
    "flow": {"async_ratio": 1.5, "prompts_per_step": 32, "group_size": 8},
}


def row_of(step: int, steps: int) -> dict[str, Any]:
    """Return the line of a step: each metric with its own course, so that no two can be swapped."""
    wave, late = math.sin(step / 3), step > steps // 2
    row: dict[str, Any] = {
        "step": step,
        "version": step,
        "time": 1000.0 + 10.0 * step + 500.0 * late,
        "reward/mean": 0.3 + step / 100 + 0.05 * wave,
        "reward/part/right": 0.1 * wave,
        "reward/part/short": -0.01 * step,
        "reward/equal_groups": 0.02 * (step % 7),
        "reward/errors": 3 if step == 5 else 1 if step == 6 else 0,
        "response/length_mean": 20.0 + wave,
        "response/length_max": 40 + step % 5,
        "response/truncated": 0.1 + 0.01 * (step % 3),
        "response/mixed_versions": 0.5 * late,
        "ratio/ess_ratio": 0.9 - step / 500,
        "ratio/kl_k1": 0.001 * step,
        "ratio/kl_k3": 0.002 * step,
        "ratio/logp_diff_mean": 0.01 * wave,
        "ratio/logp_diff_max": 0.1 + 0.1 * wave,
        "ratio/logp_diff_lag0_max": 0.03,
        "clip/positive": 0.01,
        "clip/negative": 0.02 * late,
        "policy/entropy": 1.0 - step / 300,
        "policy/loss": 0.5 * wave,
        "policy/lr": 1e-5 * min(step, 10),
        "policy/grad_norm": 2.0 if step % 9 else 90.0,
        "policy/skipped": 1 if step == 7 else 0.25 if step == 8 else 0,
        "update/norm": 0.1 * step,
        "gac/regime": step % 3,
        "staleness/drift": 0.125 * step,
        "lag/mean": 0.75,
        "lag/max": 1 if step == 1 else 2,
        "lag/histogram": [1, 3] if step == 1 else [2, 1, step % 4],
        "tokens/generated": 1000 + step,
        "tokens/trained": 900 + 2 * step,
        "time/wait_batch_s": 0.2 + 0.01 * (step % 4),
        "time/train_s": 6.0,
        "time/publish_s": 0.5,
        "time/step_s": 10.0,
        "engine/busy_share": 0.5,
        "engine/busy_shares": [0.75, 0.25] if step > 2 else [0.75],
        "engine/versions": [step - 1, step - 2 if 1 < step < steps else -1],
        "engine/in_flight": [4, step % 3],
        "engine/tokens": [300 + step, 100],
        "engine/alive": 2 if step % 20 else 1,
        "engine/restarts": step // 21,
        "flow/admitted": 8 * (step - late * (steps // 2)),
        "flow/dropped_late": step // 3 - late * (steps // 6),
        "flow/dropped_equal": step // 5,
        "trained/length_histogram": [0, 0, 1, 4, 4 + step % 2],
    }
    if step > 1:
        row["gac/cosine"] = 0.3 + 0.5 * wave
    if step % 3 == 0:
        row |= {"dropped/responses": step, "dropped/length_mean": 60.0 + step}
        row |= {"dropped/reward_mean": 0.25, "dropped/length_histogram": [0, 0, 0, 0, 0, step]}
    if step == 4:
        row |= {"reward/mean": "nan", "policy/grad_anomaly": 856.0}
    if step == 10:
        row |= {"policy/grad_norm": "inf", "policy/nonfinite": 1}
    return row


def written(run_dir: Path, steps: int = 46, **changes: Any) -> Path:
    """Write a run of `steps` steps, with the config `changes`."""
    run_dir.mkdir(parents=True)
    lines = [row_of(step, steps) for step in range(1, steps + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG | changes))
    status = {"phase": "training", "step": steps, "steps": steps + 4, "time": 0.0}
    status |= {"before": 0.31, "after": 0.91, "error": "rank 1 was killed", "log": "logs/rank1"}
    (run_dir / "status.json").write_text(json.dumps(status))
    found = {"step": 4, "norm": 1798.2, "median": 2.1, "parameter": "w"}
    found["samples"] = [{"id": f"{index}/0"} for index in range(8)]
    (run_dir / "anomalies.jsonl").write_text(json.dumps(found) + "\n{half")
    events = [{"time": 1000.0 + index, "text": f"event <{index}>"} for index in range(14)]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    evaluated = [
        {"version": version, "mean_reward": mean, "pass_at": pass_at, "tokens": 9}
        for version, mean, pass_at in (
            (0, 0.25, {"1": 0.25}),
            (4, None, {"1": 0.375, "8": 0.75}),
            (steps, 0.5, {"1": 0.5, "8": 0.875}),
            (steps + 1, 0.6, {"1": 0.5, "8": 0.9}),
        )
    ]
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluated))
    prediction = {"async_ratio": [2, 0, 1], "tokens_per_s": [120, 40, 100]}
    prediction |= {"engine_busy": [0.9, 0.4, 0.8], "trainer_busy": [0.7, 0.3, 0.6]}
    (run_dir / "simulation.json").write_text(json.dumps(prediction | {"lag_mean": [1.5, 0, 1]}))
    parts = {
        "rank 0": (("waiting", "batch", 3.0), ("training", "", 6.5), ("odd", "", 0.5)),
        "engine-0": (("busy", "", 9.0), ("loading", "", 0.75), ("idle", "prompts", 0.25)),
        "engine-1": (("busy", "", 0.01), ("paused", "", 0.02)),
    }
    (run_dir / "timeline").mkdir()
    for track, pieces in parts.items():
        at = 1500.0 + 10.0 * (steps // 2)
        spans = []
        while at < 1500.0 + 10.0 * steps and len(spans) < 60:
            for state, reason, seconds in pieces:
                spans.append({"state": state, "for": reason, "start": at, "end": at + seconds})
                at += seconds
        text = "".join(json.dumps(one) + "\n" for one in spans)
        (run_dir / "timeline" / f"{track}.jsonl").write_text(text)
    return run_dir
