"""Models and data sets on a Hugging Face hub, as local folders: `hf://OWNER/NAME[@REVISION]`,
`hf://datasets/OWNER/NAME[@REVISION]/PATH` and `hf://datasets/OWNER/NAME[@REVISION][#SPLIT]`.

Invariants:
- a name is resolved once, by the command, before anything is checked or started; what starts knows
  local paths alone;
- the local path is a folder of the hub's cache that names the commit, and it is what stands in
  RUN/config.yaml: a running run reads the bytes it began with, also when the name has moved;
- without a network, or with HF_HUB_OFFLINE, the cache answers, and a cached folder that lacks a
  file is refused: the hub's client compares it with the commit's list of files where the cache has
  one, and the names of numbered pieces contain their number;
- which files are a split is for the data set's card to say, or else for their names.
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
"""A path that went through pathlib has one slash instead of two."""
SNAPSHOT = re.compile(
    r"(?P<kind>models|datasets)--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<commit>[0-9a-f]{40})"
)
PIECE = re.compile(r"(?P<before>.*-)\d+-of-(?P<of>\d+)(?P<after>\..+)")
"""The name of one of several numbered files, as the hub's libraries write them."""
COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = "*.safetensors"
CARD = "README.md"
NOT_READ = ("*/*", "consolidated*")
"""Folders of a model for other programs, and Mistral's second copy of the weights."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """Name of a model, or of files in a data set: those at `path`, or else those of `split`.
    `part`: configuration in the card of the data set."""

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
    """Return the name on a hub that a path is; null for any other path. Raises UserError."""
    text = str(path)
    if not text.startswith("hf:/"):
        return None
    found = NAME.fullmatch(text)
    if found is None:
        fix = (
            "write hf://OWNER/NAME, hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME#SPLIT;"
            " @REVISION may follow NAME"
        )
        raise UserError.of(text, "is not a name on a hub", fix)
    return HubName(
        id=found["id"],
        is_data=found["data"] is not None,
        revision=found["revision"],
        path=found["path"],
        part=found["part"],
        split=found["split"],
    )


def name_of(path: Path) -> str | None:
    """Return the name and commit of a folder of the hub's cache; null for another folder."""
    found = SNAPSHOT.search(str(path))
    if found is None:
        return None
    kind = "datasets/" if found["kind"] == "datasets" else ""
    return f"hf://{kind}{found['owner']}/{found['name']}@{found['commit']}"


def nothing_absent(key: str, name: HubName) -> bool:
    """Require every file."""
    return False


def located(
    config: Config,
    *,
    weights: bool = True,
    may_be_absent: Callable[[str, HubName], bool] = nothing_absent,
) -> tuple[Config, list[str]]:
    """Return `config` with a local path for each name on a hub, and one line of report per name.
    Files that the cache lacks are downloaded, except for a model's weights if `weights` is false. A
    name that cannot be fetched stays in the config if `may_be_absent` permits it; its line has the
    reason. Raises UserError for other names."""
    # Read before anything is fetched: a resume must use the commits of the first start.
    before = _earlier(config.run.dir)
    notes: list[str] = []

    def place(key: str, name: HubName) -> Path:
        # Other paths are written to or are specific to a machine, so a name on a hub is a mistake
        # there.
        if not _is_data(key) and key not in ("model.path", "objective.reference.path"):
            raise UserError.of(key, f"{name} is on a hub", "name a local path here")
        try:
            found = fetch(key, name, commit=_pinned(before, key, name), weights=weights)
        except UserError as error:
            if not may_be_absent(key, name):
                raise
            notes.append(f"{key}: {error.problems[0].what}")
            # The name stays as text: a plan or a memory estimate does not need the files.
            return Path(str(name))
        notes.append(f"{key}: {name} is {found}")
        return found

    return _replaced(config, "", place), notes


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
            # Identity, not equality: an unchanged section keeps its object and its record of set
            # keys.
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
    """Return the configuration of the run in this directory; empty if there is none."""
    try:
        return read_tree((run_dir / "config.yaml").read_text(encoding="utf-8"))[0]
    except (OSError, ValueError, YamlFault):
        return {}


def _pinned(before: Mapping[str, Any], key: str, name: HubName) -> str | None:
    """Return the commit that the run began with; null if the config names a commit itself."""
    value: Any = before
    for part in key.split("."):
        if isinstance(value, list):
            # A source may have been added since the first start; it has no commit yet.
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    found = SNAPSHOT.search(str(value))
    # A pin holds for the same repository only; a new name starts at its own newest commit.
    same = found is not None and f"{found['owner']}/{found['name']}" == name.id
    if found is None or not same or COMMIT.fullmatch(name.revision or ""):
        return None
    return found["commit"]


def cached_file(model: str, file: str) -> Path | None:
    """Return a file of a model in the hub's cache; null if the cache lacks it."""
    from huggingface_hub import errors, try_to_load_from_cache

    # A local path is not a valid repository name, and then there is nothing to look up.
    with contextlib.suppress(errors.HFValidationError):
        found = try_to_load_from_cache(model, file)
        return Path(found) if isinstance(found, str) else None
    return None


def fetch(key: str, name: HubName, *, commit: str | None = None, weights: bool = True) -> Path:
    """Return the local folder, or the file or pattern in it. `commit` overrides the name's
    revision. Raises UserError with `key`."""
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
        # The client does not know braces. A path may also be a folder, whose files `/*` matches.
        patterns = alternatives_of(str(name.path))
        wanted, unwanted = [*patterns, *(f"{one}/*" for one in patterns)], []
    else:
        wanted = [*SMALL_FILES, *([WEIGHTS] if weights else [])]
        unwanted = list(NOT_READ)
    folder = _download(key, name, commit, wanted, unwanted)
    if name.path is None:
        return folder
    # The client succeeds when a pattern matches nothing, so the result is checked here.
    if not all(paths_matching(folder, one) for one in alternatives_of(str(name.path))):
        try:
            listed = _files_on_hub(name, folder)
        except Exception as error:
            absent = _absent(str(name.path))
            raise UserError.of(key, *_explained(name, absent)) from error
        raise UserError.of(key, f"{name.id} has no {name.path}", _name_a_file(name, listed))
    # An interrupted download leaves a folder that looks whole to every reader.
    missing = _missing_pieces(folder, name.path)
    if missing:
        what = f"lacks {len(missing)} pieces, such as {missing[0]}"
        raise UserError.of(key, f"{name} {what}", _fetch_it(name))
    return folder / name.path


def _download(
    key: str, name: HubName, commit: str | None, wanted: list[str], unwanted: Iterable[str] = ()
) -> Path:
    """Return the folder of a commit that contains the files of these patterns."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name.id,
            repo_type="dataset" if name.is_data else "model",
            revision=commit or name.revision,
            allow_patterns=wanted,
            ignore_patterns=list(unwanted) or None,
        )
    except Exception as error:
        raise UserError.of(key, *_explained(name, error)) from error
    return Path(folder)


def _path_of_split(key: str, name: HubName, folder: Path) -> str:
    """Return the file or pattern of the split that `name` requests; the default for training is
    `train`. `folder`: folder of a commit, with the card."""
    whole = replace(name, part=None, split=None)
    files = _listed(key, name, folder)
    part, splits = _splits(key, name, folder / CARD, files)
    if not splits:
        what = f"{whole} states neither in its card nor by names which of its files are a split"
        raise UserError.of(key, what, _name_a_file(whole, files))
    training = key == "data.train" or key.startswith("data.sources.")
    # Evaluation has no default: a held-out set that silently is the training set misleads.
    split = name.split or ("train" if training else None)
    if split not in splits:
        which = ", ".join(str(replace(whole, part=part, split=one)) for one in splits)
        what = f"{whole} has no split {split}" if split else f"{name} names no split to evaluate on"
        raise UserError.of(key, what, f"write one of {which}")
    return one_pattern(splits[split], files)


def _files_on_hub(name: HubName, folder: Path) -> list[str]:
    """Return every file of the commit, from the client's list in the cache or from the hub. Raises
    the client's errors, after one attempt if the hub cannot be reached."""
    import huggingface_hub as client

    with contextlib.suppress(Exception):  # clients of the first version keep no list
        kept = client.get_cached_repo_tree(name.id, repo_type="dataset", revision=folder.name)
        return sorted(file.path for file in kept)
    api = client.HfApi()
    # The client retries a failed request for a list many times, but this one only once.
    api.repo_info(name.id, repo_type="dataset", revision=folder.name)
    return sorted(api.list_repo_files(name.id, repo_type="dataset", revision=folder.name))


def _listed(key: str, name: HubName, folder: Path) -> list[str]:
    """Return every file of the commit. If they cannot be listed, return those in the cache,
    provided that the card is among them."""
    try:
        return _files_on_hub(name, folder)
    except Exception as error:
        there = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
        # Without the card, a split's files are unknown; with the card alone, there is nothing to
        # read.
        if CARD not in there or len(there) == 1:
            raise UserError.of(key, *_explained(name, _absent(CARD))) from error
        # A piece that the cache lacks must be missed later, not left out of its split.
        return sorted(there | _every_piece(there))


def _absent(file: str) -> Exception:
    from huggingface_hub import errors

    return errors.LocalEntryNotFoundError(file)


def _splits(
    key: str, name: HubName, card: Path, files: list[str]
) -> tuple[str | None, dict[str, list[str]]]:
    """Return the configuration that is meant, null where the data set has a single one, and the
    files of its splits by the rules of `datasets`."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import metadata_load

    try:
        header = (metadata_load(card) if card.exists() else None) or {}
        # A card without configurations still has one, whose files are found by their names.
        found = MetadataConfigs.from_dataset_card_data(header) or MetadataConfigs(default={})
        # YAML reads some names as numbers, such as years; a user writes text.
        parts = MetadataConfigs({str(one): entry for one, entry in found.items()})
        part = name.part or parts.get_default_config_name()
        splits = _matched(parts[part], files) if part in parts else {}
    except (TypeError, ValueError, yaml.YAMLError) as error:
        # TypeError: a card may hold values of any type.
        what = f"the card of {name} cannot be read: {_first_line(error)}"
        raise UserError.of(key, what, _name_a_file(name, files)) from error
    if part not in parts:
        what = f"has no configuration {name.part}" if name.part else "has several configurations"
        each = [replace(name, part=one, split=name.split or "train") for one in parts]
        raise UserError.of(key, f"{name} {what}", f"write one of {', '.join(map(str, each))}")
    return part if len(parts) > 1 else None, splits


def _matched(entry: Mapping[str, Any], files: list[str]) -> dict[str, list[str]]:
    """Return the files of each split. `entry`: of one configuration in the card; without
    `data_files` the names of the files decide. Raises ValueError for patterns outside the data
    set."""
    from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns
    from fsspec.implementations.memory import MemoryFileSystem

    # MemoryFileSystem is global to the process: a random root keeps concurrent calls apart.
    root = f"/{uuid.uuid4().hex}"
    base = posixpath.normpath(f"{root}/{entry.get('data_dir') or ''}")
    listed = entry.get("data_files")
    patterns: dict[str, list[str]] = {} if listed is None else sanitize_patterns(listed)
    # `datasets` would follow a card to other repositories, to any address, and to local files.
    for one in [base, *(str(each) for them in patterns.values() for each in them)]:
        inside = posixpath.normpath(posixpath.join(base, one))
        if "://" in one or not f"{inside}/".startswith(f"{root}/"):
            shown = entry["data_dir"] if one == base else one
            raise ValueError(f"it names {shown}, which is outside the data set")

    # `datasets` matches patterns against a file system. This one holds an empty file for each name
    # in the commit's list, because offline only the list is certain to be complete.
    there = [one for one in files if one.endswith(ENDINGS) and not NO_DATA.search(one)]
    system = MemoryFileSystem()
    system.pipe({f"{root}/{one}": b"" for one in there})
    splits: dict[str, list[str]] = {}
    try:
        for split, them in (patterns or get_data_patterns(f"memory:/{base}")).items():
            found: set[str] = set()
            for one in them:
                with contextlib.suppress(FileNotFoundError):  # of a pattern that matches nothing
                    found.update(resolve_pattern(one, f"memory:/{base}"))
            if found:
                splits[str(split)] = sorted(one.partition(f"{root}/")[2] for one in found)
    except FileNotFoundError:  # of a data set without files in these formats
        return {}
    finally:
        # The file system is one for the whole process; its own recursive removal takes quadratic
        # time.
        for one in there:
            system.rm_file(f"{root}/{one}")
    return splits


def _missing_pieces(folder: Path, wanted: str) -> list[str]:
    """Return the files that match `wanted` and that `folder` lacks, according to the numbers in the
    names of other pieces."""
    # Only pieces of the requested files count; other splits may be absent on purpose.
    patterns = [each for one in alternatives_of(wanted) for each in (one, f"{one}/*")]
    inside = [one for pattern in patterns for one in paths_matching(folder, pattern)]
    there = {str(one.relative_to(folder)) for one in inside}
    return sorted(
        one
        for one in _every_piece(there) - there
        if any(fnmatch.fnmatch(one, pattern) for pattern in patterns)
    )


def _every_piece(there: Iterable[str]) -> set[str]:
    """Return the names of all pieces of those sets that have at least one piece here."""
    sets = {(f["before"], f["of"], f["after"]) for one in there if (f := PIECE.fullmatch(one))}
    return {
        # The hub's libraries pad both numbers to the same width.
        f"{before}{number:0{len(of)}}-of-{of}{after}"
        for before, of, after in sets
        for number in range(int(of))
    }


def _explained(name: HubName, error: Exception) -> tuple[str, str]:
    """Return a description of the error, and the fix."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    what = "data set" if name.is_data else "model"
    if isinstance(error, errors.GatedRepoError):
        page = f"{where}/{'datasets/' if name.is_data else ''}{name.id}"
        return (
            f"{name} is gated",
            f"accept its terms at {page}, then `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = "check the spelling; for a private one `hf auth login` or set HF_TOKEN"
        return f"{where} has no {what} {name.id} that you may read", fix
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.id} has no revision {name.revision!r}", "name a branch, a tag or a commit"
    if isinstance(error, errors.HFValidationError):
        return f"{name} is not a name on a hub: {_first_line(error)}", "write hf://OWNER/NAME"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{where} cannot be reached"
        return (
            f"{name} is not whole in the cache ({constants.HF_HUB_CACHE}), and {why}",
            _fetch_it(name),
        )
    cause = f"{type(error).__name__}: {_first_line(error)}"
    return f"{name} cannot be fetched: {cause}", "try again, or name a local folder"


def _fetch_it(name: HubName) -> str:
    kind = "--repo-type dataset " if name.is_data else ""
    revision = f" --revision {name.revision}" if name.revision else ""
    return (
        f"where there is a network, `hf download {kind}{name.id}{revision}` with this HF_HOME,"
        " or name a local folder"
    )


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def _name_a_file(name: HubName, listed: list[str]) -> str:
    """Return the fix that shows files of the data set."""
    files = [file for file in listed if file.endswith(ENDINGS)]
    shown = f": {', '.join(files[:6])}" if files else ", such as /data/train-*.parquet"
    return f"add the file, or a pattern of files, in it{shown}"
