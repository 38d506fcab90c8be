"""kernels/gpu/blaslt.py without a GPU: what is chosen of what is offered, kept, and used again; what is passed to the library. It runs in tests/gpu."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from flatout.kernels import op as op_module
from flatout.kernels.gpu import blaslt
from flatout.kernels.linear import linear, linear_add

BF16 = torch.bfloat16


class Library:
    """Notes its calls; offers three algorithms, which are told apart by their first word."""

    def __init__(self):
        self.calls, self.made, self.takes, self.offers = [], 0, True, 3
        self.refusal = 0
        self.used = []  # the algorithms of the products so far

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args))
            if name == "cublasLtMatmul":
                assert len(args) == 16
                self.used.append(ctypes.c_uint64.from_address(args[12]).value)
            if name.endswith("Create"):
                self.made += 1
                args[0]._obj.value = self.made
            if name.endswith("Destroy"):
                self.made -= 1
            if name == "cublasLtMatmulAlgoGetHeuristic":
                for i in range(self.offers):
                    args[8][i].algorithm.data[0] = i + 1
                args[9]._obj.value = self.offers
                return self.refusal
            if name == "cublasLtGetStatusString":
                return b"said"
            return int(name == "cublasLtMatmulAlgoCheck" and not self.takes)

        call.argtypes = ()
        return call


@pytest.fixture
def library(monkeypatch):
    made = Library()
    room = torch.empty(16, dtype=torch.uint8)
    monkeypatch.setattr(blaslt, "_library", lambda: made)
    monkeypatch.setattr(blaslt, "_version", lambda: 1)
    monkeypatch.setattr(blaslt, "_handle", lambda device: ctypes.c_void_p(7))
    monkeypatch.setattr(blaslt, "_workspace", lambda device: room)
    monkeypatch.setattr(blaslt, "enter", lambda index: None)
    monkeypatch.setattr(blaslt, "_products", {})
    monkeypatch.setattr(blaslt, "_entered", SimpleNamespace(devices={torch.device("cpu")}))
    monkeypatch.setattr(blaslt, "choices", op_module.Choices())
    monkeypatch.setattr(blaslt, "_unmeasured", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return made


def measured(monkeypatch, *seconds):
    monkeypatch.setattr(blaslt, "medians", lambda runs, device: dict(zip(runs, seconds, strict=True)))


def multiply(rows, adds=False):
    out, x, weight = (torch.zeros(shape, dtype=BF16) for shape in ((rows, 16), (rows, 32), (16, 32)))
    blaslt.multiply(out, x, weight, None, adds=adds)


@pytest.mark.parametrize("seconds, taken", [((3.0, 1.0, 2.0), 2), ((1.0, 0.995, 2.0), 1), ((1.0, 2.0, 3.0), 1)])
def test_the_clearly_fastest_is_kept_for_its_class(library, monkeypatch, seconds, taken):
    measured(monkeypatch, *seconds)
    multiply(400)
    monkeypatch.setattr(blaslt, "medians", lambda *_: pytest.fail("measured again"))
    multiply(400)
    multiply(512)  # of the same class
    assert library.used == [taken] * 3
    library.takes = False
    multiply(450)
    assert library.used[-1] == 1, "the library's own choice where the kept one does not fit"


def test_what_is_no_algorithm_is_measured_anew(library, monkeypatch):
    measured(monkeypatch, 2.0, 1.0, 3.0)
    multiply(64)
    (name,) = blaslt.choices._names
    blaslt.choices._names[name] = "nonsense"
    blaslt._products.clear()
    multiply(64)
    assert library.used == [2, 2] and blaslt.choices._names[name] != "nonsense"


def test_where_memory_is_full_nothing_is_kept(library, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(blaslt, "medians", full)
    multiply(64, adds=True)
    monkeypatch.setattr(blaslt, "medians", lambda *_: pytest.fail("tried again"))
    multiply(60, adds=True)
    assert library.used == [1, 1] and not blaslt.choices._names


def test_nothing_is_measured_while_a_graph_is_captured(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(blaslt, "medians", lambda *_: pytest.fail("measured"))
    multiply(64)
    assert library.used == [1] and not blaslt.choices._names


def test_where_nothing_is_offered_cublas_multiplies(library):
    library.offers, library.refusal = 0, blaslt._UNSUPPORTED
    out, stream, x, weight = (torch.full(shape, 0.5, dtype=BF16) for shape in ((40, 16), (40, 16), (40, 32), (16, 32)))
    blaslt._linear(out, x, weight, None, False)
    blaslt._linear_add(stream, out, x, weight, None, 0.5, False)
    assert not library.used and (out == 8.0).all() and (stream == 4.5).all()
    library.refusal = 7
    with pytest.raises(blaslt.BlasError, match="AlgoGetHeuristic: said"):
        multiply(64)


def test_postponed_products_are_chosen_for_later(library, monkeypatch):
    measured(monkeypatch, 2.0, 3.0, 1.0)
    with blaslt.postponing() as later:
        multiply(64)
    assert not library.used and not blaslt.choices._names and len(later) == 1
    later[0]()
    assert len(blaslt.choices._names) == 1 and getattr(blaslt._here, "postponed", None) is None
    multiply(64)
    assert library.used == [3]


def test_what_was_made_is_given_back(library, monkeypatch):
    measured(monkeypatch, 1.0, 1.0, 1.0)
    monkeypatch.setattr(blaslt, "_MOST", 4)
    for rows in range(33, 60):
        multiply(rows)
    assert len(blaslt._products) <= 4 and library.made <= 4 * 4
    blaslt._products.clear()
    assert library.made == 0


def test_bias_factors_and_addresses(library, monkeypatch):
    measured(monkeypatch, 1.0, 1.0, 1.0)
    out, x, weight = (torch.zeros(shape, dtype=BF16) for shape in ((40, 16), (40, 32), (16, 32)))
    bias, seen = torch.zeros(16, dtype=BF16), []
    ask = blaslt._ask

    def noting(call, *args):
        if call == "cublasLtMatmul":
            seen.append([ctypes.c_float.from_address(a).value for a in (args[2], args[7])] + [args[3], args[5], args[8], args[10]])
        ask(call, *args)

    monkeypatch.setattr(blaslt, "_ask", noting)
    blaslt.multiply(out, x, weight, bias)
    blaslt.multiply(out, x, weight, None, 0.25, adds=True)
    addresses = [weight.data_ptr(), x.data_ptr(), out.data_ptr(), out.data_ptr()]
    assert seen == [[1.0, 0.0, *addresses], [0.25, 1.0, *addresses]]
    told = [args for name, args in library.calls if name == "cublasLtMatmulDescSetAttribute" and args[1] == blaslt._BIAS]
    assert [args[2]._obj.value for args in told] == [bias.data_ptr()]


def test_cublas_stays_where_the_library_is_not_found(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True, shape=(64, 32), dtype=BF16)
    weight = SimpleNamespace(shape=(16, 32), dtype=BF16)
    names = {}
    for op in (linear, linear_add):
        names[op.name] = {i.name: i.instead_of for i in op.implementations}
    assert names["linear"]["blaslt"] == "blas" and names["linear_add"]["blaslt"] == "addmm"
    monkeypatch.setattr(blaslt, "_library", lambda: object())
    assert blaslt._suits(on_gpu, on_gpu, weight, False) and not blaslt._suits(on_gpu, on_gpu, weight, True)
    monkeypatch.setattr(blaslt, "_library", lambda: None)
    assert not blaslt._suits(on_gpu, on_gpu, weight, False)
