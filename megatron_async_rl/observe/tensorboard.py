"""TensorBoard event files through TensorBoard's own writer: no torch.

Numbers become scalars, counts histograms, and what every engine has a number of a scalar for each engine: `engine/tokens/0`, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_async_rl.observe.keys import KEYS
from megatron_async_rl.observe.metrics import Value


class TensorBoard:
    def __init__(self, directory: Path, first_step: int) -> None:
        """Opens a new event file. What earlier files hold from `first_step` on, TensorBoard discards."""
        self._writer = EventFileWriter(str(directory))
        self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        """`time` in Unix seconds. On disk when this returns."""
        summary = Summary()
        for name, value in values.items():
            if not isinstance(value, list):
                summary.value.add(tag=name, simple_value=value)
            elif KEYS[name].kind == "per engine":
                for engine, number in enumerate(value):
                    summary.value.add(tag=f"{name}/{engine}", simple_value=number)
            else:
                summary.value.add(tag=name, histo=_histogram(value, doubling=KEYS[name].kind == "doubling counts"))
        self._writer.add_event(Event(step=step, wall_time=time, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _histogram(counts: Sequence[float], *, doubling: bool) -> HistogramProto:
    """`counts[i]` values equal to i or, doubling, from 2^i up to 2^(i + 1); those count as the bin's middle in the sums."""
    bins = range(len(counts))
    middles = [1.5 * 2**index - 0.5 if doubling else index for index in bins]
    used = [middle for middle, count in zip(middles, counts, strict=True) if count]
    return HistogramProto(
        min=used[0] if used else 0,
        max=used[-1] if used else 0,
        num=sum(counts),
        sum=sum(middle * count for middle, count in zip(middles, counts, strict=True)),
        sum_squares=sum(middle * middle * count for middle, count in zip(middles, counts, strict=True)),
        bucket_limit=[2 ** (index + 1) - 0.5 if doubling else index + 0.5 for index in bins],
        bucket=counts,
    )
