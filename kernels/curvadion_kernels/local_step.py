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
    """Update the elements [start, start + CHUNK)."""
    for i in range(0, CHUNK, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        here = at < n
        gradient = load_float32(g, at, here, MASKED)
        weights = decay * load_float32(x, at, here, MASKED) - step * gradient
        if SEEDED:
            store(x, at, stochastically(weights, at, seed, X_DTYPE), here, MASKED)
        else:
            store(x, at, to_nearest(weights, X_DTYPE), here, MASKED)
        if HAS_M:
            momentum = mu * load_float32(m, at, here, MASKED) + gradient
            store(m, at, to_nearest(momentum, M_DTYPE), here, MASKED)


@triton.jit
def local_step_kernel(
    table, numel, of, chunk, count, moves,
    X_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, HAS_M: tl.constexpr,
    SEEDED: tl.constexpr, GUARDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor. The table holds X, M if any, G; step, decay, mu; seeds if any."""
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    x_address = tl.load(table + t)
    m_address = tl.load(table + count + t)
    g_address = tl.load(table + (2 if HAS_M else 1) * count + t)
    scalars = table + (3 if HAS_M else 2) * count
    step = tl.load(numbers(scalars, 0) + t)
    decay = tl.load(numbers(scalars, count) + t)
    mu = tl.load(numbers(scalars, 2 * count) + t)
    seed = tl.zeros((), tl.uint32)
    if SEEDED:
        seed = tl.load(scalars + 3 * count + t).to(tl.uint32)
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
    """See :func:`curvadion.ops.local_step_`."""
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
