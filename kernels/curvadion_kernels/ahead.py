"""Around a step's flag: norms and the flag before it, and momentum and look-ahead in one pass."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.ahead import LARGEST_EXPONENT, LENGTH_EXPONENT, NAN_BITS
from curvadion.ops.tensors import Unsupported, elementwise
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on, run
from curvadion_kernels.numbers import DTYPES, load_float32, numbers, store, to_nearest

# Partial sums or norms that one program reads at a time.
SUMS = 1024

# Globals that kernels read must be constexprs.
_LENGTH_EXPONENT = tl.constexpr(LENGTH_EXPONENT)
_LARGEST_EXPONENT = tl.constexpr(LARGEST_EXPONENT)
_NAN_BITS = tl.constexpr(NAN_BITS)


@triton.jit
def _squares(
    m, g, mu, share, start, n,
    M_DTYPE: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of squares over elements [start, start + CHUNK): of m + (share - 1) g, and of g.

    With m <- mu m + g as M_DTYPE holds it.
    """
    squares = tl.zeros((BLOCK,), tl.float64)
    of_gradient = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, CHUNK, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        here = at < n
        gradient = load_float32(g, at, here, MASKED)
        momentum = to_nearest(mu * load_float32(m, at, here, MASKED) + gradient, M_DTYPE)
        # In float64, which holds the squares of tiny and of large numbers; zeros where masked.
        wide = (momentum.to(tl.float32) + (share - 1.0) * gradient).to(tl.float64)
        squares += wide * wide
        alone = gradient.to(tl.float64)
        of_gradient += alone * alone
    # Summed here, so that each caller can lay out its numbers in its own way.
    return tl.sum(squares), tl.sum(of_gradient)


@triton.jit
def _root_of_sums(partial, begin, blocks, SUMS: tl.constexpr):
    """The root of the sum of a tensor's partial sums, in their order."""
    sums = tl.zeros((SUMS,), tl.float64)
    done = 0
    while done < blocks:
        j = done + tl.arange(0, SUMS)
        sums += tl.load(partial + begin + j, j < blocks, 0.0, cache_modifier=".cg")
        done += SUMS
    return tl.sqrt(tl.sum(sums)).to(tl.float32)


@triton.jit
def lengths_kernel(
    table, numel, of, chunk, first, slots, tickets, partial, partial_gradients, lengths, norms,
    count,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """One chunk's part in two norms of its tensor; table: M, G, then mu and share.

    The block that finishes a tensor last adds up all. Its order does not depend on timing.
    """
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    m_address = tl.load(table + t)
    g_address = tl.load(table + count + t)
    mu = tl.load(numbers(table, 2 * count) + t)
    share = tl.load(numbers(table, 3 * count) + t)
    if (start + CHUNK <= n) & (((m_address | g_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        total, of_gradient = _squares(m, g, mu, share, start, n, M_DTYPE, False, CHUNK, BLOCK)
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        total, of_gradient = _squares(m, g, mu, share, start, n, M_DTYPE, True, CHUNK, BLOCK)
    tl.store(partial + block, total)
    tl.store(partial_gradients + block, of_gradient)
    # The partial sums must be in memory before the ticket is drawn.
    tl.debug_barrier()
    blocks = tl.maximum((n + CHUNK - 1) // CHUNK, 1).to(tl.int32)
    ticket = tl.atomic_add(tickets + t, 1, sem="acq_rel")
    if ticket == blocks - 1:
        tl.debug_barrier()
        begin = tl.load(first + t)
        slot = tl.load(slots + t)
        tl.store(lengths + slot, _root_of_sums(partial, begin, blocks, SUMS))
        tl.store(norms + slot, _root_of_sums(partial_gradients, begin, blocks, SUMS))
        tl.store(tickets + t, 0)


@triton.jit
def exponent_of(length):
    """See :func:`curvadion.ops.ahead.exponents`; int32."""
    # float32's subnormal numbers are normal in float64, whose bits from 52 on are x + 1022,
    # with length = f 2^x and f in [1/2, 1).
    bits = length.to(tl.float64).to(tl.int64, bitcast=True)
    x = ((bits >> 52) & 0x7FF).to(tl.int32) - 1022
    e = tl.minimum(tl.maximum(x - _LENGTH_EXPONENT, -_LARGEST_EXPONENT), _LARGEST_EXPONENT)
    return tl.where(length > 0, e, -_LARGEST_EXPONENT)


@triton.jit
def power_of_two(e):
    """2^e in float32, exact for |e| <= 126, as tl.exp2 need not be."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _step(
    m, g, out, mu, share, scale, moved, start, n,
    M_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, MASKED: tl.constexpr, STEPS: tl.constexpr,
    GUARDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m <- mu m + g, out <- scale (m + share g) for elements [start, start + CHUNK).

    Without STEPS only out <- scale g.
    """
    for i in range(0, CHUNK, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        here = at < n
        gradient = load_float32(g, at, here, MASKED)
        ahead = scale * gradient
        if STEPS:
            # m <- mu m + g
            momentum = to_nearest(mu * load_float32(m, at, here, MASKED) + gradient, M_DTYPE)
            if GUARDED:
                tl.store(m + at, momentum, (here & moved) if MASKED else moved)
            else:
                store(m, at, momentum, here, MASKED)
            # out <- scale (m + share g)
            ahead = scale * (share * gradient + momentum.to(tl.float32))
        store(out, at, to_nearest(ahead, OUT_DTYPE), here, MASKED)


# A batch's lengths begin anywhere in those of all: not compiled again for each alignment.
@triton.jit(do_not_specialize_on_alignment=["lengths"])
def ahead_kernel(
    table, numel, of, chunk, first, slots, lengths, exponents, traces, count, moves,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    SCALED: tl.constexpr, STEPS: tl.constexpr, GUARDED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor; table: M, G and out, then mu and share, of which some is empty."""
    moved = True
    if GUARDED:
        moved = tl.load(moves) != 0
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    m_address = tl.load(table + t)
    g_address = tl.load(table + count + t)
    out_address = tl.load(table + 2 * count + t)
    mu = tl.load(numbers(table, 3 * count) + t)
    share = tl.load(numbers(table, 4 * count) + t)
    scale = 1.0
    if SCALED:
        slot = tl.load(slots + t)
        length = tl.load(lengths + slot)
        e = exponent_of(length)
        scale = power_of_two(-e)
        if start == 0:
            scaled = length.to(tl.float64) * scale.to(tl.float64)
            tl.store(exponents + slot, e.to(exponents.dtype.element_ty))
            tl.store(traces + slot, (scaled * scaled).to(traces.dtype.element_ty))
    if (start + CHUNK <= n) & (((m_address | g_address | out_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        out = tl.multiple_of(out_address.to(tl.pointer_type(OUT_DTYPE)), 16)
        _step(
            m, g, out, mu, share, scale, moved, start, n,
            M_DTYPE, OUT_DTYPE, False, STEPS, GUARDED, CHUNK, BLOCK,
        )  # fmt: skip
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        out = out_address.to(tl.pointer_type(OUT_DTYPE))
        _step(
            m, g, out, mu, share, scale, moved, start, n,
            M_DTYPE, OUT_DTYPE, True, STEPS, GUARDED, CHUNK, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["norms"])
def verdict_kernel(
    norms, signal, owner, word, moves, count, largest_norm,
    HAS_SIGNAL: tl.constexpr, HAS_OWNER: tl.constexpr, FIRST: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: word and flag of all norms."""
    wrong = tl.zeros((SUMS,), tl.int32)
    positive = tl.zeros((SUMS,), tl.int32)
    for start in range(0, count, SUMS):
        at = start + tl.arange(0, SUMS)
        norm = tl.load(norms + at, at < count, 0.0)
        # A comparison with NaN is false.
        wrong = tl.where(norm < largest_norm, wrong, 1)
        positive = tl.where(norm > 0, 1, positive)
    finite = tl.max(wrong) == 0
    bits = tl.full((), 0, tl.int64)
    if HAS_SIGNAL:
        value = tl.load(signal)
        finite = finite & (value == value)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    largest = tl.where(finite, bits, _NAN_BITS) << 32
    if HAS_OWNER:
        largest = largest | tl.load(owner)
    if FIRST:
        largest = largest | (tl.max(positive).to(tl.int64) << 31)
    tl.store(word, largest)
    tl.store(moves, finite)


@triton.jit
def heeded_kernel(words, moves):
    """One program: the flag of words that have been exchanged."""
    finite = (tl.load(words) >> 32) != _NAN_BITS
    tl.store(moves, finite & (tl.load(words + 1) == -tl.load(words + 2)))


def lengths(
    M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float], share: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.lengths`; a tensor may be in both lists.

    Args:
        M: float32, bfloat16 or float16.
        G: of M's shapes, in these dtypes.
        mu: a number a tensor.
        share: a number a tensor.

    Returns:
        Both (len(G),) float32.
    """
    lists = elementwise([M], [G])
    device = M[0].device
    found = torch.empty(len(M), dtype=torch.float32, device=device)
    norms = torch.empty_like(found)
    for launch, (m_dtype, g_dtype) in launches(lists):
        partial = torch.empty(launch.blocks, dtype=torch.float64, device=device)
        partial_gradients = torch.empty_like(partial)
        with on(device):
            run(
                lengths_kernel, (launch.blocks,),
                launch.table(lists, [mu, share]),
                *launch.index.on_stream(), launch.tickets(device), partial, partial_gradients,
                found, norms, launch.count, M_DTYPE=DTYPES[m_dtype], G_DTYPE=DTYPES[g_dtype],
                CHUNK=CHUNK, BLOCK=BLOCK, SUMS=SUMS,
            )  # fmt: skip
    return found, norms


def ahead_(
    M: Sequence[Tensor],
    G: Sequence[Tensor],
    mu: Sequence[float],
    share: Sequence[float],
    out: Sequence[Tensor],
    lengths: Tensor | None,
    moves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.ahead_`.

    Args:
        M: float32, bfloat16 or float16.
        G: of M's shapes, in these dtypes.
        mu: a number a tensor.
        share: a number a tensor.
        out: of M's shapes and strides, in these dtypes.
        lengths: (len(M),) float32 or float64, or None.
        moves: () bool on the device, or None.

    Returns:
        Exponents and sums of squares, (len(M),), or (0,) without lengths.
    """
    M, out, G = elementwise([M, out], [G])
    return _run([M, G, out], [mu, share], lengths, moves)


def scale(X: Sequence[Tensor], out: Sequence[Tensor], lengths: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.scale`."""
    X = [matrix for stack in X for matrix in stack]
    out = [matrix for stack in out for matrix in stack]
    X, out = elementwise([X, out])
    return _run([X, X, out], [None, None], lengths, None)


def _run(
    lists: Sequence[Sequence[Tensor]],
    factors: Sequence[Sequence[float] | None],
    lengths: Tensor | None,
    moves: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for a list; return exponents and sums of squares.

    Args:
        lists: M, G and out.
        factors: mu and share; None only scales G.
        lengths: (count,), or None.
        moves: () bool, or None.
    """
    device = lists[0][0].device
    if lengths is None:
        given = torch.empty(0, dtype=torch.float32, device=device)
    else:
        given = lengths.contiguous()
    e = torch.empty_like(given)
    trace = torch.empty_like(given)
    for launch, (m_dtype, g_dtype, out_dtype) in launches(lists):
        with on(device):
            run(
                ahead_kernel, (launch.blocks,),
                launch.table(lists, factors),
                *launch.index.on_stream(), given, e, trace, launch.count,
                given if moves is None else moves,
                M_DTYPE=DTYPES[m_dtype], G_DTYPE=DTYPES[g_dtype], OUT_DTYPE=DTYPES[out_dtype],
                SCALED=lengths is not None, STEPS=factors[0] is not None,
                GUARDED=moves is not None, CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip
    return e, trace


def verdict(
    norms: Tensor,
    signal: Tensor | None,
    owner: Tensor | None,
    largest_norm: float,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.verdict`.

    Args:
        norms: (l,) with l > 0, float32 or float64.
        signal: () float32, or None.
        owner: () int64, or None.
        largest_norm: a float32 number.
        first: whether this is a first step.

    Returns:
        (1,) int64 and () bool.
    """
    if norms.dtype not in (torch.float32, torch.float64):
        raise Unsupported
    device = norms.device
    word = torch.empty(1, dtype=torch.int64, device=device)
    moves = torch.empty((), dtype=torch.bool, device=device)
    with on(device):
        run(
            verdict_kernel, (1,),
            norms.contiguous(), word if signal is None else signal,
            word if owner is None else owner, word, moves, len(norms), float(largest_norm),
            HAS_SIGNAL=signal is not None, HAS_OWNER=owner is not None, FIRST=first, SUMS=SUMS,
        )  # fmt: skip
    return word, moves


def heeded(words: Tensor) -> Tensor:
    """See :func:`curvadion.ops.heeded`."""
    moves = torch.empty((), dtype=torch.bool, device=words.device)
    with on(words.device):
        run(heeded_kernel, (1,), words.contiguous(), moves, num_warps=1)
    return moves
