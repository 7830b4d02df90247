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

from switches import ROUNDING, switched

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Tests of the optimizer that run every kernel but those of codes, on small matrices.
OPTIMIZER_TESTS = "test_rules_and_right_factors or test_local_steps_between"
COMPILING = 480  # seconds at most, of all kernels for all targets on busy cores
pytestmark = pytest.mark.timeout(COMPILING)  # whichever test asks first waits for that


def run(arguments, *, seconds=115, **environment):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    env.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**env, **environment},
        timeout=seconds,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


def test_interpreted_kernels_compute_what_float64_does():
    said = run(["-m", "pytest", "-q", "-x", TESTS / "ops" / "test_ops.py"], TRITON_INTERPRET="1")
    assert " passed" in said and "skipped" not in said


def test_interpreted_kernels_make_the_codes_of_numpy():
    said = run(["-m", "pytest", "-q", "-x", TESTS / "ops" / "test_codes.py"], TRITON_INTERPRET="1")
    assert " passed" in said and "1 skipped" in said


def test_the_optimizer_runs_on_interpreted_kernels():
    chosen = [TESTS / "optim" / "test_dion_reference.py", "-k", OPTIMIZER_TESTS]
    said = run(
        ["-m", "pytest", "-q", "-x", *chosen], TRITON_INTERPRET="1", CURVADION_BACKEND="triton"
    )
    assert " passed" in said and "skipped" not in said


@pytest.fixture(scope="module")
def compiled():
    """What the compiler said of every kernel, one record a variant and target."""
    said = run([TESTS / "support" / "triton_ahead_of_time.py"], seconds=COMPILING - 10)
    return [json.loads(line) for line in said.splitlines()]


def test_every_kernel_compiles_for_every_target(compiled):
    kernels = {record["kernel"] for record in compiled}
    assert len(kernels) >= 12
    assert {(r["kernel"], r["target"]) for r in compiled} == {
        (kernel, f"sm_{target}") for kernel in kernels for target in (80, 90, 100)
    }


def test_no_kernel_spills_registers(compiled):
    assert [r for r in compiled if r["spilled_bytes"]] == []


# How many programs of a kernel the registers of a multiprocessor hold, at least: enough of them
# hide the time that memory takes. Those that multiply matrices hide it in stages of their own.
PROGRAMS = {
    "norms": 6,
    "momentum_norms": 5,
    "accumulate_": 4,
    "local_step_": 3,
    "column_sum_of_squares": 6,
    "column_normalize_": 4,
    "encode_difference_": 3,
    "decode_": 8,
    "decode_add_": 8,
    "average_codes_": 4,
    "low_rank_update_": 1,
    "symmetric_product": 1,
}


def test_registers_leave_room_for_several_programs(compiled):
    for record in compiled:
        registers = -(-record["registers"] // 8) * 8  # are given out in eights
        held = 65536 // (registers * record["threads"])
        assert held >= PROGRAMS[record["kernel"].split(" ")[0]], record
    halves = [r for r in compiled if r["kernel"].startswith("symmetric_product bfloat16")]
    # Two programs, for which there is shared memory from an H100 on.
    assert all(r["registers"] <= 128 for r in halves if r["target"] != "sm_80")


def test_kernels_store_and_multiply(compiled):
    """A kernel may compile to a bare trap without an error."""
    assert [r for r in compiled if r["stores"] == 0] == []
    products = [r for r in compiled if r["kernel"].startswith(("low_rank", "symmetric"))]
    exact = ("symmetric_product float32", "symmetric_product float32 of B^T B")
    assert len(products) == 30 and all((r["mma"] > 0) != (r["kernel"] in exact) for r in products)


def test_codes_are_made_without_fused_multiply_adds(compiled):
    """Which would round otherwise than the other backends."""
    chosen = [r for r in compiled if r["kernel"].startswith(("encode", "decode", "average"))]
    assert len(chosen) == 15 and [r for r in chosen if r["fma"]] == []


def test_bulk_data_moves_in_128_bits(compiled):
    wide = ("momentum", "accumulate", "local_step", "low_rank_update_", "norms", "symmetric")
    chosen = [
        r for r in compiled if r["kernel"].startswith(wide) and "unaligned" not in r["kernel"]
    ]
    # Some tensor cores take TensorFloat-32 in one order only, into which loads have to turn it.
    turned = "symmetric_product float32 fast of B^T B"
    assert chosen and all(r["wide_loads"] or r["kernel"] == turned for r in chosen)
    writing = [r for r in chosen if not r["kernel"].endswith("norms")]
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
