"""CurvaDion and Dion: a step that reads like the papers."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, itemgetter
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from curvadion.comm.collectives import group_size, mean_
from curvadion.gates import RMMC, AlwaysOpen, FixedPeriod, Gate, WireBudget
from curvadion.layout.dtensor import local
from curvadion.layout.gradients import place_gradients
from curvadion.layout.parameters import global_shape
from curvadion.metering import wire
from curvadion.metering.report import StepReport
from curvadion.optim import hyperparameters as check
from curvadion.optim.checkpoint import check_complete, check_fits, restore_dtypes
from curvadion.optim.conversion import Loading, convert, wrong_algorithm
from curvadion.optim.progress import Progress, Record, read_record, record
from curvadion.sync import consensus, reconcile
from curvadion.sync.codec import BITS, bits_within, coded_share
from curvadion.sync.coded_mean import message_bytes
from curvadion.sync.momentum_turn import turn_momenta_, weights
from curvadion.sync.polar_step import agreements, polar_step_
from curvadion.sync.replicas import GATE_BYTES, Agreement, Notice, ReplicaGroup, Replicas, Settings
from curvadion.sync.signals import (
    MomentumNorms,
    agree_on_gradients,
    momentum_norms,
    refuse,
    with_gradients,
)
from curvadion.sync.verify import (
    Checksum,
    GradientWatch,
    Listing,
    check_alike,
    listing,
    raise_different,
    verify_replicas,
)
from curvadion.update.local_step import local_dion_step, local_gradient_step
from curvadion.update.low_rank_step import (
    LowRankStep,
    accumulate_momenta,
    low_rank_step,
    measure_momenta,
)
from curvadion.update.plan import Parameter, Plan, Pushed, check_parameter, names
from curvadion.update.scalar import elementwise_step

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
            DeviceMesh. Gradients must reach ``step`` unaveraged. None for one replica; where
            several processes hold whole weights and the gate can close, "single" says that this is
            meant: each trains by itself, or something else averages the gradients.
        threshold: tau of the RMMC gate; the default gate is RMMC(0.3).
        gate: another gate, instead of ``threshold``: FixedPeriod, WireBudget, AlwaysOpen or yours.
        local_step: what a matrix does while the gate is closed: "dion", a power iteration inside
            the replica, or "gradient", X <- (1 - lr wd) X - local_lr G (the paper's).
        local_lr: learning rate of the "gradient" local step; None takes lr.
        max_local_steps: longest run of local steps; None for no bound. A budget that keeps or pays
            something back may take twice as many.
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
            direction that the agreement on weights tells, for no bytes
            (curvadion.sync.momentum_turn). Weights are held twice meanwhile.
        reconcile_polar: of "quantized" with local_step="dion": whether replicas lengthen, for no
            bytes, what of the mean of their directions noise has shortened
            (curvadion.sync.polar_step). Weights are held once more meanwhile.
        mu: momentum decay.
        nesterov: directions are those of M + nesterov G: a look-ahead, 1 / mu is Nesterov's. None
            takes 0 (Dion's), and with reconcile="quantized" 1.6 times the root of the number of
            steps from one agreement on a weight to the next, as the gate can afford it for the
            parameters given here: 4 for six.
        betas, eps: of AdamW and Lion.
        weight_decay: decoupled, X <- (1 - lr weight_decay) X.
        rank_fraction: r as a fraction of min(m, n), in (0, 1]. None takes 1/4, and 1 with
            reconcile="quantized".
        rank_multiple_of: r is rounded up to a multiple of it, then capped by min(m, n).
        stack_dims: how many leading dimensions of a parameter enumerate matrices (1 for stacked
            experts). Of the others the first are rows and all further ones together columns.
        row_blocks: how many equal blocks of rows, or blocks of which sizes, are matrices of their
            own (3 for a fused QKV weight).
        input_first: whether matrices are stored as (in, out), as transformers' Conv1D does, and
            not as (out, in). Rows, as in ``row_blocks``, are outputs either way.
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
    _algorithms: list[str]  # of the groups, whose states hold what these need
    _part_of: list[int]  # of each parameter of the plan
    _verified: bool
    _alike: bool  # whether the last step has shown this rank no other settings than its own
    _watch: GradientWatch | None
    _unread: Tensor | None  # what the watch's last look told, on the device
    _wire_bytes: int

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: Replicas = None,
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
        input_first: bool = False,
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
            check.integer("reconcile_bits", reconcile_bits, 1)
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
        self._strangers: set[str] = set()
        self._forget()
        self._defaults_by_sync = self._when_none()
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
            "input_first": input_first,
            "momentum_rule": momentum_rule,
            "right_factor": right_factor,
            "momentum_dtype": check.dtype_name("momentum_dtype", momentum_dtype),
            "q_dtype": check.dtype_name("q_dtype", q_dtype),
            "stochastic_rounding": stochastic_rounding,
            # A key of all groups, since checkpoint tools save and load the keys of groups.
            "progress": self._record(),
            check.LR_SUM: 0.0,
        }
        chosen = self._defaults_by_sync
        defaults |= {key: value for key, value in chosen.items() if defaults[key] is None}
        # A look-ahead that is None is set by the end of this, as the parameters' costs tell.
        given = {k: v for k, v in defaults.items() if k != "nesterov" or v is not None}
        check.check_group(given)
        super().__init__(params, defaults)
        self._set_look_ahead()

    def _when_none(self) -> dict[str, Any]:
        """What None stands for where it depends on how replicas come together."""
        if self.reconcile != "quantized":
            return {"rank_fraction": 0.25, "right_factor": "column_normalized", "nesterov": 0.0}
        return {"rank_fraction": 1.0, "right_factor": "qr"}

    def _set_look_ahead(self) -> None:
        """Set what ``nesterov=None`` stands for where it depends on what the parameters cost."""
        if self.reconcile == "quantized":
            self._defaults_by_sync["nesterov"] = self._look_ahead()
        for keys in (self.defaults, *self.param_groups):
            if keys["nesterov"] is None:
                keys["nesterov"] = self._defaults_by_sync["nesterov"]

    def _look_ahead(self) -> float:
        """The weight of the present gradient in directions that did best (docs/convergence.md)."""
        trained = [
            (group["algorithm"] != "dion", x)
            for group in self.param_groups
            for x in group["params"]
            if x.requires_grad
        ]
        self._tell_costs([x for _, x in sorted(trained, key=itemgetter(0))])
        cost = self.gate.open_cost
        if cost is None:  # nothing is trained yet
            cost = coded_share(self.reconcile_bits) / self.reconcile_parts
        period = self.gate.openings_per_agreement * self.gate.expected_period(cost)
        return round(1.6 * math.sqrt(period), 1)

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
        if wrong := self._wrong_settings():
            self._refuse(wrong)
        # Ranks agree by the plan they had: what has changed here may be this rank's alone.
        plan = self._known_plan()
        scaled = self._unscale(plan.device)
        with _full_precision(plan.device):
            self._step(plan, scaled=scaled)
        return loss

    def _wrong_settings(self) -> str | None:
        """What is wrong in the groups as they are now."""
        if wrong := check.settings(self.param_groups):
            return wrong
        algorithms = [group["algorithm"] for group in self.param_groups]
        if algorithms != self._algorithms:
            if wrong := wrong_algorithm(self.param_groups, self.state):
                return wrong
            self._algorithms = algorithms
        return None

    def _refuse(self, wrong: str) -> None:
        """Raise ValueError for a setting that is wrong here, and an error on the other ranks."""
        if self._cached is not None:
            plan = self._cached[1]
        else:
            # What is not wrong is enough to meet the others.
            known = [{**group, **check.valid(group, self.defaults)} for group in self.param_groups]
            try:
                plan = self._make_plan(known)
            except (KeyError, TypeError, ValueError):
                raise ValueError(wrong) from None
        if plan.sharded:
            place_gradients([p.X for p in plan.parameters], self._replicas.process_group)
        refuse(self.gate, plan)
        raise ValueError(wrong)

    def _step(self, plan: Plan, *, scaled: bool) -> None:
        new = self._create_state(plan)
        if plan.sharded:
            place_gradients([p.X for p in plan.parameters], self._replicas.process_group)

        pushed = plan.pushed()
        reads = self.gate.reads_momentum and plan.dion
        momenta = momentum_norms(plan, pushed) if reads else None
        norms = None if momenta is None else momenta.after
        still = len(new) == len(plan.parameters) and self._lr_is_zero()
        agreement = self._agreement(plan, pushed, momenta, still=still)
        if agreement.notice == Notice.CHANGED:
            self._step(self._changed_plan(plan), scaled=scaled)
            return
        if agreement.notice == Notice.NEW and agreement.all_zero:
            return
        if not agreement.finite:
            self.skip_step(tolerate=scaled)
            return
        complete = agreement.complete
        if agreement.notice in (Notice.NEW, Notice.UNVERIFIED) and self._replicas.size > 1:
            complete = self._verify(plan, new)
        self._look_at_gradients(plan)

        reason = self._reason_to_open(agreement)
        if reason is not None:
            self._synchronized_step(plan, pushed, norms, complete=complete)
            self.progress.local_steps = 0
        else:
            self._local_step(plan, pushed, norms, complete=complete)
            self.progress.local_steps += 1
        self.progress.steps += 1
        self.progress.steps_since_exact += 1
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
        elif self.progress.local_steps:
            self.progress.parts_apart = 1  # weights stay apart until synchronize()
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
        longest = self.gate.longest_run(self.max_local_steps)
        if longest is not None and local_steps >= longest:
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

    def _agreement(
        self, plan: Plan, pushed: Pushed, momenta: MomentumNorms | None, *, still: bool
    ) -> Agreement:
        """What all ranks know of this step before it is taken; a user's error is raised on all.

        still: whether states have just been created here, and all learning rates are zero.
        """
        notice = Notice.NOTHING
        if not self._alike:
            notice = Notice.DIFFERENT
        elif self._cached is not None and self._cached[0] != self._plan_key():
            notice = Notice.CHANGED
        elif still:
            notice = Notice.NEW
        elif not self._verified and self._replicas.size > 1:
            notice = Notice.UNVERIFIED
        settings = Settings(self.progress.steps, self._checksum.of(self.param_groups))
        unread, self._unread = self._unread, None
        agreement = agree_on_gradients(
            self.gate, plan, pushed, momenta, notice=notice, settings=settings, unread=unread
        )
        self._alike = agreement.alike
        if agreement.notice == Notice.INVALID:
            raise RuntimeError(
                "Another rank has an impossible value in its param_groups and raises the error "
                "that names it: see that rank's output."
            )
        if agreement.notice == Notice.DIFFERENT:
            raise_different(self._listing(plan), plan.everyone)
        if self._watch is not None and agreement.read:
            self._watch.conclude(agreement.read)
        return agreement

    def _changed_plan(self, before: Plan) -> Plan:
        """The plan of what was frozen, thawed, added or regrouped on all ranks alike."""
        members: Listing = []
        for g, group in enumerate(self.param_groups):
            for X, name in zip(group["params"], names(group, g), strict=True):
                state = "trained" if X.requires_grad else "frozen"
                how = f"{state}, {group['algorithm']}, {group['right_factor']}"
                members.append((name, f"{how}, of shape {global_shape(X)}"))
        check_alike(members, before.everyone, before.device)
        return self._plan()

    def _verify(self, plan: Plan, new: Sequence[Parameter]) -> bool:
        """Compare the replicas; return whether all of them have all gradients.

        new: the parameters that had no state before this step.
        """
        drifts = self.progress.apart or (self.reconcile == "none" and self.progress.steps > 0)
        comparable = [p for p in plan.parameters if consensus.AGREED in p.state]
        if not comparable:
            comparable = list(new) if drifts else plan.parameters
        self._verified, complete = verify_replicas(
            plan,
            self._listing(plan),
            comparable,
            replicas=self._replicas.process_group,
        )
        return complete

    def _listing(self, plan: Plan) -> Listing:
        """All that must be alike on all ranks of all replicas."""
        # The repr of a gate of the user's may tell where an object lies in memory.
        ours = type(self.gate).__module__ == Gate.__module__
        arguments = (
            *("local_step", "reconcile", "reconcile_bits", "reconcile_parts"),
            *("reconcile_momentum", "reconcile_polar", "warmup_steps", "max_local_steps"),
        )
        more: dict[str, object] = {name: getattr(self, name) for name in arguments}
        more["gate"] = repr(self.gate) if ours else type(self.gate).__name__
        more["the gate's state"] = self.gate.state_dict()
        more["progress"] = self.progress
        return listing(self.param_groups, plan, more)

    def _look_at_gradients(self, plan: Plan) -> None:
        """Look now and then whether something else averages gradients; read at the next step."""
        if self._replicas.size == 1:
            return
        if self._watch is None:
            self._watch = GradientWatch(plan)
        self._unread = self._watch.look(self.progress.steps)
        if self._unread is not None:
            self._spend(GradientWatch.BYTES, plan)

    def _spend(self, sent: int, plan: Plan) -> None:
        """Let the gate know of bytes that were sent beside its openings."""
        if self.gate.open_cost:
            dense = 4 * sum(consensus.sizes([p.X for p in plan.parameters]))
            self.gate.spend(sent / dense / self.gate.open_cost)

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
    def synchronize(self, *, exact: bool | None = None) -> None:
        """Bring replicas together, so that they hold the same weights; collective.

        For before an evaluation or a checkpoint, and before parameters are frozen.

        Args:
            exact: True averages weights, momenta and moments exactly. It sends several times as
                much as an all-reduce of all gradients (2.6 times with full rank, as
                reconcile="quantized" has it by default). All state is then the same on every
                replica. Averaged momenta change nothing in what later synchronised steps compute,
                which depend on their mean only; local steps go on from it.
                False needs reconcile="quantized" and sends what an open step does, in codes
                (0.065 times in 2 bits), for each of the ``reconcile_parts`` that has moved since
                replicas agreed on it, and nothing where none has. Weights are then the same on
                every replica; momenta, moments and what codes have lost remain its own.
                None takes False with reconcile="quantized", and True without.

        A budget of bytes counts either, and opens the gate less often until it is paid back. A
        checkpoint that keeps one replica's state for all needs ``exact=True``: what the codes of
        one replica have lost would be sent by each, and what others have lost never.

        Raises:
            ValueError: if ``exact`` is False with another ``reconcile``.
        """
        if exact is None:
            exact = self.reconcile != "quantized"
        plan = self._known_plan()
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
        kept = [] if self.progress.apart else _of_frozen(plan)
        ready = plan.select([bool(p.state) for p in plan.parameters])
        consensus.give_back_losses_(ready.parameters)
        states = [x for p in ready.parameters for x in consensus.averaged_states(p).values()]
        tensors = [*(p.local for p in plan.parameters), *map(local, states)]
        reconcile.average_(tensors, ready.counters(), self._replicas.process_group)
        consensus.renew_(ready.parameters)
        measure_momenta(ready)
        for tensor, before in kept:
            tensor.copy_(before)
        if self.reconcile == "quantized":
            self._spend(consensus.exact_bytes(plan), plan)
        self.progress.local_steps = self.progress.parts_apart = 0
        self.progress.steps_since_exact = 0

    @torch.no_grad()
    def broadcast_weights(self, source: int = 0) -> None:
        """Give all replicas the weights of one; collective, for before the first step.

        Args:
            source: the replica, as a rank of the process group ``replicas``.

        Frozen parameters are taken along, buffers are not.
        """
        group = self._replicas.process_group
        if group is None:
            return
        for X in (X for g in self.param_groups for X in g["params"]):
            piece = local(X.detach())
            contiguous = piece.contiguous()
            dist.broadcast(contiguous, group=group, group_src=source)
            if contiguous is not piece:
                piece.copy_(contiguous)
        plan = self._known_plan()
        plan.look_up_states()
        consensus.renew_(plan.parameters)
        self._verified = False

    @torch.no_grad()
    def drift(self) -> float:
        """Root mean square over replicas of ||X_i - mean|| / ||mean||; collective, dense."""
        plan = self._known_plan()
        return reconcile.drift(
            [(p.local, plan.copies_inside(p)) for p in plan.parameters],
            self._replicas.process_group,
            plan.inside,
        )

    # ---------------------------------------------------------------- groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the constructor's defaults.

        Keys of other tools are kept without effect, and a warning names them.

        Raises:
            ValueError, TypeError: for keys that look misspelt, impossible values, and parameters
                that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        check.check_group(param_group, _ARGUMENTS)
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
        self._warn_of_strangers(self.param_groups[-1:])
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

    def _warn_of_strangers(self, groups: Iterable[dict[str, Any]]) -> None:
        """Name the keys that have no effect here, each once."""
        found = set().union(*(check.strangers(group) for group in groups)) - self._strangers
        if found:
            self._strangers |= found
            warnings.warn(
                f"{type(self).__name__} knows no {sorted(found)} in parameter groups: kept for the "
                f"tool that wrote them, without effect here.",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's; every group also holds ``progress``: the gate's memory and the counters.

        Replicas hold momenta and, after local steps, weights of their own, of which a distributed
        checkpoint, or a file that one rank writes, keeps one: call ``synchronize(exact=True)``
        before it. A warning says so if weights are apart, or if codes owe them something. It may
        be ignored where each rank saves its own state and loads it again, which loses nothing.
        """
        if self.progress.differs(self.reconcile) and self._replicas.size > 1:
            warnings.warn(
                f"state_dict() while the replicas' states differ, "
                f"{self.progress.steps_since_exact} steps after they were the same: a checkpoint "
                f"of one replica loses what the others hold. Call "
                f"optimizer.synchronize(exact=True) on all ranks before, or let each rank save and "
                f"load its own.",
                stacklevel=2,
            )
        if self._cached is not None:
            self._settle_new(self._cached[1])
        for group in self.param_groups:
            group["progress"] = self._record()
        return super().state_dict()

    def _record(self) -> str:
        ways = self.reconcile, self._defaults_by_sync
        return record(self.progress, self.gate, *ways, self._replicas.replica)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every tensor keeps the dtype it was saved with.

        From the saved state come momenta, right factors, moments, counters and the groups' values,
        learning rates among them. From the constructor's arguments come the gate, whose saved
        memory counts if it is of the same class, how replicas come together, and, where that
        changes their default, the groups' rank_fraction, rank_multiple_of, right_factor and
        nesterov. Right factors then take the new rank: the first columns stay, others are initial.
        Anchors of reconcile="quantized" are dropped under another kind, and begin as the weights
        are under it. Warnings say what is lost, and name keys of groups that mean nothing here.

        Raises:
            TypeError: if this is no state_dict.
            ValueError: if the groups or parameters do not match, come from another optimizer, the
                state is damaged, missing or another rank's piece, or anchors are wanted of weights
                that were saved while replicas were apart.
        """
        held = read_record(state_dict)
        check_fits(self, state_dict)
        check_complete(self, state_dict, held.progress.steps)
        ways = self.reconcile, self._defaults_by_sync
        fitting = convert(
            state_dict, held, Loading(self.param_groups, *ways, self._replicas.replica)
        )
        self._remember(held)
        super().load_state_dict(fitting.state_dict)
        restore_dtypes(self, fitting.state_dict)
        self.progress = fitting.progress
        self._forget()
        for text in fitting.warnings:
            warnings.warn(text, stacklevel=2)
        self._warn_of_strangers(self.param_groups)

    def _remember(self, held: Record) -> None:
        """Give the gate its memory, if it is that of a gate of its class."""
        if not held.memory or held.gate_class not in (None, type(self.gate).__name__):
            return
        before = self.gate.state_dict()
        try:
            self.gate.load_state_dict(held.memory)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.gate.load_state_dict(before)
            if held.gate_class is not None:
                raise ValueError(
                    f"state_dict holds the memory {held.memory!r}, which gate={self.gate!r} "
                    f"cannot load ({type(error).__name__}: {error})."
                ) from error

    def eval(self) -> None:
        """Bring the replicas together if they are apart, as for an evaluation or a checkpoint.

        Collective: call it on every rank, or on none. It does nothing if the replicas agree or
        there is one. Trainer and Accelerate call it where optimizers have it.
        """
        if self.progress.apart and self._replicas.size > 1:
            self.synchronize()

    def train(self) -> None:
        """Do nothing: :meth:`eval` leaves the optimizer ready for the next step."""

    def __getstate__(self) -> dict[str, Any]:
        if self._cached is not None:
            self._settle_new(self._cached[1])
        behaviour = ("gate", "local_step", "max_local_steps", "warmup_steps")
        together = [f"reconcile{what}" for what in ("", "_bits", "_parts", "_momentum", "_polar")]
        private = ("_replicas", "_defaults_by_sync", "_strangers")
        own = (*behaviour, *together, "progress", "report", *private)
        kept = {key: getattr(self, key) for key in own}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for keys in (self.defaults, *self.param_groups):
            for key in check.SETTINGS:  # pickled by a version without some of them
                keys.setdefault(key, _DEFAULTS.get(key))
        if "_strangers" not in vars(self):  # pickled by a version without them
            self._strangers, self._defaults_by_sync = set(), self._when_none()
            self._defaults_by_sync["nesterov"] = self.defaults["nesterov"]
        self._forget()

    def _forget(self) -> None:
        """Drop what is derived from the groups; it is rebuilt at the next use."""
        self._cached = None
        self._algorithms = []
        self._part_of = []
        self._verified = False
        self._alike = True
        self._checksum = Checksum()
        self._watch = self._unread = None
        self._wire_bytes, _ = wire.counted_bytes()

    def _known_plan(self) -> Plan:
        """The plan of the last step, which all ranks share; changes wait for the next step."""
        return self._plan() if self._cached is None else self._cached[1]

    def present_plan(self) -> Plan:
        """The plan of the groups as they are now, which the next step may find not to be shared."""
        if self._cached is None or self._cached[0] == self._plan_key():
            return self._known_plan()
        return self._make_plan(self.param_groups)

    def _make_plan(self, param_groups: Sequence[dict[str, Any]]) -> Plan:
        """The plan of groups; the process groups of the plan before are asked for no more."""
        unions = None if self._cached is None else self._cached[1].unions
        group, single = self._replicas.process_group, self._replicas.single
        return Plan.of(param_groups, self.state, group, single=single, unions=unions)

    def _plan(self) -> Plan:
        """The plan of the groups as they are now: frameworks replace parameters after __init__."""
        key = self._plan_key()
        if self._cached is None or self._cached[0] != key:
            plan = self._make_plan(self.param_groups)
            if self._cached is not None:
                self._change_plan(self._cached[1])
            dion = [g for g in self.param_groups if g["algorithm"] == "dion" and g["params"]]
            if self.gate.reads_momentum and not dion:
                raise ValueError(
                    f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                    f"use gate=FixedPeriod(...) or AlwaysOpen()."
                )
            self._check_one_replica(plan)
            self._tell_costs([p.X for p in plan.parameters])
            if isinstance(self.gate, WireBudget) and plan.parameters:
                self.gate.check_feasible(self.max_local_steps)
            self._cached = (key, plan)
            self._watch = self._unread = None
        return self._cached[1]

    def _plan_key(self) -> object:
        """What a plan is made of; it changes where another plan is needed."""
        return [
            [
                id(g),
                g["algorithm"],
                g["right_factor"],
                *map(id, g["params"]),
                *map(requires_grad, g["params"]),
            ]
            for g in self.param_groups
        ] + [[id(self.state), id(self.gate)]]

    def _check_one_replica(self, plan: Plan) -> None:
        """Raise ValueError where processes with whole weights would never come together."""
        sharded = plan.inside is not None and self._replicas.size == 1
        if isinstance(self.gate, WireBudget) and sharded:
            raise ValueError(
                f"gate={self.gate!r} with one replica, which is sharded over "
                f"{group_size(plan.inside)} ranks: there is nothing to bring together, and shards "
                f"send their factors at every step. Use Dion, or pass replicas= if there are "
                f"several."
            )
        meant = self._replicas.single or self._replicas.process_group is not None
        if meant or self.gate.always_open or plan.everyone is not None:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"replicas=None with gate={self.gate!r}: there are {dist.get_world_size()} "
                f"processes, each with whole parameters, and none of them would ever hear of the "
                f"others. Pass replicas=torch.distributed.group.WORLD (which is None until "
                f"init_process_group has been called) with keep_gradients_local, or "
                f"replicas='single' if each process trains by itself or something else averages "
                f"the gradients. If the model is to be sharded, make the optimizer's groups after "
                f"fully_shard."
            )
        alone = not (dist.is_available() and dist.is_initialized())
        if alone and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group exists and replicas "
                f"is None: each process trains by itself. Call init_process_group and pass "
                f"replicas=torch.distributed.group.WORLD, or replicas='single' if this is meant.",
                stacklevel=5,
            )

    def _change_plan(self, before: Plan) -> None:
        """Parameters were frozen, thawed or added since the plan of before was made."""
        alone = self.reconcile == "none" or self._replicas.size == 1
        if not alone and self.progress.apart:
            kept = {id(X) for group in self.param_groups for X in group["params"]}
            for p in before.parameters:
                if id(p.X) in kept and not p.X.requires_grad:
                    raise RuntimeError(
                        f"{p.name} was frozen while replicas are apart, of which each would keep "
                        f"its own: set requires_grad_(True), call synchronize() and freeze it then."
                    )
        self._settle_new(before)

    def _settle_new(self, before: Plan) -> None:
        """Note that replicas agree on what has been thawed since: nobody has moved it."""
        known = {id(p.X) for p in before.parameters}
        for group in self.param_groups:
            for X in group["params"]:
                if X.requires_grad and id(X) not in known:
                    consensus.settle_state(self.state.get(X, {}), group)

    @property
    def _parts(self) -> int:
        """In how many parts parameters come together: fewer than asked for where they are few."""
        return max(self._part_of, default=-1) + 1

    def _tell_costs(self, X: Sequence[Tensor]) -> None:
        """Tell the gate what steps send, alike on all ranks, whatever pieces they hold.

        X: the parameters that are trained, in the order of a plan.
        """
        sizes = consensus.sizes(X)
        if self.reconcile != "quantized" or not sum(sizes):
            return
        before, self._part_of = self._part_of, consensus.in_parts(sizes, self.reconcile_parts)
        if self.progress.parts_apart and before != self._part_of:
            self.progress.parts_apart = self._parts  # which of the old ones is not known
        dense = 4 * sum(sizes)
        self.gate.open_cost = message_bytes(sizes, self.reconcile_bits) / self._parts / dense
        self.gate.closed_cost = GATE_BYTES / dense
        self.gate.openings_per_agreement = self._parts

    def _create_state(self, plan: Plan) -> list[Parameter]:
        """Give every parameter its state, with or without a gradient; return those without any."""
        states = plan.look_up_states()
        without = [p for p, state in zip(plan.parameters, states, strict=True) if not state]
        for p in without:
            p.create_state()
        # Whatever brings new states without agreements, loading for one, is verified anew.
        if self.reconcile == "quantized" and (without or not self._verified):
            consensus.begin(plan.parameters)
        if without:
            plan.look_up_states()
        return without

    def _lr_is_zero(self) -> bool:
        return all(float(group["lr"]) == 0 for group in self.param_groups)

    def _unscale(self, device: torch.device) -> bool:
        """Divide the gradients by a GradScaler's scale, if one drives this step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            each = [X.grad for group in self.param_groups for X in group["params"]]
            gradients = [local(G) for G in each if G is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(device).double().reciprocal().float())
        return hasattr(self, "found_inf")


_DEFAULTS = {key: p.default for key, p in inspect.signature(CurvaDion).parameters.items()}
_ARGUMENTS = _DEFAULTS.keys() - {"params"}


class Dion(CurvaDion):
    """Dion (arXiv 2504.05295): CurvaDion with a gate that is always open.

    Arguments as CurvaDion's, less those that a closed gate would need.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: Replicas = None,
        mu: float = 0.95,
        nesterov: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rank_fraction: float = 0.25,
        rank_multiple_of: int = 1,
        stack_dims: int = 0,
        row_blocks: int | Sequence[int] = 1,
        input_first: bool = False,
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
            input_first=input_first,
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
        raise TypeError(
            f"gate={gate!r} must be a Gate, such as curvadion.RMMC(0.3), got {type(gate).__name__}"
        )
    longest = math.inf if max_local_steps is None else max_local_steps
    if isinstance(gate, FixedPeriod) and gate.period - 1 > longest:
        raise ValueError(
            f"gate={gate!r} takes {gate.period - 1} local steps, but "
            f"max_local_steps={max_local_steps} ends them earlier: pass max_local_steps=None."
        )
    return gate


def _of_frozen(plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """Weights and states that have been frozen since the plan was made, each with a copy."""
    tensors = [
        local(tensor)
        for p in plan.parameters
        if not p.X.requires_grad
        for tensor in (p.X.detach(), *p.state.values())
        if isinstance(tensor, Tensor)
    ]
    return [(tensor, tensor.clone()) for tensor in tensors]


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
