"""chat's Conversation over a model that echoes: history, commands, interruption, refusals; and the line of figures, worked by hand."""

import io
import os
import signal
from types import SimpleNamespace

import pytest

from flatout.cli import chat, figures
from flatout.cli.chat import Conversation
from flatout.cli.figures import Figures, kv_read, weights_read
from flatout.cli.flags import Parser
from flatout.hardware import Bandwidth, Ceilings, Hardware
from flatout.modelfile.spec import LayerSpec, ModelSpec, MoESpec, RopeSpec
from flatout.request import FinishReason, RequestError, SamplingParams, Timing
from flatout.step import StepRecord

SPEC = ModelSpec(
    architecture="test",
    family="llama",
    vocab_size=100,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    layers=(LayerSpec(), LayerSpec(window=10)),
    ropes=(RopeSpec(1e4, 4),),
    max_position=64,
    norm_eps=1e-5,
)
MACHINE = Hardware("cpu", "test", None, 1 << 30, 1, True)


def delta(text, ids, reason=None, timing=None):
    return SimpleNamespace(text=text, token_ids=ids, finish_reason=reason, cached_tokens=3, timing=timing)


class Echo:
    """Answers "<n messages> words" word by word; a prompt with "long" in it is refused, "slow" gets Ctrl-C after its first word."""

    def __init__(self):
        self.spec = SPEC
        self.engine = SimpleNamespace(weight_bytes=10_000, records=[])
        self.config = SimpleNamespace(
            device=SimpleNamespace(device="cpu", threads=4),
            model=SimpleNamespace(dtype="bfloat16", chat_template=None),
            cache=SimpleNamespace(kv_cache_dtype="bfloat16"),
        )
        self.facts = SimpleNamespace(model="echo", max_model_len=64, sampling_defaults={})
        self.tokenizer = SimpleNamespace(chat_template="{{ messages }}")
        self.seen, self.closed, self.start_lines = [], 0, ["loaded"]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def default_params(self, **fields):
        return SamplingParams(**fields)

    def chat_ids(self, messages):
        self.seen.append([dict(m) for m in messages])
        if "long" in messages[-1]["content"]:
            raise RequestError("prompt", "99 tokens are over the context of 64")
        return list(range(len(messages)))

    def stream(self, ids, params):
        words = [f"{len(ids)} ", "of ", "these"]
        try:
            for i, word in enumerate(words):
                if i == 1 and "slow" in self.seen[-1][-1]["content"]:
                    os.kill(os.getpid(), signal.SIGINT)
                last = i == len(words) - 1
                yield delta(word, [i], FinishReason.STOP if last else None, Timing(0.0, 0.1, 0.5, 1.5) if last else None)
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine whose memory gives 1 MB/s."""
    rate = Bandwidth(1 << 30, 1e6, 1e6, 1e6, "test")
    monkeypatch.setattr(figures, "detect", lambda device: MACHINE)
    monkeypatch.setattr(figures, "ceilings", lambda machine, refresh=False: Ceilings((rate,), rate))


def conversation(**options):
    return Conversation(Echo(), SamplingParams(), **{"system": None, "quiet": True, **options})


def test_history_grows_turn_by_turn(capsys):
    talk = conversation(system="be brief")
    assert talk.take("one")
    assert talk.take("two")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.messages[-1]["content"] == "4 of these"
    assert capsys.readouterr().out == "2 of these\n4 of these\n"
    assert talk.llm.closed == 2


def test_ctrl_c_stops_the_answer_only(capsys):
    before = signal.getsignal(signal.SIGINT)
    talk = conversation()
    assert talk.take("slow")
    assert talk.messages[-1] == {"role": "assistant", "content": "1 of "}  # what was said stays
    assert talk.llm.closed == 1  # and the engine was told
    assert "stopped" in capsys.readouterr().err
    assert talk.take("go on")
    assert len(talk.messages) == 4
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_turn_leaves_the_history(capsys):
    talk = conversation()
    talk.take("one")
    talk.take("a long one")
    assert len(talk.messages) == 2
    assert "over the context of 64; /reset begins anew" in capsys.readouterr().err
    talk.take("short")
    assert len(talk.messages) == 4


def test_commands(capsys):
    talk = conversation(system="be brief")
    talk.take("one")
    assert talk.take("/reset")
    assert [m["role"] for m in talk.messages] == ["system"]
    talk.take("/stats")
    talk.take("/help")
    talk.take("/rset")
    talk.take("   ")
    err = capsys.readouterr().err
    assert "1 messages, 1 of 64 tokens" in err
    assert "1 answers, 3 tokens; 3 of 2 prompt tokens from the cache" in err
    assert "Ctrl-C" in err
    assert "/rset: no such command (did you mean /reset?)" in err
    assert not talk.take("/exit")


def test_figures_worked_by_hand(capsys):
    talk = conversation(quiet=False)
    talk.take("hello")
    # 3 tokens, the first after 0.5 s, two more in 1 s. Read per token: 10,000 bytes
    # and KV of 2 tokens in 2 layers at 2 x 4 x 2 bytes: 10,064; 1 MB/s allow 99 a second
    assert "3 tokens · TTFT 500 ms · 2.0 tok/s · 2 % of the 99 tok/s that 0 GB/s of memory" in capsys.readouterr().err


def test_bytes_read_per_token():
    assert weights_read(SPEC, 10_000, 2) == 10_000
    moe = MoESpec(num_experts=8, top_k=2, intermediate_size=4, norm_topk=True)
    sparse = ModelSpec(
        **{
            **{f: getattr(SPEC, f) for f in SPEC.__dataclass_fields__},
            "moe": moe,
            "layers": (LayerSpec(moe=True), LayerSpec()),
        }
    )
    assert weights_read(sparse, 10_000, 2) == 10_000 - 1 * 6 * (3 * 8 * 4) * 2  # six experts of one layer stay unread
    assert kv_read(SPEC, 30, 8) == (30 + 10) * 2 * 8  # the window's layer reads ten


def test_one_token_has_no_rate():
    line = Figures(5, 0, 1, Timing(0.0, 0.0, 0.25, 0.25)).line(Echo())
    assert line == "1 token · TTFT 250 ms"


def test_steps_with_fewer_threads_are_told():
    """Of this answer's steps alone; on a GPU, and with one thread, none say how many they had."""
    llm = Echo()
    llm.engine.records = [StepRecord(i, 0.0, threads=n) for i, n in enumerate((1, 4, 3, 2))]
    line = Figures(5, 0, 3, Timing(0.0, 0.0, 0.5, 1.5)).line(llm)
    assert line.endswith(" · 2 of 4 threads in 67% of its steps: the cores were shared")
    llm.engine.records = [StepRecord(i, 0.0) for i in range(3)]
    assert "threads" not in Figures(5, 0, 3, Timing(0.0, 0.0, 0.5, 1.5)).line(llm)


def test_a_roof_that_was_beaten_is_measured_again(monkeypatch):
    asked = []

    def measured(machine, refresh=False):
        asked.append(refresh)
        rate = Bandwidth(1 << 30, 1e6 if refresh else 1e3, 0, 0, "test")
        return Ceilings((rate,), rate)

    monkeypatch.setattr(figures, "ceilings", measured)
    line = Figures(5, 0, 3, Timing(0.0, 0.0, 0.5, 1.5)).line(Echo())
    assert asked == [False, True]
    assert "2 %" in line


def test_pipe(monkeypatch, capsys):
    """Line by line from standard input; three quotes hold a message of several lines."""
    echo = Echo()
    monkeypatch.setattr(chat, "open_llm", lambda options, quiet: echo)
    monkeypatch.setattr("sys.stdin", io.StringIO('hello\n"""first\nsecond"""\n\n/exit\nnever\n'))
    parser = Parser("flatout chat", "", "chat")
    chat.configure(parser)
    assert chat.run(parser.parse_args(["--quiet"])) == 0
    assert capsys.readouterr().out == "1 of these\n3 of these\n"
    assert echo.seen[-1][-1]["content"] == "first\nsecond"
