"""Rules over the engine's steps: what is in them, what they wait for, and what of their time brings no token.

What a setting would bring is told from the cost table at the shapes that were met. See rules.py. No I/O.
"""

from __future__ import annotations

from flatout.ledger.rules import SPEED, Found, Rule
from flatout.ledger.signals import Signals, count, gained, in_words, percent, seconds

HOST = 0.2  # of the time with load for which the device waits for one stage of the host
ROWS = 0.8  # of the slots: they are taken
BUDGET = 0.8  # of the token budget, in the mean of the steps with chunks
CHUNK = 512  # tokens: what larger budgets are held against
HELD, STALL = 10.0, 0.5  # a step that keeps decodes waiting: times the usual one, and seconds
LOGPROBS, EXTRA = 0.5, 0.08  # of the tokens, and of the time with load
STALLED = 0.04  # of the time with load
REJECTED = 0.2  # of the rows
PADDED = MISSED = COMMUNICATION = 0.15
FLOOR = 0.15
SAID = {
    "drain": "taking requests in",
    "schedule": "planning steps",
    "inputs": "making a step's inputs",
    "wait": "noticing that a step has ended",
    "commit": "taking a step's tokens in",
    "deliver": "handing tokens on",
}


def _host(s: Signals) -> Found | None:
    if not s.steady:
        return None
    stage, most = max(s.host.items(), key=lambda each: each[1])
    whole = sum(s.host.values())
    if most < HOST / 2 or whole < HOST:
        return None
    return Found(
        f"The device waits for the host for {whole:.0%} of the time with load, most of it ({most:.0%}) while the engine is {SAID[stage]} ({stage}).",
        (
            *(percent(f"waits for {name}", share) for name, share in sorted(s.host.items(), key=lambda e: -e[1]) if share >= 0.01),
            percent("device busy", s.device),
            seconds("host time of that stage, each step", s.account.host.get(stage, 0.0) / max(1, s.account.steps)),
        ),
        gained(whole),
        SPEED,
    )


def _slots(s: Signals) -> Found | None:
    limit, waiting = s.settings.get("max_num_seqs", 0), s.account.waiting.get("slots", 0.0)
    if not s.steady or not limit or waiting < 0.5 or s.account.decode_rows < ROWS * limit:
        return None
    wanted = round(s.account.rows + waiting)
    factor = s.decode_gain(s.account.rows, wanted)
    if factor < 1.1:
        return None
    return Found(
        f"{waiting:.1f} requests wait for a slot in the mean while {limit:.0f} run: --max-num-seqs is {limit:.0f}, and the blocks would hold more.",
        (
            count("waiting for slots", waiting, "requests"),
            count("running", s.account.rows, f"of {limit:.0f}"),
            percent("of the requests' time in that queue", s.queued("slots")),
            percent("KV blocks in use", s.account.blocks),
        ),
        factor,
        SPEED,
        remedy=f"--max-num-seqs {_round_up(wanted)}, now {limit:.0f}",
        gain=f"about {factor:.2g}x the throughput with {wanted} in a step, by the cost table",
    )


def _pool(s: Signals) -> Found | None:
    waiting, preempted = s.account.waiting.get("blocks", 0.0), s.got("preemptions")
    if not s.steady or (preempted < 3 and waiting < 0.5) or s.account.blocks < 0.5:
        return None
    tokens = float(s.settings.get("num_blocks", 0)) * float(s.settings.get("block_size", 1))
    wanted = s.account.rows + waiting
    factor = max(s.decode_gain(s.account.rows, wanted), gained(s.share("preempted")), gained(s.queued("blocks")))
    need = tokens * wanted / max(s.account.rows, 1.0)
    return Found(
        f"The KV pool of {tokens:,.0f} tokens is too small for this load: {preempted:.0f} preemptions, and {waiting:.1f} requests wait for blocks in the mean.",
        (
            count("preemptions", preempted),
            count("waiting for blocks", waiting, "requests"),
            count("pool", tokens, "tokens"),
            count("this load needs about", need, "tokens"),
            percent("KV blocks in use", s.account.blocks),
            percent("of the requests' time, preempted or in that queue", s.share("preempted") + s.queued("blocks")),
        ),
        factor,
        remedy=f"a pool of {need:,.0f} tokens: --kv-cache-memory-bytes or --gpu-memory-utilization; --kv-cache-dtype int8 on a CPU; or fewer at once "
        f"(--max-num-seqs {max(1, round(s.account.rows))})",
    )


def _budget(s: Signals) -> Found | None:
    budget, a = float(s.settings.get("max_num_batched_tokens", 0)), s.account
    if not s.steady or not budget or not a.chunks or budget > CHUNK / 2 or a.chunk_tokens / a.chunks < BUDGET * budget or s.table is None:
        return None
    small, large = s.chunk_seconds(round(budget)) / budget, s.chunk_seconds(CHUNK) / CHUNK
    factor = gained(s.of_load(a.chunk_s) * (1 - large / small)) if small > large else 1.0
    # rows that wait for the budget alone would go with the others, too
    factor = max(factor, s.decode_gain(a.rows, a.rows + a.waiting.get("budget", 0.0)))
    return Found(
        f"Steps are filled up: {a.chunk_tokens / a.chunks:.0f} tokens in the mean of a budget of {budget:.0f}, so prompts go in small pieces that read all "
        "the weights for each.",
        (
            count("tokens of a step with chunks", a.chunk_tokens / a.chunks, f"of {budget:.0f}"),
            percent("of the steps", a.chunks / a.steps),
            count("waiting for budget", a.waiting.get("budget", 0.0), "requests"),
            percent("of the time with load, in such steps", s.of_load(a.chunk_s)),
        ),
        factor,
        SPEED,
        remedy=f"--max-num-batched-tokens {CHUNK}, now {budget:.0f}",
    )


def _held(s: Signals) -> Found | None:
    a = s.account
    usual = a.decode_s / max(1, a.steps - a.chunks)
    if not s.steady or a.longest < max(STALL, HELD * usual) or a.largest < 2 * CHUNK // 2 or a.steps == a.chunks:
        return None
    short = a.longest * CHUNK / 2 / a.largest + usual
    if a.longest < 2 * short:
        return None
    share = min(0.9, a.held / max(a.rows * s.account.loaded, 1e-9))
    return Found(
        f"A step with {a.largest:,} tokens of prompts keeps everybody else's next token waiting for {in_words(a.longest)}; usually a step takes {in_words(usual)}.",
        (
            seconds("the longest such step", a.longest),
            seconds("a usual step", usual),
            count("its tokens", a.largest),
            percent("of running requests' time, held up by prompts", share),
        ),
        max(gained(share), 1.06),
        remedy=("--enable-chunked-prefill and " if not s.settings.get("enable_chunked_prefill", True) else "")
        + f"--max-num-batched-tokens {CHUNK // 2}: prompts in pieces, with everybody's next token beside each",
        gain=f"the longest gap between tokens from {in_words(a.longest)} to about {in_words(short)}",
    )


def _logprobs(s: Signals) -> Found | None:
    tokens = s.got("completion_tokens")
    share = s.got("logprob_tokens") / tokens if tokens else 0.0
    extra = s.of_load(s.account.parts["sample"]) + s.host["commit"] + s.host["deliver"]
    front = s.got("front.cpu_s") / s.seconds if s.seconds else 0.0
    if not s.steady or share < LOGPROBS or extra < EXTRA:
        return None
    return Found(
        f"{share:.0%} of the tokens carry logprobs ({s.got('logprob_entries') / max(1.0, s.got('logprob_tokens')):.0f} alternatives each): sampling, taking them in "
        f"and handing them on takes {extra:.0%} of the time with load, beside {front:.0%} of the front's thread.",
        (
            percent("of the tokens", share),
            percent("sampling, of the time with load", s.of_load(s.account.parts["sample"])),
            percent("waits for commit and deliver", s.host["commit"] + s.host["deliver"]),
            percent("of the front's thread", front),
        ),
        gained(max(extra, min(0.9, front) / 2)),
        SPEED,
    )


def _stalls(s: Signals) -> Found | None:
    stalled, a = sum(s.account.stalled.values()), s.account
    collecting = s.got("engine.gc_s")
    if not s.steady or s.of_load(max(stalled if a.stalls >= 2 else 0.0, collecting)) < STALLED:
        return None
    where = max(a.stalled, key=lambda stage: a.stalled[stage], default="device")
    cause = "in the device's own time" if where == "device" else f"while the engine is {SAID.get(where, where)}"
    if collecting > 0.3 * stalled:
        cause = f"in Python's garbage collector ({in_words(collecting)} in all)"
    return Found(
        f"{a.stalls} steps took far longer than others of their shape, {in_words(stalled / max(1, a.stalls))} more in the mean, {cause}.",
        (
            count("stalled steps", a.stalls, f"of {a.steps}"),
            percent("of the time with load", s.of_load(stalled)),
            seconds("in the garbage collector", collecting),
        ),
        gained(s.of_load(max(stalled, collecting))),
        SPEED,
        remedy="gc.freeze() after the load, and no large object graphs in the engine's process" if "garbage" in cause else "",
    )


def _rejected(s: Signals) -> Found | None:
    a = s.account
    share = a.rejected / a.tokens if a.tokens else 0.0
    if not s.steady or share < REJECTED:
        return None
    kept = max(1.0, (a.tokens - a.rejected - a.prefill_tokens) / a.steps)
    whole = kept + a.rejected / a.steps
    lost = 1 - 1 / s.decode_gain(kept, whole) if s.table is None else 1 - kept / whole * s.decode_gain(kept, whole)
    return Found(
        f"{share:.0%} of the rows are drafts that are thrown away: speculation costs more than it brings at {kept:.1f} requests in a step.",
        (percent("rejected, of the rows", share), count("kept, each step", kept), count("rejected, each step", a.rejected / a.steps)),
        max(gained(max(lost, 0.0)), gained(share / 2)),
        SPEED,
    )


def _graphs(s: Signals) -> Found | None:
    missed, steps = s.account.graphs.get("missed", 0), sum(s.account.graphs.values())
    if not s.steady or s.settings.get("device") != "cuda" or not steps or s.account.chunks >= missed or missed < MISSED * steps:
        return None
    share = s.of_load(s.account.parts["launch"])
    return Found(
        f"{missed / steps:.0%} of the steps are not captured: launching their ops one by one leaves the device idle for {share:.0%}.",
        (percent("of the steps", missed / steps), percent("launch gaps, of the time with load", share)),
        gained(share),
        SPEED,
    )


def _padding(s: Signals) -> Found | None:
    share = s.of_load(s.account.parts["padding"])
    if not s.steady or share < PADDED:
        return None
    return Found(
        f"Captured steps compute {s.account.padded / s.account.steps:.1f} rows for nobody: {share:.0%} of the time with load.",
        (percent("of the time with load", share),),
        gained(share),
        SPEED,
    )


def _communication(s: Signals) -> Found | None:
    share = s.of_load(s.account.parts["communication"])
    if not s.steady or share < COMMUNICATION:
        return None
    return Found(
        f"Ranks wait for each other for {share:.0%} of the time with load: one of them is late, or the link is slow.",
        (percent("of the time with load", share),),
        gained(share),
        SPEED,
    )


def _sampling(s: Signals) -> Found | None:
    share = s.of_load(s.account.parts["sample"])
    if not s.steady or share < 0.25:
        return None
    return Found(
        f"From logits to ids takes {share:.0%} of the time with load.",
        (percent("of the time with load", share), seconds("each step", s.account.parts["sample"] / s.account.steps)),
        gained(share - 0.05),
        SPEED,
    )


def _round_up(n: int) -> int:
    """To a power of two."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


RULES = (
    Rule(
        "host bound",
        ("account.parts host_*", "account.loaded"),
        f"{HOST:.0%} of the time with load; with steps one ahead it is under 5 % where a step takes over 3 ms",
        _host,
        "leave --async-scheduling on; larger batches; take what else runs in the engine's process out of it",
        "the model is so small that a step takes no longer than planning it",
    ),
    Rule(
        "slots",
        ("account.waiting slots", "max_num_seqs", "the cost table"),
        f"half a request waits and {ROWS:.0%} of the slots are taken, and the cost table gives 10 % for more rows",
        _slots,
        "a larger --max-num-seqs",
        "each request's own speed matters more than all together: more in a step slow each of them",
    ),
    Rule(
        "pool too small",
        ("preemptions", "account.waiting blocks", "account.blocks"),
        "three preemptions in the window, or half a request waiting for blocks: either means that what runs does not fit",
        _pool,
        "a larger KV pool",
        "a burst of long requests that will not come again",
        instead_of=("prefix cache too small",),
    ),
    Rule(
        "budget too small",
        ("account.chunk_tokens", "max_num_batched_tokens", "the cost table"),
        f"steps with chunks are {BUDGET:.0%} full of a budget under {CHUNK // 2}: a chunk of {CHUNK} comes within a tenth of the best rate on CPUs",
        _budget,
        "a larger --max-num-batched-tokens",
        "gaps between tokens must be as short as can be: then small chunks are their price",
        instead_of=("slots",),
    ),
    Rule(
        "long prompts stall others",
        ("account.longest", "account.held", "account.decode_s"),
        f"{STALL:g} s and {HELD:g} usual steps; chunks of usual budgets give 2 to 8",
        _held,
        "smaller chunks of prompts",
        "nobody reads along while answers are written: then large chunks are the better throughput",
        instead_of=("stalls",),
    ),
    Rule(
        "logprobs",
        ("logprob_tokens", "account.parts sample", "front.cpu_s"),
        f"{LOGPROBS:.0%} of the tokens and {EXTRA:.0%} of the time with load; plain sampling takes 1 to 3 %",
        _logprobs,
        "ask for logprobs (and fewer of them) only where they are read",
        "they are what is wanted: then this is their price",
        instead_of=("host bound", "front bound", "sampling"),
    ),
    Rule(
        "stalls",
        ("account.stalled (ledger/usual.py)", "engine.gc_s"),
        f"{STALLED:.0%} of the time with load, in steps of over five times what their shape takes",
        _stalls,
        "see what else the machine does at those moments: disk, memory, other processes",
        "the whole machine was stopped: a suspended virtual machine looks the same",
    ),
    Rule(
        "drafts rejected",
        ("account.rejected", "the cost table"),
        f"{REJECTED:.0%} of the rows",
        _rejected,
        "no speculation at this load, or shorter drafts",
        "single streams' speed matters: then it may still pay",
    ),
    Rule(
        "graphs missed",
        ("account.graphs", "account.parts launch"),
        f"{MISSED:.0%} of the steps, prompts' left out",
        _graphs,
        "a larger --max-cudagraph-capture-size, and no --enforce-eager",
        "steps are so large that launches hide behind them",
    ),
    Rule(
        "padding",
        ("account.parts padding",),
        f"{PADDED:.0%} of the time with load; sizes are four to a doubling",
        _padding,
        "a --max-num-seqs near the number that really runs",
        "the number of requests changes all the time",
    ),
    Rule(
        "communication",
        ("account.parts communication",),
        f"{COMMUNICATION:.0%} of the time with load",
        _communication,
        "look for the late rank (clocks, placement, NUMA); fewer ranks",
        "batches are small: then fewer ranks are faster",
    ),
    Rule(
        "sampling",
        ("account.parts sample",),
        "25 % of the time with load; plain sampling takes 1 to 3 %",
        _sampling,
        "fewer penalties, bad words and allowed ids; greedy where it does not matter",
        "the vocabulary is large and the model small",
    ),
)
