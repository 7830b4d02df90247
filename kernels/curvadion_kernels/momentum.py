"""Sums mu M + G over a list, written to M, and their norms, in one launch each."""

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
from curvadion_kernels.numbers import (
    DTYPES,
    SUMS,
    load_float32,
    numbers,
    root_of_sums,
    store,
    to_nearest,
)


@triton.jit
def _chunk(
    m, g, mu, start, n,
    M_DTYPE: tl.constexpr, HAS_G: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements [start, start + CHUNK) of one tensor: m <- mu m + g, or only their squares.

    Args:
        m: pointer to the tensor's momenta, M_DTYPE.
        g: pointer to its gradients, of any float dtype; used only with HAS_G.
        mu: the factor of momenta.
        start: the chunk's first element, int64.
        n: elements of the tensor, int64.
        M_DTYPE: to which sums are rounded, before they are squared too.
        HAS_G: whether there are gradients; else the sums are the momenta.
        WRITE: whether sums are written.
        MASKED: whether the chunk may reach beyond the tensor, or addresses may be unaligned.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.

    Returns:
        The sum of squares of the rounded sums, float64.
    """
    squares = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, CHUNK, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        inside = offsets < n
        sums = load_float32(m, offsets, inside, MASKED)
        if HAS_G:
            # S = mu M + G
            sums = mu * sums + load_float32(g, offsets, inside, MASKED)
            rounded = to_nearest(sums, M_DTYPE)
        else:
            rounded = sums.to(M_DTYPE)
        if WRITE:
            store(m, offsets, rounded, inside, MASKED)
        # In float64, which holds the squares of tiny and of large numbers; zeros where masked.
        wide = rounded.to(tl.float64)
        squares += wide * wide
    # Summed before the return, so that the caller's two branches need no common layout.
    return tl.sum(squares)


@triton.jit
def _finish_norm(
    total, block, tensor, blocks, first, slots, tickets, partial, norms, SUMS: tl.constexpr
):
    """Store a block's sum of squares; the last block of a tensor adds up all and takes the root.

    Args:
        total: the block's sum of squares, float64.
        block: its number in the launch.
        tensor: its tensor in the launch.
        blocks: how many blocks this tensor has.
        first: (count,) int32, the first block of each tensor.
        slots: (count,) int32, each tensor's position in the list, and so in results.
        tickets: (count,) int32, how many blocks of each tensor have finished; zeros between
            launches.
        partial: (blocks of the launch,) float64, sums of squares of blocks.
        norms: written at the tensor's slot, (tensors of the list,) float32.
        SUMS: partial sums that are added at a time.
    """
    tl.store(partial + block, total)
    # The partial sum must be in memory before the ticket is drawn.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + tensor, 1, sem="acq_rel")
    if ticket == blocks - 1:
        tl.debug_barrier()
        # Any block may be the last. All would add up in the same order, so timing changes no bit.
        norm = root_of_sums(partial, tl.load(first + tensor), blocks, SUMS)
        tl.store(norms + tl.load(slots + tensor), norm)
        tl.store(tickets + tensor, 0)


@triton.jit
def momentum_kernel(
    table, numel, of, chunk, first, slots, tickets, partial, norms, count, moves,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, HAS_G: tl.constexpr, WRITE: tl.constexpr,
    GUARDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: write mu M + G to M, or take part in its norm.

    Columns of the table: addresses of M, and of G if HAS_G; mu if HAS_G.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        first: (count,) int32, the first block of each tensor.
        slots: (count,) int32, each tensor's position in the list, and so in results.
        tickets: (count,) int32, how many blocks of each tensor have finished; zeros between
            launches.
        partial: written unless WRITE, (blocks,) float64, sums of squares of blocks.
        norms: written unless WRITE, (tensors of the list,) float32.
        count: tensors of the launch.
        moves: () bool; where it is false nothing is written. Not read unless GUARDED.
        M_DTYPE: of momenta.
        G_DTYPE: of gradients.
        HAS_G: whether there are gradients; else norms are those of M.
        WRITE: whether to write the sums; else their norm is computed.
        GUARDED: whether there is such a flag.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
        SUMS: partial sums that are added at a time.
    """
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    m_address = tl.load(table + tensor)
    g_address = m_address
    mu = 1.0
    if HAS_G:
        g_address = tl.load(table + count + tensor)
        mu = tl.load(numbers(table, 2 * count) + tensor)
    if (start + CHUNK <= n) & (((m_address | g_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        total = _chunk(m, g, mu, start, n, M_DTYPE, HAS_G, WRITE, False, CHUNK, BLOCK)
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        total = _chunk(m, g, mu, start, n, M_DTYPE, HAS_G, WRITE, True, CHUNK, BLOCK)
    if not WRITE:
        blocks = tl.maximum((n + CHUNK - 1) // CHUNK, 1).to(tl.int32)
        _finish_norm(total, block, tensor, blocks, first, slots, tickets, partial, norms, SUMS)


def norms(X: Sequence[Tensor]) -> Tensor:
    """See :func:`curvadion.ops.norms`."""
    return _run(elementwise([X]), [], write=False)


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms`."""
    return _run(elementwise([M], [G]), [mu], write=False)


def accumulate_(
    M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float], moves: Tensor | None = None
) -> None:
    """See :func:`curvadion.ops.accumulate_`.

    Args:
        M: momenta, float32, bfloat16 or float16.
        G: gradients, of M's shapes and any of these dtypes; copied where the strides differ.
        mu: a number per tensor.
        moves: () bool on the device, or None to write in any case.
    """
    _run(elementwise([M], [G]), [mu], write=True, moves=moves)


def _run(
    lists: Sequence[Sequence[Tensor]],
    factors: Sequence[Sequence[float]],
    *,
    write: bool,
    moves: Tensor | None = None,
) -> Tensor:
    """Write mu M + G to M, or return its norms.

    Args:
        lists: M alone, or M and G, of equal shapes and strides.
        factors: [mu], a number per tensor; [] without G.
        write: whether to write the sums; else their norms are computed.
        moves: () bool on the device, or None to write in any case.

    Returns:
        Frobenius norms, (tensors,) float32, of M without G; (0,) with ``write``.
    """
    count = len(lists[0])
    device = lists[0][0].device
    result = torch.empty(0 if write else count, dtype=torch.float32, device=device)
    for launch, dtypes in launches(lists):
        m_dtype = dtypes[0]
        g_dtype = dtypes[1] if len(lists) > 1 else m_dtype
        partial = torch.empty(0 if write else launch.blocks, dtype=torch.float64, device=device)
        with on(device):
            run(
                momentum_kernel, (launch.blocks,),
                launch.table(lists, factors),
                *launch.index.on_stream(), launch.tickets(device), partial, result, launch.count,
                result if moves is None else moves,
                M_DTYPE=DTYPES[m_dtype], G_DTYPE=DTYPES[g_dtype], HAS_G=bool(factors),
                WRITE=write, GUARDED=moves is not None, CHUNK=CHUNK, BLOCK=BLOCK, SUMS=SUMS,
            )  # fmt: skip
    return result
