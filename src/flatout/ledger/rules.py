"""Rules: what may limit a served model, as data, one Rule a constraint; and judge(): those that hold, what gives back the most first.

A rule is a test over Signals with the origin of its thresholds, its remedy and when it does not apply; docs/adding_a_rule.md says how to write one. The
rules stand in rules_requests.py, rules_steps.py and rules_machine.py; here are their form, their order and the states where nothing is wrong.
No torch, no clock, no I/O. Called by server/diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.ledger.signals import Signals
from flatout.ledger.verdict import Evidence, Verdict

LEAST_FACTOR = 1.05  # what would bring less is not told: a run differs from the next by as much
SPEED, REQUESTS, START = "throughput", "requests", "start"  # what a factor multiplies


@dataclass(frozen=True)
class Found:
    """What a rule's test saw. factor: what its remedy multiplies the speed of `of` by, as predicted."""

    sentence: str
    evidence: tuple[Evidence, ...]
    factor: float
    of: str = REQUESTS
    remedy: str = ""  # more exact than the rule's own
    gain: str = ""  # likewise than what the factor says


@dataclass(frozen=True)
class Rule:
    """One constraint. `instead_of`: rules that see the same time from further off, and are not told beside this one."""

    constraint: str  # a short key, stable
    inputs: tuple[str, ...]  # what the test reads of Signals
    origin: str  # where its thresholds come from
    test: Callable[[Signals], Found | None]
    remedy: str  # a flag or a deed
    unless: str  # when it does not apply
    instead_of: tuple[str, ...] = ()

    def verdict(self, found: Found) -> Verdict:
        gain = found.gain
        if not gain:
            words = {
                SPEED: f"about {found.factor:.2g}x the throughput",
                REQUESTS: f"requests take {1 - 1 / found.factor:.0%} less time",
                START: f"{1 - 1 / found.factor:.0%} of the time since the start, at the next one",
            }
            gain = words[found.of]
        return Verdict(
            self.constraint, found.sentence, found.evidence, found.remedy or self.remedy, gain, found.factor, self.unless
        )


def judge(signals: Signals, rules: tuple[Rule, ...] | None = None) -> list[Verdict]:
    """What limits it, first what would give back the most; at the end, or alone, the state it is in. Never empty."""
    from flatout.ledger.states import state

    held = [(rule, found) for rule in (all_rules() if rules is None else rules) if (found := rule.test(signals)) is not None]
    held = [(rule, found) for rule, found in held if found.factor >= LEAST_FACTOR]
    silenced = {other for rule, _ in held for other in rule.instead_of}
    held = sorted((each for each in held if each[0].constraint not in silenced), key=lambda each: -each[1].factor)
    faults = [rule.verdict(found) for rule, found in held]
    verdicts = [*faults, state(signals, nothing_wrong=not faults)]
    unseen = _unseen(signals)
    return [verdict.without_sight_of(unseen) for verdict in verdicts]


def all_rules() -> tuple[Rule, ...]:
    from flatout.ledger import rules_machine, rules_requests, rules_steps

    return (*rules_requests.RULES, *rules_steps.RULES, *rules_machine.RULES)


def _unseen(signals: Signals) -> list[str]:
    unseen = []
    if signals.table is None:
        unseen.append("how far from the floor its steps are: the engine gave no cost table")
    if signals.foreign is None:
        unseen.append("what others take of its cores: this system does not tell")
    if signals.settings.get("device") == "cuda":
        unseen.append("the GPU's clocks, throttling and links: flatout doctor hardware reads them")
    return unseen
