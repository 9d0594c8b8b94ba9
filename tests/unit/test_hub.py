"""Names of models and data sets on a hub are resolved once, in the cache or over HTTP, and
pinned."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub
import pytest
from huggingface_hub import constants

from megatron_async_rl import evaluate, study
from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.files import read_rows
from megatron_async_rl.data.hub import located, name_of, parse
from megatron_async_rl.plan.model_files import published_shape, read_model
from tests.unit.test_study import write_grid
from tests.written_run import write_model, write_prompts, write_run

OLD, NEW = "a" * 40, "b" * 40
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, without a network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    return folder


def cached(cache: Path, kind: str, commit: str, *, main: bool = True) -> Path:
    """Write the folder of a commit of me/tiny as a download leaves it, and return it."""
    repository = cache / f"{kind}--me--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return snapshot


def run_of(tmp_path: Path, *overrides: str) -> Config:
    return load(write_run(tmp_path), overrides)


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        located(config)
    return str(caught.value)


def test_a_hub_name_is_not_resolved_as_a_path(tmp_path: Path) -> None:
    config = run_of(tmp_path, "model.path=hf://me/tiny@v1")
    name = parse(config.model.path)
    assert name is not None
    assert str(name) == "hf://me/tiny@v1"
    assert (name.id, name.revision, name.is_data) == ("me/tiny", "v1", False)
    files = parse(Path("hf://datasets/me/tiny/data/train-*.parquet"))
    assert files is not None
    assert (files.id, files.path, files.is_data) == ("me/tiny", "data/train-*.parquet", True)
    whole = parse(Path("hf://datasets/me/tiny@v1#main/test"))
    assert whole is not None
    assert str(whole) == "hf://datasets/me/tiny@v1#main/test"
    assert (whole.revision, whole.part, whole.split, whole.path) == ("v1", "main", "test", None)


def test_cached_files_are_used_without_a_network(tmp_path: Path, cache: Path) -> None:
    snapshot = write_model(cached(cache, "models", OLD))
    data = cached(cache, "datasets", NEW)
    write_prompts(data / "train.jsonl")
    config, notes = located(
        run_of(tmp_path, "model.path=hf://me/tiny", "data.train=hf://datasets/me/tiny/train.jsonl")
    )
    assert config.model.path == snapshot
    assert config.data.train == data / "train.jsonl"
    assert notes[0] == f"model.path: hf://me/tiny is {snapshot}"
    assert read_model(config.model.path)[1] == []
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml") == config, "a run's config.yaml has the commit's folder"
    assert name_of(config.model.path) == f"hf://me/tiny@{OLD}"


def test_a_run_continues_with_the_commit_it_began_with(tmp_path: Path, cache: Path) -> None:
    write_model(cached(cache, "models", OLD))
    config = run_of(tmp_path, "model.path=hf://me/tiny")
    begun, _ = located(config)
    config.run.dir.mkdir()
    (config.run.dir / "config.yaml").write_text(dump(begun))
    moved = write_model(cached(cache, "models", NEW))
    assert located(config)[0] == begun
    other = run_of(tmp_path, "model.path=hf://me/tiny", "run.dir=elsewhere")
    assert located(other)[0].model.path == moved
    requested = run_of(tmp_path, f"model.path=hf://me/tiny@{NEW}")
    assert located(requested)[0].model.path == moved, "a commit by its number is another model"


def test_a_source_added_later_has_the_newest_commit(tmp_path: Path, cache: Path) -> None:
    def sources(*names: str) -> Config:
        path = "hf://datasets/me/tiny"
        entries = ", ".join(f"{{path: '{path}/{name}', name: {name}}}" for name in names)
        return run_of(tmp_path, "data.train=null", f"data.sources=[{entries}]")

    for commit in (OLD, NEW):
        folder = cached(cache, "datasets", commit)
        for name in ("a.jsonl", "b.jsonl"):
            write_prompts(folder / name)
        if commit == OLD:
            begun, _ = located(sources("a.jsonl"))
            begun.run.dir.mkdir()
            (begun.run.dir / "config.yaml").write_text(dump(begun))
    found, _ = located(sources("a.jsonl", "b.jsonl"))
    assert [one.path.parent.name for one in found.data.sources] == [OLD, NEW]


def test_sources_of_different_data_sets_keep_different_labels(tmp_path: Path, cache: Path) -> None:
    for folder in (cached(cache, "datasets", OLD), cache / "datasets--me--other/snapshots" / OLD):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text("# A data set")
        write_prompts(folder / "train.jsonl")
    (cache / "datasets--me--other" / "refs").mkdir()
    (cache / "datasets--me--other" / "refs" / "main").write_text(OLD)
    entries = ", ".join(f"{{path: 'hf://datasets/me/{one}'}}" for one in ("tiny", "other"))
    config = run_of(tmp_path, "data.train=null", f"data.sources=[{entries}]")
    found, _ = located(config)
    assert [one.path.name for one in found.data.sources] == ["train.jsonl", "train.jsonl"]
    assert [one.label for one in found.data.sources] == ["tiny", "other"]
    # The ranks of a run read this file.
    (tmp_path / "located.yaml").write_text(dump(found))
    assert [one.label for one in load(tmp_path / "located.yaml").data.sources] == ["tiny", "other"]


def test_a_study_finds_the_models_of_its_runs_on_a_hub(tmp_path: Path, cache: Path) -> None:
    snapshot = write_model(cached(cache, "models", OLD))
    grid = read_grid(write_grid(tmp_path))
    grid.base.write_text(grid.base.read_text().replace("path: model", "path: hf://me/tiny"))
    configs = study.check(grid, runs_of(grid), jobs=1, again=["waiting"])
    assert {config.model.path for config in configs.values()} == {snapshot}


def test_an_evaluation_does_not_write_into_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = evaluate.find_target(write_model(cached(cache, "models", OLD)), None)
    assert found.result == tmp_path / f"eval_me--tiny@{OLD}.json"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "model.path=hf://me/tiny",
            ("hf://me/tiny is not complete in the cache", "hf download me/tiny"),
        ),
        (
            "data.train=hf://datasets/me/tiny@v2/x.jsonl",
            ("data.train", "HF_HUB_OFFLINE is set", "--repo-type dataset me/tiny --revision v2"),
        ),
        (
            "data.train=hf://datasets/me/tiny#test",
            (
                "hf://datasets/me/tiny#test is not complete in the cache",
                "--repo-type dataset me/tiny",
            ),
        ),
        ("data.train=hf://me/tiny", ("is the name of a model", "write hf://datasets/me/tiny")),
        ("model.path=hf://datasets/me/tiny/x", ("is the name of a data set", "write hf://me/tiny")),
        ("model.path=hf://me/tiny/part", ("is a part of a model", "write hf://me/tiny")),
        ("model.path=hf://me/tiny#train", ("is a part of a model", "write hf://me/tiny")),
        ("model.path=hf://tiny", ("is not a name on a hub", "write hf://OWNER/NAME")),
        ("model.path=hf://me/ti!ny", ("is not a name on a hub", "write hf://OWNER/NAME")),
        ("run.dir=hf://me/tiny", ("run.dir", "name a local path here")),
    ],
)
def test_an_unavailable_name_is_refused_with_the_fix(
    tmp_path: Path, cache: Path, override: str, words: tuple[str, ...]
) -> None:
    message = refusal(run_of(tmp_path, override))
    for word in words:
        assert word in message


def test_an_unreachable_hub_is_distinguished_from_offline_mode(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert f"{UNREACHABLE} cannot be reached" in refusal(
        run_of(tmp_path, "model.path=hf://me/tiny")
    )


@pytest.mark.parametrize("card", [True, False])
@pytest.mark.parametrize("named", ["", "/x.jsonl"])
def test_an_unreachable_hub_is_requested_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, named: str, card: bool
) -> None:
    snapshot = cached(cache, "datasets", OLD)
    if card:
        (snapshot / "README.md").write_text("# A data set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    tried = []

    def refused(address: tuple[str, int], *rest: object, **given: object) -> socket.socket:
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refused)
    message = refusal(run_of(tmp_path, f"data.train=hf://datasets/me/tiny{named}"))
    assert f"is not complete in the cache ({cache}), and {UNREACHABLE} cannot be reached" in message
    assert 1 <= len(tried) <= 3


@pytest.mark.parametrize("named", ["data", "data/train-*.parquet", "*/train-0000[01]-of-*"])
def test_partly_cached_data_is_refused(tmp_path: Path, cache: Path, named: str) -> None:
    folder = cached(cache, "datasets", OLD) / "data"
    folder.mkdir()
    write_prompts(folder / "train-00000-of-00003.parquet")
    write_prompts(folder / "test-00000-of-00001.parquet")
    config = run_of(tmp_path, f"data.train=hf://datasets/me/tiny/{named}")
    message = refusal(config)
    assert ("lacks 1" if "01" in named else "lacks 2") in message
    assert "such as data/train-00001-of-00003.parquet" in message
    assert "`hf download --repo-type dataset me/tiny` with this HF_HOME" in message
    one = "data.train=hf://datasets/me/tiny/data/train-00000-of-00003.parquet"
    assert located(run_of(tmp_path, one))[0].data.train.name == "train-00000-of-00003.parquet"


def test_a_removed_folder_of_the_cache_is_named_with_its_commit(cache: Path) -> None:
    gone = cache / "models--me--tiny" / "snapshots" / OLD
    _, (problem,) = read_model(gone)
    assert f"set model.path to hf://me/tiny@{OLD}" in problem.fix


class Hub(ThreadingHTTPServer):
    """Server with the parts of a hub that a download of me/tiny needs."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.commit = OLD
        self.error = ""
        self.fetched: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, unquote(self.path.partition("?")[0])
        path = path.replace("/datasets/", "/models/" if path.startswith("/api/") else "/", 1)
        if hub.error:
            self.answer(b"{}", error=hub.error)
        elif path.startswith("/api/models/me/tiny/revision/"):
            known = path.endswith(("/main", hub.commit))
            error = None if known else "RevisionNotFound"
            self.answer(json.dumps({"id": "me/tiny", "sha": hub.commit}).encode(), error=error)
        elif path.startswith("/api/models/me/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": digest(content)}
                for name, content in hub.files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith("/me/tiny/resolve/"):
            name = path.split("/", 5)[5]
            hub.fetched += [name] if self.command == "GET" else []
            self.answer(hub.files[name])
        else:
            self.answer(b"{}", error="RepoNotFound")

    def answer(self, content: bytes, error: str | None = None) -> None:
        self.send_response(404 if error else 200)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("X-Repo-Commit", self.server.commit)
        self.send_header("ETag", f'"{digest(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    model = write_model(tmp_path / "on-the-hub")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    files |= {"pytorch_model.bin": b"x", "original/params.json": b"{}"}
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.shutdown()
    server.server_close()


def test_only_the_files_that_a_run_reads_are_fetched_and_once(tmp_path: Path, hub: Hub) -> None:
    config = run_of(tmp_path, "model.path=hf://me/tiny")
    planned, _ = located(config, weights=False)
    assert read_model(planned.model.path, weights=False)[1] == []
    described = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(hub.fetched) == described
    trained, _ = located(config)
    assert read_model(trained.model.path)[1] == []
    assert hub.fetched[3:] == ["model.safetensors"]
    assert name_of(trained.model.path) == f"hf://me/tiny@{OLD}"


def test_a_cache_without_one_file_of_a_model_is_refused(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, "model.path=hf://me/tiny")
    found, _ = located(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert located(config)[0].model.path == found.model.path
    (found.model.path / "tokenizer.json").unlink()
    assert "hf://me/tiny is not complete in the cache" in refusal(config)


ONE_PART = """---
configs:
- config_name: main
  data_dir: main
  data_files:
  - split: train
    path: "*-learn.jsonl"
  - {split: held, path: [b-test.jsonl, "**/c-test.jsonl"]}
---
# A data set
"""
TWO_PARTS = """---
configs:
- {config_name: main, data_dir: main}
- {config_name: socratic, data_files: "other/*"}
---
"""
YEARS = TWO_PARTS.replace("main,", "2024,").replace("socratic", "2025")
ONE_OF_TWO = TWO_PARTS.replace("data_dir: main", "data_dir: main, default: true")


def card_of(data_files: str) -> str:
    return f"---\nconfigs:\n- config_name: main\n  data_files: {data_files}\n---\n"


def on_hub(hub: Hub, card: str | None, *names: str) -> None:
    """Write a data set with one prompt per file."""
    hub.files = {"README.md": card.encode()} if card is not None else {}
    hub.files |= {name: json.dumps({"prompt": name}).encode() for name in names}


def prompts_of(location: Path) -> list[str]:
    return [row["prompt"] for _, _, row in read_rows(location)]


@pytest.mark.parametrize(
    ("card", "names", "requested", "read"),
    [
        (ONE_PART, "main/a-learn.jsonl main/b-learn.jsonl x-learn.jsonl", "", 2),
        (ONE_PART, "main/b-test.jsonl main/c-test.jsonl main/d.jsonl", "#held", 2),
        (ONE_PART, "main/a-learn.jsonl main/x/b-learn.jsonl", "#main/train", 1),
        (ONE_OF_TWO, "main/train.jsonl train.jsonl other/x.jsonl", "", 1),
        (
            TWO_PARTS,
            "other/x.jsonl other/y.jsonl other/config.json main/train.jsonl",
            "#socratic/train",
            2,
        ),
        (YEARS, "other/x.jsonl main/train.jsonl", "#2025/train", 1),
        (None, "train.jsonl test.jsonl notes.csv .a/train.jsonl", "", 1),
        ("# no header", "train-00000-of-00002.json train-00001-of-00002.json dev.json", "", 2),
        (None, "data/odd-00000-of-00001.json data/even-00000-of-00001.json", "#odd", 1),
        (None, "train/a.jsonl train/b.jsonl test/train.jsonl", "@main", 2),
        (None, "my_dev.jsonl train.jsonl", "#validation", 1),
        (None, "train/[a].jsonl test/[b].jsonl", "", 1),
        (None, "train/a.jsonl train/x/b.jsonl test.jsonl", "", 2),
        (None, "my-train.jsonl train-a.jsonl my.jsonl", "", 2),
        (None, "train/x/b.jsonl train/x/c.jsonl train/{a,b}.jsonl test/b.jsonl", "", 3),
        (None, "a.jsonl part/b.jsonl notes.txt dataset_info.json", "", 2),
        ("# no header", "a.jsonl", "#train", 1),
    ],
)
def test_a_whole_data_set_means_the_files_of_its_split(
    tmp_path: Path, hub: Hub, card: str | None, names: str, requested: str, read: int
) -> None:
    on_hub(hub, card, *names.split())
    expected = names.split()[:read]
    config = run_of(tmp_path, f"data.train=hf://datasets/me/tiny{requested}")
    found, notes = located(config)
    assert found.data.train is not None
    assert prompts_of(found.data.train) == expected
    assert sorted(hub.fetched) == sorted([*expected, *["README.md"] * (card is not None)])
    assert notes[0].startswith(f"data.train: hf://datasets/me/tiny{requested} is ")


@pytest.mark.parametrize(
    ("key", "card", "names", "requested", "words"),
    [
        ("train", ONE_PART, "main/a-learn.jsonl", "#held", ("no split held", "tiny#train")),
        (
            "train",
            None,
            "dev.csv test.csv",
            "",
            ("no split train", "tiny#validation, hf://", "#test"),
        ),
        ("eval", None, "train.csv test.csv", "", ("names no split to evaluate on", "tiny#test")),
        ("train", TWO_PARTS, "x", "", ("several configurations", "#main/train, ", "#socratic/tr")),
        ("train", TWO_PARTS, "x", "#x/test", ("has no configuration x", "#socratic/test")),
        ("train", TWO_PARTS, "other/x.csv", "#socratic/test", ("no split test", "#socratic/train")),
        ("train", None, "a.bin b.txt", "", ("neither its card nor the names of its files",)),
        ("eval", None, "a.csv b.csv", "#test", ("no split test", "write one of", "tiny#train")),
        ("train", "---\na: [\n---\n", "train.csv", "", ("card", "cannot be read", "train.csv")),
        (
            "train",
            card_of('{a: "*"}'),
            "train.csv",
            "",
            ("card", "Expected data_files", "train.csv"),
        ),
        ("train", card_of('[{split: 7, path: "*"}]'), "train.csv", "", ("card", "cannot be read")),
        ("train", card_of("../x/*"), "train.csv", "", ("names ../x/*, which is outside",)),
        ("train", card_of("/etc/hosts"), "train.csv", "", ("names /etc/hosts, which is outside",)),
        ("train", card_of("hf://datasets/a/b/*"), "train.csv", "", ("names hf://datasets/a/b/*,",)),
    ],
)
def test_an_unknown_split_is_refused_with_the_known_splits(
    tmp_path: Path,
    hub: Hub,
    key: str,
    card: str | None,
    names: str,
    requested: str,
    words: list[str],
) -> None:
    on_hub(hub, card, *names.split())
    message = refusal(run_of(tmp_path, f"data.{key}=hf://datasets/me/tiny{requested}"))
    for word in words:
        assert word in message
    assert set(hub.fetched) <= {"README.md"}


def test_a_whole_data_set_in_the_cache_needs_no_network(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hub(hub, None, "train-1.jsonl", "train-2.jsonl", "test.jsonl")
    config = run_of(tmp_path, "data.train=hf://datasets/me/tiny")
    found = located(config)[0].data.train
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert located(config)[0].data.train == found
    test = run_of(tmp_path, "data.train=hf://datasets/me/tiny#test")
    assert "hf://datasets/me/tiny/test.jsonl is not complete in the cache" in refusal(test)


def test_a_cache_without_a_list_of_files_needs_the_card(tmp_path: Path, cache: Path) -> None:
    """The cache is that of a client that stores no list of a commit's files."""
    folder = cached(cache, "datasets", OLD)
    (folder / "train-00000-of-00002.jsonl").write_text('{"prompt": "0"}')
    config = run_of(tmp_path, "data.train=hf://datasets/me/tiny")
    assert "hf://datasets/me/tiny is not complete in the cache" in refusal(config)
    (folder / "README.md").write_text("# A data set")
    assert "lacks 1 pieces, such as train-00001-of-00002.jsonl" in refusal(config)
    (folder / "train-00001-of-00002.jsonl").write_text('{"prompt": "1"}')
    found = located(config)[0].data.train
    assert found is not None
    assert prompts_of(found) == ["0", "1"]


def test_a_run_continues_with_the_commit_of_its_whole_data_set(tmp_path: Path, hub: Hub) -> None:
    on_hub(hub, "# A data set", "train.jsonl")
    config = run_of(tmp_path, "data.train=hf://datasets/me/tiny")
    begun, _ = located(config)
    config.run.dir.mkdir()
    (config.run.dir / "config.yaml").write_text(dump(begun))
    hub.commit = NEW
    assert located(config)[0] == begun


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf://me/tyni", ("has no model me/tyni that you may read", "check the spelling")),
        ("hf://me/tiny@v7", ("me/tiny has no revision 'v7'", "a branch, a tag or a commit")),
    ],
)
def test_a_wrong_name_is_reported_by_the_hub(
    tmp_path: Path, hub: Hub, name: str, words: tuple[str, ...]
) -> None:
    message = refusal(run_of(tmp_path, f"model.path={name}"))
    for word in words:
        assert word in message


@pytest.mark.parametrize("caches_lists", [True, False])
def test_a_file_that_a_data_set_lacks_is_refused_with_its_files(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caches_lists: bool
) -> None:
    if not caches_lists:  # as early 1.x clients
        monkeypatch.setattr(huggingface_hub, "get_cached_repo_tree", None, raising=False)
    on_hub(hub, "# A data set", "b.jsonl", "a.jsonl", "notes.txt")
    message = refusal(run_of(tmp_path, "data.train=hf://datasets/me/tiny/c.jsonl"))
    assert "me/tiny has no c.jsonl" in message
    assert "append a file of the data set, or a pattern of files: a.jsonl, b.jsonl" in message


def test_a_gated_repository_is_refused_with_its_page(tmp_path: Path, hub: Hub) -> None:
    hub.error = "GatedRepo"
    for override, page in (
        ("model.path=hf://me/tiny", "me/tiny"),
        ("data.train=hf://datasets/me/tiny/a.jsonl", "datasets/me/tiny"),
    ):
        message = refusal(run_of(tmp_path, override))
        assert f"{override.partition('=')[2]} is gated" in message
        assert f"accept its terms at {hub.address}/{page}, then run `hf auth login`" in message


def test_another_error_of_a_download_is_named(tmp_path: Path, hub: Hub, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    message = refusal(run_of(tmp_path, "model.path=hf://me/tiny"))
    assert "hf://me/tiny cannot be fetched: NotADirectoryError: " in message
    assert "fix: try again, or name a local folder" in message


def test_sizes_of_an_absent_model_come_from_the_cache_or_the_table(
    tmp_path: Path, cache: Path
) -> None:
    """The parameter counts equal those of the models' files."""
    for name, parameters in {
        "Qwen3-8B": 8_190_735_360,
        "Qwen3-32B": 32_762_123_264,
        "Qwen3-30B-A3B": 30_532_122_624,
        "Qwen2.5-32B": 32_763_876_352,
    }.items():
        for path in (tmp_path / "models" / name, Path(f"hf://Qwen/{name}")):
            found = published_shape(path)
            assert found is not None
            assert (found[0].parameters, "the table" in found[1]) == (parameters, True)
    hub_names = (Path("hf://me/Qwen3-8B"), Path("hf://me/no!name"))
    for unknown in (tmp_path / "models" / "Qwen9-8B", *hub_names):
        assert published_shape(unknown) is None

    repository = cache / "models--Qwen--Qwen3-8B"
    snapshot = repository / "snapshots" / OLD
    write_model(snapshot, hidden_size=48)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    shape, source = published_shape(tmp_path / "models" / "Qwen3-8B") or (None, "")
    assert shape is not None
    assert (shape.hidden, "the hub's cache" in source) == (48, True)


def test_an_absent_name_that_is_allowed_stays_with_the_reason(tmp_path: Path, cache: Path) -> None:
    config = run_of(tmp_path, "model.path=hf://Qwen/Qwen3-8B", "data.train=hf://datasets/me/tiny")
    with pytest.raises(UserError, match=r"data\.train"):
        located(config, weights=False, may_be_absent=lambda key, name: key == "model.path")
    found, notes = located(config, weights=False, may_be_absent=lambda key, name: True)
    assert found.model.path == config.model.path
    assert [note.partition(":")[0] for note in notes] == ["model.path", "data.train"]
    assert "HF_HUB_OFFLINE is set" in notes[0]
