"""Base of every config model, selection of methods by name, plug-ins, and digests of user code.

A method is a loss, an advantage, a correction or a control. Its settings model is a subclass of
LossSettings, AdvantageSettings, CorrectionSettings or ControlSettings; the class attribute `method`
of the model is the method. The configuration selects the settings model by its `name`:

    gac             a model of config/; its `method` is text, "controls.gac:Gac", because config/
                    must not import torch
    mine            the model SETTINGS in the file mine.py of the package's folder for this kind of
                    method; it needs no entry elsewhere
    module:Class    the model Class of a user's own module

A method's file may import torch, so it is imported only when a configuration names its method.

A value of a configuration may name user code as `module:function`: a reward, an environment, tools
or a method. `code_digests` returns the digests of these files, and a resume reports the files that
have changed. It finds files by their names in Python's search path and imports nothing, so that
user code runs only in isolated processes.
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
"""Name of the settings model in a file that adds a method to this package."""


def _as_json(values: Any) -> Any:
    try:
        # JSON has no nan: other programs could not read samples with nan.
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"contains a value that JSON does not have ({error}): put dates in quotes"
        ) from None
    return values


OnlyJson = AfterValidator(_as_json)
"""Validator of values that become fields of samples or are compared with them."""


class Strict(BaseModel):
    """Base of every config model: frozen, without unknown keys. The docstring below a field is its
    description."""

    model_config = ConfigDict(
        # All processes of a run must have the same configuration.
        frozen=True,
        extra="forbid",
        validate_default=True,
        # docs/config.md and error messages use these docstrings, too.
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @classmethod
    def default_of(cls, key: str) -> Any:
        """Return the default of a key, for code that also runs without a configuration. The schema
        is the only place that states a default."""
        return cls.model_fields[key].get_default(call_default_factory=True)


@dataclass(frozen=True)
class FromFile:
    """Mark of text that may be given as the path of a file. The file is read with the
    configuration, so the run keeps the text that it started with."""


TextOrFile = Annotated[str, FromFile()]


class MethodSettings(Strict):
    """Base of the settings of a method."""

    method: ClassVar[Any] = None
    """The method. In config/ it is text, `module:attribute` below this package."""
    method_type: ClassVar[tuple[str, str]]
    """Required type of `method`: (relation, qualified name of the class). A name, because config/
    must not import torch."""
    folder: ClassVar[str]
    """Package in which a file NAME.py with SETTINGS adds the method NAME."""
    compares_batch: ClassVar[bool] = False
    """True if the numbers of a sample depend on samples of other groups of the batch."""

    @property
    def needs_batch(self) -> bool:
        """True if the method needs all groups of the batch with these settings."""
        return self.compares_batch


def method_of(settings: MethodSettings | type[MethodSettings]) -> Any:
    """Return the method of the settings: a LossMethod, AdvantageMethod or CorrectionMethod, or a
    subclass of Control. Imports its file."""
    method = settings.method
    if not isinstance(method, str):
        return method
    module, _, attribute = method.partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), attribute)


def bare_name(value: Any) -> Any:
    """Convert a method's bare name, such as `loss: reinforce`, to `loss: {name: reinforce}`."""
    return {"name": value} if isinstance(value, str) else value


def plug_in_class(name: str, base: type[MethodSettings]) -> Any:
    """Return the settings model `name`, either module:Class or the name of a file in `base.folder`.
    Raises ValueError with the fault and the fix."""
    module_name, colon, class_name = name.partition(":")
    if not colon:
        module_name, class_name = f"{base.folder}.{name}", SETTINGS
    if not module_name or not class_name:
        raise ValueError(f"{name!r} is not module:Class; write, for example, my_loss:MyLoss")
    # As for rewards, modules in the current folder can be imported, also by ranks and engines.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # Catch SystemExit, too: a script without a main guard may end the interpreter.
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}; fix that"
            " file, start from the folder that contains it, or set PYTHONPATH"
        ) from error

    # Check the class now, so that a wrong plug-in is refused before any process starts.
    model = getattr(module, class_name, None)
    if not (isinstance(model, type) and issubclass(model, base)):
        raise ValueError(f"{name!r} is not a subclass of {base.__name__} in that module")
    if "name" not in model.model_fields or model.model_fields["name"].annotation not in (
        str,
        "str",
    ):
        raise ValueError(
            f"{name!r} has no field `name: str` for its name in the configuration; add it"
        )
    if getattr(model, "method", None) is None:
        raise ValueError(
            f"{name!r} has no class attribute `method`; add it ({shipped('docs/add_a_method.md')})"
        )
    settings: Any = model
    if not _fits(settings.method, *settings.method_type):
        raise ValueError(
            f"{name!r}: its `method` is {settings.method!r}; it must be"
            f" {' '.join(settings.method_type)}"
            f" ({shipped('docs/add_a_method.md')})"
        )
    return settings


def _fits(method: Any, relation: str, required: str) -> bool:
    is_class = isinstance(method, type)
    # Compare qualified names: an import of the base class would load torch.
    classes = method.__mro__ if is_class else type(method).__mro__
    return is_class == (relation == "a subclass of") and any(
        f"{each.__module__}.{each.__qualname__}" == required for each in classes
    )


def is_plug_in(name: object, base: type[MethodSettings]) -> bool:
    """Return True if `name` selects a settings model outside config/: module:Class, or the name of
    a file in `base.folder`."""
    if not isinstance(name, str) or ":" in name:
        return isinstance(name, str)
    # The file of a built-in method may have the method's name; it has no SETTINGS and needs torch.
    if name in built_in_names(base) or not name.isidentifier():
        return False
    spec = importlib.util.find_spec(f"{base.folder}.{name}")
    if spec is None or spec.origin is None:
        return False
    # Other modules of the folder, such as controls/decision.py, are not methods.
    return re.search(rf"^{SETTINGS} = ", Path(spec.origin).read_text("utf-8"), re.M) is not None


def built_in_names(base: type[MethodSettings]) -> set[str]:
    """Return the names of the settings models in config/ that are derived from `base`."""
    names, pending = set(), [base]
    while pending:
        model = pending.pop()
        pending += model.__subclasses__()
        if "name" in model.model_fields and isinstance(model.method, str):
            names.add(str(model.model_fields["name"].default))
    return names


def or_plug_in(base: type[MethodSettings]) -> WrapValidator:
    """Return a validator with which a field of built-in methods also accepts a plug-in."""

    def validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
        name = value.get("name") if isinstance(value, dict) else None
        if is_plug_in(name, base):
            return plug_in_class(str(name), base).model_validate(value)
        # Accept a validated model, as in a copy of the configuration.
        if isinstance(value, base) and not isinstance(value.method, str):
            return value
        return built_in(value)

    return WrapValidator(validate)


_NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*(?:\.\w+)*")


def code_digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return file -> digest for each Python module that a value of `tree`, a whole configuration,
    names. Modules that these modules import are not included."""
    digests = {}
    for text in _texts(tree):
        # Any value may name code: plug-ins have keys outside this schema.
        matched = _NAMED.fullmatch(text)
        file = _file_of(matched[1]) if matched is not None else None
        if file is not None:
            try:
                digests[str(file)] = file_digest(file)
            except OSError:
                continue  # its import reports the fault
    return digests


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    # Keys are names of settings, which never name code.
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _file_of(module: str) -> Path | None:
    parts = module.split(".")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Child processes also search the current folder and PYTHONPATH, which sys.path may lack.
    for folder in dict.fromkeys([*sys.path, *given, os.getcwd()]):
        base = Path(folder or os.getcwd(), *parts).absolute()
        for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None
