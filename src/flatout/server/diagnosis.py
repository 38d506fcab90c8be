"""Diagnosis: counts what the doctor's rules ask beside the ledger, for one served model, and asks them.

Counting is a few additions a request; twice a second, with the engine's own reports, all counters are noted as they stand (ledger/pulse.py), 0.5 ms.
On the event loop; fed by engines.py, read by its accounts(). What the numbers mean is ledger/rules.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flatout.ledger.account import RequestAccount
from flatout.ledger.heads import Heads, Likeness
from flatout.ledger.ledger import Ledger
from flatout.ledger.pulse import Pulse
from flatout.ledger.rules import judge
from flatout.ledger.signals import Signals
from flatout.ledger.verdict import Verdict
from flatout.ledger.vitals import Vitals, machine
from flatout.server.metrics import Metrics

WINDOW = 10  # seconds of a verdict, unless another is asked for
MOST_OPEN = 256  # requests in flight whose time so far is told

_front = Vitals()  # of this process, whatever the number of models


class Diagnosis:
    """Of one model. Rates and shares are over the last `seconds`, of which the requests in flight are told by their time so far."""

    def __init__(self, metrics: Metrics, open_accounts: Callable[[], Iterable[RequestAccount]]):
        self._metrics, self._open = metrics, open_accounts
        self._pulse, self._heads = Pulse(), Heads()
        self._sums: dict[str, float] = {}
        self._settings: Mapping[str, Any] = {}
        self._at_start: Mapping[str, float] = {}
        self._ready = time.monotonic()

    def ready(self, settings: Mapping[str, Any], vitals: Mapping[str, float]) -> None:
        """The engine is: its settings, and its process's vitals by then."""
        self._settings, self._at_start, self._ready = settings, vitals, time.monotonic()
        self.look(0.0, vitals)

    def count(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def prompt(self, ids: bytes) -> Likeness:
        """A prompt comes: its int32 ids."""
        return self._heads.see(ids)

    def ended(self, account: RequestAccount, prompts: Iterable[tuple[Likeness, int, str, int]]) -> None:
        """A request ended. prompts: of each its likeness, cached tokens, miss reason and length."""
        _add(self._sums, account)
        self.count("ended", 1)
        for likeness, cached, reason, length in prompts:
            self._heads.ended(likeness, cached, reason, length)

    def look(self, late: float, vitals: Mapping[str, float]) -> None:
        """A report of the engine's came, so many seconds after it was sent, with its process's vitals."""
        self.count("loop_late_s", max(0.0, late))
        self.count("looks", 1)
        now = time.monotonic()
        if not self._pulse.due(now):
            return
        counters = dict(self._sums)
        for account in self._open():
            _add(counters, account)
        m = self._metrics
        counters |= {
            "requests": m.requests,
            "prompt_tokens": m.prompt_tokens,
            "completion_tokens": m.generation_tokens,
            "preemptions": m.state.preemptions,
        }
        counters |= {f"lost.{reason}": tokens for reason, tokens in self._heads.lost.items()}
        counters |= {f"parted.{at}": tokens for at, tokens in self._heads.parted.items()}
        for whose, values in (("engine", vitals), ("front", _front.read()), ("machine", machine())):
            counters |= {f"{whose}.{name}": value for name, value in values.items()}
        self._pulse.add(now, counters)

    def signals(self, ledger: Ledger, seconds: int = WINDOW) -> Signals:
        state, busy = self._metrics.state, self._metrics.state.running > 0
        whole, grew = self._pulse.over(seconds)
        _, late = self._pulse.over(seconds / 2)
        gauges = {"running": state.running, "waiting": state.num_waiting, "in_flight": self._metrics.in_flight, "cores": machine()["cores"]}
        gauges["cold_s"] = ledger.cold
        account, uptime = ledger.window(seconds, busy), time.monotonic() - self._ready
        return Signals(account, ledger.table, self._settings, whole, grew, late, gauges, self._at_start, uptime)

    def verdicts(self, ledger: Ledger, seconds: int = WINDOW) -> list[Verdict]:
        """The first is what matters most. Never empty."""
        return judge(self.signals(ledger, seconds))


def _add(sums: dict[str, float], account: RequestAccount) -> None:
    added = {"e2e_s": account.total, "client_s": account.client, **{"part." + name: s for name, s in account.parts.items()}}
    for name, value in added.items():
        sums[name] = sums.get(name, 0.0) + value
