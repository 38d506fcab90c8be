"""Engines in turns, and flatout bench compare-cpu: medians and ratios by hand, processes that end, the whole of it where llama.cpp is."""

import asyncio
import http.server
import json
import os
import sys
import threading
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from flatout import LLM
from flatout.bench import compare_cpu, processes, turns
from flatout.bench import served as serving
from flatout.bench.llamacpp import BEST, FLASH_ATTN, LlamaCpp, chosen_flash_attn
from flatout.bench.processes import busy_neighbour, program, starts
from flatout.bench.served import ALONE, engine_alone, flatout_server, llama_server, lost, served
from flatout.bench.turns import Case, Row, Run, lines, rest, take_turns
from flatout.cli import main
from flatout.config import ConfigError

SMALL = Case("small", 1, 8, 3)


def scripted(*runs):
    """An engine that gives these runs one by one, and the prompts it was given."""
    left, seen = list(runs), []

    def engine(prompts, new):
        seen.append(prompts)
        return left.pop(0)

    return engine, seen


def test_turns_by_hand():
    case = Case("decode", batch=2, prompt=4, new=3)
    ours, seen = scripted(Run(9, 9, [5, 6, 7]), Run(1, 2, [5, 6, 7]), Run(1, 1, [5, 6, 7]), Run(1, 4, [5, 6, 7]))
    theirs, seen_there = scripted(Run(1, 1, [5, 6, 7]), Run(1, 8, [5, 6, 9]), Run(1, 2, [5, 6, 7]), Run(1, 4, [5, 6, 7]))
    row = take_turns(case, {"flatout": ours, "other": theirs}, repeats=3, vocab_size=100)
    assert row.medians == {"flatout": 2 * 2 / 2, "other": 2 * 2 / 4}, "two requests decode two tokens each; the first round does not count"
    assert row.ratios == {"other": 2.0}
    assert row.agree == {"other": 2}
    assert seen == seen_there
    assert len({str(prompts) for prompts in seen}) == 4, "new prompts in each round"
    assert all(len(prompt) == 4 and min(prompt) >= 10 and max(prompt) < 100 for prompts in seen for prompt in prompts)
    assert row.facts()["ratios"] == {"other": 2.0}


def test_a_prefill_counts_prompt_tokens():
    ours, _ = scripted(Run(1, 0, [5]), Run(0.5, 0, [5]))
    row = take_turns(Case("prefill", 1, 64, 1), {"flatout": ours}, repeats=1, vocab_size=100)
    assert row.medians == {"flatout": 128.0}
    assert row.at_rest < 0.1


def test_short_answers_are_not_compared():
    ours, _ = scripted(Run(1, 1, [5, 6]))
    with pytest.raises(RuntimeError, match="small: flatout wrote 2 of 3 tokens"):
        take_turns(SMALL, {"flatout": ours}, repeats=1, vocab_size=100)


def test_fewer_seconds_are_the_better_ratio():
    assert Row("start", {"flatout": 2.0, "other": 3.0}, seconds=True).ratios == {"other": 1.5}


def test_the_table_has_a_place_for_what_an_engine_did_not_do():
    rows = [
        Row("decode, batch 1", {"flatout": 1300.0, "llama.cpp": 100.0, "Transformers": 13.0}, {"llama.cpp": 7, "Transformers": 9}, 9),
        Row("start", {"flatout": 1.5, "llama.cpp": 0.5}, seconds=True),
    ]
    head, decode, start = lines(rows, ("llama.cpp", "Transformers"))
    assert " ".join(head.split()) == "tok/s flatout llama.cpp ratio same greedy tokens Transformers ratio same greedy tokens"
    assert " ".join(decode.split()) == "decode, batch 1 1,300.0 100.0 13.00x 7 of 9 13.0 100.00x 9 of 9"
    assert " ".join(start.split()) == "start 1.50 s 0.50 s 0.33x - - - -"
    assert len({len(line) for line in (head, decode, start)}) == 1


def test_threads_that_spin_between_turns_are_seen(monkeypatch):
    monkeypatch.setattr(turns, "REST", 0.1)
    until = time.monotonic() + 0.5
    spin = threading.Thread(target=lambda: [None for _ in iter(lambda: time.monotonic() < until, False)])
    spin.start()
    assert rest() > 0.2
    spin.join()
    assert rest() < 0.1


def test_a_neighbour_is_busy_during_its_turn_alone():
    def children():
        return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())

    seen, before = [], children()

    def engine(prompts, new):
        (pid,) = children() - before
        time.sleep(0.5)
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        seen.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return Run(1, 1, [5, 6, 7])

    take_turns(replace(SMALL, neighbour=True), {"flatout": engine}, repeats=1, vocab_size=100)
    assert len(seen) == 2
    assert min(seen) > 0.1
    assert children() == before


def test_a_neighbour_that_leaves_early_spoils_the_figures(monkeypatch):
    monkeypatch.setattr(processes, "SPIN", "print('busy', flush=True)")
    with pytest.raises(RuntimeError, match="neighbour ended before"), busy_neighbour():
        time.sleep(0.5)


def test_starts_end_with_the_first_line():
    slow = "import time; time.sleep(0.3); print('token', flush=True); time.sleep(60)"
    seconds = starts({"slow": program(slow), "import": program(processes.IMPORT, "json")}, repeats=1)
    assert 0.3 < seconds["slow"] < 60
    assert 0 < seconds["import"] < 60
    with pytest.raises(RuntimeError, match="exit code 3 before it said anything"):
        starts({"a": program("raise SystemExit(3)")}, repeats=1)


def test_a_server_under_clients(tiny):
    options = {"model": tiny, "load_format": "dummy", "dtype": "float32", "threads": 1, "device": "cpu"}
    rates = served(Case("served", batch=3, prompt=5, new=7), {"flatout": flatout_server(options)}, repeats=1, vocab_size=300)
    assert set(rates) == {"flatout"}
    assert rates["flatout"] > 0


def test_the_engine_alone_does_what_the_clients_ask(tiny):
    options = {"model": tiny, "load_format": "dummy", "dtype": "float32", "threads": 1, "device": "cpu"}
    case, seen = Case("served", batch=3, prompt=5, new=7), []
    with LLM(**options) as llm:
        generate, llm.generate = llm.generate, lambda *given, **how: seen.append(generate(*given, **how))
        rates = served(case, {"flatout": flatout_server(options)}, repeats=1, vocab_size=300, alone=engine_alone(llm))
    assert [[len(o.outputs[0].token_ids) for o in outputs] for outputs in seen] == [[7] * 3] * 2
    assert lost(rates) == 1 - rates["flatout"] / rates[ALONE] < 1
    assert lost({"flatout": 90.0, ALONE: 100.0}) == pytest.approx(0.1)


def test_a_server_that_stops_early_is_not_compared():
    class Brief(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()

        def do_POST(self):
            self.do_GET()
            self.wfile.write(b'data: {"choices": [{"text": "a b"}], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Brief) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RuntimeError, match="answered 2 tokens, 3 were asked for"):
            asyncio.run(serving.clients(server.server_port, [[1, 2]], 3))
        server.shutdown()
    with pytest.raises(RuntimeError, match="not ready: no such model"):
        served(SMALL, {"broken": lambda port: program("raise SystemExit('no such model')")}, 1, 100)


def test_flash_attention_is_what_suits_the_work_unless_asked():
    assert [chosen_flash_attn(BEST, new) for new in (1, 2, 256)] == ["on", "off", "off"]
    assert [chosen_flash_attn(asked, 1) for asked in FLASH_ATTN] == list(FLASH_ATTN)


def test_llama_server_gets_a_slot_for_each_client():
    command = llama_server("llama-server", "m.gguf", 2, "best", Case("served", 16, 128, 128))(8123)
    assert " ".join(command) == "llama-server -m m.gguf -t 2 -fa off -np 16 -c 4096 --host 127.0.0.1 --port 8123"


@pytest.mark.parametrize(
    ("argv", "code", "wrong"),
    [
        (["--repeats", "0"], 2, "--repeats: must be at least 1, got 0"),
        (["--work", "batch9"], 2, "--work: 'batch9' is not known (did you mean batch8?)"),
        (["--work", "batch1,served"], 2, "--llama-server FILE"),
        (["--flash-attn", "maybe"], 2, "--flash-attn"),
        (["--model", "TINY", "--load-format", "dummy"], 1, "--gguf: llama.cpp reads GGUF files alone"),
    ],
)
def test_what_cannot_be_compared_is_told_before_a_model_loads(tiny, argv, code, wrong, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", Namespace())
    monkeypatch.setattr(compare_cpu.shutil, "which", lambda name: None)
    monkeypatch.setattr(compare_cpu, "open_llm", None)
    assert main(["bench", "compare-cpu", *(tiny if a == "TINY" else a for a in argv)]) == code
    assert wrong in capsys.readouterr().err


def test_without_llama_cpp_its_package_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    monkeypatch.setattr(compare_cpu, "open_llm", None)
    assert main(["bench", "compare-cpu"]) == 1
    assert capsys.readouterr().err == "flatout: error: bench compare-cpu: llama_cpp is not installed; pip install llama-cpp-python\n"


def test_the_whole_of_it(default_model, monkeypatch, capsys):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    small = {name: Case(case.name, case.batch, 16, min(case.new, 4)) for name, case in compare_cpu.TURNS.items()}
    monkeypatch.setattr(compare_cpu, "TURNS", small)
    argv = ["--threads", "1", "--max-model-len", "512", "--repeats", "1", "--quiet"]
    works = [name for name in compare_cpu.NAMES if name != "served"]
    assert main(["bench", "compare-cpu", "--work", *works, "--json", *argv]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["work"] for row in report["rows"]] == [*(case.name for case in small.values()), compare_cpu.START.name]
    for row in report["rows"]:
        assert set(row["medians"]) == {"flatout", "llama.cpp"}
        assert min(row["medians"].values()) > 0
    assert report["threads"] == 1
    assert report["cores busy between turns"] < 0.2
    assert {"llama-cpp-python", "built with", "flash-attn", "import torch", "import llama_cpp"} <= set(report)


def test_llama_cpp_computes_the_same_model(default_model):
    """Tokens that Transformers is sure of in float32: alone, and beside another sequence."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    known = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
    sure = max(known, key=lambda case: case["safe_prefix"])
    prompt, tokens = sure["prompt_ids"], sure["greedy_ids"][: sure["safe_prefix"]]
    assert len(tokens) > 3
    peer = LlamaCpp(default_model, 1)
    try:
        (written,), times = peer.generate([prompt], len(tokens))
        assert written == tokens
        assert len(times) == len(tokens)
        assert times == sorted(times)
        first, other, third = peer.generate([prompt, prompt[::-1], prompt], len(tokens))[0]
        assert first == third == tokens
        assert other != tokens
    finally:
        peer.close()


def test_llama_cpp_refuses_a_file_that_is_no_model(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"no.gguf: llama.cpp does not load it"):
        LlamaCpp(tmp_path / "no.gguf", 1)
