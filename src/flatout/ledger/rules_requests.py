"""Rules over what requests went through: the front (texts, log, clients), the queue by reason, the prefix cache, and arrivals against answers.

Thresholds are shares of the requests' own time, so they need no machine's figures. See rules.py. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.ledger.rules import SPEED, Found, Rule
from flatout.ledger.signals import Signals, count, gained, in_words, percent, seconds

TEXT = 0.15  # of the requests' time: tokenising 4,000 tokens takes 2 to 5 ms, where a request takes hundreds
LOOP = 0.25  # of one core's time, the event loop's: beyond, answers wait for each other at bursts
CLIENT = 0.2
LOG = 0.05
GRAMMAR = 0.1
LOST = 0.25  # of the prompt tokens
GROWTH = 0.2  # of the arrivals: so many more come than go
MOST_IDLE = 0.2


def _tokeniser(s: Signals) -> Found | None:
    share = s.share("tokenise") + s.share("accept")
    if share < TEXT or s.got("ended") < 1:
        return None
    each = (s.got("part.tokenise") + s.got("part.accept")) / s.got("ended")
    return Found(
        f"Requests wait {in_words(each)} each for their prompt to become tokens: {share:.0%} of their time, before the engine hears of them.",
        (percent("of the requests' time", share), seconds("for each request", each), count("requests answered", s.got("ended"))),
        gained(share),
    )


def _detokeniser(s: Signals) -> Found | None:
    busy = s.got("detokenise_s") / s.seconds if s.seconds else 0.0
    tokens = s.got("completion_tokens")
    if busy < LOOP or not tokens:
        return None
    return Found(
        f"Turning tokens into text takes {busy:.0%} of the front's only thread, {in_words(s.got('detokenise_s') / tokens)} a token: answers wait for it.",
        (percent("of the front's thread", busy), percent("of the requests' time, after their last token", s.share("detokenise"))),
        gained(max(min(busy, 0.9), s.share("detokenise"))),
    )


def _clients(s: Signals) -> Found | None:
    whole = s.got("e2e_s")
    share = s.got("client_s") / whole if whole else 0.0
    if share < CLIENT:
        return None
    return Found(
        f"Clients read slower than answers are written: they kept the server waiting for {share:.0%} of their requests' time.",
        (percent("of the requests' time", share), percent("of it after the last token", s.share("client"))),
        gained(share),
    )


def _log(s: Signals) -> Found | None:
    share = s.got("log_s") / s.seconds if s.seconds else 0.0
    if share < LOG:
        return None
    return Found(
        f"Writing log lines blocks the front for {share:.0%} of the time, {in_words(s.got('log_s') / max(1.0, s.got('ended')))} a request: nobody is served meanwhile.",
        (percent("of the front's thread", share), count("lines", s.got("ended"))),
        gained(max(share, s.share("reply"))),
    )


def _front(s: Signals) -> Found | None:
    busy = s.got("front.cpu_s") / s.seconds if s.seconds else 0.0
    late = s.got("loop_late_s") / max(1.0, s.got("looks"))
    if busy < 0.85 and late < 0.1:
        return None
    share = max(
        s.share("reply") + s.share("detokenise") + s.share("accept"),
        min(late * s.got("ended") / s.got("e2e_s"), 0.9) if s.got("e2e_s") else 0,
    )
    return Found(
        f"The front is behind: its thread is {busy:.0%} busy and hears the engine {in_words(late)} late.",
        (percent("of one core", busy), seconds("late, in the mean", late)),
        max(gained(share), 1.06),
    )


def _grammar(s: Signals) -> Found | None:
    share = s.queued("grammar")
    if share < GRAMMAR:
        return None
    return Found(
        f"Requests wait for their grammar to be compiled: {share:.0%} of their time.",
        (percent("of the requests' time", share), count("waiting for it, in the mean", s.account.waiting.get("grammar", 0.0))),
        gained(share),
    )


def _overload(s: Signals) -> Found | None:
    """More come than go, in the second half of the window too, and the engine is never idle."""
    came, gone = s.late.get("requests", 0.0), s.late.get("ended", 0.0)
    idle = s.account.parts["idle"] / s.account.seconds if s.account.seconds else 1.0
    if came < 5 or came - gone < max(3.0, GROWTH * came) or idle > MOST_IDLE or s.gauges.get("in_flight", 0) < 8:
        return None
    factor = came / max(gone, 1.0)
    return Found(
        f"More requests come than this machine answers: {s.got('requests') / s.seconds:.3g} a second come, {s.got('ended') / s.seconds:.3g} are answered; "
        "the queue grows for as long as that lasts.",
        (
            count("arrivals", s.got("requests") / s.seconds, "/s"),
            count("answers", s.got("ended") / s.seconds, "/s"),
            count("in flight now", s.gauges.get("in_flight", 0)),
            percent("of the time with work", 1 - idle),
        ),
        min(factor, 10.0),
        SPEED,
        gain=f"all of the load answered, {min(factor, 10.0):.2g}x what is answered now",
    )


def _lost(s: Signals, reason: str) -> tuple[float, float]:
    """(share of the prompt tokens that were computed again for this reason, and of the time with load that took, about)."""
    lost, prompt = s.got("lost." + reason), s.got("prompt_tokens")
    if not prompt or lost < LOST * prompt:
        return 0.0, 0.0
    computed = max(1, s.account.prefill_tokens)
    return lost / prompt, min(1.0, lost / computed) * s.of_load(s.account.chunk_s)


def _prefix(reason: str, says: str) -> Callable[[Signals], Found | None]:
    """The test for one reason of the cache's."""

    def test(s: Signals) -> Found | None:
        of_prompts, of_time = _lost(s, reason)
        if not of_prompts:
            return None
        where = ""
        at = {int(name.rpartition(".")[2]): tokens for name, tokens in s.grew.items() if name.startswith("parted.") and tokens > 0}
        if reason == "differs" and at:
            position = max(at, key=lambda p: at[p])
            where = f", at token {position} (counted from 0)"
        return Found(
            f"{of_prompts:.0%} of the prompt tokens were there before and are computed again: {says.format(where=where)}.",
            (
                percent("of the prompt tokens", of_prompts),
                percent("of the time with load, computing them", of_time),
                count("tokens", s.got("lost." + reason)),
            ),
            max(gained(of_time), 1.06),
        )

    return test


_SHARED = ("lost.REASON (ledger/heads.py)", "prompt_tokens", "account.chunk_s")
_ORIGIN = f"{LOST:.0%} of the prompt tokens: heads shorter than a third of their prompts are the common case of chat templates"

RULES = (
    Rule(
        "tokeniser bound",
        ("part.tokenise", "part.accept", "e2e_s"),
        f"{TEXT:.0%} of the requests' time; tokenising takes 1 us a token where the tokenizer is a compiled one",
        _tokeniser,
        "a compiled tokenizer (tokenizer.json) and a simple chat template; prompts sent as token ids skip it",
        "prompts are very long and answers of a few tokens: then it is what the work is",
        instead_of=("front bound",),
    ),
    Rule(
        "detokeniser bound",
        ("detokenise_s", "completion_tokens"),
        f"{LOOP:.0%} of the event loop's time",
        _detokeniser,
        "fewer stop strings, no logprobs in text, a compiled tokenizer; or a second server beside this one for its front",
        "the engine is the slower one all the same: then it is hidden",
        instead_of=("front bound",),
    ),
    Rule(
        "slow clients",
        ("client_s (Marks.stalled_s)", "e2e_s"),
        f"{CLIENT:.0%} of the requests' time with sockets full",
        _clients,
        "read streams as they come (a thread or task of their own), or ask without stream; a proxy that buffers takes the wait over",
        "they pause on purpose: a request holds its slot only until its last token",
    ),
    Rule(
        "blocking log",
        ("log_s", "part.reply"),
        f"{LOG:.0%} of the event loop's time; a line costs 20 us where nothing blocks",
        _log,
        "--no-enable-log-requests, or a log handler that hands lines to a thread",
        "the disk or pipe it writes to was stuck for this moment alone",
        instead_of=("front bound", "detokeniser bound"),
    ),
    Rule(
        "front bound",
        ("front.cpu_s", "loop_late_s"),
        "85 % of a core, or 0.1 s late: a token takes a few ms",
        _front,
        "fewer and larger events: requests without stream, no logprobs; another server beside this one",
        "something else holds that core: see the machine's verdicts",
    ),
    Rule(
        "grammar compiling",
        ("part.queue grammar", "account.waiting"),
        f"{GRAMMAR:.0%} of the requests' time",
        _grammar,
        "send the same schema again rather than a new one each time, so that it is compiled once; simpler schemas",
        "each grammar really is another one",
        instead_of=("host bound",),
    ),
    Rule(
        "overload",
        ("requests", "ended", "in_flight", "account.parts"),
        f"arrivals exceed answers by {GROWTH:.0%} in the second half of the window, with the engine idle for under {MOST_IDLE:.0%}",
        _overload,
        "fewer requests (refuse early, or retry later), a second machine, or smaller weights (--quantization int8, int4)",
        "it is a burst that ends: then the queue empties by itself",
        instead_of=("slots", "threads unused"),
    ),
    Rule(
        "prefix cache off",
        _SHARED,
        _ORIGIN,
        _prefix("off", "their heads are shared and prefix caching is off"),
        "--enable-prefix-caching",
        "timing needs every request to be alike",
    ),
    Rule(
        "prefix heads differ",
        _SHARED,
        _ORIGIN,
        _prefix("differs", "prompts part{where}, and agree again behind that"),
        "put what changes (date, name, id) behind what stays: the prefix cache shares from the first token on, up to the first difference",
        "what follows only looks alike by chance",
    ),
    Rule(
        "salts split the prefix cache",
        _SHARED,
        _ORIGIN,
        _prefix("salted", "their heads are shared under different values of cache_salt"),
        "one cache_salt for all who may share (a tenant), instead of one for each request or user",
        "the salts are there to keep users apart: then this is their price",
    ),
    Rule(
        "prefix cache too small",
        _SHARED,
        _ORIGIN,
        _prefix("evicted", "other requests' blocks took their place in the pool"),
        "a larger pool: --gpu-memory-utilization, --kv-cache-memory-bytes, or --kv-cache-dtype int8 on a CPU",
        "heads come back so seldom that no pool would hold them",
    ),
    Rule(
        "prefix shorter than a block",
        _SHARED,
        _ORIGIN,
        _prefix("too short", "prompts are shorter than a block, the least that is cached"),
        "a smaller --block-size",
        "prompts are short anyway: then there is little to gain",
    ),
    Rule(
        "prompt logprobs bypass the prefix cache",
        _SHARED,
        _ORIGIN,
        _prefix("prompt_logprobs", "prompt_logprobs (or echo with logprobs) are computed, never read from the cache"),
        "leave prompt_logprobs and echo out where they are not read",
        "they are what is wanted",
    ),
)
