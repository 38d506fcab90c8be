"""What the NVIDIA GPUs are and how they run now: by NVML, and by torch what only it knows. What cannot be had says what it needs.

Nothing is set, nothing is measured. Called by cli/doctor/hardware.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from flatout.doctor.facts import Fact, NotAvailable, Section, bytes_shown, fact
from flatout.doctor.nvml import Nvml

THROTTLES = {  # nvmlClocksEventReasons; whether it costs speed that could be had
    0x1: ("idle", False),
    0x2: ("application clocks set", True),
    0x4: ("power cap", True),
    0x8: ("hardware slowdown", True),
    0x10: ("sync boost", True),
    0x20: ("heat (driver)", True),
    0x40: ("heat (hardware)", True),
    0x80: ("power brake", True),
    0x100: ("display clocks", True),
}
GRAPHICS, SM, MEMORY = 0, 1, 2  # nvmlClockType_t
NVLINKS = 18  # most of one GPU
P2P_NVLINK = 2  # nvmlGpuP2PCapsIndex_t
UNCORRECTED, VOLATILE = 1, 0
OURS = (8, 0)  # the capability that flatout's kernels are written for
GENERATIONS = "PCIe {} x{}"


def gpus(torch: Any, library: Any = None) -> list[Section]:
    """A section a GPU; one that says why where there is none. torch: the module; library: NVML's, for tests."""
    try:
        with Nvml(library) as nvml:
            handles = nvml.devices()
            seen = _seen(torch)
            sections = [_section(nvml, handles, index, seen, torch) for index in range(len(handles))]
    except NotAvailable as lacking:
        sections = [_by_torch(torch, index, str(lacking)) for index in range(torch.cuda.device_count())]
        if not sections:
            return [Section("gpu_0", "GPU", [Fact("name", "device", needs=str(lacking))])]
    return sections or [Section("gpu_0", "GPU", [Fact("name", "device", needs="an NVIDIA GPU; its driver is here and finds none")])]


def _section(nvml: Nvml, handles: list[Any], index: int, seen: dict[str, int], torch: Any) -> Section:
    device = handles[index]

    def uuid() -> str:
        return nvml.text("nvmlDeviceGetUUID", device)

    def name() -> tuple[str, str]:
        return (n := nvml.text("nvmlDeviceGetName", device)), n

    def in_torch() -> tuple[int | None, str, str]:
        number = seen.get(uuid().removeprefix("GPU-"))
        if number is not None:
            return number, f"cuda:{number}", ""
        hidden = "CUDA_VISIBLE_DEVICES hides it" if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
        return None, "not seen", hidden

    def capability() -> tuple[str, str, str]:
        major, minor = nvml.numbers("nvmlDeviceGetCudaComputeCapability", device, count=2, kind=ctypes.c_int)
        return _capability((major, minor), torch)

    def sms() -> tuple[int, str]:
        number = seen.get(uuid().removeprefix("GPU-"))
        if number is None:
            raise NotAvailable("torch to see this GPU")
        return (count := torch.cuda.get_device_properties(number).multi_processor_count), str(count)

    def memory() -> tuple[int, str]:
        m = nvml.memory(device)
        return m.total, bytes_shown(m.total)

    def memory_used() -> tuple[int, str]:
        m = nvml.memory(device)
        return m.used, f"{bytes_shown(m.used)} ({m.used / m.total:.0%})"

    def pcie(which: str) -> tuple[str, str]:
        generation, width = (nvml.number(f"nvmlDeviceGet{which}PcieLink{part}", device) for part in ("Generation", "Width"))
        return (link := GENERATIONS.format(generation, width)), link

    def pcie_now() -> tuple[str, str, str]:
        now, most = (
            [nvml.number(f"nvmlDeviceGet{which}PcieLink{part}", device) for part in ("Generation", "Width")] for which in ("Curr", "Max")
        )
        link = GENERATIONS.format(*now)
        if now[1] < most[1]:
            return link, link, f"narrower than its {most[1]} lanes: copies take {most[1] / now[1]:.0f} times as long; check slot and riser"
        slow = now[0] < most[0]  # an idle link is slowed to save power
        return link, f"{link} (an idle link is slowed; look again under load)" if slow else link, ""

    def nvlinks() -> tuple[int, str]:
        active = 0
        for link in range(NVLINKS):
            try:
                active += nvml.number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(link))
            except NotAvailable:
                if link == 0:
                    raise
                break  # it has no more
        return active, f"{active} active"

    def peers() -> tuple[list[int], str]:
        others = [i for i in range(len(handles)) if i != index]
        if not others:
            return [], "none: the only GPU"
        linked = [i for i in others if nvml.number("nvmlDeviceGetP2PStatus", device, handles[i], ctypes.c_int(P2P_NVLINK)) == 0]
        return linked, f"GPU {', '.join(map(str, linked))}" if linked else "none"

    def clock(kind: int) -> Callable[[], tuple[int, str]]:
        def read() -> tuple[int, str]:
            now = nvml.number("nvmlDeviceGetClockInfo", device, ctypes.c_int(kind))
            most = nvml.number("nvmlDeviceGetMaxClockInfo", device, ctypes.c_int(kind))
            return now, f"{now:,} MHz of {most:,}"

        return read

    def throttle() -> tuple[list[str], str, str]:
        bits = nvml.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong)
        reasons = [name for bit, (name, _) in THROTTLES.items() if bits & bit]
        bad = [name for bit, (name, costs) in THROTTLES.items() if bits & bit and costs]
        return reasons, ", ".join(reasons) or "none", f"slowed by {', '.join(bad)}" if bad else ""

    def ecc() -> tuple[bool, str]:
        now, pending = nvml.numbers("nvmlDeviceGetEccMode", device, count=2)
        return bool(now), ("on" if now else "off") + (f", {'on' if pending else 'off'} after a restart" if now != pending else "")

    def errors() -> tuple[int, str, str]:
        kinds = ctypes.c_int(UNCORRECTED), ctypes.c_int(VOLATILE)
        count = nvml.number("nvmlDeviceGetTotalEccErrors", device, *kinds, kind=ctypes.c_ulonglong)
        return count, f"{count:,} since the driver was loaded", "memory fails: have the GPU replaced" if count else ""

    def power() -> tuple[float, str]:
        now = nvml.number("nvmlDeviceGetPowerUsage", device) / 1e3
        limit = nvml.number("nvmlDeviceGetEnforcedPowerLimit", device) / 1e3
        return now, f"{now:.0f} W of {limit:.0f}"

    def energy() -> tuple[float, str]:
        joules = nvml.number("nvmlDeviceGetTotalEnergyConsumption", device, kind=ctypes.c_ulonglong) / 1e3
        return joules, f"{joules / 3.6e6:,.1f} kWh since the driver was loaded"

    def heat() -> tuple[int, str]:
        return (celsius := nvml.number("nvmlDeviceGetTemperature", device, ctypes.c_int(0))), f"{celsius} °C"

    def node() -> tuple[int, str]:
        return (number := nvml.number("nvmlDeviceGetNumaNodeId", device)), str(number)

    return Section(
        f"gpu_{index}",
        f"GPU {index}",
        [
            fact("name", "name", name),
            fact("torch_device", "in torch", in_torch),
            fact("capability", "compute capability", capability),
            fact("sms", "SMs", sms),
            fact("memory_total_bytes", "memory", memory),
            fact("memory_used_bytes", "memory in use", memory_used),
            fact("driver", "driver", lambda: ((v := nvml.text("nvmlSystemGetDriverVersion")), v)),
            fact("pcie_now", "PCIe link now", pcie_now),
            fact("pcie_max", "PCIe link at most", lambda: pcie("Max")),
            fact("nvlinks_active", "NVLinks", nvlinks),
            fact("nvlink_peers", "NVLink to", peers),
            fact("numa_node", "NUMA node", node),
            fact("sm_clock_mhz", "SM clock now", clock(SM)),
            fact("memory_clock_mhz", "memory clock now", clock(MEMORY)),
            fact("throttle_reasons", "clocks held back by", throttle),
            fact("ecc", "ECC", ecc),
            fact("ecc_uncorrected_errors", "uncorrected errors", errors),
            fact("power_watts", "power", power),
            fact("energy_joules", "energy", energy),
            fact("temperature_celsius", "temperature", heat),
        ],
    )


def _capability(capability: tuple[int, int], torch: Any) -> tuple[str, str, str]:
    shown = f"{capability[0]}.{capability[1]}"
    built = torch.cuda.get_arch_list()
    ours = {int(a.split("_")[1].rstrip("abcdef")) // 10 for a in built if a.startswith(("sm_", "compute_"))}
    if built and capability[0] not in ours and not any(a.startswith("compute_") for a in built):
        return shown, shown, f"this torch has kernels for {', '.join(built)} alone; install one built for this GPU"
    if capability < OURS:
        return shown, shown, f"flatout's kernels are written for {OURS[0]}.{OURS[1]} and later: this GPU runs by torch's own"
    return shown, shown, ""


def _seen(torch: Any) -> dict[str, int]:
    """torch's number of each GPU that it sees, by UUID without "GPU-"."""
    return {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}


def _by_torch(torch: Any, index: int, lacking: str) -> Section:
    """What is known without NVML."""
    p = torch.cuda.get_device_properties(index)
    return Section(
        f"gpu_{index}",
        f"GPU {index}",
        [
            fact("name", "name", lambda: (p.name, p.name)),
            fact("torch_device", "in torch", lambda: (index, f"cuda:{index}")),
            fact("capability", "compute capability", lambda: _capability((p.major, p.minor), torch)),
            fact("sms", "SMs", lambda: (p.multi_processor_count, str(p.multi_processor_count))),
            fact("memory_total_bytes", "memory", lambda: (p.total_memory, bytes_shown(p.total_memory))),
            Fact("driver", "driver, links, clocks, ECC, power", needs=lacking),
        ],
    )
