"""`flatout doctor MODEL` and `flatout doctor URL` from end to end: a model served here under a load, and a running server's own verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.doctor.live import served
from flatout.ledger.verdict import verdict_from

THREAD = {"threads": 1, "max_num_seqs": 4}


def test_a_model_under_a_load(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["doctor", "smollm2", "--threads", "1", "--seconds", "3", "--clients", "4", "--input-len", "16", "--output-len", "8", "--json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "smollm2" and told["load"]["tokens"] > 0 and not told["load"]["errors"]
    verdicts = [verdict_from(v) for v in told["verdicts"]]
    assert verdicts[0].sentence and verdicts[-1].constraint in ("bandwidth-bound decode", "prefill", "compute-bound prefill", "no load")


def test_a_running_server_says_so_itself(default_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with served({"model": "smollm2", **THREAD}, tmp_path / "log") as url:
        assert main(["doctor", url]) == 0
        shown = capsys.readouterr().out
        assert "by its own ledger over the last 10 s" in shown and "verdict: no load" in shown
        assert main(["doctor", "--url", url, "--model", "gpt"]) != 0
        assert "--model" in capsys.readouterr().err


def test_a_model_that_can_not_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "./no-such-model"]) == 1
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["smollm2", "--url", "http://x"], "one of them"),
        (["smollm2", "--seconds", "9999"], "--seconds: 9999 is not between"),
        (["smollm2", "--input-len", "9:3"], "load: prompt"),
        (["--url", "http://x", "--threads", "2"], "--threads: is for a MODEL"),
    ],
)
def test_wrong_flags(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) in (1, 2)
    assert says in capsys.readouterr().err
