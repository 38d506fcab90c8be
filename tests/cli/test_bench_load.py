"""flatout bench load: flags become a load, figures a table or JSON, failures an exit code."""

import json

import pytest
import virtual_time
from fake_endpoint import Fake

from flatout.bench import load as verb
from flatout.cli import main


@pytest.fixture
def bench(monkeypatch, capsys):
    """bench(fake, *argv) -> (exit code, stdout, stderr), on the virtual clock."""

    def run(fake, *argv):
        monkeypatch.setattr(verb, "asyncio", virtual_time.beside(fake))
        return main(["bench", "load", "--url", fake.url, *argv]), *capsys.readouterr()

    return run


def test_a_closed_loop(bench):
    fake = Fake(fixed=0.1, per_row=0.0, prefill=1e9, slots=2)
    code, out, err = bench(
        fake, "--max-concurrency", "4", "--num-prompts", "8", "--input-len", "10:20", "--output-len", "5", "--prefix-len", "4"
    )
    assert (code, err) == (0, "")
    assert "8 of 8 requests answered in 2.00 s, 4.00 per second" in out, "two at a time, 0.5 s each"
    assert "40 tokens out, 20.0 tok/s" in out
    rows = {
        line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] and line.split()[0] in ("TPOT", "ITL", "TTFT")
    }
    assert rows["TPOT"][0] == rows["ITL"][0] == "100.0"
    prompts = [body["prompt"].split() for body in fake.bodies[-8:]]
    assert all(10 <= len(p) <= 20 for p in prompts) and len({tuple(p[:4]) for p in prompts}) == 1


def test_an_open_loop_as_json(bench):
    fake = Fake(fixed=0.1, per_row=0.0, prefill=1e9)
    code, out, _ = bench(fake, "--request-rate", "4", "--burstiness", "0", "--seconds", "5", "--output-len", "30", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["requests"] == 20
    assert report["tpot"]["p50"] == pytest.approx(0.1)
    assert report["e2e"]["longest"] == pytest.approx(3.1, abs=0.2), "nobody waits for a client"


def test_failures_are_told(bench):
    code, out, _ = bench(Fake(refuse_over=2), "--max-concurrency", "3", "--num-prompts", "3", "--output-len", "4")
    assert code == 1
    assert "2 of 3 requests answered" in out and "1 failed, http 429: too many requests" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "bench load: --url"),
        (["--url", "http://127.0.0.1:1"], "nobody answers"),
        (["--url", "http://x", "--max-concurrency", "0"], "--max-concurrency: 0 makes no load"),
        (["--url", "http://x", "--input-len", "9:3"], "--input-len: (9, 3) makes no load"),
        (["--url", "http://x", "--input-len", "many"], "--input-len: 'many' is not a length"),
    ],
)
def test_wrong_flags(argv, says, capsys):
    assert main(["bench", "load", *argv]) in (1, 2)
    assert says in capsys.readouterr().err
