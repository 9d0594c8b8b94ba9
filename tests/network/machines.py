"""Machines imitated on one: each a network namespace with an address on one bridge, a host name, and
a /tmp and a /dev/shm that no other sees. The file system is the same, as on a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "launchers" / "torchrun_multinode.sh"
NETWORK = "10.77.0"
CONFIGURATION = Path("/etc/netns")
"""`ip netns exec` puts what is there in the place of files of /etc."""
INSIDE = 'hostname $0; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /tmp; exec "$@"'
"""The folder of a run must not lie in /tmp."""


def ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


class Machines:
    """`folder`: of the run's files and of what each machine says."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"node{number}" for number in range(count)]
        self.bridge = f"br{os.getpid()}"

    def build(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{NETWORK}.{number + 1} {name}" for number, name in enumerate(self.names)]
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            ip(*f"link add {self.link(number)} type veth peer name eth0 netns {name}".split())
            ip("link", "set", self.link(number), "master", self.bridge, "up")
            ip("-n", name, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            # Ray asks for the address towards the outside.
            ip("-n", name, "route", "add", "default", "via", f"{NETWORK}.254")
            (CONFIGURATION / name).mkdir(parents=True, exist_ok=True)
            (CONFIGURATION / name / "hosts").write_text("\n".join(hosts) + "\n")

    def remove(self) -> None:
        present = {line.split()[0] for line in ip("netns", "list").splitlines()}
        links = ip("-o", "link")
        for number, name in enumerate(self.names):
            if f" {self.link(number)}@" in links:
                # A namespace takes its end along only when the last of its processes is gone.
                ip("link", "delete", self.link(number))
            if name in present:
                self.kill(name)
                ip("netns", "delete", name)
            (CONFIGURATION / name / "hosts").unlink(missing_ok=True)
        ip("link", "delete", self.bridge)

    def link(self, number: int) -> str:
        return f"{self.bridge}v{number}"

    def cut(self, number: int) -> None:
        """Nothing reaches that machine any more, and nothing comes from it."""
        ip("link", "set", self.link(number), "down")

    def kill(self, name: str) -> None:
        """Ends every process of the machine at once, as the loss of its power does."""
        for process in ip("netns", "pids", name).split():
            os.kill(int(process), signal.SIGKILL)

    def said(self, number: int) -> str:
        return (self.folder / f"{self.names[number]}.log").read_text()

    def start(self, number: int, config: Path, **settings: str) -> subprocess.Popen[str]:
        name = self.names[number]
        with open(self.folder / f"{name}.log", "a") as log:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", name, "unshare", "--uts", "--mount"),
                    *("bash", "-c", INSIDE, name, LAUNCHER, config),
                ],
                cwd=self.folder,
                env=os.environ
                | {
                    "VENV": sys.prefix,
                    "PYTHONPATH": str(ROOT),
                    "NNODES": str(len(self.names)),
                    "NODE_RANK": str(number),
                    "MASTER_ADDR": self.names[0],
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "REJOIN_S": "5",
                }
                | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )


@contextmanager
def machines(folder: Path, count: int) -> Iterator[Machines]:
    made = Machines(folder, count)
    try:
        made.build()
        yield made
    finally:
        made.remove()
