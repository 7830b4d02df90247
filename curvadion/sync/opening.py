"""An opening: members exchange something, and then all of them apply it, or none does.

    weigh      how much do each member's steps count?
    exchange   messages become means
    vote       have all members received all means?
    apply      if they have; otherwise residuals become what they were before

With members that come and go, a sync weighs and exchanges before it changes weights, so if an
opening is not applied, residuals are the only tensors to be restored. A fixed group does not
vote, because a lost rank ends all of them: a sync may apply each mean as soon as it has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.lost import MemberLost
from curvadion.comm.members import Exchanges, Members
from curvadion.layout.dtensor import local
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import RESIDUAL
from curvadion.sync.coded_mean import open_residuals


@contextmanager
def applying(members: Members) -> Iterator[None]:
    """A block that applies an opening after the vote.

    If an error or a signal ends it in the middle, this rank's weights are no longer the others',
    and whoever catches the error may train on.
    """
    try:
        yield
    except BaseException:
        members.changed()
        raise


class Opening:
    """One opening of the members present.

    Args:
        members: who take part; they have met.
        parameters: with the residuals of all that is exchanged.

    Attributes:
        total: the sum of all members' weights.
        count: how many members take part; 0 before they are weighed.
        record: what a member that misses this opening needs to apply it later.
    """

    def __init__(self, members: Members, parameters: Sequence[Parameter]) -> None:
        self.members = members
        self.total = 0.0
        self.count = 0
        self.record: dict[str, Any] = {}
        self._parameters = list(parameters)
        # As they are stored; copies of those in 8 bits are copies of codes.
        self._residuals = [local(p.state[RESIDUAL]) for p in parameters]
        self._saved = [] if members.fixed else [stored.clone() for stored in self._residuals]
        self._weight = 0.0
        self._agreement: Exchange[Any] | None = None
        # Why this rank cannot apply the opening; None once its exchanges have ended.
        self._error: str | None = "it was interrupted"

    def weigh(
        self, weight: float, numbers: Sequence[float] = (), *, earlier: int = 0
    ) -> list[list[float]]:
        """Learn the members' weights, and scale residuals to the number of members.

        Args:
            weight: how much this replica's part counts.
            numbers: what else the members tell each other.
            earlier: how many members the last mean had; 0 if there was none.

        Returns:
            The numbers of all members, by rank.
        """
        gathered = self.members.gather([weight, *numbers])
        self._weight = weight
        self.total = sum(told[0] for told in gathered)
        self.count = len(gathered)
        if earlier not in (0, self.count):
            # What a residual holds had a share of 1 / earlier in the last mean, and will have
            # 1 / count in the next.
            for p in self._parameters:
                with open_residuals([p], None) as (residual,):
                    residual.mul_(self.count / earlier)
        return [told[1:] for told in gathered]

    @property
    def share(self) -> float:
        """This replica's weight relative to an equal share."""
        if self.total == 0.0:  # fixed members, or nobody has taken a step: all count equally
            return 1.0
        return self._weight * self.count / self.total

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A block for the exchanges.

        If a member is lost in it, this rank votes against the opening.
        """
        try:
            yield
            if self._agreement is None:
                self.members.agree()
        except MemberLost as error:
            if self.members.fixed:
                raise
            self._error = str(error)  # the traceback would keep the tensors alive
        except BaseException:
            self.restore()
            self.members.disconnect()  # whatever becomes of this rank, others may wait for it
            raise
        else:
            self._error = None

    def end_later(self, thread: Exchanges, exchanges: Sequence[Exchange[Any]]) -> None:
        """Let the members agree in the thread of these exchanges, once they have ended."""

        def end() -> None:
            error = None
            try:
                for exchange in exchanges:  # the thread works in order, so they have ended
                    exchange.result()
                self.members.agree()
            except MemberLost as lost:
                error = str(lost)  # the traceback would keep the connections
            if error is not None:
                # Now, not only when means are due here: others may wait for this member.
                self.members.disconnect()
                raise MemberLost(error)

        self._agreement = thread.begin("The end of an opening", end)

    @property
    def agrees_later(self) -> bool:
        """Whether the members agree in a thread."""
        return self._agreement is not None

    def wait(self) -> None:
        """Wait until the members have agreed, if they do so in a thread.

        The thread is idle afterwards, as it must be before a vote.
        """
        if self._agreement is None:
            return
        try:
            self._agreement.result()
        except MemberLost as error:
            self._error = str(error)

    def vote(self) -> bool:
        """End the opening; return whether all members apply it."""
        applied = self.members.commit(error=self._error, record=self.record)
        if not applied:
            self.restore()
        return applied

    def restore(self) -> None:
        """Make residuals what they were; only with members that come and go."""
        if self._saved:
            torch._foreach_copy_(self._residuals, self._saved)
