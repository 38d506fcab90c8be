"""Hardware: what this machine is (detect) and what it can give (ceilings, measured once and kept). Plain data.

Nothing here decides anything: config.resolve, runner/memory.py and the ledger read it. The measuring code loads torch when it is called,
never at import. Called by engine.py, bench/ and cli/.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flatout.config import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

# the instruction sets that a kernel may ask for, as the kernel spells them in /proc/cpuinfo
X86 = {"avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"}
AMX = {"amx_tile", "amx_bf16", "amx_int8"}
ARM = {"asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16"}
ISA = frozenset(X86 | AMX | ARM)
BFLOAT16_ISA = frozenset(("avx512_bf16", "amx_bf16", "bf16", "svebf16"))


@dataclass(frozen=True)
class Hardware:
    """One machine as this process sees it."""

    device: str  # "cuda" | "cpu": where a model would run
    name: str  # of the GPU, or of the CPU
    capability: tuple[int, int] | None  # CUDA compute capability
    memory_bytes: int  # the GPU's memory in all; on the CPU the RAM that this process may still take
    cpu_count: int  # cores this process may really use: affinity and cgroup quota
    has_bfloat16: bool  # arithmetic, not emulation
    cpu_name: str = ""
    isa: frozenset[str] = frozenset()  # those of ISA that the CPU has

    def fingerprint(self) -> str:
        """Twelve hex digits that name this kind of machine: measured facts are kept under it."""
        facts = (self.device, self.name, self.capability, self.cpu_count, self.cpu_name, sorted(self.isa))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def detect(device: str = "auto") -> Hardware:
    """The machine for --device auto, cuda or cpu. Without a CUDA device it is the CPU, whatever was asked: config.resolve judges."""
    import torch

    isa = cpu_isa()
    cpu, cores = cpu_name(), allowed_cores()
    if device != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        capability = (gpu.major, gpu.minor)
        return Hardware("cuda", gpu.name, capability, gpu.total_memory, cores, capability >= (8, 0), cpu, isa)
    return Hardware("cpu", cpu, None, available_memory(), cores, bool(isa & BFLOAT16_ISA), cpu, isa)


# -- the CPU: the kernel's files, under a root that tests replace ------------------------------------------------------


def cpu_name(root: Path = Path("/")) -> str:
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_isa(root: Path = Path("/")) -> frozenset[str]:
    """The entries of ISA among the CPU's flags; empty where the system does not tell."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return ISA & frozenset(value.split())
    return frozenset()


def allowed_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use at once: its affinity, or less where a cgroup grants less time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [int(q) / int(period) for q, period in _cpu_quotas(root) if int(q) > 0 and int(period) > 0]
    return max(1, int(min([cores, *quotas])))


def _cpu_quotas(root: Path) -> Iterator[tuple[str, str]]:
    """(quota, period) in microseconds of each cgroup above this process that has a limit."""
    for folder in _cgroups(root, ""):
        fields = _text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            yield fields[0], fields[1]
    for folder in _cgroups(root, "cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota and period:
            yield quota, period


def last_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the largest cache that the first of this process's cores may use; 0 where the system does not tell."""
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sizes = [_text(place / "size") for place in (root / f"sys/devices/system/cpu/cpu{first}/cache").glob("index*")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[:-1].isdigit() and size[-1] in units), default=0)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process can still take without swapping: the system's, or less where a cgroup allows less."""
    rooms = [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    if not rooms and hasattr(os, "sysconf"):
        rooms = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for controller, limit_file, usage_file, cache_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroups(root, controller):
            limit, usage = _text(folder / limit_file), _text(folder / usage_file)
            if limit.isdigit() and usage.isdigit():
                # file pages that nobody uses count as usage but are given back on demand
                stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
                rooms.append(int(limit) - int(usage) + int(stat.get(cache_key, 0)))
    return max(0, min(rooms))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of those above it; controller "" is version 2."""
    base = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, names, path = line.split(":", 2)
        if controller not in names.split(",") or (not controller and number != "0"):
            continue
        mounts = (base, base / "unified") if not controller else (base / names, base / controller)
        mount = next((m for m in mounts if m.is_dir()), None)
        if mount is None:
            continue
        inside = Path(path.lstrip("/"))
        # a container often sees its own group mounted as the root: what does not exist is skipped
        yield from (mount / p for p in (inside, *inside.parents) if (mount / p).is_dir())


def _text(path: Path) -> str:
    """A small file of the kernel's, "" where this system does not have it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


# -- ceilings ----------------------------------------------------------------------------------------------------------

RUNS = 7
SETTLED = 0.8  # idle Xeon with 2 vCPU: median / best 0.85-0.99; with two foreign busy processes 0.7-0.9
RETRY_SECONDS = 600
CPU_SETS = (64 << 20, 256 << 20, 1 << 30)  # working sets read: what a large cache can hold, and what must come from DRAM
CUDA_SETS = (1 << 30,)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: the median of RUNS passes over a working set, with the slowest and the fastest."""

    working_set: int  # bytes
    median: float
    low: float
    high: float
    method: str

    @property
    def settled(self) -> bool:
        """The passes agree. Where the best is far over the median, others were using the memory, and it can give more than this."""
        return self.median >= SETTLED * self.high


@dataclass(frozen=True)
class Ceilings:
    """The most this machine gave: its memory, all allowed threads reading, and on a GPU its matrix units."""

    read: tuple[Bandwidth, ...]  # by working set, small to large
    copy: Bandwidth  # bytes read and bytes written, together
    measured: float = 0.0  # seconds since 1970
    matrix: float = 0.0  # 16-bit floating-point operations per second of a large matrix product; 0: not measured on this device

    def reading(self, working_set: int) -> Bandwidth:
        """The bandwidth that holds for reading this many bytes over and over: a cache may hold a small model."""
        return next((b for b in self.read if b.working_set >= working_set), self.read[-1])


def ceilings(hardware: Hardware, refresh: bool = False) -> Ceilings:
    """What memory allows here, from the cache or measured now (1-2 s, at most 1.2 GiB) and kept for the next time.

    A measurement that did not settle serves for RETRY_SECONDS. Of several the best counts: a ceiling is the most there was.
    """
    import torch

    before = kept_ceilings(hardware, torch.__version__)
    if before is not None and not refresh and (before.read[-1].settled or time.time() - before.measured < RETRY_SECONDS):
        return before
    best = measure(hardware) if before is None else _best(before, measure(hardware))
    keep_entry(cache_dir() / "hardware.json", f"{hardware.fingerprint()} torch {torch.__version__}", asdict(best), "bandwidth")
    return best


def kept_ceilings(hardware: Hardware, torch_version: str) -> Ceilings | None:
    """What ceilings() kept for this machine; None where nothing was measured yet."""
    return _entry(read_kept(cache_dir() / "hardware.json").get(f"{hardware.fingerprint()} torch {torch_version}"))


@dataclass(frozen=True)
class Rate:
    """One more thing that a machine gives, measured several times: a rate ("FLOP/s", "B/s") or, of which less is better, a time ("s")."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    method: str
    foreign_cores: float | None = None  # that other processes used meanwhile; None: unknown

    @property
    def settled(self) -> bool:
        """The runs agree, as Bandwidth's do."""
        return self.low >= SETTLED * self.median if self.unit == "s" else self.median >= SETTLED * self.high

    def better_than(self, other: Rate) -> bool:
        return self.median < other.median if self.unit == "s" else self.median > other.median


@dataclass(frozen=True)
class Rates:
    """Matrix products, copies between host and device, launches: what was measured, by name. doctor/measure.py measures it."""

    rates: tuple[Rate, ...]
    measured: float  # seconds since 1970


def kept_rates(hardware: Hardware, torch_version: str) -> Rates | None:
    """What keep_rates() kept for this machine; None where nothing was, or what another version wrote."""
    entry = read_kept(cache_dir() / "rates.json").get(f"{hardware.fingerprint()} torch {torch_version}")
    try:
        return Rates(tuple(Rate(**rate) for rate in entry["rates"]), float(entry["measured"])) if entry else None
    except (KeyError, TypeError, ValueError):
        return None


def keep_rates(hardware: Hardware, torch_version: str, rates: Rates) -> None:
    keep_entry(cache_dir() / "rates.json", f"{hardware.fingerprint()} torch {torch_version}", asdict(rates), "rates")


def _best(a: Ceilings, b: Ceilings) -> Ceilings:
    """Of two measurements of one machine, the larger medians. Working sets that differ (less memory was free) make them two stories: the later one."""
    if [x.working_set for x in a.read] != [x.working_set for x in b.read]:
        return b
    pairs = [*zip(a.read, b.read), (a.copy, b.copy)]
    *read, copy = (max(pair, key=lambda bandwidth: bandwidth.median) for pair in pairs)
    return Ceilings(tuple(read), copy, b.measured, max(a.matrix, b.matrix))


def _entry(entry: Any) -> Ceilings | None:
    """What the cache holds for a machine; None for a damaged entry or another version's, which is measured anew and replaced."""
    try:
        read = tuple(Bandwidth(**b) for b in entry["read"])
        return Ceilings(read, Bandwidth(**entry["copy"]), float(entry["measured"]), float(entry["matrix"])) if read else None
    except (KeyError, TypeError, ValueError):
        return None


def read_kept(path: Path) -> dict[str, Any]:
    """The cache file; a damaged one counts as empty, since everything in it can be measured again."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep_entry(path: Path, key: str, entry: dict[str, Any], what: str) -> None:
    """Put an entry into a cache file beside those of other machines."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**read_kept(path), key: entry}, indent=1))
        temporary.replace(path)
    except OSError as error:
        warnings.warn(f"the measured {what} cannot be kept ({error}); it will be measured again each time", stacklevel=3)


def measure(hardware: Hardware) -> Ceilings:
    """Read and copy bandwidth of the device's memory, now. On the CPU with every core this process may use."""
    import torch

    cuda = hardware.device == "cuda"
    free = torch.cuda.mem_get_info()[0] if cuda else available_memory()
    sets = [s for s in (CUDA_SETS if cuda else CPU_SETS) if s <= free // 2] or [max(free // 4, 1 << 20) & ~0xFFFFF]
    threads = torch.get_num_threads()
    torch.set_num_threads(hardware.cpu_count)
    try:
        buffer = torch.ones(sets[-1] // 4, dtype=torch.float32, device=hardware.device)
        read = tuple(_read(buffer[: size // 4]) for size in sets)
        half = buffer.numel() // 2
        copy = _timed("copy", sets[-1], lambda: buffer[:half].copy_(buffer[half : 2 * half]), cuda)
    finally:
        torch.set_num_threads(threads)
    return Ceilings(read, copy, time.time(), _matrix_rate() if cuda else 0.0)


def _matrix_rate() -> float:
    """Of a product of two bfloat16 matrices of 8192 rows and columns on the GPU."""
    import torch

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))  # zeros would run faster than any real data
    product = a @ b
    return 2 * 8192**3 * _timed("product", 1, lambda: torch.mm(a, b, out=product), True).median


def _read(data: Tensor) -> Bandwidth:
    """The fastest read-only pass that torch has over float32 data; which one that is differs by machine.

    Xeon 2 vCPU, 1 GiB: matrix-vector 26 GB/s, as fast as a C loop with eight prefetched streams; sums 13 GB/s.
    """
    rows = data.view(-1, 4096)
    vector = data.new_ones(4096)
    size, cuda = data.numel() * 4, data.is_cuda
    passes: dict[str, Callable[[], object]] = {"matrix-vector": lambda: rows.mv(vector), "row sums": lambda: rows.sum(1)}
    if cuda:  # H200: 4.37 TB/s where float32 gives 4.3
        import torch

        halves, half_vector = data.view(torch.bfloat16).view(-1, 4096), data.new_ones(4096, dtype=torch.bfloat16)
        passes["matrix-vector, 16 bits"] = lambda: halves.mv(half_vector)
    best = max(passes, key=lambda name: _timed(name, size, passes[name], cuda, runs=2).high)
    return _timed(best, size, passes[best], cuda)


def _timed(method: str, size: int, run: Callable[[], object], cuda: bool, runs: int = RUNS) -> Bandwidth:
    rates = [size / each for each in timed(run, cuda, runs, 16 if cuda else 1)]  # so that the launch, tens of microseconds, does not count
    return Bandwidth(size, median(rates), min(rates), max(rates), method)


def timed(run: Callable[[], object], cuda: bool, runs: int = RUNS, repeats: int = 1) -> list[float]:
    """Seconds of one call, in each of so many runs of `repeats` calls, after a first call."""
    import torch

    run()
    seconds = []
    for _ in range(runs):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / repeats)
    return seconds
