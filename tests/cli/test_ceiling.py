"""The ceiling test on a tiny model: both sides' parts sum to their time, and the loss to the difference."""

import io
import json
import re

import pytest
from doctor.fake_nvml import UNSUPPORTED, FakeNvml
from rich.console import Console

from flatout.bench.ceiling import PARTS, Ceiling, Side, Turn
from flatout.bench.turns import Case
from flatout.cli import main
from flatout.cli.doctor.ceiling import sentences, told
from flatout.doctor.energy import joules
from flatout.doctor.facts import NotAvailable

TINY_FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "1M"]


def test_both_sides_of_a_real_load(tiny, capsys):
    flags = ["--batch", "3", "--prompt", "9", "--output", "12", "--repeats", "2", "--json", "--quiet"]
    assert main(["doctor", "ceiling", tiny, *flags, *TINY_FLAGS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (3, 9, 12)
    assert len(found["each_turn"]) == 2 and found["loss_share"] == pytest.approx(1 - 1 / found["ceiling_over_served"])
    for side in ("ceiling", "served"):
        assert set(found[side]["seconds_per_token"]) == set(PARTS)
        assert found[side]["joules_per_token"] is None and 1 <= found[side]["tokens_per_step"] <= 3
        assert found[side]["seconds_per_token"]["ops of the forward"] > 0
    assert found["joules_not_available"].startswith("needs a GPU")
    assert found["served"]["ttft_p50_s"] > 0


def side(*seconds, joules=None, idle=0.0):
    parts = dict.fromkeys(PARTS, 0.0)
    return Side([Turn(s, 100, 25, {**parts, "ops of the forward": s - idle, "no request at hand": idle}, joules) for s in seconds])


def test_the_loss_by_hand():
    found = Ceiling(
        "m", "here", Case("ceiling", 4, 8, 25), side(1.0, 1.0, 1.0, joules=50.0), side(1.25, 1.25, 1.3, joules=60.0, idle=0.2), ""
    )
    assert found.ratio == pytest.approx(1.25) and found.loss == pytest.approx(0.2)
    assert sum(map(found.lost, PARTS)) == pytest.approx(0.8 / 300) and found.lost("no request at hand") == pytest.approx(0.002)
    assert (found.alone.joules, found.served.joules, found.alone.rows) == (0.5, 0.6, 4.0)
    shown = io.StringIO()
    Console(file=shown, width=100).print(told(found))
    assert re.search(r"output tok/s +100.0 +80.0 +20.0%", shown.getvalue())
    assert re.search(r"no request at hand +0.000 +2.000 +2.000", shown.getvalue())
    (said,) = sentences(found)
    assert "take 20.0% of what the engine can do, most of it by: no request at hand" in said
    noisy = Ceiling("m", "here", found.case, side(1.0, 1.0), side(0.9, 1.2), "root")
    assert "less than these turns differ by" in sentences(noisy)[0] and sentences(noisy)[1].endswith("needs root")


def test_energy_is_never_a_zero_that_was_not_measured():
    assert joules("bb", FakeNvml()) == 3_600_000.0
    for uuid, library, needs in (
        ("", FakeNvml(), "needs|a GPU"),
        ("cc", FakeNvml(), "know the GPU cc"),
        ("aa", FakeNvml(nvmlDeviceGetTotalEnergyConsumption=UNSUPPORTED), "report it"),
    ):
        with pytest.raises(NotAvailable, match=needs):
            joules(uuid, library)


@pytest.mark.parametrize("flag", ["--batch", "--prompt", "--output", "--repeats"])
def test_what_makes_no_load(flag, capsys):
    assert main(["doctor", "ceiling", flag, "0"]) == 2
    assert flag in capsys.readouterr().err
