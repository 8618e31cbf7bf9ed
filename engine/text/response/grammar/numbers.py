"""Numbers of JSON schemas, exactly as written: llguidance has them as float64, and keeps fifteen digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
KEYWORDS = BOUNDS | {"multipleOf"}

MAX_DIGITS = 80  # before the point, and as many after it: 2^256 has 78
_KEPT_DIGITS = 15  # a decimal with this many keeps them all as a float64
_MAX_MULTIPLE = 10**9  # without its point: llguidance stores it in 32 bits
_MAX_LISTED = 256  # multiples between two bounds
_MAX_EXPRESSION = 20_000  # characters of one bound
_SHORT = 40  # characters: a longer number keeps its exponent
_ANY = r"(0|[1-9][0-9]*)(\.[0-9]+)?"
_MORE = r"(\.[0-9]+)?"


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: float) -> Fraction:
    """Returns the number as JSON spells it, not the binary one closest to it."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def is_kept(value: float) -> bool:
    """Whether llguidance accepts the number without rounding it."""
    whole, _, fraction = positional(abs(exact(value))).partition(".")
    return max(len(whole), len(fraction), len((whole + fraction).strip("0"))) <= _KEPT_DIGITS


def is_kept_multiple(value: float) -> bool:
    """Whether llguidance accepts a `multipleOf` without rounding it."""
    return is_kept(value) and int(positional(abs(exact(value))).replace(".", "")) <= _MAX_MULTIPLE


def positional(number: Fraction) -> str:
    """Writes a number with a finite decimal expansion, without an exponent."""
    places = 0
    while number.denominator != 1:
        number, places = number * 10, places + 1
    digits = str(abs(number.numerator)).zfill(places + 1)
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if number < 0 else text


def spelled(value: float, *, is_whole: bool) -> str:
    """Writes a number as JSON. If `is_whole`, it has no point and no exponent."""
    text = positional(exact(value))
    return text if is_whole or isinstance(value, int) or len(text) <= _SHORT else repr(value)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that a schema allows. None means no such bound, or no step."""

    low: Fraction | None
    high: Fraction | None
    is_above: bool  # not `low` itself
    is_below: bool  # not `high` itself
    step: Fraction | None
    is_whole: bool

    @staticmethod
    def of(schema: Mapping[str, Any], *, is_whole: bool) -> Numbers:
        """Reads the numeric keywords of `schema`, whose values must be valid."""
        low, is_above = max(_bounds(schema, "minimum", "exclusiveMinimum"), default=(None, False))
        highs = ((bound, not is_open) for bound, is_open in _bounds(schema, "maximum", "exclusiveMaximum"))
        high, is_within = min(highs, default=(None, True))
        step = abs(exact(schema["multipleOf"])) if "multipleOf" in schema else None
        return Numbers(low, high, is_above, not is_within, step, is_whole)

    def __contains__(self, number: Fraction) -> bool:
        if self.low is not None and (number < self.low or (self.is_above and number == self.low)):
            return False
        if self.high is not None and (number > self.high or (self.is_below and number == self.high)):
            return False
        return (number.denominator == 1 or not self.is_whole) and (self.step is None or not number % self.step)

    def lexeme(self) -> str | None:
        """Returns a lexeme of the numbers: without exponents, and with at most MAX_DIGITS before the point.

        Returns None if a bound has more digits, or if there are too many multiples of a step that is not a power of
        ten.
        """
        form = self._form()
        if form is None:
            return self._listed()
        lowest, highest = -(10**MAX_DIGITS), 10**MAX_DIGITS
        parts = [form]
        if self.low is not None and self.low > lowest:
            parts.append(_compared(self.low, is_open=self.is_above, is_low=True))
        if self.high is not None and self.high < highest:
            parts.append(_compared(self.high, is_open=self.is_below, is_low=False))
        return None if any(len(part) > _MAX_EXPRESSION for part in parts) else " & ".join(f"/{part}/" for part in parts)

    def _form(self) -> str | None:
        """Returns a regex of the numbers without bounds, or None if `step` is not a power of ten."""
        whole, _, fraction = ("1", "", "") if self.step is None else positional(self.step).partition(".")
        if (whole + fraction).strip("0") != "1":
            return None
        zeros = len(whole) - 1
        places = 0 if self.is_whole else len(fraction) if self.step is not None else MAX_DIGITS
        digits = f"-?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1 - zeros}}}{'0' * zeros})"
        return rf"{digits}(\.[0-9]{{1,{places}}})?" if places else digits

    def _listed(self) -> str | None:
        if self.low is None or self.high is None or self.step is None:
            return None
        first, last = -(-self.low // self.step), self.high // self.step
        if last - first >= _MAX_LISTED:
            return None
        multiples = (self.step * count for count in range(first, last + 1))
        found = [positional(number).replace(".", r"\.") for number in multiples if number in self]
        return f"/{'|'.join(found)}/" if found else None


def _bounds(schema: Mapping[str, Any], closed: str, open_: str) -> Iterator[tuple[Fraction, bool]]:
    """Yields the bounds on one side, and whether each is excluded; Draft 4 says that by a boolean."""
    if closed in schema:
        yield exact(schema[closed]), schema.get(open_) is True
    if open_ in schema and not isinstance(schema[open_], bool):
        yield exact(schema[open_]), True


def _compared(bound: Fraction, *, is_open: bool, is_low: bool) -> str:
    """Returns the numbers on one side of a bound: all of one sign, or some of it and all of the other sign."""
    far, near = ("", "-") if is_low else ("-", "")
    text = positional(abs(bound))
    if not bound:
        return f"{far}({_from(text, is_open)})" + ("" if is_open else rf"|{near}0(\.0+)?")
    if (bound > 0) == is_low:
        return f"{far}({_from(text, is_open)})"
    return f"{far}{_ANY}|{near}({_up_to(text, is_open)})"


def _from(text: str, is_open: bool) -> str:
    """Returns unsigned numbers that are not less than `text`: longer ones, and those with a greater digit first."""
    whole, _, fraction = text.partition(".")
    found = [f"[1-9][0-9]{{{len(whole)},}}{_MORE}"]
    for place, digit in enumerate(whole):
        if digit < "9":
            found.append(f"{whole[:place]}[{int(digit) + 1}-9][0-9]{{{len(whole) - place - 1}}}{_MORE}")
    for place, digit in enumerate(fraction):
        if digit < "9":
            found.append(rf"{whole}\.{fraction[:place]}[{int(digit) + 1}-9][0-9]*")
    if is_open:
        found.append(rf"{whole}\.{fraction}[0-9]*[1-9][0-9]*")
    else:
        found.append(rf"{whole}\.{fraction}[0-9]*" if fraction else f"{whole}{_MORE}")
    return "|".join(found)


def _up_to(text: str, is_open: bool) -> str:
    """Returns unsigned numbers that are not more than `text`: shorter ones, and those with a lesser digit first."""
    whole, _, fraction = text.partition(".")
    found = [f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){_MORE}"] if len(whole) > 1 else []
    for place, digit in enumerate(whole):
        lowest = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > lowest:
            found.append(f"{whole[:place]}[{lowest}-{int(digit) - 1}][0-9]{{{len(whole) - place - 1}}}{_MORE}")
    for place, digit in enumerate(fraction):
        found.append(rf"{whole}\.{fraction[:place]}" if place else whole)
        if digit > "0":
            found.append(rf"{whole}\.{fraction[:place]}[0-{int(digit) - 1}][0-9]*")
    if not is_open:
        found.append(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")
    return "|".join(found)
