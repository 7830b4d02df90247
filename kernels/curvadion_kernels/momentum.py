"""Sums mu M + G over a list, written to M or elsewhere, and their norms, in one launch each."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.tensors import elementwise
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on, run
from curvadion_kernels.numbers import DTYPES, load_float32, numbers, store, to_nearest


@triton.jit
def _chunk(
    m, g, out, mu, start, n,
    OUT_DTYPE: tl.constexpr, HAS_G: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements [start, start + CHUNK): write mu m + g, and return the sum of its squares."""
    squares = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, CHUNK, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        here = at < n
        sums = load_float32(m, at, here, MASKED)
        if HAS_G:
            sums = mu * sums + load_float32(g, at, here, MASKED)
            held = to_nearest(sums, OUT_DTYPE)
        else:
            held = sums.to(OUT_DTYPE)
        if WRITE:
            store(out, at, held, here, MASKED)
        # In float64, which holds the squares of tiny and of large numbers; zeros where masked.
        wide = held.to(tl.float64)
        squares += wide * wide
    # Summed here, so that each caller can lay out its numbers in its own way.
    return tl.sum(squares)


@triton.jit
def _finish_norm(
    total, block, t, blocks, first, slots, tickets, partial, norms, SUMS: tl.constexpr
):
    """Store a block's sum of squares; the last block of a tensor adds up all and takes the root."""
    tl.store(partial + block, total)
    # The partial sum must be in memory before the ticket is drawn.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + t, 1, sem="acq_rel")
    if ticket == blocks - 1:
        tl.debug_barrier()
        # Any block may be the last. All add up in the same order, so timing changes no bit.
        begin = tl.load(first + t)
        sums_of_blocks = tl.zeros((SUMS,), tl.float64)
        done = 0
        while done < blocks:
            j = done + tl.arange(0, SUMS)
            sums_of_blocks += tl.load(partial + begin + j, j < blocks, 0.0, cache_modifier=".cg")
            done += SUMS
        tl.store(norms + tl.load(slots + t), tl.sqrt(tl.sum(sums_of_blocks)).to(tl.float32))
        tl.store(tickets + t, 0)


@triton.jit
def momentum_kernel(
    table, numel, of, chunk, first, slots, tickets, partial, norms, count, moves,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, HAS_G: tl.constexpr,
    HAS_OUT: tl.constexpr, WRITE: tl.constexpr, GUARDED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: write mu M + G to M or elsewhere, or take part in its norm."""
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    m_address = tl.load(table + t)
    g_address = m_address
    out_address = m_address
    mu = 1.0
    if HAS_G:
        g_address = tl.load(table + count + t)
        mu = tl.load(numbers(table, (3 if HAS_OUT else 2) * count) + t)
    if HAS_OUT:
        out_address = tl.load(table + 2 * count + t)
    if (start + CHUNK <= n) & (((m_address | g_address | out_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        out = tl.multiple_of(out_address.to(tl.pointer_type(OUT_DTYPE)), 16)
        total = _chunk(m, g, out, mu, start, n, OUT_DTYPE, HAS_G, WRITE, False, CHUNK, BLOCK)
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        out = out_address.to(tl.pointer_type(OUT_DTYPE))
        total = _chunk(m, g, out, mu, start, n, OUT_DTYPE, HAS_G, WRITE, True, CHUNK, BLOCK)
    if not WRITE:
        blocks = tl.maximum((n + CHUNK - 1) // CHUNK, 1).to(tl.int32)
        _finish_norm(total, block, t, blocks, first, slots, tickets, partial, norms, SUMS)


def norms(X: Sequence[Tensor]) -> Tensor:
    """See :func:`curvadion.ops.norms`."""
    return _run(elementwise([X]), [], write=False)


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms`."""
    return _run(elementwise([M], [G]), [mu], write=False)


def accumulate_(
    M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float], moves: Tensor | None = None
) -> None:
    """See :func:`curvadion.ops.accumulate_`."""
    _run(elementwise([M], [G]), [mu], write=True, moves=moves)


def look_ahead(
    M: Sequence[Tensor], G: Sequence[Tensor], share: Sequence[float], out: Sequence[Tensor]
) -> None:
    """See :func:`curvadion.ops.look_ahead`."""
    M, out, G = elementwise([M, out], [G])
    _run([G, M, out], [share], write=True)


def _run(
    lists: Sequence[Sequence[Tensor]],
    factors: Sequence[Sequence[float]],
    *,
    write: bool,
    moves: Tensor | None = None,
) -> Tensor:
    """Write mu M + G, to a third list if there is one, or return its norms, (count,) float32.

    Without G they are the norms of M.
    """
    count, device = len(lists[0]), lists[0][0].device
    result = torch.empty(0 if write else count, dtype=torch.float32, device=device)
    for launch, dtypes in launches(lists):
        partial = torch.empty(0 if write else launch.blocks, dtype=torch.float64, device=device)
        with on(device):
            run(
                momentum_kernel, (launch.blocks,),
                launch.table(lists, factors),
                *launch.index.on_stream(), launch.tickets(device), partial, result, launch.count,
                result if moves is None else moves,
                M_DTYPE=DTYPES[dtypes[0]], G_DTYPE=DTYPES[dtypes[min(1, len(lists) - 1)]],
                OUT_DTYPE=DTYPES[dtypes[2 if len(lists) > 2 else 0]], HAS_G=bool(factors),
                HAS_OUT=len(lists) > 2, WRITE=write, GUARDED=moves is not None, CHUNK=CHUNK,
                BLOCK=BLOCK, SUMS=1024,
            )  # fmt: skip
    return result
