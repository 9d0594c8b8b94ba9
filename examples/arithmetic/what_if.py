"""docs/what_if.md and its figure: the demo collapses without its control, and its recorded steps
are replayed with the same settings and with the control.

    python examples/arithmetic/what_if.py

writes both from `what_if.json`, next to this file, which has the numbers of the replays and names
the commands that made them. The same file gives the same page. After the demo's warm start,

    python examples/arithmetic/what_if.py --run runs/collapse

records the run, replays it, and writes all three files, in about five minutes on two cores. It
continues an interrupted run, and repeats an interrupted replay. The prose of the template,
what_if_page.md, describes one recording: read it again after another one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.launch.foreground import run_in_foreground
from megatron_async_rl.metrics.log import MetricRow, read_evaluations, read_metrics
from megatron_async_rl.metrics.replay_record import EXPLANATION_FILE, ReplayRecord
from megatron_async_rl.report.panel import COLOURS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NUMBERS = HERE / "what_if.json"
TEMPLATE = HERE / "what_if_page.md"
PAGE = ROOT / "docs" / "what_if.md"
FIGURE = ROOT / "docs" / "what_if.svg"

WITHOUT = "controls=[{name: gac, c_low: 0.999}]"
CONTROL = "controls=[{name: gac, c_low: 0.999}, {name: displacement, tolerated_kl: 0.02}]"
SETTINGS = (
    "run.steps=40",
    "policy.optimizer.schedule=constant",
    "policy.optimizer.min_lr=0",
    "checkpoint.every=10",
    "eval.every=10",
)
WIDTH = 100
"""Number of columns of the page."""
EXPLAINED = 7
SHORT = 10
"""Number of steps of the replay whose weights are evaluated."""
TABLE_STEPS = (2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40)
LISTED = 5
"""Number of groups, samples and tokens of the explanation on the page."""
KEPT = {
    "ess": "ratio/ess_ratio",
    "kl": "ratio/kl_k2",
    "entropy": "policy/entropy",
    "grad_norm": "policy/grad_norm",
    "weights": "weights",
}
"""Name in NUMBERS -> metric of a step."""

Numbers = dict[str, Any]


def commands(run_dir: str) -> dict[str, list[str]]:
    """Return the commands of the page by name, without `mar`."""
    replay, short = ["replay", run_dir], f"{run_dir}/replays/short"
    return {
        "record": [
            "train",
            "examples/arithmetic_cpu.yaml",
            f"run.dir={run_dir}",
            WITHOUT,
            *SETTINGS,
        ],
        "same": replay,
        "control": [*replay, CONTROL],
        "short": [*replay, CONTROL, "--steps", str(SHORT), "--save", "--out", short],
        "evaluate": ["eval", f"{short}/checkpoint", "eval.samples_per_prompt=4"],
        "explain": [*replay, "--explain", str(EXPLAINED)],
    }


def record(run_dir: Path) -> dict[str, str]:
    """Make what is missing of the run and its replays. Return the last line that each replay
    printed about its weights, by name."""
    made = commands(str(run_dir))
    # Resumes an interrupted run, and leaves a finished one as it is.
    _mar(made["record"])
    printed = {}
    for name in ("same", "control", "short", "explain"):
        folder = run_dir / "replays" / name
        if not _complete(folder):
            # `mar replay` refuses a folder that exists.
            shutil.rmtree(folder, ignore_errors=True)
            named = [] if name == "short" else ["--out", str(folder)]
            _mar([*made[name], *named])
        found = ReplayRecord.read(folder)
        first = found.first_different
        printed[name] = (
            f"{len(found.steps)} steps, identical bits" if first is None else f"step {first}"
        )
    if not list((run_dir / "replays" / "short").glob("eval_*.json")):
        evaluated = run_dir / "replays" / "short" / f"eval_{SHORT}.json"
        _mar([*made["evaluate"], "--out", str(evaluated)])
    return printed


def _complete(replay_dir: Path) -> bool:
    """Return whether a replay has repeated all its steps."""
    try:
        found = ReplayRecord.read(replay_dir)
    except (FileNotFoundError, UserError):
        return False
    # An interrupted replay has ended, too.
    return found.ended and bool(found.steps) and found.steps[-1].step == found.last


def _mar(arguments: Sequence[str]) -> None:
    run_in_foreground([sys.executable, "-m", "megatron_async_rl", *arguments], cwd=ROOT)


def collect(run_dir: Path) -> Numbers:
    """Return the numbers of the page from the directories of a run and its replays."""
    printed = record(run_dir)
    replays = run_dir / "replays"
    rows = read_metrics(run_dir)
    (evaluated,) = (replays / "short").glob("eval_*.json")
    explanation = json.loads((replays / "explain" / EXPLANATION_FILE).read_text(encoding="utf-8"))
    return {
        "printed": printed,
        "first_different": ReplayRecord.read(replays / "control").first_different,
        "reward": [_short(row["reward/mean"]) for row in rows],
        "held_out": {
            str(one["version"]): _short(one["mean_reward"]) for one in read_evaluations(run_dir)
        },
        "held_out_with_control": _short(
            json.loads(evaluated.read_text(encoding="utf-8"))["mean_reward"]
        ),
        "run": _kept(rows),
        "control": _kept(read_metrics(replays / "control")),
        "explanation": _listed(explanation["updates"][0]),
    }


def _kept(rows: Sequence[MetricRow]) -> list[dict[str, Any]]:
    return [{name: _short(row[key]) for name, key in KEPT.items() if key in row} for row in rows]


def _listed(update: Numbers) -> Numbers:
    """Return the part of an explanation that the page shows."""
    samples, texts = update["samples"], update["texts"]
    by_share = sorted(samples, key=lambda one: -one["share"])
    listed = {
        "norm": update["norm"],
        "sum_of_shares": update["sum_of_shares"],
        "samples": len(samples),
        "silent": sum(one["norm"] == 0 for one in samples),
        "opposed": sum(one["share"] < 0 for one in samples),
        "half": _needed(one["share"] for one in by_share),
        "parameters": update["parameters"][:3],
        "top_groups": update["groups"][:LISTED],
        "top_samples": [
            one | {name: texts[one["id"]][name] for name in ("prompt", "response")}
            for one in samples[:LISTED]
        ],
        "top_tokens": [
            one | {"prompt": texts[one["sample"]]["prompt"]} for one in update["tokens"][:LISTED]
        ],
    }
    rounded: Numbers = _rounded(listed)
    return rounded


def _needed(shares: Any) -> int:
    """Return how many of the largest shares add up to half of the gradient."""
    total = 0.0
    for count, share in enumerate(shares, 1):
        total += share
        if total >= 0.5:
            return count
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return _short(value)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def page(numbers: Numbers) -> str:
    """Return the text of the page."""
    environment = Environment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    environment.filters["n"] = lambda value, digits=3: f"{value:.{digits}g}"
    environment.filters["percent"] = lambda value: f"{100 * value:.0f} %"
    environment.filters["shares"] = lambda value: f"{100 * value:.1f} %"
    # A line break inside a table's cell would end the table.
    environment.filters["code"] = lambda text: f"`{text}`".replace("\n", " ").replace("|", "\\|")
    made = {name: _command(one) for name, one in commands("RUN").items()}
    made["record"] = made["record"].replace("RUN", "runs/collapse")
    steps = [(step, numbers["run"][step - 1], numbers["control"][step - 1]) for step in TABLE_STEPS]
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        **numbers, commands=made, steps=steps, explained=EXPLAINED, short=SHORT, listed=LISTED
    )
    return "\n\n".join(map(_wrapped, text.rstrip().split("\n\n"))) + "\n"


def _wrapped(block: str) -> str:
    """Return a paragraph or a list with lines of at most WIDTH columns."""
    if block.lstrip().startswith(("#", "|", "`", "!")):
        return block.strip("\n")
    style: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    if not block.startswith("- "):
        return textwrap.fill(block, WIDTH, **style)
    # Without the indentation of continued lines, which would stay inside the wrapped ones.
    items = [f"- {' '.join(item.split())}" for item in block.removeprefix("- ").split("\n- ")]
    return "\n".join(textwrap.fill(one, WIDTH, subsequent_indent="  ", **style) for one in items)


def _command(arguments: Sequence[str]) -> str:
    return " ".join(["mar", *(f"'{word}'" if " " in word else word for word in arguments)])


def draw(numbers: Numbers, path: Path) -> None:
    """Write the figure to `path`."""
    figure = Figure(figsize=(9.4, 3.1), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    reward, ess, kl = figure.subplots(1, 3)
    steps = range(1, len(numbers["reward"]) + 1)
    reward.plot(steps, numbers["reward"], color=COLOURS["red"], label="recorded samples")
    held_out = {int(version): mean for version, mean in numbers["held_out"].items()}
    style: dict[str, Any] = {"ms": 5, "clip_on": False, "ls": ""}
    reward.plot(
        list(held_out),
        list(held_out.values()),
        "D",
        color=COLOURS["red"],
        label="held-out",
        **style,
    )
    reward.plot(
        [SHORT],
        [numbers["held_out_with_control"]],
        "D",
        color=COLOURS["blue"],
        label="held-out, replayed with control",
        **style,
    )
    reward.set_title("Accuracy", loc="left", fontsize=9)
    reward.set_ylim(0, 0.7)
    for axes, name, title in (
        (ess, "ess", "ESS, share of the samples"),
        (kl, "kl", "KL, nats per token"),
    ):
        for who, label, colour in (
            ("run", "the run, without control", "red"),
            ("control", "replay with control", "blue"),
        ):
            values = [row[name] for row in numbers[who]]
            axes.plot(steps, values, color=COLOURS[colour], label=label)
        axes.axvline(
            numbers["first_different"] + 1, color=COLOURS["blue"], ls=(0, (5, 4)), lw=1,
            label="off-policy from here",
        )  # fmt: skip
        axes.set_title(title, loc="left", fontsize=9)
    kl.set_yscale("log")
    kl.set_ylim(1e-2, None)
    for axes in (reward, ess, kl):
        _finish(axes)
    # The third panel has the names of the second.
    for axes in (reward, ess):
        axes.legend(frameon=False, fontsize=7, loc="upper right")
    # Without a date and with these ids, the same numbers give the same file.
    with rc_context({"svg.hashsalt": "what_if", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _finish(axes: Axes) -> None:
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, metavar="RUN")
    if (run := parser.parse_args().run) is not None:
        content = json.dumps(collect(run.resolve()), indent=1) + "\n"
        # Numbers that do not fit the page must not replace those that do.
        page(json.loads(content))
        NUMBERS.write_text(content, encoding="utf-8")
        print(f"wrote {NUMBERS}")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    PAGE.write_text(page(numbers), encoding="utf-8")
    draw(numbers, FIGURE)
    print(f"wrote {PAGE} and {FIGURE}")


if __name__ == "__main__":
    main()
