"""The local step over a list, in one launch: X <- decay X - step G, and M <- mu M + G."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.tensors import elementwise
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on, run
from curvadion_kernels.numbers import (
    DTYPES,
    load_float32,
    numbers,
    stochastically,
    store,
    to_nearest,
)


@triton.jit
def _chunk(
    x, g, m, step, decay, mu, seed, start, n,
    X_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, HAS_M: tl.constexpr, SEEDED: tl.constexpr,
    MASKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the elements [start, start + CHUNK) of one tensor.

    Args:
        x: pointer to the tensor's weights, X_DTYPE.
        g: pointer to its gradients, of any float dtype.
        m: pointer to its momenta, M_DTYPE; used only with HAS_M.
        step: the factor of gradients in the step of the weights.
        decay: the factor of the weights.
        mu: the factor of momenta.
        seed: uint32, used only if SEEDED.
        start: the chunk's first element, int64.
        n: elements of the tensor, int64.
        X_DTYPE: of weights.
        M_DTYPE: of momenta.
        HAS_M: whether momenta are updated too.
        SEEDED: whether bfloat16 weights are rounded up or down at random.
        MASKED: whether the chunk may reach beyond the tensor, or addresses may be unaligned.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
    """
    for i in range(0, CHUNK, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        inside = offsets < n
        gradient = load_float32(g, offsets, inside, MASKED)
        # X <- decay X - step G
        weights = decay * load_float32(x, offsets, inside, MASKED) - step * gradient
        if SEEDED:
            store(x, offsets, stochastically(weights, offsets, seed, X_DTYPE), inside, MASKED)
        else:
            store(x, offsets, to_nearest(weights, X_DTYPE), inside, MASKED)
        if HAS_M:
            # M <- mu M + G
            momentum = mu * load_float32(m, offsets, inside, MASKED) + gradient
            store(m, offsets, to_nearest(momentum, M_DTYPE), inside, MASKED)


@triton.jit
def local_step_kernel(
    table, numel, of, chunk, count, moves,
    X_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, HAS_M: tl.constexpr,
    SEEDED: tl.constexpr, GUARDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: X <- decay X - step G and, with momenta, M <- mu M + G.

    Columns of the table: addresses of X, of M if HAS_M, and of G; then step, decay and mu; then
    seeds if SEEDED.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        count: tensors of the launch.
        moves: () bool; where it is false nothing is written. Not read unless GUARDED.
        X_DTYPE: of weights.
        G_DTYPE: of gradients.
        M_DTYPE: of momenta.
        HAS_M: whether there are momenta.
        SEEDED: whether bfloat16 weights are rounded up or down at random.
        GUARDED: whether there is such a flag.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
    """
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    x_address = tl.load(table + tensor)
    # Without momenta this is the address of gradients, which is not used.
    m_address = tl.load(table + count + tensor)
    g_address = tl.load(table + (2 if HAS_M else 1) * count + tensor)
    scalars = table + (3 if HAS_M else 2) * count
    step = tl.load(numbers(scalars, 0) + tensor)
    decay = tl.load(numbers(scalars, count) + tensor)
    mu = tl.load(numbers(scalars, 2 * count) + tensor)
    seed = tl.zeros((), tl.uint32)
    if SEEDED:
        seed = tl.load(scalars + 3 * count + tensor).to(tl.uint32)
    addresses = x_address | g_address
    if HAS_M:
        addresses |= m_address
    if (start + CHUNK <= n) & ((addresses & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        x = tl.multiple_of(x_address.to(tl.pointer_type(X_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        _chunk(
            x, g, m, step, decay, mu, seed, start, n,
            X_DTYPE, M_DTYPE, HAS_M, SEEDED, False, CHUNK, BLOCK,
        )  # fmt: skip
    else:
        x = x_address.to(tl.pointer_type(X_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        m = m_address.to(tl.pointer_type(M_DTYPE))
        _chunk(
            x, g, m, step, decay, mu, seed, start, n,
            X_DTYPE, M_DTYPE, HAS_M, SEEDED, True, CHUNK, BLOCK,
        )  # fmt: skip


def local_step_(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    step: Sequence[float],
    decay: Sequence[float],
    M: Sequence[Tensor] = (),
    mu: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
    moves: Tensor | None = None,
) -> None:
    """See :func:`curvadion.ops.local_step_`.

    Args:
        X: weights, float32, bfloat16 or float16.
        G: gradients, of X's shapes and any of these dtypes; copied where the strides differ.
        step: a number, or a tensor of shape () on the device, per tensor.
        decay: likewise.
        M: momenta, of X's shapes and strides, and any of these dtypes; () if there are none.
        mu: a number per tensor, if there are momenta.
        seeds: an integer below 2**32 per tensor for random rounding; None rounds to nearest.
        moves: () bool on the device, or None to write in any case.
    """
    lists = elementwise([X, M] if M else [X], [G])
    for launch, dtypes in launches(lists):
        table = launch.table(lists, [step, decay, mu if M else None], seeds)
        with on(table.device):
            run(
                local_step_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count,
                table if moves is None else moves,
                X_DTYPE=DTYPES[dtypes[0]], G_DTYPE=DTYPES[dtypes[-1]], M_DTYPE=DTYPES[dtypes[1]],
                HAS_M=bool(M), SEEDED=seeds is not None, GUARDED=moves is not None,
                CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip
