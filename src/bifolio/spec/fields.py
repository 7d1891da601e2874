"""Typed reads from a checkpoint's own description, which names the key when it refuses."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.wording import cut

MOST_LAYERS = 10_000
"""Beyond any model; a damaged number must not take memory before it is compared with tensors."""

MOST_EXPERTS = 250_000
"""Of all layers together, for the same reason. Kimi K2 has 23,000."""

_MOST = 2**40
"""Beyond any size or count, so that products of a few stay numbers that a float holds."""

_LARGEST = sys.float_info.max
_ID_DIGITS = 9

_MOST_SHOWN = 120
"""Characters of a value in an error: a vocabulary may stand where a number belongs."""


class Fields:
    """A mapping of JSON-like values from `where` (a file, or a part of one).

    A read gives the value in the type asked for, or the default where the key is absent or null.
    Without a default the key is required. Wrong types and ranges raise CheckpointError.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._defaults: dict[str, Any] = {}

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> Collection[str]:
        """Keys that are present and not null."""
        return [key for key, _ in self.items()]

    def items(self) -> Collection[tuple[str, Any]]:
        """Keys that are present and not null, and what they hold."""
        return [(key, value) for key, value in self._values.items() if value is not None]

    def defaults(self, keys: Collection[str]) -> str:
        """Which of these were read and are absent, and what was taken: `a=1, b=2`; or empty."""
        taken = [(key, value) for key, value in self._defaults.items() if key in keys]
        return ", ".join(f"{key}={value}" for key, value in taken)

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = _MOST
    ) -> int:
        """An integer of at least `low` and at most `high`. True and 3.0 are not integers."""
        value = self._get(key, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not low <= value <= high:
            most = f" and at most {high}" if high != _MOST or is_integer else ""
            raise self._wrong(key, value, f"an integer of at least {low}{most}")
        return int(value)

    def take_defaults(self, other: Fields) -> None:
        """Count what another part has taken for absent keys as taken here."""
        self._defaults |= other._defaults

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = 0.0,
        most: float = _LARGEST,
    ) -> float:
        """A finite number greater than `above` and at most `most`."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        if not above < value <= most:
            limit = "" if most == _LARGEST else f" and at most {most:g}"
            raise self._wrong(key, value, f"a finite number above {above:g}{limit}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of texts")
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of numbers, whole ones among them."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and not isinstance(item, bool) for item in value
        ):
            raise self._wrong(key, value, "a list of numbers")
        return value

    def ids(self, key: str, absent: Collection[int] = ()) -> tuple[int, ...]:
        """Token ids given as one integer or as a list, without those that mean that there is none.

        Empty where the key is absent.
        """
        value = self._values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        items = [i for i in items if not (type(i) is int and i in absent)]
        if not all(type(i) is int and i >= 0 for i in items):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(items)

    def token(self, key: str) -> str | None:
        """The text of a token: a text, or an object whose `content` it is; None for none."""
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            raise self._wrong(key, value, "a text or an object with a text as its content")
        return self.part(key).text("content")

    def numbered(self) -> Iterator[tuple[int, Fields]]:
        """Every object by the token id that is its key."""
        for key in self.keys():
            if not (key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS):
                raise CheckpointError(f"{self._where}: {cut(ascii(key))} is no token id")
            yield int(key), self.part(key)

    def part(self, key: str) -> Fields:
        """The object under `key`, empty where it is absent."""
        value = self._values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self._where}: {key}")

    def parts(self, key: str) -> list[Fields]:
        """The objects of the list under `key`, none where it is absent."""
        value = self._values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self._wrong(key, value, "a list of objects")
        return [Fields(item, f"{self._where}: {key}") for item in value]

    def refuse_unless(self, key: str, harmless: Collection[Any], why: str) -> None:
        """UnsupportedError if the key is present with a value other than the harmless ones."""
        value = self._values.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedError(f"{self._where}: {key}={_cut(value)} is not supported; {why}")

    def refuse_others(self, known: Collection[str]) -> None:
        """UnsupportedError naming the first key that is not known."""
        for key in self.keys():
            if key not in known:
                raise UnsupportedError(
                    f"{self._where}: unknown key {_cut(key)}; known: {sorted(known)}"
                )

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._where}: {key} is missing")
        self._defaults[key] = default
        return default

    def _wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {key} is {_cut(value)}, not {wanted}")


def _cut(value: object) -> str:
    return cut(repr(value), _MOST_SHOWN)
