"""What a server says of itself: whose it is, and its counters and gauges under one set of names, whatever it calls them.

/metrics of flatout, vLLM, SGLang, TGI and llama.cpp; /v1/models; llama.cpp's /props; flatout's own /ledger. Called by probe.py, cli/doctor/ and bench/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.client.http import Endpoint, EndpointError

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)")

# our name -> theirs; several where versions differ: the first that is there counts
RUNNING, WAITING, PREEMPTIONS = "running", "waiting", "preemptions"
E2E_SUM, E2E_COUNT = "e2e_seconds_sum", "e2e_seconds_count"
KV = "kv_used"  # a share, 0 to 1
FLOOR = "of_floor"  # the floor of its steps as a share of their time, now; ours alone says that
VLLM = {
    RUNNING: ("num_requests_running",),
    WAITING: ("num_requests_waiting",),
    KV: ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    PREEMPTIONS: ("num_preemptions_total", "num_preemptions"),
    E2E_SUM: ("e2e_request_latency_seconds_sum",),
    E2E_COUNT: ("e2e_request_latency_seconds_count",),
}
KNOWN: dict[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {  # server -> prefix of its metrics, their names
    "flatout": ("flatout:", {**VLLM, FLOOR: ("of_floor",)}),
    "vLLM": ("vllm:", VLLM),
    "SGLang": (
        "sglang:",
        {
            RUNNING: ("num_running_reqs",),
            WAITING: ("num_queue_reqs",),
            KV: ("token_usage",),
            PREEMPTIONS: ("num_retracted_requests_total", "num_retracted_reqs"),
            E2E_SUM: ("e2e_request_latency_seconds_sum",),
            E2E_COUNT: ("e2e_request_latency_seconds_count",),
        },
    ),
    "TGI": (
        "tgi_",
        {
            RUNNING: ("batch_current_size",),
            WAITING: ("queue_size",),
            E2E_SUM: ("request_duration_sum",),
            E2E_COUNT: ("request_duration_count",),
        },
    ),
    "llama.cpp": (
        "llamacpp:",
        {RUNNING: ("requests_processing",), WAITING: ("requests_deferred",), KV: ("kv_cache_usage_ratio",)},
    ),
}
OWNERS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "flatout": "flatout"}  # as /v1/models has owned_by
HOW = {  # what makes metrics appear where they do not by themselves
    "SGLang": "start it with --enable-metrics",
    "llama.cpp": "start it with --metrics",
}


@dataclass(frozen=True)
class Server:
    """What is known of a server before it is asked to generate. None: it does not say."""

    kind: str = "unknown"  # a key of KNOWN, or "unknown"
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    slots: int | None = None  # llama.cpp's -np
    model_bytes: int | None = None  # of the weights' file
    unseen: tuple[str, ...] = ()


def parse(text: str) -> dict[str, float]:
    """Prometheus text: the sum of each metric's samples, over its labels. What is no number counts as absent."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := SAMPLE.match(line):
            try:
                value = float(match[2])
            except ValueError:
                continue
            if value == value and not match[1].endswith("_bucket"):
                found[match[1]] = found.get(match[1], 0.0) + value
    return found


def kind_of(metrics: Mapping[str, float]) -> str | None:
    """Whose these metrics are. A server with vLLM's names beside its own (ours) counts by its own: KNOWN's order."""
    return next((kind for kind, (prefix, _) in KNOWN.items() if any(name.startswith(prefix) for name in metrics)), None)


def gauges(metrics: Mapping[str, float]) -> dict[str, float]:
    """A reading of /metrics by our names; a name is missing where the server has no such metric, all are where it is nobody's we know."""
    kind = kind_of(metrics)
    if kind is None:
        return {}
    prefix, names = KNOWN[kind]
    found = {ours: next((prefix + t for t in theirs if prefix + t in metrics), None) for ours, theirs in names.items()}
    return {ours: metrics[name] for ours, name in found.items() if name is not None}


async def metrics(endpoint: Endpoint) -> dict[str, float]:
    """Empty where there are none. What goes wrong here is told elsewhere: a server that is gone answers no completion either."""
    try:
        reply = await endpoint.get("/metrics")
    except EndpointError:
        return {}
    return parse(reply.text) if reply.status == 200 else {}


async def identify(endpoint: Endpoint) -> Server:
    """Raises EndpointError: there is no server, it lets nobody in, or it is not ready."""
    listed = await endpoint.get("/v1/models", timeout=15)
    if listed.status not in (200, 404, 405):  # not let in, or not ready; without that route --model will do
        raise EndpointError(f"http {listed.status}", listed.complaint)
    entries = _entries(listed.json()) if listed.status == 200 else []
    found = await metrics(endpoint)
    owner = OWNERS.get(str(entries[0].get("owned_by")) if entries else "")
    props = await _json(endpoint, "/props") if owner in (None, "llama.cpp") else {}
    if owner is None and "total_slots" in props:
        owner = "llama.cpp"
    meta = (entries[0].get("meta") or {}) if entries else {}
    kind = owner or kind_of(found) or "unknown"
    unseen = []
    if kind_of(found) is None:
        how = HOW.get(kind)
        unseen.append("queue, KV cache use and preemptions: /metrics is not there" + (f"; {how}" if how else ""))
    return Server(
        kind,
        tuple(str(entry["id"]) for entry in entries if entry.get("id")),
        _whole(entries[0].get("max_model_len") if entries else None)
        or _whole((props.get("default_generation_settings") or {}).get("n_ctx")),
        _whole(props.get("total_slots")),
        _whole(meta.get("size")),
        tuple(unseen),
    )


def chosen_model(server: Server) -> str:
    """Where nobody said which. EndpointError: the server lists none."""
    if not server.models:
        raise EndpointError("no model", "the server lists no model at /v1/models")
    return server.models[0]


async def _json(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """An object, empty where there is none."""
    try:
        reply = await endpoint.get(path)
    except EndpointError:
        return {}
    value = reply.json() if reply.status == 200 else None
    return value if isinstance(value, dict) else {}


def _entries(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


async def ledgers(endpoint: Endpoint, deep: int = 0) -> dict[str, Any] | None:
    """A flatout server's account of each model, by name: state, windows, table (server/engines.py); None: the server keeps none.

    deep: so many steps from now on tell their ops apart. EndpointError: it may not be read.
    """
    reply = await endpoint.get(f"/ledger?deep={deep}" if deep else "/ledger")
    if reply.status == 404:
        return None
    if reply.status != 200:
        raise EndpointError(f"http {reply.status}", reply.complaint)
    found: dict[str, Any] = reply.json()["models"]
    return found
