"""The doctor on an endpoint with one known fault at a time: the first verdict names it. Sound ones raise no alarm, and what can't be had is named."""

import json

import pytest
import virtual_time
from fake_endpoint import Fake

from flatout.cli import main
from flatout.cli.doctor import url as verb
from flatout.client.http import Endpoint, EndpointError
from flatout.doctor import gauges
from flatout.doctor.probe import Probe, probe
from flatout.doctor.probe_rules import judge


def probed(fake: Fake, seconds=30.0, cpu=lambda: 0.0, **how) -> Probe:
    async def work():
        async with fake.served():
            endpoint = Endpoint(fake.url, fake.key)
            try:
                return await probe(endpoint, seconds=seconds, cpu=cpu, **how)
            finally:
                endpoint.close()

    return virtual_time.run(work())


def evidence(verdict, what):
    return next(e.value for e in verdict.evidence if e.what == what)


FAULTS = {
    "serial queue": Fake(slots=1),
    "slots": Fake(slots=4),
    "rate cap by pace": Fake(requests_per_second=4.0),
    "rate cap by refusal": Fake(refuse_over=6),
    "token cap": Fake(tokens_per_second=90.0),
    "no gain from batching": Fake(fixed=0.0, per_row=0.01, crowd=0.5),
    "prefill stalls neighbours": Fake(chunk=None),
    "prefill stalls neighbours by large chunks": Fake(chunk=4096),
    "no prefix cache": Fake(cache=False),
    "no prefix cache that a server without usage has": Fake(cache=False, usage=False),
    "compute-bound prefill": Fake(prefill=600.0),
    "front bound": Fake(front=1.0, metrics="vllm:"),
}
SOUND = {
    "healthy": Fake(),
    "healthy by chat alone": Fake(routes=("chat/completions",), known=()),
    "healthy behind a key": Fake(key="secret", metrics="sglang:"),
    "bandwidth-bound decode": Fake(per_row=0.00002),
    "saturated": Fake(per_row=0.02),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_the_first_verdict(name):
    found = probed(FAULTS[name])
    first, *others = judge(found)
    assert first.constraint == name.split(" by ")[0].split(" that ")[0]
    assert not first.healthy and first.sentence.endswith(".")
    assert first.remedy and first.gain and first.unless and first.evidence
    assert all(v.constraint in ("healthy", "saturated", "bandwidth-bound decode") for v in others), "one fault, one finding"


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_raises_no_alarm(name):
    (verdict,) = judge(probed(SOUND[name]))
    assert verdict.constraint == name.split(" by ")[0].split(" behind ")[0]
    assert verdict.healthy and "Nothing is wrong" in verdict.sentence


def test_figures_are_the_fakes():
    fake = Fake(metrics="flatout:")
    found = probed(fake)
    assert found.server.kind == "flatout" and found.server.models == ("fake",) and found.server.max_model_len == 16_384
    one, *_, top = found.points
    assert one.tpot == pytest.approx(0.0106, rel=0.02) and one.rate == pytest.approx(1 / 0.0106, rel=0.02)
    assert [p.streams for p in found.points] == [1, 2, 4, 8, 16, 32]
    assert all(p.active == p.streams and not p.errors for p in found.points)
    assert top.peak[gauges.RUNNING] == 32
    assert top.tpot == pytest.approx(0.010 + 32 * 0.0006, rel=0.1)
    # a chunk of 256 tokens is a step of 10 ms beside 12.8 ms of reading
    assert found.prefill and found.prefill[1] == pytest.approx(256 / (0.0128 + 0.010), rel=0.05)
    assert found.repeat and found.repeat.cached == found.repeat.tokens - 1 and found.repeat.again < 0.1 * found.repeat.cold
    beside = found.interference
    assert beside and beside.streams == 3 and beside.quiet == pytest.approx(0.0118, rel=0.1)
    assert beside.gap == pytest.approx(0.0118 + 0.0128, rel=0.2)
    assert found.e2e_there == pytest.approx(found.e2e_here[0] / found.e2e_here[1], rel=0.2)
    assert found.preemptions == 0


def test_a_stall_says_how_long_and_what_is_left_of_it():
    (verdict, *_) = judge(probed(FAULTS["prefill stalls neighbours"]))
    assert evidence(verdict, "longest gap of a neighbour") == pytest.approx(8192 / 20_000, rel=0.1)
    assert "in one go" in verdict.sentence
    (verdict, *_) = judge(probed(FAULTS["prefill stalls neighbours by large chunks"]))
    assert "chunks of about 4,200 tokens" in verdict.sentence, "a step's fixed cost counts as tokens too"


def test_the_number_of_slots_and_the_pace_are_measured():
    (verdict, *_) = judge(probed(FAULTS["slots"]))
    assert evidence(verdict, "answers at one time, at most") == 4
    (verdict, *_) = judge(probed(FAULTS["rate cap by pace"]))
    assert evidence(verdict, "between one start and the next") == pytest.approx(0.25, rel=0.05)


def test_slots_are_confirmed_by_the_servers_gauges():
    (verdict, *_) = judge(probed(Fake(slots=4, metrics="vllm:")))
    assert evidence(verdict, "the server says") == 4
    assert any(e.shown.startswith("4 running, ") and not e.shown.endswith(" 0 waiting") for e in verdict.evidence)


def test_a_model_whose_size_is_known_tells_the_bandwidth_it_takes():
    (verdict,) = judge(probed(Fake(meta={"size": 100_000_000})))
    assert evidence(verdict, "weights read for one stream") == pytest.approx(100e6 / 0.0106, rel=0.02)


def test_our_own_server_says_how_near_its_floor_it_is():
    (verdict,) = judge(probed(Fake(metrics="flatout:")))
    assert evidence(verdict, "floor of its steps, as it says") == 0.8
    assert not any("fixed cost" in thing for thing in verdict.unseen)


def test_too_little_seen_is_no_clean_bill():
    (verdict,) = judge(probed(Fake(prefill=1e12, chunk=None), most_streams=2))
    assert verdict.constraint == "not loaded" and not verdict.healthy
    assert "Too little was seen" in verdict.sentence


def test_a_busy_client_is_named_before_the_server():
    clock = iter(range(0, 1 << 30, 100))  # a hundred seconds of CPU time at each look
    (verdict, *_) = judge(probed(Fake(), cpu=lambda: float(next(clock))))
    assert verdict.constraint == "client bound"


@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0])
@pytest.mark.parametrize("fake", [Fake(), Fake(fixed=0.1, slots=4), Fake(fixed=0.0005, per_row=0.00001)], ids=["usual", "slow", "fast"])
def test_the_time_is_bounded_and_what_had_none_is_named(fake, seconds):
    found = probed(fake, seconds=seconds)
    assert found.seconds <= 1.3 * seconds + 5
    assert found.one is not None
    if found.points[-1].streams < 32:
        assert any("streams and more" in thing for thing in found.unseen) or any("concurrency" in thing for thing in found.unseen)
    assert judge(found)[0].unseen


def test_what_could_not_be_seen_is_named():
    unseen = judge(probed(Fake(usage=False, context=600), seconds=10.0))[0].unseen
    assert any("/metrics" in thing for thing in unseen)
    assert any("no usage" in thing for thing in unseen)
    short = judge(probed(Fake(prefill=1e12, chunk=None, usage=False)))[0].unseen
    assert any("prefix cache" in thing for thing in short) and any("long prompt" in thing for thing in short)


def test_prompts_stay_in_the_context():
    fake = Fake(context=600)
    found = probed(fake)
    assert found.lengths[-1][0] <= 540
    assert max(len(body["prompt"].split()) for body in fake.bodies) <= 540


@pytest.mark.parametrize(
    ("fake", "kind"),
    [(Fake(routes=()), "http 404"), (Fake(streams=False), "no stream"), (Fake(cut=1), "cut")],
)
def test_a_server_that_cannot_be_probed(fake, kind):
    with pytest.raises(EndpointError) as caught:
        probed(fake)
    assert caught.value.kind == kind


PAGES = {
    "vLLM": 'vllm:num_requests_running{model_name="a"} 3.0\nvllm:num_requests_running{model_name="b"} 1\nvllm:gpu_cache_usage_perc{a="}"} 0.5\n',
    "SGLang": "# HELP sglang:num_running_reqs x\nsglang:num_running_reqs 4\nsglang:token_usage 0.5\n",
    "TGI": "tgi_batch_current_size 4\ntgi_queue_size NaN\n",
    "llama.cpp": "llamacpp:requests_processing 4\nllamacpp:kv_cache_usage_ratio 5e-1 1700000000\n",
    "flatout": 'vllm:num_requests_running 9\nflatout:num_requests_running 4\nflatout:of_floor{window="10s"} 0.8\n',
}


@pytest.mark.parametrize("kind", PAGES)
def test_metrics_of_each_server(kind):
    found = gauges.parse(PAGES[kind])
    assert gauges.kind_of(found) == kind
    values = gauges.gauges(found)
    assert values[gauges.RUNNING] == 4
    assert values.get(gauges.KV, 0.5) == 0.5
    assert gauges.WAITING not in values, "not a number, or not there"
    assert values.get(gauges.FLOOR) == (0.8 if kind == "flatout" else None)


def test_metrics_of_somebody_else():
    found = gauges.parse('go_goroutines 5\nx_bucket{le="1"} 2\nno number\n')
    assert found == {"go_goroutines": 5.0}
    assert gauges.kind_of(found) is None and gauges.gauges(found) == {}


@pytest.fixture
def doctor(monkeypatch, capsys):
    """doctor(fake, *argv) -> (exit code, stdout, stderr): the verb, on the virtual clock, with the fake served meanwhile."""

    def run(fake, *argv):
        monkeypatch.setattr(verb, "asyncio", virtual_time.beside(fake))
        monkeypatch.setenv("COLUMNS", "100")
        code = main(["doctor", "--url", fake.url, "--seconds", "20", *argv])
        return code, *capsys.readouterr()

    return run


def test_the_report(doctor):
    code, out, err = doctor(Fake(slots=4))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.split()[:2] == ["1", "94"] and "█" in line for line in lines), out
    for part in ("verdict: slots", "At most 4 requests", "--max-num-seqs", "not seen", "4,096 tokens: TTFT"):
        assert part in out, out
    bars = [line.count("█") for line in lines if line.split()[:1] and line.split()[0] in ("1", "2", "4")]
    assert bars == sorted(bars) and bars[0] < bars[-1], "the plot grows with throughput"


def test_the_json(doctor):
    code, out, _ = doctor(Fake(key="secret-key"), "--api-key", "secret-key", "--json")
    report = json.loads(out)
    assert code == 0 and "secret-key" not in out
    assert report["verdicts"][0]["constraint"] == "healthy"
    assert report["verdicts"][0]["evidence"][0] == {
        "what": "one stream",
        "value": pytest.approx(94.3, rel=0.02),
        "unit": "tok/s",
        "shown": "94 tok/s",
    }
    assert [p["streams"] for p in report["concurrency"]] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("fake", "argv", "says"),
    [
        (Fake(key="right"), (), "--api-key: the server wants one, or another one: who are you?"),
        (Fake(key="right"), ("--api-key", "wrong-key"), "--api-key: the server wants one, or another one"),
        (Fake(), ("--model", "gpt"), "The model 'gpt' does not exist"),
        (Fake(streams=False), (), "does not stream"),
        (Fake(routes=()), (), "no such route"),
    ],
)
def test_errors_are_one_line_with_the_mend(doctor, fake, argv, says):
    code, out, err = doctor(fake, *argv)
    assert code in (1, 2) and out == ""
    assert err.count("\n") == 1 and says in err
    assert "wrong-key" not in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "doctor: say whose: http"),
        (["hardwar"], "no such verb (did you mean hardware?)"),
        (["--url", "ftp://x"], "--url: 'ftp://x' is no address"),
        (["--url", "http://127.0.0.1:1"], "nobody answers"),
        (["--url", "http://x", "--probe", "--seconds", "1"], "--seconds: 1 is not between"),
        (["--url", "http://x", "--max-streams", "0"], "--max-streams: 0 is not between"),
    ],
)
def test_wrong_flags(argv, says, capsys):
    assert main(["doctor", *argv]) in (1, 2)
    assert says in capsys.readouterr().err
