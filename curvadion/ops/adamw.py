"""AdamW over a list of tensors, each with its own hyperparameters; one launch on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim.adamw import adamw

from curvadion.ops.backends import fused
from curvadion.ops.operations import NumbersOrTensors, put_back
from curvadion.ops.state_codes import Opened, check_states, is_coded, runs_to_open
from curvadion.ops.tensors import Numbers, Tensors, at, check_lengths


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
    mean_seeds: Sequence[int] | None = None,
    square_seeds: Sequence[int] | None = None,
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
        means: m, of X's shapes and any floating dtypes, or vectors of their codes.
        squares: v, likewise; codes are of roots.
        counters: t, float32 of shape (), one per tensor; on X's device if that is a GPU,
            else on the CPU.
        lr: a number or a tensor of one element, per tensor.
        weight_decay: a number per tensor.
        beta1: the decay of m, a number per tensor.
        beta2: the decay of v, a number per tensor.
        eps: a number per tensor, added to the root of the corrected v.
        moves: () bool on the device; where it is false, nothing is written. None writes.
        mean_seeds: an integer below 2^32 per tensor, with which codes of m are rounded up or
            down at random; None rounds to nearest.
        square_seeds: the same for v.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    check_states(means, X, mean_seeds)
    check_states(squares, X, square_seeds)
    numbers = (lr, weight_decay, beta1, beta2, eps, moves)
    written = [X, means, squares, counters]
    if any(map(is_coded, [*means, *squares])):
        seeds = (mean_seeds, square_seeds)
        done = fused(
            "coded_adamw_", X, G, means, squares, counters, *numbers, *seeds, writes=written
        )
    else:
        done = fused("adamw_", X, G, means, squares, counters, *numbers, writes=written)
    if done:
        return
    check_lengths(X, G, means, squares, counters, lr, weight_decay, beta1, beta2, eps)
    hyperparameters = [
        Hyperparameters(*of_tensor)
        for of_tensor in zip(lr, weight_decay, beta1, beta2, eps, strict=True)
    ]
    coded = [m if is_coded(m) else v for m, v in zip(means, squares, strict=True)]
    for run in runs_to_open(coded, X):
        tensors = at(run, X, G, means, squares, counters)
        _step_run(
            *tensors,
            hyperparameters=[hyperparameters[i] for i in run],
            moves=moves,
            mean_seeds=None if mean_seeds is None else [mean_seeds[i] for i in run],
            square_seeds=None if square_seeds is None else [square_seeds[i] for i in run],
        )


class Hyperparameters(NamedTuple):
    """The numbers of one tensor, or of several that PyTorch steps in one call."""

    lr: float | Tensor
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def _step_run(
    X: Tensors,
    G: Tensors,
    means: Tensors,
    squares: Tensors,
    counters: Tensors,
    *,
    hyperparameters: Sequence[Hyperparameters],
    moves: Tensor | None,
    mean_seeds: Sequence[int] | None,
    square_seeds: Sequence[int] | None,
) -> None:
    """A step in plain PyTorch of tensors whose moments are open at the same time.

    Args:
        X: weights.
        G: gradients.
        means: m, or vectors of their codes.
        squares: v, likewise.
        counters: t.
        hyperparameters: of each tensor.
        moves: () bool on the device; where it is false, nothing is written. None writes.
        mean_seeds: for codes of m, or None.
        square_seeds: for codes of v, or None.
    """
    open_means = Opened(means, X, [False] * len(X))
    open_squares = Opened(squares, X, [True] * len(X))
    moments = (open_means.tensors, open_squares.tensors)
    for common, places in _grouped(X, hyperparameters):
        tensors = at(places, X, G, *moments, counters)
        _torch_step(*tensors, hyperparameters=common, moves=moves)
    open_means.close(mean_seeds)
    open_squares.close(square_seeds)


def _grouped(
    X: Tensors, hyperparameters: Sequence[Hyperparameters]
) -> list[tuple[Hyperparameters, list[int]]]:
    """Group the tensors of one device that have equal hyperparameters, by their indices in X.

    A learning rate that is a tensor is compared by identity: comparing values would make the
    host wait for the device.

    Args:
        X: weights.
        hyperparameters: of each.
    """
    groups: dict[object, tuple[Hyperparameters, list[int]]] = {}
    for i, (x, numbers) in enumerate(zip(X, hyperparameters, strict=True)):
        identities = [id(n) if isinstance(n, Tensor) else n for n in numbers]
        _, places = groups.setdefault((x.device, *identities), (numbers, []))
        places.append(i)
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
        counters: t, float32 of shape (), one per tensor.
        hyperparameters: those of all the tensors.
        moves: () bool on the device; where it is false, nothing is written. None writes.
    """
    # PyTorch's unfused steps add only tensors of one dtype.
    G = [g.to(m.dtype) for g, m in zip(G, means, strict=True)]
    fuses = all(map(_fusible, X, G, means, squares))
    # Fused kernels write nothing where found_inf is one. Unfused steps have no such flag.
    restored: list[Tensors] = [] if fuses else [X, means, squares, counters]
    found_inf = None
    if fuses and moves is not None:
        found_inf = (~moves).float()
    with put_back(moves, *restored):
        adamw(
            list(X), G, list(means), list(squares), [], list(counters),
            # PyTorch uses its fused kernels only on request.
            fused=fuses or None,
            # Otherwise the host would read each counter on a GPU.
            capturable=not fuses and all(x.device.type == "cuda" for x in X),
            found_inf=found_inf,
            amsgrad=False, maximize=False, **hyperparameters._asdict(),
        )  # fmt: skip


def _fusible(*tensors: Tensor) -> bool:
    """Whether PyTorch's fused kernels support these tensors of one parameter."""
    if len({t.dtype for t in tensors}) > 1:
        return False
    if not all(t.is_contiguous() for t in tensors):
        return False
    return tensors[0].device.type in ("cpu", "cuda")
