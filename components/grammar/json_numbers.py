"""JSON numbers within bounds, as regular expressions."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from diffray.components.config import InvalidField

INTEGER: Final = "-?(?:0|[1-9][0-9]*)"
NUMBER: Final = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_MOST_DECIMALS: Final = 30  # of a bound: each is another level of the expression


def integers(path: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of the integers within a schema's bounds."""
    low, high = _limits(path, schema)
    if low is None and high is None:
        return INTEGER
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    return _range(path, least, most)


def numbers(path: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of the numbers within a schema's bounds; with one, without exponent."""
    low, high = _limits(path, schema)
    if low is None and high is None:
        return NUMBER
    for bound in (low, high):
        if bound is not None and len(_digits(bound[0])[1]) > _MOST_DECIMALS:
            raise _refused(path, f"the bound {bound[0]} has over {_MOST_DECIMALS} decimals")
    parts = _from_zero(low, high)
    parts += [f"-{part}" for part in _from_zero(_negated(high), _negated(low))]
    if not parts:
        raise _refused(path, "no number is within its bounds")
    return f"(?:{'|'.join(parts)})"


Bound = tuple[Decimal, bool]  # the number, and whether it is excluded


def _from_zero(low: Bound | None, high: Bound | None) -> list[str]:
    """Return the expressions of the numbers of at least 0 within bounds."""
    if low is None or low[0] < 0:
        low = Decimal(0), False
    if high is not None and high[0] < low[0]:
        return []
    least, after_least = _digits(low[0])
    excluded = low[1], high is not None and high[1]
    most, after_most = (None, None) if high is None else _digits(high[0])
    if least == most:
        parts = [(str(least), _decimals(after_least, after_most, excluded))]
    else:
        parts = [(str(least), _decimals(after_least, None, excluded))]
        if most is None or least + 1 < most:
            inner = _positive(least + 1, None if most is None else most - 1)
            parts.append((inner, _decimals(None, None, excluded)))
        if most is not None:
            parts.append((str(most), _decimals(None, after_most, excluded)))
    return [whole + rest for whole, rest in parts if rest is not None]


def _digits(number: Decimal) -> tuple[int, str]:
    """Return a number's integer part, and its decimals up to the last that is not 0."""
    whole, _, decimals = f"{number.copy_abs():f}".partition(".")
    return int(whole), decimals.rstrip("0")


def _decimals(
    low: str | None, high: str | None, excluded: tuple[bool, bool], point: str = r"\."
) -> str | None:
    """Return the expression of a number's further decimals, if any, between those of its bounds.

    A bound is None if earlier digits keep it, whatever follows. The result is None if none do.
    """
    may_end = (low is None or (not low and not excluded[0])) and (
        high is None or bool(high) or not excluded[1]
    )
    if low or high:
        first, last = int((low or "")[:1] or 0), 9 if high is None else int(high[:1] or 0)
        starts: dict[str, str] = {}  # what follows -> the digits that it follows
        for digit in range(first, last + 1):
            lower = low[1:] if low is not None and digit == first else None
            upper = high[1:] if high is not None and digit == last else None
            rest = _decimals(lower, upper, excluded, "")
            if rest is not None:
                starts[rest] = starts.get(rest, "") + str(digit)
        more = "|".join(f"[{digits}]{rest}" for rest, digits in starts.items())
    elif high is not None:
        more = "0+" if may_end else ""
    else:
        more = "[0-9]+" if may_end else "[0-9]*[1-9][0-9]*"
    if not more:
        return "" if may_end else None
    return f"(?:{point}(?:{more}))" + "?" * may_end


def _range(path: str, least: int | None, most: int | None) -> str:
    if least is not None and most is not None and least > most:
        raise _refused(path, "no integer is within its bounds")
    parts = []
    if most is None or most >= 0:
        parts.append(_positive(max(least or 0, 0), most))
    if least is None or least < 0:
        nearest = max(-most, 1) if most is not None and most < 0 else 1
        parts.append(f"-{_positive(nearest, None if least is None else -least)}")
    return f"(?:{'|'.join(parts)})"


def _positive(least: int, most: int | None) -> str:
    """Return the expression of the whole numbers from `least`, at least 0, to `most`."""
    if most is None:
        size = len(str(least))
        more = f"[1-9][0-9]{{{size},}}"
        return f"(?:{'|'.join([*_equally_long(least, 10**size - 1), more])})"
    parts = []
    for size in range(len(str(least)), len(str(most)) + 1):
        low, high = max(least, 10 ** (size - 1) if size > 1 else 0), min(most, 10**size - 1)
        parts += _equally_long(low, high)
    return f"(?:{'|'.join(parts)})"


def _equally_long(least: int, most: int) -> list[str]:
    """Return expressions of the numbers between two with the same number of digits."""
    low, high = str(least), str(most)
    if low == high:
        return [low]
    if low[0] == high[0]:
        inner = _tails(low[1:], high[1:])
        return [f"{low[0]}(?:{'|'.join(inner)})"]
    return _tails(low, high)


def _tails(low: str, high: str) -> list[str]:
    """Return expressions of the digit strings between two of the same length."""
    if not low:
        return [""]
    if set(low) == {"0"} and set(high) == {"9"}:
        return [f"[0-9]{{{len(low)}}}"]
    if low[0] == high[0]:
        return [f"{low[0]}(?:{'|'.join(_tails(low[1:], high[1:]))})"]
    size, parts = len(low) - 1, []
    first, last = int(low[0]), int(high[0])
    if set(low[1:]) - {"0"}:
        parts.append(f"{first}(?:{'|'.join(_tails(low[1:], '9' * size))})")
        first += 1
    ends = bool(set(high[1:]) - {"9"})
    if first <= last - ends:
        parts.append(f"[{first}-{last - ends}][0-9]{{{size}}}")
    if ends:
        parts.append(f"{last}(?:{'|'.join(_tails('0' * size, high[1:]))})")
    return parts


def _limits(path: str, schema: Mapping[str, Any]) -> tuple[Bound | None, Bound | None]:
    found: list[Bound | None] = []
    for name, sign in (("inimum", 1), ("aximum", -1)):
        bounds = [
            (schema[key], excluded)
            for key, excluded in ((f"m{name}", False), (f"exclusiveM{name}", True))
            if key in schema
        ]
        for value, _ in bounds:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not abs(value) <= 2**53:
                raise _refused(path, f"the bound {value!r:.50} is not a number up to 2**53")
        exact = [(Decimal(str(value)), excluded) for value, excluded in bounds]
        found.append(max(exact, key=lambda b: (sign * b[0], b[1]), default=None))
    return found[0], found[1]


def _negated(bound: Bound | None) -> Bound | None:
    return None if bound is None else (bound[0].copy_negate(), bound[1])


def _refused(path: str, reason: str) -> InvalidField:
    return InvalidField(f"structured outputs: {path}: {reason}", path)
