"""AdamW over a list, in one launch for tensors of equal dtypes, whatever their hyperparameters."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.page import apply
from curvadion.ops.state_codes import is_coded
from curvadion.ops.tensors import Unsupported, elementwise
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on, run
from curvadion_kernels.numbers import DTYPES, load_float32, numbers, store, to_nearest
from curvadion_kernels.state_codes import (
    STATE_DTYPES,
    elements_or,
    places,
    read_state,
    write_state,
)

# With four warps, a thread's elements take all registers that it can have.
OPTIONS = {"num_warps": 8}


@triton.jit
def _chunk(
    x, m, v, g, decay, step_size, beta1, gain1, beta2, gain2, inverse_root, eps, mean_seed,
    square_seed, start, n,
    X_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, CODED: tl.constexpr,
    SEEDED: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the elements [start, start + CHUNK) of one tensor.

    Args:
        x: pointer to the tensor's weights, X_DTYPE.
        m: pointer to the averages of its gradients, or to their codes.
        v: pointer to the averages of their squares, or to codes of their roots.
        g: pointer to its gradients, of any float dtype.
        decay: 1 - lr weight_decay.
        step_size: lr / (1 - beta1^t).
        beta1: the decay of m.
        gain1: 1 - beta1.
        beta2: the decay of v.
        gain2: 1 - beta2.
        inverse_root: 1 / sqrt(1 - beta2^t).
        eps: added to the divisor.
        mean_seed: uint32, of the codes of m.
        square_seed: uint32, of the codes of v.
        start: the chunk's first element, int64.
        n: elements of the tensor, int64.
        X_DTYPE: of weights.
        M_DTYPE: of m, or of its codes.
        V_DTYPE: of v, or of its codes.
        CODED: whether m and v are codes.
        SEEDED: whether codes are rounded up or down at random.
        MASKED: whether the chunk may reach beyond the tensor, or addresses may be unaligned.
        CHUNK: elements of a block.
        BLOCK: elements that the block holds in registers at a time.
    """
    for i in range(0, CHUNK, BLOCK):
        begin = start + i
        offsets = places(begin, CODED, BLOCK)
        inside = offsets < n
        gradient = load_float32(g, offsets, inside, MASKED)
        # m <- beta1 m + (1 - beta1) G
        mean = read_state(m, begin, n, CODED, False, MASKED, BLOCK)
        mean = beta1 * mean + gain1 * gradient
        # v <- beta2 v + (1 - beta2) G^2
        square = read_state(v, begin, n, CODED, True, MASKED, BLOCK)
        square = beta2 * square + gain2 * gradient * gradient
        # sqrt(v) / sqrt(1 - beta2^t) + eps. The faster root takes numbers below 2^-126 for zeros,
        # by which a step without eps would be infinite.
        divisor = tl.sqrt_rn(square) * inverse_root + eps
        # X <- (1 - lr weight_decay) X - lr / (1 - beta1^t) m / divisor
        weights = decay * load_float32(x, offsets, inside, MASKED) - step_size * mean / divisor
        store(x, offsets, to_nearest(weights, X_DTYPE), inside, MASKED)
        write_state(
            m, begin, mean, n, mean_seed, True,
            M_DTYPE, CODED, False, SEEDED, False, MASKED, BLOCK,
        )  # fmt: skip
        write_state(
            v, begin, square, n, square_seed, True,
            V_DTYPE, CODED, True, SEEDED, False, MASKED, BLOCK,
        )  # fmt: skip


@triton.jit
def _complement(logarithm, t):
    """1 - beta^t, float64.

    In float64, because of the difference of close numbers. With a logarithm in float32, the
    relative error is that of one rounding to float32.

    Args:
        logarithm: log2(beta), float32.
        t: the number of the step, float32.
    """
    return 1.0 - tl.exp2(logarithm.to(tl.float64) * t.to(tl.float64))


@triton.jit
def adamw_kernel(
    table, numel, of, chunk, tickets, count, moves,
    X_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,
    CODED: tl.constexpr, SEEDED: tl.constexpr, GUARDED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: an AdamW step.

    Columns of the table: addresses of X, m, v, G and the counters; then the numbers
    decay = 1 - lr weight_decay, lr, eps; beta1, 1 - beta1, log2(beta1); and the same of beta2;
    then seeds of m and of v if SEEDED.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        tickets: (count,) int32, how many blocks of each tensor have finished; zeros between
            launches.
        count: tensors of the launch.
        moves: () bool; where it is false nothing is written. Not read unless GUARDED.
        X_DTYPE: of weights.
        M_DTYPE: of the averages m of gradients, or of their codes.
        V_DTYPE: of the averages v of their squares, or of their codes.
        G_DTYPE: of gradients.
        CODED: whether m and v are codes.
        SEEDED: whether codes are rounded up or down at random.
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
    m_address = tl.load(table + count + tensor)
    v_address = tl.load(table + 2 * count + tensor)
    g_address = tl.load(table + 3 * count + tensor)
    counter = tl.load(table + 4 * count + tensor).to(tl.pointer_type(tl.float32))
    scalars = table + 5 * count
    decay = tl.load(numbers(scalars, 0) + tensor)
    lr = tl.load(numbers(scalars, count) + tensor)
    eps = tl.load(numbers(scalars, 2 * count) + tensor)
    beta1 = tl.load(numbers(scalars, 3 * count) + tensor)
    gain1 = tl.load(numbers(scalars, 4 * count) + tensor)
    logarithm1 = tl.load(numbers(scalars, 5 * count) + tensor)
    beta2 = tl.load(numbers(scalars, 6 * count) + tensor)
    gain2 = tl.load(numbers(scalars, 7 * count) + tensor)
    logarithm2 = tl.load(numbers(scalars, 8 * count) + tensor)
    mean_seed = tl.zeros((), tl.uint32)
    square_seed = tl.zeros((), tl.uint32)
    if SEEDED:
        mean_seed = tl.load(scalars + 9 * count + tensor).to(tl.uint32)
        square_seed = tl.load(scalars + 10 * count + tensor).to(tl.uint32)
    # t <- t + 1. Only the last block stores it: the others may not have read it yet.
    t = tl.load(counter) + 1.0
    # lr / (1 - beta1^t)
    step_size = (lr.to(tl.float64) / _complement(logarithm1, t)).to(tl.float32)
    # 1 / sqrt(1 - beta2^t)
    inverse_root = (1.0 / tl.sqrt(_complement(logarithm2, t))).to(tl.float32)
    if (start + CHUNK <= n) & (((x_address | m_address | v_address | g_address) & 15) == 0):
        # Without a mask and with aligned addresses, loads and stores are 128 bits wide.
        x = tl.multiple_of(x_address.to(tl.pointer_type(X_DTYPE)), 16)
        m = tl.multiple_of(m_address.to(tl.pointer_type(M_DTYPE)), 16)
        v = tl.multiple_of(v_address.to(tl.pointer_type(V_DTYPE)), 16)
        g = tl.multiple_of(g_address.to(tl.pointer_type(G_DTYPE)), 16)
        _chunk(
            x, m, v, g, decay, step_size, beta1, gain1, beta2, gain2, inverse_root, eps,
            mean_seed, square_seed, start, n,
            X_DTYPE, M_DTYPE, V_DTYPE, CODED, SEEDED, False, CHUNK, BLOCK,
        )  # fmt: skip
    else:
        x = x_address.to(tl.pointer_type(X_DTYPE))
        m = m_address.to(tl.pointer_type(M_DTYPE))
        v = v_address.to(tl.pointer_type(V_DTYPE))
        g = g_address.to(tl.pointer_type(G_DTYPE))
        _chunk(
            x, m, v, g, decay, step_size, beta1, gain1, beta2, gain2, inverse_root, eps,
            mean_seed, square_seed, start, n,
            X_DTYPE, M_DTYPE, V_DTYPE, CODED, SEEDED, True, CHUNK, BLOCK,
        )  # fmt: skip
    # All threads have read the counter before the ticket is drawn.
    tl.debug_barrier()
    blocks = tl.maximum((n + CHUNK - 1) // CHUNK, 1).to(tl.int32)
    ticket = tl.atomic_add(tickets + tensor, 1, sem="acq_rel")
    if ticket == blocks - 1:
        # The other blocks have drawn theirs, so no block reads the counter any more.
        tl.store(counter, t)
        tl.store(tickets + tensor, 0)


def adamw_(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    counters: Sequence[Tensor],
    lr: Sequence[float],
    weight_decay: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    moves: Tensor | None = None,
    mean_seeds: Sequence[int] | None = None,
    square_seeds: Sequence[int] | None = None,
) -> None:
    """See :func:`curvadion.ops.adamw_`.

    Args:
        X: weights, float32, bfloat16 or float16.
        G: gradients, of X's shapes and any of these dtypes; copied where the strides differ.
        means: of X's shapes and strides, and any of these dtypes, or vectors of codes.
        squares: likewise; of one tensor both moments are codes, or none.
        counters: float32, of shape (), on X's device.
        lr: a number, or a tensor of shape () on the device, per tensor.
        weight_decay: a number per tensor.
        beta1: the decay of m, per tensor.
        beta2: the decay of v, per tensor.
        eps: a number per tensor.
        moves: a bool on the device, shape (), or None.
        mean_seeds: an integer below 2^32 a tensor, for the codes of m; or None.
        square_seeds: the same for v; both are lists, or none.
    """
    if [*map(is_coded, means)] != [*map(is_coded, squares)]:
        raise Unsupported
    if (mean_seeds is None) != (square_seeds is None):
        raise Unsupported
    like_means, like_squares = (elements_or(X, states) for states in (means, squares))
    *_, G = elementwise([X, like_means, like_squares], [G])
    device = X[0].device
    if any((t.dtype, t.device, t.dim()) != (torch.float32, device, 0) for t in counters):
        raise Unsupported
    # 1 - lr weight_decay. The rates of a group are one object, perhaps a tensor: its product is
    # computed once.
    products: dict[tuple[int, float], float] = {}
    for rate, share in zip(lr, weight_decay, strict=True):
        if (id(rate), share) not in products:
            products[id(rate), share] = 1.0 - rate * share
    decay = [products[id(rate), share] for rate, share in zip(lr, weight_decay, strict=True)]
    scalars = [decay, lr, eps]
    for betas in (beta1, beta2):
        # The table's numbers are float32: what follows from a beta that has been rounded to it
        # would be inaccurate.
        gains = [1.0 - beta for beta in betas]
        logarithms = [apply(_logarithm, beta) for beta in betas]
        scalars += [betas, gains, logarithms]
    lists = [X, means, squares, G]
    for launch, dtypes in launches(lists):
        coded = dtypes[1] == torch.int8
        seeds = [mean_seeds, square_seeds] if coded and mean_seeds is not None else []
        table = launch.table([*lists, counters], scalars, *seeds)
        with on(device):
            run(
                adamw_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.tickets(device), launch.count,
                table if moves is None else moves,
                X_DTYPE=DTYPES[dtypes[0]], M_DTYPE=STATE_DTYPES[dtypes[1]],
                V_DTYPE=STATE_DTYPES[dtypes[2]], G_DTYPE=DTYPES[dtypes[3]],
                CODED=coded, SEEDED=bool(seeds), GUARDED=moves is not None,
                CHUNK=CHUNK, BLOCK=BLOCK, **OPTIONS,
            )  # fmt: skip


coded_adamw_ = adamw_


def _logarithm(beta: float) -> float:
    """log2(beta); of zero, a number to which 2 is zero in float64, as zero is to any power."""
    return math.log2(beta) if beta > 0 else -2048.0
