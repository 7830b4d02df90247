"""What is known of a step beforehand, and words that replicas hear later than they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.background import Background, Exchange, no_background
from curvadion.ops.tensors import from_host
from curvadion.sync.decision import Notice, notice_of
from curvadion.update.plan import Plan

QUIET = (Notice.NOTHING, Notice.MISSING_GRADIENT)  # needs nobody's answer
MEETING = (Notice.NEW, Notice.UNVERIFIED, Notice.CHANGED)  # for which all ranks must meet
# In the place of a signal, which is never below 0: this replica told something else; it is at an
# opening, of which the others may not know.
NO_SIGNAL, ANNOUNCED = -1, 2**63 - 1


class Foreseen(NamedTuple):
    """What is known of a step before any rank has told anything of it.

    Attributes:
        opens: whether replicas come together; None if nothing tells.
        reason: why they do.
        heard: whether this rank must hear the other replicas before the step. The rest is of steps
            where it need not.
        delay: how many steps later they hear what it tells now; 0 if it tells nothing now.
        late: whether they tell each other the gate's signals at every step, and not words at
            openings only.
        background: does exchanges beside the training; the first call is collective over the
            replicas.
    """

    opens: bool | None = None
    reason: str | None = None
    heard: bool = True
    delay: int = 0
    late: bool = False
    background: Callable[[], Background] = no_background


class Told(NamedTuple):
    """Two words that this rank has told; the largest of any replica are heard later. 16 bytes.

    Attributes:
        word: of this rank, or the largest of its replica.
        signal: the second word: the gate's signal, as a word that sorts like it, or ``NO_SIGNAL``.
            None if the second word is minus the first, so that the smallest is heard as well.
        step: at which it was told.
        due: the step at which it is heard.
        plan: of the step.
        exchange: gives the largest words.
        stale: whether a state has been loaded since, so that the signal decides on nothing.
    """

    word: int
    signal: int | None
    step: int
    due: int
    plan: Plan
    exchange: Exchange[Tensor]
    stale: bool = False

    @classmethod
    def begin(
        cls, word: int, signal: int | None, step: int, due: int, plan: Plan, background: Background
    ) -> Told:
        """Tell the other replicas."""
        both = [word, -word if signal is None else signal]
        words = from_host(both, torch.int64, plan.device)

        def exchange() -> Tensor:
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=background.group)
            return words

        what = f"What replicas tell each other at step {step + 1}"
        return cls(word, signal, step, due, plan, background.begin(what, exchange))

    @property
    def needs_answer(self) -> bool:
        """Whether this replica told something for which all ranks must meet."""
        return notice_of(self.word) not in QUIET

    def heard(self, inside: dist.ProcessGroup | None) -> tuple[int, int]:
        """The largest word, and the largest signal's or minus the smallest word; waits for them.

        Collective inside the replica, unless there is a signal: then its ranks told the same.
        """
        words = self.exchange.result()
        if inside is not None and self.signal is None:
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=inside)
        largest, other = words.tolist()
        return largest, other
