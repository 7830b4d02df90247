"""What every backend of curvadion.ops must compute: checks against float64, for any device.

Each check takes a backend's name and a device. References are written from the definitions, in
float64 or in exact integers, and share no code with the package.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch

from curvadion import ops
from support.references import tolerance
from support.references.tolerance import Rounding, assert_within

DTYPES = (torch.float32, torch.bfloat16)
SIZES = {
    "one": [(1,)],
    "few": [(3,), (0,), (16,), (5, 7), (33,)],
    "odd and even": [(1000,), (4097,), (2, 3, 5), (128, 65), (0, 4), (1024,), (1023,)],
    "across blocks": [(70_001,), (1,), (140_000,)],
    "many": [(3 + i % 100,) for i in range(250)],  # more than PyTorch takes in two launches
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LONG = 70_000  # elements of some blocks
if INTERPRETED:  # which takes milliseconds a block, of 4096 elements
    SIZES["across blocks"] = [(5001,), (1,), (10_000,)]
    LONG = 9000


def places(*on_cpu):
    """Parameters of tests: each backend here, with a device; ``on_cpu`` without an interpreter."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    found = [(name, cpu) for name in (("triton",) if INTERPRETED else on_cpu)]
    if torch.cuda.is_available():
        found += [(name, gpu) for name in ("torch", "triton", "cuda")]
    return [
        pytest.param(
            name,
            device,
            id=f"{name} on {device.type}",
            marks=pytest.mark.skipif(ops.lacking(name) is not None, reason=str(ops.lacking(name))),
        )
        for name, device in found
    ]


def numbers(shape, dtype, device, seed, offset=0):
    """Random numbers; ``offset`` elements into their storage, which spoils the alignment."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(math.prod(shape) + offset, generator=generator)
    return values.to(dtype).to(device)[offset:].view(shape)


def tensors(shapes, dtypes, device, seed, *, aligned=True):
    """One tensor a shape, dtypes in turn; every other one misaligned if asked for."""
    return [
        numbers(shape, dtypes[i % len(dtypes)], device, 100 * seed + i, 0 if aligned else i % 2)
        for i, shape in enumerate(shapes)
    ]


def scalars(count, low, high):
    return [low + (high - low) * (i + 1) / (count + 1) for i in range(count)]


IN_A_NORM = 1024  # terms of each of the sums whose sum is a norm


def assert_close(actual, expected, terms=4, arithmetic=torch.float32):
    """Each element within the roundings of sums, relative to the larger of the value and one.

    A narrow result is rounded once more, to the nearest: by half of the spacing of its dtype.
    """
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    expected = expected.double().cpu()
    error = (actual.double().cpu() - expected).abs() / expected.abs().clamp_min(1.0)
    if actual.dtype != torch.float32:
        error = (error - torch.finfo(actual.dtype).eps / 2).clamp_min(0.0)
    assert_within(error.max(), Rounding(arithmetic, terms=terms))


def assert_elements(actual, expected):
    """Elements within the roundings of a sum, relative to the largest, and of their own dtype."""
    if not actual.numel():
        return
    actual, narrow = actual.double().cpu(), actual.dtype
    error = (actual - expected).abs()
    if narrow not in (torch.float32, torch.float64):
        # Rounding to nearest, between normal numbers and below them.
        limits = torch.finfo(narrow)
        error = error - (expected.abs() * limits.eps).clamp_min(limits.tiny * limits.eps) / 2
    largest = expected.abs().max()
    assert_within(
        error.max() / largest if largest else error.max(), Rounding(torch.float32, terms=4)
    )


@contextlib.contextmanager
def backend(name):
    with ops.use_backend(name):
        yield


def wide(lists):
    return [t.double().cpu() for t in lists]


# ---------------------------------------------------------------- momentum and norms


def check_norms(name, device, shapes, dtypes, *, aligned=True):
    X = tensors(shapes, dtypes, device, 1, aligned=aligned)
    expected = torch.stack([x.norm() for x in wide(X)])
    with backend(name):
        actual = ops.norms(X)
    assert actual.dtype == torch.float32 and actual.device.type == device.type
    assert_close(actual, expected, terms=IN_A_NORM)


def check_momentum(name, device, shapes, M_dtypes, G_dtypes, *, aligned=True):
    """The norms, which read only, and the sums that are written afterwards."""
    M = tensors(shapes, M_dtypes, device, 1, aligned=aligned)
    G = tensors(shapes, G_dtypes, device, 2, aligned=aligned)
    mu = scalars(len(M), 0.5, 1.0)
    sums = [decay * m + g for decay, m, g in zip(mu, wide(M), wide(G), strict=True)]
    held = [s.to(m.dtype).double() for s, m in zip(sums, M, strict=True)]
    expected = torch.stack([s.norm() for s in held])
    untouched = [m.clone() for m in M]
    gradients = [g.clone() for g in G]
    with backend(name):
        read = ops.momentum_norms(M, G, mu)
        assert all(torch.equal(m, u) for m, u in zip(M, untouched, strict=True))
        ops.accumulate_(M, G, mu, moves=None)
    for norm, e, m in zip(read, expected, M, strict=True):
        # What is between two narrow numbers may be rounded to either.
        narrow = m.dtype != torch.float32
        assert_close(norm, e, terms=1 if narrow else IN_A_NORM, arithmetic=m.dtype)
    for m, s in zip(M, sums, strict=True):
        assert_close(m, s)
    assert all(torch.equal(g, before) for g, before in zip(G, gradients, strict=True))


def check_called_off(name, device):
    """A flag on the device calls writes off, whatever the gradients are, or changes nothing."""
    shapes, dtypes = [(40, 24), (LONG // 14, 7), (1, 1)], [torch.float32, torch.bfloat16]
    X, G, M = (tensors(shapes, dtypes, device, seed) for seed in (1, 2, 3))
    P = [torch.ones(m, 4, device=device) for m, _ in shapes]
    Q = [torch.ones(n, 4, device=device) for _, n in shapes]
    ones = [1.0] * len(X)
    bad = [torch.full_like(g, math.nan) for g in G]
    with backend(name):
        for flag, gradients, factors in ((False, bad, [p * math.nan for p in P]), (True, G, P)):
            for operation in (
                lambda X, M, moves, G=gradients: ops.accumulate_(M, G, ones, moves=moves),
                lambda X, M, moves, G=gradients: ops.local_step_(
                    X, G, ones, ones, M, ones, moves=moves
                ),
                lambda X, M, moves, P=factors: ops.low_rank_update_(
                    X, P, Q, ones, ones, M, Q, ones, moves=moves
                ),
            ):
                found, wanted = ([[t.clone() for t in list_] for list_ in (X, M)] for _ in range(2))
                if flag:
                    operation(*wanted, None)
                operation(*found, torch.tensor(flag, device=device))
                for now, then in zip(chain(*found), chain(*wanted), strict=True):
                    assert torch.equal(now, then)


def check_non_finite(name, device):
    """A norm is the flag of its own tensor, and of no other."""
    for bad in (math.nan, math.inf, -math.inf):
        M = tensors([(LONG,), (40,), (5000,)], [torch.float32], device, 1)
        G = tensors([(LONG,), (40,), (5000,)], [torch.bfloat16], device, 2)
        G[0][LONG - 1] = bad
        M[2][17] = bad
        with backend(name):
            finite = torch.isfinite(ops.momentum_norms(M, G, [1.0] * 3))
            assert finite.tolist() == [False, True, False]
            assert torch.isfinite(ops.norms(G)).tolist() == [False, True, True]


def check_any_scale(name, device):
    """Norms whose squares float32 does not hold."""
    for exponent in (-36, -30, -22, -10, 15, 25, 35):
        scale = 10.0**exponent
        M = [(numbers((n,), torch.float32, device, n) * scale) for n in (3, 1000, LONG)]
        M = [torch.cat([m, torch.zeros(600, device=device)]) for m in M]
        zeros = [torch.zeros_like(m) for m in M]
        expected = torch.stack([m.norm() for m in wide(M)])
        rounding = Rounding(torch.float32, terms=IN_A_NORM)
        with backend(name):
            assert_within(relative(ops.norms(M), expected), rounding)
            read = ops.momentum_norms(M, zeros, [1.0] * 3)
            assert_within(relative(read, expected), rounding)
            ops.accumulate_(M, zeros, [1.0] * 3, moves=None)
            assert_within(relative(ops.norms(M), expected), rounding)


def relative(actual, expected):
    """The largest error of an element, relative to it; zeros must be zeros."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert actual.shape == expected.shape
    error = (actual - expected).abs()
    error = torch.where(error == 0, 0.0, error / expected.abs())
    return error.max().item() if error.numel() else 0.0


def check_strides(name, device):
    """Transposed parameters, gradients of other strides, expanded gradients, slices."""
    M = [numbers((30, 20), torch.float32, device, 1).t(), numbers((6, 8), torch.float32, device, 2)]
    G = [numbers((20, 30), torch.float32, device, 3), torch.ones(1, 1, device=device).expand(6, 8)]
    sums = [m + g for m, g in zip(wide(M), wide(G), strict=True)]
    with backend(name):
        norms = ops.momentum_norms(M, G, [1.0, 1.0])
        ops.accumulate_(M, G, [1.0, 1.0], moves=None)
        sliced = ops.norms([numbers((6, 8), torch.float32, device, 4)[:, ::2]])
    assert_close(norms, torch.stack([s.norm() for s in sums]), terms=IN_A_NORM)
    for m, s in zip(M, sums, strict=True):
        assert_close(m, s)
    expected = numbers((6, 8), torch.float64, torch.device("cpu"), 4).float()[:, ::2].norm()
    assert_close(sliced, expected.double().reshape(1), terms=IN_A_NORM)


# ---------------------------------------------------------------- local step


def check_local_step(name, device, shapes, X_dtypes, G_dtypes, M_dtypes, *, aligned=True):
    X = tensors(shapes, X_dtypes, device, 1, aligned=aligned)
    G = tensors(shapes, G_dtypes, device, 2, aligned=aligned)
    M = tensors(shapes, M_dtypes, device, 3, aligned=aligned) if M_dtypes else []
    step, decay = scalars(len(X), 0.01, 0.3), scalars(len(X), 0.9, 1.0)
    mu = scalars(len(M), 0.5, 1.0)
    stepped = [b * x - e * g for b, x, e, g in zip(decay, wide(X), step, wide(G), strict=True)]
    sums = [d * m + g for d, m, g in zip(mu, wide(M), wide(G), strict=False)]
    with backend(name):
        ops.local_step_(X, G, step, decay, M, mu, moves=None)
    for x, s in zip(X, stepped, strict=True):
        assert_close(x, s)
    for m, s in zip(M, sums, strict=True):
        assert_close(m, s)


# ---------------------------------------------------------------- stochastic rounding


def noise(offsets, seed):
    """The 16 random bits of each place, uint32: a hash."""

    def mixed(x):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    with np.errstate(over="ignore"):
        return mixed(mixed(offsets.astype(np.uint32)) ^ np.uint32(seed)) & np.uint32(0xFFFF)


def rounded_stochastically(values, offsets, seed):
    """float32 -> the bits of bfloat16, from the definition: add noise below the kept bits."""
    with np.errstate(over="ignore"):
        sums = values.view(np.uint32) + noise(offsets, seed)
    return (sums >> np.uint32(16)).astype(np.uint16)


OTHERS = (torch.float32, torch.float16)  # which are not rounded stochastically


def bits_of(tensor):
    return tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def check_stochastic_local_step(name, device):
    """X <- G exactly, then rounded: the bits follow from seed and place alone.

    Weights of other dtypes are rounded to nearest.
    """
    shapes = [(1,), (5000,), (LONG + 1,)]
    seeds = [0, 12345, 2**32 - 1]
    for dtype in (torch.float32, torch.float16):
        G = tensors(shapes, [dtype], device, 1, aligned=False)
        X = [torch.ones_like(g, dtype=torch.bfloat16) for g in G]
        others = [torch.ones_like(g, dtype=other) for g in G for other in OTHERS]
        twice = [[t for t in list_ for _ in OTHERS] for list_ in (G, seeds)]
        ones = [-1.0] * len(others)
        with backend(name):
            ops.local_step_(X, G, ones[:3], [0.0] * 3, seeds=seeds, moves=None)
            ops.local_step_(others, twice[0], ones, [0.0] * len(ones), seeds=twice[1], moves=None)
        for x, g, seed in zip(X, G, seeds, strict=True):
            values = g.float().cpu().numpy()
            assert (bits_of(x) == rounded_stochastically(values, np.arange(g.numel()), seed)).all()
        for x, g in zip(others, twice[0], strict=True):
            assert torch.equal(x, g.to(x.dtype))


def check_float16(name, device):
    """Every float16 is read exactly, and what lies between two of them rounds to the nearest."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = np.sort(every[np.isfinite(every)]).astype(np.float32)
    halves = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(halves, np.float32(way)) for way in (-np.inf, np.inf)]
    beyond = np.float32([65519.996, 65520, 1e9, np.inf, np.nan, 2**-25, 1e-30])
    wanted = np.concatenate([halves, *beside, beyond, -beyond])
    with np.errstate(over="ignore"):
        rounded = wanted.astype(np.float16)
    G = [torch.from_numpy(each).to(device) for each in (every, wanted)]
    X = [torch.ones_like(g, dtype=d) for g, d in zip(G, OTHERS, strict=True)]
    with backend(name), np.errstate(over="ignore", invalid="ignore"):  # the interpreter's
        ops.local_step_(X, G, [-1.0] * 2, [0.0] * 2, moves=None)
    for x, expected in zip(X, (every.astype(np.float32), rounded), strict=True):
        assert np.array_equal(x.cpu().numpy(), expected, equal_nan=True)


# ---------------------------------------------------------------- columns


def columns_problem(shape, device, scale=1.0, seed=1):
    """R, and lengths up to which its columns are to become zero."""
    R = numbers(shape, torch.float32, device, seed)
    if shape[-1] > 1 and R.numel():
        R[..., 0] *= 1e-4
        R[..., 1] *= 1e-2
    floor = torch.full((shape[0], shape[-1]), 1e-3 * shape[1] ** 0.5 * scale, dtype=torch.float64)
    return R * scale, floor.to(device)


def normalized(R, sums, floor):
    lengths = sums.sqrt()
    return R * torch.where(lengths > floor, 1 / lengths, 0.0).unsqueeze(-2)


def check_columns(name, device, shape, scale=1.0):
    R, floor = columns_problem(shape, device, scale)
    sums = R.double().cpu().square().sum(dim=-2)
    others = sums * 2  # what another rank's rows add
    with backend(name):
        found = ops.column_sum_of_squares(R)
        Q = ops.column_normalize(R, found, floor)
        Q_split = ops.column_normalize(R, others.to(device), floor)
    assert found.dtype == torch.float64
    lengths = torch.where(sums == 0, 1.0, sums)
    rounding = Rounding(torch.float64, terms=max(shape[-2], 1))
    tolerance.assert_close(found.cpu() / lengths, sums / lengths, rounding, elementwise=True)
    [R] = wide([R])
    whole, split = normalized(R, sums, floor.cpu()), normalized(R, others, floor.cpu())
    assert_close(Q, whole)
    assert_close(Q_split, split)
    if shape[-1] > 1 and R.numel():
        assert not whole[..., 0].any() and whole[..., 1].any()


# ---------------------------------------------------------------- low-rank update


def check_low_rank_update(
    name,
    device,
    shapes,
    X_dtypes,
    M_dtypes,
    *,
    aligned=True,
    with_momentum=True,
    arithmetic=torch.float32,
):
    """shapes: (m, n, r) each; a negative r means that X and M are given as transposed views."""
    sizes = [(n, m) if r < 0 else (m, n) for m, n, r in shapes]
    X = tensors(sizes, X_dtypes, device, 1, aligned=aligned)
    M = tensors(sizes, M_dtypes, device, 2, aligned=aligned) if with_momentum else []
    flip = [r < 0 for *_, r in shapes]
    X = [x.mT if f else x for x, f in zip(X, flip, strict=True)]
    M = [m.mT if f else m for m, f in zip(M, flip, strict=False)]
    P = tensors([(m, abs(r)) for m, _, r in shapes], [torch.float32], device, 3)
    Q = tensors([(n, abs(r)) for _, n, r in shapes], [torch.float32], device, 4)
    R = tensors([(n, abs(r)) for _, n, r in shapes], [torch.float32], device, 5)
    # Rows of length one, so that products are of size one and errors are comparable.
    P, Q, R = ([t / max(t.shape[1], 1) ** 0.5 for t in list_] for list_ in (P, Q, R))
    step, decay = scalars(len(X), 0.1, 0.5), scalars(len(X), 0.9, 1.0)
    feedback = scalars(len(M), 0.02, 0.3)
    stepped = [
        b * x - e * p @ q.mT
        for b, x, e, p, q in zip(decay, wide(X), step, wide(P), wide(Q), strict=True)
    ]
    fed = [
        m - c * p @ r.mT for m, c, p, r in zip(wide(M), feedback, wide(P), wide(R), strict=False)
    ]
    with backend(name):
        ops.low_rank_update_(X, P, Q, step, decay, M, R, feedback, moves=None)
    for x, s, (*_, r) in zip(X, stepped, shapes, strict=True):
        assert_close(x, s, max(abs(r), 4), arithmetic)
    for m, s, (*_, r) in zip(M, fed, shapes, strict=False):
        assert_close(m, s, max(abs(r), 4), arithmetic)


def check_stochastic_low_rank_update(name, device):
    """X <- P Q^T of rank one, exact in float32, rounded by seed and place in memory."""
    m, n = 45, 70
    p = torch.arange(1, m + 1, dtype=torch.float32, device=device).view(m, 1)
    q = torch.arange(1, n + 1, dtype=torch.float32, device=device).view(n, 1) / 64
    X = torch.zeros(m, n, dtype=torch.bfloat16, device=device)
    Y = torch.zeros(n, m, dtype=torch.bfloat16, device=device)
    with backend(name):
        ops.low_rank_update_(
            [X, Y.mT], [p, p], [q, q], [-1.0, -1.0], [1.0, 1.0], seeds=[7, 2**31 + 5], moves=None
        )
    product = (p @ q.mT).cpu().numpy()
    row_major = np.arange(m * n).reshape(m, n)
    assert (bits_of(X) == rounded_stochastically(product, row_major, 7)).all()
    other = np.ascontiguousarray(product.T)
    expected = rounded_stochastically(other, np.arange(m * n).reshape(n, m), 2**31 + 5)
    assert (bits_of(Y) == expected).all()


# ---------------------------------------------------------------- symmetric products

# How the factors of B^T B and the result lie in memory.
LAYOUTS = ("rows", "columns", "gaps", "copies")


def symmetric_problem(k, n, m, dtype, device, layout):
    """A = B^T, B, a place for A B, and A B in float64; numbers of it are of size one."""
    shape = (k, n, m) if layout == "columns" else (k, m, n)
    B = numbers(shape, torch.float32, device, 1).div(max(m, 1) ** 0.5).to(dtype)
    out = torch.full((k, n, n), math.nan, dtype=dtype, device=device)
    if layout == "columns":
        B, out = B.mT, out.mT
    elif layout == "gaps":
        wide = B.new_zeros(k, m, 2 * n)
        wide[..., ::2] = B
        B, out = wide[..., ::2], out.new_full((k, n + 3, n + 5), math.nan)[:, 3:, 1 : n + 1]
    A = B.mT.contiguous() if layout == "copies" else B.mT
    return A, B, out, B.mT.double().cpu() @ B.double().cpu()


@contextlib.contextmanager
def whatever_it_gains(name):
    """The Triton kernel takes small matrices too, and leaves none to plain PyTorch."""
    if name != "triton":
        yield
        return
    kernels = importlib.import_module("curvadion_kernels.symmetric")
    left = mock.Mock(side_effect=AssertionError("left to plain PyTorch"))
    with (
        mock.patch.object(kernels, "gains", lambda *_: True),
        mock.patch.object(torch, "bmm", left),
    ):
        yield


def check_symmetric_product(name, device, k, n, dtype, layout, *, m=None, arithmetic=torch.float32):
    m = n + 3 if m is None else m
    A, B, out, expected = symmetric_problem(k, n, m, dtype, device, layout)
    before = B.clone()
    with backend(name), whatever_it_gains(name):
        assert ops.symmetric_product(A, B, out) is out
    assert_close(out, expected, terms=max(m, 4), arithmetic=arithmetic)
    assert torch.equal(B, before)
    if name == "triton":
        assert torch.equal(out, out.mT)


def check_symmetric_product_leaves(name, device):
    """Plain PyTorch takes what a backend does not."""
    for n, dtype in ((40, torch.float64), (40, torch.float32), (600, torch.float64)):
        A, B, out, expected = symmetric_problem(2, n, 9, dtype, device, "rows")
        with backend(name):
            ops.symmetric_product(A, B, out)
        tolerance.assert_close(out, expected, Rounding(dtype, terms=9), elementwise=True)


# Checks that take a backend and a device alone.
SPECIAL_CASES = (
    check_called_off,
    check_non_finite,
    check_any_scale,
    check_strides,
    check_stochastic_local_step,
    check_float16,
    check_stochastic_low_rank_update,
    check_symmetric_product_leaves,
)
