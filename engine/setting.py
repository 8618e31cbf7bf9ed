"""What a configuration declares of each setting: type and default by the field, meaning and range by a `Setting`.

Command line, environment, settings file and the local API follow from the declaration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Setting:
    """Meaning and range of a setting, in the `Annotated` of its field.

    Attributes:
        text: what it means, for people.
        least: its smallest value.
        most: its largest value.
        above: every value is greater.
        sane: a value above is a typo on any machine.
        one_of: the values that it can have.
        why: why `least` is that.
        group: the heading that it is listed under; empty: that of its configuration.
    """

    text: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    sane: int | None = None
    one_of: tuple[str, ...] = ()
    why: str = ""
    group: str = ""

    def fault(self, value: Any) -> str | None:
        """Returns what is wrong with the value, such as `must be above 0`, or None. The value None is always valid."""
        if value is None:
            return None
        if self.one_of and value not in self.one_of:
            return f"must be one of {', '.join(self.one_of)}, not {value!r}"
        if self.least is not None and self.most is not None:
            return None if self.least <= value <= self.most else f"must be {self.least} to {self.most}, not {value}"
        if self.above is not None and not value > self.above:
            return f"must be above {self.above}, not {value}"
        if self.least is not None and not value >= self.least:
            return f"must be {self.least} or more{self.why and f' ({self.why})'}, not {value}"
        most = self.sane if self.most is None else self.most
        return None if most is None or value <= most else f"must be at most {most}, not {value}"


class Declared(NamedTuple):
    """A field of a configuration.

    Attributes:
        type: without its `Setting`.
        default: its value where nobody sets it; None where it is derived then.
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
            default = None if field.default is dataclasses.MISSING else field.default
            found[field.name] = Declared(kind, default, settings[0])
    return found


def faults(config: Any) -> Iterator[tuple[str, str]]:
    """Yields each setting of a configuration that is out of range, with what is wrong with it, as `must be ...`."""
    kind: type = type(config)
    for name, field in declared(kind).items():
        if (fault := field.setting.fault(getattr(config, name))) is not None:
            yield name, fault
