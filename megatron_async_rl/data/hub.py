"""Local folders of models and data sets on the Hugging Face Hub: `hf://OWNER/NAME[@REVISION]`,
`hf://datasets/OWNER/NAME[@REVISION]/PATH` and `hf://datasets/OWNER/NAME[@REVISION][#SPLIT]`.

Invariants:
- the command resolves a name once, before any check and before any process starts; processes get
  only local paths;
- the local path is a folder of the hub's cache whose name contains the commit, and RUN/config.yaml
  has this path: a run reads the same bytes until its end, also if the name moves to another commit;
- without a network, or with HF_HUB_OFFLINE, files come from the cache. A cached folder that lacks a
  file is refused: the hub's client compares the folder with the cached list of the commit's files,
  and the names of numbered pieces state their total;
- the data set's card defines the files of a split; without such a definition, the files' names do.
"""

from __future__ import annotations

import contextlib
import fnmatch
import posixpath
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import Strict
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.data.generated import with_generated
from megatron_async_rl.data.locations import (
    ENDINGS,
    NO_DATA,
    alternatives_of,
    one_pattern,
    paths_matching,
)

NAME = re.compile(
    r"hf:/{1,2}(?P<data>datasets/)?(?P<id>[^/@#]+/[^/@#]+)(@(?P<revision>[^/#]+))?"
    r"(/(?P<path>.+)|#((?P<part>[^/]+)/)?(?P<split>[^/]+))?"
)
"""Syntax of a name. pathlib reduces the two slashes to one."""
SNAPSHOT = re.compile(
    r"(?P<kind>models|datasets)--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<commit>[0-9a-f]{40})"
)
PIECE = re.compile(r"(?P<before>.*-)\d+-of-(?P<of>\d+)(?P<after>\..+)")
"""Name of one of several numbered files, as the hub's libraries write them."""
COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = "*.safetensors"
CARD = "README.md"
NOT_READ = ("*/*", "consolidated*")
"""Files of a model that are not downloaded: folders for other programs, and Mistral's second copy
of the weights."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """Name of a model, or of files in a data set: the files at `path`, or else those of `split`.
    `part`: configuration in the data set's card."""

    id: str
    is_data: bool
    revision: str | None
    path: str | None
    part: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        path = f"/{self.path}" if self.path else ""
        part = f"{self.part}/" if self.part else ""
        split = f"#{part}{self.split}" if self.split else ""
        return f"hf://{'datasets/' if self.is_data else ''}{self.id}{revision}{path}{split}"


def parse(path: Path) -> HubName | None:
    """Return the hub name that `path` is; None for any other path. Raises UserError."""
    text = str(path)
    if not text.startswith("hf:/"):
        return None
    match = NAME.fullmatch(text)
    if match is None:
        fix = (
            "write hf://OWNER/NAME, hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME#SPLIT;"
            " @REVISION may follow NAME"
        )
        raise UserError.of(text, "is not a name on a hub", fix)
    return HubName(
        id=match["id"],
        is_data=match["data"] is not None,
        revision=match["revision"],
        path=match["path"],
        part=match["part"],
        split=match["split"],
    )


def name_of(path: Path) -> str | None:
    """Return the name and commit of a folder in the hub's cache; None for any other folder."""
    match = SNAPSHOT.search(str(path))
    if match is None:
        return None
    kind = "datasets/" if match["kind"] == "datasets" else ""
    return f"hf://{kind}{match['owner']}/{match['name']}@{match['commit']}"


def nothing_absent(key: str, name: HubName) -> bool:
    """Return False for every name: all files are required."""
    return False


def located(
    config: Config,
    *,
    weights: bool = True,
    may_be_absent: Callable[[str, HubName], bool] = nothing_absent,
) -> tuple[Config, list[str]]:
    """Return `config` with a local path for each name on a hub and each generated task, and a
    report of one line per name.

    Files that the cache lacks are downloaded, except for a model's weights if `weights` is False. A
    name that cannot be fetched stays in the config if `may_be_absent` returns True, and its line
    states the reason. Raises UserError for other names that cannot be fetched.
    """
    # Read the run's config before any download: a resume must use the commits of the first start.
    before = _earlier(config.run.dir)
    notes: list[str] = []

    def place(key: str, name: HubName) -> Path:
        # The run writes to the other paths, or they belong to a machine, so they must be local.
        if not _is_data(key) and key not in ("model.path", "objective.reference.path"):
            raise UserError.of(key, f"{name} is on a hub", "name a local path here")
        try:
            local = fetch(key, name, commit=_pinned(before, key, name), weights=weights)
        except UserError as error:
            if not may_be_absent(key, name):
                raise
            notes.append(f"{key}: {error.problems[0].what}")
            # Keep the name: a plan or a memory estimate does not need the files.
            return Path(str(name))
        notes.append(f"{key}: {name} is {local}")
        return local

    config, generated = with_generated(config)
    return _labelled(_replaced(config, "", place), config), [*generated, *notes]


def _labelled(config: Config, named: Config) -> Config:
    """Return `config` with the labels of the sources that the user named, if files of different
    data sets have one name: labels must differ."""
    sources = config.data.sources
    if len({one.label for one in sources}) == len(sources):
        return config
    pairs = zip(sources, named.data.sources, strict=True)
    labelled = tuple(one.model_copy(update={"name": was.label}) for one, was in pairs)
    data = config.data.model_copy(update={"sources": labelled})
    return config.model_copy(update={"data": data})


def _is_data(key: str) -> bool:
    return key.startswith(("data.", "eval."))


def _replaced[Model: Strict](model: Model, prefix: str, place: Any) -> Model:
    changed: dict[str, Any] = {}
    for key, value in dict(model).items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Path):
            name = parse(value)
            if name is not None:
                changed[key] = place(dotted, name)
        elif isinstance(value, Strict):
            new = _replaced(value, f"{dotted}.", place)
            # Compare identities, so that an unchanged section keeps its object and its record of
            # set keys.
            if new is not value:
                changed[key] = new
        elif isinstance(value, tuple) and any(isinstance(one, Strict) for one in value):
            entries = tuple(
                _replaced(one, f"{dotted}.{index}.", place) if isinstance(one, Strict) else one
                for index, one in enumerate(value)
            )
            if any(new is not old for new, old in zip(entries, value, strict=True)):
                changed[key] = entries
    return model.model_copy(update=changed) if changed else model


def _earlier(run_dir: Path) -> Mapping[str, Any]:
    """Return the configuration of the run in `run_dir`; empty if there is none."""
    try:
        return read_tree((run_dir / "config.yaml").read_text(encoding="utf-8"))[0]
    except (OSError, ValueError, YamlFault):
        return {}


def _pinned(before: Mapping[str, Any], key: str, name: HubName) -> str | None:
    """Return the commit that the run started with; None if there is none for this name, or if the
    config names a commit."""
    value: Any = before
    for part in key.split("."):
        if isinstance(value, list):
            # A source that was added since the first start has no commit yet.
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    match = SNAPSHOT.search(str(value))
    # The commit applies to the same repository only; a new name starts at its newest commit.
    same = match is not None and f"{match['owner']}/{match['name']}" == name.id
    if match is None or not same or COMMIT.fullmatch(name.revision or ""):
        return None
    return match["commit"]


def cached_file(model: str, file: str) -> Path | None:
    """Return the path of a model's file in the hub's cache; None if the cache lacks it."""
    from huggingface_hub import errors, try_to_load_from_cache

    # The cache has no file of an invalid name, which a fetch reports.
    with contextlib.suppress(errors.HFValidationError):
        cached = try_to_load_from_cache(model, file)
        return Path(cached) if isinstance(cached, str) else None
    return None


def fetch(key: str, name: HubName, *, commit: str | None = None, weights: bool = True) -> Path:
    """Download the files of `name`, and return the local folder of a model, or the path or pattern
    of a data set's files. `commit` overrides the name's revision. Raises UserError with `key`."""
    if name.is_data != _is_data(key):
        kind, other = ("a data set", "") if name.is_data else ("a model", "datasets/")
        raise UserError.of(key, f"{name} is the name of {kind}", f"write hf://{other}{name.id}")
    if not name.is_data and (name.path or name.split):
        raise UserError.of(key, f"{name} is a part of a model", f"write hf://{name.id}")
    if name.is_data and name.path is None:
        folder = _download(key, name, commit, [CARD])
        # The branch may move before the next request: card and files must be of one commit.
        commit = folder.name
        name = replace(name, path=_path_of_split(key, name, folder), part=None, split=None)
    if name.is_data:
        # The client does not support braces. `/*` matches the files of a path that is a folder.
        patterns = alternatives_of(str(name.path))
        allowed, ignored = [*patterns, *(f"{one}/*" for one in patterns)], []
    else:
        allowed = [*SMALL_FILES, *([WEIGHTS] if weights else [])]
        ignored = list(NOT_READ)
    folder = _download(key, name, commit, allowed, ignored)
    if name.path is None:
        return folder
    # The client succeeds if a pattern matches nothing, so check the result here.
    if not all(paths_matching(folder, one) for one in alternatives_of(str(name.path))):
        try:
            listed = _files_on_hub(name, folder)
        except Exception as error:
            absent = _absent(str(name.path))
            raise UserError.of(key, *_explained(name, absent)) from error
        raise UserError.of(key, f"{name.id} has no {name.path}", _name_a_file(name, listed))
    # An interrupted download leaves a folder that looks complete, so check the numbered pieces.
    missing = _missing_pieces(folder, name.path)
    if missing:
        what = f"lacks {len(missing)} pieces, such as {missing[0]}"
        raise UserError.of(key, f"{name} {what}", _fetch_it(name))
    return folder / name.path


def _download(
    key: str, name: HubName, commit: str | None, allowed: list[str], ignored: Iterable[str] = ()
) -> Path:
    """Download the files that match `allowed` and not `ignored`, and return the commit's folder."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name.id,
            repo_type="dataset" if name.is_data else "model",
            revision=commit or name.revision,
            allow_patterns=allowed,
            ignore_patterns=list(ignored) or None,
        )
    except Exception as error:
        raise UserError.of(key, *_explained(name, error)) from error
    return Path(folder)


def _path_of_split(key: str, name: HubName, folder: Path) -> str:
    """Return the path or pattern of the files in the split that `name` requests; the default for
    training is `train`. `folder`: folder of a commit, with the card."""
    whole = replace(name, part=None, split=None)
    files = _listed(key, name, folder)
    part, splits = _splits(key, name, folder / CARD, files)
    if not splits:
        what = f"{whole} has no splits: neither its card nor the names of its files define any"
        raise UserError.of(key, what, _name_a_file(whole, files))
    training = key == "data.train" or key.startswith("data.sources.")
    # Evaluation has no default, because the training split would be a misleading held-out set.
    split = name.split or ("train" if training else None)
    if split not in splits:
        which = ", ".join(str(replace(whole, part=part, split=one)) for one in splits)
        what = f"{whole} has no split {split}" if split else f"{name} names no split to evaluate on"
        raise UserError.of(key, what, f"write one of {which}")
    return one_pattern(splits[split], files)


def _files_on_hub(name: HubName, folder: Path) -> list[str]:
    """Return every file of the commit, from the client's cached list or from the hub. Raises the
    client's errors, after a single attempt if the hub cannot be reached."""
    import huggingface_hub as client

    with contextlib.suppress(Exception):  # early 1.x clients cache no list
        cached = client.get_cached_repo_tree(name.id, repo_type="dataset", revision=folder.name)
        return sorted(file.path for file in cached)
    api = client.HfApi()
    # repo_info fails at once without a network, while the client repeats a request for a list.
    api.repo_info(name.id, repo_type="dataset", revision=folder.name)
    return sorted(api.list_repo_files(name.id, repo_type="dataset", revision=folder.name))


def _listed(key: str, name: HubName, folder: Path) -> list[str]:
    """Return every file of the commit. If they cannot be listed, return the cached files, provided
    that they include the card."""
    try:
        return _files_on_hub(name, folder)
    except Exception as error:
        cached = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
        # Without the card the files of a split are unknown; with only the card there is no data.
        if CARD not in cached or len(cached) == 1:
            raise UserError.of(key, *_explained(name, _absent(CARD))) from error
        # Add the pieces that the cache lacks, so that `fetch` reports them as missing.
        return sorted(cached | _every_piece(cached))


def _absent(file: str) -> Exception:
    from huggingface_hub import errors

    return errors.LocalEntryNotFoundError(file)


def _splits(
    key: str, name: HubName, card: Path, files: list[str]
) -> tuple[str | None, dict[str, list[str]]]:
    """Return the requested configuration, None if the data set has a single one, and the files of
    its splits by the rules of `datasets`."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import metadata_load

    try:
        header = (metadata_load(card) if card.exists() else None) or {}
        # A card without configurations has the default one, whose files follow from their names.
        configs = MetadataConfigs.from_dataset_card_data(header) or MetadataConfigs(default={})
        # YAML reads some names, such as years, as numbers; the names of users are text.
        parts = MetadataConfigs({str(one): entry for one, entry in configs.items()})
        part = name.part or parts.get_default_config_name()
        splits = _matched(parts[part], files) if part in parts else {}
    except (TypeError, ValueError, yaml.YAMLError) as error:
        # TypeError, because a card may contain values of any type.
        what = f"the card of {name} cannot be read: {_first_line(error)}"
        raise UserError.of(key, what, _name_a_file(name, files)) from error
    if part not in parts:
        what = f"has no configuration {name.part}" if name.part else "has several configurations"
        each = [replace(name, part=one, split=name.split or "train") for one in parts]
        raise UserError.of(key, f"{name} {what}", f"write one of {', '.join(map(str, each))}")
    return part if len(parts) > 1 else None, splits


def _matched(entry: Mapping[str, Any], files: list[str]) -> dict[str, list[str]]:
    """Return the files of each split. `entry`: a configuration in the card; without `data_files`
    the names of the files define the splits. Raises ValueError for patterns outside the data
    set."""
    from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns
    from fsspec.implementations.memory import MemoryFileSystem

    # MemoryFileSystem is global to the process, so concurrent calls need different roots.
    root = f"/{uuid.uuid4().hex}"
    base = posixpath.normpath(f"{root}/{entry.get('data_dir') or ''}")
    listed = entry.get("data_files")
    patterns: dict[str, list[str]] = {} if listed is None else sanitize_patterns(listed)
    # Refuse patterns that leave the data set: `datasets` would read other repositories, any URL and
    # local files.
    for one in [base, *(str(each) for them in patterns.values() for each in them)]:
        inside = posixpath.normpath(posixpath.join(base, one))
        if "://" in one or not f"{inside}/".startswith(f"{root}/"):
            shown = entry["data_dir"] if one == base else one
            raise ValueError(f"it names {shown}, which is outside the data set")

    # `datasets` matches patterns against a file system. Give it an empty file for each name in the
    # commit's list, because offline only the list is certain to be complete.
    data = [one for one in files if one.endswith(ENDINGS) and not NO_DATA.search(one)]
    system = MemoryFileSystem()
    system.pipe({f"{root}/{one}": b"" for one in data})
    splits: dict[str, list[str]] = {}
    try:
        for split, them in (patterns or get_data_patterns(f"memory:/{base}")).items():
            matched: set[str] = set()
            for one in them:
                with contextlib.suppress(FileNotFoundError):  # the pattern matches nothing
                    matched.update(resolve_pattern(one, f"memory:/{base}"))
            if matched:
                splits[str(split)] = sorted(one.partition(f"{root}/")[2] for one in matched)
    except FileNotFoundError:  # the data set has no files in these formats
        return {}
    finally:
        # Remove the files one by one from the process's file system: its recursive removal takes
        # quadratic time.
        for one in data:
            system.rm_file(f"{root}/{one}")
    return splits


def _missing_pieces(folder: Path, requested: str) -> list[str]:
    """Return the files that match the pattern `requested` and that `folder` lacks, according to the
    totals in the names of other pieces."""
    # Check only pieces of the requested files, because other splits may be absent on purpose.
    patterns = [each for one in alternatives_of(requested) for each in (one, f"{one}/*")]
    inside = [one for pattern in patterns for one in paths_matching(folder, pattern)]
    present = {str(one.relative_to(folder)) for one in inside}
    return sorted(
        one
        for one in _every_piece(present) - present
        if any(fnmatch.fnmatch(one, pattern) for pattern in patterns)
    )


def _every_piece(names: Iterable[str]) -> set[str]:
    """Return the names of all pieces of every set of numbered files with a piece in `names`."""
    sets = {(m["before"], m["of"], m["after"]) for one in names if (m := PIECE.fullmatch(one))}
    return {
        # The hub's libraries pad both numbers to the same width.
        f"{before}{number:0{len(of)}}-of-{of}{after}"
        for before, of, after in sets
        for number in range(int(of))
    }


def _explained(name: HubName, error: Exception) -> tuple[str, str]:
    """Return (fault, fix) for an error of the hub's client."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    what = "data set" if name.is_data else "model"
    if isinstance(error, errors.GatedRepoError):
        page = f"{where}/{'datasets/' if name.is_data else ''}{name.id}"
        return (
            f"{name} is gated",
            f"accept its terms at {page}, then run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = f"check the spelling; for a private {what} run `hf auth login` or set HF_TOKEN"
        return f"{where} has no {what} {name.id} that you may read", fix
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.id} has no revision {name.revision!r}", "name a branch, a tag or a commit"
    if isinstance(error, errors.HFValidationError):
        return f"{name} is not a name on a hub: {_first_line(error)}", "write hf://OWNER/NAME"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{where} cannot be reached"
        return (
            f"{name} is not complete in the cache ({constants.HF_HUB_CACHE}), and {why}",
            _fetch_it(name),
        )
    cause = f"{type(error).__name__}: {_first_line(error)}"
    return f"{name} cannot be fetched: {cause}", "try again, or name a local folder"


def _fetch_it(name: HubName) -> str:
    kind = "--repo-type dataset " if name.is_data else ""
    revision = f" --revision {name.revision}" if name.revision else ""
    return (
        f"on a machine with a network, run `hf download {kind}{name.id}{revision}` with this"
        " HF_HOME, or name a local folder"
    )


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def _name_a_file(name: HubName, listed: list[str]) -> str:
    """Return a fix that lists files of the data set."""
    files = [file for file in listed if file.endswith(ENDINGS)]
    shown = f": {', '.join(files[:6])}" if files else ", such as /data/train-*.parquet"
    return f"append a file of the data set, or a pattern of files{shown}"
