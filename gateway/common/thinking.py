"""`thinking`, by which clients turn a model's reasoning on or off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.gateway.common.fields import Body

_VARIABLES = ("enable_thinking", "thinking")  # the names that chat templates have for it


class Thinking(Body):
    """`thinking`. A model thinks for as long as it likes within `max_tokens`, so a budget is accepted without
    effect.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"

    @property
    def variables(self) -> dict[str, bool]:
        """The variables of chat templates that say so."""
        return thinking_variables(self.is_on)


def thinking_variables(is_on: bool) -> dict[str, bool]:
    return dict.fromkeys(_VARIABLES, is_on)
