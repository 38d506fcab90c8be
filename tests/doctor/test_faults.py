"""Faults that are injected one at a time into a server under load, and its first verdict, which must name them; and healthy loads, where none may.

All of them are `make long`, as each takes ten seconds and a machine of its own: their figures are in docs/doctor.md. A few whose verdicts a busy
machine cannot change run always. The faults are faults.py, the cases and their loads fault_cases.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import CASES, HEALTHY, BusyMachine, Servers, verdicts

ALWAYS = ("slow_tokeniser", "four_slots", "cache_off", "date_first", "salts", "no_load")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


def of(names: tuple[str, ...] | list[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", of(list(CASES)))
def test_a_fault_is_named_first(servers: Servers, name: str) -> None:
    case = CASES[name]
    try:
        found = verdicts(servers, case)
    except BusyMachine:
        pytest.skip("other processes use the cores that were to be free")
    assert found[0].constraint == case.names, [v.sentence for v in found]
    assert case.says in f"{found[0].sentence} {found[0].remedy}"


@pytest.mark.parametrize("name", of(list(HEALTHY)))
def test_nothing_is_wrong_with_a_healthy_server(servers: Servers, name: str) -> None:
    found = verdicts(servers, HEALTHY[name])
    assert len(found) == 1, [v.sentence for v in found]  # the state it is in, and no fault
