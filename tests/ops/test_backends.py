"""Which backend runs, what happens where it cannot, and PyTorch's tracers."""

import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from curvadion import ops
from curvadion.ops import backends, coding, native
from curvadion.ops.code_format import Bits, block_bytes
from support.references.tolerance import Rounding, assert_close
from support.runs import fresh

CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(
    ops.lacking("cpu") is not None,
    reason=f"no library of compiled operations: {ops.lacking('cpu')}",
)


def lists(k=4):
    generator = torch.Generator().manual_seed(0)
    draw = [[torch.randn(20 + i, 3, generator=generator) for i in range(k)] for _ in range(3)]
    return [*draw, [1.0] * k]


@needs_library
def test_the_cpu_takes_compiled_codes(monkeypatch):
    M, G, X, _ = lists()
    for name in ("_encode", "_decode"):
        monkeypatch.setattr(coding, name, None)
    monkeypatch.delenv("CURVADION_BACKEND", raising=False)
    assert ops.backend_for(CPU) == "cpu"
    codes, own = torch.zeros(4, block_bytes(2), dtype=torch.uint8), torch.zeros(4, 256)
    ops.encode_difference_(codes, X, M, G, bits=2)
    ops.decode_add_(X, (), codes, 2)
    ops.decode_add_(X, M, codes, 2)
    ops.average_codes_(codes, own, codes.clone()[None], 0, Bits(2, 2))


@needs_library
def test_what_a_backend_refuses_is_counted(monkeypatch):
    monkeypatch.setattr(backends, "refused", Counter())
    codes = torch.zeros(1, block_bytes(2), dtype=torch.uint8)
    with ops.use_backend("cpu"):
        ops.encode_difference_(codes, [torch.ones(256)], bits=2)
        ops.norms([torch.ones(3)])  # this backend has no such operation
        assert not backends.refused
        ops.encode_difference_(codes, [torch.ones(256, dtype=torch.float64)], bits=2)
    assert backends.refused == {"encode_difference_": 1}


def test_backends_are_forced_by_argument_and_by_environment(monkeypatch):
    monkeypatch.setenv("CURVADION_BACKEND", "torch")
    assert ops.backend_for(CPU) == "torch"
    monkeypatch.setenv("CURVADION_BACKEND", "numpy")
    with pytest.raises(ValueError, match=r"'numpy' must be one of .*'torch', 'cpu'"):
        ops.norms([torch.ones(1)])
    with ops.use_backend("torch"):
        assert ops.backend_for(CPU) == "torch"
    monkeypatch.delenv("CURVADION_BACKEND")
    before = ops.backend_for(CPU)
    with ops.use_backend("torch"), ops.use_backend(None):
        assert ops.backend_for(CPU) == before
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="'cuda' is forced.*no CUDA device"):
            ops.use_backend("cuda")
    if not ops.lacking("cpu"):
        with ops.use_backend("cpu"), pytest.raises(RuntimeError, match="'cpu' is forced.*on meta"):
            ops.backend_for(torch.device("meta"))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from curvadion import CurvaDion
from curvadion import ops
X = torch.nn.Parameter(torch.ones(3, 2))
X.grad = torch.ones(3, 2)
CurvaDion([X], threshold=0.3).step()
print(ops.lacking("triton"))
"""
USE = """
import torch
from curvadion import ops
print(ops.norms([torch.ones(4)]).item(), ops.norms([torch.ones(9)]).item())
print(ops.lacking("cpu"))
"""


def test_torch_needs_no_triton():
    assert "install triton" in fresh.forked(WITHOUT_TRITON)


def test_a_failing_compiler_is_one_warning_that_quotes_it(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of ink' >&2\nexit 1\n")
    compiler.chmod(0o755)
    said = fresh.forked(USE, CXX=str(compiler), CURVADION_CACHE=str(tmp_path / "cache"))
    assert "2.0 3.0\n" in said
    assert said.count("curvadion runs in plain PyTorch on the cpu (cpu: building it failed") == 1


@needs_library
def test_a_damaged_library_is_an_error_that_names_it(tmp_path, monkeypatch):
    path = tmp_path / Path(native.library("cpu")._name).name
    path.write_text("of another machine")
    monkeypatch.setenv("CURVADION_CACHE", str(tmp_path))
    with pytest.raises(native.Unavailable, match=r"(?i)delete it.*CURVADION_CACHE"):
        native.library.__wrapped__("cpu")


@needs_library
def test_ranks_with_a_cold_cache_compile_once_and_sweep_up(tmp_path, monkeypatch):
    built, compiled = Path(native.library("cpu")._name), []

    def compile_slowly(*_, build_directory, **__):
        compiled.append(build_directory)
        time.sleep(0.2)
        return shutil.copy(built, build_directory)

    monkeypatch.setattr("torch.utils.cpp_extension.load", compile_slowly)
    monkeypatch.setenv("CURVADION_CACHE", str(tmp_path))
    for name, hours in (("killed", 2), ("elsewhere", 0.5)):
        folder = tmp_path / f"curvadion_cpu_build_{name}"
        folder.mkdir()
        os.utime(folder, (time.time() - 3600 * hours,) * 2)
    with ThreadPoolExecutor() as ranks:
        assert len(list(ranks.map(native.library.__wrapped__, ["cpu"] * 3))) == 3
    assert len(compiled) == 1
    kept = {built.name, "curvadion_cpu.lock", "curvadion_cpu_build_elsewhere"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_other_flags_are_another_library(monkeypatch):
    before = native.digest("cpu")
    monkeypatch.setattr(native, "FLAGS", ["-O0"])
    assert native.digest("cpu") != before


def test_writing_counts_as_a_change_for_autograd():
    """A weight changed between forward and backward must not pass silently."""
    X = torch.ones(3, requires_grad=True)
    loss = (X * X).sum()
    with torch.no_grad():
        ops.local_step_([X], [torch.ones(3)], [0.1], [1.0], moves=None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.numeric
def test_torch_compile_takes_operations():
    def step(M, G, X, ones):
        ops.accumulate_(M, G, ones, moves=None)
        ops.local_step_(X, G, ones, ones, M, ones, moves=None)
        return ops.momentum_norms(M, G, ones)

    eager, compiled = lists(2), lists(2)
    expected = step(*eager)
    actual = torch.compile(step, backend="aot_eager")(*compiled)
    rounding = Rounding(torch.float32, terms=20)
    assert_close(actual, expected, rounding)
    for e, a in zip(eager[2], compiled[2], strict=True):
        assert_close(a, e, rounding)
