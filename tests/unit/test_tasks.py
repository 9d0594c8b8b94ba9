"""Tasks of reasoning-gym: generated rows, their files, and the reward that uses their scorers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml

from megatron_async_rl.config.data import GenerateConfig
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, UserError
from megatron_async_rl.data import generated
from megatron_async_rl.data.generated import task_file, with_generated
from megatron_async_rl.data.task_entries import LISTS
from megatron_async_rl.rollout.rewards import tasks
from megatron_async_rl.rollout.rewards.registry import RewardError, load_reward, validate_row
from megatron_async_rl.rollout.rewards.tasks import _MORE_THAN_A_FORMULA, FORMULAS
from megatron_async_rl.samples.types import Prompt
from tests.cases import case
from tests.thorough import thorough

factory = pytest.importorskip("reasoning_gym").factory

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
CHECKED = ("arc_1d", "chain_sum", "countdown", "graph_color", "rearc", "word_ladder")
"""Tasks with answers, with several solutions, with entries of tuples, and with options that their
scorers read."""
SLOW = {"knight_swap", "sokoban"}
"""Tasks that need seconds for a question."""
ANY_ANSWER = {"game_of_life_halting", "propositional_logic", "spell_backward"}
"""Tasks whose scorers give more than 0.2 to a text that is not an answer."""


ROWS_OF_CHILD = generated._rows_of_child


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    # A process for each task would take most of the time of these tests.
    monkeypatch.setattr(generated, "_rows_of_child", generated._rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_async_rl" / "reasoning_gym"


def rows(name: str, test: bool = False, key: str = "data.train", **settings):
    file = task_file(key, Path(f"reasoning_gym:{name}"), GenerateConfig(**settings), held_out=test)
    return [json.loads(line) for line in file.read_text().splitlines()]


def scored(row, response: str, **settings) -> float:
    reward = load_reward("reasoning_gym", settings)
    prompt = Prompt(id=row["id"], text="", token_ids=(0,), fields=row)
    return reward.function(prompt, response, **reward.settings)


def check_task(name: str, level: int | None) -> None:
    options = {"datasets": [{"name": "chain_sum"}]} if name == "composite" else {}
    some = rows(name, size=2, held_out=1, seed=3, level=level, options=options)
    assert some, name
    for row in some:
        validate_row("reasoning_gym", {}, row)
        if "answer" in row:
            assert scored(row, row["answer"]) == 1.0, name
        if name not in ANY_ANSWER:
            assert scored(row, "hello 17 $#") <= 0.2, name


def test_tasks_give_rows_whose_answers_their_scorers_accept() -> None:
    for name in CHECKED:
        with case(name):
            check_task(name, None)
            check_task(name, 1 if name in factory.CURRICULA else None)


@thorough
def test_every_task_gives_rows_whose_answers_its_scorer_accepts() -> None:
    names = sorted(factory.DATASETS.keys() - SLOW)
    assert len(names) > 100
    for name in names:
        check_task(name, None)
        check_task(name, 0 if name in factory.CURRICULA else None)


def test_rows_are_those_of_the_generator_and_no_question_is_on_both_sides(cache) -> None:
    settings = {"size": 60, "held_out": 20, "seed": 5, "options": SUMS}
    training, held_out = rows("chain_sum", **settings), rows("chain_sum", test=True, **settings)
    assert (len(training), len(held_out)) == (60, 20)
    questions = [row["prompt"] for row in (*held_out, *training)]
    assert len(set(questions)) == 80
    # The generator's own sequence, without repeated questions.
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", **SUMS, seed=5, size=320)
    drawn = dict.fromkeys(dataset[index]["question"] for index in range(320))
    assert questions == list(drawn)[:80]
    first = held_out[0]
    entry = {key: value for key, value in dataset[0].items() if key != "question"}
    entry |= {"task": "chain_sum", "options": SUMS, "tuples": False}
    assert first == {
        "id": "chain_sum-0",
        "prompt": dataset[0]["question"],
        "task": "chain_sum",
        "entry": json.loads(json.dumps(entry)),
        "answer": dataset[0]["answer"],
    }
    # More training rows do not change the held-out ones, and the same settings are read again.
    assert rows("chain_sum", test=True, **{**settings, "size": 61}) == held_out
    made = {file: file.stat().st_mtime_ns for file in cache.rglob("*.jsonl")}
    assert rows("chain_sum", **settings) == training
    # The order of the options does not matter.
    assert rows("chain_sum", **settings | {"options": dict(reversed(SUMS.items()))}) == training
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.jsonl")} == made
    assert rows("chain_sum", **{**settings, "seed": 6}) != training
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == sorted(
        {file.parent.name for file in cache.rglob("*.jsonl")}
    ), "a temporary folder was left"


def test_rows_do_not_depend_on_the_process(monkeypatch, cache) -> None:
    monkeypatch.setattr(generated, "_rows_of_child", ROWS_OF_CHILD)
    made = []
    # Its questions come from a set of text.
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache / seed))
        made.append(rows("ransom_note", size=4, held_out=1, seed=3))
    assert made[0] == made[1]
    assert len(made[0]) == 4
    with pytest.raises(UserError, match="max_terms must be >= min_terms") as error:
        rows("chain_sum", options={"min_terms": 9, "max_terms": 2})
    assert error.value.problems[0].key == "data.generate.options"


def test_rows_do_not_depend_on_the_day_or_on_earlier_draws() -> None:
    options = {"task_types": ["time", "time_seconds", "time_ms"]}
    for row in rows("time_intervals", size=5, held_out=1, options=options):
        metadata = row["entry"]["metadata"]
        assert metadata["start_time"].startswith("2000-01-01 ")
        assert metadata["end_time"].startswith("2000-01-0")
    options, made = {"datasets": [{"name": "list_functions"}]}, []
    for held_out in (1, 2):
        random.seed(held_out)
        settings = {"size": 80, "held_out": held_out, "options": options}
        questions = [*rows("composite", test=True, **settings), *rows("composite", **settings)]
        made.append([row["prompt"] for row in questions])
    assert made[0] == made[1][:81]


def test_draws_without_a_question_are_passed_over(monkeypatch) -> None:
    class Ladders:
        def __getitem__(self, index: int) -> dict:
            if index % 3 or index > 30:
                raise IndexError("exhausted")
            return {"question": f"q{index}", "answer": "a", "metadata": {}}

        def score_answer(self, *_: object) -> float:
            return 1.0

    sizes = []

    def dataset(task: str, options: dict, *, size: int, seed: int) -> Ladders:
        sizes.append(size)
        # A generator with a largest size.
        if size > 300:
            raise ValueError("too large")
        return Ladders()

    monkeypatch.setattr(generated, "dataset_of", dataset)
    found = rows("word_ladder", size=200, held_out=2)
    assert [row["prompt"] for row in found] == [f"q{index}" for index in range(6, 31, 3)]
    assert sizes == [808, 202]


def test_a_generator_that_is_killed_is_reported(monkeypatch, cache) -> None:
    monkeypatch.setattr(generated, "_rows_of_child", ROWS_OF_CHILD)
    monkeypatch.setattr(generated, "CHILD", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="questions of chain_sum ended with exit code -9"):
        rows("chain_sum")
    assert not list(cache.iterdir())


def test_a_level_sets_the_options_and_options_take_precedence() -> None:
    (row,) = rows("chain_sum", size=1, held_out=1, level=1)
    assert row["entry"]["options"] == SUMS | {"max_digits": 2, "max_terms": 3}
    (row,) = rows("chain_sum", size=1, held_out=1, level=1, options={"max_terms": 2})
    assert row["entry"]["options"] == SUMS | {"max_digits": 2}


def test_a_config_gets_files_instead_of_tasks(tmp_path, cache) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    given = load(file)
    assert str(given.data.train) == "reasoning_gym:chain_sum", "the name became a path"
    config, notes = with_generated(given)
    assert config.data.generate == given.data.generate
    assert config.data.train is not None
    assert config.data.eval is not None
    assert config.data.train.parent == config.data.eval.parent
    assert config.data.train.is_relative_to(cache)
    assert (config.data.train.name, config.data.eval.name) == ("train.jsonl", "test.jsonl")
    assert notes == [
        f"data.train: reasoning_gym:chain_sum is {config.data.train}, 100 rows instead of 1000:"
        " the task gave no more different questions",
        f"data.eval: reasoning_gym:chain_sum is {config.data.eval}",
    ]
    # A configuration of files alone is not changed.
    assert with_generated(config) == (config, [])


def test_deleted_files_of_a_run_are_generated_again(tmp_path, cache, monkeypatch) -> None:
    file = tmp_path / "run.yaml"
    tree = yaml.safe_load(CONFIG)
    tree["data"]["generate"]["size"] = 3
    own = {"generate": {"size": 2, "held_out": 1, "options": SUMS}}
    tree["eval"] = {"sets": [{"name": "a", "path": "reasoning_gym:chain_sum", **own}]}
    del tree["data"]["eval"]
    file.write_text(yaml.safe_dump(tree))
    config, _ = with_generated(load(file))
    assert config.eval is not None
    files = (config.data.train, config.eval.sets[0].path)
    assert None not in files
    before = [one.read_bytes() for one in files]
    # The run's own file, which a rank, `mar eval RUN` or another machine reads.
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert with_generated(load(file)) == (load(file), [])
    shutil.rmtree(cache)
    assert with_generated(load(file)) == (config, [])
    assert [one.read_bytes() for one in files] == before
    # On a machine with another home directory the paths change, and the files do not.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    shutil.rmtree(cache)
    moved, _ = with_generated(load(file))
    assert moved.data.train is not None
    assert moved.data.train.is_relative_to(tmp_path / "other")
    assert moved.data.train.read_bytes() == before[0]
    # Other settings would give other questions: a missing file is refused, an existing one kept.
    changed = load(file, ["data.generate.seed=7"])
    with pytest.raises(UserError) as error:
        with_generated(changed)
    (problem,) = error.value.problems
    assert problem.key == "data.train"
    assert "is missing, and data.generate with reasoning-gym" in problem.what
    moved = moved.model_copy(
        update={"data": moved.data.model_copy(update={"generate": changed.data.generate})}
    )
    kept, notes = with_generated(moved)
    assert kept == moved
    beginning = f"data.train: keeps {moved.data.train}, although "
    assert notes == [
        f"{beginning}data.generate, or reasoning-gym, has changed since; reasoning_gym:chain_sum"
        " generates other questions"
    ]
    # A newer reasoning-gym may not know an option, or the task.
    generate = GenerateConfig(size=3, held_out=1, options={**SUMS, "renamed": 1})
    moved = moved.model_copy(
        update={"data": moved.data.model_copy(update={"generate": generate}), "eval": None}
    )
    kept, notes = with_generated(moved)
    assert kept == moved
    assert notes == [
        f"{beginning}data.generate cannot give its questions: chain_sum has no option 'renamed'"
    ]


CONFIG = """
run: {dir: runs/x, steps: 1}
model: {path: /m}
data:
  train: reasoning_gym:chain_sum
  eval: reasoning_gym:chain_sum
  generate:
    size: 1000
    held_out: 100
    options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
flow: {prompts_per_step: 4, group_size: 2, async_ratio: 1}
rollout: {reward: {name: reasoning_gym}, sampling: {max_tokens: 8}}
policy: {optimizer: {lr: 1.0e-5}}
objective: {loss: ppo_clip, advantage: grpo}
"""


def test_sources_keep_the_names_of_their_tasks(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    own = {"generate": {"size": 2, "held_out": 1, "options": SUMS}}
    tree = yaml.safe_load(CONFIG)
    paths = ("reasoning_gym:chain_sum", "reasoning_gym:spell_backward")
    tree["data"] = {"sources": [{"path": paths[0], **own}, {"path": paths[1], "weight": 2}]}
    file.write_text(yaml.safe_dump(tree))
    config, _ = with_generated(load(file))
    assert [one.label for one in config.data.sources] == ["chain_sum", "spell_backward"]
    # A rank reads the written config.
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(file).data == config.data


def test_bad_settings_are_refused_with_the_key_and_the_nearest_name() -> None:
    cases = (
        ("chain_sums", {}, "data.train", "no task 'chain_sums'", "did you mean 'chain_sum'?"),
        ("zzz", {}, "data.train", "no task 'zzz'", "name one of ab, acre,"),
        (
            "chain_sum",
            {"options": {"min_term": 2}},
            "data.generate.options.min_term",
            "chain_sum has no option 'min_term'",
            "did you mean 'min_terms'? its options are min_terms, max_terms, min_digits,"
            " max_digits, allow_negation",
        ),
        (
            "chain_sum",
            {"options": {"min_terms": 9, "max_terms": 2}},
            "data.generate.options",
            "chain_sum refuses its options: max_terms must be >= min_terms",
            "correct the options",
        ),
        (
            "chain_sum",
            {"level": 11},
            "data.generate.level",
            "the highest level of chain_sum is 10",
            "set it to 10 or less",
        ),
        (
            "caesar_cipher",
            {"level": 2},
            "data.generate.level",
            "caesar_cipher refuses the options of level 2: rotation must be in range [1,25]",
            "name another level, or correct the options",
        ),
        (
            "chain_sum",
            {"size": 1, "held_out": 200, "options": SUMS},
            "data.train",
            "chain_sum gave only 197 different questions, and all are held out",
            "lower data.generate.held_out, or set options that give more questions",
        ),
        (
            "spell_backward",
            {"options": {"min_word_len": 11, "max_word_len": 12}},
            "data.generate.options",
            "spell_backward cannot generate a question: Cannot choose from an empty sequence",
            "correct the options",
        ),
        (
            "word_ladder",
            {"size": 20000},
            "data.generate.size",
            "word_ladder refuses 20200 questions: Dataset size too large",
            "lower size or data.generate.held_out",
        ),
        (
            "gsm_symbolic",
            {"level": 0},
            "data.generate.level",
            "gsm_symbolic has no levels",
            "remove level, and set options instead",
        ),
    )
    for name, settings, key, what, fix in cases:
        with case(name):
            with pytest.raises(UserError) as error:
                rows(name, **settings)
            (problem,) = error.value.problems
            assert problem.key == key
            assert what in problem.what
            assert problem.fix.startswith(fix)


def test_keys_of_sources_and_sets_are_named(tmp_path) -> None:
    with pytest.raises(UserError) as error:
        rows("chain_sum", key="eval.sets.0.path", level=99)
    assert error.value.problems[0].key == "eval.sets.0.generate.level"
    # Settings of `data.generate`, which a source uses.
    file = tmp_path / "run.yaml"
    tree = yaml.safe_load(CONFIG)
    source = {"path": "reasoning_gym:chain_sum"}
    tree["data"] = {"sources": [source], "generate": {"level": 99}}
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError) as error:
        with_generated(load(file))
    assert error.value.problems[0].key == "data.generate.level"


def test_held_out_sets_use_the_settings_of_the_data(tmp_path, cache) -> None:
    file = tmp_path / "run.yaml"
    tree = yaml.safe_load(CONFIG)
    tree["data"] = {"train": "/data/x.jsonl", "generate": {"size": 2, "held_out": 3}}
    tree["eval"] = {"every": 1, "sets": [{"name": "a", "path": "reasoning_gym:chain_sum"}]}
    file.write_text(yaml.safe_dump(tree))
    config, _ = with_generated(load(file))
    assert config.eval is not None
    assert len(config.eval.sets[0].path.read_text().splitlines()) == 3
    # A rank reads the written config.
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(file) == config


def test_generate_without_a_task_is_refused(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    text = CONFIG.replace("reasoning_gym:chain_sum", "/data/x.jsonl")
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"data\.generate has no effect on files"):
        load(file)
    file.write_text(
        "data: {sources: [{path: /data/x.jsonl, generate: {size: 3}}]}\n"
        "run: {dir: r, steps: 1}\nmodel: {path: /m}\nrollout: {reward: {name: math}}\n"
        "objective: {loss: ppo_clip}\n"
    )
    with pytest.raises(ConfigError, match=r"generate has no effect on the file /data/x\.jsonl"):
        load(file)


def test_a_missing_package_is_reported_with_the_command(monkeypatch) -> None:
    monkeypatch.setattr(generated.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        rows("chain_sum")
    (problem,) = error.value.problems
    assert problem.what == "reasoning_gym:chain_sum needs the package reasoning-gym"
    assert problem.fix == "install it: pip install reasoning-gym"


def test_the_reward_reads_the_response_or_the_last_tag() -> None:
    (row,) = rows("chain_sum", size=1, held_out=1, options=SUMS)
    answer = row["answer"]
    tagged = f"<answer>7</answer> no: <answer> {answer} </answer> done"
    cases = (
        (f" {answer}\n", {}, 1.0),
        (f"it is {answer}", {}, len(answer) / len(f"it is {answer}")),
        (f"it is {answer}", {"partial_credit": False}, 0.0),
        (answer, {"partial_credit": False}, 1.0),
        (tagged, {"tag": "answer"}, 1.0),
        (answer, {"tag": "answer"}, 0.0),
        (f"<answer>{answer}", {"tag": "answer"}, 0.0),
        ("", {}, 0.0),
    )
    for response, settings, expected in cases:
        assert scored(row, response, **settings) == pytest.approx(expected), response


def test_a_scorer_that_raises_scores_zero_and_is_logged_once(caplog, monkeypatch) -> None:
    monkeypatch.setattr(tasks, "_reported", set())  # other tests' responses make it raise too
    (row,) = rows("prime_factorization", size=1, held_out=1)
    assert [scored(row, "no × number") for _ in range(2)] == [0.0, 0.0]
    assert len(caplog.records) == 1
    assert "the scorer of prime_factorization raised ValueError" in caplog.text


def test_entries_that_cannot_be_stored_are_refused() -> None:
    def raises(*_: object) -> float:
        raise KeyError("moves")

    def accepts(*_: object) -> float:
        return 1.0

    cases = ((raises, 1, "KeyError: 'moves'"), (accepts, {1, 2}, "set is not JSON serializable"))
    cases += ((accepts, float("nan"), "not JSON compliant"),)
    for score, value, why in cases:
        entry = {"question": "q", "answer": "a", "metadata": {"value": value}}
        with pytest.raises(UserError, match=f"question 3 of x cannot be stored: .*{why}"):
            generated._row("data.train", "x", {}, 3, entry, score)


def test_no_response_is_run_as_code(tmp_path) -> None:
    made = tmp_path / "made"
    touch = f"open({str(made)!r}, 'w')"
    forms = (touch, f"[{touch}]", f"({touch}).close()", f"(open)({str(made)!r}, 'w')")
    for name in (*FORMULAS, *LISTS):
        (row,) = rows(name, size=1, held_out=1)
        for response in (*forms, f"sqrt({touch!r})", "exec(chr(1))", "(exec)(chr(1))"):
            with case(f"{name}: {response}"):
                assert scored(row, response) <= 0.01
                assert not made.exists()
    options = {"datasets": [{"name": "puzzle24"}]}
    (row,) = rows("composite", size=1, held_out=1, options=options)
    assert scored(row, touch) == 0.0
    assert not made.exists()


def test_formulas_and_lists_are_scored() -> None:
    (row,) = rows("polynomial_multiplication", size=1, held_out=1)
    assert scored(row, f"1*({row['answer']}) + sqrt(0)") == 1.0
    (row,) = rows("spiral_matrix", size=1, held_out=1)
    assert scored(row, str(row["answer"].split())) == 0.1
    for formula in (
        "x**2*exp(3*x)/2 + C",
        "-2*cos(x)*sin(x)",
        "(1 + 2)*3/4",
        "asinh(x)",
        "-Integral(x, x)",
    ):
        assert not _MORE_THAN_A_FORMULA.search(formula), formula
    for text in ("f(x)", "x.args", "1;2", "a[0]", "sinx(1)", "(x)(y)", "ｅxec(x)", "x!r:1"):
        assert _MORE_THAN_A_FORMULA.search(text), text


def test_rows_of_other_data_and_bad_tags_are_refused() -> None:
    with pytest.raises(RewardError, match=r"`entry` is not an entry of reasoning-gym"):
        validate_row("reasoning_gym", {}, {"entry": {"a": 1}})
    with pytest.raises(RewardError, match="`entry` has no scorer"):
        validate_row("reasoning_gym", {}, {"entry": {"task": "zzz", "options": {}, "metadata": {}}})
    with pytest.raises(RewardError, match="'<answer>' is not the name of a tag"):
        load_reward("reasoning_gym", {"tag": "<answer>"})
