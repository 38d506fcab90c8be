"""States: what is said of a model when nothing is to be mended, or beside what is: no load, or how near the floor it runs and which term is the floor.

See rules.py, which calls it last. No I/O.
"""

from __future__ import annotations

from flatout.ledger.signals import Signals, count, percent
from flatout.ledger.verdict import Verdict

IDLE = 0.5  # of the window: half of it had nothing to do
MOST = 3  # ops named


def state(s: Signals, nothing_wrong: bool) -> Verdict:
    """Never None. nothing_wrong: no rule holds."""
    a = s.account
    idle = a.parts["idle"] / a.seconds if a.seconds > 0 else 1.0
    good = "Nothing is wrong: " if nothing_wrong else ""
    if idle >= IDLE or not a.steps:
        asked = f"{s.got('requests') / s.seconds:.2g} requests a second come" if s.seconds else "no request came"
        return Verdict(
            "no load",
            f"{good}{'t' if good else 'T'}here is too little load to limit anything; {asked}, and {idle:.0%} of the time nothing was to be done.",
            (percent("idle", idle), count("requests running, in the mean", a.rows)),
            "nothing; to see how fast it is, send more",
            healthy=nothing_wrong,
        )
    bandwidth, compute = (s.of_load(a.parts[name]) for name in ("floor_bandwidth", "floor_compute"))
    reach = f"you are at {a.of_floor:.0%} of what this machine can do" if a.of_floor else f"the device is busy for {s.device:.0%} of the time"
    evidence = [
        percent("of the floor", a.of_floor),
        percent("floor by bandwidth", bandwidth),
        percent("floor by compute", compute),
        percent("kernels beyond it", s.of_load(a.parts["kernels"])),
        percent("host", sum(s.host.values())),
        count("requests in a step", a.rows),
        *(percent(f"over its floor: {op.label}", s.of_load(op.over)) for op in a.ops[:MOST]),
    ]
    sentence = f"{good}{reach}"
    if a.chunk_s > a.decode_s:
        return Verdict(
            "compute-bound prefill" if compute >= bandwidth else "prefill",
            f"{sentence[0].upper()}{sentence[1:]}; {s.of_load(a.chunk_s):.0%} of the time goes to steps with prompts, which need arithmetic.",
            tuple(evidence),
            "shared heads at the beginning of prompts, shorter prompts, fewer bits (--quantization int8), more devices",
            unless="prompts are read so seldom that answers are what is waited for",
            healthy=nothing_wrong,
        )
    weights, kv = _terms(s)
    more = s.decode_gain(a.rows, 2 * a.rows)
    return Verdict(
        "bandwidth-bound decode",
        f"{sentence[0].upper()}{sentence[1:]}; decoding is bound by reading {'keys and values' if kv > weights else 'weights'}, "
        f"and {'twice the requests in a step would bring ' + format(more, '.2g') + 'x the throughput' if more >= 1.2 else 'more requests bring little'}.",
        (*evidence, percent("weights, of a step's bytes", weights), percent("keys and values", kv)),
        "--kv-cache-dtype int8, shorter contexts" if kv > weights else "more requests at once; weights in fewer bits (--quantization int8, int4)",
        f"{more:.2g}x the throughput at {2 * a.rows:.0f} requests" if more >= 1.2 else "",
        unless="no more requests are to be had: then fewer bits are what is left",
        healthy=nothing_wrong,
    )


def _terms(s: Signals) -> tuple[float, float]:
    """Shares of weights and of keys and values among a decode step's bytes."""
    if s.table is None:
        return 1.0, 0.0
    rows = max(1, round(s.account.rows))
    cost = s.table.cost(s.decode_shape(rows))
    whole = max(1, cost.bytes)
    return cost.weights / whole, cost.kv / whole
