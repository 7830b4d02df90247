"""Two corrections after replicas have averaged weights; they send nothing between replicas.

Over steps whose lr (with the shape's scale) add up to L, replica i has moved by

    D_i = X_i - anchor = -sum over steps of lr U_i,

where U_i is the direction of its momentum, P Q^T or the polar factor. D is the mean of the
D_i. The sync knows the sum of lr (``Fragments`` adds it up, and an opening takes the largest
of all members); ``_lengths`` multiplies it by the scale of each matrix's shape, which is L.

**Momentum alignment.** The part of M_i in the space of U_i is U_i S_i with S_i = U_i^T M_i.
Its average direction was -D_i / L, and the mean direction is -D / L. The momentum takes the
mean direction and keeps its own S_i:

    M_i <- M_i - (D - D_i) S_i / L.

If all S_i were equal, the mean of the momenta would not change. But S_i shares its noise with
D_i, so momenta lose some of their mean at each opening. A ``spectrum_decay`` averages the S_i
of polar directions over openings, which reduces this.

M_i is the momentum after the last step, and U_i that step's direction, from the momentum
before error feedback and with the look-ahead.

**Polar correction.** A singular value of D / L is 1 where replicas took the same direction,
and less where noise made them differ, but a synchronised step has its full length everywhere.
One step of Newton and Schulz's iteration for the polar factor,

    D <- D + L (V - V V^T V) / 2,                V = D / L,

takes a singular value s of V to s (3 - s^2) / 2 and changes no singular vector (Higham,
Functions of Matrices, 2008, chapter 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from curvadion.layout.dtensor import local
from curvadion.layout.exchange import (
    cut_columns,
    dtype_of_products,
    summands_of_columns,
    whole_rows,
)
from curvadion.ops.tensors import Tensors, from_host
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    Stacks,
    open_shards,
    product_dtype,
    stacked,
)
from curvadion.plan.plan import Plan
from curvadion.plan.state import ANCHOR, SPECTRUM, SPECTRUM_WEIGHT
from curvadion.update.direction import Directions
from curvadion.update.registry import DIRECTIONS

TINY = torch.finfo(torch.float32).tiny
# The largest (s - s^3) / 2 for a singular value s in [0, 1], at sqrt(1 / 3).
LARGEST_CORRECTION = 1 / (3 * math.sqrt(3))
# Below this L, D holds only residuals of codes, and the cube of D / L could overflow.
SHORTEST = 1e-10
# The sum of lr, without the shape's scale, over the steps from one anchor to the opening that
# moved it: Fragments.sent_rate.
Rate = Callable[[Parameter], float]


def anchor_of(p: Parameter) -> Tensor:
    """The last synchronised weights; this rank's shards."""
    return local(p.state[ANCHOR])


def copies_of(stacks: Stacks, tensor_of: Callable[[Parameter], Tensor]) -> list[Tensor]:
    """Copy the matrices of a tensor of each parameter, (k, m_i, n_j) by stack."""
    return [stacked([m.read(tensor_of(m.parameter)) for m in stack], stack[0]) for stack in stacks]


def subtract_from_(
    stacks: Stacks, tensor_of: Callable[[Parameter], Tensor], copies: Tensors
) -> None:
    """Replace :func:`copies_of` matrices by the movement of the matrices since then."""
    for stack, old in zip(stacks, copies, strict=True):
        new = [m.read(tensor_of(m.parameter)) for m in stack]
        torch._foreach_add_(list(old.neg_()), new)


def _lengths(stacks: Stacks, rate: Rate) -> list[Tensor]:
    """L of each matrix, (k,) by stack."""
    lengths = []
    for stack in stacks:
        X = stack[0].parameter.X
        numbers = [rate(m.parameter) * m.update_scale for m in stack]
        lengths.append(from_host(numbers, product_dtype(X), X.device))
    return lengths


def _clip(factor: Tensor | float, limit: Tensor | float, size: Tensor) -> Tensor:
    """factor / max(limit, size), as residuals from steps at a larger lr can exceed limit."""
    return factor / size.clamp_min(limit).clamp_min(TINY)


@record_function("curvadion.align_momenta")
def align_momenta_(
    directions: Directions, differences: Tensors, spectrum_decay: float, rate: Rate
) -> None:
    """M_i <- M_i - (D - D_i) S_i / L with S_i = U_i^T M_i; collective in the replica.

    This turns momenta from the replica's direction to the mean one.

    Args:
        directions: U_i of the last step, of rank r; used up.
        differences: D - D_i of the matrices, (k, m_i, n_j) by stack; overwritten. One that is
            longer than L sqrt(r) is scaled down with the square of its length.
        spectrum_decay: the factor of earlier openings in the mean of S_i that polar
            directions keep; zero: only this one counts.
        rate: the sum of lr over the steps to D; times a matrix's update scale it is L.
    """
    if not directions.stacks:
        return
    lengths = _lengths(directions.stacks, rate)
    squares = directions.plan.squared_norms(differences)
    # share = -1 / L, or -(L r) / |D - D_i|^2 where |D - D_i|^2 is above L^2 r
    shares = []
    for L, r, square in zip(lengths, directions.ranks, squares, strict=True):
        shares.append(-_clip(L * r, L.square() * r, square))
    # M_i <- M_i + share (D - D_i) S_i
    directions.turn_momenta_(differences, shares, spectrum_decay)


def place_spectra(parameters: Sequence[Parameter], *, kept: bool) -> None:
    """Allocate the sums of S for directions that keep them; free them otherwise."""
    for p in parameters:
        if not kept:
            p.state.pop(SPECTRUM, None)
            p.state.pop(SPECTRUM_WEIGHT, None)
        elif p.matrices and DIRECTIONS[p.direction].keeps_spectrum:
            p.create_spectra()


def forget_spectra(parameters: Sequence[Parameter]) -> None:
    """Reset the sums of S, so that replicas with equal states stay equal."""
    for p in parameters:
        if SPECTRUM in p.state:
            local(p.state[SPECTRUM]).zero_()
            p.state[SPECTRUM_WEIGHT] = 0.0


@record_function("curvadion.correct_polar")
def correct_polar_(plan: Plan, D: Tensors, rate: Rate, *, together: bool = True) -> None:
    """Add L (V - V V^T V) / 2 with V = D / L to weights and anchors, which contain D.

    Collective in the replica.

    Args:
        plan: of the parameters.
        D: mean movements of the matrices, (k, m_i, n_j) by stack; overwritten.
        rate: the sum of lr over the steps to D; times a matrix's update scale it is L.
        together: whether X equals the anchor; otherwise it has moved on since.
    """
    stacks = plan.stacks
    if not stacks:
        return
    lengths = _lengths(stacks, rate)
    # V = D / L, or zero for a short L
    for V, L in zip(D, lengths, strict=True):
        V.div_(L.where(L > SHORTEST, torch.inf)[:, None, None])
    changes = _newton_schulz_(plan, D)
    squares = plan.squared_norms(changes)
    for stack, change, L, square in zip(stacks, changes, lengths, squares, strict=True):
        # |(V - V V^T V) / 2| is at most this if no singular value of V is above 1.
        limit = LARGEST_CORRECTION * math.sqrt(min(stack[0].layout.shape))
        share = _clip(limit, limit, square.sqrt())
        # L (V - V V^T V) / 2
        change.mul_((L * share).to(change.dtype)[:, None, None])
        _move(stack, change, together=together)


def _newton_schulz_(plan: Plan, V: Tensors) -> list[Tensor]:
    """(V - V V^T V) / 2, (k, m_i, n_j) by stack; V is overwritten.

    Products are of W = V / d, in the range of float16. d is the root mean square of the
    singular values, at least 1. Shapes of a stack's k matrices are

        V                (k, m_i, n_j)
        W                (k, m_r, n)       whole rows
        W^T W            (k, n, n)         summed over all rows
        W W^T W          (k, m_r, n)
    """
    layouts = [stack[0].layout for stack in plan.stacks]
    divisors = []
    for square, layout in zip(plan.squared_norms(V), layouts, strict=True):
        root_mean_square = (square / min(layout.shape)).sqrt()
        divisors.append(root_mean_square.clamp_min(1.0)[:, None, None])
    rows = whole_rows([v.div_(d) for v, d in zip(V, divisors, strict=True)], layouts)
    grams = summands_of_columns(rows, rows, layouts)
    grams.all_reduce_()
    changes = []
    for W, gram, d in zip(rows, grams.views, divisors, strict=True):
        dtype = dtype_of_products(W)
        cube = torch.bmm(W.to(dtype), gram.to(dtype)).to(W.dtype)
        # (V - V V^T V) / 2 = (W - d^2 W W^T W) d / 2
        changes.append(W.sub_(cube.mul_(d.square())).mul_(d / 2))
    return cut_columns(changes, layouts)


def _move(matrices: Sequence[Matrix], changes: Tensor, *, together: bool) -> None:
    """Add changes, (k, m_i, n_j), to anchors; X <- anchor if together, else X + change."""
    movements = list(changes)
    anchors = [anchor_of(m.parameter) for m in matrices]
    weights = [m.parameter.local for m in matrices]
    with open_shards(matrices, anchors, weights) as (A, X):
        torch._foreach_add_(A, movements)
        if together:
            torch._foreach_copy_(X, A)
        else:
            # The sum is float32 or wider, and rounded to X's dtype once.
            torch._foreach_add_(movements, X)
            torch._foreach_copy_(X, movements)
