"""The polar factor of the momentum as the direction (Muon's), on shards, without unsharding.

With B the oriented momentum (m x n, m >= n), of which a rank holds rows B_k,

    G = sum_k B_k^T B_k          n (n + 1) / 2 numbers a matrix to the rank that works on it
    Z = G^(-1/2), about          Newton-Schulz iterations, each matrix on one of the ranks
    U_k = B_k Z                  n (n + 1) / 2 numbers back
    X_k <- (1 - lr wd) X_k - lr scale U_k

At full rank P R^T is the momentum itself: error feedback, M <- M - (1 - mu) P R^T, and the plain
rule, M <- mu M + G, then are the same rule. There is no right factor to remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import all_to_all, divide
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout
from curvadion.update.direction import Direction, Taken
from curvadion.update.gradients import Gradients
from curvadion.update.newton_schulz import MUON, Coefficients, inverse_root, polar_express
from curvadion.update.parameter import Matrix, batches, open_shards, stacked
from curvadion.update.plan import Plan
from curvadion.update.row_shards import counted, cut_columns, products_of_columns, whole_rows


class Polar(Direction):
    """The polar factor of M + nesterov G."""

    def step(
        self,
        wave: Plan,
        gradients: Gradients,
        *,
        step: int,
        inside_replica: bool,
        remember: bool,
    ) -> Taken:
        stacks = wave.stacks()
        layouts = [matrices[0].layout for matrices in stacks]
        G = dict(zip(map(id, gradients.parameters), gradients.G, strict=True))
        B = whole_rows([_looking_ahead(matrices, G) for matrices in stacks], layouts)
        U = polar_factors(B, layouts, [_iterations(matrices[0]) for matrices in stacks])
        del B
        _move(stacks, cut_columns(U, layouts), step)
        return PolarTaken(wave, stacks, U)


class PolarTaken(Taken):
    """A step along polar factors. U: their whole rows, (k, m_r, n) by stack."""

    def __init__(self, plan: Plan, stacks: list[list[Matrix]], U: list[Tensor]) -> None:
        super().__init__(plan, stacks)
        self._U = U

    def ranks(self) -> list[int]:
        return [min(matrices[0].layout.shape) for matrices in self.stacks]

    def turn_momenta_(self, changes: Sequence[Sequence[Tensor]], shares: Sequence[Tensor]) -> None:
        layouts = [matrices[0].layout for matrices in self.stacks]
        M = whole_rows([stacked([m.M for m in s], s[0]) for s in self.stacks], layouts)
        S = products_of_columns(self._U, M, layouts)
        rows = whole_rows(
            [stacked(C, s[0]) for C, s in zip(changes, self.stacks, strict=True)], layouts
        )
        turns = [
            torch.bmm(C, S_stack.mul_(share[:, None, None]))  # (m_r, n) = (m_r, n) (n, n)
            for C, S_stack, share in zip(rows, S, shares, strict=True)
        ]
        for matrices, turn in zip(self.stacks, cut_columns(turns, layouts), strict=True):
            for batch in batches(matrices):
                chosen = matrices[batch]
                with open_shards(chosen, [m.parameter.M for m in chosen]) as (momenta,):
                    ones = [1.0] * len(chosen)
                    ops.local_step_(momenta, list(turn[batch]), [-1.0] * len(chosen), ones)


# -------------------------------------------------------------------- before and after


def _iterations(m: Matrix) -> Iterations:
    steps = m.group["newton_schulz_steps"]
    if m.group["newton_schulz"] == "muon":
        return Iterations((MUON,) * steps, tight=False)
    return Iterations(polar_express(steps), tight=True)


def _looking_ahead(matrices: Sequence[Matrix], G: dict[int, Tensor]) -> Tensor:
    """M + nesterov G of a stack, (k, m_i, n_j), in the dtype of products."""
    B = stacked([m.M for m in matrices], matrices[0])
    shares = [m.parameter.nesterov for m in matrices]
    for share in {share for share in shares if share}:
        chosen = [i for i, each in enumerate(shares) if each == share]
        ahead = [matrices[i].read(G[id(matrices[i].parameter)]).to(B.dtype) for i in chosen]
        torch._foreach_add_([B[i] for i in chosen], ahead, alpha=share)
    return B


def _move(stacks: Sequence[Sequence[Matrix]], U: Sequence[Tensor], step: int) -> None:
    """X <- (1 - lr wd) X - lr scale U."""
    moves = [one for each in zip(stacks, U, strict=True) for one in zip(*each, strict=True)]
    moves.sort(key=lambda move: not move[0].is_view)  # views in as few calls as can be
    for random, run in groupby(moves, lambda move: move[0].parameter.stochastic_rounding):
        matrices, directions = zip(*run, strict=True)
        for batch in batches(matrices):
            chosen = matrices[batch]
            with open_shards(chosen, [m.parameter.local for m in chosen]) as (X,):
                ops.local_step_(
                    X,
                    list(directions[batch]),
                    [m.group["lr"] * m.update_scale for m in chosen],
                    [m.parameter.decay for m in chosen],
                    seeds=[m.rounding_seed(step) for m in chosen] if random else None,
                )


# -------------------------------------------------------------------- polar factors


class Iterations(NamedTuple):
    """Newton-Schulz iterations, and how matrices are scaled before (:func:`inverse_root`)."""

    coefficients: tuple[Coefficients, ...]
    tight: bool


def polar_factors(
    B: Sequence[Tensor], layouts: Sequence[MatrixLayout], iterations: Sequence[Iterations]
) -> list[Tensor]:
    """The polar factors of stacks, as whole rows (k, m_r, n) like B, which is scaled; collective.

    Every rank scales its rows by a power of two, so that no square leaves float32's range. The
    matrices of a replica are divided among the ranks that hold shards of them.
    """
    exponents = [_scale_(b) for b in B]
    G = []
    for b, layout in zip(B, layouts, strict=True):
        rows = counted(b, layout)
        G.append(torch.bmm(rows.mT, rows))
    Z: list[Tensor] = list(G)
    by_group: dict[Group | None, list[int]] = {}
    for i, layout in enumerate(layouts):
        by_group.setdefault(layout.shards, []).append(i)
    for group, chosen in by_group.items():
        of_group = [_Work(G[i], exponents[i], iterations[i]) for i in chosen]
        roots = _shared_roots(of_group, group) if group is not None else map(_Work.root, of_group)
        for i, root in zip(chosen, roots, strict=True):
            Z[i] = root
    return [_times(b, z) for b, z in zip(B, Z, strict=True)]


def _scale_(B: Tensor) -> Tensor:
    """Divide each matrix (k, m_r, n) by 2^e, about its largest number; e, (k,) in B's dtype."""
    if not B.numel():
        return B.new_full((len(B),), _SMALLEST)
    _, exponents = torch.frexp(largest := torch.linalg.vector_norm(B, torch.inf, dim=(1, 2)))
    # The power of two and its inverse must be numbers themselves.
    exponents = exponents.clamp(_SMALLEST, -_SMALLEST).to(B.dtype)
    exponents = exponents.where(largest > 0, _SMALLEST)  # what has no numbers decides nothing
    B.mul_(torch.exp2(-exponents)[:, None, None])
    return exponents


_SMALLEST = -126.0


def _times(B: Tensor, Z: Tensor) -> Tensor:
    """B Z, (k, m_r, n), with B's order of strides; Z is symmetric."""
    if B.stride(-2) < B.stride(-1):
        return torch.bmm(Z, B.mT).mT
    return torch.bmm(B, Z)


class _Work(NamedTuple):
    """Gram matrices of a stack, (k, n, n), with the exponents of this rank's rows, (k,)."""

    G: Tensor
    exponents: Tensor
    iterations: Iterations

    def root(self) -> Tensor:
        return inverse_root(self.G, self.iterations.coefficients, tight=self.iterations.tight)


def _shared_roots(stacks: Sequence[_Work], group: Group) -> list[Tensor]:
    """Z of every matrix for this rank's rows as they are scaled; each is found on one rank."""
    places = [(s, i) for s, stack in enumerate(stacks) for i in range(len(stack.G))]
    owners = divide([stacks[s].G.shape[-1] ** 3 for s, _ in places], group.size())
    owned = [
        [p for p, owner in zip(places, owners, strict=True) if owner == rank]
        for rank in range(group.size())
    ]
    mine = owned[group.rank()]
    sent = [torch.cat((pack(stack.G), stack.exponents[:, None]), dim=1) for stack in stacks]
    received = all_to_all(
        [[sent[s][i] for s, i in each] for each in owned],
        [[tuple(sent[s][i].shape) for s, i in mine]] * group.size(),
        group,
    )
    found = {}
    for s, run in groupby(enumerate(mine), lambda each: each[1][0]):
        numbers = [number for number, _ in run]
        from_ranks = [torch.stack([each[number] for number in numbers]) for each in received]
        exponents, G = _sum(from_ranks)
        Z = stacks[s]._replace(G=unpack(G, stacks[s].G.shape[-1])).root()
        for number, z in zip(numbers, torch.cat((pack(Z), exponents[:, None]), 1), strict=True):
            found[mine[number]] = z
    answers = all_to_all(
        [[found[place] for place in mine]] * group.size(),
        [[tuple(sent[s][i].shape) for s, i in each] for each in owned],
        group,
    )
    packed = [torch.empty_like(each) for each in sent]
    for of_rank, answer in zip(owned, answers, strict=True):
        for (s, i), z in zip(of_rank, answer, strict=True):
            packed[s][i] = z
    roots = []
    for stack, of_stack in zip(stacks, packed, strict=True):
        power = torch.exp2(stack.exponents - of_stack[:, -1])
        roots.append(unpack(of_stack[:, :-1] * power[:, None], stack.G.shape[-1]))
    return roots


def _sum(packed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest exponents of the ranks, (k,), and the sums of their Gram matrices at these."""
    each = torch.stack([rank[:, -1] for rank in packed])
    largest = each.amax(0)
    total = torch.zeros_like(packed[0][:, :-1])
    for rank, exponents in zip(packed, each, strict=True):
        total += rank[:, :-1] * torch.exp2(2 * (exponents - largest))[:, None]
    return largest, total


def pack(G: Tensor) -> Tensor:
    """Symmetric matrices (k, n, n) as n (n + 1) / 2 numbers each, (k, n (n + 1) / 2).

    The lower triangle, folded: [[A, .], [C, D]] becomes C and, in one rectangle, the lower triangle
    of A beside the upper one of D.
    """
    k, n, _ = G.shape
    h = (n + 1) // 2
    A, C, D = G[:, :h, :h], G[:, h:, :h], G[:, h:, h:]
    if n % 2:
        folded = A.tril()
        folded[:, : h - 1, 1:] += D.triu()
    else:
        folded = G.new_zeros(k, h + 1, h)
        folded[:, 1:] = A.tril()
        folded[:, :-1] += D.triu()
    return torch.cat((C.reshape(k, -1), folded.reshape(k, -1)), dim=1)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`."""
    k, h = len(packed), (n + 1) // 2
    C, folded = packed.split([(n - h) * h, n * (n + 1) // 2 - (n - h) * h], dim=1)
    folded = folded.view(k, h + 1 - n % 2, h)
    if n % 2:
        A, D = folded.tril(), folded[:, : h - 1, 1:].triu()
    else:
        A, D = folded[:, 1:].tril(), folded[:, :-1].triu()
    G = packed.new_empty(k, n, n)
    G[:, :h, :h] = A + A.tril(-1).mT
    G[:, h:, h:] = D + D.triu(1).mT
    G[:, h:, :h] = C.view(k, n - h, h)
    G[:, :h, h:] = G[:, h:, :h].mT
    return G
