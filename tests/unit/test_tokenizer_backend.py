"""Ids and text of generated tokenizers are those of transformers' AutoTokenizer."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_async_rl.data import DataError, load_tokenizer
from megatron_async_rl.data.tokenizer import PLAIN_CLASSES, FileBackend
from megatron_async_rl.policy.families import FAMILIES

WORDS = (
    *("the", "cat", "sat", "on", "a", "mat", "hello", "world", "don't", "return", "naïve", "ünï"),
    *("1", "2", "42", "=", "+", "(", ")", ",", ".", "你好", "世界"),
)
SPECIAL = ["<unk>", "<bos>", "<eos>", "<pad>"]
TEXTS = (
    *("", " ", "hello", " hello", "  hello  world ", "\n", "a\n\nb", "\t cat\n", "hello , world ."),
    *("<bos>", "<eos>x<eos>", "the <x> cat", "the<x>cat", " <x> ", "a<y> b", "<Y>", "cat<eos> 1"),
    *("你好世界", "🙂👩‍👧", "naïve nai\u0308ve", "１ ﬁ ²", "don't  stop", "x\0y", "▁ x▁", "HELLO"),
)
OFF = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)


def trained(kind: str) -> Backend:
    """Return a small tokenizer; ids 0 to 3 are SPECIAL."""
    choose = random.Random(0)
    corpus = [" ".join(choose.choices(WORDS, k=12)) for _ in range(200)]
    settings: dict[str, Any] = {
        "vocab_size": 340,
        "special_tokens": SPECIAL,
        "show_progress": False,
    }
    trainer: Any = trainers.BpeTrainer(**settings)
    if kind in ("bytes", "prefixed"):
        found = Backend(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefixed")
        found.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    elif kind == "metaspace":
        found = Backend(models.Unigram())
        found.normalizer = normalizers.NFKC()
        found.pre_tokenizer = pre_tokenizers.Metaspace()
        found.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **settings)
    elif kind == "pieces":
        found = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        found.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        found = Backend(models.WordPiece(unk_token="<unk>"))
        found.normalizer = normalizers.BertNormalizer()
        found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        found.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**settings)
    found.train_from_iterator(corpus, trainer=trainer)
    return found


KINDS = ("bytes", "prefixed", "metaspace", "pieces", "words")
TEMPLATES = {"none": None, "bos": "<bos> $A", "both": "<bos> $A <eos>"}
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"lstrip": True},
    {"rstrip": True},
    {"single_word": True},
    {"normalized": True},
    {"lstrip": True, "rstrip": True, "special": True},
    {"special": True},
)
TOKEN = {"content": "<y>", **OFF, "special": False}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"add_prefix_space": True},
    {"add_prefix_space": False},
    {"split_special_tokens": True},
    {"clean_up_tokenization_spaces": True},
    {"clean_up_tokenization_spaces": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"legacy": False},
    {"legacy": True},
    {"eos_token": {"__type": "AddedToken", "content": "<eos>", **OFF, "lstrip": True}},
    {"eos_token": {"content": "<eos>", **OFF, "rstrip": True}},
    {"pad_token": "<y>"},
    {"unk_token": "<x>"},
    {"sep_token": "<y>"},
    {"image_token": "<y>"},
    {"extra_special_tokens": ["<y>"]},
    {"extra_special_tokens": {"image_token": "<y>"}},
    {"additional_special_tokens": ["<x>", "<y>"]},
    {"added_tokens_decoder": {"400": TOKEN}},
    {"added_tokens_decoder": {"4": {**TOKEN, "content": "<x>", "rstrip": True}}},
    {"added_tokens_decoder": {"2": {**TOKEN, "content": "<eos>", "special": True, "lstrip": True}}},
    {"do_lower_case": False},
    {"padding_side": "left", "model_max_length": 5},
    {"chat_template": "{{ messages }}"},
)
FILES: tuple[dict[str, Any], ...] = (
    {},
    {"special_tokens_map.json": {"eos_token": {"content": "<eos>", **OFF, "lstrip": True}}},
    {"special_tokens_map.json": {"pad_token": "<y>"}},
    {"added_tokens.json": {"<y>": 400}},
    {"generation_config.json": {"eos_token_id": [2]}},
)
CLASSES = (
    *(*PLAIN_CLASSES, "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "Qwen2Tokenizer"),
    *("GPT2Tokenizer", "BertTokenizer", "CodeLlamaTokenizer", None),
)
FILE_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
    {
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 3,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
    },
)


def cases() -> Iterator[tuple[Any, ...]]:
    """Yield every setting with the class that transformers reads unchanged, and a sample of the
    rest."""
    choose = random.Random(7)
    plain = ("none", {}, {}, {}, PLAIN_CLASSES[0], "qwen3", {})
    for number, settings in enumerate(SETTINGS):
        yield KINDS[number % len(KINDS)], *plain[:2], settings, *plain[3:]
    for kind, flags in itertools.product(KINDS, FLAGS):
        yield kind, "none", flags, *plain[2:]
    for name, family in itertools.product(CLASSES, FAMILIES):
        yield choose.choice(KINDS), choose.choice([*TEMPLATES]), *plain[1:4], name, family, {}
    for _ in range(60):
        yield (
            choose.choice(KINDS),
            choose.choice([*TEMPLATES]),
            choose.choice(FLAGS),
            choose.choice(SETTINGS),
            choose.choice(FILES),
            choose.choice(CLASSES),
            choose.choice([*FAMILIES]),
            choose.choice(FILE_SETTINGS),
        )


def write(folder: Path, base: Backend, case: tuple[Any, ...]) -> Path:
    _, template, flags, settings, files, name, family, file_settings = case
    folder.mkdir()
    content = json.loads(base.to_str())
    content["post_processor"] = None
    if TEMPLATES[template] is not None:
        own = processors.TemplateProcessing(
            single=TEMPLATES[template], special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
        content["post_processor"] = json.loads(own.__getstate__())
    size = base.get_vocab_size()
    added = {"id": size, "content": "<x>", "special": False, **OFF, **flags}
    content["added_tokens"] = [*content["added_tokens"], added]
    content |= file_settings
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": name, "eos_token": "<eos>", "bos_token": "<bos>", **settings}
    config = {key: value for key, value in config.items() if value is not None}
    for file, tree in {
        "tokenizer_config.json": config,
        "config.json": {"model_type": family},
        **files,
    }.items():
        (folder / file).write_text(json.dumps(tree))
    return folder


def difference(folder: Path) -> Any:
    """Return the first text whose ids, or decoded text, differ from those of transformers."""
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(str(folder))
    except Exception:  # noqa: BLE001 - a class may raise anything for files of another
        with pytest.raises(DataError):
            load_tokenizer(folder)
        return None
    ours = load_tokenizer(folder)
    for around in (True, False):
        expected = {text: outcome(theirs.encode, text, add_special_tokens=around) for text in TEXTS}
        for text, ids in expected.items():
            found = outcome(ours.encode, text, special_tokens=around)
            if found != ids:
                return text, around, found, ids
        known = {text: ids for text, ids in expected.items() if ids is not None}
        if ours.encode_many([*known], special_tokens=around) != [*known.values()]:
            return "many", around
        for ids in known.values():
            read = theirs.decode(ids, skip_special_tokens=True)
            if ours.decode(ids) != read:
                return ids, ours.decode(ids), read
    return None


def outcome(encode: Any, *args: Any, **options: Any) -> list[int] | None:
    """Return the ids; None if the text has none, such as without an unknown token."""
    try:
        ids: list[int] = encode(*args, **options)
    except Exception:  # noqa: BLE001 - tokenizers raise bare Exception
        return None
    return ids


def test_generated_tokenizers_give_the_ids_and_texts_of_transformers(tmp_path: Path) -> None:
    bases = {kind: trained(kind) for kind in KINDS}
    plain = 0
    for number, case in enumerate(cases()):
        folder = write(tmp_path / str(number), bases[case[0]], case)
        assert difference(folder) is None, case
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_async_rl.data.tokenizer.load_with_transformers", refuse)
            try:
                plain += isinstance(load_tokenizer(folder)._backend, FileBackend)  # type: ignore[attr-defined]
            except (NotImplementedError, DataError):
                continue
    assert plain > 10, "some are read without transformers"


def test_a_file_of_mistral_common_next_to_the_tokenizer_is_not_read(tmp_path: Path) -> None:
    case = ("bytes", "bos", {}, {}, {"tekken.json": {}}, None, "mistral", {})
    folder = write(tmp_path / "model", trained("bytes"), case)
    ids = load_tokenizer(folder).encode("cat")
    (folder / "tekken.json").unlink()
    assert (difference(folder), load_tokenizer(folder).encode("cat")) == (None, ids)


def refuse(model_dir: Path) -> Any:
    raise NotImplementedError(model_dir)
