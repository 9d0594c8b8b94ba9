"""The policies beside the one in training that the objective compares with: which are kept, and when they move.

reference           initial weights, or those of `reference.path`; `refresh_every`: becomes the current weights after every so
                    many steps taken; `ema`: an exponential average of the weights, moved after every step taken
proximal ewma       such an average, by `ewma_decay`
proximal snapshot   the weights of the newest `snapshots` versions, each kept when its own step begins; a step control may ask
                    for them too

Invariants:
- only what the objective's survey or a control asks for is kept;
- what moves is in the checkpoint, and so are the snapshots that the next step may need; a reference that does not move is read
  again from its model directory, so it is the one the run started with although the model in training is a resumed one;
- a step that was skipped moves nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_async_rl.policy.held_weights import HeldWeights, Snapshots
from megatron_async_rl.weights.load import load_hf

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import ObjectiveConfig
    from megatron_async_rl.policy.checkpoint import Checkpoint
    from megatron_async_rl.policy.model import PolicyModel
    from megatron_async_rl.policy.parameter_state import ModelTensors

log = logging.getLogger(__name__)

PAST = "past_weights_"
"""And a version: the name of its weights in a checkpoint."""

SAME_ARCHITECTURE = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
"""Keys of config.json that change what the same tensors compute."""


class OtherArchitecture(ValueError):
    """The reference's directory describes another model than the one in training."""


class OtherPolicies:
    """`trained`: where the weights in training wait while others are in place. `past`: the newest versions; `snapshots`: those,
    where they are the proximal policy. Members are null where nothing asks for them.
    """

    def __init__(self, config: ObjectiveConfig, needs: Collection[str], model: PolicyModel, *, keep_past: bool = False) -> None:
        """Raises OtherArchitecture or WeightsDoNotFit for a `reference.path` of another shape. Collective over pipeline ranks."""
        self.reference: HeldWeights | None = None
        self.average: HeldWeights | None = None
        self.past: Snapshots | None = None
        self.snapshots: Snapshots | None = None
        self._refresh_every = config.reference.refresh_every if config.reference is not None else None
        self._ema = config.reference.ema if config.reference is not None else None
        self._decay = config.ewma_decay
        self.trained = HeldWeights(model.chunks) if {"logp_ref", "logp_prox"} & set(needs) else None
        if "logp_ref" in needs:
            path = config.reference.path if config.reference is not None else None
            self.reference = self._initial_reference(path, model)
        if "logp_prox" in needs and config.proximal == "ewma":
            self.average = HeldWeights(model.chunks, torch.float32)
        proximal = "logp_prox" in needs and config.proximal == "snapshot"
        if proximal or keep_past:
            self.past = Snapshots(model.chunks, config.snapshots)
        if proximal:
            self.snapshots = self.past

    def _initial_reference(self, path: Path | None, model: PolicyModel) -> HeldWeights:
        dtype = torch.float32 if self._ema is not None else None
        if path is None:
            return HeldWeights(model.chunks, dtype)
        _refuse_other_architecture(path, model.source)
        assert self.trained is not None
        with self.trained.restored_after():
            load_hf(model.bridge, model.chunks, path)
            return HeldWeights(model.chunks, dtype)

    def begin(self, version: int) -> None:
        """The weights in place are those of `version`, before its step."""
        if self.past is not None:
            self.past.begin(version)

    def stepped(self, taken: int) -> None:
        """An optimizer step was taken, the `taken`-th of the run."""
        if self.reference is not None and self._ema is not None:
            self.reference.average(self._ema)
        if self.reference is not None and self._refresh_every and taken % self._refresh_every == 0:
            self.reference.update()
        if self.average is not None:
            self.average.average(self._decay)

    def trained_restored(self, *, after: bool) -> AbstractContextManager[None]:
        """after: within it others are put in place, and at its end the weights in training again; otherwise it does nothing."""
        return self.trained.restored_after() if after and self.trained is not None else nullcontext()

    def parameter_state(self) -> dict[str, ModelTensors]:
        """What moves and what is past, by name: model tensors of this rank."""
        past = self.past.lasting if self.past is not None else {}
        held = self._moving() | {f"{PAST}{version}": weights for version, weights in past.items()}
        return {name: weights.tensors for name, weights in held.items()}

    def load(self, saved: Checkpoint, *, warn: bool) -> None:
        """After the model was loaded: what `parameter_state` returned. What is missing starts anew; warn: say so. Collective."""
        for name, held in self._moving().items():
            if name in saved.names:
                held.load(saved.read(name))
                continue
            if held is self.average:
                held.update()
            if warn:
                start = "the weights of the checkpoint" if held is self.average else "the weights it was configured with"
                log.warning("the checkpoint holds no %s: it starts from %s", name.replace("_", " "), start)
        if self.past is not None:
            self.past.clear()
            for version in sorted(int(name.removeprefix(PAST)) for name in saved.names if name.startswith(PAST)):
                self.past.load(version, saved.read(f"{PAST}{version}"))

    def oldest(self, version: int) -> int:
        """The oldest version whose tokens the step that trains `version` can take."""
        return 0 if self.past is None else min((*self.past.lasting, version))

    def _moving(self) -> dict[str, HeldWeights]:
        moves = self._ema is not None or self._refresh_every is not None
        found = {"reference": self.reference if moves else None, "proximal_average": self.average}
        return {name: held for name, held in found.items() if held is not None}


def _refuse_other_architecture(path: Path, source: Path) -> None:
    theirs, own = (_architecture(directory) for directory in (path, source))
    different: Sequence[str] = [key for key in SAME_ARCHITECTURE if theirs.get(key) != own.get(key)]
    if different:
        listed = "; ".join(f"{key}: {theirs.get(key)!r}, the model has {own.get(key)!r}" for key in different)
        raise OtherArchitecture(f"objective.reference.path: {path} is another model than {source} ({listed})")


def _architecture(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content
