"""What a user may say about the advantage: one small model per estimator, chosen by its `name`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field

from megatron_async_rl.config.bare_name import bare_name
from megatron_async_rl.config.strict import Strict


class AdvantageSettings(Strict):
    """The class attributes are facts about the estimator, for config/composition.py."""

    compares_group: ClassVar[bool] = False
    """Needs at least two responses per prompt."""


class GrpoAdvantage(AdvantageSettings):
    """(R - mean) / (std + 1e-6) over the group, unbiased std (arXiv 2402.03300)."""

    compares_group: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """False is Dr.GRPO (arXiv 2503.20783): centre only."""


class RlooAdvantage(AdvantageSettings):
    """R minus the mean of the group's other rewards (arXiv 2402.14740)."""

    compares_group: ClassVar[bool] = True

    name: Literal["rloo"] = "rloo"


class NoAdvantage(AdvantageSettings):
    """The reward itself, without a baseline. The `sft` loss needs no advantage and takes this one."""

    name: Literal["none"] = "none"


Advantage = Annotated[
    Annotated[Union[GrpoAdvantage, RlooAdvantage, NoAdvantage], Field(discriminator="name")],
    BeforeValidator(bare_name),
]
