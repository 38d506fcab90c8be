"""Metrics: what a served model counts, on events as they happen, and how Prometheus reads it: under flatout's names, and under vLLM's for routers.

Counting is plain Python, a fraction of a microsecond; families are made when somebody scrapes. One Metrics a model, on the event loop; fed by engines.py,
openai.py and the engine's own reports (mailbox.py:Steps), shown by app.py at /metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from flatout.ledger.account import RequestAccount
from flatout.ledger.ledger import PARTS, Ledger
from flatout.server.mailbox import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
TOKENS = tuple(1 << i for i in range(18))
NO_COUNTER = ("residual", "underway")  # parts that may fall


class Histogram:
    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass
class Metrics:
    """Of one model."""

    prompt_tokens: int = 0  # of prompts whose first token came; each counts once, whatever its samples
    generation_tokens: int = 0  # that belong to answers: not those behind a stop string
    finished: dict[str, int] = field(default_factory=dict)  # choices by finish reason
    requests: int = 0  # taken from clients
    in_flight: int = 0  # of them, not yet answered
    refused: int = 0  # by the engine
    state: EngineState = field(default_factory=EngineState)
    queued: dict[str, float] = field(default_factory=dict)  # seconds in the queue, by reason
    ttft: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    gap: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # between tokens
    tpot: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    whole: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    decode: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    answer_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def ended(self, account: RequestAccount) -> None:
        """A request was answered, well or not."""
        self.whole.observe(account.total)
        if account.tpot is not None:
            self.tpot.observe(account.tpot)
        waits = {name.removeprefix("queue "): s for name, s in account.parts.items() if name.startswith("queue ")}
        for reason, seconds in waits.items():
            self.queued[reason] = self.queued.get(reason, 0.0) + seconds
        self.queue.observe(sum(waits.values()))
        if account.ttft is not None:
            self.prefill.observe(account.parts["prefill"])
            self.decode.observe(account.parts["decode"])
        self.prompt_lengths.observe(account.prompt_tokens)
        self.answer_lengths.observe(account.completion_tokens)


Served = tuple[str, Metrics, Ledger | None]  # a model's name, and what it counts
Value = float | Histogram

# kind, name, vLLM's older name where it had one, what it is, and its value
_SHARED: tuple[tuple[str, str, str | None, str, Callable[[Metrics], Value]], ...] = (
    ("gauge", "num_requests_running", None, "Sequences in the running batch.", lambda m: m.state.running),
    ("gauge", "num_requests_waiting", None, "Sequences in the queue.", lambda m: m.state.num_waiting),
    ("gauge", "kv_cache_usage_perc", "gpu_cache_usage_perc", "Blocks held by requests, of all (1 = all).", lambda m: m.state.usage),
    ("counter", "num_preemptions", None, "Preemptions.", lambda m: m.state.preemptions),
    ("counter", "prefix_cache_queries", None, "Prompt tokens looked up in the prefix cache.", lambda m: m.state.prefix_queries),
    ("counter", "prefix_cache_hits", None, "Of them, those that were found.", lambda m: m.state.prefix_hits),
    ("counter", "prompt_tokens", None, "Prompt tokens of requests that got a token.", lambda m: m.prompt_tokens),
    ("counter", "generation_tokens", None, "Tokens of answers.", lambda m: m.generation_tokens),
    ("histogram", "time_to_first_token_seconds", None, "From the door to the first token.", lambda m: m.ttft),
    ("histogram", "inter_token_latency_seconds", "time_per_output_token_seconds", "Between a sequence's tokens.", lambda m: m.gap),
    ("histogram", "request_time_per_output_token_seconds", None, "A request's mean between tokens.", lambda m: m.tpot),
    ("histogram", "e2e_request_latency_seconds", None, "From the door to the last byte.", lambda m: m.whole),
    ("histogram", "request_queue_time_seconds", None, "In the queue.", lambda m: m.queue),
    ("histogram", "request_prefill_time_seconds", None, "From the first step to the first token.", lambda m: m.prefill),
    ("histogram", "request_decode_time_seconds", None, "From the first token to the last.", lambda m: m.decode),
    ("histogram", "request_prompt_tokens", None, "Tokens of a request's prompts.", lambda m: m.prompt_lengths),
    ("histogram", "request_generation_tokens", None, "Tokens of a request's answers.", lambda m: m.answer_lengths),
)
_OURS: tuple[tuple[str, str, str, Callable[[Metrics], Value]], ...] = (
    ("gauge", "requests_in_flight", "Requests taken and not yet answered.", lambda m: m.in_flight),
    ("counter", "requests", "Requests taken.", lambda m: m.requests),
    ("counter", "requests_refused", "Requests that the engine refused.", lambda m: m.refused),
    ("counter", "steps", "Engine steps.", lambda m: m.state.steps),
)
# kind, name, label, what it is, and its values by label
_BY: tuple[tuple[str, str, str, str, Callable[[Metrics], Mapping[str, float]]], ...] = (
    ("counter", "flatout:request_success", "finished_reason", "Choices by how they ended.", lambda m: m.finished),
    ("counter", "vllm:request_success", "finished_reason", "Choices by how they ended.", lambda m: m.finished),
    ("gauge", "flatout:waiting_by_reason", "reason", "Sequences in the queue by what they wait for.", lambda m: m.state.waiting),
    ("counter", "flatout:queue_seconds", "reason", "Request-seconds in the queue by reason.", lambda m: m.queued),
)


class _Families(Collector):
    def __init__(self, served: Sequence[Served]):
        self._served = served

    def collect(self) -> Iterator[Metric]:
        for kind, name, older, says, value in _SHARED:
            for full in (f"flatout:{name}", f"vllm:{name}", *([f"vllm:{older}"] if older else [])):
                yield self._family(kind, full, says, value)
        for kind, name, says, value in _OURS:
            yield self._family(kind, f"flatout:{name}", says, value)
        for kind, name, label, says, values in _BY:
            yield self._by(kind, name, label, says, [values(metrics) for _, metrics, _ in self._served])
        totals, shares = [], []
        for _, metrics, ledger in self._served:
            busy = metrics.state.running > 0
            total = ledger.total(busy) if ledger else None
            totals.append({part: total.parts[part] for part in PARTS if part not in NO_COUNTER} if total else {})
            shares.append({"10s": ledger.window(10, busy).of_floor} if ledger else {})
        yield self._by("counter", "flatout:step_seconds", "part", "Wall time of steps by part of the ledger.", totals)
        yield self._by("gauge", "flatout:of_floor", "window", "Floor as a share of the time with load.", shares)

    def _family(self, kind: str, name: str, says: str, value: Callable[[Metrics], Value]) -> Metric:
        return _metric(kind, name, says, (), [((model,), value(metrics)) for model, metrics, _ in self._served])

    def _by(self, kind: str, name: str, label: str, says: str, values: Sequence[Mapping[str, float]]) -> Metric:
        each = [((served[0], key), value) for served, of_model in zip(self._served, values) for key, value in of_model.items()]
        return _metric(kind, name, says, (label,), each)


def _metric(kind: str, name: str, says: str, labels: Sequence[str], values: Sequence[tuple[Sequence[str], Value]]) -> Metric:
    names = ("model_name", *labels, "engine")  # vLLM's labels; a model has one engine here
    if kind == "histogram":
        family = HistogramMetricFamily(name, says, labels=names)
        for of, value in values:
            assert isinstance(value, Histogram)
            family.add_metric((*of, "0"), value.buckets(), value.sum)
        return family
    plain = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, says, labels=names)
    for of, value in values:
        assert not isinstance(value, Histogram)
        plain.add_metric((*of, "0"), float(value))
    return plain


def exposition(served: Sequence[Served]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(served))
    return generate_latest(registry)
