"""Whole outputs of `mar replay`, with a trainer that writes given records instead of training."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.config.durable import file_digest
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.starts import Start, read_starts, record_start
from megatron_async_rl.metrics.log import MetricsLog, digests_of_steps, read_metrics
from megatron_async_rl.metrics.replay_record import ReplayedStep
from megatron_async_rl.metrics.weight_log import WeightLog
from megatron_async_rl.plan.machine import Gpu, Machine
from megatron_async_rl.replay import explanation_tables, repetition
from megatron_async_rl.replay.replay_plan import plan_replay
from megatron_async_rl.replay.step_table import show_distance
from megatron_async_rl.samples.types import Sample
from tests.healthy_run import STEPS, TENSORS, Alterations, write_healthy_run
from tests.stored_pages import RecordedConsole, require_page

GIB = 2**30
LAPTOP = Machine(cores=2, memory=16 * GIB, shared_memory=2 * GIB, gpus=())
SERVER = Machine(cores=8, memory=64 * GIB, shared_memory=8 * GIB, gpus=(Gpu("H100", 80 * GIB),) * 2)
SOFTWARE = {"Python": "[3.12.1]", "torch": "2.9"}


def with_distance(line: dict[str, Any], step: int) -> dict[str, Any]:
    distance = {"ratio/ess": 16.0 - step, "ratio/ess_ratio": 1 - step / 16, "ratio/kl_k2": 1e-3}
    return line | distance | {"policy/loss": -0.25}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of STEPS steps that kept the checkpoints of steps 4 and 8, and the last."""
    altered = Alterations(metrics=with_distance)
    run_dir = write_healthy_run(tmp_path_factory.mktemp("replayed"), altered)
    for step in (4, 8):
        (run_dir / "checkpoint" / f"step_{step:08d}").mkdir()
    return run_dir


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    # Brackets must not become markup, and long lines must not be wrapped.
    shutil.copytree(healthy, tmp_path / "[run]")
    return tmp_path / "[run]"


@dataclass
class Trainer:
    """Stand-in of `launch`. It repeats what the run recorded, with these changes."""

    run: Path
    digest: Callable[[str, int], str] = lambda digest, step: digest
    line: Callable[[dict[str, Any], int], dict[str, Any]] = lambda line, step: line
    tensor: Callable[[str, int], str] = lambda name, step: f"{name} {step}"
    start: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int, int] | None = None
    """(step before which it stops, exit code)."""
    explanation: dict[str, Any] | None = None
    launched: list[str] = field(default_factory=list)

    def __call__(self, config: Config, console: Any, nodes: Any, peers: Any, env: Any) -> int:
        assert config.run.replay is not None
        assert (nodes.count, nodes.rank) == (1, 0)
        first, last = config.run.replay.first, config.run.replay.last
        begin = config.run.replay.checkpoint
        self.launched.append(
            f"steps {first} to {last} from {begin and begin.name}, save {config.run.replay.save},"
            f" explain {config.run.replay.explain}, lr {config.policy.optimizer.lr:g},"
            f" evaluations {config.eval}, checkpoints every {config.checkpoint.every},"
            f" in {config.run.dir}, {env}"
        )
        config.run.dir.mkdir(parents=True, exist_ok=True)
        own = read_starts(self.run)
        if own:
            there = next(one for one in reversed(own) if one.step < first)
            record_start(config.run.dir, there.model_copy(update={"step": first - 1, **self.start}))
        of_run, digests = {row["step"]: row for row in read_metrics(self.run)}, self._digests()
        log = MetricsLog(config.run.dir, tensorboard=False, first_step=first)
        weights = WeightLog(config.run.dir, first)
        code = 0
        for step in range(first, last + 1):
            if self.stops is not None and step >= self.stops[0]:
                code = self.stops[1]
                break
            line = {k: v for k, v in of_run[step].items() if k not in ("step", "version", "time")}
            log.log(step, self.line(line, step), self.digest(digests[step], step))
            weights.log(step, {name: self.tensor(name, step) for name in TENSORS})
        log.close()
        weights.close()
        if self.explanation is not None:
            (config.run.dir / "explanation.json").write_text(json.dumps(self.explanation))
        return code

    def _digests(self) -> dict[int, str]:
        return {step: f"{step:016x}" for step in range(1, STEPS + 1)}


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "this_machine", lambda: LAPTOP)
    monkeypatch.setattr(repetition, "software", lambda: SOFTWARE)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


def replayed(
    trainer: Trainer,
    *changes: str,
    first: int | None = None,
    count: int | None = None,
    explained: int | None = None,
    save: bool = False,
    out: Path | None = None,
) -> str:
    """Return everything that `mar replay` printed and recorded, or the error."""
    console = RecordedConsole()
    run_dir = trainer.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "launch", trainer)
        try:
            plan = plan_replay(run_dir, first, count, changes, explained, save=save)
            code = repetition.replay(plan, out, console)
        except UserError as error:
            return f"{error}\n".replace(str(run_dir), "RUN")
    text = "".join(f"launch: {one}\n" for one in trainer.launched)
    trainer.launched.clear()
    text = f"{text}{console.text}exit code {code}\n"
    folder = out or max((run_dir / "replays").iterdir(), key=lambda one: int(one.name))
    record = json.loads((folder / "replay.json").read_text())
    steps = record.pop("steps")
    text += f"{json.dumps(record)}\n" + "".join(f"  {list(one.values())}\n" for one in steps[-2:])
    return text.replace(str(run_dir), "RUN").replace(str(run_dir.parent), "PARENT")


def edit_start(run_dir: Path, **changes: Any) -> None:
    (only,) = read_starts(run_dir)
    (run_dir / "starts.jsonl").unlink()
    record_start(run_dir, only.model_copy(update=changes))


def resumed(run_dir: Path, step: int, **changes: Any) -> Start:
    """Record a later start, and return it."""
    again = read_starts(run_dir)[-1].model_copy(update={"step": step, "weights": "w", **changes})
    record_start(run_dir, again)
    return again


def test_every_replay_of_a_run_prints_and_records_its_page(run: Path) -> None:
    pages = {
        "all": replayed(Trainer(run)),
        "--from 5": replayed(Trainer(run), first=5),
        "--from 7 --steps 3 --save": replayed(Trainer(run), first=7, count=3, save=True),
        "--from 12 --steps 9": replayed(Trainer(run), first=12, count=9),
        "--steps 1 --out": replayed(Trainer(run), count=1, out=run.parent / "own"),
        "other weights from step 10": replayed(
            Trainer(
                run,
                digest=lambda digest, step: digest if step < 10 else "f" * 16,
                tensor=lambda name, step: f"{name} {step + (step >= 10 and name != TENSORS[1])}",
            ),
            first=9,
        ),
        "other bits of one tensor": replayed(
            Trainer(
                run,
                digest=lambda digest, step: "f" * 16,
                tensor=lambda name, step: f"{name} {step + (name == TENSORS[3])}",
            ),
            first=12,
        ),
        "other weights, equal eight bits": replayed(
            Trainer(run, digest=lambda digest, step: "f" * 16), first=12
        ),
        "stopped": replayed(Trainer(run, stops=(11, 130)), first=9),
        "failed before a step": replayed(Trainer(run, stops=(1, 1)), first=9),
        "a step short": replayed(Trainer(run, stops=(12, 0)), first=9),
        "a setting that changes no number": replayed(
            Trainer(run, digest=lambda digest, step: "f" * 16),
            "watchdog.timeout_s=900",
            first=12,
        ),
    }
    require_page("replays/runs", "".join(f"$ {name}\n{text}" for name, text in pages.items()))


def test_every_what_if_analysis_prints_and_records_its_page(run: Path) -> None:
    def other(digest: str, step: int) -> str:
        return "f" * 16

    def farther(line: dict[str, Any], step: int) -> dict[str, Any]:
        values = {"ratio/ess": 8.0, "ratio/ess_ratio": 0.5, "ratio/kl_k2": 0.25}
        return line | values if step > 9 else line

    layout = "policy.tokens_per_micro_batch=640"

    def rounded(loss: float, norm: float) -> Callable[[dict[str, Any], int], dict[str, Any]]:
        return lambda line, step: line | {"policy/loss": loss, "policy/grad_norm": norm}

    pages = {
        "another learning rate": replayed(
            Trainer(run, digest=other, line=farther), "policy.optimizer.lr=0.5", first=9
        ),
        "a change without effect": replayed(Trainer(run), "policy.optimizer.lr=0.5", first=12),
        "another layout, same bits": replayed(Trainer(run), layout, first=12),
        "another layout within the tolerance": replayed(
            Trainer(run, digest=other, line=rounded(-0.2501, 1.001)), layout, first=12
        ),
        "another layout beyond the tolerance": replayed(
            Trainer(run, digest=other, line=rounded(-0.25, 1.0011)), layout, first=12
        ),
        "another layout within the tolerance, a step short": replayed(
            Trainer(run, digest=other, line=rounded(-0.25, 1.0), stops=(12, 0)), layout, first=9
        ),
        "another layout and setting": replayed(
            Trainer(run, digest=other), layout, "objective.kl.coef=0.5", first=12
        ),
        "another device": replayed(
            Trainer(run, digest=other, line=rounded(-0.25, 1.0), start={"device": "cpu, AVX2"}),
            first=12,
        ),
    }
    require_page("replays/what_if", "".join(f"$ {name}\n{text}" for name, text in pages.items()))


@pytest.mark.parametrize("threads", [None, "3"])
def test_a_replay_restores_the_number_of_threads_of_its_user(
    run: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    trainer = Trainer(run)
    edit_start(run, threads=5)
    assert "exit code 0" in replayed(trainer, count=1)
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_a_damaged_sample_log_of_a_replay_is_named(run: Path) -> None:
    """The steps before the damage are repeated; if there are none, the replay is refused."""
    files = sorted((run / "samples").glob("outcomes-*"))
    for place, file in enumerate(reversed(files)):
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
        found = replayed(Trainer(run))
        if file == files[0]:
            assert found.startswith(f"RUN\n  RUN/samples/{file.name} ")
            assert "\n  fix: " in found
        else:
            last = 8 - 4 * place
            note = f"note: steps {last + 1} to 12 cannot be replayed: RUN/samples/{file.name} is"
            assert f"steps 1 to {last} " in found
            assert note in found


def test_every_difference_of_the_starts_is_noted_on_its_page(run: Path) -> None:
    pages = {}
    edit_start(run, software=SOFTWARE, nodes=2, threads=5)
    pages["the same"] = replayed(Trainer(run), first=12)
    start = {"device": "cpu [AVX2]", "threads": 9, "data": {"training": []}, "weights": "other"}
    pages["everything else"] = replayed(Trainer(run, start=start), first=5)
    pages["weights of the first step"] = replayed(Trainer(run, start={"weights": "other"}))
    pages["no digests of data"] = replayed(Trainer(run, start={"data": {}}), first=12)
    edit_start(run, software={"Python": "3.13.0", "numpy": "2"})
    pages["other software"] = replayed(Trainer(run), first=12)
    # A resume after step 6 with another learning rate.
    config = run / "config.yaml"
    shutil.copy(config, run / "config.0.yaml")
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.002"))
    resumed(run, 6, config=file_digest(config))
    pages["two settings"] = replayed(Trainer(run), first=5, save=True)
    pages["two settings, stopped in the first"] = replayed(Trainer(run, stops=(6, 1)), first=5)
    pages["two settings, other weights in the second"] = replayed(
        Trainer(run, digest=lambda digest, step: digest if step < 9 else "f" * 16), first=5
    )
    (run / "starts.jsonl").unlink()
    pages["an earlier version"] = replayed(Trainer(run), first=12)
    require_page("replays/starts", "".join(f"$ {name}\n{text}" for name, text in pages.items()))
    assert digests_of_steps(run)[12] == f"{12:016x}"


def test_every_request_that_is_refused_has_the_error_on_its_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(run)
    pages = {
        "--explain 3 --from 2": replayed(trainer, first=2, explained=3),
        "--explain 3 --steps 2": replayed(trainer, count=2, explained=3),
        "--from 13": replayed(trainer, first=13),
        "--explain 13": replayed(trainer, explained=13),
        "rollout.engines=3": replayed(trainer, "rollout.engines=3"),
        "rollout.sampling.top_p=0.5": replayed(trainer, "rollout.sampling.top_p=0.5"),
        "policy.optimiser.lr=1": replayed(trainer, "policy.optimiser.lr=1"),
        "kl_coef=1": replayed(trainer, "kl_coef=1"),
        "policy.routing_replay=rollout": replayed(trainer, "policy.routing_replay=rollout"),
        "an old directory": replayed(trainer, out=run),
        "a file": replayed(trainer, out=run / "config.yaml"),
        "no layout": replayed(trainer, "policy.parallel.ranks=3", "policy.parallel.tensor=2"),
    }
    monkeypatch.setattr(repetition, "this_machine", lambda: SERVER)
    ranks = ("policy.device=cuda", "policy.parallel.ranks=4")
    pages["more ranks than GPUs"] = replayed(trainer, *ranks)
    edit_start(run, nodes=2, ranks=4)
    pages["ranks of two machines"] = replayed(trainer, *ranks)
    edit_start(run, nodes=2, ranks=2)
    pages["ranks that the run did not have"] = replayed(trainer, *ranks)
    monkeypatch.undo()

    for segment in (0, 1):
        for file in (run / "samples").glob(f"*-{segment:06d}.*"):
            file.unlink()
    pages["--explain 5 without its segment"] = replayed(trainer, explained=5)
    pages["--from 6 without a checkpoint before the log"] = replayed(trainer, first=6)
    shutil.rmtree(run / "checkpoint" / "step_00000008")
    pages["no checkpoint before the log"] = replayed(trainer)
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("")
    pages["no step"] = replayed(trainer)
    (run / "metrics.jsonl").write_text(metrics)
    shutil.rmtree(run / "samples")
    pages["no log"] = replayed(trainer)
    pages["no run"] = replayed(Trainer(tmp_path / "nothing"))
    require_page("replays/refusals", "".join(f"$ {name}\n{text}" for name, text in pages.items()))


def test_a_change_that_reads_weights_which_the_run_did_not_keep_is_refused(
    run: Path, tmp_path: Path
) -> None:
    control, snapshot = "controls=[displacement]", "objective.proximal=snapshot"
    # Its samples train at lag 0, so that no past weights are read.
    assert "exit code 0" in replayed(Trainer(run), control, first=6)

    def older(sample: Sample, step: int) -> Sample:
        return replace(sample, versions=np.maximum(sample.versions - 1, 0))

    altered = Alterations(metrics=with_distance, sample=older, config=("flow.async_ratio=1",))
    stale = write_healthy_run(tmp_path, altered)
    (stale / "checkpoint" / "step_00000004").mkdir()
    trainer = Trainer(stale)
    for first, changes in (
        (1, (control,)),
        (6, ()),
        (6, ("policy.optimizer.lr=1e-4",)),
        # This loss reads no proximal policy.
        (6, ("objective.loss=reinforce", snapshot)),
    ):
        assert "exit code 0" in replayed(trainer, *changes, first=first), (first, changes)

    def stale_later(sample: Sample, step: int) -> Sample:
        return replace(sample, versions=sample.versions - 2 * (step == 6))

    # Only the steps that run read past weights.
    later = Alterations(metrics=with_distance, sample=stale_later, config=("flow.async_ratio=2",))
    mixed = write_healthy_run(tmp_path / "later", later)
    (mixed / "checkpoint" / "step_00000004").mkdir()
    assert "exit code 0" in replayed(Trainer(mixed), control, first=5, count=1)
    assert "reads weights of versions before 4" in replayed(Trainer(mixed), control, first=5)
    losses = ("objective.loss=ppo_clip", snapshot)
    pages = {
        control: replayed(trainer, control, first=6),
        " ".join(losses): replayed(trainer, *losses, first=6),
        f"{control} --explain 6": replayed(trainer, control, explained=6),
    }
    for file in (stale / "samples").glob("*-000000.*"):
        file.unlink()
    pages["without the first steps"] = replayed(trainer, control, first=6)
    text = "".join(f"$ {name}\n{text}" for name, text in pages.items())
    require_page("replays/past_weights", text)


def no_tokenizer(*_: Any) -> None:
    raise UserError.of("model.path", "has no tokenizer", "copy one")


def explanation(tokens: int, samples: int, *, updates: int = 1, rest: float = 1.0) -> Any:
    """Return the content of explanation.json with samples "0-0", "1-0" and so on."""
    ids = [f"{number}-0" for number in range(samples)]
    prompts = [[2, 3, 12, 4, 13], [2, 0, *[4] * 60]]
    update = {
        "norm": 0.0123456,
        "sum_of_shares": rest,
        "parameters": [{"name": f"layers.{n}.weight", "share": 0.5 / (n + 1)} for n in range(5)],
        "groups": [
            {"group": n, "samples": 4, "reward": 0.25 * n, **shares(n)} for n in range(samples)
        ],
        "samples": [
            {"id": one, "reward": float(n), "lag_max": n, **shares(n)} for n, one in enumerate(ids)
        ],
        "tokens": [
            {
                "sample": ids[n % 2],
                "position": n,
                "token_id": 0 if n == 1 else 5,
                "size": 1.0 / (n + 1),
                "derivative": -0.125 * n,
                "advantage": "nan" if n == 2 else 0.5,
                "log_ratio": 0.001,
            }
            for n in range(tokens)
        ],
        "texts": {
            one: {"prompt_ids": prompts[n % 2], "response_ids": [n + 2, *range(2, 14), 0]}
            for n, one in enumerate(ids[:-1])
        },
    }
    return {"step": 7, "updates": [update] * updates}


def shares(n: int) -> dict[str, Any]:
    return {"norm": 3.0 - n, "norm_share": 0.5 - 0.03 * n, "share": "inf" if n == 3 else 0.75 - n}


def test_an_explanation_prints_and_stores_its_page(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"none": replayed(Trainer(run), explained=7)}
    trainer = Trainer(run, explanation=explanation(14, 12))
    pages["one optimizer step"] = replayed(trainer, explained=7)
    (file,) = (run / "replays" / "2").glob("explanation.json")
    stored = json.loads(file.read_text())
    pages["its file"] = file.read_text().replace("\n", "") + "\n"
    assert stored["updates"][0]["tokens"][9]["before"] == "2 3 4 5 6 7"
    for rest in (1.0101, 1.0099, 0.9, "nan"):
        trainer.explanation = explanation(1, 2, updates=1 + (rest == 1.0101), rest=rest)
        pages[f"shares of {rest}"] = replayed(trainer, explained=7)
    trainer.explanation["updates"][0] |= {"norm": 0, "sum_of_shares": 0.0, "tokens": []}
    pages["no gradient"] = replayed(trainer, explained=7)
    trainer.explanation, trainer.stops = explanation(1, 2), (7, 1)
    pages["a trainer that failed"] = replayed(trainer, explained=7)
    trainer.stops = None
    monkeypatch.setattr(explanation_tables, "load_tokenizer", no_tokenizer)
    pages["no tokenizer"] = replayed(trainer, explained=7)
    text = "".join(f"$ {name}\n{text}" for name, text in pages.items())
    require_page("replays/explanations", text)


def test_many_steps_from_the_run_s_policy_are_averaged_and_some_are_shown() -> None:
    def distance(steps: int, different: int | None, **changes: Any) -> str:
        console = RecordedConsole()
        rows = [
            ReplayedStep(
                **{
                    "step": step,
                    "identical": False,
                    "ess": 2.0 * step,
                    "ess_share": 1 / step,
                    "kl": 0.5,
                    "run_ess": 3.0 * step,
                    "run_ess_share": 0.5,
                    "run_kl": 0.25,
                    **changes,
                }
            )
            for step in range(1, steps + 1)
        ]
        show_distance(rows, different, console.print, console.print)
        return console.text

    pages = {
        "12 steps": distance(13, 1),
        "13 steps": distance(14, 1),
        "100 steps": distance(101, 1),
        "no KL": distance(3, 1, kl=None, ess_share=None),
        "no KL of the run": distance(3, 1, run_kl=None),
    }
    require_page("replays/distances", "".join(f"$ {name}\n{text}" for name, text in pages.items()))
    assert distance(3, None) == distance(3, 3) == distance(3, 1, run_ess=None) == ""
