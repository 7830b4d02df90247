"""Parameters and their matrices, as the optimizer sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.layout.flat_shard import flat_shard
from curvadion.layout.matrix import UPDATE_SCALES, MatrixLayout, Options, block_sizes
from curvadion.layout.matrix_shards import MatrixShard
from curvadion.layout.placements import check_placements, global_shape
from curvadion.layout.sharded_states import create_squares
from curvadion.ops.page import apply
from curvadion.ops.tensors import Tensors, from_host
from curvadion.plan.state import MOMENTUM, R_SCALE, SPECTRUM, SPECTRUM_WEIGHT

States = MutableMapping[Tensor, MutableMapping[str, Any]]
FEEDING_BACK = set[str]()  # directions that take only a part from M
Number = TypeVar("Number")
TRAINED = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter X, its group and its state; other tensors are this rank's shards."""

    X: Tensor
    group: Options
    states: States
    name: str  # in reports
    index: int = 0  # among all Dion parameters, the same on every rank
    position: int = 0  # of the group
    matrices: list[Matrix] = field(default_factory=list)

    @property
    def local(self) -> Tensor:
        return local(self.X.detach())

    @property
    def G(self) -> Tensor | None:
        """This replica's gradient."""
        gradient = self.X.grad
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"{self.name} has a sparse gradient: use nn.Embedding(sparse=False)")
        return None if gradient is None else local(gradient)

    @property
    def gradient_or_zeros(self) -> Tensor:
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
        """The optimizer's state of X; empty before the first step."""
        # Reading must not create an entry, a state to torch's checkpoints.
        return self.states.get(self.X, {})

    @property
    def M(self) -> Tensor:
        return local(self.state[MOMENTUM])

    @property
    def direction(self) -> str:
        return str(self.group["direction"])

    @property
    def momentum_decay(self) -> float:
        """The factor of M before it takes the gradient."""
        decay: float = 1.0 if self.feedback else self.group["momentum"]
        return decay

    @property
    def feedback(self) -> float:
        """1 - mu if error feedback removes the step's part from M, else 0."""
        # The polar factor uses all of M, which makes both rules the same.
        if self.group["momentum_rule"] == "plain" or self.direction not in FEEDING_BACK:
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
        """The learning rate of a local gradient step."""
        own: float | Tensor | None = self.group["local_lr"]
        return self.group["lr"] if own is None else own

    def create_spectra(self) -> None:
        """Allocate missing spectra of a matrix parameter."""
        if SPECTRUM not in self.state:
            self.state[SPECTRUM] = create_squares(self.X, self.group)
            self.state[SPECTRUM_WEIGHT] = 0.0

    @property
    def stochastic_rounding(self) -> bool:
        return bool(self.group["stochastic_rounding"])

    def rounding_seed(self, step: int, matrix: int = 0) -> int:
        """A seed below 2**32, equal on every replica."""
        return (step * 0x9E3779B1 + self.index * 0x85EBCA6B + matrix) & 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix of a parameter; shards are oriented: globally m >= n."""

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
        """Momentum, (m_i, n_j)."""
        return self.read(self.parameter.M)

    @property
    def Q(self) -> Tensor:
        """Right factor, a view, (n_j, r)."""
        return local(self.parameter.state[self.shard.q.key])[self.shard.q.index]

    @property
    def R_scale(self) -> Tensor:
        """The recent length of R's longest column or M's largest singular value, a view."""
        return local(self.parameter.state[R_SCALE]).view(-1)[self.index]

    @cached_property
    def update_scale(self) -> float:
        """The factor of lr for a step of X."""
        return UPDATE_SCALES[self.group["update_scale"]](*self.layout.shape)

    def elements(self, tensor: Tensor) -> Tensor:
        """Its elements of a local tensor of the parameter, a view of any shape."""
        return self.shard.view.elements(tensor)

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements in a shard, (m_i, n_j)."""
        return self.shard.view.held(shard.mT if self._turned else shard)

    def read(self, tensor: Tensor) -> Tensor:
        """Its shard of a local tensor of the parameter, (m_i, n_j)."""
        shard = self.shard.view.read(tensor)
        return shard.mT if self._turned else shard

    @cached_property
    def _turned(self) -> bool:
        """Whether its oriented shards are transposes."""
        return self.layout.transposed


Stacks = Sequence[Sequence[Matrix]]  # each of one shape, layout and dtype


def step_sizes(matrices: Sequence[Matrix]) -> list[Any]:
    """lr times the scale of each matrix's shape; a product once a group and scale.

    If lr is a tensor, so are these.
    """
    known: dict[tuple[int, float], Any] = {}
    sizes = []
    for m in matrices:
        key = m.parameter.position, m.update_scale
        if key not in known:
            known[key] = m.group["lr"] * m.update_scale
        sizes.append(known[key])
    return sizes


def each_of_group(
    matrices: Sequence[Matrix], number: Callable[[Parameter], Number]
) -> list[Number]:
    """A number for every matrix, computed once a group."""
    one_of_group = {m.parameter.position: m.parameter for m in matrices}
    found = {position: number(p) for position, p in one_of_group.items()}
    return [found[m.parameter.position] for m in matrices]


def weight_decays(matrices: Sequence[Matrix]) -> list[Any]:
    """The factors 1 - lr weight_decay of the matrices."""
    return each_of_group(matrices, attrgetter("decay"))


@contextmanager
def open_shards(matrices: Sequence[Matrix], *tensors: Tensors) -> Iterator[list[list[Tensor]]]:
    """Shards (m_i, n_j) of matrices in local tensors, to write; copies are written back."""
    shards = [[m.read(t) for m, t in zip(matrices, each, strict=True)] for each in tensors]
    yield shards
    for each, opened in zip(tensors, shards, strict=True):
        for m, tensor, shard in zip(matrices, each, opened, strict=True):
            if not m.shard.view.is_view:
                m.elements(tensor).copy_(m.held(shard))


def rounding_seeds(matrices: Sequence[Matrix], step: int) -> list[int] | None:
    """Seeds if these matrices have stochastic rounding; all or none have it."""
    if not any(m.parameter.stochastic_rounding for m in matrices):
        return None
    return [m.parameter.rounding_seed(step, m.index) for m in matrices]


def stacked(shards: Tensors, m: Matrix) -> Tensor:
    """A copy of shards like m's, (k, m_i, n_j), with their strides, for products."""
    stack = empty_stack(shards, product_dtype(m.parameter.X))
    torch._foreach_copy_(list(stack), list(shards))
    return stack


def empty_stack(shards: Tensors, dtype: torch.dtype) -> Tensor:
    """Memory for k shards in a dtype, (k, m_i, n_j), with the order of their strides."""
    turned = shards[0].stride(0) < shards[0].stride(1)
    like = shards[0].mT if turned else shards[0]
    stack = like.new_empty(len(shards), *like.shape, dtype=dtype)
    return stack.mT if turned else stack


def remember_scales(stacks: Stacks, scales: Tensors, moves: Tensor | None) -> None:
    """Store the momenta's scales, (k,) by stack."""
    for matrices, scale in zip(stacks, scales, strict=True):
        ops.copy_([m.R_scale for m in matrices], scale, moves)


def scale_before(matrices: Sequence[Matrix]) -> Tensor:
    """The momenta's last scale, decayed since then, (k,) float64."""
    before = torch.stack([m.R_scale for m in matrices]).double()
    decays = each_of_group(matrices, scale_decay)
    return before * from_host(decays, before.dtype, before.device)


def scale_decay(p: Parameter) -> float:
    """The factor by which a scale decays in a step: half as fast as the momentum."""
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
    return torch.promote_types(X.dtype, torch.float32)


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
    stack_dims, input_first = group["stack_dims"], group["input_first"]
    needed = f"stack_dims={stack_dims} needs parameters of {stack_dims + 2} dimensions"
    if len(shape) < stack_dims + 2 or 0 in shape:
        raise ValueError(
            f"{name} has shape {shape}, but algorithm='dion' with {needed} or more, and "
            f"elements: use curvadion.param_groups(model). For FSDP1 first call "
            f"curvadion.integrations.fsdp.declare_flat_shards(model)."
        )
    if input_first and len(shape) != stack_dims + 2:
        raise ValueError(
            f"{name} has shape {shape}, but input_first=True with {needed}, (..., in, out)"
        )
    rows = shape[-1] if input_first else shape[stack_dims]
    block_sizes(rows, group["row_blocks"], f"{name}: row_blocks")
    if not local(X.detach()).is_contiguous() and len(shape) > 2:
        raise ValueError(f"{name} of shape {shape} is not contiguous: call contiguous() first")
