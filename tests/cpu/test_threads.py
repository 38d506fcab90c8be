"""Threads: none more than cores, fewer while others use them, all again afterwards; and what a busy neighbour and too many threads cost.

Rows C09 (idle is idle) and C10 (exactly the cores that are allowed) of the cases that other engines got wrong. Timings run with `make long` alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from checkpoints import make

from flatout import LLM, SamplingParams
from flatout.bench.processes import SPIN, program, started
from flatout.kernels import native
from flatout.runner.threads import LAG, LONGEST_PAUSE, PAUSE, WINDOW, Threads, waited_for_cores

needs_native = pytest.mark.skipif(not native.available(), reason="needs the native library")


class Machine:
    """Steps whose seconds depend on the threads, and threads that wait for cores, on a clock of its own."""

    def __init__(self, asked: int, seconds: dict[int, float], lag: float):
        self.seconds, self.lag, self.clock, self.waited, self.taken = seconds, lag, 0.0, 0.0, []
        self.threads = Threads(asked, self.taken.append, lambda: self.waited, lambda: self.clock)

    def run(self, seconds: float, rows: int = 1) -> list[int]:
        """The threads of each step."""
        used, end = [], self.clock + seconds
        while self.clock < end:
            took = self.seconds[self.threads.now]
            self.clock += took
            self.waited += took * self.lag
            used.append(self.threads.now)
            self.threads.after(rows, took)
        return used


QUIET, SHARED = {1: 0.007, 2: 0.004}, {1: 0.007, 2: 0.009}


def test_a_quiet_machine_tries_nothing():
    assert set(Machine(2, QUIET, lag=0.2).run(20)) == {2}


def test_fewer_while_they_are_faster_and_all_again():
    machine = Machine(2, SHARED, lag=0.67)
    machine.run(2)
    assert machine.taken[0] == 1
    assert np.mean(machine.run(20)) < 1.05, "trials of all threads are few"
    machine.seconds, machine.lag = QUIET, 0.1
    used = machine.run(LONGEST_PAUSE + 3 * WINDOW)
    assert used[-1] == 2
    assert set(machine.run(20)) == {2}, "and nothing is tried while nobody waits"


def test_lag_alone_takes_no_thread_away():
    """Beside a neighbour that leaves enough all threads stay, at the price of a short trial now and then."""
    machine = Machine(2, {1: 0.007, 2: 0.006}, lag=LAG + 0.1)
    used = machine.run(60)
    assert used[-1] == 2 and 1 in used
    assert used.count(1) / len(used) < 0.04


def test_as_many_fewer_as_wait():
    machine = Machine(8, {8: 0.004, 6: 0.002}, lag=2.2)
    machine.run(2 * WINDOW)
    assert machine.taken == [6]


def test_only_steps_of_the_same_rows_compare():
    machine = Machine(2, SHARED, lag=1.0)
    machine.run(WINDOW, rows=4)
    assert machine.threads.now == 1
    machine.run(WINDOW + 0.01, rows=3)
    assert machine.threads.now == 2, "nothing is known of these"
    machine.run(PAUSE, rows=0)
    assert machine.taken == [1, 2], "prompts compare with nothing"


def test_waiting_is_read_from_the_system(tmp_path):
    for thread, text in (("1", "5 2000000000 7"), ("2", "0 500000000 1")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "3").mkdir()  # ended just now
    assert waited_for_cores(str(tmp_path)) == 2.5
    assert waited_for_cores(str(tmp_path / "nowhere")) == 0.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not tell")
def test_measuring_costs_little():
    """Less than 1 % of the steps between two looks."""
    begin = time.thread_time()
    for _ in range(20):
        waited_for_cores()
    look = (time.thread_time() - begin) / 20
    threads = Threads(2, lambda n: None, lambda: 0.0)
    begin = time.thread_time()
    for _ in range(1000):
        threads.after(1, 1e-6)
    step = (time.thread_time() - begin) / 1000
    assert look < 0.01 * WINDOW and step < 0.01 * 1e-3


# -- the whole engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("threads"))


GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
TELL = """
import json, os, sys, torch
from flatout import LLM
options = json.loads(sys.argv[1])[0]
with LLM(**options) as llm:
    of_torch = llm.engine.runner._thread.submit(torch.get_num_threads).result()
    print(json.dumps([llm.config.device.threads, of_torch, [l for l in llm.start_lines if l.startswith("threads")]]))
"""


def told(checkpoint: Path, cores: set[int], environment: dict[str, str] | None = None, **options) -> tuple[int, int, str]:
    """(threads, torch's, what is said of them) of a process that may use these cores."""
    command = program(TELL, {"model": str(checkpoint), "dtype": "float32", "device": "cpu", "max_model_len": 64, **options})
    ran = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    threads, of_torch, lines = json.loads(ran.stdout)
    return threads, of_torch, "\n".join(lines)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_c10_exactly_the_cores_that_are_allowed(checkpoint):
    """By affinity; OMP_NUM_THREADS, which many images set to 1, does not count, --threads does; more threads than cores are told and not made."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert told(checkpoint, {first})[:2] == (1, 1)
    for environment in ({}, {"OMP_NUM_THREADS": "1"}):
        threads, of_torch, lines = told(checkpoint, {first, second}, environment)
        assert (threads, of_torch) == (2, 2) and "threads = 2: cores this process may use" in lines
    assert told(checkpoint, {first, second}, threads=1)[:2] == (1, 1)
    threads, of_torch, lines = told(checkpoint, {second}, threads=8)
    assert (threads, of_torch) == (1, 1) and "threads = 1: 8 asked, but this process may use 1 cores" in lines


@needs_native
def test_what_is_decided_is_recorded(checkpoint, monkeypatch):
    """Each step says how many threads it had; the tokens are the same."""
    with LLM(str(checkpoint), dtype="float32", device="cpu", threads=2, max_model_len=64) as llm:
        assert llm.engine.config.device.threads == 1 or any(line.startswith("threads: 2, or fewer") for line in llm.start_lines)
        used: list[int] = []
        monkeypatch.setattr("flatout.runner.threads.WINDOW", 0.005)
        monkeypatch.setattr("flatout.runner.threads.WINDOW_EACH", 0)
        llm.engine.runner.threads = threads = Threads(2, used.append, lambda: time.monotonic())  # always one that waits
        expected = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert used and used[0] == 1
        assert {record.threads for record in llm.engine.records} == {1, 2}
        llm.engine.runner.threads = None
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert llm.engine.records[-1].threads == 0 and threads.asked == 2
    native.set_threads(1)


def test_c09_an_idle_engine_is_idle(checkpoint):
    """Under 1 % of a core, from half a second after an answer."""
    with LLM(str(checkpoint), dtype="float32", device="cpu", max_model_len=64) as llm:
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        time.sleep(0.5)
        before = time.process_time()
        time.sleep(3)
        assert time.process_time() - before < 0.03
    native.set_threads(1)


# -- timings ----------------------------------------------------------------------------------------------------------------


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A process that keeps this core busy."""
    with started(["taskset", "-c", str(core), *program(SPIN)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield
        assert process.poll() is None


def rate(llm: LLM) -> float:
    timing = llm.generate([list(range(10, 74))], GREEDY, use_tqdm=False)[0].timing
    assert timing is not None
    return 47 / (timing.finished - timing.first_token)


@pytest.mark.long
@needs_native
def test_beside_a_busy_process_no_less_than_one_thread_gives(default_model):
    """Within 10 %, in turns, on either core."""
    if len(os.sched_getaffinity(0)) != 2:
        pytest.skip("says something where two cores are")
    with LLM(str(default_model), max_model_len=512) as llm:
        adapting = llm.engine.runner.threads
        for core in sorted(os.sched_getaffinity(0)):
            with neighbour(core):
                ratios = []
                for _ in range(12):
                    both = rate(llm)
                    llm.engine.runner.threads = None
                    native.set_threads(1)
                    ratios.append(both / rate(llm))
                    native.set_threads(adapting.now)
                    llm.engine.runner.threads = adapting
            assert median(ratios) > 0.9, ratios
    native.set_threads(1)


@pytest.mark.long
@needs_native
def test_more_threads_than_cores_do_not_collapse():
    """Of the library alone, which takes as many as it is told: 8 threads at least 0.8 of 2, a decode step's products in turns."""
    weight, x, out = torch.randn(3072, 576).bfloat16(), torch.randn(1, 576), torch.empty(1, 3072)

    def products() -> float:
        begin = time.perf_counter()
        for _ in range(300):
            native.product(out, x, weight, 16)
        return 300 / (time.perf_counter() - begin)

    rates: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    for _ in range(15):
        for threads, found in rates.items():
            native.set_threads(threads)
            products()
            found.append(products())
    native.set_threads(1)
    medians = {threads: median(found) for threads, found in rates.items()}
    assert medians[8] >= 0.8 * medians[2] and medians[4] >= 0.8 * medians[2], medians
