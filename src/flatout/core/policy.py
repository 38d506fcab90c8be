"""Who goes first: a policy is one function that ranks a request; the scheduler admits by rank and preempts from the other end.

Also when a prompt is kept whole, and Line, the sorted line that running and waiting requests stand in. Called by scheduler.py.
To add a policy: write its function, name it in POLICIES and in config.SchedulerConfig.scheduling_policy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from flatout.request import Request

# Lower ranks are admitted first and preempted last; among equals those that came first. A request's rank is asked once, when it is
# added, and must be comparable with every other request's.
Policy = Callable[[Request], tuple[float, ...]]


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served: all rank alike."""
    return ()


def priority(request: Request) -> tuple[float, ...]:
    """Lower `Request.priority` first, as in vLLM."""
    return (request.priority,)


def kept_whole(rest: int, left: int, budget: int, decodes: int) -> bool:
    """Whether the head of the line, of whose prompt `rest` tokens are to be computed, more than the `left` ones of this step's budget, waits
    for the next step rather than be cut: if that one holds it whole beside its `decodes` (a token each), and this one is half full.

    It loses nothing: cut or whole, it has its first token from the next step, which takes it, as nobody of its rank overtakes it and of
    those who run by then each has but one token to compute. Dense attention takes a prompt that is whole, and none that is cut oddly.
    Those of a better rank may come for every step, so nobody is kept twice running: the scheduler's to see to.
    """
    return rest <= budget - decodes and 2 * (budget - left) >= budget


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}

T = TypeVar("T")


class Line(Generic[T]):
    """Items sorted by a key that is unique and does not change while they stand here."""

    def __init__(self, key: Callable[[T], Any]):
        self._key = key
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @property
    def first(self) -> T:
        return self._items[0]

    @property
    def last(self) -> T:
        return self._items[-1]

    def add(self, item: T) -> None:
        insort(self._items, item, key=self._key)

    def remove(self, item: T) -> None:
        index = bisect_left(self._items, self._key(item), key=self._key)
        assert self._items[index] is item
        del self._items[index]
