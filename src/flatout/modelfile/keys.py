"""Keys: typed reading of a parsed config, with errors that name the key and the file.

A key may be required (no default known), defaulted, or null. Knows nothing of models. Called by hf_spec.py, hf_rope.py and gguf_spec.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout.modelfile.spec import ModelFileError

MAX_INTEGER = 2**40  # no size or count of a model is near it: larger ones are garbage


class Keys:
    """A mapping of keys to plain values. `where` is the file as errors name it; `defaults` serve the keys that are left out."""

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any]):
        self.values = values
        self.where = where
        self.defaults = defaults

    def error(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key}: {problem}")

    def get(self, key: str) -> Any:
        """The value, the default, or None."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            state = "is null" if key in self.values else "is missing"
            raise ModelFileError(f"{self.where}: required key {key!r} {state}; restore it from the model's original files")
        return value

    def integer(self, key: str, low: int = 1) -> int:
        return self._integer(key, self.require(key), low)

    def optional_integer(self, key: str) -> int | None:
        """None for null, for 0 and for a key without default."""
        value = self.get(key)
        return self._integer(key, value, 0) or None if value is not None else None

    def _integer(self, key: str, value: Any, low: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INTEGER:
            raise self.error(key, f"must be a whole number of at least {low}, got {value!r}")
        return value

    def number(self, key: str) -> float:
        """A finite number over 0."""
        self.require(key)
        value = self.any_number(key)
        if value <= 0:
            raise self.error(key, f"must be over 0, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def any_number(self, key: str) -> float | int:
        """A finite number, as it is."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, got {value!r}")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of exactly `length` numbers over 0."""
        value = self.require(key)
        if not isinstance(value, list) or len(value) != length:
            found = f"{len(value)}" if isinstance(value, list) else repr(value)
            raise self.error(key, f"must be a list of {length} numbers, got {found}")
        item = Keys({f"{key}[{i}]": v for i, v in enumerate(value)}, self.where, {})
        return tuple(item.number(k) for k in item.values)

    def flag(self, key: str) -> bool:
        value = self.require(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self.require(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value
