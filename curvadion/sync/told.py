"""What is known of a step beforehand, and words that replicas hear later than they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.background import Background, Exchange, no_background
from curvadion.sync.decision import Notice, notice_of
from curvadion.update.plan import Plan

QUIET = (Notice.NOTHING, Notice.MISSING_GRADIENT)  # needs nobody's answer


class Foreseen(NamedTuple):
    """What is known of a step before any rank has told anything of it.

    opens: whether replicas come together; None if nothing tells. reason: why they do. heard:
    whether this rank must hear the other replicas before the step. Where it need not:

    delay: how many steps later they hear what it tells now; 0 if it tells nothing now. late:
    whether they tell each other the gate's signals at every step, and not words at openings only.
    background: does exchanges beside the training; the first call is collective over the replicas.
    """

    opens: bool | None = None
    reason: str | None = None
    heard: bool = True
    delay: int = 0
    late: bool = False
    background: Callable[[], Background] = no_background


class Told(NamedTuple):
    """Two words, of which the largest that any replica told are heard later: 16 bytes.

    word: of this rank, or the largest of its replica. signal: the gate's signal, as a word that
    sorts like it; None if the smallest word is heard in its place. step: at which it was told.
    due: at which it is heard. plan: of the step.
    """

    word: int
    signal: int | None
    step: int
    due: int
    plan: Plan
    exchange: Exchange[Tensor]

    @classmethod
    def begin(
        cls, word: int, signal: int | None, step: int, due: int, plan: Plan, background: Background
    ) -> Told:
        """Tell the other replicas."""
        words = torch.tensor([word, -word if signal is None else signal], device=plan.device)

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
