"""Both ends of the mailbox in one process: what goes in comes out, in order, at once."""

from __future__ import annotations

import asyncio
import math
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flatout.request import FinishReason, ModelFacts, Output, PositionLogprobs, Request, SamplingParams, Status, Timing, TokenLogprob
from flatout.server.mailbox import (
    Abort,
    Add,
    Alive,
    EngineGone,
    EngineMailbox,
    Failed,
    FrontMailbox,
    Outputs,
    Ready,
    Refused,
    Shutdown,
)

PARAMS = SamplingParams(
    n=2, seed=2**64 - 1, stop=["a", "b"], logit_bias={5: -1.5}, bad_words=["x"], allowed_token_ids=[1, 2], stop_token_ids=[7], logprobs=3
)
REQUEST = Request("id", [1, 2, 3], PARAMS, index=1, seed=2**63, eos_ids=frozenset({4, 5}), bad_words_ids=[[1], [2, 3]], cache_salt="s")
LOGPROBS = [PositionLogprobs(TokenLogprob(5, -math.inf, 9), [TokenLogprob(1, -0.5, 1)])]
OUTPUT = Output(
    "id", 1, [5, 6], LOGPROBS, [None, *LOGPROBS], FinishReason.STOP, "stop", 3, 2, "miss", 1, Timing(1.0, 2.0, 3.0, 4.0), "error"
)
UP = [
    Ready(ModelFacts("m", 10, 20, 30, 16, (1, 2), {"temperature": 0.5}), ["a line"]),
    Outputs([OUTPUT, Output("x", 0, [])]),
    Refused("id", "prompt", "prompt: too long"),
    Failed("why"),
    Alive(),
]
DOWN = [Add([REQUEST]), Abort("id"), Abort("id", 1, FinishReason.STOP, "stop"), Shutdown()]


def plain(value: Any) -> Any:
    """Comparable: Request compares by identity."""
    if isinstance(value, Add):
        return [{name: getattr(r, name) for name in Request.__dataclass_fields__} for r in value.requests]
    return value


@pytest.fixture
def front() -> Iterator[FrontMailbox]:
    mailbox = FrontMailbox()
    yield mailbox
    mailbox.close()


def test_everything_arrives_as_it_was(front: FrontMailbox) -> None:
    heard: list[tuple[str, Any]] = []
    assert stat.S_IMODE(front.folder.stat().st_mode) == 0o700

    async def main() -> None:
        front.listen(lambda key, message: heard.append((key, message)))
        engine = EngineMailbox(front.endpoint, "a key")
        for message in UP:
            engine.send(message)
        while len(heard) < len(UP):
            await asyncio.sleep(0.001)
        for down in DOWN:
            front.send("a key", down)
        got: list[Any] = []
        while len(got) < len(DOWN):
            got += engine.receive(0.1)
        assert [plain(m) for m in got] == [plain(m) for m in DOWN]
        assert got[0].requests[0].status is Status.WAITING and got[0].requests[0].params == PARAMS
        engine.close()

    asyncio.run(main())
    assert heard == [("a key", message) for message in UP]


def test_nobody_there(front: FrontMailbox) -> None:
    with pytest.raises(EngineGone, match="nobody"):
        front.send("nobody", Shutdown())


def test_no_edge_is_lost(front: FrontMailbox) -> None:
    """2,000 questions, each answered by another thread; sends and arrivals mix in every way."""
    answers = 0

    def echo() -> None:
        engine = EngineMailbox(front.endpoint, "e")
        engine.send(Alive())
        while True:
            for message in engine.receive(1):
                if isinstance(message, Shutdown):
                    engine.close()
                    return
                engine.send(Failed(message.id))  # type: ignore[union-attr]

    async def main() -> None:
        nonlocal answers
        seen = asyncio.Event()

        def deliver(key: str, message: Any) -> None:
            nonlocal answers
            answers += isinstance(message, Failed)
            seen.set()

        front.listen(deliver)
        thread = threading.Thread(target=echo)
        thread.start()
        await asyncio.wait_for(seen.wait(), 5)
        for i in range(2000):
            front.send("e", Abort(str(i)))
            if i % 7 == 0:
                await asyncio.sleep(0)
        end = time.monotonic() + 5
        while answers < 2000 and time.monotonic() < end:
            await asyncio.sleep(0.005)
        front.send("e", Shutdown())
        thread.join(5)

    asyncio.run(main())
    assert answers == 2000


def test_the_last_words_come_before_the_end(front: FrontMailbox) -> None:
    """A line counts as closed once all that came by it can be read, however much and however late the loop looks."""
    heard: list[Any] = []
    said = [*([Outputs([OUTPUT] * 100)] * 200), Failed("why")]

    async def main() -> None:
        front.listen(lambda key, message: heard.append(message))
        for i in range(5):
            heard.clear()
            engine = EngineMailbox(front.endpoint, f"e{i}")
            for message in said:
                engine.send(message)
            engine.close()
            await asyncio.wait_for(front.lines_closed.acquire(), 30)
            front.drain()
            assert len(heard) == len(said) and heard[-1] == said[-1]

    asyncio.run(main())


def test_a_send_to_the_dead_hides_no_arrival(front: FrontMailbox) -> None:
    """zmq takes note of what has arrived while it sends, and tells by edges: also where the send itself fails."""
    heard: list[Any] = []

    async def main() -> None:
        front.listen(lambda key, message: heard.append(message))
        engine = EngineMailbox(front.endpoint, "e")
        engine.send(Alive())
        while not heard:
            await asyncio.sleep(0.001)
        engine.send(Failed("why"))
        engine.close()
        with pytest.raises(EngineGone):
            for _ in range(1000):
                front.send("e", Abort("id"))
                time.sleep(0.005)  # the loop stands still
        end = time.monotonic() + 10
        while len(heard) < 2 and time.monotonic() < end:
            await asyncio.sleep(0.005)

    asyncio.run(main())
    assert heard == [Alive(), Failed("why")]
