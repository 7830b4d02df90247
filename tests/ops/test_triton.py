"""The Triton kernels without a GPU: numbers by the interpreter, code by ahead-of-time compilation.

Both run in processes of their own: TRITON_INTERPRET counts when kernels are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.devices.compiler import CXX
from support.runs.switches import ROUNDING, switched

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Kernels of products of matrices.
PRODUCTS = ("low_rank", "symmetric", "grams", "inverse_root")
SECONDS = 480  # at most, for interpreting or compiling all kernels on busy cores
pytestmark = pytest.mark.timeout(SECONDS)


def run(arguments, **environment):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    env.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**env, **environment},
        timeout=SECONDS - 10,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


def test_interpreted_kernels_compute_what_float64_and_numpy_do():
    # Of the optimizer, what runs every kernel but those of codes, on small matrices.
    optimizer = f"{TESTS}/optim/test_dion_reference.py::test_"
    chosen = [f"{TESTS}/ops/test_ops.py", f"{TESTS}/ops/test_codes.py"]
    chosen += [f"{TESTS}/ops/test_adamw.py", f"{TESTS}/ops/test_state_codes.py"]
    chosen += [f"{TESTS}/ops/test_rows.py"]
    chosen += [f"{TESTS}/ops/test_ahead.py"]
    chosen += [f"{TESTS}/ops/test_newton_schulz.py"]
    chosen += [f"{TESTS}/ops/test_cholesky_qr.py"]
    chosen += [f"{optimizer}rules_and_right_factors", f"{optimizer}local_steps_between"]
    environment = {"TRITON_INTERPRET": "1", "CURVADION_BACKEND": "triton"}
    said = run(["-m", "pytest", "-q", "-x", *chosen], **environment)
    # Without a compiler, codes are not compared with those of C++ as well.
    assert " passed" in said and ("skipped" not in said or CXX is None)


@pytest.fixture(scope="module")
def compiled():
    """What the compiler said of every kernel, one record a variant and target."""
    said = run([TESTS / "support" / "devices" / "triton_ahead_of_time.py"])
    return [json.loads(line) for line in said.splitlines()]


# Of a thread's registers, where Triton needs more than 128; its releases differ by a few.
MOST_SPILLED_BYTES = 32


def test_kernels_store_and_multiply_and_spill_hardly_any_registers(compiled):
    """A kernel may compile to a bare trap without an error."""
    spilling = [r for r in compiled if r["stack_bytes"] > MOST_SPILLED_BYTES]
    assert spilling == []
    assert [r for r in compiled if r["stores"] == 0] == []
    assert len({record["kernel"] for record in compiled}) >= 12
    products = [r for r in compiled if r["kernel"].startswith(PRODUCTS)]
    exact = ("symmetric_product float32", "symmetric_product float32 of B^T B")
    exact += ("symmetric_product float32 in whole tiles",)
    assert len(products) == 38 and all((r["mma"] > 0) != (r["kernel"] in exact) for r in products)


def test_two_programs_of_products_share_a_processor_of_an_h100(compiled):
    """Its 65536 registers suffice for 512 threads with 128 each."""
    iterated = ("grams", "inverse_root", "symmetric_product bfloat16")
    chosen = [r for r in compiled if r["kernel"].startswith(iterated) and r["target"] == "sm_90"]
    assert len(chosen) == 15 and [r for r in chosen if r["registers"] > 128] == []


def test_codes_are_made_without_fused_multiply_adds(compiled):
    """Which would round otherwise than the other backends."""
    codes = ("encode", "decode", "average", "states")
    chosen = [r for r in compiled if r["kernel"].startswith(codes)]
    assert len(chosen) == 6 and [r for r in chosen if r["fma"]] == []


def test_bulk_data_moves_in_128_bits(compiled):
    wide = ("momentum", "accumulate", "local_step", "low_rank_update_", "norms", "symmetric")
    wide += ("adamw_",)
    wide += ("ahead", "lengths")
    wide += ("row_sums", "rescaled_rows", "scale_rows")
    wide += ("grams", "inverse_root", "first_factor")
    chosen = [
        r for r in compiled if r["kernel"].startswith(wide) and "unaligned" not in r["kernel"]
    ]
    # Some tensor cores take TensorFloat-32 in one order only, into which loads have to turn it.
    turned = "symmetric_product float32 fast of B^T B"
    assert chosen and all(r["wide_loads"] or r["kernel"].startswith(turned) for r in chosen)
    reading = ("norms", "momentum_norms", "lengths")
    reading += ("row_sums",)
    writing = [r for r in chosen if not r["kernel"].startswith(reading)]
    assert writing and all(r["wide_stores"] for r in writing)


@pytest.mark.parametrize("switch", [*ROUNDING, "autocast"])
def test_products_round_where_torch_says_so_by_either_interface(switch, monkeypatch):
    from curvadion_kernels import low_rank, symmetric

    asked = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, PRECISION, **__: asked.append(PRECISION)

    monkeypatch.setattr(low_rank, "low_rank_kernel", Kernel())
    monkeypatch.setattr(symmetric, "symmetric_kernel", Kernel())
    monkeypatch.setattr(symmetric, "gains", lambda *_: True)
    X, A = torch.ones(4, 4), torch.ones(1, 4, 4)
    with switched(switch):
        low_rank.low_rank_update_([X], [X], [X], [0.1], [1.0])
        symmetric.symmetric_product(A, A, A.clone())
    assert asked == (["tf32", "tf32"] if switch in ROUNDING else ["tf32x3", "ieee"])
