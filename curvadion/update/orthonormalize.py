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
from curvadion.ops.tensors import Tensors, float64_chunk, joined

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
        floors: of each stack; None: those of products.
        complete: replace dependent columns by directions from global row indices, not by
            zeros.
    """
    if floors is None:
        floors = [Floor(roundoff_of_products(P.dtype)) for P in matrices]
    groups = groups_of_equal_rank(matrices, floors)
    # G = P^T P,  P <- P W
    first = _first_pass(matrices, rows, floors, groups)
    stacks = [stack for group in first for stack in group.by_stack()]
    if complete:
        _complete_(stacks, rows)
    else:
        # Dependent columns of products with numbers that are not finite are not zero yet.
        for stack in stacks:
            stack.columns.masked_fill_(stack.dependent.unsqueeze(-2), 0.0)
    # The same again, whose result is orthonormal to rounding errors
    return _second_pass(first, [stack.columns for stack in stacks], rows, groups)


def roundoff_of_products(dtype: torch.dtype, factor: torch.dtype | None = None) -> float:
    """The relative error of a product in ``dtype``; factor: the dtype of a factor."""
    stored = 0.0 if factor is None else torch.finfo(factor).eps / 2
    return stored + ERRORS_OF_A_PRODUCT * torch.finfo(dtype).eps / 2


class Floor(NamedTuple):
    """Finds columns of a stack that are too short to hold a signal: ``ops.column_floors``."""

    roundoff: float  # relative error of the entries
    scale: Tensor | None = None  # the longest column's length at the last step, decayed, (k,)
    # For the columns of R = B^T P: these fields of P's :class:`Orthonormal`.
    dependent: Tensor | None = None
    error: Tensor | None = None

    @classmethod
    def of_group(cls, floors: Sequence[Floor]) -> Floor:
        """That of stacks with one roundoff and the same fields, as if they were one stack."""
        scales = [floor.scale for floor in floors if floor.scale is not None]
        dependent = [floor.dependent for floor in floors if floor.dependent is not None]
        errors = [floor.error for floor in floors if floor.error is not None]
        return cls(
            floors[0].roundoff,
            scale=joined(scales) if scales else None,
            dependent=joined(dependent) if dependent else None,
            error=joined(errors) if errors else None,
        )

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
    last_key: object = None
    elements = 0  # of the Gram matrices of the last group
    for i, (P, floor) in enumerate(zip(matrices, floors, strict=True)):
        k, _, r = P.shape
        missing_fields = [field is None for field in floor]
        key = (r, P.dtype, P.device, floor.roundoff, missing_fields)
        fits = elements + k * r**2 <= float64_chunk(P.device)
        if P.device.type not in GROUPED or key != last_key or not fits:
            starts.append(i)
            elements = 0
        last_key = key
        elements += k * r**2
    return [slice(start, stop) for start, stop in pairwise([*starts, len(matrices)])]


class _Group(NamedTuple):
    """Stacks of K matrices in all, after a pass."""

    columns: list[Tensor]  # (k, m_i, r) by stack
    dependent: Tensor  # (K, r) bool
    error: Tensor  # (K, r) float64
    lengths: Tensor  # (K, r) float64: of the original columns

    def by_stack(self) -> list[Orthonormal]:
        """The same for each stack."""
        dependent = _by_stack(self.dependent, self.columns)
        errors = _by_stack(self.error, self.columns)
        lengths = _by_stack(self.lengths, self.columns)
        fields = zip(self.columns, dependent, errors, lengths, strict=True)
        return [Orthonormal(*of_stack) for of_stack in fields]


def _first_pass(
    matrices: Tensors, rows: Sequence[Extent], floors: Sequence[Floor], groups: list[slice]
) -> list[_Group]:
    """One pass of Cholesky QR, whose dependent columns may hold anything.

    Shapes of a group's K matrices, with k in a stack, are

        P                    (k, m_i, r)     by stack
        G = P^T P            (K, r, r)       float64
        W                    (K, r, r)
        P W                  (k, m_i, r)     by stack

    Args:
        matrices: P, (k, m_i, r) by stack.
        rows: of each stack, this rank's rows.
        floors: of each stack.
        groups: the stacks whose Gram matrices are one tensor.
    """
    results = []
    for group, G in zip(groups, _grams(matrices, rows, groups), strict=True):
        stacks = matrices[group]
        dtype = stacks[0].dtype
        floor = Floor.of_group(floors[group])
        # The diagonal of G holds the squared lengths of P's columns.
        lengths, lowest = floor.of(G.diagonal(dim1=-2, dim2=-1), dtype)
        # W = D L^-T with L L^T = D G D, where D divides columns by their lengths
        factor = ops.first_factor(G, lengths, lowest, floor.roundoff, dtype)
        # P W = (2^-e P) (2^e W): the product of tiny or large columns fits the dtype.
        scaled = [torch.empty_like(P) for P in stacks]
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
    for previous, group, G in zip(first, groups, _grams(matrices, rows, groups), strict=True):
        stacks = matrices[group]
        dtype = stacks[0].dtype
        roundoff = roundoff_of_products(dtype)
        # P <- P W
        W, error = ops.second_factor(G, previous.dependent, previous.error, roundoff, dtype)
        result = previous._replace(columns=_times(stacks, W), error=error)
        results += result.by_stack()
    return results


def _times(stacks: Tensors, W: Tensor) -> list[Tensor]:
    """P W, (k, m_i, r) by stack, of W, (K, r, r), of all stacks."""
    return [torch.bmm(P, w) for P, w in zip(stacks, _by_stack(W, stacks), strict=True)]


def _by_stack(together: Tensor, stacks: Tensors) -> Sequence[Tensor]:
    """Rows of all matrices, (K, ...), as (k, ...) by stack."""
    parts: Sequence[Tensor] = together.split(list(map(len, stacks)))
    return parts


def _grams(matrices: Tensors, rows: Sequence[Extent], groups: list[slice]) -> list[Tensor]:
    """P^T P over the rows of all ranks, (K, r, r) float64 by group; collective.

    Args:
        matrices: P, (k, m_i, r) by stack.
        rows: of each stack, this rank's rows.
        groups: the stacks whose Gram matrices are one tensor.
    """
    grams = []
    summands: list[Tensor] = []  # views of these by stack, (k, r, r)
    for group in groups:
        stacks = matrices[group]
        r = stacks[0].shape[2]
        count = sum(map(len, stacks))
        gram = stacks[0].new_empty(count, r, r, dtype=torch.float64)
        grams.append(gram)
        summands += _by_stack(gram, stacks)
    _multiply_by_themselves(list(map(Extent.counted, rows, matrices)), summands)
    if all(extent.group is None for extent in rows):
        return grams
    sent = []
    for summand, extent in zip(summands, rows, strict=True):
        sent.append(summand if extent.group is None else pack(summand))
    received = sums(sent, [extent.group for extent in rows])
    for gram, packed, extent in zip(summands, received, rows, strict=True):
        if extent.group is not None:
            gram.copy_(unpack(packed, gram.shape[-1]))
    return grams


def _multiply_by_themselves(matrices: Tensors, products: Tensors) -> None:
    """products <- P^T P, (k, r, r) float64 by stack, of P, (k, m_i, r) by stack."""
    for parts in _parts_in_float64(zip(matrices, products, strict=True)):
        narrow = [P for P, _ in parts]
        wide = narrow
        if any(P.dtype != torch.float64 for P in narrow):
            wide = [torch.empty_like(P, dtype=torch.float64) for P in narrow]
            torch._foreach_copy_(wide, narrow)
        for P, (_, out) in zip(wide, parts, strict=True):
            ops.symmetric_product(P.mT, P, out)


def _parts_in_float64(
    stacks: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Parts of pairs of stacks, of which as many together as one may hold in float64.

    Args:
        stacks: P, (k, m_i, r), and the place of its products, (k, r, r).
    """
    parts: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for P, out in stacks:
        most = float64_chunk(P.device)
        count = max(1, most // max(1, P.shape[1] * P.shape[2]))
        for some, products in zip(P.split(count), out.split(count), strict=True):
            if parts and elements + some.numel() > most:
                yield parts
                parts = []
                elements = 0
            parts.append((some, products))
            elements += some.numel()
    if parts:
        yield parts


def _complete_(stacks: Sequence[Orthonormal], rows: Sequence[Extent]) -> None:
    """Replace dependent columns by completing directions.

    Args:
        stacks: after the first pass.
        rows: of each stack, this rank's rows.
    """
    columns = []
    dependent = []
    indices = []
    for stack, extent in zip(stacks, rows, strict=True):
        # On an accelerator the host does not wait to learn whether there are any.
        if stack.columns.device.type in GROUPED or bool(stack.dependent.any()):
            columns.append(stack.columns)
            dependent.append(stack.dependent)
            indices.append(extent.indices)
    ops.complete_(columns, dependent, indices)
