"""A driver's library made of Python: two GPUs whose answers a test sets, by the C functions' names and conventions. Holds no tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
UNSUPPORTED, NO_PERMISSION, INVALID = 3, 4, 2
# function -> answers, or a code that it returns instead
ANSWERS: dict[str, Any] = {
    "nvmlInit_v2": [],
    "nvmlShutdown": [],
    "nvmlSystemGetDriverVersion": ["570.1"],
    "nvmlSystemGetCudaDriverVersion_v2": [12080],
    "nvmlDeviceGetCount_v2": [2],
    "nvmlDeviceGetName": ["NVIDIA H200"],
    "nvmlDeviceGetUUID": ["GPU-aa", "GPU-bb"],
    "nvmlDeviceGetCudaComputeCapability": [9, 0],
    "nvmlDeviceGetMemoryInfo": [139 * GIB, 100 * GIB, 39 * GIB],
    "nvmlDeviceGetCurrPcieLinkGeneration": [1],
    "nvmlDeviceGetCurrPcieLinkWidth": [16],
    "nvmlDeviceGetMaxPcieLinkGeneration": [5],
    "nvmlDeviceGetMaxPcieLinkWidth": [16],
    "nvmlDeviceGetNvLinkState": [1],
    "nvmlDeviceGetP2PStatus": [0],
    "nvmlDeviceGetNumaNodeId": UNSUPPORTED,
    "nvmlDeviceGetClockInfo": [1980],
    "nvmlDeviceGetMaxClockInfo": [1980],
    "nvmlDeviceGetCurrentClocksThrottleReasons": [0x1],
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetTotalEccErrors": [0],
    "nvmlDeviceGetPowerUsage": [76_500],
    "nvmlDeviceGetEnforcedPowerLimit": [700_000],
    "nvmlDeviceGetTotalEnergyConsumption": [3_600_000_000],
    "nvmlDeviceGetTemperature": [31],
    "nvmlDeviceGetUtilizationRates": [(40 << 32) | 87],
}


class FakeNvml:
    """`changed`: other answers than ANSWERS; None: the library has no such function. `calls`: the functions called, in order."""

    def __init__(self, **changed: Any):
        self.answers = {**ANSWERS, **changed}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if self.answers.get(name) is None:
            raise AttributeError(name)

        def called(*arguments: Any) -> int:
            self.calls.append(name)
            return self._answer(name, self.answers[name], arguments)

        return called

    def _answer(self, name: str, answer: Any, arguments: tuple[Any, ...]) -> int:
        if isinstance(answer, int):
            return answer
        if name == "nvmlDeviceGetUUID":
            answer = answer[(arguments[0].value or 0) : (arguments[0].value or 0) + 1]
        if name == "nvmlDeviceGetNvLinkState" and arguments[1].value >= 4:
            return INVALID  # it has four
        if name == "nvmlDeviceGetMemoryInfo":
            memory = arguments[1]._obj
            memory.total, memory.free, memory.used = answer
        elif answer and isinstance(answer[0], str):
            arguments[-2].value = answer[0].encode()
        else:
            for argument, value in zip(arguments[len(arguments) - len(answer) :], answer):
                argument._obj.value = value
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value
        return 0


def fake_torch(uuids: tuple[str, ...] = ("aa", "bb"), cuda: str | None = "12.8", archs: tuple[str, ...] = ("sm_80", "sm_90")) -> Any:
    """What the doctor asks of torch, for GPUs of these UUIDs."""

    def properties(index: int) -> Any:
        return SimpleNamespace(uuid=uuids[index], name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=139 * GIB)

    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(device_count=lambda: len(uuids), get_device_properties=properties, get_arch_list=lambda: list(archs)),
    )
