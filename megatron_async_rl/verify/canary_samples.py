"""Canary samples of one version with the measurements of trainer and engines, as the ranks wrote
them (canary_loop.py)."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.samples.columns import value_rows
from megatron_async_rl.samples.frames import FOLDER, segments_in
from megatron_async_rl.samples.segments import read_batches


def measurement_file(run_dir: Path, version: int) -> Path:
    """Return the file with the arrays of one version; see canary_loop.measure_canaries."""
    return run_dir / f"canaries_{version}.npz"


def write_measurements(file: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Replace the file of a version. Raises OSError; the old file then stays unchanged."""
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_file(file, content.getvalue())


def _arrays(file: Path) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of a version; None if the file is missing or damaged."""
    try:
        with np.load(file) as stored:
            return dict(stored.items())
    # Each array has a checksum, so other damage does not pass for a measurement.
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class InitialMeasurements:
    """Measurements of the first version only; see canary_loop.measure_canaries."""

    first_token_logprobs: NDArray[np.float32]
    moved: NDArray[np.float32]
    without_gradient: tuple[str, ...]
    trainable: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CanarySamples:
    """S samples with N response tokens of one version; arrays as in canary_loop.measure_canaries.
    digest: of the trainer's weights. engines: [S], the engine that sampled each."""

    version: int
    digest: str
    id: NDArray[np.str_]
    engines: NDArray[np.int64]
    group: NDArray[np.int64]
    prompt_length: NDArray[np.int64]
    length: NDArray[np.int64]
    response_ids: NDArray[np.int32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    engine: NDArray[np.float32]
    trainer: NDArray[np.float32]
    sum_p_squared: NDArray[np.float32]
    rounded: NDArray[np.float32]
    first: InitialMeasurements | None = None
    known_engines: tuple[int, ...] = field(default=())
    """All engines that train."""

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Sample of each token: [N]."""
        return value_rows(self.length)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First token of each sample: [S]."""
        return np.cumsum(self.length) - self.length

    @cached_property
    def depth(self) -> NDArray[np.int64]:
        """Number of tokens before each token, in prompt and response: [N]."""
        position = np.arange(len(self.rows)) - self.starts[self.rows]
        return self.prompt_length[self.rows] + position

    @property
    def trained(self) -> NDArray[np.bool_]:
        """True for tokens that an engine sampled: [N]."""
        return self.loss_mask > 0

    @cached_property
    def canary(self) -> NDArray[np.int64]:
        """Number of admission of each sample's group: [S]."""
        return np.array([int(one.partition("-")[0]) for one in self.id], dtype=np.int64)

    def lengthened(self, prompts: int) -> NDArray[np.bool_]:
        """Return True for samples of lengthened prompts: [S]. prompts: number of canary prompts."""
        # Admitted in the order of the prompts; those with odd numbers are lengthened.
        return self.canary % prompts % 2 == 1


def read_canaries(
    file: Path, run_dir: Path, version: int, engines: tuple[int, ...]
) -> CanarySamples | None:
    """Return the samples of a version from the file of the ranks and the run's sample log, which
    names the engine of each sample; None if the file is missing or damaged."""
    arrays = _arrays(file)
    if arrays is None:
        return None
    first = None
    if "moved" in arrays:
        first = InitialMeasurements(
            first_token_logprobs=arrays.pop("first_token_logprobs"),
            moved=arrays.pop("moved"),
            without_gradient=tuple(arrays.pop("without_gradient").tolist()),
            trainable=int(arrays.pop("trainable")),
        )
    by_id = _engines_of(run_dir)
    return CanarySamples(
        version=version,
        digest=str(arrays.pop("digest")),
        engines=np.array([by_id.get(one, -1) for one in arrays["id"].tolist()], dtype=np.int64),
        first=first,
        known_engines=engines,
        **arrays,
    )


def _engines_of(run_dir: Path) -> dict[str, int]:
    """Return the engine of each logged sample, by id."""
    found: dict[str, int] = {}
    for segment in segments_in(run_dir / FOLDER):
        for _, batch in read_batches(run_dir / FOLDER, "samples", segment, ("id", "engine")):
            pairs = zip(batch["id"].to_pylist(), batch["engine"].to_pylist(), strict=True)
            found.update(pairs)
    return found
