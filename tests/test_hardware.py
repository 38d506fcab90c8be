"""hardware.py: cores and memory from fake kernel files, the ceilings' cache, and a real measurement on a small working set."""

import json
import os

import pytest

from flatout import hardware
from flatout.hardware import Bandwidth, Ceilings, Hardware, allowed_cores, available_memory, ceilings, cpu_isa, cpu_name, last_cache_bytes

GIB = 1 << 30
CPU = Hardware("cpu", "test CPU", None, 8 * GIB, 1, False)
MEASURED = Ceilings(
    (Bandwidth(1 << 20, 5e9, 4e9, 6e9, "row sums"), Bandwidth(GIB, 2e9, 1e9, 2.1e9, "row sums")), Bandwidth(GIB, 1e9, 1e9, 1e9, "copy")
)


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "20000 100000"}, 1),  # a fifth of a core still runs one thread
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),  # mounted as the container's root
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000"}, 8),  # more than there are
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/d\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_cores_obey_affinity_and_quota(tmp_path, eight_cores, files, cores):
    assert allowed_cores(tree(tmp_path, files)) == cores


def test_affinity_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert allowed_cores(tmp_path) == 2


def test_memory_is_the_least_of_system_and_cgroups(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {16 * GIB // 1024} kB\n"})
    assert available_memory(root) == 16 * GIB
    tree(
        root,
        {
            "proc/self/cgroup": "4:memory:/job\n0::/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
        },
    )
    assert available_memory(root) == 6 * GIB
    tree(root, {"sys/fs/cgroup/job/memory.max": str(2 * GIB), "sys/fs/cgroup/job/memory.current": str(GIB)})
    assert available_memory(root) == GIB


def test_cpu_flags_and_name(tmp_path):
    x86 = tree(tmp_path / "x86", {"proc/cpuinfo": "model name\t: Fast CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512_bf16 ht\n"})
    assert cpu_name(x86) == "Fast CPU @ 2 GHz"
    assert cpu_isa(x86) == {"avx2", "avx512_bf16"}
    arm = tree(tmp_path / "arm", {"proc/cpuinfo": "Features\t: fp asimd bf16 i8mm\n"})
    assert cpu_isa(arm) == {"asimd", "bf16", "i8mm"}
    assert cpu_isa(tmp_path) == frozenset()


def test_fingerprint_names_the_machine():
    assert CPU.fingerprint() == Hardware("cpu", "test CPU", None, 4 * GIB, 1, False).fingerprint()  # free memory is no fact about it
    assert CPU.fingerprint() != Hardware("cpu", "test CPU", None, 8 * GIB, 2, False).fingerprint()


def test_ceilings_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(hardware, "measure", lambda machine: calls.append(machine) or MEASURED)
    assert ceilings(CPU) == MEASURED
    assert ceilings(CPU) == MEASURED
    assert len(calls) == 1
    other = Hardware("cpu", "another", None, 8 * GIB, 1, False)
    ceilings(other)
    assert len(calls) == 2
    assert len(json.loads((tmp_path / "hardware.json").read_text())) == 2  # a shared home keeps both machines
    ceilings(CPU, refresh=True)
    assert len(calls) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["hardware.json"]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        '{"KEY": {}}',
        '{"KEY": {"read": [{"x": 1}], "copy": {}}}',
        '{"KEY": {"read": [], "copy": {}, "measured": 1}}',
        '{"KEY": 3}',
    ],
)
def test_a_damaged_cache_is_measured_anew(tmp_path, monkeypatch, damage):
    import torch

    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "measure", lambda machine: MEASURED)
    (tmp_path / "hardware.json").write_text(damage.replace("KEY", f"{CPU.fingerprint()} torch {torch.__version__}"))
    assert ceilings(CPU) == MEASURED
    monkeypatch.setattr(hardware, "measure", lambda machine: pytest.fail("was not kept"))
    assert ceilings(CPU) == MEASURED


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(hardware, "measure", lambda machine: MEASURED)
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert ceilings(CPU) == MEASURED


def test_an_unsettled_measurement_serves_a_while(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    now = [1000.0]
    monkeypatch.setattr(hardware.time, "time", lambda: now[0])

    def noisy(median):
        rate = Bandwidth(GIB, median, 1e9, 9e9, "row sums")
        return Ceilings((rate,), rate, now[0])

    medians = iter([2e9, 1e9, 8.9e9])
    monkeypatch.setattr(hardware, "measure", lambda machine: noisy(next(medians)))
    seen = []
    for now[0] in (1000, 1100, 2000, 3000, 4000, 9000):
        seen.append(ceilings(CPU).read[0].median)
    # kept for ten minutes; 1e9 came later but is no ceiling; 8.9e9 is close to its best run and stays
    assert seen == [2e9, 2e9, 2e9, 8.9e9, 8.9e9, 8.9e9]


def test_the_working_set_picks_the_bandwidth():
    assert MEASURED.reading(1000).median == 5e9
    assert MEASURED.reading(2 << 20).median == 2e9
    assert MEASURED.reading(9 * GIB).median == 2e9


def test_a_real_measurement(monkeypatch):
    import torch

    monkeypatch.setattr(hardware, "CPU_SETS", (4 << 20, 16 << 20))
    threads = torch.get_num_threads()
    measured = hardware.measure(CPU)
    assert [b.working_set for b in measured.read] == [4 << 20, 16 << 20]
    for bandwidth in (*measured.read, measured.copy):
        assert 1e8 < bandwidth.low <= bandwidth.median <= bandwidth.high < 1e13
    assert torch.get_num_threads() == threads


def test_the_largest_cache_of_a_core(tmp_path):
    first = min(os.sched_getaffinity(0))
    assert last_cache_bytes(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "30M", "odd")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{first}/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 30 << 20
