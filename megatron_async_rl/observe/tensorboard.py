"""TensorBoard event files through TensorBoard's own writer: no torch.

Numbers become scalars, counts histograms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    def __init__(self, directory: Path, first_step: int) -> None:
        """Opens a new event file. What earlier files hold from `first_step` on, TensorBoard discards."""
        self._writer = EventFileWriter(str(directory))
        self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, time: float, values: Mapping[str, float | list[int]]) -> None:
        """`time` in Unix seconds. On disk when this returns."""
        summary = Summary()
        for name, value in values.items():
            if isinstance(value, list):
                summary.value.add(tag=name, histo=_histogram(value))
            else:
                summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(Event(step=step, wall_time=time, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _histogram(counts: list[int]) -> HistogramProto:
    """`counts[i]` values equal to i."""
    total = sum(counts)
    used = [index for index, count in enumerate(counts) if count]
    return HistogramProto(
        min=used[0] if used else 0,
        max=used[-1] if used else 0,
        num=total,
        sum=sum(index * count for index, count in enumerate(counts)),
        sum_squares=sum(index * index * count for index, count in enumerate(counts)),
        bucket_limit=[index + 0.5 for index in range(len(counts))],
        bucket=counts,
    )
