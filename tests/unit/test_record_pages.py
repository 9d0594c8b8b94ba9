"""Columns of the tables on disk and on the wire, and default values of records."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pyarrow as pa

from megatron_async_rl.controls import alignment, decision, gac
from megatron_async_rl.flow import (
    buffer,
    controller_spec,
    distribution,
    engine_task,
    errors,
    fleet,
    group_table,
    ipc_buckets,
    starts,
    summary,
    updates,
)
from megatron_async_rl.launch import addresses
from megatron_async_rl.objectives import batch, objective
from megatron_async_rl.samples import columns, frames, rank_batch, rows, segments, types
from megatron_async_rl.watchdog import logs, progress_monitor, stall, watch
from megatron_async_rl.watchdog.limited_server import LimitedThreads
from megatron_async_rl.watchdog.watch import KilledForMemory, ProcessDied
from megatron_async_rl.weights import agents, digest, manifest, relay_server, staging, transport
from tests.stored_pages import require_page

MODULES = (
    *(alignment, decision, gac, buffer, controller_spec, distribution, engine_task, errors),
    *(
        fleet,
        group_table,
        ipc_buckets,
        starts,
        summary,
        updates,
        addresses,
        batch,
        objective,
        columns,
    ),
    *(frames, rank_batch, rows, segments, types, logs, progress_monitor, stall, watch, digest),
    *(agents, manifest, relay_server, staging, transport),
)
TABLES: dict[str, pa.Schema] = {
    "NUMERIC": columns.NUMERIC,
    "LOGGED": columns.LOGGED,
    "SCHEMA": columns.SCHEMA,
    "NUMBERS": rank_batch.NUMBERS,
    "TOKENS": rank_batch.TOKENS,
    "OUTCOMES": segments.OUTCOMES,
    "PARTIALS": buffer.PARTIALS,
}


def test_tables_have_the_columns_of_their_page() -> None:
    text = "".join(f"{name}\n{schema}\n\n" for name, schema in TABLES.items())
    require_page("records/tables", text)


def shown(value: object) -> str:
    """Return a plain value, or the kind of another one."""
    plain = isinstance(value, bool | int | float | str | tuple | list | set | dict | None)
    return repr(value) if plain else getattr(value, "__name__", type(value).__name__)


def defaults(module: ModuleType) -> str:
    """Return one line for each record of a module that has defaults or hidden fields."""
    text = ""
    for name, kind in vars(module).items():
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            continue
        if kind.__module__ != module.__name__:
            continue
        found = []
        for one in dataclasses.fields(kind):
            flags = "".join(
                f" ({flag})"
                for flag, on in (("not shown", not one.repr), ("not given", not one.init))
                if on
            )
            value = "" if one.default is dataclasses.MISSING else f" = {shown(one.default)}"
            if one.default_factory is not dataclasses.MISSING:
                value = f" = {shown(one.default_factory())}"
            found += [f"    {one.name}{value}{flags}\n"] if value or flags else []
        text += f"{module.__name__.removeprefix('megatron_async_rl.')}.{name}\n{''.join(found)}" * (
            bool(found)
        )
    return text


def test_records_have_the_defaults_of_their_page() -> None:
    require_page("records/defaults", "".join(map(defaults, MODULES)))


def test_errors_and_classes_have_their_marks() -> None:
    assert (ProcessDied.consequence, KilledForMemory.consequence) == (True, False)
    assert (ProcessDied.out_of_memory, KilledForMemory.out_of_memory) == (None, "host")
    assert staging.NotStaged.consequence is True
    assert (staging.Staging.on_demand, staging.SingleProcess.rank) == (False, 0)
    assert transport.TransportReader.lasting is True
    assert (LimitedThreads.daemon_threads, LimitedThreads.slots) == (True, 64)
    assert LimitedThreads.request_queue_size == 128
    assert relay_server._RelayTcpServer.request_queue_size == 128
    assert (decision.Control.needs_update_norm, gac.MatchedLr.needs_update_norm) == (False, True)
    assert decision.never(1e9) is False
    control = decision.Control()
    assert (control.device_state(), control.state_dict(), control.shard_state()) == ([], {}, {})
    assert "secret" not in repr(relay_server.Address(host="h", port=1, key=b"secret"))
    assert (logs.PRIMARY, logs.KILLED, logs.DEADLINE, logs.SECONDARY) == (0, 1, 2, 3)
    assert (alignment.KEEP, alignment.PROJECT, alignment.SKIP) == (0, 1, 2)
    assert len(frames._header(frames.ROWS, 0, b"")) == frames.HEADER_BYTES
