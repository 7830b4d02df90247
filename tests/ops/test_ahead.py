"""Every backend of curvadion.ops.ahead that runs in this process, against float64 and integers.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import importlib
import math
import struct
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from curvadion import ops
from support.references import operations, tolerance
from support.references.operations import (
    INTERPRETED,
    assert_elements,
    numbers,
    relative,
    scalars,
    tensors,
    wide,
)
from support.references.tolerance import Rounding, assert_within
from support.runs.pairwise import all_pairs

F32, BF16 = operations.DTYPES
F16, F64 = torch.float16, torch.float64
SIZES = operations.SIZES
if INTERPRETED:  # which takes milliseconds a program: it sees short lists only
    SIZES = {name: SIZES[name] for name in ("one", "few", "odd and even")}
LARGEST = 2.0**50
NAN_BITS = 0x7FC00000

pytestmark = [
    pytest.mark.numeric,
    # C++ on the CPU has codes alone.
    pytest.mark.parametrize(("backend", "device"), operations.places("torch")),
]


# ---------------------------------------------------------------- references


def norm_of(m, g, mu, share, dtype=F64):
    """|m + (share - 1) g| with m <- mu m + g as dtype holds it, in float64; or |share g|."""
    if m is None:
        return (share * g).norm()
    return ((mu * m + g).to(dtype).double() + (share - 1) * g).norm()


def exponent_of(length):
    """The e with 2^-e length in [64, 128), cut off at 126."""
    if not length > 0:
        return -126
    e = math.floor(math.log2(length)) - 6
    # The logarithm is rounded.
    e += (math.ldexp(length, -e) >= 128) - (math.ldexp(length, -e) < 64)
    return min(max(e, -126), 126)


def lengths_of(M, G, mu, share, device, dtype=F32):
    """|mu M + (1 + share) G|, as an operation before this one has found it."""
    each = zip(wide(M), wide(G), mu, share, strict=True)
    found = [norm_of(m, g, decay, 1 + factor) for m, g, decay, factor in each]
    # As a part of those of all matrices, which begins at any alignment.
    return torch.stack([torch.zeros((), dtype=F64), *found]).to(dtype).to(device)[1:]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@contextmanager
def never_plain(name):
    """A backend that leaves nothing to plain PyTorch; how many launches it made."""
    if name != "triton":
        with operations.backend(name):
            yield None
        return
    kernels = importlib.import_module("curvadion_kernels.ahead")
    plain = importlib.import_module("curvadion.ops.ahead")
    left = mock.Mock(side_effect=AssertionError("left to plain PyTorch"))
    with (
        operations.backend(name),
        mock.patch.object(plain, "norms", left),
        mock.patch.object(plain, "accumulate_", left),
        mock.patch.object(kernels, "run", wraps=kernels.run) as run,
    ):
        yield run


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("M_dtypes", "G_dtypes", "sizes", "aligned", "without"),
    all_pairs(
        [[F32], [BF16], [F32, BF16]],
        [[F32], [BF16], [F16], [BF16, F32]],
        list(SIZES),
        [True, False],
        ["none", "some", "all"],
    ),
)
def test_lengths(backend, device, M_dtypes, G_dtypes, sizes, aligned, without):
    shapes = SIZES[sizes]
    held = tensors(shapes, M_dtypes, device, 1, aligned=aligned)
    G = tensors(shapes, G_dtypes, device, 2, aligned=aligned)
    lacking = {"none": lambda i: False, "some": lambda i: i % 3 == 0, "all": lambda i: True}
    M = [None if lacking[without](i) else m for i, m in enumerate(held)]
    mu, share = scalars(len(M), 0.5, 1.0), scalars(len(M), -1.0, 4.0)
    share[-1] = 1.0
    before = [t.clone() for t in (*held, *G)]
    each = zip(M, wide(held), wide(G), mu, share, strict=True)
    expected = torch.stack(
        [
            norm_of(None if given is None else m, *terms, F64 if given is None else given.dtype)
            for given, m, *terms in each
        ]
    )
    with never_plain(backend):
        actual, alone = ops.lengths(M, G, mu, share)
    assert actual.dtype == alone.dtype == F32
    assert actual.device.type == alone.device.type == device.type
    of_gradients = torch.stack([g.norm() for g in wide(G)])
    operations.assert_close(alone, of_gradients, terms=operations.IN_A_NORM)
    # Opposite summands cancel: errors are relative to them, not to their sum.
    operations.assert_close(actual, expected, terms=operations.IN_A_NORM)
    assert all(map(torch.equal, (*held, *G), before))


def test_one_launch_for_lists_with_and_without_momenta(backend, device):
    M = tensors([(40, 24), (7,), (0, 4)], [F32], device, 1)
    G = tensors([(40, 24), (7,), (0, 4)], [F32], device, 2)
    out = [torch.empty_like(m, dtype=F16) for m in M]
    ones = [1.0] * 3
    with never_plain(backend) as run:
        lengths, _ = ops.lengths([M[0], None, M[2]], G, ones, ones)
        ops.ahead_(M, G, ones, ones, out, lengths)
        ops.heeded(torch.zeros(3, dtype=torch.int64, device=device))
        ops.verdict(lengths, lengths[0], None, LARGEST, first=True)
    assert run is None or run.call_count == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_length_is_finite_if_all_elements_are(backend, device, bad):
    shapes = [(20_000,), (40,), (5000,), (33,)]
    M, G = tensors(shapes, [F32], device, 1), tensors(shapes, [BF16], device, 2)
    G[0][19_999] = bad
    M[2][17] = bad
    G[3][32] = bad
    held = [M[0], M[1], M[2], None]
    with never_plain(backend):
        found, alone = ops.lengths(held, G, [0.5] * 4, [2.0] * 4)
        # Even where the factor of what is not finite is zero.
        multiplied, _ = ops.lengths(held, G, [0.0] * 4, [0.0, 0.0, 0.0, 1.0])
    assert torch.isfinite(found).tolist() == [False, True, False, False]
    assert torch.isfinite(multiplied).tolist() == [False, True, False, False]
    assert torch.isfinite(alone).tolist() == [False, True, True, False]


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e15, 1e30])
def test_lengths_of_any_scale(backend, device, scale):
    """Whose squares float32 does not hold."""
    M = [numbers((n,), F32, device, n) * scale for n in (3, 1000, 4000)]
    G = [numbers((n,), F32, device, n + 1) * scale for n in (3, 1000, 4000)]
    mu, share = [0.9, 0.8, 0.7], [0.1, 0.2, 0.3]
    held = [M[0], None, M[2]]
    terms = zip([True, False, True], wide(M), wide(G), mu, share, strict=True)
    expected = torch.stack([norm_of(m if given else None, *rest) for given, m, *rest in terms])
    with never_plain(backend):
        found, _ = ops.lengths(held, G, mu, share)
    assert_within(relative(found, expected), Rounding(F32, terms=operations.IN_A_NORM))


def test_lengths_of_other_strides_and_of_float64(backend, device):
    M = [numbers((30, 20), F32, device, 1).t(), numbers((6, 8), F32, device, 2)[:, ::2]]
    G = [numbers((20, 30), F32, device, 3), torch.ones(1, 1, device=device).expand(6, 4)]
    for m, g in zip(M, G, strict=True):
        expected = norm_of(*wide([m, g]), 0.9, 1.5).view(1)
        with operations.backend(backend):
            found, _ = ops.lengths([m], [g], [0.9], [1.5])
            double, _ = ops.lengths([m.double()], [g], [0.9], [1.5])
            without, _ = ops.lengths([None], [g.double()], [0.9], [1.5])
        assert found.dtype == F32 and double.dtype == F64 and without.dtype == F64
        assert_within(relative(found, expected), Rounding(F32, terms=operations.IN_A_NORM))
        rounding = Rounding(F64, terms=operations.IN_A_NORM)
        assert_within(relative(double, expected), rounding)
        alone = norm_of(None, *wide([g]), 0.9, 1.5).view(1)
        assert_within(relative(without, alone), rounding)


# ---------------------------------------------------------------- momentum and look-ahead


@pytest.mark.parametrize(
    ("M_dtypes", "G_dtypes", "out_dtypes", "sizes", "aligned", "scaled"),
    all_pairs(
        [[F32], [BF16], [F32, BF16]],
        [[F32], [BF16], [F16], [BF16, F32]],
        [[F32], [F16], [BF16], [F64], [F16, F32]],
        list(SIZES),
        [True, False],
        [None, F32, F64],
    ),
)
def test_ahead(backend, device, M_dtypes, G_dtypes, out_dtypes, sizes, aligned, scaled):
    shapes = SIZES[sizes]
    M = tensors(shapes, M_dtypes, device, 1, aligned=aligned)
    G = tensors(shapes, G_dtypes, device, 2, aligned=aligned)
    out = tensors(shapes, out_dtypes, device, 3, aligned=aligned)
    mu, share = scalars(len(M), 0.5, 1.0), scalars(len(M), 0.0, 4.0)
    check_ahead(backend, M, G, mu, share, out, scaled, fused=F64 not in out_dtypes)


def check_ahead(name, M, G, mu, share, out, scaled, *, fused=True):
    device = M[0].device
    # M <- mu M + G
    sums = [decay * m + g for decay, m, g in zip(mu, wide(M), wide(G), strict=True)]
    lengths = None if scaled is None else lengths_of(M, G, mu, share, device, scaled)
    gradients = [g.clone() for g in G]
    with never_plain(name) if fused else operations.backend(name):
        e, trace = ops.ahead_(M, G, mu, share, out, lengths)
    assert all(torch.equal(g, before) for g, before in zip(G, gradients, strict=True))
    for m, s in zip(M, sums, strict=True):
        assert_elements(m, s)
    powers = [0] * len(M)
    if lengths is None:
        assert e.shape == trace.shape == (0,)
    else:
        powers = [exponent_of(length) for length in lengths.tolist()]
        assert e.tolist() == powers and e.dtype == trace.dtype == scaled
        inside = [math.ldexp(n, -p) for n, p in zip(lengths.tolist(), powers, strict=True)]
        assert all(64 <= n < 128 or p == -126 for n, p in zip(inside, powers, strict=True))
        squares = torch.tensor(inside, dtype=F64).square()
        assert_within(relative(trace, squares), Rounding(scaled))
    # out <- 2^-e (M + share G), with M as it has been rounded
    for o, m, g, factor, power in zip(out, wide(M), wide(G), share, powers, strict=True):
        assert_elements(o, (m + factor * g) * 2.0**-power)
    if lengths is not None:
        # M is rounded before out is computed, and out afterwards.
        coarsest = min((t.dtype for t in (*M, *out)), key=lambda dtype: -torch.finfo(dtype).eps)
        found = torch.stack([o.square().sum() for o in wide(out)])
        assert_within(relative(trace, found), Rounding(coarsest))


@pytest.mark.parametrize("out_dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e15, 1e30])
def test_ahead_of_any_scale(backend, device, out_dtype, scale):
    shapes = [(3,), (129, 7), (1000,)]
    M = [t * scale for t in tensors(shapes, [F32], device, 1)]
    # The interpreter reads other numbers than bfloat16's subnormal ones.
    G_dtype = F32 if INTERPRETED else BF16
    G = [t * scale for t in tensors(shapes, [G_dtype], device, 2)]
    out = tensors(shapes, [out_dtype], device, 3)
    check_ahead(backend, M, G, [0.9] * 3, [0.5] * 3, out, F32, fused=out_dtype != F64)


@pytest.mark.parametrize("M_dtype", [F32, BF16])
@pytest.mark.parametrize("out_dtype", [F32, F16, BF16])
def test_ahead_of_zeros(backend, device, M_dtype, out_dtype):
    """A matrix of zeros stays one, beside others."""
    shapes = [(40, 24), (5, 7)]
    M, G = tensors(shapes, [M_dtype], device, 1), tensors(shapes, [F32], device, 2)
    out = tensors(shapes, [out_dtype], device, 3)
    M[0].zero_()
    G[0].zero_()
    lengths = lengths_of(M, G, [1.0] * 2, [1.0] * 2, device)
    with never_plain(backend):
        e, trace = ops.ahead_(M, G, [1.0] * 2, [1.0] * 2, out, lengths)
    assert e[0] == -126 and e[1] > -126 and trace[0] == 0 and trace[1] > 0
    assert not M[0].any() and not out[0].any() and out[1].any()


def test_exponents_are_cut_off(backend, device):
    """At powers of two, where no more than a bit is missing, and at both ends."""
    powers = [-149, -130, -126, -120, -119, -118, -1, 0, 6, 7, 8, 50, 126, 127]
    values = [2.0**p for p in powers] + [2.0**p * 1.75 for p in powers[2:]]
    values += [2.0**p * (1 - 2.0**-24) for p in powers[2:]]
    values += [0.0, math.nan]
    for dtype, more in ((F32, []), (F64, [2.0**-1000, 2.0**132, 2.0**133, 2.0**500])):
        lengths = torch.tensor(values + more, dtype=dtype, device=device)
        ones = [torch.ones(2, device=device) for _ in range(len(lengths))]
        zeros = [torch.zeros_like(x) for x in ones]
        with never_plain(backend):
            e, trace = ops.ahead_(
                ones, zeros, [1.0] * len(ones), [0.0] * len(ones), zeros_like(ones), lengths
            )
        expected = [exponent_of(length) for length in lengths.tolist()]
        assert e.tolist() == expected and ops.exponents(lengths)[0].tolist() == expected
        assert torch.equal(trace.isnan(), lengths.isnan())
        assert bits(trace) == bits(ops.exponents(lengths)[1])


def zeros_like(tensors):
    return [torch.zeros_like(t) for t in tensors]


@pytest.mark.parametrize(
    ("M_dtype", "G_dtype", "out_dtype"),
    all_pairs([F32, BF16], [F32, BF16, F16], [F32, F64, F16, BF16]),
)
def test_ahead_gives_the_bits_of_momenta_and_of_products_with_powers_of_two(
    backend, device, M_dtype, G_dtype, out_dtype
):
    """So each element of the result is rounded to its dtype once."""
    shapes = [(40, 24), (1000,), (3,)]
    M, G = tensors(shapes, [M_dtype], device, 1), tensors(shapes, [G_dtype], device, 2)
    mu, share = [0.9, 0.95, 1.0], [0.0, 0.95, 0.1]
    sums = [m.clone() for m in M]
    wider = F64 if out_dtype == F64 else F32
    steps = [torch.empty_like(m, dtype=wider) for m in M]
    lengths = lengths_of(M, G, mu, share, device)
    with operations.backend(backend):
        ops.accumulate_(sums, G, mu, moves=None)
        ops.ahead_([m.clone() for m in M], G, mu, share, steps, None)
        # Without lengths, results of these dtypes would be compared with themselves.
        for given in (lengths,) if out_dtype in (F32, F64) else (None, lengths):
            momenta = [m.clone() for m in M]
            out = [torch.empty_like(m, dtype=out_dtype) for m in M]
            e, _ = ops.ahead_(momenta, G, mu, share, out, given)
            powers = [0] * len(M) if given is None else e.tolist()
            for m, s, o, a, power in zip(momenta, sums, out, steps, powers, strict=True):
                assert bits(m) == bits(s)
                assert bits(o) == bits((a * 2.0**-power).to(out_dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_flag_on_the_device_calls_ahead_off(backend, device, bad, aligned):
    """Whatever the gradients and their lengths are; and where it is true, changes nothing."""
    shapes = [(40, 24), (20_000,), (1, 1), (0,)]
    M = tensors(shapes, [F32, BF16], device, 1, aligned=aligned)
    G = tensors(shapes, [F32], device, 2, aligned=aligned)
    out = [torch.zeros_like(m, dtype=F16) for m in M]
    ones = [1.0] * len(M)
    lengths = torch.full((len(M),), bad, device=device)
    moves = torch.tensor(False, device=device)
    before = [m.clone() for m in M]
    with never_plain(backend):
        ops.ahead_(M, [torch.full_like(g, bad) for g in G], ones, ones, out, lengths, moves)
        assert all(map(torch.equal, M, before))
        moves.fill_(True)
        lengths = lengths_of(M, G, ones, ones, device)
        told = ops.ahead_(M, G, ones, ones, out, lengths, moves)
        others = [torch.zeros_like(o) for o in out]
        unasked = ops.ahead_(before, G, ones, ones, others, lengths)
    for found, wanted in zip((*M, *out, *told), (*before, *others, *unasked), strict=True):
        assert bits(found) == bits(wanted)


def test_ahead_of_other_strides(backend, device):
    """Transposed momenta, gradients of other strides, expanded ones, and slices."""
    M = [numbers((30, 20), F32, device, 1).t(), numbers((6, 8), BF16, device, 2)]
    G = [numbers((20, 30), F32, device, 3), torch.ones(1, 1, device=device).expand(6, 8)]
    out = [torch.empty_like(m, dtype=F16) for m in M]
    assert out[0].stride() == M[0].stride()
    check_ahead(backend, M, G, [0.9, 1.0], [0.5, 1.0], out, F32)
    memory = numbers((6, 8), F32, device, 4)
    held, rest = [memory[:, ::2]], memory[:, 1::2].clone()
    check_ahead(backend, held, [G[1][:, :4]], [0.9], [0.5], [held[0].half()], F32, fused=False)
    assert torch.equal(memory[:, 1::2], rest)
    # Each of another order of strides.
    out = [torch.empty(20, 30, dtype=F16, device=device)]
    check_ahead(backend, M[:1], G[:1], [0.9], [0.5], out, F32, fused=False)


def test_ahead_of_float64(backend, device):
    M, G = (tensors([(40, 24), (3,)], [F64], device, seed) for seed in (1, 2))
    out = [torch.empty_like(m) for m in M]
    lengths = lengths_of(M, G, [0.9] * 2, [0.5] * 2, device, F64)
    sums = [0.9 * m + g for m, g in zip(M, G, strict=True)]
    with operations.backend(backend):
        e, trace = ops.ahead_(M, G, [0.9] * 2, [0.5] * 2, out, lengths)
    assert e.dtype == trace.dtype == F64
    for m, s, o, g, power in zip(M, sums, out, G, e.tolist(), strict=True):
        tolerance.assert_close(m, s, Rounding(F64, terms=2), elementwise=True)
        expected = (s + 0.5 * g) * 2.0**-power
        tolerance.assert_close(o, expected, Rounding(F64, terms=3), elementwise=True)


def test_no_matrices(backend, device):
    with operations.backend(backend):
        e, trace = ops.ahead_([], [], [], [], [], torch.zeros(0, device=device))
        assert e.shape == trace.shape == (0,)
        e, trace = ops.ahead_([], [], [], [], [], None)
        assert e.shape == trace.shape == (0,)


# ---------------------------------------------------------------- the meeting's words


def word_of(norms, signal, owner, first):
    """A word in Python's integers."""
    finite = all(n < LARGEST for n in norms) and not math.isnan(signal)
    number = struct.unpack("<I", struct.pack("<f", signal))[0] if finite else NAN_BITS
    positive = first and any(n > 0 for n in norms)
    return (number << 32) + (positive << 31) + owner, finite


def test_verdict(backend, device):
    below = 2.0**50 - 2.0**26
    lists = [[0.0], [1.0], [0.0, below], [LARGEST, 1.0], [math.inf], [0.0, math.nan]]
    lists += [[1.0] * 4999 + [last] for last in (1.0, math.nan, math.inf)]
    lists += [[0.0] * 4999 + [last] for last in (0.0, 1e-40)]
    lists += [[start] + [0.0] * 4999 for start in (1.0, math.nan)]
    told = [(None, None), (0.0, 3), (0.25, None), (None, 7), (1e-42, 2**31 - 1)]
    told += [(math.inf, 0), (math.nan, 5), (-math.nan, 5)]
    for norms, (signal, owner), dtype, first in all_pairs(lists, told, [F32, F64], [True, False]):
        given = torch.tensor(norms, dtype=dtype, device=device)
        with never_plain(backend):
            word, moves = ops.verdict(
                given,
                None if signal is None else torch.tensor(signal, device=device),
                None if owner is None else torch.tensor(owner, device=device),
                LARGEST,
                first,
            )
        assert word.dtype == torch.int64 and moves.dtype == torch.bool
        assert word.shape == (1,) and moves.shape == ()
        expected = word_of(given.tolist(), signal or 0.0, owner or 0, first)
        assert (word.item(), moves.item()) == expected


def test_heeded(backend, device):
    signal = struct.unpack("<I", struct.pack("<f", 0.5))[0]
    infinite = struct.unpack("<I", struct.pack("<f", math.inf))[0]
    for number, finite in ((0, True), (signal, True), (infinite, True), (NAN_BITS, False)):
        for w, negated in ((7, -7), (0, 0), (-(2**62), 2**62), (7, -6), (2**62, 2**62)):
            for owner in (0, 2**32 - 1):
                words = torch.tensor([(number << 32) + owner, w, negated], device=device)
                with never_plain(backend):
                    heeded = ops.heeded(words)
                assert heeded.dtype == torch.bool and heeded.shape == ()
                assert heeded.item() == (finite and w == -negated)


# ---------------------------------------------------------------- scale


@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scale(backend, device, dtype, out_dtype):
    shapes = [(2, 40, 24), (1, 24, 8), (3, 5, 7)]
    stacks = [numbers(shape, dtype, device, i) for i, shape in enumerate(shapes)]
    stacks[1] = stacks[1].mT * 1e4
    stacks[2][1] = 0.0
    out = [torch.empty_like(stack, dtype=out_dtype) for stack in stacks]
    lengths = torch.stack([x.norm() for stack in wide(stacks) for x in stack]).to(F32).to(device)
    with never_plain(backend):
        e, trace = ops.scale(stacks, out, lengths)
    assert e.tolist() == [exponent_of(length) for length in lengths.tolist()]
    for stack, scaled, powers in zip(wide(stacks), out, e.split([2, 1, 3]), strict=True):
        expected = stack * torch.exp2(-powers.double().cpu())[:, None, None]
        assert torch.equal(scaled.cpu(), expected.to(out_dtype))
    squares = torch.stack([x.square().sum() for stack in wide(out) for x in stack])
    error = relative(trace, squares)
    assert_within(error, Rounding(out_dtype, terms=operations.IN_A_NORM))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_nearly_cancels_a_momentum_overflows_nothing(backend, device, dtype):
    """Lengths are those of the rounded momentum from which out is made."""
    M = [numbers((16, 16), dtype, device, 1)]
    G = [-0.475 * M[0].float()]
    out = [torch.empty(16, 16, dtype=F16, device=device)]
    with operations.backend(backend):
        lengths, _ = ops.lengths(M, G, [0.95], [2.0])
        _, trace = ops.ahead_(M, G, [0.95], [1.0], out, lengths)
    assert torch.isfinite(out[0]).all()
    if dtype == BF16:  # otherwise only rounding errors are left
        squares = out[0].double().square().sum().view(1)
        assert_within(relative(trace, squares), Rounding(F16, terms=16))
