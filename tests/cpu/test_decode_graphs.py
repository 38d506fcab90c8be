"""Captured decode steps without a GPU: there they are programs (kernels/program.py), tested with staging, padding and choice against eager steps."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import make
from network import CPU, load

from flatout.attention.sdpa import TorchBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels import native
from flatout.kernels.attention import AttentionWork, attention
from flatout.kernels.op import Cost, Implementation, op
from flatout.request import Request, SamplingParams
from flatout.runner.graphs import RING, DecodeGraphs, diffs_of, ladder
from flatout.runner.runner import Handle, Runner
from flatout.runner.slots import Slots
from flatout.step import FROM_DEVICE, StepPlan, StepResult

BLOCK, SLOTS, COLUMNS = 4, 12, 16
SPARE = SLOTS * COLUMNS  # the last block of the pool
SIZES = (1, 2, 4, 7)
EMPTY = np.empty(0, np.int32)


@dataclass
class Unread:
    """The arrangement of a captured plan: read when it is run, as kernels on a device do."""

    batch: ForwardBatch
    group: int
    backend: TorchBackend


class CapturedTorch(TorchBackend):
    captures = True

    def plan_decode(self, batch: ForwardBatch, cascade: bool = False) -> None:
        batch.attention = tuple(
            AttentionWork(EMPTY, EMPTY, EMPTY.reshape(0, 0), self.block_size, window, 0, 0, Unread(batch, group, self))  # type: ignore[arg-type]
            for group, window in enumerate(self.windows)
        )


class CascadingTorch(CapturedTorch):
    """Says that four rows and more share keys; keeps what it was asked to find, and on what."""

    cascades = True

    def __init__(self, *given):
        super().__init__(*given)
        self.found: list[tuple[int, list[int], list[list[int]]]] = []

    def shared_depth(self, tables, table_rows, kv_lens):
        return 2 if len(table_rows) >= 4 else -1

    def find_shared(self, batch, depth):
        find(depth, batch, self.found)


@op(cost=lambda depth, batch, found: Cost(), outs=())
def find(depth, batch, found) -> None:
    found.append((int(depth), batch.kv_lens.tolist(), batch.block_tables[0][batch.table_rows.long()].tolist()))


def run_unread(out, q, k_cache, v_cache, work, scale, softcap) -> None:
    batch, group, backend = work.arrangement.batch, work.arrangement.group, work.arrangement.backend
    tables = tuple(table[batch.table_rows.long()].numpy() for table in batch.block_tables)
    host = HostBatch(np.ones(len(batch.kv_lens), np.int32), batch.kv_lens.numpy().copy(), tables)
    read = replace(batch, attention=None)
    backend.plan(read, host)
    attention.dispatch(out, q, k_cache, v_cache, read.attention[group], scale, softcap)


@pytest.fixture(autouse=True)
def reading(monkeypatch):
    mine = Implementation("unread", run_unread, lambda *operands: isinstance(operands[4].arrangement, Unread))
    monkeypatch.setattr(attention, "implementations", [*attention.implementations, mine])


class Apart(Slots):
    """The tables apart from their twin on the host, as on a GPU: only what a step stages reaches them."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.tables, self._apart = self.tables.clone(), True


@dataclass
class Side:
    """A runner with its own weights' cache, and the results of its steps."""

    runner: Runner
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    results: list[StepResult] = field(default_factory=list)


def side(folder, captured: bool, kind: type[TorchBackend] = CapturedTorch) -> Side:
    decoder = load(folder).decoder
    backend = (kind if captured else TorchBackend)(decoder.spec, BLOCK)
    runner = Runner(decoder, backend, max_slots=SLOTS, max_blocks=COLUMNS, block_size=BLOCK, device=CPU)
    runner.slots = Apart(SLOTS, COLUMNS, CPU)
    caches = backend.allocate_kv(decoder.spec, SPARE + 1, BLOCK, torch.float32, CPU)
    decoder.bind(caches)
    runner.slots.spare_block(SPARE)
    if captured:
        runner.executor.decodes = DecodeGraphs(runner.executor, runner.slots, BLOCK, SIZES)
        runner.executor.decodes.capture()
    return Side(runner, caches)


class Requests:
    """Sequences in slots and the plans that go on with them. Blocks come in a shuffled order."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.lengths, self.outputs, self.blocks = (np.zeros(SLOTS, np.int32) for _ in range(3))
        self.free = self.rng.permutation(SPARE).tolist()
        self.step = 0

    def plan(self, rows: list[tuple[int, list[int]]], admitted: list[Request] = (), ahead: int = 0) -> StepPlan:
        """Rows of (slot, token ids). ahead: blocks given beyond those needed."""
        diffs = []
        for slot, ids in rows:
            while self.blocks[slot] * BLOCK < self.lengths[slot] + len(ids) + ahead * BLOCK:
                diffs.append((slot, self.blocks[slot], self.free.pop()))
                self.blocks[slot] += 1
        slots = np.array([slot for slot, _ in rows], np.int32)
        counts = np.array([len(ids) for _, ids in rows], np.int32)
        per_diff = np.array(diffs, np.int32).reshape(-1, 3).T
        plan = StepPlan(
            step=self.step,
            slots=slots,
            starts=self.lengths[slots].copy(),
            counts=counts,
            token_ids=np.array([i for _, ids in rows for i in ids], np.int32),
            samples=np.ones(len(rows), bool),
            out_positions=self.outputs[slots].copy(),
            requests=[],
            admitted=list(admitted),
            block_slots=per_diff[0],
            block_columns=per_diff[1],
            block_ids=per_diff[2],
        )
        self.lengths[slots] += counts
        self.outputs[slots] += 1
        self.step += 1
        return plan

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(5, 250, count).tolist()


def admit(requests: Requests, sides: list[Side], params: list[SamplingParams]) -> None:
    """One step with every prompt."""
    prompts = [requests.ids(int(n)) for n in requests.rng.integers(1, 3 * BLOCK, len(params))]
    admitted = [Request(str(i), ids, p, seed=i, slot=i) for i, (ids, p) in enumerate(zip(prompts, params))]
    launch(requests.plan(list(enumerate(prompts)), admitted), sides)


def launch(plan: StepPlan, sides: list[Side]) -> None:
    for one in sides:
        one.results.append(one.runner.launch(plan)().result)


def same(eager: Side, captured: Side) -> None:
    """Ids and logprobs; what the slots remember; the cache but for the spare block; the tables."""
    for a, b in zip(eager.results, captured.results, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None:
            np.testing.assert_allclose(a.logprobs.logprobs, b.logprobs.logprobs, atol=1e-4)
            assert (a.logprobs.ranks == b.logprobs.ranks).all()
    (mine, theirs) = (one.runner.slots for one in (eager, captured))
    assert torch.equal(mine.last_ids[:SLOTS], theirs.last_ids[:SLOTS])
    assert torch.equal(mine.tables, theirs.tables) and (theirs.host_tables == theirs.tables.numpy()).all()
    assert (theirs.host_tables[SLOTS] == SPARE).all()
    for a, b in zip(eager.caches, captured.caches):
        for one, other in zip(a, b):
            torch.testing.assert_close(one[:SPARE], other[:SPARE], atol=1e-4, rtol=1e-4)


GREEDY = SamplingParams(temperature=0)
PARAMS = {
    "greedy": [GREEDY] * 7,
    "mixed": [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(top_k=5),
        GREEDY,
        GREEDY,
    ],
}


in_place = pytest.param(TorchBackend, marks=pytest.mark.skipif(not native.available(), reason="needs the native library"))


@pytest.mark.parametrize("backend", [CapturedTorch, in_place])
@pytest.mark.parametrize(("family", "kind"), [("llama", "greedy"), ("llama", "mixed"), ("gemma2", "greedy"), ("qwen2_moe", "mixed")])
def test_captured_steps_equal_eager_ones(family, kind, backend, tmp_path_factory):
    """Any rows in any order, their ids from the host or the device, batches of every size up to the largest captured and beyond a ring."""
    folder = make(family, tmp_path_factory.mktemp("graphs"))
    eager, captured = sides = [side(folder, False), side(folder, True, backend)]
    decodes = captured.runner.executor.decodes
    requests, replayed, counts = Requests(7), [], []
    run = decodes.run
    decodes.run = lambda staged, *rest: (replayed.append(staged.step.size), run(staged, *rest))[1]
    admit(requests, sides, PARAMS[kind])
    assert not replayed
    for turn in range(4 * RING):
        rows = requests.rng.permutation(7)[: 7 if turn == 5 else int(requests.rng.integers(1, 8))].tolist()
        from_host = turn % 3 == 2
        plan = requests.plan([(slot, requests.ids(1) if from_host else [FROM_DEVICE]) for slot in rows], ahead=turn % 2)
        counts.append(len(rows))
        launch(plan, sides)
    assert replayed == [next(s for s in SIZES if s >= rows) for rows in counts]
    assert set(replayed) == set(SIZES) and replayed != counts
    same(eager, captured)
    for one in sides:
        one.runner.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = [side(make("llama", tmp_path_factory.mktemp("graphs")), captured) for captured in (False, True)]
    yield made
    for one in made:
        one.runner.close()


def test_steps_in_the_air(pair):
    """Two of them, as the engine has: each launched before the result of the one before it was asked for."""
    requests = Requests(3)
    admit(requests, pair, [GREEDY] * 5)
    plans = [requests.plan([(slot, [FROM_DEVICE]) for slot in range(5)]) for _ in range(3 * RING)]
    for one in pair:
        waits: deque[Handle] = deque()
        for plan in plans:
            waits.append(one.runner.launch(plan))
            if len(waits) == 2:
                one.results.append(waits.popleft()().result)
        one.results.append(waits.popleft()().result)
    same(*pair)


def test_steps_are_staged_while_those_before_them_run(pair):
    """On the thread that launches them, whether they sample or not."""
    runner, requests = pair[1].runner, Requests(6)
    admit(requests, pair, [GREEDY, SamplingParams(temperature=0.9), GREEDY])
    stage, staged, seen = runner.executor.decodes.stage, [], threading.Event()
    runner.executor.decodes.stage = lambda plan: (staged.append(threading.current_thread()), stage(plan))[1]
    try:
        plans = [requests.plan([(slot, [FROM_DEVICE]) for slot in rows]) for rows in ((0, 2), (0, 1, 2), (2, 0), (1, 0))]
        runner._thread.submit(seen.wait)  # what came before is still under way
        waits = [runner.launch(plan) for plan in plans]
        assert staged == [threading.current_thread()] * len(plans)
    finally:
        seen.set()
        runner.executor.decodes.stage = stage
    pair[1].results += [wait().result for wait in waits]
    pair[0].results += [pair[0].runner.launch(plan)().result for plan in plans]
    same(*pair)


def test_steps_whose_rows_share_keys(tmp_path_factory):
    """Their other form is captured when a size first needs it, among steps in the air; groups are found in tables as the step leaves them."""
    folder = make("llama", tmp_path_factory.mktemp("graphs"))
    sides = [side(folder, False), side(folder, True, CascadingTorch)]
    runner = sides[1].runner
    decodes, backend = runner.executor.decodes, runner.executor.backend
    assert not backend.found and not any(step.cascade for step in decodes.steps.values())
    requests = Requests(5)
    admit(requests, sides, [GREEDY] * 7)
    plans = [requests.plan([(slot, [FROM_DEVICE]) for slot in range(rows)], ahead=rows % 2) for rows in (2, 3, 4, 7, 1, 6, 5, 4, 3, 7)]
    for one in sides:
        one.results += [wait().result for wait in [one.runner.launch(plan) for plan in plans]]
    same(*sides)
    assert sorted(step.size for step in decodes.steps.values() if step.cascade) == [4, 7]
    real = [f for f in backend.found if f[0] == 2]
    assert [len(lens) for _, lens, _ in real] == [4, 7, 7, 7, 4, 7]  # and rehearsals at depth 0
    for (_, lens, tables), plan in zip(real, [plan for plan in plans if len(plan.slots) >= 4]):
        assert lens[: len(plan.slots)] == (plan.starts + 1).tolist()
        for row, slot in enumerate(plan.slots.tolist()):
            columns = -(-lens[row] // BLOCK)
            assert tables[row][:columns] == runner.slots.host_tables[slot, :columns].tolist()
    for one in sides:
        one.runner.close()


def test_padding_touches_the_spare_block_alone(pair):
    _, captured = pair
    requests = Requests(4)
    admit(requests, [captured], [GREEDY] * 5)
    before = [(k.clone(), v.clone()) for k, v in captured.caches]
    last = captured.runner.slots.last_ids.clone()
    plan = requests.plan([(slot, [FROM_DEVICE]) for slot in (4, 0, 2, 1, 3)])
    launch(plan, [captured])
    written = {
        int(captured.runner.slots.host_tables[slot, start // BLOCK]) * BLOCK + start % BLOCK
        for slot, start in zip(plan.slots.tolist(), plan.starts.tolist())
    }
    for old, new in zip(before, captured.caches):
        for a, b in zip(old, new):
            changed = (a != b).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
            assert written <= set(changed) <= written | {SPARE * BLOCK}  # padding is at position 0
    assert torch.equal(captured.runner.slots.last_ids[5:SLOTS], last[5:SLOTS])


def test_fitting(pair):
    _, captured = pair
    decodes = captured.runner.executor.decodes

    def plan(rows: int, diffs: int = 0, **changes) -> StepPlan:
        one = np.zeros(rows, np.int32)
        options = {"counts": one + 1, "token_ids": one, "samples": one == 0, **changes}
        blocks = np.arange(diffs, dtype=np.int32)
        return StepPlan(
            0, one, one, out_positions=one, requests=[], block_slots=blocks * 0, block_columns=blocks, block_ids=blocks, **options
        )

    assert [decodes.fitting(plan(rows)) for rows in range(1, 8)] == [1, 2, 4, 4, 7, 7, 7]
    assert decodes.fitting(plan(8)) == 0  # more rows than the largest
    assert decodes.fitting(plan(2, counts=np.array([1, 2], np.int32), token_ids=np.zeros(3, np.int32))) == 0  # a prompt among them
    assert decodes.fitting(plan(2, samples=np.array([True, False]))) == 0  # one yields no token
    for rows, size in ((1, 1), (3, 4)):
        assert decodes.fitting(plan(rows, diffs_of(size))) == size
        assert decodes.fitting(plan(rows, diffs_of(size) + 1)) == 0  # more new blocks than are staged
    assert pair[0].runner.executor.decodes is None


@pytest.mark.parametrize("most", [*range(1, 70), 100, 255, 256, 257, 1000, 1024])
def test_ladder(most):
    sizes = ladder(most)
    assert sizes[-1] == most and sizes[:4] == tuple(range(1, most + 1))[:4]
    for small, large in pairwise(sizes):
        assert small < large <= small + max(1, small // 4)
    assert len(sizes) <= 4 * most.bit_length()


def test_spare_block():
    slots = Slots(3, 5, CPU)
    slots.spare_block(77)
    assert slots.spare == 3 and slots.last_ids.shape == (4,)
    assert (slots.tables[3] == 77).all() and not slots.tables[:3].any()
    assert (slots.host_tables == slots.tables.numpy()).all()


def test_prompt_logprobs_of_one_request_leave_the_others_their_graphs(tmp_path_factory):
    """Neither a prompt of one token, which has none, nor one that was left in the middle keeps later steps from being captured ones."""
    captured = side(make("llama", tmp_path_factory.mktemp("graphs")), True)
    runner = captured.runner
    asking = SamplingParams(temperature=0, prompt_logprobs=1)
    requests = Requests(3)
    prompts = [[7], requests.ids(6), requests.ids(3)]
    admitted = [Request(str(i), ids, p, seed=i, slot=i) for i, (ids, p) in enumerate(zip(prompts, (asking, asking, GREEDY)))]
    launch(requests.plan([(0, prompts[0]), (1, prompts[1][:2]), (2, prompts[2])], admitted), [captured])
    assert set(runner.prompts) == {1}  # whose request goes away now
    run, ran = runner.executor.decodes.run, []
    runner.executor.decodes.run = lambda staged, *rest: (ran.append(staged.step.size), run(staged, *rest))[1]
    launch(requests.plan([(0, [FROM_DEVICE]), (2, [FROM_DEVICE])]), [captured])
    assert ran
    runner.close()
