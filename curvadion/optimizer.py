"""CurvaDion and Dion: a step that reads like the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from curvadion import consensus, reconcile, wire
from curvadion import hyperparameters as check
from curvadion.checkpoint import check_complete, check_fits, restore_dtypes
from curvadion.collectives import group_size, mean_
from curvadion.elementwise import elementwise_step
from curvadion.gate import RMMC, AlwaysOpen, FixedPeriod, Gate, WireBudget
from curvadion.gradients import settle_gradients
from curvadion.local_step import local_dion_step, local_gradient_step
from curvadion.low_rank_step import (
    LowRankStep,
    accumulate_momenta,
    low_rank_step,
    measure_momenta,
)
from curvadion.momentum_turn import turn_momenta_, weights
from curvadion.plan import LR_AT_AGREEMENT, Plan, Pushed, check_parameter, names
from curvadion.polar_step import agreements, polar_step_
from curvadion.progress import Progress, read_record, record
from curvadion.quantization import BITS, bits_within, coded_share
from curvadion.quantized_mean import message_bytes
from curvadion.replicas import GATE_BYTES, Agreement, ReplicaGroup, verify_replicas
from curvadion.sharding import FLAT_SHARD_START, local
from curvadion.signals import agree_on_gradients, momentum_norms, with_gradients
from curvadion.telemetry import StepReport

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

MOST_SKIPS_IN_A_ROW = 10

requires_grad = attrgetter("requires_grad")


class CurvaDion(Optimizer):
    """Low-rank orthonormal updates, synchronised over replicas only when a gate opens.

    Per matrix X (m x n) on every replica i, after M_i <- M_i + G_i of the LOCAL gradient:

        gate open:   P = orth( mean_i(M_i Q_i) ),   R = mean_i( M_i^T P )
                     M_i <- M_i - (1 - mu) P R^T,   Q_i = column_normalize(R)
                     X <- (1 - lr wd) X - lr sqrt(m / n) P Q_i^T
        gate closed: a step of this replica's own, and nothing but the gate's 16 bytes sent

    (Dion, arXiv 2504.05295, algorithm 1; CurvaDion, arXiv 2512.13728.) The other parameters take
    AdamW or Lion under the same gate.

    Args:
        params: parameters, (name, parameter) pairs or groups, as for any torch optimizer;
            ``curvadion.param_groups(model)`` makes groups of a model. A group's ``algorithm`` is
            "dion" (2-D parameters), "adamw" or "lion"; each has its own lr, betas, decay.
        lr: learning rate, a number or a tensor of one element.
        replicas: the ranks that hold replicas of the weights, a ProcessGroup or a one-dimensional
            DeviceMesh; None for one replica. Gradients must reach ``step`` unaveraged.
        threshold: tau of the RMMC gate; the default gate is RMMC(0.3).
        gate: another gate, instead of ``threshold``: FixedPeriod, WireBudget, AlwaysOpen or yours.
        local_step: what a matrix does while the gate is closed: "dion", a power iteration inside
            the replica, or "gradient", X <- (1 - lr wd) X - local_lr G (the paper's).
        local_lr: learning rate of the "gradient" local step; None takes lr.
        max_local_steps: longest run of local steps; None for no bound.
        warmup_steps: that many first steps are always synchronised.
        wire_budget: share of the bytes of an all-reduce of all float32 gradients at every step, in
            (0, 1], that the replicas may send: the gate WireBudget, with reconcile="quantized".
        reconcile: what brings drifted replicas together when the gate opens. "average": the exact
            mean of all parameters and of the elementwise algorithms' moments, before the open step
            above. "quantized": a local step, then the mean of what weights have moved since the
            last time, sent in a few bits a number, instead of the open step above; P and R never
            cross the replicas, so that their rank costs no bytes. "none": nothing. By default
            "quantized" with a wire_budget, "average" without.
        reconcile_bits: of "quantized": 1, 2, 3, 4 or 8. What these bits lose is sent the next time.
            None takes what a budget pays for at every second step, 2 at least: 4 for 0.1.
        reconcile_parts: of "quantized": parameters come together in so many parts of about equal
            size, one when the gate opens, in turn; under a wire_budget it opens as many times more
            often. 3 gain in short runs where each weight is agreed on at every third to sixteenth
            step (docs/convergence.md).
        reconcile_momentum: of "quantized" with local_step="dion": whether momenta turn to the mean
            direction that the agreement on weights tells, for no bytes (curvadion.momentum_turn).
            Weights are held twice meanwhile.
        reconcile_polar: of "quantized" with local_step="dion": whether replicas lengthen, for no
            bytes, what of the mean of their directions noise has shortened
            (curvadion.polar_step). Weights are held once more meanwhile.
        mu: momentum decay.
        nesterov: directions are those of M + nesterov G: a look-ahead, 1 / mu is Nesterov's. None
            takes 0 (Dion's), and with reconcile="quantized" 1.6 times the root of the number of
            steps from one agreement on a weight to the next: 4 for six.
        betas, eps: of AdamW and Lion.
        weight_decay: decoupled, X <- (1 - lr weight_decay) X.
        rank_fraction: r as a fraction of min(m, n), in (0, 1]. None takes 1/4, and 1 with
            reconcile="quantized".
        rank_multiple_of: r is rounded up to a multiple of it, then capped by min(m, n).
        stack_dims: how many leading dimensions of a parameter enumerate matrices (1 for stacked
            experts). Of the others the first are rows and all further ones together columns.
        row_blocks: how many equal blocks of rows, or blocks of which sizes, are matrices of their
            own (3 for a fused QKV weight).
        momentum_rule: "error_feedback" (Dion) or "plain": M <- mu M + G, nothing fed back.
        right_factor: "column_normalized" (Dion) or "qr" (arXiv 2605.16341). None takes the first,
            and the second with reconcile="quantized".
        momentum_dtype, q_dtype: of the state, a torch.dtype or its name; None takes X's.
        stochastic_rounding: round bfloat16 matrices up or down at random, so that updates smaller
            than their spacing count on average. Replicas that agree keep the same bits.

    Raises:
        TypeError, ValueError: naming the argument or group key and the value.
    """

    # GradScaler then leaves unscaling and skipping to step(), which decides for all replicas.
    _step_supports_amp_scaling = True

    _cached: tuple[object, Plan] | None
    _part_of: list[int]  # of each parameter of the plan
    _verified: bool
    _wire_bytes: int

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        threshold: float | None = None,
        gate: Gate | None = None,
        local_step: Literal["dion", "gradient"] = "dion",
        local_lr: float | None = None,
        max_local_steps: int | None = 50,
        warmup_steps: int = 0,
        wire_budget: float | None = None,
        reconcile: Literal["average", "quantized", "none"] | None = None,
        reconcile_bits: int | None = None,
        reconcile_parts: int = 1,
        reconcile_momentum: bool = True,
        reconcile_polar: bool = True,
        mu: float = 0.95,
        nesterov: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rank_fraction: float | None = None,
        rank_multiple_of: int = 1,
        stack_dims: int = 0,
        row_blocks: int | Sequence[int] = 1,
        momentum_rule: Literal["error_feedback", "plain"] = "error_feedback",
        right_factor: Literal["column_normalized", "qr"] | None = None,
        momentum_dtype: torch.dtype | str | None = None,
        q_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        if reconcile is None:
            reconcile = "average" if wire_budget is None else "quantized"
        check.one_of("local_step", local_step, ("dion", "gradient"))
        check.one_of("reconcile", reconcile, ("average", "quantized", "none"))
        if reconcile_bits is not None:
            check.one_of("reconcile_bits", reconcile_bits, BITS)
        check.integer("reconcile_parts", reconcile_parts, 1)
        check.boolean("reconcile_momentum", reconcile_momentum)
        check.boolean("reconcile_polar", reconcile_polar)
        check.integer("warmup_steps", warmup_steps, 0)
        if max_local_steps is not None:
            check.integer("max_local_steps", max_local_steps, 1)
        self.gate = _gate(gate, threshold, wire_budget, max_local_steps)
        share = self.gate.share if isinstance(self.gate, WireBudget) else 0.0
        if share and reconcile != "quantized":
            raise ValueError(
                f"reconcile={reconcile!r} with gate={self.gate!r}: a budget of bytes needs "
                f"reconcile='quantized'."
            )
        self.local_step: str = local_step
        self.max_local_steps = max_local_steps
        self.warmup_steps = warmup_steps
        self.reconcile: str = reconcile
        self.reconcile_bits = bits_within(share) if reconcile_bits is None else reconcile_bits
        self.reconcile_parts = reconcile_parts
        self.reconcile_momentum = reconcile_momentum
        self.reconcile_polar = reconcile_polar
        self.progress = Progress()
        self.report: StepReport | None = None
        self._replicas = ReplicaGroup(replicas)
        self._forget()
        defaults = {
            "algorithm": "dion",
            "lr": lr,
            "local_lr": local_lr,
            "mu": mu,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank_fraction": rank_fraction,
            "rank_multiple_of": rank_multiple_of,
            "stack_dims": stack_dims,
            "row_blocks": row_blocks,
            "momentum_rule": momentum_rule,
            "right_factor": right_factor,
            "momentum_dtype": check.dtype_name("momentum_dtype", momentum_dtype),
            "q_dtype": check.dtype_name("q_dtype", q_dtype),
            "stochastic_rounding": stochastic_rounding,
            # A key of all groups, since checkpoint tools save and load the keys of groups.
            "progress": record(self.progress, self.gate),
            check.LR_SUM: 0.0,
        }
        chosen = self._when_none()
        defaults |= {key: value for key, value in chosen.items() if defaults[key] is None}
        check.check_group(defaults, defaults)
        super().__init__(params, defaults)

    def _when_none(self) -> dict[str, Any]:
        """What None stands for where it depends on how replicas come together."""
        if self.reconcile != "quantized":
            return {"rank_fraction": 0.25, "right_factor": "column_normalized", "nesterov": 0.0}
        parts = self.reconcile_parts
        period = parts * self.gate.expected_period(coded_share(self.reconcile_bits) / parts)
        return {"rank_fraction": 1.0, "right_factor": "qr", "nesterov": _look_ahead(period)}

    # ---------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step; collective over the replicas.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            RuntimeError: on every replica alike, if the replicas' gradients are identical although
                this optimizer synchronises them, if their optimizers differ, or at the tenth
                step in a row with a non-finite gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._plan()
        with _full_precision(plan.device):
            self._step(plan)
        return loss

    def _step(self, plan: Plan) -> None:
        created = self._create_state(plan)
        if plan.sharded:
            settle_gradients([p.X for p in plan.parameters], self._replicas.process_group)
        scaled = self._unscale(plan)

        pushed = plan.pushed()
        reads = self.gate.reads_momentum and plan.dion
        momenta = momentum_norms(plan, pushed) if reads else None
        norms = None if momenta is None else momenta.after
        agreement = agree_on_gradients(self.gate, plan, pushed, momenta)
        if created and agreement.all_zero and self._lr_is_zero():
            return
        if not agreement.finite:
            self.skip_step(tolerate=scaled)
            return
        self._verify(plan)

        reason = self._reason_to_open(agreement)
        if reason is not None:
            self._synchronized_step(plan, pushed, norms, complete=agreement.complete)
            self.progress.local_steps = 0
        else:
            self._local_step(plan, pushed, norms, complete=agreement.complete)
            self.progress.local_steps += 1
        self.progress.steps += 1
        self.progress.skipped_in_a_row = 0
        self._report(plan, reason or "closed", reason is not None, agreement)

    def _synchronized_step(
        self, plan: Plan, pushed: Pushed, norms: Tensor | None, *, complete: bool
    ) -> None:
        group = self._replicas.process_group
        if self.reconcile == "quantized":
            step = self._local_step(plan, pushed, norms, complete=complete)
            self._come_together(plan, step)
            return
        if self.reconcile == "average" and self.progress.local_steps:
            weights = [p.local for p in plan.parameters]
            reconcile.average_(weights + plan.moments(), plan.counters(), group)
        if not complete:
            plan, norms = with_gradients(plan, norms, plan.everyone)
            pushed = plan.pushed()
        accumulate_momenta(plan, pushed)
        low_rank_step(plan, pushed, norms, step=self.progress.steps, inside_replica=False)
        _elementwise_steps(plan, group)

    def _come_together(
        self, plan: Plan, step: LowRankStep | None = None, *, parts: int = 1
    ) -> None:
        """Replicas move the next parts to the mean of what each has moved since the last time.

        step: the one just taken, which the momenta are to follow.
        """
        self.gate.spend(parts)
        if not plan.parameters:
            return
        total = self._parts
        now = {(self.progress.part + i) % total for i in range(parts)}
        self._agree(plan.select([part in now for part in self._part_of]), step)
        self.progress.part = (self.progress.part + parts) % total
        self.progress.parts_apart = max(0, self.progress.parts_apart - parts)

    def _agree(self, plan: Plan, step: LowRankStep | None) -> None:
        """Replicas agree on the weights of a plan; momenta turn as far as the step has them."""
        group = self._replicas.process_group
        if group_size(group) == 1:
            consensus.renew_(plan.parameters)
            return
        turned = (
            step.among(plan.parameters) if step is not None and self.reconcile_momentum else None
        )
        own = [] if turned is None else weights(turned)
        lengthen = step is not None and self.reconcile_polar
        before = agreements(plan) if lengthen else []
        consensus.agree_(plan.parameters, self.reconcile_bits, group)
        if turned is not None:
            turn_momenta_(turned, own)
        if lengthen:
            polar_step_(plan, before)
        if turned is not None and self.gate.reads_momentum:
            measure_momenta(plan)
        consensus.settle(plan.parameters)

    def _local_step(
        self, plan: Plan, pushed: Pushed, norms: Tensor | None, *, complete: bool
    ) -> LowRankStep | None:
        """A step inside the replica; what it was made of, if it was Dion's."""
        if self.reconcile == "quantized":
            self._count_rates(plan, complete=complete)
        if not complete:
            # A replica's shards are one matrix: a piece that some of them miss is a piece of zeros.
            plan, norms = with_gradients(plan, norms, plan.inside)
            pushed = plan.pushed()
        taken = None
        if self.local_step == "dion":
            # Replicas share no later R where all steps are local: each remembers its own.
            remember = self.reconcile == "quantized"
            taken = local_dion_step(
                plan, pushed, norms, step=self.progress.steps, remember=remember
            )
        else:
            local_gradient_step(plan, pushed, norms, step=self.progress.steps)
        _elementwise_steps(plan, None)
        return taken

    def _count_rates(self, plan: Plan, *, complete: bool) -> None:
        """Note how far this local step goes, which some replica takes."""
        for group in self.param_groups:
            group[check.LR_SUM] += float(group["lr"])
        if not complete:
            moving, _ = with_gradients(plan, None, plan.everyone)
            these = set(map(id, moving.dion))
            consensus.stand_still([p for p in plan.dion if id(p) not in these])
        self.progress.parts_apart = self._parts

    def _reason_to_open(self, agreement: Agreement) -> str | None:
        """Why replicas synchronise at this step; None if they do not. Alike on all replicas."""
        local_steps = self.progress.local_steps
        # Asked at every step: a gate may keep a memory of what it has seen.
        opens = self.gate.opens(agreement.signal, local_steps)
        if self.progress.steps < self.warmup_steps:
            return "warm-up"
        if opens:
            return self.gate.reason
        if self.max_local_steps is not None and local_steps >= self.max_local_steps:
            return "longest local run"
        return None

    def skip_step(self, *, tolerate: bool) -> None:
        """Count a step at which some replica had a non-finite gradient; touch nothing else.

        For frameworks that see such gradients before ``step`` and do not call it. tolerate: raise
        no error however many steps in a row are skipped, as a loss scaler that looks for its scale
        wants it.
        """
        self.progress.steps += 1
        self.progress.skipped_in_a_row += 1
        self._report(None, "non-finite gradient", False, None)
        if self.progress.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW and not tolerate:
            raise RuntimeError(
                f"{self.progress.skipped_in_a_row} steps in a row had a NaN or an Inf in a "
                f"gradient on some replica (last: step {self.progress.steps}). No state was "
                f"touched at these steps: lower the learning rate or look for the cause in the "
                f"model, then load the last checkpoint."
            )

    def _verify(self, plan: Plan) -> None:
        if self._verified:
            return
        own_repr = type(self.gate).__repr__ is not object.__repr__
        gate = repr(self.gate) if own_repr else type(self.gate).__name__
        self._verified = verify_replicas(
            plan.description(
                self.local_step,
                self.reconcile,
                self.reconcile_bits,
                self.reconcile_parts,
                self.reconcile_momentum,
                self.reconcile_polar,
                self.warmup_steps,
                self.max_local_steps,
                gate,
                repr(self.gate.state_dict()),
                repr(self.progress),
                consensus.fingerprint(plan.parameters),
            ),
            [p.G for p in plan.parameters if p.G is not None],
            plan.device,
            replicas=self._replicas.process_group,
            everyone=plan.everyone,
        )

    def _report(
        self, plan: Plan | None, reason: str, gate_open: bool, agreement: Agreement | None
    ) -> None:
        read = agreement is not None and self.gate.reads_momentum
        total, metered = wire.counted_bytes()
        sent = total - self._wire_bytes if metered else None
        self._wire_bytes = total
        self.report = StepReport(
            step=self.progress.steps,
            gate_open=gate_open,
            reason=reason,
            rmmc=agreement.signal if agreement is not None and read else None,
            rmmc_parameter=(
                plan.parameters[agreement.parameter].name
                if agreement is not None and read and plan is not None and plan.dion
                else None
            ),
            local_steps=self.progress.local_steps,
            skipped=agreement is None,
            wire_bytes=sent,
        )

    # ---------------------------------------------------------------- replicas

    @torch.no_grad()
    def synchronize(self, *, exact: bool = True) -> None:
        """Make replicas agree in parameters and optimizer state; collective, dense.

        For before a checkpoint or an evaluation, and before parameters are frozen. Averaging the
        momenta changes nothing in what later synchronised steps compute, which depend on the
        momenta's mean only; local steps, all there are with reconcile="quantized", go on from it.

        Args:
            exact: True sends several times as much as dense gradients. False sends, with
                reconcile="quantized", what an open step does for each of the ``reconcile_parts``
                that has moved since replicas agreed on it, and they agree in what that averages.
                A budget of bytes counts either as that many openings.

        Raises:
            ValueError: if ``exact`` is False with another ``reconcile``.
        """
        plan = self._plan()
        plan.look_up_states()
        if not exact:
            if self.reconcile != "quantized":
                raise ValueError(
                    f"exact=False needs reconcile='quantized', but it is {self.reconcile!r}: leave "
                    f"exact out."
                )
            if self.progress.parts_apart:
                with _full_precision(plan.device):
                    self._come_together(plan, parts=self.progress.parts_apart)
            self.progress.local_steps = 0
            return
        tensors = [p.local for p in plan.parameters]
        ready = plan.select([bool(p.state) for p in plan.parameters])
        consensus.give_back_losses_(ready.parameters)
        for p in ready.dion:
            others = {"momentum_norm", FLAT_SHARD_START, LR_AT_AGREEMENT, *consensus.STATE_KEYS}
            tensors += [local(p.state[key]) for key in sorted(p.state.keys() - others)]
        group = self._replicas.process_group
        reconcile.average_(tensors + ready.moments(), ready.counters(), group)
        consensus.renew_(ready.parameters)
        measure_momenta(ready)
        self.gate.spend(self.progress.parts_apart)
        self.progress.local_steps = self.progress.parts_apart = 0

    @torch.no_grad()
    def drift(self) -> float:
        """Root mean square over replicas of ||X_i - mean|| / ||mean||; collective, dense."""
        plan = self._plan()
        return reconcile.drift(
            [(p.local, plan.copies_inside(p)) for p in plan.parameters],
            self._replicas.process_group,
            plan.inside,
        )

    # ---------------------------------------------------------------- groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the constructor's defaults.

        Raises:
            ValueError, TypeError: for unknown keys, impossible values, and parameters that the
                group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        check.check_group(param_group, self.defaults)
        if "params" not in param_group:
            raise ValueError(f"param_group has no 'params', only {sorted(param_group)}")
        dtypes: dict[str, Any] = {
            key: check.dtype_name(key, param_group[key])
            for key in ("momentum_dtype", "q_dtype")
            if key in param_group
        }
        super().add_param_group({**param_group, **dtypes})
        try:
            self._check_last_group()
        except ValueError:
            self.param_groups.pop()
            raise
        self._verified = False

    def _check_last_group(self) -> None:
        group = self.param_groups[-1]
        X, X_names = group["params"], names(group, len(self.param_groups) - 1)
        if len(X) != len(X_names):
            raise ValueError(f"param_names={X_names!r} names {len(X_names)} of {len(X)} params")
        for x, name in zip(X, X_names, strict=True):
            check_parameter(x, name, group)
        for key in ("lr", "local_lr"):
            group[key] = check.without_dimensions(group[key])

    def state_dict(self) -> dict[str, Any]:
        """As torch's; every group also holds ``progress``: the gate's memory and the counters.

        Replicas hold momenta of their own, and a distributed checkpoint keeps one of each: call
        :meth:`synchronize` before it.
        """
        for group in self.param_groups:
            group["progress"] = record(self.progress, self.gate)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every tensor keeps the dtype it was saved with.

        Raises:
            ValueError: if the groups or parameters do not match, come from another optimizer, or
                the state is missing, or another rank's piece.
        """
        progress, gate = read_record(state_dict)
        check_fits(self, state_dict)
        check_complete(self, state_dict, progress.steps)
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)
        if gate:
            self.gate.load_state_dict(gate)
        self.progress = progress
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        behaviour = ("gate", "local_step", "max_local_steps", "warmup_steps")
        together = [f"reconcile{what}" for what in ("", "_bits", "_parts", "_momentum", "_polar")]
        own = (*behaviour, *together, "progress", "report", "_replicas")
        kept = {key: getattr(self, key) for key in own}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        """Drop what is derived from the groups; it is rebuilt at the next use."""
        self._cached = None
        self._part_of = []
        self._verified = False
        self._wire_bytes, _ = wire.counted_bytes()

    def _plan(self) -> Plan:
        """The plan of the groups as they are now: frameworks replace parameters after __init__."""
        key = [
            [
                id(g),
                g["algorithm"],
                g["right_factor"],
                *map(id, g["params"]),
                *map(requires_grad, g["params"]),
            ]
            for g in self.param_groups
        ] + [[id(self.state), id(self.gate)]]
        if self._cached is None or self._cached[0] != key:
            plan = Plan.of(self.param_groups, self.state, self._replicas.process_group)
            if self._cached is not None:
                self._change_plan(self._cached[1], plan)
            dion = [g for g in self.param_groups if g["algorithm"] == "dion" and g["params"]]
            if self.gate.reads_momentum and not dion:
                raise ValueError(
                    f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                    f"use gate=FixedPeriod(...) or AlwaysOpen()."
                )
            self._tell_costs(plan)
            self._cached = (key, plan)
        return self._cached[1]

    def _change_plan(self, before: Plan, after: Plan) -> None:
        """Parameters were frozen, thawed or added since the plan of before was made."""
        alone = self.reconcile == "none" or group_size(self._replicas.process_group) == 1
        if not alone and (self.progress.local_steps or self.progress.parts_apart):
            kept = {id(X) for group in self.param_groups for X in group["params"]}
            for p in before.parameters:
                if id(p.X) in kept and not p.X.requires_grad:
                    raise RuntimeError(
                        f"{p.name} was frozen while replicas are apart, of which each would keep "
                        f"its own: set requires_grad_(True), call synchronize() and freeze it then."
                    )
        known = {id(p.X) for p in before.parameters}
        consensus.settle([p for p in after.parameters if id(p.X) not in known])

    @property
    def _parts(self) -> int:
        """In how many parts parameters come together: fewer than asked for where they are few."""
        return max(self._part_of, default=-1) + 1

    def _tell_costs(self, plan: Plan) -> None:
        """Tell the gate what steps send, alike on all ranks, whatever pieces they hold."""
        if self.reconcile != "quantized" or not plan.parameters:
            return
        sizes = consensus.sizes(plan.parameters)
        before, self._part_of = self._part_of, consensus.in_parts(sizes, self.reconcile_parts)
        if self.progress.parts_apart and before != self._part_of:
            self.progress.parts_apart = self._parts  # which of the old ones is not known
        dense = 4 * sum(sizes)
        self.gate.open_cost = message_bytes(sizes, self.reconcile_bits) / self._parts / dense
        self.gate.closed_cost = GATE_BYTES / dense
        if isinstance(self.gate, WireBudget):
            self.gate.check_feasible(self.max_local_steps)

    def _create_state(self, plan: Plan) -> bool:
        """Give every parameter its state, with or without a gradient; True if none had any."""
        states = plan.look_up_states()
        without = [p for p, state in zip(plan.parameters, states, strict=True) if not state]
        for p in without:
            p.create_state()
        # Whatever brings new states without agreements, loading for one, is verified anew.
        if self.reconcile == "quantized" and (without or not self._verified):
            consensus.begin(plan.parameters)
        if without:
            plan.look_up_states()
        return len(without) == len(plan.parameters)

    def _lr_is_zero(self) -> bool:
        return all(float(group["lr"]) == 0 for group in self.param_groups)

    def _unscale(self, plan: Plan) -> bool:
        """Divide the gradients by a GradScaler's scale, if one drives this step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients = [p.G for p in plan.parameters if p.G is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(plan.device).double().reciprocal().float())
        return hasattr(self, "found_inf")


class Dion(CurvaDion):
    """Dion (arXiv 2504.05295): CurvaDion with a gate that is always open.

    Arguments as CurvaDion's, less those that a closed gate would need.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        mu: float = 0.95,
        nesterov: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rank_fraction: float = 0.25,
        rank_multiple_of: int = 1,
        stack_dims: int = 0,
        row_blocks: int | Sequence[int] = 1,
        momentum_rule: Literal["error_feedback", "plain"] = "error_feedback",
        right_factor: Literal["column_normalized", "qr"] = "column_normalized",
        momentum_dtype: torch.dtype | str | None = None,
        q_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            replicas=replicas,
            gate=AlwaysOpen(),
            mu=mu,
            nesterov=nesterov,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            rank_fraction=rank_fraction,
            rank_multiple_of=rank_multiple_of,
            stack_dims=stack_dims,
            row_blocks=row_blocks,
            momentum_rule=momentum_rule,
            right_factor=right_factor,
            momentum_dtype=momentum_dtype,
            q_dtype=q_dtype,
            stochastic_rounding=stochastic_rounding,
        )


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Keep a caller's autocast from an update's products, which it would take in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _gate(
    gate: Gate | None,
    threshold: float | None,
    wire_budget: float | None,
    max_local_steps: int | None,
) -> Gate:
    ways = {"gate": gate, "threshold": threshold, "wire_budget": wire_budget}
    given = [f"{key}={value!r}" for key, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: each is a gate; pass one of them.")
    if wire_budget is not None:
        return WireBudget(wire_budget)
    if gate is None:
        return RMMC(0.3 if threshold is None else threshold)
    if not isinstance(gate, Gate):
        raise TypeError(f"gate={gate!r} must be a Gate, got {type(gate).__name__}")
    longest = math.inf if max_local_steps is None else max_local_steps
    if isinstance(gate, FixedPeriod) and gate.period - 1 > longest:
        raise ValueError(
            f"gate={gate!r} takes {gate.period - 1} local steps, but "
            f"max_local_steps={max_local_steps} ends them earlier: pass max_local_steps=None."
        )
    return gate


def _look_ahead(period: float) -> float:
    """The weight of the present gradient in directions that did best (docs/convergence.md)."""
    return round(1.6 * math.sqrt(period), 1)


def _elementwise_steps(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Steps with the gradients' means over a group; a missing gradient is zero."""
    gradients = [torch.zeros_like(p.local) if p.G is None else p.G for p in plan.elementwise]
    mean_(gradients, group)
    gradient = {id(p): G for p, G in zip(plan.elementwise, gradients, strict=True)}
    for parameters in plan.elementwise_by_group():
        elementwise_step(
            parameters[0].group["algorithm"],
            [p.local for p in parameters],
            [gradient[id(p)] for p in parameters],
            [{key: local(t) for key, t in p.state.items()} for p in parameters],
            parameters[0].group,
        )
