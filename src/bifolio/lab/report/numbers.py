"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "–"


def whole(value: float | None) -> str:
    """`1,234`."""
    return NONE if value is None else f"{value:,.0f}"


def short(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands parted."""
    if value is None:
        return NONE
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def milliseconds(value: float | None) -> str:
    """Of seconds, without the unit."""
    if value is None:
        return NONE
    ms = value * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


def percent(value: float | None, digits: int = 0) -> str:
    """`12%`."""
    return NONE if value is None else f"{value:.{digits}%}"


def times(value: float | None) -> str:
    """`×1.41`."""
    return NONE if value is None else f"×{value:.2f}"


def ratio(found: Mapping[str, Any] | None) -> str:
    """`×1.41 (1.38 to 1.44)`, of a ratio with its interval."""
    if found is None:
        return NONE
    return f"×{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def middle(value: Mapping[str, float] | None) -> float | None:
    """The median of a figure over repeats."""
    return None if value is None else value["median"]


def spread(value: Mapping[str, float] | None) -> str:
    """`±3%`: half the range of the repeats over their median."""
    if value is None or not value["median"]:
        return ""
    return f"±{(value['max'] - value['min']) / 2 / value['median']:.0%}"


def size(nbytes: float | None) -> str:
    """Bytes in the unit that suits: 10⁹ to a GB."""
    if nbytes is None:
        return NONE
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.3g} {unit}"
    return f"{nbytes:.0f} B"
