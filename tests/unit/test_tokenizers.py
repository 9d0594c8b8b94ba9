"""The tokenizers of this project give the ids of transformers, without an import of it."""

import importlib.util
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import processors

from megatron_async_rl.data import DataError, Tokenizer, load_tokenizer, read_prompts
from tests.cases import looped
from tests.characters import save_characters

ROOT = Path(__file__).resolve().parents[2]


def prepare_script(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"prepare_{example}", ROOT / "examples" / example / "prepare.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["arithmetic", "countdown"])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    script = prepare_script(request.param)
    script.write_data(folder, seed=3)
    script.write_model(folder / "model", seed=3)
    return folder


def test_ids_and_text_are_those_of_transformers(example: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (
        load_tokenizer(example / "model"),
        AutoTokenizer.from_pretrained(str(example / "model")),
    )
    rows = [json.loads(line) for line in (example / "sft.jsonl").read_text().splitlines()[:500]]
    for row in rows:
        prompt, response = (
            ours.encode(row["prompt"]),
            ours.encode(row["response"], special_tokens=False),
        )
        assert prompt == theirs.encode(row["prompt"])
        assert response == theirs.encode(row["response"], add_special_tokens=False)
        assert prompt[0] == 1, "both examples put a BOS before a prompt"
        sampled = [*response, ours.eos_ids[0]]
        assert ours.decode(sampled) == theirs.decode(sampled, skip_special_tokens=True)
        assert ours.decode(sampled).strip() == row["response"]


def test_the_arithmetic_example_is_read_without_transformers(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes seconds in every process with a tokenizer."""
    if (example / "model" / "tokenizer.json").exists():
        monkeypatch.setitem(sys.modules, "transformers", None)
        assert load_tokenizer(example / "model").eos_ids == (2,)


def test_a_vocabulary_divides_over_two_tensor_ranks_and_matches_the_model(example: Path) -> None:
    size = load_tokenizer(example / "model").vocab_size
    assert size % 2 == 0
    assert size == json.loads((example / "model" / "config.json").read_text())["vocab_size"]


def test_writing_an_example_again_writes_the_same(example: Path, tmp_path: Path) -> None:
    script = prepare_script(
        "arithmetic" if (example / "model/tokenizer.json").exists() else "countdown"
    )
    script.write_data(tmp_path, seed=3)
    script.write_model(tmp_path / "model", seed=3)
    for path in sorted(example.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / path.relative_to(example)).read_bytes(), (
                path.name
            )


def test_held_out_prompts_are_in_neither_training_file(example: Path) -> None:
    def tasks(name: str) -> set[tuple[str, ...]]:
        prompts = [json.loads(line)["prompt"] for line in (example / name).read_text().splitlines()]
        # Countdown's tasks do not depend on the order of the numbers
        return {tuple(sorted(prompt.split())) for prompt in prompts}

    held_out = tasks("eval.jsonl")
    assert len(held_out) == 256
    assert not held_out & tasks("train.jsonl")
    assert not held_out & tasks("sft.jsonl")


def test_every_line_of_an_example_is_solvable_by_its_own_reward(example: Path) -> None:
    from megatron_async_rl.rollout.rewards.registry import load_reward

    tokenizer = load_tokenizer(example / "model")
    if (example / "model/tokenizer.model").exists():
        prompts = read_prompts(example / "train.jsonl", tokenizer)
        # the same tasks in the same order, with shuffled numbers
        rows = [json.loads(line) for line in (example / "sft.jsonl").read_text().splitlines()]
        answers = {prompt.text: row["response"] for prompt, row in zip(prompts, rows, strict=True)}
        reward = load_reward("countdown").function
    else:
        prompts = read_prompts(example / "train.jsonl", tokenizer)
        answers = {prompt.text: str(eval(prompt.text[:-1])) for prompt in prompts}
        reward = load_reward("arithmetic").function
    assert all(reward(prompt, answers[prompt.text]) == 1.0 for prompt in prompts)


def copy_tokenizer(example: Path, to: Path, **settings: object) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "config.json"):
        if (example / "model" / name).exists():
            (to / name).write_bytes((example / "model" / name).read_bytes())
    config = json.loads((to / "tokenizer_config.json").read_text())
    merged = {key: value for key, value in {**config, **settings}.items() if value is not None}
    (to / "tokenizer_config.json").write_text(json.dumps(merged))
    return load_tokenizer(to)


@looped("bos", [True, False, None])
@looped("eos", [True, False, None])
def test_bos_and_eos_stand_where_transformers_puts_them(
    example: Path, tmp_path: Path, bos: bool | None, eos: bool | None
) -> None:
    from transformers import AutoTokenizer

    ours = copy_tokenizer(example, tmp_path, add_bos_token=bos, add_eos_token=eos)
    ids = ours.encode("12")
    assert ids == AutoTokenizer.from_pretrained(str(tmp_path)).encode("12")
    if (tmp_path / "tokenizer.model").exists():
        assert (ids[0] == 1, ids[-1] == 2) == (bool(bos), bool(eos))


def test_every_eos_id_counts_and_the_tokenizers_own_comes_first(
    example: Path, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert copy_tokenizer(example, tmp_path).eos_ids == (2, 7, 9)


def test_chat_messages_go_through_the_models_template(example: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{%"
        " endif %}"
    )
    tokenizer = copy_tokenizer(example, tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "1 "}, {"role": "user", "content": "2"}]
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": messages}) + "\n")
    (prompt,) = read_prompts(data, tokenizer)
    assert prompt.text == "1 2:"
    assert list(prompt.token_ids) == tokenizer.encode("1 2:", special_tokens=False), (
        "a template writes its own BOS"
    )


def test_a_chat_prompt_without_a_template_is_refused(example: Path, tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "1"}]}\n')
    with pytest.raises(DataError, match=r"chat.jsonl:1: .*has no chat template"):
        read_prompts(data, load_tokenizer(example / "model"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither tokenizer.json nor tokenizer.model"),
        ({"tokenizer.json": "{"}, "is not a tokenizer"),
        ({"tokenizer.model": "x"}, "is not a SentencePiece model"),
    ],
)
def test_a_directory_without_a_usable_tokenizer_is_refused(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_settings_that_are_not_an_object_are_refused(tmp_path: Path, name: str) -> None:
    save_characters(tmp_path)
    for content, fault in (("[]", "is not a JSON object"), ("{", "is not JSON: Expecting")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=rf"{name}: {fault}"):
            load_tokenizer(tmp_path)


def test_a_model_that_names_no_end_of_sequence_is_refused(example: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (example / "model" / name).exists():
            (tmp_path / name).write_bytes((example / "model" / name).read_bytes())
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        load_tokenizer(tmp_path)


# SentencePiece models


WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "hello",
    "world",
    "1",
    "2",
    "42",
    "=",
    "+",
    "(",
    ")",
    "naïve",
    "ünï",
    "你好",
    "世界",
    "foo()",
    "return",
]
BPE = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
PIECES: dict[str, dict[str, Any]] = {
    "llama": {**BPE, "vocab_size": 360, "remove_extra_whitespaces": False},
    "gemma": {**BPE, "vocab_size": 360, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    | {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "own": {**BPE, "vocab_size": 360, "user_defined_symbols": ["<|im_start|>", "<sep>"]},
    "unigram": {"model_type": "unigram", "vocab_size": 80},
}
"""Family of models -> its options of SentencePiece's training."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
EXTRA = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
ADDED = {
    "400": {"content": "<extra>", "special": False, **EXTRA},
    "401": {"content": "<|im_end|>", "special": True, **EXTRA, "rstrip": True},
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", **SPECIAL, "add_bos_token": True}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", **SPECIAL, "added_tokens_decoder": ADDED}),
    ("gemma3_text", {"tokenizer_class": "GemmaTokenizer", **SPECIAL, "add_bos_token": True}),
    ("qwen3", {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, "pad_token": "[PAD]"}),
]
TEXTS = (
    *("", " ", "  hello  world ", "\n", "a\n\nb", "\t", "<s>x</s>", "x<extra>y", "x <extra> y"),
    *(
        "<|im_start|>user\nhi<|im_end|>\n",
        "<sep>",
        "你好世界",
        "🙂",
        "naïve",
        "１ ﬁ",
        "▁ x▁",
        "x\0y",
    ),
)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    from sentencepiece import SentencePieceTrainer

    choose = random.Random(0)
    found = {}
    for name, settings in PIECES.items():
        written = io.BytesIO()
        corpus = (" ".join(choose.choices(WORDS, k=12)) for _ in range(500))
        SentencePieceTrainer.train(
            sentence_iterator=corpus,
            model_writer=written,
            hard_vocab_limit=False,
            minloglevel=2,
            **settings,
        )
        found[name] = written.getvalue()
    return found


def save_pieces(folder: Path, model: bytes, family: str = "llama", **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "config.json").write_text(json.dumps({"model_type": family, "eos_token_id": 1}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def differences(folder: Path, texts: tuple[str, ...]) -> list[Any]:
    """Return the texts whose ids, or decoded text, differ from those of transformers."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    found: list[Any] = []
    for text in texts:
        for around in (True, False):
            ids = theirs.encode(text, add_special_tokens=around)
            if ours.encode(text, special_tokens=around) != ids:
                found.append((text, ours.encode(text, special_tokens=around), ids))
            if ours.decode(ids) != theirs.decode(ids, skip_special_tokens=True):
                found.append((text, ours.decode(ids)))
    return found


def test_ids_of_sentencepiece_models_are_those_of_transformers(
    pieces: dict[str, bytes], tmp_path: Path
) -> None:
    choose = random.Random(1)
    letters = "abc <>s|/\n 你12é🙂"
    texts = (*TEXTS, *("".join(choose.choices(letters, k=1 + i % 25)) for i in range(80)))
    for name, model in pieces.items():
        for number, (family, settings) in enumerate(CONFIGS):
            folder = save_pieces(tmp_path / f"{name}-{number}", model, family, **settings)
            assert differences(folder, texts) == [], (name, family, settings)


def test_added_tokens_count_in_whatever_file_they_stand(
    pieces: dict[str, bytes], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    model, base = pieces["llama"], {"tokenizer_class": "LlamaTokenizer", **SPECIAL}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "decoder": ({"added_tokens_decoder": ADDED}, {}),
        "extra": ({"extra_special_tokens": ["<extra>", "<|im_end|>"]}, {}),
        "additional": ({"additional_special_tokens": ["<extra>", "<|im_end|>"]}, {}),
        "file": ({}, {"<extra>": 360, "<|im_end|>": 361}),
        "pad": ({"pad_token": "<extra>"}, {}),
    }
    for form in ("tokenizer.model", "tokenizer.json"):
        for way, (settings, added) in ways.items():
            folder = save_pieces(tmp_path / form / way, model, **base)
            if form == "tokenizer.json":
                AutoTokenizer.from_pretrained(str(folder)).save_pretrained(folder)
                (folder / "tokenizer.model").unlink()
            config = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
            if added:
                (folder / "added_tokens.json").write_text(json.dumps(added))
            assert differences(folder, TEXTS) == [], (form, way)
            if way != "additional":  # the old name of `extra`, which transformers may ignore
                ids = load_tokenizer(folder).encode("<extra>", special_tokens=False)
                assert len(ids) == 1, (form, way)


def test_ids_without_a_token_have_no_text(pieces: dict[str, bytes], tmp_path: Path) -> None:
    """A model has padding rows, and samples them while it is untrained."""
    settings = {"tokenizer_class": "LlamaTokenizer", **SPECIAL, "added_tokens_decoder": ADDED}
    tokenizer = load_tokenizer(save_pieces(tmp_path, pieces["llama"], **settings))
    ids = tokenizer.encode("the <extra>cat", special_tokens=False)
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 2**31 - 1, -1]
    assert tokenizer.decode([*beyond[:2], *ids, *beyond]) == "the <extra>cat"
    assert tokenizer.decode(beyond) == ""


def test_text_with_a_token_that_the_model_has_no_row_for_is_refused_alone(
    pieces: dict[str, bytes], tmp_path: Path
) -> None:
    """Gemma 3's tokenizer has an image token, for which its text models have no row."""
    settings = {"tokenizer_class": "LlamaTokenizer", **SPECIAL, "pad_token": "<pad>"}
    folder = save_pieces(tmp_path, pieces["llama"], **settings)
    rows = load_tokenizer(folder).vocab_size - 1
    config = {"model_type": "llama", "eos_token_id": 1, "vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.encode("cat")) == (rows + 1, tokenizer.encode("cat"))
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "the cat"}\n{"prompt": "the <pad>"}\n')
    with pytest.raises(DataError, match=rf"d.jsonl:2: .*no row for token {rows} \('<pad>'\)"):
        read_prompts(data, tokenizer)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, rows]}))
    with pytest.raises(DataError, match=f"ends sequences with token {rows}, and the model has"):
        load_tokenizer(folder)


# End of a turn


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("<turn>{{ m.content }}<stop>\n", 3),
        ("<turn>{{ m.content }} <end>\n<stop>", None),
        ("<turn>{{ m.content }}\n", None),
    ],
)
def test_the_templates_end_of_a_turn_ends_a_response_too(
    tmp_path: Path, template: str, turn: int | None
) -> None:
    file = save_characters(tmp_path, ("<turn>", "<stop>")) / "tokenizer.json"
    # The tokenizer adds a special token to each text; it is not part of a turn.
    adding = processors.TemplateProcessing(single="<turn> $A", special_tokens=[("<turn>", 2)])
    own = {"post_processor": json.loads(adding.__getstate__())}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (tmp_path / "chat_template.jinja").write_text(
        f"{{% for m in messages %}}{template}{{% endfor %}}"
    )
    assert load_tokenizer(tmp_path).eos_ids == ((1,) if turn is None else (1, turn))
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(tmp_path).eos_ids == (1,)


def test_data_imports_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules)"
    code = f"import sys, megatron_async_rl.data, megatron_async_rl.flow.controller; print({heavy})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.strip() == "set()"
