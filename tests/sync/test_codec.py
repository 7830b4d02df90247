"""Codes of a few bits, and means over a group that are sent in them."""

import math

import pytest
import torch
import torch.distributed as dist

from curvadion import ops
from curvadion.metering.wire import WireMeter
from curvadion.ops import coding
from curvadion.ops.code_format import BITS, BLOCK, Bits, block_bytes
from curvadion.sync.coded_mean import coded_mean_, message_bytes
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed

pytestmark = pytest.mark.numeric
# Mean square errors of the best quantizers of a standard normal number (Max, 1960, table I).
LEAST_DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def encode(x, bits):
    """(k * BLOCK,) float32 -> (k, block_bytes(bits)) uint8."""
    codes = x.new_empty(len(x) // BLOCK, block_bytes(bits), dtype=torch.uint8)
    ops.encode_difference_(codes, [x], bits=bits)
    return codes


def decode(codes, bits):
    """The inverse, but for what codes lose."""
    x = codes.new_empty(len(codes) * BLOCK, dtype=torch.float32)
    ops.decode_add_([x], (), codes, bits)
    return x


@pytest.mark.parametrize(("bits", "least"), LEAST_DISTORTION.items())
@pytest.mark.parametrize("kind", ["normal", "few large", "signs", "one row"])
@pytest.mark.chosen_inputs
def test_the_distortion_is_at_most_a_normal_numbers_whatever_the_distribution(bits, least, kind):
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(64, BLOCK, generator=generator)
    if kind == "few large":
        x = x**5
    elif kind == "signs":
        x = x.sign() * 3.0
    elif kind == "one row":
        x[1:] = 0
    x = x.view(-1)
    lost = (x - decode(encode(x, bits), bits)).square().sum() / x.square().sum()
    assert float(lost) < (1.25 if kind == "one row" else 1.1) * least
    if kind == "normal":
        assert float(lost) == pytest.approx(least, rel=0.1)


def replicas_numbers(rank, sizes, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator) + 0.3 for size in sizes]


@pytest.mark.parametrize(
    ("world", "bits", "sizes"),
    [
        (2, (1, 1), [(256,)]),
        (4, (1, 2), [(3, 5), (), (1000,), (0,)]),
        (2, (3, 3), [(64, 64), (7,)]),
        (4, (4, 2), [(64, 64), (7,)]),
        (2, (8, 8), [(3, 5), (), (1000,), (0,)]),
    ],
)
def test_sums_of_means_are_true_but_for_the_last_residuals(world, bits, sizes):
    distributed.run(world, average, sizes, bits)


def average(rank, sizes, bits):
    world, steps = dist.get_world_size(), 4
    residuals = [torch.zeros(size) for size in sizes]
    up, down = (message_bytes([math.prod(size) for size in sizes], b) for b in bits)
    received, numbers = [torch.zeros(s).double() for s in sizes], [[] for _ in sizes]
    for step in range(steps):
        X = replicas_numbers(rank, sizes, step)
        with WireMeter() as meter:
            coded_mean_(X, residuals, Bits(*bits), dist.group.WORLD)
        sent = sum(distributed.gathered(meter.total.sent)) / world
        assert sent == pytest.approx((world - 1) / world * (up + down))
        for theirs in distributed.gathered(X):
            assert all(map(torch.equal, theirs, X))
        for total, mean in zip(received, X, strict=True):
            assert mean.shape == total.shape
            total += mean
        for r in range(world):
            for i, x in enumerate(replicas_numbers(r, sizes, step)):
                numbers[i].append(x.double())
    for i, kept in enumerate(zip(*distributed.gathered(residuals), strict=True)):
        true = (sum(numbers[i]) - sum(residual.double() for residual in kept)) / world
        # Sums are shorter than what is added up.
        added = float(sum(x.norm() for x in numbers[i])) / world
        assert_close(received[i], true, Rounding(torch.float32, terms=steps), scale=added)


@pytest.mark.parametrize("bits", BITS)
def test_chunks_have_the_codes_of_the_whole(bits, monkeypatch):
    x = torch.randn(7 * BLOCK, generator=torch.Generator().manual_seed(0))
    whole = encode(x, bits)
    monkeypatch.setattr(coding, "CHUNK", 2 * BLOCK)
    with ops.use_backend("torch"):
        assert encode(x, bits).equal(whole)
        assert decode(whole, bits).equal(torch.cat([decode(block[None], bits) for block in whole]))
