"""Typed reads from a checkpoint's own description, which names the key when it refuses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from bifolio.errors import CheckpointError, UnsupportedError

MOST_LAYERS = 10_000
"""Beyond any model; a damaged number must not take memory before it is compared with tensors."""

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

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> Collection[str]:
        """Keys that are present and not null."""
        return [key for key, value in self._values.items() if value is not None]

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int | None = None
    ) -> int:
        """An integer of at least `low` and at most `high`. True and 3.0 are not integers."""
        value = self._get(key, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < low or (high is not None and value > high):
            most = "" if high is None else f" and at most {high}"
            raise self._wrong(key, value, f"an integer of at least {low}{most}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        if not math.isfinite(value) or value <= above:
            raise self._wrong(key, value, f"a finite number above {above}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key, above=-math.inf) if key in self else None

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
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(items)

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
            raise UnsupportedError(f"{self._where}: {key}={value!r} is not supported; {why}")

    def refuse_others(self, known: Collection[str]) -> None:
        """UnsupportedError naming the first key that is not known."""
        for key in self.keys():
            if key not in known:
                raise UnsupportedError(
                    f"{self._where}: unknown key {key!r}; known: {sorted(known)}"
                )

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._where}: {key} is missing")
        return default

    def _wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        shown = repr(value)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]}…"
        return CheckpointError(f"{self._where}: {key} is {shown}, not {wanted}")
