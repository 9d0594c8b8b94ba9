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
    """Properties of a carrier that determine where engines may run and how much memory a version
    needs.

    `agents`: module of `weights/` with the agents that copy versions to engines on machines other
    than rank 0's (`weights/agents.py`); empty if all engines run on rank 0's machine. `per_engine`:
    each engine receives its own copy, one engine after another, and the carrier's file has a
    `Receiver` for its workers; otherwise all engines of a machine read one copy. `ipc`: engines
    load from buckets that the ranks fill on demand, on devices that engines and policy share.
    """

    agents: str = ""
    per_engine: bool = False
    ipc: bool = False

    @property
    def other_machines(self) -> bool:
        """True if engines may run on machines other than rank 0's."""
        return bool(self.agents)


CARRIERS = {
    "shared_memory": CarrierCapabilities(),
    "relay": CarrierCapabilities(agents="relay_agents"),
    "collective": CarrierCapabilities(agents="collective_agents", per_engine=True),
    "cuda_ipc": CarrierCapabilities(ipc=True),
}
"""Carrier's name -> its capabilities. The first carrier is the default."""
DEFAULT_CARRIER = next(iter(CARRIERS))

# The key's choices are the names in the table, so a new carrier needs one line only.
if TYPE_CHECKING:
    Transport = str
else:
    Transport = Literal[tuple(CARRIERS)]


def carriers(*, other_machines: bool | None = None, ipc: bool | None = None) -> str:
    """Return the names of the carriers with these capabilities, for messages: `relay or
    collective`."""
    required = {"other_machines": other_machines, "ipc": ipc}
    return " or ".join(
        name
        for name, one in CARRIERS.items()
        if all(value in (None, getattr(one, key)) for key, value in required.items())
    )


class WeightsConfig(Strict):
    """Transport of new weights to the engines."""

    transport: Transport = DEFAULT_CARRIER
    """Carrier of new weights. `shared_memory`: engines run on rank 0's machine and read the
    weights from its shared memory. `cuda_ipc`, for `rollout.placement: colocated`: engines load two
    buckets at a time from the devices that they share with the policy, without a copy in host
    memory. With the other carriers engines run on any machine of the Ray cluster. `relay`: on each
    machine except rank 0's, an agent copies every version over TCP into the machine's shared
    memory. `collective`: a sender on rank 0's machine sends every version to one engine after
    another, each over its own communicator (NCCL between GPUs, gloo between CPUs), and the engine's
    workers write it into their machine's shared memory."""
    bucket_mib: PositiveInt = 256
    """Size of a bucket, the part of the weights that an engine loads at a time; MiB."""
    max_paused: Fraction = 0.5
    """Largest share of the engines that may pause at the same time to load new weights, while the
    others serve. One engine always may; with 1 all engines load together."""

    @property
    def carrier(self) -> CarrierCapabilities:
        return CARRIERS[self.transport]
