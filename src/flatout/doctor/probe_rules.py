"""The doctor's rules over a probe of somebody's server: symptom, cause, remedy, gain. One function a constraint.

A rule sees what a client sees, so it names what it can't tell apart. Thresholds stand beside what they come from. Called by cli/doctor/.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

from flatout.doctor.gauges import FLOOR, KV, RUNNING, WAITING
from flatout.doctor.probe import Point, Probe
from flatout.ledger.verdict import Evidence, Verdict

# A Python client of streams that takes this much of its core is late in reading; a core is 1.
CLIENT_CORES = 0.85
# Of the mean request as this client saw it: more than this outside of the server's own clock is its front, the network or the client.
OUTSIDE = 0.3
# Throughput of many streams over that of one: batching on a bandwidth-bound decode gives nearly the number of streams; under this there is none.
NO_GAIN = 1.3
LOSS = 0.85  # and under this no cap explains it: a capped server gives many as much as one
# A burst's first tokens come evenly spaced, and this many times wider apart than a lone prompt takes: something lets requests in one by one.
PACED = 3.0
EVEN = 0.5  # a gap this share of the median gap or more, up to its inverse, counts as even
# What the last doubling of streams multiplied throughput by. Of a step that takes a + b * streams the part b * streams is 40 % at 1.6 and 80 % at
# 1.2: above, a step costs nearly the same whatever is in it (weights are read); below, it is full.
LINEAR, FULL = 1.6, 1.2
# A neighbour's longest gap in gaps between tokens; chunked prefill at usual budgets gives 2 to 8.
STALL = 10.0
CHUNK = 256  # tokens; what is predicted for chunks is for these, and chunks up to twice as large are left alone
WHOLE = 0.6  # and of the long prompt's TTFT: it was read in one go
# TTFT of a repeated prompt over the first time's: a cached one costs its last block and a step.
NO_CACHE = 0.7
TELLING = 2.0  # a cold prompt's TTFT over a short one's from which a cached one could differ
# Prompt tokens per second over one stream's output rate. Weights are read once for a whole chunk, so prompts go tens of times faster where
# compute allows; at 8 a prompt of eight times its answer's length (chat with documents) takes as long as the answer.
SLOW_PREFILL = 8.0
STREAMS = 4  # a sweep that ended under so many tells nothing of batching

FLAGS = {  # constraint -> server -> its flag
    "slots": {
        "llama.cpp": "-np N (and -c N times as large)",
        "SGLang": "--max-running-requests N",
        "TGI": "--max-concurrent-requests and --max-batch-size",
        "vLLM": "--max-num-seqs N",
        "flatout": "--max-num-seqs N",
    },
    "chunks": {
        "llama.cpp": "-b 256 -ub 256",
        "SGLang": "--chunked-prefill-size 256",
        "TGI": "--max-batch-prefill-tokens 256 (chunks need TGI 3)",
    },
    "cache": {
        "vLLM": "--enable-prefix-caching",
        "SGLang": "start without --disable-radix-cache",
        "TGI": "TGI 3, which has it by default",
        "llama.cpp": '"cache_prompt": true in requests, and no --no-cache-prompt',
        "flatout": "--enable-prefix-caching",
    },
}
DEFAULTS = {
    "slots": "--max-num-seqs N (vLLM, flatout), -np N (llama.cpp)",
    "chunks": "--max-num-batched-tokens 256",
    "cache": "prefix caching on",
}


def judge(probe: Probe) -> list[Verdict]:
    """What limits the server, first what matters most; at least one verdict, and each says what could not be seen."""
    limit = next((verdict for rule in LIMITS if (verdict := rule(probe)) is not None), None)
    faults = [verdict for rule in FAULTS if (verdict := rule(probe)) is not None]
    first = [limit] if limit is not None else []
    last = [] if limit is not None else [_state(probe, nothing_wrong=not faults)]
    unseen = [*probe.unseen, *_blind(probe)]
    return [verdict.without_sight_of(unseen) for verdict in (*first, *faults, *last)]


def _client_bound(probe: Probe) -> Verdict | None:
    top = probe.points[-1]
    if top.cpu < CLIENT_CORES:
        return None
    return Verdict(
        "client bound",
        f"This client is the limit: at {top.streams} streams it used {top.cpu:.0%} of a core, so the server may be faster than was measured.",
        (_number("client's CPU", top.cpu, "cores"), _rate(top)),
        f"measure from another machine, or with --max-streams {max(1, top.streams // 2)}",
        "figures that are the server's",
        unless="the client's core is shared with the server, which then is slowed by it too",
    )


def _refused(probe: Probe) -> Verdict | None:
    kinds = [(p.streams, kind, p.complaint) for p in probe.points for kind in p.errors if kind in ("http 429", "http 503")]
    kinds += [(1, kind, message) for kind, message in probe.refused if kind in ("http 429", "http 503")]
    if not kinds:
        return None
    streams, kind, said = kinds[0]
    when = f"at {streams} streams" if streams > 1 else "even one request after the other"
    counts = sum(sum(p.errors.values()) for p in probe.points)
    evidence = [_number("refused", counts, "requests", f"{counts} requests with {kind.removeprefix('http ')}")] if counts else []
    return Verdict(
        "rate cap",
        f"The server refuses requests {when} ({kind.upper()}: {said or 'no reason given'}): a limit on requests, not the machine's speed.",
        (*evidence, *([_rate(probe.whole[-1])] if probe.whole else [])),
        "raise the gateway's or server's limit on requests, or send fewer at once and try again after Retry-After",
        "as many streams as the machine can take; how many is hidden behind the limit",
        unless="the limit protects the latency of those inside: then it is meant",
    )


def _paced(probe: Probe) -> Verdict | None:
    """Requests start at even intervals that neither the work nor the number of streams explains."""
    one, top = probe.one, probe.points[-1]
    if one is None or top.streams < STREAMS or len(top.starts) < STREAMS or top.active <= 1:
        return None
    gaps = [b - a for a, b in pairwise(top.starts)]
    middle = median(gaps)
    even = sum(EVEN * middle <= gap <= middle / EVEN for gap in gaps) >= 0.8 * len(gaps)
    if not even or middle < PACED * one.ttft or top.tpot > 2 * one.tpot:
        return None
    return Verdict(
        "rate cap",
        f"Requests are let in one each {_time(middle)}, however many wait: a cap of {1 / middle:.3g} requests per second, not the machine's speed.",
        (
            _seconds("between one start and the next", middle),
            _seconds("TTFT alone", one.ttft),
            _seconds(f"worst TTFT of {top.streams} streams", top.ttft_worst),
            _seconds("per token, alone", one.tpot),
            _seconds(f"per token at {top.streams} streams", top.tpot),
        ),
        "lift the cap on requests per second, in the gateway or in the server",
        f"worst TTFT of {top.streams} streams from {_time(top.ttft_worst)} towards {_time(one.ttft)}",
        top.ttft_worst / one.ttft,
        "prompts are prepared one by one by something slow in front of the model (a tokeniser, images), which looks the same from here",
    )


def _serial(probe: Probe) -> Verdict | None:
    one, top = probe.one, probe.points[-1]
    if one is None or top.streams < 2 or top.active > 1:
        return None
    return Verdict(
        "serial queue",
        f"Requests are answered one after the other: {top.streams} streams get {top.rate:,.0f} tok/s together, one alone {one.rate:,.0f}.",
        (_rate(one), _rate(top), _number("answers at one time", top.active, ""), _seconds("worst TTFT", top.ttft_worst)),
        _flag(probe, "slots") + ": continuous batching; or a server that has it",
        f"up to {top.streams}x the throughput at {top.streams} streams: a step reads the weights once for all of them",
        top.streams,
        "there is memory for the KV cache of one stream only",
    )


def _no_gain(probe: Probe) -> Verdict | None:
    """Many are written at one time, and all together get no more than one."""
    one, top = probe.one, probe.points[-1]
    if one is None or top.streams < STREAMS or top.active <= 1 or top.rate > NO_GAIN * one.rate or top.tpot < 0.5 * top.active * one.tpot:
        return None
    evidence = (_rate(one), _rate(top), _seconds("per token, alone", one.tpot), _seconds(f"per token at {top.streams} streams", top.tpot))
    gain = f"up to {top.streams}x the throughput at {top.streams} streams"
    if top.rate < LOSS * one.rate:
        return Verdict(
            "no gain from batching",
            f"More streams make the server slower: {top.streams} get {top.rate:,.0f} tok/s together, one alone {one.rate:,.0f}.",
            evidence,
            "look for other work on its cores (threads over the cores it may use, a neighbour); then kernels for more rows, or another server",
            gain,
            top.streams,
            "its speed drifts: run the probe again",
        )
    return Verdict(
        "token cap",
        f"Streams share {one.rate:,.0f} tok/s whatever their number: a cap on tokens per second, or streams that take turns without a batch.",
        evidence,
        "lift the cap on tokens in the gateway; if there is none, a server with continuous batching",
        gain,
        top.streams,
        "the machine is full at one stream: a small model in 32 bits on few cores comes near that",
    )


def _slots(probe: Probe) -> Verdict | None:
    """More streams than slots: those outside wait while those inside run as fast as before."""
    one, top = probe.one, probe.points[-1]
    inside = max(p.active for p in probe.points)
    if one is None or inside < 2 or top.streams < 1.5 * inside or top.errors:
        return None
    at = max((p for p in probe.points if p.streams <= inside), key=lambda p: p.streams)
    kv = top.peak.get(KV)
    pool = kv is not None and kv > 0.9
    evidence = [_number("answers at one time, at most", inside, ""), _rate(at), _rate(top), _seconds("worst TTFT", top.ttft_worst)]
    if WAITING in top.peak and RUNNING in top.peak:
        shown = f"{top.peak[RUNNING]:.0f} running, {top.peak[WAITING]:.0f} waiting"
        evidence.append(_number("the server says", top.peak[RUNNING], "requests", shown))
    if pool and kv is not None:
        evidence.append(_number("KV cache in use", kv, "", f"{kv:.0%}"))
    if probe.server.slots:
        evidence.append(_number("slots, as the server says", probe.server.slots, ""))
    grows = top.streams / inside if at.rate > 1.5 * one.rate else 1.0
    return Verdict(
        "slots",
        f"At most {inside} requests run at a time, the others wait: "
        + ("the KV cache has no room for more." if pool else "a limit on running requests, as far as can be seen."),
        tuple(evidence),
        "more memory for the KV cache, a smaller KV dtype, or a shorter --max-model-len" if pool else _flag(probe, "slots"),
        f"up to {grows:.1f}x the throughput at {top.streams} streams: it grew with streams as far as they ran"
        if grows > 1
        else "a shorter queue",
        grows,
        "requests are longer than those of this probe and memory is the limit"
        if not pool
        else "requests share their heads: cached blocks are room too",
    )


def _stalls(probe: Probe) -> Verdict | None:
    seen, prefill = probe.interference, probe.prefill
    if seen is None or not seen.streams or prefill is None:
        return None
    better = seen.quiet + CHUNK / prefill[1]
    if seen.gap < max(STALL * seen.quiet, 2 * better):
        return None
    chunk = seen.gap * prefill[1]
    whole = seen.gap > WHOLE * (seen.ttft - prefill[0])
    return Verdict(
        "prefill stalls neighbours",
        f"A prompt of {seen.tokens:,} tokens stops everybody else's answer for {_time(seen.gap)}: "
        + ("it is read in one go." if whole else f"it is read in chunks of about {_round(chunk)} tokens."),
        (
            _seconds("longest gap of a neighbour", seen.gap),
            _seconds("its usual gap", seen.quiet),
            _seconds("TTFT of the long prompt", seen.ttft),
        ),
        f"{_flag(probe, 'chunks')}: chunks of a prompt, with everybody's next token beside each",
        f"longest gap from {_time(seen.gap)} to about {_time(better)} with chunks of {CHUNK} tokens",
        seen.gap / better,
        "nobody reads along while answers are written: then large chunks are the better throughput",
    )


def _no_cache(probe: Probe) -> Verdict | None:
    repeat, prefill = probe.repeat, probe.prefill
    if repeat is None or prefill is None or repeat.cached or not _telling(probe) or repeat.again < NO_CACHE * repeat.cold:
        return None
    begin = probe.lengths[0][1]
    told = "" if repeat.cached is None else ", and the server counts no cached token"
    return Verdict(
        "no prefix cache",
        f"A prompt of {repeat.tokens:,} tokens takes as long the second time{told}: shared heads are computed anew for each request.",
        (
            _seconds("TTFT, first time", repeat.cold),
            _seconds("TTFT, the same prompt again", repeat.again),
            _seconds(f"TTFT of {probe.lengths[0][0]} tokens", begin),
        ),
        _flag(probe, "cache"),
        f"TTFT of a prompt whose head is known from {_time(repeat.cold)} to about {_time(begin)}",
        repeat.cold / begin,
        "prompts share no head (system prompt, earlier turns, documents)",
    )


def _slow_prefill(probe: Probe) -> Verdict | None:
    one, prefill = probe.one, probe.prefill
    if one is None or prefill is None or not one.rate or prefill[1] >= SLOW_PREFILL * one.rate:
        return None
    tokens, ttft = probe.lengths[-1]
    times = prefill[1] / one.rate
    cached = bool(probe.repeat and probe.repeat.again < NO_CACHE * probe.repeat.cold)
    return Verdict(
        "compute-bound prefill",
        f"Prompts are read at {prefill[1]:,.0f} tok/s, {times:.1f} times as fast as one answer is written: compute is what long prompts wait for.",
        (
            _number("prompt tokens per second", prefill[1], "tok/s", f"{prefill[1]:,.0f} tok/s"),
            _rate(one),
            _seconds(f"TTFT of {tokens:,} tokens", ttft),
        ),
        "keep the heads of prompts the same, first word on, so that the prefix cache has them"
        if cached
        else "a prefix cache, shorter prompts, and matrix arithmetic in fewer bits (fp8, int8) or on more devices",
        f"TTFT of {tokens:,} tokens from {_time(ttft)} to about {_time(prefill[0] + tokens / prefill[1] / 5)} if four fifths of it are cached",
        ttft / (prefill[0] + tokens / prefill[1] / 5),
        "prompts are shorter than answers; or prompts are read in batches too small for the device (raise the chunk), which looks the same",
    )


def _front(probe: Probe) -> Verdict | None:
    total, count = probe.e2e_here
    there = probe.e2e_there
    if there is None or not count or (here := total / count) <= 0 or 1 - there / here < OUTSIDE:
        return None
    return Verdict(
        "front bound",
        f"{1 - there / here:.0%} of a request's time passes outside of the server's own clock: its HTTP front, the network, or this client.",
        (
            _seconds("mean request, here", here),
            _seconds("mean request, as the server counts", there),
            _seconds("a new connection", probe.round_trip),
        ),
        "probe from the server's own machine: if the difference stays it is the front (more front processes, fewer events per stream)",
        f"up to {here / there:.1f}x shorter requests",
        here / there,
        "a proxy in between buffers the streams",
    )


Rule = Callable[[Probe], Verdict | None]
# what caps throughput: the first that holds explains the sweep, and none of the others is looked at
LIMITS: tuple[Rule, ...] = (_client_bound, _refused, _paced, _serial, _no_gain, _slots)
# what is wrong beside
FAULTS: tuple[Rule, ...] = (_front, _stalls, _no_cache, _slow_prefill)


def _state(probe: Probe, nothing_wrong: bool) -> Verdict:
    """What throughput does with streams: full, still growing as streams come for free, or well in between."""
    one, best = probe.one, max(probe.whole or probe.points, key=lambda p: p.rate)
    assert one is not None
    gain = best.rate / one.rate if one.rate else 1.0
    evidence = (_rate(one), *([_rate(best)] if best is not one else []), *_latencies(one, best))
    if probe.server.model_bytes:
        read = probe.server.model_bytes * one.rate
        evidence += (_number("weights read for one stream", read, "B/s", f"{read / 1e9:.3g} GB/s"),)
    if FLOOR in best.peak:
        evidence += (_number("floor of its steps, as it says", best.peak[FLOOR], "", f"{best.peak[FLOOR]:.0%} of their time"),)
    good = "Nothing is wrong that can be seen: " if nothing_wrong else ""
    if len(probe.whole) < 2 or best.streams < STREAMS:
        said = f"Too little was seen to judge its throughput: one stream gets {one.rate:,.0f} tok/s."
        return Verdict("not loaded", said, evidence, "give it more --seconds and --max-streams", "a verdict")
    last, before = probe.whole[-1], probe.whole[-2]
    growth = last.rate / before.rate if before.rate else 1.0
    if growth >= LINEAR:
        return Verdict(
            "bandwidth-bound decode",
            f"{good}{'d' if good else 'D'}ecoding is bound by what each step costs whatever is in it, weights read above all: "
            f"{last.streams} streams get {gain:.1f}x what one gets, and more would get more.",
            evidence,
            "send more at once; for one stream's speed weights in fewer bits, or speculative decoding",
            f"about {growth:.1f}x the throughput at {2 * last.streams} streams",
            growth,
            "there is no more load to send: then latency is what is left to mend",
            healthy=nothing_wrong,
        )
    if growth <= FULL:
        knee = next(p for p in probe.whole if p.rate >= 0.9 * best.rate)
        return Verdict(
            "saturated",
            f"{good}{'t' if good else 'T'}he server is full at about {knee.streams} streams: {best.rate:,.0f} tok/s, {gain:.1f}x what one stream gets.",
            evidence,
            f"keep it near {knee.streams} streams, queue or shed the others; for more: another replica, weights and KV in fewer bits",
            "no throughput from more streams, only longer waits",
            unless="prompts and answers are much longer or shorter than here (32 tokens in)",
            healthy=nothing_wrong,
        )
    return Verdict(
        "healthy",
        f"{good}{'b' if good else 'B'}atching gains {gain:.1f}x at {best.streams} streams, {best.rate:,.0f} tok/s; "
        f"the last doubling still brought {growth - 1:.0%}.",
        evidence,
        "nothing; more streams bring little more and wait longer",
        healthy=True,
    )


def _blind(probe: Probe) -> list[str]:
    """What this probe's figures can't tell."""
    blind = []
    if others := probe.before.get(RUNNING):
        blind.append(f"what the server gives without others: {others:.0f} requests of somebody else's ran when the probe began")
    if FLOOR not in probe.after:
        blind.append("whether a step's fixed cost is weights read or the host's work: that takes the server's own clocks")
    if probe.repeat is not None and not probe.repeat.cached and not _telling(probe):
        blind.append(f"the prefix cache: a prompt of {probe.repeat.tokens:,} tokens takes hardly longer than a short one")
    if probe.interference is not None and not probe.interference.streams:
        blind.append("what a long prompt does to others: none was being written when it came")
    if probe.after == {}:
        blind.append("what the server's front takes of a request: it does not count their time")
    return blind


def _telling(probe: Probe) -> bool:
    """Whether the repeated prompt costs enough for a cached one to be known by its time."""
    return probe.repeat is not None and bool(probe.lengths) and probe.repeat.cold >= TELLING * probe.lengths[0][1]


def _flag(probe: Probe, what: str) -> str:
    return FLAGS[what].get(probe.server.kind, DEFAULTS[what])


def _rate(point: Point) -> Evidence:
    name = "one stream" if point.streams == 1 else f"{point.streams} streams"
    return Evidence(name, point.rate, "tok/s", f"{point.rate:,.0f} tok/s")


def _latencies(one: Point, best: Point) -> tuple[Evidence, ...]:
    return (
        _seconds("per token, alone", one.tpot),
        *([_seconds(f"per token at {best.streams} streams", best.tpot)] if best is not one else []),
    )


def _number(what: str, value: float, unit: str, shown: str | None = None) -> Evidence:
    return Evidence(what, value, unit, shown if shown is not None else f"{value:.3g} {unit}".strip())


def _seconds(what: str, value: float) -> Evidence:
    return Evidence(what, value, "s", _time(value))


def _time(seconds: float) -> str:
    """1.24 s, 85.3 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _round(tokens: float) -> str:
    """Two digits are what this is known to."""
    return f"{float(f'{tokens:.2g}'):,.0f}"
