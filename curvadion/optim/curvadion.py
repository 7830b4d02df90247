"""CurvaDion: local steps, and a gate that decides when replicas synchronise."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from typing_extensions import Unpack

from curvadion import checks
from curvadion.comm.replicas import ReplicasArgument
from curvadion.gates import Gate
from curvadion.optim.choices import chosen_gate, chosen_sync
from curvadion.optim.dion_inner import DionInner
from curvadion.optim.group_keys import GroupOptions, Params, with_defaults
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.sync.base import Sync
from curvadion.sync.low_rank import LowRank


class CurvaDion(ReplicaOptimizer):
    """Orthonormal updates, synchronised over replicas only when a gate opens.

    The gate says when replicas synchronise, the sync how (CurvaDion, arXiv 2512.13728). While
    the gate is closed, replicas take local steps and exchange only 24 bytes, or nothing if
    the gate follows a schedule.

    Choose when replicas synchronise, because there is no default: ``wire_budget=0.01``, which
    is recommended, another gate, or the paper's method, :meth:`paper`.

    Args:
        params, lr, replicas: as in :class:`curvadion.Dion`.
        gate: when replicas synchronise. Needed without wire_budget and threshold, except with
            CodedGradients(), for which it is AlwaysOpen(). It is copied: read
            ``optimizer.gate``.
        sync: LowRank(), the papers' step, by default; with a gate that counts bytes
            QuantizedAverage(), the mean change of the weights in a few bits. It is copied.
        wire_budget: short for gate=ByteBudget(wire_budget), a share in (0, 1] of the bytes of
            an all-reduce of all float32 gradients at every step.
        threshold: tau, short for gate=RMMC(threshold).
        local_step: the update of a matrix while the gate is closed: "dion", along the
            replica's own direction, or "gradient", the paper's:
            X <- (1 - lr wd) X - local_lr G. The latter is for those who reproduce the paper;
            :meth:`paper` chooses it.
        local_lr: learning rate of the "gradient" local step; None uses lr.
        max_local_steps: most local steps in a row, doubled by a byte budget; None: no limit.
        warmup_steps: number of steps at the start that are always synchronised.
        capture: as in Dion. It captures the closed steps of a schedule.

    ``lr``, ``local_lr`` and all keyword arguments below are defaults of group keys, as in
    torch: a group may have values of its own.

    Keyword Args:
        look_ahead, direction, rank_fraction, right_factor: as in Dion. Default None, which is
            the sync's default, in the table below.
        momentum, ..., stochastic_rounding: all others of Dion, with the same defaults.

    What None means depends on the sync:

    ==============  ====================  ===================  ===================
    key             LowRank               QuantizedAverage     CodedGradients
    ==============  ====================  ===================  ===================
    look_ahead      0                     1.6 sqrt(p), <= 4.1  2
    direction       "low_rank"            "polar"              "polar"
    rank_fraction   1/4                   1                    1
    right_factor    "column_normalized"   "qr"                 "qr"
    ==============  ====================  ===================  ===================

    where p is the number of steps between two synchronisations of a weight (1 with RMMC,
    which cannot know). A group with a rank_fraction below 1 and no direction takes
    "low_rank". So a budget means Muon's direction; ``repr`` and ``report.directions`` say
    which one is taken.

    Attributes:
        inner: the optimizer of this replica, with ``inner.local_step``.
        report: as in Dion. :class:`curvadion.ReplicaOptimizer` has all attributes.

    Raises:
        TypeError, ValueError: naming the argument or group key and the value.
    """

    inner: DionInner

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: ReplicasArgument = None,
        gate: Gate | None = None,
        sync: Sync | None = None,
        wire_budget: float | None = None,
        threshold: float | None = None,
        local_step: Literal["dion", "gradient"] = "dion",
        local_lr: float | None = None,
        max_local_steps: int | None = 50,
        warmup_steps: int = 0,
        capture: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        keys = with_defaults(type(self), options)
        checks.one_of("local_step", local_step, ("dion", "gradient"))
        gate = chosen_gate(gate, wire_budget, threshold, sync, default=None)
        sync = chosen_sync(sync, gate)
        inner = DionInner(params, {"lr": lr, "local_lr": local_lr, **keys}, gate, sync, local_step)
        super().__init__(
            inner,
            gate,
            sync,
            replicas=replicas,
            max_local_steps=max_local_steps,
            warmup_steps=warmup_steps,
            capture=capture,
        )

    @classmethod
    def paper(
        cls,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        threshold: float = 0.3,
        local_step: Literal["dion", "gradient"] = "gradient",
        **options: Any,
    ) -> CurvaDion:
        """The method of the CurvaDion paper (arXiv 2512.13728).

        Replicas synchronise by Dion's low-rank step, ``LowRank()``, when the relative maximum
        momentum change exceeds tau, ``RMMC(threshold)``, and otherwise step along their own
        gradients. It is here to reproduce the paper: ``wire_budget=0.01`` reaches a lower loss
        with fewer bytes.

        Args:
            params: as in :class:`curvadion.Dion`.
            lr: learning rate, a number or a tensor of one element.
            threshold: tau, 0 or more.
            local_step: "gradient" as in the paper, or "dion" as in its authors' code.
            options: further arguments of :class:`CurvaDion`, such as ``replicas``. For the
                variant whose weights are never averaged and whose local runs have no limit,
                pass ``sync=LowRank(average_weights=False), max_local_steps=None``.

        Returns:
            The optimizer.

        Raises:
            TypeError, ValueError: as :class:`CurvaDion`.
        """
        options.setdefault("sync", LowRank())
        return cls(params, lr, threshold=threshold, local_step=local_step, **options)
