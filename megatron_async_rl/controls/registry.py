"""Names of the configuration -> controls. A built-in control is one file, one settings model in
config/controls.py and one line here; a plug-in, `module:Class`, is one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_async_rl.config.settings_model import find
from megatron_async_rl.controls.decision import Control
from megatron_async_rl.controls.displacement import Displacement
from megatron_async_rl.controls.ess_lr import EssLr
from megatron_async_rl.controls.gac import Beta1, Gac, MatchedLr, MatchedNorm
from megatron_async_rl.controls.momentum_by_alignment import MomentumByAlignment

CONTROLS: Mapping[str, Callable[[Any], Control]] = {
    "gac": Gac,
    "matched_norm": MatchedNorm,
    "matched_lr": MatchedLr,
    "beta1": Beta1,
    "momentum_by_alignment": MomentumByAlignment,
    "ess_lr": EssLr,
    "displacement": Displacement,
}


def build_controls(configs: Iterable[Any]) -> dict[str, Control]:
    """Name -> control, in the order of the configuration, which is the order they are applied in.

    Raises UnknownName for a name that no registry line has.
    """
    # A plug-in's class was imported and checked when the configuration was validated.
    return {one.name: find("control", one.name, CONTROLS)(one) for one in configs}
