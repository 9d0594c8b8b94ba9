"""`python -m megatron_async_rl.config.docs > docs/config.md`: every key, its default and its
meaning, from the models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from megatron_async_rl.config.keys import describe, walk
from megatron_async_rl.config.settings_model import Strict

OPENING = """\
# Configuration

A run is one YAML file: `mar train FILE [dotted.key=value ...]`. This page lists every key; it is written by
`python -m megatron_async_rl.config.docs > docs/config.md`.

- **Overrides** on the command line win over the file: `policy.optimizer.lr=1e-4`, `controls=[]`, `controls.0.c_low=0.2`,
  `eval=null`. They are read as YAML, except for a key that takes text or a path, whose value is everything after `=`, as written:
  `data.system_prompt=Answer after ####`, `run.dir=runs/2026-03-01`. Quote it as YAML (`'"null"'` in a shell) for the text `null`.
- **Values are what you wrote.** Text and paths are never read as dates, numbers or switches. Elsewhere, values that versions of
  YAML read differently (`010`, `1:30`, `1_000`, `on`, `no`) are refused, as are empty overrides, comments in overrides and tags;
  write a plain number, `true` or `false`, or quote the text. In a file a `#` after a blank begins a comment, as ever in YAML, and
  text that ends before one without a blank behind it (`End with #### and ...`) is refused: quote it. Keys are names, whatever
  they look like.
- **Relative paths** in the file start at the file's folder, those in an override at the current folder. Every path is made
  absolute at once. In a locale that is not UTF-8 paths must be ASCII; all other text may be anything, as every file is UTF-8.
- **Unknown keys**, keys given twice and values of the wrong type are refused, naming the line and the nearest valid key.
- **A method without settings** may be written as its bare name: `loss: reinforce` is `loss: {name: reinforce}`.
- **A run directory holds one run.** `mar train` on a directory that holds steps of a run goes on from its newest checkpoint. The
  length of the run, the learning rate, the layout, the engines, `flow`, evaluation, what is kept, the `settings.url` of a reward
  or environment, and paths of identical copies of model and data may then differ, and are printed; any other difference is
  refused with both values, and so is every difference from a finished run whose `run.steps` is not raised.
- `mar plan FILE` prints who runs where, memory, batch, staleness law, step time and totals of the run, or everything that is
  wrong with it, and starts nothing; `--resolved` adds the whole config, defaults included.
  `mar plan FILE --gpus 8 --gpu-memory 80 --host-memory 1024 --nodes 4` plans for such machines instead of this one.
"""


def document() -> str:
    return "\n".join([OPENING, *_sections()])


def _sections() -> Iterator[str]:
    for dotted, model, leaves in walk():
        if not dotted:
            continue
        section, _, rest = dotted.partition("(")
        method, _, inside = rest.partition(")")
        place = section.replace("[]", "") + inside
        yield f"## `{place}`" + (f": `{method}`" if method else "") + "\n"
        about = _about(model)
        if about:
            yield about + "\n"
        shown = [leaf for leaf in leaves if not (method and leaf.key.endswith(".name"))]
        if not shown:
            continue
        yield "| key | takes | default | meaning |\n| --- | --- | --- | --- |"
        for leaf in shown:
            cells = (
                f"`{leaf.key.rsplit('.', 1)[-1]}`",
                describe(leaf.field),
                _default(leaf.field),
                _line(leaf.field.description),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _about(model: type[Strict]) -> str:
    return _line(model.__doc__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default)}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.stdout.buffer.write(document().encode("utf-8"))
