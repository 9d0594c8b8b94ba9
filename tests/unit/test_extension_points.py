"""A control, a loss, an environment, a weight carrier and a model family are each added by one file
and at most one line elsewhere, and are then usable from a configuration."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config import weights
from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.config.keys import method_name, models_in
from megatron_async_rl.config.load import load
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import built_in_names, method_of
from megatron_async_rl.config.weights import CarrierCapabilities, WeightsConfig
from megatron_async_rl.controls.decision import build_controls
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.policy import families
from megatron_async_rl.policy.bridge import PolicyBridge
from megatron_async_rl.policy.families import unsupported
from megatron_async_rl.rollout import environments
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.transport import carrier
from tests.gradients import gradient, step
from tests.method_settings import models
from tests.token_batches import decided, part_of
from tests.train_batches import columns, ragged_batch
from tests.written_run import config_tree, write_run

CONTROL = """
from typing import Any, ClassVar

from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.controls.decision import Control, Decision


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


SETTINGS = SlowerSettings
"""
LOSS = """
from typing import Any, ClassVar

import torch

from megatron_async_rl.config.losses import LossSettings
from megatron_async_rl.objectives.batch import TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def scaled(batch, settings):
    loss = -settings.factor * batch.mask * batch.logp
    return TokenLoss(loss, torch.zeros_like(batch.mask, dtype=torch.bool))


class Scaled(LossSettings):
    method: ClassVar[Any] = LossMethod(scaled)
    uses_advantage: ClassVar[bool] = False
    name: str
    factor: float = 2.0


SETTINGS = Scaled
"""
ENVIRONMENT = """
from megatron_async_rl.rollout.environments import EpisodeStep


class Echo:
    def reset(self, prompt):
        return None

    def step(self, response):
        return EpisodeStep(observation=response, done=response == "bye")


ENVIRONMENT = Echo
"""
FAMILY = """
from megatron_async_rl.policy.families import NO_BIAS, Family


def bridge():
    from mbridge.models.llama import LLaMABridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Helium(PolicyBridge, LLaMABridge):
        pass

    return Helium


FAMILY = Family("helium", "HeliumForCausalLM", "Helium 1", bridge, only=NO_BIAS)
"""

CARRIER = """
from megatron_async_rl.weights.shared_memory import SharedMemory


class Pigeon(SharedMemory):
    pass


CARRIER = Pigeon
"""


@dataclass(frozen=True)
class Addition:
    """A file of the package, and the line that names it elsewhere: an entry of a table, which is
    the constant of a module."""

    package: str
    name: str
    text: str
    table: str = ""
    constant: str = ""
    entry: Any = None

    @property
    def lines_elsewhere(self) -> int:
        return self.entry is not None


ADDITIONS = {
    "control": Addition("controls", "slower", CONTROL),
    "loss": Addition("objectives.losses", "scaled", LOSS),
    "environment": Addition(
        "rollout.environments.built_in",
        "echo",
        ENVIRONMENT,
    ),
    "carrier": Addition(
        "weights",
        "pigeon",
        CARRIER,
        table="config.weights",
        constant="CARRIERS",
        entry=CarrierCapabilities(other_machines=True),
    ),
    "family": Addition("policy.families", "helium", FAMILY),
}


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with one more file in each of these folders."""
    for one in ADDITIONS.values():
        package = importlib.import_module(f"megatron_async_rl.{one.package}")
        folder = tmp_path / one.package
        folder.mkdir()
        (folder / f"{one.name}.py").write_text(one.text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        # Undone with the test, and with it the attribute of the parent package.
        monkeypatch.setattr(package, one.name, None, raising=False)
        if one.entry is not None:
            tables = importlib.import_module(f"megatron_async_rl.{one.table}")
            monkeypatch.setitem(getattr(tables, one.constant), one.name, one.entry)
    importlib.invalidate_caches()
    # Tables of files that are made at import.
    environment = "megatron_async_rl.rollout.environments.built_in.echo:ENVIRONMENT"
    monkeypatch.setitem(environments.BUILT_IN, "echo", environment)
    found = families.found_families()
    monkeypatch.setattr(families, "FAMILIES", found)
    yield
    for one in ADDITIONS.values():
        sys.modules.pop(f"megatron_async_rl.{one.package}.{one.name}", None)


def config(**sections: Any) -> Config:
    return validated({**config_tree(), **sections})


def test_each_kind_takes_one_file_and_at_most_one_line() -> None:
    assert all(one.lines_elsewhere <= 1 for one in ADDITIONS.values())
    assert sum(one.lines_elsewhere for one in ADDITIONS.values()) == 1


@pytest.mark.usefixtures("added")
def test_a_control_of_one_file_decides_about_the_step(tmp_path: Path) -> None:
    overrides = ["controls=[gac, slower]", "controls.1.scale=0.25"]
    chosen = load(write_run(tmp_path), overrides)
    assert validated(chosen.model_dump(mode="json", warnings="error")) == chosen
    control = build_controls(chosen.controls)["slower"]
    assert control.apply(step(gradient([1.0]))).lr_scale == 0.25


@pytest.mark.usefixtures("added")
def test_the_settings_and_rules_of_a_control_of_one_file_are_checked() -> None:
    with pytest.raises(ValidationError, match="scael"):
        config(controls=[{"name": "slower", "scael": 0.25}])
    with pytest.raises(ValidationError, match="both scale the learning rate"):
        config(controls=["slower", "ess_lr"])


@pytest.mark.usefixtures("added")
def test_a_loss_of_one_file_is_trained_with() -> None:
    loss = {"name": "scaled", "factor": 3.0}
    chosen = config(objective={"loss": loss, "advantage": "none", "corrections": []})
    objective, batch = Objective(chosen.objective), columns(ragged_batch())
    targets = decided(objective, batch, {})
    part = part_of(targets, range(len(targets.samples)))
    logp = part.logp_behavior.clone().requires_grad_()
    objective.loss(
        part.replace(logp=logp), targets.denominators, corrected=False
    ).parts.sum().backward()
    torch.testing.assert_close(logp.grad, -3.0 * part.mask / int((part.mask > 0).sum()))


@pytest.mark.usefixtures("added")
def test_an_environment_of_one_file_answers() -> None:
    tree = config_tree()
    tree["rollout"]["environment"] = {"name": "echo"}
    settings = validated(tree).rollout.environment
    environment = environments.load_factory(settings)()
    environment.reset(Prompt(id="p", text="", token_ids=(1,)))
    assert environments.checked_step(environment.step("hello"))["observation"] == "hello"
    assert environment.step("bye").done


def test_the_files_of_a_folder_are_the_built_in_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "built_in").mkdir()
    (tmp_path / "built_in" / "echo.py").write_text(ENVIRONMENT)
    again = ModuleType("environments_again")
    again.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, again.__name__, again)
    source = Path(environments.__file__).read_text(encoding="utf-8")
    exec(compile(source, "environments.py", "exec"), vars(again))
    assert again.BUILT_IN == {"echo": "environments_again.built_in.echo:ENVIRONMENT"}


@pytest.mark.usefixtures("added")
def test_a_carrier_of_one_file_and_one_line_is_chosen_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(carrier("pigeon"), SharedMemory)
    # The choices of the key are made at import, so the module runs again with one more line.
    source = Path(weights.__file__).read_text(encoding="utf-8")
    line = '    "pigeon": CarrierCapabilities(other_machines=True),\n'
    longer = source.replace('    "cuda_ipc": Carrier', f'{line}    "cuda_ipc": Carrier')
    assert len(longer.splitlines()) == len(source.splitlines()) + 1
    module = ModuleType("megatron_async_rl.config.weights_and_pigeon")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(longer, "weights.py", "exec"), vars(module))
    chosen = module.WeightsConfig.model_validate({"transport": "pigeon"})
    assert chosen.carrier.other_machines
    with pytest.raises(ValidationError, match="transport"):
        WeightsConfig.model_validate({"transport": "pigeon"})


@pytest.mark.usefixtures("added")
def test_a_family_of_one_file_is_chosen_by_its_architecture() -> None:
    model = {"model_type": "helium", "architectures": ["HeliumForCausalLM"]}
    assert unsupported(model) is None
    assert unsupported({**model, "attention_bias": True}).key == "attention_bias"
    assert issubclass(families.FAMILIES["helium"].bridge(), PolicyBridge)


def test_without_their_files_the_names_are_refused() -> None:
    for section in ({"controls": ["slower"]}, {"objective": {"loss": "scaled"}}):
        with pytest.raises(ValidationError, match="does not match any of the expected tags"):
            config(**section)
    assert unsupported({"model_type": "helium"}).key == "model_type"


def test_another_module_of_the_folder_is_not_a_method() -> None:
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        config(controls=["decision"])


def test_every_built_in_method_is_what_its_settings_require() -> None:
    for section in ("loss", "advantage", "corrections", "controls"):
        for model in models(section):
            relation, wanted = model.method_type
            method = method_of(model)
            classes = method.__mro__ if relation == "a subclass of" else type(method).__mro__
            names = [f"{one.__module__}.{one.__qualname__}" for one in classes]
            assert wanted in names, (section, model)


def test_built_in_names_are_those_of_the_configuration() -> None:
    annotation = Config.model_fields["controls"].annotation
    assert built_in_names(ControlSettings) == {method_name(one) for one in models_in(annotation)}
