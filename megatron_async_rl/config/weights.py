"""The section `weights`, and the capabilities of each carrier. Imports no torch.

A carrier is one file, `weights/<name>.py`, and one line of CARRIERS. The rest of the package reads
its capabilities and never tests for its name (`lint/style.py` refuses that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from megatron_async_rl.config.policy import Fraction
from megatron_async_rl.config.settings_model import Strict


@dataclass(frozen=True, kw_only=True)
class CarrierCapabilities:
    """Properties of a carrier that decide where engines may run and what memory a version needs.

    `other_machines`: engines may run on machines other than rank 0's. `per_engine`: each engine
    receives its own copy over a communicator, one engine after the other; otherwise all engines of
    a machine read one copy. `ipc`: engines load from devices that they share with the policy, from
    buckets that the ranks fill on demand.
    """

    other_machines: bool = False
    per_engine: bool = False
    ipc: bool = False


CARRIERS = {
    "shared_memory": CarrierCapabilities(),
    "relay": CarrierCapabilities(other_machines=True),
    "collective": CarrierCapabilities(other_machines=True, per_engine=True),
    "cuda_ipc": CarrierCapabilities(ipc=True),
}
"""Capabilities by the carrier's name. The first is the default."""
DEFAULT_CARRIER = next(iter(CARRIERS))

# One line per carrier: the choices of the key are the names of the table.
if TYPE_CHECKING:
    Transport = str
else:
    Transport = Literal[tuple(CARRIERS)]


def carriers(*, other_machines: bool | None = None, ipc: bool | None = None) -> str:
    """Return the names of the carriers with these capabilities, for messages: `relay or
    collective`."""
    wanted = {"other_machines": other_machines, "ipc": ipc}
    return " or ".join(
        name
        for name, one in CARRIERS.items()
        if all(value in (None, getattr(one, key)) for key, value in wanted.items())
    )


class WeightsConfig(Strict):
    """How new weights reach the engines."""

    transport: Transport = DEFAULT_CARRIER
    """The carrier of new weights. `shared_memory`: engines run on rank 0's machine and read what
    the ranks wrote there. `cuda_ipc`, for `rollout.placement: colocated`: engines load from the
    devices that they share with the policy, two buckets at a time, and nothing passes through host
    memory. With the others engines run on any machine of the Ray cluster. `relay`: an agent on each
    machine but rank 0's copies every version into its shared memory, over TCP. `collective`: a
    sender on rank 0's machine gives every version to one engine after the other, each over a
    communicator of its own (NCCL between GPUs, gloo between CPUs), and its workers put it into
    their machine's shared memory."""
    bucket_mib: PositiveInt = 256
    """Bytes of weights that an engine takes at one time."""
    max_paused: Fraction = 0.5
    """Largest share of the engines that may pause at the same time to load new weights, while the
    others serve. One engine always may; 1 lets all load together."""

    @property
    def carrier(self) -> CarrierCapabilities:
        return CARRIERS[self.transport]
