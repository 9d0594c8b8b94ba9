"""The training loop: get a batch, update, publish, evaluate, log, and save a checkpoint.

    phase    generate           train                    publish                     generate
             next batch   take devices, update   give devices, publish   evaluate, log, checkpoint

Every rank runs this file (SPMD, under torchrun). Rank 0 differs in one object, `Rank0`, which owns
the controller of engines and samples, the logs and the status. The other ranks have its null
counterpart.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

# Import `device` first: without a GPU, it imports Megatron without loading torch's compiler.
from megatron_async_rl.policy import device

# isort: split
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.metrics.replay_record import EXPLANATION_FILE
from megatron_async_rl.plan.fit import memory_ran_out
from megatron_async_rl.plan.layout import PLANNED_DEVICE
from megatron_async_rl.policy.anomaly import FILE as ANOMALIES
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.model import DTYPES
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.verify.canary_loop import measure_canaries
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import failure_of, record_failure
from megatron_async_rl.watchdog.freed_memory import return_freed_memory
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.watchdog.processes import collect_rarely
from megatron_async_rl.watchdog.run_folder import name_shared_memory
from megatron_async_rl.watchdog.stall import gather_if_timed_out
from megatron_async_rl.watchdog.watch import name_this_process
from megatron_async_rl.weights.convert import export_adapter, export_hf
from megatron_async_rl.weights.export import WeightExporter

COLLECTIVE_GRACE_S = 60.0
"""Seconds that are added to `quiet_s` for the timeout of collectives. Ranks wait in a collective
while rank 0 starts engines or waits for a batch, and rank 0's own deadlines must expire first."""
RANK_END_SHARE = 1.5
"""Multiple of watchdog.timeout_s without progress after which a rank ends itself, if no launcher
watches it."""
WRITE_WAIT_SHARE = 0.8
"""Share of `quiet_s` that a failed run waits for the checkpoint being written."""


def train(config: Config, layout: Layout, rank: TrainerRank, writing: Background) -> None:
    """Train until `run.last_step` or a requested stop, then save a checkpoint and, at the end of
    the run, export the model. A replay exports nothing, and `run.numerics` trains nothing.
    `writing` writes checkpoints in the background."""
    directory, rank0, replay = config.run.dir, rank.rank0, config.run.replay
    with watch.phase("starting model and engines", quiet_s(config)):
        policy = Policy.build(
            config.model,
            config.policy,
            config.resolved_objective,
            config.controls,
            layout=layout,
            temperature=config.rollout.sampling.temperature if config.rollout else 1.0,
            total_steps=config.optimizer_steps,
            seed=config.run.seed,
            anomalies=directory / ANOMALIES,
            explained=(
                (replay.last, directory / EXPLANATION_FILE)
                if replay is not None and replay.explain
                else None
            ),
        )
        rank.memory = policy.memory
        same_dtype = config.engine_dtype == config.model.dtype
        exporter = WeightExporter(
            policy.model.bridge,
            policy.model.chunks,
            dtype=None if same_dtype else DTYPES[config.engine_dtype],
        )
        rank.stage_from(exporter)
        start = directory / "checkpoint" if replay is None else replay.checkpoint
        resumed = policy.load(start) if start is not None else None
        version = 0 if resumed is None else int(resumed["version"])
        if replay is not None and version != replay.first - 1:
            # The folder may have been removed since: a replay must not start from other weights.
            raise UserError.of(
                "run.replay",
                f"the weights before step {replay.first} are needed, and {start or 'the model'} has"
                f" those of step {version}",
                "start the replay again",
            )
        rank.begin(version, resumed, oldest=policy.references.oldest(version))
    saved = version if resumed is not None else -1
    due = False

    def save() -> None:
        nonlocal saved, due
        due = False
        if saved != version:
            state, files = rank.state()
            with watch.phase("saving a checkpoint", quiet_s(config)):
                policy.save(
                    directory / "checkpoint",
                    version,
                    state,
                    # After non-finite steps the weights may be at fault: keep all older
                    # checkpoints.
                    keep=None if policy.untried else config.checkpoint.keep,
                    # A finite step has used the last saved weights; none has used the new ones.
                    proven=saved if saved >= 0 else None,
                    files=files,
                    background=writing if config.checkpoint.asynchronous else None,
                )
            saved = version
            rank0.set_status("training")

    rank.publish(version)
    if config.run.numerics is not None:
        measure_canaries(config, policy, rank)
        return
    rank.evaluate(policy.mean_loss)
    rank0.set_status("training")
    collect_rarely()
    while version < config.run.last_step:
        writing.check()
        batch = next_batch(policy, rank)
        if batch is None:
            break
        rank.take_devices()
        rank.enter("training")
        metrics = policy.train_step(batch)
        version += 1
        rank.give_devices()
        rank.publish(version)
        # After the publish, because it takes up to 0.1 s. On a CPU the activations of micro-batches
        # of other sizes leave gaps, and the process would grow.
        return_freed_memory()
        rank.evaluate(policy.mean_loss)
        rank0.log(batch, metrics, policy.lag0)
        policy.require_finite_steps(ended=replay is None and version == config.run.steps)
        due |= bool(config.checkpoint.every) and version % config.checkpoint.every == 0
        # If a checkpoint is due during non-finite steps, save it after the next finite step.
        if due and not policy.untried:
            save()
    if replay is None or replay.save:
        save()
    with watch.phase("writing the last checkpoint", quiet_s(config)):
        writing.finish()
    if version < config.run.last_step:
        rank0.set_status("stopped")
        return
    if replay is not None:
        rank0.set_status("finished")
        return

    rank0.set_status("exporting", "Hugging Face checkpoint")
    with watch.phase("exporting the model", quiet_s(config)):
        files = WeightExporter(policy.model.bridge, policy.model.chunks)
        export_hf(files, config.model.path, directory / "hf")
        export_adapter(policy.model, directory / "adapter")
    skipped = policy.step.nonfinite
    rank0.set_status("finished", f"{skipped} optimizer steps were not finite" if skipped else "")


def next_batch(policy: Policy, rank: TrainerRank) -> RankBatch | None:
    """Return the batch that trains this version; None if the user requested the run to stop. With
    streamed groups, the policy adds parts of the batch to its gradient until it is complete."""
    while True:
        rank.enter("waiting", "batch")
        rank.await_batch()
        batch = policy.receive(rank.rank0.next_batch)
        if batch is None or batch.complete:
            return batch
        rank.enter("training")
        policy.accumulate(batch)


def quiet_s(config: Config) -> float:
    """Return the time in seconds that a start, a checkpoint or an export may take without
    progress."""
    start_s = config.rollout.start_timeout_s if config.rollout and config.has_engines else 0.0
    return max(config.watchdog.timeout_s, start_s)


def main(config_path: Path) -> int:
    """Run this rank of `mar train`; return the exit code."""
    config = load(config_path)
    directory, timeout_s, rank = config.run.dir, config.watchdog.timeout_s, device.launched_rank()
    log = directory / "logs" / f"rank_{rank}.log"
    redirect_output(log)
    name_this_process(f"rank {rank}")
    name_shared_memory()
    watch.start(directory, f"rank {rank}", end_after_s=RANK_END_SHARE * timeout_s)
    device_type = device.install(os.environ.get(PLANNED_DEVICE, config.policy.device))
    # Exclude the imported objects from every later garbage collection, which would traverse them.
    gc.freeze()
    with watch.phase("joining the other ranks", quiet_s(config)):
        collective_s = quiet_s(config) + COLLECTIVE_GRACE_S
        layout = initialise(config.policy.parallel, device_type, timeout_s=collective_s)

    trainer = TrainerRank(config, layout)
    with Background("writing a checkpoint") as writing:
        try:
            train(config, layout, trainer, writing)
        except BaseException as error:
            traceback.print_exc()
            explained = _explained(error, config, trainer, device_type)
            record_failure(directory, failure_of(explained, log))
            # Wait before rank 0 reports the failure, because the launcher ends all processes soon
            # after the report. The wait is shorter than the stall limit, because another rank may
            # be gone.
            with watch.phase("writing a checkpoint", quiet_s(config)):
                writing.settle(WRITE_WAIT_SHARE * quiet_s(config))
            trainer.rank0.failed(explained)
            gather_if_timed_out(directory, error, timeout_s)
            raise
        finally:
            trainer.close()
    with watch.working("leaving the other ranks"):
        layout.shutdown()
    return 0


def _explained(
    error: BaseException, config: Config, trainer: TrainerRank, device_type: str
) -> BaseException:
    """Return the error to report for `error`. If memory was exhausted, the result lists what used
    the memory."""
    try:
        return (
            memory_ran_out(
                error, config, trainer.devices.current, trainer.held, on_cpu=device_type == "cpu"
            )
            or error
        )
    except Exception:  # noqa: BLE001 - a broken device cannot be queried; report the original error
        traceback.print_exc()
        return error


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
