"""The models that the examples prepare, and the run that the demo is compared with."""

import json
import runpy
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from megatron_async_rl.config.load import load
from megatron_async_rl.report.run_data import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "example", ["arithmetic", "countdown", "guessing", "calculator", "rewriting"]
)
def test_every_token_an_engine_may_sample_has_an_embedding(example, tmp_path):
    """Transformers leaves that of padding at zeros, and a step back through it multiplies the
    gradient by 1/sqrt(norm_eps)."""
    runpy.run_path(str(EXAMPLES / example / "prepare.py"))["write_model"](tmp_path, 1)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    lengths = embeddings.norm(dim=1)
    assert float(lengths.min()) > 0.5 * float(lengths.median())


def holds(settings, kept):
    """Settings that were added since the run was kept are not in it."""
    if not isinstance(kept, dict):
        return settings == kept
    return all(key in settings and holds(settings[key], kept[key]) for key in kept)


def test_the_run_beside_the_demo_differs_from_it_in_one_control_alone():
    config = load(EXAMPLES / "arithmetic_cpu.yaml")
    demo = config.model_dump(mode="json")
    folder = EXAMPLES / "arithmetic" / "without_control"
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    without = kept.pop("controls")
    # The demo keeps the same number of versions by default.
    assert kept["objective"].pop("snapshots") == config.resolved_objective.past_versions
    assert [control["name"] for control in demo["controls"]] == ["gac", "displacement"]
    assert all(map(holds, demo["controls"], without))
    assert len(without) == 1
    assert holds(demo, kept)
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == list(range(1, demo["run"]["steps"] + 1))
    assert run.summary.after < 0.5 * run.summary.before


def test_the_what_if_page_and_its_figure_are_made_from_their_stored_numbers(tmp_path):
    script = runpy.run_path(str(EXAMPLES / "arithmetic" / "what_if.py"))
    numbers = json.loads(script["NUMBERS"].read_text())
    assert script["page"](numbers) == script["PAGE"].read_text()
    script["draw"](numbers, tmp_path / "what_if.svg")
    assert (tmp_path / "what_if.svg").read_bytes() == script["FIGURE"].read_bytes()
    # The settings of the run differ from the demo's in what its commands name.
    demo = load(EXAMPLES / "arithmetic_cpu.yaml")
    without = load(EXAMPLES / "arithmetic_cpu.yaml", [script["WITHOUT"], *script["SETTINGS"]])
    control = load(EXAMPLES / "arithmetic_cpu.yaml", [script["CONTROL"]])
    assert control.controls == demo.controls
    assert without.controls == demo.controls[:1]
    assert without.policy.optimizer.lr == demo.policy.optimizer.lr


def test_the_readme_s_curve_is_drawn_from_its_stored_rewards(tmp_path):
    curve = runpy.run_path(str(EXAMPLES / "arithmetic" / "curve.py"))
    stored = EXAMPLES / "arithmetic" / "curve.csv"
    rewards = curve["read"](stored)

    curve["draw"](rewards, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_bytes() == stored.with_suffix(".svg").read_bytes()
    curve["write"](rewards, tmp_path / "curve.csv")
    assert (tmp_path / "curve.csv").read_bytes() == stored.read_bytes()

    kept = read_run(EXAMPLES / "arithmetic" / "without_control")
    drawn = rewards["without", "training"]
    assert drawn == {row["step"]: row["reward/mean"] for row in kept.rows}
    assert rewards["without", "held-out"][0] == rewards["with displacement control", "held-out"][0]
