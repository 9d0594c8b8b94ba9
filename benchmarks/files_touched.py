"""Files of the package that a sample, a weight version and the start of a run pass through.

Runs the arithmetic example for a few synchronous steps with every process traced
(call_recorder/sitecustomize.py), and counts the files with at least one call in a window:

    start      `mar train` is called          -> Megatron's first forward pass
    weights    a rank publishes a version     -> the controller has it on an engine;
               of the ranks' calls, those inside `publish`
    sample     the controller has a version   -> the ranks have reduced the next step's gradients;
               of the ranks' calls, those after the batch has arrived

The windows `weights` and `sample` leave out the command's own process, which shows progress. Also
counts the package's modules and its lines of code (without blanks, comments and docstrings), and
the comments per 100 of them. Prints one JSON object; `--list` adds the files of each window.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_async_rl"
FORWARD = "gpt_model.py:GPTModel.forward"
PUBLISH = "trainer_rank.py:TrainerRank.publish"
AFTER_PUBLISH = "trainer_rank.py:TrainerRank.evaluate"
ON_ENGINE = "controller.py:Controller.on_version"
BATCH = "policy.py:Policy.receive"
REDUCED = "adam_view.py:gradients_of"
LAYOUT_TOKENS = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MARKERS = (FORWARD, PUBLISH, AFTER_PUBLISH, ON_ENGINE, BATCH, REDUCED)


@dataclass(frozen=True)
class Call:
    """A call in process `pid` at `time`, in nanoseconds of the machine's monotonic clock."""

    pid: int
    time: int
    file: str
    name: str

    @property
    def marker(self) -> str:
        return f"{Path(self.file).name}:{self.name}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--list", action="store_true", help="print the files of each window")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        calls = traced_run(Path(name), args.steps)

    files = {window: files_of(found) for window, found in windows(calls).items()}
    code, comments = map(sum, zip(*map(lines_of, modules()), strict=True))
    print(
        json.dumps(
            {
                **{f"files_{window}": len(found) for window, found in files.items()},
                "modules": len(modules()),
                "lines_of_code": code,
                "comments_per_100_lines": round(100 * comments / code, 1),
                **(files if args.list else {}),
            },
            indent=2,
        )
    )


def traced_run(folder: Path, steps: int) -> list[Call]:
    """Run the example in `folder` and return the calls of all its processes by time."""
    runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"](folder, seed=0)
    config = yaml.safe_load((ROOT / "examples" / "arithmetic_cpu.yaml").read_text(encoding="utf-8"))
    # Synchronous: the windows of consecutive versions do not overlap. The objective and the
    # controls stay, because they are part of a sample's path.
    config["run"] = {"dir": "run", "steps": steps}
    config["model"]["path"] = "model"
    config["data"] = {"train": "train.jsonl"}
    config["flow"] |= {"prompts_per_step": 8, "async_ratio": 0}
    for section in ("eval", "observe"):
        config.pop(section)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    records = folder / "calls"
    records.mkdir()
    paths = [str(Path(__file__).parent / "call_recorder"), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-m", "megatron_async_rl", "train", "config.yaml"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MAR_CALLS": str(records),
            "MAR_MARKERS": ",".join(MARKERS),
        },
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if run.returncode:
        raise SystemExit(run.stdout + run.stderr)
    calls = [
        Call(int(file.stem), *json.loads(line))
        for file in records.iterdir()
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(calls, key=lambda call: call.time)


def windows(calls: list[Call]) -> dict[str, list[Call]]:
    """Calls of each window; of the last version and the last sample that were traced whole."""
    command = calls[0].pid
    ranks = {call.pid for call in calls if call.marker == PUBLISH}
    reduced = last_before(calls, calls[-1].time + 1, REDUCED)
    on_engine = last_before(calls, reduced, ON_ENGINE)
    published = last_before(calls, on_engine, PUBLISH)

    def between(
        begin: int, end: int, *, rank_begin: str | None = None, rank_end: str | None = None
    ) -> list[Call]:
        """Calls from `begin` to `end`; on the ranks only from and to these markers."""
        spans = {
            pid: (
                begin if rank_begin is None else first_after(calls, begin, rank_begin, pid),
                end if rank_end is None else first_after(calls, begin, rank_end, pid),
            )
            for pid in ranks
        }
        return [
            call
            for call in calls
            if call.pid != command
            and spans.get(call.pid, (begin, end))[0]
            <= call.time
            <= spans.get(call.pid, (begin, end))[1]
        ]

    forward = first_after(calls, 0, FORWARD)
    return {
        "start": [call for call in calls if call.time <= forward],
        "weights": between(published, on_engine, rank_end=AFTER_PUBLISH),
        "sample": between(on_engine, first_after(calls, on_engine, REDUCED), rank_begin=BATCH),
    }


def last_before(calls: list[Call], end: int, marker: str) -> int:
    return _found(
        [call.time for call in calls if call.time < end and call.marker == marker], marker
    )[-1]


def first_after(calls: list[Call], begin: int, marker: str, pid: int | None = None) -> int:
    times = [
        call.time
        for call in calls
        if call.time > begin and call.marker == marker and pid in (None, call.pid)
    ]
    return _found(times, marker)[0]


def _found(times: list[int], marker: str) -> list[int]:
    if not times:
        raise SystemExit(f"no call of {marker} was recorded. Was it renamed? See MARKERS.")
    return times


def files_of(calls: list[Call]) -> list[str]:
    """Files of the package with a call, relative to it."""
    files = {Path(call.file) for call in calls}
    return sorted(str(file.relative_to(PACKAGE)) for file in files if PACKAGE in file.parents)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def lines_of(module: Path) -> tuple[int, int]:
    """Numbers of lines with code, and of lines with a comment. Docstrings count as neither."""
    text = module.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            # Bare strings after an assignment document it, so they count as docstrings, too.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(comments)


if __name__ == "__main__":
    main()
