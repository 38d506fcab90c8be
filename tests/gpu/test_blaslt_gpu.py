"""cuBLASLt's algorithms against float64: every one it offers, the chosen one kept and used for other rows, in graphs, by several threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from products import OPS, Case, close, implementation

if not torch.cuda.is_available():  # before triton is imported: tests/kernels choose its interpreter
    pytest.skip("needs a CUDA device", allow_module_level=True)

from flatout.kernels import op as op_module
from flatout.kernels.gpu import blaslt
from flatout.kernels.linear import linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(blaslt._library() is None, reason="needs cuBLASLt")]
FP16 = torch.float16
SHAPES = [
    Case("linear", 0, 4608, 3584, biased=True),  # Qwen2-7B
    Case("linear", 0, 37888, 3584),
    Case("linear_add", 0, 3584, 18944),
    Case("linear", 0, 2048, 8192, FP16),  # Llama-3.2-1B
    Case("linear_add", 0, 2048, 2048, FP16, scale=0.22),
    Case("linear", 0, 32064, 576, wide=True),
    Case("linear", 0, 200, 72, biased=True),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choice of another test or of this machine."""
    monkeypatch.setattr(blaslt, "choices", op_module.Choices())
    monkeypatch.setattr(blaslt, "_products", {})


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.form}-{c.outputs}x{c.columns}")
def test_rows_of_a_class_by_one_choice(case):
    """The first number of rows is measured; the others take what was chosen."""
    for rows in (512, 257, 300, 384, 511, 33, 64, 1000, 4097):
        asked = replace(case, rows=rows)
        given = asked.operands("cuda")
        expected = asked.truth(given)
        operands = asked.arguments(given)
        assert next(i.accepts for i in OPS[case.form].implementations if i.name == "blaslt")(*operands)
        implementation(OPS[case.form], "blaslt")(*operands)
        close(given["out"], expected, asked, rounded_rows=False)
    assert len(blaslt.choices._names) == 5, "classes of 64, 384, 512, 1024 and 8192 rows"


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.form}-{c.outputs}x{c.columns}")
def test_every_algorithm_that_is_offered(case):
    asked = replace(case, rows=200)
    given = asked.operands("cuda")
    expected, before = asked.truth(given), given["out"].clone()
    product = blaslt._product(given["out"], given["x"], given["weight"], given["bias"], case.form == "linear_add")
    offers = product.offers()
    assert len(offers) > 1
    for offer in offers:
        assert product.takes(offer)
        given["out"].copy_(before)
        product.run(offer, given["out"], given["x"], given["weight"], given["bias"], case.scale)
        close(given["out"], expected, asked, rounded_rows=False)


def test_measuring_leaves_no_trace_and_a_kept_choice_is_not_measured(monkeypatch):
    asked = replace(SHAPES[4], rows=100)
    given, again = asked.operands("cuda"), asked.operands("cuda")
    run = implementation(OPS["linear_add"], "blaslt")
    run(*asked.arguments(given))
    blaslt._products.clear()
    with monkeypatch.context() as once:
        once.setattr(blaslt, "medians", lambda *_: pytest.fail("measured twice"))
        run(*asked.arguments(again))
    assert torch.equal(given["out"], again["out"])
    (name,) = blaslt.choices._names
    for broken in ("zz", "00", "ff" * 64):  # of a file that something else wrote, or of another library
        blaslt._products.clear()
        blaslt.choices._names[name] = broken
        fresh = asked.operands("cuda")
        expected = asked.truth(fresh)
        run(*asked.arguments(fresh))
        close(fresh["out"], expected, asked, rounded_rows=False)


def test_rows_further_apart_than_they_are_long():
    whole = torch.randn(300, 1024 + 64, device="cuda").bfloat16()
    weight = torch.randn(512, 1024, device="cuda").bfloat16() / 32
    wide = torch.full((300, 640), float("nan"), device="cuda", dtype=torch.bfloat16)
    x, out = whole[:, 8 : 8 + 1024], wide[:, 64 : 64 + 512]
    blaslt.multiply(out, x, weight, None)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=2**-7, atol=2**-7)
    assert wide[:, :64].isnan().all() and wide[:, 64 + 512 :].isnan().all()


def test_a_captured_product_follows_its_operands():
    asked = replace(SHAPES[0], rows=128)
    given = asked.operands("cuda")
    operands = asked.arguments(given)
    run = implementation(linear, "blaslt")
    run(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*operands)
        run(torch.empty_like(given["out"]), *operands[1:3], torch.zeros_like(given["bias"]), False)  # the bias of one is not the other's
    given["x"].copy_(given["x"].flip(0))
    expected = asked.truth(given)
    given["out"].fill_(float("nan"))
    graph.replay()
    close(given["out"], expected, asked, rounded_rows=False)


def test_threads_multiply_what_they_ask_for():
    asked = replace(SHAPES[6], rows=64)
    sets = [replace(asked, seed=seed).operands("cuda") for seed in range(6)]
    truths, failures = [asked.truth(s) for s in sets], []
    blaslt.multiply(*(sets[0][k] for k in ("out", "x", "weight", "bias")))
    torch.cuda.synchronize()

    def work(given) -> None:
        try:
            for _ in range(100):
                blaslt.multiply(*(given[k] for k in ("out", "x", "weight", "bias")))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(given,)) for given in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for given, truth in zip(sets, truths, strict=True):
        close(given["out"], truth, asked, rounded_rows=False)
