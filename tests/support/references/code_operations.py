"""What every backend must make of codes: checks bit for bit against numpy, for any device.

The arithmetic is written from the docstring of curvadion.ops.code_format, in numpy's float32, which
rounds each operation. Only the levels are the package's own; tests/sync compares them with others.
"""

from __future__ import annotations

import numpy as np
import torch

from curvadion import ops
from curvadion.ops.code_format import Bits, levels
from support.references.tolerance import Rounding, assert_close

BLOCK = 256
SIZES = [(0,), (1,), (255,), (256,), (257,), (3, 5, 7), (), (997,), (64, 8)]
# Across the runs of blocks that threads and programs take.
LONG = [(3,), (17_001,), (0,), (16_384,)]


def signs():
    generator = torch.Generator().manual_seed(0)
    return (2.0 * torch.randint(0, 2, (BLOCK,), generator=generator) - 1).numpy()


def hadamard(y):
    for _ in range(8):
        even, odd = y[:, 0::2], y[:, 1::2]
        y = np.concatenate([even + odd, even - odd], axis=1)
    return y


def sum_in_halves(x):
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x


def bfloat16(x):
    """The bits of the nearest bfloat16, and its value."""
    rounded = torch.from_numpy(x).bfloat16()
    return rounded.view(torch.int16).numpy().astype(np.uint16), rounded.float().numpy()


def encode(z, bits):
    """(k, 256) float32 -> rows of bytes and what they stand for."""
    one = np.float32(1)
    y = hadamard(z * signs().astype(np.float32))
    _, exponent = np.frexp(np.abs(y).max(axis=1, keepdims=True))
    exponent = np.clip(exponent - 1, -126, 126)
    y = y * np.ldexp(one, -exponent)
    size = np.sqrt(sum_in_halves(y * y) / np.float32(BLOCK))
    scale, value = bfloat16(size / np.float32(16) * np.ldexp(one, exponent))
    ascending = levels(bits).numpy()
    midpoints = (ascending[1:] + ascending[:-1]) / np.float32(2)
    codes = sum((y > m * size).astype(np.int64) for m in midpoints)
    planes = [
        sum(((codes[:, 32 * k : 32 * k + 32] >> p) & 1) << k for k in range(8)) for p in range(bits)
    ]
    rows = np.concatenate([*planes, scale & 0xFF, scale >> 8], axis=1).astype(np.uint8)
    stands = hadamard(ascending[codes] * (value / np.float32(16))) * signs().astype(np.float32)
    return torch.from_numpy(rows), stands


def decode(rows, bits):
    """Rows of bytes -> (k, 256) float32."""
    rows = rows.numpy().astype(np.int64)
    codes = np.zeros((len(rows), BLOCK), dtype=np.int64)
    for i in range(BLOCK):
        for p in range(bits):
            codes[:, i] |= ((rows[:, 32 * p + i % 32] >> (i // 32)) & 1) << p
    value = (rows[:, -2:-1] | rows[:, -1:] << 8).astype(np.int16)
    value = torch.from_numpy(value).view(torch.bfloat16).float().numpy()
    y = levels(bits).numpy()[codes] * (value / np.float32(16))
    return hadamard(y) * signs().astype(np.float32)


def blocks(x):
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK).numpy()


def row_count(shapes):
    return sum(-(-torch.Size(shape).numel() // BLOCK) for shape in shapes)


def draw(shapes, dtype, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) * scale).to(dtype) for s in shapes]


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (actual.cpu(), expected))
    assert torch.equal(*flat)


def on(device, tensors):
    return [t.to(device, copy=True) for t in tensors]


def check_encode_difference(
    name, device, bits, X_dtype=torch.float32, R_dtype=torch.float32, *, shapes=SIZES, scale=1.0,
    with_anchors=True, with_residuals=True, first=2, owned=4,
):  # fmt: skip
    X = draw(shapes, X_dtype, 1, scale)
    A = draw(shapes, torch.float32, 2, scale) if with_anchors else []
    R = draw(shapes, R_dtype, 3, scale) if with_residuals else []
    z = []
    for i, x in enumerate(X):
        moved = x.float()
        if with_anchors:
            moved = moved - A[i].to(X_dtype).float()
        z.append(blocks(moved + R[i].float() if with_residuals else moved))
    codes, stand = encode(np.concatenate(z), bits)
    lost = torch.from_numpy(np.concatenate(z) - stand).split([len(one) for one in z])
    own = torch.from_numpy(np.concatenate(z))[first : first + owned]

    made = torch.full((row_count(shapes), 32 * bits + 2), 7, dtype=torch.uint8, device=device)
    kept = torch.zeros(len(own), BLOCK, device=device)
    inputs, anchors, residuals = (on(device, list_) for list_ in (X, A, R))
    with ops.use_backend(name):
        ops.encode_difference_(
            made, inputs, anchors, residuals, bits=bits, owned=kept, first=first
        )  # fmt: skip
    assert_same_bits(made, codes)
    assert_same_bits(kept, own)
    for residual, rest in zip(residuals, lost if R else [], strict=True):
        expected = rest.reshape(-1)[: residual.numel()].view(residual.shape)
        assert_same_bits(residual, expected.to(R_dtype))
    for read, before in zip((*inputs, *anchors), (*X, *A), strict=True):
        assert_same_bits(read, before)


def check_decode(name, device, bits, X_dtype=torch.float32, *, shapes=SIZES, scale=1.0):
    rows = row_count(shapes)
    codes, _ = encode(draw([(rows, BLOCK)], torch.float32, 4, scale)[0].numpy(), bits)
    mean = decode(codes, bits)
    starts = np.cumsum([0, *(row_count([shape]) for shape in shapes)])
    means = [
        torch.from_numpy(mean[a:b]).reshape(-1)[: torch.Size(s).numel()].view(s)
        for a, b, s in zip(starts[:-1], starts[1:], shapes, strict=True)
    ]
    X = on(device, draw(shapes, X_dtype, 1))
    A = draw(shapes, torch.float32, 2, scale)
    numbers, anchors = [torch.zeros(s, device=device) for s in shapes], on(device, A)
    with ops.use_backend(name):
        ops.decode_add_(numbers, (), codes.to(device), bits)
        ops.decode_add_(X, anchors, codes.to(device), bits)
    for i, one in enumerate(means):
        assert_same_bits(numbers[i], one)
        assert_same_bits(anchors[i], A[i] + one)
        assert_same_bits(X[i], (A[i] + one).to(X_dtype))


def check_average(name, device, up, down, ranks, rank, *, count=5, scale=1.0):
    sent = draw([(count, BLOCK)] * ranks, torch.float32, 5, scale)
    received = [encode(x.numpy(), up)[0] for x in sent]
    own = draw([(count, BLOCK)], torch.float32, 6, scale)[0]
    total = np.zeros((count, BLOCK), dtype=np.float32)
    for r in range(ranks):
        total = total + (own.numpy() if r == rank else decode(received[r], up))
    codes, stand = encode(total / np.float32(ranks), down)
    made = torch.zeros(count, 32 * down + 2, dtype=torch.uint8, device=device)
    kept = own.to(device, copy=True)
    with ops.use_backend(name):
        ops.average_codes_(made, kept, torch.stack(received).to(device), rank, Bits(up, down))
    assert_same_bits(made, codes)
    assert_same_bits(kept, torch.from_numpy(total - np.float32(ranks) * stand))


def check_memory_layouts(name, device):
    """Transposed tensors and slices have the codes of their row-major copies, and take updates."""
    shapes = [(30, 40), (5, 1), (300,), (20, 30)]
    plain = [on(device, draw(shapes, torch.float32, i)) for i in range(3)]
    strided = [[laid_out(t, i) for i, t in enumerate(list_)] for list_ in plain]
    results = []
    for X, A, R in (plain, strided):
        codes = torch.zeros(row_count(shapes), 66, dtype=torch.uint8, device=device)
        own = torch.zeros(4, BLOCK, device=device)
        with ops.use_backend(name):
            ops.encode_difference_(codes, X, A, R, bits=2, owned=own, first=3)
            encoded = [t.clone() for t in R]
            ops.decode_add_(X, A, codes, 2)
            ops.decode_add_(R, (), codes, 2)
        results.append([codes, own, *encoded, *X, *A, *R])
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs.cpu().contiguous())


def laid_out(x, i):
    """The same numbers by columns, or with gaps."""
    if i == 3:
        return x.clone()
    if x.dim() == 2:
        return x.T.clone(memory_format=torch.contiguous_format).T
    wide = torch.zeros(len(x), 2, device=x.device)
    wide[:, 0] = x
    return wide[:, 0]


def check_wide_tensors(name, device):
    """float64 weights and anchors are taken too."""
    X = [torch.full((300,), 1.0 + 2.0**-40, dtype=torch.float64, device=device)]
    A = [torch.ones(300, dtype=torch.float64, device=device)]
    R = [torch.zeros(300, device=device)]
    codes = torch.zeros(2, 66, dtype=torch.uint8, device=device)
    with ops.use_backend(name):
        ops.encode_difference_(codes, X, A, R, bits=2)
        moved = torch.zeros(300, device=device)
        ops.decode_add_([moved], (), codes, 2)
        rounding = Rounding(torch.float32)
        assert_close(moved + R[0], torch.full_like(moved, 2.0**-40), rounding, elementwise=True)
        ops.decode_add_(X, A, codes, 2)
    assert torch.equal(X[0], A[0]) and torch.equal(A[0], 1.0 + moved.double())
