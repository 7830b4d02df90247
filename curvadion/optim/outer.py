"""The outer layer: when and how replicas synchronise around their local steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from curvadion import checks
from curvadion.agreement.meeting import Meeting, Outcome, begin_comparison, compare, meet
from curvadion.agreement.verify import (
    OTHER_GRADIENTS,
    lack_the_same_gradients,
    verify_replicas,
)
from curvadion.comm.background import Background, background_of
from curvadion.comm.collectives import checksum, explain_lost_ranks
from curvadion.comm.members import FixedMembers, Members
from curvadion.layout.dtensor import local
from curvadion.layout.placements import place_gradients
from curvadion.metering import wire
from curvadion.metering.report import StepReport
from curvadion.ops.page import Live, Page
from curvadion.ops.precision import accurate_products
from curvadion.optim.base import OuterLayer
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors
from curvadion.plan.state import ANCHOR
from curvadion.sync import exact_average
from curvadion.sync.base import Step
from curvadion.update.inner_step import InnerStep, Lengths, measure

MAX_CONSECUTIVE_SKIPS = 10
RETRY_AFTER = 0.5  # seconds after an opening that failed, if no step comes between
RUNS_AHEAD = ("cuda",)  # devices whose host waits only if it must
LATER = StepTensors((), (), (), (), complete=True)  # read if a step needs them
UNHEARD = Outcome(signal=0.0, parameter=None, finite=True, all_zero=False)


class ReplicaOptimizer(OuterLayer):
    """An optimizer of one of several replicas, which agree on each step."""

    # --- a step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # torch.compiler.disable would import torch._dynamo with this module
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; collective over the replicas.

        Raises:
            ValueError: if a group holds an invalid value.
            RuntimeError: on every replica, if their gradients are identical or their
                optimizers differ; at the tenth skipped step in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if (members := self.replicas.members) is not None and self.sync.every_step:
            members.meet(ahead=True)  # this may replace states and settings by a peer's
        self._check_settings()
        plan = self._collective_plan()
        idle = all(p.X.grad is None for p in plan.parameters)
        if plan.parameters and idle and not self.progress.steps:
            warnings.warn(
                "No parameter has a gradient at the first step: call backward() before "
                "step(), and build the optimizer after fully_shard and other wrappers.",
                stacklevel=checks.user_stacklevel(),
            )
        scaled = self._unscale(plan.device)
        with full_precision(plan.device), explain_lost_ranks("optimizer.step()"):
            self._step(plan, scaled=scaled)
        return loss

    def _step(self, plan: Plan, *, scaled: bool) -> None:
        heard = self._hear(tolerate=scaled)
        new = self._create_states(plan)
        first = self.progress.steps == 0
        memory = self.gate.state_dict() if first else {}
        if plan.sharded:
            place_gradients([p.X for p in plan.parameters], self.replicas.process_group)
        # Under a schedule all ranks meet only where replicas wait for each other anyway.
        reason = self._reason_to_open(0.0) if self.scheduled else None
        opens = reason is not None
        waits = not self.scheduled or first or (opens and not self.sync.delay)
        waits = waits and self.replicas.members is None  # members have their own protocol
        self._compare_words(plan)
        if self._runs_ahead(plan, opens=opens):
            self._step_ahead(plan, everyone=waits, heard=heard)
            return
        tensors = plan.step_tensors()
        momenta = plan.momentum_norms(tensors) if self.gate.reads_momentum else None
        lengths = measure(plan, tensors, momenta, directed=self._takes_directions)
        met = self._meet(plan, lengths.every, tensors, momenta, everyone=waits).read()
        if met.all_zero and not any(float(group.get("lr", 1.0)) for group in self.param_groups):
            # A dry step of torch's checkpoint tools, which need states.
            self._take_no_step()
            self.gate.load_state_dict(memory)
            return
        if waits and not met.finite:
            self.skip_step(tolerate=scaled)
            return
        if not self._verified:
            everywhere = met
            if not waits:
                again = self._meet(plan, lengths.every, tensors, momenta, everyone=True)
                everywhere = again.read()
            if everywhere.finite:
                self._verify(plan, new)
        if not self.scheduled:
            reason = self._reason_to_open(met.signal)
            opens = reason is not None
        elif reason is not None and self.sync.delay and self.replicas.members is None:
            words = begin_comparison(self._word(plan), plan, self._background(plan.device))
            self._words.append((self.progress.steps + self.sync.delay, words))

        norms = None if momenta is None else momenta.after
        rests = not met.finite
        step = self._step_of(plan, tensors, norms=norms, lengths=lengths.ahead, rests=rests)
        opened = self._take(step, opened=opens)
        self._report(met, reason if opened else None, skipped=rests, heard=heard)
        self._count_skips(skipped=rests, tolerate=scaled)

    def _step_ahead(self, plan: Plan, *, everyone: bool, heard: bool) -> None:
        """Take a step before the host knows whether it is skipped.

        Args:
            plan: of the step.
            everyone: whether all replicas meet, or the ranks of this one.
            heard: whether the last step was skipped.
        """
        reason = None if self.scheduled else self._reason_to_open(0.0)
        ahead = StepAhead(self, plan, everyone=everyone, opened=reason is not None)
        step = self._step_of(plan, LATER, ahead=ahead)
        opened = self._take(step, opened=reason is not None)
        self._asked = ahead.meeting
        self._asked.send()
        why = reason if opened else None
        self._report(UNHEARD, why, skipped=False, heard=heard, captured=ahead.captured)

    def _runs_ahead(self, plan: Plan, *, opens: bool) -> bool:
        """Whether the host may learn later if gradients are finite."""
        # Without gates that close and without residuals, a skipped step counts like any
        # other.
        single = self.gate.always_open and not self.sync.sends_codes
        alone = single if self.replicas.size == 1 else self.scheduled and not opens
        told = self.gate.reads_momentum or self.sync.delay or not self._verified
        told = told or not self.sync.runs_ahead
        return alone and not told and plan.device.type in RUNS_AHEAD

    def _meet(
        self,
        plan: Plan,
        norms: Tensor,
        tensors: StepTensors,
        momenta: MomentumNorms | None,
        *,
        everyone: bool,
        page: Page | None = None,
    ) -> Meeting:
        """Start a meeting, as :func:`curvadion.agreement.meeting.meet`.

        Args:
            plan: of the step.
            norms: that must be finite, (l,).
            tensors: weights, momenta and gradients of the matrices.
            momenta: their norms, if the gate reads them.
            everyone: whether all replicas meet, or the ranks of this one.
            page: of the step that is recorded, if any: the word differs at every replay.
        """
        word = partial(self._word, plan, of_one_replica=not everyone)
        return meet(
            self.gate,
            plan,
            norms,
            tensors,
            momenta,
            word=word if page is None else partial(Live, page, word),  # type: ignore[arg-type]
            listing=partial(self._listing, plan),
            group=plan.all_ranks if everyone else plan.inside,
            first=self.progress.steps == 0,
        )

    def _step_of(self, plan: Plan, tensors: StepTensors, **more: Any) -> Step:
        """What the sync takes; more: further fields of :class:`Step`."""
        return self._inner_step(
            plan,
            tensors,
            self.progress.steps,
            members=self._members(plan),
            local_steps=self.progress.local_steps,
            state_keys=lambda: self._state_keys,
            **more,
        )

    def _take(self, step: Step, *, opened: bool) -> bool:
        """Take the step; return whether replicas have synchronised."""
        if opened and step.members.arrived():
            opened = self.sync.open_step(step)
            if not isinstance(opened, bool):
                raise TypeError(
                    f"open_step() of sync={self.sync!r} returned {opened!r}: return True, or "
                    f"False if members that come and go could not synchronise."
                )
            self.gate.spend(1 if opened else 0)
        else:
            opened = False
            self.sync.closed_step(step)
        progress = self.progress  # may now be a peer's
        progress.steps += 1
        progress.local_steps = 0 if opened else progress.local_steps + 1
        progress.steps_since_exact += 1
        return opened

    def open_without_step(self) -> bool:
        """Synchronise a fragment with the members present; return whether all could."""
        plan = self._collective_plan()
        self._create_states(plan)
        step = self._step_of_members(plan)
        step.members.with_step = False
        try:
            with full_precision(plan.device):
                opened = self.sync.open_step(step)
        finally:
            step.members.with_step = True
        if not opened:
            return False
        self.gate.spend(1)
        self.progress.local_steps = 0
        return True

    def _step_of_members(self, plan: Plan) -> Step:
        """A step that changes no weights."""
        tensors = plan.step_tensors()
        members = self._members(plan)
        return self._inner_step(plan, tensors, self.progress.steps, rests=True, members=members)

    def _members(self, plan: Plan) -> Members:
        """The replicas as an opening sees them."""
        if self.replicas.members is not None:
            return self.replicas.members
        return FixedMembers(self.replicas.process_group, partial(self._background, plan.device))

    def _inner_step(self, *agreed: Any, **more: Any) -> Step:
        """The inner optimizer's step, from the fields of :class:`Step`."""
        return Step(*agreed, **more)

    def _take_no_step(self) -> None:
        """Create states as a step without gradients and learning rate would."""

    def _create_states(self, plan: Plan) -> list[Parameter]:
        """Create missing states; return the new parameters."""
        # Those of members have begun, or have come from a peer, in start().
        first = self.progress.steps == 0 and self.replicas.members is None
        # Frameworks may move, cast and load weights before a first step.
        new = [p for p in plan.parameters if first or not p.state]
        for p in new:
            self._create_state(p)
        # Loaded states may lack the sync's; replicas are then verified again.
        if new or not self._verified:
            self.sync.begin(plan.parameters)
        return new

    def _unscale(self, device: torch.device) -> bool:
        """Undo a GradScaler's scale; return whether one drives this step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            each = [X.grad for group in self.param_groups for X in group["params"]]
            gradients = [local(G) for G in each if G is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(device).double().reciprocal().float())
        return hasattr(self, "found_inf")

    def _reason_to_open(self, signal: float) -> str | None:
        """Why replicas synchronise at this step, or None."""
        gate = self.gate
        local_steps = self.progress.local_steps
        # Called at every step, because a gate may keep state.
        opens = gate.opens(signal, local_steps)
        if self.progress.steps < self.warmup_steps:
            return "warm-up"
        if opens or self.sync.every_step:
            return gate.reason
        longest = gate.longest_run(self.max_local_steps)
        if longest is not None and local_steps >= longest:
            return "longest local run"
        return None

    def _word(self, plan: Plan, *, of_one_replica: bool = False) -> int:
        """A checksum of everything that must be equal on the ranks that meet."""
        if not self._verified:
            return checksum(("first", self._listing(plan)))
        resting: list[str] = []
        if of_one_replica or self.replicas.size == 1:
            resting = [p.name for p in plan.parameters if p.rests]
        known = self._settings.checksum, plan.checksum, self.progress.shared, resting
        return checksum((*known, *self._choices.items()))

    def _compare_words(self, plan: Plan) -> None:
        """Raise on all ranks if replicas differed at a delayed opening."""
        while self._words and self._words[0][0] <= self.progress.steps:
            words = self._words.pop(0)[1].result().tolist()
            compare(words, partial(self._listing, plan), plan.all_ranks)

    def _verify(self, plan: Plan, new: Sequence[Parameter]) -> None:
        """Compare the replicas before weights with new states move."""
        if self.replicas.size > 1 and self.replicas.members is None:
            together = self.sync.ends_drift or self.progress.steps == 0
            comparable = [p for p in plan.parameters if ANCHOR in p.state]
            if not comparable:
                comparable = list(plan.parameters if together and not self.drifted else new)
            self._verified = verify_replicas(plan, comparable, self.replicas.process_group)
            if self.sync.delay:  # create its group while all ranks are here
                self._background(plan.device)
            return
        if not lack_the_same_gradients(plan):
            raise RuntimeError(OTHER_GRADIENTS)
        if self.replicas.members is not None:
            self.replicas.members.changed()
        self._verified = True

    def _background(self, device: torch.device) -> Background:
        """The background exchanges; the first call is collective."""
        wire.install_kernels()  # a meter may start during an exchange
        assert self.replicas.process_group is not None
        return background_of(self.replicas.process_group, device)

    # --- reports

    def skip_step(self, *, tolerate: bool) -> None:
        """Count a step that a framework skipped; tolerate: never raise."""
        self._hear(tolerate=tolerate)
        self.progress.steps += 1
        self._report(None, None, skipped=True)
        self._count_skips(skipped=True, tolerate=tolerate)

    def _hear(self, *, tolerate: bool) -> bool:
        """Whether the last step was skipped, if the host did not wait for that."""
        meeting = self._asked
        self._asked = None
        if meeting is None:
            return False
        finite = meeting.read().finite
        self._count_skips(skipped=not finite, tolerate=tolerate)
        return not finite

    def _count_skips(self, *, skipped: bool, tolerate: bool) -> None:
        progress = self.progress
        progress.consecutive_skips = progress.consecutive_skips + 1 if skipped else 0
        if progress.consecutive_skips >= MAX_CONSECUTIVE_SKIPS and not tolerate:
            raise RuntimeError(
                f"{progress.consecutive_skips} steps in a row were skipped: a gradient had a "
                f"NaN, an Inf or a norm above 1e15, or gate={self.gate!r} a NaN. Lower the "
                f"learning rate and load the last checkpoint."
            )

    def _report(
        self,
        met: Outcome | None,
        opened: str | None,
        *,
        skipped: bool,
        heard: bool = False,
        captured: bool = False,
    ) -> None:
        """Report a step.

        Args:
            met: what the ranks have told each other; None if they have not met.
            opened: why replicas synchronised; None if they have not.
            skipped: whether this step was skipped.
            heard: whether the last step was, and the host has only now heard of it.
            captured: whether the step was a replay.
        """
        read = met if self.gate.reads_momentum and not skipped else None
        sent = self._wire.take()
        waited = self.sync.waited_seconds
        # A framework may skip a step before there is a plan.
        directions = None if self._plan is None else self._plan.directions
        self.report = StepReport(
            step=self.progress.steps,
            gate_open=opened is not None,
            reason="non-finite gradient" if skipped else opened or "closed",
            rmmc=None if read is None else read.signal,
            rmmc_parameter=None if read is None else read.parameter,
            local_steps=self.progress.local_steps,
            skipped=skipped or heard,
            wire_bytes=None if sent is None else sum(sent.values()),
            wire_bytes_by_ranks=sent,
            waited_seconds=waited - self._waited,
            captured=captured,
            directions=directions,
        )
        self._waited = waited

    # --- between steps

    @torch.no_grad()
    def synchronize(self, *, exact: bool | None = None) -> None:
        """Give all replicas the same weights; collective. A byte budget counts the bytes.

        Call it before an evaluation or a checkpoint, and before freezing parameters.

        Args:
            exact: True averages weights and all states, for a checkpoint of one replica's
                state; it sends 2 to 4 times as much as an all-reduce of gradients. False
                sends codes of fragments that have drifted, and replicas keep their own
                states. None means False with a sync that sends codes.

        Raises:
            ValueError: if ``exact`` is False with a sync without codes, or True with replicas
                that come and go.
        """
        if exact is False and not self.sync.sends_codes:
            raise ValueError(
                f"exact=False needs a sync that sends codes, not {self.sync!r}: leave it out."
            )
        plan = self._collective_plan()
        if self.replicas.members is not None:
            if exact:
                raise ValueError("exact=True needs a fixed group of replicas: leave it out.")
            self._synchronize_members(plan)
            return
        with full_precision(plan.device), explain_lost_ranks("optimizer.synchronize()"):
            if exact or not self.sync.sends_codes:
                self._average_everything(plan)
            elif self.drifted:
                group = self.replicas.process_group
                keys = self._state_keys
                self.gate.spend(self.sync.sync_weights(plan, group, keys))
        self.progress.local_steps = 0

    def _synchronize_members(self, plan: Plan) -> None:
        while self.drifted:
            if not self.open_without_step():
                time.sleep(RETRY_AFTER)
            self.sync.finish(plan, self._step_of_members(plan))

    def _average_everything(self, plan: Plan) -> None:
        frozen = self._make_plan(wanted=lambda X: not X.requires_grad and bool(self._states.get(X)))
        dense = 4 * sum(exact_average.sizes([p.X for p in plan.parameters]))
        group = self.replicas.process_group
        keys = self._state_keys
        # Weights that were frozen while replicas were equal are still equal.
        differ = self.drifted and not self.sync.ends_drift
        for part, kept in ((plan, ()), (frozen, () if differ else frozen.parameters)):
            exact_average.average_everything_(part, group, self.sync, keys, kept)
            if dense and self.gate.open_cost:  # a budget pays for it
                sent = exact_average.bytes_of_everything(part, keys)
                self.gate.spend(sent / dense / self.gate.open_cost)
        self.progress.local_steps = self.sync.fragments_drifted = 0
        self.progress.steps_since_exact = 0

    def eval(self) -> None:
        """Synchronise replicas that have drifted; collective. Frameworks call it."""
        if self.drifted:
            self.synchronize()

    def train(self) -> None:
        """Do nothing; the counterpart of :meth:`eval`."""


class StepAhead:
    """A step whose host does not wait for the ranks' decision; perhaps it is replayed.

    Args:
        optimizer: whose step it is.
        plan: of the step.
        everyone: whether all replicas meet, or the ranks of this one.
        opened: whether the gate is open.
    """

    def __init__(
        self, optimizer: ReplicaOptimizer, plan: Plan, *, everyone: bool, opened: bool
    ) -> None:
        self._optimizer = optimizer
        self._plan = plan
        self._everyone = everyone
        self._opened = opened
        self._meeting: Meeting | None = None
        self.captured = False

    @property
    def meeting(self) -> Meeting:
        """The ranks' meeting, which is held now if the step has not needed it."""
        if self._meeting is None:
            _, self._meeting = self._decided(self._plan, self._plan.step_tensors(), None)
        return self._meeting

    def decided(self, step: Step) -> Step:
        """The step with its gradients, and with what the ranks decide on the device."""
        tensors = self._plan.step_tensors()
        lengths, self._meeting = self._decided(self._plan, tensors, None)
        moves = self._meeting.moves
        return replace(step, tensors=tensors, lengths=lengths.ahead, moves=moves, ahead=None)

    def replay(self, how: Mapping[str, Any]) -> bool:
        """Take the whole step by replaying it; False if it has not been recorded.

        how: as :meth:`InnerStep.batches` takes it.
        """
        if "gradients" in how or any(p.X.grad is None for p in self._plan.parameters):
            return False
        key = self._opened, *sorted(how.items())
        body = partial(self._body, how)
        captures = self._optimizer._captures
        assert captures is not None
        self._meeting = captures.replay(key, self._plan, body)
        self.captured = self._meeting is not None
        return self.captured

    def _body(self, how: Mapping[str, Any], plan: Plan, page: Page) -> Meeting:
        """The device's part of the step, which is recorded.

        Args:
            how: as :meth:`InnerStep.batches` takes it.
            plan: of the parameters, in live groups.
            page: for what may differ at a replay.
        """
        optimizer = self._optimizer
        tensors = plan.step_tensors()
        lengths, meeting = self._decided(plan, tensors, page)
        step = InnerStep(
            plan,
            tensors,
            Live(page, lambda: optimizer.progress.steps),  # type: ignore[arg-type]
            lengths=lengths.ahead,
            directed=optimizer._takes_directions,
            moves=meeting.moves,
        )
        for _ in step.batches(**how):
            pass
        return meeting

    def _decided(
        self, plan: Plan, tensors: StepTensors, page: Page | None
    ) -> tuple[Lengths, Meeting]:
        """Norms of the gradients, and the ranks' meeting about them.

        Args:
            plan: of the parameters; while a step is recorded, in live groups.
            tensors: weights, momenta and gradients of its matrices.
            page: of the step that is recorded, if any.
        """
        optimizer = self._optimizer
        lengths = measure(plan, tensors, None, directed=optimizer._takes_directions)
        meeting = optimizer._meet(
            self._plan, lengths.every, tensors, None, everyone=self._everyone, page=page
        )
        return lengths, meeting


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable what would round an update's products: autocast, and switches on a GPU.

    Not only those that need it, as this costs the host less than a launch. Blocks may be
    nested.
    """
    by_autocast = torch.is_autocast_enabled(device.type)
    without = torch.autocast(device.type, enabled=False) if by_autocast else nullcontext()
    with accurate_products(device), without:
        yield
