"""Polar factors of row shards: what a rank receives and holds, and products in half precision."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from curvadion.update.newton_schulz import polar_factors
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs.polar_stacks import stack_of
from support.runs.seeded import weights

pytestmark = pytest.mark.numeric


SHAPES = [(3, 20, 5), (1, 9, 9), (2, 12, 1), (1, 7, 3)]


def factors(rank, dtype, exponents):
    """Rows are 2^exponent long, by rank; the last rank has none."""
    stacks, group = [], dist.group.WORLD if dist.get_world_size() > 1 else None
    for i, (k, m, n) in enumerate(SHAPES):
        # Far from singular, whatever the seed.
        B = 8 * torch.eye(m, n).double() + weights((k * m, n), seed=i).view(k, m, n)
        ends = [m * r // (len(exponents) - 1) for r in range(len(exponents))]
        for exponent, start, stop in zip(exponents, ends, (*ends[1:], m), strict=True):
            B[:, start:stop] *= 2.0**exponent
        rows = range(ends[rank], (*ends[1:], m)[rank]) if group else range(m)
        stacks.append(stack_of(B.float(), rows, group, dtype))
    scales = [stack.scales.after for stack in stacks]
    factors = polar_factors(stacks)
    return [(U.float(), torch.stack(s)) for U, s in zip(factors, scales, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("exponents", [(0, 0, 0, 0), (30, 28, 29, 0)], ids=["equal", "unequal"])
def test_shards_give_the_factors_of_whole_matrices(dtype, exponents):
    (whole,) = distributed.run(1, factors, dtype, exponents)
    found = distributed.run(len(exponents), factors, dtype, exponents)
    # The first polynomial takes values near 1 down to a hundredth, and rounding errors of a Gram
    # matrix are relative to the others. float16 takes two passes, after each of which U is rounded.
    rounding = Rounding(dtype, terms=4, condition=8 if dtype == torch.float16 else 1e3)
    for (wanted, scale), *each in zip(whole, *found, strict=True):
        U = torch.cat([U for U, _ in each], dim=1)
        assert_close(U, wanted, rounding)
        # Errors of single elements cancel in their projection on what is wanted.
        along = (U * wanted).sum() / wanted.square().sum()
        half = dtype == torch.float16
        assert_close(along, 1.0, Rounding(dtype, terms=4, condition=2 if half else 100))
        for _, known in each:
            assert torch.equal(known, each[0][1])
            assert_close(known, scale, Rounding(dtype))
