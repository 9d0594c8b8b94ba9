"""Policies besides the trained one with which the objective compares: their choice, and their
updates.

reference           initial weights, or those of `reference.path`; `refresh_every`: set to the
                    current weights after every so many steps that are not skipped; `ema`: an
                    exponential average of the weights, updated after every such step
proximal ewma       such an average, with `ewma_decay`
proximal snapshot   the weights of the newest `snapshots` versions, each copied when its own step
                    begins; a gradient control may need them, too

Invariants:
- only weights that the objective or a control needs are kept;
- weights that change are in the checkpoint, and so are the snapshots that the next step may need. A
  reference that does not change is read again from its model directory and compared with its digest
  in the checkpoint, so a resumed run has the reference with which the run started;
- a skipped step updates nothing.

`Precompute` computes the per-token numbers of the whole batch on every rank before training begins,
by forward passes and one all-reduce:

    logp, sum_p_squared, values   under the trained weights
    logp_ref                      under the reference
    logp_prox                     ewma: under the average; snapshot: each token under the version
                                  that sampled it, so a response that several versions wrote is in
                                  one pass of each

Invariants of the passes:
- the passes and their samples are a pure function of the batch, so every rank makes the same ones;
- each token is computed by one rank (the last stage, tensor rank 0, of the data-parallel rank that
  owns its sample) and is 0 on the others, so a plain sum over the world completes the columns,
  whatever the number of micro-batches of a rank;
- columns are float32 on the CPU, in the order of the samples.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.batch import on_device
from megatron_async_rl.policy.adam_view import Sliced
from megatron_async_rl.policy.batching import Batcher, MicroBatch, Minibatch
from megatron_async_rl.policy.blocks import ModelBlocks, placed_digest
from megatron_async_rl.policy.checkpoint import Checkpoint
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken
from megatron_async_rl.policy.families import used_window
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.optimizer import load_masters
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import load_hf
from megatron_async_rl.policy.past_weights import (
    MasterSnapshot,
    Snapshots,
    WeightSnapshot,
)
from megatron_async_rl.policy.routing_replay import RoutingPass
from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

log = logging.getLogger(__name__)

REFERENCE_DIGEST = "reference_digest"
"""Key in about.json."""
PAST = "past_weights_"
"""Prefix, before a version, of the name of its weights in a checkpoint."""
PAST_MASTERS = "past_masters_"
"""Prefix, before a version, of the name of the optimizer's own weights at its start."""

SAME_ARCHITECTURE = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "query_pre_attn_scalar",
    "tie_word_embeddings",
)
"""Keys of config.json that change the computation with the same tensors."""


PolicyCopy = WeightSnapshot | MasterSnapshot
"""A copy of the weights of one policy; a MasterSnapshot if the model has FP8 weights."""


class ArchitectureMismatch(ValueError):
    """The reference's directory describes another model than the trained one."""


class ReferencePolicies:
    """Copies of weights. `trained`: copy of the trained weights while others are in place.
    `snapshots`: the newest versions, if they are the proximal policy. `past_masters`: the
    optimizer's own weights of as many versions, for a control. Members are null if nothing needs
    them.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        needs: Collection[str],
        model: PolicyModel,
        *,
        past_masters: Snapshots[MasterSnapshot] | None = None,
        optimizer: MegatronOptimizer | None = None,
    ) -> None:
        """Make the copies. optimizer: that of a model with FP8 weights, whose float32 weights are
        copied. Raises ArchitectureMismatch or WeightsDoNotFit for a `reference.path` of another
        shape. Collective over pipeline ranks, with `optimizer` over the world."""
        self.reference: PolicyCopy | None = None
        self.average: PolicyCopy | None = None
        self.past_masters = past_masters
        self.snapshots: Snapshots[PolicyCopy] | None = None
        self._optimizer = optimizer
        self._model = model
        self._source = model.source
        self._digest: str | None = None
        self._refresh_every = (
            config.reference.refresh_every if config.reference is not None else None
        )
        self._ema = config.reference.ema if config.reference is not None else None
        self._decay = config.ewma_decay
        self._layout = model.bridge.layout if model.bridge is not None else None
        # Only needed if another policy's weights are put in place for a pass.
        self.trained = self._copy(model) if {"logp_ref", "logp_prox"} & set(needs) else None
        if "logp_ref" in needs:
            path = config.reference.path if config.reference is not None else None
            self._source = path or model.source
            self.reference = self._initial_reference(path, model)
        if "logp_prox" in needs and config.proximal == "ewma":
            self.average = self._copy(model, torch.float32)
        if "logp_prox" in needs and config.proximal == "snapshot":
            self.snapshots = Snapshots(lambda: self._copy(model), config.past_versions)

    def _copy(self, model: PolicyModel, dtype: torch.dtype | None = None) -> PolicyCopy:
        if self._optimizer is not None:
            return MasterSnapshot(self._optimizer)
        return WeightSnapshot(model.chunks, dtype, self._layout)

    def _initial_reference(self, path: Path | None, model: PolicyModel) -> PolicyCopy:
        dtype = torch.float32 if self._ema is not None else None
        if path is None:
            return self._copy(model, dtype)
        _refuse_other_architecture(path, model.source)
        assert self.trained is not None
        # Loading overwrites the parameters in place; the trained weights are restored after the
        # copy.
        with self.trained.restored_after():
            load_hf(model.bridge, model.chunks, path)
            if self._optimizer is not None:
                load_masters(self._optimizer, model, path, every=True)
            return self._copy(model, dtype)

    def begin(self, version: int) -> None:
        """Record that the present weights are those of `version`, before its step."""
        for store in self._past().values():
            store.begin(version)

    @property
    def follows(self) -> bool:
        """True if `stepped` reads the weights, after some steps or all."""
        return bool(self._moving())

    def stepped(self, taken: int) -> None:
        """Update the copies after an optimizer step, the `taken`-th of the run that was not
        skipped."""
        # The order does not matter, because each copy reads only the trained weights.
        if self.reference is not None and self._ema is not None:
            self.reference.average(self._ema)
        if self.reference is not None and self._refresh_every and taken % self._refresh_every == 0:
            self.reference.update()
        if self.average is not None:
            self.average.average(self._decay)

    def trained_restored(self, *, after: bool) -> AbstractContextManager[None]:
        """Return a context manager. after: the body may put others in place, and the trained
        weights are restored at its end; otherwise it does nothing."""
        return (
            self.trained.restored_after() if after and self.trained is not None else nullcontext()
        )

    def parameter_state(self) -> dict[str, Sliced]:
        """Return slices by name of the weights that change and of past versions."""
        past = {
            f"{kind}{version}": copy.slices()
            for kind, store in self._past().items()
            for version, copy in store.lasting.items()
        }
        return {name: held.slices() for name, held in self._moving().items()} | past

    def fixed_digest(self) -> str | None:
        """Return the digest of a reference that does not change; null: there is none. Collective
        over the world."""
        if self.reference is None or self.reference in self._moving().values():
            return None
        if self._model.lora is not None:
            return None  # the base model, which has a digest of its own (blocks.py)
        if self._digest is None:
            slices = {"reference": self.reference.slices()}
            # `writes`: each element is hashed on only one replica.
            blocks = ModelBlocks(self._model).state(slices, writes=True)
            self._digest = placed_digest(blocks, self._layout)
        return self._digest

    def _refuse_other_reference(self, saved: Checkpoint) -> None:
        own, before = self.fixed_digest(), saved.content.get(REFERENCE_DIGEST)
        # A reference that changes is in the checkpoint itself; this one is read again from its
        # directory.
        if own is not None and before is not None and own != before:
            raise CheckpointBroken.of(
                "objective.reference",
                f"{saved.path} was trained with other reference weights than those of"
                f" {self._source} (digest {before}, here {own})",
                f"put the weights of {self._source} back as they were, or choose another run.dir",
            )

    def load(self, saved: Checkpoint, *, warn: bool) -> None:
        """Load the result of `parameter_state`, after the model was loaded. Missing state starts
        again; warn: log that. Collective. Raises CheckpointBroken."""
        self._refuse_other_reference(saved)
        wanted: dict[str, Sliced] = {}
        for name, held in self._moving().items():
            if name in saved.names:
                wanted[name] = held.slices()
                continue
            if held is self.average:
                # The average already exists, with the weights from before the load.
                held.update()
            if warn:
                start = (
                    "the weights of the checkpoint"
                    if held is self.average
                    else "the weights it was configured with"
                )
                log.warning(
                    "the checkpoint holds no %s: it starts from %s", name.replace("_", " "), start
                )
        for kind, store in self._past().items():
            store.clear()
            for version in sorted(
                int(name.removeprefix(kind)) for name in saved.names if name.startswith(kind)
            ):
                # The copy is only allocated here; `saved.read` fills it.
                store.begin(version)
            wanted |= {
                f"{kind}{version}": held.slices() for version, held in store.versions.items()
            }
        saved.read(wanted)

    def oldest(self, version: int) -> int:
        """Return the oldest version whose tokens the step that trains `version` can use."""
        return max(
            (min((*store.lasting, version)) for store in self._past().values()),
            default=0,
        )

    def _past(self) -> dict[str, Snapshots[Any]]:
        """Return the stores of past versions, by the prefix of their names in a checkpoint."""
        found = {PAST: self.snapshots, PAST_MASTERS: self.past_masters}
        return {kind: store for kind, store in found.items() if store is not None}

    def _moving(self) -> dict[str, PolicyCopy]:
        moves = self._ema is not None or self._refresh_every is not None
        found = {"reference": self.reference if moves else None, "proximal_average": self.average}
        return {name: held for name, held in found.items() if held is not None}


def _refuse_other_architecture(path: Path, source: Path) -> None:
    loaded, own = (_architecture(directory) for directory in (path, source))
    different: Sequence[str] = [key for key in SAME_ARCHITECTURE if loaded.get(key) != own.get(key)]
    if different:
        listed = "; ".join(
            f"{key}: {loaded.get(key)!r}, the model has {own.get(key)!r}" for key in different
        )
        raise ArchitectureMismatch(
            f"objective.reference.path: {path} is another model than {source} ({listed})"
        )


def _architecture(directory: Path) -> dict[str, Any]:
    """Return the architecture as transformers reads it, because its releases write different keys,
    and omitted keys have defaults."""
    from transformers import AutoConfig

    content = AutoConfig.from_pretrained(str(directory), local_files_only=True).to_dict()
    window = used_window(content)
    return content | {"sliding_window": window} | ({} if window else {"layer_types": None})


CURRENT_WEIGHTS = ("logp", "sum_p_squared", "values")
"""Columns that a pass under the trained weights computes."""


@dataclass(frozen=True)
class Precompute:
    """`column` is set to the model's `output`, on tokens that `version` sampled (null: on all)."""

    column: str
    output: str
    version: int | None = None


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass. weights: null for the trained weights. rows: its samples, by number; null for
    all. routing: if the trainer replays its own choice of experts, the pass over all samples under
    the trained weights records it; a reference chooses its own."""

    weights: PolicyCopy | None
    fills: tuple[Precompute, ...]
    rows: tuple[int, ...] | None = None
    routing: RoutingPass = "replay"


def passes(
    columns: Sequence[str],
    samples: RankBatch,
    references: ReferencePolicies,
    *,
    record: bool = False,
) -> list[Pass]:
    """Return the passes that compute `columns`, first those under the trained weights (which are
    the batch's version). record: these record their choice of experts.

    Raises SnapshotMissing for a token whose version is not kept.
    """
    version = samples.version
    current = [Precompute(name, name) for name in columns if name in CURRENT_WEIGHTS]
    rows: tuple[int, ...] | None = None
    sampled_by: dict[int, tuple[int, ...]] = {}
    if "logp_prox" in columns and references.snapshots is not None:
        for each in np.unique(samples.versions).tolist():
            sampled_by[each] = tuple(np.unique(samples.rows[samples.versions == each]).tolist())
        # Tokens of the present version need no snapshot, because its weights are in place.
        own = sampled_by.pop(version, None)
        if own is not None:
            rows = None if current else own
            current.append(Precompute("logp_prox", "logp", version))
    routing: RoutingPass = "record" if record else "replay"
    found = [Pass(None, tuple(current), rows, routing)] if current else []
    if "logp_ref" in columns:
        assert references.reference is not None
        found.append(
            Pass(references.reference, (Precompute("logp_ref", "logp"),), routing="choose")
        )
    if "logp_prox" in columns and references.average is not None:
        found.append(Pass(references.average, (Precompute("logp_prox", "logp"),)))
    for each in sorted(sampled_by):
        assert references.snapshots is not None
        # One pass per version: a response that several versions wrote is in a pass of each.
        weights = references.snapshots.of(each, current=version)
        found.append(Pass(weights, (Precompute("logp_prox", "logp", each),), sampled_by[each]))
    return found


def precompute(
    columns: Sequence[str],
    samples: RankBatch,
    minibatches: Sequence[Minibatch],
    references: ReferencePolicies,
    schedule: Schedule,
    batcher: Batcher,
    *,
    record: bool = False,
) -> dict[str, Tensor]:
    """Return these columns over the tokens of `samples`, [N] float32 each, on the CPU of every
    rank. `minibatches` contain all of the samples. record: see `passes`. Collective over the world.
    Raises SnapshotMissing.

    A pass over all samples runs the same micro-batches as training, so that at a batch's first step
    pi and a recomputed pi_prox are the same numbers.
    """
    table = PrecomputeTable(samples, columns, schedule.layout)
    planned = passes(columns, samples, references, record=record)
    # The trained weights are restored even after a pass that raised.
    with references.trained_restored(after=any(each.weights is not None for each in planned)):
        for each in planned:
            if each.weights is not None:
                each.weights.place()
            parts = minibatches if each.rows is None else [batcher.of(samples, np.array(each.rows))]
            for part in parts:
                rows, own = part.rows, part.micro_batches
                table.run(schedule, own, each.fills, rows, each.routing)
    return table.finish()


def current_columns(
    columns: Sequence[str], minibatch: Minibatch, schedule: Schedule
) -> dict[str, Tensor]:
    """Return these columns of CURRENT_WEIGHTS over the tokens of a minibatch, under the trained
    weights. Collective over the world."""
    table = PrecomputeTable(minibatch.samples, columns, schedule.layout)
    if columns:
        fills = [Precompute(name, name) for name in columns]
        table.run(schedule, minibatch.micro_batches, fills)
    return table.finish()


class PrecomputeTable:
    """[C, N] float32: named columns over the response tokens of the samples, in their order."""

    def __init__(self, samples: RankBatch, columns: Sequence[str], layout: Layout) -> None:
        self.columns = list(columns)
        self.layout = layout
        self.samples = samples
        self.values = torch.zeros(
            len(self.columns), len(samples.rows), dtype=torch.float32, device=layout.device
        )

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        fills: Sequence[Precompute],
        rows: NDArray[np.int64] | None = None,
        routing: RoutingPass = "replay",
    ) -> None:
        """Run one forward pass under the present weights. rows: the samples to which the
        micro-batches' numbers refer; null for all."""
        numbers = np.arange(len(self.samples)) if rows is None else rows
        # Indices, among all tokens, of the tokens that this rank computes; micro-batches number
        # their own tokens.
        numbers = numbers[self.samples.owner[numbers] == self.layout.dp_rank]
        tokens = spans(self.samples.starts[numbers], self.samples.lengths[numbers])
        owned = on_device({"owned": torch.from_numpy(tokens)}, self.layout.device)["owned"]
        for micro_batch, outputs in schedule.forward(micro_batches, routing):
            # Only one rank writes a token, or the sum over the world would count it twice.
            if not self.layout.records_outputs or not micro_batch.samples:
                continue
            places = owned[micro_batch.owned_tokens]
            for fill in fills:
                target, output = (
                    self.values[self.columns.index(fill.column)],
                    # float32, whatever the model's dtype, because bfloat16 would round log-probs.
                    getattr(outputs, fill.output).float(),
                )
                if fill.version is not None:
                    output = torch.where(
                        micro_batch.versions == fill.version, output, target[places]
                    )
                target[places] = output

    def finish(self) -> dict[str, Tensor]:
        """Return column -> [N] float32 on the CPU. Collective over the world."""
        if self.columns:
            # Unwritten elements are 0, so the sum completes the columns on every rank.
            dist.all_reduce(self.values, group=self.layout.world_group)
        return dict(zip(self.columns, self.values.cpu(), strict=True))
