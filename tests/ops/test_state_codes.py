"""States in 8 bits on every backend that runs in this process, bit for bit against numpy.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from curvadion import ops
from support.references.operations import places

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


def noise(positions, seed):
    """Numbers in [0, 1) from 16 bits of a hash."""

    def mixed(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    bits = mixed(mixed(positions.astype(np.int64)) ^ seed) & 0xFFFF
    return bits / 65536


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
        codes = low + (scaled - low > noise(np.arange(y.size).reshape(y.shape), seed))
    codes = np.where(np.abs(scaled) > np.float32(126.99), np.sign(scaled) * 127, codes)
    if roots:
        codes = np.where((scaled > 0) & (codes == 0), 1, codes)
    return codes, scales


@each_backend
@pytest.mark.parametrize("roots", [False, True])
@pytest.mark.parametrize("seeds", [None, SEEDS])
@pytest.mark.parametrize("scale", [1.0, 1e-41, 1e25])
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
