"""Remedies: the best predicted one is the one that a load needs, and what it brings is told from the rounds as they were."""

import json

import pytest

from flatout.bench.remedy import Remedy, Tried, predicted, remedy_of
from flatout.cli import main
from flatout.cli.doctor.whatif import changes_of
from flatout.ledger.verdict import Verdict
from flatout.plan.simulate import Load

SMALL = dict(load_format="dummy", dtype="float32", device="cpu", threads=1, kv_cache_memory_bytes=1 << 20)
FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "1M", "--quiet"]


def test_slots_are_what_a_load_under_one_slot_needs(tiny):
    options = {"model": tiny, "max_num_seqs": 1, **SMALL}
    best, *others = predicted(options, Load(8, 16, 16), measure=False)
    assert best.changes == {"max_num_seqs": 8} and best.factor > 1.5
    assert all(best.factor >= other.factor for other in others)
    names = {name for remedy in (best, *others) for name in remedy.changes}
    assert not names & {"quantization", "kv_cache_dtype"}  # what changes the arithmetic must be asked for
    said = []
    lossy = predicted(options, Load(2, 16, 4), lossy=True, measure=False, tell=said.append)
    assert {"quantization", "kv_cache_dtype"} & {name for remedy in lossy for name in remedy.changes} or said


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
        ("raise --max-num-seqs=32 and drop --enforce-eager, i.e. --no-enforce-eager", {"max_num_seqs": 32, "enforce_eager": False}),
        ("--max-num-seqs 4: as it is", {}),
        ("use a faster disk, or --some-other-server 3", {}),
    ],
)
def test_settings_of_a_verdict(text, changes):
    remedy = remedy_of(Verdict("k", "s", remedy=text, factor=1.5), {"max_num_seqs": 4}, changes_of)
    assert (remedy.changes if remedy else {}) == changes
    assert remedy is None or remedy.factor == 1.5


def test_nothing_to_try_is_said(tiny, monkeypatch, capsys):
    from flatout.bench import remedy

    monkeypatch.setattr(remedy, "predicted", lambda *args, **options: [Remedy({"max_num_seqs": 2}, 1.01, "what-if")])
    assert main(["doctor", "--apply-best", tiny, *FLAGS]) == 0
    assert "nothing to try" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--repeats", "2"], ["--set", "no_such=3"], ["--batch", "0"]])
def test_what_cannot_be_asked(argv, tiny, capsys):
    assert main(["doctor", "--apply-best", tiny, *argv, *FLAGS]) == 2
    assert argv[0] in capsys.readouterr().err
