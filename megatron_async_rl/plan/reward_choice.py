"""Answers to the question of `mar init` what a response is worth, as sections of the configuration:
rewards, servers and environments by their names or of a user's own, several joined by `+`.

Whatever a choice needs has a value to start from, and a comment that explains it.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import UserError, shipped, suggestion
from megatron_async_rl.config.rollout import AGENTS, TOOLS
from megatron_async_rl.config.yaml_tree import YamlFault, parse_value, write
from megatron_async_rl.rollout.rewards import registry

SETTING = "--setting"
AGENT_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`settings`: those that it cannot do without, with values to start from; `comment`: what to
    put there, and its other requirements."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    comment: str = ""


# Order of the list that an unknown name is answered with.
REWARDS = {
    "math": Choice(comment="compares with the column `answer`"),
    "code": Choice(comment="runs the column `tests`, in a sandbox"),
    "arithmetic": Choice(comment="is the column `answer`, and nothing else"),
    "countdown": Choice(comment="uses the columns `numbers` and `target`"),
    "judge": Choice(
        settings={"url": "http://localhost:8001/v1", "model": "Qwen/Qwen3-8B"},
        comment="url: of your judge, any OpenAI-compatible endpoint; model: its name there;"
        " api_key_env: the variable with its key",
    ),
    "http": Choice(
        settings={"url": "http://localhost:8000/reward"}, comment="url: of your reward server"
    ),
}
ENVIRONMENTS = {
    "tools": Choice(
        settings={"functions": "my_tools"},
        comment="functions: a module of yours, each of whose functions the model may call;"
        " tool_parser: as the model's card gives it for `vllm serve --tool-call-parser`",
    ),
    "agent": Choice(
        settings={"function": "my_agent:run"},
        comment="function: of yours, given the base URL of an OpenAI-compatible endpoint; returns"
        " the reward. Or `command`, a program",
    ),
    "verifiers": Choice(
        settings={"env": {"taskset": {"id": "my_tasks"}}, "task": "task"},
        comment="env: as verifiers has it; task: the column with the number of a row's task",
    ),
    "openenv": Choice(
        settings={"url": "http://localhost:8000", "action": "message", "observation": None},
        comment="url: of your server; action: the field that takes a response; observation: the"
        " field that is shown, null for all",
    ),
}
# Files that run as they are, so that the first config can be planned.
STARTERS = {
    "my_tools": '''"""Functions that the model may call: those without a leading underscore."""


def times(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b
''',
    "my_agent": '''"""An agent: calls the model as often as it needs, and returns the result."""

from openai import OpenAI


def run(prompt, base_url):
    client = OpenAI(base_url=base_url, api_key="unused")
    messages = [{"role": "user", "content": prompt.text}]
    answer = client.chat.completions.create(model="policy", messages=messages)
    return float(answer.choices[0].message.content.strip() == str(prompt.fields["answer"]))
''',
}
"""Contents of the modules that the settings above name, for a user who has none."""


def names_of(answer: str) -> list[str]:
    """The names in an answer. Raises ValueError for an unknown one."""
    names = [one.strip() for one in answer.split("+")]
    known = {**REWARDS, **ENVIRONMENTS}
    # `module:function` is checked when it is loaded, by the plan.
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"nothing is called {name!r}: {suggestion(name, known)}rewards are"
                f" {', '.join(REWARDS)} and module:function, environments"
                f" {', '.join(ENVIRONMENTS)} and module:Class; `+` joins several"
            )
    # Parts are named after their rewards, and names must be unique.
    if len(set(names)) < len(names):
        raise ValueError(f"{answer!r} names one of them twice")
    if len(found := [one for one in names if is_environment(one)]) > 1:
        raise ValueError(
            f"{' and '.join(found)} are environments, and a run has one: leave one out"
        )
    return names


def is_environment(name: str) -> bool:
    """True for a built-in one and for a class with its methods. False, too, for what cannot be
    loaded: the plan gives the reason."""
    if ":" not in name:
        return name in ENVIRONMENTS
    module, _, attribute = name.partition(":")
    try:
        # Importing decides: the name alone does not distinguish a reward from an environment.
        found = getattr(registry.imported(module, name, registry.KEY), attribute, None)
    except (registry.RewardError, ValueError):
        return False
    return inspect.isclass(found) and hasattr(found, "reset") and hasattr(found, "step")


@dataclass(frozen=True)
class RewardChoice:
    """`names`: of rewards, and of at most one environment; `settings`: of each."""

    names: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, answer: str, given: Sequence[str]) -> RewardChoice:
        """`given`: [NAME.]KEY=VALUE, without NAME of the answer's first. Raises UserError, and
        ValueError for an answer that `names_of` refuses."""
        names = names_of(answer)
        known = {**REWARDS, **ENVIRONMENTS}
        # Copies: the defaults are shared by all answers.
        settings = {one: dict(known[one].settings) if one in known else {} for one in names}
        for one in given:
            name, key, value = _setting(one, names)
            settings[name][key] = value
        return cls(names, settings)

    @property
    def environment(self) -> str | None:
        return next((one for one in self.names if is_environment(one)), None)

    def starters(self) -> dict[Path, str]:
        """Files of STARTERS that the settings name and Python does not find, for the folder in
        which they are looked for."""
        named = {
            str(one).partition(":")[0] for each in self.settings.values() for one in each.values()
        }
        here = Path.cwd()
        return {
            here / f"{module}.py": text
            for module, text in STARTERS.items()
            if module in named
            and not (here / f"{module}.py").exists()
            and importlib.util.find_spec(module) is None
        }

    def lines(self, *, chat: bool) -> str:
        """Lines of the section `rollout`. `chat`: the model has a chat template."""
        environment = self.environment
        rewards = [one for one in self.names if one != environment]
        # `tools` has no reward of its own, and a config without one is refused.
        if environment == TOOLS and not rewards:
            rewards = ["math"]
        found = "" if environment is None else self._environment(environment, chat=chat)
        if not rewards:
            return found
        of = (
            "of the last turn, added to what the environment gives: "
            if environment is not None
            else ""
        )
        if len(rewards) == 1:
            comment = _comment((of + self._comment(rewards[0])).removesuffix(": "))
            return f"{found}{comment}  reward: {_flow(self._reward(rewards[0]))}\n"
        parts = "".join(
            f"{_comment(self._comment(one), 6)}      {label}: {_flow(self._reward(one))}\n"
            for label, one in zip(_labels(rewards), rewards, strict=True)
        )
        more = f"{of}the sum of the parts; `weight`, `gate`: {shipped('docs/rewards.md')}"
        return f"{found}{_comment(more)}  reward:\n    parts:\n{parts}"

    def _environment(self, name: str, *, chat: bool) -> str:
        tree: dict[str, Any] = {"name": name}
        if self.settings[name]:
            tree["settings"] = self.settings[name]
        # Without a chat template turns are joined as text; agents always send chats.
        if not chat and name not in AGENTS:
            tree["format"] = "text"
        tree["max_turns"] = 8
        if name in (TOOLS, *AGENTS):
            tree["tool_parser"] = "hermes"
        if name in AGENTS:
            tree["timeout_s"] = AGENT_TIMEOUT_S
        comment = ENVIRONMENTS[name].comment if name in ENVIRONMENTS else ""
        more = f"more: {shipped('docs/environments.md')}"
        return f"{_comment(comment)}{_comment(more)}  environment: {_flow(tree)}\n"

    def _comment(self, name: str) -> str:
        return f"{name}: {REWARDS[name].comment}" if name in REWARDS else ""

    def _reward(self, name: str) -> dict[str, Any]:
        settings = self.settings.get(name) or {}
        tree: dict[str, Any] = {"name": name} | ({"settings": settings} if settings else {})
        try:
            of_groups = registry.load_reward(name, settings).of_groups
        except registry.RewardError:
            return tree  # the plan gives the reason
        return tree | ({"per": "group"} if of_groups else {})


def _setting(given: str, names: Sequence[str]) -> tuple[str, str, Any]:
    """Name of the reward or environment that the setting belongs to, its key and its value."""
    path, separator, text = given.partition("=")
    owner, dot, key = path.rpartition(".")
    # A setting may name `module:function` by its function; a full name wins.
    short = {one.rpartition(":")[2]: one for one in names} | {one: one for one in names}
    name = short.get(owner) if dot else names[0]
    if not separator or not key.isidentifier():
        raise UserError.of(
            SETTING, f"{given!r} is not KEY=VALUE", "write such as url=http://HOST:PORT"
        )
    # An unknown owner is refused: its setting would be lost.
    if name is None:
        hint = suggestion(owner, short)
        what = f"{owner!r} is not in the answer to --reward"
        raise UserError.of(SETTING, what, f"{hint}settings are those of {', '.join(names)}")
    try:
        return name, key, parse_value(text)
    except YamlFault as error:
        raise UserError.of(SETTING, f"{given!r}: {error.what}", error.fix) from None


def _labels(names: Sequence[str]) -> list[str]:
    """Unique names of the parts, which are metrics."""
    short = [re.sub(r"\W", "_", one.rpartition(":")[2]).lstrip("_") or "part" for one in names]
    # Metric names must be unique and hold no colon.
    return [one if short.count(one) == 1 else f"{one}_{place}" for place, one in enumerate(short)]


def _comment(text: str, indent: int = 2) -> str:
    return f"{' ' * indent}# {text}\n" if text else ""


def _flow(tree: Mapping[str, Any]) -> str:
    return write(tree, one_line=True).strip()
