"""Steps that the host takes before it knows whether gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from curvadion.agreement.meeting import Meeting
from curvadion.ops.page import Live, Page
from curvadion.optim.capture import Captures
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors
from curvadion.sync.base import Step
from curvadion.update.inner_step import InnerStep, Lengths, measure
from curvadion.update.update_hooks import UpdateHook, is_capturable

# In the place of tensors that are looked up only if the step is not a replay.
LATER = StepTensors((), (), (), (), complete=True)


class Meet(Protocol):
    """Starts the meeting of a step, over the ranks that meet at it."""

    def __call__(
        self,
        plan: Plan,
        norms: Tensor,
        tensors: StepTensors,
        momenta: MomentumNorms | None,
        *,
        page: Page | None = None,
    ) -> Meeting:
        """As :meth:`curvadion.agreement.agreement.Agreement.meet`, with the same terms.

        Args:
            plan: of the step.
            norms: that must be finite, (l,) with l > 0.
            tensors: weights, momenta and gradients of the matrices.
            momenta: their norms; None if the gate reads none.
            page: of the step that is recorded, if any.
        """


class StepAhead:
    """A step whose host does not wait for the ranks' decision; perhaps it is replayed.

    Args:
        plan: of the step.
        captures: the recorded steps of its optimizer.
        meet: starts its meeting.
        step_index: gives the number of earlier steps, also at a replay.
        directed: whether matrices take directions.
        opened: whether the gate is open.
        hooks: of the inner optimizer, by the numbers of their handles.

    Attributes:
        captured: whether the step was a replay.
    """

    def __init__(
        self,
        plan: Plan,
        captures: Captures,
        meet: Meet,
        step_index: Callable[[], int],
        *,
        directed: bool,
        opened: bool,
        hooks: Mapping[int, UpdateHook],
    ) -> None:
        self._plan = plan
        self._captures = captures
        self._meet = meet
        self._step_index = step_index
        self._directed = directed
        self._opened = opened
        self._hooks = hooks
        self._meeting: Meeting | None = None
        self.captured = False

    @property
    def meeting(self) -> Meeting:
        """The ranks' meeting, held now if the step had no need of it."""
        if self._meeting is None:
            _, self._meeting = self._hold(self._plan, self._plan.step_tensors(), None)
        return self._meeting

    def decided(self, step: Step) -> Step:
        """The step with its gradients, and with what the ranks decide on the device."""
        tensors = self._plan.step_tensors()
        lengths, self._meeting = self._hold(self._plan, tensors, None)
        moves = self._meeting.moves
        return replace(step, tensors=tensors, lengths=lengths.by_batch, moves=moves, ahead=None)

    def replay(self, how: Mapping[str, Any]) -> bool:
        """Take the whole step by replaying it; False if it has not been recorded.

        how: as :meth:`InnerStep.batches` takes it.
        """
        if "gradients" in how or any(p.X.grad is None for p in self._plan.parameters):
            return False
        if not all(map(is_capturable, self._hooks.values())):
            return False
        # By the handles' numbers, not by id(): a new hook may get the address of one that is gone.
        key = self._opened, tuple(self._hooks), *sorted(how.items())
        self._meeting = self._captures.replay(key, self._plan, partial(self._body, how))
        self.captured = self._meeting is not None
        return self.captured

    def _body(self, how: Mapping[str, Any], plan: Plan, page: Page) -> Meeting:
        """The device's part of the step, which is recorded.

        Args:
            how: as :meth:`InnerStep.batches` takes it.
            plan: of the parameters, in live groups.
            page: for what may differ at a replay.
        """
        tensors = plan.step_tensors()
        lengths, meeting = self._hold(plan, tensors, page)
        step = InnerStep(
            plan,
            tensors,
            Live(page, self._step_index),  # type: ignore[arg-type]
            lengths=lengths.by_batch,
            directed=self._directed,
            moves=meeting.moves,
            hooks=tuple(self._hooks.values()),
        )
        for _ in step.batches(**how):
            pass
        return meeting

    def _hold(self, plan: Plan, tensors: StepTensors, page: Page | None) -> tuple[Lengths, Meeting]:
        """Measure the gradients, and hold the ranks' meeting about them.

        Args:
            plan: of the parameters; while a step is recorded, in live groups.
            tensors: weights, momenta and gradients of its matrices.
            page: of the step that is recorded, if any.
        """
        lengths = measure(plan, tensors, None, directed=self._directed)
        meeting = self._meet(self._plan, lengths.norms, tensors, None, page=page)
        return lengths, meeting
