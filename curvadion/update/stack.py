"""Matrices that form a stack, as a power iteration sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvadion.ops.tensors import from_host
from curvadion.update.parameter import Matrix, product_dtype
from curvadion.update.power_iteration import RightFactor, Stack


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
        scale=scale_before(matrices),
    )


def remember_scales(stacks: Sequence[Sequence[Matrix]], scales: Sequence[Tensor]) -> None:
    """Note the momenta's scales after a step, (k,) by stack."""
    for matrices, scale in zip(stacks, scales, strict=True):
        torch._foreach_copy_([m.R_scale for m in matrices], list(scale))


def scale_before(matrices: Sequence[Matrix]) -> Tensor:
    """What is left of the momenta's scale since the last step, (k,) float64."""
    before = torch.stack([m.R_scale for m in matrices]).double()
    decays = [m.parameter.scale_decay for m in matrices]
    one = len(set(decays)) == 1
    return before * (decays[0] if one else from_host(decays, before.dtype, before.device))
