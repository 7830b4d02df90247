"""The optimizer's parameters as it works on them: matrices in stacks, and the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, groupby, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.comm.groups import Unions
from curvadion.layout.blocks import block_sizes
from curvadion.layout.dtensor import local
from curvadion.layout.flat_shard import flat_shard_state
from curvadion.layout.matrices import MatrixShard, matrices_of, zeros_per_matrix
from curvadion.layout.matrix import MatrixLayout
from curvadion.layout.parameters import check_placements, check_replicas, global_shape, groups_of
from curvadion.layout.right_factors import create_right_factors
from curvadion.ops.tensors import FixedTensors, Parameters, Tensors
from curvadion.optim.hyperparameters import LR_SUM
from curvadion.update.power_iteration import RightFactor, Stack
from curvadion.update.scalar import STATE_KEYS, create_state

# State of what takes Dion: its group's LR_SUM when replicas last agreed on its weights.
LR_AT_AGREEMENT = "lr_at_agreement"
# State of what takes Dion: per matrix, how long the longest column of R has been lately.
R_SCALE = "R_scale"

States = MutableMapping[Tensor, dict[str, Any]]
Number = TypeVar("Number")


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter X with its group's hyperparameters, all states and its name in reports.

    Tensors are handed out as the pieces held here: ``local`` of X, ``G``, ``M``. ``number`` is the
    place among all that take Dion, the same on every rank.
    """

    X: Tensor
    group: dict[str, Any]
    states: States
    name: str
    number: int = 0
    parts: tuple[MatrixShard, ...] = ()
    matrices: list[Matrix] = field(default_factory=list)

    @property
    def local(self) -> Tensor:
        return local(self.X.detach())

    @property
    def G(self) -> Tensor | None:
        """This replica's gradient."""
        gradient = self.X.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            raise RuntimeError(
                f"{self.name} has a sparse gradient: pass sparse=False to its module"
            )
        return local(gradient)

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer remembers of X; empty before the first step.

        Reading leaves no entry behind: to torch's checkpoints it would be a state already.
        """
        return self.states.get(self.X, {})

    @property
    def M(self) -> Tensor:
        """Momentum, of X's shape."""
        return local(self.state["momentum"])

    @property
    def error_feedback(self) -> bool:
        return bool(self.group["momentum_rule"] == "error_feedback")

    @property
    def momentum_decay(self) -> float:
        """What M is multiplied by before it takes the gradient: error feedback decays it later."""
        return 1.0 if self.error_feedback else float(self.group["mu"])

    @property
    def feedback(self) -> float:
        """The factor 1 - mu of the error feedback; 0 under the plain rule."""
        return 1.0 - float(self.group["mu"]) if self.error_feedback else 0.0

    @property
    def nesterov(self) -> float:
        """The gradient's share in the direction, beside the momentum's, which holds it once."""
        return float(self.group["nesterov"])

    @property
    def decay(self) -> float | Tensor:
        """The factor 1 - lr weight_decay of X."""
        factor: float | Tensor = 1 - self.group["lr"] * self.group["weight_decay"]
        return factor

    @property
    def local_lr(self) -> float | Tensor:
        """Learning rate of the local gradient step."""
        local_lr: float | Tensor | None = self.group["local_lr"]
        return self.group["lr"] if local_lr is None else local_lr

    @property
    def lr_since_agreement(self) -> float:
        """The sum of the learning rates of the steps since replicas last agreed on X."""
        return float(self.group[LR_SUM] - self.state[LR_AT_AGREEMENT])

    @property
    def scale_decay(self) -> float:
        """What R_scale falls by at a step: half as fast as the momentum."""
        return math.sqrt(float(self.group["mu"]))

    @property
    def R_scale(self) -> Tensor:
        """How long R's longest column has been lately, (matrices held here,), a view."""
        if R_SCALE not in self.state:  # saved by a version that did not remember it
            self.state[R_SCALE] = zeros_per_matrix(self.X, self.group)
        return local(self.state[R_SCALE]).view(-1)

    @property
    def stochastic_rounding(self) -> bool:
        return bool(self.group["stochastic_rounding"])

    def rounding_seed(self, step: int, matrix: int = 0) -> int:
        """Below 2**32; the same on every replica, others at other steps and for other matrices."""
        return (step * 0x9E3779B1 + self.number * 0x85EBCA6B + matrix) & 0xFFFFFFFF

    def create_state(self) -> None:
        """Fill the state as the algorithm needs it before its first step."""
        place = flat_shard_state(self.X)
        if self.group["algorithm"] != "dion":
            self.states[self.X] = create_state(self.group["algorithm"], self.X) | place
            return
        dtype = _dtype(self.group["momentum_dtype"], self.X)
        q_dtype = _dtype(self.group["q_dtype"], self.X)
        self.states[self.X] = {
            "momentum": torch.zeros_like(self.X, dtype=dtype),
            **create_right_factors(self.X, self.group, q_dtype),
            "momentum_norm": zeros_per_matrix(self.X, self.group),
            R_SCALE: zeros_per_matrix(self.X, self.group),
            **place,
        }


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a parameter; pieces are oriented: no fewer rows than columns globally.

    ``index`` is its place among those of the parameter that are held here.
    """

    parameter: Parameter
    part: MatrixShard
    index: int

    @property
    def group(self) -> dict[str, Any]:
        return self.parameter.group

    @property
    def layout(self) -> MatrixLayout:
        return self.part.layout

    @property
    def is_view(self) -> bool:
        """Whether X and M are views of the parameter's tensors; padded copies otherwise."""
        return self.part.view.is_view

    @property
    def X(self) -> Tensor:
        """Weights, (m_i, n_j)."""
        return self.read(self.parameter.local)

    @property
    def M(self) -> Tensor:
        """Momentum, (m_i, n_j)."""
        return self.read(self.parameter.M)

    @property
    def Q(self) -> Tensor:
        """Right factor, a view, (n_j, r)."""
        return local(self.parameter.state[self.part.q.key])[self.part.q.index]

    @property
    def R_scale(self) -> Tensor:
        """How long R's longest column has been lately, a view without dimensions."""
        return self.parameter.R_scale[self.index]

    @property
    def feedback(self) -> float:
        """The parameter's."""
        return self.parameter.feedback

    def rounding_seed(self, step: int) -> int:
        return self.parameter.rounding_seed(step, self.index)

    def elements(self, tensor: Tensor) -> Tensor:
        """The elements of this matrix in a local tensor of the parameter, a view of any shape."""
        return self.part.view.elements(tensor)

    def held(self, piece: Tensor) -> Tensor:
        """The elements of a piece, (m_i, n_j), that are this matrix's and held here."""
        return self.part.view.held(self._oriented(piece))

    def read(self, tensor: Tensor) -> Tensor:
        """This matrix's piece of a local tensor of the parameter, (m_i, n_j)."""
        return self._oriented(self.part.view.read(tensor))

    def store(self, tensor: Tensor, piece: Tensor) -> None:
        """Write an updated piece, which :meth:`read` gave, back to the tensor it is of."""
        self.part.view.write(tensor, self._oriented(piece))

    def write(self, X: Tensor, M: Tensor | None) -> None:
        """Store updated pieces that are not views; a momentum that is None was not updated."""
        if not self.is_view:
            self.store(self.parameter.local, X)
            if M is not None:
                self.store(self.parameter.M, M)

    def _oriented(self, piece: Tensor) -> Tensor:
        return piece.mT if self.layout.transposed else piece


def _dtype(name: str | None, X: Tensor) -> torch.dtype:
    dtype = X.dtype if name is None else getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return dtype


@dataclass(frozen=True, eq=False)
class Pushed:
    """The parameters of a plan's ``dion`` that have a gradient at this step, piece by piece.

    Attributes:
        parameters: the parameters themselves; X, M, G: their weights, momenta and gradients.
        everyone: whether these are all of ``dion``.
        runs: parameters of one group in a row, by the first of them and their number.
    """

    parameters: Sequence[Parameter]
    X: Sequence[Tensor]
    M: Sequence[Tensor]
    G: Sequence[Tensor]
    everyone: bool
    runs: Sequence[tuple[Parameter, int]]

    def each(self, number: Callable[[Parameter], Number]) -> list[Number]:
        """What follows from a parameter's group, for every parameter."""
        return list(chain.from_iterable(repeat(number(first), k) for first, k in self.runs))

    def by_rounding(self, step: int) -> Iterator[tuple[Pushed, list[int] | None]]:
        """Those that are rounded stochastically with their seeds, and the others without."""
        kinds = {first.stochastic_rounding for first, _ in self.runs}
        for random in sorted(kinds):
            chosen = self._chosen(random) if len(kinds) == 2 else self
            seeds = [p.rounding_seed(step) for p in chosen.parameters] if random else None
            yield chosen, seeds

    def _chosen(self, random: bool) -> Pushed:
        keep = [p.stochastic_rounding == random for p in self.parameters]
        parameters = list(compress(self.parameters, keep))
        X, M, G = (list(compress(tensors, keep)) for tensors in (self.X, self.M, self.G))
        return Pushed(parameters, X, M, G, False, _runs(parameters))


class Plan:
    """Which parameters take which update, in an order that all ranks share.

    Attributes:
        dion, elementwise: the parameters by kind of update; ``parameters``: first these, then
            those.
        matrices: those of ``dion``, in its order.
        inside: all ranks of this replica's shards; None if the replica is one rank.
        everyone: all ranks of all replicas; None for this process alone.
        device: where the ranks agree.
        unions: the groups that were asked for on the way.
    """

    def __init__(
        self,
        dion: Sequence[Parameter],
        elementwise: Sequence[Parameter],
        inside: dist.ProcessGroup | None,
        everyone: dist.ProcessGroup | None,
        device: torch.device,
        unions: Unions | None = None,
    ) -> None:
        self.device = device
        self.unions = Unions() if unions is None else unions
        self.dion, self.elementwise = list(dion), list(elementwise)
        self.parameters = [*self.dion, *self.elementwise]
        self.matrices = [m for p in self.dion for m in p.matrices]
        self.inside, self.everyone = inside, everyone
        self._X, self._M, self._norms = Parameters(), Tensors(), _Norms()
        self._states: list[dict[str, Any]] = []

    @classmethod
    def of(
        cls,
        param_groups: Sequence[dict[str, Any]],
        states: States,
        replicas: dist.ProcessGroup | None,
        *,
        single: bool = False,
        unions: Unions | None = None,
    ) -> Plan:
        """Collective where parameters are sharded: every rank must hold the same parameters.

        single: whether the user has said that other replicas, if any, are not to be heard of.
        unions: of an earlier plan, which knows the groups already.
        """
        dion: list[Parameter] = []
        elementwise: list[Parameter] = []
        unions = Unions() if unions is None else unions
        for g, group in enumerate(param_groups):
            for X, name in zip(group["params"], names(group, g), strict=True):
                if not X.requires_grad:
                    continue
                check_parameter(X, name, group)
                if not single:
                    check_replicas(X, name, replicas)
                if group["algorithm"] == "dion":
                    try:
                        parts = tuple(matrices_of(X, group, replicas, unions))
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}") from error
                    parameter = Parameter(X, group, states, name, len(dion), parts)
                    parameter.matrices.extend(
                        Matrix(parameter, part, i) for i, part in enumerate(parts)
                    )
                    dion.append(parameter)
                else:
                    elementwise.append(Parameter(X, group, states, name))
        cuts = [g for p in [*dion, *elementwise] for g in groups_of(p.X)]
        inside = unions.of(cuts)
        # Frozen parameters count: where all are, the replicas still have to agree somewhere.
        devices = [local(X.detach()).device for group in param_groups for X in group["params"]]
        device = devices[0] if devices else torch.device("cpu")
        return cls(dion, elementwise, inside, unions.of([inside, replicas]), device, unions)

    def select(self, keep: Sequence[bool]) -> Plan:
        """The plan of the kept parameters, given in the order of ``parameters``."""
        if all(keep):
            return self
        kept = {id(p) for p, k in zip(self.parameters, keep, strict=True) if k}
        selected = Plan(
            [p for p in self.dion if id(p) in kept],
            [p for p in self.elementwise if id(p) in kept],
            self.inside,
            self.everyone,
            self.device,
            self.unions,
        )
        selected.look_up_states()
        return selected

    @cached_property
    def stack_positions(self) -> list[list[int]]:
        """Indices into ``matrices``, batched where all ranks batch alike."""
        stacks: dict[Any, list[int]] = {}
        for i, m in enumerate(self.matrices):
            dtype = product_dtype(m.parameter.X)
            key = (m.part.kind, m.part.rank, dtype, m.parameter.X.device, m.group["right_factor"])
            stacks.setdefault(key, []).append(i)
        return list(stacks.values())

    def stacks(self) -> list[list[Matrix]]:
        """The matrices of ``stack_positions``."""
        return [[self.matrices[i] for i in stack] for stack in self.stack_positions]

    def by_matrix(self, values: Sequence[Tensor]) -> Tensor:
        """One number a matrix, given by stack, in the order of ``matrices``, (k,)."""
        order = [i for stack in self.stack_positions for i in stack]
        return torch.cat(list(values))[torch.tensor(order, device="cpu").argsort()]

    def by_stack(self, values: Tensor) -> list[Tensor]:
        """The inverse of :meth:`by_matrix`."""
        return [values[stack] for stack in self.stack_positions]

    def elementwise_by_group(self) -> list[list[Parameter]]:
        by_group: dict[int, list[Parameter]] = {}
        for parameter in self.elementwise:
            by_group.setdefault(id(parameter.group), []).append(parameter)
        return list(by_group.values())

    def moments(self) -> list[Tensor]:
        """The elementwise algorithms' state tensors, without their step counters."""
        return [
            local(p.state[key])
            for p in self.elementwise
            for key in STATE_KEYS[p.group["algorithm"]]
        ]

    def counters(self) -> list[Tensor]:
        """The elementwise algorithms' step counters, one scalar each."""
        return [p.state["step"] for p in self.elementwise]

    @cached_property
    def owners(self) -> Tensor:
        """Index into ``parameters`` of each matrix's, (k,) int64 on the device."""
        owners = [i for i, p in enumerate(self.dion) for _ in p.matrices]
        return torch.tensor(owners, dtype=torch.int64, device=self.device)

    def copies_inside(self, parameter: Parameter) -> int:
        """How many ranks of this replica hold the same piece of the parameter as this one."""
        pieces = math.prod(group_size(g) for g in groups_of(parameter.X))
        return group_size(self.inside) // pieces

    @cached_property
    def one_matrix_each(self) -> bool:
        """Whether each parameter of ``dion`` is one matrix, whose piece is all that is held."""
        return all(
            len(p.matrices) == 1 and p.matrices[0].elements(p.local).numel() == p.local.numel()
            for p in self.dion
        )

    @cached_property
    def sharded(self) -> bool:
        """Whether parameters are DTensors, of which pieces are held here."""
        return any(local(p.X) is not p.X for p in self.parameters)

    def look_up_states(self) -> list[dict[str, Any]]:
        """What the optimizer remembers of each parameter, empty if nothing; kept for the step."""
        states = self.parameters[0].states if self.parameters else {}
        self._states = [states.get(p.X, {}) for p in self.parameters]
        return self._states

    def pushed(self) -> Pushed:
        """The step's gradients with their weights and momenta, each list looked at once.

        Lists of hundreds of tensors stay the same objects as long as they hold the same tensors:
        most of what fused operations must know of them is then known already.
        """
        X: Sequence[Tensor] = [p.X for p in self.dion]
        M = list(map(itemgetter("momentum"), self._states[: len(self.dion)]))
        if self.sharded:
            X, M = list(map(local, X)), list(map(local, M))
        self._X = self._X if _same(self._X, X) else Parameters(X)
        self._M = self._M if _same(self._M, M) else Tensors(M)
        gradients = [p.X.grad for p in self.dion]
        missing = any(map(is_, gradients, repeat(None)))
        if not (missing or self.sharded or any(map(attrgetter("is_sparse"), gradients))):
            weights = FixedTensors.of(self._X)
            pushes = FixedTensors.gradients(gradients, weights)  # type: ignore[arg-type]
            return Pushed(self.dion, weights, FixedTensors.of(self._M), pushes, True, self._runs)
        held = [i for i, p in enumerate(self.dion) if p.G is not None]
        parameters = [self.dion[i] for i in held]
        return Pushed(
            parameters,
            [X[i] for i in held],
            [M[i] for i in held],
            [G for p in self.dion if (G := p.G) is not None],
            not missing,
            _runs(parameters),
        )

    def matrices_with_gradients(self) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """Per matrix the held elements of its momentum and gradient, and the momentum's decay."""
        M = [m.elements(m.parameter.M) for m in self.matrices]
        decays = [m.parameter.momentum_decay for m in self.matrices]
        G = list(M)
        for i, m in enumerate(self.matrices):
            if (gradient := m.parameter.G) is not None:
                G[i] = m.elements(gradient)
            else:  # mu M + 0 = (mu - 1) M + M, without a tensor of zeros
                decays[i] -= 1.0
        return M, G, decays

    @cached_property
    def _runs(self) -> list[tuple[Parameter, int]]:
        return _runs(self.dion)

    def stored_norms(self) -> Tensor:
        """Norms of the momenta as the last step left them, one per matrix, (k,)."""
        return self._norms.read(self._states[: len(self.dion)])

    def store_norms(self, norms: Tensor) -> None:
        """Remember one norm per matrix, (k,), for the next step's gate."""
        self._norms.write(self._states[: len(self.dion)], norms)

    def norms_over_shards(self, pieces: Tensor) -> Tensor:
        """Norms of whole matrices from those of the pieces held here, (k,) -> (k,)."""
        if self.inside is None:
            return pieces
        # In float64, where the squares of tiny and of large numbers fit.
        return self.sum_over_shards(pieces.double().square()).sqrt().to(pieces.dtype)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """One number per matrix, (k,): the sums over the ranks that hold the matrix's pieces."""
        if self.inside is None or not self.matrices:
            return values
        slots = [Slot((), m.layout.shards, values.dtype, values.device) for m in self.matrices]
        buckets = Buckets(slots)
        torch._foreach_copy_(buckets.views, list(values.unbind()))
        buckets.all_reduce_()
        return torch.stack(buckets.views)

    def squared_norms(self, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Squared Frobenius norms of what has these pieces of the stacks' matrices, (k,) by stack.

        Collective inside the replica.
        """
        norms = [
            torch.stack(
                [
                    torch.linalg.vector_norm(m.held(x), dtype=product_dtype(x))
                    for m, x in zip(stack, each, strict=True)
                ]
            )
            for stack, each in zip(self.stacks(), pieces, strict=True)
        ]
        return self.by_stack(self.sum_over_shards(self.by_matrix(norms).square()))


def names(group: dict[str, Any], position: int) -> list[str]:
    """The group's parameter names; places in param_groups where they were given without names."""
    given = group.get("param_names")
    if given is not None:
        return list(given)
    return [f"param_groups[{position}]['params'][{i}]" for i in range(len(group["params"]))]


def product_dtype(X: Tensor) -> torch.dtype:
    """The dtype of products with X or its momentum: float32 or wider."""
    return torch.promote_types(X.dtype, torch.float32)


class _Norms:
    """Every state's "momentum_norm" as one tensor, (k,): the states hold views of it.

    Hundreds of copies of one number each would take longer than the norms themselves. States that
    are sharded, or that have come from elsewhere, are read and written one by one.
    """

    def __init__(self) -> None:
        self._views: list[Tensor] = []
        self._all = torch.empty(0, dtype=torch.float32, device="cpu")

    def read(self, states: Sequence[dict[str, Any]]) -> Tensor:
        stored = list(map(itemgetter("momentum_norm"), states))
        if not _same(self._views, stored):
            pieces = [local(norm) for norm in stored]
            self._all = torch.cat([piece.reshape(-1) for piece in pieces])
            if not _same(pieces, stored):
                return self._all
            split = self._all.split([piece.numel() for piece in pieces])
            self._views = [view.view(p.shape) for view, p in zip(split, pieces, strict=True)]
            for state, view in zip(states, self._views, strict=True):
                state["momentum_norm"] = view
        return self._all

    def write(self, states: Sequence[dict[str, Any]], norms: Tensor) -> None:
        stored = list(map(itemgetter("momentum_norm"), states))
        if _same(self._views, stored):
            self._all.copy_(norms)
            return
        pieces = [local(norm) for norm in stored]
        split = norms.split([piece.numel() for piece in pieces])
        for piece, values in zip(pieces, split, strict=True):
            piece.copy_(values.view(piece.shape))


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _runs(parameters: Sequence[Parameter]) -> list[tuple[Parameter, int]]:
    runs = [list(run) for _, run in groupby(parameters, key=lambda p: id(p.group))]
    return [(run[0], len(run)) for run in runs]


class _Momenta(Sequence[Tensor]):
    """The matrices' momenta, each read when it is asked for: it may be a padded copy."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, index: Any) -> Any:
        return self._matrices[index].M


def as_stack(matrices: Sequence[Matrix], *, inside_replica: bool) -> Stack:
    """What a power iteration needs to know of matrices that form a stack."""
    layout, right_factor = matrices[0].layout, matrices[0].group["right_factor"]
    factor: RightFactor = right_factor
    return Stack(
        layout=layout.inside_replica() if inside_replica else layout,
        B=_Momenta(matrices),
        Q=[m.Q for m in matrices],
        right_factor=factor,
        dtype=product_dtype(matrices[0].parameter.X),
        stored=matrices[0].parameter.M.dtype,
        scale=_scale_before(matrices),
    )


def _scale_before(matrices: Sequence[Matrix]) -> Tensor:
    """What is left of R's scale since the last step, (k,) float64."""
    before = torch.stack([m.R_scale for m in matrices]).double()
    decays = [m.parameter.scale_decay for m in matrices]
    one = len(set(decays)) == 1
    return before * (decays[0] if one else before.new_tensor(decays))


def check_parameter(X: Tensor, name: str, group: dict[str, Any]) -> None:
    """Raise ValueError, naming the parameter, if the group's algorithm cannot take it."""
    if X.is_complex():
        raise ValueError(f"{name} is complex ({X.dtype}): only real parameters are supported")
    check_placements(X, name)
    if group["algorithm"] != "dion":
        return
    shape, stack_dims = global_shape(X), group["stack_dims"]
    if len(shape) < stack_dims + 2:
        raise ValueError(
            f"{name} has shape {shape}, but algorithm='dion' with stack_dims={stack_dims} takes "
            f"{stack_dims + 2}-D parameters or more: put it in a group with algorithm='adamw' or "
            f"'lion', or let curvadion.param_groups(model) make the groups. (A parameter of "
            f"FullyShardedDataParallel looks flat until "
            f"curvadion.integrations.fsdp.declare_flat_shards(model) has been called.)"
        )
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}: a matrix needs rows and columns")
    if group["input_first"] and len(shape) != stack_dims + 2:
        raise ValueError(
            f"{name} has shape {shape}, but input_first=True with stack_dims={stack_dims} takes "
            f"{stack_dims + 2}-D parameters, (..., in, out)"
        )
    rows = shape[-1] if group["input_first"] else shape[stack_dims]
    block_sizes(rows, group["row_blocks"], f"{name}: row_blocks")
    if not local(X.detach()).is_contiguous() and len(shape) > 2:
        raise ValueError(f"{name} of shape {shape} is not contiguous: make it so before")
