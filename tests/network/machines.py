"""Machines imitated on one: each a network namespace with an address on one switch, a host name,
and a /dev/shm and a folder of Ray's that no other sees. The file system is the same, as on a
cluster.

Nothing of this machine is touched: the switch is in a namespace of its own, and what lies over
files of this machine lies there for the processes of one imitated machine alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "launchers" / "torchrun_multinode.sh"
NETWORK = "10.77.0"
PROBE = """
mount -t tmpfs tmpfs /run
ip link add bridge0 type bridge
ip link add port0 type veth peer name eth0
ip link set port0 master bridge0
ip netns add machine
hostname machine
"""
"""All that is needed, in namespaces that end with it."""
INSIDE = """
hostname "$0"
mount --bind hosts /etc/hosts
[[ ! -e /etc/resolv.conf ]] || mount --bind resolv.conf /etc/resolv.conf
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
exec "$@"
"""


def obstacle() -> str:
    """Why there can be no machines here; empty where there can."""
    if os.geteuid() != 0:
        return "needs root: machines are network namespaces"
    for command in ("ip", "unshare"):
        if not shutil.which(command):
            return f"needs the command {command} (Debian: iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "bash", "-e", "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return f"network namespaces are not permitted here: {said}" if tried.returncode else ""


def listeners_of(pid: int) -> set[str]:
    """IPv4 addresses, or `::`, at which a process listens, in whichever network namespace it is."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                digits = fields[1].partition(":")[0]
                number = bytes.fromhex(digits[-8:])[::-1]  # of an IPv4 address in IPv6, too
                found.add(socket.inet_ntoa(number) if any(number) else "::")
    return found


def ports_of_machine(pid: int) -> set[int]:
    """TCP ports at which any process listens in the network namespace of this one."""
    return {
        int(fields[1].partition(":")[2], 16)
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A"
    }


def torchrun_of_machine(pid: int) -> int:
    """Process id of torchrun in the network namespace of process `pid`. It need not be the parent
    of a rank, which may be forked by a server."""
    module = "megatron_async_rl.launch.torchrun"
    found: int
    (found,) = (
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if module in (process.info["cmdline"] or ())
        and os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink(f"/proc/{pid}/ns/net")
    )
    return found


def ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


class Machines:
    """`folder`: of the run's files and of each machine's output. `hosts`: addresses that the
    machines have for names, where those are not the right ones."""

    def __init__(self, folder: Path, count: int, hosts: Mapping[str, str]) -> None:
        self.folder = folder
        self.names = [f"node{number}" for number in range(count)]
        self.hosts = {name: f"{NETWORK}.{number + 1}" for number, name in enumerate(self.names)}
        self.hosts |= {"localhost": "127.0.0.1", **hosts}

    def build(self) -> None:
        lines = [f"{address} {name}\n" for name, address in self.hosts.items()]
        (self.folder / "hosts").write_text("".join(lines))
        # No server resolves names; an unreachable one is waited for, and here no server listens.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        switch = namespace("switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(self.names):
            there, port = namespace(name), f"port{number}"
            ip("netns", "add", there)
            pair = f"link add {port} type veth peer name eth0 netns {there}"
            ip("-n", switch, *pair.split())
            ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            ip("-n", there, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", there, "link", "set", device, "up")
            # Ray requests the address towards the outside.
            ip("-n", there, "route", "add", "default", "via", f"{NETWORK}.254")

    def remove(self) -> None:
        """A namespace ends with its last process, and a link with one of its ends."""
        present = {line.split()[0] for line in ip("netns", "list").splitlines()}
        for name in ("switch", *self.names):
            if namespace(name) in present:
                self.kill(name)
                ip("netns", "delete", namespace(name))

    def cut(self, number: int) -> None:
        """Nothing reaches that machine any more, and nothing comes from it."""
        ip("-n", namespace("switch"), "link", "set", f"port{number}", "down")

    def kill(self, name: str) -> None:
        """Ends every process of the machine at once, as the loss of its power does."""
        for process in ip("netns", "pids", namespace(name)).split():
            os.kill(int(process), signal.SIGKILL)

    def said(self, number: int) -> str:
        return (self.folder / f"{self.names[number]}.log").read_text()

    def start(self, number: int, config: Path, **settings: str) -> subprocess.Popen[str]:
        name = self.names[number]
        with open(self.folder / f"{name}.log", "a") as log:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", namespace(name), "unshare", "--uts", "--mount"),
                    *("bash", "-e", "-c", INSIDE, name, LAUNCHER, config),
                ],
                cwd=self.folder,
                env=os.environ
                | {
                    "VENV": sys.prefix,
                    "PYTHONPATH": str(ROOT),
                    "NNODES": str(len(self.names)),
                    "NODE_RANK": str(number),
                    "MASTER_ADDR": self.names[0],
                    "REJOIN_S": "5",
                }
                | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )


def namespace(name: str) -> str:
    """Two test runs at a time have machines of their own."""
    return f"mar{os.getpid()}-{name}"


@contextmanager
def machines(folder: Path, count: int, hosts: Mapping[str, str]) -> Iterator[Machines]:
    made = Machines(folder, count, hosts)
    try:
        made.build()
        yield made
    finally:
        made.remove()
