"""A first config from the answers of `mar init`, with the simplest layout that `mar plan` accepts.

Invariants:
- a config with a colocated layout is synchronous, because no engine samples while the policy
  trains. If another style was requested, a note reports the change;
- if no config is accepted, no file is left behind.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_async_rl.config.data import TASK_PREFIX
from megatron_async_rl.config.load import load
from megatron_async_rl.config.losses import LONG_RESPONSE
from megatron_async_rl.config.problem import (
    ConfigError,
    DataError,
    Problem,
    UserError,
    number_of,
    shipped,
)
from megatron_async_rl.config.rollout import AGENTS, TOOLS
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import YamlFault, parse_value
from megatron_async_rl.data.hub import fetch, located, name_of, parse
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.plan.held_out import MAX_HELD_OUT, Split, split_off
from megatron_async_rl.plan.host import free_memory_problems
from megatron_async_rl.plan.init_layouts import (
    SYNCHRONOUS,
    InitLayout,
    InitSizes,
    init_layouts,
)
from megatron_async_rl.plan.machine import Machine, described_machine, this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.preflight import longest_samples, preflight
from megatron_async_rl.plan.reward_choice import SETTING, RewardChoice

PROMPTS, GROUP, STEPS = 32, 8, 200
EVALUATE_EVERY = 20
RESPONSE_TOKENS = {
    ("gpu", True): 8192,
    ("gpu", False): 1024,
    ("cpu", True): 2048,
    ("cpu", False): 256,
}
"""rollout.sampling.max_tokens by (device, the model thinks before it answers). A response that ends
within its thoughts has no answer, and therefore no reward."""
LAYOUT_KEYS = ("policy", "rollout", "host memory")
"""Prefixes of the keys of problems that depend on the layout."""

STYLES: Mapping[str, tuple[str, str]] = {
    "asynchronous": (
        "engines keep sampling while the policy trains; stale samples are corrected",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 2}}
objective:
  loss: reinforce
  proximal: recompute
  corrections: [{{name: tis, level: {level}, cap: 2.0}}]
controls: [{{name: displacement, tolerated_kl: 0.02}}]
""",
    ),
    "clipped": (
        "like asynchronous, with PPO's clip instead of the correction: less memory, a narrower"
        " range of learning rates",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 2}}
objective: {{loss: {{name: ppo_clip, clip_high: 0.28}}}}
""",
    ),
    SYNCHRONOUS: (
        "sampling and training alternate: no sample is stale",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 0}}
objective: {{loss: reinforce}}
""",
    ),
}
"""(description, lines of the config file) by name. The lines are a format string."""


@dataclass(frozen=True, kw_only=True)
class InitColumns:
    """Settings of the section `data` on columns."""

    prompt_key: str = "prompt"
    answer_key: str = ""
    as_chat: bool = False

    def __str__(self) -> str:
        """Return the lines of the section `data`."""
        lines = [f"  prompt_key: {_scalar(self.prompt_key)}\n" * (self.prompt_key != "prompt")]
        lines += [f"  answer_key: {_scalar(self.answer_key)}\n" * bool(self.answer_key)]
        return "".join([*lines, "  as_chat: true\n" * self.as_chat])


@dataclass(frozen=True, kw_only=True)
class InitAnswers:
    """Answers to all questions of `mar init`."""

    model: str
    """A path, or a name on a hub."""
    data: str
    """A path, or a name on a hub."""
    held_out: str | float | None
    """A path, a name on a hub, or the share of `data` to split off; null for no held-out data."""
    columns: InitColumns
    reward: RewardChoice
    gpus: int
    """Number of GPUs of this or another machine; 0 trains on the CPU."""
    gpu_memory_gib: float
    """Memory of each GPU in GiB."""
    style: str
    """A key of STYLES."""


@dataclass(frozen=True, kw_only=True)
class InitFiles:
    """The files that `write_config` wrote, the config first, and notes for the user."""

    files: Sequence[Path]
    notes: Sequence[str]


def write_config(answers: InitAnswers, out: Path) -> InitFiles:
    """Write the config `out`, the two parts of split data, and starter files that the reward uses.
    Raises ConfigError with the problems of the last layout if the plan accepts none, and UserError
    if the data cannot be split."""
    # Files first: the plan checks the config by loading the files that it names.
    starters = answers.reward.starters()
    split: Split | None = None
    notes: list[str] = []
    try:
        for file, text in starters.items():
            file.write_text(text, encoding="utf-8")
        if isinstance(answers.held_out, float):
            split = _split(answers, answers.held_out, out)
            answers = replace(answers, held_out=None)
            if split is None:
                notes.append("the data has no two distinct prompts, so none is held out")
            else:
                answers = replace(answers, data=str(split.train), held_out=str(split.held_out))
                notes.append(_split_note(split))
        notes += _write_accepted(answers, out)
    # Also on Ctrl-C.
    except BaseException:
        for file in starters:
            file.unlink(missing_ok=True)
        if split is not None:
            split.remove()
        raise
    files = [out, *([split.train, split.held_out] if split is not None else []), *starters]
    return InitFiles(files=files, notes=notes)


def _split(answers: InitAnswers, share: float, out: Path) -> Split | None:
    """Split the data into two files in a folder next to `out`."""
    name = parse(Path(answers.data))
    data = fetch("data.train", name) if name is not None else Path(answers.data).expanduser()
    folder = out.parent / f"{out.stem}_data"
    try:
        return split_off(data, share, answers.columns.prompt_key, folder)
    except DataError as error:
        raise UserError("", [error.problem("data.train")]) from error
    except OSError as error:
        what = f"{folder}: {error.strerror or error}"
        raise UserError.of(
            "--eval", what, "name held-out data, or OUT in another folder"
        ) from error


def _split_note(split: Split) -> str:
    maximum = f" (at most {MAX_HELD_OUT} prompts)" if split.held_out_rows >= MAX_HELD_OUT else ""
    return (
        f"held-out rows: {split.held_out_rows}{maximum}, training rows: {split.train_rows}; rows"
        " with the same prompt are on the same side"
    )


def _write_accepted(answers: InitAnswers, out: Path) -> list[str]:
    """Write the first candidate that the plan accepts. Return notes on it."""
    # All candidates have the same model and data; loading one of them resolves paths and hub names.
    first = next(init_layouts(answers.gpus, answers.style))
    config = _loaded(_text(answers, out, first, InitSizes(response=1), chat=False), out)
    model = config.model.path
    shape, problems = read_model(model, weights=False)
    if shape is None:
        raise ConfigError(f"{out} was not written", problems)
    chat, device = _has_chat_template(model), "gpu" if answers.gpus else "cpu"
    response = min(RESPONSE_TOKENS[device, thinks(model)], shape.context // 2)
    whole = _text(answers, out, first, InitSizes(response=response), chat=chat)
    trained, held_out = longest_samples(_loaded(whole, out), shape)
    for layout in init_layouts(answers.gpus, answers.style, trained):
        sizes = InitSizes.of(
            shape, layout, response, max(trained, held_out), on_gpu=bool(answers.gpus)
        )
        text = _text(answers, out, layout, sizes, chat=chat)
        problems = _problems(text, answers, out)
        if not problems:
            out.write_text(text, encoding="utf-8")
            return _style_notes(answers, layout)
        # No other layout would fix these problems, and each check includes a trial of the reward.
        if not any(_depends_on_layout(one) for one in problems):
            break
    # Problems of the last layout only: those that another layout fixes are not reported.
    reason = ": no layout fits" if any(_depends_on_layout(one) for one in problems) else ""
    raise ConfigError(f"{out} was not written{reason}", [_by_option(one) for one in problems])


def _depends_on_layout(problem: Problem) -> bool:
    """Return True if another layout may fix the problem."""
    other = ("rollout.reward", "rollout.environment")
    return problem.key.startswith(LAYOUT_KEYS) and not problem.key.startswith(other)


def _style_notes(answers: InitAnswers, layout: InitLayout) -> list[str]:
    """Return the note on a config that is synchronous although another style was requested."""
    if not layout.colocated or answers.style == SYNCHRONOUS:
        return []
    return [f"the config is synchronous instead of {answers.style}: {_why_colocated(answers)}"]


def _why_colocated(answers: InitAnswers) -> str:
    which = number_of("GPU", answers.gpus)
    return (
        f"only a colocated layout fits {which} of {answers.gpu_memory_gib:g} GiB, and its engines"
        " sleep while the policy trains"
    )


def _by_option(problem: Problem) -> Problem:
    """Return the problem with a fix that names options of `mar init` instead of config keys."""
    if problem.key.startswith(("rollout.reward.settings", "rollout.environment.settings")):
        problem = replace(problem, fix=f"{problem.fix} (here: {SETTING} KEY=VALUE)")
    for key, option in (
        ("data.eval=", "--eval "),
        ("data.prompt_key=", "--prompt-key "),
        ("data.answer_key=", "--answer-key "),
        # A prompt may be a list of messages, and no option is named after them.
        ("data.messages_key=", "--prompt-key "),
    ):
        problem = replace(problem, fix=problem.fix.replace(key, option))
    return problem


def _has_chat_template(model: Path) -> bool:
    """Return True if the model can render a chat, and if its files are not here."""
    try:
        tokenizer = load_tokenizer(model)
    except DataError:
        return True
    try:
        # Rendering is the only reliable test: a template may refuse every message.
        tokenizer.render_chat([{"role": "user", "content": "0"}], answer=True)
    except DataError:
        return False
    except Exception:  # noqa: BLE001 - a template is a program; the plan reports its error
        return True
    return True


def _problems(text: str, answers: InitAnswers, out: Path) -> list[Problem]:
    """Return the problems of the config `text`, as if it were the file `out`."""
    machine: Machine = this_machine()
    if answers.gpus:
        machine = described_machine(
            gpus=answers.gpus, gpu_memory_gib=answers.gpu_memory_gib, nodes=1
        )
    config = _loaded(text, out)
    plan = preflight(config, all_data=False, machine=machine)
    # `mar train` checks the free memory, too. Programs that run now may have ended by then.
    crowded = free_memory_problems(config, machine, plan.device, plan.hosts, idle=True)
    return [*plan.problems, *crowded]


def _loaded(text: str, out: Path) -> Config:
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the folder of `out`, because relative paths in a config start from its folder.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=out.parent, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            config = load(Path(file.name))
        except ConfigError as error:
            # Without line numbers, which refer to the temporary file.
            problems = [replace(one, where=None) for one in error.problems]
            raise ConfigError(f"{out} was not written", problems) from None
    return located(config, weights=False)[0]


def _text(
    answers: InitAnswers, out: Path, layout: InitLayout, sizes: InitSizes, *, chat: bool
) -> str:
    """Return the text of the config. `chat`: the model has a chat template."""
    style = SYNCHRONOUS if layout.colocated else answers.style
    meaning, method = STYLES[style]
    if style == SYNCHRONOUS and layout.colocated:
        meaning += "; engines and policy share the GPUs"
    elif style == SYNCHRONOUS and answers.gpus:
        meaning += ", and half of the GPUs idle at any time"
    why = "" if style == answers.style else f"# Not {answers.style}: {_why_colocated(answers)}.\n"
    folder = out.resolve().parent
    prompts, group = (PROMPTS, GROUP) if answers.gpus else (8, 8)
    # The samples of a batch must divide over the replicas, also for 3 or 6 GPUs.
    multiple = layout.replicas // math.gcd(layout.replicas, group)
    prompts = -(-prompts // multiple) * multiple
    # A sequence-level ratio of a long response is a product dominated by rounding errors.
    level = "token" if sizes.response > LONG_RESPONSE else "sequence"
    columns = answers.columns
    environment = answers.reward.environment
    # Agents apply the chat template themselves: they send messages.
    if chat and environment is not None and environment not in AGENTS:
        columns = replace(columns, as_chat=True)
    no_tools = "  tools_key: null              # rollout.environment provides the tools\n"
    no_tools = no_tools if environment == TOOLS else ""
    place = f"--gpus {answers.gpus} --gpu-memory {answers.gpu_memory_gib:g}" if answers.gpus else ""
    dtype, lr = ("bfloat16", "1.0e-6") if answers.gpus else ("float32", "1.0e-5")
    name = shlex.quote(out.name)
    settings = method.format(prompts=prompts, group=group, level=level)
    return f"""# {style.capitalize()}: {meaning}.
{why}#   mar plan {f"{name} {place}".strip()}
#   mar train {name}
# Every key and its default: {shipped("docs/config.md")}
# Which method to start with: {shipped("docs/choosing_a_method.md")}
run: {{dir: {_scalar(f"runs/{out.stem}")}, steps: {STEPS}}}
model: {{path: {_scalar(_path(answers.model, folder))}, dtype: {dtype}}}
data:
  train: {_scalar(_path(answers.data, folder))}
{columns}{no_tools}{_held_out(answers, folder)}{settings}rollout:
{sizes.rollout}{layout.rollout}  sampling: {{temperature: 1.0, max_tokens: {sizes.response}}}
{answers.reward.lines(chat=chat)}policy:
{layout.policy}{sizes.policy}  optimizer: {{lr: {lr}, warmup_steps: 5}}
"""


def _held_out(answers: InitAnswers, folder: Path) -> str:
    """Return the end of the section `data` and the section `eval`; comments without held-out
    data."""
    section = f"eval: {{every: {EVALUATE_EVERY}, samples_per_prompt: 1}}"
    if not isinstance(answers.held_out, str):
        return f"  # eval: held_out.jsonl         # same columns; also add a section `{section}`\n"
    return f"  eval: {_scalar(_path(answers.held_out, folder))}\n{section}\n"


def _path(name: str, folder: Path) -> str:
    """Return the path for the config file in `folder`: relative if it is inside the folder. A name
    on a hub or of a task is returned as it is."""
    if name.startswith(("hf:", TASK_PREFIX)):
        return name
    path = Path(name).expanduser().resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _scalar(text: str) -> str:
    """Return `text` as a YAML scalar, quoted if YAML would read it as something else, such as a
    path with `, ` or ` #`."""
    try:
        # Parsed as YAML, because any list of characters that require quotes would be incomplete.
        plain = parse_value(f"{{key: {text}}}") == {"key": text}
    except YamlFault:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)


_THOUGHT_MARKS = ("<think>", "[THINK]", "enable_thinking")
"""Parts of the chat templates of models that think before they answer."""
_THINKING_NAMES = re.compile(
    r"thinking|reason|\bqwq\b|\br1\b|magistral|qwen3-[\d.]+b(-a\d+b)?\b", re.IGNORECASE
)
_NOT_THINKING = re.compile(r"\b(base|instruct)\b", re.IGNORECASE)
"""Matches names of models that do not think although their template may: Qwen3's base models have
the template of the other Qwen3 models."""


def thinks(model: Path) -> bool:
    """Return True if the model thinks before it answers, by its chat template or, if the template
    is not here, by its name."""
    name = _name(model)
    if _NOT_THINKING.search(name):
        return False
    template = _template(model)
    # A name is only a guess.
    if template is not None:
        return any(mark in template for mark in _THOUGHT_MARKS)
    return _THINKING_NAMES.search(name) is not None


def _name(model: Path) -> str:
    """Return the last part of the model's name on the hub, or of its path."""
    on_hub = parse(model) or parse(Path(name_of(model) or model))
    return on_hub.id.rpartition("/")[2] if on_hub is not None else model.name


def _template(model: Path) -> str | None:
    """Return the text of the model's chat templates; None if it has none, or is not here."""
    file = model / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = settings.get("chat_template") if isinstance(settings, dict) else None
    # JSON text, because several templates are a list of {name, template}.
    return None if found is None else json.dumps(found, ensure_ascii=False)
