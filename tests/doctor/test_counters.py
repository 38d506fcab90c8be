"""Device counters of a machine made of numbers."""

from __future__ import annotations

from fake_nvml import FakeNvml

from flatout.doctor.counters import Counters


def test_cores_by_the_time_between_two_looks() -> None:
    now, spent = 10.0, 100.0
    counters = Counters(FakeNvml(nvmlDeviceGetCount_v2=[0]), lambda: {"cores": 2.0, "busy_s": spent}, lambda: now)
    assert counters.read() == []  # no time has passed
    now, spent = 12.0, 103.0
    assert counters.read() == ["2 cores: 75% busy"]
    now, spent = 13.0, 105.5
    assert counters.read() == ["2 cores: 100% busy"]


def test_gpus_and_what_they_do_not_tell() -> None:
    none = dict[str, float]
    first, second = Counters(FakeNvml(), none).read()
    assert first == "GPU 0: 87 % busy, 39 GiB of 139 GiB, 76 W, 1,980 MHz, 31 °C" and second.startswith("GPU 1: ")
    first, _ = Counters(FakeNvml(nvmlDeviceGetUtilizationRates=None, nvmlDeviceGetCurrentClocksThrottleReasons=[0x24]), none).read()
    assert first.startswith("GPU 0: 39 GiB") and first.endswith("slowed by power cap, heat (driver)")
    assert Counters(FakeNvml(nvmlInit_v2=9), none).read() == []
