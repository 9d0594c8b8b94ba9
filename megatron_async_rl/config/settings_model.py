"""The base of every config model, the short form of a method, methods in one file, and digests of
the user's own files.

A method is a loss, an advantage, a correction or a control. Its settings model is a subclass of
LossSettings, AdvantageSettings, CorrectionSettings or ControlSettings, whose class attribute
`method` is the method. The configuration selects the settings model by its `name`:

    gac             a model of config/, whose `method` is text, "controls.gac:Gac", because config/
                    imports without torch
    mine            the model SETTINGS in the file mine.py of the folder that the kind of method
                    has in this package; it needs no line elsewhere
    module:Class    the model Class of a user's own module

A file is imported when a configuration names its method, and not before: it may import torch.

A value of a configuration may name a user's code as `module:function`: a reward, an environment,
tools, a method. `code_digests` returns the digests of those files, and a resume notes the files
that have changed. It imports nothing: it looks a file up where Python would, by its name alone, so
that user code runs only where it is isolated.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, WrapValidator

from megatron_async_rl.config.durable import file_digest
from megatron_async_rl.config.problem import shipped

PACKAGE = __name__.partition(".")[0]
SETTINGS = "SETTINGS"
"""Name of the settings model in a file that adds a method to the package."""


def _as_json(values: Any) -> Any:
    try:
        # JSON has no nan: samples with one could not be read by other programs.
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds what JSON does not ({error}): put dates in quotes") from None
    return values


OnlyJson = AfterValidator(_as_json)
"""Validator of values that go into samples, or are compared with theirs."""


class Strict(BaseModel):
    """Frozen; unknown keys are refused; docstrings under fields are their description."""

    model_config = ConfigDict(
        # Frozen: all processes of a run hold the same configuration.
        frozen=True,
        extra="forbid",
        validate_default=True,
        # Descriptions, docs/config.md and error texts come from one place.
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @classmethod
    def default_of(cls, key: str) -> Any:
        """Default of a key, for code that also runs without a configuration: a default is written
        once, in the schema."""
        return cls.model_fields[key].get_default(call_default_factory=True)


@dataclass(frozen=True)
class FromFile:
    """Marks text that may be given as the path of a file, which is read with the configuration: a
    run keeps what it read."""


TextOrFile = Annotated[str, FromFile()]


class MethodSettings(Strict):
    """Settings of a method."""

    method: ClassVar[Any] = None
    """The method; in config/ as text, `module:attribute` below the package."""
    method_type: ClassVar[tuple[str, str]]
    """Requirement on `method`, by name: the configuration is read without torch."""
    folder: ClassVar[str]
    """Package in which a file NAME.py with SETTINGS adds the method NAME."""


def method_of(settings: MethodSettings | type[MethodSettings]) -> Any:
    """The method of the settings: a LossMethod, AdvantageMethod or CorrectionMethod, or a subclass
    of Control. Imports its file."""
    method = settings.method
    if not isinstance(method, str):
        return method
    module, _, attribute = method.partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), attribute)


def bare_name(value: Any) -> Any:
    """A method without settings may be written as its name: `loss: reinforce` is `loss: {name:
    reinforce}`."""
    return {"name": value} if isinstance(value, str) else value


def plug_in_class(name: str, base: type[MethodSettings]) -> Any:
    """The settings model `name`, either module:Class or the name of a file in `base.folder`. Raises
    ValueError with what is wrong and the fix."""
    module_name, colon, class_name = name.partition(":")
    if not colon:
        module_name, class_name = f"{base.folder}.{name}", SETTINGS
    if not module_name or not class_name:
        raise ValueError(f"{name!r} is not module:Class; write for example my_loss:MyLoss")
    # As for rewards: what lies in the current folder is found, by ranks and engines too.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # SystemExit, too: a script without a main guard may end the interpreter.
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}; fix that"
            " file, start from the folder that holds it, or set PYTHONPATH"
        ) from error

    # The checks below run here, so that a wrong plug-in is refused before any process starts.
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{name!r} is not a class of that module that is derived from {base.__name__}"
        )
    if "name" not in found.model_fields or found.model_fields["name"].annotation not in (
        str,
        "str",
    ):
        raise ValueError(
            f"{name!r} has no field `name: str`, which holds its name in the configuration"
        )
    if getattr(found, "method", None) is None:
        raise ValueError(
            f"{name!r} has no class attribute `method` ({shipped('docs/add_a_method.md')})"
        )
    settings: Any = found
    if not _fits(settings.method, *settings.method_type):
        raise ValueError(
            f"{name!r}: its `method` is {settings.method!r}; it must be"
            f" {' '.join(settings.method_type)}"
            f" ({shipped('docs/add_a_method.md')})"
        )
    return settings


def _fits(method: Any, relation: str, wanted: str) -> bool:
    is_class = isinstance(method, type)
    # Compared by name: importing the base class would load torch.
    classes = method.__mro__ if is_class else type(method).__mro__
    return is_class == (relation == "a subclass of") and any(
        f"{each.__module__}.{each.__qualname__}" == wanted for each in classes
    )


def is_plug_in(name: object, base: type[MethodSettings]) -> bool:
    """True if the name selects a settings model outside config/: module:Class, or the name of a
    file in `base.folder`."""
    if not isinstance(name, str) or ":" in name:
        return isinstance(name, str)
    # A built-in method's file may have its name, too, and is not imported: it needs torch.
    if name in built_in_names(base) or not name.isidentifier():
        return False
    spec = importlib.util.find_spec(f"{base.folder}.{name}")
    if spec is None or spec.origin is None:
        return False
    # Other modules of the folder, such as controls/decision.py, are not methods.
    return re.search(rf"^{SETTINGS} = ", Path(spec.origin).read_text("utf-8"), re.M) is not None


def built_in_names(base: type[MethodSettings]) -> set[str]:
    """Names of the settings models in config/ that are made from `base`."""
    found, ahead = set(), [base]
    while ahead:
        model = ahead.pop()
        ahead += model.__subclasses__()
        if "name" in model.model_fields and isinstance(model.method, str):
            found.add(str(model.model_fields["name"].default))
    return found


def or_plug_in(base: type[MethodSettings]) -> WrapValidator:
    """Let a field of built-in methods hold a plug-in too."""

    def validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
        name = value.get("name") if isinstance(value, dict) else None
        if is_plug_in(name, base):
            return plug_in_class(str(name), base).model_validate(value)
        # A model that was validated already, as in a copy of the configuration.
        if isinstance(value, base) and not isinstance(value.method, str):
            return value
        return built_in(value)

    return WrapValidator(validate)


_NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*(?:\.\w+)*")


def code_digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """File -> digest, for each module that a value of `tree` (a whole configuration) names and that
    is a Python file. A module that imports others is one file: the others do not count."""
    found = {}
    for text in _texts(tree):
        # Any value may name code: plug-ins have keys that this schema does not know.
        matched = _NAMED.fullmatch(text)
        file = _file_of(matched[1]) if matched is not None else None
        if file is not None:
            try:
                found[str(file)] = file_digest(file)
            except OSError:
                continue  # it cannot be loaded either, which is reported where it is
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    # Keys are names of settings and never name code.
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _file_of(module: str) -> Path | None:
    parts = module.split(".")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Children are started with the current folder and PYTHONPATH, which this process may lack.
    for folder in dict.fromkeys([*sys.path, *given, os.getcwd()]):
        base = Path(folder or os.getcwd(), *parts).absolute()
        for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None
