"""From a parameter, whole, a DTensor or a flat shard, to its matrices and their layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group, Unions, group_of_ranks
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.layout.shard_views import Block, FlatRange, Piece

_FLAT_SHARD = "curvadion_flat_shard"
_REPLICAS = "curvadion_replicas"
FLAT_SHARD_START = "flat_shard_start"  # key of a state


@dataclass(frozen=True)
class FlatShard:
    """A parameter that is a contiguous range of a row-major tensor's elements (ZeRO, FSDP1).

    Attributes:
        shape: global shape of the tensor.
        start, stop: the elements held here.
        group: the ranks that hold the others; None if all are here.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    group: Group | None


def declare_flat_shard(
    parameter: Tensor, shape: Sequence[int], start: int, stop: int, group: Group | None
) -> None:
    """Say that ``parameter``, 1-D, holds elements [start, stop) of a tensor of ``shape``.

    Every rank of ``group`` declares its own range, which may be empty; together they cover the
    tensor once (checked at the first step). Replicas hold the same ranges. The optimizer's state
    is cut at the same elements: each rank saves and loads its own state_dict (torch.save), in the
    same layout; torch.distributed.checkpoint cannot move it.

    Raises:
        TypeError: if the parameter is a DTensor, or the group is none.
        ValueError: if the parameter is not 1-D, or the range does not lie in the tensor or is not
            as long as the parameter.
    """
    if isinstance(parameter, DTensor):
        raise TypeError(f"A DTensor of placements {parameter.placements} says itself what it holds")
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group={group!r} must be a ProcessGroup or None")
    numel = math.prod(shape)
    if parameter.dim() != 1:
        raise ValueError(f"parameter of shape {tuple(parameter.shape)} must be 1-D: flatten it")
    if not 0 <= start <= stop <= numel or parameter.numel() != stop - start:
        raise ValueError(
            f"[start, stop)=[{start}, {stop}) must lie in [0, {numel}) and have the parameter's "
            f"{parameter.numel()} elements"
        )
    setattr(parameter, _FLAT_SHARD, FlatShard(tuple(shape), start, stop, group))


def flat_shard(parameter: Tensor) -> FlatShard | None:
    """What was declared of the parameter."""
    return getattr(parameter, _FLAT_SHARD, None)


def place_of_flat_shard(parameter: Tensor) -> dict[str, Tensor]:
    """State that tells this rank's flat shard from others; nothing for other parameters.

    A tensor of one number: the form that torch.distributed.checkpoint and FSDP1 treat least.
    """
    declared = flat_shard(parameter)
    if declared is None:
        return {}
    return {FLAT_SHARD_START: torch.tensor(declared.start, device="cpu")}


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, of which this rank may hold a piece."""
    declared = flat_shard(parameter)
    return tuple(parameter.shape) if declared is None else declared.shape


def local(tensor: Tensor) -> Tensor:
    """The piece held here, sharing memory with the tensor."""
    if isinstance(tensor, DTensor):
        piece: Tensor = tensor.to_local()
        # Still on its way from a collective of autograd's; fused operations need the memory itself.
        return piece.wait() if isinstance(piece, AsyncCollectiveTensor) else piece
    return tensor


@dataclass(frozen=True)
class QSlot:
    """Where a matrix's right factor lies in its parameter's state: ``state[key][index]``."""

    key: str
    index: tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """One matrix of a parameter, as this rank holds it.

    ``kind`` is equal for matrices that can be batched: it is made of global facts alone, so all
    ranks batch alike.
    """

    layout: MatrixLayout
    piece: Piece
    rank: int
    q: QSlot
    kind: tuple[object, ...]


def matrices_of(
    X: Tensor, options: Mapping[str, Any], replicas: Group | None, unions: Unions
) -> list[Part]:
    """The matrices of a parameter under its group's stack_dims, row_blocks and rank options."""
    declared = flat_shard(X)
    if declared is not None:
        return list(_flat_parts(declared, X, options, replicas, unions))
    return list(_block_parts(X, options, replicas, unions))


def groups_of(X: Tensor) -> list[Group]:
    """The groups over which any dimension of the parameter is cut."""
    declared = flat_shard(X)
    if declared is not None:
        return [declared.group] if declared.group is not None else []
    if not isinstance(X, DTensor):
        return []
    groups = [group_over(X.device_mesh, d.axes) for d in _dimensions(X)]
    return [group for group in groups if group is not None]


def declare_replicas(parameter: Tensor, count: int) -> None:
    """Note that gradients of so many replicas of the parameter are kept apart."""
    setattr(parameter, _REPLICAS, count)


def check_replicas(X: Tensor, name: str, replicas: Group | None) -> None:
    """Raise ValueError if the parameter is cut over the ranks that should hold it alike.

    Or if no ranks should, but its replicas' gradients are kept apart.
    """
    if replicas is None:
        if (count := getattr(X, _REPLICAS, 1)) > 1:
            raise ValueError(
                f"replicas=None, but keep_gradients_local keeps the gradients of {count} replicas "
                f"of {name} apart, which would never come together: pass replicas=, the process "
                f"group of the replicas, or 'single' to train each by itself."
            )
        return
    alike = set(dist.get_process_group_ranks(replicas))
    for group in groups_of(X):
        if len(alike.intersection(dist.get_process_group_ranks(group))) > 1:
            raise ValueError(
                f"replicas is the process group of ranks {sorted(alike)}, over which {name} of "
                f"shape {global_shape(X)} is sharded: pass the group that replicates it, such as "
                f"mesh['replicate'], or None."
            )


def check_placements(X: Tensor, name: str) -> None:
    """Raise ValueError for a DTensor whose placements no update is written for."""
    for placement in _placements(X):
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(
                f"{name} has the placements {_placements(X)}: {placement!r} is not supported. "
                f"Redistribute it to Shard or Replicate placements first."
            )


def block_sizes(rows: int, row_blocks: int | Sequence[int], name: str = "row_blocks") -> list[int]:
    """Row counts of the blocks that a matrix of ``rows`` rows is split into.

    Raises:
        ValueError: if the blocks do not add up to the rows.
    """
    if isinstance(row_blocks, int):
        if rows % row_blocks:
            raise ValueError(f"{name}={row_blocks!r} does not divide {rows} rows: list their sizes")
        return [rows // row_blocks] * row_blocks
    if sum(row_blocks) != rows:
        raise ValueError(f"{name}={row_blocks!r} must add up to the {rows} rows")
    return list(row_blocks)


# -------------------------------------------------------------------- whole tensors and DTensors


@dataclass(frozen=True)
class _Dimension:
    """One tensor dimension: the global indices held here and the mesh axes that cut it."""

    held: range
    axes: tuple[int, ...]


def _dimensions(X: Tensor) -> list[_Dimension]:
    if not isinstance(X, DTensor):
        return [_Dimension(range(size), ()) for size in X.shape]
    dimensions = []
    for d, size in enumerate(X.shape):
        held, axes = range(size), _axes_in_order(X.placements, d)
        for axis in axes:
            held = _chunk(held, X.device_mesh.size(axis), X.device_mesh.get_local_rank(axis))
        dimensions.append(_Dimension(held, axes))
    expected, actual = [len(d.held) for d in dimensions], list(local(X).shape)
    if expected != actual and (0 not in expected or 0 not in actual):
        raise ValueError(
            f"a DTensor of shape {tuple(X.shape)} and placements {X.placements} holds {actual} on "
            f"rank {dist.get_rank()} where {expected} was expected: uneven shards must be those of "
            f"torch.chunk."
        )
    return dimensions


def _axes_in_order(placements: Sequence[Placement], dimension: int) -> tuple[int, ...]:
    """Mesh axes that cut a dimension, the first to cut first.

    _StridedShard says that axes to its right have cut before: split_factor pieces already exist.
    """
    order = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dimension:
            order.append((_split_factor(placement), axis))
    return tuple(axis for _, axis in sorted(order))


def _placements(X: Tensor) -> tuple[Placement, ...]:
    return tuple(X.placements) if isinstance(X, DTensor) else ()


def _split_factor(placement: Placement) -> int:
    """Into how many pieces other axes have cut before; 0 for a plain Shard."""
    return int(getattr(placement, "split_factor", 0))


def _chunk(held: range, pieces: int, place: int) -> range:
    size = -(-len(held) // pieces)
    return held[min(place * size, len(held)) : min((place + 1) * size, len(held))]


def group_over(mesh: DeviceMesh, axes: Sequence[int]) -> Group | None:
    """The ranks that differ from this one along some mesh axes only."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} holds a parameter of {mesh} but is not in it")
    index = tuple(slice(None) if a in axes else c for a, c in enumerate(coordinate))
    return group_of_ranks(mesh.mesh[index].flatten().tolist())


def _block_parts(
    X: Tensor, options: Mapping[str, Any], replicas: Group | None, unions: Unions
) -> Iterator[Part]:
    stack_dims, input_first = options["stack_dims"], options["input_first"]
    X = _output_first(X, options)
    dimensions = _dimensions(X)
    rows, columns, inner = (
        dimensions[stack_dims],
        dimensions[stack_dims + 1],
        X.shape[stack_dims + 2 :],
    )
    mesh = X.device_mesh if isinstance(X, DTensor) else None
    _check_inner(X, columns, dimensions[stack_dims + 2 :])
    rows_group = group_over(mesh, rows.axes) if mesh is not None else None
    columns_group = group_over(mesh, columns.axes) if mesh is not None else None
    width = math.prod(inner)
    held_columns = range(columns.held.start * width, columns.held.stop * width)
    n = X.shape[stack_dims + 1] * width
    sizes = block_sizes(X.shape[stack_dims], options["row_blocks"])
    slots = _QSlots(sizes, n, options)
    stacks = itertools.product(*(range(len(d.held)) for d in dimensions[:stack_dims]))
    for stack in stacks:
        for b, (start, size) in enumerate(
            zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
        ):
            inside = _intersection(rows.held, range(start, start + size))
            here = slice(inside.start - rows.held.start, inside.stop - rows.held.start)
            layout = _layout(
                (size, n),
                Extent(range(inside.start - start, inside.stop - start), rows_group),
                Extent(held_columns, columns_group),
                replicas,
                unions,
            )
            yield Part(
                layout,
                Block(stack, here, input_first),
                slots.ranks[b],
                slots.slot(b, stack, here),
                (tuple(X.shape), _placements(X), mesh, b, layout.replicas),
            )


def _output_first(X: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The parameter, or under ``input_first`` its view (*stack, out, in); for its layout alone."""
    if not options["input_first"]:
        return X
    rows = options["stack_dims"]
    turned = {rows: rows + 1, rows + 1: rows}
    X = X.detach()
    if not isinstance(X, DTensor):
        return X.mT
    placements = [
        _moved(placement, turned.get(dim, dim))
        if (dim := getattr(placement, "dim", None)) is not None
        else placement
        for placement in X.placements
    ]
    shape, stride = list(X.shape), list(X.stride())
    for sizes in (shape, stride):
        sizes[rows], sizes[rows + 1] = sizes[rows + 1], sizes[rows]
    view: Tensor = DTensor.from_local(
        local(X).mT,
        X.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
    return view


def _moved(placement: Placement, dimension: int) -> Placement:
    """The same cut of another dimension."""
    if factor := _split_factor(placement):
        strided: Placement = _StridedShard(dimension, split_factor=factor)
        return strided
    return Shard(dimension)


def _check_inner(X: Tensor, columns: _Dimension, inner: Sequence[_Dimension]) -> None:
    if any(d.axes for d in inner):
        raise ValueError(
            f"a parameter of shape {tuple(X.shape)} is cut by {_placements(X)}, but only rows, "
            f"columns and stacked dimensions can be"
        )
    pieces = 1
    if isinstance(X, DTensor):
        pieces = math.prod(X.device_mesh.size(axis) for axis in columns.axes)
    if inner and len(columns.held) * pieces != X.shape[-len(inner) - 1]:
        raise ValueError(
            f"a parameter of shape {tuple(X.shape)} is cut by {_placements(X)} into uneven numbers "
            f"of input channels: shard it over its output channels"
        )


def _intersection(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _layout(
    shape: tuple[int, int],
    X_rows: Extent,
    X_columns: Extent,
    replicas: Group | None,
    unions: Unions,
) -> MatrixLayout:
    rows, columns = (X_columns, X_rows) if shape[0] < shape[1] else (X_rows, X_columns)
    return MatrixLayout(
        shape,
        rows,
        columns,
        replicas,
        unions.of([rows.group, replicas]),
        unions.of([columns.group, replicas]),
        unions.of([rows.group, columns.group]),
    )


# -------------------------------------------------------------------- the state of right factors


class _QSlots:
    """Where the right factors of a parameter's row blocks lie in its state.

    A block whose orientation is upright has a Q whose rows are the parameter's columns: all of
    these stand side by side in one tensor (n, sum of ranks). One that is transposed has a
    Q whose rows are its own: these stand below each other in a tensor (m, largest rank), cut as
    the parameter's rows are. So both can be DTensors, whatever the cut.
    """

    def __init__(self, sizes: Sequence[int], n: int, options: Mapping[str, Any]) -> None:
        whole = [MatrixLayout.whole((size, n)) for size in sizes]
        self.ranks = [layout.rank(*_rank_rule(options)) for layout in whole]
        self.transposed = [layout.transposed for layout in whole]
        self.beside = sum(r for r, t in zip(self.ranks, self.transposed, strict=True) if not t)
        self.below = max(
            (r for r, t in zip(self.ranks, self.transposed, strict=True) if t), default=0
        )

    def slot(self, block: int, stack: tuple[int, ...], rows: slice) -> QSlot:
        rank = self.ranks[block]
        if self.transposed[block]:
            return QSlot("Q_rows" if self.beside else "Q", (*stack, rows, slice(rank)))
        before = zip(self.ranks[:block], self.transposed[:block], strict=True)
        start = sum(r for r, t in before if not t)
        return QSlot("Q", (*stack, slice(None), slice(start, start + rank)))


def create_right_factors(
    X: Tensor, parts: Sequence[Part], options: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The state tensors that the parts' slots index, filled with the initial Q's."""
    if flat_shard(X) is not None:
        return {
            part.q.key: part.layout.initial_q(part.rank).to(device=X.device, dtype=dtype)
            for part in parts
        }
    tensors = {
        key: _zeros(X, shape, cut, dtype)
        for key, (shape, cut) in _right_factor_forms(X, options).items()
    }
    for part in parts:
        local(tensors[part.q.key])[part.q.index].copy_(part.layout.initial_q(part.rank))
    return tensors


def right_factor_shapes(X: Tensor, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the state tensors of the right factors, global where they are DTensors."""
    if (shard := flat_shard(X)) is not None:
        return {
            key: (len(held), whole.rank(*_rank_rule(options)))
            for key, whole, held in _flat_right_factors(shard, options)
        }
    return {key: shape for key, (shape, _) in _right_factor_forms(X, options).items()}


def resize_right_factors(
    X: Tensor, saved: Mapping[str, Tensor], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Right factors under other rank options: the first columns stay, new ones are initial.

    The first columns are those to keep: each P is orthonormalised column by column, so that the
    first k columns are a power iteration of rank k of their own, on the largest singular values.

    Args:
        X: the parameter.
        saved: its state tensors under the options ``before``.
        before: options under which they were saved.
        after: those of now, which differ in rank_fraction or rank_multiple_of only.
    """
    if (shard := flat_shard(X)) is not None:
        tensors = {}
        for key, whole, held in _flat_right_factors(shard, after):
            initial = whole.initial_q(whole.rank(*_rank_rule(after)))[held.start : held.stop]
            tensors[key] = initial.to(device=X.device, dtype=saved[key].dtype)
            _copy_columns(saved[key], tensors[key])
        return tensors
    dtype = next(iter(saved.values())).dtype
    tensors = {
        key: _zeros(X, shape, cut, dtype)
        for key, (shape, cut) in _right_factor_forms(X, after).items()
    }
    X, stack_dims = _output_first(X, after), after["stack_dims"]
    rows, columns = (d.held for d in _dimensions(X)[stack_dims : stack_dims + 2])
    width = math.prod(X.shape[stack_dims + 2 :])
    n = X.shape[stack_dims + 1] * width
    sizes = block_sizes(X.shape[stack_dims], after["row_blocks"])
    old, new = (_QSlots(sizes, n, options) for options in (before, after))
    every = (slice(None),) * stack_dims
    for b, (start, size) in enumerate(zip(_starts(sizes), sizes, strict=True)):
        inside = _intersection(rows, range(start, start + size))
        here = slice(inside.start - rows.start, inside.stop - rows.start)
        held = range(columns.start * width, columns.stop * width)
        if new.transposed[b]:
            held = range(inside.start - start, inside.stop - start)
        was, becomes = old.slot(b, every, here), new.slot(b, every, here)
        target = local(tensors[becomes.key])[becomes.index]
        whole = MatrixLayout.whole((size, n))
        target.copy_(whole.initial_q(new.ranks[b])[held.start : held.stop])
        _copy_columns(local(saved[was.key])[was.index], target)
    return tensors


def _copy_columns(source: Tensor, target: Tensor) -> None:
    kept = min(source.shape[-1], target.shape[-1])
    target[..., :kept].copy_(source[..., :kept])


def _right_factor_forms(
    X: Tensor, options: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], list[Placement]]]:
    """Global shape and placements of the state tensors that hold right factors, by key."""
    X, stack_dims = _output_first(X, options), options["stack_dims"]
    n = math.prod(X.shape[stack_dims + 1 :])
    slots = _QSlots(block_sizes(X.shape[stack_dims], options["row_blocks"]), n, options)
    forms = {}
    if slots.beside:
        cut = _cut_like(X, stack_dims, stack_dims + 1)
        forms["Q"] = (*X.shape[:stack_dims], n, slots.beside), cut
    if slots.below:
        cut = _cut_like(X, stack_dims, stack_dims)
        shape = (*X.shape[: stack_dims + 1], slots.below)
        forms["Q_rows" if slots.beside else "Q"] = shape, cut
    return forms


def _rank_rule(options: Mapping[str, Any]) -> tuple[float, int]:
    return options["rank_fraction"], options["rank_multiple_of"]


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def zeros_per_matrix(X: Tensor, parts: Sequence[Part], options: Mapping[str, Any]) -> Tensor:
    """One zero per matrix: shape (*stack dimensions, row blocks), without dimensions of size one.

    float32 or wider; cut as the parameter's stack dimensions are.
    """
    dtype = torch.promote_types(X.dtype, torch.float32)
    if flat_shard(X) is not None:
        shape = (len(parts),) if len(parts) > 1 else ()
        return torch.zeros(shape, dtype=dtype, device=X.device)
    X, stack_dims = _output_first(X, options), options["stack_dims"]
    blocks = len(block_sizes(X.shape[stack_dims], options["row_blocks"]))
    shape = (*X.shape[:stack_dims], *([blocks] if blocks > 1 else []))
    if not stack_dims:
        return torch.zeros(shape, dtype=dtype, device=X.device)
    return _zeros(X, shape, _cut_like(X, stack_dims, None), dtype)


def _cut_like(X: Tensor, stack_dims: int, dimension: int | None) -> list[Placement]:
    """Placements of a state tensor: cut along the stack dimensions and along one more of X's.

    X's ``dimension`` is the state tensor's first after the stack.
    """
    placements: list[Placement] = []
    for placement in _placements(X):
        cuts = getattr(placement, "dim", None)
        if cuts is not None and cuts < stack_dims:
            placements.append(placement)
        elif cuts is not None and cuts == dimension:
            placements.append(_moved(placement, stack_dims))
        else:
            placements.append(Replicate())
    return placements


def _zeros(
    X: Tensor, shape: Sequence[int], placements: list[Placement], dtype: torch.dtype
) -> Tensor:
    if not isinstance(X, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=X.device)
    held = list(shape)
    for d in range(len(held)):
        part = range(held[d])
        for axis in _axes_in_order(placements, d):
            part = _chunk(part, X.device_mesh.size(axis), X.device_mesh.get_local_rank(axis))
        held[d] = len(part)
    piece = torch.zeros(held, dtype=dtype, device=local(X).device)
    stride = torch.empty(tuple(shape), device="meta").stride()
    whole: Tensor = DTensor.from_local(
        piece, X.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole


# -------------------------------------------------------------------- flat shards


def _flat_parts(
    shard: FlatShard,
    X: Tensor,
    options: Mapping[str, Any],
    replicas: Group | None,
    unions: Unions,
) -> Iterator[Part]:
    everywhere = _ranges(shard)
    matrices = list(_flat_matrices(shard, options))
    group = shard.group if group_size(shard.group) > 1 else None
    for i, (first, shape, piece) in enumerate(matrices):
        stored = piece.columns
        shared = _shared_rows(everywhere, first, math.prod(shape) // stored, stored)
        cut = Extent(
            piece.rows, group, shared, borrowed=bool(piece.rows) and piece.start % stored != 0
        )
        whole = Extent(range(stored))
        rows, columns = (whole, cut) if options["input_first"] else (cut, whole)
        layout = _layout(shape, rows, columns, replicas, unions)
        rank = layout.rank(*_rank_rule(options))
        slot = QSlot(_flat_key(i, len(matrices)), ())
        yield Part(layout, piece, rank, slot, ("flat", id(X), i))


def _flat_matrices(
    shard: FlatShard, options: Mapping[str, Any]
) -> Iterator[tuple[int, tuple[int, int], FlatRange]]:
    """Of each matrix its first element's place, its shape, and the range of it held here."""
    stack_dims, input_first = options["stack_dims"], options["input_first"]
    n = math.prod(shard.shape[stack_dims + 1 :])
    if input_first:
        _check_one_block(shard.shape, options["row_blocks"])
        sizes = [shard.shape[stack_dims]]
    else:
        sizes = block_sizes(shard.shape[stack_dims], options["row_blocks"])
    every = [size for _ in _stacks(shard, stack_dims) for size in sizes]
    for first, size in zip(_starts([size * n for size in every]), every, strict=True):
        inside = _intersection(range(shard.start, shard.stop), range(first, first + size * n))
        piece = FlatRange(
            inside.start - first if inside else 0,
            inside.stop - first if inside else 0,
            columns=n,
            offset=inside.start - shard.start if inside else 0,
            input_first=input_first,
        )
        yield first, (n, size) if input_first else (size, n), piece


def _flat_key(matrix: int, count: int) -> str:
    return "Q" if count == 1 else f"Q_{matrix}"


def _flat_right_factors(
    shard: FlatShard, options: Mapping[str, Any]
) -> Iterator[tuple[str, MatrixLayout, range]]:
    """Of each matrix the key of its Q, its whole layout, and the rows of Q that are held here."""
    matrices = list(_flat_matrices(shard, options))
    for i, (_, shape, piece) in enumerate(matrices):
        whole = MatrixLayout.whole(shape)
        # Q has a row for each column of the oriented matrix.
        cut = whole.transposed != options["input_first"]
        held = piece.rows if cut else range(min(shape))
        yield _flat_key(i, len(matrices)), whole, held


def _check_one_block(shape: tuple[int, ...], row_blocks: int | Sequence[int]) -> None:
    if len(block_sizes(shape[-1], row_blocks)) > 1:
        raise ValueError(
            f"row_blocks={row_blocks!r} with input_first=True splits a flat shard of shape {shape} "
            f"along its last dimension, so that no block lies in one piece (ZeRO 1 to 3, FSDP1): "
            f"leave row_blocks out, or use FSDP2, whose parameters are DTensors."
        )


def _stacks(shard: FlatShard, stack_dims: int) -> range:
    return range(math.prod(shard.shape[:stack_dims]))


def _ranges(shard: FlatShard) -> list[tuple[int, int]]:
    """Every rank's [start, stop), of those that hold elements, ascending."""
    ranges = [(shard.start, shard.stop)]
    if group_size(shard.group) > 1:
        ranges = ranges * group_size(shard.group)
        dist.all_gather_object(ranges, (shard.start, shard.stop), group=shard.group)
    held = sorted(r for r in ranges if r[0] < r[1])
    stops = [0, *(stop for _, stop in held)]
    if [start for start, _ in held] != stops[:-1] or stops[-1] != math.prod(shard.shape):
        raise ValueError(
            f"the flat shards {ranges} of a parameter of shape {shard.shape} do not cover its "
            f"{math.prod(shard.shape)} elements once: declare each rank's own range."
        )
    return held


def _shared_rows(
    ranges: Sequence[tuple[int, int]], first: int, rows: int, n: int
) -> tuple[int, ...]:
    """Rows of the matrix at element ``first`` that a boundary between ranks runs through."""
    inside = (start - first for start, _ in ranges if first < start < first + rows * n)
    return tuple(sorted({element // n for element in inside if element % n}))
