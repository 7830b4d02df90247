"""Orthonormal columns for tall matrices whose rows may be sharded over a process group.

The method is Cholesky QR, twice, with Gram matrices in float64, of which each pass sends
r (r + 1) / 2 elements per matrix over the row group.

A column depends on those before it if its part outside their span is no longer than its
rounding errors, as estimated from the root mean square length of all columns, if its length
is zero or not finite, or if the condition of the columns' directions is above 1e6.

Stacks of equal r are a group, whose Gram matrices (k, r, r) and lengths (k, r) take one
operation each. Only products with the tall matrices take one a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.matrix import Extent
from curvadion.ops.newton_schulz import FALLEN
from curvadion.ops.tensors import Lists, float64_chunk
from curvadion.update.row_shards import pack, sums, unpack

# Added to diagonals for Cholesky: larger than rounding errors, smaller than DEPENDENT
# squared.
SHIFT = 1e-13
# Rounding errors may be this many times larger than their estimate.
MARGIN = 2.0
# A part outside the others' span that holds only rounding errors, relative to its column.
DEPENDENT = 1e-6
# The error of an entry of a product, in units of one rounding error.
ERRORS_OF_A_PRODUCT = 8.0
# Shorter columns, in units of the smallest normal number, are inaccurate.
SHORTEST = 2.0**10
# Devices on which an operation costs more than its data, if these are small.
GROUPED = ("cuda",)


class Orthonormal(NamedTuple):
    """A stack of k orthonormalised matrices."""

    columns: Tensor  # (k, m_i, r)
    dependent: Tensor  # (k, r) bool: which replace dependent columns
    error: Tensor  # (k, r) float64: rounding errors' lengths in others
    lengths: Tensor  # (k, r) float64: of the original columns


def orthonormal_columns(
    matrices: Sequence[Tensor],
    rows: Sequence[Extent],
    floors: Sequence[Floor] | None = None,
    *,
    complete: bool = True,
) -> list[Orthonormal]:
    """Q of the QR factorisation with diag(R) > 0, by stack; collective.

    Args:
        matrices: (k, m_i, r) by stack, float32 or float64.
        rows: of each stack, this rank's rows.
        floors: of each stack, by default of products.
        complete: replace dependent columns by directions from global row indices, not by
            zeros.
    """
    if floors is None:
        floors = [Floor(roundoff_of_products(p.dtype)) for p in matrices]
    groups = groups_of_equal_rank(matrices, floors)
    first = _first_pass(matrices, rows, floors, groups)
    if complete:
        columns = _completed(first, rows)
    else:
        # Not even those of products with numbers that are not finite remain.
        columns = [
            one.columns.masked_fill_(one.dependent.unsqueeze(-2), 0.0) for one in first
        ]
    return _second_pass(first, columns, rows, groups)


def roundoff_of_products(dtype: torch.dtype, factor: torch.dtype | None = None) -> float:
    """The relative error of a product in ``dtype``; factor: the dtype of a factor."""
    stored = 0.0 if factor is None else torch.finfo(factor).eps / 2
    return stored + ERRORS_OF_A_PRODUCT * torch.finfo(dtype).eps / 2


class Floor(NamedTuple):
    """Finds columns of a stack that are too short to hold a signal."""

    roundoff: float  # relative error of the entries
    scale: Tensor | None = None  # the longest column's length before, (k,)
    # For R = B^T P: those of the result that contains P.
    dependent: Tensor | None = None
    error: Tensor | None = None

    @classmethod
    def of_group(cls, floors: Sequence[Floor]) -> Floor:
        """That of stacks with one roundoff, as if they were one stack."""
        scales = [floor.scale for floor in floors if floor.scale is not None]
        dependent = [floor.dependent for floor in floors if floor.dependent is not None]
        errors = [floor.error for floor in floors if floor.error is not None]
        fields = [joined(parts) if parts else None for parts in (scales, dependent, errors)]
        return cls(floors[0].roundoff, *fields)

    def of(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """The lengths up to which columns hold no signal, (k, r); of all if inf or NaN.

        Args:
            lengths: of the columns, (k, r) float64.
            dtype: of the columns.
        """
        norm = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
        # Until the last line, in units of sqrt(r): the norm is sqrt(r) root mean squares.
        floor = self.roundoff * norm
        if self.error is not None and self.dependent is not None:
            # A completed column of P is orthogonal to the others only up to their errors.
            others = self.error.masked_fill(self.dependent, 0.0) * lengths
            lost = torch.linalg.vector_norm(others, dim=-1, keepdim=True)
            leak = torch.addcmul(lost, self.error, norm, value=lengths.shape[-1] ** 0.5)
            floor = torch.where(self.dependent, torch.maximum(floor, leak), floor)
        least: float | Tensor = SHORTEST * torch.finfo(dtype).tiny
        if self.scale is not None:
            least = (FALLEN * self.scale).clamp_min(least)
        # No length is above a floor divided by False. If one is not finite, nor is the norm.
        holds = lengths.amax(dim=-1) > least
        unit = MARGIN / lengths.shape[-1] ** 0.5
        lowest: Tensor = floor * unit / holds.unsqueeze(-1)
        return lowest


def groups_of_equal_rank(matrices: Lists, floors: Sequence[Floor]) -> list[slice]:
    """Consecutive stacks with one r, dtype and roundoff, few enough for float64_chunk.

    On a CPU each stack is one: its libraries round differently at other addresses, and a
    group holds more memory.
    """
    starts: list[int] = []
    last: object = None
    elements = 0
    for i, (p, floor) in enumerate(zip(matrices, floors, strict=True)):
        size = len(p) * p.shape[2] ** 2
        given = [field is None for field in floor]
        key = p.shape[2], p.dtype, p.device, floor.roundoff, given
        fits = p.device.type in GROUPED and elements + size <= float64_chunk(p.device)
        if key != last or not fits:
            starts.append(i)
            elements = 0
        last = key
        elements += size
    return [slice(*ends) for ends in pairwise([*starts, len(matrices)])]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts, (k, ...) by stack, as one tensor."""
    if len(parts) == 1:
        return parts[0]
    whole: Tensor = torch.cat(list(parts))
    return whole


def _first_pass(
    matrices: Lists, rows: Sequence[Extent], floors: Sequence[Floor], groups: list[slice]
) -> list[Orthonormal]:
    """One pass of Cholesky QR, whose dependent columns may hold anything.

    Args:
        matrices: P, (k, m_i, r) by stack.
        rows: of each stack, this rank's rows.
        floors: of each stack.
        groups: the stacks whose Gram matrices are one tensor.
    """
    results = []
    for group, gram in zip(groups, _grams(matrices, rows, groups), strict=True):
        stacks = matrices[group]
        dtype = stacks[0].dtype
        floor = Floor.of_group(floors[group])
        lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
        W, sound = _inverse_triangles(gram, lengths, floor.of(lengths, dtype))
        error = _error_of_product(lengths, W, floor.roundoff)
        error.clamp_min_(torch.finfo(dtype).eps)
        dependent = ~(sound & (error < 1 / MARGIN))
        W.masked_fill_(dependent.unsqueeze(-2), 0.0)
        # P W = (P / unit) (unit W). Powers of two make factors of tiny and large columns fit
        # P's dtype.
        unit = lengths.amax(dim=-1).log2().clamp_(-126, 126).round_().exp2_()[:, None, None]
        W = W.mul_(unit).to(dtype)
        unit = unit.to(dtype)
        each = zip(
            stacks, *(_by_stack(t, stacks) for t in (W, unit, dependent, error, lengths)),
            strict=True,
        )  # fmt: skip
        for p, w, u, *others in each:
            results.append(Orthonormal(torch.bmm(p / u, w), *others))
    return results


def _second_pass(
    first: Sequence[Orthonormal], columns: Lists, rows: Sequence[Extent], groups: list[slice]
) -> list[Orthonormal]:
    """The results of the first pass with columns that are orthonormal to rounding errors.

    Args:
        first: of each stack. Its dependent columns come after the others here.
        columns: P, (k, m_i, r) by stack, finite; columns are zero or far from singular.
        rows: of each stack.
        groups: the stacks whose Gram matrices are one tensor.
    """
    results = []
    for group, gram in zip(groups, _grams(columns, rows, groups), strict=True):
        stacks = columns[group]
        before = first[group]
        dtype = stacks[0].dtype
        dependent = joined([one.dependent for one in before])
        error_before = joined([one.error for one in before])
        lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
        W = _ordered_inverse_triangles(gram, dependent)
        error = _error_of_product(lengths, W, roundoff_of_products(dtype))
        error = torch.where(dependent, error, error_before)
        W = W.to(dtype)
        each = zip(before, stacks, *(_by_stack(t, stacks) for t in (W, error)), strict=True)
        for one, p, w, e in each:
            results.append(one._replace(columns=torch.bmm(p, w), error=e))
    return results


def _by_stack(together: Tensor, stacks: Lists) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = together.split(list(map(len, stacks)))
    return parts


def _error_of_product(lengths: Tensor, W: Tensor, roundoff: float) -> Tensor:
    """The lengths of errors in columns of P W, which sum those of P with weights W, (k, r).

    lengths: of P's columns, (k, r). W: (k, r, r). roundoff: the relative error of P.
    """
    norm = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
    root_mean_square = norm * (roundoff / lengths.shape[-1] ** 0.5)
    error: Tensor = root_mean_square * torch.linalg.vector_norm(W, dim=-2)
    return error


def _grams(matrices: Lists, rows: Sequence[Extent], groups: list[slice]) -> list[Tensor]:
    """P^T P over the rows of all ranks, (k, r, r) float64 by group; collective."""
    grams = []
    for group in groups:
        stacks = matrices[group]
        r = stacks[0].shape[2]
        count = sum(map(len, stacks))
        grams.append(stacks[0].new_empty(count, r, r, dtype=torch.float64))
    by_group = [
        _by_stack(gram, matrices[group]) for gram, group in zip(grams, groups, strict=True)
    ]
    summands = [out for outs in by_group for out in outs]
    _multiply_by_themselves(list(map(Extent.counted, rows, matrices)), summands)
    if all(extent.group is None for extent in rows):
        return grams
    sent = []
    for summand, extent in zip(summands, rows, strict=True):
        sent.append(summand if extent.group is None else pack(summand))
    received = sums(sent, [extent.group for extent in rows])
    for out, packed, extent in zip(summands, received, rows, strict=True):
        if extent.group is not None:
            out.copy_(unpack(packed, out.shape[-1]))
    return grams


def _multiply_by_themselves(matrices: Lists, products: Lists) -> None:
    """P^T P, (k, r, r) float64 by stack, of P, (k, m_i, r) by stack."""
    for parts in _parts_in_float64(zip(matrices, products, strict=True)):
        P = [p for p, _ in parts]
        wide = P
        if any(p.dtype != torch.float64 for p in P):
            wide = [torch.empty_like(p, dtype=torch.float64) for p in P]
            torch._foreach_copy_(wide, P)
        for p, (_, out) in zip(wide, parts, strict=True):
            ops.symmetric_product(p.mT, p, out)


def _parts_in_float64(
    stacks: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Parts of pairs of stacks, of which as many together as one may hold in float64."""
    parts = list[tuple[Tensor, Tensor]]()
    elements = 0
    for p, out in stacks:
        most = float64_chunk(p.device)
        count = max(1, most // max(1, p.shape[1] * p.shape[2]))
        for part in zip(p.split(count), out.split(count), strict=True):
            if parts and elements + part[0].numel() > most:
                yield parts
                parts = []
                elements = 0
            parts.append(part)
            elements += part[0].numel()
    if parts:
        yield parts


def _inverse_triangles(gram: Tensor, lengths: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`_inverse_triangle` for the first pass, of a few matrices at a time."""
    factors, sound = [], []
    for some in _parts_of(gram):
        W, columns = _inverse_triangle(gram[some], lengths[some], floor[some], shift=SHIFT)
        factors.append(W)
        sound.append(columns)
    return joined(factors), joined(sound)


def _ordered_inverse_triangles(gram: Tensor, last: Tensor) -> Tensor:
    """W, (k, r, r), such that P W has orthonormal columns or zeros.

    gram: P^T P, (k, r, r) float64. last: (k, r) bool: columns that come after others.
    """
    found = []
    for some in _parts_of(gram):
        order = last[some].to(torch.int8).argsort(dim=-1, stable=True)
        # The place in a Gram matrix of each element of the one with its columns in order.
        places = torch.add(order.unsqueeze(-2), order.unsqueeze(-1), alpha=gram.shape[-1])
        places = places.flatten(1)
        ordered = gram[some].flatten(1).gather(1, places).view_as(gram[some])
        lengths = ordered.diagonal(dim1=-2, dim2=-1).sqrt()
        W, sound = _inverse_triangle(ordered, lengths)
        W.masked_fill_(~sound.unsqueeze(-2), 0.0)
        back = torch.empty_like(places, dtype=W.dtype).scatter_(1, places, W.flatten(1))
        found.append(back.view_as(ordered))
    return joined(found)


def _parts_of(gram: Tensor) -> list[slice]:
    count = max(1, float64_chunk(gram.device) // gram.shape[-1] ** 2)
    return [slice(i, i + count) for i in range(0, len(gram), count)]


def _inverse_triangle(
    gram: Tensor, lengths: Tensor, floor: Tensor | None = None, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """W such that P W has orthonormal columns, and which columns are sound, not dependent.

    Args:
        gram: P^T P, (k, r, r) float64.
        lengths: of P's columns, (k, r) float64.
        floor: the lengths up to which they hold no signal, (k, r); None for those of the
            second pass, which are finite and whose signals are zero or long.
        shift: is added to the diagonal of the unit columns' Gram matrix.
    """
    sound = lengths > (0.0 if floor is None else floor)
    # Zeros for the others, whose lengths may be zero, infinite or NaN, so that no column is
    # compared with them. Where one is not finite, no column is sound.
    inverse_lengths = (sound / lengths).nan_to_num_(0.0, 0.0, 0.0)
    unit = (gram * inverse_lengths.unsqueeze(-1)).mul_(inverse_lengths.unsqueeze(-2))
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + shift)
    # cholesky_ex reports failure in a tensor, without a device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    left = lower.diagonal(dim1=-2, dim2=-1)
    least = DEPENDENT if floor is None else (floor * inverse_lengths).clamp_min_(DEPENDENT)
    sound = sound & (left > least)
    # Drop dependent columns, so that later ones are not compared with their noise.
    dependent = ~sound
    lower.masked_fill_(dependent.unsqueeze(-2), 0.0)
    left.masked_fill_(dependent, 1.0)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    # The inverse also amplifies the Gram matrix's errors, relative to the columns' lengths.
    sound = sound & (torch.linalg.vector_norm(inverse, dim=-1) < 1 / DEPENDENT)
    return inverse.mT.mul_(inverse_lengths.unsqueeze(-1)), sound


def _completed(stacks: Sequence[Orthonormal], rows: Sequence[Extent]) -> list[Tensor]:
    """The columns, with completing directions for dependent ones."""
    # On an accelerator the host does not wait to learn whether there are any.
    lacking = [
        one.columns.device.type in GROUPED or bool(one.dependent.any()) for one in stacks
    ]
    incomplete = [one.columns for one, lacks in zip(stacks, lacking, strict=True) if lacks]
    held = [extent.indices for extent, lacks in zip(rows, lacking, strict=True) if lacks]
    directions = iter(_directions(incomplete, held))
    columns = []
    for one, lacks in zip(stacks, lacking, strict=True):
        p = one.columns
        if lacks:
            p = torch.where(one.dependent.unsqueeze(-2), next(directions), p)
        columns.append(p)
    return columns


def _directions(stacks: Lists, rows: Sequence[range]) -> list[Tensor]:
    """Completing directions (m_i, r) like each stack (k, m_i, r), whose rows are given."""
    wanted: dict[tuple[int, torch.dtype, torch.device], set[range]] = {}
    for p, held in zip(stacks, rows, strict=True):
        wanted.setdefault((p.shape[2], p.dtype, p.device), set()).add(held)
    known = {}
    for (r, dtype, device), ranges in wanted.items():
        whole = range(min(i.start for i in ranges), max(i.stop for i in ranges))
        # They depend on the row alone, so one table may hold those of several matrices.
        together = len(whole) <= sum(map(len, ranges))
        for held in {whole} if together else ranges:
            indices = torch.arange(held.start, held.stop, device=device)
            table = completing_directions(indices, r).to(dtype)
            for part in ranges if together else {held}:
                places = slice(part.start - held.start, part.stop - held.start)
                known[r, dtype, device, part] = table[places]
    return [
        known[p.shape[2], p.dtype, p.device, held]
        for p, held in zip(stacks, rows, strict=True)
    ]


def completing_directions(rows: Tensor, columns: int) -> Tensor:
    """Values in [-1, 1), (m_i, columns) float64, from global indices."""
    modulus = 2**31 - 1
    step = 69_621
    first = 48_271 + step
    column = torch.arange(first, first + step * columns, step, device=rows.device)
    # 48,271 (row + 1) + 69,621 (column + 1)
    x = torch.add(column, rows.unsqueeze(-1), alpha=48_271)
    shift = torch.tensor(12_345, device="cpu")
    for factor in (16_807, 39_373, 630_360_016):
        x = torch.add(shift, x, alpha=factor) % modulus
        x = x ^ (x >> 13)
    return (x % modulus).double() / (modulus / 2) - 1.0
