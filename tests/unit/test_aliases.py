"""The error for a name of another library states its equivalent, or that it is not supported."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_async_rl.config.aliases import ALIASES
from megatron_async_rl.config.keys import elsewhere, walk
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError
from tests.cases import looped
from tests.written_run import write_run

KEYS = {section for section, _, _ in walk()} | {
    re.sub(r"\(\w+\)", "", leaf.key) for _, _, leaves in walk() for leaf in leaves
}


def fix_of(folder: Path, override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write_run(folder), [override])
    (problem,) = caught.value.problems
    return problem.fix


@looped(
    ("override", "says"),
    [
        ("objective.loss=grpo", "objective.advantage=grpo objective.loss=ppo_clip"),
        ("objective.loss=dapo", "objective.loss={name: ppo_clip, clip_high: 0.28}"),
        ("objective.loss=dr-grpo", "seq-mean-token-sum-norm"),
        ("objective.loss=ppo", "objective.advantage=gae"),
        ("objective.loss=tis", "tis is a value of `objective.corrections`"),
        ("objective.advantage=gac", "gac is a value of `controls`"),
        ("objective.loss=peft", "use `policy.lora`"),
        ("objective.loss=dpo", "training on pairs of responses is not supported"),
        ("model.lora={rank: 8}", "set it as `policy.lora`"),
        ("policy.lora={target_modules: [q_proj]}", "use `policy.lora.targets`"),
        ("objective.kl_coef=0.1", "use `objective.kl.coef`"),
        ("learning_rate=1e-5", "use `policy.optimizer.lr`"),
        ("policy.learning_rate=1e-5", "use `policy.optimizer.lr`"),
        ("policy.lr=1e-5", "`policy.optimizer.lr`"),
        ("flow.batch_size=8", "use `flow.prompts_per_step`"),
        (
            "policy.parallel.expert_tensor=2",
            "use `policy.parallel.expert`; each expert stays whole on one rank",
        ),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(
    tmp_path: Path, override: str, says: str
) -> None:
    assert says in fix_of(tmp_path, override)


def test_a_slip_of_the_pen_is_still_answered_with_the_nearest_name(tmp_path: Path) -> None:
    assert fix_of(tmp_path, "objective.loss=ppo_clipp").startswith("did you mean `ppo_clip`?")
    assert fix_of(tmp_path, "flow.group_sice=2") == "did you mean `flow.group_size`?"


@looped("name", sorted(ALIASES))
def test_every_alias_is_something_that_exists(tmp_path: Path, name: str) -> None:
    alias = ALIASES[name]
    assert alias.overrides or alias.keys or alias.note
    load(write_run(tmp_path), shlex.split(" ".join(alias.overrides)))
    named = [*alias.keys, *re.findall(r"`([\w.]+)`", alias.note)]
    assert [key for key in named if key not in KEYS] == []
    assert not elsewhere(name), "the schema has this key itself"
