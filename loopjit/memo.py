"""A bounded, thread-safe table that forgets what was used longest ago; keys by identity."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """A mapping with a bound.

    Attributes:
      peek: finds a value or None, without a lock and without touching the order (for warm calls).
    """

    __slots__ = ("_data", "_lock", "evicted", "maxsize", "peek")

    def __init__(self, maxsize: int):
        self.maxsize = maxsize
        self.evicted = 0
        self._data: OrderedDict[K, V] = OrderedDict()
        # Reentrant: a garbage collection while it is held may run a finalizer that comes back here.
        self._lock = threading.RLock()
        self.peek: Callable[[K], V | None] = self._data.get

    def get(self, key: K) -> V | None:
        """Finds a value or None, and notes the use."""
        with self._lock:
            value = self._data.get(key)
            if value is not None:
                self._data.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Stores ``value`` unless the key is there already; returns what is stored."""
        evicted = []
        with self._lock:
            there = self._data.setdefault(key, value)
            self._data.move_to_end(key)
            while len(self._data) > self.maxsize:
                evicted.append(self._data.popitem(last=False))
                self.evicted += 1
        del evicted  # outside of the lock: this may free objects of the user
        return there

    def replace(self, key: K, value: V) -> V:
        """Stores ``value`` in the place of whatever is there."""
        with self._lock:
            self._data.pop(key, None)
        return self.put(key, value)

    def discard(self, key: K) -> None:
        """Forgets one key."""
        with self._lock:
            self._data.pop(key, None)

    def limit(self, maxsize: int) -> None:
        """Sets how many values are kept at most, from the next new one on."""
        self.maxsize = maxsize

    def pop_oldest(self) -> None:
        """Forgets what was used longest ago."""
        with self._lock:
            if self._data:
                self._data.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._data.clear()

    def items(self) -> list[tuple[K, V]]:
        with self._lock:
            return list(self._data.items())

    def values(self) -> list[V]:
        with self._lock:
            return list(self._data.values())

    def __len__(self) -> int:
        return len(self._data)


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects, in the same order."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class Same:
    """Compares by identity, and keeps alive what it compares.

    A bare ``id()`` would be given again to another object once the first is freed.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.value is other.value

    def __repr__(self) -> str:
        return f"Same({self.value!r})"
