"""Pack symmetric matrices into n (n + 1) / 2 elements for sending."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(G: Tensor) -> Tensor:
    """Pack symmetric matrices (k, n, n) into n (n + 1) / 2 elements each, (k, n (n + 1) / 2).

    The lower triangle, folded: [[A, .], [C, D]] becomes C and, in one rectangle, the lower triangle
    of A beside the upper one of D.
    """
    k, n, _ = G.shape
    h, odd = (n + 1) // 2, n % 2
    folded = G.new_zeros(k, h + 1 - odd, h)
    folded[:, 1 - odd :] = G[:, :h, :h].tril()
    folded[:, : n - h, odd:].add_(G[:, h:, h:].triu())
    return torch.cat((G[:, h:, :h].reshape(k, -1), folded.reshape(k, -1)), dim=1)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`."""
    k, h, odd = len(packed), (n + 1) // 2, n % 2
    C, folded = packed.tensor_split([(n - h) * h], dim=1)
    folded = folded.view(k, h + 1 - odd, h)
    G = packed.new_zeros(k, n, n)
    G[:, :h, :h] = folded[:, 1 - odd :].tril()
    G[:, h:, h:] = folded[:, : n - h, odd:].triu().mT
    G[:, h:, :h] = C.view(k, n - h, h)
    return G.add_(G.tril(-1).mT)
