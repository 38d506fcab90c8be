"""Experiments on somebody's server, from outside and in bounded time: what it gives to one stream and to many, how prompts cost, what a
repeated head saves, what a long prompt does to its neighbours.

Measures only; probe_rules.py judges. Each experiment has its share of the seconds and leaves out what does not fit. Called by cli/doctor/.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from flatout.client.completions import Answer, Dialect, complete, learn
from flatout.client.http import Endpoint, EndpointError, Reader
from flatout.client.load import Figures, Load, run_load, sized, words
from flatout.doctor.gauges import E2E_COUNT, E2E_SUM, PREEMPTIONS, Server, chosen_model, gauges, identify, metrics

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (32, 128, 512, 1024, 2048, 4096, 8192)  # prompt tokens
SHORT = 32  # tokens of a prompt that is to cost little
LEAST, MOST = 8, 128  # output tokens of a stream in the sweep
LONGEST_REPEAT = 4096  # tokens
NEIGHBOURS = 3  # streams beside the long prompt, where so many run at a time
SETTLED = 8  # pieces of each of them before it comes
SHARES = {"one stream": 0.12, "prompt lengths": 0.2, "repeated prefix": 0.13, "concurrency": 0.38, "long prompt": 0.17}


@dataclass(frozen=True)
class Point:
    """So many streams at once, each of one short prompt. Times in s."""

    streams: int
    seconds: float  # the whole burst
    rate: float  # output tokens per second of all, from the first token on
    tpot: float  # per token and stream, the median stream's
    ttft: float  # median
    ttft_worst: float
    e2e: float  # median
    starts: tuple[float, ...]  # first tokens, from the burst's beginning
    active: int  # most answers that were being written at one time
    cpu: float  # cores that this client used
    errors: dict[str, int] = field(default_factory=dict)
    complaint: str = ""
    peak: dict[str, float] = field(default_factory=dict)  # the server's gauges in the middle of it


@dataclass(frozen=True)
class Repeat:
    """One prompt three times."""

    tokens: int
    cold: float  # TTFT in s
    again: float  # the better of the two later ones
    cached: int | None  # tokens, as the server says; None where it does not


@dataclass(frozen=True)
class Interference:
    """Short streams into which a long prompt came. Times in s."""

    tokens: int  # of the long prompt
    ttft: float  # its own
    quiet: float  # the median gap between tokens of the others before it came
    gap: float  # their longest while it was read; the median stream's
    streams: int  # that were being written when it came; 0: nothing could be seen


@dataclass
class Probe:
    """Everything that was measured; what could not be is in `unseen`."""

    url: str
    server: Server
    dialect: Dialect
    round_trip: float  # s, of a new connection
    points: list[Point] = field(default_factory=list)
    lengths: list[tuple[int, float]] = field(default_factory=list)  # prompt tokens -> TTFT in s
    repeat: Repeat | None = None
    interference: Interference | None = None
    refused: list[tuple[str, str]] = field(default_factory=list)  # (kind, message) of requests that ended an experiment
    before: dict[str, float] = field(default_factory=dict)  # the server's counters
    after: dict[str, float] = field(default_factory=dict)
    e2e_here: tuple[float, int] = (0.0, 0)  # sum in s and count, as this client saw all of its requests
    unseen: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def one(self) -> Point | None:
        return next((p for p in self.points if p.streams == 1), None)

    @property
    def whole(self) -> list[Point]:
        """The points at which every request was answered."""
        return [p for p in self.points if not p.errors]

    @property
    def prefill(self) -> tuple[float, float] | None:
        """(s before a prompt's first token is due, prompt tokens per second): a line through the shortest and the longest prompt.

        None where a longer prompt took no longer, or only one length was tried.
        """
        if len(self.lengths) < 2:
            return None
        (short, begin), (long, end) = self.lengths[0], self.lengths[-1]
        if end < 1.1 * begin:  # jitter, not prompts
            return None
        rate = (long - short) / (end - begin)
        return max(0.0, begin - short / rate), rate

    @property
    def e2e_there(self) -> float | None:
        """Mean seconds of a request as the server counts them, of those during the probe; None where it does not."""
        sums, counts = (self.after.get(k, 0.0) - self.before.get(k, 0.0) for k in (E2E_SUM, E2E_COUNT))
        return sums / counts if counts > 0 else None

    @property
    def preemptions(self) -> float | None:
        return self.after[PREEMPTIONS] - self.before.get(PREEMPTIONS, 0.0) if PREEMPTIONS in self.after else None

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "server": asdict(self.server),
            "dialect": asdict(self.dialect),
            "seconds": self.seconds,
            "round_trip_seconds": self.round_trip,
            "concurrency": [asdict(p) for p in self.points],
            "prompt_lengths": [{"tokens": tokens, "ttft_seconds": ttft} for tokens, ttft in self.lengths],
            "prefill_tokens_per_second": self.prefill and self.prefill[1],
            "repeated_prefix": self.repeat and asdict(self.repeat),
            "long_prompt": self.interference and asdict(self.interference),
            "server_e2e_seconds": self.e2e_there,
            "preemptions": self.preemptions,
            "unseen": self.unseen,
        }


Tell = Callable[[str, float], None]  # the experiment that goes on, and the share of the seconds that is over


async def probe(
    endpoint: Endpoint,
    model: str | None = None,
    seconds: float = 60.0,
    most_streams: int = 32,
    tell: Tell = lambda what, share: None,
    cpu: Callable[[], float] = time.process_time,
) -> Probe:
    """All experiments, in about `seconds`. `model`: the first that the server lists. `cpu`: a clock of this process's CPU time.

    EndpointError: no server, no entry, no such model, no streams.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    tell("who is there", 0.0)
    round_trip = await endpoint.connect_seconds()
    server = await identify(endpoint)
    model = model or chosen_model(server)
    dialect, learned = await learn(endpoint, model, timeout=max(10.0, seconds))
    found = Probe(endpoint.url, server, dialect, round_trip, unseen=list(server.unseen))
    if (with_size := await sized(endpoint, dialect, time.time_ns())) is not None:
        found.dialect = with_size
    else:
        found.unseen.append("prompt tokens: the server reports no usage in streams, so a word is taken for a token")
    if len(server.models) > 1 and model == server.models[0]:
        found.unseen.append(f"other models of this server: {', '.join(server.models[1:])}")
    experiments = _Experiments(endpoint, found, learned, most_streams, cpu)
    found.before = gauges(await metrics(endpoint))
    left = dict(SHARES)
    steps: dict[str, Callable[[float], Awaitable[None]]] = {
        "one stream": experiments.one_stream,
        "prompt lengths": experiments.prompt_lengths,
        "repeated prefix": experiments.repeated_prefix,
        "concurrency": experiments.concurrency,
        "long prompt": experiments.long_prompt,
    }
    for name, step in steps.items():
        now = loop.time()
        tell(name, min(1.0, (now - begin) / seconds))
        share = max(0.0, begin + seconds - now) * left[name] / sum(left.values())
        patience = max(1.0, min(2 * share + 1, begin + 1.2 * seconds - now))
        del left[name]
        try:
            async with asyncio.timeout(patience):  # experiments keep to their share by themselves, unless the server slows down
                await step(now + share)
        except EndpointError as error:
            found.refused.append((error.kind, str(error)))
            found.unseen.append(f"{name}: {error}")
        except TimeoutError:
            found.unseen.append(f"{name}: not over within {patience:.0f} s; give it more --seconds")
    if not found.points:
        raise EndpointError(*(found.refused[0] if found.refused else ("timeout", f"{endpoint.url}: not even one stream came to its end")))
    found.after = gauges(await metrics(endpoint))
    found.e2e_here = (sum(a.e2e for a in experiments.all), len(experiments.all))
    found.seconds = loop.time() - begin
    tell("done", 1.0)
    return found


class _Experiments:
    """The experiments, each given the loop time at which it should be over; and what they learn for each other."""

    def __init__(self, endpoint: Endpoint, found: Probe, learned: Answer, most_streams: int, cpu: Callable[[], float]):
        self.endpoint, self.found, self.learned, self.most_streams, self.cpu = endpoint, found, learned, most_streams, cpu
        self.all: list[Answer] = []  # that were good, since the server's counters were read
        self.seed = time.time_ns()  # no prompt may be in the server's cache from an earlier probe

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def prompt(self, tokens: int) -> str:
        """A new one."""
        self.seed += 1
        return words(tokens, self.found.dialect.tokens_per_word, f"probe {self.seed}")

    async def _ask(self, prompt: str, tokens: int, reader: Reader | None = None) -> Answer:
        """EndpointError: it was not answered."""
        answer = await complete(self.endpoint, self.found.dialect, prompt, tokens, reader)
        if answer.error:
            raise EndpointError(answer.error, answer.message)
        self.all.append(answer)
        return answer

    async def one_stream(self, until: float) -> None:
        """Up to three times; the median one counts."""
        first = self.learned
        room = max(0.0, (until - self.now) / 3 - first.ttft)
        self.tokens = max(LEAST, min(MOST, int(room / max(first.tpot or first.e2e, 1e-4))))
        tries: list[Point] = []
        while not tries or (len(tries) < 3 and self.now + tries[-1].e2e < until):
            tries.append(await self._burst(1))
        self.found.points.append(sorted(tries, key=lambda p: p.rate)[len(tries) // 2])

    async def prompt_lengths(self, until: float) -> None:
        """TTFT of longer and longer prompts, the better of two, while they fit the context and the time."""
        limit = self.found.server.max_model_len or LENGTHS[-1]
        for tokens in (n for n in LENGTHS if n <= 0.9 * limit):
            if self.found.lengths and self.now + 2 * self._expected(tokens) > until:
                self.found.unseen.append(f"prompts of {tokens:,} tokens and more: no time for them")
                return
            try:
                answers = [await self._ask(self.prompt(tokens), 1) for _ in range(2)]
            except EndpointError as error:
                if not self.found.lengths:
                    raise
                self.found.unseen.append(f"prompts of {tokens:,} tokens and more: refused ({error})")
                return
            self.found.lengths.append((answers[0].prompt_tokens or tokens, min(a.ttft for a in answers)))

    def _expected(self, tokens: int) -> float:
        """TTFT of a longer prompt than those so far, by the last two; by proportion, which is more, from one."""
        *_, (last, ttft) = self.found.lengths
        if len(self.found.lengths) < 2:
            return ttft * tokens / last
        before, earlier = self.found.lengths[-2]
        return ttft + max(0.0, ttft - earlier) * (tokens - last) / (last - before)

    async def repeated_prefix(self, until: float) -> None:
        """The longest prompt that the time allows thrice, and twice again."""
        fit = self.found.lengths
        if not fit:
            return
        tokens = max((n for n, ttft in fit if n <= LONGEST_REPEAT and self.now + 3 * ttft < until), default=fit[0][0])
        prompt = self.prompt(tokens)
        cold = await self._ask(prompt, 1)
        again = [await self._ask(prompt, 1) for _ in range(2)]
        cached = [a.cached_tokens for a in again if a.cached_tokens is not None]
        self.found.repeat = Repeat(cold.prompt_tokens or tokens, cold.ttft, min(a.ttft for a in again), max(cached, default=None))

    async def concurrency(self, until: float) -> None:
        """Bursts of more and more streams, while the next is expected to end in time: each twice as long, or half as long again where streams gain."""
        one = self.found.one
        if one is None:
            return
        last, longer = one, 1.5
        for streams in (n for n in STREAMS[1:] if n <= self.most_streams):
            if self.now + longer * last.seconds > until:
                self.found.unseen.append(f"{streams} streams and more: no time for them")
                return
            point = await self._burst(streams)
            longer = 1.5 if point.rate > 1.2 * last.rate else 2.0
            last = point
            self.found.points.append(point)
            if point.errors:
                self.found.unseen.append(f"more than {streams} streams: some of {streams} were refused already")
                return

    async def _burst(self, streams: int) -> Point:
        """So many at once, and the server's gauges in the middle of it."""
        loop, found = asyncio.get_running_loop(), self.found
        load = Load(clients=streams, requests=streams, prompt=(SHORT, SHORT), output=(self.tokens, self.tokens), seed=self.seed)
        self.seed += 1
        peek = loop.create_task(self._peek(found.points[-1].seconds / 2 if found.points else 0.0))
        begin, cpu = loop.time(), self.cpu()
        try:
            answers = await run_load(self.endpoint, found.dialect, load)
        finally:
            too_late = peek.cancel()
        seconds = loop.time() - begin
        cores = (self.cpu() - cpu) / seconds if seconds > 0 else 0.0
        good = [a for a in answers if not a.error]
        self.all += good
        figures = Figures.of(answers)
        if not good:
            kind, message = next(iter(figures.examples.items()))
            raise EndpointError(kind, message)
        assert figures.ttft and figures.e2e
        first, end = min(a.times[0] for a in good), max(a.times[-1] for a in good)
        return Point(
            streams,
            seconds,
            rate=(sum(a.tokens for a in good) - 1) / (end - first) if end > first else 0.0,
            tpot=figures.tpot.p50 if figures.tpot else 0.0,
            ttft=figures.ttft.p50,
            ttft_worst=figures.ttft.longest,
            e2e=figures.e2e.p50,
            starts=tuple(sorted(a.ttft for a in good)),
            active=_overlap(good),
            cpu=cores,
            errors=figures.errors,
            complaint=next(iter(figures.examples.values()), ""),
            peak={} if too_late else peek.result(),
        )

    async def _peek(self, after: float) -> dict[str, float]:
        await asyncio.sleep(after)
        return gauges(await metrics(self.endpoint))

    async def long_prompt(self, until: float) -> None:
        """Short streams are being written when the longest prompt that fits arrives."""
        one = self.found.one
        if one is None or self.found.prefill is None:
            self.found.unseen.append("what a long prompt does to others: longer prompts took no longer, or were not tried")
            return
        beside = min(NEIGHBOURS, max(p.active for p in self.found.points) - 1)
        if beside < 1:
            self.found.unseen.append("what a long prompt does to others: no two answers are written at one time")
            return
        left = until - self.now - 3 * SETTLED * one.tpot
        tokens = max((n for n, ttft in self.found.lengths if 2 * ttft < left), default=0)
        if not tokens:
            self.found.unseen.append("what a long prompt does to others: no time for it")
            return
        writing = min(1024, (self.found.server.max_model_len or 1 << 20) - 2 * SHORT)
        times: list[list[float]] = [[] for _ in range(beside)]
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        def note(mine: list[float]) -> Callable[[bytes], None]:
            def on_piece(piece: bytes) -> None:
                mine.append(loop.time())
                if sum(map(len, times)) == SETTLED * beside:
                    begun.set()

            return on_piece

        neighbours = [loop.create_task(self._ask(self.prompt(SHORT), writing, Reader(on_piece=note(mine)))) for mine in times]
        waiting = loop.create_task(begun.wait())
        try:
            await asyncio.wait([waiting, *neighbours], return_when=asyncio.FIRST_COMPLETED)
            long = await self._ask(self.prompt(tokens), 1)
            await asyncio.sleep(4 * one.tpot)  # for the gap in which it was read to end
            for mine, neighbour in zip(times, neighbours):
                if mine and not neighbour.done():
                    mine.append(loop.time())  # a gap that has not ended is at least this long
        finally:
            for task in (waiting, *neighbours):
                task.cancel()  # hangs up: what they were to write is of no interest
            ends = await asyncio.gather(*neighbours, return_exceptions=True)
        self.found.unseen += [f"a neighbour of a long prompt: {e}" for e in ends if isinstance(e, EndpointError)][:1]
        self.found.interference = _interference(long, times, tokens)


def _interference(long: Answer, others: Sequence[Sequence[float]], tokens: int) -> Interference:
    """`others`: when each neighbour got a piece of its stream."""
    arrived, read = long.sent, long.times[0]
    quiet = [b - a for times in others for a, b in pairwise(times[1:]) if b <= arrived]
    # a stream's longest wait for a token while the prompt was read: gaps that overlap that time
    writing = [times for times in others if times and times[0] < arrived < times[-1]]
    waits = [max(b - a for a, b in pairwise(times) if b > arrived and a < read) for times in writing]
    seen = bool(waits and quiet)
    return Interference(long.prompt_tokens or tokens, long.ttft, median(quiet) if seen else 0.0, median(waits) if seen else 0.0, len(waits))


def _overlap(answers: Sequence[Answer]) -> int:
    """The most answers that were between their first and last token at one time."""
    edges = sorted(edge for a in answers for edge in ((a.times[0], 1), (a.times[-1], -1)))
    most = now = 0
    for _, step in edges:  # at one time an end comes before a beginning
        now += step
        most = max(most, now)
    return most
