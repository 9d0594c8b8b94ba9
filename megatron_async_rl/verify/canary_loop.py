"""Work of the trainer's ranks in `mar verify CONFIG --numerics`: publish two versions, let engines
sample the canary prompts under each, and measure the policy on these samples.

    publish the model's weights --> canaries sampled --> scores, rounding, first tokens, gradients
    publish scaled weights      --> canaries sampled --> scores, rounding

Invariants:
- nothing is trained: the optimizer makes no step, and no checkpoint is written;
- publishing, engines, batches and device phases are those of a training run (train.py);
- the engines finish sampling a version before the next one is published, so every sample has one
  version; the launcher computes the verdicts (numerics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_async_rl.config.schema import NUMERICS_VERSIONS, Config
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.policy.canary_scores import (
    fill_zeros,
    first_token_logprobs,
    rounded_once_more,
    scale_weights,
    score,
    unit_roundoff,
    without_gradient,
)
from megatron_async_rl.policy.model import DTYPES
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.columns import ROUTED, flat, list_array, rows_of_lists
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.verify.canary_samples import measurement_file, write_measurements
from megatron_async_rl.watchdog import watch

SCALE = 0.8
"""Factor of all weights for the second version. Logits, keys and values change by more than
rounding in any precision, and the distribution becomes flatter, so samples stay varied."""

Arrays = dict[str, NDArray[np.generic]]


def measure_canaries(config: Config, policy: Policy, rank: TrainerRank) -> None:
    """Compare trainer and engines on canary prompts. Rank 0 writes one file for each version.

    digest: text, of the weights. Arrays by sample (S) and response token (N), in the order of the
    batch: id [S] text, group, prompt_length, length [S] int64; response_ids, versions, loss_mask
    [N] integers; engine, trainer [N] float32, log-probs of the two; sum_p_squared [N] float32;
    rounded [N] float32, the trainer's log-probs with one more rounding per layer. First version:
    first_token_logprobs [groups, V] float32, and moved [groups] float32, the change of the log-prob
    of each group's first sampled token by the second version's weights; without_gradient, text, and
    trainable, a number.
    """
    for version in range(NUMERICS_VERSIONS):
        rank.enter("waiting", "batch")
        rank.await_batch()
        taken: list[TrainBatch] = []
        batch = policy.receive(_keeping(rank.rank0.next_batch, taken))
        if batch is None:
            rank.rank0.set_status("stopped")
            return
        rank.take_devices()
        rank.enter("training")
        with watch.phase("measuring the policy on canaries", config.watchdog.timeout_s):
            found = _measure(config, policy, batch, taken, first=version == 0)
        if taken:
            found |= _sampled(taken[0]) | {"digest": np.array(rank.digest)}
            write_measurements(measurement_file(config.run.dir, version), found)
        rank.give_devices()
        # After the last version there is nothing to sample; its publication would not be compared.
        if version + 1 < NUMERICS_VERSIONS:
            rank.publish(version + 1)
        rank.version = version + 1
        rank.rank0.advance(version + 1)
    rank.rank0.set_status("finished")


def _keeping(
    take: Callable[[], TrainBatch | None], kept: list[TrainBatch]
) -> Callable[[], TrainBatch | None]:
    """Return `take`, which also appends its batch to `kept`, on rank 0. A sample whose reward
    failed is compared like the others."""

    def taking() -> TrainBatch | None:
        batch = take()
        if batch is None:
            return None
        valid = pa.array(np.ones(batch.samples.num_rows, dtype=np.bool_))
        kept.append(_replaced(batch, batch.samples, {"valid": valid}))
        return kept[-1]

    return taking


def _measure(
    config: Config, policy: Policy, batch: RankBatch, taken: list[TrainBatch], *, first: bool
) -> Arrays:
    """Return the trainer's arrays; after the first version, change the weights. taken: on rank 0,
    the whole batch. Collective."""
    quantised = config.rollout is not None and config.rollout.quantised
    roundoff = unit_roundoff(
        DTYPES[config.model.dtype], fp8=quantised or config.policy.fp8 is not None
    )
    scores = score(policy, batch)
    with rounded_once_more(policy.model, roundoff):
        rounded = score(policy, batch)["logp"]
    found: Arrays = {
        "trainer": scores["logp"],
        "sum_p_squared": scores["sum_p_squared"],
        "rounded": rounded,
    }
    if not first:
        return found
    beginnings = policy.receive(lambda: _first_tokens(taken[0]))
    assert beginnings is not None
    found["first_token_logprobs"] = first_token_logprobs(policy, beginnings)
    before = score(policy, beginnings)["logp"]
    # Only after every score: the gradient needs parameters that are not zero.
    fill_zeros(policy.model)
    names, trainable = without_gradient(policy, batch)
    found["without_gradient"] = np.array(names, dtype=np.str_)
    found["trainable"] = np.array(trainable)
    scale_weights(policy.model, SCALE)
    found["moved"] = score(policy, beginnings)["logp"] - before
    return found


def _sampled(batch: TrainBatch) -> Arrays:
    """Return the engines' arrays."""
    samples = batch.samples
    responses, lengths = flat(samples.column("response_ids"))
    return {
        "id": np.array(samples.column("id").to_pylist(), dtype=np.str_),
        "group": samples.column("group").to_numpy(),
        "prompt_length": flat(samples.column("prompt_ids"))[1],
        "length": lengths,
        "response_ids": responses,
        "versions": flat(samples.column("versions"))[0],
        "loss_mask": flat(samples.column("loss_mask"))[0],
        "engine": flat(samples.column("behavior_logprobs"))[0],
    }


def _first_tokens(batch: TrainBatch) -> TrainBatch:
    """Return the first sample of each group with its first response token alone."""
    _, rows = np.unique(batch.samples.column("group").to_numpy(), return_index=True)
    kept = batch.samples.take(pa.array(np.sort(rows)))
    cut = {
        name: list_array([row[:1] for row in _rows(kept, name)], kept.schema.field(name).type)
        for name in ("response_ids", "behavior_logprobs", "versions", "loss_mask")
    }
    for name in ("step_rewards", "segment_starts"):
        cut[name] = pa.nulls(len(kept), kept.schema.field(name).type)
    cut[ROUTED] = pa.array(
        [_of_prompt(kept, row) for row in range(len(kept))], kept.schema.field(ROUTED).type
    )
    return _replaced(batch, kept, cut)


def _of_prompt(samples: pa.RecordBatch, row: int) -> bytes | None:
    """Return the experts of a sample's prompt; None if none were recorded."""
    experts: bytes | None = samples.column(ROUTED)[row].as_py()
    prompt, length = (len(_rows(samples, name)[row]) for name in ("prompt_ids", "response_ids"))
    segments = samples.column("segment_starts")[row].as_py() or ()
    # No layer reads the last token of a segment, so it has no experts.
    fed = prompt + length - 1 - len(segments)
    return None if experts is None else experts[: len(experts) // fed * prompt]


def _rows(samples: pa.RecordBatch, name: str) -> list[NDArray[np.generic]]:
    return [row for row in rows_of_lists(samples.column(name)) if row is not None]


def _replaced(
    batch: TrainBatch, samples: pa.RecordBatch, columns: Mapping[str, pa.Array]
) -> TrainBatch:
    """Return a batch of `samples` with other `columns`."""
    every = [columns.get(name, samples.column(name)) for name in samples.schema.names]
    return TrainBatch(
        version=batch.version, samples=pa.RecordBatch.from_arrays(every, schema=samples.schema)
    )
