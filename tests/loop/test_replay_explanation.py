"""`mar replay --explain` of whole runs: shares of samples, groups, tokens and parameters."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import read_metrics
from tests.loop.one_process import Engines, LoopEngine, OneProcess, varied
from tests.loop.replays import killed_and_resumed, repeated, replaying, run


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with replaying(tmp_path_factory.mktemp("replays")) as process:
        yield process


@pytest.fixture(scope="module")
def resumed(loop: OneProcess) -> Path:
    return killed_and_resumed(loop)


@pytest.fixture(scope="module")
def explained(resumed: Path) -> tuple[Path, str]:
    """Directory and output of a replay that explains step 4 from the checkpoint of step 2."""
    out = resumed.parent / "explained"
    code, shown = repeated(resumed, explained=4, out=out)
    assert code == 0
    return out, shown


def test_an_explained_step_keeps_its_bits_and_its_samples_add_up(
    resumed: Path, explained: tuple[Path, str]
) -> None:
    out, shown = explained
    assert "step 3 was kept, so the replay begins at step 3\n2 steps, identical bits\n" in shown
    content = json.loads((out / "explanation.json").read_text())
    (update,) = content["updates"]
    (row,) = [row for row in read_metrics(resumed) if row["step"] == content["step"] == 4]
    assert update["norm"] == pytest.approx(row["policy/grad_norm"], rel=1e-5)
    assert update["loss"] == row["policy/loss"]
    assert sum(one["share"] for one in update["parameters"]) == pytest.approx(1.0, abs=1e-2)
    assert update["sum_of_shares"] == pytest.approx(1.0, rel=1e-5)
    samples, groups = update["samples"], update["groups"]
    assert len(samples) == 2 * len(groups) == 8
    for of_all in (samples, groups):
        assert sum(one["share"] for one in of_all) == pytest.approx(1.0, rel=1e-5)
        assert sum(one["norm_share"] for one in of_all) == pytest.approx(1.0)
        norms = [one["norm"] for one in of_all]
        assert norms == sorted(norms, reverse=True)
    for group in groups:
        members = [one for one in samples if one["group"] == group["group"]]
        rewards = [one["reward"] for one in members]
        assert sum(one["share"] for one in members) == pytest.approx(group["share"], abs=1e-6)
        assert group["norm"] <= sum(one["norm"] for one in members) * (1 + 1e-6)
        # Equal rewards have no advantage, so these samples make no gradient.
        assert (len(set(rewards)) == 1) == (group["norm"] == 0.0)


def test_an_explained_token_has_the_derivative_of_the_loss_by_its_log_prob(
    explained: tuple[Path, str],
) -> None:
    out, shown = explained
    (update,) = json.loads((out / "explanation.json").read_text())["updates"]
    tokens = update["tokens"]
    assert tokens
    for token in tokens:
        ids = update["texts"][token["sample"]]
        assert token["token_id"] == ids["response_ids"][token["position"]]
        # A surrogate loss over 8 samples of 2 tokens, without the tokens that the clip leaves out.
        ratio = math.exp(token["log_ratio"])
        assert token["derivative"] == pytest.approx(-token["advantage"] * ratio / 16, rel=1e-4)
        # The model is almost uniform: |d logp / d logits| is close to 1.
        assert 0.8 < token["size"] / abs(token["derivative"]) < 1.0
        assert ids["prompt"] == "5 + 5 =" or ids["prompt"].endswith("=")
    sizes = [token["size"] for token in tokens]
    assert sizes == sorted(sizes, reverse=True)
    assert f"largest shares of its square: {update['parameters'][0]['name']}" in shown
    assert f"all samples and more tokens: {out / 'explanation.json'}" in shown


def test_an_explanation_of_each_optimizer_step_leaves_dropout_as_it_was(loop: OneProcess) -> None:
    """The second minibatch's dropout follows the explanation of the first."""
    config = loop.config(
        "dropout",
        "run.steps=2",
        "flow.async_ratio=0",
        "checkpoint.every=1",
        "objective.minibatches=2",
        "policy.lora={rank: 2, alpha: 4, dropout: 0.5}",
    )
    run_dir = run(loop, config)
    code, shown = repeated(run_dir, explained=2)
    assert (code, shown.splitlines()[1]) == (0, "1 step, identical bits")
    content = json.loads((run_dir / "replays" / "1" / "explanation.json").read_text())
    assert len(content["updates"]) == 2
    assert "gradient of step 2, optimizer step 2, before the controls:" in shown


def test_a_step_on_given_responses_is_explained(loop: OneProcess, tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    rows = [{"prompt": f"{n} + {n} =", "response": str(2 * n)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = loop.config(
        "given",
        "run.steps=1",
        "rollout=null",
        "eval=null",
        "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}",
        f"data={{train: {data}}}",
        "objective={loss: sft, advantage: none}",
    )
    run_dir = run(loop, config)
    code, shown = repeated(run_dir, explained=1)
    assert code == 0
    assert "1 step, identical bits" in shown
    content = json.loads((run_dir / "replays" / "1" / "explanation.json").read_text())
    (update,) = content["updates"]
    assert update["sum_of_shares"] == pytest.approx(1.0, rel=1e-5)
    # The loss is the mean of -log p.
    tokens = sum(one["length"] for one in update["samples"])
    assert {round(-1 / one["derivative"]) for one in update["tokens"]} == {tokens}


def test_a_step_without_a_gradient_has_no_explanation(loop: OneProcess, tmp_path: Path) -> None:
    def prepare(engine: LoopEngine) -> None:
        engine.alter = lambda sample: replace(varied(sample), loss_mask=sample.loss_mask * 0)

    config = loop.config("nothing to learn", "flow.async_ratio=0", "run.steps=1")
    run_dir = run(loop, config, engines=Engines(prepare=prepare))
    code, shown = repeated(run_dir, explained=1, out=tmp_path / "own")
    assert code == 0
    assert "step 1 has no gradient to explain" in shown


def test_only_a_recorded_step_is_explained(resumed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--explain\n.*last recorded step is 6"):
        repeated(resumed, explained=7)
    with pytest.raises(UserError, match=r"--explain\n(.*\n)*.*leave out --from"):
        repeated(resumed, first=2, explained=4)
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    shutil.rmtree(run_dir / "samples")
    with pytest.raises(UserError, match="no log of its samples"):
        repeated(run_dir, explained=4)
