"""Parameters and their matrices, as the optimizer sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.layout.flat_shard import flat_shard
from curvadion.layout.matrix import (
    UPDATE_SCALES,
    Block,
    Extent,
    MatrixLayout,
    Options,
    block_sizes,
    matrix_shape,
)
from curvadion.layout.matrix_shards import MatrixShard, sizes_in_memory
from curvadion.layout.placements import check_placements, global_shape
from curvadion.layout.sharded_states import create_squares
from curvadion.ops.page import apply
from curvadion.ops.tensors import (
    Tensors,
    from_host,
    is_column_major,
    is_dense,
    wide_dtype,
    with_strides_of,
)
from curvadion.plan.coded_states import CODED, KEYS
from curvadion.plan.state import MOMENTUM, R_SCALE, RESIDUAL, SPECTRUM, SPECTRUM_WEIGHT

States = MutableMapping[Tensor, MutableMapping[str, Any]]
Number = TypeVar("Number")
TRAINED = (torch.float64, torch.float32, torch.bfloat16)
# Devices whose operations on single elements take only tensors without gaps in memory.
WITHOUT_GAPS = ("cuda",)
# Above the numbers of a parameter's matrices, whose weights are rounded at random, too.
SEED_OF_STATES = 1 << 31
# The state of a parameter that has none. A write raises TypeError, where one to a new
# dictionary would vanish. It is typed Any because writers have created a state before.
_NO_STATE: Any = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter X, its group and its state; other tensors are this rank's shards.

    Args:
        X: the parameter as the optimizer got it, perhaps a DTensor.
        group: its parameter group, whose values may change between steps.
        states: the states of all parameters, by parameter.
        name: in reports and errors.
        index: its position among the plan's parameters, the same on every rank; rounding seeds
            contain it.
        position: of the group in ``param_groups``.
        feeds_back: whether error feedback subtracts from M what a step has used; copied from
            ``Direction.feeds_back``.
        matrices: this rank's, filled by the plan; empty for AdamW and Lion.
    """

    X: Tensor
    group: Options
    states: States
    name: str
    index: int = 0
    position: int = 0
    feeds_back: bool = False
    matrices: list[Matrix] = field(default_factory=list)

    @property
    def local(self) -> Tensor:
        return local(self.X.detach())

    @property
    def G(self) -> Tensor | None:
        """This replica's gradient, of the shape of :attr:`local`; None without one."""
        gradient = self.X.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            raise RuntimeError(f"{self.name} has a sparse gradient: use nn.Embedding(sparse=False)")
        return local(gradient)

    @property
    def gradient_or_zeros(self) -> Tensor:
        """The gradient; zeros without one, because other replicas may have one."""
        G = self.G
        return torch.zeros_like(self.local) if G is None else G

    @property
    def rests(self) -> bool:
        """Whether its gradient is None, so that it does not move in a local step."""
        # FSDP1 gives no gradient to a parameter without elements here. All ranks of a replica
        # must agree, so for a flat shard a missing gradient is zero.
        return self.X.grad is None and flat_shard(self.X) is None

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The optimizer's state of X; before the first step empty and read-only."""
        # Reading must not create an entry: torch's checkpoints would save it as a state.
        return self.states.get(self.X, _NO_STATE)

    @property
    def M(self) -> Tensor:
        """The momentum as it is stored: of the shape of :attr:`local`, or a vector of codes.

        :func:`open_shards` and :func:`shards_without_gaps` take both.
        """
        return local(self.state[MOMENTUM])

    @property
    def keeps_codes(self) -> bool:
        """Whether its states are in 8 bits, which a new plan compares with its group."""
        return self.group.get("state_dtype") == CODED

    def is_coded(self, key: str) -> bool:
        """Whether a state is a vector of codes of :mod:`curvadion.plan.coded_states`."""
        # Other optimizers keep tensors of 8 bits in forms of their own, also under these keys, but
        # the residual is the sync's.
        others = self.group["algorithm"] == "inner" and key != RESIDUAL
        return not others and ops.is_coded(self.state[key])

    @property
    def direction(self) -> str:
        return str(self.group["direction"])

    @property
    def momentum_decay(self) -> float:
        """The factor of M before it takes the gradient: the first half of the momentum rule.

        ====================================  ==============  ==========  ====================
        ``momentum_rule``, and the direction  momentum_decay  feedback    so that a step does
        ====================================  ==============  ==========  ====================
        "error_feedback", which feeds back    1               1 - mu      M <- M + G, and then
                                                                          M <- M - (1 - mu) of
                                                                          what the step took
        "error_feedback", any other           mu              0           M <- mu M + G
        "plain"                               mu              0           M <- mu M + G
        ====================================  ==============  ==========  ====================

        ``InnerStep`` applies the first half, or ``Direction.begin`` for a direction that adds
        gradients itself; ``Direction.step`` applies the feedback. A local step along the
        gradient takes the first half only.
        """
        decay: float = 1.0 if self.feedback else self.group["momentum"]
        return decay

    @property
    def feedback(self) -> float:
        """The share of what a step has used that M loses; :attr:`momentum_decay` has the table."""
        if self.group["momentum_rule"] == "plain":
            return 0.0
        # A direction that uses all of M, such as the polar factor, leaves nothing to feed
        # back, which makes both rules the same.
        if not self.feeds_back:
            return 0.0
        feedback: float = 1.0 - self.group["momentum"]
        return feedback

    @property
    def decay(self) -> float | Tensor:
        """The factor 1 - lr weight_decay of X."""
        factor: float | Tensor = 1 - self.group["lr"] * self.group["weight_decay"]
        return factor

    @property
    def local_lr(self) -> float | Tensor:
        """The learning rate of a local gradient step: ``local_lr``, or ``lr`` if it is None."""
        local_lr: float | Tensor | None = self.group["local_lr"]
        if local_lr is None:
            local_lr = self.group["lr"]
        return local_lr

    @cached_property
    def blocks_beside(self) -> range | None:
        """The numbers of the blocks of stored columns that local tensors consist of.

        None unless the matrices are such blocks, and those on this rank are equally wide.
        """
        blocks = set()
        shapes = set()
        for m in self.matrices:
            view = m.shard.view
            shape = tuple(m.read(self.local).shape)
            if not isinstance(view, Block) or self.local.dim() != len(view.stack) + 2:
                return None
            if (view.columns == slice(None)) != view.input_first:
                return None  # they are blocks of rows, or no blocks
            if 0 not in shape:
                blocks.add(m.shard.block)
                shapes.add(shape)
        if len(shapes) != 1:
            return None
        return range(min(blocks), max(blocks) + 1)

    def create_spectra(self) -> None:
        """Allocate S and its weight for a matrix parameter that has none."""
        if SPECTRUM not in self.state:
            self.state[SPECTRUM] = create_squares(self.X, self.group)
            self.state[SPECTRUM_WEIGHT] = 0.0

    @property
    def stochastic_rounding(self) -> bool:
        return bool(self.group["stochastic_rounding"])

    def rounding_seed(self, step: int, matrix: int = 0) -> int:
        """A seed below 2**32 of a step and a matrix, equal on every replica.

        Args:
            step: the number of earlier steps.
            matrix: of the parameter; a number from :data:`SEED_OF_STATES` on is for its states.
        """
        # Multiples of two large odd numbers, so that the seeds of neighbouring steps and
        # parameters lie far apart; a parameter's matrices take the numbers between.
        return (step * 0x9E3779B1 + self.index * 0x85EBCA6B + matrix) & 0xFFFFFFFF

    def state_seed(self, step: int, key: str, matrix: int = 0) -> int:
        """A seed of a step with which a state in 8 bits is rounded at random.

        Args:
            step: the number of earlier steps.
            key: of the state.
            matrix: of the parameter, whose codes are rounded.
        """
        # Each state of a parameter, and each of its matrices, has noise of its own.
        keys = (*KEYS, RESIDUAL)
        return self.rounding_seed(step, SEED_OF_STATES + matrix * len(keys) + keys.index(key))

    @cached_property
    def code_places(self) -> list[slice] | None:
        """Where the codes of each matrix lie in its momentum's; None if matrices share blocks."""
        sizes = sizes_in_memory(self.X, self.group)
        return None if sizes is None else ops.code_places(sizes)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix of a parameter; shards (m_i, n_j) are oriented: globally m >= n."""

    parameter: Parameter
    shard: MatrixShard
    index: int  # among the parameter's matrices on this rank

    @property
    def group(self) -> Options:
        return self.parameter.group

    @property
    def layout(self) -> MatrixLayout:
        return self.shard.layout

    @property
    def M(self) -> Tensor:
        """Momentum, (m_i, n_j), to read; a copy if it is stored in 8 bits."""
        [shard] = _Copies([self], [self.parameter.M], gaps=True, stay_coded=[False]).shards
        return shard

    @property
    def Q(self) -> Tensor:
        """Right factor, a view, (n_j, r)."""
        return local(self.parameter.state[self.shard.q.key])[self.shard.q.index]

    @property
    def R_scale(self) -> Tensor:
        """The length of R's longest column, or M's largest singular value; a view, ().

        It is that of the last step that stored one. The next step reads it to tell rounding
        errors from a signal: columns of R, or a momentum, far below their recent scale are
        zero. Corrections at an opening divide momenta by it.
        """
        return local(self.parameter.state[R_SCALE]).view(-1)[self.index]

    @cached_property
    def update_scale(self) -> float:
        """The factor of lr in a step of X, from the global shape of X, which is not oriented."""
        return UPDATE_SCALES[self.group["update_scale"]](*self.layout.shape)

    def elements(self, tensor: Tensor) -> Tensor:
        """Its elements of a local tensor of the parameter, of any shape, to read."""
        return self.shard.view.elements(tensor)

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements in a shard (m_i, n_j), in the shape of :meth:`elements`."""
        return self.shard.view.held(shard.mT if self._transposed else shard)

    def read(self, tensor: Tensor) -> Tensor:
        """Its shard of a local tensor of the parameter, (m_i, n_j)."""
        shard = self.shard.view.read(tensor)
        return shard.mT if self._transposed else shard

    def beside(self, blocks: Tensor, position: int) -> Tensor:
        """Its shard (m_i, n_j) among blocks that lie beside each other.

        Args:
            blocks: of its parameter, as stored, (*stack, blocks, rows, columns).
            position: of the matrix's block among them.
        """
        view = self.shard.view
        assert isinstance(view, Block)
        shard = blocks[view.stack][position]
        return shard.mT if view.input_first != self._transposed else shard

    def store(self, tensor: Tensor, shard: Tensor) -> None:
        """Write its shard (m_i, n_j) into a local tensor of the parameter."""
        self.shard.view.store(tensor, shard.mT if self._transposed else shard)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether other blocks lie between its rows in memory, on a device that minds."""
        tensor = self.parameter.local
        return tensor.device.type in WITHOUT_GAPS and not is_dense(self.read(tensor))

    @property
    def code_place(self) -> slice | None:
        """Where the codes of its momentum lie in its parameter's; None if it has none of its own.

        That is if its shard has gaps in memory, or other ranks hold parts of its rows.
        """
        places = self.parameter.code_places
        return None if places is None else places[self.index]

    def codes_among(self, codes: Tensor) -> Tensor:
        """Its own codes among those of its parameter's momentum; a view."""
        # Most matrices are whole parameters, and each view takes the host some time.
        return codes if len(self.parameter.matrices) == 1 else codes[self.code_place]

    @cached_property
    def stays_coded(self) -> bool:
        """Whether operations take the codes of its momentum as they are."""
        return self.parameter.keeps_codes and self.code_place is not None

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Of its shard of the weights, (m_i, n_j): the order of codes."""
        return self.read(self.parameter.local).stride()

    def own(self, shard: Tensor) -> Tensor:
        """A shard (m_i, n_j) with zeros for elements of other ranks, of rows that they share."""
        if self.shard.view.is_view:
            return shard
        flat = torch.empty_like(self.parameter.local, dtype=shard.dtype)
        self.store(flat, shard)
        return self.read(flat)

    @property
    def rows_of_X(self) -> Extent:
        """This rank's rows of the matrix as X has it, which are outputs."""
        return self.layout.columns if self._transposed else self.layout.rows

    @property
    def columns_of_X(self) -> Extent:
        """This rank's columns of the matrix as X has it."""
        return self.layout.rows if self._transposed else self.layout.columns

    def reoriented(self, shard: Tensor) -> Tensor:
        """From B's orientation to X's, outputs first, or back; a view."""
        return shard.mT if self._transposed else shard

    @cached_property
    def _transposed(self) -> bool:
        """Whether B is the transpose of X."""
        return self.layout.transposed


Stacks = Sequence[Sequence[Matrix]]  # each of one shape, layout and dtype


def step_sizes(matrices: Sequence[Matrix]) -> list[Any]:
    """lr times the scale of each matrix's shape, numbers or tensors as lr is.

    Each product is computed once a group and scale: a model has thousands of matrices, and
    each product of a tensor is a launch.
    """
    products: dict[tuple[int, float], Any] = {}
    sizes = []
    for m in matrices:
        key = (m.parameter.position, m.update_scale)
        if key not in products:
            products[key] = m.group["lr"] * m.update_scale
        sizes.append(products[key])
    return sizes


def each_of_group(
    parameters: Sequence[Parameter], number: Callable[[Parameter], Number]
) -> list[Number]:
    """A number for every parameter, computed once a group from any of its parameters."""
    parameter_of_group = {p.position: p for p in parameters}
    number_of_group = {position: number(p) for position, p in parameter_of_group.items()}
    return [number_of_group[p.position] for p in parameters]


def weight_decays(matrices: Sequence[Matrix]) -> list[Any]:
    """The factors 1 - lr weight_decay of the matrices."""
    return each_of_group([m.parameter for m in matrices], attrgetter("decay"))


@contextmanager
def open_shards(
    matrices: Sequence[Matrix],
    *tensors: Tensors,
    gaps: bool = True,
    stay_coded: Sequence[bool] = (),
    step: int | None = None,
) -> Iterator[list[list[Tensor]]]:
    """Shards (m_i, n_j) of matrices in local tensors, to write.

    Most shards are views. Those of a flat shard whose rows lie on two ranks are copies, and so
    are those of momenta in 8 bits. Copies are written back at the end of the block, unless it
    raises.

    Args:
        matrices: k matrices.
        tensors: lists of k local tensors of their parameters, such as weights and momenta.
        gaps: whether shards may have gaps in memory; else those with gaps are copies, too.
        stay_coded: by matrix whether it is not opened, but yields its vector of codes; see
            :attr:`Matrix.stays_coded`. () opens all.
        step: the number of earlier steps, to round momenta in 8 bits at random; None rounds to
            nearest.
    """
    shards_by_list = []
    copies_by_list = []
    for local_tensors in tensors:
        copies = _Copies(matrices, local_tensors, gaps=gaps, stay_coded=stay_coded)
        shards_by_list.append(copies.shards)
        copies_by_list.append(copies)
    yield shards_by_list
    for copies in copies_by_list:
        copies.write_back(step)


def shards_without_gaps(
    matrices: Sequence[Matrix], tensors: Tensors, stay_coded: Sequence[bool] = ()
) -> list[Tensor]:
    """Shards (m_i, n_j) of matrices in local tensors of their parameters, to read.

    Args:
        matrices: k matrices.
        tensors: k local tensors of their parameters.
        stay_coded: as in :func:`open_shards`.
    """
    return _Copies(matrices, tensors, gaps=False, stay_coded=stay_coded).shards


def gradients_without_gaps(matrices: Sequence[Matrix], G: Tensors) -> list[Tensor]:
    """Shards (m_i, n_j) of gradients, to read.

    Those beside codes have the order of the weights in memory, which is that of codes.

    Args:
        matrices: k matrices.
        G: k gradients of their parameters.
    """
    shards = shards_without_gaps(matrices, G)
    for i, m in enumerate(matrices):
        if m.stays_coded and shards[i].stride() != m.strides:
            shards[i] = with_strides_of(m.read(m.parameter.local), shards[i])
    return shards


class _Copies:
    """Shards of matrices in local tensors: views, and copies where views do not do.

    Momenta in 8 bits are decoded matrix by matrix, or, where matrices share blocks of codes, as a
    whole. Equal blocks that lie beside each other are copied at once, as (*stack, blocks, rows,
    columns), because each launch takes time.

    Args:
        matrices: k matrices.
        tensors: k local tensors of their parameters.
        gaps: whether shards may have gaps in memory.
        stay_coded: as in :func:`open_shards`.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        tensors: Tensors,
        *,
        gaps: bool,
        stay_coded: Sequence[bool],
    ) -> None:
        self._alone: list[tuple[Matrix, Tensor, Tensor]] = []  # with its tensor and its copy
        self._beside: dict[Parameter, tuple[Tensor, Tensor]] = {}  # views, and their copies
        stays = stay_coded or [False] * len(matrices)
        # What is opened: its codes, and a tensor of the shape and strides of its elements.
        opened: dict[Matrix | Parameter, tuple[Tensor, Tensor]] = {}
        for m, tensor, stay in zip(matrices, tensors, stays, strict=True):
            if not ops.is_coded(tensor) or stay:
                continue
            if m.code_place is None:
                opened[m.parameter] = (tensor, m.parameter.local)
            else:
                opened[m] = (m.codes_among(tensor), m.read(m.parameter.local))
        self._opened = list(opened)
        codes = [codes for codes, _ in opened.values()]
        like = [shard for _, shard in opened.values()]
        self._momenta = ops.Opened(codes, like, [False] * len(codes))
        elements_of = dict(zip(opened, self._momenta.tensors, strict=True))
        self.shards: list[Tensor] = []
        for m, tensor, stay in zip(matrices, tensors, stays, strict=True):
            if ops.is_coded(tensor) and stay:
                self.shards.append(m.codes_among(tensor))
            elif m in elements_of:
                self.shards.append(elements_of[m])
            else:
                elements = elements_of.get(m.parameter, tensor)
                self.shards.append(self._shard(m, elements, gaps=gaps or not m.has_gaps))

    def write_back(self, step: int | None) -> None:
        """Write the copies into the tensors; step: as in :func:`open_shards`."""
        for m, tensor, shard in self._alone:
            m.store(tensor, shard)
        for blocks, copy in self._beside.values():
            blocks.copy_(copy)
        seeds = None
        if step is not None:
            seeds = [_seed(owner, step) for owner in self._opened]
        self._momenta.close(seeds)

    def _shard(self, m: Matrix, tensor: Tensor, *, gaps: bool) -> Tensor:
        """A matrix's shard, (m_i, n_j); gaps: whether it may have any, or has none."""
        if gaps:
            shard = m.read(tensor)
            if not m.shard.view.is_view:
                self._alone.append((m, tensor, shard))
            return shard
        blocks_beside = m.parameter.blocks_beside
        if blocks_beside is None:
            shard = m.read(tensor)
            by_column = is_column_major(shard)
            shard = shard.mT.contiguous().mT if by_column else shard.contiguous()
            self._alone.append((m, tensor, shard))
            return shard
        if m.parameter not in self._beside:
            # (*stack, rows, blocks, columns) -> (*stack, blocks, rows, columns)
            blocks = tensor.unflatten(-1, (len(blocks_beside), -1)).movedim(-2, -3)
            self._beside[m.parameter] = (blocks, blocks.contiguous())
        _, copy = self._beside[m.parameter]
        return m.beside(copy, m.shard.block - blocks_beside.start)


def elements_of(matrices: Sequence[Matrix], tensors: Tensors) -> list[Tensor]:
    """The matrices' elements of local tensors of their parameters, of any shape, to read."""
    if any(m.has_gaps for m in matrices):
        return shards_without_gaps(matrices, tensors)
    return [m.elements(tensor) for m, tensor in zip(matrices, tensors, strict=True)]


def _seed(owner: Matrix | Parameter, step: int) -> int:
    """The seed with which codes of a momentum are rounded after a step."""
    if isinstance(owner, Matrix):
        return owner.parameter.state_seed(step, MOMENTUM, owner.index)
    return owner.state_seed(step, MOMENTUM)


def rounding_seeds(matrices: Sequence[Matrix], step: int) -> list[int] | None:
    """A seed per matrix; None without stochastic rounding, which all or none of them have."""
    if not any(m.parameter.stochastic_rounding for m in matrices):
        return None
    return [m.parameter.rounding_seed(step, m.index) for m in matrices]


def stacked(shards: Tensors, m: Matrix) -> Tensor:
    """A copy of shards like m's, (k, m_i, n_j), with the order of their strides, for products.

    Its dtype is float32 or wider.
    """
    stack = empty_stack(shards[0], len(shards), product_dtype(m.parameter.X))
    torch._foreach_copy_(list(stack), list(shards))
    return stack


def empty_stack(shard: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Memory for matrices like a shard (m_i, n_j), (count, m_i, n_j), in the order of its strides.

    Args:
        shard: a matrix.
        count: of matrices.
        dtype: of the memory.
    """
    if is_column_major(shard):
        return shard.new_empty(count, *shard.mT.shape, dtype=dtype).mT
    return shard.new_empty(count, *shard.shape, dtype=dtype)


def remember_scales(stacks: Stacks, scales: Tensors, moves: Tensor | None) -> None:
    """Store the momenta's scales, (k,) by stack, for :func:`scale_before` of the next step."""
    for matrices, scale in zip(stacks, scales, strict=True):
        ops.copy_([m.R_scale for m in matrices], scale, moves)


def scale_before(matrices: Sequence[Matrix]) -> Tensor:
    """The momenta's last scale, decayed since then, (k,) float64."""
    scales = torch.stack([m.R_scale for m in matrices]).double()
    decays = each_of_group([m.parameter for m in matrices], scale_decay)
    return scales * from_host(decays, scales.dtype, scales.device)


def scale_decay(p: Parameter) -> float:
    """sqrt(mu), the factor of a scale in a step: it decays half as fast as the momentum."""
    # apply() keeps mu live while a step is recorded, so that a replay follows it.
    decay: float = apply(math.sqrt, p.group["momentum"])
    return decay


def dtype_of(name: str | None, X: Tensor) -> torch.dtype:
    """The dtype that a group's key names; None is the parameter's own."""
    dtype: torch.dtype = X.dtype if name is None else getattr(torch, name)
    return dtype


def names(group: dict[str, Any], position: int) -> list[str]:
    """The group's parameter names, or their positions in param_groups."""
    unnamed = [f"param_groups[{position}]['params'][{i}]" for i in range(len(group["params"]))]
    return list(group.get("param_names") or unnamed)


def product_dtype(X: Tensor) -> torch.dtype:
    """The dtype of products with X or its momentum: float32 or wider."""
    return wide_dtype(X.dtype)


def check_trained(X: Tensor, name: str) -> None:
    """Raise ValueError for an unsupported dtype, at the first step: frameworks cast."""
    if X.is_meta:
        raise ValueError(
            f"{name} is on the meta device: call model.to_empty(device=...) and initialise "
            f"the weights before building the optimizer"
        )
    if X.requires_grad and X.dtype not in TRAINED:
        raise ValueError(
            f"{name} has dtype {X.dtype}: train float32, float64 or bfloat16 weights under "
            "torch.autocast (float16: with a torch.amp.GradScaler)"
        )


def check_parameter(X: Tensor, name: str, group: Options) -> None:
    """Raise ValueError if the group's algorithm does not support the parameter."""
    check_placements(X, name)
    if group["algorithm"] != "dion":
        return
    shape = global_shape(X)
    stack_dims = group["stack_dims"]
    input_first = group["input_first"]
    needed = f"stack_dims={stack_dims} needs parameters of {stack_dims + 2} dimensions"
    if len(shape) < stack_dims + 2 or 0 in shape:
        raise ValueError(
            f"{name} has shape {shape}, but algorithm='dion' with {needed} or more, and "
            f"elements: use curvadion.param_groups(model). For FSDP1 first call "
            f"curvadion.integrations.fsdp.declare_flat_shards(model)."
        )
    if input_first and len(shape) != stack_dims + 2:
        raise ValueError(
            f"{name} has shape {shape}, but input_first=True with {needed}, (..., in, out): "
            f"reshape it, or leave input_first out"
        )
    rows, columns = matrix_shape(shape, group)
    row_blocks = block_sizes(rows, group["row_blocks"], f"{name}: row_blocks")
    column_blocks = block_sizes(columns, group["column_blocks"], f"{name}: column_blocks")
    if len(column_blocks) > 1 and len(row_blocks) > 1:
        raise ValueError(
            f"{name} has row_blocks={group['row_blocks']!r} and "
            f"column_blocks={group['column_blocks']!r}: leave one of them out"
        )
    width = math.prod(shape[stack_dims + 2 :])
    if any(block % width for block in column_blocks):
        raise ValueError(
            f"{name} has shape {shape} and column_blocks={group['column_blocks']!r}: use blocks "
            f"of a multiple of {width} columns, which are those of one input channel"
        )
    # Rows of more than two dimensions are read as a view with the last ones flattened.
    if len(shape) > 2 and not local(X.detach()).is_contiguous():
        raise ValueError(f"{name} of shape {shape} is not contiguous: call contiguous() first")
