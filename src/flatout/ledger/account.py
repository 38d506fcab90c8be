"""One request's time: what each part of it took between its arrival at the door and the last byte of its answer, so that the parts sum to the whole.

The moments are marked by the door (server/engines.py, server/openai.py) and by the scheduler (request.py:Timing), all on the monotonic clock that the
processes of a machine share. Plain data; shown as `timings` in replies, in the log line of a request and in histograms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flatout.request import NEXT_PLAN, PREEMPTED, Timing

QUEUE = "queue "  # before a reason among the parts


@dataclass(slots=True)
class Marks:
    """Moments of one request at the door, in order; 0: it never came so far."""

    accepted: float  # its head was read
    parsing: float = 0.0  # its body was read, and a thread for texts had time
    sent: float = 0.0  # it was tokenised and given to the engine
    texted: float = 0.0  # its last token had come and was text
    ended: float = 0.0  # its answer was sent, or given up
    # beside what it waited for, and hidden behind it as far as the engine was at work meanwhile
    detokenise_s: float = 0.0
    stalled_s: float = 0.0  # the client did not read what was sent,
    sending: float = 0.0  # and what is being sent since then waits for it still; 0: nothing
    late_stall_s: float = 0.0  # of that, after the last token


@dataclass(slots=True)
class RequestAccount:
    """Of a request, by the sequence of it that ended last. Seconds."""

    total: float
    parts: dict[str, float]  # sum to total
    detokenise: float  # of all its tokens, most of it hidden
    client: float  # all that the client kept it waiting
    ttft: float | None  # from the door to the first token; None: there was none
    tpot: float | None  # from the first token to the last, by token; None with less than two
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    miss_reason: str  # why no more of the prompt was cached; "": all of it that could be was
    chunks: int  # steps in which its prompt, or what a preemption lost of it, was computed
    preemptions: int

    def plain(self) -> dict[str, Any]:
        """For replies and logs: milliseconds."""

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1e3, 3)

        return {
            "total_ms": ms(self.total),
            "parts_ms": {name: ms(seconds) for name, seconds in self.parts.items()},
            "ttft_ms": ms(self.ttft),
            "tpot_ms": ms(self.tpot),
            "detokenise_ms": ms(self.detokenise),
            "client_stall_ms": ms(self.client),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cache_miss": self.miss_reason,
            "prefill_chunks": self.chunks,
            "preemptions": self.preemptions,
        }


@dataclass(slots=True)
class SequenceTimes:
    """What the door knows of one sequence."""

    timing: Timing | None = None  # with its first output and its last, where the engine ended it
    first_token: float = 0.0  # when the door had it, and
    latest: float = 0.0  # its latest
    tokens: int = 0
    texted: float = 0.0  # when its last token was text
    cached_tokens: int = 0
    miss_reason: str = ""
    preemptions: int = 0


def account_of(marks: Marks, sequences: list[SequenceTimes], prompt_tokens: int, now: float) -> RequestAccount:
    """At its end, or so far. `sequences`: all of its choices."""
    last = max(sequences, key=lambda s: s.texted or now)
    timing = last.timing or Timing(marks.sent, 0.0, 0.0, 0.0)
    ended = marks.ended or now
    texted = marks.texted or ended
    # what the engine never told, as it never came or as a stop string ended it here, came when the next known thing did
    finished = timing.finished or texted
    first = timing.first_token or finished
    scheduled = timing.first_scheduled or first
    moments = [marks.accepted, marks.parsing, marks.sent, scheduled, first, finished, texted, ended]
    for i in range(1, len(moments)):
        moments[i] = min(max(moments[i] or ended, moments[i - 1]), ended)
    accept, tokenise, queue, prefill, decode, detokenise, tail = (b - a for a, b in pairwise(moments))
    waited = dict(timing.waited)
    preempted = min(waited.pop(PREEMPTED, 0.0), prefill + decode)
    in_decode = min(preempted, decode)
    parts = {"accept": accept, "tokenise": tokenise}
    reasons = {reason: seconds for reason, seconds in waited.items() if reason != NEXT_PLAN}
    scale = min(1.0, queue / short) if (short := sum(reasons.values())) else 0.0
    parts |= {QUEUE + reason: seconds * scale for reason, seconds in reasons.items()}
    parts[QUEUE + NEXT_PLAN] = queue - short * scale
    parts["prefill"] = prefill - (preempted - in_decode)
    parts["decode"] = decode - in_decode
    parts["preempted"] = preempted
    parts["detokenise"] = detokenise
    blocked = now - marks.sending if marks.sending and not marks.ended else 0.0
    late = marks.late_stall_s + (min(blocked, now - marks.texted) if marks.texted else 0.0)
    client = min(late, tail)
    parts["client"] = client
    parts["reply"] = tail - client
    firsts = [s.first_token for s in sequences if s.first_token]
    return RequestAccount(
        total=moments[-1] - moments[0],
        parts=parts,
        detokenise=marks.detokenise_s,
        client=marks.stalled_s + blocked,
        ttft=min(firsts) - marks.accepted if firsts else None,
        tpot=(finished - first) / (last.tokens - 1) if last.tokens > 1 and timing.first_token else None,
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(s.tokens for s in sequences),
        cached_tokens=last.cached_tokens,
        miss_reason=last.miss_reason,
        chunks=timing.chunks,
        preemptions=sum(s.preemptions for s in sequences),
    )
