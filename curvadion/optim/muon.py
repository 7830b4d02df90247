"""Muon, with the arguments and defaults of torch.optim.Muon."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from curvadion import checks
from curvadion.comm.replicas import ReplicasArgument
from curvadion.optim.dion import Dion
from curvadion.optim.group_keys import Params
from curvadion.update.newton_schulz import MUON

EPS = 1e-7  # torch's default


class Muon(Dion):
    """Muon in place of torch.optim.Muon: the same arguments, defaults and steps.

    It is :class:`curvadion.Dion` with ``direction="polar"``, so it also works on shards (FSDP2,
    tensor parallelism, ZeRO), between replicas, and for other parameters: groups of
    ``curvadion.param_groups(model)`` that are not matrices take AdamW or Lion.

    The defaults are torch's and not Dion's, so that a run in which you swap one for the other
    takes the same steps, up to the rounding of torch's bfloat16 products. Dion's own iteration
    has four steps instead of five and is more accurate; for that, use ``Dion``.

    Args:
        params: as in Dion. Parameters without an ``algorithm`` need two dimensions or more.
        lr: learning rate of matrices, a number or a tensor of one element.
        weight_decay: decoupled, X <- (1 - lr weight_decay) X.
        momentum: the factor mu by which momenta decay. A group with its own needs its own
            ``look_ahead``, 1 / momentum.
        nesterov: whether directions are computed from M + G / mu instead of M.
        ns_coefficients: only torch's default, (3.4445, -4.7750, 2.0315).
        eps: only torch's default, 1e-7: a momentum of any length has a direction here.
        ns_steps: the number of Newton-Schulz iterations, 1 to 20.
        adjust_lr_fn: the factor of lr for a matrix (m, n): "original" is sqrt(max(1, m / n)),
            "match_rms_adamw" is 0.2 sqrt(max(m, n)). None is "original".
        replicas, capture: as in Dion.
        options: Dion's other keyword arguments, such as ``betas`` of AdamW. ``eps`` of AdamW is
            1e-8, unless its groups have another.

    Attributes:
        report: as in Dion. :class:`curvadion.ReplicaOptimizer` has all attributes.

    Raises:
        TypeError, ValueError: naming the argument or group key and the value.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = MUON,
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        replicas: ReplicasArgument = None,
        capture: bool | None = None,
        **options: Any,
    ) -> None:
        checks.boolean("nesterov", nesterov)
        checks.number("momentum", momentum, below=1.0)
        checks.integer("ns_steps", ns_steps, 1, 20)
        checks.one_of("adjust_lr_fn", adjust_lr_fn, (None, "original", "match_rms_adamw"))
        if ns_coefficients not in (MUON, list(MUON)):
            raise ValueError(
                f"ns_coefficients={ns_coefficients!r} must be {MUON}: leave it out, or use "
                f"Dion(direction='polar') for the best coefficients of each iteration."
            )
        if eps != EPS:
            raise ValueError(
                f"eps={eps!r} must be {EPS}, torch's default, which has no effect here: leave "
                f"it out; AdamW's is a key of its groups."
            )
        settings: dict[str, Any] = {
            "direction": "polar",
            "look_ahead": 1 / momentum if nesterov and momentum else 0.0,
            "newton_schulz": "muon",
            "newton_schulz_steps": ns_steps,
            "update_scale": adjust_lr_fn or "original",
        }
        for key in settings.keys() & options.keys():
            raise TypeError(f"Muon sets {key} to {settings[key]!r}: use Dion for another.")
        super().__init__(
            params,
            lr,
            replicas=replicas,
            capture=capture,
            weight_decay=weight_decay,
            momentum=momentum,
            **settings,
            **options,
        )
