"""The interface of a sync kind: how replicas come together when the gate opens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from curvadion.comm.background import Background, no_background
from curvadion.sync.decision import Moving
from curvadion.update.direction import Taken
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan
from curvadion.update.state import StateKey


@dataclass(frozen=True)
class Step:
    """A step that ranks have decided to take.

    Attributes:
        moving: the parameters with their gradients, and the momenta's norms if a gate reads them.
        complete: whether no rank misses a gradient.
        replicas: the process group of the replicas; None for one replica.
        number: how many steps were taken before.
        local_steps: how many of them replicas took by themselves since they last came together.
        local_update: takes the step of a part of the plan inside the replica, as if the gate were
            closed; returns what the step of its matrices was made of, None if there was none. A
            part has matrices of one direction (:meth:`Plan.waves`); None stands for all.
        agreed: the ranks that have agreed on it: of all replicas, or, at a closed step of a
            schedule or of a gate that decides late, of this one. The others must not be waited for.
        directed: whether local steps take the matrices' directions, not plain gradients.
        rests: whether this replica leaves its own step out, for a gradient that is not finite.
        background: does exchanges beside the training. The first call creates its process group,
            so all replicas must make it at the same step.
    """

    moving: Moving
    complete: bool
    replicas: dist.ProcessGroup | None
    number: int
    local_steps: int = 0
    agreed: dist.ProcessGroup | None = None
    local_update: Callable[..., Taken | None] = lambda part=None: None
    directed: bool = True
    rests: bool = False
    background: Callable[[], Background] = no_background

    @property
    def plan(self) -> Plan:
        return self.moving.plan


class Costs(NamedTuple):
    """What openings send: bytes of one, on average, and how many bring all weights together."""

    opening_bytes: float
    openings_per_agreement: int = 1


class Sync(ABC):
    """How replicas come together when the gate opens: the outer step. Subclass it for another.

    Each optimizer works with a copy, which remembers how far its run has come.

    Class attributes:
        group_defaults: what None stands for in group keys under this kind. Without the key
            "nesterov" :meth:`look_ahead` tells that one. "direction" is for full rank: groups of
            another rank_fraction take "low_rank".
        state_keys: what it keeps of each parameter, beside the table of curvadion.update.state.
        shares_factors: whether open steps take P and R from products that are means over replicas.
            Local steps then leave no notes behind that differ between replicas.
        sends_codes: whether weights can come together for fewer bytes than an exact average, by
            :meth:`come_together`. Codes lose something, so one replica's state cannot stand for
            all, even if weights agree.
        every_step: whether replicas must come together at every step. Gates that would close are
            refused.
        message_format: a number that replicas must have in common to read each other's messages.

    Attributes:
        fragments_apart: how many fragments of the weights have moved since replicas agreed on them;
            the weights are one fragment unless the kind divides them.
        delay: how many steps after an opening its result arrives. If there is one, openings do not
            wait for other replicas, and a replica whose gradient is not finite takes part.
        brings_weights_together: whether openings end what keeps replicas' weights apart.
    """

    group_defaults: ClassVar[Mapping[str, Any]] = {
        "direction": "low_rank",
        "rank_fraction": 0.25,
        "right_factor": "column_normalized",
        "nesterov": 0.0,
    }
    state_keys: ClassVar[tuple[StateKey, ...]] = ()
    shares_factors: ClassVar[bool] = False
    sends_codes: ClassVar[bool] = False
    every_step: ClassVar[bool] = False
    message_format: ClassVar[int] = 0
    fragments_apart: int = 0
    delay: int = 0
    brings_weights_together: bool = True

    @abstractmethod
    def open_step(self, step: Step) -> None:
        """Take a step at which the gate is open, the same on every replica. Collective."""

    def closed_step(self, step: Step) -> None:
        """Take a step at which the gate is closed; collective inside the replica."""
        step.local_update(None)

    def after_load(self) -> None:
        """Note that states and this kind's memory have been loaded."""

    def settle(self) -> None:
        """Wait for what is under way, so that states hold it: for copies and checkpoints."""

    @property
    def waited_seconds(self) -> float:
        """How long steps have waited so far for what was under way."""
        return 0.0

    # ---------------------------------------------------------------- what it costs

    def choose_defaults(self, budget: float | None) -> None:
        """Set what None stands for in the constructor's arguments.

        budget: what the gate allows replicas to send, as a share of dense gradients; None if it
        counts no bytes.
        """

    def prepare(self, sizes: Sequence[int]) -> Costs | None:
        """Learn which parameters there are; return what openings send, None if that is unknown.

        sizes: numbers in each parameter, all its shards together, in the order of a plan.
        """
        return None

    def added_by_shards(self, shards: Sequence[Sequence[int]]) -> float:
        """Bytes of an opening beside those of :meth:`prepare`, as the parameters are in shards.

        shards: numbers in each shard of every parameter, in the order of :meth:`prepare`.
        """
        return 0.0

    @property
    def typical_cost(self) -> float:
        """What an opening sends, as a share of dense gradients, if parameters are unknown."""
        return 1.0

    def look_ahead(self, period: float) -> float:
        """The default of ``nesterov``; period: steps from one agreement on a weight to the next."""
        return 0.0

    # ---------------------------------------------------------------- around steps

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Create what this kind keeps of parameters, where it is missing.

        All replicas hold the same weights when this is called for a parameter the first time.
        """

    def note_own_step(self) -> None:
        """Note that replicas take a step by themselves, or leave it out; alike on all of them."""

    def before_local_update(self, step: Step) -> None:
        """Note what this replica is about to move."""

    def come_together(self, plan: Plan, replicas: dist.ProcessGroup | None) -> int:
        """Bring the weights together without a step; return how many openings that was worth.

        Only for kinds that have ``sends_codes``. Collective.
        """
        raise NotImplementedError

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        """Make weights ready for an exact average, such as by adding what codes lost."""

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        """Note that replicas now hold the same weights."""

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue: numbers, strings, lists of these."""
        return {"fragments_apart": self.fragments_apart}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()`` of this class, or begin anew from that of a new one."""
        self.fragments_apart = int(state.get("fragments_apart", 0))
