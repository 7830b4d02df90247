"""Momentum and norms: M <- mu M + G and || mu M + G || over a list, in one pass and one launch."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.arguments import floats
from curvadion.ops.tensors import Facts, elementwise_facts
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on
from curvadion_kernels.numbers import CODES, numbers, saturated, to_nearest


@triton.jit
def _squares(sums, held):
    """Squares of what is held of sums, float64: NaN where a sum is not finite.

    The squares of tiny and of large numbers do not fit into float32.
    """
    held = held.to(tl.float64)
    return held * held + (sums - sums).to(tl.float64)


@triton.jit
def momentum_kernel(
    table, numel, of, chunk, first, slots, tickets, partial, norms, count,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, HAS_G: tl.constexpr, WRITE: tl.constexpr,
    NORM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor; the block that finishes a tensor last adds up its partial sums."""
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    m_address = tl.load(table + t)
    g_address = m_address
    mu = 1.0
    if HAS_G:
        g_address = tl.load(table + count + t)
        mu = tl.load(numbers(table, 2 * count) + t)
    if (start + CHUNK <= n) & (((m_address | g_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        squares = tl.zeros((BLOCK,), tl.float64)
        for i in range(0, CHUNK, BLOCK):
            at = start + i + tl.arange(0, BLOCK)
            sums = tl.load(m + at).to(tl.float32)
            if HAS_G:
                sums = mu * sums + tl.load(g + at).to(tl.float32)
            held = sums.to(M_DTYPE)
            if HAS_G:
                held = to_nearest(saturated(sums, M_DTYPE), M_DTYPE)
            if WRITE:
                tl.store(m + at, held)
            squares += _squares(sums, held)
        # Summed here, so that both branches may lay out their numbers as suits them.
        total = tl.sum(squares)
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        squares = tl.zeros((BLOCK,), tl.float64)
        for i in range(0, CHUNK, BLOCK):
            at = start + i + tl.arange(0, BLOCK)
            here = at < n
            sums = tl.load(m + at, here, 0.0).to(tl.float32)
            if HAS_G:
                sums = mu * sums + tl.load(g + at, here, 0.0).to(tl.float32)
            held = sums.to(M_DTYPE)
            if HAS_G:
                held = to_nearest(saturated(sums, M_DTYPE), M_DTYPE)
            if WRITE:
                tl.store(m + at, held, here)
            squares += tl.where(here, _squares(sums, held), 0.0)
        total = tl.sum(squares)
    if NORM:
        tl.store(partial + block, total)
        blocks = tl.maximum((n + CHUNK - 1) // CHUNK, 1).to(tl.int32)
        # The partial sum must be in memory before the ticket says so.
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + t, 1, sem="acq_rel")
        if ticket == blocks - 1:
            tl.debug_barrier()
            # In the same order whichever block does it: the norm's bits do not depend on timing.
            begin = tl.load(first + t)
            sums_of_blocks = tl.zeros((SUMS,), tl.float64)
            done = 0
            while done < blocks:
                j = done + tl.arange(0, SUMS)
                sums_of_blocks += tl.load(
                    partial + begin + j, j < blocks, 0.0, cache_modifier=".cg"
                )
                done += SUMS
            tl.store(norms + tl.load(slots + t), tl.sqrt(tl.sum(sums_of_blocks)).to(tl.float32))
            tl.store(tickets + t, 0)


def norms(X: Sequence[Tensor]) -> Tensor:
    """See :func:`curvadion.ops.norms`."""
    return _run(elementwise_facts([X]), [], write=False)


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms`."""
    return _run(elementwise_facts([M], [G]), mu, write=False)


def momentum_norms_(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms_`."""
    return _run(elementwise_facts([M], [G]), mu, write=True)


def accumulate_(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> None:
    """See :func:`curvadion.ops.accumulate_`."""
    _run(elementwise_facts([M], [G]), mu, write=True, norm=False)


def _run(facts: list[Facts], mu: Sequence[float], *, write: bool, norm: bool = True) -> Tensor:
    has_g = len(facts) == 2
    numbers = [floats(mu, len(facts[0].addresses))] if has_g else []
    device = facts[0].device
    assert device is not None
    result = torch.empty(len(facts[0].addresses) if norm else 0, dtype=torch.float32, device=device)
    for launch, codes in launches(facts):
        partial = torch.empty(launch.blocks if norm else 0, dtype=torch.float64, device=device)
        with on(device):
            momentum_kernel[(launch.blocks,)](
                launch.table(facts, numbers),
                launch.numel, launch.of, launch.chunk, launch.first, launch.slots, launch.tickets,
                partial, result, launch.count,
                M_DTYPE=CODES[codes[0]], G_DTYPE=CODES[codes[-1]], HAS_G=has_g, WRITE=write,
                NORM=norm, CHUNK=CHUNK, BLOCK=BLOCK, SUMS=1024,
            )  # fmt: skip
    return result
