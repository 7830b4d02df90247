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
from curvadion.layout.exchange import pack, sums, unpack
from curvadion.layout.matrix import Extent
from curvadion.ops.tensors import Tensors, adjacent, float64_chunk

# The error of an entry of a product, in units of one rounding error.
ERRORS_OF_A_PRODUCT = 8.0
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
    by_stack = [one for group in first for one in group.by_stack()]
    if complete:
        _complete_(by_stack, rows)
    else:
        # Not even those of products with numbers that are not finite remain.
        for one in by_stack:
            one.columns.masked_fill_(one.dependent.unsqueeze(-2), 0.0)
    return _second_pass(first, [one.columns for one in by_stack], rows, groups)


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

    def of(self, squares: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Lengths, and those up to which columns hold no signal; both (k, r) float64.

        Args:
            squares: of the lengths of columns, (k, r) float64.
            dtype: of the columns.
        """
        return ops.column_floors(
            squares, self.roundoff, dtype, self.scale, self.dependent, self.error
        )


def groups_of_equal_rank(matrices: Tensors, floors: Sequence[Floor]) -> list[slice]:
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
    """The parts, (k, ...) by stack, as one tensor: a view if they are neighbours."""
    if len(parts) == 1:
        return parts[0]
    flat = [part.reshape(-1) for part in parts]
    return adjacent(flat).view(-1, *parts[0].shape[1:])


class _Group(NamedTuple):
    """Stacks of K matrices in all, after a pass."""

    columns: list[Tensor]  # (k, m_i, r) by stack
    dependent: Tensor  # (K, r) bool
    error: Tensor  # (K, r) float64
    lengths: Tensor  # (K, r) float64: of the original columns

    def by_stack(self) -> list[Orthonormal]:
        fields = (self.dependent, self.error, self.lengths)
        parts = [_by_stack(field, self.columns) for field in fields]
        return [Orthonormal(*each) for each in zip(self.columns, *parts, strict=True)]


def _first_pass(
    matrices: Tensors, rows: Sequence[Extent], floors: Sequence[Floor], groups: list[slice]
) -> list[_Group]:
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
        lengths, lowest = floor.of(gram.diagonal(dim1=-2, dim2=-1), dtype)
        factor = ops.first_factor(gram, lengths, lowest, floor.roundoff, dtype)
        # P W = (2^-e P) (2^e W)
        scaled = [torch.empty_like(p) for p in stacks]
        ops.scale(stacks, scaled, factor.longest)
        columns = _times(scaled, factor.W)
        results.append(_Group(columns, factor.dependent, factor.error, lengths))
    return results


def _second_pass(
    first: Sequence[_Group], matrices: Tensors, rows: Sequence[Extent], groups: list[slice]
) -> list[Orthonormal]:
    """The results of the first pass with columns that are orthonormal to rounding errors.

    Args:
        first: of each group. Its dependent columns come after the others here.
        matrices: P, (k, m_i, r) by stack, finite; columns are zero or far from singular.
        rows: of each stack.
        groups: the stacks whose Gram matrices are one tensor.
    """
    results = []
    for before, group, gram in zip(first, groups, _grams(matrices, rows, groups), strict=True):
        stacks = matrices[group]
        dtype = stacks[0].dtype
        roundoff = roundoff_of_products(dtype)
        W, error = ops.second_factor(gram, before.dependent, before.error, roundoff, dtype)
        after = before._replace(columns=_times(stacks, W), error=error)
        results += after.by_stack()
    return results


def _times(stacks: Tensors, W: Tensor) -> list[Tensor]:
    """P W by stack."""
    return [torch.bmm(p, w) for p, w in zip(stacks, _by_stack(W, stacks), strict=True)]


def _by_stack(together: Tensor, stacks: Tensors) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = together.split(list(map(len, stacks)))
    return parts


def _grams(matrices: Tensors, rows: Sequence[Extent], groups: list[slice]) -> list[Tensor]:
    """P^T P over the rows of all ranks, (k, r, r) float64 by group; collective."""
    grams = []
    for group in groups:
        stacks = matrices[group]
        r = stacks[0].shape[2]
        count = sum(map(len, stacks))
        grams.append(stacks[0].new_empty(count, r, r, dtype=torch.float64))
    by_group = [_by_stack(gram, matrices[group]) for gram, group in zip(grams, groups, strict=True)]
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


def _multiply_by_themselves(matrices: Tensors, products: Tensors) -> None:
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


def _complete_(stacks: Sequence[Orthonormal], rows: Sequence[Extent]) -> None:
    """Replace dependent columns by completing directions."""
    # On an accelerator the host does not wait to learn whether there are any.
    lacking = [
        (one, extent.indices)
        for one, extent in zip(stacks, rows, strict=True)
        if one.columns.device.type in GROUPED or bool(one.dependent.any())
    ]
    ops.complete_(
        [one.columns for one, _ in lacking],
        [one.dependent for one, _ in lacking],
        [held for _, held in lacking],
    )
