"""The front's view of its engines: a served model with its text tools, and the requests in flight to it.

A Flight is one HTTP request's sequences between admission and last token. Tokens become text here as they arrive, so a stop string ends its
sequence at once; what the client has not fetched yet merges into one piece per choice, bounded by the request's own tokens.
Lives on the event loop. Called by openai.py and app.py; launch.py makes the table and reports processes that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import msgspec

from flatout.ledger.account import Marks, RequestAccount, SequenceTimes, account_of
from flatout.ledger.heads import Likeness
from flatout.ledger.ledger import Ledger
from flatout.ledger.table import table_from
from flatout.ledger.verdict import Verdict
from flatout.request import FinishReason, ModelFacts, Output, PositionLogprobs, Request
from flatout.server.diagnosis import MOST_OPEN, WINDOW, Diagnosis
from flatout.server.live import REQUESTS, Live, Seen
from flatout.server.mailbox import Abort, Add, Alive, Down, EngineGone, Failed, FrontMailbox, Outputs, Ready, Refused, Steps, Up
from flatout.server.metrics import Metrics
from flatout.server.protocol import ApiError
from flatout.server.replies import PromptTokensDetails, Usage
from flatout.text.chat import ChatTemplate
from flatout.text.sequence import SequenceText
from flatout.text.tokenizer import Tokenizer

STALL_SECONDS = 60.0  # an engine silent for longer is reported as down; a step of a large prefill on a CPU may take tens of seconds


class ClientGone(Exception):
    """The client hung up; nobody waits for this request any more."""


@dataclass(slots=True)
class Piece:
    """What one choice got since its last piece. The whole choice, when nothing was taken before its end."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Sequence:
    """One choice of a flight."""

    def __init__(self, choice: int, request: Request, tokenizer: Tokenizer | None):
        self.choice, self.request = choice, request
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.times = SequenceTimes()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text = SequenceText(tokenizer, request.params, request.prompt_ids) if tokenizer else None
        self._piece: Piece | None = None

    def push(self, output: Output) -> None:
        """Take a step's output. Ids behind a stop string are dropped."""
        text, ids, reason, stop_reason = "", output.token_ids, output.finish_reason, output.stop_reason
        if self._text is not None:
            delta = self._text.push(ids, reason)
            text, ids, reason = delta.text, delta.token_ids, delta.finish_reason
            stop_reason = delta.stop_reason if delta.stop_reason is not None else stop_reason
        self.completion_tokens += len(ids)
        self.cached_tokens = output.cached_tokens or self.cached_tokens  # told with the first and the last output, not between
        self.finish_reason, self.stop_reason = reason, stop_reason
        if output.timing is not None:  # with the first output and the last
            self.times.timing, self.times.cached_tokens = output.timing, output.cached_tokens
            self.times.miss_reason, self.times.preemptions = output.miss_reason, output.preemptions
        piece = self._piece = self._piece or Piece(self.choice)
        piece.text += text
        piece.token_ids += ids
        piece.logprobs += (output.logprobs or [])[: len(ids)]
        piece.prompt_logprobs = output.prompt_logprobs or piece.prompt_logprobs
        piece.finish_reason, piece.stop_reason = reason, stop_reason

    @property
    def spent(self) -> bool:
        """It has ended, and nothing waits to be taken."""
        return self.finish_reason is not None and self._piece is None

    def take(self) -> Piece | None:
        piece, self._piece = self._piece, None
        return piece


class Flight:
    """Made by ServedModel.launch(); close() it in any case: that ends what still runs."""

    def __init__(self, model: ServedModel, prompts: list[list[Request]], marks: Marks):
        """`prompts`: the sequences of each prompt; choice = prompt x n + sample. marks: of its way here."""
        self.prompts = prompts
        self.marks = marks
        self.reason = ""  # how it ended, once it has: a finish reason, "error" or "abort"
        requests = [request for sequences in prompts for request in sequences]
        self.sequences = {request.key: Sequence(choice, request, model.tokenizer) for choice, request in enumerate(requests)}
        self._model = model
        self._likenesses = [model.diagnosis.prompt(sequences[0].prompt_bytes) for sequences in prompts]
        self._error: ApiError | ClientGone | None = None
        self._begun: set[str] = set()  # prompts whose first token came
        self._wake = asyncio.Event()

    @property
    def done(self) -> bool:
        """Every choice has ended; pieces may wait to be taken."""
        return all(s.finish_reason is not None for s in self.sequences.values())

    @property
    def spent(self) -> bool:
        return all(s.spent for s in self.sequences.values())

    async def take(self, whole: bool = False) -> list[Piece]:
        """What has come, at least one piece, in order of choice; `whole`: everything, at the end.

        Raises ApiError when the flight failed, ClientGone after hang_up().
        """
        while self._error is None:
            if not whole or self.done:
                pieces = [piece for sequence in self.sequences.values() if (piece := sequence.take()) is not None]
                if pieces:
                    return pieces
            self._wake.clear()
            await self._wake.wait()
        raise self._error

    def push(self, output: Output) -> None:
        sequence = self.sequences[output.id, output.index]
        if sequence.finish_reason is not None:
            return  # made by the step that ran while a stop string was found
        if output.finish_reason == FinishReason.ERROR:
            self.fail(ApiError.internal(output.error))
        elif output.finish_reason == FinishReason.ABORT:
            self.fail(ApiError.unavailable("the engine dropped the request"))
        else:
            self._take_in(sequence, output)
            if sequence.finish_reason is not None and output.finish_reason is None:
                self._model.send(Abort(output.id, output.index, sequence.finish_reason, str(sequence.stop_reason)))
            self._wake.set()

    def _take_in(self, sequence: Sequence, output: Output) -> None:
        """Its text, and what is counted of it."""
        metrics, times, begin = self._model.metrics, sequence.times, time.monotonic()
        before = sequence.completion_tokens
        sequence.push(output)
        now = time.monotonic()
        self.marks.detokenise_s += now - begin
        self._model.diagnosis.count("detokenise_s", now - begin)
        if output.logprobs:
            self._model.diagnosis.count("logprob_tokens", len(output.logprobs))
            self._model.diagnosis.count("logprob_entries", sum(len(position.top) for position in output.logprobs))
        if count := sequence.completion_tokens - before:
            metrics.generation_tokens += count
            if times.first_token:
                metrics.gap.observe((begin - times.latest) / count, count)
            else:
                times.first_token = begin
                metrics.ttft.observe(begin - self.marks.accepted)
                self._model.live.first_token(begin, begin - self.marks.accepted)
            times.tokens, times.latest = sequence.completion_tokens, begin
        if output.id not in self._begun:
            self._begun.add(output.id)
            metrics.prompt_tokens += len(sequence.request.prompt_ids)
        if sequence.finish_reason is not None:
            times.texted = now
            metrics.finished[sequence.finish_reason] = metrics.finished.get(sequence.finish_reason, 0) + 1
            if self.done:
                self.marks.texted = now

    def account(self) -> RequestAccount:
        """Where its time went: until its end, or so far."""
        prompt = sum(len(requests[0].prompt_ids) for requests in self.prompts)
        return account_of(self.marks, [s.times for s in self.sequences.values()], prompt, time.monotonic())

    def seen(self) -> Seen:
        return Seen(self.prompts[0][0].id, self.marks.accepted, self.reason, self.account())

    def prompts_seen(self) -> Iterator[tuple[Likeness, int, str, int]]:
        """Of each prompt its likeness to others, cached tokens, the reason for no more, and its length."""
        for requests, likeness in zip(self.prompts, self._likenesses):
            times = self.sequences[requests[0].key].times
            yield likeness, times.cached_tokens, times.miss_reason, len(requests[0].prompt_ids)

    def fail(self, error: ApiError | ClientGone) -> None:
        """Whoever takes gets the error; after the last token there is nothing left to fail."""
        if not self.done:
            self._error = self._error or error
            self._wake.set()

    def hang_up(self) -> None:
        """The client went away: end it all now."""
        self.fail(ClientGone())
        self.close()

    def close(self) -> None:
        """Take nothing more; end in the engine what still runs. A second call does nothing."""
        if self.reason:
            return
        self.marks.ended = time.monotonic()
        ends = {s.finish_reason for s in self.sequences.values()}
        self.reason = "abort" if None in ends else "+".join(sorted(filter(None, ends)))
        if self._error is not None:
            self.reason = "abort" if isinstance(self._error, ClientGone) else "error"
        self._model.forget(self)

    def usage(self) -> Usage:
        """Tokens so far; final once done."""
        prompt = sum(len(requests[0].prompt_ids) for requests in self.prompts)
        completion = sum(s.completion_tokens for s in self.sequences.values())
        cached = sum(self.sequences[requests[0].key].cached_tokens for requests in self.prompts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class ServedModel:
    """One model as clients see it: its name, text tools, facts, and the engine process behind it."""

    def __init__(self, name: str, key: str, mailbox: FrontMailbox):
        self.name, self.key = name, key
        self.created = int(time.time())
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self.facts: ModelFacts | None = None
        self.start_lines: list[str] = []
        self.metrics = Metrics()
        self.ledger = Ledger()
        self.live = Live()
        self.diagnosis = Diagnosis(self.metrics, lambda: (flight.account() for flight in islice(set(self._flights.values()), MOST_OPEN)))
        self.log: Callable[[str], None] | None = None  # takes a line for each request that ended
        self.settled = asyncio.Event()  # the engine is ready, or down
        self._mailbox = mailbox
        self._trouble: str | None = "the model is loading"
        self._down = False
        self._heard = time.monotonic()
        self._flights: dict[str, Flight] = {}  # by the engine's request id: one for each prompt

    @property
    def trouble(self) -> str | None:
        """Why the engine can't be used just now; None when it can."""
        silent = time.monotonic() - self._heard
        if self._trouble is None and silent > STALL_SECONDS:
            return f"the engine has been silent for {silent:.0f} s"
        return self._trouble

    def open(self) -> None:
        """Engine and text tools are here: requests may come."""
        if not self._down:
            self._trouble = None

    def launch(self, prompts: list[list[Request]], marks: Marks) -> Flight:
        """Send the sequences of each prompt to the engine. Raises ApiError 503 when it can't be used."""
        if self._trouble is not None:
            raise ApiError.unavailable(self._trouble)
        flight = Flight(self, prompts, marks)
        marks.sent = time.monotonic()
        self.metrics.requests += 1
        self.metrics.in_flight += 1
        for requests in prompts:
            self._flights[requests[0].id] = flight
            self.send(Add(requests))
        return flight

    def forget(self, flight: Flight) -> None:
        for requests in flight.prompts:
            id = requests[0].id
            if self._flights.pop(id, None) and any(flight.sequences[r.key].finish_reason is None for r in requests):
                self.send(Abort(id))
        seen = flight.seen()
        account = seen.account
        self.metrics.in_flight -= 1
        self.metrics.ended(account)
        self.live.ended(seen)
        self.diagnosis.ended(account, flight.prompts_seen())
        for sequence in flight.sequences.values():
            if sequence.finish_reason is None:
                self.metrics.finished[flight.reason] = self.metrics.finished.get(flight.reason, 0) + 1
        if self.log is not None:
            head = {"request": seen.id, "model": self.name, "end": flight.reason, "choices": len(flight.sequences)}
            begin = time.monotonic()
            self.log(json.dumps({**head, **account.plain()}))
            self.diagnosis.count("log_s", time.monotonic() - begin)

    def send(self, message: Down) -> None:
        """To a dead engine: lost, as its requests are; down() tells everybody when the process's end is noticed."""
        with contextlib.suppress(EngineGone):
            self._mailbox.send(self.key, message)

    def deliver(self, message: Up) -> None:
        """A message from the engine."""
        self._heard = time.monotonic()
        match message:
            case Outputs(outputs):
                for output in outputs:
                    if (flight := self._flights.get(output.id)) is not None:
                        self._push(flight, output)
            case Refused(id, name, text):
                if (flight := self._flights.get(id)) is not None:
                    self.metrics.refused += 1
                    flight.fail(ApiError.refused(name, text))
            case Steps(records, state, at):
                self.metrics.state = state
                for record in records:
                    self.ledger.add(record)
                self.diagnosis.count("loop_late_s", max(0.0, self._heard - at))
                self.diagnosis.count("looks", 1)
            case Ready(facts, lines, costs, settings, vitals):
                self.facts, self.start_lines = facts, lines
                self.ledger = Ledger(table_from(costs) if costs else None)
                self.diagnosis.ready(settings, vitals)
                self.settled.set()
            case Failed(text):
                self.down(text)
            case Alive(vitals, at):
                self.diagnosis.look(self._heard - at, vitals)

    def accounts(self, seconds: int = WINDOW, since: int | None = None) -> dict[str, Any]:
        """For JSON: how the engine stands, what limits it (verdicts over the last `seconds`, the first matters most), its account by window
        (ledger.WINDOWS, and since the start), its cost table, and what Live has.

        since: for a viewer who has seen all before that second of the series; what takes long to tell is as of this second, or left out.
        """
        metrics, state, busy = self.metrics, self.metrics.state, self.metrics.state.running > 0
        counted = ("requests", "prompt_tokens", "generation_tokens")
        flights = list(dict.fromkeys(reversed(self._flights.values())))[:REQUESTS]
        found: dict[str, Any] = {
            "state": {**msgspec.structs.asdict(state), "in_flight": metrics.in_flight, "blocks": state.usage},
            "trouble": self.trouble,
            "totals": {name: getattr(metrics, name) for name in counted},
            **self.live.plain(self.ledger, busy, since, [flight.seen() for flight in flights]),
            **self.live.each_second(self.ledger, busy, lambda: self.verdicts(WINDOW)),
        }
        if since is not None:
            return found
        table = self.ledger.table
        return {
            **found,
            "verdict": [verdict.to_json() for verdict in self.verdicts(seconds)],
            "windows": {name: account.plain() for name, account in self.ledger.windows(busy).items()},
            "table": table.plain() if table else None,
            "facts": asdict(self.facts) if self.facts is not None else None,
            "start_lines": self.start_lines,
        }

    def verdicts(self, seconds: int = WINDOW) -> list[Verdict]:
        return self.diagnosis.verdicts(self.ledger, seconds)

    def down(self, reason: str) -> None:
        """The engine cannot go on: say why to everyone who waits and to all who come. The first reason stays."""
        if self._down:
            return
        self._down, self._trouble = True, reason
        for flight in set(self._flights.values()):
            flight.fail(ApiError.unavailable(reason))
        self.settled.set()

    def _push(self, flight: Flight, output: Output) -> None:
        try:
            flight.push(output)
        except Exception as error:  # a fault in one request's text must not stop the others' deliveries
            traceback.print_exc(file=sys.stderr)
            flight.fail(ApiError.internal(f"{type(error).__name__}: {error}"))
