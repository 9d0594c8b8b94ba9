"""A first configuration from the answers of `mar init`, which `mar plan` accepts.

The layout is the first of a list, from the simplest on, that the plan has no fault with.

Invariants:
- where engines and policy share devices, no engine samples while the policy trains: the file is
  then synchronous, whichever style was requested, and a note reports it;
- a file that is refused leaves nothing behind.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from megatron_async_rl.plan.machine import Machine, described_machine, this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.reward_choice import SETTING, RewardChoice

TENSOR = (1, 2, 4, 8)
PROMPTS, GROUP, STEPS = 32, 8, 200
EVALUATE_EVERY = 20
RESPONSE_TOKENS = {
    ("gpu", True): 8192,
    ("gpu", False): 1024,
    ("cpu", True): 2048,
    ("cpu", False): 256,
}
"""rollout.sampling.max_tokens by device, and whether the model thinks before it answers. A response
that is cut while it thinks has no answer, and so no reward."""
SYNCHRONOUS = "synchronous"
LAYOUT_KEYS = ("policy", "rollout", "host memory")
"""Beginnings of the keys of faults that depend on the layout."""

STYLES: Mapping[str, tuple[str, str]] = {
    "asynchronous": (
        "engines keep sampling while the policy trains; stale samples are corrected",
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
        "the same with PPO's clip instead of the correction: less memory, a narrower range of"
        " learning rates",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 2}}
objective: {{loss: {{name: ppo_clip, clip_high: 0.28}}}}
""",
    ),
    SYNCHRONOUS: (
        "generate, train, generate: no sample is stale",
        """flow: {{prompts_per_step: {prompts}, group_size: {group}, async_ratio: 0}}
objective: {{loss: reinforce}}
""",
    ),
}
"""Name -> description; its part of the file."""


@dataclass(frozen=True, kw_only=True)
class InitColumns:
    """Columns of the prompts and answers in the data."""

    prompt_key: str = "prompt"
    answer_key: str = ""
    as_chat: bool = False

    def __str__(self) -> str:
        """Lines of the section `data`."""
        lines = [f"  prompt_key: {_scalar(self.prompt_key)}\n" * (self.prompt_key != "prompt")]
        lines += [f"  answer_key: {_scalar(self.answer_key)}\n" * bool(self.answer_key)]
        return "".join([*lines, "  as_chat: true\n" * self.as_chat])


@dataclass(frozen=True, kw_only=True)
class InitAnswers:
    """`model`, `data`: local, or names on a hub. `held_out`: the same, or the share of `data` to
    split off; null for none. `gpus`: of this or of another machine, each of `gpu_memory_gib`; 0
    trains on the CPU. `style`: one of STYLES."""

    model: str
    data: str
    held_out: str | float | None
    columns: InitColumns
    reward: RewardChoice
    gpus: int
    gpu_memory_gib: float
    style: str


@dataclass(frozen=True, kw_only=True)
class InitFiles:
    """Files that were written, the config first, and notes on deviations from the request."""

    files: Sequence[Path]
    notes: Sequence[str]


@dataclass(frozen=True)
class InitLayout:
    """Lines of the sections `policy` and `rollout`. `replicas`: data-parallel ranks; `colocated`:
    engines and policy share GPUs."""

    policy: str
    rollout: str
    replicas: int = 1
    colocated: bool = False


def write_config(answers: InitAnswers, out: Path) -> InitFiles:
    """Write `out`, held-out rows that are split off, and files of the user's own to begin with
    which the reward names. Raises ConfigError where the plan has a fault with every layout: then
    with the last one's faults; UserError where the data cannot be split."""
    # Before the config, which is checked by loading what it names.
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
                notes.append(_of_split(split))
        notes += _write_accepted(answers, out)
    # Also on Ctrl-C: a refused config leaves nothing behind.
    except BaseException:
        for file in starters:
            file.unlink(missing_ok=True)
        if split is not None:
            split.remove()
        raise
    files = [out, *([split.train, split.held_out] if split is not None else []), *starters]
    return InitFiles(files=files, notes=notes)


def _split(answers: InitAnswers, share: float, out: Path) -> Split | None:
    """The two parts of the data, in a folder next to the file."""
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


def _of_split(split: Split) -> str:
    maximum = f" (at most {MAX_HELD_OUT} prompts)" if split.held_out_rows >= MAX_HELD_OUT else ""
    return (
        f"rows held out: {split.held_out_rows}{maximum}, trained on: {split.train_rows}; rows with"
        " the same prompt are on one side"
    )


def _write_accepted(answers: InitAnswers, out: Path) -> list[str]:
    """Write the first file that the plan accepts; return notes on it."""
    # Any candidate names the model; loading one resolves hub names and paths.
    first = next(_candidates(answers, out, 1))[1]
    model = _loaded(first, out).model.path
    shape, faults = read_model(model, weights=False)
    if shape is None:
        raise ConfigError(f"{out} was not written", faults)
    chat, device = _has_chat_template(model), "gpu" if answers.gpus else "cpu"
    longest = min(RESPONSE_TOKENS[device, thinks(model)], shape.context // 2)
    for layout, text in _candidates(answers, out, longest, chat=chat):
        faults = _faults(text, answers, out)
        if not faults:
            out.write_text(text, encoding="utf-8")
            return _not_asynchronous(answers, layout)
        # Other layouts would fail for the same reason, each after a trial of the reward.
        if not any(_of_layout(one) for one in faults):
            break  # what is left has nothing to do with the layout, and no other would fix it
    # Of the last layout that was tried: a fault that another one fixes is not reported.
    reason = ": no layout fits" if any(_of_layout(one) for one in faults) else ""
    raise ConfigError(f"{out} was not written{reason}", [_by_option(one) for one in faults])


def _of_layout(fault: Problem) -> bool:
    """True for a fault that another layout may fix."""
    fixed = ("rollout.reward", "rollout.environment")
    return fault.key.startswith(LAYOUT_KEYS) and not fault.key.startswith(fixed)


def _not_asynchronous(answers: InitAnswers, layout: InitLayout) -> list[str]:
    """A note on a file that is synchronous although another style was requested."""
    if not layout.colocated or answers.style == SYNCHRONOUS:
        return []
    return [f"the config is synchronous instead of {answers.style}: {_why_colocated(answers)}"]


def _why_colocated(answers: InitAnswers) -> str:
    which = number_of("GPU", answers.gpus)
    return (
        f"only a colocated layout fits {which} of {answers.gpu_memory_gib:g} GiB, in which the"
        " engines sleep while the policy trains"
    )


def _by_option(fault: Problem) -> Problem:
    """Rephrase the fix in terms of the command's options."""
    if fault.key.startswith(("rollout.reward.settings", "rollout.environment.settings")):
        fault = replace(fault, fix=f"{fault.fix} (here: {SETTING} KEY=VALUE)")
    for key, option in (
        ("data.eval=", "--eval "),
        ("data.prompt_key=", "--prompt-key "),
        ("data.answer_key=", "--answer-key "),
        # The user answered questions and has seen no config key.
        ("data.messages_key=", "--prompt-key "),  # a prompt may be a list of messages
    ):
        fault = replace(fault, fix=fault.fix.replace(key, option))
    return fault


def _has_chat_template(model: Path) -> bool:
    """True also for a model that is not here, because it may have a chat template."""
    try:
        tokenizer = load_tokenizer(model)
    except DataError:
        return True
    try:
        # The only reliable test: a template may exist and refuse every message.
        tokenizer.render_chat([{"role": "user", "content": "0"}], answer=True)
    except DataError:
        return False
    except Exception:  # noqa: BLE001 - a template is a program; the plan names what it raises
        return True
    return True


def _faults(text: str, answers: InitAnswers, out: Path) -> list[Problem]:
    """Faults of a file with this text at the path `out`: its paths start there."""
    machine: Machine = this_machine()
    if answers.gpus:
        machine = described_machine(
            gpus=answers.gpus, gpu_memory_gib=answers.gpu_memory_gib, nodes=1
        )
    return list(preflight(_loaded(text, out), all_data=False, machine=machine).problems)


def _loaded(text: str, out: Path) -> Config:
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the folder of OUT, since relative paths start there.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=out.parent, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            config = load(Path(file.name))
        except ConfigError as error:
            faults = [replace(one, where=None) for one in error.problems]
            raise ConfigError(f"{out} was not written", faults) from None
    return located(config, weights=False)[0]


def _candidates(
    answers: InitAnswers, out: Path, tokens: int, *, chat: bool = False
) -> Iterator[tuple[InitLayout, str]]:
    """`tokens`: of a response at most; `chat`: the model has a chat template."""
    # The caller stops at the first layout that the plan accepts.
    for layout in _layouts(answers):
        yield layout, _text(answers, out, layout, tokens, chat=chat)


def _layouts(answers: InitAnswers) -> Iterator[InitLayout]:
    """The layouts to try, the simplest first. A synchronous run has engines that only wait while
    the policy trains, so it shares the GPUs where that fits."""
    gpus = answers.gpus
    if not gpus:
        yield InitLayout("  device: cpu\n", "  kv_cache_gib: 1.0\n")
    elif answers.style == SYNCHRONOUS:
        yield from _colocated(gpus)
        yield from _disaggregated(gpus)
    else:
        yield from _disaggregated(gpus)
        yield from _colocated(gpus)


def _disaggregated(gpus: int) -> Iterator[InitLayout]:
    # Small tensor sizes first: they communicate least.
    for tensor in TENSOR:
        for recompute in ("none", "full"):
            if 2 * tensor <= gpus:
                # Half of the GPUs train, rounded down to whole replicas.
                ranks = gpus // 2 // tensor * tensor
                engines = (gpus - ranks) // tensor
                yield InitLayout(
                    f"  device: cuda\n  parallel: {_parallel(ranks, tensor)}\n"
                    f"  sequence: packed\n  recompute: {recompute}\n",
                    f"  engines: {engines}\n  tensor: {tensor}\n",
                    replicas=ranks // tensor,
                )


def _colocated(gpus: int) -> Iterator[InitLayout]:
    for tensor in TENSOR:
        if gpus % tensor == 0:
            yield InitLayout(
                f"  device: cuda\n  parallel: {_parallel(gpus, tensor)}\n"
                "  sequence: packed\n  recompute: full\n",
                f"  placement: colocated\n  engines: {gpus // tensor}\n  tensor: {tensor}\n"
                "  gpu_memory_utilization: 0.5\n",
                replicas=gpus // tensor,
                colocated=True,
            )


def _parallel(ranks: int, tensor: int) -> str:
    ranks_text = f"ranks: {ranks}, tensor: {tensor}"
    return f"{{{ranks_text}, sequence: true}}" if tensor > 1 else f"{{{ranks_text}}}"


def _text(answers: InitAnswers, out: Path, layout: InitLayout, tokens: int, *, chat: bool) -> str:
    style = SYNCHRONOUS if layout.colocated else answers.style
    meaning, method = STYLES[style]
    if style == SYNCHRONOUS and layout.colocated:
        meaning += "; engines and policy take turns on the same GPUs"
    elif style == SYNCHRONOUS and answers.gpus:
        meaning += ", and half of the GPUs wait"
    why = "" if style == answers.style else f"# Not {answers.style}: {_why_colocated(answers)}.\n"
    folder = out.resolve().parent
    prompts, group = (PROMPTS, GROUP) if answers.gpus else (8, 8)
    # The samples of a batch divide over the data-parallel ranks, also of 3 or 6 GPUs.
    # Smallest number of prompts whose samples divide over the replicas.
    multiple = layout.replicas // math.gcd(layout.replicas, group)
    prompts = -(-prompts // multiple) * multiple
    # Products of ratios over long responses are dominated by rounding.
    level = "token" if tokens > LONG_RESPONSE else "sequence"
    columns = answers.columns
    environment = answers.reward.environment
    if chat and environment is not None and environment not in AGENTS:  # those write messages
        columns = replace(columns, as_chat=True)
    own = "  tools_key: null              # the tools are those of rollout.environment\n"
    own = own if environment == TOOLS else ""
    place = f"--gpus {answers.gpus} --gpu-memory {answers.gpu_memory_gib:g}" if answers.gpus else ""
    dtype = "bfloat16" if answers.gpus else "float32"
    settings = method.format(prompts=prompts, group=group, level=level)
    return f"""# {style.capitalize()}: {meaning}.
{why}#   mar plan {f"{out.name} {place}".strip()}
#   mar train {out.name}
# Every key and its default: {shipped("docs/config.md")}
# Which method to start with: {shipped("docs/choosing_a_method.md")}
run: {{dir: runs/{out.stem}, steps: {STEPS}}}
model: {{path: {_scalar(_path(answers.model, folder))}, dtype: {dtype}}}
data:
  train: {_scalar(_path(answers.data, folder))}
{columns}{own}{_held_out(answers, folder)}{settings}rollout:
{layout.rollout}  sampling: {{temperature: 1.0, max_tokens: {tokens}}}
{answers.reward.lines(chat=chat)}policy:
{layout.policy}  optimizer: {{lr: {"1.0e-6" if answers.gpus else "1.0e-5"}, warmup_steps: 5}}
"""


def _held_out(answers: InitAnswers, folder: Path) -> str:
    """Lines of the held-out data: the end of the section `data`, and the section `eval`."""
    how = f"eval: {{every: {EVALUATE_EVERY}, samples_per_prompt: 1}}"
    if not isinstance(answers.held_out, str):
        line = f"`{how}`"
        return (
            f"  # eval: held_out.jsonl         # the same fields; and on a line of its own {line}\n"
        )
    return f"  eval: {_scalar(_path(answers.held_out, folder))}\n{how}\n"


def _path(name: str, folder: Path) -> str:
    """Path as written in the config file: relative to the file's folder if it lies inside."""
    # Names on a hub have no folder.
    if name.startswith("hf:"):
        return name
    path = Path(name).expanduser().resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _scalar(text: str) -> str:
    """YAML form of `text`, quoted if YAML would read it as something else, as a path with `, `
    or ` #`."""
    try:
        # Read back as YAML: a list of characters that need quotes would be incomplete.
        plain = parse_value(f"{{key: {text}}}") == {"key": text}
    except YamlFault:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)


_THOUGHT_MARKS = ("<think>", "[THINK]", "enable_thinking")
"""Parts of the chat templates of such models."""
_THINKING_NAMES = re.compile(
    r"thinking|reason|\bqwq\b|\br1\b|magistral|qwen3-[\d.]+b(-a\d+b)?\b", re.IGNORECASE
)
_NOT_THINKING = re.compile(r"\b(base|instruct)\b", re.IGNORECASE)
"""Qwen3's base models have the template of the others."""


def thinks(model: Path) -> bool:
    """True for a model whose chat template opens or closes a thought, and that is not a base model;
    where its template is not here, for a model with such a name."""
    name = _name(model)
    if _NOT_THINKING.search(name):
        return False
    template = _template(model)
    # The template decides where it is here; a name is only a guess.
    if template is not None:
        return any(mark in template for mark in _THOUGHT_MARKS)
    return _THINKING_NAMES.search(name) is not None


def _name(model: Path) -> str:
    """The last part of its name: of the hub where it is from there."""
    on_hub = parse(model) or parse(Path(name_of(model) or model))
    return on_hub.id.rpartition("/")[2] if on_hub is not None else model.name


def _template(model: Path) -> str | None:
    """The text of the model's chat templates; null if it has none."""
    file = model / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = settings.get("chat_template") if isinstance(settings, dict) else None
    # Several templates are a list of {name, template}.
    return None if found is None else json.dumps(found, ensure_ascii=False)
