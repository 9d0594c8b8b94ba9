"""User errors end with one screen and exit code 2, before any rank or engine starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from megatron_async_rl.config.load import dump, load
from megatron_async_rl.flow.buffer import Buffer, buffer_bytes
from megatron_async_rl.launch.run_lock import lock_run_dir
from megatron_async_rl.watchdog.events import Status, write_status
from tests.mar_command import mar
from tests.ports import free_ports
from tests.written_run import write_model, write_run

pytestmark = pytest.mark.faults

SCREEN_LINES = 30


def refused(config: Path, *overrides: str, says: tuple[str, ...], command: str = "train") -> str:
    """Runs `mar train`; what it printed, after checking that it is one screen with all of `says`.
    Of `mar plan` this is what follows the plan, in wrapped lines."""
    done = mar(command, config, *overrides, folder=config.parent)
    printed = done.stdout + done.stderr
    assert done.returncode == 2, printed
    assert "Traceback" not in printed
    if command == "plan":
        printed = printed.rpartition("\nproblems\n")[2].replace("\n  ", " ")
    assert len(printed.splitlines()) <= SCREEN_LINES
    for words in says:
        assert words in printed, f"{words!r} is not in:\n{printed}"
    assert not (config.parent / "out" / "logs").exists(), "a run directory was made"
    return printed


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def change(config: Path, old: str, new: str) -> int:
    """Replaces a text of the file once; the line it is on."""
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def test_the_unchanged_config_is_fine(config):
    done = mar("plan", config, folder=config.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_key_names_its_line_and_the_nearest_key(config):
    line = change(config, "group_size", "group_sice")
    refused(config, says=("flow.group_sice", f"config.yaml:{line}", "flow.group_size"))


def test_a_key_of_another_section_is_sent_home(config):
    refused(config, "policy.lr=1e-4", says=("policy.lr", "command line", "policy.optimizer.lr"))


def test_a_wrong_type_names_what_was_given_and_what_is_expected(config):
    line = change(config, "steps: 4", "steps: four")
    refused(config, says=("run.steps", f"config.yaml:{line}", '"four"', "whole number"))


def test_an_unknown_method_lists_the_known_ones(config):
    refused(
        config,
        "objective.loss=ppo_clipp",
        says=("objective.loss", "ppo_clipp", "choose one of: reinforce, ppo_clip, "),
    )


def test_broken_yaml_names_its_line(config):
    config.write_text(config.read_text() + "eval: {samples_per_prompt: 2\n")
    refused(config, says=("config.yaml:", "is not YAML"))


def test_a_key_given_twice_names_both_lines(config):
    config.write_text("run: {dir: out, steps: 1}\n" + config.read_text())
    refused(config, says=("run", "lines 1 and 2"))


def test_a_config_that_is_not_there(config):
    refused(config.with_name("other.yaml"), says=("other.yaml", "config.yaml"))


def test_tensor_times_pipeline_that_does_not_divide_the_ranks(config):
    refused(
        config,
        "policy.parallel.ranks=3",
        "policy.parallel.tensor=2",
        says=("policy.parallel.ranks", "3 ranks", "tensor 2 x pipeline 1", "multiple of 2"),
    )


def test_tensor_parallelism_that_does_not_divide_the_heads(config):
    refused(
        config,
        "policy.parallel.ranks=4",
        "policy.parallel.tensor=4",
        says=("policy.parallel.tensor", "2 key-value heads", "1, 2"),
    )


def test_pipeline_parallelism_that_does_not_divide_the_layers(config):
    refused(
        config,
        "policy.parallel.ranks=3",
        "policy.parallel.pipeline=3",
        says=("policy.parallel.pipeline", "2 layers", "1, 2"),
    )


def test_a_batch_that_does_not_divide_over_data_parallel_ranks(config):
    refused(
        config,
        "policy.parallel.ranks=3",
        says=("flow.prompts_per_step", "8 samples", "3 data-parallel ranks", "multiple of 3"),
    )


def test_a_missing_model_directory(config):
    refused(
        config,
        "model.path=nowhere",
        says=("model.path", str(config.parent / "nowhere"), "Hugging Face model directory"),
    )


def test_a_model_directory_without_weights(config):
    (config.parent / "model" / "model.safetensors").unlink()
    refused(config, says=("model.path", "no *.safetensors weights"))


def test_an_unsupported_architecture(tmp_path):
    config = write_run(tmp_path, architectures=["MambaForCausalLM"])
    refused(config, says=("model.path", "MambaForCausalLM", "Qwen3ForCausalLM"))


def test_a_malformed_line_names_file_and_line(config):
    data = config.parent / "train.jsonl"
    lines = data.read_text().splitlines()
    lines[4] = '{"prompt": "1+1=", "answer"'
    data.write_text("\n".join(lines))
    refused(config, says=("data.train", "train.jsonl:5", "JSON"))


def test_a_malformed_line_far_down_is_found_before_training(config):
    data = config.parent / "train.jsonl"
    good = data.read_text().splitlines()[0]
    data.write_text("\n".join([good] * 3000 + ["{"]))
    refused(config, says=("data.train", "train.jsonl:3001"))


def test_a_prompt_longer_than_the_context_names_its_line(config):
    data = config.parent / "train.jsonl"
    data.write_text(data.read_text() + '{"prompt": "' + "1" * 60 + '", "answer": "1"}\n')
    refused(config, says=("data.train", "train.jsonl:9", "60 tokens", "56"))


def test_responses_that_leave_no_room_for_a_prompt(config):
    refused(
        config,
        "rollout.sampling.max_tokens=64",
        says=("rollout.sampling.max_tokens", "context of 64"),
    )


def test_a_reward_that_does_not_import(config):
    refused(
        config,
        "rollout.reward.name=no_such_module:score",
        says=("rollout.reward.name", "no_such_module"),
    )


def test_a_reward_whose_module_raises(config):
    (config.parent / "my_rewards.py").write_text("raise RuntimeError('half written')\n")
    refused(
        config,
        "rollout.reward.name=my_rewards:score",
        says=("rollout.reward.name", "my_rewards", "half written"),
    )


def test_all_problems_are_reported_at_once(config):
    refused(
        config,
        "model.path=nowhere",
        "data.train=nowhere.jsonl",
        "rollout.reward.name=arithmetics",
        "policy.parallel.ranks=3",
        "policy.parallel.tensor=2",
        says=(
            "4 problems",
            "model.path",
            "data.train",
            "rollout.reward.name",
            "policy.parallel.ranks",
            "'arithmetic'",
        ),
    )


def test_a_run_to_stand_beside_that_made_no_step(config):
    refused(config, "observe.beside=nowhere", says=("observe.beside", "nowhere is not a", "fix: "))


def test_a_run_to_stand_beside_whose_metrics_are_spoilt(config):
    other = config.parent / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("spoilt\n")
    refused(
        config,
        "observe.beside=other",
        says=("observe.beside", "other/metrics.jsonl:1: ", "remove that line"),
        command="plan",
    )


def test_a_run_to_stand_beside_itself(config):
    own = f"observe.beside={config.parent / 'out'}"
    refused(config, own, says=("observe.beside", "is this run's own", "fix: "))


def test_a_run_directory_that_is_a_file(config):
    refused(config, "run.dir=train.jsonl", says=("run.dir", "is a file"))


def test_a_run_directory_with_another_active_run(config):
    with lock_run_dir(config.parent / "out"):
        refused(config, says=("run.dir", "is in use", f"pid {os.getpid()} on ", "fix: "))


def test_a_status_that_is_none(config):
    (config.parent / "out").mkdir()
    (config.parent / "out" / "status.json").write_text("{")
    refused(config, says=("run.dir", "status.json is not a run's status", "delete it"))


def test_a_run_directory_in_which_nothing_can_be_made(config):
    (config.parent / "out").mkdir()
    (config.parent / "out" / "lock").mkdir()
    refused(
        config, says=("run.dir", str(config.parent / "out" / "lock"), "Is a directory", "fix: ")
    )


def listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), 600).close()
    except OSError:
        return False
    return True


def test_a_node_that_does_not_find_its_config_ends_the_one_that_waits_for_it(config):
    (port,) = free_ports(1)
    nodes = ["--nnodes=2", f"--rdzv-endpoint=localhost:{port}"]
    good = [
        sys.executable,
        "-m",
        "megatron_async_rl",
        "train",
        config.name,
        "policy.parallel.ranks=2",
        *nodes,
        "--node-rank=0",
    ]
    zero = subprocess.Popen(
        good, cwd=config.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while not listens(port):  # a node that ends informs others for ten seconds
        assert zero.poll() is None
        time.sleep(0.1)
    one = mar("train", "nowhere.yaml", *nodes, "--node-rank=1", folder=config.parent)
    said, _ = zero.communicate(timeout=600)
    assert (one.returncode, zero.returncode) == (2, 2), one.stdout + one.stderr + said
    assert f"node 1 ({socket.gethostname()})\n  does not start" in said
    assert "nowhere.yaml\n      cannot be read: No such file" in said
    assert "Traceback" not in said
    assert not list((config.parent / "out" / "logs").glob("*"))


def test_a_damaged_line_of_metrics_is_put_aside_and_not_in_the_way(config):
    run_dir = config.parent / "out"
    write_status(run_dir, Status(phase="finished", step=4, steps=4, time=0.0))
    (run_dir / "config.yaml").write_text(dump(load(config)))
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "version": 1, "time": 1.0, "time/step_s": 1.0}\n{"step": 2, "ver\n'
    )
    reported = mar("report", run_dir, folder=config.parent)
    assert reported.returncode == 2
    assert reported.stderr.startswith(f"{run_dir / 'metrics.jsonl'}:2\n  is not a line of metrics")
    done = mar("train", config, folder=config.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 4" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "unreadable" in (run_dir / "metrics.cut.jsonl").read_text()


@pytest.fixture
def checkpoint(config: Path) -> Path:
    """The newest checkpoint of a run that can be resumed, as far as it shows before the model is
    loaded."""
    path = config.parent / "out" / "checkpoint" / "step_00000002"
    (path / "sharded").mkdir(parents=True)
    (path / "sharded" / ".metadata").write_bytes(b"any")
    (path / "about.json").write_text("{}")
    with zipfile.ZipFile(path / "state.pt", "w") as file:
        file.writestr("archive/data.pkl", b"numbers" * 100)
    (path / "buffer.arrow").write_bytes(buffer_bytes(Buffer()))
    (path.parent / "latest").write_text(path.name)
    (config.parent / "out" / "config.yaml").write_text(dump(load(config)))
    return path


def test_a_whole_checkpoint_is_fine(config, checkpoint):
    done = mar("plan", config, folder=config.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["buffer.arrow", "state.pt", "about.json"])
def test_a_damaged_file_of_the_checkpoint_is_named_before_anything_starts(config, checkpoint, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    refused(config, says=("run.dir", str(checkpoint), name, "cannot be read", "fix: "))


def test_what_waited_in_a_checkpoint_of_an_earlier_version_is_not_lost_unsaid(config, checkpoint):
    (checkpoint / "buffer.arrow").rename(checkpoint / "buffer.npz")
    refused(config, says=("run.dir", "buffer.npz", "of an earlier version", "fix: remove the file"))


@pytest.mark.parametrize("name", ["state.pt", "about.json", "sharded/.metadata"])
def test_a_missing_file_of_the_checkpoint_is_named_before_anything_starts(config, checkpoint, name):
    (checkpoint / name).unlink()
    refused(config, says=("run.dir", f"{checkpoint} is damaged: {name}", "fix: "))


def test_a_checkpoint_of_another_model_is_refused_and_one_of_a_longer_context_is_not(
    config, checkpoint
):
    for changes in ({"intermediate_size": 64}, {"max_position_embeddings": 128}):
        other = write_model(config.parent / str(changes), **changes)
        (checkpoint / "about.json").write_text(json.dumps({"model_path": str(other)}))
        if "intermediate_size" in changes:
            refused(
                config,
                says=(
                    "model.path",
                    f"{checkpoint} is of another model: intermediate 64 there, 32 here",
                    "run.dir",
                ),
            )
    assert mar("plan", config, folder=config.parent).returncode == 0


@pytest.mark.parametrize(
    ("command", "says"), [("report", "metrics.jsonl"), ("convert", "is not a directory")]
)
def test_other_commands_refuse_what_is_not_there_without_a_traceback(tmp_path, command, says):
    done = mar(command, "nowhere", *(["out"] if command == "convert" else []), folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "fix:" in done.stderr
