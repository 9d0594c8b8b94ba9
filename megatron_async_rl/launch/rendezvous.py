"""Rendezvous of the launchers of one run on several machines, before the ranks start.

They exchange JSON values in a torch store of node 0's launcher at `--rdzv-endpoint`:

    key       written by                           content
    refusal   the first node that does not start   its reason; every node shows it and ends
    node 0    node 0, its directory is prepared    id of the start, config, versions, rank address
    node n    node n, it fits node 0               address of its ranks
    go        node 0, it has reached every node    id of the start: the ranks may start
    read n    node n                               it has read the outcome, and is done

Invariants:
- no rank starts before every node has the same config, number of nodes and software, sees node 0's
  run directory, and node 0 and the node reach each other's ranks;
- the store is open from the beginning, before node 0 reads its config: nodes may refuse in any
  order;
- a node that does not start ends at most REFUSAL_S after it reported this to its user;
- every wait has a name and a limit. torch's client has no limit: it waits forever for a server that
  accepts the connection and does not answer;
- no value is unpickled, and a value that is not one of the above counts as absent;
- no socket listens at an address that neither the endpoint nor the ranks need;
- a run on one machine does not load torch here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, IPvAnyAddress, ValidationError

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.addresses import (
    INTERFACE,
    LOOPBACK,
    Nodes,
    NodesError,
    interface_of,
    listening_address,
    rank_address,
)
from megatron_async_rl.rollout.cluster import software, software_differences
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.progress_monitor import LAUNCHER, ProcessState, read_states
from megatron_async_rl.weights.bound_store import listen, serve_store

POLL_S = 0.1
REFUSAL_S = 10.0
"""Longest time that a node that does not start waits for the others to read its reason. Schedulers
start the nodes of a job within about this time of each other."""
CONNECT_S = 1.0
CALL_S = 5.0
"""Longest wait for a connection to node 0, and for an answer of its store."""
REACH_S = 10.0
"""Longest wait for an answer from a node that is known to run."""
SHARED_S = 90.0
"""Longest time for a file of node 0 to appear on another node, since NFS caches folders for 60
s."""
RENDEZVOUS = "bound"
"""Name of the rendezvous of torchrun.py in torchrun's registry."""
DESCRIPTORS = 65536
"""Limit of open files on node 0 while it serves the store, which does not limit connections."""
TORCH_LOG = "TORCH_CPP_LOG_LEVEL"
"""Environment variable that torch reads when it is imported."""

_REFUSAL, _GO = "refusal", "go"
_START, _UNREACHED = "start", "unreached"
"""Key of a launcher's facts in its state in the run directory."""


@dataclass(frozen=True)
class RankStore:
    """Store of the ranks of a start: `address` and `port` on node 0. `listener`: on node 0 the
    socket that torchrun will serve, so the port stays open between launcher and torchrun."""

    start: str
    address: str
    port: int
    listener: socket.socket | None

    def torchrun(self, nodes: Nodes, ranks: int) -> list[str]:
        """Return torchrun's arguments for this node's share of the ranks."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        served = "" if self.listener is None else f",descriptor={self.listener.fileno()}"
        return [
            f"--nnodes={nodes.count}",
            f"--nproc-per-node={ranks // nodes.count}",
            f"--rdzv-backend={RENDEZVOUS}",
            f"--rdzv-endpoint={host}:{self.port}",
            f"--rdzv-conf=rank={nodes.rank}{served}",
            f"--rdzv-id={self.start}",
        ]


class NodeRecord(BaseModel):
    """Announcement of a node. `start`: id of the start that it joins. `address`, `port`: a socket
    that listens at the address of its ranks. `interface`: its network interface towards the
    others."""

    node: int
    host: str
    start: str
    count: int
    software: dict[str, str]
    config: str
    address: IPvAnyAddress
    port: int
    interface: str


class NodeRefusal(BaseModel):
    """Reason why a node does not start."""

    node: int
    host: str
    why: str


class PeerNodes:
    """The other nodes, until the ranks start. A run on one machine has none."""

    def __init__(self, nodes: Nodes) -> None:
        """Raise NodesError if node 0 cannot listen at its endpoint."""
        self._nodes = nodes
        self._host = socket.gethostname()
        self._store: Any = None
        """Node 0: the store, which is also its own client. Another node: its client, if any."""
        self._address = ""
        """Address of this machine on its connection to the others."""
        self._reached_at: float | None = None
        """Monotonic time at which node 0 was last known to run."""
        self._unreached = ""
        """Reason of the last failure to reach node 0."""
        self._ranks: socket.socket | None = None
        """Socket that listens at the address of this node's ranks, for tests by other nodes."""
        self._closed = nodes.count == 1

        if nodes.count > 1:
            listener = self._listen_at_endpoint() if nodes.rank == 0 else None
            _load_torch()
            if listener is not None:
                self._store = serve_store(listener, timedelta(seconds=REACH_S))

    def meet(self, config: Config, timeout_s: float) -> RankStore:
        """Wait for the other nodes, and begin this launcher's heartbeat.

        Node 0 has prepared the run's directory. The caller owns the listener of the result. Raises
        NodesError.
        """
        run_dir, start = config.run.dir, uuid.uuid4().hex
        if self._nodes.count == 1:
            watch.start(run_dir, f"{LAUNCHER}0")
            listener = listen(LOOPBACK)
            return RankStore(start, LOOPBACK, listener.getsockname()[1], listener)

        self._ranks = listen(rank_address())
        address, port = self._ranks.getsockname()[:2]
        own = NodeRecord(
            node=self._nodes.rank,
            host=self._host,
            start=start,
            count=self._nodes.count,
            software=software(),
            config=dump(config),
            address=address,
            port=port,
            interface=interface_of(self._address),
        )
        meet = self._lead if self._nodes.rank == 0 else self._join
        with watch.doing("wait", "the other nodes", timeout_s):
            found = meet(own, run_dir, timeout_s)
        self.close()
        return found

    def refuse(self, why: str, within_s: float = REFUSAL_S) -> None:
        """Report to the other nodes that this one does not start.

        Node 0 waits up to `within_s` until all have read the reason, another node until node 0 has
        it.
        """
        own = NodeRefusal(node=self._nodes.rank, host=self._host, why=why).model_dump_json()

        def report(store: Any) -> bool:
            store.compare_set(_REFUSAL, "", own)  # does not replace an earlier reason
            return self._is_read(store)

        if not self._closed:
            self._repeat(report, within_s)
        self.close()

    def close(self) -> None:
        """Stop serving or reading the store, and release its port."""
        if self._ranks is not None:
            self._ranks.close()
        self._store, self._ranks, self._closed = None, None, True

    def _listen_at_endpoint(self) -> socket.socket:
        self._address, port = listening_address(self._nodes), self._nodes.port
        try:
            listener = listen(self._address, port)
        except (OSError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise NodesError.of(
                "--rdzv-endpoint",
                f"port {port} is already in use on this machine"
                if in_use
                else f"this machine cannot listen on port {port} of {self._address}: {error}",
                "name a free port",
            ) from error

        # The store never closes a client, and connections of strangers must not use up this
        # process's open files. torchrun, whose store is as open, inherits the limit.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
        return listener

    def _lead(self, own: NodeRecord, run_dir: Path, timeout_s: float) -> RankStore:
        """Announce the start of node 0, and return once every node has joined it."""
        # The other nodes look for the id in node 0's state file, too, which proves that they see
        # this directory, so it is written before the store announces the id.
        watch.fact(_START, lambda: own.start)
        watch.start(run_dir, f"{LAUNCHER}0")
        self._repeat(lambda store: _put(store, "node 0", own), REACH_S)

        deadline = time.monotonic() + timeout_s
        missing = list(range(1, self._nodes.count))
        while missing:
            found = self._read(_REFUSAL, *(f"node {number}" for number in missing))
            for number in list(missing):
                node = _parsed(NodeRecord, found.get(f"node {number}"))
                # A record of another start belongs to an earlier launcher.
                if node is not None and node.start == own.start:
                    self._try_ranks(node)
                    missing.remove(number)
            _raise_cut_off(run_dir, own.start)
            if missing and time.monotonic() > deadline:
                numbers = ("node " if len(missing) == 1 else "nodes ") + ", ".join(
                    map(str, missing)
                )
                raise NodesError.of(
                    f"{numbers} of {self._nodes.count}",
                    f"timed out after {timeout_s:g} s",
                    "run the same command there, with a --node-rank of its own; all nodes must see"
                    f" {run_dir}",
                )
            time.sleep(POLL_S)

        def go(store: Any) -> bool:
            store.set(_GO, own.start)
            return self._is_read(store)

        # The store stays until all have read this: a client whose server is gone learns nothing. If
        # a node has ended meanwhile, torchrun, which waits for its ranks, reports it.
        self._repeat(go, REACH_S)
        self._read(_REFUSAL)
        listener, self._ranks = self._ranks, None
        return RankStore(own.start, str(own.address), own.port, listener)

    def _join(self, own: NodeRecord, run_dir: Path, timeout_s: float) -> RankStore:
        """Join the start that node 0 announces, and return once it lets the ranks start."""
        zero: NodeRecord | None = None
        began = announced_at = time.monotonic()
        joined, beats = False, set[float]()
        while True:
            found = self._read(_REFUSAL, "node 0", _GO)
            now, state = time.monotonic(), _launcher(run_dir, 0)

            announced = _parsed(NodeRecord, found.get("node 0"))
            if announced is not None and announced != zero:  # node 0 may have been restarted
                self._require_fit(own, announced)
                zero, joined, announced_at = announced, False, now
            if zero is not None and not joined:
                if state is not None and state.facts.get(_START) == zero.start:
                    self._try_ranks(zero)
                    joined, began = self._announce(own, zero.start, run_dir), now
                elif now - announced_at > SHARED_S:
                    raise NodesError.of(
                        "run.dir",
                        f"{run_dir} on node {own.node} ({own.host}) is not the directory of node 0"
                        f" ({zero.host})",
                        "mount the same file system there, under the same path",
                    )
            if zero is not None and joined and found.get(_GO) == zero.start:
                self._call(self._is_read)
                return RankStore(zero.start, str(zero.address), zero.port, None)

            # Node 0 also runs if its heartbeat continues. A single beat may be a killed launcher's.
            beats |= {state.time} if state is not None else set()
            if self._reached_at is None and len(beats) > 1:
                self._reached_at = now
            if self._reached_at is not None and now - self._reached_at > REACH_S:
                raise self._cut_off(run_dir, state)
            if now - began > timeout_s:
                raise NodesError.of(
                    "node 0",
                    f"timed out after {timeout_s:g} s",
                    f"run the same command there, with --node-rank 0; all nodes must see {run_dir}",
                )
            time.sleep(POLL_S)

    def _announce(self, own: NodeRecord, start: str, run_dir: Path) -> bool:
        """Join `start`. Return False if the store cannot be reached."""
        # A node that cannot write to the directory fails here, before the others rely on it.
        watch.start(run_dir, f"{LAUNCHER}{own.node}")
        here = {"start": start, "interface": interface_of(self._address)}
        record = own.model_copy(update=here)
        return self._repeat(lambda store: _put(store, f"node {own.node}", record), REACH_S)

    def _require_fit(self, own: NodeRecord, zero: NodeRecord) -> None:
        """Raise NodesError if this node differs from node 0."""
        if zero.count != own.count:
            raise NodesError.of(
                "--nnodes",
                f"{own.count} here, {zero.count} on node 0 ({zero.host})",
                "give all nodes the same --nnodes",
            )
        if differs := software_differences(own.software, zero.software):
            raise NodesError.of(
                f"node {own.node} ({own.host})",
                f"has other versions than node 0 ({zero.host}): {differs}",
                "install the same environment on all nodes",
            )
        if own.config != zero.config:
            lines = zip(zero.config.splitlines(), own.config.splitlines(), strict=False)
            there, here = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
            raise NodesError.of(
                "CONFIG",
                f"differs from that of node 0 ({zero.host}): `{here.strip()}` here,"
                f" `{there.strip()}` there",
                "give all nodes the same config and the same overrides",
            )

    def _try_ranks(self, other: NodeRecord) -> None:
        """Raise NodesError if the ranks here will not reach those of the other node."""
        try:
            socket.create_connection((str(other.address), other.port), REACH_S).close()
        except OSError as error:
            detail = ", which is every machine's own address" if other.address.is_loopback else ""
            raise NodesError.of(
                f"node {other.node} ({other.host})",
                f"its ranks will listen at {other.address}{detail}, and node {self._nodes.rank}"
                f" ({self._host}) does not reach that: {error}",
                f"set {INTERFACE} there to the network that all nodes have (such as"
                f" {other.interface}), and NCCL_SOCKET_IFNAME on GPUs; open all ports in it",
            ) from error

    def _cut_off(self, run_dir: Path, zero: ProcessState | None) -> NodesError:
        """Return the error of a node that cannot reach node 0. Node 0 reads it in the run
        directory, because the store cannot carry it."""
        error = NodesError.of(
            "--rdzv-endpoint",
            f"node {self._nodes.rank} ({self._host}) does not reach node 0 at"
            f" {self._nodes.endpoint}: {self._unreached}",
            "name node 0 by an address that the other nodes reach (MASTER_ADDR), and open that"
            " port (MASTER_PORT) between them",
        )
        start = zero.facts.get(_START) if zero is not None else None
        watch.fact(_START, lambda: start)
        watch.fact(_UNREACHED, lambda: str(error))
        watch.start(run_dir, f"{LAUNCHER}{self._nodes.rank}")
        return error

    def _read(self, *keys: str) -> dict[str, str]:
        """Return the values of those `keys` that are set; none while node 0 is out of reach. Raises
        NodesError for a refusal."""

        def read(store: Any) -> dict[str, str]:
            # `get` would wait for a key that is not set.
            return {key: store.get(key).decode() for key in keys if store.check([key])}

        found = self._call(read) or {}
        if (refusal := _parsed(NodeRefusal, found.get(_REFUSAL))) is not None:
            raise refused(refusal.node, refusal.host, refusal.why)
        return found

    def _is_read(self, store: Any) -> bool:
        """Record that this node has read the outcome. On node 0, return True once all have."""
        if self._nodes.rank > 0:
            store.set(f"read {self._nodes.rank}", "")
            return True
        return bool(store.check([f"read {number}" for number in range(1, self._nodes.count)]))

    def _repeat(self, act: Callable[[Any], bool], within_s: float) -> bool:
        """Call `act(store)` until it returns True, for at most `within_s`. Return its result."""
        deadline = time.monotonic() + within_s
        with watch.doing("wait", "the other nodes to read from the store", within_s):
            while True:
                # A server that does not answer must not hold a node for longer than `within_s`.
                left_s = max(POLL_S, deadline - time.monotonic())
                if self._call(act, min(CALL_S, left_s)):
                    return True
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_S)

    def _call[Result](
        self, act: Callable[[Any], Result], limit_s: float | None = None
    ) -> Result | None:
        """Return `act(store)`, or None while node 0 is out of reach."""
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(act(self._connected()))
            except Exception as error:  # noqa: BLE001 - raised by `result`
                outcome.set_exception(error)

        # torch's client would wait forever for a server that does not answer, so it runs in a
        # daemon thread.
        threading.Thread(target=run, name="store", daemon=True).start()
        try:
            result = outcome.result(CALL_S if limit_s is None else limit_s)
        except (RuntimeError, OSError, ValueError) as error:  # torch raises RuntimeErrors
            self._unreached = str(error) or f"no answer within {CALL_S:g} s"
            if self._nodes.rank > 0:
                self._store = None  # the next call connects again
            return None
        self._reached_at = time.monotonic()
        return result

    def _connected(self) -> Any:
        if self._store is None:
            # First a plain connection: its error has the system's reason, and a stranger's service
            # at the port does not receive torch's protocol.
            endpoint = (self._nodes.host, self._nodes.port)
            with socket.create_connection(endpoint, CONNECT_S) as tried:
                self._address, host = tried.getsockname()[0], tried.getpeername()[0]
            from torch.distributed import TCPStore

            limit = timedelta(seconds=CALL_S)
            self._store = TCPStore(
                host, self._nodes.port, is_master=False, timeout=limit, wait_for_workers=False
            )
        return self._store


def _put(store: Any, key: str, record: NodeRecord) -> bool:
    store.set(key, record.model_dump_json())
    return True


def _load_torch() -> None:
    """Import torch's store without its log, which prints a C++ stack for a stranger's bytes."""
    given = os.environ.get(TORCH_LOG)
    os.environ.setdefault(TORCH_LOG, "FATAL")
    import torch.distributed  # noqa: F401

    if given is None:
        del os.environ[TORCH_LOG]  # the ranks inherit the environment and need their logs


def _parsed[Record: BaseModel](kind: type[Record], text: str | None) -> Record | None:
    """Return the value of a key; None for a key that is not set or that a stranger has set."""
    with contextlib.suppress(ValidationError):
        return None if text is None else kind.model_validate_json(text)
    return None


def _launcher(run_dir: Path, number: int) -> ProcessState | None:
    return next(
        (state for state in read_states(run_dir) if state.name == f"{LAUNCHER}{number}"), None
    )


def _raise_cut_off(run_dir: Path, start: str) -> None:
    """Raise NodesError if a node reports in the directory that it cannot reach node 0 of this
    start."""
    for state in read_states(run_dir):
        if state.facts.get(_START) == start and (why := state.facts.get(_UNREACHED)) is not None:
            raise refused(int(state.name.removeprefix(LAUNCHER)), state.host, str(why))


def refused(node: int, host: str, why: str) -> NodesError:
    indented = why.replace("\n", "\n    ")
    return NodesError.of(
        f"node {node} ({host})",
        f"does not start:\n    {indented}",
        "correct it there, then start all nodes again",
    )
