"""What the processor and its memory are, for this process: cores, instruction sets, governor, NUMA nodes, caches, pages.

From the kernel's files, under a root that tests replace. Whatever cannot be read says what it needs. Called by cli/doctor/hardware.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flatout.doctor.facts import Fact, NotAvailable, Section, bytes_shown, fact
from flatout.hardware import allowed_cores, available_memory, cpu_isa, cpu_name

# as people call them -> the flag in /proc/cpuinfo
X86 = {
    "AVX2": "avx2",
    "AVX-VNNI": "avx_vnni",
    "AVX-512": "avx512f",
    "AVX-512 VNNI": "avx512_vnni",
    "AVX-512 BF16": "avx512_bf16",
    "AVX-512 FP16": "avx512_fp16",
    "AMX BF16": "amx_bf16",
    "AMX int8": "amx_int8",
}
ARM = {"NEON": "asimd", "dot product": "asimddp", "I8MM": "i8mm", "BF16": "bf16", "SVE": "sve", "SVE2": "sve2"}
SLOW_GOVERNORS = ("powersave", "conservative")
CPUS = "sys/devices/system/cpu"


def cpu(root: Path = Path("/")) -> Section:
    isa = cpu_isa(root)
    kinds = ARM if isa & set(ARM.values()) and not isa & set(X86.values()) else X86
    allowed = _affinity()
    return Section(
        "cpu",
        "CPU",
        [
            fact("name", "name", lambda: (name := cpu_name(root), name)),
            fact("virtual_machine", "virtual machine", lambda: _virtual(root)),
            fact("cores_allowed", "cores allowed", lambda: _cores(root, allowed)),
            fact("cores_physical", "physical cores", lambda: _physical(root, allowed)),
            fact("isa", "instruction sets", lambda: _isa(root, {n: f for n, f in kinds.items() if f in isa})),
            fact("isa_lacking", "without", lambda: _isa(root, {n: f for n, f in kinds.items() if f not in isa})),
            fact("governor", "governor", lambda: _governor(root, allowed)),
            fact("clock_mhz", "clock now", lambda: _clock(root, allowed)),
            fact("numa_nodes", "NUMA nodes", lambda: _nodes(root, allowed)),
            *_caches(root, allowed),
            fact("memory_total_bytes", "memory", lambda: _meminfo(root, "MemTotal")),
            fact("memory_allowed_bytes", "free for this process", lambda: (n := available_memory(root), bytes_shown(n))),
            fact("swap_used_bytes", "swap in use", lambda: _swap(root)),
            fact("transparent_hugepages", "transparent hugepages", lambda: _hugepages(root)),
            fact("load_1min", "load, last minute", lambda: _load(root, allowed)),
        ],
    )


def _read(root: Path, path: str) -> str:
    """NotAvailable, naming the file, where this system does not have it or says nothing in it."""
    try:
        text = (root / path).read_text().strip()
    except OSError:
        text = ""
    if not text:
        raise NotAvailable(f"/{path}, which this system does not show")
    return text


def _affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _ids(text: str) -> list[int]:
    """ "0-3,8" as numbers."""
    made: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        made += range(int(first), int(last or first) + 1)
    return made


def _runs(ids: Iterable[int]) -> str:
    """The other way round."""
    made: list[list[int]] = []
    for i in sorted(ids):
        if made and made[-1][-1] == i - 1:
            made[-1].append(i)
        else:
            made.append([i])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in made)


def _virtual(root: Path) -> tuple[bool, str]:
    flags = next((line for line in _read(root, "proc/cpuinfo").splitlines() if line.startswith("flags")), None)
    if flags is None:
        raise NotAvailable("a flags line in /proc/cpuinfo, which only x86 has")
    virtual = "hypervisor" in flags.split()
    return virtual, "yes: others may use the same cores and memory unseen" if virtual else "no"


def _cores(root: Path, allowed: list[int]) -> tuple[int, str]:
    cores = allowed_cores(root)
    said = f"{cores} (affinity: CPU {_runs(allowed)}"
    if cores < len(allowed):
        said += "; a cgroup's quota allows no more time"
    with suppress(NotAvailable):  # how many there are is told where it is known
        said += f"; of {len(_ids(_read(root, f'{CPUS}/online')))} in the machine"
    return cores, said + ")"


def _physical(root: Path, allowed: list[int]) -> tuple[int, str]:
    siblings = {_read(root, f"{CPUS}/cpu{i}/topology/thread_siblings_list") for i in allowed}
    threads = max(len(_ids(s)) for s in siblings)
    return len(siblings), f"{len(siblings)} of {threads} thread{'s' * (threads > 1)} each"


def _isa(root: Path, found: dict[str, str]) -> tuple[list[str], str]:
    _read(root, "proc/cpuinfo")
    return list(found.values()), ", ".join(found) or "none"


def _governor(root: Path, allowed: list[int]) -> tuple[str, str, str]:
    if not (root / f"{CPUS}/cpu{allowed[0]}/cpufreq").is_dir():
        raise NotAvailable(f"cpufreq in /{CPUS}/cpu{allowed[0]}, which this system does not show")
    names = sorted({_read(root, f"{CPUS}/cpu{i}/cpufreq/scaling_governor") for i in allowed})
    said = ", ".join(names)
    slow = any(name in SLOW_GOVERNORS for name in names)
    return said, said, "the clock may stay low: cpupower frequency-set -g performance" if slow else ""


def _clock(root: Path, allowed: list[int]) -> tuple[float, str]:
    try:
        now = [int(_read(root, f"{CPUS}/cpu{i}/cpufreq/scaling_cur_freq")) / 1e3 for i in allowed]
        most = max(int(_read(root, f"{CPUS}/cpu{i}/cpufreq/cpuinfo_max_freq")) / 1e3 for i in allowed)
        return max(now), f"{min(now):,.0f}-{max(now):,.0f} MHz of {most:,.0f}"
    except NotAvailable:
        lines = [line.split(":") for line in _read(root, "proc/cpuinfo").splitlines() if line.startswith("cpu MHz")]
        if not lines:
            raise
        return (mhz := max(float(value) for _, value in lines)), f"{mhz:,.0f} MHz, as the kernel has it"


def _nodes(root: Path, allowed: list[int]) -> tuple[int, str, str]:
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if not folders:
        raise NotAvailable("/sys/devices/system/node, which this system does not show")
    cpus = {f.name.removeprefix("node"): set(_ids(_read(root, f"sys/devices/system/node/{f.name}/cpulist"))) for f in folders}
    ours = [node for node, ids in cpus.items() if ids & set(allowed)]
    shown = "; ".join(f"node {node}: CPU {_runs(ids) or 'none'}" for node, ids in cpus.items())
    several = len(ours) > 1
    return len(cpus), f"{len(cpus)} ({shown})", "this process runs on several: numactl --cpunodebind may help" if several else ""


def _caches(root: Path, allowed: list[int]) -> list[Fact]:
    made = []
    for level, kind, name in ((1, "Data", "L1 data"), (2, "Unified", "L2"), (3, "Unified", "L3")):
        key = f"cache_l{level}_bytes"
        made.append(fact(key, f"{name} cache", lambda level=level, kind=kind: _cache(root, allowed, level, kind)))  # type: ignore[misc]
    return made


def _cache(root: Path, allowed: list[int], level: int, kind: str) -> tuple[int, str]:
    base = f"{CPUS}/cpu{allowed[0]}/cache"
    for folder in sorted((root / base).glob("index[0-9]*")):
        where = f"{base}/{folder.name}"
        if int(_read(root, f"{where}/level")) == level and _read(root, f"{where}/type") in (kind, "Unified"):
            number, unit = _read(root, f"{where}/size")[:-1], _read(root, f"{where}/size")[-1]
            size = int(number) << {"K": 10, "M": 20, "G": 30}[unit]
            sharing = len(_ids(_read(root, f"{where}/shared_cpu_list")))
            return size, f"{bytes_shown(size)}, {'of each CPU' if sharing == 1 else f'shared by {sharing} CPUs'}"
    raise NotAvailable(f"/{base}, where this system shows no cache of level {level}")


def _meminfo(root: Path, key: str) -> tuple[int, str]:
    for line in _read(root, "proc/meminfo").splitlines():
        if line.startswith(f"{key}:"):
            return (size := int(line.split()[1]) * 1024), bytes_shown(size)
    raise NotAvailable(f"{key} in /proc/meminfo")


def _swap(root: Path) -> tuple[int, str, str]:
    total, free = _meminfo(root, "SwapTotal")[0], _meminfo(root, "SwapFree")[0]
    used = total - free
    return (
        used,
        f"{bytes_shown(used)} of {bytes_shown(total)}" if total else "no swap",
        "memory was short: what is in swap is read from a disk" if used else "",
    )


def _hugepages(root: Path) -> tuple[str, str]:
    text = _read(root, "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = next((word[1:-1] for word in text.split() if word.startswith("[")), text)
    return chosen, chosen


def _load(root: Path, allowed: list[int]) -> tuple[float, str, str]:
    load = float(_read(root, "proc/loadavg").split()[0])
    busy = load > 0.5 * len(allowed)
    said = "of the whole machine" if len(allowed) < (os.cpu_count() or 1) else "threads that ran or wanted to"
    return load, f"{load:.2f} ({said})", "others use the cores: what is measured now is too low" if busy else ""
