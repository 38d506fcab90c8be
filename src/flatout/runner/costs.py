"""A model's CostTable: its decoder on meta tensors under kernels/op.py's recorder at a few shapes, and the functions that fit them exactly.

Nothing runs and nothing is allocated: 0.1 s for a model of 28 layers, loaded or not. A cost that no function here fits is an error, not a guess.
Called by build.py for the engine's own table and by doctor/predict.py for models on paper.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.batch import ForwardBatch
from flatout.kernels.attention import AttentionWork, Pieces
from flatout.kernels.inputs import remember
from flatout.kernels.kv import stored
from flatout.kernels.op import Cost, Op, recording_by
from flatout.kernels.sampling import greedy
from flatout.ledger.table import KINDS, CostTable, OpCost, Roof, StepShape, Terms
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder

LAYER = re.compile(r"^layers\.\d+\.")
META = torch.device("meta")
MOST_ROWS = 64


def cost_table(
    spec: ModelSpec, *, name: str, dtype: str, kv_dtype: str, packed: Mapping[str, int], embedding: str = "", runs_on: str, roof: Roof
) -> CostTable:
    """dtype, kv_dtype: names of torch's; packed, embedding: as the Decoder takes them; runs_on: "cuda" or "cpu", whose ops differ a little.

    RuntimeError: an op's cost is no function of the step's shape that a CostTable knows.
    """
    decoder = Decoder(
        spec,
        dtype=getattr(torch, dtype),
        device=META,
        max_tokens=MOST_ROWS,
        max_logits=MOST_ROWS,
        max_model_len=1,
        packed=packed,
        embedding=embedding,
        runs_on=runs_on,
    )
    kv_type = getattr(torch, kv_dtype)
    width = stored(spec.head_dim, kv_type)
    cache = torch.empty(1, 1, spec.num_kv_heads, width, dtype=kv_type, device=META)
    decoder.bind([(cache, cache)] * spec.num_layers)
    calls = _fitted(decoder, spec)
    counts = Counter(calls)
    ops = tuple(replace(call, count=counts[call]) for call in counts)
    index = {replace(op, count=1): i for i, op in enumerate(ops)}
    return CostTable(
        model=name,
        ops=ops,
        sequence=tuple(index[call] for call in calls),
        windows=tuple(group.window for group in spec.cache_groups()),
        roof=roof,
        weight_bytes=sum(d.tensor.nbytes for d in decoder.destinations().values()),
        kv_bytes_token=2 * spec.num_layers * spec.num_kv_heads * width * kv_type.itemsize,
    )


# -- recording ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Calls:
    """Every op called, with its operands and cost. What kernels/op.py:recording_by takes."""

    made: list[tuple[Op, tuple[Any, ...], Cost]] = field(default_factory=list)

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        self.made.append((op, args, op.cost(*args)))


def _recorded(decoder: Decoder, spec: ModelSpec, shape: StepShape) -> list[tuple[Op, tuple[Any, ...], Cost]]:
    """The calls of a step of this shape, whose keys and pairs may be any numbers. Its last keys stand for their pairs too."""

    def ids(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=META)

    empty = np.empty(0, np.int32)

    def work(group: int, keys: int, pairs: int) -> AttentionWork:
        # the group travels as the block size, which no cost looks at
        return AttentionWork(empty, empty, empty.reshape(0, 0), group, None, keys, pairs, Pieces([], []))

    def batch(rows: int, keys: tuple[int, ...], pairs: tuple[int, ...]) -> ForwardBatch:
        works = tuple(work(group, *both) for group, both in enumerate(zip(keys, pairs)))
        sampled, none = ids(shape.sampled), ids(0)
        return ForwardBatch(ids(rows), ids(rows), none, none, (), none, (ids(rows),) * len(keys), sampled, works)

    whole = batch(shape.tokens, shape.keys, shape.pairs)
    if shape.sampled < shape.tokens:
        whole.last = batch(shape.sampled, shape.last_keys, shape.last_keys)
    calls = _Calls()
    with recording_by(calls):
        hidden = decoder.forward(whole)
        if shape.sampled:
            logits = decoder.logits(hidden, (whole.last or whole).sample_rows)
            greedy(ids(shape.sampled), logits)
            remember(ids(1), ids(shape.sampled), ids(shape.sampled))
    return calls.made


# -- fitting -----------------------------------------------------------------------------------------------------------


def _shape(groups: int, tokens: int, sampled: int, keys: int, pairs: int, last_keys: int) -> StepShape:
    return StepShape(tokens, sampled, (keys,) * groups, (pairs,) * groups, (last_keys,) * groups)


def _fitted(decoder: Decoder, spec: ModelSpec) -> list[OpCost]:
    """Each call of a step in order, as an OpCost of one call."""
    groups = len(spec.cache_groups())
    base = _shape(groups, 3, 2, 5, 7, 4)
    steps = [
        base,
        _shape(groups, 4, 3, 5, 7, 4),  # a row more
        _shape(groups, 3, 2, 6, 7, 5),  # a key more
        _shape(groups, 3, 2, 5, 8, 4),  # a pair more
        _shape(groups, 64, 17, 2311, 70001, 977),  # what was found must hold here
    ]
    recorded = [_recorded(decoder, spec, shape) for shape in steps]
    nothing = _recorded(decoder, spec, _shape(groups, 9, 0, 31, 60, 0))
    every, one = _shape(groups, 6, 6, 20, 20, 20), _shape(groups, 1, 1, 11, 11, 11)
    all_sampled, single = _recorded(decoder, spec, every), _recorded(decoder, spec, one)
    whole = recorded[0]
    first, picked = len(nothing), len(whole) - len(all_sampled)
    kinds = ["tokens"] * first + ["picked"] * picked + ["sampled"] * (len(whole) - first - picked)
    _check_order(whole, nothing, [*range(first)])
    for other in (all_sampled, single):
        _check_order(whole, other, [i for i, kind in enumerate(kinds) if kind != "picked"])

    names = {id(d.tensor): (name, d.shape_of()) for name, d in decoder.destinations().items()}
    experts = (spec.moe.num_experts, spec.moe.top_k) if spec.moe else (0, 0)
    calls = []
    for i, kind in enumerate(kinds):
        samples = [(shape, made[i][2]) for shape, made in zip(steps, recorded, strict=True)]
        if i < first:
            samples.append((_shape(groups, 9, 0, 31, 60, 0), nothing[i][2]))
        if kind != "picked":
            place = i if i < first else i - picked
            samples += [(every, all_sampled[place][2]), (one, single[place][2])]
        calls.append(_call(whole[i][0], whole[i][1], kind, samples, names, experts))
    return calls


def _check_order(whole: list[Any], other: list[Any], places: list[int]) -> None:
    """A step of another shape makes the calls of the whole one at these places."""
    expected = [whole[i][0].name for i in places]
    if [op.name for op, *_ in other] != expected:
        raise RuntimeError("a step's ops differ with its shape in a way that the cost table does not know; see layers/ and runner/costs.py")


def _call(
    op: Op,
    args: tuple[Any, ...],
    kind: str,
    samples: list[tuple[StepShape, Cost]],
    names: Mapping[int, tuple[str, tuple[int, ...]]],
    experts: tuple[int, int],
) -> OpCost:
    work = next((a for a in args if isinstance(a, AttentionWork)), None)
    known = [names[id(a)] for a in args if id(a) in names]
    wide = [(name, shape) for name, shape in known if len(shape) > 1]
    parameters = [a for a in args if id(a) in names and len(names[id(a)][1]) > 1]
    numbers = [a for a in args if isinstance(a, Tensor) and a.dtype.is_floating_point]
    arithmetic = (parameters or numbers or [args[0]])[0].dtype
    dtype = {torch.uint8: "int8"}.get(arithmetic, str(arithmetic).removeprefix("torch."))
    if work is not None:
        q, k_cache = args[1], args[2]
        shape = f"{q.shape[1] // k_cache.shape[2]} heads on {k_cache.shape[1]} of {k_cache.shape[2]}"
    elif wide:
        shape = " + ".join("x".join(map(str, s)) for _, s in wide)
    else:
        shape = "x".join(map(str, args[op.out_indices[0]].shape[1:]))
    nothing = Terms()
    made = OpCost(
        name=op.name,
        part=_part(op, [name for name, _ in wide or known]),
        shape=shape,
        count=1,
        rows=kind,
        group=-1 if work is None else work.block_size,
        dtype=dtype,
        weights=nothing,
        kv=nothing,
        activations=nothing,
        flops=nothing,
    )
    weights, kv, activations, flops = (_terms(made, cost_kind, samples, experts) for cost_kind in KINDS)
    return replace(made, weights=weights, kv=kv, activations=activations, flops=flops)


def _part(op: Op, names: list[str]) -> str:
    """The projection or block that an op's parameters belong to: "attn.qkv", "moe", "head"; "" where it has none."""
    if not names:
        return ""
    found = [LAYER.sub("", name).split(".")[:-1] for name in names]
    common = [words[0] for words in zip(*found) if len(set(words)) == 1] or found[0][:1]
    return "head" if common == ["embed"] and op.name != "embedding" else ".".join(common)


def _terms(call: OpCost, kind: str, samples: list[tuple[StepShape, Cost]], experts: tuple[int, int]) -> Terms:
    """The function that gives this kind of cost at every sample. The first four are a base, then a row, a key and a pair more."""

    def at(shape: StepShape) -> tuple[int, int, int]:
        if call.group < 0:
            return shape.rows(call.rows), 0, 0
        if call.rows == "sampled":
            return shape.sampled, shape.last_keys[call.group], shape.last_keys[call.group]
        return shape.tokens, shape.keys[call.group], shape.pairs[call.group]

    values = [(at(shape), int(getattr(cost, kind))) for shape, cost in samples]
    (where, base), *others = values
    row, key, pair = (value - base for _, value in others[:3])
    if call.rows == "sampled":
        pair = 0  # those of the last keys
    linear = Terms(base - row * where[0] - key * where[1] - pair * where[2], row, key, pair)
    # of one token at the end, which meets top_k experts
    routed = Terms(expert=values[-1][1] // experts[1], experts=experts) if experts[1] else linear
    for terms in (linear, routed):
        if all(terms.at(*place) == value for place, value in values):
            return terms
    raise RuntimeError(f"{call.label}: its {kind} are no sum of rows, keys, pairs and experts met that the cost table knows ({values})")
