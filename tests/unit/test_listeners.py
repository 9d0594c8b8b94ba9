"""Tests of servers: they listen only at the address that they need, and idle clients cannot exhaust
them."""

from __future__ import annotations

import ast
import contextlib
import functools
import socket
import socketserver
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.distributed import TCPStore, run
from torch.distributed.elastic.rendezvous import RendezvousParameters

import megatron_async_rl
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.launch import torchrun
from megatron_async_rl.launch.addresses import Nodes, NodesError, listening_address
from megatron_async_rl.launch.launcher import environment_of_ranks
from megatron_async_rl.launch.rendezvous import PeerNodes, RankStore
from megatron_async_rl.metrics.sinks import Prometheus
from megatron_async_rl.rollout.cluster import RAY_CLUSTERS, loopback_interface, start_no_monitor
from megatron_async_rl.watchdog import limited_server
from megatron_async_rl.watchdog.limited_server import LimitedThreads
from megatron_async_rl.weights import relay_server
from megatron_async_rl.weights.bound_store import listen, serve_store
from megatron_async_rl.weights.collective import Sender
from megatron_async_rl.weights.relay_server import RelayServer
from tests.ports import free_ports

PACKAGE = Path(megatron_async_rl.__file__).parent
PATIENT_S = 600.0


def listening() -> set[tuple[str, int]]:
    """Return the (address, port) pairs at which this process listens."""
    return {
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def test_the_store_of_torch_always_listens_at_all_addresses() -> None:
    """bound_store.py exists because of this fact."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ("::", store.port) in listening() or ("0.0.0.0", store.port) in listening()


def test_the_store_of_a_sender_of_weights_listens_only_at_its_host() -> None:
    sender = Sender("127.0.0.1", torch.device("cpu"), PATIENT_S)
    meeting = sender.open(1)
    assert [at for at, port in listening() if port == meeting.port] == ["127.0.0.1"]
    client = TCPStore(meeting.host, meeting.port, is_master=False, timeout=meeting.limit)
    client.set("key", "value")
    assert client.get("key") == b"value"
    sender.close(meeting)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_of_torchrun_listens_only_at_its_endpoint(host: str) -> None:
    with listen(host) as listener:
        port = listener.getsockname()[1]
        store = RankStore("id", host, port, listener)
        arguments = run.get_args_parser().parse_args([*store.torchrun(Nodes(), 1), "script"])
        inherited = listener.detach()
    assert arguments.rdzv_conf == f"rank=0,descriptor={inherited}"
    conf = dict(one.split("=") for one in arguments.rdzv_conf.split(","))
    handler = torchrun.BoundRendezvous(
        RendezvousParameters(
            torchrun.RENDEZVOUS, arguments.rdzv_endpoint, "id", 1, 1, timeout=600, **conf
        )
    )
    found = handler.next_rendezvous()
    assert found.bootstrap_store_info.master_port == port
    assert [at for at, taken in listening() if taken == port] == [host]
    assert handler.use_agent_store, "ranks would open their own store"
    assert found.bootstrap_store_info.master_addr == host


def test_ranks_use_the_loopback_interface_on_one_node_only() -> None:
    interfaces = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    single = environment_of_ranks(interfaces, "id", {})
    assert {single[name] for name in interfaces} == {loopback_interface()}
    assert environment_of_ranks(interfaces, "id", {}, nodes=2).items() >= interfaces.items()


@pytest.mark.parametrize("address", ["", "node0:6379"])
def test_a_ray_instance_of_the_run_stays_on_the_machine(address: str) -> None:
    environment = environment_of_ranks({"RAY_ADDRESS": address}, "id", {})
    assert (environment.get(RAY_CLUSTERS) == "0") == (not address)


def test_a_ray_instance_of_the_run_starts_no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor would serve metrics on port 44217."""
    from ray._private.node import Node

    started: list[Node] = []
    for name in ("start_log_monitor", "start_api_server"):
        monkeypatch.setattr(Node, name, getattr(Node, name))
    monkeypatch.setattr(Node, "start_monitor", started.append)
    head = Mock(_gcs_address=None, _gcs_client=None)
    head._ray_params = Mock(no_monitor=False, ray_client_server_port=None)
    head.start_monitor = lambda: Node.start_monitor(head)

    Node.start_head_processes(head)
    assert started == [head], "Ray starts no monitor by default; start_no_monitor is not needed"
    start_no_monitor()
    Node.start_head_processes(head)
    assert started == [head]


def test_ray_has_the_options_that_close_its_ports() -> None:
    """launchers/torchrun_multinode.sh uses these options; Ray does not document the first."""
    from ray.scripts.scripts import start

    options = {option for parameter in start.params for option in parameter.opts}
    assert options >= {"--no-monitor", "--include-dashboard"}


def named(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """Resolve these host names to these addresses, as /etc/hosts would; no others resolve."""

    def look_up(host: str, port: object, **_: object) -> list[tuple[object, ...]]:
        address = addresses.get(host, host)
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            socket.inet_pton(family, address)
        except OSError:
            raise socket.gaierror(-2, "Name or service not known") from None
        return [(family, 1, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "own")


@pytest.mark.parametrize(
    ("host", "addresses", "address"),
    [
        ("node0", {"node0": "127.0.0.1", "own": "127.0.0.1"}, None),
        ("127.0.0.2", {}, "127.0.0.2"),
        ("localhost", {"localhost": "127.0.0.1"}, "127.0.0.1"),
        # The name belongs to another machine or does not resolve: use the address of the ranks.
        ("node0", {"node0": "192.0.2.77", "own": "127.0.0.3"}, "127.0.0.3"),
        ("nowhere", {"own": "127.0.0.3"}, "127.0.0.3"),
    ],
)
def test_node_0_listens_at_the_address_that_the_other_nodes_use(
    monkeypatch: pytest.MonkeyPatch, host: str, addresses: dict[str, str], address: str | None
) -> None:
    named(monkeypatch, **addresses)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    nodes = Nodes(2, 0, f"{host}:29500")
    if address is not None:
        assert listening_address(nodes) == address
        return
    message = (
        r"node0 is 127\.0\.0\.1 on this machine, which is every machine's own.*\n.*MASTER_ADDR"
    )
    with pytest.raises(NodesError, match=message):
        listening_address(nodes)


def outward() -> str | None:
    """Return an IPv4 address of this machine that is not a loopback address, if there is one."""
    return next(
        (
            one.address
            for addresses in psutil.net_if_addrs().values()
            for one in addresses
            if one.family == socket.AF_INET and not one.address.startswith("127.")
        ),
        None,
    )


def test_node_0_listens_at_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    address = outward()
    if address is None:
        pytest.skip("this machine has no address besides the loopback one")
    named(monkeypatch, node0=address)
    (port,) = free_ports(1)
    zero = PeerNodes(Nodes(2, 0, f"node0:{port}"))
    try:
        assert [at for at, taken in listening() if taken == port] == [address]
    finally:
        zero.close()


class Echo(socketserver.BaseRequestHandler):
    """Admit clients that send `key`, and echo their data."""

    server: Limited

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            if self.request.recv(3) == b"key":
                self.server.admit(self.request)
                while content := self.request.recv(100):
                    self.request.sendall(content)


class Limited(LimitedThreads, socketserver.TCPServer):
    slots = 4


@pytest.fixture
def server() -> Iterator[Limited]:
    with Limited(("127.0.0.1", 0), Echo) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def connect(server: Limited, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(server.server_address, PATIENT_S)  # type: ignore[arg-type]
    connection.settimeout(PATIENT_S)
    connection.sendall(sent)
    return connection


EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _without_earlier_threads() -> None:
    """Note the threads from before the test: servers of other test files may still be ending."""
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def threads_of_requests() -> int:
    """Return the number of threads that serve a connection and were started by this test."""
    return sum(
        thread.name.endswith("(process_request_thread)")
        for thread in set(threading.enumerate()) - EARLIER
    )


def test_idle_connections_use_the_slots_and_end_no_admitted_connection(server: Limited) -> None:
    with contextlib.ExitStack() as open_ones:
        own = open_ones.enter_context(connect(server, b"keya"))
        assert own.recv(1) == b"a"
        idle = [open_ones.enter_context(connect(server)) for _ in range(12)]
        another = open_ones.enter_context(connect(server, b"keyb"))
        assert another.recv(1) == b"b", "no idle connection was closed for it"
        assert idle[0].recv(1) == b"", "the oldest idle connection was not closed first"
        assert threads_of_requests() <= Limited.slots + 2
        own.sendall(b"c")
        assert own.recv(1) == b"c"


def test_connections_wait_in_the_kernel_until_they_are_accepted() -> None:
    """Without this queue, idle clients would delay every connection by a retransmission."""
    with Limited(("127.0.0.1", 0), Echo) as busy, contextlib.ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(socket.create_connection(busy.server_address, 5.0))


def test_a_slot_is_free_after_its_connection_has_ended(server: Limited) -> None:
    for _ in range(3 * Limited.slots):
        with connect(server, b"keya") as one:
            assert one.recv(1) == b"a"
        with connect(server, b"no!") as one:
            assert one.recv(1) == b""


def test_a_slow_client_is_disconnected_at_the_time_limit_for_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client sends every byte within the limit of silence."""
    monkeypatch.setattr(relay_server._RelayTcpServer, "admission_s", 0.2)
    server = RelayServer("127.0.0.1", silence_s=PATIENT_S)
    closed = False
    try:
        with socket.create_connection((server.address.host, server.address.port)) as client:
            client.settimeout(PATIENT_S)
            assert len(client.recv(32, socket.MSG_WAITALL)) == 32
            for _ in range(55):  # a request has 56 bytes
                try:
                    client.sendall(b"x")
                except OSError:
                    closed = True
                    break
                time.sleep(0.05)
            with contextlib.suppress(ConnectionResetError):
                closed = closed or client.recv(1) == b""
    finally:
        server.close()
    assert closed


def test_idle_connections_do_not_exhaust_prometheus_or_rank_0(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = Prometheus(tmp_path, 0)
    try:
        assert [at for at, port in listening() if port == sink.port] == ["127.0.0.1"]
        with contextlib.ExitStack() as idle:
            for _ in range(24):
                idle.enter_context(socket.create_connection(("127.0.0.1", sink.port), PATIENT_S))
            with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}", timeout=PATIENT_S) as page:
                assert page.status == 200
            assert threads_of_requests() <= 18
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            sink._server.handle_error(None, None)
        assert "Traceback" not in capfd.readouterr().err, "a client can fill rank 0's log"
    finally:
        sink.close()


def test_prometheus_listens_on_the_configured_address(tmp_path: Path) -> None:
    sink = Prometheus(tmp_path, 0, "0.0.0.0")
    try:
        assert ("0.0.0.0", sink.port) in listening()
        address = (tmp_path / "prometheus.txt").read_text()
        assert address == f"http://{socket.gethostname()}:{sink.port}/metrics\n"
    finally:
        sink.close()
    message = r"observe\.prometheus_host\n  192\.0\.2\.99 is not an address of this machine"
    with pytest.raises(UserError, match=message):
        Prometheus(tmp_path, 0, "192.0.2.99")


THREADED = {"ThreadingTCPServer", "ThreadingHTTPServer", "ThreadingMixIn", "start_http_server"}
EVERYWHERE = {"0.0.0.0", "::", ""}


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return (file and line, name, call) of every call in the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "id", getattr(function, "attr", ""))
                found.append((f"{module}:{node.lineno}", name, node))
    return found


def test_only_bound_store_serves_stores() -> None:
    servers = [
        place
        for place, name, call in calls()
        if name in ("TCPStore", "PrefixStore")
        if any(
            one.arg == "is_master"
            and not (isinstance(one.value, ast.Constant) and not one.value.value)
            for one in call.keywords
        )
    ]
    assert [place.partition(":")[0] for place in servers] == ["weights/bound_store.py"]


def test_nothing_in_the_package_listens_at_all_addresses_by_default() -> None:
    found = [
        place
        for place, name, call in calls()
        if name in ("create_server", "bind", "TCPSite", "start_server", "make_server")
        for argument in call.args[:2]
        for part in getattr(argument, "elts", [argument])[:1]
        if isinstance(part, ast.Constant) and part.value in EVERYWHERE
        if name != "bind" or isinstance(argument, ast.Tuple)
    ]
    assert found == []


def test_no_server_has_an_unlimited_number_of_threads() -> None:
    named = {
        f"{path.relative_to(PACKAGE)}: {word}"
        for path in PACKAGE.rglob("*.py")
        for word in THREADED
        if word in path.read_text(encoding="utf-8")
    }
    assert named == {"watchdog/limited_server.py: ThreadingMixIn"}


def test_the_caller_sets_the_timeout_of_a_store() -> None:
    store = serve_store(listen("127.0.0.1"), timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    with pytest.raises(OSError, match="ssign requested address"):
        listen("192.0.2.99")


class Refused:
    """The sockets that a server closes without an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.closed: list[object] = []
        self.server: Any = Limited.__new__(Limited)
        self.server._free = threading.Semaphore(free)
        self.server._unadmitted = {}
        self.server._lock = threading.Lock()
        monkeypatch.setattr(limited_server, "CUT_S", 0.01)
        monkeypatch.setattr(Limited, "shutdown_request", lambda _, one: self.closed.append(one))


def test_a_connection_without_a_slot_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Refused(monkeypatch, free=0)
    one.server.process_request("a connection", "address")
    assert one.closed == ["a connection"]
    assert one.server._unadmitted == {}


def test_a_connection_without_a_thread_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no thread")

    one = Refused(monkeypatch, free=1)
    monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no thread"):
            one.server.process_request("a connection", "address")
        assert one.server._unadmitted == {}
    assert one.closed == []
