"""Dion: low-rank orthonormal updates, synchronised over replicas at every step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvadion import checks
from curvadion.agreement.verify import Settings
from curvadion.comm.groups import ReplicasArgument
from curvadion.gates import AlwaysOpen
from curvadion.optim import group_keys
from curvadion.optim.base import Params
from curvadion.optim.checkpoint import Record, check_state, check_sync, fitted, restore_dtypes
from curvadion.optim.outer import ReplicaOptimizer
from curvadion.plan.parameter import Parameter, check_parameter, names
from curvadion.plan.plan import Plan
from curvadion.plan.state import PROGRESS, StateKey
from curvadion.sync.base import Step, Sync
from curvadion.sync.low_rank import LowRank
from curvadion.update.registry import create_state, state_keys

DirectionName = Literal["low_rank", "polar", "normuon", "dion2", "nordion2"]


class Dion(ReplicaOptimizer):
    """Dion optimizer (arXiv 2504.05295, algorithm 1): replicas synchronise at every step.

    Per matrix X (m x n), on every replica i:

        M_i <- M_i + G_i                                     G_i is the LOCAL gradient
        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P )   two low-rank all-reduces
        M_i <- M_i - (1 - mu) P R^T,   Q = column_normalize(R)
        X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T            the same on every replica

    Parameters that are not matrices use AdamW or Lion with the mean gradient.

    Args:
        params: parameters, (name, parameter) pairs or groups, such as
            ``curvadion.param_groups(model)``. A group's ``algorithm`` is "dion", "adamw" or
            "lion".
        lr: learning rate, a number or a tensor of one element.
        replicas: the ranks with replicas of the weights, a ProcessGroup or a one-dimensional
            DeviceMesh. Their gradients must reach ``step`` unaveraged. None for one replica,
            "single" if processes train alone or something else averages.
        momentum: the factor mu by which momenta decay.
        look_ahead: directions are computed from M + look_ahead G; 1 / mu is Nesterov's
            momentum.
        betas, eps: of AdamW, Lion and NorMuon.
        weight_decay: decoupled, X <- (1 - lr weight_decay) X.
        direction: how the update of a matrix is computed. "low_rank": P Q^T as above.
            "polar": Muon's polar factor of the momentum, U = B (B^T B)^(-1/2), of full rank;
            between replicas it sends dense gradients. "normuon": U with rows divided by their
            second moments (arXiv 2510.05491). "dion2": U of the share rank_fraction of the
            rows of a wide matrix, columns of a tall one, that are largest (arXiv 2512.16928).
            "nordion2": both. Groups that set a rank_fraction below 1 and no direction use
            "low_rank".
        rank_fraction: r as a fraction of min(m, n), in (0, 1]. For "low_rank" and "dion2".
        rank_multiple_of: r is rounded up to a multiple of this, then capped by min(m, n); for
            GPUs, whose tensor cores like multiples of 8 or 16.
        stack_dims: number of leading dimensions that enumerate matrices (1 for stacked
            experts). Rows come next, and all other dimensions are the columns.
        row_blocks: number of blocks of rows, or their sizes, each its own matrix (3 for QKV).
        input_first: whether matrices are stored as (in, out); rows are outputs either way.
        momentum_rule: "error_feedback" (Dion) or "plain", ordinary momentum M <- mu M + G, for
            an ablation of the paper's error feedback in "low_rank" and "dion2" steps. "polar"
            and "normuon" use all of M, so that both rules are the same.
        right_factor: "column_normalized" (Dion) or "qr" (arXiv 2605.16341). For "low_rank".
        newton_schulz: the iteration for polar factors: "polar_express", the best
            coefficients for the number of steps (arXiv 2505.16932), or "muon", those of
            torch.optim.Muon, for a run that continues one (with newton_schulz_steps=5).
        newton_schulz_steps: the number of iterations.
        gather: how ranks with shards compute polar factors. "auto": a matrix is sent to one
            of them and back if that is cheaper than sums of Gram matrices. "never": it stays
            sharded.
        exchange_dtype: the dtype in which matrices are sent, "float32" or "bfloat16"; None
            uses bfloat16 if products run in half precision, and otherwise their own dtype.
        update_scale: the factor of lr for a matrix (m, n): "spectral" is sqrt(m / n) (Dion),
            "original" is sqrt(max(1, m / n)) (Muon), "match_rms_adamw" (arXiv 2502.16982) is
            0.2 sqrt(max(m, n)).
        momentum_dtype: dtype of momenta, a torch.dtype or its name; None: X's.
        q_dtype: the same for the right factors Q of "low_rank". With float32 weights
            "bfloat16" halves their memory, n r elements a matrix.
        stochastic_rounding: round bfloat16 matrices up or down at random, identically on all
            replicas, so that tiny updates take effect on average.

        capture: on a CUDA device, whether steps are captured in a CUDA graph and replayed.
            None captures after three equal steps, where it can, and warns once otherwise;
            True raises ValueError where it cannot; False never captures. Gradients may be new
            tensors at each step, and all numbers of groups may change.

    All arguments except ``params``, ``replicas`` and ``capture`` are defaults of group keys,
    as in torch.

    Attributes:
        report: the last step's :class:`curvadion.StepReport`.
        progress: counters of the run: ``steps``, ``local_steps`` and more.

    Raises:
        TypeError, ValueError: naming the argument or group key and the value.
    """

    local_step: str = "dion"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: ReplicasArgument = None,
        momentum: float = 0.95,
        look_ahead: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        direction: DirectionName = "low_rank",
        rank_fraction: float = 0.25,
        rank_multiple_of: int = 1,
        stack_dims: int = 0,
        row_blocks: int | Sequence[int] = 1,
        input_first: bool = False,
        momentum_rule: Literal["error_feedback", "plain"] = "error_feedback",
        right_factor: Literal["column_normalized", "qr"] = "column_normalized",
        newton_schulz: Literal["polar_express", "muon"] = "polar_express",
        newton_schulz_steps: int = 4,
        gather: Literal["auto", "never"] = "auto",
        exchange_dtype: torch.dtype | str | None = None,
        update_scale: Literal["spectral", "original", "match_rms_adamw"] = "spectral",
        momentum_dtype: torch.dtype | str | None = None,
        q_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        capture: bool | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k in group_keys.SETTINGS}
        self._choose(replicas, AlwaysOpen(), LowRank(), capture=capture)
        self._construct(params, local_lr=None, **given)

    def _construct(self, params: Params, **keys: Any) -> None:
        """End a constructor, after :meth:`_choose`; keys: defaults of group keys."""
        of_sync = {**Sync.group_defaults, **self.sync.group_defaults}
        foresees = "look_ahead" not in self.sync.group_defaults
        if foresees:
            del of_sync["look_ahead"]
        keys = {**group_keys.with_direction(keys), "algorithm": "dion"}
        keys |= {key: value for key, value in of_sync.items() if keys[key] is None}
        # look_ahead=None is resolved later, from the cost of the parameters.
        group_keys.check_group(
            {k: v for k, v in keys.items() if k != "look_ahead" or v is not None}
        )
        # The record is a group key because checkpoint tools save and load those.
        super().__init__(params, {**keys, PROGRESS: self._record()})
        if foresees:
            self._set_look_ahead()

    def _set_look_ahead(self) -> None:
        self._set_gate_costs(self._trained(), sharded=False)
        period = self.gate.openings_per_full_sync * self.gate.expected_period()
        for keys in (self.defaults, *self.param_groups):
            if keys["look_ahead"] is None:
                keys["look_ahead"] = self.sync.look_ahead(period)

    def _trained(self) -> list[Tensor]:
        """The trained parameters in the order of a plan, Dion's first; all if none is yet."""
        groups = sorted(self.param_groups, key=lambda group: group["algorithm"] != "dion")
        X = [x for group in groups for x in group["params"]]
        return [x for x in X if x.requires_grad] or X

    # --- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose keys override the defaults; a warning names unknown keys.

        Raises:
            ValueError, TypeError: for misspelt keys, invalid values and unsupported
                parameters.
        """
        group_keys.check_group(param_group)
        super().add_param_group(group_keys.with_direction(param_group))
        group = self.param_groups[-1]
        try:
            X_names = names(group, len(self.param_groups) - 1)
            for x, name in zip(group["params"], X_names, strict=True):
                check_parameter(x, name, group)
            for key in ("lr", "local_lr"):
                if isinstance(group[key], Tensor):
                    group[key] = group[key].view(())  # a scalar tensor promotes no dtype
            for key in group_keys.DTYPE_KEYS:
                group[key] = group_keys.dtype_name(key, group[key])
        except ValueError:
            self.param_groups.pop()
            raise
        self._verified = False
        if unknown := group_keys.unknown_keys(group):
            warnings.warn(
                f"{type(self).__name__} does not know the group keys {sorted(unknown)}, "
                f"which are kept without effect.",
                stacklevel=checks.user_stacklevel(),
            )

    def _check_settings(self) -> None:
        """Raise ValueError for an invalid value of a group."""
        if not self._settings.changed(self.param_groups):
            return
        if wrong := group_keys.first_error(self.param_groups):
            self._settings = Settings()  # checked again at the next step
            raise ValueError(wrong)

    def _check_plan(self, plan: Plan) -> None:
        if self.gate.reads_momentum and not any(
            g["algorithm"] == "dion" and g["params"] for g in self.param_groups
        ):
            raise ValueError(
                f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                f"use FixedPeriod or AlwaysOpen()."
            )
        if self.progress.steps:
            for p in plan.parameters:
                if p.state:
                    check_state(p.name, p.X, p.group, p.state)
        super()._check_plan(plan)

    # --- states

    @property
    def _state_keys(self) -> tuple[StateKey, ...]:
        return (*self.sync.state_keys, *state_keys())

    def _create_state(self, p: Parameter) -> None:
        create_state(p)

    @property
    def _takes_directions(self) -> bool:
        return self.local_step == "dion"

    def _inner_step(self, *agreed: Any, **more: Any) -> Step:
        return super()._inner_step(*agreed, directed=self._takes_directions, **more)

    def _load(self, saved: dict[str, Any], held: Record) -> None:
        fitting = fitted(saved, held, self.param_groups, self.sync)
        check_sync(saved, held, self.sync, self.replicas.replica)
        Optimizer.load_state_dict(self, fitting)
        restore_dtypes(self.param_groups, self.state, fitting)
