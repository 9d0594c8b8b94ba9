"""Answers to the reward question of `mar init`, and the config sections that they become.

An answer is the name of a built-in reward or environment, `module:function` or `module:Class`, or
several of these joined by `+`. Every required setting gets a starting value and a comment.
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
    """A built-in reward or environment. `settings`: required settings with their starting values.
    `comment`: explains the settings and other requirements."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    comment: str = ""


# The error for an unknown name lists the names in this order.
REWARDS = {
    "math": Choice(comment="compares the response with the column `answer`"),
    "code": Choice(comment="runs the tests in the column `tests` in a sandbox"),
    "arithmetic": Choice(comment="the response must be the column `answer`, without other text"),
    "countdown": Choice(comment="reads the columns `numbers` and `target`"),
    "reasoning_gym": Choice(
        comment="the scorer of the task in `data`; tag: answer reads only the text in"
        " <answer>...</answer>"
    ),
    "judge": Choice(
        settings={"url": "http://localhost:8001/v1", "model": "Qwen/Qwen3-8B"},
        comment="url: an OpenAI-compatible endpoint with the judge; model: its name there;"
        " api_key_env: name of the environment variable with the API key",
    ),
    "http": Choice(
        settings={"url": "http://localhost:8000/reward"},
        comment="url: address of your reward server",
    ),
}
ENVIRONMENTS = {
    "tools": Choice(
        settings={"functions": "my_tools"},
        comment="functions: your module; the model may call each of its functions; tool_parser:"
        " value of `vllm serve --tool-call-parser` in the model's card",
    ),
    "agent": Choice(
        settings={"function": "my_agent:run"},
        comment="function: your function, called with the base URL of an OpenAI-compatible"
        " endpoint; returns the reward; or set `command`, a program",
    ),
    "verifiers": Choice(
        settings={"env": {"taskset": {"id": "my_tasks"}}, "task": "task"},
        comment="env: config of the environment in verifiers' format; task: column with the number"
        " of the row's task",
    ),
    "openenv": Choice(
        settings={"url": "http://localhost:8000", "action": "message", "observation": None},
        comment="url: address of your server; action: the field for the response; observation: the"
        " field that the model sees, null for all",
    ),
}
# These modules work without changes, so that `mar plan` accepts the first config.
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
"""Content of the modules that the settings above name; written if the module does not exist."""


def names_of(answer: str) -> list[str]:
    """Return the names in an answer. Raises ValueError for an unknown name, for a name that occurs
    twice, and for more than one environment."""
    names = [one.strip() for one in answer.split("+")]
    known = {**REWARDS, **ENVIRONMENTS}
    # The plan checks `module:function` by loading it.
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"{name!r} is unknown: {suggestion(name, known)}rewards are"
                f" {', '.join(REWARDS)} and module:function, environments"
                f" {', '.join(ENVIRONMENTS)} and module:Class; `+` joins several"
            )
    # The parts of a reward are named after these names, so they must be unique.
    if len(set(names)) < len(names):
        raise ValueError(f"{answer!r} contains a name twice")
    if len(found := [one for one in names if is_environment(one)]) > 1:
        raise ValueError(
            f"{' and '.join(found)} are environments, and a run has only one: keep one of them"
        )
    return names


def is_environment(name: str) -> bool:
    """Return True for a built-in environment, and for a class with the methods of one. False for a
    name that cannot be loaded: the plan reports the reason."""
    if ":" not in name:
        return name in ENVIRONMENTS
    module, _, attribute = name.partition(":")
    try:
        # The name alone does not distinguish a reward from an environment.
        found = getattr(registry.imported(module, name, registry.KEY), attribute, None)
    except (registry.RewardError, ValueError):
        return False
    return inspect.isclass(found) and hasattr(found, "reset") and hasattr(found, "step")


@dataclass(frozen=True)
class RewardChoice:
    """Names of rewards and of at most one environment, and the settings of each name."""

    names: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, answer: str, given: Sequence[str]) -> RewardChoice:
        """Return the choice for `answer` with the settings `given`, [NAME.]KEY=VALUE. NAME is the
        first name in the answer by default. Raises UserError for a setting, and ValueError for an
        answer that `names_of` refuses."""
        names = names_of(answer)
        known = {**REWARDS, **ENVIRONMENTS}
        # Copies, because all choices share the starting values.
        settings = {one: dict(known[one].settings) if one in known else {} for one in names}
        for one in given:
            name, key, value = _setting(one, names)
            settings[name][key] = value
        return cls(names, settings)

    @property
    def environment(self) -> str | None:
        return next((one for one in self.names if is_environment(one)), None)

    def starters(self) -> dict[Path, str]:
        """Return path and content of each module in STARTERS that the settings name and that does
        not exist. They belong into the current folder, from which Python imports them."""
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
        """Return the lines for the section `rollout`. `chat`: the model has a chat template."""
        environment = self.environment
        rewards = [one for one in self.names if one != environment]
        # `tools` does not provide a reward, and a config without a reward is refused.
        if environment == TOOLS and not rewards:
            rewards = ["math"]
        section = "" if environment is None else self._environment(environment, chat=chat)
        if not rewards:
            return section
        scored = "for the last turn, added to the environment's reward: " if environment else ""
        if len(rewards) == 1:
            comment = _comment((scored + self._comment(rewards[0])).removesuffix(": "))
            return f"{section}{comment}  reward: {_flow(self._reward(rewards[0]))}\n"
        parts = "".join(
            f"{_comment(self._comment(one), 6)}      {label}: {_flow(self._reward(one))}\n"
            for label, one in zip(_labels(rewards), rewards, strict=True)
        )
        more = f"{scored}the sum of the parts; `weight` and `gate`: {shipped('docs/rewards.md')}"
        return f"{section}{_comment(more)}  reward:\n    parts:\n{parts}"

    def _environment(self, name: str, *, chat: bool) -> str:
        tree: dict[str, Any] = {"name": name}
        if self.settings[name]:
            tree["settings"] = self.settings[name]
        # Without a chat template turns are joined as text. Agents always send messages.
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
            return tree  # the plan reports the error
        return tree | ({"per": "group"} if of_groups else {})


def _setting(setting: str, names: Sequence[str]) -> tuple[str, str, Any]:
    """Return (name of the reward or environment, key, value) of a setting [NAME.]KEY=VALUE."""
    path, separator, text = setting.partition("=")
    owner, dot, key = path.rpartition(".")
    # NAME may be the function of `module:function` alone; full names take precedence.
    short = {one.rpartition(":")[2]: one for one in names} | {one: one for one in names}
    name = short.get(owner) if dot else names[0]
    if not separator or not key.isidentifier():
        raise UserError.of(
            SETTING, f"{setting!r} is not KEY=VALUE", "write, for example, url=http://HOST:PORT"
        )
    # An unknown NAME is refused, because its setting would be lost.
    if name is None:
        hint = suggestion(owner, short)
        what = f"{owner!r} is not a name in --reward"
        raise UserError.of(SETTING, what, f"{hint}use one of the names {', '.join(names)}")
    try:
        return name, key, parse_value(text)
    except YamlFault as error:
        raise UserError.of(SETTING, f"{setting!r}: {error.what}", error.fix) from None


def _labels(names: Sequence[str]) -> list[str]:
    """Return unique names of the parts."""
    # Metrics are named after the parts, so other characters than letters and digits are replaced.
    short = [re.sub(r"\W", "_", one.rpartition(":")[2]).lstrip("_") or "part" for one in names]
    return [one if short.count(one) == 1 else f"{one}_{place}" for place, one in enumerate(short)]


def _comment(text: str, indent: int = 2) -> str:
    return f"{' ' * indent}# {text}\n" if text else ""


def _flow(tree: Mapping[str, Any]) -> str:
    return write(tree, one_line=True).strip()
