"""AdamW over a list of tensors with hyperparameters of their own, in one launch on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.optim.adamw import adamw

from curvadion.ops.backends import fused
from curvadion.ops.operations import NumbersOrTensors, put_back
from curvadion.ops.tensors import Numbers, Tensors


def adamw_(
    X: Tensors,
    G: Tensors,
    means: Tensors,
    squares: Tensors,
    counters: Tensors,
    lr: NumbersOrTensors,
    weight_decay: Numbers,
    beta1: Numbers,
    beta2: Numbers,
    eps: Numbers,
    moves: Tensor | None = None,
) -> None:
    """One step of AdamW (arXiv 1711.05101) for each tensor, in place.

        t <- t + 1
        X <- (1 - lr weight_decay) X
        m <- beta1 m + (1 - beta1) G
        v <- beta2 v + (1 - beta2) G^2
        X <- X - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Args:
        X: weights, of any shapes and floating dtypes.
        G: gradients, of X's shapes and any floating dtypes.
        means: m, of X's shapes and any floating dtypes.
        squares: v, of X's shapes and any floating dtypes.
        counters: t, float32 of shape (), one per tensor; on X's device if that is a GPU,
            else on the CPU.
        lr: a number or a tensor of one element, per tensor.
        weight_decay: a number per tensor.
        beta1: the decay of m, per tensor.
        beta2: the decay of v, per tensor.
        eps: a number per tensor.
        moves: a bool on the device, shape (), or None; where it is false, nothing is
            written.
    """
    if fused(
        "adamw_",
        X,
        G,
        means,
        squares,
        counters,
        lr,
        weight_decay,
        beta1,
        beta2,
        eps,
        moves,
        writes=[X, means, squares, counters],
    ):
        return
    each = map(Hyperparameters._make, zip(lr, weight_decay, beta1, beta2, eps, strict=True))
    for hyperparameters, places in _grouped(X, each):
        chosen = ([own[i] for i in places] for own in (X, G, means, squares, counters))
        _torch_step(*chosen, hyperparameters=hyperparameters, moves=moves)


class Hyperparameters(NamedTuple):
    """Those of a tensor, or of several that PyTorch steps in one call."""

    lr: float | Tensor
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def _grouped(
    X: Tensors, hyperparameters: Iterable[Hyperparameters]
) -> list[tuple[Hyperparameters, list[int]]]:
    """The places of tensors with equal hyperparameters, on one device.

    A rate that is a tensor is compared by identity: the host does not wait for it.
    """
    groups: dict[object, tuple[Hyperparameters, list[int]]] = {}
    for i, (x, numbers) in enumerate(zip(X, hyperparameters, strict=True)):
        key = (x.device, *(id(n) if isinstance(n, Tensor) else n for n in numbers))
        groups.setdefault(key, (numbers, []))[1].append(i)
    return list(groups.values())


def _torch_step(
    X: Tensors,
    G: Tensors,
    means: Tensors,
    squares: Tensors,
    counters: Tensors,
    *,
    hyperparameters: Hyperparameters,
    moves: Tensor | None,
) -> None:
    """PyTorch's AdamW, for tensors of one device with equal hyperparameters.

    Args:
        X: weights, of any shapes and floating dtypes.
        G: gradients, of X's shapes and any floating dtypes.
        means: m, of X's shapes and any floating dtypes.
        squares: v, of X's shapes and any floating dtypes.
        counters: t, float32 of shape ().
        hyperparameters: of all of them.
        moves: a bool on the device, shape (), or None.
    """
    # Its unfused steps add in one dtype.
    G = [g.to(m.dtype) for g, m in zip(G, means, strict=True)]
    fuses = all(map(_fusible, X, G, means, squares))
    with put_back(moves, *(() if fuses else (X, means, squares, counters))):
        adamw(
            list(X), G, list(means), list(squares), [], list(counters),
            # PyTorch uses its fused kernels only on request.
            fused=fuses or None,
            # Otherwise the host would read each counter on a GPU.
            capturable=not fuses and all(x.device.type == "cuda" for x in X),
            found_inf=(~moves).float() if fuses and moves is not None else None,
            amsgrad=False, maximize=False, **hyperparameters._asdict(),
        )  # fmt: skip


def _fusible(*together: Tensor) -> bool:
    """Whether PyTorch's fused kernels support these tensors of a parameter."""
    same = len({t.dtype for t in together}) == 1 and all(t.is_contiguous() for t in together)
    return same and together[0].device.type in ("cpu", "cuda")
