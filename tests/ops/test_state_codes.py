"""States in 8 bits on every backend that runs in this process, bit for bit against numpy.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from curvadion import ops
from curvadion.ops import backends
from support.references import operations
from support.references.operations import places
from support.references.tolerance import Rounding, assert_within
from support.runs.pairwise import all_pairs

each_backend = pytest.mark.parametrize(("backend", "device"), places("torch", "cpu"))
SEEDS = [5, 2**32 - 3, 7, 11, 13]


def values(*, roots, scale=1.0):
    """A long tensor, one that ends in a block, one that is turned, one element, and none."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(131, 257), (512,), (9, 40), (1,), (0, 4)]
    drawn = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    drawn[0][:, :100] *= 1e-4  # far below the largest of their blocks
    drawn[0][2] = 0.0
    drawn[1][:256] = 127 / 4 * scale  # the largest code
    drawn[1][1:256] = (torch.arange(255) - 127) / 8 * scale  # integers and ties
    drawn[2] = drawn[2].mT.contiguous().mT
    return [x.square() for x in drawn] if roots else drawn


def in_memory(x):
    return x.mT.reshape(-1) if x.dim() == 2 and x.mT.is_contiguous() else x.reshape(-1)


def reference(x, seed, *, roots):
    """Codes (blocks, 256) and scales (blocks,), from the definitions."""
    flat = in_memory(x).numpy()
    flat = np.sqrt(flat) if roots else flat
    blocks = -(-len(flat) // 256)
    y = np.pad(flat, (0, 256 * blocks - len(flat))).reshape(blocks, 256)
    largest = np.abs(y).max(axis=1, initial=np.float32(0))
    mantissa, exponents = np.frexp(largest / np.float32(127))
    mantissa = np.floor(mantissa.astype(np.float64) * 2**17 + 0.5) / 2**17
    scales = np.ldexp(mantissa, exponents).astype(np.float32)
    scales[scales < (2.0**-63 if roots else 2.0**-126)] = 0
    divisor = np.where(scales == 0, np.float32(np.inf), scales)
    scaled = (y / divisor[:, None]).astype(np.float64)
    if seed is None:
        codes = np.rint(scaled)
    else:
        low = np.floor(scaled)
        drawn = operations.noise(np.arange(y.size).reshape(y.shape), seed) / 2**16
        codes = low + (scaled - low > drawn)
    codes = np.where(np.abs(scaled) > np.float32(126.99), np.sign(scaled) * 127, codes)
    if roots:
        codes = np.where((scaled > 0) & (codes == 0), 1, codes)
    return codes, scales


@each_backend
@pytest.mark.parametrize(
    ("roots", "seeds", "scale"), all_pairs([False, True], [None, SEEDS], [1.0, 1e-41, 1e25])
)
def test_codes_and_what_they_stand_for(backend, device, roots, seeds, scale):
    if roots and scale > 1:
        scale = 1e12  # its square is what is encoded
    X = values(roots=roots, scale=scale)
    on_device = [x.to(device) for x in X]
    coded = [
        torch.full((ops.code_bytes(x.numel()),), 77, dtype=torch.int8, device=device) for x in X
    ]
    with ops.use_backend(backend):
        ops.encode_states_(coded, on_device, seeds, roots=roots)
        decoded = ops.decode_states(coded, on_device, roots=roots)
    for i, (x, made, read) in enumerate(zip(X, coded, decoded, strict=True)):
        codes, scales = reference(x, seeds and seeds[i], roots=roots)
        assert made[: codes.size].tolist() == codes.reshape(-1).tolist()
        assert made[codes.size :].view(torch.float32).tolist() == scales.tolist()
        stands = codes * scales[:, None].astype(np.float64)
        stands = (stands**2 if roots else stands).reshape(-1)[: x.numel()]
        assert read.shape == x.shape and read.stride() == x.stride()
        assert in_memory(read.cpu()).tolist() == stands.astype(np.float32).tolist()


@each_backend
def test_roots_are_rounded_as_ieee_754_says(backend, device):
    """PyTorch's own are not on some CPUs. A unit in the last place decides about these scales."""
    generator = torch.Generator().manual_seed(2)
    kept_bits = torch.randint(2**16, 2**17, (100, 1), generator=generator)
    square = (127 * (kept_bits.double() + 0.5) / 2**17).square().float()
    x = torch.zeros(700, 256)
    neighbours = square.view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32)
    x[:, 0] = neighbours.view(torch.float32).view(-1)
    x = x.view(-1)
    coded = [torch.zeros(ops.code_bytes(len(x)), dtype=torch.int8, device=device)]
    with ops.use_backend(backend):
        ops.encode_states_(coded, [x.to(device)], [5], roots=True)
    codes, scales = reference(x, 5, roots=True)
    made = coded[0].cpu().numpy()
    np.testing.assert_array_equal(made[codes.size :].view(np.float32), scales)
    np.testing.assert_array_equal(made[: codes.size], codes.reshape(-1))


@each_backend
@pytest.mark.parametrize("roots", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-21])
def test_states_that_are_only_read_and_written_stay(backend, device, roots, scale):
    """Also squares of elements of 1e-21, which are below float32's normal numbers."""
    like = [x.to(device) for x in values(roots=roots, scale=scale)]
    coded = [torch.zeros(ops.code_bytes(x.numel()), dtype=torch.int8, device=device) for x in like]
    with ops.use_backend(backend):
        ops.encode_states_(coded, like, SEEDS, roots=roots)
        before = ops.decode_states(coded, like, roots=roots)
        for seed in range(3):
            ops.encode_states_(coded, before, [seed] * len(like), roots=roots)
            for x, y in zip(ops.decode_states(coded, like, roots=roots), before, strict=True):
                assert torch.equal(x, y)


@each_backend
def test_the_mean_over_seeds_is_the_value(backend, device):
    """To five standard errors of 400 draws; a step of the codes is 1.5 / 127."""
    x = (torch.linspace(-1.5, 1.5, 256) + 0.001).to(device)
    coded = list(torch.zeros(400, ops.code_bytes(256), dtype=torch.int8, device=device))
    X = [x] * len(coded)
    with ops.use_backend(backend):
        ops.encode_states_(coded, X, [7919 * i for i in range(400)], roots=False)
        drawn = ops.decode_states(coded, X, roots=False)
    assert (torch.stack(drawn).double().mean(0) - x).abs().max() < 5 * (1.5 / 127) / 2 / 20


@each_backend
def test_codes_of_another_tensor_are_refused(backend, device):
    codes = [torch.zeros(260, dtype=torch.int8, device=device)]
    x = [torch.zeros(20, 13, device=device)]
    with ops.use_backend(backend), pytest.raises(ValueError, match=r"260 bytes.*\(20, 13\).*520"):
        ops.encode_states_(codes, x, None, roots=False)
    with ops.use_backend(backend), pytest.raises(ValueError, match=r"260 bytes.*\(20, 13\).*520"):
        ops.decode_states(codes, x, roots=False)


# ---------------------------------------------------------------- steps of codes


def stands_for(codes, like, *, roots):
    """The elements for which codes stand, float64, by numpy."""
    made = codes.cpu().numpy()
    blocks = len(made) // 260
    scales = made[256 * blocks :].view(np.float32).astype(np.float64)
    flat = (made[: 256 * blocks].reshape(blocks, 256) * scales[:, None]).reshape(-1)
    elements = torch.from_numpy(flat[: like.numel()] ** (2 if roots else 1))
    return torch.empty_like(like, dtype=torch.float64, device="cpu").copy_(
        elements.as_strided(like.shape, like.stride())
    )


def assert_encoded(codes, expected, seed, *, roots):
    """The codes are those of the elements, but for a few that rounding errors move by one."""
    wanted, scales = reference(expected.float(), seed, roots=roots)
    made = codes.cpu().numpy()
    apart = np.abs(made[: wanted.size] - wanted.reshape(-1))
    assert apart.max(initial=0) <= 1 and (apart > 0).sum() <= 2 + 0.004 * apart.size
    np.testing.assert_allclose(made[wanted.size :].view(np.float32), scales, rtol=2**-16)


def encoded(X, device, *, roots=False):
    codes = [torch.zeros(ops.code_bytes(x.numel()), dtype=torch.int8, device=device) for x in X]
    ops.encode_states_(codes, [x.to(device) for x in X], SEEDS, roots=roots)
    return codes


def gradients(X, device, dtype):
    """Of the list's shapes, all row-major: the third one's weight is not."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randn(x.shape, generator=generator).to(dtype) for x in X]
    return [g.to(device) for g in drawn]


@pytest.mark.numeric
@each_backend
@pytest.mark.parametrize("seeds", [None, SEEDS])
@pytest.mark.parametrize(
    ("G_dtype", "out_dtype", "moves"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
    ],
)
def test_momenta_of_codes_take_gradients(backend, device, seeds, G_dtype, out_dtype, moves):
    X = values(roots=False)
    G = gradients(X, device, G_dtype)
    backends.refused.clear()
    # A momentum that is no codes may be among them.
    plain = torch.randn(70, 33, generator=torch.Generator().manual_seed(5))
    mu = [0.9, 0.8, 0.95, 0.9, 0.9, 0.7]
    share = [0.5, 1.0, 0.0, 2.0, 0.5, 0.5]
    with ops.use_backend(backend):
        M = [*encoded(X, device), plain.to(device)]
        before = [stands_for(m, x, roots=False) for m, x in zip(M, X, strict=False)]
        before.append(plain.double())
        kept = [m.clone() for m in M]
        # lengths() takes codes to lie in the order of the gradients' strides.
        G.append(torch.ones_like(M[-1]))
        like = [*(x.to(device) for x in X), M[-1]]
        ordered = [
            torch.empty_like(x, dtype=g.dtype).copy_(g) for x, g in zip(like, G, strict=True)
        ]
        shares = [1 + factor for factor in share]
        found, norms = ops.lengths([*M, None], [*ordered, G[0]], [*mu, 0.0], [*shares, 1.0])
        assert all(map(torch.equal, M, kept))
        out = [torch.empty_like(x, dtype=out_dtype) for x in like]
        flag = None if moves is None else torch.tensor(moves, device=device)
        noise_of = None if seeds is None else [*seeds, 0]
        lengths = found[:-1]
        e, trace = ops.ahead_(M, G, mu, share, out, lengths, flag, noise_of)
        refused = dict(backends.refused)
    # Each entry of a list with codes is stepped by the backend that takes it.
    assert not {"coded_lengths", "coded_ahead_"} & refused.keys()
    wide = [g.double().cpu() for g in G]
    stepped = [decay * m + g for decay, m, g in zip(mu, before, wide, strict=True)]
    ahead = [m + factor * g for factor, m, g in zip(share, stepped, wide, strict=True)]
    expected = torch.stack([x.norm() for x in [*ahead, wide[0]]])
    of_norms = Rounding(torch.float32, terms=operations.IN_A_NORM)
    assert_within(operations.relative(found, expected), of_norms)
    expected = torch.stack([g.norm() for g in [*wide, wide[0]]])
    assert_within(operations.relative(norms, expected), of_norms)
    if moves is False:
        assert all(map(torch.equal, M, kept))
        return
    powers = torch.exp2(-e.double().cpu())
    scaled = lengths.double().cpu() * powers
    assert ((scaled[:4] >= 64) & (scaled[:4] < 128)).all() and e[4] == -126  # no elements
    assert_within(operations.relative(trace, scaled.square()), Rounding(torch.float32))
    for x, y, power in zip(out, ahead, powers, strict=True):
        operations.assert_elements(x, y * power)
    for i, x in enumerate(X):
        elements = torch.empty_like(x, dtype=torch.float64).copy_(stepped[i])
        assert_encoded(M[i], elements, seeds and seeds[i], roots=False)
    operations.assert_elements(M[-1], stepped[-1])


@pytest.mark.numeric
@each_backend
@pytest.mark.parametrize(
    ("seeds", "moves", "dtype"),
    all_pairs([None, SEEDS], [None, True, False], [torch.float32, torch.bfloat16]),
)
def test_adamw_with_moments_of_codes(backend, device, seeds, moves, dtype):
    like = values(roots=False)
    X = [x.to(dtype).to(device) for x in like]
    G = gradients(like, device, dtype)
    k = len(X)
    lr, decay, beta1, beta2, eps = 0.1, 0.2, 0.9, 0.99, 1e-8
    with ops.use_backend(backend):
        means = encoded(like, device)
        squares = encoded([x.square() for x in like], device, roots=True)
        m = [stands_for(c, x, roots=False) for c, x in zip(means, like, strict=True)]
        v = [stands_for(c, x, roots=True) for c, x in zip(squares, like, strict=True)]
        t = [torch.tensor(float(4 + i), device=device) for i in range(k)]
        written = [*X, *means, *squares, *t]
        kept = [tensor.clone() for tensor in written]
        before = [x.double().cpu() for x in X]
        flag = None if moves is None else torch.tensor(moves, device=device)
        other = None if seeds is None else [seed + 1 for seed in seeds]
        numbers = [[number] * k for number in (lr, decay, beta1, beta2, eps)]
        backends.refused.clear()
        ops.adamw_(X, G, means, squares, t, *numbers, flag, seeds, other)
        assert not backends.refused
    if moves is False:
        assert all(map(torch.equal, written, kept))
        return
    for i, g in enumerate(g.double().cpu() for g in G):
        step = 5 + i
        assert t[i].item() == step
        mean = torch.empty_like(m[i]).copy_(beta1 * m[i] + (1 - beta1) * g)
        square = torch.empty_like(v[i]).copy_(beta2 * v[i] + (1 - beta2) * g**2)
        divisor = (square / (1 - beta2**step)).sqrt() + eps
        x = (1 - lr * decay) * before[i] - lr / (1 - beta1**step) * mean / divisor
        # PyTorch's unfused step of other dtypes than those of the moments rounds each operation.
        arithmetic = dtype if backend == "torch" else torch.float32
        operations.assert_close(X[i], x, arithmetic=arithmetic)
        assert_encoded(means[i], mean, seeds and seeds[i], roots=False)
        assert_encoded(squares[i], square, seeds and seeds[i] + 1, roots=True)


@each_backend
def test_steps_refuse_codes_of_another_tensor(backend, device):
    codes = [torch.zeros(260, dtype=torch.int8, device=device)]
    x = [torch.zeros(20, 13, device=device)]
    t = [torch.zeros((), device=device)]
    number = [0.5]
    refused = pytest.raises(ValueError, match=r"260 bytes.*\(20, 13\).*520")
    with ops.use_backend(backend):
        with refused:
            ops.lengths(codes, x, number, number)
        with refused:
            ops.ahead_(codes, x, number, number, x, None)
        for states in ((codes, x), (x, codes)):
            with refused:
                ops.adamw_(x, x, *states, t, *[number] * 5)


@each_backend
def test_steps_of_codes_refuse_lists_of_unequal_lengths(backend, device):
    x = [torch.zeros(20, 13, device=device)]
    codes = [torch.zeros(ops.code_bytes(260), dtype=torch.int8, device=device)]
    t = [torch.zeros((), device=device)]
    with ops.use_backend(backend):
        with pytest.raises((ValueError, IndexError)):
            ops.ahead_(codes, [], [0.5], [0.5], x, None)
        with pytest.raises((ValueError, IndexError)):
            ops.adamw_(x, [], codes, codes, t, *[[0.5]] * 5)
        for G, number in (([*x, *x], [0.5]), (x, [0.5] * 3)):
            with pytest.raises((ValueError, IndexError)):
                ops.adamw_(x, G, codes, codes, t, *[number] * 5)
        for seeds in ([], [1, 2]):
            with pytest.raises(ValueError, match=f"{len(seeds)} seeds of 1 states"):
                ops.ahead_(codes, x, [0.5], [0.5], x, None, None, seeds)
            for both in ([seeds, [1]], [[1], seeds]):
                with pytest.raises(ValueError, match=f"{len(seeds)} seeds of 1 states"):
                    ops.adamw_(x, x, codes, codes, t, *[[0.5]] * 5, None, *both)
    if backend == "cpu":  # which reads arrays of numbers by their addresses
        with ops.use_backend(backend):
            for numbers in ([[], [0.5]], [[0.5], []]):
                with pytest.raises(ValueError, match="lists of unequal lengths"):
                    ops.ahead_(codes, x, *numbers, x, None)
            with pytest.raises(ValueError, match="2 lengths of 1 momenta"):
                ops.ahead_(codes, x, [0.5], [0.5], x, torch.ones(2))
            with pytest.raises(ValueError, match="lists of unequal lengths"):
                ops.adamw_(x, x, codes, codes, t, [], *[[0.5]] * 4)
    assert t[0].item() == 0


@each_backend
def test_codes_at_an_odd_place_of_their_storage_are_refused(backend, device):
    codes = [torch.zeros(261, dtype=torch.int8, device=device)[1:]]
    x = [torch.zeros(20, 5, device=device)]
    with ops.use_backend(backend), pytest.raises(ValueError, match="clone"):
        ops.lengths(codes, x, [0.5], [1.0])


def test_states_are_opened_in_runs():
    """Of at most 300 elements that are codes; one that is larger is a run by itself."""
    sizes = [100, 200, 1, 400, 7, 50, 1000]
    like = [torch.empty(size) for size in sizes]
    states = [torch.empty(ops.code_bytes(size), dtype=torch.int8) for size in sizes]
    states[4] = torch.empty(7)
    assert ops.runs_to_open(states, like, 300) == [[0, 1], [2], [3, 4], [5], [6]]
    assert ops.runs_to_open(like, like, 300) == [[*range(7)]]
    assert ops.runs_to_open([], [], 300) == []
