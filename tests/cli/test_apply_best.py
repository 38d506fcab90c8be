"""Remedies: the best predicted one is the one that a load needs, and what it brings is told from the rounds as they were."""

import json

import pytest

from flatout.bench import remedy
from flatout.bench.remedy import Forecast, Remedy, Tried, named
from flatout.cli import main
from flatout.cli.doctor.whatif import changes_of
from flatout.plan.simulate import Load

SMALL = dict(load_format="dummy", dtype="float32", device="cpu", threads=1, kv_cache_memory_bytes=1 << 20)
FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "1M", "--quiet"]


def test_slots_are_what_a_load_under_one_slot_needs(tiny):
    options = {"model": tiny, "max_num_seqs": 1, **SMALL}
    said = []
    best, *others = Forecast(options, Load(8, 16, 16), measure=False).best(False, said.append)
    assert best.changes == {"max_num_seqs": 8} and best.factor > 1.5
    assert all(best.factor >= other.factor for other in others)
    names = {name for each in (best, *others) for name in each.changes}
    assert not names & set(remedy.LOSSY)  # what changes the arithmetic must be asked for
    lossy = list(Forecast(options, Load(2, 16, 4), measure=False).candidates(lossy=True))
    assert {"quantization": "int4"} in lossy and {"kv_cache_dtype": "int8"} in lossy


def test_two_servers_in_turns(tiny, capsys):
    flags = ["--batch", "4", "--prompt", "8", "--output", "8", "--repeats", "3", "--json", "--max-num-seqs", "1", "--set", "max_num_seqs=4"]
    assert main(["doctor", "--apply-best", tiny, *flags, *FLAGS]) == 0
    found = json.loads(capsys.readouterr().out)
    before, after = found["tokens_per_second"]["before"], found["tokens_per_second"]["after"]
    assert len(before) == len(after) == 3 and min(before + after) > 0
    assert found["changes"] == {"max_num_seqs": 4} and found["predicted_factor"] is None
    low, high = found["measured_factor_95"]
    assert low <= found["measured_factor"] <= high
    assert found["outcome"] == ("confirmed" if low > 1 else "retracted")


@pytest.mark.parametrize(
    ("after", "outcome", "says"),
    [
        ([150, 156, 147, 151, 149], "confirmed", "brought +50.0%"),
        ([80, 82, 79, 81, 80], "retracted", "it does harm"),
        ([104, 97, 99, 108, 93], "retracted", "within what rounds differ by"),
    ],
)
def test_confirmed_or_retracted(after, outcome, says):
    tried = Tried(Remedy({"max_num_seqs": 8, "enforce_eager": False}, 1.4, "what-if"), [100] * 5, after)
    assert tried.outcome == outcome and says in tried.sentence and "predicted +40.0%" in tried.sentence
    assert "--max-num-seqs 8 --no-enforce-eager" in tried.sentence
    assert tried.least <= tried.factor <= tried.most


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("--max-num-batched-tokens 256: chunks of a prompt", {"max_num_batched_tokens": 256}),
        (
            "--enable-chunked-prefill and --max-num-batched-tokens 256: prompts",
            {"enable_chunked_prefill": True, "max_num_batched_tokens": 256},
        ),
        ("--max-num-seqs=32, now 4; not --max-num-seqs 64", {"max_num_seqs": 32}),
        ("--no-enforce-eager", {"enforce_eager": False}),
        ("--max-num-seqs 4, now 4", {}),
        ("--quantization int8", {}),
        ("a pool of 100 tokens: --kv-cache-memory-bytes; or --max-num-seqs 3", {}),
        ("--some-other-server 3", {}),
    ],
)
def test_settings_of_a_verdict(text, changes):
    assert named({"remedy": text}, {"max_num_seqs": 4}, False, changes_of) == changes
    assert named({"remedy": "--quantization int8"}, {}, True, changes_of) == {"quantization": "int8"}


def test_what_the_rules_name_is_tried_first(tiny, monkeypatch, capsys):
    seen = []
    verdict = {"constraint": "slots", "sentence": "Two wait for a slot.", "remedy": "--max-num-seqs 3, now 1"}
    monkeypatch.setattr(remedy, "looked", lambda *args: [{"constraint": "?", "sentence": "", "remedy": "a faster disk"}, verdict])
    monkeypatch.setattr(remedy, "calibrated", lambda paper, *rest: (paper, "not measured"))

    def turns(options, best, *rest):
        seen.append(best)
        return Tried(best, [100.0] * 3, [200.0] * 3)

    monkeypatch.setattr(remedy, "tried", turns)
    assert main(["doctor", "--apply-best", tiny, "--max-num-seqs", "1", *FLAGS]) == 0
    assert seen[0].changes == {"max_num_seqs": 3} and seen[0].factor > 1
    out = capsys.readouterr().out
    assert "slots: Two wait for a slot." in out and "confirmed" in out and f"flatout serve {tiny} --max-num-seqs 3" in out


def test_nothing_to_try_is_said(tiny, monkeypatch, capsys):
    monkeypatch.setattr(Forecast, "best", lambda *args: [Remedy({"max_num_seqs": 2}, 1.01, "what-if")])
    monkeypatch.setattr(remedy, "calibrated", lambda paper, *rest: (paper, "not measured"))
    assert main(["doctor", "--apply-best", tiny, "--look", "0", *FLAGS]) == 0
    assert "nothing to try" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--repeats", "2"], ["--set", "no_such=3"], ["--batch", "0"]])
def test_what_cannot_be_asked(argv, tiny, capsys):
    assert main(["doctor", "--apply-best", tiny, *argv, *FLAGS]) == 2
    assert argv[0] in capsys.readouterr().err
