"""What hooks on the update see, and may change, before matrices move.

A step of a matrix X (m x n, rows are outputs) along its direction U is

    X <- (1 - lr weight_decay) X - lr scale U

A hook is called with each batch once its directions are known, and before this line. On shards
it sees this rank's rows and columns; sums over rows and matrices hide where the rest lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from curvadion import ops
from curvadion.comm.groups import Group
from curvadion.layout.exchange import sum_shared_, sums
from curvadion.layout.matrix import Extent, Options
from curvadion.ops.tensors import Tensors, from_host
from curvadion.plan.parameter import Matrix, Parameter, product_dtype


class MatrixUpdate:
    """A matrix, or this rank's shard of it, and the step that it is about to take.

    X, M and U have shape (rows on this rank, columns on this rank): rows are outputs, also if the
    parameter is stored with the input first, and several dimensions of inputs are flattened. Of
    a row that a flat shard (FSDP1, ZeRO) cuts, they are zero where the elements lie on another
    rank. So each element is on one rank, or on copies of it, and products keep that.

    Args:
        matrix: of the plan.
        X: its weights, oriented as the plan has them.
        U: its direction, oriented likewise.
        momentum_of: gives the momentum of its parameter, of the shape of its local tensor.

    Attributes:
        X: the weights; see :meth:`UpdateBatch.write_` before changing them.
        U: the direction, float32 or wider; a copy that may be changed in place or replaced.
        lr: of the group, a number or a tensor; may be replaced.
        weight_decay: of the group; may be replaced.
        scale: the factor of U that follows from the matrix's shape (``update_scale``).
        name: of the parameter.
        index: of the matrix among this rank's of the parameter, as of stacked experts.
        group: the parameter group; read only.
        shape: (m, n) of the whole matrix.
        rows: the numbers of this rank's rows in the parameter, of which the matrix may be a block
            (``row_blocks``).
        columns: the numbers of this rank's columns, likewise (``column_blocks``).
        row_group: the ranks with other rows of these columns; None if all are here.
        column_group: the ranks with other columns of these rows; None if all are here.
    """

    def __init__(
        self, matrix: Matrix, X: Tensor, U: Tensor, momentum_of: Callable[[Parameter], Tensor]
    ) -> None:
        self._matrix = matrix
        self._momentum_of = momentum_of
        self.X = matrix.reoriented(X)
        self.U = matrix.reoriented(U)
        self.lr: float | Tensor = matrix.group["lr"]
        self.weight_decay: float = matrix.group["weight_decay"]
        self.scale: float = matrix.update_scale
        self.name: str = matrix.parameter.name
        self.index: int = matrix.index
        self.group: Options = matrix.group
        self.shape: tuple[int, int] = matrix.layout.shape
        self.rows = _in_parameter(matrix.rows_of_X, matrix, "row_blocks", self.shape[0])
        self.columns = _in_parameter(matrix.columns_of_X, matrix, "column_blocks", self.shape[1])
        self.row_group: Group | None = matrix.rows_of_X.group
        self.column_group: Group | None = matrix.columns_of_X.group

    @property
    def M(self) -> Tensor:
        """The momentum after this step; read only."""
        momentum = self._momentum_of(self._matrix.parameter)
        return self._matrix.reoriented(self._matrix.read(momentum))

    def on_device(self, number: float | Tensor) -> Tensor:
        """A number of a group, or one computed from such, as () beside U.

        Multiply tensors by this instead of the number: a captured step then reads it anew.
        """
        if isinstance(number, Tensor):
            return number.to(self.U.device, self.U.dtype)
        return from_host([number], self.U.dtype, self.U.device)[0]

    @property
    def _direction(self) -> Tensor:
        """U as the plan orients it."""
        return self._matrix.reoriented(self.U)

    def __repr__(self) -> str:
        return f"MatrixUpdate({self.name!r}, rows={self.rows}, columns={self.columns})"


@dataclass(frozen=True)
class UpdateBatch:
    """The matrices of a batch, to iterate over; a rank without experts may have none.

    Args:
        updates: of this rank's matrices, in an order that all ranks with shards share.
        moves: () bool on the device, false if a gradient is not finite, so that the step is
            cancelled; None if the host knows that it is not.
    """

    updates: Sequence[MatrixUpdate]
    moves: Tensor | None

    def __iter__(self) -> Iterator[MatrixUpdate]:
        return iter(self.updates)

    def __len__(self) -> int:
        return len(self.updates)

    def write_(self, tensor: Tensor, value: Tensor) -> None:
        """tensor <- value, unless the step is cancelled on the device.

        For X and for a hook's own states. U needs no such care.

        Args:
            tensor: to write, of any floating dtype.
            value: of its shape, of any floating dtype.
        """
        tensor.copy_(ops.if_moving(value.to(tensor.dtype), tensor, self.moves))

    def row_sums(self, values: Tensors) -> list[Tensor]:
        """Sums over whole rows, whoever holds their columns; collective.

        Args:
            values: for each matrix a tensor like its U, zero where U is a zero for an element of
                another rank, as products of U, X and M are.

        Returns:
            For each matrix (rows on this rank,), float32 or wider.
        """
        summands = []
        for value in values:
            summands.append(value.to(product_dtype(value)).sum(1))
        totals = sums(summands, [u.column_group for u in self.updates])
        # Rows that a flat shard cuts are summed over the ranks that hold parts of them.
        stacks = [total[None, :, None] for total in totals]
        sum_shared_(stacks, [u._matrix.rows_of_X for u in self.updates])
        return totals

    def sums(self, numbers: Tensors) -> list[Tensor]:
        """Sums over all rows of whole matrices, each row counted once; collective.

        Args:
            numbers: for each matrix a number a row, (rows on this rank,), as :meth:`row_sums`
                returns.

        Returns:
            For each matrix ().
        """
        summands = []
        for update, of_rows in zip(self.updates, numbers, strict=True):
            summands.append(update._matrix.rows_of_X.counted(of_rows[:, None]).sum(0))
        totals = sums(summands, [u.row_group for u in self.updates])
        return [total[0] for total in totals]


UpdateHook = Callable[[UpdateBatch], None]


def is_capturable(hook: UpdateHook) -> bool:
    """Whether a CUDA graph may repeat what the hook does."""
    return bool(getattr(hook, "capturable", False))


def _in_parameter(held: Extent, matrix: Matrix, key: str, length: int) -> range:
    """The rows or columns of a matrix on this rank, numbered in the parameter.

    Args:
        held: the same, numbered in the matrix.
        matrix: perhaps one of the blocks of its parameter's rows or columns.
        key: the group key with these blocks.
        length: of the matrix in this direction, over all ranks.
    """
    blocks = matrix.group[key]
    if isinstance(blocks, int):
        first = matrix.index % blocks * length
    else:
        first = sum(blocks[: matrix.index % len(blocks)])
    here = held.indices
    return range(first + here.start, first + here.stop)
