"""runner/tune.py without a GPU: what the search keeps, against a model of a chip; the steps it repeats, on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import make

from flatout import LLM
from flatout.request import SamplingParams
from flatout.runner import tune


class Product:
    """Offers by name; each costs a step so many seconds."""

    def __init__(self, costs: dict[bytes, float], chosen: bytes):
        self.costs, self.chosen, self.kept = costs, chosen, []

    def offers(self) -> list[bytes]:
        return list(self.costs)


class Chip:
    """Steps take what their products cost, and more the colder it is; one that it tries counts at once."""

    def __init__(self, *products: Product):
        self.products, self.spans = products, []

    def seconds(self, least: float) -> float:
        self.spans.append(least)
        return 1.0 + sum(p.costs[p.chosen] for p in self.products)


def settled(*products: Product) -> tune.Tuned:
    def keep(product: Product, algorithm: bytes) -> None:
        product.chosen = algorithm
        product.kept.append(algorithm)

    return tune.settle(256, products, keep, Chip(*products).seconds)


def test_each_product_takes_what_is_best_for_the_step():
    up = Product({b"a": 0.3, b"b": 0.5, b"c": 0.2, b"d": 0.25}, chosen=b"b")
    down = Product({b"a": 0.1, b"b": 0.3}, chosen=b"a")
    tuned = settled(up, down)
    assert (up.chosen, up.kept) == (b"c", [b"c"])
    assert (down.chosen, down.kept) == (b"a", [])
    assert (tuned.tokens, tuned.changed, tuned.tried) == (256, 1, 2)
    assert tuned.before == pytest.approx(1.6) and tuned.after == pytest.approx(1.3)


def test_what_gains_no_more_than_noise_is_left():
    product = Product({b"a": 0.1, b"b": 0.097}, chosen=b"a")
    tuned = settled(product)
    assert (product.chosen, product.kept, tuned.changed) == (b"a", [], 0)
    assert tuned.after == tuned.before


def test_a_product_with_one_algorithm_and_none_at_all():
    product = Product({b"a": 0.1}, chosen=b"a")
    assert settled(product).changed == 0 and product.chosen == b"a"
    assert settled().tried == 0


def test_sizes_are_the_largest_of_each_class():
    assert tune.sizes(256, 8192, 33000) == [256, 384, 512, 768, 1024, 2048, 4096, 8192]
    assert tune.sizes(1024, 2000, 500) == [256, 384, 512, 768, 1024]
    assert tune.sizes(300, 8192, 301) == [256, 300]
    assert tune.sizes(64, 128, 8192) == []


@pytest.mark.parametrize(("keys", "tokens"), [(37, 5), (0, 40), (0, 1)])
def test_the_step_that_is_repeated(tmp_path, keys, tokens):
    """Of that many tokens, behind that many keys, twice with the same logits; afterwards requests are served as before."""
    with LLM(make("qwen2", tmp_path), dtype="float32", max_model_len=64, max_num_seqs=8, enable_prefix_caching=False) as llm:
        asked = [[3, 1, 4, 1, 5, 9, 2, 6]], SamplingParams(temperature=0.0, max_tokens=8)
        before = llm.generate(*asked, use_tqdm=False)[0].outputs[0].token_ids
        runner, seen = llm.engine.runner, []
        logits = runner.decoder.logits
        runner.decoder.logits = lambda hidden, rows: seen.append(logits(hidden, rows).numpy().copy())
        try:
            run = tune._step(runner, llm.engine.scheduler.blocks.num_blocks, keys, tokens)
            run(), run()
        finally:
            runner.decoder.logits = logits
        assert seen[0].shape[0] == (tokens if keys else 1)
        assert np.isfinite(seen[0]).all() and (seen[0] == seen[1]).all()
        assert llm.generate(*asked, use_tqdm=False)[0].outputs[0].token_ids == before
