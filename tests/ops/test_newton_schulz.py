"""The operations of Newton-Schulz iterations on every backend of this process, against float64.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from unittest import mock

import pytest
import torch

from curvadion import ops
from curvadion.ops import newton_schulz
from curvadion.ops.newton_schulz import Bound
from support.references import operations
from support.references.tolerance import Rounding, assert_close
from support.runs.pairwise import all_pairs

F32 = torch.float32
F16 = torch.float16
BF16 = torch.bfloat16

# a s + b s^3 + c s^5 with moderate coefficients, each far from the next ones, and Muon's.
COEFFICIENTS = ((3.2, -3.9, 1.6), (2.1, -1.9, 0.75), (1.2, -0.4, 0.1), (1.875, -1.25, 0.375))
MUON = ((3.4445, -4.7750, 2.0315),) * 3

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.parametrize(("backend", "device"), operations.places("torch")),
]


@contextlib.contextmanager
def whatever_it_gains(backend):
    """The Triton kernels take small matrices too, and leave none to plain PyTorch.

    Yields the launched kernels, by name; None for other backends.
    """
    if backend != "triton":
        with ops.use_backend(backend):
            yield None
        return
    kernels = importlib.import_module("curvadion_kernels.newton_schulz")
    launched = []

    def run(kernel, *arguments, **constants):
        launched.append(kernel)
        launch(kernel, *arguments, **constants)

    launch = kernels.run
    left = mock.Mock(side_effect=AssertionError("left to plain PyTorch"))
    with (
        ops.use_backend(backend),
        mock.patch.object(kernels, "gains", lambda *_: True),
        mock.patch.object(kernels, "grams_gain", lambda *_: True),
        mock.patch.object(kernels, "run", run),
        mock.patch.object(torch, "bmm", left),
    ):
        yield launched


# ---------------------------------------------------------------- Gram matrices


def stack(shape, dtype, device, seed, layout):
    """A stack (k, m, n) of random matrices whose Gram matrices have elements of size one."""
    k, m, n = shape
    values = operations.numbers((k, m, n), F32, device, seed).div(max(m, 1) ** 0.5).to(dtype)
    if layout == "columns":
        return values.mT.contiguous().mT
    if layout == "part":  # of longer rows, and of more of them
        wide = values.new_full((k, m + 3, n + 24), math.nan)
        wide[:, 3:, 16 : n + 16] = values
        return wide[:, 3:, 16 : n + 16]
    if layout == "gaps":
        wide = values.new_full((k, m, 2 * n), math.nan)
        wide[..., ::2] = values
        return wide[..., ::2]
    return values


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("n", [16, 128, 144])
def test_grams_of_several_stacks(backend, device, n, dtype):
    shapes = [(2, 70, n), (1, 8, n), (3, 136, n), (0, 5, n), (1, 200, n)]
    layouts = ["rows", "columns", "columns", "rows", "part"]
    B = [
        stack(shape, dtype, device, seed, layout)
        for seed, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
    ]
    before = [b.clone() for b in B]
    G = torch.full((7, n, n), math.nan, dtype=dtype, device=device)
    with whatever_it_gains(backend) as launched:
        ops.grams(B, G.split([2, 1, 3, 0, 1]))
    assert launched is None or len(launched) == 1
    expected = torch.cat([b.mT.double() @ b.double() for b in before])
    # Each element is rounded once, to the dtype, after a sum in float32.
    assert_close(G, expected, Rounding(dtype), elementwise=True)
    assert all(map(torch.equal, B, before))
    if backend == "triton":
        assert torch.equal(G, G.mT)


@pytest.mark.parametrize(
    ("n", "dtype", "layout"), [(40, F16, "rows"), (32, F16, "gaps"), (32, F32, "rows")]
)
def test_grams_that_kernels_leave(backend, device, n, dtype, layout):
    B = [stack((2, 20, n), dtype, device, 1, layout)]
    G = torch.empty(2, n, n, dtype=dtype, device=device)
    with operations.backend(backend):
        ops.grams(B, [G])
    assert_close(G, B[0].mT.double() @ B[0].double(), Rounding(dtype, terms=20))


# ---------------------------------------------------------------- roots


def gram_matrices(k, n, dtype, device, least=0.2):
    """G (k, n, n) with eigenvalues from least^2 to one, times the matrix's number."""
    generator = torch.Generator().manual_seed(n)
    V, _ = torch.linalg.qr(torch.randn(k, n, n, generator=generator, dtype=torch.float64))
    eigenvalues = torch.linspace(least, 1, n, dtype=torch.float64).square()
    sizes = torch.arange(1, k + 1, dtype=torch.float64)[:, None, None]
    G = ((V * eigenvalues) @ V.mT * sizes).to(dtype)
    return (G.tril() + G.tril(-1).mT).to(device)


def bounds(G, kind):
    """What G is divided by, (k,) float64, from its eigenvalues."""
    eigenvalues = torch.linalg.eigvalsh(G.double().cpu())
    if kind is Bound.TIGHT:
        # |G^2|^(1/2), with room for rounding errors
        room = 1 + 4 * torch.finfo(G.dtype).eps
        return eigenvalues.pow(4).sum(1).pow(0.25) * room
    return eigenvalues.sum(1) if kind is Bound.TRACE else torch.ones(len(G), dtype=torch.float64)


def roots(G, coefficients, bound):
    """The product of the W of all iterations, divided by sqrt(bound), in float64."""
    x, V = torch.linalg.eigh(G.double().cpu())
    x = x / bound[:, None]
    z = torch.ones_like(x)
    for a, b, c in coefficients:
        w = a + b * x + c * x.square()
        z *= w
        x *= w.square()
    return (V * (z / bound.sqrt()[:, None])[:, None, :]) @ V.mT


@pytest.mark.parametrize(
    ("n", "dtype", "kind", "iterations", "traced"),
    all_pairs([33, 128, 144], [F16, BF16], list(Bound), [2, 3, 4], [True, False]),
)
def test_inverse_root(backend, device, n, dtype, kind, iterations, traced):
    G = gram_matrices(2, n, dtype, device)
    if kind is Bound.ONE:
        G[1] /= 2
    bound = bounds(G, kind)
    coefficients = COEFFICIENTS[:iterations]
    expected = roots(G, coefficients, bound)
    trace = bounds(G, Bound.TRACE).float().to(device) if traced else None
    with whatever_it_gains(backend) as launched:
        root = ops.inverse_root(G, coefficients, kind, trace=trace)
    if launched is not None:
        products = 4 * iterations - 3
        assert len(launched) == products + (kind is Bound.TIGHT)
        assert torch.equal(root.Z, root.Z.mT)
    # The result of each iteration is rounded to the dtype.
    assert_close(root.Z, expected, Rounding(dtype, steps=iterations))
    assert root.check.reshape(2, -1).sum(1).isfinite().all()
    if kind is Bound.ONE:
        assert len(root.bound) == 0
    else:
        assert root.bound.dtype == F32
        assert_close(root.bound, bound, Rounding(dtype), elementwise=True)


def test_one_iteration(backend, device):
    """In the second of two passes, which divides by nothing."""
    G = gram_matrices(3, 40, F16, device)
    G /= 4
    expected = roots(G, COEFFICIENTS[:1], bounds(G, Bound.ONE))
    with whatever_it_gains(backend) as launched:
        root = ops.inverse_root(G, COEFFICIENTS[:1], Bound.ONE)
    assert launched is None or len(launched) == 1
    assert_close(root.Z, expected, Rounding(F16))
    assert root.check.reshape(3, -1).sum(1).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "wide", "iterations"), [(F32, F32, 3), (F16, F32, 3), (F16, F16, 1)]
)
def test_roots_that_kernels_leave(backend, device, dtype, wide, iterations):
    """Wide Gram matrices, whose roots may be narrow, and a single iteration with a bound."""
    G = gram_matrices(2, 33, wide, device)
    bound = bounds(G, Bound.TIGHT)
    bound *= (1 + 4 * torch.finfo(dtype).eps) / (1 + 4 * torch.finfo(wide).eps)
    expected = roots(G, COEFFICIENTS[:iterations], bound)
    with operations.backend(backend):
        root = ops.inverse_root(G, COEFFICIENTS[:iterations], dtype=dtype)
    assert root.Z.dtype == dtype
    assert_close(root.Z, expected, Rounding(dtype, steps=iterations))


@pytest.mark.parametrize("kind", [Bound.TIGHT, Bound.TRACE])
def test_polar_factors_of_matrices_that_lack_rank(backend, device, kind):
    """Muon's iterations bring nonzero singular values to [0.6, 1.3], and keep zeros zero."""
    n = 32
    B = stack((3, n + 8, n), F16, device, 1, "rows")
    columns = torch.arange(n, device=device)
    B[1] *= columns < 5
    B[2] *= columns == 3
    with whatever_it_gains(backend):
        G = torch.empty(3, n, n, dtype=F16, device=device)
        ops.grams([B], [G])
        root = ops.inverse_root(G, MUON * 2, kind)
        ops.drop_unusable_(root.Z, root.check)
    s = torch.linalg.svdvals(B.double().cpu() @ root.Z.double().cpu())
    largest = torch.linalg.svdvals(B.double().cpu())
    known = largest > 0.05 * largest[:, :1]
    assert known.sum(1).tolist()[1:] == [5, 1]
    assert s[known].min() > 0.6 and s[known].max() < 1.3
    assert s[1, 5:].max() < 0.1 and s[2, 1:].max() < 0.1


def test_bounds_are_just_above_the_largest_eigenvalue(backend, device):
    """Where all eigenvalues are equal or one is alone, which are the extreme cases."""
    n = 144
    G = torch.zeros(3, n, n, dtype=F16, device=device)
    G[0] = torch.eye(n)
    G[1, 5, 5] = 200.0
    G[2] = 3.0  # of rank one
    largest = torch.linalg.eigvalsh(G.double().cpu())[:, -1]
    with whatever_it_gains(backend):
        root = ops.inverse_root(G, COEFFICIENTS[:2])
    # |G^2|^(1/2) is the eigenvalue if it is alone; rounding must leave none above one.
    largest[0] *= n**0.25
    found = root.bound.double().cpu() / largest
    eps = torch.finfo(F16).eps
    assert found.min() > 1 + 2 * eps and found.max() < 1 + 6 * eps


def test_matrices_do_not_disturb_each_other(backend, device):
    """One that overflows, or is zero, and its neighbours."""
    n = 40
    G = gram_matrices(5, n, F16, device)
    G[1] *= 6e4
    G[3] = 0.0
    good = [0, 2, 4]
    expected = roots(G[good], COEFFICIENTS[:2], bounds(G[good], Bound.TIGHT))
    scales = list(torch.ones(5, device=device))
    exponents = torch.zeros(5, device=device)
    with whatever_it_gains(backend):
        root = ops.inverse_root(G, COEFFICIENTS[:2])
        finite = root.check.reshape(5, -1).sum(1).isfinite().tolist()
        assert finite == root.Z.reshape(5, -1).isfinite().all(1).tolist()
        assert not finite[1] and all(finite[i] for i in good)
        assert root.bound[1].isnan()
        ops.drop_unusable_(root.Z, root.check, root.bound, exponents, scales, [1.0] * 5)
    assert_close(root.Z[good], expected, Rounding(F16, steps=2))
    assert not root.Z[[1, 3]].any()


@pytest.mark.parametrize("kind", list(Bound))
def test_many_matrices_are_iterated_in_parts(backend, device, kind, monkeypatch):
    n = 24
    G = gram_matrices(3, n, F16, device) / 3
    trace = bounds(G, Bound.TRACE).float().to(device)
    with whatever_it_gains(backend):
        whole = ops.inverse_root(G.clone(), COEFFICIENTS[:2], kind, trace=trace)
        modules = [newton_schulz]
        if backend == "triton":
            modules.append(importlib.import_module("curvadion_kernels.newton_schulz"))
        for module in modules:
            monkeypatch.setattr(module, "most_of_squares", lambda _: 2 * n * n + 1)
        parts = ops.inverse_root(G.clone(), COEFFICIENTS[:2], kind, trace=trace)
    assert whole.Z.isfinite().all()
    assert all(map(torch.equal, whole, parts))


# ---------------------------------------------------------------- whole tiles


@contextlib.contextmanager
def whole_tiles(whole=None):
    """Yields for each launch of a product whether its tiles count as whole; no others may run.

    Args:
        whole: what counts as whole, by n, m and the depth of a tile; None as the kernels say.
    """
    found = []
    with whatever_it_gains("triton"), contextlib.ExitStack() as patches:
        for name in ("newton_schulz", "symmetric"):
            kernels = importlib.import_module(f"curvadion_kernels.{name}")

            def run(*arguments, launch=kernels.run, **constants):
                if "TILE" in constants:
                    found.append(constants["WHOLE"])
                launch(*arguments, **constants)

            patches.enter_context(mock.patch.object(kernels, "run", run))
            patches.enter_context(mock.patch.object(kernels, "gains", lambda *_: True))
            if whole is not None:
                patches.enter_context(mock.patch.object(kernels, "whole", whole))
        yield found


@pytest.mark.parametrize(("n", "dtype", "iterations"), [(128, BF16, 3), (256, F16, 2)])
def test_whole_tiles_without_masks_have_the_same_bits(backend, device, n, dtype, iterations):
    if backend != "triton":
        pytest.skip("of the Triton kernels alone")
    B = [
        stack((1, 64, n), dtype, device, 1, "rows"),
        stack((1, 192, n), dtype, device, 2, "columns"),
    ]

    def everything():
        G = torch.full((2, n, n), math.nan, dtype=dtype, device=device)
        ops.grams(B, G.split(1))
        square = ops.symmetric_product(G, G, torch.empty_like(G))
        one = ops.inverse_root(G / n, COEFFICIENTS[:1], Bound.ONE)
        return [G.clone(), square, *one, *ops.inverse_root(G, COEFFICIENTS[:iterations])]

    with whole_tiles() as unmasked:
        expected = everything()
    with whole_tiles(lambda *_: False) as masked:
        found = everything()
    launches = 3 + 4 * iterations - 3  # three products by themselves, and those of the last root
    assert len(unmasked) == launches and all(unmasked)
    assert len(masked) == launches and not any(masked)
    assert all(result.isfinite().all() for result in expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("n", "depths", "whole"),
    [(128, (64, 0), True), (128, (64, 72), False), (128, (72, 64), False), (144, (64,), False)],
)
def test_masks_where_any_tile_is_not_whole(backend, device, n, depths, whole):
    if backend != "triton":
        pytest.skip("of the Triton kernels alone")
    B = [stack((1, m, n), F16, device, 1, "rows") for m in depths]
    with whole_tiles() as found:
        ops.grams(B, [b.new_empty(1, n, n) for b in B])
        ops.symmetric_product(B[-1].mT, B[-1], B[-1].new_empty(1, n, n))
        ops.inverse_root(torch.eye(n, device=device, dtype=F16)[None], COEFFICIENTS[:1], Bound.ONE)
    multiple = depths[-1] % 64 == 0
    assert found == [whole, n == 128 and multiple, n == 128]


# ---------------------------------------------------------------- what is dropped

NAN = math.nan
INF = math.inf


@pytest.mark.parametrize("parts", [0, 1, 5])
def test_roots_that_are_not_finite_are_dropped(backend, device, parts):
    k, n = 4, 40
    Z = operations.numbers((k, n, n), F16, device, 1)
    check = torch.zeros(k, max(parts, 1), device=device)
    check[1, -1] = INF
    check[2, 0] = NAN
    check[3] = -3.0
    expected = Z.clone()
    expected[1:3] = 0.0
    with whatever_it_gains(backend) as launched:
        ops.drop_unusable_(Z, check if parts else check[:, 0])
    assert launched is None or len(launched) == 1
    assert torch.equal(Z, expected)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_short_matrices_are_dropped_and_lengths_are_kept(backend, device, flag, in_place):
    """Lengths beside FALLEN = 3e-5 times the decayed scale; NaN in a length or a scale."""
    #           kept  short  longer  new   lost  lost scale  not finite
    lengths = [2.9e-5, 2.5e-5, 3.0, 1e-3, NAN, 0.5, 2.0]
    last = [1.0, 1.0, 2.0, 0.0, 1.0, NAN, 1.0]
    decays = [0.9, 0.9, 0.5, 0.9, 0.25, 0.5, 1.0]
    usable = [True, False, True, True, False, False, False]
    new = [0.9, 0.9, 3.0, 1e-3, NAN, NAN, 2.0]
    k = len(lengths)
    e = torch.tensor([3.0, -2.0, 0.0, 20.0, 1.0, 0.0, -30.0], device=device)
    bound = (torch.tensor(lengths, device=device) * torch.exp2(-e)).square()
    Z = torch.ones(k, 16, 16, dtype=F16, device=device)
    check = torch.zeros(k, 2, device=device)
    check[-1] = INF
    scales = list(torch.tensor(last, device=device))
    new_scales = scales if in_place else [torch.zeros((), device=device) for _ in last]
    before = torch.stack(new_scales)
    moves = None if flag is None else torch.tensor(flag, device=device)
    with whatever_it_gains(backend) as launched:
        ops.drop_unusable_(Z, check, bound, e, scales, decays, new_scales, moves)
    assert launched is None or len(launched) == 1
    assert Z.amin((1, 2)).tolist() == Z.amax((1, 2)).tolist() == [float(u) for u in usable]
    found = torch.stack(new_scales)
    if flag is False:
        assert torch.equal(found.nan_to_num(-1.0), before.nan_to_num(-1.0))
    else:
        assert found.isnan().tolist() == [math.isnan(x) for x in new]
        expected = torch.tensor(new, dtype=torch.float64)
        known = ~expected.isnan()
        assert_close(found.cpu()[known], expected[known], Rounding(F32), elementwise=True)
    if not in_place:
        assert torch.equal(torch.stack(scales).cpu().nan_to_num(), torch.tensor(last).nan_to_num())


def test_scales_decay_in_float64(backend, device):
    """By a number next to one, which float32 would round to 1 - 2^-24."""
    last = torch.tensor(1.75, device=device)
    Z = torch.ones(1, 4, 4, dtype=F16, device=device)
    zero = torch.zeros(1, device=device)
    with whatever_it_gains(backend):
        ops.drop_unusable_(Z, zero, zero, zero, [last], [1 - 0.55 * 2**-24], [last])
    # 1.75 decay is 1.75 less 0.48 of the distance to the next float32 number.
    assert float(last) == 1.75 and not Z.any()


# ---------------------------------------------------------------- whether kernels gain


def test_programs_with_the_longest_sums_begin_first(backend, device):
    if backend != "triton":
        pytest.skip("of the Triton kernels alone")
    B = [stack((1, m, 16), F16, device, 1, "rows") for m in (8, 72, 24)]
    kernels = importlib.import_module("curvadion_kernels.newton_schulz")
    with whatever_it_gains(backend), mock.patch.object(kernels, "run") as run:
        ops.grams(B, [b.new_empty(1, 16, 16) for b in B])
    table = run.call_args.args[2].view(3, 8)
    assert table[:, 0].tolist() == [0, 1, 2] and table[:, 4].tolist() == [72, 24, 8]


def test_kernels_are_chosen_by_waves_of_tiles(backend, device):
    if backend != "triton":
        pytest.skip("of the Triton kernels alone")
    kernels = importlib.import_module("curvadion_kernels.newton_schulz")

    def grams(*shapes):
        return kernels.grams_gain(shapes, device)

    def iterated(k, n):
        return kernels.gains(torch.empty(k, n, n, dtype=F16, device="meta"), 2)

    with mock.patch.object(kernels, "processors_of", lambda _: 132):
        # Half of the tiles in half as many waves, and four launches in one.
        assert grams((48, 3072, 768)) and grams((12, 768, 768), (12, 3072, 768))
        # The blocks of GPT-2 160M: of one alone, torch.bmm divides the sums of 36 tiles each.
        blocks = [(1, 2304, 768), (1, 768, 768), (1, 3072, 768), (1, 3072, 768)]
        assert grams(*((12, m, n) for _, m, n in blocks)) and not grams(*blocks)
        # Tiles take longer, and the copy of the table takes its time.
        assert not grams((1, 768, 768)) and not grams((1, 3072, 128))
        # The chain saves a dozen elementwise launches, too.
        assert iterated(48, 768) and iterated(1, 768) and iterated(1, 128)
        assert not iterated(48, 770)  # loads would be narrow
