"""Train SmolLM2-135M-Instruct on two tasks of reasoning-gym, with all weights and with LoRA, on two
CPU cores; measure what each run learned and forgot; write the results to docs/real_model.md.

    python examples/smollm2/real.py                    prepare, train, measure, and write the page
    python examples/smollm2/real.py --only chain_sum   one run
    python examples/smollm2/real.py --page             write the page again from real.json

`make real` runs the first command. An interrupted run continues from its newest checkpoint (every
20 steps, and after Ctrl-C), and a finished run is left as it is. The results are in `real.json`
next to this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron_async_rl.launch.foreground import run_in_foreground
from megatron_async_rl.metrics.log import read_evaluations, read_metrics
from megatron_async_rl.report.run_data import read_config

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = HERE / "generated" / "smollm2"
FOLDER = ROOT / "runs" / "smollm2"
RECORD, FIGURE = HERE / "real.json", ROOT / "docs" / "real_model.svg"
PAGE = ROOT / "docs" / "real_model.md"
BEGIN = "<!-- from real.json: python examples/smollm2/real.py --page -->\n"
END = "<!-- end -->\n"

LORA = ("policy.lora={rank: 16}", "policy.optimizer.lr=4e-4")
RUNS = {
    "chain_sum": ("smollm2_chain_sum_cpu.yaml", ()),
    "chain_sum_lora": ("smollm2_chain_sum_cpu.yaml", LORA),
    "needle_haystack": ("smollm2_needle_haystack_cpu.yaml", ()),
    "needle_haystack_lora": ("smollm2_needle_haystack_cpu.yaml", LORA),
}
"""Name of a run -> (config, overrides)."""
COLOURS = {"chain_sum": "#1f5fb4", "needle_haystack": "#c0392b"}
SHOWN = 4
"""Number of held-out questions that the page shows with the responses before and after."""

Record = dict[str, Any]
"""runs: name -> Run. A Run has date, machine, overrides, dtype, steps, minutes, curve (pairs of
minutes and the share of right answers), and before and after: what `measured` returns."""


def fast_dtype() -> str:
    """Return `bfloat16` on a CPU with AMX instructions, which multiply it at over ten times the
    rate of float32, and otherwise `float32`."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "bfloat16" if "amx_bf16" in flags else "float32"


def command(*words: str | Path) -> None:
    """Run a command of the package. Raises SystemExit if it fails or is interrupted."""
    print("$ mar " + " ".join(map(str, words)), flush=True)
    # In the checkout, whose `examples` has the reward of needle_haystack.
    run_in_foreground([sys.executable, "-m", "megatron_async_rl", *map(str, words)], cwd=ROOT)


def train(name: str, dtype: str) -> Path:
    """Train a run to its end, unless it has ended, and return its folder."""
    config, overrides = RUNS[name]
    folder = FOLDER / name
    if not (folder / "hf" / "config.json").is_file():
        command(
            *("train", ROOT / "examples" / config, f"run.dir={folder}"),
            *(f"model.dtype={dtype}", *overrides),
        )
    return folder


def measured(model: Path, config: Path, out: Path) -> dict[str, Any]:
    """Evaluate a model on a config's held-out sets. Return, for each set: `right`, the share of
    responses to which the reward gives 1; `alone`, the share that are the answer and nothing else;
    `contained`, the share that contain the answer; `length`, the mean number of characters; and the
    first responses."""
    responses = out.with_suffix(".jsonl")
    if not responses.is_file():
        command("eval", model, "--config", config, "--out", out, "--responses", responses)
    rows = [json.loads(line) for line in responses.read_text(encoding="utf-8").splitlines()]
    found = {}
    for one in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == one]
        found[one] = {
            "right": sum(row["reward"] == 1 for row in own) / len(own),
            "alone": sum(row["response"].strip() == row["answer"] for row in own) / len(own),
            "contained": sum(map(contains_answer, own)) / len(own),
            "length": sum(len(row["response"]) for row in own) / len(own),
            "first": [
                {"question": question_of(row), "answer": row["answer"], "response": row["response"]}
                for row in own[:SHOWN]
            ],
        }
    return found


def contains_answer(row: dict[str, Any]) -> bool:
    """Return True if the answer is a word or number of the response."""
    return bool(
        re.search(rf"(?<![\w.-])(?<!\d,){re.escape(row['answer'])}(?!\w|[.,]\d)", row["response"])
    )


def question_of(row: dict[str, Any]) -> str:
    """Return the user's message in the text of the chat."""
    found = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", row["prompt"], re.S)
    return found[1] if found else str(row["prompt"])


def result_of(name: str, folder: Path) -> dict[str, Any]:
    rows = read_metrics(folder)
    evaluations = [one for one in read_evaluations(folder) if one["set"] == task_of(name)]
    # The sum of the steps, without pauses between starts.
    minutes = dict(enumerate(accumulate((row["time/step_s"] / 60 for row in rows), initial=0.0)))
    return {
        "date": datetime.date.fromtimestamp(rows[-1]["time"]).isoformat(),
        "machine": machine(),
        "overrides": list(RUNS[name][1]),
        "dtype": read_config(folder)["model"]["dtype"],
        "steps": len(rows),
        "minutes": round(minutes[len(rows)], 1),
        "lag": round(sum(row["lag/mean"] for row in rows) / len(rows), 2),
        "curve": [[round(minutes[one["version"]], 2), one["pass_at"]["1"]] for one in evaluations],
        "before": measured(MODEL, folder / "config.yaml", folder / "before.json"),
        "after": measured(folder / "hf", folder / "config.yaml", folder / "after.json"),
    }


def machine() -> str:
    amx = " with AMX" if fast_dtype() == "bfloat16" else ""
    return f"{len(os.sched_getaffinity(0))} CPU cores{amx}"


def write_page(record: Record) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(page_lines(record))
    PAGE.write_text(before + BEGIN + lines + "\n" + END + after, encoding="utf-8")
    if record["runs"]:
        draw(record)


def page_lines(record: Record) -> Iterator[str]:
    if not record["runs"]:
        yield "No run is recorded."
        return
    yield f"![right answers over time]({FIGURE.name})\n"
    yield "| run | date, machine, `model.dtype` |\n| --- | --- |"
    for name, run in record["runs"].items():
        overrides = "".join(f", `{one}`" for one in run["overrides"])
        yield f"| `{name}`{overrides} | {run['date']}, {run['machine']}, `{run['dtype']}` |"
    yield (
        "\n| run | steps | minutes | mean lag | right | the answer alone | contains the answer "
        "| characters |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, run in record["runs"].items():
        task = task_of(name)
        cells = [f"`{name}`", run["steps"], run["minutes"], run["lag"]]
        cells += [change(run, task, key, "%") for key in ("right", "alone", "contained")]
        cells += [change(run, task, "length")]
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield "\nOn questions of a task that no run trained on (`letter_counting`):\n"
    yield "| run | right | the answer alone | characters |"
    yield "| --- | --- | --- | --- |"
    for name, run in record["runs"].items():
        cells = [change(run, "untrained", key, "%") for key in ("right", "alone")]
        yield f"| `{name}` | " + " | ".join([*cells, change(run, "untrained", "length")]) + " |"
    for name, run in record["runs"].items():
        yield f"\nHeld-out questions of `{name}`:\n"
        yield "| question | answer | before | after |\n| --- | --- | --- | --- |"
        pairs = zip(
            *(run[when][task_of(name)]["first"] for when in ("before", "after")), strict=True
        )
        for one, other in pairs:
            texts = [one["question"], one["answer"], one["response"], other["response"]]
            yield "| " + " | ".join(f"`{flat(text)}`" for text in texts) + " |"


def task_of(name: str) -> str:
    return name.removesuffix("_lora")


def change(run: dict[str, Any], which: str, key: str, unit: str = "") -> str:
    values = (run[when][which][key] * (100 if unit else 1) for when in ("before", "after"))
    return " → ".join(f"{value:.0f}{unit}" for value in values)


def flat(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("`", "'").split()) or " "


def draw(record: Record) -> None:
    """Draw right answers over time (600 x 300 pixels, SVG)."""
    figure = Figure(figsize=(6.25, 3.125), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for name, run in record["runs"].items():
        style = "--" if name.endswith("_lora") else "-"
        minutes, right = zip(*run["curve"], strict=True)
        colour = COLOURS[task_of(name)]
        axes.plot(minutes, right, style, color=colour, marker="o", ms=3, label=name)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("right answers, held out")
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    # Without a date and with these ids, the same numbers give the same file.
    with rc_context({"svg.hashsalt": "real"}):
        figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--page", action="store_true", help="write the page from real.json")
    options = parser.parse_args()
    if options.page and not RECORD.is_file():
        # Otherwise the page would lose its numbers.
        parser.error(f"--page: {RECORD} is missing; run this script without --page")
    record: Record = {"runs": {}}
    if RECORD.is_file():
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    if not options.page:
        run_in_foreground([sys.executable, str(HERE / "prepare.py")])
        dtype = fast_dtype()
        for name in options.only:
            record["runs"][name] = result_of(name, train(name, dtype))
            record["runs"] = {one: record["runs"][one] for one in RUNS if one in record["runs"]}
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_page(record)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
