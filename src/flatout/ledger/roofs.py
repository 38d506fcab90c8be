"""Roofs: the ceilings of a machine as the ledger uses them, of this one from what was measured and kept, of others from their data sheets.

Nothing is measured here (hardware.py, doctor/measure.py) and nothing predicted (table.py). Called by runner/build.py, doctor/ and plan/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version

from flatout.hardware import Ceilings, Hardware, Rates, kept_ceilings, kept_rates, last_cache_bytes
from flatout.ledger.table import Roof

MIB, TERA = 1 << 20, 1e12
# what an H200 gives, measured, of its sheet (4.37 TB/s read, 696 to 735 TFLOP/s in bfloat16), and what each op of a captured step takes beside its
# bytes (a batch of 1: 0.45 ms of the 176 ops of Qwen2-7B, 0.29 of Llama-3.2-1B's 104)
OF_BANDWIDTH, OF_FLOPS, AN_OP = 0.91, 0.72, 2.6e-6


@dataclass(frozen=True)
class DataSheet:
    """A GPU as its maker describes it: dense rates (half of those "with sparsity"), products of 16 bits summed in 32."""

    name: str
    memory: int  # bytes, as its driver tells them
    bandwidth: float  # bytes/s
    bfloat16: float  # FLOP/s; float16 is the same
    float32: float  # outside the matrix units, as exact float32 runs
    int8: float
    float8: float  # 0: it has none
    cache: int  # bytes of L2
    capability: tuple[int, int]
    source: str

    def hardware(self) -> Hardware:
        """A machine with one of it, as config.resolve() takes it."""
        return Hardware("cuda", self.name, self.capability, self.memory, cpu_count=8, has_bfloat16=True)

    @property
    def roof(self) -> Roof:
        """What it may be expected to give: less than the sheet says."""
        rates = {"bfloat16": self.bfloat16, "float16": self.bfloat16, "float32": self.float32, "int8": self.int8, "float8": self.float8}
        read = ((self.memory, OF_BANDWIDTH * self.bandwidth),)
        flops = {dtype: OF_FLOPS * rate for dtype, rate in rates.items() if rate}
        return Roof(self.name, read, flops, self.cache, launch_s=AN_OP, captured_launch_s=AN_OP, measured=False)


def _sheet(
    name: str,
    memory: int,
    bandwidth: int,
    bf16: float,
    f32: float,
    int8: float,
    fp8: float,
    l2: int,
    capability: tuple[int, int],
    source: str,
) -> DataSheet:
    """MiB, GB/s, TFLOP/s, MiB."""
    rates = (bf16 * TERA, f32 * TERA, int8 * TERA, fp8 * TERA)
    return DataSheet(name, memory * MIB, bandwidth * 1e9, *rates, l2 * MIB, capability, source)


_OF = "NVIDIA {} data sheet"
DATA_SHEETS = (
    _sheet("B200", 183359, 8000, 2250, 75, 4500, 4500, 126, (10, 0), "NVIDIA DGX B200 data sheet, an eighth of it"),
    _sheet("H200", 143771, 4800, 989, 67, 1979, 1979, 50, (9, 0), _OF.format("H200 Tensor Core GPU")),
    _sheet("H200 NVL", 143771, 4800, 835, 60, 1671, 1671, 50, (9, 0), _OF.format("H200 Tensor Core GPU")),
    _sheet("H100", 81559, 3350, 989, 67, 1979, 1979, 50, (9, 0), _OF.format("H100 Tensor Core GPU")),
    _sheet("H100 PCIe", 81559, 2000, 756, 51, 1513, 1513, 50, (9, 0), _OF.format("H100 Tensor Core GPU")),
    _sheet("A100 80GB", 81920, 2039, 312, 19.5, 624, 0, 40, (8, 0), _OF.format("A100 Tensor Core GPU")),
    _sheet("A100 40GB", 40960, 1555, 312, 19.5, 624, 0, 40, (8, 0), _OF.format("A100 Tensor Core GPU")),
    _sheet("L40S", 46068, 864, 362, 91.6, 733, 733, 96, (8, 9), _OF.format("L40S GPU")),
    _sheet("L4", 23034, 300, 121, 30.3, 242, 242, 48, (8, 9), _OF.format("L4 Tensor Core GPU")),
    _sheet("A10", 23028, 600, 125, 31.2, 250, 0, 6, (8, 6), _OF.format("A10 Tensor Core GPU")),
    _sheet("RTX A6000", 49140, 768, 155, 38.7, 310, 0, 6, (8, 6), _OF.format("RTX A6000")),
    _sheet("RTX 5090", 32607, 1792, 209.5, 104.8, 838, 419, 96, (12, 0), "NVIDIA RTX Blackwell GPU Architecture paper"),
    _sheet("RTX 4090", 24564, 1008, 165.2, 82.6, 660.6, 330.3, 72, (8, 9), "NVIDIA Ada GPU Architecture paper"),
    _sheet("RTX 3090", 24576, 936, 71, 35.6, 284, 0, 6, (8, 6), "NVIDIA Ampere GA102 GPU Architecture paper"),
)


def data_sheet(name: str) -> DataSheet:
    """By a name as users and drivers write it: "h200", "NVIDIA H100 80GB HBM3", "rtx4090". ValueError: unknown, with those that are known."""
    wanted = _words(name)
    found = [sheet for sheet in DATA_SHEETS if _words(sheet.name) <= wanted or _joined(sheet.name) == _joined(name)]
    if not found and "a100" in wanted:  # alone it is the larger one
        found = [sheet for sheet in DATA_SHEETS if sheet.name == "A100 80GB"]
    if not found:
        raise ValueError(f"{name!r} is not known; known: {', '.join(sheet.name for sheet in DATA_SHEETS)}")
    return max(found, key=lambda sheet: len(sheet.name))


def _words(name: str) -> frozenset[str]:
    """ "NVIDIA A100-SXM4-80GB" -> {nvidia, a100, sxm4, 80gb}."""
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def _joined(name: str) -> str:
    return "".join(re.findall(r"[a-z0-9]+", name.lower())).removeprefix("nvidia").removeprefix("geforce")


def roof_here(hardware: Hardware) -> Roof:
    """From what was measured on this machine and kept, whichever of it there is; a GPU's data sheet where nothing was. Measures nothing."""
    torch_version = version("torch")
    return roof_of(hardware, kept_ceilings(hardware, torch_version), kept_rates(hardware, torch_version))


def roof_of(hardware: Hardware, memory: Ceilings | None, rates: Rates | None) -> Roof:
    """With neither and no data sheet a roof that bounds nothing."""
    try:
        sheet = data_sheet(hardware.name).roof if hardware.device == "cuda" else None
    except ValueError:
        sheet = None
    cache = sheet.cache if sheet else last_cache_bytes() if hardware.device == "cpu" else 0
    measured = {rate.name: rate.median for rate in rates.rates} if rates else {}
    flops = {name.removeprefix("matrix_"): rate for name, rate in measured.items() if name.startswith("matrix_")}
    if memory is not None and memory.matrix:
        flops["bfloat16"] = max(memory.matrix, flops.get("bfloat16", 0.0))
    if "int8" in flops:  # torch's own product may use less of the processor than the native library's
        flops["int8"] = max(flops.values())
    read = tuple((b.working_set, b.median) for b in memory.read) if memory else sheet.read if sheet else ()
    return Roof(
        name=hardware.name,
        read=read,
        flops=flops or (sheet.flops if sheet else {}),
        cache=cache,
        launch_s=measured.get("launch_eager", 0.0),
        captured_launch_s=measured.get("launch_in_graph", 0.0),
        measured=memory is not None,
    )
