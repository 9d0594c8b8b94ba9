"""A control, a loss, an environment, a weight carrier and a model family are each added by one file
and at most one line elsewhere, and are then usable from a configuration."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import megatron_async_rl
from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.config.keys import method_name, models_in
from megatron_async_rl.config.load import load
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import built_in_names, method_of
from megatron_async_rl.controls.decision import build_controls
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.policy import families
from megatron_async_rl.policy.bridge import PolicyBridge
from megatron_async_rl.policy.families import unsupported
from megatron_async_rl.rollout import environments
from megatron_async_rl.samples.types import Prompt
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


ADDITIONS = {
    "controls/slower.py": CONTROL,
    "objectives/losses/scaled.py": LOSS,
    "rollout/environments/built_in/echo.py": ENVIRONMENT,
    "weights/pigeon.py": CARRIER,
    "policy/families/helium.py": FAMILY,
}
"""Files of the package -> their text."""
LINE = '    "pigeon": CarrierCapabilities(agents="relay_agents"),\n'
"""The only line elsewhere: the carrier's name and capabilities in config/weights.py."""
BEFORE = '    "cuda_ipc": Carrier'
PACKAGE = Path(megatron_async_rl.__file__).parent


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with one more file in each of these folders."""
    modules = {}
    for file, text in ADDITIONS.items():
        parent, name = (f"megatron_async_rl/{file}".replace("/", ".")[:-3]).rsplit(".", 1)
        package = importlib.import_module(parent)
        modules[f"{parent}.{name}"] = package
        folder = tmp_path / parent
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        # Undone with the test, and with it the attribute of the parent package.
        monkeypatch.setattr(package, name, None, raising=False)
    importlib.invalidate_caches()
    # Tables of files that are made at import.
    environment = "megatron_async_rl.rollout.environments.built_in.echo:ENVIRONMENT"
    monkeypatch.setitem(environments.BUILT_IN, "echo", environment)
    found = families.found_families()
    monkeypatch.setattr(families, "FAMILIES", found)
    yield
    for module in modules:
        sys.modules.pop(module, None)


USE = """
import asyncio
import json
from pathlib import Path

import torch

import megatron_async_rl
from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.config.losses import LossSettings
from megatron_async_rl.config.settings_model import plug_in_class
from megatron_async_rl.config.weights import WeightsConfig
from megatron_async_rl.policy.families import FAMILIES
from megatron_async_rl.rollout.environments import BUILT_IN
from megatron_async_rl.weights.agents import AgentSpec
from megatron_async_rl.weights.manifest import BucketRef, Manifest
from megatron_async_rl.weights.relay_agents import RelayActor
from megatron_async_rl.weights.relay_server import RelayServer
from megatron_async_rl.weights.staging import Staging
from megatron_async_rl.weights.transport import ShardSlice, TensorSpec, carrier

weights = WeightsConfig(transport="pigeon")
memory = carrier("pigeon")
tensor = torch.arange(6.0).reshape(2, 3)
staging = Staging(memory)
part = ShardSlice.whole("w", tensor)
manifest = staging.stage(1, [[TensorSpec.of("w", tensor)]], [part])
server = RelayServer("127.0.0.1", 60.0)
server.stage(1, manifest)
spec = AgentSpec(
    index=0, machine="there", log_dir=Path("."), transport="pigeon", silence_s=60.0
)
agent = RelayActor(spec, server.address)
copy = asyncio.run(agent.fetch(1, manifest))
(bucket,) = copy.manifest.buckets
((name, arrived),) = memory.reader().read(bucket)
used = {
    "package": str(Path(megatron_async_rl.__file__).parent),
    "moved": [name, arrived.tolist()],
    "memory": [type(one).__name__ for one in (memory, agent._agent._slots[0]._carrier)],
    "methods": [
        plug_in_class("slower", ControlSettings).__name__,
        plug_in_class("scaled", LossSettings).__name__,
    ],
    "names": ["echo" in BUILT_IN, "helium" in FAMILIES],
    "other_machines": weights.carrier.other_machines,
}
asyncio.run(agent.close())
staging.close()
server.close()
Path("used.json").write_text(json.dumps(used))
"""


def contents(folder: Path) -> dict[str, list[str]]:
    """Return the lines of every Python file in `folder`, without the copies of the examples, which
    an installation adds."""
    return {
        str(file.relative_to(folder)): file.read_text(encoding="utf-8").splitlines()
        for file in folder.rglob("*.py")
        if file.relative_to(folder).parts[0] != "share"
    }


def test_each_kind_takes_one_file_and_at_most_one_line(tmp_path: Path) -> None:
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "share"))
    for file, text in ADDITIONS.items():
        (copy / file).write_text(text)
    weights_file = copy / "config" / "weights.py"
    source = weights_file.read_text(encoding="utf-8")
    assert source.count(BEFORE) == 1
    weights_file.write_text(source.replace(BEFORE, LINE + BEFORE))

    before, after = contents(PACKAGE), contents(copy)
    assert {file for file in after if file not in before} == set(ADDITIONS)
    changed = [file for file in before if after[file] != before[file]]
    assert changed == ["config/weights.py"]
    (file,) = changed
    assert len(after[file]) == len(before[file]) + 1

    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    log = tmp_path / "pigeon-0.log"
    output = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert done.returncode == 0, output
    used = json.loads((tmp_path / "used.json").read_text())
    assert used == {
        "package": str(copy),
        "moved": ["w", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]],
        "memory": ["Pigeon", "Pigeon"],
        "methods": ["SlowerSettings", "Scaled"],
        "names": [True, True],
        "other_machines": True,
    }


def config(**sections: Any) -> Config:
    return validated({**config_tree(), **sections})


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
