"""A user's loss, advantage, correction and control: one file and one line each."""

import subprocess
import sys

import pytest
import torch
import yaml
from pydantic import ValidationError

from megatron_async_rl.config.load import load
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from megatron_async_rl.controls.decision import build_controls
from megatron_async_rl.objectives.objective import Objective
from tests.gradients import gradient, step
from tests.token_batches import decided, part_of
from tests.train_batches import columns, ragged_batch
from tests.written_run import config_tree

FILE = """
from typing import Any, ClassVar

import torch

from megatron_async_rl.config.advantages import AdvantageSettings
from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.config.corrections import CorrectionSettings
from megatron_async_rl.config.losses import LossSettings
from megatron_async_rl.controls.decision import Control, Decision
from megatron_async_rl.objectives.batch import Advantages, TokenLoss
from megatron_async_rl.objectives.method import AdvantageMethod, CorrectionMethod, LossMethod


def scaled(batch, settings):
    loss = -settings.factor * batch.advantages * batch.logp
    return TokenLoss(loss, torch.zeros_like(batch.mask, dtype=torch.bool))


class Scaled(LossSettings):
    method: ClassVar[Any] = LossMethod(scaled)
    name: str
    factor: float = 2.0


class Halved(CorrectionSettings):
    method: ClassVar[Any] = CorrectionMethod(
        lambda batch, settings: 0.5 * torch.ones_like(batch.mask)
    )
    compares_prox_with_behavior: ClassVar[bool] = False
    name: str


class Ones(AdvantageSettings):
    method: ClassVar[Any] = AdvantageMethod(lambda batch, settings: Advantages(batch.mask))
    name: str


class Slower(Control):
    def __init__(self, settings):
        self.settings = settings

    def apply(self, step):
        return Decision(lr_scale=self.settings.scale)


class SlowerSettings(ControlSettings):
    method: ClassVar[Any] = Slower
    scales_lr: ClassVar[bool] = True
    name: str
    scale: float = 0.5


class Nameless(LossSettings):
    method: ClassVar[Any] = LossMethod(scaled)


class Methodless(LossSettings):
    name: str


class Bare(LossSettings):
    method: ClassVar[Any] = scaled
    name: str


class Misplaced(LossSettings):
    method: ClassVar[Any] = AdvantageMethod(scaled)
    name: str


class Uncalled(LossSettings):
    method: ClassVar[Any] = LossMethod
    name: str


class BareControl(ControlSettings):
    method: ClassVar[Any] = scaled
    name: str
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def config(**objective):
    tree = config_tree()
    tree["objective"] = {**tree.get("objective", {}), **objective}
    return tree


def test_each_kind_of_method_is_added_by_one_file_and_one_line(folder):
    tree = config(
        loss={"name": "mine:Scaled", "factor": 3.0},
        advantage="mine:Ones",
        corrections=["mine:Halved"],
    )
    tree["controls"] = [{"name": "mine:SlowerSettings", "scale": 0.25}]
    chosen = validated(tree)
    objective, batch = Objective(chosen.objective), columns(ragged_batch())
    targets = decided(objective, batch, {})
    part = part_of(targets, range(len(targets.samples)))
    logp = part.logp_behavior.clone().requires_grad_()
    loss = objective.loss(part.replace(logp=logp), targets.denominators, corrected=False)
    loss.parts.sum().backward()
    trained = part.mask > 0
    expected = -3.0 * 0.5 * part.mask / int(trained.sum())
    torch.testing.assert_close(logp.grad, expected)
    (control,) = build_controls(chosen.controls).values()
    assert control.apply(step(gradient([1.0]))).lr_scale == 0.25


def test_a_config_with_plug_ins_survives_dump_and_load(folder):
    tree = config(loss={"name": "mine:Scaled", "factor": 3.0})
    tree["controls"] = ["mine:SlowerSettings"]
    chosen = validated(tree)
    dumped = chosen.model_dump(mode="json", warnings="error")
    assert dumped["objective"]["loss"] == {"name": "mine:Scaled", "factor": 3.0}
    assert validated(dumped) == chosen
    assert Config.model_validate(chosen.model_copy()) == chosen
    (folder / "again.yaml").write_text(yaml.safe_dump(dumped))
    assert load(folder / "again.yaml").objective.loss == chosen.objective.loss


def test_rules_also_apply_to_plug_ins(folder):
    tree = config()
    tree["controls"] = ["mine:SlowerSettings", "ess_lr"]
    with pytest.raises(ValidationError, match="both scale the learning rate"):
        validated(tree)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine:", "write, for example, my_loss:MyLoss"),
        ("nowhere:Loss", "importing nowhere failed: ModuleNotFoundError"),
        ("broken:Loss", "importing broken failed: ZeroDivisionError"),
        ("mine:Missing", "is not a subclass of LossSettings in that module"),
        ("mine:SlowerSettings", "is not a subclass of LossSettings in that module"),
        ("mine:Nameless", "no field `name: str`"),
        ("mine:Methodless", "no class attribute `method`; add it"),
        ("script:Loss", "importing script failed: SystemExit"),
        ("mine:Bare", "it must be an instance of megatron_async_rl.objectives.method.LossMethod"),
        ("mine:Misplaced", "it must be an instance of .*LossMethod"),
        ("mine:Uncalled", "it must be an instance of .*LossMethod"),
    ],
)
def test_an_invalid_plug_in_is_refused_with_the_reason(folder, name, reason):
    with pytest.raises(ValidationError, match=reason):
        validated(config(loss=name))


def test_a_control_that_is_a_function_is_refused_with_the_reason(folder):
    tree = config()
    tree["controls"] = ["mine:BareControl"]
    with pytest.raises(ValidationError, match=r"a subclass of .*\.decision\.Control"):
        validated(tree)


def test_a_wrong_setting_of_a_plug_in_names_its_line(folder):
    with pytest.raises(ValidationError) as refused:
        validated(config(loss={"name": "mine:Scaled", "fctor": 3.0}))
    assert refused.value.errors()[0]["loc"] == ("objective", "loss", "fctor")


def test_reading_a_configuration_without_plug_ins_imports_no_torch():
    code = (
        "import sys, megatron_async_rl.config.schema as s;"
        "s.ObjectiveConfig(loss='cispo');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
