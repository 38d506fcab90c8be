"""A load on an endpoint: who asks when, what and how fast he reads; and the figures of what came back.

Closed loop: so many clients, each asks again once it is answered. Open loop: requests arrive by themselves, however long the queue. Prompts are
made here, of words that most vocabularies hold as one token. Called by doctor/probe.py, bench/served.py and cli/.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flatout.client.completions import Answer, Dialect, complete
from flatout.client.http import Endpoint, EndpointError, Reader

TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case week "
    "company system program question work government number night point home water room mother area money story fact month lot right study "
    "book eye job word business issue side kind head house service friend father power hour game line end member law car city community name"
)
WORDS = TEXT.split()
CALIBRATION = 10, 60  # words; from the tokens of both the size of prompts is known


@dataclass(frozen=True)
class Load:
    """What to send. Lengths are tokens, (least, most), drawn evenly between. ValueError names a field that makes no sense."""

    clients: int = 1  # closed loop: how many ask at once
    rate: float | None = None  # open loop instead: arrivals per second
    burstiness: float = 1.0  # of arrivals: 1 is Poisson's, 0 evenly spaced, over 1 in clumps
    requests: int | None = None  # stop after so many,
    seconds: float | None = None  # or start none after so long; one of the two must be given
    prompt: tuple[int, int] = (128, 128)
    output: tuple[int, int] = (128, 128)
    shared: int = 0  # tokens at the head of prompts that are the same for those of one group
    groups: int = 1  # of such heads
    slow: float = 0.0  # share of readers who pause
    pause: float = 0.1  # seconds, after each piece that such a reader got
    timeout: float = 300.0  # seconds for one request
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "clients": self.clients < 1,
            "rate": self.rate is not None and self.rate <= 0,
            "burstiness": self.burstiness < 0,
            "requests": self.requests is not None and self.requests < 1,
            "seconds": self.seconds is not None and self.seconds <= 0,
            "prompt": not 1 <= self.prompt[0] <= self.prompt[1],
            "output": not 1 <= self.output[0] <= self.output[1],
            "shared": not 0 <= self.shared < self.prompt[0],
            "groups": self.groups < 1,
            "slow": not 0 <= self.slow <= 1,
            "pause": self.pause < 0,
        }
        if bad := next((name for name, is_wrong in wrong.items() if is_wrong), ""):
            raise ValueError(f"{bad}: {getattr(self, bad)!r} makes no load")
        if self.requests is None and self.seconds is None:
            raise ValueError("requests, seconds: one of them must end the load")

    def asks(self, tokens_per_word: float) -> Iterator[tuple[str, int, Reader]]:
        """(prompt, tokens to write, how it is read), the same for the same load, without end."""
        rng = random.Random(self.seed)
        while True:
            length = rng.randint(*self.prompt)
            head = words(self.shared, tokens_per_word, f"head {self.seed} {rng.randrange(self.groups)}")
            tail = words(length - self.shared, tokens_per_word, rng)
            yield f"{head} {tail}".strip(), rng.randint(*self.output), Reader(self.pause if rng.random() < self.slow else 0.0)

    def delays(self) -> Iterator[float]:
        """Seconds from one arrival to the next; their spread over their mean is the square root of burstiness."""
        assert self.rate is not None
        rng = random.Random(f"arrivals {self.seed}")
        while True:
            shape = 1 / self.burstiness if self.burstiness else None
            yield rng.gammavariate(shape, 1 / (shape * self.rate)) if shape else 1 / self.rate


def words(tokens: int, tokens_per_word: float, seed: random.Random | str) -> str:
    """A text of about so many tokens, another one for another seed from its first words on."""
    rng = random.Random(seed) if isinstance(seed, str) else seed
    return " ".join(rng.choices(WORDS, k=round(tokens / tokens_per_word)))


async def sized(endpoint: Endpoint, dialect: Dialect, seed: int) -> Dialect | None:
    """The dialect with its tokens_per_word measured, whatever a template adds to a prompt; None where the server counts no tokens.

    EndpointError: the two short prompts for it were not answered.
    """
    counts = []
    for length in CALIBRATION:
        answer = await complete(endpoint, dialect, words(length, 1.0, f"size {seed} {length}"), 1)
        if answer.error:
            raise EndpointError(answer.error, answer.message)
        counts.append(answer.prompt_tokens)
    few, many = counts
    return replace(dialect, tokens_per_word=(many - few) / (CALIBRATION[1] - CALIBRATION[0])) if many > few else None


async def run_load(endpoint: Endpoint, dialect: Dialect, load: Load, on_answer: Callable[[Answer], None] | None = None) -> list[Answer]:
    """Every answer, in the order of their ends. What was begun is finished."""
    loop = asyncio.get_running_loop()
    begin, answers, asks = loop.time(), list[Answer](), load.asks(dialect.tokens_per_word)
    left = load.requests if load.requests is not None else 1 << 62

    def wanted() -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and (load.seconds is None or loop.time() - begin < load.seconds)

    async def one(arrival: float | None = None) -> None:
        prompt, tokens, reader = next(asks)
        answer = await complete(endpoint, dialect, prompt, tokens, reader, load.timeout, arrival)
        answers.append(answer)
        if on_answer is not None:
            on_answer(answer)

    async def client() -> None:
        while wanted():
            await one()

    async with asyncio.TaskGroup() as tasks:
        if load.rate is None:
            for _ in range(load.clients):
                tasks.create_task(client())
            return answers
        due = begin
        for delay in load.delays():
            if not wanted():
                break
            tasks.create_task(one(due))
            due += delay
            await asyncio.sleep(max(0.0, due - loop.time()))
    return answers


@dataclass(frozen=True)
class Spread:
    """Of one latency, in s."""

    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there are none."""
        ordered = sorted(values)
        return cls(*(quantile(ordered, q) for q in (0.5, 0.9, 0.99, 1.0))) if ordered else None


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of sorted values, linear between the two nearest."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Figures:
    """Of the answers of a load. Latencies are None where nothing could be timed."""

    requests: int
    errors: dict[str, int]  # by kind
    seconds: float  # from the first arrival to the last end
    prompt_tokens: int
    cached_tokens: int | None  # None: the server never says
    tokens: int
    told: bool  # tokens are the server's counts, not events'
    ttft: Spread | None
    tpot: Spread | None  # each request's mean
    itl: Spread | None  # every gap of every stream
    e2e: Spread | None
    late: float  # seconds by which the client itself sent a request late, the worst
    examples: dict[str, str] = field(default_factory=dict)  # a message for each kind of error

    @property
    def rate(self) -> float:
        """Tokens written per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Figures:
        good = [a for a in answers if not a.error]
        cached = [a.cached_tokens for a in good if a.cached_tokens is not None]
        return cls(
            requests=len(answers),
            errors=dict(Counter(a.error for a in answers if a.error)),
            seconds=max(a.end for a in answers) - min(a.arrival for a in answers) if answers else 0.0,
            prompt_tokens=sum(a.prompt_tokens for a in good),
            cached_tokens=sum(cached) if cached else None,
            tokens=sum(a.tokens for a in good),
            told=all(a.told for a in good),
            ttft=Spread.of([a.ttft for a in good]),
            tpot=Spread.of([a.tpot for a in good if a.tpot is not None]),
            itl=Spread.of([gap for a in good for gap in a.gaps]),
            e2e=Spread.of([a.e2e for a in good]),
            late=max((a.sent - a.arrival for a in answers if a.sent), default=0.0),
            examples={a.error: a.message for a in answers if a.error},
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.rate}
