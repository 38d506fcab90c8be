"""The cost table's own arithmetic: shapes of plans, terms, shares, and that nothing is lost between processes."""

import json

import numpy as np
import pytest

from flatout.ledger.table import CostTable, OpBytes, OpCost, Roof, Shares, StepShape, Terms, pairs_of, shape_of, table_from

ZERO = Terms()


def op(**changed):
    plain = dict(name="linear", part="attn.qkv", shape="4 x 8", count=1, rows="tokens", group=-1, dtype="bfloat16")
    return OpCost(**{**plain, "weights": ZERO, "kv": ZERO, "activations": ZERO, "flops": ZERO, **changed})


def table(*ops, **roof):
    limits = {"name": "toy", "read": ((100, 10.0), (1000, 5.0)), "flops": {"bfloat16": 2.0, "int8": 4.0}, **roof}
    return CostTable("toy", ops, tuple(range(len(ops))), (None,), Roof(**limits))


def test_the_shape_of_a_mixed_step_counts_what_each_query_sees():
    # a chunk of 3 after 4 (not its last), a chunk of 2 after 0 that ends a prompt, a decode at 9
    starts, counts, samples = np.array([4, 0, 9], np.int32), np.array([3, 2, 1], np.int32), np.array([False, True, True])
    shape = shape_of(starts, counts, samples, (None, 4))
    assert (shape.tokens, shape.sampled, shape.requests, shape.decodes) == (6, 2, 3, 1)
    assert shape.keys == (7 + 2 + 10, 6 + 2 + 4)  # under a window of 4: 3 queries see 4 + 2 different keys
    assert shape.pairs == (5 + 6 + 7 + 1 + 2 + 10, 3 * 4 + 1 + 2 + 4)
    assert shape.last_keys == (2 + 10, 2 + 4)


def test_pairs_are_those_of_the_attention_backends():
    backend = pytest.importorskip("flatout.attention.backend")
    random = np.random.default_rng(1)
    for window in (None, 1, 7, 64):
        counts = random.integers(1, 40, 9)
        ends = counts + random.integers(0, 90, 9)
        assert pairs_of(counts, ends, window) == backend.pairs(counts, ends, window)


def test_padding_is_rows_of_one_key():
    shape = shape_of(np.array([9, 3]), np.array([1, 1]), np.array([True, True]), (None, 4), padded=2)
    assert shape.executed() == StepShape(4, 4, (16, 10), (16, 10), (16, 10), 4, 4)


def test_terms_add_up_and_no_rows_cost_nothing():
    terms = Terms(100, 10, 3, 2, 1000, (8, 2))
    met = 8 * (1 - (6 / 8) ** 4)
    assert terms.at(4, 5, 6) == 100 + 40 + 15 + 12 + round(met * 1000)
    assert terms.at(0, 5, 6) == 0


def test_picked_rows_are_none_where_all_are_sampled():
    every = StepShape(3, 3, (3,), (3,), (3,))
    assert every.rows("picked") == 0 and every.rows("sampled") == 3
    assert StepShape(3, 1, (3,), (3,), (1,)).rows("picked") == 1


def test_a_floor_takes_the_slower_of_bytes_and_flops_op_by_op():
    bytes_bound = op(weights=Terms(50), flops=Terms(row=4), count=2)
    flops_bound = op(weights=Terms(10), flops=Terms(row=40), dtype="int8")
    shape = StepShape(2, 2, (2,), (2,), (2,))
    found = table(bytes_bound, flops_bound).floor(shape)
    assert found.bandwidth == (2 * 50 / 5, 10 / 5)  # 110 bytes in all are past the first working set
    assert found.compute == (2 * 8 / 2, 80 / 4)
    assert found.by_bandwidth == 20 and found.by_compute == 20 and found.seconds == 40
    assert table(bytes_bound, flops_bound).cost(shape) == OpBytes(weights=110, flops=96)


def test_activations_count_beyond_the_last_cache_alone():
    wide = op(activations=Terms(row=30))
    shape = StepShape(2, 2, (2,), (2,), (2,))
    assert table(wide).floor(shape).bandwidth == (6.0,)
    assert table(wide, cache=45).floor(shape).bandwidth == (1.5,)


def test_an_unknown_dtype_is_given_the_best_rate():
    assert table().roof.rate("float8") == 4.0
    assert table(flops={}).floor(StepShape(1, 1, (1,), (1,), (1,))).seconds == 0


def test_shares_interpolate_by_logarithms_and_hold_beyond_their_knots():
    shares = Shares((1, 4), (1, 100), ((0.25, 1.0), (1.0, 1.0)))
    assert shares.at(2) == pytest.approx(0.5)
    assert shares.at(1, 10) == pytest.approx(0.5)
    assert shares.at(8, 1e6) == shares.at(0.5, 200) == 1.0


def test_a_prediction_divides_by_the_measured_share_and_adds_a_launch_where_there_is_none():
    plain, known = op(weights=Terms(50)), op(weights=Terms(50), shares=Shares((1,), (1,), ((0.5,),)))
    made = table(plain, known, launch_s=1.0, captured_launch_s=0.25)
    shape = StepShape(1, 1, (1,), (1,), (1,))
    assert made.predicted(shape) == (6.0, 10.0)
    assert made.predicted(shape, captured=True) == (5.25, 10.0)


def test_nothing_is_lost_between_processes():
    made = table(op(shares=Shares((1, 4), (1,), ((0.5,), (0.7,)))), op(name="experts", weights=Terms(expert=7, experts=(8, 2))))
    again = table_from(json.loads(json.dumps(made.plain())))
    assert again == made
    msgspec = pytest.importorskip("msgspec")
    assert table_from(msgspec.msgpack.decode(msgspec.msgpack.encode(made.plain()))) == made


def test_another_versions_table_is_refused():
    plain = table().plain()
    del plain["roof"]
    with pytest.raises(ValueError, match="no cost table of this version: KeyError"):
        table_from(plain)
