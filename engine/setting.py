"""What a configuration declares of each setting: type and default by the field, meaning and range by a `Setting`.

Command line, environment, settings file and the local API follow from the declaration.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Setting:
    """Meaning and range of a setting, in the `Annotated` of its field.

    Attributes:
        text: what it means, for people.
        least: its smallest value.
        most: its largest value.
        sane: a value above is a typo on any machine.
        one_of: the values that it can have.
        why: why `least` is that.
    """

    text: str
    least: float | None = None
    most: float | None = None
    sane: int | None = None
    one_of: tuple[str, ...] = ()
    why: str = ""

    def fault(self, value: Any) -> str | None:
        """Returns what the value must be and is not, or None. None as a value is always right."""
        if value is None:
            return None
        if self.one_of and value not in self.one_of:
            return f"must be one of {', '.join(self.one_of)}, not {value!r}"
        if self.least is not None and self.most is not None:
            return None if self.least <= value <= self.most else f"must be {self.least} to {self.most}, not {value}"
        if self.least is not None and value < self.least:
            return f"must be {self.least} or more{self.why and f' ({self.why})'}, not {value}"
        if self.sane is not None and value > self.sane:
            return f"must be at most {self.sane}, not {value}"
        return None


class Declared(NamedTuple):
    """A field of a configuration.

    Attributes:
        type: without its `Setting`.
        default: what it is where nobody sets it.
        setting: its meaning and range.
    """

    type: Any
    default: Any
    setting: Setting


@functools.cache
def declared(config: type) -> dict[str, Declared]:
    """Returns the fields of a configuration that have a `Setting`, by name and in their order."""
    hints = get_type_hints(config, include_extras=True)
    found = {}
    for field in dataclasses.fields(config):
        kind, *more = get_args(hints[field.name]) or (hints[field.name],)
        settings = [one for one in more if isinstance(one, Setting)]
        if settings:
            found[field.name] = Declared(kind, field.default, settings[0])
    return found
