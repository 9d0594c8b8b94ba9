"""A first configuration from five answers, which `mar plan` accepts: model, data, reward, GPUs, style.

The layout is the first of a list, from the simplest on, that the plan has no fault with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_async_rl.config.environment import AGENTS, TOOLS
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, DataError, Problem, shipped
from megatron_async_rl.config.ratios import LONG_RESPONSE
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import YamlFault, parse_value
from megatron_async_rl.data.hub import located
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.plan.machine import Machine, described_machine, this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.reward_choice import SETTING, RewardChoice

TENSOR = (1, 2, 4, 8)
PROMPTS, GROUP, STEPS = 32, 8, 200

STYLES: Mapping[str, tuple[str, str]] = {
    "asynchronous": (
        "engines go on while the policy trains; stale samples are corrected",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 2}}
objective:
  loss: reinforce
  proximal: recompute
  corrections: [{{name: tis, level: {level}, cap: 2.0}}]
  snapshots: 3                   # the largest lag + 1
controls: [{{name: displacement, tolerated_kl: 0.02}}]
""",
    ),
    "clipped": (
        "the same with PPO's clip in the place of the correction: less memory, a narrower range of learning rates",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 2}}
objective: {{loss: {{name: ppo_clip, clip_high: 0.28}}}}
""",
    ),
    "synchronous": (
        "generate, train, generate: no sample is stale, and half of the devices wait",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 0}}
objective: {{loss: reinforce}}
""",
    ),
}
"""Name -> what it is, in words; its part of the file."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where prompts and answers stand in the data."""

    prompt_key: str = "prompt"
    answer_key: str = ""
    as_chat: bool = False

    def __str__(self) -> str:
        """As lines of the section `data`."""
        lines = [f"  prompt_key: {_scalar(self.prompt_key)}\n" * (self.prompt_key != "prompt")]
        lines += [f"  answer_key: {_scalar(self.answer_key)}\n" * bool(self.answer_key)]
        return "".join([*lines, "  as_chat: true\n" * self.as_chat])


@dataclass(frozen=True, kw_only=True)
class Answers:
    """`model`, `data`: local, or names on a hub. `gpus`: of this or of another machine, each of
    `gpu_memory_gib`; 0 trains on the CPU. `style`: one of STYLES."""

    model: str
    data: str
    columns: Columns
    reward: RewardChoice
    gpus: int
    gpu_memory_gib: float
    style: str


def write_config(answers: Answers, out: Path) -> list[Path]:
    """Writes `out`, and files of the user's own to begin with which the reward names. Returns them
    all. Raises ConfigError where the plan has a fault with every layout: then with the last one's
    faults."""
    starters = answers.reward.starters()
    try:
        for file, text in starters.items():
            file.write_text(text, encoding="utf-8")
        _write_accepted(answers, out)
    except BaseException:
        for file in starters:
            file.unlink(missing_ok=True)
        raise
    return [out, *starters]


def _write_accepted(answers: Answers, out: Path) -> None:
    first = next(_candidates(answers, out, 1))
    shape, faults = read_model(_loaded(first, out).model.path, weights=False)
    if shape is None:
        raise ConfigError(f"{out} was not written", faults)
    chat = _has_chat_template(_loaded(first, out).model.path)
    for text in _candidates(answers, out, shape.context // 2, chat=chat):
        faults = _faults(text, answers, out)
        if not faults:
            out.write_text(text, encoding="utf-8")
            return
        fixed = ("data", "rollout.reward", "rollout.environment")
        others = [one for one in faults if one.key.startswith(fixed)]
        if others or not any(one.key.startswith(("policy", "rollout")) for one in faults):
            # No layout would mend it.
            raise ConfigError(f"{out} was not written", [_by_option(one) for one in faults])
    raise ConfigError(f"{out} was not written: no layout fits", faults)


def _by_option(fault: Problem) -> Problem:
    """With the options that say it."""
    if fault.key.startswith(("rollout.reward.settings", "rollout.environment.settings")):
        fault = replace(fault, fix=f"{fault.fix} (here: {SETTING} KEY=VALUE)")
    for key, option in (
        ("data.prompt_key=", "--prompt-key "),
        ("data.answer_key=", "--answer-key "),
        ("data.messages_key=", "--prompt-key "),  # a prompt may be a list of messages
    ):
        fault = replace(fault, fix=fault.fix.replace(key, option))
    return fault


def _has_chat_template(model: Path) -> bool:
    """True, too, where it cannot be known: the model is elsewhere."""
    try:
        tokenizer = load_tokenizer(model)
    except DataError:
        return True
    try:
        tokenizer.render_chat([{"role": "user", "content": "0"}], answer=True)
    except DataError:
        return False
    except Exception:  # noqa: BLE001 - a template is a program; the plan names what it raises
        return True
    return True


def _faults(text: str, answers: Answers, out: Path) -> list[Problem]:
    """Faults of a file with this text, in the place of `out`: its paths start there."""
    machine: Machine = this_machine()
    if answers.gpus:
        machine = described_machine(
            gpus=answers.gpus, gpu_memory_gib=answers.gpu_memory_gib, nodes=1
        )
    return list(preflight(_loaded(text, out), all_data=False, machine=machine).problems)


def _loaded(text: str, out: Path) -> Config:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=out.parent, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            config = load(Path(file.name))
        except ConfigError as error:
            faults = [replace(one, where=None) for one in error.problems]
            raise ConfigError(f"{out} was not written", faults) from None
    return located(config, weights=False)[0]


def _candidates(answers: Answers, out: Path, longest: int, *, chat: bool = False) -> Iterator[str]:
    """`longest`: most response tokens; `chat`: the model has a chat template."""
    layouts: list[tuple[str, str]] = []
    gpus = answers.gpus
    if not gpus:
        layouts.append(("  device: cpu\n", "  kv_cache_gib: 1.0\n"))
    for tensor in TENSOR:
        for recompute in ("none", "full"):
            rows = f"  sequence: packed\n  recompute: {recompute}\n"
            if 2 * tensor <= gpus:
                ranks = gpus // 2 // tensor * tensor
                engines = (gpus - ranks) // tensor
                layouts.append(
                    (
                        f"  device: cuda\n  parallel: {_parallel(ranks, tensor)}\n{rows}",
                        f"  engines: {engines}\n  tensor: {tensor}\n",
                    )
                )
    for tensor in TENSOR:
        if gpus and gpus % tensor == 0:
            layouts.append(
                (
                    f"  device: cuda\n  parallel: {_parallel(gpus, tensor)}\n"
                    "  sequence: packed\n  recompute: full\n",
                    f"  placement: colocated\n  engines: {gpus // tensor}\n  tensor: {tensor}\n"
                    "  gpu_memory_utilization: 0.5\n",
                )
            )
    for policy, rollout in layouts:
        yield _text(answers, out, policy, rollout, longest, chat=chat)


def _parallel(ranks: int, tensor: int) -> str:
    words = f"ranks: {ranks}, tensor: {tensor}"
    return f"{{{words}, sequence: true}}" if tensor > 1 else f"{{{words}}}"


def _text(
    answers: Answers, out: Path, policy: str, rollout: str, longest: int, *, chat: bool
) -> str:
    meaning, method = STYLES[answers.style]
    folder = out.resolve().parent
    prompts, group = (PROMPTS, GROUP) if answers.gpus else (8, 8)
    tokens = min(1024 if answers.gpus else 64, longest)
    level = "token" if tokens > LONG_RESPONSE else "sequence"
    columns = answers.columns
    environment = answers.reward.environment
    if chat and environment is not None and environment not in AGENTS:  # those write messages
        columns = replace(columns, as_chat=True)
    own = "  tools_key: null              # the tools are those of rollout.environment\n"
    own = own if environment == TOOLS else ""
    place = f"--gpus {answers.gpus} --gpu-memory {answers.gpu_memory_gib:g}" if answers.gpus else ""
    return f"""# {answers.style.capitalize()}: {meaning}.
#   mar plan {f"{out.name} {place}".strip()}
#   mar train {out.name}
# Every key and its default: {shipped("docs/config.md")}
# Which method to start with: {shipped("docs/choosing_a_method.md")}
run: {{dir: runs/{out.stem}, steps: {STEPS}}}
model: {{path: {_scalar(_path(answers.model, folder))}, dtype: {"bfloat16" if answers.gpus else "float32"}}}
data:
  train: {_scalar(_path(answers.data, folder))}
{columns}{own}  # eval: held_out.jsonl         # the same fields; then `eval: {{every: 20}}` measures during the run
{method.format(prompts=prompts, group=group, level=level)}rollout:
{rollout}  sampling: {{temperature: 1.0, max_tokens: {tokens}}}
{answers.reward.lines(chat=chat)}policy:
{policy}  optimizer: {{lr: {"1.0e-6" if answers.gpus else "1.0e-5"}, warmup_steps: 5}}
"""


def _path(name: str, folder: Path) -> str:
    """As the file says it: from its own folder where the path lies in it."""
    if name.startswith("hf:"):
        return name
    path = Path(name).expanduser().resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _scalar(text: str) -> str:
    """As YAML: quoted where it would be read as something else, as a path with `, ` or ` #`."""
    try:
        plain = parse_value(f"{{key: {text}}}") == {"key": text}
    except YamlFault:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)
