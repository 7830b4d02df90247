"""Around a step's flag: norms and the flag before it, and momentum and look-ahead in one pass."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.ahead import LARGEST_EXPONENT, LENGTH_EXPONENT
from curvadion.ops.tensors import Unsupported, elementwise
from curvadion.ops.verdict import NAN_BITS
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
from curvadion_kernels.state_codes import (
    STATE_DTYPES,
    as_stored,
    elements_or,
    float64_zeros,
    places,
    read_state,
    write_state,
)

# Globals that kernels read must be constexprs.
_LENGTH_EXPONENT = tl.constexpr(LENGTH_EXPONENT)
_LARGEST_EXPONENT = tl.constexpr(LARGEST_EXPONENT)
_NAN_BITS = tl.constexpr(NAN_BITS)


@triton.jit
def _squares(
    m, g, mu, share, start, n,
    M_DTYPE: tl.constexpr, CODED: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of squares over the elements [start, start + CHUNK) of one tensor.

        S = m + (share - 1) g    with m <- mu m + g, rounded (unless to codes) but not written

    Args:
        m: pointer to the tensor's momenta, or to their codes.
        g: pointer to its gradients, of any float dtype.
        mu: the factor of momenta.
        share: the factor of gradients in S, after the one in m.
        start: the chunk's first element, int64.
        n: elements of the tensor, int64.
        M_DTYPE: of momenta, or of their codes.
        CODED: whether momenta are codes.
        MASKED: whether the chunk may reach beyond the tensor, or addresses may be unaligned.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.

    Returns:
        The sums of the squares of S and of g, float64.
    """
    squares = float64_zeros(CODED, BLOCK)
    gradient_squares = float64_zeros(CODED, BLOCK)
    for i in range(0, CHUNK, BLOCK):
        begin = start + i
        offsets = places(begin, CODED, BLOCK)
        gradient = load_float32(g, offsets, offsets < n, MASKED)
        # m <- mu m + g
        momentum = mu * read_state(m, begin, n, CODED, False, MASKED, BLOCK) + gradient
        momentum = as_stored(momentum, M_DTYPE, CODED)
        # S = m + (share - 1) g, in float64, which holds the squares of tiny and of large numbers;
        # zeros where masked.
        wide = (momentum + (share - 1.0) * gradient).to(tl.float64)
        squares += wide * wide
        wide_gradient = gradient.to(tl.float64)
        gradient_squares += wide_gradient * wide_gradient
    # Summed before the return, so that the caller's two branches need no common layout.
    return tl.sum(squares), tl.sum(gradient_squares)


@triton.jit
def lengths_kernel(
    table, numel, of, chunk, first, slots, tickets, partial, partial_gradients, lengths, norms,
    count,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, CODED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One chunk's part in two norms of its tensor: |M + (share - 1) G| with M <- mu M + G, and |G|.

    The block that finishes a tensor last adds up all. Its order does not depend on timing.
    Columns of the table: addresses of M and of G; mu and share.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        first: (count,) int32, the first block of each tensor.
        slots: (count,) int32, each tensor's position in the list, and so in results.
        tickets: (count,) int32, how many blocks of each tensor have finished; zeros between
            launches.
        partial: written, (blocks,) float64, a block's sum of the squares of the first norm.
        partial_gradients: written, (blocks,) float64, its sum of the squares of gradients.
        lengths: written, (tensors of the list,) float32, the first norms.
        norms: written, (tensors of the list,) float32, those of gradients.
        count: tensors of the launch.
        M_DTYPE: of momenta, or of their codes.
        G_DTYPE: of gradients.
        CODED: whether momenta are codes.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
        SUMS: partial sums that are added at a time.
    """
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    m_address = tl.load(table + tensor)
    g_address = tl.load(table + count + tensor)
    mu = tl.load(numbers(table, 2 * count) + tensor)
    share = tl.load(numbers(table, 3 * count) + tensor)
    if (start + CHUNK <= n) & (((m_address | g_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        total, gradient_total = _squares(
            m, g, mu, share, start, n, M_DTYPE, CODED, False, CHUNK, BLOCK
        )
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        total, gradient_total = _squares(
            m, g, mu, share, start, n, M_DTYPE, CODED, True, CHUNK, BLOCK
        )
    tl.store(partial + block, total)
    tl.store(partial_gradients + block, gradient_total)
    # The partial sums must be in memory before the ticket is drawn.
    tl.debug_barrier()
    blocks = tl.maximum((n + CHUNK - 1) // CHUNK, 1).to(tl.int32)
    ticket = tl.atomic_add(tickets + tensor, 1, sem="acq_rel")
    if ticket == blocks - 1:
        tl.debug_barrier()
        begin = tl.load(first + tensor)
        slot = tl.load(slots + tensor)
        tl.store(lengths + slot, root_of_sums(partial, begin, blocks, SUMS))
        tl.store(norms + slot, root_of_sums(partial_gradients, begin, blocks, SUMS))
        tl.store(tickets + tensor, 0)


@triton.jit
def exponent_of(length):
    """e such that 2^-e length is in [2^6, 2^7), int32; see :func:`curvadion.ops.ahead.exponents`.

    Args:
        length: float32 or float64.
    """
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
    m, g, out, mu, share, scale, seed, moved, start, n,
    M_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, STEPS: tl.constexpr, CODED: tl.constexpr,
    SEEDED: tl.constexpr, GUARDED: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the elements [start, start + CHUNK) of one tensor.

        m <- mu m + g,    out <- scale (m + share g)    and without STEPS only out <- scale g

    Codes of m are made after out has been computed.

    Args:
        m: pointer to the tensor's momenta, or to their codes; not used without STEPS.
        g: pointer to its gradients, of any float dtype.
        out: pointer to the result, OUT_DTYPE.
        mu: the factor of momenta.
        share: the factor of gradients.
        scale: a power of two, so that out is rounded once.
        seed: uint32, of the tensor's codes.
        moved: whether m may be written, bool; out is written in any case.
        start: the chunk's first element, int64.
        n: elements of the tensor, int64.
        M_DTYPE: of momenta, or of their codes.
        OUT_DTYPE: of the result.
        STEPS: whether there are momenta; else g is only scaled.
        CODED: whether momenta are codes.
        SEEDED: whether codes are rounded up or down at random.
        GUARDED: whether ``moved`` counts.
        MASKED: whether the chunk may reach beyond the tensor, or addresses may be unaligned.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
    """
    for i in range(0, CHUNK, BLOCK):
        begin = start + i
        offsets = places(begin, CODED, BLOCK)
        inside = offsets < n
        gradient = load_float32(g, offsets, inside, MASKED)
        if STEPS:
            # m <- mu m + g
            momentum = mu * read_state(m, begin, n, CODED, False, MASKED, BLOCK) + gradient
            momentum = as_stored(momentum, M_DTYPE, CODED)
            # out <- scale (m + share g), first: codes need the registers
            ahead = scale * (share * gradient + momentum)
            store(out, offsets, to_nearest(ahead, OUT_DTYPE), inside, MASKED)
            write_state(
                m, begin, momentum, n, seed, moved,
                M_DTYPE, CODED, False, SEEDED, GUARDED, MASKED, BLOCK,
            )  # fmt: skip
        else:
            # out <- scale g
            store(out, offsets, to_nearest(scale * gradient, OUT_DTYPE), inside, MASKED)


# A batch's lengths begin anywhere in those of all: not compiled again for each alignment.
@triton.jit(do_not_specialize_on_alignment=["lengths"])
def ahead_kernel(
    table, numel, of, chunk, first, slots, lengths, exponents, traces, count, moves,
    M_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    SCALED: tl.constexpr, STEPS: tl.constexpr, CODED: tl.constexpr, SEEDED: tl.constexpr,
    GUARDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: M <- mu M + G, out <- 2^-e (M + share G), or only out <- 2^-e G.

    Columns of the table: addresses of M, G and out; mu and share, which are empty without STEPS;
    then seeds if SEEDED.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        first: (count,) int32, the first block of each tensor.
        slots: (count,) int32, each tensor's position in the list, and so in results.
        lengths: (tensors of the list,) float32 or float64, the norms of M + share G.
        exponents: written, (tensors of the list,) in the dtype of lengths: e of each.
        traces: written, likewise: (2^-e length)^2.
        count: tensors of the launch.
        moves: () bool; where it is false M stays, but out is written. Not read unless GUARDED.
        M_DTYPE: of momenta, or of their codes.
        G_DTYPE: of gradients.
        OUT_DTYPE: of the result.
        SCALED: whether there are lengths; else e = 0, and the two outputs are not written.
        STEPS: whether there are momenta.
        CODED: whether they are codes.
        SEEDED: whether codes are rounded up or down at random.
        GUARDED: whether there is such a flag.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
    """
    moved = True
    if GUARDED:
        moved = tl.load(moves) != 0
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    m_address = tl.load(table + tensor)
    g_address = tl.load(table + count + tensor)
    out_address = tl.load(table + 2 * count + tensor)
    mu = tl.load(numbers(table, 3 * count) + tensor)
    share = tl.load(numbers(table, 4 * count) + tensor)
    seed = tl.zeros((), tl.uint32)
    if SEEDED:
        seed = tl.load(table + 5 * count + tensor).to(tl.uint32)
    scale = 1.0
    if SCALED:
        slot = tl.load(slots + tensor)
        length = tl.load(lengths + slot)
        exponent = exponent_of(length)
        # scale = 2^-e
        scale = power_of_two(-exponent)
        # The first block of a tensor writes its numbers.
        if start == 0:
            # trace = (2^-e length)^2
            scaled = length.to(tl.float64) * scale.to(tl.float64)
            tl.store(exponents + slot, exponent.to(exponents.dtype.element_ty))
            tl.store(traces + slot, (scaled * scaled).to(traces.dtype.element_ty))
    if (start + CHUNK <= n) & (((m_address | g_address | out_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        out = tl.multiple_of(out_address.to(tl.pointer_type(OUT_DTYPE)), 16)
        _step(
            m, g, out, mu, share, scale, seed, moved, start, n,
            M_DTYPE, OUT_DTYPE, STEPS, CODED, SEEDED, GUARDED, False, CHUNK, BLOCK,
        )  # fmt: skip
    else:
        m = m_address.to(tl.pointer_type(M_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        out = out_address.to(tl.pointer_type(OUT_DTYPE))
        _step(
            m, g, out, mu, share, scale, seed, moved, start, n,
            M_DTYPE, OUT_DTYPE, STEPS, CODED, SEEDED, GUARDED, True, CHUNK, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["norms"])
def verdict_kernel(
    norms, signal, owner, word, moves, count, largest_norm,
    HAS_SIGNAL: tl.constexpr, HAS_OWNER: tl.constexpr, FIRST: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: whether all norms are finite, and the word by which ranks agree on that.

    :func:`curvadion.ops.verdict` says what the bits of the word are.

    Args:
        norms: (count,) float32 or float64.
        signal: () float32, not negative, or NaN; read only with HAS_SIGNAL.
        owner: () int64; read only with HAS_OWNER.
        word: written, (1,) int64.
        moves: written, () bool: whether all norms are finite and the signal is not NaN.
        count: of norms.
        largest_norm: a float32 number; a norm that reaches it counts as infinite.
        HAS_SIGNAL: whether there is a signal; else it is zero.
        HAS_OWNER: whether there is an owner; else it is zero.
        FIRST: whether this is a first step.
        SUMS: norms that are read at a time.
    """
    wrong = tl.zeros((SUMS,), tl.int32)
    positive = tl.zeros((SUMS,), tl.int32)
    for start in range(0, count, SUMS):
        places = start + tl.arange(0, SUMS)
        norm = tl.load(norms + places, places < count, 0.0)
        # A comparison with NaN is false, so NaN is wrong, too.
        wrong = tl.where(norm < largest_norm, wrong, 1)
        positive = tl.where(norm > 0, 1, positive)
    finite = tl.max(wrong) == 0
    signal_bits = tl.full((), 0, tl.int64)
    if HAS_SIGNAL:
        value = tl.load(signal)
        finite = finite & (value == value)
        signal_bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    word_bits = tl.where(finite, signal_bits, _NAN_BITS) << 32
    if HAS_OWNER:
        word_bits = word_bits | tl.load(owner)
    if FIRST:
        word_bits = word_bits | (tl.max(positive).to(tl.int64) << 31)
    tl.store(word, word_bits)
    tl.store(moves, finite)


@triton.jit
def heeded_kernel(words, moves):
    """One program: the flag of words that have been exchanged.

    Args:
        words: (3,) int64: the largest word of all ranks, and two that add up to zero if they agree.
        moves: written, () bool.
    """
    finite = (tl.load(words) >> 32) != _NAN_BITS
    tl.store(moves, finite & (tl.load(words + 1) == -tl.load(words + 2)))


def lengths(
    M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float], share: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.lengths`; a tensor may be in both lists.

    Args:
        M: float32, bfloat16 or float16, or vectors of codes.
        G: of M's shapes, in these dtypes.
        mu: a number a tensor.
        share: a number a tensor.

    Returns:
        Both (len(G),) float32.
    """
    _, G = elementwise([elements_or(G, M)], [G])
    device = M[0].device
    lengths_of_sums = torch.empty(len(M), dtype=torch.float32, device=device)
    norms = torch.empty_like(lengths_of_sums)
    for launch, (g_dtype, m_dtype) in launches([G, M]):
        partial = torch.empty(launch.blocks, dtype=torch.float64, device=device)
        partial_gradients = torch.empty_like(partial)
        with on(device):
            run(
                lengths_kernel, (launch.blocks,),
                launch.table([M, G], [mu, share]),
                *launch.index.on_stream(), launch.tickets(device), partial, partial_gradients,
                lengths_of_sums, norms, launch.count,
                M_DTYPE=STATE_DTYPES[m_dtype], G_DTYPE=DTYPES[g_dtype],
                CODED=m_dtype == torch.int8, CHUNK=CHUNK, BLOCK=BLOCK, SUMS=SUMS,
            )  # fmt: skip
    return lengths_of_sums, norms


def ahead_(
    M: Sequence[Tensor],
    G: Sequence[Tensor],
    mu: Sequence[float],
    share: Sequence[float],
    out: Sequence[Tensor],
    lengths: Tensor | None,
    moves: Tensor | None = None,
    seeds: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.ahead_`; also the operation of lists with codes.

    Args:
        M: float32, bfloat16 or float16, or vectors of codes.
        G: of M's shapes, in these dtypes.
        mu: a number a tensor.
        share: a number a tensor.
        out: of M's shapes and strides, in these dtypes.
        lengths: (len(M),) float32 or float64, or None.
        moves: () bool on the device, or None.
        seeds: an integer below 2^32 a tensor, or None.

    Returns:
        Exponents and sums of squares, (len(M),), or (0,) without lengths.
    """
    _, out, G = elementwise([elements_or(out, M), out], [G])
    return _run([M, G, out], [mu, share], lengths, moves, seeds)


coded_lengths = lengths
coded_ahead_ = ahead_


def scale(X: Sequence[Tensor], out: Sequence[Tensor], lengths: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.scale`.

    Args:
        X: stacks (k, m, n), float32, bfloat16 or float16.
        out: written, of X's shapes and strides, in any of these dtypes.
        lengths: (matrices,) float32 or float64, in the order of the stacks.
    """
    matrices, results = elementwise(
        [
            [matrix for stack in X for matrix in stack],
            [matrix for stack in out for matrix in stack],
        ]
    )
    # Nothing is read or written of the first list, that of momenta.
    return _run([matrices, matrices, results], [None, None], lengths, None, None)


def _run(
    lists: Sequence[Sequence[Tensor]],
    factors: Sequence[Sequence[float] | None],
    lengths: Tensor | None,
    moves: Tensor | None,
    seeds: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for a list; return exponents and sums of squares.

    Args:
        lists: M, G and out.
        factors: mu and share; None only scales G.
        lengths: (count,) float32 or float64, or None, with which nothing is scaled.
        moves: () bool, or None.
        seeds: of codes, or None to round them to nearest.

    Returns:
        Both (count,) in the dtype of the lengths, or (0,) without lengths.
    """
    M, G, out = lists
    device = G[0].device
    if lengths is None:
        all_lengths = torch.empty(0, dtype=torch.float32, device=device)
    else:
        all_lengths = lengths.contiguous()
    exponents = torch.empty_like(all_lengths)
    traces = torch.empty_like(all_lengths)
    for launch, (g_dtype, m_dtype, out_dtype) in launches([G, M, out]):
        coded = m_dtype == torch.int8
        seeds_of_launch = seeds if coded else None
        with on(device):
            run(
                ahead_kernel, (launch.blocks,),
                launch.table(lists, factors, seeds_of_launch),
                *launch.index.on_stream(), all_lengths, exponents, traces, launch.count,
                all_lengths if moves is None else moves,
                M_DTYPE=STATE_DTYPES[m_dtype], G_DTYPE=DTYPES[g_dtype],
                OUT_DTYPE=DTYPES[out_dtype],
                SCALED=lengths is not None, STEPS=factors[0] is not None, CODED=coded,
                SEEDED=seeds_of_launch is not None, GUARDED=moves is not None,
                CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip
    return exponents, traces


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
