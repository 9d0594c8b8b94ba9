"""Names of the configuration -> controls. A built-in control is one file, one settings model in
config/controls.py and one line here; a plug-in, `module:Class`, is one file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_async_rl.config.controls import ControlSettings
from megatron_async_rl.config.settings_model import plug_in_class
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

    Raises ValueError for a name that no registry line has, naming the nearest.
    """
    controls: dict[str, Control] = {}
    for config in configs:
        # A plug-in's class was imported and checked when the configuration was validated.
        if ":" in config.name:
            controls[config.name] = plug_in_class(config.name, ControlSettings).method(config)
            continue
        if config.name not in CONTROLS:
            # Reached only from a configuration that no schema has checked.
            nearest = difflib.get_close_matches(config.name, CONTROLS, n=3, cutoff=0.0)
            raise ValueError(
                f"unknown control {config.name!r}; nearest: {', '.join(nearest)}; known:"
                f" {', '.join(sorted(CONTROLS))}"
            )
        controls[config.name] = CONTROLS[config.name](config)
    return controls
