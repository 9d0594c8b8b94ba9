"""Publication of a staged version to another machine: the TCP relay against Ray objects.

Two Ray nodes in two network namespaces of this machine, joined by a virtual Ethernet link; needs
root. `--mbit` limits the link. Both sides start from buckets in
the first machine's /dev/shm and end with the same buckets in the second's, where every tensor was
compared with its digest. The sides alternate within each round; ratios are Ray objects / relay.

Ray objects: a bucket is put into the object store in pieces of `--chunk-mib`, with `--ahead` pieces
in flight. One actor on the other machine pulls them and copies each to its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
MIB = 2**20
PORT = 6379
STORE_MIB = 2048


class PullingAgent:
    """The engine machine's end: pulls pieces and writes them to this machine's shared memory."""

    def __init__(self) -> None:
        from megatron_async_rl.weights.shared_memory import SharedMemory
        from megatron_async_rl.weights.staging import StagingSlot

        carrier = SharedMemory()
        self._slots = (StagingSlot(carrier), StagingSlot(carrier))
        self._next = 0
        self._writer = carrier.writer()
        self._pool = ThreadPoolExecutor(4)

    def where(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def begin(self, manifest: Any) -> None:
        paths = self._slots[self._next].places([ref.size for ref in manifest.buckets])
        self._next = 1 - self._next
        self._refs = [replace(r, path=p) for r, p in zip(manifest.buckets, paths, strict=True)]
        self._digests = manifest.digests
        self._left = [ref.size for ref in self._refs]
        self._checks: list[Any] = []

    def piece(self, number: int, first: int, data: Any) -> None:
        """`data`: passed by reference, so Ray has pulled it to this node; a view of the store."""
        from megatron_async_rl.weights.transport import whole_bucket

        ref = self._refs[number]
        place = self._writer.view(ref, whole_bucket(ref)).numpy()
        place[first : first + len(data)] = data
        self._left[number] -= len(data)
        if not self._left[number]:
            self._checks.append(self._pool.submit(self._check, ref))

    def end(self) -> int:
        for check in self._checks:
            check.result()
        return len(self._refs)

    def _check(self, ref: Any) -> None:
        from megatron_async_rl.weights.transport import damaged_tensor

        wrong = damaged_tensor(self._writer, ref, self._digests)
        if wrong is not None:
            raise ValueError(f"tensor {wrong} arrived damaged")


def by_ray(agent: Any, manifest: Any, chunk: int, ahead: int, putters: int) -> float:
    import numpy as np
    import ray

    began = time.monotonic()
    started = agent.begin.remote(manifest)
    pieces = []
    for number, ref in enumerate(manifest.buckets):
        with open(ref.path, "rb") as file:
            memory = np.frombuffer(
                mmap.mmap(file.fileno(), ref.size, access=mmap.ACCESS_READ), np.uint8
            )
        pieces += [
            (number, first, memory[first : first + chunk]) for first in range(0, ref.size, chunk)
        ]

    with ThreadPoolExecutor(putters) as pool:
        waiting = iter(pieces)
        puts: deque[Any] = deque()
        flying: deque[Any] = deque()

        def put(piece: Any) -> Any:
            number, first, data = piece
            return number, first, ray.put(data)

        def fill() -> None:
            piece = next(waiting, None)
            if piece is not None:
                puts.append(pool.submit(put, piece))

        for _ in range(putters):
            fill()
        while puts:
            number, first, ref = puts.popleft().result()
            fill()
            flying.append(agent.piece.remote(number, first, ref))
            del ref
            while len(flying) >= ahead:
                ray.get(flying.popleft())
        ray.get(list(flying))
    ray.get(started)
    ray.get(agent.end.remote())
    return time.monotonic() - began


async def by_relay(relay: Any, version: int, manifest: Any) -> float:
    began = time.monotonic()
    await relay.fetch(version, manifest)
    return time.monotonic() - began


def head(arguments: argparse.Namespace) -> None:
    """The first machine's part."""
    import ray
    import torch
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from megatron_async_rl.weights.agents import AgentSpec
    from megatron_async_rl.weights.relay_agents import serve_here, start_agent
    from megatron_async_rl.weights.shared_memory import SharedMemory
    from megatron_async_rl.weights.staging import Staging
    from megatron_async_rl.weights.transport import ShardSlice, TensorSpec

    ray.init(address=f"10.77.0.1:{PORT}", logging_level="ERROR", log_to_driver=True)
    while len([n for n in ray.nodes() if n["Alive"]]) < 2:
        time.sleep(0.2)
    here = ray.get_runtime_context().get_node_id()
    there = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here)
    strategy = NodeAffinitySchedulingStrategy(there, soft=False)
    agent = ray.remote(num_cpus=0)(PullingAgent).options(scheduling_strategy=strategy).remote()
    assert ray.get(agent.where.remote()) == there
    server = serve_here(60.0)
    spec = AgentSpec(
        index=0,
        machine=there,
        log_dir=Path(arguments.folder),
        transport="relay",
        silence_s=60.0,
    )
    loop = asyncio.new_event_loop()
    relay = loop.run_until_complete(start_agent(spec, server.address))

    results = []
    version = 0
    staging = Staging(SharedMemory())
    for size in arguments.mb:
        nbytes, bucket = size * 10**6, arguments.bucket_mib * MIB
        rows = max(1, round(nbytes / 2 / 1024 / max(1, -(-nbytes // bucket)) / 4))
        count = round(nbytes / 2 / 1024 / rows)
        tensors = {f"w{i}": torch.randn(rows, 1024).bfloat16() for i in range(count)}
        specs: list[list[TensorSpec]] = [[]]
        held = 0
        for name, tensor in tensors.items():
            one = TensorSpec.of(name, tensor)
            if specs[-1] and held + one.nbytes > bucket:
                specs.append([])
                held = 0
            specs[-1].append(one)
            held += one.nbytes
        times: dict[str, list[float]] = {"relay": [], "ray": []}
        for turn in range(arguments.rounds + 2):
            version += 1
            parts = (ShardSlice.whole(name, tensor) for name, tensor in tensors.items())
            manifest = staging.stage(version, specs, parts)
            server.stage(version, manifest)
            sides = ["relay", "ray"] if turn % 2 else ["ray", "relay"]
            for side in sides:
                if side == "relay":
                    seconds = loop.run_until_complete(by_relay(relay, version, manifest))
                else:
                    seconds = by_ray(
                        agent,
                        manifest,
                        int(arguments.chunk_mib * MIB),
                        arguments.ahead,
                        arguments.putters,
                    )
                if turn >= 2:  # both slots' pages are there
                    times[side].append(seconds)
            server.release(version + 1)
        middle = {side: statistics.median(values) for side, values in times.items()}
        results.append(
            {
                "mb": size,
                "buckets": len(specs),
                "seconds": {k: round(v, 4) for k, v in middle.items()},
                "fastest": {k: round(min(v), 4) for k, v in times.items()},
                "gb_s": {k: round(nbytes / v / 1e9, 2) for k, v in middle.items()},
                "ratio": round(middle["ray"] / middle["relay"], 2),
                "ratio_of_fastest": round(min(times["ray"]) / min(times["relay"]), 2),
            }
        )
    print(
        json.dumps(
            {
                "settings": {k: v for k, v in vars(arguments).items() if k != "folder"},
                "results": results,
            }
        )
    )
    ray.kill(agent)
    relay.kill()
    staging.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, nargs="+", default=[20, 500])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--chunk-mib", type=float, default=16)
    parser.add_argument("--ahead", type=int, default=8)
    parser.add_argument("--putters", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=0, help="link rate; 0: no limit")
    parser.add_argument("--folder", default="")
    parser.add_argument("--head", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.head:
        head(arguments)
        return

    from tests.network.machines import INSIDE, machines, namespace, obstacle

    if why := obstacle():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as name, machines(Path(name), 2, {}) as made:
        if arguments.mbit:
            limit = ("tbf", "rate", f"{arguments.mbit}mbit", "burst", "1mb", "latency", "50ms")
            for machine in made.names:
                command = ("tc", "qdisc", "add", "dev", "eth0", "root", *limit)
                subprocess.run(
                    ["ip", "netns", "exec", namespace(machine), *command], check=True, timeout=60
                )

        environment = {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

        def start(number: int, *command: str, **more: Any) -> subprocess.Popen[str]:
            machine = made.names[number]
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", namespace(machine), "unshare", "--uts", "--mount"),
                    *("bash", "-e", "-c", INSIDE, machine, *command),
                ],
                cwd=name,
                env=os.environ | environment,
                text=True,
                **more,
            )

        ray = str(Path(sys.executable).parent / "ray")
        address, other_address = made.hosts["node0"], made.hosts["node1"]
        store = f"--object-store-memory={STORE_MIB * MIB}"
        node = f"{ray} start --block --num-cpus=4 {store} --disable-usage-stats"
        first_node = f"{node} --head --no-monitor --include-dashboard=false --port={PORT}"
        measured = [sys.executable, __file__, "--head", "--folder", name, *sys.argv[1:]]
        first = start(
            0,
            "bash",
            "-c",
            f"({first_node} --node-ip-address={address} > node0.log 2>&1 &)"
            f" ; sleep 8; exec {shlex.join(measured)}",
        )
        other = start(
            1,
            "bash",
            "-c",
            f"sleep 10; exec {node} --address={address}:{PORT}"
            f" --node-ip-address={other_address} > node1.log 2>&1",
        )
        code = first.wait(timeout=840)
        if code:
            for log in ("node0.log", "node1.log"):
                print(Path(name, log).read_text(encoding="utf-8")[-3000:])
        other.kill()
        raise SystemExit(code)


if __name__ == "__main__":
    main()
