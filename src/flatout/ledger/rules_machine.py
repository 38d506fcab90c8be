"""Rules over the machine and the process: cores, neighbours, page faults, and the start.

What they see is vitals.py's; where the system does not tell, they are silent. See rules.py. No I/O.
"""

from __future__ import annotations

from flatout.ledger.rules import SPEED, START, Found, Rule
from flatout.ledger.signals import Signals, count, gained, in_words, percent, seconds

BUSY = 0.5  # of the time with load: less, and cores are not what is lacking
FOREIGN, WAIT = 0.2, 0.15  # of the cores, and of the time for which threads wanted one
FREE = 0.4  # of a core
FAULTS = 20.0  # a second: each may wait for a disk, 0.1 to 10 ms
FAULTY = 0.03
COLD = 0.3  # seconds
YOUNG = 600.0  # seconds since the start, after which the start is no news
DISK, LOAD = 0.3, 0.5  # of the weights' bytes came from the disk; seconds of loading


def _unused(s: Signals) -> Found | None:
    threads, cores = s.settings.get("threads", 0), s.cores
    if not s.steady or s.settings.get("device") != "cpu" or not threads or threads >= cores or s.device < BUSY:
        return None
    free = cores - threads - (s.foreign or 0.0) * cores + _front_cores(s)
    if free < FREE:
        return None
    factor = gained(s.device * free / (threads + free))
    return Found(
        f"{threads} of {cores:.0f} cores compute: {free:.1f} are free while the device is busy for {s.device:.0%} of the time with load.",
        (count("threads", threads), count("cores that this process may use", cores), percent("device busy", s.device)),
        factor,
        SPEED,
        remedy=f"--threads {cores:.0f}, now {threads}",
    )


def _front_cores(s: Signals) -> float:
    """Cores that the server itself takes beside the threads that compute: none of them is free."""
    return -min(0.5, s.got("front.cpu_s") / s.seconds) if s.seconds else 0.0


def _over(s: Signals) -> Found | None:
    threads, cores = s.settings.get("threads", 0), s.cores
    if not s.steady or s.settings.get("device") != "cpu" or not cores or threads <= cores:
        return None
    return Found(
        f"{threads} threads compute on {cores:.0f} cores: they wait for each other's core for {s.core_wait:.0%} of their time.",
        (count("threads", threads), count("cores that this process may use", cores), percent("waiting for a core", s.core_wait)),
        max(gained(s.core_wait), min(2.0, threads / cores)),
        SPEED,
        remedy=f"--threads {cores:.0f}, now {threads}",
    )


def _neighbour(s: Signals) -> Found | None:
    foreign = s.foreign
    if not s.steady or foreign is None or foreign < FOREIGN or s.core_wait < WAIT:
        return None
    return Found(
        f"Other processes take {foreign:.0%} of the cores: the engine's threads wait for one for {s.core_wait:.0%} of their time.",
        (
            percent("of the cores, used by others", foreign),
            percent("waiting for a core", s.core_wait),
            count("cores that this process may use", s.cores),
        ),
        gained(min(foreign, s.core_wait)),
        SPEED,
    )


def _faults(s: Signals) -> Found | None:
    rate, swapped = (s.got(n) / s.seconds if s.seconds else 0.0 for n in ("engine.major_faults", "machine.swapped_in"))
    if not s.steady or rate < FAULTS:
        return None
    stalled = s.of_load(sum(s.account.stalled.values()))
    return Found(
        f"The engine waits for {rate:.0f} pages a second to come from the disk{' (swap)' if swapped > FAULTS else ''}: its memory does not stay in memory.",
        (
            count("major page faults", rate, "/s"),
            count("pages swapped in, by anybody", swapped, "/s"),
            percent("of the time with load, in stalled steps", stalled),
        ),
        gained(max(stalled, min(0.5, FAULTY + rate * 1e-3))),
        SPEED,
    )


def _cold_load(s: Signals) -> Found | None:
    loaded, weights = s.settings.get("start", {}).get("weights", 0.0), s.settings.get("weight_bytes", 0)
    read = s.at_start.get("disk_read", 0.0)
    if not 0 < s.uptime < YOUNG or not weights or loaded < LOAD or read < DISK * weights:
        return None
    return Found(
        f"The start read {read / 1e6:,.0f} MB from the disk: loading took {in_words(loaded)}, at {read / max(loaded, 1e-9) / 1e9:.2g} GB/s.",
        (
            count("from the disk", read / 1e6, "MB"),
            seconds("loading", loaded),
            *(seconds(f"start: {name}", value) for name, value in s.settings["start"].items() if name != "weights"),
        ),
        gained(loaded / (s.uptime + loaded)),
        START,
    )


def _cold_request(s: Signals) -> Found | None:
    cold = s.gauges.get("cold_s", 0.0)
    if cold < COLD or not 0 < s.uptime < YOUNG:
        return None
    return Found(
        f"First steps of a shape took {in_words(cold)} longer than the next ones: something was compiled or measured while requests waited.",
        (seconds("lost to first steps", cold), seconds("since the start", s.uptime)),
        gained(min(0.9, cold / max(s.uptime, cold))),
        START,
    )


RULES = (
    Rule(
        "threads unused",
        ("threads", "cores", "account.decode_s", "machine.busy_s"),
        f"the device is busy for {BUSY:.0%} and {FREE} of a core is free",
        _unused,
        "more --threads",
        "the other cores are meant for other work",
    ),
    Rule(
        "threads over cores",
        ("threads", "cores (affinity and cgroup)", "engine.core_wait_s"),
        "any more than cores: threads of a step meet at its end, so one without a core delays all",
        _over,
        "fewer --threads",
        "the cores were counted wrongly: see flatout doctor hardware",
        instead_of=("noisy neighbour", "stalls"),
    ),
    Rule(
        "noisy neighbour",
        ("machine.busy_s", "engine.core_wait_s", "engine.cpu_s"),
        f"{FOREIGN:.0%} of the cores are others' and threads wait {WAIT:.0%}; clients on the machine take 5 to 15 %",
        _neighbour,
        "move the other work away, or give this server cores of its own (taskset, cpuset)",
        "the other work is the clients themselves: measure from another machine",
    ),
    Rule(
        "page faults",
        ("engine.major_faults", "machine.swapped_in"),
        f"{FAULTS:.0f} a second for as long as the window; a warm process has none",
        _faults,
        "more memory or less in it: a smaller KV pool (--kv-cache-memory-bytes), --quantization int8 or int4; no swap",
        "it has just started: a mapped file is read as it is touched",
        instead_of=("stalls",),
    ),
    Rule(
        "cold load",
        ("start phases", "engine.disk_read at the start"),
        f"{DISK:.0%} of the weights' bytes from the disk and {LOAD:g} s of loading, in the first {YOUNG / 60:.0f} minutes",
        _cold_load,
        "keep the file in the page cache (enough free memory; read it once before: cat FILE > /dev/null) or on a faster disk",
        "starts are rare: it is lost once",
    ),
    Rule(
        "cold first requests",
        ("cold_s: Account.cold since the start (ledger/usual.py)",),
        f"{COLD:g} s in steps that were the first of their shape, over five times the next one",
        _cold_request,
        "send a request of each usual size before clients come; keep the cache of measurements (FLATOUT_CACHE) between starts",
        "it is lost once",
        instead_of=("stalls", "long prompts stall others"),
    ),
)
