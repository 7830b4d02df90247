"""Symmetric matrices as n (n + 1) / 2 numbers to send."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(n: int) -> int:
    """How many numbers a packed n x n matrix takes."""
    return n * (n + 1) // 2


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
        folded[:, : h - 1, 1:].add_(D.triu())
    else:
        folded = G.new_zeros(k, h + 1, h)
        folded[:, 1:] = A.tril()
        folded[:, :-1].add_(D.triu())
    return torch.cat((C.reshape(k, -1), folded.reshape(k, -1)), dim=1)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`."""
    k, h = len(packed), (n + 1) // 2
    C, folded = packed.split([(n - h) * h, packed_size(n) - (n - h) * h], dim=1)
    folded = folded.view(k, h + 1 - n % 2, h)
    if n % 2:
        A, D = folded.tril(), folded[:, : h - 1, 1:].triu()
    else:
        A, D = folded[:, 1:].tril(), folded[:, :-1].triu()
    G = packed.new_zeros(k, n, n)
    G[:, :h, :h] = A
    G[:, h:, h:] = D.mT
    G[:, h:, :h] = C.view(k, n - h, h)
    return G.add_(G.tril(-1).mT)
