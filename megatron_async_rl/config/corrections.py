"""What a user may say about corrections of off-policy data: one small model per correction, chosen by its `name`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field, PositiveFloat

from megatron_async_rl.config.bare_name import bare_name
from megatron_async_rl.config.strict import Strict


class CorrectionSettings(Strict):
    """The class attributes are facts about the correction, for config/composition.py."""

    weighs: ClassVar[bool] = False
    """Multiplies by an importance ratio, where others only reject."""
    uses_advantage: ClassVar[bool] = False
    """Looks at the sign of the advantage."""

    @property
    def per_token(self) -> bool:
        """True when tokens of one sequence may get different factors."""
        return False


class TisCorrection(CorrectionSettings):
    """Truncated importance sampling: min(rho, cap), rho = pi_prox / pi_behavior."""

    weighs: ClassVar[bool] = True

    name: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Each token's ratio, or the product over its sequence."""
    cap: PositiveFloat = 2.0
    """Weights above it are cut to it."""
    normalize: bool = False
    """Divide by the mean weight of the whole optimizer-step batch, after truncation."""

    @property
    def per_token(self) -> bool:
        return self.level == "token"


class IcepopCorrection(CorrectionSettings):
    """The token's rho where low <= rho <= high, else 0."""

    weighs: ClassVar[bool] = True

    name: Literal["icepop"] = "icepop"
    low: PositiveFloat = 0.5
    """Tokens with a smaller ratio are rejected."""
    high: PositiveFloat = 5.0
    """Tokens with a larger ratio are rejected."""

    @property
    def per_token(self) -> bool:
        return True


Correction = Annotated[
    Annotated[Union[TisCorrection, IcepopCorrection], Field(discriminator="name")],
    BeforeValidator(bare_name),
]
