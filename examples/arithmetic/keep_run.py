"""Keeps a run of the demo, small enough for the repository, to be compared with later ones
(`observe.beside`).

    mar train examples/arithmetic_cpu.yaml run.dir=runs/without_control \\
        'controls=[{name: gac, c_low: 0.999}]'
    python examples/arithmetic/keep_run.py runs/without_control

writes `without_control/` next to this file: the metrics that a report or a comparison draws, to
five digits, the evaluations, how it ended, and the settings without paths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_async_rl.config.yaml_tree import write
from megatron_async_rl.metrics.log import read_evaluations, read_metrics
from megatron_async_rl.report.comparison import KEYS
from megatron_async_rl.report.run_data import read_config

HERE = Path(__file__).resolve().parent
KEPT = (
    *("step", "version", "time", "reward/mean", "lag/mean", "lag/max"),
    *("tokens/trained", "tokens/generated", "time/step_s"),
    *(key for _, _, key in KEYS),
)
SETTINGS = ("flow", "objective", "controls", "policy", "eval")


def keep(run_dir: Path, folder: Path) -> None:
    """`folder` is made if it is missing. Raises UserError for anything but a run."""
    rows = read_metrics(run_dir)
    config = read_config(run_dir)
    status = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    folder.mkdir(exist_ok=True)
    kept = [{key: _short(row[key]) for key in KEPT if key in row} for row in rows]
    evaluations = [
        {key: value for key, value in evaluation.items() if key != "per_prompt"}
        for evaluation in read_evaluations(run_dir)
    ]
    for name, content in (
        ("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept)),
        ("eval.jsonl", "".join(json.dumps(one) + "\n" for one in evaluations)),
        ("status.json", json.dumps(status | {"log": None}) + "\n"),
        ("config.yaml", write({key: config[key] for key in SETTINGS if key in config})),
    ):
        (folder / name).write_text(content, encoding="utf-8")


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) and value < 1e6 else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    run = parser.parse_args().run.resolve()
    keep(run, HERE / run.name)
    print(f"wrote {HERE / run.name}")


if __name__ == "__main__":
    main()
